"""llama.cpp: what it says before it runs, how its converter comes and is run, and real models of several architectures.

What every engine must do is in test_contract.py.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import re
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import CONFIG, make_model
from hypothesis import given
from hypothesis import strategies as st
from test_contract import SHORT, divergence, logits_of, passages, plan_of, users_environments  # noqa: F401 - a fixture

from weighin import cache, demo, engines, environments, machine, model
from weighin.compare import Silent, start
from weighin.engines import Job, SnippetPrompt, llama_cpp
from weighin.engines.llama_cpp import LlamaCppEngine
from weighin.errors import WeighinError
from weighin.machine import Gpu, Machine
from weighin.model import Model, Shape
from weighin.plan import Contender

# What llama.cpp itself made of these shapes, in bytes of tensors: rows of 576 are no whole blocks of 256.
SMOLLM2 = Shape(
    layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocabulary=49152,
    max_positions=8192, sliding_window=None, tied=True,
)  # fmt: skip
SMOLLM2_BYTES = {
    "q4_0": 89_941_248, "q4_k_m": 103_668_480, "q5_k_m": 110_317_824, "q6_k": 136_597_248, "q8_0": 143_025_408,
    "bf16": 269_100_288, "f16": 269_100_288, "f32": 538_060_032,
}  # fmt: skip
SMALL = Shape(
    layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocabulary=49152, max_positions=2048,
    sliding_window=None, tied=False,
)  # fmt: skip
SMALL_BYTES = {"q4_0": 18_068_480, "q4_k_m": 18_110_720, "q5_k_m": 19_810_560, "q6_k": 21_616_640, "q8_0": 27_997_184}


@pytest.fixture(scope="module")
def here() -> Machine:
    return msgspec.structs.replace(machine.look(measure=False), gpus=(), gpu_reason="no driver", threads=3)


@pytest.fixture(scope="module")
def with_gpu(here: Machine) -> Machine:
    values = {name: None for name in Gpu.__struct_fields__} | {"name": "a GPU", "processes": ()}
    return msgspec.structs.replace(here, gpus=(Gpu(**values),))


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> Model:
    return model.inspect("tiny", tiny_model)


@pytest.fixture(scope="module")
def gguf(folder: Model) -> Model:
    return msgspec.structs.replace(folder, kind="gguf", path="/models/a.gguf", dtype="q4_1", quantization="gguf Q4_1")


def shaped(folder: Model, shape: Shape, parameters: int) -> Model:
    return msgspec.structs.replace(folder, shape=shape, parameters=parameters, text_parameters=parameters)


def says(name: str, here: Machine, it: Model) -> str | None:
    return LlamaCppEngine.cannot_run(Contender.parse(f"llama.cpp:{name}"), here, it)


# ---- before it runs


def test_by_default_a_folder_is_quantized_and_a_quantized_file_is_left_alone(
    here: Machine, folder: Model, gguf: Model
) -> None:
    full = msgspec.structs.replace(gguf, dtype="fp16", quantization=None)
    nf4 = msgspec.structs.replace(folder, quantization="bitsandbytes nf4")
    found = {name: LlamaCppEngine.contenders(here, it) for name, it in
             {"folder": folder, "gguf": gguf, "full gguf": full, "nf4": nf4}.items()}  # fmt: skip
    assert found == {
        "folder": ["llama.cpp:q4_k_m@cpu", "llama.cpp:q8_0@cpu"],
        "gguf": ["llama.cpp:own@cpu"],
        "full gguf": ["llama.cpp:own@cpu", "llama.cpp:q4_k_m@cpu", "llama.cpp:q8_0@cpu"],
        "nf4": [],
    }


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("q8_0@cuda", "no CUDA GPU here: no driver"),
        ("q8_0@cpu+layers=3", "layers"),
        ("own@cpu", "this is a folder"),
    ],
)
def test_what_cannot_run_says_why(name: str, word: str, here: Machine, folder: Model) -> None:
    assert word in (says(name, here, folder) or "")


def test_what_is_already_quantized(here: Machine, folder: Model, gguf: Model) -> None:
    assert says("own@cpu", here, gguf) is None
    assert "already quantized (gguf Q4_1)" in (says("q8_0@cpu", here, gguf) or "")
    full = msgspec.structs.replace(gguf, dtype="bf16", quantization=None)
    assert says("q8_0@cpu", here, full) is None
    for words, takes in (("bitsandbytes nf4", False), ("awq 4-bit", False), ("gptq 4-bit", True), ("fp8", True)):
        found = says("q8_0@cpu", here, msgspec.structs.replace(folder, quantization=words))
        assert (found is None) == takes, found


def test_a_quantized_cache_needs_heads_of_whole_blocks(here: Machine, folder: Model) -> None:
    assert "8 wide" in (says("q8_0@cpu+kv=q8_0", here, folder) or "")
    assert says("q8_0@cpu+kv=f32", here, folder) is None


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"query_pre_attn_scalar": 8}, None),
        ({}, "query_pre_attn_scalar to be 8 .* it is 256"),
        ({"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}, "but each 6th"),
        ({"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention"] * 2}, None),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_a_gemma_that_llama_cpp_would_run_as_another_is_refused(
    nested: bool, config: dict[str, Any], word: str | None, here: Machine, tmp_path: Path
) -> None:
    text = {**CONFIG, "model_type": "gemma3_text", "head_dim": 8, **config}
    whole = {**text, "model_type": "gemma3", "text_config": text} if nested else text
    folder = make_model(tmp_path / "gemma", **whole)
    found = says("q8_0@cpu", here, model.inspect("gemma", folder))
    assert found is None if word is None else re.search(word, found or "")


@pytest.mark.parametrize("built", [True, False])
def test_a_library_without_cuda_is_noticed_by_its_files(
    built: bool, with_gpu: Machine, folder: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = tmp_path / "lib" / "python3.11" / "site-packages" / "llama_cpp" / "lib"
    libraries.mkdir(parents=True)
    (libraries / ("libggml-cuda.so" if built else "libggml-cpu.so")).touch()
    found = environments.Environment(python=str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(environments, "for_contender", lambda *_: found)
    assert ("llama.cpp:q4_k_m@cuda" in LlamaCppEngine.contenders(with_gpu, folder)) == built
    assert (says("q4_k_m@cuda+layers=1", with_gpu, folder) is None) == built
    assert "layers" in (says("q4_k_m@cuda+layers=some", with_gpu, folder) or "") or not built


def test_an_engine_that_is_not_there_yet_is_not_called_unable(
    with_gpu: Machine, folder: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "for_contender", lambda *_: environments.Missing(reason="no", remedy="do"))
    assert says("q4_k_m@cuda", with_gpu, folder) is None
    assert LlamaCppEngine.contenders(with_gpu, folder) == ["llama.cpp:q4_k_m@cpu", "llama.cpp:q8_0@cpu"]


def test_settings(here: Machine, with_gpu: Machine, folder: Model, gguf: Model) -> None:
    def of(name: str, it: Model = folder) -> engines.Settings:
        return LlamaCppEngine.settings(Contender.parse(f"llama.cpp:{name}"), with_gpu, it)

    assert of("q4_k_m@cpu").quantization == "4-bit (llama.cpp Q4_K_M)"
    assert (of("bf16@cpu").quantization, of("bf16@cpu").dtype) == ("none", "bfloat16")
    assert (of("own@cpu", gguf).quantization, of("own@cpu", gguf).dtype) == ("gguf Q4_1, as it is", "q4_1")
    kinds = {name: of(name).details["kv"] for name in ("q8_0@cpu", "f32@cpu", "f32@cpu+kv=f16", "q8_0@cpu+kv=q4_0")}
    assert kinds == {"q8_0@cpu": "f16", "f32@cpu": "f32", "f32@cpu+kv=f16": "f16", "q8_0@cpu+kv=q4_0": "q4_0"}
    assert of("q8_0@cpu").hardware == "CPU only"
    assert of("q8_0@cuda").hardware == "NVIDIA GPU with CUDA"
    assert of("q8_0@cuda+layers=1").hardware == "NVIDIA GPU with CUDA, 1 of 2 layers"
    assert of("q8_0@cuda+layers=many").uses_gpu  # refused elsewhere, with a sentence


@pytest.mark.parametrize(("precision", "expected"), SMOLLM2_BYTES.items())
def test_the_size_of_the_weights_is_known_before(precision: str, expected: int, here: Machine, folder: Model) -> None:
    assert bytes_of(precision, shaped(folder, SMOLLM2, 134_515_008), here) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("precision", "expected"), SMALL_BYTES.items())
def test_the_size_in_whole_blocks_with_a_head_of_its_own(
    precision: str, expected: int, here: Machine, folder: Model
) -> None:
    assert bytes_of(precision, shaped(folder, SMALL, 26_346_752), here) == pytest.approx(expected, rel=0.01)


def bytes_of(precision: str, it: Model, here: Machine) -> int:
    contender = Contender.parse(f"llama.cpp:{precision}@cpu")
    return LlamaCppEngine.weight_bytes(contender, LlamaCppEngine.settings(contender, here, it), it)


@given(
    layers=st.integers(1, 200), hidden=st.integers(1, 20_000), kv_heads=st.integers(1, 128),
    head_dim=st.integers(1, 512), intermediate=st.none() | st.integers(1, 100_000), vocabulary=st.integers(1, 300_000),
    tied=st.booleans(), parameters=st.integers(0, 10**12),
)  # fmt: skip
def test_more_bits_never_take_less_room(parameters: int, **shape: Any) -> None:
    it = msgspec.structs.replace(PLAIN, shape=Shape(heads=128, max_positions=None, sliding_window=None, **shape))
    it = msgspec.structs.replace(it, parameters=parameters, text_parameters=parameters)
    sizes = [llama_cpp._file_bytes(p, it) for p in ("q4_0", "q5_k_m", "q6_k", "q8_0")]
    assert sizes == sorted(sizes)
    assert sizes[0] >= 0


PLAIN = Model(
    source="x", name="x", kind="folder", path="/x", architecture="L", model_type="l", shape=SMALL, parameters=0,
    text_parameters=0, weight_bytes=0, text_weight_bytes=0, weight_files=(), dtypes={}, dtype="bf16", quantization=None,
    multimodal=False, chat_template=True, eos_ids=(), bos_id=None, fingerprint="0", notes=(),
)  # fmt: skip


def test_what_is_prepared_is_shared_by_those_who_differ_only_in_how_they_run(folder: Model) -> None:
    def of(name: str) -> str | None:
        return LlamaCppEngine.recipe(Contender.parse(f"llama.cpp:{name}"), folder)

    assert of("q8_0@cpu") == of("q8_0@cpu+kv=q4_0") == of("q8_0@cuda+layers=2")
    assert len({of(f"{p}@cpu") for p in LlamaCppEngine.precisions}) == len(LlamaCppEngine.precisions)
    assert of("own@cpu") is None
    assert llama_cpp.VERSION in (of("q8_0@cpu") or "")


def test_disk_is_counted_with_the_file_between() -> None:
    it = shaped(PLAIN, SMALL, 26_346_752)
    needed = {p: LlamaCppEngine.prepared_bytes(Contender.parse(f"llama.cpp:{p}@cpu"), it) for p in ("q8_0", "bf16")}
    assert needed["bf16"] == 26_346_752 * 2
    assert needed["q8_0"] == pytest.approx(needed["bf16"] + SMALL_BYTES["q8_0"], rel=0.01)


def test_only_its_own_environment_prepares(folder: Model, gguf: Model) -> None:
    own = LlamaCppEngine.requirements_for(Contender.parse("llama.cpp:own@cpu"), gguf)
    made = LlamaCppEngine.requirements_for(Contender.parse("llama.cpp:q8_0@cpu"), folder)
    assert own == LlamaCppEngine.requirements
    assert set(made) - set(own) == {f"weighin-llama-cpp-converter=={llama_cpp.VERSION}"}


@pytest.mark.parametrize("kind", ["chat", "raw", "file"])
@pytest.mark.parametrize("name", ["q8_0@cpu", "f32@cpu", "q8_0@cuda+layers=2+kv=q8_0"])
def test_a_snippet_is_python_of_a_bearable_length(kind: str, name: str, here: Machine, folder: Model) -> None:
    contender = Contender.parse(f"llama.cpp:{name}")
    settings = LlamaCppEngine.settings(contender, here, folder)
    messages = [{"role": "user", "content": 'it\'s "me"\n'}] if kind == "chat" else None
    prompt = SnippetPrompt(messages=messages, text='it\'s "me"\n', template_file=kind == "file")
    snippet = LlamaCppEngine.snippet(contender, settings, "/cache/prepared", prompt, 64, [2])
    compile(snippet, "snippet", "exec")
    assert 10 <= len(snippet.splitlines()) <= 25
    assert "/cache/prepared/model.gguf" in snippet
    assert ("flash_attn=False" in snippet) == (name == "f32@cpu")


# ---- the converter


def archive(files: dict[str, str]) -> bytes:
    """A source distribution with these files of llama.cpp in it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llama_cpp_python-{llama_cpp.VERSION}/vendor/llama.cpp/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()


