"""What the model is, from its headers and config; never loads weights.

A model may come from anyone: every value is checked here, before anything that could run its code is imported.
"""

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from weighin import gguf_header, safetensors_header
from weighin.errors import BadInput
from weighin.safetensors_header import BITS, Tensor, json_object, show


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The text side's dimensions; what a prediction of memory and speed needs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int | None
    vocabulary: int
    max_positions: int | None
    sliding_window: int | None
    tied: bool  # the output head is the embedding


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared, as its files describe it."""

    source: str  # what the user typed
    name: str  # for display: folder name, Hub id or GGUF stem
    kind: str  # "folder" or "gguf"
    path: str  # local folder or GGUF file, absolute
    architecture: str
    model_type: str
    shape: Shape
    parameters: int  # unpacked, where the checkpoint is quantized
    text_parameters: int  # without vision and audio towers
    weight_bytes: int
    text_weight_bytes: int
    weight_files: tuple[str, ...]  # the files that hold the weights, absolute; a folder may hold others beside them
    dtypes: dict[str, int]  # bytes by dtype, named as in the headers
    dtype: str  # the dominant one, in our words: fp32, bf16, fp16, fp8, int8, nf4, int4, q4_1, ...
    quantization: str | None  # the method of an already quantized checkpoint; None: full precision
    multimodal: bool
    chat_template: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None
    fingerprint: str  # of the content: the same in another folder
    notes: tuple[str, ...]  # sentences the report must show
    auto_class: str | None = "AutoModelForCausalLM"  # the class of transformers that loads it
    auto_class_reason: str | None = None  # why there is none


CODE_FILES = (
    "config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json",
    "preprocessor_config.json", "adapter_config.json",
)  # fmt: skip
KERNEL_KEYS = re.compile(r"attn_implementation|experts_implementation|custom_generate")
IDENTITY_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "chat_template.jinja",
)  # fmt: skip
NOT_WEIGHTS = re.compile(r"training_args|optimizer|scheduler|rng_state|scaler|trainer_state")
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
TOWER_CONFIGS = ("vision_config", "audio_config", "visual_config", "vision_tower_config", "speech_config")
TOWERS = (
    "vision_tower", "vision_model", "vision_encoder", "vision_embed", "visual.", "multi_modal_projector",
    "multimodal_projector", "mm_projector", "audio_tower", "audio_encoder", "embed_vision", "embed_audio",
    "image_newline", "img_processor", "model.connector.", "vqmodel", "talker.", "token2wav",
)  # fmt: skip
OUTPUT_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.(weight|qweight|weight_packed)$")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")
OUR_DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "I8": "int8"} | {
    name: "fp8" for name in BITS if name.startswith("F8")
}
CONFIG_DTYPES = {"float32": ("fp32", 4), "float16": ("fp16", 2), "bfloat16": ("bf16", 2)}

# a composite config saves only what differs from its text class's defaults, so the defaults are part of the format
DEFAULTED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "sliding_window",
)  # fmt: skip
TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    kind: dict(zip(DEFAULTED, values, strict=False))
    for kind, values in {
        "llama": (4096, 32, 32, 32, 11008, 32000, 2048),
        "mistral": (4096, 32, 32, 8, 14336, 32000, 131072, 4096),
        "qwen2": (4096, 32, 32, 32, 22016, 151936, 32768),
        "gemma": (3072, 28, 16, 16, 24576, 256000, 8192),
        "gemma2": (2304, 26, 8, 4, 9216, 256000, 8192, 4096),
        "gemma3_text": (2304, 26, 8, 4, 9216, 262208, 131072, 4096),
    }.items()
}
HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}


def inspect(
    source: str, path: Path, *, remote_code: str = "refuse", allow_pickle: bool = False, notes: tuple[str, ...] = ()
) -> Model:
    """What a local folder or GGUF file holds; anything unusable is a BadInput that says what and why."""
    if remote_code not in ("refuse", "ignore", "trust"):
        raise BadInput(f"--remote-code must be refuse, ignore or trust, and is {show(remote_code)}.")
    try:
        if path.is_dir():
            return _folder(source, path, remote_code, allow_pickle, notes)
        if path.is_file():
            if path.suffix.lower() != ".gguf" and path.suffix:
                raise BadInput(f"{path} is a file: give the folder with the model's config.json, or a .gguf file.")
            return _gguf(source, path, notes)
        raise BadInput(_absent(path))
    except OSError as error:
        raise BadInput(f"{error.filename or path} cannot be read: {error.strerror or error}. Check the path.") from None


def _absent(path: Path) -> str:
    if path.exists():
        return f"{path} is neither a folder nor a regular file: give a model folder, a .gguf file or a Hub id."
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names[:10_000], n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(str(parent / name) for name in close)}?" if close else ""
    return f"{path} does not exist.{hint or ' Give a model folder, a .gguf file or a Hub id.'}"


# --- a folder -------------------------------------------------------------------------------------------------------


def _folder(source: str, folder: Path, remote_code: str, allow_pickle: bool, notes: tuple[str, ...]) -> Model:
    # before the weights and anything else: code that a model brings is the one thing that must never be missed
    notes += _remote_code(folder, remote_code)
    _check_kind_of_folder(folder)
    config = json_object(folder / "config.json")
    generation = _optional_json(folder / "generation_config.json")
    architectures = config.get("architectures")
    names = [name for name in architectures if _plain(name)] if isinstance(architectures, list) else []
    if not names:
        raise BadInput(
            f"{folder / 'config.json'} names no architecture ({show(architectures)}), so weighin cannot tell what the "
            "model is: add `architectures`, or save the model again with save_pretrained."
        )
    text, nested = _text_config(config)
    files = safetensors_header.read_folder(folder)
    tensors = [tensor for file in files for tensor in file.tensors]
    how = safetensors_header.quantization(config.get("quantization_config") or text.get("quantization_config"))
    pickles: list[Path] = []
    digest = _Fingerprint()
    digest.add_files(folder / name for name in IDENTITY_FILES)
    if files:
        dtypes = _bytes_by_dtype(tensors)
        if not sum(dtypes.values()):
            raise BadInput(f"{folder} has weights files without any weights in them: download the model again.")
        dominant = max(dtypes, key=lambda name: dtypes[name])
        dtype = (how.dtype if how else None) or OUR_DTYPES.get(dominant, dominant.lower())
        for file in files:
            digest.add_weights(file.path, file.header, file.tensors)
        parameters = sum(safetensors_header.parameters(tensor, how) for tensor in tensors)
        weight_bytes = sum(dtypes.values())
    else:
        pickles = _pickles(folder, allow_pickle)
        weight_bytes = sum(file.stat().st_size for file in pickles)
        named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
        dtype, width = CONFIG_DTYPES.get(named if isinstance(named, str) else "", ("fp32", 4))
        dtypes, parameters = {dtype: weight_bytes}, weight_bytes // width
        notes += (
            f"Its weights are pickles, without a header: its parameters are estimated from their size as {dtype}.",
        )
        digest.add_pickles(pickles)
    weight_files = [file.path for file in files] or pickles
    if aside := _set_aside(generation):
        notes += (
            f"Its generation_config.json sets {aside}; all contenders answer greedily without it, so that they can be "
            "compared.",
        )
    towers = any(isinstance(config.get(key), dict) for key in TOWER_CONFIGS)
    side = [tensor for tensor in tensors if _is_tower(tensor.name)] if towers or nested else []
    if how:
        notes += (f"It is already quantized ({how.words}): figures against it do not show what that itself lost.",)
    written = [c["tie_word_embeddings"] for c in (config, text) if isinstance(c.get("tie_word_embeddings"), bool)]
    tied = written[0] if written else not any(OUTPUT_HEAD.search(tensor.name) for tensor in tensors)
    return Model(
        source=source,
        name=_folder_name(source, folder),
        kind="folder",
        path=str(folder.absolute()),
        architecture=names[0],
        model_type=config["model_type"] if _plain(config.get("model_type")) else "",
        shape=_shape(text, tensors, folder / "config.json", nested=nested, tied=tied),
        parameters=parameters,
        text_parameters=parameters - sum(safetensors_header.parameters(tensor, how) for tensor in side),
        weight_bytes=weight_bytes,
        text_weight_bytes=weight_bytes - sum(tensor.size for tensor in side),
        weight_files=tuple(str(file.absolute()) for file in weight_files),
        dtypes=dtypes,
        dtype=dtype,
        quantization=how.words if how else None,
        multimodal=towers or bool(side),
        chat_template=_has_chat_template(folder),
        # the generation config is what transformers stops by; a leftover in the model config may be an ordinary token
        eos_ids=_ids(generation.get("eos_token_id")) or _ids(text.get("eos_token_id"), config.get("eos_token_id")),
        bos_id=_first(_ids(text.get("bos_token_id"), config.get("bos_token_id"), generation.get("bos_token_id"))),
        fingerprint=digest.hex(),
        notes=notes,
    )


def _set_aside(generation: dict[str, Any]) -> str:
    """What a generation config sets that would make an answer other than plainly greedy, as words."""
    neutral: dict[str, Any] = {
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "do_sample": False,
        "min_length": 0,
    }
    neutral |= dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id"))
    found = {
        key: generation[key] for key, value in neutral.items() if generation.get(key, value) not in (value, None, [])
    }
    if generation.get("do_sample") is True:
        found |= {key: generation[key] for key in ("temperature", "top_p", "top_k") if key in generation}
    return ", ".join(f"{key} {show(value)}" for key, value in found.items())


def _check_kind_of_folder(folder: Path) -> None:
    if (folder / "adapter_config.json").exists() and not safetensors_header.find(folder):
        raise BadInput(
            f"{folder} is a LoRA adapter, which weighin does not compare yet: merge it into its base first "
            "(peft's merge_and_unload, then save_pretrained) and give the merged folder."
        )
    if not (folder / "config.json").is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        if ggufs:
            raise BadInput(f"{folder} holds GGUF files; give one of them: {', '.join(map(show, ggufs[:8]))}.")
        raise BadInput(f"{folder} has no config.json, so it is not a model folder: give the folder that holds it.")


def _plain(name: object) -> bool:
    """A name that is safe to show and to save."""
    return isinstance(name, str) and re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII) is not None


def _optional_json(path: Path) -> dict[str, Any]:
    return json_object(path) if path.is_file() else {}


def _folder_name(source: str, folder: Path) -> str:
    home = folder.resolve()
    if home.parent.name == "snapshots" and home.parents[1].name.startswith("models--"):
        return home.parents[1].name.removeprefix("models--").replace("--", "/")
    return home.name if Path(source).exists() else source


def _has_chat_template(folder: Path) -> bool:
    files = ("chat_template.jinja", "chat_template.json", "chat_templates", "additional_chat_templates")
    return any((folder / name).exists() for name in files) or bool(
        _optional_json(folder / "tokenizer_config.json").get("chat_template")
    )


def _pickles(folder: Path, allowed: bool) -> list[Path]:
    found = sorted(
        file
        for file in folder.iterdir()
        if file.suffix in (".bin", ".pt", ".pth") and file.is_file() and not NOT_WEIGHTS.search(file.name)
    )
    found = [file for file in found if file.name.startswith("pytorch_model")] or found
    if not found:
        raise BadInput(f"{folder} has a config.json but no weights (*.safetensors): finish the download of the model.")
    if not allowed:
        raise BadInput(
            f"{folder} holds its weights only as pickles ({', '.join(show(file.name) for file in found[:4])}), and "
            "loading one can run code. Nothing was loaded. Convert them to safetensors, or pass --allow-pickle."
        )
    return found


def _remote_code(folder: Path, remote_code: str) -> tuple[str, ...]:
    for where, key, value in _code_in(folder):
        if remote_code == "refuse":
            raise BadInput(
                f"{where} asks to run code that comes with the model: {show(key)} is {show(value)}. Nothing was run. "
                "Use transformers' own class instead with `--remote-code ignore`, or run the model's code with "
                "`--remote-code trust` if you trust where it comes from."
            )
        did = "it was ignored" if remote_code == "ignore" else "it was trusted and run (--remote-code trust)"
        return (f"The model asks to run code of its own ({where.name}: {show(key)}); {did}.",)
    return ()


def _code_in(folder: Path) -> Iterator[tuple[Path, str, object]]:
    for name in CODE_FILES:
        path = folder / name
        stack: list[tuple[str, object]] = [("", _optional_json(path))]
        while stack:  # not recursive: the nesting is the file's choice
            key, value = stack.pop()
            asks = key in ("auto_map", "custom_pipelines", "trust_remote_code") and value not in (
                None,
                False,
                "",
                {},
                [],
            )
            kernel = KERNEL_KEYS.search(key) and isinstance(value, str) and "/" in value
            if asks or kernel:
                yield path, key, value
            if isinstance(value, dict):
                # attn_implementation may be a table of its own, one entry for each part of the model
                outer = f"{key}." if KERNEL_KEYS.search(key) else ""
                stack.extend((outer + str(inner), item) for inner, item in value.items())
            elif isinstance(value, list):
                stack.extend((key if KERNEL_KEYS.search(key) else "", item) for item in value)
    if (folder / "custom_generate").exists():
        yield folder / "custom_generate", "custom_generate", "a folder of code"


# --- its config -----------------------------------------------------------------------------------------------------


def _text_config(config: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The part of the config that describes the text side, and whether it was inside another."""
    text = config
    for _ in range(3):
        inner = next((text[key] for key in TEXT_CONFIGS if isinstance(text.get(key), dict)), None)
        if inner is None:
            break
        text = inner
    return text, text is not config


