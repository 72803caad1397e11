# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-fast test-engines lint types check docs help clean

help:
	@echo "make demo       make the environment, get the demo model, compare four ways of running it"
	@echo "make test       all tests (make test-fast: those without torch, under a minute)"
	@echo "make test-engines   make the engines' own environments and test every engine by the same contract"
	@echo "make check      lint and types"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "weighin needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making the environment in $(VENV) (a few minutes, about 1.5 GB, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' \
		| { grep --line-buffered -E '^ *(Downloading|Installing|Successfully)' | cut -c1-110 || true; }
	@touch $(READY)

# Three CPU contenders, and a GPU one that keeps its row (and its reason) where there is no GPU: exit code 4 then.
demo: $(READY)
	@$(BIN)/weighin compare demo-base --budget 85s --response-tokens 100 \
		-c transformers:fp32@cpu -c transformers:bf16@cpu -c transformers:nf4@cpu -c transformers:nf4@cuda \
		|| { code=$$?; [ $$code -eq 4 ] || exit $$code; }

test: $(READY)
	@$(BIN)/python -m pytest -m "not engines" -n 2

# Every engine in its own environment: made here (llama.cpp compiles for some minutes), then the same contract for all.
test-engines: $(READY)
	@$(BIN)/weighin engines install llama.cpp onnxruntime openvino lm-eval
	@$(BIN)/python -m pytest -m engines -k "not vllm"
	@echo "vLLM comes last, within 20 minutes"
	@timeout 20m bash -c '$(BIN)/weighin engines install vllm && $(BIN)/python -m pytest -m engines -k vllm' \
		|| { code=$$?; [ $$code -eq 124 ] && echo "SKIPPED: vLLM took longer than 20 minutes" || exit $$code; }

test-fast: $(READY)
	@$(BIN)/python -m pytest -m "not slow and not gpu and not engines" -n 2

lint: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy

check: lint types

docs: $(READY)
	@$(BIN)/python tools/readme.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