def environment(folder: Path, script: str, files: dict[str, str] | None = None) -> Path:
    """The site-packages of an environment whose Python is this shell script."""
    (folder / "bin").mkdir()
    (folder / "sdist").write_bytes(archive(files or {}))
    (folder / "bin" / "python").write_text(f"#!/bin/sh\nhere='{folder}'\n{script}\n")
    (folder / "bin" / "python").chmod(0o755)
    site_packages = folder / "lib" / "python3.11" / "site-packages"
    site_packages.mkdir(parents=True)
    return site_packages


DOWNLOADS = 'for last; do :; done; echo "$@" > "$here/asked"; cp "$here/sdist" "$last/llama.tar.gz"'


def test_the_converter_is_taken_out_of_the_source_and_nothing_else(tmp_path: Path) -> None:
    files = {
        "convert_hf_to_gguf.py": "the script",
        "conversion/base.py": "its parts",
        "gguf-py/gguf/__init__.py": "its writer",
        "gguf-py/tests/test.py": "not wanted",
        "src/llama.cpp": "not wanted",
        "conversion/../../../../outside.py": "not wanted",
    }
    site_packages = environment(tmp_path, DOWNLOADS, files)
    LlamaCppEngine.complete_environment(site_packages)
    asked = (tmp_path / "asked").read_text()
    assert f"llama-cpp-python=={llama_cpp.VERSION}" in asked
    assert "--no-deps" in asked
    converter = site_packages / llama_cpp.CONVERTER
    found = {str(f.relative_to(converter)): f.read_text() for f in converter.rglob("*") if f.is_file()}
    assert found == {name: text for name, text in files.items() if text != "not wanted"}
    assert not list(tmp_path.rglob("outside.py"))
    known = {d.name: d.version for d in importlib.metadata.distributions(path=[str(site_packages)])}
    assert known == {"weighin-llama-cpp-converter": llama_cpp.VERSION}


