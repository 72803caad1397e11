"""ONNX Runtime: what it says before it runs, how its builder is run and set right, and real models of several kinds.

What every engine must do is in test_contract.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_contract import SHORT, logits_of, plan_of, users_environments  # noqa: F401 - a fixture
from test_llama_cpp import PLAIN, SMOLLM2, agreement, own_environment, random_model, shaped

from weighin import cache, demo, machine, model
from weighin.compare import Silent, start
from weighin.engines import Job, Sampling, Settings, SnippetPrompt, onnxruntime
from weighin.engines.onnxruntime import OnnxRuntimeEngine
from weighin.journal import read
from weighin.machine import Gpu, Machine
from weighin.model import Model, Shape
from weighin.plan import Contender

# What the builder made of the demo's shapes, in bytes of weights on disk; a shared head is packed anew in memory.
SMOLLM2_PARAMETERS, SMOLLM2_HEAD = 134_515_008, 49152 * 576
SMOLLM2_BYTES = {
    "fp32@cpu": 540_157_184 + 4 * SMOLLM2_HEAD,
    "int8@cpu": 266_773_760,
    "int4@cpu": 86_287_616 + 0.625 * SMOLLM2_HEAD,
    "int4@cpu+block=16": 103_097_600 + 0.75 * SMOLLM2_HEAD,
    "int4@cpu+mixed": 110_507_264 + 1.125 * SMOLLM2_HEAD,
}


@pytest.fixture(scope="module")
def here() -> Machine:
    found = machine.look(measure=False)
    return msgspec.structs.replace(found, gpus=(), gpu_reason="no driver", threads=3, memory_available_bytes=10**10)


@pytest.fixture(scope="module")
def with_gpu(here: Machine) -> Machine:
    values = {name: None for name in Gpu.__struct_fields__} | {"name": "a GPU", "processes": ()}
    return msgspec.structs.replace(here, gpus=(Gpu(**values),))


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> Model:
    return model.inspect("tiny", tiny_model)


@pytest.fixture
def cuda_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """This Python has the package that runs on CUDA."""
    known = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.18.0" if name == onnxruntime.CUDA_PACKAGE else known(name)
    )


def named(name: str) -> Contender:
    return Contender.parse(f"onnxruntime:{name}")


def says(name: str, here: Machine, it: Model) -> str | None:
    return OnnxRuntimeEngine.cannot_run(named(name), here, it)


def settings_of(name: str, here: Machine, it: Model) -> Settings:
    return OnnxRuntimeEngine.settings(named(name), here, it)


# ---- before it runs


def test_by_default_four_and_eight_bits_of_what_is_not_quantized_yet(here: Machine, folder: Model) -> None:
    gguf = msgspec.structs.replace(folder, kind="gguf", quantization="gguf Q4_1")
    nf4 = msgspec.structs.replace(folder, quantization="bitsandbytes nf4")
    assert OnnxRuntimeEngine.contenders(here, folder) == ["onnxruntime:int4@cpu", "onnxruntime:int8@cpu"]
    assert OnnxRuntimeEngine.contenders(here, gguf) == OnnxRuntimeEngine.contenders(here, folder)
    assert OnnxRuntimeEngine.contenders(here, nf4) == []
    assert says("int4@cpu", here, gguf) is None
    assert "already quantized (bitsandbytes nf4)" in (says("int4@cpu", here, nf4) or "")


def test_a_gpu_counts_where_the_package_for_it_is(
    here: Machine, with_gpu: Machine, folder: Model, request: pytest.FixtureRequest
) -> None:
    assert not [name for name in OnnxRuntimeEngine.contenders(with_gpu, folder) if "cuda" in name]
    assert "pip install 'onnxruntime-genai-cuda==0.18.*'" in (says("int4@cuda", with_gpu, folder) or "")
    request.getfixturevalue("cuda_package")
    assert "onnxruntime:int4@cuda" in OnnxRuntimeEngine.contenders(with_gpu, folder)
    assert says("int4@cuda", with_gpu, folder) is None
    assert "no CUDA GPU here: no driver" in (says("int4@cuda", here, folder) or "")
    assert OnnxRuntimeEngine.requirements_for(named("fp16@cuda"), folder)[0] == "onnxruntime-genai-cuda==0.18.*"
    assert OnnxRuntimeEngine.requirements_for(named("fp32@cpu"), folder) == OnnxRuntimeEngine.requirements


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("fp16@cpu", "for GPUs alone; try onnxruntime:fp32@cpu"),
        ("bf16@cpu", "for GPUs alone"),
        ("fp32@cpu+block=64", "fp32 is not quantized"),
        ("int8@cpu+mixed", "take int4"),
    ],
)
def test_what_cannot_run_says_why(name: str, word: str, here: Machine, folder: Model) -> None:
    assert word in (says(name, here, folder) or "")


def test_quantizing_takes_more_memory_than_running_and_is_done_once(here: Machine, folder: Model) -> None:
    large = shaped(folder, SMOLLM2, 4 * 10**9)
    assert "about 22 GB of memory to quantize this model, 10 GB are free" in (says("int4@cpu", here, large) or "")
    assert says("fp32@cpu", here, large) is None
    prepared = cache.prepared(large.fingerprint, OnnxRuntimeEngine.recipe(named("int4@cpu"), large) or "")
    prepared.mkdir(parents=True)
    (prepared / cache.DONE).touch()
    assert says("int4@cpu", here, large) is None


def test_settings(here: Machine, folder: Model) -> None:
    def of(name: str) -> Settings:
        return settings_of(name, here, folder)

    assert of("int4@cpu").quantization == "4-bit (ONNX Runtime, blocks of 32)"
    assert of("int8@cpu+block=64").quantization == "8-bit (ONNX Runtime, blocks of 64)"
    assert "8 for the head" in of("int4@cpu+mixed").quantization
    assert (of("fp32@cpu").quantization, of("fp32@cpu").dtype) == ("none", "float32")
    assert (of("int4@cpu").dtype, of("int4@cuda").dtype, of("bf16@cuda").dtype) == ("float32", "float16", "bfloat16")
    products = {name: of(name).details["products"] for name in ("int4@cpu", "int4@cpu+accuracy=1", "fp32@cpu")}
    assert products == {"int4@cpu": "int8", "int4@cpu+accuracy=1": "float32", "fp32@cpu": "float32"}
    assert of("int4@cpu+block=16").details["builder"] == ["hf_token=false", "block_size=16"]
    assert of("fp16@cuda").uses_gpu


@pytest.mark.parametrize(("name", "expected"), SMOLLM2_BYTES.items())
def test_the_size_of_the_weights_is_known_before(name: str, expected: float, here: Machine, folder: Model) -> None:
    it = shaped(folder, SMOLLM2, SMOLLM2_PARAMETERS)
    found = OnnxRuntimeEngine.weight_bytes(named(name), settings_of(name, here, it), it)
    assert found == pytest.approx(expected, rel=0.02)
    gguf = msgspec.structs.replace(it, kind="gguf")
    assert OnnxRuntimeEngine.prepared_bytes(named(name), it) == found
    assert OnnxRuntimeEngine.prepared_bytes(named(name), gguf) == found + 4 * SMOLLM2_PARAMETERS


@given(
    layers=st.integers(1, 200), hidden=st.integers(1, 20_000), head_dim=st.integers(1, 512),
    vocabulary=st.integers(1, 300_000), max_positions=st.none() | st.integers(1, 10**6), tied=st.booleans(),
    parameters=st.integers(0, 10**12),
)  # fmt: skip
def test_more_bits_never_take_less_room(parameters: int, **shape: Any) -> None:
    full = Shape(heads=128, kv_heads=8, intermediate=None, sliding_window=None, **shape)
    it = msgspec.structs.replace(PLAIN, shape=full, parameters=parameters, text_parameters=parameters)
    names = ("int4@cpu+block=128", "int4@cpu", "int4@cpu+mixed", "int8@cpu", "fp32@cpu")
    sizes = [onnxruntime._bytes(named(name), it) for name in names]
    assert sizes == sorted(sizes)
    assert sizes[0] >= 0


def test_what_is_prepared_is_told_apart(folder: Model) -> None:
    names = ("int4@cpu", "int8@cpu", "fp32@cpu", "int4@cuda", "int4@cpu+mixed", "int4@cpu+block=16",
             "int4@cpu+accuracy=1", "int4@cpu+accuracy=1+block=16")  # fmt: skip
    recipes = [OnnxRuntimeEngine.recipe(named(name), folder) or "" for name in names]
    assert len(set(recipes)) == len(names)
    assert all(recipe.endswith(f"genai-{onnxruntime.SERIES}") for recipe in recipes)
    swapped = OnnxRuntimeEngine.recipe(named("int4@cpu+block=16+accuracy=1"), folder)
    assert swapped == recipes[-1]


@pytest.mark.parametrize("kind", ["chat", "raw", "file"])
def test_a_snippet_is_python_of_a_bearable_length(kind: str, here: Machine, folder: Model) -> None:
    messages = [{"role": "user", "content": 'it\'s "me"\n'}] if kind == "chat" else None
    prompt = SnippetPrompt(messages=messages, text='it\'s "me"\n', template_file=kind == "file")
    settings = settings_of("int4@cpu", here, folder)
    snippet = OnnxRuntimeEngine.snippet(named("int4@cpu"), settings, "/cache/prepared", prompt, 64, [2, 7])
    compile(snippet, "snippet", "exec")
    assert 10 <= len(snippet.splitlines()) <= 25
    assert "'/cache/prepared'" in snippet
    assert '"intra_op_num_threads": 3' in snippet
    assert ("add_special_tokens=False" in snippet) == (kind != "raw")


# ---- its builder, in whose place another is put


class Rope:
    """In place of the builder's classes: what they would do about RoPE."""

    def make_rope_init(self, config: Any) -> str:
        return "every kind"

    def make_rotary_embedding_caches_from_scratch(self) -> float:
        return float(self.rope_attrs["rescale_factors"])


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A builder that writes down what it was asked; `config` is the model's, `fails` what it says against it."""
    own_rope = {"make_rope_init": lambda self, config: "Llama's"}
    made = types.SimpleNamespace(
        config=types.SimpleNamespace(architectures=["LlamaForCausalLM"], rope_parameters={"rope_type": "default"}),
        fails=None,
        Model=Rope,
        LlamaModel=type("LlamaModel", (Rope,), own_rope),
        Gemma3Model=type("Gemma3Model", (Rope,), {}),
    )
    made.config.get_text_config = lambda: made.config

    def parse(name: None, source: str, out: str, precision: str, device: str, cache_dir: str, words: list[str]) -> Any:
        made.words, made.offline = words, os.environ["HF_HUB_OFFLINE"]
        return {"hf_details": {"hf_config": made.config}, "parsed": True}

    def create(name: None, source: str, out: str, precision: str, device: str, cache_dir: str, **options: Any) -> None:
        Path(cache_dir).mkdir(parents=True)
        (Path(cache_dir) / "left over").touch()
        if made.fails:
            raise made.fails
        Path(out, "model.onnx").write_text(f"{source} as {precision} for {device}, {options['parsed']}")

    made.parse_extra_options, made.create_model = parse, create
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "onnxruntime_genai.models", types.SimpleNamespace(builder=made))
    return made


