"""The transformers engine on real (small, random) models of several architectures, through the whole pipeline."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

import weighin
from weighin import intake, worker
from weighin.compare import job_of
from weighin.errors import BadInput
from weighin.schedule import Unit

pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024, "tie_word_embeddings": False}
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 32},
    "phi3": {"pad_token_id": 0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 32},
}


def save(folder: Path, config, tokenizer_folder: Path, seed: int = 0) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    copy_tokenizer(tokenizer_folder, folder)
    return folder


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            (target / name).write_bytes((source / name).read_bytes())


def compare(folder: Path, out: Path, *contenders: str, **options):
    arguments = {"rounds": 1, "max_new_tokens": 8, "response_tokens": 16, "prompt_tokens": (64,), "quality": False}
    arguments |= options
    return weighin.compare(str(folder), contenders, out=out, **arguments)


def in_process(folder: Path, contender: str, **options):
    """A contender's jobs run here, by the worker's own code, without paying for a process each."""
    arguments = {"max_new_tokens": 8, "response_tokens": 16, "prompt_tokens": (64,), "rounds": 1, **options}
    plan = intake.make_plan(intake.Request(model=str(folder), contenders=(contender,), **arguments), say=print)
    assert plan.entries[0].status == "ok", plan.entries[0].reason
    events: list[dict] = []
    for job in ("speed", "responses"):
        worker.run(job_of(Unit(contender, 1, job), plan, 1), events.append)
    assert not [e for e in events if e["event"] == "failed"]
    return plan, events


def run_here(snippet: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(snippet, {})
    return said.getvalue()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_architecture_runs_and_its_snippet_gives_the_same_answer(model_type, tmp_path, tiny_model):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.for_model(model_type, **{**SMALL, **ARCHITECTURES[model_type]})
    folder = save(tmp_path / model_type, config, tiny_model)
    plan, events = in_process(folder, "transformers:fp32@cpu")
    # what a plain greedy loop over the model gives
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(plan.workload.rendered[0].ids)
    forced = next(e for e in events if e["event"] == "call" and e["call"] == "first")
    with torch.no_grad():
        for expected in forced["ids"]:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            assert ids[-1] == expected
    # what the snippet prints
    response = next(e for e in events if e["event"] == "response")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert run_here(plan.entries[0].snippet) == tokenizer.decode(response["ids"], skip_special_tokens=True) + "\n"
    loaded = next(e["value"] for e in events if e.get("key") == "loaded_bytes")
    assert loaded == pytest.approx(plan.model.parameters * 4, rel=0.01)


def test_the_whole_pipeline_on_every_kind_of_figure(tmp_path, tiny_model):
    from transformers import AutoConfig

    folder = save(tmp_path / "llama", AutoConfig.for_model("llama", **SMALL), tiny_model)
    comparison = compare(folder, tmp_path / "out", "transformers:bf16@cpu")
    result = comparison.contenders[0]
    assert (result.status, result.reason) == ("ok", None)
    assert result.effective["dtype"] == "bfloat16"
    assert result.dependencies.keys() >= {"torch", "transformers", "accelerate"}
    for key in ("import_seconds", "load_seconds", "answer_seconds", "decode_tokens_per_second", "peak_ram_bytes"):
        assert result.value(key) > 0, key
    assert result.value("prefill_tokens_per_second@64") > 0
    assert result.value("peak_vram_bytes") is None
    done = subprocess.run([sys.executable, "-c", result.snippet], capture_output=True, text=True, check=True)
    assert done.stdout == result.responses[0].whole + "\n"


def test_every_cpu_precision_of_the_engine_runs(tmp_path, tiny_model):
    from transformers import AutoConfig

    folder = save(tmp_path / "llama", AutoConfig.for_model("llama", **SMALL), tiny_model)
    loaded, dtypes = {}, {}
    for precision in ("fp32@cpu", "bf16@cpu", "fp16@cpu", "nf4@cpu", "fp4@cpu", "int8@cpu",
                      "nf4@cpu+compute=fp32+double", "fp32@auto"):  # fmt: skip
        plan, events = in_process(folder, f"transformers:{precision}", prompt_tokens=())
        loaded[precision] = next(e["value"] for e in events if e.get("key") == "loaded_bytes")
        dtypes[precision] = next(e["effective"]["dtype"] for e in events if e["event"] == "effective")
        assert dtypes[precision] == plan.entries[0].settings["dtype"]
    assert dtypes["fp16@cpu"] == "float16"
    assert dtypes["nf4@cpu+compute=fp32+double"] == "float32"
    assert loaded["bf16@cpu"] == pytest.approx(loaded["fp32@cpu"] / 2, rel=0.01)
    assert loaded["nf4@cpu"] < loaded["int8@cpu"] < loaded["bf16@cpu"]


def test_an_already_quantized_folder_runs_as_it_is(tmp_path, tiny_model):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    folder = save(tmp_path / "llama", AutoConfig.for_model("llama", **SMALL), tiny_model)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    quantized = tmp_path / "quantized"
    model.save_pretrained(quantized)
    copy_tokenizer(tiny_model, quantized)
    plan, _ = in_process(quantized, "transformers:own@cpu", prompt_tokens=())
    assert "bitsandbytes" in plan.model.quantization
    default = intake.make_plan(intake.Request(model=str(quantized)), say=print)
    assert [(e.name, e.status) for e in default.entries] == [("transformers:own@cpu", "ok")]
    named = intake.make_plan(intake.Request(model=str(quantized), contenders=("transformers:bf16@cpu",)), say=print)
    assert named.entries[0].status == "cannot_run"
    assert "already quantized" in named.entries[0].reason


def test_the_text_side_of_a_multimodal_checkpoint(tmp_path, tiny_model):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**SMALL, "head_dim": 16, "sliding_window": 32, "vocab_size": 520, "tie_word_embeddings": True}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=519,
        boi_token_index=518,
        eoi_token_index=517,
    )
    folder = tmp_path / "gemma3"
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    copy_tokenizer(tiny_model, folder)
    plan, events = in_process(folder, "transformers:fp32@cpu", prompt_tokens=())
    assert plan.model.multimodal
    assert plan.model.text_parameters < plan.model.parameters
    assert [e for e in events if e["event"] == "response"]


def test_sharded_folders_load(tmp_path, tiny_model):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL)).save_pretrained(
        folder, max_shard_size="100KB"
    )
    copy_tokenizer(tiny_model, folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    _, events = in_process(folder, "transformers:fp32@cpu", prompt_tokens=())
    assert [e for e in events if e["event"] == "response"]


def test_weights_that_do_not_match_the_config_fail_with_the_engines_reason(tmp_path, tiny_model):
    import json

    from transformers import AutoConfig

    folder = save(tmp_path / "llama", AutoConfig.for_model("llama", **SMALL), tiny_model)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 96
    (folder / "config.json").write_text(json.dumps(config))
    result = compare(folder, tmp_path / "out", "transformers:fp32@cpu", prompt_tokens=()).contenders[0]
    assert (result.status, result.phase) == ("failed", "load")
    assert result.value("decode_tokens_per_second") is None
    assert "size mismatch" in result.reason.lower() or "mismatch" in result.reason.lower()


def test_remote_code_is_refused_before_anything_runs(tmp_path, tiny_model):
    import json

    canary = tmp_path / "canary"
    folder = tmp_path / "hostile"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    with pytest.raises(BadInput, match=r"modeling_evil\.Evil"):
        compare(folder, tmp_path / "out", "transformers:fp32@cpu")
    assert not canary.exists()
    assert not (tmp_path / "out").exists()
    ignored = compare(folder, tmp_path / "out", "transformers:fp32@cpu", prompt_tokens=(), remote_code="ignore")
    assert ignored.contenders[0].status in ("ok", "failed")  # whether or not its weights load, its code must not run
    assert not canary.exists()


# ---- quality


def engine_for(folder: Path, contender: str = "transformers:fp32@cpu", **changes):
    """The engine, loaded here, of a job of the quality pass."""
    import dataclasses

    from weighin.engines.transformers import TransformersEngine

    request = intake.Request(model=str(folder), contenders=(contender,), rounds=1, prompt_tokens=(), max_new_tokens=8)
    plan = intake.make_plan(request, say=print)
    job = dataclasses.replace(job_of(Unit(contender, 1, "score"), plan, 1), **changes)
    engine = TransformersEngine(job)
    engine.import_packages()
    engine.load()
    return engine


def rows_of(engine, documents):
    import numpy as np

    return {number: np.concatenate([logits for _, logits in chunks]) for number, chunks in engine.score_all(documents)}


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
def test_a_reference_scored_from_disk_is_the_one_in_memory(model_type, tmp_path, tiny_model):
    import numpy as np
    import torch
    from transformers import AutoConfig

    # gemma2 caps its logits after the head, which must not be lost
    extra = {"gemma2": {"head_dim": 16, "final_logit_softcapping": 3.0}, "qwen3": {"head_dim": 16}}.get(model_type, {})
    config = AutoConfig.for_model(model_type, **{**SMALL, "num_hidden_layers": 6, **extra})
    folder = save(tmp_path / model_type, config, tiny_model)
    documents = [[5, 6, 7, 8] * 50, [9, 10, 11], [20, 3, 40, 5] * 20]
    whole = rows_of(engine_for(folder), documents)
    half = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    engine = engine_for(folder, from_disk=True, memory_bytes=half)
    assert "disk" in engine.effective()["devices"]
    found = rows_of(engine, documents)
    engine.close()
    for number, ids in enumerate(documents):
        assert found[number].shape == (len(ids), 512)
        assert np.abs(found[number] - whole[number]).max() < 1e-4
    assert torch.get_num_threads() > 0


def test_scoring_agrees_with_one_forward_pass_and_with_generation(tmp_path, tiny_model):
    import numpy as np
    import torch

    engine = engine_for(tiny_model)
    ids = [0, *range(10, 200), *range(20, 120)]
    scored = np.concatenate([logits for _, logits in engine.score(ids)])
    with torch.inference_mode():
        plain = engine.model(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert np.abs(scored - plain).max() < 1e-4
    new = engine.generate(ids, 1, [], lambda _: None)
    assert new == [int(scored[-1].argmax())]


def test_drawing_is_repeatable_by_its_seed_and_really_draws(tiny_model):
    from weighin.engines import Sampling

    engine = engine_for(tiny_model)
    draws = [engine.generate([0, 5], 24, [], lambda _: None, Sampling(seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert engine.generate([0, 5], 24, [], lambda _: None) == engine.generate([0, 5], 24, [], lambda _: None)


def test_quality_of_real_contenders(tmp_path, tiny_model):
    """An untouched copy is indistinguishable; one whose layers were damaged is not."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", **{**SMALL, "initializer_range": 0.5})
    folder = save(tmp_path / "whole", config, tiny_model)
    found = compare(folder, tmp_path / "a", "transformers:fp32@cpu", "transformers:bf16@cpu", quality=True)
    floor, close = (c.fidelity for c in found.contenders)
    assert floor.headline.kl.value < 1e-6
    assert floor.headline.kl.value < close.headline.kl.value
    assert close.headline.reference_perplexity.value > 1

    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    weights = load_file(damaged / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    torch.manual_seed(0)
    weights[name] = weights[name].flatten()[torch.randperm(weights[name].numel())].reshape(weights[name].shape)
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    plan = intake.make_plan(
        intake.Request(model=str(folder), contenders=("transformers:fp32@cpu",), rounds=1), say=print
    )
    documents = [d.ids for d in plan.workload.documents[:6]]
    import numpy as np

    from weighin.fidelity import Scored, judge
    from weighin.probes.likelihood import divergence
    from weighin.reference_rows import Block, statistics

    def word(one, other):
        mine, theirs = rows_of(engine_for(one), documents), rows_of(engine_for(other), documents)
        scored = []
        for number, ids in enumerate(documents):
            targets = np.array([*ids[1:], 0])
            stats = statistics(theirs[number], targets)
            found = divergence(mine[number].copy(), targets, Block(theirs[number].copy(), None, stats))
            reference_nll = list(stats["normalizer"] - stats["target_logit"])
            same = [int(s) for s in found["same"]]
            scored.append(
                Scored(
                    stratum="passages",
                    name=str(number),
                    kl=list(found["kl"]),
                    nll=list(found["nll"]),
                    same=same,
                    reference_nll=reference_nll,
                )
            )
        return judge(scored).word

    assert word(folder, folder) == "indistinguishable"
    assert word(damaged, folder) in ("lower", "broken")
