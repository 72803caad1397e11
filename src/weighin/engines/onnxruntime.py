"""ONNX Runtime, by ONNX Runtime GenAI: what its own model builder makes of a Hugging Face folder."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighin import unpack
from weighin.engines import Engine, Job, OnToken, Recipe, Sampling, Settings, SnippetPrompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weighin.machine import Machine
    from weighin.model import Model
    from weighin.plan import Contender

SERIES = "0.18"  # of ONNX Runtime GenAI: what is prepared, and what is set right in its builder, belong to this one
RECIPE_VERSION = 1
CUDA_PACKAGE = "onnxruntime-genai-cuda"
FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
BITS = {"int4": 4, "int8": 8}
BLOCK = "32"  # weights that share a scale, where no option says otherwise
MIXED = "matmul_mixed_precision=last_matmul:int8,mixed_layers:int8"
MIXED_SHARE = 0.2  # of the layers' weights that `mixed` keeps in 8 bits
QUANTIZING = {"int4": 5.5, "int8": 6.0}  # bytes of memory per parameter that the builder takes, as measured
PROMPT_CHUNK = 512  # ids of a prompt at a time: it keeps the logits of all of them
SCORE_ROWS = 128
SCORE_BYTES = 64 * 10**6
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0}
ATTENTION = ("GroupQueryAttention", "MultiHeadAttention", "SparseAttention", "Attention")
OUT_OF_MEMORY = ("failed to allocate memory", "out of memory", "bad_alloc", "bad allocation", "can't allocate memory")


class OnnxRuntimeEngine(Engine):
    name = "onnxruntime"
    title = "ONNX Runtime GenAI"
    requirements = (
        f"onnxruntime-genai=={SERIES}.*",
        "onnxruntime>=1.31",
        # the builder's
        "onnx>=1.23",
        "onnx-ir>=1.1",
        "transformers>=5.0,<6",
        "torch>=2.6",
    )
    install = "weighin engines install onnxruntime"
    precisions = (*BITS, *FLOATS)
    devices = ("cpu", "cuda")
    options = {"block": ("16", "32", "64", "128"), "accuracy": ("1", "4"), "mixed": ()}  # noqa: RUF012 - a ClassVar
    untested = ("cuda",)
    log_probabilities = "full"
    samples = True
    environment = Recipe(
        packages=(
            f"onnxruntime-genai=={SERIES}.0",
            "onnxruntime==1.31.1",
            "numpy==2.4.6",
            # the builder's
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            "torch==2.13.0",
            "transformers==5.22.2",
            "sentencepiece==0.2.2",
            "protobuf==7.36.2",
            "jinja2==3.1.6",
            # to unpack a GGUF file
            "gguf==0.19.0",
            "accelerate==1.15.0",
        ),
        bytes=1_280_000_000,
        seconds=80.0,
        modules=("onnxruntime_genai", "onnxruntime", "onnx", "onnx_ir", "torch", "transformers", "gguf", "accelerate"),
    )

    # ---- in weighin's own process

    @classmethod
    def contenders(cls, machine: Machine, model: Model) -> list[str]:
        if _is_quantized(model):
            return []
        on_gpu = ["int4@cuda", "fp16@cuda"] if machine.gpus and _has_cuda_package() else []
        return [f"{cls.name}:{name}" for name in (*on_gpu, "int4@cpu", "int8@cpu")]

    @classmethod
    def requirements_for(cls, contender: Contender, model: Model) -> tuple[str, ...]:
        unpacks = ("gguf>=0.10", "accelerate>=1.1") if model.kind == "gguf" else ()
        if contender.device != "cuda":
            return (*cls.requirements, *unpacks)
        return (f"{CUDA_PACKAGE}=={SERIES}.*", "onnxruntime-gpu>=1.31", *cls.requirements[2:], *unpacks)

    @classmethod
    def cannot_run(cls, contender: Contender, machine: Machine, model: Model) -> str | None:
        precision, device, options = contender.precision, contender.device, contender.options
        if device == "cuda" and not machine.gpus:
            reason = machine.gpu_reason or "none was found"
            return f"no CUDA GPU here: {reason}; run it on a machine with an NVIDIA GPU and its driver"
        if device == "cuda" and not _has_cuda_package():
            return (
                f"{cls.name}'s own environment is for the CPU alone; for CUDA, install beside weighin what has it: "
                f"pip install '{CUDA_PACKAGE}=={SERIES}.*' onnxruntime-gpu onnx onnx-ir"
            )
        if device == "cpu" and precision in ("fp16", "bf16"):
            return f"its builder makes {precision} for GPUs alone; try {cls.name}:fp32@cpu or {cls.name}:int8@cpu"
        if options and precision in FLOATS:
            return f"the options {', '.join(cls.options)} are of int4 and int8; {precision} is not quantized"
        if "mixed" in options and precision != "int4":
            return f"mixed keeps 8 bits where 4 lose most; {precision} has 8 everywhere: leave it out, or take int4"
        if "accuracy" in options and device == "cuda":
            return "the option accuracy is how the CPU multiplies; leave it out on a GPU"
        if _is_quantized(model):
            return f"the checkpoint is already quantized ({model.quantization}); give the model in full precision"
        return cls._cannot_quantize(contender, machine, model)

    @classmethod
    def _cannot_quantize(cls, contender: Contender, machine: Machine, model: Model) -> str | None:
        """The builder holds all weights in 32 bits while it quantizes: more than running them ever takes."""
        from weighin import cache

        needed = QUANTIZING.get(contender.precision, 0.0) * model.text_parameters
        if needed <= machine.memory_available_bytes:
            return None
        if cache.is_complete(cache.prepared(model.fingerprint, cls._recipe(contender))):
            return None
        free = machine.memory_available_bytes
        return (
            f"its builder takes about {needed / 1e9:.0f} GB of memory to quantize this model, {free / 1e9:.0f} GB are "
            "free; prepare it on a machine with more, and copy its cache here"
        )

    @classmethod
    def settings(cls, contender: Contender, machine: Machine, model: Model) -> Settings:
        precision, on_gpu = contender.precision, contender.device == "cuda"
        options = contender.options
        quantization, builder = "none", ["hf_token=false"]
        if bits := BITS.get(precision):
            block = options.get("block", BLOCK)
            more = ", 8 for the head and the layers that lose most" if "mixed" in options else ""
            quantization = f"{bits}-bit (ONNX Runtime, blocks of {block}){more}"
            builder += [f"block_size={block}", *(["algo_config=rtn", MIXED] if "mixed" in options else [])]
            builder += [f"accuracy_level={options['accuracy']}"] if "accuracy" in options else []
        computes = FLOATS.get(precision, "float32") if precision in FLOATS or not on_gpu else "float16"
        return Settings(
            hardware="NVIDIA GPU with CUDA" if on_gpu else "CPU only",
            quantization=quantization,
            dtype=computes,
            device_map=contender.device,
            dependencies=(*_packages(contender), *(["CUDA"] if on_gpu else [])),
            uses_gpu=on_gpu,
            details={
                "builder": builder,
                "unpacks": model.kind == "gguf",
                "threads": machine.threads,
                # the builder's own choice on a CPU: activations, too, are rounded to 8 bits in matrix products
                "products": "int8" if precision in BITS and not on_gpu and options.get("accuracy") != "1" else computes,
            },
        )

    @classmethod
    def weight_bytes(cls, contender: Contender, settings: Settings, model: Model) -> int:
        return _bytes(contender, model)

    @classmethod
    def recipe(cls, contender: Contender, model: Model) -> str | None:
        return cls._recipe(contender)

    @classmethod
    def _recipe(cls, contender: Contender) -> str:
        options = "".join(f"-{key}{value}" for key, value in sorted(contender.options.items()))
        return f"onnx-{contender.precision}-{contender.device}{options}-{RECIPE_VERSION}-genai-{SERIES}"

    @classmethod
    def prepared_bytes(cls, contender: Contender, model: Model) -> int:
        between = 4 * model.parameters if model.kind == "gguf" else 0
        return _bytes(contender, model) + between

    @classmethod
    def snippet(
        cls, contender: Contender, settings: Settings, path: str, prompt: SnippetPrompt, cap: int, stop_ids: list[int]
    ) -> str:
        trust = ", trust_remote_code=True" if prompt.remote_code else ""
        if prompt.messages is not None:
            ids = [
                f"messages = {prompt.messages!r}",
                "text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)",
                "ids = tokenizer(text, add_special_tokens=False)['input_ids']",
            ]
        else:
            special = ", add_special_tokens=False" if prompt.template_file else ""
            ids = [f"ids = tokenizer({prompt.text!r}{special})['input_ids']"]
        search = ", ".join(f"{key}={value}" for key, value in GREEDY.items())
        lines = [
            "import onnxruntime_genai as og",
            "from transformers import AutoTokenizer",
            "",
            f"path = {path!r}",
            f"tokenizer = AutoTokenizer.from_pretrained(path{trust})",
            "config = og.Config(path)",
            f"config.overlay('{_overlay(settings.details['threads'])}')",
            "model = og.Model(config)",
            *ids,
            "parameters = og.GeneratorParams(model)",
            f"parameters.set_search_options(max_length=len(ids) + {cap}, {search})",
            "generator = og.Generator(model, parameters)",
            "generator.append_tokens(ids)",
            "new = []",
            f"while len(new) < {cap} and not (new and new[-1] in {stop_ids}):",
            "    generator.generate_next_token()",
            "    new.append(int(generator.get_next_tokens()[0]))",
            "print(tokenizer.decode(new, skip_special_tokens=True))",
        ]
        return "\n".join(lines) + "\n"

    # ---- in the worker

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.genai: Any = None
        self.numpy: Any = None
        self.model: Any = None
        self.tokenizer: Any = None
        self.rows = 1  # of logits at a time, in `score`

    def import_packages(self) -> None:
        import numpy
        import onnxruntime_genai

        self.genai, self.numpy = onnxruntime_genai, numpy
        onnxruntime_genai.disable_telemetry_events()

    def prepare(self, out: str) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # the files are here; nothing may be fetched
        source, between = self.job.model_path, Path(out) / "between"
        if self.job.settings["details"]["unpacks"]:
            unpack.unpack(source, str(between / "unpacked"))
            source = str(between / "unpacked")
        _build(self.job, source, out, str(between / "builder"))
        shutil.rmtree(between, ignore_errors=True)

    def load(self) -> None:
        config = self.genai.Config(self._path)
        config.overlay(_overlay(self.job.threads))
        self.model = self.genai.Model(config)
        vocabulary = json.loads((Path(self._path) / "genai_config.json").read_text())["model"]["vocab_size"]
        self.rows = max(1, min(SCORE_ROWS, SCORE_BYTES // (4 * vocabulary)))

    def generate(
        self,
        ids: Sequence[int],
        n: int,
        stop_ids: Sequence[int],
        on_token: OnToken,
        sampling: Sampling | None = None,
    ) -> list[int]:
        generator, stops = self._generator(len(ids) + n, sampling), frozenset(stop_ids)
        generator.append_tokens(self.numpy.asarray(ids, dtype=self.numpy.int32))
        new: list[int] = []
        while True:
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            on_token(token)
            new.append(token)
            if len(new) == n or token in stops:
                return new
            if generator.is_done():
                # at the model's own end it would repeat that for ever, and has not taken it in: hand it over, go on
                generator.append_tokens([token])

    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        generator = self._generator(len(ids), None)
        for start in range(0, len(ids), self.rows):
            generator.append_tokens(self.numpy.asarray(ids[start : start + self.rows], dtype=self.numpy.int32))
            yield start, generator.get_output("logits")[0].astype(self.numpy.float32, copy=False)

    def tokenize(self, text: str) -> list[int] | None:
        tokenizer = self._tokenizer()
        return [int(token) for token in tokenizer.encode(text)] if tokenizer else None

    def render(self, messages: list[dict[str, str]]) -> str | None:
        tokenizer = self._tokenizer()
        try:
            return str(tokenizer.apply_chat_template(json.dumps(messages), add_generation_prompt=True))
        except (AttributeError, RuntimeError) as error:
            print(f"ONNX Runtime GenAI renders no template of this model: {error}")
            return None

    def effective(self) -> dict[str, Any]:
        settings, graph = self.job.settings, (Path(self._path) / "model.onnx").read_bytes()
        return {
            "dtype": settings["dtype"],
            "matrix_products": settings["details"]["products"],
            "attention": next((name for name in ATTENTION if name.encode() in graph), None),
            "kv_cache": f"{settings['dtype']}, of the length of prompt and answer",
            "threads": self.job.threads,
            "devices": [str(self.model.device_type).lower()],
        }

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or any(sign in str(error).lower() for sign in OUT_OF_MEMORY)

    def close(self) -> None:
        self.tokenizer = self.model = None

    @property
    def _path(self) -> str:
        assert self.job.prepared is not None
        return self.job.prepared

    def _generator(self, length: int, sampling: Sampling | None) -> Any:
        """A fresh one, with an empty KV cache of this length."""
        parameters = self.genai.GeneratorParams(self.model)
        parameters.set_search_options(max_length=length, chunk_size=PROMPT_CHUNK, **GREEDY)
        if sampling:
            parameters.set_search_options(
                do_sample=True,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                repetition_penalty=sampling.repetition_penalty,
                random_seed=sampling.seed,
            )
        return self.genai.Generator(self.model, parameters)

    def _tokenizer(self) -> Any:
        """GenAI's own, None if it knows no tokenizer of this kind; made when first asked for, since ids need none."""
        if self.tokenizer is None:
            try:
                self.tokenizer = self.genai.Tokenizer(self.model)
            except RuntimeError as error:
                print(f"ONNX Runtime GenAI has no tokenizer for this model: {error}")
        return self.tokenizer