def job_of(out: Path, here: Machine, it: Model, name: str = "int8@cpu", **changes: Any) -> Job:
    contender = named(name)
    settings = msgspec.to_builtins(settings_of(name, here, it))
    values: dict[str, Any] = {"remote_code": False, "prepared": None, "model_path": "/model", **changes}
    return Job(
        kind="prepare", round=0, contender=str(contender), engine="onnxruntime", precision=contender.precision,
        device=contender.device, options=contender.options, settings=settings, weight_files=[], out=str(out), threads=1,
        prompts=[], lengths={}, stop_ids=[], max_new_tokens=1, response_cap=1, repeats=1, allow_pickle=False,
        spawned_at=0.0, **values,
    )  # fmt: skip


def prepare(out: Path, here: Machine, it: Model, **changes: Any) -> None:
    OnnxRuntimeEngine(job_of(out, here, it, **changes)).prepare(str(out))


@pytest.mark.parametrize("trusted", [True, False])
def test_the_builder_fetches_nothing_and_runs_no_code_that_is_not_trusted(
    trusted: bool, builder: types.SimpleNamespace, tmp_path: Path, here: Machine, folder: Model
) -> None:
    prepare(tmp_path, here, folder, remote_code=trusted)
    assert (tmp_path / "model.onnx").read_text() == "/model as int8 for cpu, True"
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert builder.offline == "1"
    assert builder.words == ["hf_token=false", "block_size=32", f"hf_remote={str(trusted).lower()}"]


