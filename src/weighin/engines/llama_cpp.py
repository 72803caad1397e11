"""llama.cpp, by llama-cpp-python: GGUF files as they are, or converted and quantized by llama.cpp's own converter."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import logging
import os
import runpy
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighin.engines import Engine, Job, OnToken, Recipe, Sampling, Settings, SnippetPrompt
from weighin.errors import WeighinError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weighin.machine import Machine
    from weighin.model import Model
    from weighin.plan import Contender

VERSION = "0.3.36"  # of llama-cpp-python, and so of the llama.cpp and the converter in its source distribution
RECIPE_VERSION = 1
CONVERTER = "weighin_llama_cpp_converter"  # the folder in the environment's site-packages
CONVERTER_DISTRIBUTION = CONVERTER.replace("_", "-")
CONVERTER_FILES = ("convert_hf_to_gguf.py", "LICENSE", "conversion/", "gguf-py/gguf/")
PREPARED = "model.gguf"

OWN = "own"  # a GGUF file as it is
FLOATS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
FLOAT_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
LOSSLESS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}  # a checkpoint's dtype -> the converter's that loses nothing
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "bf16": 32}
# the types of most tensors, of every second value and down projection, and of the output head
MIXTURES = {
    "q4_0": ("q4_0", "q4_0", "q6_k"),
    "q4_k_m": ("q4_k", "q6_k", "q6_k"),
    "q5_k_m": ("q5_k", "q6_k", "q6_k"),
    "q6_k": ("q6_k", "q6_k", "q6_k"),
    "q8_0": ("q8_0", "q8_0", "q8_0"),
}
BITS = {"q4_0": 4.5, "q4_k": 4.5, "q5_0": 5.5, "q5_k": 5.5, "q5_1": 6.0, "q6_k": 6.5625, "q8_0": 8.5}
IN_SMALL_BLOCKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}  # what replaces a type with blocks of 256
KV_TYPES = {"f16": 1, "f32": 0, "q8_0": 8, "q4_0": 2}  # as ggml numbers them
DEQUANTIZED = ("fp8", "gptq", "compressed-tensors", "bitnet", "mxfp4", "modelopt")  # what the converter unpacks
ALL_LAYERS = 2**31 - 1
PROMPT_BATCH = 2048  # ids in one call; llama.cpp computes them 512 at a time
SCORE_ROWS = 128
SCORE_BYTES = 64 * 10**6
WARNING, ERROR = 3, 4  # levels of llama.cpp's log
OUT_OF_MEMORY = ("failed to allocate", "unable to allocate", "allocate memory", "out of memory", "bad_alloc")


class LlamaCppEngine(Engine):
    name = "llama.cpp"
    title = "llama.cpp"
    requirements = (f"llama-cpp-python>={VERSION}", "numpy>=1.26")
    install = "weighin engines install llama.cpp"
    precisions = (*MIXTURES, *FLOATS, OWN)
    devices = ("cpu", "cuda")
    options = {"kv": tuple(KV_TYPES), "layers": ("*",)}  # noqa: RUF012 - a ClassVar of the contract
    untested = ("cuda",)
    log_probabilities = "full"
    samples = True
    environment = Recipe(
        packages=(
            f"llama-cpp-python=={VERSION}",
            "numpy==2.4.6",
            "jinja2==3.1.6",
            # the converter's
            "torch==2.13.0",
            "transformers==5.22.2",
            "sentencepiece==0.2.2",
            "protobuf==7.36.2",
        ),
        options=("--config-settings=cmake.define.LLAVA_BUILD=OFF",),  # images are not compared
        bytes=1_200_000_000,
        seconds=600.0,
        compiles="llama.cpp, for this machine's processor: about 8 minutes on two cores",
        modules=("llama_cpp", "torch", "transformers", "sentencepiece"),
    )

    # ---- in weighin's own process

    @classmethod
    def contenders(cls, machine: Machine, model: Model) -> list[str]:
        from weighin.plan import Contender

        own = [OWN] if model.kind == "gguf" else []
        precisions = own if model.quantization else [*own, "q4_k_m", "q8_0"]
        cuda = Contender(engine=cls.name, precision="q8_0", device="cuda")
        devices = ["cuda", "cpu"] if machine.gpus and _has_cuda(cls, cuda, model) else ["cpu"]
        return [f"{cls.name}:{precision}@{device}" for device in devices for precision in precisions]

    @classmethod
    def requirements_for(cls, contender: Contender, model: Model) -> tuple[str, ...]:
        if cls.recipe(contender, model) is None:
            return cls.requirements
        # what is prepared depends on the version that prepared it, so that is done in its own environment alone
        return (*cls.requirements, f"{CONVERTER_DISTRIBUTION}=={VERSION}")

    @classmethod
    def complete_environment(cls, site_packages: Path) -> None:
        _bring_converter(site_packages)

    @classmethod
    def cannot_run(cls, contender: Contender, machine: Machine, model: Model) -> str | None:
        precision, device = contender.precision, contender.device
        if device == "cuda" and not machine.gpus:
            reason = machine.gpu_reason or "none was found"
            return f"no CUDA GPU here: {reason}; run it on a machine with an NVIDIA GPU and its driver"
        if device == "cuda" and _has_cuda(cls, contender, model) is False:
            return (
                "this llama.cpp was built without CUDA; with the CUDA toolkit: weighin engines remove llama.cpp, then "
                "CMAKE_ARGS=-DGGML_CUDA=on PIP_NO_CACHE_DIR=1 weighin engines install llama.cpp"
            )
        if "layers" in contender.options and (device == "cpu" or not contender.options["layers"].isdecimal()):
            return "the option layers is how many layers the GPU holds, as in llama.cpp:q4_k_m@cuda+layers=20"
        if precision == OWN and model.kind != "gguf":
            return f"own is a GGUF file as it is, and this is a folder; try {cls.name}:q8_0@{device}"
        method = (model.quantization or "").partition(" ")[0]
        if model.kind == "gguf" and method and precision != OWN:
            return (
                f"the file is already quantized ({model.quantization}), and a second time would lose more; use "
                f"{cls.name}:{OWN}@{device}, or give the model in full precision"
            )
        if model.kind != "gguf" and method and method not in DEQUANTIZED:
            return f"llama.cpp's converter does not read what {method} quantized; give the model in full precision"
        if contender.options.get("kv", "").startswith("q") and model.shape.head_dim % 32:
            return f"a quantized KV cache has blocks of 32, and the heads of this model are {model.shape.head_dim} wide"
        return _other_gemma(model)

    @classmethod
    def settings(cls, contender: Contender, machine: Machine, model: Model) -> Settings:
        precision, on_gpu = contender.precision, contender.device == "cuda"
        if precision == OWN:
            dtype, quantization = LOSSLESS.get(model.dtype, model.dtype), f"{model.quantization or 'none'}, as it is"
        else:
            dtype, bits = precision, f"{precision[1]}-bit (llama.cpp {precision.upper()})"
            quantization = "none" if precision in FLOATS else bits
        layers = contender.options.get("layers", "")
        held = (int(layers) if layers.isdecimal() else ALL_LAYERS) if on_gpu else 0
        part = f", {held} of {model.shape.layers} layers" if on_gpu and held < model.shape.layers else ""
        return Settings(
            hardware=f"NVIDIA GPU with CUDA{part}" if on_gpu else "CPU only",
            quantization=quantization,
            dtype=FLOATS.get(dtype, dtype),
            device_map=contender.device,
            dependencies=("llama-cpp-python", "numpy", *(["CUDA"] if on_gpu else [])),
            uses_gpu=on_gpu,
            details={
                # llama.cpp's own choice is f16; full precision is not rounded there either
                "kv": contender.options.get("kv") or ("f32" if dtype == "f32" else "f16"),
                "gpu_layers": held,
                "threads": machine.threads,
                "converts": model.kind != "gguf",
                "lossless": LOSSLESS.get(model.dtype, "f32"),
                "window": model.shape.sliding_window,
            },
        )

    @classmethod
    def weight_bytes(cls, contender: Contender, settings: Settings, model: Model) -> int:
        return _file_bytes(contender.precision, model)

    @classmethod
    def recipe(cls, contender: Contender, model: Model) -> str | None:
        if contender.precision == OWN:
            return None
        return f"gguf-{contender.precision}-{RECIPE_VERSION}-llama-cpp-python-{VERSION}"

    @classmethod
    def prepared_bytes(cls, contender: Contender, model: Model) -> int:
        if contender.precision == OWN:
            return 0
        between = contender.precision not in FLOATS and model.kind != "gguf"  # the file that is quantized
        return _file_bytes(contender.precision, model) + (
            _file_bytes(LOSSLESS.get(model.dtype, "f32"), model) if between else 0
        )

    @classmethod
    def snippet(
        cls, contender: Contender, settings: Settings, path: str, prompt: SnippetPrompt, cap: int, stop_ids: list[int]
    ) -> str:
        details = settings.details
        file = path if contender.precision == OWN else str(Path(path) / PREPARED)
        room = len(prompt.text.encode()) + 8 + cap  # a text has no more tokens than bytes
        lines = [
            "from llama_cpp import Llama",
            "",
            "model = Llama(",
            f"    {file!r},",
            f"    n_ctx={room},",
            f"    n_threads={details['threads']},",
            f"    n_threads_batch={details['threads']},",
            f"    n_gpu_layers={-1 if details['gpu_layers'] == ALL_LAYERS else details['gpu_layers']},",
            f"    flash_attn={details['kv'] != 'f32'},",
            f"    type_k={KV_TYPES[details['kv']]},  # {details['kv']}",
            f"    type_v={KV_TYPES[details['kv']]},",
            "    swa_full=False,",
            *(["    chat_format='chat_template.default',  # the one in the file"] if prompt.messages else []),
            "    verbose=False,",
            ")",
        ]
        if prompt.messages is not None:
            lines += [
                f"messages = {prompt.messages!r}",
                f"answer = model.create_chat_completion(messages, max_tokens={cap}, temperature=0.0)",
                "print(answer['choices'][0]['message']['content'])",
            ]
        else:
            lines += [
                f"ids = model.tokenize({prompt.text!r}.encode(), add_bos={not prompt.template_file}, special=True)",
                f"answer = model.create_completion(ids, max_tokens={cap}, temperature=0.0)",
                "print(answer['choices'][0]['text'])",
            ]
        return "\n".join(lines) + "\n"

    # ---- in the worker

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.llama: Any = None
        self.numpy: Any = None
        self.log: _Log
        self.model: Any = None
        self.context: Any = None
        self.vocabulary: Any = None
        self.width = 0  # of a row of logits
        self.length = self.outputs = 0  # what the context has room for

    def import_packages(self) -> None:
        if self.job.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a library with CUDA would let the GPU help with long prompts
        import llama_cpp
        import numpy

        self.llama, self.numpy = llama_cpp, numpy
        self.log = _Log(llama_cpp)
        llama_cpp.llama_backend_init()

    def prepare(self, out: str) -> None:
        details, precision = self.job.settings["details"], self.job.precision
        source, made = Path(self.job.model_path), Path(out) / PREPARED
        if details["converts"]:
            direct = precision in FLOATS
            source = made if direct else Path(out) / "full.gguf"
            _convert(self.job, source, precision if direct else details["lossless"])
            if direct:
                return
        self.import_packages()
        parameters = self.llama.llama_model_quantize_default_params()
        parameters.nthread = self.job.threads
        parameters.ftype = FILE_TYPES[precision]
        if self.llama.llama_model_quantize(str(source).encode(), str(made).encode(), ctypes.byref(parameters)):
            raise RuntimeError(self.log.explain(f"llama.cpp could not quantize it to {precision}"))
        if details["converts"]:
            source.unlink()

    def load(self) -> None:
        llama, details = self.llama, self.job.settings["details"]
        if self.job.device == "cuda" and not llama.llama_supports_gpu_offload():
            raise RuntimeError("this llama.cpp was built without CUDA")
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = details["gpu_layers"]
        self.model = llama.llama_model_load_from_file(self._file.encode(), parameters)
        if not self.model:
            raise RuntimeError(self.log.explain("llama.cpp could not load the file"))
        self.vocabulary = llama.llama_model_get_vocab(self.model)
        self.width = llama.llama_vocab_n_tokens(self.vocabulary)
        self._make_context(*self._room())

    def generate(
        self,
        ids: Sequence[int],
        n: int,
        stop_ids: Sequence[int],
        on_token: OnToken,
        sampling: Sampling | None = None,
    ) -> list[int]:
        self._empty_context(len(ids) + n, 1)
        sampler = self._sampler(sampling, ids) if sampling else None
        try:
            return self._generate(
                ids, n, frozenset(stop_ids), on_token, self._drawn(sampler) if sampler else self._best
            )
        finally:
            if sampler:
                self.llama.llama_sampler_free(sampler)

    def _generate(
        self, ids: Sequence[int], n: int, stop_ids: frozenset[int], on_token: OnToken, choose: Callable[[], int]
    ) -> list[int]:
        for start in range(0, len(ids), PROMPT_BATCH):
            self._decode(_batch(self.llama, ids[start : start + PROMPT_BATCH]))
        step = _batch(self.llama, ids[-1:])  # one id; llama.cpp counts the positions
        new: list[int] = []
        while True:
            token = choose()
            on_token(token)
            new.append(token)
            if len(new) == n or token in stop_ids:
                return new
            step.token[0] = token
            self._decode(step)

    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        rows = self._score_rows
        self._empty_context(len(ids), rows)
        for start in range(0, len(ids), rows):
            chunk = ids[start : start + rows]
            self._decode(_batch(self.llama, chunk, every=True))
            yield start, self._logits(0, len(chunk)).copy()

    def tokenize(self, text: str) -> list[int] | None:
        data, llama = text.encode(), self.llama
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = llama.llama_tokenize(self.vocabulary, data, len(data), ids, len(ids), True, True)
        if count < 0:
            raise RuntimeError(f"llama.cpp's tokenizer wants {-count} ids for a text of {len(data)} bytes")
        found = list(ids[:count])
        begin = llama.llama_vocab_bos(self.vocabulary)
        # the file may say that a begin token is added, and the text may bring it: one of them is meant
        return found[1:] if found[:2] == [begin, begin] else found

    def render(self, messages: list[dict[str, str]]) -> str | None:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = self.llama.llama_model_chat_template(self.model, None)
        if not template:
            return None
        begin = self._token_text(self.llama.llama_vocab_bos(self.vocabulary))
        end = self._token_text(self.llama.llama_vocab_eos(self.vocabulary))
        formatter = Jinja2ChatFormatter(template=template.decode(), eos_token=end, bos_token=begin)
        return str(formatter(messages=messages).prompt)

    def effective(self) -> dict[str, Any]:
        llama, details = self.llama, self.job.settings["details"]
        return {
            "dtype": (llama.llama_ftype_name(llama.llama_model_ftype(self.model)) or b"unknown").decode(),
            "attention": self._attention,
            "kv_cache": f"{details['kv']}, room for {llama.llama_n_ctx(self.context)} tokens",
            "threads": llama.llama_n_threads(self.context),
            "threads_prompt": llama.llama_n_threads_batch(self.context),
            "devices": [self.job.device] if details["gpu_layers"] in (0, ALL_LAYERS) else ["cpu", self.job.device],
            "gpu_layers": details["gpu_layers"] if details["gpu_layers"] != ALL_LAYERS else "all",
            "sliding_window": llama.llama_model_n_swa(self.model) or None,
            "processor": llama.llama_print_system_info().decode(errors="replace").strip(),
        }

    def loaded_bytes(self) -> int | None:
        return int(self.llama.llama_model_size(self.model))

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or any(sign in str(error).lower() for sign in OUT_OF_MEMORY)

    def close(self) -> None:
        if self.context:
            self.llama.llama_free(self.context)
        if self.model:
            self.llama.llama_model_free(self.model)
        self.context = self.model = None

    @property
    def _file(self) -> str:
        return str(Path(self.job.prepared) / PREPARED) if self.job.prepared else self.job.model_path

    @property
    def _attention(self) -> str:
        kv = self.job.settings["details"]["kv"]
        flash = kv != "f32" and (kv.startswith("q") or self.log.flash)  # a quantized cache is read by no other
        return {True: "flash", False: "plain", None: "flash where it can"}[flash]

    @property
    def _score_rows(self) -> int:
        return max(1, min(SCORE_ROWS, SCORE_BYTES // (4 * self.width)))

    def _room(self) -> tuple[int, int]:
        """The longest text of this job, and how many rows of logits a call gives."""
        job = self.job
        asked = max(map(len, [*job.prompts, *job.lengths.values()]), default=0)
        new = max(job.max_new_tokens, 0 if job.kind in ("speed", "cold") else max(job.response_cap, job.sample_tokens))
        scores = max((len(document["ids"]) for document in job.documents), default=0)
        return (max(asked + new, scores), self._score_rows if job.kind in ("score", "floor", "tasks") else 1)

    def _make_context(self, length: int, outputs: int) -> None:
        llama, details = self.llama, self.job.settings["details"]
        if self.context:
            llama.llama_free(self.context)
        parameters = llama.llama_context_default_params()
        if details["kv"] == "f32":  # flash attention, else "auto", would round it to f16
            parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.n_ctx = length
        parameters.n_batch = PROMPT_BATCH
        parameters.n_outputs_max = outputs  # else room is made for the logits of every id of a prompt
        parameters.n_threads = parameters.n_threads_batch = self.job.threads
        parameters.type_k = parameters.type_v = KV_TYPES[details["kv"]]
        parameters.swa_full = False  # nothing is ever reused, so a sliding window needs no more than itself
        parameters.offload_kqv = parameters.op_offload = self.job.device != "cpu"
        self.context = llama.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise RuntimeError(self.log.explain(f"llama.cpp could not make room for {length} tokens"))
        self.length, self.outputs = length, outputs

    def _empty_context(self, length: int, outputs: int) -> None:
        window = self.job.settings["details"]["window"]
        if window and length > window and not self.llama.llama_model_n_swa(self.model):
            raise RuntimeError(
                f"llama.cpp does not use this model's sliding window of {window} tokens; with {length}, as asked here, "
                "it would be another model"
            )
        if length > self.length or outputs > self.outputs:
            # where the lengths are not known before, not one more context for every longer text
            self._make_context(max(length, 2 * self.length), max(outputs, self.outputs))
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), False)

    def _decode(self, batch: Any) -> None:
        if code := self.llama.llama_decode(self.context, batch):
            raise RuntimeError(self.log.explain(f"llama.cpp could not compute (llama_decode gave {code})"))

    def _logits(self, row: int, rows: int) -> Any:
        """A view of llama.cpp's own buffer: the next call overwrites it."""
        pointer = self.llama.llama_get_logits_ith(self.context, row)
        return self.numpy.ctypeslib.as_array(pointer, shape=(rows, self.width))

    def _best(self) -> int:
        return int(self._logits(-1, 1).argmax())

    def _drawn(self, sampler: Any) -> Callable[[], int]:
        return lambda: int(self.llama.llama_sampler_sample(sampler, self.context, -1))

    def _sampler(self, sampling: Sampling, ids: Sequence[int]) -> Any:
        """A chain in the order in which transformers applies the same settings."""
        llama = self.llama
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        steps = [llama.llama_sampler_init_temp(sampling.temperature)]
        if sampling.repetition_penalty != 1.0:
            penalty = (self.width, self.length, sampling.repetition_penalty, 0.0, 0.0)
            steps.insert(0, llama.llama_sampler_init_penalties(*penalty))
        if sampling.top_k:
            steps.append(llama.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1.0:
            steps.append(llama.llama_sampler_init_top_p(sampling.top_p, 1))
        for step in (*steps, llama.llama_sampler_init_dist(sampling.seed)):
            llama.llama_sampler_chain_add(chain, step)
        for token in ids:
            llama.llama_sampler_accept(chain, token)  # a penalty counts the prompt too
        return chain

    def _token_text(self, token: int) -> str:
        return "" if token < 0 else self.llama.llama_vocab_get_text(self.vocabulary, token).decode(errors="replace")


class _Log:
    """What llama.cpp says: warnings go to the worker's log, and the last error explains what failed."""

    def __init__(self, llama: Any) -> None:
        self.flash: bool | None = None  # whether attention is flash attention, once llama.cpp has decided
        self._errors: list[str] = []
        self._callback = llama.llama_log_callback(self._say)  # kept, since llama.cpp calls it
        llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _say(self, level: int, text: bytes, _: Any) -> None:
        if b"Flash Attention" in text:
            self.flash = b"enabled" in text
        if level in (WARNING, ERROR):  # of thousands of lines while it loads
            sys.stderr.write(text.decode(errors="replace"))
        if level == ERROR:
            self._errors.append(text.decode(errors="replace").strip())

    def explain(self, what: str) -> str:
        """What failed, with the last things that llama.cpp said of it."""
        return f"{what}: {'; '.join(self._errors[-3:])}" if self._errors else what


def _batch(llama: Any, ids: Sequence[int], every: bool = False) -> Any:
    """The ids as one call's input, after those already there; logits of the last alone, or of every one."""
    batch = llama.llama_batch(n_tokens=len(ids), token=(ctypes.c_int32 * len(ids))(*ids))
    if every:
        batch.logits = (ctypes.c_int8 * len(ids))(*[1] * len(ids))
    return batch  # it keeps its arrays alive; one that llama_batch_get_one made would not


def _file_bytes(precision: str, model: Model) -> int:
    """Bytes of the weights in a GGUF file of this precision, by llama.cpp's choice of a type for each tensor."""
    if precision == OWN:
        return model.weight_bytes
    if precision in FLOATS:
        return model.text_parameters * FLOAT_BYTES[precision]
    shape = model.shape
    most, better, head = MIXTURES[precision]
    table = shape.vocabulary * shape.hidden
    inner = shape.intermediate or 4 * shape.hidden
    values = shape.layers * shape.hidden * shape.kv_heads * shape.head_dim
    downs = shape.layers * shape.hidden * inner
    rest = max(model.text_parameters - table * (1 if shape.tied else 2) - values - downs, 0)
    bits = table * _bits(head, shape.hidden) + (0 if shape.tied else table * _bits(most, shape.hidden))
    bits += values * (_bits(most, shape.hidden) + _bits(better, shape.hidden)) / 2
    bits += downs * (_bits(most, inner) + _bits(better, inner)) / 2
    return int((bits + rest * _bits(most, shape.hidden)) / 8)


def _bits(kind: str, row: int) -> float:
    """Bits per weight of a type; rows that are no whole blocks of it get another."""
    kind = IN_SMALL_BLOCKS.get(kind, kind) if row % 256 else kind
    return 16.0 if row % 32 else BITS[kind]


def _other_gemma(model: Model) -> str | None:
    """Where a Gemma is not as llama.cpp takes every Gemma to be: the converter does not tell it."""
    if model.kind == "gguf" or model.model_type not in ("gemma2", "gemma3", "gemma3_text"):
        return None
    config = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
    text, shape = config.get("text_config", config), model.shape
    period, layers_of_27b = (2, 46) if model.model_type == "gemma2" else (6, 62)
    scale = shape.hidden // shape.heads if shape.layers == layers_of_27b else shape.head_dim
    if (its := text.get("query_pre_attn_scalar", 256)) != scale:
        return f"llama.cpp takes query_pre_attn_scalar to be {scale} in a Gemma of this shape, and here it is {its}"
    kinds = text.get("layer_types") or []
    if any((kind == "full_attention") != (number % period == 0) for number, kind in enumerate(kinds, start=1)):
        return f"llama.cpp takes every layer of a Gemma but each {period}th to have a sliding window; not so here"
    return None


def _has_cuda(engine: type[Engine], contender: Contender, model: Model) -> bool | None:
    """Whether the llama.cpp that would run a contender has its CUDA part, by its files; None if there is none yet."""
    from weighin import environments

    found = environments.for_contender(engine, contender, model)
    if isinstance(found, environments.Missing):
        return None
    folders = list(Path(found.python).parent.parent.glob("lib/python*/site-packages/llama_cpp"))
    spec = importlib.util.find_spec("llama_cpp") if found.python == sys.executable else None
    folders += map(Path, (spec.submodule_search_locations or []) if spec else [])
    return any(list(folder.glob("lib/*ggml-cuda*")) for folder in folders)


def _convert(job: Job, file: Path, kind: str) -> None:
    """Run llama.cpp's converter in this process; what it says against a model is the error."""
    folder, model = _converter_folder(), Path(job.model_path)
    named = any(Path(weights).match("model*.safetensors") for weights in job.weight_files)
    if not (named or job.allow_pickle or (model / "model.safetensors.index.json").exists()):
        raise RuntimeError("llama.cpp's converter reads safetensors only if they are named model*.safetensors")
    os.environ["HF_HUB_OFFLINE"] = "1"  # the files are here; nothing may be fetched
    from transformers import AutoTokenizer

    if not job.remote_code:
        trusting = AutoTokenizer.from_pretrained  # the converter would let a tokenizer run the model's own code
        AutoTokenizer.from_pretrained = lambda *words, **more: trusting(*words, **{**more, "trust_remote_code": False})
    errors = _LastError(logging.ERROR)
    logging.getLogger().addHandler(errors)
    logging.getLogger().addHandler(logging.StreamHandler())
    sys.path.insert(0, str(folder))
    sys.argv = [CONVERTER_FILES[0], str(model), "--outfile", str(file), "--outtype", kind]
    try:
        runpy.run_path(str(folder / CONVERTER_FILES[0]), run_name="__main__")
    except Exception as error:
        said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise RuntimeError(f"llama.cpp's converter does not take this model: {said}") from error
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"llama.cpp's converter does not take this model: {errors.said}") from end


