"""OpenVINO: what it says before it runs, what it asks of its exporter and pipeline, and real models of several kinds.

What every engine must do is in test_contract.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_contract import SHORT, divergence, logits_of, passages, plan_of, users_environments  # noqa: F401 - a fixture
from test_llama_cpp import agreement, demo_folder, random_model

from weighin import cache, demo, engines, machine, model
from weighin.compare import Silent, start
from weighin.engines import Job, Sampling, SnippetPrompt
from weighin.engines import openvino as module
from weighin.engines.openvino import OpenVinoEngine
from weighin.machine import Machine
from weighin.model import Model, Shape
from weighin.plan import Contender

# What the exporter and NNCF made of these shapes, in bytes of the weights' file.
SMOLLM2 = Shape(
    layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocabulary=49152,
    max_positions=8192, sliding_window=None, tied=True,
)  # fmt: skip
SMOLLM2_BYTES = {"int4": 85_831_365, "int8": 135_234_821, "fp16": 269_030_335, "fp32": 538_060_421}
SMALL = Shape(
    layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocabulary=49152, max_positions=2048,
    sliding_window=None, tied=False,
)  # fmt: skip
SMALL_BYTES = {"int4": 26_103_237, "int8": 26_659_205, "fp16": 52_694_335, "fp32": 105_388_421}
PARAMETERS = {"smollm2": 134_515_008, "small": 26_346_752}


@pytest.fixture(scope="module")
def here() -> Machine:
    return msgspec.structs.replace(machine.look(measure=False), threads=3)


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> Model:
    return model.inspect("tiny", tiny_model)


@pytest.fixture(scope="module")
def gguf(folder: Model) -> Model:
    return msgspec.structs.replace(folder, kind="gguf", path="/models/a.gguf", dtype="q4_1", quantization="gguf Q4_1")


def shaped(it: Model, shape: Shape, parameters: int) -> Model:
    return msgspec.structs.replace(it, shape=shape, parameters=parameters, text_parameters=parameters)


def named(precision: str) -> Contender:
    return Contender.parse(f"openvino:{precision}@cpu")


# ---- before it runs


def test_by_default_it_is_quantized_and_what_is_quantized_already_is_left_alone(
    here: Machine, folder: Model, gguf: Model
) -> None:
    both = ["openvino:int4@cpu", "openvino:int8@cpu"]
    nf4 = msgspec.structs.replace(folder, quantization="bitsandbytes nf4")
    assert [OpenVinoEngine.contenders(here, it) for it in (folder, gguf, nf4)] == [both, both, []]


def test_what_cannot_run_says_why(here: Machine, folder: Model, gguf: Model) -> None:
    def says(**changes: Any) -> str | None:
        return OpenVinoEngine.cannot_run(named("int8"), here, msgspec.structs.replace(folder, **changes))

    assert says() is None
    assert OpenVinoEngine.cannot_run(named("int8"), here, gguf) is None
    assert "already quantized (awq 4-bit)" in (says(quantization="awq 4-bit") or "")
    assert says(auto_class=None, auto_class_reason="nobody knows it") == "nobody knows it"


def test_settings(here: Machine, folder: Model, gguf: Model) -> None:
    def of(precision: str, *features: str, it: Model = folder) -> engines.Settings:
        at = msgspec.structs.replace(here, cpu_features=features)
        return OpenVinoEngine.settings(named(precision), at, it)

    assert [of(p, "avx512_bf16").dtype for p in ("int4", "int8", "fp16", "fp32")] == ["bfloat16"] * 3 + ["float32"]
    assert of("int4", "avx2").dtype == "float32"
    assert [of(p).quantization.partition(" ")[0] for p in ("int4", "int8", "fp16")] == ["4-bit", "8-bit", "none"]
    assert of("int8").details["unpacker"] is None
    assert of("int8", it=gguf).details["unpacker"] == sys.executable


@pytest.mark.parametrize(
    ("shape", "name", "sizes"), [(SMOLLM2, "smollm2", SMOLLM2_BYTES), (SMALL, "small", SMALL_BYTES)]
)
def test_the_size_of_the_weights_is_known_before(
    shape: Shape, name: str, sizes: dict[str, int], here: Machine, folder: Model
) -> None:
    it = shaped(folder, shape, PARAMETERS[name])
    settings = OpenVinoEngine.settings(named("int8"), here, it)
    found = {p: OpenVinoEngine.weight_bytes(named(p), settings, it) for p in sizes}
    assert found == pytest.approx(sizes, rel=0.01)


@given(
    layers=st.integers(1, 200), hidden=st.integers(16, 20_000), vocabulary=st.integers(1, 300_000), tied=st.booleans(),
    parameters=st.integers(0, 10**12),
)  # fmt: skip
def test_more_bits_never_take_less_room(parameters: int, **shape: Any) -> None:
    it = shaped(PLAIN, msgspec.structs.replace(SMALL, **shape), parameters)
    sizes = [module._file_bytes(p, it) for p in ("int4", "int8", "fp16", "fp32")]
    assert sizes == sorted(sizes)
    assert sizes[0] >= 0


PLAIN = Model(
    source="x", name="x", kind="folder", path="/x", architecture="L", model_type="l", shape=SMALL, parameters=0,
    text_parameters=0, weight_bytes=0, text_weight_bytes=0, weight_files=(), dtypes={}, dtype="bf16", quantization=None,
    multimodal=False, chat_template=True, eos_ids=(), bos_id=None, fingerprint="0", notes=(),
)  # fmt: skip


def test_disk_is_counted_with_what_lies_between() -> None:
    it = shaped(PLAIN, SMALL, PARAMETERS["small"])

    def needed(precision: str, **changes: Any) -> int:
        return OpenVinoEngine.prepared_bytes(named(precision), msgspec.structs.replace(it, **changes))

    full = PARAMETERS["small"] * 2
    assert needed("fp16") == full
    assert needed("int8") == pytest.approx(SMALL_BYTES["int8"] + full, rel=0.01)
    assert needed("int8", multimodal=True) == needed("int8") + full
    assert needed("fp16", kind="gguf", dtype="q4_1") == full + 2 * full


def test_what_is_prepared_is_named_by_what_makes_it(folder: Model) -> None:
    names = {OpenVinoEngine.recipe(named(p), folder) for p in OpenVinoEngine.precisions}
    assert len(names) == len(OpenVinoEngine.precisions)
    assert all(module.OPTIMUM in (name or "") and module.NNCF in (name or "") for name in names)


@pytest.mark.parametrize("kind", ["chat", "raw", "file"])
@pytest.mark.parametrize("stop_ids", [[], [2, 5]])
def test_a_snippet_is_python_of_a_bearable_length(kind: str, stop_ids: list[int], here: Machine, folder: Model) -> None:
    settings = OpenVinoEngine.settings(named("int4"), here, folder)
    messages = [{"role": "user", "content": 'it\'s "me"\n'}] if kind == "chat" else None
    prompt = SnippetPrompt(messages=messages, text='it\'s "me"\n', template_file=kind == "file")
    snippet = OpenVinoEngine.snippet(named("int4"), settings, "/cache/prepared", prompt, 64, stop_ids)
    compile(snippet, "snippet", "exec")
    assert 10 <= len(snippet.splitlines()) <= 25
    assert "'/cache/prepared'" in snippet
    assert f"add_special_tokens={kind == 'raw'}" in snippet
    assert ("ignore_eos" in snippet) == (not stop_ids)


# ---- preparing, with an exporter of our own


def job(kind: str, precision: str = "int8", **changes: Any) -> Job:
    details = {"threads": 1, "unpacker": None, "multimodal": False, "auto_class": "AutoModelForCausalLM"}
    values: dict[str, Any] = {
        "kind": kind, "round": 0, "contender": "x", "engine": "openvino", "precision": precision, "device": "cpu",
        "options": {}, "settings": {"details": {**details, **changes.pop("details", {})}}, "model_path": "/model",
        "weight_files": [], "prepared": "/prepared", "out": None, "threads": 1, "prompts": [], "lengths": {},
        "stop_ids": [], "max_new_tokens": 1, "response_cap": 1, "repeats": 1, "remote_code": False,
        "allow_pickle": False, "spawned_at": 0.0, "vocabulary": 10, **changes,
    }  # fmt: skip
    return Job(**values)


class Exporter:
    """In place of optimum-intel, which is in an environment of its own."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.quantized: dict[str, Any] = {}
        self.tokenizer = True
        self.error: Exception | None = None

    def main_export(self, source: str, out: Path, **asked: Any) -> None:
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        assert sys.modules["openvino_telemetry"] is None
        self.asked = {"source": source, **asked}
        if self.error:
            raise self.error
        out.mkdir(exist_ok=True)
        for name in ("model.xml", "model.bin", *(["tokenizer.xml"] if self.tokenizer else [])):
            (out / f"openvino_{name}").write_text("exported")

    def quantize(self, *, ov_config: dict[str, Any], save_directory: Path) -> None:
        self.quantized = ov_config["quantization_config"]
        for file in ("openvino_model.xml", "openvino_model.bin"):
            (save_directory / file).write_text("quantized")

    def convert_tokenizer(self, tokenizer: str, **_: Any) -> None:
        raise TypeError(f"no converter for {tokenizer}")


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Exporter:
    made = Exporter()
    anything = types.SimpleNamespace(from_pretrained=lambda *_, **__: made)
    modules = {
        "optimum": {},
        "optimum.exporters": {},
        "optimum.exporters.openvino": {"main_export": made.main_export},
        "optimum.intel": {
            "OVConfig": dict,
            "OVWeightQuantizationConfig": dict,
            "OVModelForCausalLM": anything,
            "OVQuantizer": anything,
        },
        "openvino_tokenizers": {"convert_tokenizer": made.convert_tokenizer},
        "openvino_telemetry": {},
        "transformers": {"AutoTokenizer": types.SimpleNamespace(from_pretrained=lambda path, **_: f"that of {path}")},
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return made


def prepare(out: Path, precision: str, **changes: Any) -> dict[str, str]:
    """What is in the folder afterwards."""
    out.mkdir(exist_ok=True)
    OpenVinoEngine(job("prepare", precision, out=str(out), **changes)).prepare(str(out))
    return {str(file.relative_to(out)): file.read_text() for file in out.rglob("*") if file.is_file()}


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_full_precision_is_exported_as_it_is(precision: str, exporter: Exporter, tmp_path: Path) -> None:
    assert set(prepare(tmp_path / "out", precision).values()) == {"exported"}
    assert exporter.asked["ov_config"] == {"dtype": precision}
    assert not exporter.quantized


@pytest.mark.parametrize(("precision", "bits"), [("int4", 4), ("int8", 8)])
def test_only_what_was_quantized_stays(precision: str, bits: int, exporter: Exporter, tmp_path: Path) -> None:
    found = prepare(tmp_path / "out", precision)
    assert found == {
        "openvino_model.xml": "quantized",
        "openvino_model.bin": "quantized",
        "openvino_tokenizer.xml": "exported",
    }
    assert exporter.quantized["bits"] == bits
    assert all(path.is_file() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("trusted", [True, False])
def test_code_and_pickles_are_read_only_if_they_are_trusted(trusted: bool, exporter: Exporter, tmp_path: Path) -> None:
    prepare(tmp_path / "out", "fp16", remote_code=trusted, allow_pickle=trusted)
    assert exporter.asked["trust_remote_code"] is trusted
    assert exporter.asked["model_loading_kwargs"] == ({} if trusted else {"use_safetensors": True})


def test_the_exporters_own_reason_is_the_error(exporter: Exporter, tmp_path: Path) -> None:
    exporter.error = ValueError("a foo9 is not supported\nmore")
    with pytest.raises(RuntimeError, match=r"does not take this model: ValueError: a foo9 is not supported$"):
        prepare(tmp_path / "out", "int8")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_tokenizer_that_is_not_converted_is_told_with_the_reason(exporter: Exporter, tmp_path: Path) -> None:
    exporter.tokenizer = False
    with pytest.raises(RuntimeError, match="TypeError: no converter for that of /model"):
        prepare(tmp_path / "out", "int8")


def test_memory_that_ran_out_while_preparing_is_no_refusal(exporter: Exporter, tmp_path: Path) -> None:
    exporter.error = MemoryError()
    with pytest.raises(MemoryError):
        prepare(tmp_path / "out", "int8")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_file_is_unpacked_first(exporter: Exporter, tmp_path: Path) -> None:
    python = script(tmp_path / "python", f'echo "$@" > {tmp_path}/asked')
    found = prepare(tmp_path / "out", "int8", model_path="/a.gguf", details={"unpacker": python})
    words = (tmp_path / "asked").read_text().split()
    assert words[:4] == ["-m", "weighin.unpack", "model", "/a.gguf"]
    assert exporter.asked["source"] == words[4]
    assert len(found) == 3


def test_a_file_that_cannot_be_unpacked_says_why(exporter: Exporter, tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo trace >&2; echo 'ValueError: no such layout' >&2; exit 1")
    with pytest.raises(RuntimeError, match="could not be unpacked: ValueError: no such layout"):
        prepare(tmp_path / "out", "int8", details={"unpacker": python})


# ---- answering and scoring, with a pipeline of our own


class Pipeline:
    """In place of GenAI's: it says these tokens and keeps what it was asked."""

    def __init__(self, says: list[int | list[int]]) -> None:
        self.says = says
        self.config: Any = None

    def generate(self, prompt: Any, config: Any, streamer: Any) -> None:
        self.prompt, self.config = prompt, config
        for token in self.says:
            assert streamer.write(token) == "running"
        streamer.end()


def answering(pipeline: Pipeline) -> OpenVinoEngine:
    engine = OpenVinoEngine(job("speed"))
    status = types.SimpleNamespace(RUNNING="running")
    engine.genai = types.SimpleNamespace(
        GenerationConfig=types.SimpleNamespace, StreamerBase=object, StreamingStatus=status
    )
    engine.openvino, engine.numpy, engine.pipeline = types.SimpleNamespace(Tensor=np.asarray), np, pipeline
    engine.streamer = module._streamer_class(engine.genai)
    return engine


def test_tokens_come_one_by_one_also_where_the_pipeline_brings_several() -> None:
    pipeline, seen = Pipeline([5, [6, 7], 8]), list[int]()
    assert answering(pipeline).generate([1, 2], 4, [], seen.append) == seen == [5, 6, 7, 8]
    assert pipeline.prompt.tolist() == [[1, 2]]
    assert (pipeline.config.max_new_tokens, pipeline.config.ignore_eos) == (4, True)


def test_it_stops_at_the_ids_that_were_named_and_no_others() -> None:
    pipeline = Pipeline([5, 3])
    answering(pipeline).generate([1], 9, [3, 4], lambda token: None)
    assert vars(pipeline.config) == {
        "max_new_tokens": 9, "ignore_eos": False, "eos_token_id": 3, "stop_token_ids": {3, 4},
    }  # fmt: skip


@pytest.mark.parametrize("top_k", [0, 7])
def test_how_it_draws(top_k: int) -> None:
    pipeline = Pipeline([5])
    sampling = Sampling(temperature=0.5, top_k=top_k, top_p=0.9, repetition_penalty=1.1, seed=3)
    answering(pipeline).generate([1], 1, [], lambda token: None, sampling)
    found = vars(pipeline.config)
    assert (found["do_sample"], found["temperature"], found["top_p"], found["rng_seed"]) == (True, 0.5, 0.9, 3)
    assert found.get("top_k", 0) == top_k  # where none is named, the engine's own: all


class Compiled:
    """In place of a compiled model: it keeps its inputs and gives logits that name the position."""

    def __init__(self, vocabulary: int, inputs: tuple[str, ...]) -> None:
        self.vocabulary = vocabulary
        self.inputs = [types.SimpleNamespace(names={name}) for name in inputs]
        self.asked: list[dict[str, Any]] = []
        self.resets = 0

    def output(self, name: str) -> Any:
        assert name == "logits"
        width = types.SimpleNamespace(is_static=True, get_length=lambda: self.vocabulary)
        return types.SimpleNamespace(partial_shape=[None, None, width])

    def reset_state(self) -> None:
        self.resets += 1

    def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(inputs)
        return {"logits": np.zeros((1, inputs["input_ids"].shape[1], 4), dtype=np.float16)}


def scoring(compiled: Compiled) -> OpenVinoEngine:
    engine = OpenVinoEngine(job("score"))
    engine.numpy, engine.compiled, engine.request = np, compiled, compiled
    return engine


@pytest.mark.parametrize(("vocabulary", "rows"), [(49152, 325), (262208, 61)])
def test_it_scores_in_pieces_that_stay_small(vocabulary: int, rows: int) -> None:
    compiled = Compiled(vocabulary, ("input_ids", "attention_mask", "position_ids", "beam_idx"))
    found = list(scoring(compiled).score(list(range(700))))
    assert [start for start, _ in found] == list(range(0, 700, rows))
    assert sum(len(logits) for _, logits in found) == 700
    assert {logits.dtype for _, logits in found} == {np.dtype("float32")}
    assert compiled.resets == 1
    assert np.concatenate([i["position_ids"][0] for i in compiled.asked]).tolist() == list(range(700))
    assert [i["attention_mask"].shape[1] for i in compiled.asked] == [s + len(rows_) for s, rows_ in found]


def test_a_model_gets_only_the_inputs_that_it_has() -> None:
    compiled = Compiled(100, ("input_ids", "attention_mask"))
    list(scoring(compiled).score([1, 2, 3]))
    assert compiled.asked[0].keys() == {"input_ids", "attention_mask"}


class Tokenizer:
    """In place of GenAI's, for a model whose texts begin with 1."""

    chat_template = "{{ messages }}"

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        ids = [1] * text.startswith("<s>") + [9]
        return types.SimpleNamespace(input_ids=types.SimpleNamespace(data=np.array([[1] * add_special_tokens + ids])))

    def get_bos_token_id(self) -> int:
        return 1

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        raise RuntimeError("Unknown filter")


def with_tokenizer(texts: list[dict[str, Any]]) -> OpenVinoEngine:
    engine = OpenVinoEngine(job("responses", texts=texts))
    engine.pipeline = types.SimpleNamespace(get_tokenizer=Tokenizer)
    return engine


def test_a_text_begins_once() -> None:
    engine = with_tokenizer([{"text": "rendered", "messages": [{}]}, {"text": "plain", "messages": None}])
    assert engine.tokenize("plain") == [1, 9]
    assert engine.tokenize("rendered") == [9]  # a template says itself how a text begins
    assert engine.tokenize("<s>plain") == [1, 9]


def test_a_template_that_it_cannot_render_gives_nothing_and_differs() -> None:
    engine = with_tokenizer([])
    assert engine.render([]) == ""
    engine.pipeline.get_tokenizer = lambda: types.SimpleNamespace(chat_template="")
    assert engine.render([]) is None


def test_memory_that_ran_out_is_known_by_its_words() -> None:
    engine = OpenVinoEngine(job("speed"))
    assert engine.is_out_of_memory(RuntimeError("Check 'x' failed: std::bad_alloc"))
    assert not engine.is_out_of_memory(RuntimeError("Check 'x' failed"))


# ---- real models, in its own environment

own_environment = [pytest.mark.slow, pytest.mark.engines, pytest.mark.usefixtures("users_environments")]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 64},
    "phi3": {"sliding_window": 64},
    "gemma3_text": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64, "num_hidden_layers": 6},
}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
class TestArchitectures:
    pytestmark = own_environment

    def test_it_is_exported_right(self, model_type: str, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", model_type, **ARCHITECTURES[model_type])
        kl, same = agreement(folder, "openvino:fp32@cpu", tmp_path)
        assert kl < 1e-5
        assert same > 0.99


class TestModels:
    pytestmark = own_environment

    def test_every_precision_loses_as_much_as_its_bits_say(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "llama", dtype="bfloat16")
        reference = plan_of(str(folder), "transformers:fp32@cpu")
        documents = passages(reference)[-1:]
        expected = logits_of(reference, documents, tmp_path / "reference")[0]
        found = []
        for precision in ("fp16", "int8", "int4"):
            plan = plan_of(str(folder), f"openvino:{precision}@cpu", quality=False)
            found.append(divergence(expected, logits_of(plan, documents, tmp_path / precision)[0])[0])
        assert found[0] < 2e-3
        assert found == sorted(found)

    def test_four_bits_are_as_large_as_expected_and_the_snippet_answers_the_same(self, tmp_path: Path) -> None:
        plan = plan_of("demo-base", "openvino:int4@cpu", rounds=1, quality=False)
        result = start(plan, tmp_path / "out", Silent()).contenders[0]
        assert (result.status, result.reason) == ("ok", None)
        assert result.value("loaded_bytes") == pytest.approx(result.weight_bytes, rel=0.02)
        assert result.effective["kv_cache"] == "u8"
        assert result.effective["dtype"] == plan.entries[0].settings["dtype"]
        command = [plan.entries[0].python or "", "-I", "-c", result.snippet]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == result.responses[0].whole + "\n"

    def test_the_text_side_of_a_multimodal_model(self, tmp_path: Path) -> None:
        folder = multimodal(tmp_path / "model")
        kl, same = agreement(folder, "openvino:fp32@cpu", tmp_path)
        assert kl < 1e-5
        assert same > 0.99

    def test_a_gguf_file_is_unpacked_and_exported(self, tmp_path: Path) -> None:
        packed = demo.gguf_file(cache.root(), print)
        kl, same = agreement(packed, "openvino:fp32@cpu", tmp_path)
        assert kl < 1e-3
        assert same > 0.99

    def test_a_model_that_the_exporter_refuses_fails_with_its_reason(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "olmo3")
        plan = plan_of(str(folder), "openvino:int8@cpu", rounds=1, quality=False)
        result = start(plan, tmp_path / "out", Silent()).contenders[0]
        assert (result.status, result.phase) == ("failed", "prepare")
        assert "optimum-intel does not take this model: ValueError: Trying to export a olmo3" in (result.reason or "")
        assert not cache.prepared(plan.model.fingerprint, plan.entries[0].recipe or "").exists()

    def test_answers_are_drawn_by_the_seed(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "llama")
        settings = {"do_sample": True, "temperature": 1.5, "top_k": 200, "top_p": 0.98, "repetition_penalty": 1.1}
        (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 2}))
        options = {"rounds": 1, "quality": False, "prompts": [SHORT], "response_tokens": 12, "sampling": "model"}
        plan = plan_of(str(folder), "openvino:int8@cpu", **options)
        drawn = [
            [answer.ids for answer in start(plan, tmp_path / name, Silent()).contenders[0].responses]
            for name in ("one", "two")
        ]
        assert drawn[0] == drawn[1]
        assert len({tuple(ids) for ids in drawn[0]}) == len(drawn[0]) == 3


def multimodal(out: Path) -> Path:
    """A small Gemma 3 with a vision tower, random, its head tied, with the demo's tokenizer."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 2048}
    text |= {"query_pre_attn_scalar": 64, "sliding_window": 64}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=49151,
        boi_token_index=49150,
        eoi_token_index=49149,
    )
    torch.manual_seed(1)
    made = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * (0.2 if weight.ndim == 1 else weight.shape[-1] ** -0.5))
    made.save_pretrained(out)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (out / file).write_bytes((demo_folder() / file).read_bytes())
    return out