def test_what_the_builder_says_against_a_model_is_the_reason(
    builder: types.SimpleNamespace, tmp_path: Path, here: Machine, folder: Model
) -> None:
    builder.fails = NotImplementedError("The model is not currently supported.\nmore")
    with pytest.raises(RuntimeError) as error:
        prepare(tmp_path, here, folder)
    assert str(error.value) == (
        "ONNX Runtime GenAI's builder does not take LlamaForCausalLM: "
        "NotImplementedError: The model is not currently supported."
    )


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_running_out_of_memory_is_told_apart(
    error: Exception, builder: types.SimpleNamespace, tmp_path: Path, here: Machine, folder: Model
) -> None:
    builder.fails = error
    engine = OnnxRuntimeEngine(job_of(tmp_path, here, folder))
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        engine.prepare(str(tmp_path))
    assert engine.is_out_of_memory(caught.value)
    assert not engine.is_out_of_memory(RuntimeError("Invalid model"))


def test_a_yarn_that_would_come_out_wrong_is_refused(
    builder: types.SimpleNamespace, tmp_path: Path, here: Machine, folder: Model
) -> None:
    builder.config.rope_parameters = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM: .*YaRN.* would be wrong"):
        prepare(tmp_path, here, folder)


def test_what_the_builder_misses_is_set_right(
    builder: types.SimpleNamespace, tmp_path: Path, here: Machine, folder: Model
) -> None:
    config = builder.config
    prepare(tmp_path, here, folder)
    assert builder.LlamaModel().make_rope_init(config) == "Llama's"
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0}
    prepare(tmp_path, here, folder)
    assert builder.LlamaModel().make_rope_init(config) == "every kind"
    config.architectures, config.rope_parameters = ["Phi3ForCausalLM"], {"rope_type": "default"}
    config.sliding_window, config.num_hidden_layers = 2047, 3
    config.max_position_embeddings, config.original_max_position_embeddings = 2048, 4096
    prepare(tmp_path, here, folder)
    assert config.layer_types == ["sliding_attention"] * 3
    assert config.original_max_position_embeddings == 2048