class _LastError(logging.Handler):
    """Keeps what was last logged as an error: the converter says why, and then only ends."""

    said = "it did not say why"

    def emit(self, record: logging.LogRecord) -> None:
        self.said = record.getMessage()


def _converter_folder() -> Path:
    spec = importlib.util.find_spec(CONVERTER)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"llama.cpp's converter is not in this environment: {LlamaCppEngine.install}")
    return Path(next(iter(spec.submodule_search_locations)))


def _bring_converter(site_packages: Path) -> None:
    """Take the converter out of the source distribution that pip compiled: the wheel leaves it out."""
    python = str(site_packages.parents[2] / "bin" / "python")
    command = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--no-binary=llama-cpp-python", f"llama-cpp-python=={VERSION}", "--dest"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, folder], capture_output=True, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL
        )
        archives = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not archives:
            last = "".join(f"\n  {line}" for line in (done.stdout + done.stderr).strip().splitlines()[-5:])
            raise WeighinError(f"llama.cpp's converter could not be downloaded:{last}\nMend that, and try again.")
        _unpack_converter(archives[0], site_packages / CONVERTER)
    # a name and a version, by which the environment is known to have it
    information = site_packages / f"{CONVERTER}-{VERSION}.dist-info"
    information.mkdir(exist_ok=True)
    words = f"Metadata-Version: 2.1\nName: {CONVERTER_DISTRIBUTION}\nVersion: {VERSION}\n"
    (information / "METADATA").write_text(words, encoding="utf-8")


def _unpack_converter(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as members:
        for member in members:
            name = member.name.partition("/vendor/llama.cpp/")[2]
            wanted = name in CONVERTER_FILES or name.startswith(tuple(f for f in CONVERTER_FILES if f.endswith("/")))
            content = members.extractfile(member) if wanted and member.isfile() else None
            if content is not None and ".." not in name.split("/"):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(content.read())
    if not (target / CONVERTER_FILES[0]).is_file():
        raise WeighinError(f"{archive.name} holds no {CONVERTER_FILES[0]}, which converts models for llama.cpp.")


ENGINE = LlamaCppEngine
