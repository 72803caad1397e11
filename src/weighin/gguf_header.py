"""The header of a GGUF file: its keys and its tensors, read within bounds; no weights are loaded."""

import math
import mmap
import re
import struct
from pathlib import Path

import msgspec

from weighin.errors import BadInput
from weighin.safetensors_header import Tensor, show

# type number: name, elements in a block, bytes of a block (ggml's table; gguf.GGML_QUANT_SIZES is the same, tested)
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
FLOATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# a real header has some hundred thousand items (the vocabulary and its merges); more is a damaged or hostile file
ITEMS_LIMIT = 4_000_000
STRING_LIMIT = 1 << 24
HEADER_LIMIT = 1 << 28
KEPT_ARRAY = 10_000  # longer arrays are only counted


class Array(msgspec.Struct, frozen=True):
    """An array of a header: its length, and its numbers where it is short."""

    length: int
    numbers: tuple[int | float, ...] = ()


Value = int | float | bool | str | Array


class Header(msgspec.Struct, frozen=True):
    raw: bytes
    keys: dict[str, Value]
    tensors: tuple[Tensor, ...]


class _Reader:
    """A cursor that cannot leave the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.position = 0
        self.items = 0

    def damaged(self, what: str) -> BadInput:
        return BadInput(f"{self.path} is not a usable GGUF file: {what}. Download it again.")

    def skip(self, count: int) -> int:
        start = self.position
        if count > self.size - start:
            raise BadInput(
                f"{self.path} is cut short: its header needs at least {start + count:,} bytes, the file has "
                f"{self.size:,}. Download it again."
            )
        self.position = start + count
        if self.position > HEADER_LIMIT:
            raise self.damaged(f"its header would be {self.position:,} bytes or more (limit {HEADER_LIMIT:,})")
        return start

    def number(self, code: str) -> int | float:
        value: int | float = struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]
        return value

    def whole(self, code: str) -> int:
        return int(self.number(code))

    def count_item(self, items: int = 1) -> None:
        self.items += items
        if self.items > ITEMS_LIMIT:
            raise self.damaged(f"its header has more than {ITEMS_LIMIT:,} items")

    def string(self, limit: int = STRING_LIMIT) -> str:
        length = self.whole("Q")
        if length > limit:
            raise self.damaged(f"a string in its header would be {length:,} bytes")
        start = self.skip(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Value:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        raise self.damaged(f"its header has a value of the unknown type {kind}")

    def array(self, depth: int = 0) -> Array:
        kind, length = self.whole("I"), self.whole("Q")
        if kind in SCALARS:
            code = SCALARS[kind]
            start = self.skip(length * struct.calcsize("<" + code))
            kept = length <= KEPT_ARRAY
            return Array(length, struct.unpack_from(f"<{length}{code}", self.data, start) if kept else ())
        if kind == STRING:
            self.count_item(length)
            for _ in range(length):
                self.skip(self.whole("Q"))
        elif kind == ARRAY and depth < 3:
            self.count_item(length)
            for _ in range(length):
                self.array(depth + 1)
        else:
            raise self.damaged(f"its header has an array of the unknown type {kind}")
        return Array(length)


def read(path: Path) -> Header:
    """Keys and tensors of a GGUF file, each tensor checked to lie within it."""
    size = path.stat().st_size
    if size < 24:
        raise BadInput(f"{path} has {size} bytes, too few for a GGUF file: download it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:8] == b"version " and b"git-lfs" in data[:64]:
            raise BadInput(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder.")
        return _read(_Reader(path, data, size))


def _read(reader: _Reader) -> Header:
    path, size = reader.path, reader.size
    if reader.data[:4] != b"GGUF":
        raise BadInput(f"{path} is not a GGUF file (it begins with {show(reader.data[:4])}): give a folder or a GGUF.")
    reader.skip(4)
    version = reader.whole("I")
    if version not in (2, 3):
        why = "big-endian" if version in (2 << 24, 3 << 24) else f"of version {version}"
        raise BadInput(f"{path} is a GGUF {why}; weighin reads little-endian versions 2 and 3. Convert it again.")
    n_tensors, n_keys = reader.whole("Q"), reader.whole("Q")
    reader.count_item(n_tensors)
    reader.count_item(n_keys)
    keys: dict[str, Value] = {}
    for _ in range(n_keys):
        key = reader.string(limit=65_535)
        if key in keys:
            raise reader.damaged(f"it has the key {show(key)} twice")
        keys[key] = reader.value(reader.whole("I"))
    alignment = keys.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.damaged(f"its alignment is {show(alignment)}")
    described = [_tensor(reader) for _ in range(n_tensors)]
    raw = reader.data[: reader.position]
    base = -(-reader.position // alignment) * alignment
    tensors = sorted(
        (Tensor(tensor.name, tensor.dtype, tensor.shape, base + tensor.start, tensor.size) for tensor in described),
        key=lambda tensor: (tensor.start, tensor.size),
    )
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise reader.damaged("it has two tensors of the same name")
    end = base
    for tensor in tensors:
        if (tensor.start - base) % alignment or tensor.start < end:
            raise reader.damaged(f"tensor {show(tensor.name)} overlaps another or is not aligned")
        end = tensor.start + tensor.size
    if tensors and end > size:
        raise BadInput(
            f"{path} is cut short: its header describes {end:,} bytes, the file has {size:,}. Download it again."
        )
    return Header(raw, keys, tuple(tensors))


def _tensor(reader: _Reader) -> Tensor:
    name = reader.string(limit=4096)
    dimensions = reader.whole("I")
    if dimensions > 8:
        raise reader.damaged(f"tensor {show(name)} has {dimensions} dimensions")
    shape = tuple(reader.whole("Q") for _ in range(dimensions))
    kind, offset = reader.whole("I"), reader.whole("Q")
    if kind not in TYPES:
        raise BadInput(f"{reader.path}: tensor {show(name)} has the type number {kind}, which weighin does not know.")
    dtype, block, block_bytes = TYPES[kind]
    if shape and shape[0] % block:
        raise reader.damaged(f"tensor {show(name)} has rows of {shape[0]}, not whole blocks of {dtype} ({block})")
    return Tensor(name, dtype, shape, offset, math.prod(shape) // block * block_bytes)


# a config's names for what GGUF calls otherwise, so that one set of checks does for both
CONFIG_NAMES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "sliding_window": "attention.sliding_window",
}


def architecture(path: Path, header: Header) -> str:
    """The name of the language model's architecture; files that hold something else are refused here."""
    name = header.keys.get("general.architecture")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
        raise BadInput(f"{path} names no architecture ({show(name)}): convert the model to GGUF again.")
    if name == "clip":
        raise BadInput(f"{path} is the vision part of a multimodal model: give the GGUF of its language model.")
    if isinstance(parts := header.keys.get("split.count"), int) and parts > 1:
        raise BadInput(f"{path} is one of {parts} parts: join them with `llama-gguf-split --merge` first.")
    if not any(tensor.size for tensor in header.tensors):
        raise BadInput(f"{path} holds no weights (perhaps only a vocabulary): give the GGUF of the whole model.")
    return name


def as_config(header: Header, name: str) -> dict[str, Value | None]:
    """The text side's settings under the names that a config.json has."""
    found: dict[str, Value | None] = {}
    for ours, theirs in CONFIG_NAMES.items():
        value = header.keys.get(f"{name}.{theirs}")
        # one number for each layer: layers without attention count no heads, so the largest is the one that tells
        found[ours] = max(value.numbers, default=None) if isinstance(value, Array) else value
    if found["sliding_window"] == 0:
        found["sliding_window"] = None
    tokens = header.keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Array):
        found["vocab_size"] = tokens.length
    return found