def test_gemma_3_stretches_its_global_layers_alone(
    builder: types.SimpleNamespace, tmp_path: Path, here: Machine, folder: Model
) -> None:
    local, global_ = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "factor": 8.0}
    builder.config.architectures = ["Gemma3ForCausalLM"]
    builder.config.rope_parameters = {"sliding_attention": local, "full_attention": {**global_, "rope_theta": 1e6}}
    prepare(tmp_path, here, folder)
    assert builder.config.rope_local_base_freq == 1e4
    assert builder.config.rope_parameters == {**global_, "rope_theta": 1e6}
    gemma = builder.Gemma3Model()
    gemma.rope_local_theta, gemma.rope_attrs = 1e4, {"theta": 1e6, "rescale_factors": 8.0}
    assert gemma.make_rotary_embedding_caches_from_scratch() == 8.0
    gemma.rope_attrs["theta"] = 1e4
    assert gemma.make_rotary_embedding_caches_from_scratch() == 1.0


# ---- what it asks of GenAI, in whose place another is put


class Generator:
    """Says 5, 6, 7, ... and, like GenAI's, nothing but its own end (7) from there on, until it is given a token."""

    def __init__(self, model: Any, parameters: Any) -> None:
        self.given: list[list[int]] = []
        self.token, self.done = 4, False
        model.generators.append(self)
        self.options = parameters.options

    def append_tokens(self, ids: Any) -> None:
        self.given.append([int(i) for i in ids])
        self.done = False

    def generate_next_token(self) -> None:
        self.token += not self.done
        self.done = self.token == 7

    def get_next_tokens(self) -> Any:
        return np.array([self.token], dtype=np.int32)

    def is_done(self) -> bool:
        return self.done

    def get_output(self, name: str) -> Any:
        return np.zeros((1, len(self.given[-1]), 272), dtype=np.float16)