def test_a_download_that_fails_says_what_pip_said(tmp_path: Path) -> None:
    site_packages = environment(tmp_path, "echo 'ERROR: no network' >&2; exit 1")
    with pytest.raises(WeighinError, match=r"converter could not be downloaded[\s\S]*ERROR: no network"):
        LlamaCppEngine.complete_environment(site_packages)


def test_a_source_without_the_converter_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeighinError, match=r"llama.tar.gz holds no convert_hf_to_gguf.py"):
        LlamaCppEngine.complete_environment(environment(tmp_path, DOWNLOADS, {"README": "hello"}))


class Tokenizers:
    """In place of transformers' AutoTokenizer, which takes seconds to import."""

    asked: dict[str, Any]

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> None:
        cls.asked = options


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converter to be written, where the engine finds its own."""
    tokenizers = type("AutoTokenizer", (Tokenizers,), {})
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=tokenizers))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.syspath_prepend(str(tmp_path))
    script = tmp_path / llama_cpp.CONVERTER / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    return script


def prepare(out: Path, *, weights: str = "model.safetensors", **changes: Any) -> None:
    details = {"kv": "f16", "gpu_layers": 0, "threads": 1, "converts": True, "lossless": "bf16"}
    job = Job(
        kind="prepare", round=0, contender="llama.cpp:f16@cpu", engine="llama.cpp", precision="f16", device="cpu",
        options={}, settings={"details": details}, model_path="/model", weight_files=[f"/model/{weights}"],
        prepared=None, out=str(out), threads=1, prompts=[], lengths={}, stop_ids=[], max_new_tokens=1, response_cap=1,
        repeats=1, spawned_at=0.0, **{"remote_code": False, "allow_pickle": False, **changes},
    )  # fmt: skip
    LlamaCppEngine(job).prepare(str(out))


def test_the_converter_writes_the_file_and_fetches_nothing(converter: Path, tmp_path: Path) -> None:
    converter.write_text(
        "import os, sys\n"
        "assert os.environ['HF_HUB_OFFLINE'] == '1'\n"
        "_, model, _, file, _, kind = sys.argv\n"
        "open(file, 'w').write(f'{model} as {kind}')\n"
    )
    prepare(tmp_path)
    assert (tmp_path / "model.gguf").read_text() == "/model as f16"


@pytest.mark.parametrize("trusted", [True, False])
def test_a_models_own_code_runs_only_if_it_is_trusted(trusted: bool, converter: Path, tmp_path: Path) -> None:
    converter.write_text(
        "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained('x', trust_remote_code=True)\n"
    )
    prepare(tmp_path, remote_code=trusted)
    assert sys.modules["transformers"].AutoTokenizer.asked == {"trust_remote_code": trusted}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise NotImplementedError('BPE pre-tokenizer was not recognized\\nmore')", "BPE pre-tokenizer was not rec"),
        ("import logging, sys; logging.error('Model X is not supported'); sys.exit(1)", "Model X is not supported"),
        ("import sys; sys.exit(1)", "did not say why"),
    ],
)
def test_the_converters_own_reason_is_the_error(code: str, reason: str, converter: Path, tmp_path: Path) -> None:
    converter.write_text(code)
    with pytest.raises(RuntimeError, match=f"converter does not take this model: .*{reason}") as error:
        prepare(tmp_path)
    assert "more" not in str(error.value)


def test_pickles_are_not_read_in_place_of_safetensors_with_another_name(converter: Path, tmp_path: Path) -> None:
    converter.write_text("raise SystemExit('it was run')")
    with pytest.raises(RuntimeError, match="named model"):
        prepare(tmp_path, weights="other.safetensors")


def test_an_environment_without_the_converter_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="weighin engines install"):
        prepare(tmp_path)


# ---- real models, in its own environment

ARCHITECTURES = {
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "gemma3_text": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64, "num_hidden_layers": 6},
}
# by which class transformers, and then the converter, read the demo's tokenizer unchanged
TOKENIZER_CLASSES = {"qwen2": "LlamaTokenizerFast", "phi3": "GPT2Tokenizer"}
own_environment = [pytest.mark.slow, pytest.mark.engines, pytest.mark.usefixtures("users_environments")]


def demo_folder() -> Path:
    """The demo's unpacked weights and tokenizer."""
    return Path(plan_of("demo-base", "transformers:fp32@cpu", quality=False).model.path)


