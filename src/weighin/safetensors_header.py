"""Which weights a folder holds, from the safetensors headers alone; every count and offset is checked before use."""

import json
import math
import re
import struct
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from weighin.errors import BadInput

HEADER_LIMIT = 100_000_000  # safetensors' own limit
JSON_LIMIT = 100_000_000
DIMENSIONS_LIMIT = 64  # keeps the product of a hostile shape cheap

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class Tensor(msgspec.Struct, frozen=True):
    """One tensor as a header describes it; `start` is where its data begins in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class WeightsFile(msgspec.Struct, frozen=True):
    """A weights file: its raw header (for the fingerprint) and its tensors, in the order of their data."""

    path: Path
    header: bytes
    tensors: tuple[Tensor, ...]


def show(value: object) -> str:
    """A value from a file we do not trust, safe for a terminal: escaped and short."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or nesting without end
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else text[:117] + "..."


def json_object(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """The JSON object in a file of a bounded size."""
    size = path.stat().st_size
    if size > limit:
        raise BadInput(f"{path} is {size:,} bytes, too large for settings (limit {limit:,}): is it the right file?")
    return parse_object(path.read_bytes(), str(path))


def parse_object(raw: bytes, what: str, *, unique: bool = False) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise BadInput(f"{what} names the same thing twice, so it is damaged: download it again.")
        return found

    try:
        value = json.loads(raw, object_pairs_hook=pairs if unique else None)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadInput(f"{what} is not valid JSON ({reason[:200]}): it is damaged; download it again.") from None
    if not isinstance(value, dict):
        raise BadInput(f"{what} must be a JSON object and is a {type(value).__name__}: it is not what its name says.")
    return value


def read(path: Path) -> WeightsFile:
    """The header of one safetensors file, fully checked against the file's size."""
    if not path.is_file():
        raise BadInput(f"{path} is not a regular file: replace it with the weights file.")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version " and b"git-lfs" in file.read(64):
            raise BadInput(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder.")
        if len(start) < 8:
            raise BadInput(f"{path} has {size} bytes, too few for a safetensors file: download it again.")
        (length,) = struct.unpack("<Q", start)
        if length > HEADER_LIMIT:
            raise BadInput(
                f"{path} is not a safetensors file: its header would be {length:,} bytes (limit {HEADER_LIMIT:,}). "
                "Download it again."
            )
        if length + 8 > size:
            raise BadInput(
                f"{path} is cut short: its header needs {length + 8:,} bytes, the file has {size:,}. Download it again."
            )
        file.seek(8)
        header = file.read(length)
    table = parse_object(header, f"the header of {path}", unique=True)
    tensors = sorted(
        (_tensor(path, name, entry, length + 8) for name, entry in table.items() if name != "__metadata__"),
        key=lambda tensor: (tensor.start, tensor.start + tensor.size),
    )
    position = length + 8
    for tensor in tensors:
        if tensor.start != position:
            what = "overlaps the one before it" if tensor.start < position else "leaves a gap before it"
            raise BadInput(f"{path}: tensor {show(tensor.name)} {what}, so the file is damaged: download it again.")
        position += tensor.size
    if position > size:
        raise BadInput(
            f"{path} is cut short: its header describes {position:,} bytes, the file has {size:,}. Download it again."
        )
    if position < size:
        raise BadInput(
            f"{path} is damaged: its header describes {position:,} bytes, the file has {size:,}. Download it again."
        )
    return WeightsFile(path, header, tuple(tensors))


def _tensor(path: Path, name: str, entry: object, base: int) -> Tensor:
    def damaged(what: str) -> BadInput:
        return BadInput(f"{path}: tensor {show(name)} {what}, so the file is damaged: download it again.")

    if not isinstance(entry, dict):
        raise damaged("is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in BITS:
        raise BadInput(f"{path}: tensor {show(name)} has the dtype {show(dtype)}, which weighin does not know.")
    if shape is None or len(shape) > DIMENSIONS_LIMIT:
        raise damaged(f"has the shape {show(entry.get('shape'))}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(f"has the offsets {show(entry.get('data_offsets'))}")
    begin, end = offsets
    if math.prod(shape) * BITS[dtype] != (end - begin) * 8:
        raise damaged(f"has {end - begin} bytes, which is not {dtype} of the shape {show(shape)}")
    return Tensor(name, dtype, tuple(shape), base + begin, end - begin)


def _sizes(value: object) -> list[int] | None:
    good = isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
    return value if good and isinstance(value, list) else None


def find(folder: Path) -> list[Path]:
    """The safetensors files that make up the model of a folder, in transformers' own order of preference."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        return _shards(folder, index)
    others = sorted(path for path in folder.glob("*.safetensors") if path.name != "adapter_model.safetensors")
    named = [path for path in others if path.name.startswith("model")]
    return named or [path for path in others if not path.name.startswith("consolidated")] or others


def _shards(folder: Path, index: Path) -> list[Path]:
    weight_map = json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index} has no weight_map: it is damaged; download it again.")
    names: set[str] = set()
    for name in weight_map.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or "\0" in name:
            raise BadInput(f"{index} names {show(name)} as a weights file, which is not a .safetensors file.")
        names.add(name)
    shards: list[Path] = []
    missing: list[Path] = []
    for name in sorted(names):
        path = _inside(folder, name, index)
        (shards if path.exists() else missing).append(path)
    if missing:
        listed = ", ".join(show(path.name) for path in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise BadInput(
            f"{folder} lacks {len(missing)} of the {len(names)} weights files its index names: {listed}. "
            "Finish the download of the model."
        )
    return shards


def _inside(folder: Path, name: str, index: Path) -> Path:
    """The file an index names; one that leads out of the folder is refused, since a model may come from anyone."""
    pure = PurePosixPath(name)
    path = folder / name
    if not (pure.is_absolute() or ".." in pure.parts or "\\" in name or Path(name).is_absolute()):
        home, target = folder.resolve(), path.resolve()
        # the Hugging Face cache keeps the files of a snapshot as links into the blobs of the same repository
        cached = home.parent.name == "snapshots" and home.parents[1].name.startswith("models--")
        if target.is_relative_to(home) or (cached and target.is_relative_to(home.parents[1] / "blobs")):
            return path
    raise BadInput(
        f"{index} names {show(name)}, which leads out of the model's folder; it was not opened. "
        "If you trust it, put the file itself into the folder."
    )


def read_folder(folder: Path) -> list[WeightsFile]:
    """Every weights file of a folder; empty where it has no safetensors."""
    files = [read(path) for path in find(folder)]
    where: dict[str, Path] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in where:
                raise BadInput(
                    f"tensor {show(tensor.name)} is in {where[tensor.name].name} and in {file.path.name} of {folder}: "
                    "the folder mixes two checkpoints; keep the files of one."
                )
            where[tensor.name] = file.path
    return files


# --- checkpoints that are already quantized -------------------------------------------------------------------------

# what a quantizer stores beside the weights; these are not parameters
AUXILIARY = re.compile(
    r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)$|\.(SCB|weight_format|qzeros|scales|g_idx|"
    r"weight_scale|weight_scale_inv|weight_global_scale|input_scale|input_global_scale|output_scale|k_scale|v_scale|"
    r"weight_zero_point|input_zero_point|weight_shape|weight_g_idx)$|_scales$"
)
PACKED = re.compile(r"(qweight|weight_packed|_blocks)$")


class Quantization(msgspec.Struct, frozen=True):
    """How a checkpoint is quantized: in words, its dtype (None: as in the headers), the bits it packs weights to."""

    words: str
    dtype: str | None
    bits: int | None


def quantization(setting: object) -> Quantization | None:
    """What a config's `quantization_config` says."""
    if not isinstance(setting, dict) or not setting:
        return None
    method = setting.get("quant_method")
    four = setting.get("load_in_4bit") or setting.get("_load_in_4bit")
    eight = setting.get("load_in_8bit") or setting.get("_load_in_8bit")
    if method == "bitsandbytes" or (method is None and (four or eight)):
        if not four:
            return Quantization("bitsandbytes int8", "int8", None)
        kind = "nf4" if setting.get("bnb_4bit_quant_type") == "nf4" else "fp4"
        return Quantization(f"bitsandbytes {kind}", kind, 4)
    if not isinstance(method, str) or not re.fullmatch(r"[\w.-]{1,40}", method):
        return Quantization("an unknown method", None, None)
    if method in ("gptq", "awq"):
        bits = _bits(setting.get("bits", setting.get("w_bit"))) or 4
        return Quantization(f"{method} {bits}-bit", f"int{bits}", bits)
    if method == "compressed-tensors":
        groups = setting.get("config_groups")
        listed = groups.values() if isinstance(groups, dict) else ()
        each = [group.get("weights") for group in listed if isinstance(group, dict)]
        bits = next((found for item in each if isinstance(item, dict) and (found := _bits(item.get("num_bits")))), 4)
        return Quantization(method, f"int{bits}" if "pack" in str(setting.get("format")) else None, bits)
    if method == "mxfp4":
        return Quantization(method, method, 4)
    bits_written = _bits(setting.get("bits"))
    return Quantization(f"{method} {bits_written}-bit" if bits_written else method, None, None)


def _bits(value: object) -> int | None:
    return value if isinstance(value, int) and value in range(1, 17) and not isinstance(value, bool) else None


def parameters(tensor: Tensor, how: Quantization | None) -> int:
    """How many parameters of the model a tensor holds, unpacked."""
    if how is None:
        return tensor.elements
    if AUXILIARY.search(tensor.name):
        return 0
    packed = PACKED.search(tensor.name) or (tensor.dtype == "U8" and tensor.name.endswith(".weight"))
    return tensor.elements * BITS[tensor.dtype] // how.bits if how.bits and packed else tensor.elements