class Parameters:
    def __init__(self, model: Any) -> None:
        self.options: dict[str, Any] = {}

    def set_search_options(self, **options: Any) -> None:
        self.options |= options


@pytest.fixture
def engine(tmp_path: Path, here: Machine, folder: Model) -> OnnxRuntimeEngine:
    made = OnnxRuntimeEngine(job_of(tmp_path, here, folder, prepared=str(tmp_path)))
    made.genai = types.SimpleNamespace(Generator=Generator, GeneratorParams=Parameters)
    made.numpy, made.model = np, types.SimpleNamespace(generators=[])
    return made


def test_the_models_own_end_does_not_end_a_forced_length(engine: OnnxRuntimeEngine) -> None:
    seen: list[int] = []
    assert engine.generate([1, 2], 5, [], seen.append) == [5, 6, 7, 8, 9] == seen
    (used,) = engine.model.generators
    assert used.given == [[1, 2], [7]]
    assert (used.options["max_length"], used.options["do_sample"]) == (7, False)
    assert engine.generate([1, 2], 5, [6], seen.append) == [5, 6]
    assert engine.generate([1, 2], 3, [7], seen.append) == [5, 6, 7]
    assert len(engine.model.generators) == 3  # each with an empty cache of its own


def test_answers_are_drawn_as_told(engine: OnnxRuntimeEngine) -> None:
    engine.generate([1], 1, [], print, Sampling(temperature=0.7, top_k=9, top_p=0.8, repetition_penalty=1.1, seed=3))
    used = engine.model.generators[0].options
    assert {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.1,
            "random_seed": 3}.items() <= used.items()  # fmt: skip


def test_scores_come_in_pieces_of_float32(engine: OnnxRuntimeEngine) -> None:
    engine.rows = 3
    found = list(engine.score(range(8)))
    assert [(start, rows.shape, rows.dtype.name) for start, rows in found] == [
        (0, (3, 272), "float32"),
        (3, (3, 272), "float32"),
        (6, (2, 272), "float32"),
    ]
    assert engine.model.generators[0].given == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize(("vocabulary", "rows"), [(272, 128), (262_208, 61), (10**8, 1)])