def random_model(out: Path, model_type: str, dtype: str = "float32", **values: Any) -> Path:
    """A small model with random weights, norms and biases too, that is sure of its next token."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 49152, "max_position_embeddings": 2048, "pad_token_id": 2}
    shape |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**shape, **values}))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            noise = torch.randn_like(weight)
            if weight.ndim == 1:
                weight.add_(noise * 0.2)
            else:
                weight.copy_(noise * (1 if "embed" in name else 3 if "lm_head" in name else 1) / weight.shape[1] ** 0.5)
    made.to(getattr(torch, dtype)).save_pretrained(out)
    source, read_as = demo_folder(), TOKENIZER_CLASSES.get(model_type, "TokenizersBackend")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        text = (source / file).read_text()
        (out / file).write_text(text.replace("TokenizersBackend", read_as))
    return out


def agreement(folder: Path, contender: str, tmp_path: Path) -> tuple[float, float]:
    """KL and top-1 agreement of a contender with transformers in float32, on texts longer than a sliding window."""
    reference = plan_of(str(folder), "transformers:fp32@cpu")
    documents = passages(reference)[-2:]
    expected = np.concatenate(logits_of(reference, documents, tmp_path / "reference"))
    found = np.concatenate(logits_of(plan_of(str(folder), contender, quality=False), documents, tmp_path / "found"))
    return divergence(expected, found)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
class TestArchitectures:
    pytestmark = own_environment

    def test_it_is_converted_right(self, model_type: str, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", model_type, **ARCHITECTURES[model_type])
        kl, same = agreement(folder, "llama.cpp:f32@cpu", tmp_path)
        assert kl < 1e-5
        assert same > 0.99


class TestModels:
    pytestmark = own_environment

    def test_every_precision_loses_as_much_as_its_bits_say(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "llama", dtype="bfloat16")
        found = {p: agreement(folder, f"llama.cpp:{p}@cpu", tmp_path / p)[0] for p in ("bf16", "q8_0", "q6_k", "q4_0")}
        assert found["bf16"] < 1e-3 < found["q4_0"]
        assert sorted(found.values()) == list(found.values())

    def test_a_coarser_cache_costs_more(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "llama")
        found = {
            kv: agreement(folder, f"llama.cpp:f32@cpu+kv={kv}", tmp_path / kv)[0]
            for kv in ("f32", "f16", "q8_0", "q4_0")
        }
        assert found["f32"] < 1e-8
        assert sorted(found.values()) == list(found.values())

    def test_a_file_is_used_as_it_is_and_a_full_one_can_be_quantized(self, tmp_path: Path) -> None:
        packed = demo.gguf_file(cache.root(), print)
        plan = plan_of(str(packed), "llama.cpp:own@cpu", rounds=1, quality=False)
        assert plan.entries[0].recipe is None
        result = start(plan, tmp_path / "own", Silent()).contenders[0]
        assert (result.status, result.reason) == ("ok", None)
        assert result.value("loaded_bytes") == pytest.approx(result.weight_bytes, rel=0.01)
        assert not [doubt for doubt in result.doubts if doubt.type in ("template_differs", "tokenizer_differs")]
        folder = random_model(tmp_path / "model", "llama")
        whole = plan_of(str(folder), "llama.cpp:f16@cpu", rounds=1, quality=False)
        assert start(whole, tmp_path / "whole", Silent()).contenders[0].status == "ok"
        file = cache.prepared(whole.model.fingerprint, whole.entries[0].recipe or "") / llama_cpp.PREPARED
        plan = plan_of(str(file), "llama.cpp:q8_0@cpu", rounds=1, quality=False)
        result = start(plan, tmp_path / "quantized", Silent()).contenders[0]
        assert (result.status, result.effective["dtype"]) == ("ok", "Q8_0")

    def test_a_model_that_the_converter_refuses_fails_with_its_reason(self, tiny_model: Path, tmp_path: Path) -> None:
        plan = plan_of(str(tiny_model), "llama.cpp:q8_0@cpu", rounds=1, quality=False)
        result = start(plan, tmp_path / "out", Silent()).contenders[0]
        assert (result.status, result.phase) == ("failed", "prepare")
        assert "pre-tokenizer was not recognized" in (result.reason or "")
        assert not cache.prepared(plan.model.fingerprint, plan.entries[0].recipe or "").exists()

    def test_a_window_that_it_does_not_know_is_never_passed_silently(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "mistral", sliding_window=64)
        options = {"rounds": 1, "quality": False, "response_tokens": 8, "max_new_tokens": 4}
        short = plan_of(str(folder), "llama.cpp:f32@cpu", prompts=[SHORT], **options)
        assert start(short, tmp_path / "short", Silent()).contenders[0].status == "ok"
        long = plan_of(str(folder), "llama.cpp:f32@cpu", prompts=[SHORT * 10], **options)
        result = start(long, tmp_path / "long", Silent()).contenders[0]
        assert result.status == "failed"
        assert "sliding window" in (result.reason or "")

    def test_answers_are_drawn_by_the_seed(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "llama")
        settings = {"do_sample": True, "temperature": 1.5, "top_k": 200, "top_p": 0.98, "repetition_penalty": 1.1}
        (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 2}))
        options = {"rounds": 1, "quality": False, "prompts": [SHORT], "sampling": "model"}
        plan = plan_of(str(folder), "llama.cpp:q8_0@cpu", **options)
        first, again = (start(plan, tmp_path / name, Silent()).contenders[0] for name in ("first", "again"))
        assert (first.status, first.reason) == ("ok", None)
        answers = [tuple(response.ids) for response in first.responses]
        assert len(set(answers)) == len(answers) >= 3
        assert answers == [tuple(response.ids) for response in again.responses]