def _shape(
    text: Mapping[str, Any],
    tensors: list[Tensor],
    where: Path,
    *,
    nested: bool,
    tied: bool,
    spelled: Mapping[str, str] = MappingProxyType({}),  # what a message calls a key, where the file calls it otherwise
) -> Shape:
    kind = text.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    defaults = TEXT_DEFAULTS.get(kind, {}) if nested else {}
    if nested:
        tables = [t for t in tensors if len(t.shape) == 2 and t.name.endswith(EMBEDDINGS) and not _is_tower(t.name)]
        if tables:
            defaults = {**defaults, "vocab_size": tables[0].shape[0]}

    def optional(limit: int, *keys: str) -> int | None:
        for key in keys:
            if text.get(key) is not None:
                value = text[key]
                # some models give one number for each layer; the largest bounds them all
                listed = value if isinstance(value, list) and value else [value]
                return max(whole(key, item, limit) for item in listed[:10_000])
        return defaults.get(keys[0])

    def whole(key: str, value: object, limit: int) -> int:
        if type(value) is not int or not 1 <= value <= limit:
            raise BadInput(
                f"{where}: {spelled.get(key, key)} is {show(value)} and must be a whole number from 1 to {limit:,}. "
                "It is damaged: download it again."
            )
        return value

    def required(limit: int, *keys: str) -> int:
        value = optional(limit, *keys)
        if value is None:
            key = spelled.get(keys[0], keys[0])
            raise BadInput(f"{where} has no {key}: it does not describe a causal language model that weighin knows.")
        return value

    hidden = required(2**20, "hidden_size", "n_embd", "d_model")
    heads = required(2**16, "num_attention_heads", "n_head", "n_heads")
    kv_heads = optional(2**16, "num_key_value_heads", "num_kv_heads")
    if kv_heads is None or (text.get("multi_query") is True and not text.get("new_decoder_architecture")):
        kv_heads = 1 if text.get("multi_query") is True else heads
    if kv_heads > heads:
        raise BadInput(
            f"{where}: num_key_value_heads is {kv_heads}, more than num_attention_heads, {heads}: it is damaged."
        )
    head_dim = optional(2**16, "head_dim") or HEAD_DIMS.get(kind) or hidden // heads
    if head_dim < 1:
        raise BadInput(f"{where}: hidden_size {hidden} is less than num_attention_heads {heads}: it is damaged.")
    windowed = text.get("use_sliding_window", kind not in ("qwen2", "qwen3")) is not False
    return Shape(
        layers=required(10_000, "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=optional(2**24, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
        vocabulary=required(2**24, "vocab_size"),
        max_positions=optional(2**40, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        sliding_window=optional(2**40, "sliding_window") if windowed else None,
        tied=tied,
    )


def _ids(*values: object) -> tuple[int, ...]:
    """Token ids, in order and once each; what is not an id is left out."""
    listed = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(item for item in listed if type(item) is int and 0 <= item < 2**31))


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _is_tower(name: str) -> bool:
    return any(part in name for part in TOWERS)


def _bytes_by_dtype(tensors: Iterable[Tensor]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.size
    return found


# --- a GGUF file ----------------------------------------------------------------------------------------------------


def _gguf(source: str, path: Path, notes: tuple[str, ...]) -> Model:
    header = gguf_header.read(path)
    keys, tensors = header.keys, header.tensors
    architecture = gguf_header.architecture(path, header)
    dtypes = _bytes_by_dtype(tensors)
    dominant = max(dtypes, key=lambda name: dtypes[name])
    full = gguf_header.FLOATS.get(dominant)
    if full is None:
        notes += (
            f"Its full precision is its dequantized {dominant} weights: figures against it do not show what {dominant} "
            "itself lost.",
        )
    digest = _Fingerprint()
    digest.add_weights(path, header.raw, tensors)
    parameters = sum(tensor.elements for tensor in tensors)
    return Model(
        source=source,
        name=path.stem,
        kind="gguf",
        path=str(path.absolute()),
        architecture=architecture,
        model_type=architecture,
        shape=_shape(
            gguf_header.as_config(header, architecture),
            [],
            path,
            nested=False,
            tied=all(tensor.name != "output.weight" for tensor in tensors),
            spelled=gguf_header.CONFIG_NAMES,
        ),
        parameters=parameters,
        text_parameters=parameters,
        weight_bytes=sum(dtypes.values()),
        text_weight_bytes=sum(dtypes.values()),
        weight_files=(str(path.absolute()),),
        dtypes=dtypes,
        dtype=full or dominant.lower(),
        quantization=None if full else f"gguf {dominant}",
        multimodal=False,
        chat_template=bool(keys.get("tokenizer.chat_template")),
        eos_ids=_ids(keys.get("tokenizer.ggml.eos_token_id"), keys.get("tokenizer.ggml.eot_token_id")),
        bos_id=_first(_ids(keys.get("tokenizer.ggml.bos_token_id"))),
        fingerprint=digest.hex(),
        notes=notes,
    )


class _Fingerprint:
    """Content identity without reading all weights: headers, and both ends of every tensor; no path, no time."""

    ENDS = 4096

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"weighin model 1\n")

    def _add(self, label: str, data: bytes) -> None:
        self._hash.update(f"{label} {len(data)}\n".encode("utf-8", "surrogateescape") + data)

    def add_files(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path.is_file():
                with path.open("rb") as file:
                    self._add(path.name, hashlib.file_digest(file, "sha256").digest())

    def add_weights(self, path: Path, header: bytes, tensors: Iterable[Tensor]) -> None:
        # not the file's name: what a GGUF is called is the user's choice
        self._add("weights", header)
        with path.open("rb") as file:
            for tensor in tensors:
                file.seek(tensor.start)
                data = file.read(min(tensor.size, 2 * self.ENDS if tensor.size <= 2 * self.ENDS else self.ENDS))
                if tensor.size > 2 * self.ENDS:
                    file.seek(tensor.start + tensor.size - self.ENDS)
                    data += file.read(self.ENDS)
                self._add("tensor", data)

    def add_pickles(self, paths: Iterable[Path]) -> None:
        for path in paths:
            size = path.stat().st_size
            self.add_weights(path, str(size).encode(), [Tensor(path.name, "", (), 0, size)])

    def hex(self) -> str:
        return self._hash.hexdigest()