def _build(job: Job, source: str, out: str, between: str) -> None:
    """Run GenAI's model builder in this process; what it says against a model is the error."""
    from onnxruntime_genai.models import builder

    words = [*job.settings["details"]["builder"], f"hf_remote={str(job.remote_code).lower()}"]
    common = (None, source, out, job.precision, job.device, between)
    kind = "this model"
    try:
        options = builder.parse_extra_options(*common, words)
        config = options["hf_details"]["hf_config"]
        kind = config.architectures[0]
        _set_right(builder, config)
        builder.create_model(*common, **options)
    except MemoryError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise RuntimeError(f"ONNX Runtime GenAI's builder does not take {kind}: {said}") from error


def _set_right(builder: Any, config: Any) -> None:
    """What this series of the builder misses in a config of transformers 5; every line was tried against its logits."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if config.architectures[0].startswith("Gemma3For"):
        # a RoPE for each kind of layer: the builder wants that of the global ones, and the base of the local ones
        config.rope_local_base_freq = rope["sliding_attention"]["rope_theta"]
        config.rope_parameters = rope = dict(rope["full_attention"])
        _scale_global_layers_alone(builder.Gemma3Model)
    if getattr(text, "sliding_window", None) and getattr(text, "layer_types", None) is None:
        config.layer_types = ["sliding_attention"] * text.num_hidden_layers  # Mistral's and Phi 3's are not listed
    kind = rope.get("rope_type")
    if kind == "default" and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = config.max_position_embeddings  # else it looks for Phi 3's LongRoPE
    if kind == "longrope":
        config.rope_parameters["type"] = kind
    if kind not in ("default", "llama3"):
        builder.LlamaModel.make_rope_init = builder.Model.make_rope_init  # Llama's own passes over all other kinds
    if kind == "yarn" and rope.get("truncate", True):
        raise NotImplementedError("it computes YaRN's RoPE otherwise than transformers, and the answers would be wrong")


def _scale_global_layers_alone(gemma: Any) -> None:
    """Gemma 3 stretches the RoPE of its global layers; the builder would stretch that of the local ones with it."""
    make = gemma.make_rotary_embedding_caches_from_scratch

    def caches(self: Any) -> Any:
        if self.rope_attrs["theta"] == self.rope_local_theta:
            self.rope_attrs["rescale_factors"] = 1
        return make(self)

    gemma.make_rotary_embedding_caches_from_scratch = caches


def _overlay(threads: int) -> str:
    """What is laid over the builder's configuration of the model."""
    return json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}})


