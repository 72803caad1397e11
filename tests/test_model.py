"""What a person sees when they point weighin at a model, a damaged model, or a hostile one."""

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighin import gguf_header, safetensors_header
from weighin.errors import BadInput
from weighin.model import Model, inspect

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}
WEIGHTS = {"model.embed_tokens.weight": ("BF16", (10, 8)), "model.norm.weight": ("BF16", (8,))}


def safetensors(tensors: dict[str, tuple[str, tuple[int, ...]]], fill: int = 1, **changes: Any) -> bytes:
    """A safetensors file made by hand."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = WIDTH[dtype]
        for dimension in shape:
            size *= dimension
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    table.update(changes)
    header = json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + bytes([fill]) * position


def folder(path: Path, config: dict[str, Any] | None = None, weights: bytes | None = None, **files: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (path / "model.safetensors").write_bytes(safetensors(WEIGHTS) if weights is None else weights)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(BadInput) as error:
        inspect(str(path), path, **options)
    return str(error.value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def gguf(
    *, tensors: tuple[tuple[str, tuple[int, ...], int, int], ...] | None = None, keys: list[bytes] | None = None
) -> bytes:
    """A GGUF file made by hand: `tensors` are (name, dimensions, type, bytes)."""
    if tensors is None:
        tensors = (("token_embd.weight", (32, 10), 3, 200), ("blk.0.attn_norm.weight", (32,), 0, 128))
    if keys is None:
        keys = [
            text("general.architecture") + struct.pack("<I", 8) + text("llama"),
            number("llama.block_count", 2),
            number("llama.embedding_length", 32),
            number("llama.attention.head_count", 4),
            number("llama.context_length", 64),
            text("llama.attention.head_count_kv") + struct.pack("<IIQ3I", 9, 4, 3, 0, 2, 0),
            text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 10) + b"".join(text(f"t{i}") for i in range(10)),
            text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 20_000) + bytes(80_000),
            number("tokenizer.ggml.eos_token_id", 2),
            number("tokenizer.ggml.bos_token_id", 1),
            text("tokenizer.chat_template") + struct.pack("<I", 8) + text("{{ messages }}"),
        ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    data = b""
    for name, shape, kind, size in tensors:
        data += bytes(-len(data) % 32)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += b"\x07" * size
    return head + bytes(-len(head) % 32) + data


def gguf_at(path: Path, **options: Any) -> Path:
    path.write_bytes(gguf(**options))
    return path


# --- a good folder


def test_a_folder_is_described_from_its_headers(tmp_path: Path) -> None:
    path = folder(
        tmp_path / "tiny", generation_config={"eos_token_id": [7, 2]}, tokenizer_config={"chat_template": "x"}
    )
    model = inspect(str(path), path, notes=("said before",))
    assert (model.name, model.kind, model.path) == ("tiny", "folder", str(path))
    assert (model.parameters, model.weight_bytes, model.dtypes) == (88, 176, {"BF16": 176})
    assert (model.dtype, model.quantization, model.multimodal) == ("bf16", None, False)
    assert (model.eos_ids, model.bos_id, model.chat_template) == ((7, 2), 1, True)
    assert (model.shape.kv_heads, model.shape.head_dim, model.shape.tied) == (2, 2, True)
    assert model.notes == ("said before",)


def test_gpt2_names_are_understood(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 3, "n_head": 2}
    path = folder(tmp_path / "m", config | {"n_positions": 64, "vocab_size": 10, "n_inner": None})
    shape = inspect("gpt2", path).shape
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.max_positions) == (3, 2, 2, 4, 64)


def test_a_head_of_its_own_means_not_tied(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", weights=safetensors(WEIGHTS | {"lm_head.weight": ("BF16", (10, 8))}))
    assert not inspect("m", path).shape.tied


@pytest.mark.parametrize(("use", "seen"), [(True, 32), (False, None)])
def test_a_sliding_window_counts_unless_switched_off(tmp_path: Path, use: bool, seen: int | None) -> None:
    path = folder(tmp_path / "m", CONFIG | {"sliding_window": 32, "use_sliding_window": use})
    assert inspect("m", path).shape.sliding_window == seen


def test_multimodal_text_side_is_told_apart_and_class_defaults_fill_what_the_config_leaves_out(tmp_path: Path) -> None:
    # as google/gemma-3-4b-it is saved: no heads, no vocabulary
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
                        "intermediate_size": 10240, "sliding_window": 1024},
    }  # fmt: skip
    weights = {
        "language_model.model.embed_tokens.weight": ("BF16", (20, 4)),
        "vision_tower.vision_model.encoder.weight": ("BF16", (5, 4)),
        "multi_modal_projector.weight": ("BF16", (2, 2)),
    }
    model = inspect("org/gemma", folder(tmp_path / "m", config, safetensors(weights)))
    assert model.multimodal
    assert model.name == "org/gemma"
    assert (model.parameters, model.text_parameters, model.text_weight_bytes) == (104, 80, 160)
    assert (model.shape.heads, model.shape.kv_heads, model.shape.head_dim) == (8, 4, 256)
    assert (model.shape.vocabulary, model.shape.sliding_window, model.shape.tied) == (20, 1024, True)
    assert model.eos_ids == (1, 106)


@pytest.mark.parametrize(
    ("setting", "tensors", "parameters", "words", "dtype"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            {"a.weight": ("U8", (32, 1)), "a.weight.absmax": ("F32", (1,)), "a.weight.quant_map": ("F32", (16,)),
             "a.weight.quant_state.bitsandbytes__nf4": ("U8", (80,)), "n.weight": ("BF16", (8,))},
            72, "bitsandbytes nf4", "nf4",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            {"a.weight": ("I8", (8, 8)), "a.SCB": ("F32", (8,))}, 64, "bitsandbytes int8", "int8",
        ),
        (
            {"quant_method": "gptq", "bits": 4},
            {"a.qweight": ("I32", (4, 8)), "a.qzeros": ("I32", (1, 1)), "a.scales": ("F16", (1, 8)),
             "a.g_idx": ("I32", (32,))},
            256, "gptq 4-bit", "int4",
        ),
        (
            {"quant_method": "awq", "bits": 4}, {"a.qweight": ("I32", (4, 8)), "a.scales": ("F16", (8,))},
            256, "awq 4-bit", "int4",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized",
             "config_groups": {"g": {"weights": {"num_bits": 8}}}},
            {"a.weight_packed": ("I32", (4, 8)), "a.weight_shape": ("I64", (2,))}, 128, "compressed-tensors", "int8",
        ),
        (
            {"quant_method": "fp8"}, {"a.weight": ("F8_E4M3", (8, 8)), "a.weight_scale_inv": ("F32", (1, 1))},
            64, "fp8", "fp8",
        ),
    ],
)  # fmt: skip
def test_a_quantized_checkpoint_counts_unpacked(
    tmp_path: Path, setting: dict[str, Any], tensors: Any, parameters: int, words: str, dtype: str
) -> None:
    model = inspect("m", folder(tmp_path / "m", CONFIG | {"quantization_config": setting}, safetensors(tensors)))
    assert (model.parameters, model.quantization, model.dtype) == (parameters, words, dtype)
    assert any(words in note for note in model.notes)


def test_shards_are_read_together(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    assert inspect("m", path).parameters == 88


def sharded(
    path: Path, names: tuple[str, str] = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
) -> Path:
    folder(path)
    (path / "model.safetensors").unlink()
    for name, tensor in zip(
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), WEIGHTS, strict=True
    ):
        (path / name).write_bytes(safetensors({tensor: WEIGHTS[tensor]}))
    index = {"weight_map": dict(zip(WEIGHTS, names, strict=True))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_a_second_copy_of_the_weights_is_not_counted(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "consolidated.safetensors").write_bytes(safetensors(WEIGHTS))
    assert inspect("m", path).parameters == 88


def test_the_fingerprint_follows_the_content_only(tmp_path: Path) -> None:
    one = folder(tmp_path / "one")
    two = tmp_path / "elsewhere" / "two"
    shutil.copytree(one, two)
    os.utime(two / "model.safetensors", (1, 1))
    first = inspect("one", one).fingerprint
    assert inspect("two", two).fingerprint == first
    (two / "tokenizer.json").write_text("{}")
    assert inspect("two", two).fingerprint != first
    (one / "model.safetensors").write_bytes(safetensors(WEIGHTS, fill=2))
    assert inspect("one", one).fingerprint != first


def test_a_model_can_be_saved_and_read_back(tmp_path: Path) -> None:
    import msgspec

    model = inspect("m", folder(tmp_path / "m"))
    assert msgspec.json.decode(msgspec.json.encode(model), type=Model) == model


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, weighin.model, weighin.hub, weighin.demo;"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


# --- a folder that cannot be used


def test_a_path_that_is_not_there_names_what_is_near(tmp_path: Path) -> None:
    folder(tmp_path / "my-model")
    message = refused(tmp_path / "my-modle")
    assert "does not exist" in message
    assert str(tmp_path / "my-model") in message


@pytest.mark.parametrize("value", [-1, 0, 2**63, True, "8", 8.0, float("nan"), [], {}, [8, -1]])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_key_value_heads"]
)
def test_a_config_value_that_makes_no_sense_is_named(tmp_path: Path, key: str, value: Any) -> None:
    message = refused(folder(tmp_path / "m", CONFIG | {key: value}))
    assert key in message


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_config_key_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    assert key in refused(folder(tmp_path / "m", {name: value for name, value in CONFIG.items() if name != key}))


@pytest.mark.parametrize("value", [None, "LlamaForCausalLM", [], [3], ["\x1b[2J"]])
def test_no_architecture(tmp_path: Path, value: Any) -> None:
    message = refused(folder(tmp_path / "m", CONFIG | {"architectures": value}))
    assert "no architecture" in message
    assert "\x1b" not in message


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000])
def test_a_config_that_is_not_one(tmp_path: Path, content: bytes) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").write_bytes(content)
    assert "config.json" in refused(path)


def test_no_config(tmp_path: Path) -> None:
    assert "no config.json" in refused(tmp_path)
    gguf_at(tmp_path / "a.gguf")
    assert "a.gguf" in refused(tmp_path)


def test_no_weights_and_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    assert "give the folder" in refused(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    (path / "training_args.bin").write_bytes(b"x")
    assert "no weights" in refused(path)


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    whole = safetensors(WEIGHTS)
    path = folder(tmp_path / "m", weights=whole[:-10])
    message = refused(path)
    assert "model.safetensors" in message
    assert f"{len(whole):,}" in message
    assert f"{len(whole) - 10:,}" in message
    (path / "model.safetensors").write_bytes(whole[:30])
    assert "cut short" in refused(path)


def test_a_git_lfs_pointer_is_recognized(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    assert "git lfs pull" in refused(folder(tmp_path / "m", weights=pointer))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [9] * 100, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},  # overlaps
        {"dtype": "F32", "shape": [2], "data_offsets": [1000, 1008]},  # a gap
        {"dtype": "F32", "shape": [True], "data_offsets": [176, 180]},
        {"dtype": "X1", "shape": [1], "data_offsets": [176, 180]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [176, 180]},
        {"dtype": "F32", "shape": [1], "data_offsets": [180, 176]},
        {"dtype": "F32"},
        [],
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, entry: Any) -> None:
    message = refused(folder(tmp_path / "m", weights=safetensors(WEIGHTS, bad=entry)))
    assert "'bad'" in message or "overlaps" in message


def test_missing_shards_are_named(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    (path / "model-00002-of-00002.safetensors").unlink()
    message = refused(path)
    assert "model-00002-of-00002.safetensors" in message
    assert "1 of the 2" in message


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    shutil.copy(path / "model-00001-of-00002.safetensors", path / "model-00002-of-00002.safetensors")
    assert "model.embed_tokens.weight" in refused(path)


@pytest.mark.parametrize(
    "name",
    [
        "../out.safetensors",
        "/etc/out.safetensors",
        "a/../../out.safetensors",
        "..\\out.safetensors",
        "link.safetensors",
        "\0.safetensors",
        3,
    ],
)
def test_an_index_may_not_lead_out_of_the_folder(tmp_path: Path, name: Any) -> None:
    (tmp_path / "out.safetensors").write_bytes(safetensors({"x": ("F32", (1,))}))
    path = sharded(tmp_path / "m", names=(name, "model-00002-of-00002.safetensors"))
    (path / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    message = refused(path)
    assert "leads out" in message or "not a .safetensors file" in message


def test_links_of_the_hugging_face_cache_are_allowed(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    path = sharded(repo / "snapshots" / "0123")
    (repo / "blobs").mkdir()
    for file in sorted(path.iterdir()):
        file.rename(repo / "blobs" / f"blob-{file.name}")
        file.symlink_to(f"../../blobs/blob-{file.name}")
    model = inspect(str(path), path)
    assert (model.parameters, model.name) == (88, "org/name")


def test_pickles_are_refused_unless_allowed(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", CONFIG | {"dtype": "float16"})
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(bytes(200))
    message = refused(path)
    assert "--allow-pickle" in message
    assert "pytorch_model.bin" in message
    model = inspect("m", path, allow_pickle=True)
    assert (model.parameters, model.dtype) == (100, "fp16")
    assert "estimated" in model.notes[0]


def test_an_adapter_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors(WEIGHTS))
    message = refused(tmp_path)
    assert "LoRA" in message
    assert "merge" in message


def test_what_is_not_a_regular_file_does_not_hang(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "regular file" in refused(path)
    assert "regular file" in refused(tmp_path / "pipe.gguf")


# --- code that comes with a model


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        ("config", {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}, "auto_map"),
        ("config", {"other": {"deep": [{"trust_remote_code": True}]}}, "trust_remote_code"),
        ("config", {"_attn_implementation": "evil/kernel"}, "_attn_implementation"),
        ("config", {"attn_implementation": {"text_config": "evil/kernel"}}, "attn_implementation"),
        ("tokenizer_config", {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}, "auto_map"),
        ("generation_config", {"custom_generate": "evil/generate"}, "custom_generate"),
        ("processor_config", {"auto_map": {"AutoProcessor": "evil.P"}}, "auto_map"),
        ("preprocessor_config", {"trust_remote_code": True}, "trust_remote_code"),
        ("adapter_config", {"trust_remote_code": "yes"}, "trust_remote_code"),
    ],
)
def test_code_in_a_model_is_refused_by_name(tmp_path: Path, file: str, content: Any, key: str) -> None:
    path = folder(tmp_path / "m")
    (path / f"{file}.json").write_text(json.dumps((CONFIG if file == "config" else {}) | content))
    message = refused(path)
    for part in (f"{file}.json", key, "Nothing was run", "--remote-code ignore", "--remote-code trust"):
        assert part in message
    assert "ignored" in inspect("m", path, remote_code="ignore").notes[0]
    assert "trusted" in inspect("m", path, remote_code="trust").notes[0]


def test_a_folder_of_generation_code_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "custom_generate").mkdir()
    assert "custom_generate" in refused(path)


def test_harmless_settings_are_not_code(tmp_path: Path) -> None:
    config = CONFIG | {"auto_map": {}, "trust_remote_code": False, "_attn_implementation": "sdpa"}
    assert inspect("m", folder(tmp_path / "m", config)).notes == ()


# --- a GGUF


def test_a_gguf_is_described_from_its_header(tmp_path: Path) -> None:
    path = gguf_at(tmp_path / "tiny.Q4_1.gguf")
    model = inspect(str(path), path)
    assert (model.kind, model.name, model.architecture) == ("gguf", "tiny.Q4_1", "llama")
    assert (model.parameters, model.weight_bytes) == (352, 328)
    assert (model.dtypes, model.dtype, model.quantization) == ({"Q4_1": 200, "F32": 128}, "q4_1", "gguf Q4_1")
    assert (model.shape.layers, model.shape.heads, model.shape.kv_heads, model.shape.vocabulary) == (2, 4, 2, 10)
    assert (model.eos_ids, model.bos_id, model.chat_template, model.shape.tied) == ((2,), 1, True, True)
    assert model.notes == (
        "Its full precision is its dequantized Q4_1 weights: figures against it do not show what Q4_1 itself lost.",
    )
    other = gguf_at(tmp_path / "other.gguf")
    assert inspect("x", other).fingerprint == model.fingerprint


def test_a_float_gguf_is_full_precision(tmp_path: Path) -> None:
    model = inspect("x", gguf_at(tmp_path / "a.gguf", tensors=(("output.weight", (32, 10), 1, 640),)))
    assert (model.dtype, model.quantization, model.notes, model.shape.tied) == ("fp16", None, (), False)


def test_a_truncated_gguf_says_how_much_is_missing(tmp_path: Path) -> None:
    whole = gguf()
    (tmp_path / "a.gguf").write_bytes(whole[:-5])
    message = refused(tmp_path / "a.gguf")
    assert f"{len(whole):,}" in message
    assert f"{len(whole) - 5:,}" in message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "too few"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "items"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "items"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "string"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**60), "items"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 2**60), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQIQIQIQ", *[9], *[9, 1] * 4), "array"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99), "unknown type"),
        (gguf(tensors=(("a", (32, 10), 99, 0),)), "type number 99"),
        (gguf(tensors=(("a", (31, 10), 3, 0),)), "block"),
        (gguf(tensors=(("a", (2**63, 2**63), 0, 0),)), "cut short"),
        (gguf(tensors=(("a", (32,), 0, 128), ("a", (32,), 0, 128))), "same name"),
        (gguf(tensors=()), "no weights"),
        (gguf(keys=[number("general.alignment", 0)]), "alignment"),
        (gguf(keys=[]), "architecture"),
        (gguf(keys=[text("general.architecture") + struct.pack("<I", 8) + text("clip")]), "vision"),
        (gguf(keys=[text("general.architecture") + struct.pack("<I", 8) + text("llama")]), "embedding_length"),
    ],
)  # fmt: skip
def test_a_gguf_that_cannot_be_used(tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    assert part in refused(tmp_path / "a.gguf")


def test_our_table_of_gguf_types_is_that_of_the_gguf_package() -> None:
    package = pytest.importorskip("gguf")
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in package.GGML_QUANT_SIZES.items()}
    assert {kind: gguf_header.TYPES[kind] for kind in theirs if kind in gguf_header.TYPES} == {
        kind: row for kind, row in theirs.items() if kind in gguf_header.TYPES
    }
    assert set(gguf_header.TYPES) >= {kind for kind in theirs if kind <= 39}


# --- whatever the bytes are: an answer or a BadInput


def try_bytes(content: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / name
        path.write_bytes(content)
        try:
            (gguf_header.read if name.endswith("gguf") else safetensors_header.read)(path)
            if name.endswith("gguf"):
                inspect("x", path)
        except BadInput:
            pass


def mutated(whole: bytes) -> st.SearchStrategy[bytes]:
    def change(changes: list[tuple[int, int]], cut: int) -> bytes:
        content = bytearray(whole)
        for position, value in changes:
            content[position % len(content)] = value
        return bytes(content[: len(content) - cut])

    changes = st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), max_size=8)
    return st.builds(change, changes, st.integers(0, 300))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), mutated(safetensors(WEIGHTS))))
def test_any_safetensors_bytes(content: bytes) -> None:
    try_bytes(content, "a.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200).map(lambda data: b"GGUF\x03\0\0\0" + data), mutated(gguf())))
def test_any_gguf_bytes(content: bytes) -> None:
    try_bytes(content, "a.gguf")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *CONFIG,
        "text_config",
        "quantization_config",
        "head_dim",
        "sliding_window",
        "dtype",
        "tie_word_embeddings",
        "auto_map",
        "vision_config",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=4), JSON, JSON)
def test_any_config(changes: dict[str, Any], generation: Any, tokenizer: Any) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = folder(Path(place), CONFIG | changes, generation_config=generation, tokenizer_config=tokenizer)
        with contextlib.suppress(BadInput):
            inspect("x", path)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_any_quantization_setting(setting: Any) -> None:
    safetensors_header.quantization({"quant_method": setting, "bits": setting, "config_groups": setting})
    safetensors_header.quantization({"quant_method": "compressed-tensors", "config_groups": setting})
