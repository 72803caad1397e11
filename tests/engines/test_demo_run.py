"""The demo's real weights: as demo-base, and as the GGUF file that they come from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import weighin
from weighin import cache, demo

pytestmark = pytest.mark.slow
QUICK = {"rounds": 1, "max_new_tokens": 8, "response_tokens": 24, "prompt_tokens": ()}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    names = ["transformers:fp32@cpu", "transformers:nf4@cpu", "transformers:nf4@cuda"]
    return weighin.compare("demo-base", names, out=tmp_path_factory.mktemp("demo") / "out", **QUICK)


def test_the_demo_runs_and_says_what_its_full_precision_is(compared):
    assert compared.model.name == "SmolLM2-135M-Instruct"
    assert compared.model.parameters == 134_515_008
    assert any("dequantized Q4_1" in note for note in compared.notes)
    assert [c.status for c in compared.contenders][:2] == ["ok", "ok"]
    assert compared.contenders[2].status in ("cannot_run", "ok")
    assert compared.reference == "transformers:fp32@cpu"


def test_it_greets_a_guest(compared):
    assert compared.contenders[0].responses[0].text.startswith("Hello")


@pytest.mark.parametrize("which", [0, 1])
def test_its_snippet_gives_the_reports_answer_word_for_word(compared, which):
    result = compared.contenders[which]
    done = subprocess.run([sys.executable, "-c", result.snippet], capture_output=True, text=True, check=True)
    assert done.stdout == result.responses[0].whole + "\n"


def test_four_bits_take_what_the_headers_said(compared):
    four_bit = compared.contenders[1]
    assert four_bit.value("loaded_bytes") == pytest.approx(four_bit.weight_bytes, rel=0.02)


def test_the_gguf_file_itself_is_a_model_too(compared, tmp_path: Path):
    file = demo.gguf_file(cache.root(), print)
    found = weighin.compare(str(file), ["transformers:fp32@cpu"], out=tmp_path / "out", **QUICK)
    assert found.model.kind == "gguf"
    assert (found.contenders[0].status, found.contenders[0].reason) == ("ok", None)
    assert "q4_1" in found.reference_note
    assert found.workload.rendered[0].ids == compared.workload.rendered[0].ids
    assert found.contenders[0].responses[0].ids == compared.contenders[0].responses[0].ids