def _packages(contender: Contender) -> tuple[str, str]:
    return (CUDA_PACKAGE, "onnxruntime-gpu") if contender.device == "cuda" else ("onnxruntime-genai", "onnxruntime")


def _has_cuda_package() -> bool:
    """Whether this Python has the GenAI that runs on CUDA; its own environment never has."""
    try:
        return bool(importlib.metadata.version(CUDA_PACKAGE))
    except importlib.metadata.PackageNotFoundError:
        return False


def _is_quantized(model: Model) -> bool:
    """Whether the checkpoint is quantized already; a GGUF is unpacked instead."""
    return model.quantization is not None and model.kind != "gguf"


def _bytes(contender: Contender, model: Model) -> int:
    """Bytes of the weights in memory: a tied head is a matrix of its own there, since ONNX Runtime packs it anew."""
    shape, options = model.shape, contender.options
    table = shape.vocabulary * shape.hidden
    layers = max(model.text_parameters - table * (1 if shape.tied else 2), 0)
    width = 4 if contender.precision == "fp32" or (contender.device == "cpu" and contender.precision in BITS) else 2
    # cosine and sine of every position; Gemma 3 has one pair for its global layers and one for its local ones
    rope = (shape.max_positions or 0) * shape.head_dim * width * (2 if model.model_type.startswith("gemma3") else 1)
    bits = BITS.get(contender.precision)
    if bits is None:
        return int((layers + 2 * table) * width + rope)
    scale = width / int(options.get("block", BLOCK))
    weight, eight = bits / 8 + scale, 1 + scale
    mixed = "mixed" in options
    head = eight if mixed else weight
    embedding = (
        head if shape.tied and bits == 4 else width
    )  # a tied one shares the head's 4 bits, no other is quantized
    layer = weight + (eight - weight) * MIXED_SHARE if mixed else weight
    return int(layers * layer + table * (head + embedding) + rope)


ENGINE = OnnxRuntimeEngine