def test_a_piece_is_never_large(vocabulary: int, rows: int, engine: OnnxRuntimeEngine, tmp_path: Path) -> None:
    laid: list[dict[str, Any]] = []
    config = types.SimpleNamespace(overlay=lambda text: laid.append(json.loads(text)))
    engine.genai = types.SimpleNamespace(Config=lambda path: config, Model=lambda config: "the model")
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"vocab_size": vocabulary}}))
    engine.load()
    assert (engine.model, engine.rows) == ("the model", rows)
    assert laid == [{"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}]


def test_a_tokenizer_that_genai_does_not_know_is_none_at_all(engine: OnnxRuntimeEngine) -> None:
    def refuse(model: Any) -> None:
        raise RuntimeError("unknown tokenizer")

    engine.genai.Tokenizer = refuse
    assert engine.tokenize("hello") is None
    assert engine.render([{"role": "user", "content": "hello"}]) is None


# ---- real models, in its own environment

LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "mistral": ("mistral", {"sliding_window": 64}),
    "phi3": ("phi3", {"sliding_window": 64}),
    "llama, stretched": ("llama", {"rope_parameters": LINEAR}),
    "gemma3, stretched": (
        "gemma3_text",
        {
            "head_dim": 64,
            "sliding_window": 64,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
class TestArchitectures:
    pytestmark = own_environment

    def test_it_is_converted_right(self, kind: str, tmp_path: Path) -> None:
        model_type, values = ARCHITECTURES[kind]
        folder = random_model(tmp_path / "model", model_type, **values)
        kl, same = agreement(folder, "onnxruntime:fp32@cpu", tmp_path)
        assert kl < 1e-5
        assert same > 0.99


class TestModels:
    pytestmark = own_environment

    def test_every_precision_loses_as_much_as_its_bits_say(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "llama", dtype="bfloat16")
        names = ("fp32@cpu", "int8@cpu", "int4@cpu+mixed", "int4@cpu")
        found = {name: agreement(folder, f"onnxruntime:{name}", tmp_path / name)[0] for name in names}
        assert found["fp32@cpu"] < 1e-6
        assert found["int8@cpu"] < 0.1 < found["int4@cpu"]
        assert sorted(found.values()) == list(found.values()), found

    def test_what_was_prepared_is_as_large_as_was_said(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "llama")
        for name in ("int4@cpu", "int8@cpu", "fp32@cpu"):
            plan = plan_of(str(folder), f"onnxruntime:{name}", rounds=1, quality=False)
            result = start(plan, tmp_path / name, Silent()).contenders[0]
            assert (result.status, result.reason) == ("ok", None)
            weights = cache.prepared(plan.model.fingerprint, plan.entries[0].recipe or "") / "model.onnx.data"
            assert weights.stat().st_size == pytest.approx(result.weight_bytes, rel=0.02)
            assert result.effective["attention"] == "GroupQueryAttention"

    def test_a_forced_length_goes_on_after_the_models_own_end(self, tmp_path: Path) -> None:
        plan = plan_of("demo-base", "onnxruntime:fp32@cpu", rounds=1, quality=False, prompts=[SHORT], max_new_tokens=64)
        result = start(plan, tmp_path / "out", Silent()).contenders[0]
        assert result.responses[0].finish == "stop"
        forced = next(e["ids"] for e in read(tmp_path / "out") if e["event"] == "call" and e["call"] == "first")
        end = len(result.responses[0].ids)
        assert forced[:end] == result.responses[0].ids
        assert forced[end - 1] in plan.workload.stop_ids
        assert len(set(forced[end:])) > 3
        prompt = plan.workload.rendered[0].ids
        (rows,) = logits_of(plan, [[*prompt, *forced]], tmp_path)
        assert rows[len(prompt) - 1 :].argmax(axis=1).tolist() == forced

    def test_a_gguf_file_is_unpacked_first(self, tmp_path: Path) -> None:
        packed = demo.gguf_file(cache.root(), print)
        plan = plan_of(str(packed), "onnxruntime:fp32@cpu", rounds=1, quality=False, prompts=[SHORT])
        result = start(plan, tmp_path / "out", Silent()).contenders[0]
        assert (result.status, result.reason) == ("ok", None)
        assert result.responses[0].text.startswith("Hello")
        prepared = cache.prepared(plan.model.fingerprint, plan.entries[0].recipe or "")
        assert not [file.name for file in prepared.iterdir() if "safetensors" in file.name or file.is_dir()]

    def test_a_model_that_the_builder_refuses_fails_with_its_reason(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "olmo2")
        plan = plan_of(str(folder), "onnxruntime:int4@cpu", rounds=1, quality=False)
        result = start(plan, tmp_path / "out", Silent()).contenders[0]
        assert (result.status, result.phase) == ("failed", "prepare")
        assert "builder does not take Olmo2ForCausalLM: NotImplementedError" in (result.reason or "")
        assert not cache.prepared(plan.model.fingerprint, plan.entries[0].recipe or "").exists()

    def test_answers_are_drawn_by_the_seed(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "llama")
        settings = {"do_sample": True, "temperature": 1.5, "top_k": 200, "top_p": 0.98, "repetition_penalty": 1.1}
        (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 2}))
        options = {"rounds": 1, "quality": False, "prompts": [SHORT], "sampling": "model"}
        plan = plan_of(str(folder), "onnxruntime:int8@cpu", **options)
        first, again = (start(plan, tmp_path / name, Silent()).contenders[0] for name in ("first", "again"))
        assert (first.status, first.reason) == ("ok", None)
        answers = [tuple(response.ids) for response in first.responses]
        assert len(set(answers)) == len(answers) >= 3
        assert answers == [tuple(response.ids) for response in again.responses]
