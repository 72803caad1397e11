"""The transformers engine on real (small, random) models of several architectures, through the whole pipeline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import weighin
from weighin.errors import BadInput

pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 1024, "tie_word_embeddings": False}
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
    arguments = {"rounds": 1, "max_new_tokens": 8, "response_tokens": 16, "prompt_tokens": (64,), **options}
    return weighin.compare(str(folder), contenders, out=out, **arguments)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_architecture_runs_and_its_snippet_gives_the_reports_answer(model_type, tmp_path, tiny_model):
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **{**SMALL, **ARCHITECTURES[model_type]})
    folder = save(tmp_path / model_type, config, tiny_model)
    comparison = compare(folder, tmp_path / "out", "transformers:fp32@cpu")
    result = comparison.contenders[0]
    assert (result.status, result.reason) == ("ok", None)
    assert result.effective["dtype"] == "float32"
    assert result.value("decode_tokens_per_second") > 0
    assert result.value("peak_ram_bytes") > 50e6
    assert result.value("loaded_bytes") == pytest.approx(comparison.model.parameters * 4, rel=0.01)
    done = subprocess.run([sys.executable, "-c", result.snippet], capture_output=True, text=True, check=True)
    assert done.stdout == result.responses[0].whole + "\n"


def test_the_answer_is_that_of_a_plain_greedy_loop(tmp_path, tiny_model):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = save(tmp_path / "llama", AutoConfig.for_model("llama", **SMALL), tiny_model)
    comparison = compare(folder, tmp_path / "out", "transformers:fp32@cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(comparison.workload.rendered[0].ids)
    forced = next(c for c in comparison.contenders[0].calls if c.call == "first")
    with torch.no_grad():
        for expected in forced.ids:
            token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
            assert token == expected
            ids.append(token)


def test_every_cpu_precision_of_the_engine_runs(tmp_path, tiny_model):
    from transformers import AutoConfig

    folder = save(tmp_path / "llama", AutoConfig.for_model("llama", **SMALL), tiny_model)
    names = [f"transformers:{p}@cpu" for p in ("fp32", "bf16", "fp16", "nf4", "fp4", "int8")]
    names += ["transformers:nf4@cpu+compute=fp32+double", "transformers:fp32@auto"]
    comparison = compare(folder, tmp_path / "out", *names, prompt_tokens=())
    assert {c.name: c.status for c in comparison.contenders} == dict.fromkeys(names, "ok")
    dtypes = {c.name: c.effective["dtype"] for c in comparison.contenders}
    assert dtypes["transformers:fp16@cpu"] == "float16"
    assert dtypes["transformers:nf4@cpu+compute=fp32+double"] == "float32"
    loaded = {c.name: c.value("loaded_bytes") for c in comparison.contenders}
    assert loaded["transformers:bf16@cpu"] == pytest.approx(loaded["transformers:fp32@cpu"] / 2, rel=0.01)
    assert loaded["transformers:nf4@cpu"] < loaded["transformers:int8@cpu"] < loaded["transformers:bf16@cpu"]
    assert comparison.reference == "transformers:fp32@cpu"


def test_an_already_quantized_folder_runs_as_it_is(tmp_path, tiny_model):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    folder = save(tmp_path / "llama", AutoConfig.for_model("llama", **SMALL), tiny_model)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    quantized = tmp_path / "quantized"
    model.save_pretrained(quantized)
    copy_tokenizer(tiny_model, quantized)
    comparison = compare(quantized, tmp_path / "out", prompt_tokens=())
    assert "bitsandbytes" in comparison.model.quantization
    assert [(c.name, c.status) for c in comparison.contenders] == [("transformers:own@cpu", "ok")]
    named = compare(quantized, tmp_path / "out2", "transformers:bf16@cpu")
    assert named.contenders[0].status == "cannot_run"
    assert "already quantized" in named.contenders[0].reason


def test_the_text_side_of_a_multimodal_checkpoint(tmp_path, tiny_model):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**SMALL, "head_dim": 16, "sliding_window": 32, "vocab_size": 80, "tie_word_embeddings": True}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=79,
        boi_token_index=78,
        eoi_token_index=77,
    )
    folder = tmp_path / "gemma3"
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    copy_tokenizer(tiny_model, folder)
    comparison = compare(folder, tmp_path / "out", "transformers:fp32@cpu", prompt_tokens=())
    assert comparison.model.multimodal
    assert comparison.model.text_parameters < comparison.model.parameters
    result = comparison.contenders[0]
    assert (result.status, result.reason) == ("ok", None)


def test_sharded_folders_load(tmp_path, tiny_model):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL)).save_pretrained(
        folder, max_shard_size="100KB"
    )
    copy_tokenizer(tiny_model, folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    result = compare(folder, tmp_path / "out", "transformers:fp32@cpu", prompt_tokens=()).contenders[0]
    assert result.status == "ok"


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
    assert ignored.contenders[0].status in ("ok", "failed")  # its tiny weights may not load; its code must not run
    assert not canary.exists()
