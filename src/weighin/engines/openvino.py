"""OpenVINO GenAI: its own exporter and quantizer (optimum-intel with NNCF), its pipeline, its tokenizer."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighin.engines import Engine, Job, OnToken, Recipe, Sampling, Settings, SnippetPrompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weighin.machine import Machine
    from weighin.model import Model
    from weighin.plan import Contender

GENAI, OPTIMUM, NNCF = "2026.4", "2.2.0", "3.4.0"
RECIPE_VERSION = 1
DEVICE = "CPU"
MODEL, TOKENIZER = "openvino_model", "openvino_tokenizer"
QUANTIZED = ("int4", "int8")
BYTES = {"fp32": 4, "fp16": 2}
CHECKPOINT_BYTES = {"fp64": 8, "fp32": 4}  # what is not named has two
KV_CACHE = {"int4": "u8", "int8": "u8", "fp16": "f16", "fp32": "f32"}
GROUPS = (64, 32)  # values that share a scale in int4, and what narrower layers get
TORCH = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
BF16_FEATURES = {"avx512_bf16", "amx_bf16"}
SCORING = ("score", "floor", "tasks")
SCORE_BYTES = 64 * 10**6
OUT_OF_MEMORY = ("bad_alloc", "cannot allocate memory", "failed to allocate", "out of memory")


class OpenVinoEngine(Engine):
    name = "openvino"
    title = "OpenVINO GenAI"
    # what is prepared depends on the versions that prepared it, so those are exact
    requirements = (f"openvino-genai>={GENAI}", f"optimum-intel=={OPTIMUM}", f"nncf=={NNCF}")
    install = "weighin engines install openvino"
    precisions = (*QUANTIZED, "fp16", "fp32")
    log_probabilities = "full"
    samples = True
    environment = Recipe(
        packages=(
            "openvino-genai==2026.4.1.0",
            "openvino==2026.4.1",
            "openvino-tokenizers==2026.4.1.0",
            f"optimum-intel=={OPTIMUM}",
            "optimum==2.3.0",
            f"nncf=={NNCF}",
            "torch==2.13.0",
            "transformers==5.0.0",  # of those that optimum-intel allows, the newest that it exports Gemma with
            "tokenizers==0.22.2",
            "huggingface-hub==1.21.0",
            "numpy==2.4.6",
            # for tokenizers that come as another file than tokenizer.json
            "sentencepiece==0.2.2",
            "protobuf==7.36.2",
            "tiktoken==0.14.0",
        ),
        remove=("torchvision",),  # optimum-intel asks for it, and what pip finds does not match this torch
        bytes=1_550_000_000,
        seconds=115.0,
        modules=("openvino_genai", "openvino_tokenizers", "optimum.exporters.openvino", "nncf"),
    )

    # ---- in weighin's own process

    @classmethod
    def contenders(cls, machine: Machine, model: Model) -> list[str]:
        return [] if _is_quantized(model) else [f"{cls.name}:{precision}@cpu" for precision in QUANTIZED]

    @classmethod
    def cannot_run(cls, contender: Contender, machine: Machine, model: Model) -> str | None:
        if model.auto_class is None:
            return model.auto_class_reason
        if _is_quantized(model):
            return (
                f"the checkpoint is already quantized ({model.quantization}), and OpenVINO's exporter takes full "
                f"precision here; give the model in full precision"
            )
        return None

    @classmethod
    def settings(cls, contender: Contender, machine: Machine, model: Model) -> Settings:
        precision = contender.precision
        bf16 = precision != "fp32" and BF16_FEATURES & set(machine.cpu_features)
        words = {
            "int4": f"4-bit (NNCF INT4_ASYM with AWQ, groups of {GROUPS[0]}; embeddings and head in 8-bit)",
            "int8": "8-bit (NNCF INT8_ASYM)",
        }
        return Settings(
            hardware="CPU only",
            quantization=words.get(precision, "none"),
            dtype="bfloat16" if bf16 else "float32",
            device_map=contender.device,
            dependencies=("openvino-genai", "openvino", "openvino-tokenizers", "optimum-intel", "nncf"),
            details={
                "threads": machine.threads,
                "unpacker": sys.executable if model.kind == "gguf" else None,
                "multimodal": model.multimodal,
                "auto_class": model.auto_class,
            },
        )

    @classmethod
    def weight_bytes(cls, contender: Contender, settings: Settings, model: Model) -> int:
        return _file_bytes(contender.precision, model)

    @classmethod
    def recipe(cls, contender: Contender, model: Model) -> str | None:
        return f"openvino-{contender.precision}-{RECIPE_VERSION}-optimum-intel-{OPTIMUM}-nncf-{NNCF}"

    @classmethod
    def prepared_bytes(cls, contender: Contender, model: Model) -> int:
        checkpoint = 4 if model.kind == "gguf" else CHECKPOINT_BYTES.get(model.dtype, 2)
        copies = (model.kind == "gguf" or model.multimodal) + (contender.precision in QUANTIZED)
        return _file_bytes(contender.precision, model) + model.text_parameters * checkpoint * copies

    @classmethod
    def snippet(
        cls, contender: Contender, settings: Settings, path: str, prompt: SnippetPrompt, cap: int, stop_ids: list[int]
    ) -> str:
        properties = _properties(contender.precision, settings.details["threads"])
        stop = f"eos_token_id={stop_ids[0]}, stop_token_ids={set(stop_ids)}" if stop_ids else "ignore_eos=True"
        lines = [
            "import openvino_genai",
            "",
            f"path = {path!r}",
            f"properties = {properties!r}",
            f"pipeline = openvino_genai.LLMPipeline(path, {DEVICE!r}, ATTENTION_BACKEND='SDPA', **properties)",
            "tokenizer = pipeline.get_tokenizer()",
            f"config = openvino_genai.GenerationConfig(max_new_tokens={cap}, {stop})",
        ]
        if prompt.messages is not None:
            lines += [
                f"messages = {prompt.messages!r}",
                "text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)",
            ]
        else:
            lines += [f"text = {prompt.text!r}"]
        bare = prompt.messages is not None or prompt.template_file
        lines += [
            f"inputs = tokenizer.encode(text, add_special_tokens={not bare})",
            "output = pipeline.generate(inputs, config)",
            "print(tokenizer.decode(output.tokens[0]))",
        ]
        return "\n".join(lines) + "\n"

    # ---- in the worker

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.numpy: Any = None
        self.openvino: Any = None
        self.genai: Any = None
        self.pipeline: Any = None  # answers
        self.streamer: Any = None  # the class of what it hands its tokens to
        self.compiled: Any = None  # the same model with the same properties; gives logits, which a pipeline does not
        self.request: Any = None

    def import_packages(self) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        self.streamer = _streamer_class(openvino_genai)

    def prepare(self, out: str) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # the files are here; nothing may be fetched behind the report
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment] # NNCF would tell its makers what it does
        with tempfile.TemporaryDirectory(dir=out, prefix="making-") as making:
            source = self._full_precision(Path(making) / "source")
            try:
                self._make(source, Path(making) / "exported", Path(out))
            except MemoryError:
                raise
            except Exception as error:
                said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                raise RuntimeError(f"optimum-intel does not take this model: {said}") from error

    def _make(self, source: str, exported: Path, out: Path) -> None:
        if self.job.precision not in QUANTIZED:
            self._export(source, out, self.job.precision)
            return
        self._export(source, exported, "auto")
        _quantize(exported, out, self.job.precision)
        for file in exported.iterdir():  # the tokenizer and its template
            if not (out / file.name).exists():
                shutil.move(file, out)

    def _full_precision(self, folder: Path) -> str:
        """The folder that the exporter reads: the model's own, or what a GGUF file or a multimodal model holds."""
        details = self.job.settings["details"]
        if details["unpacker"]:
            _unpack(details["unpacker"], self.job.model_path, folder)
        elif details["multimodal"]:
            _save_text_side(self.job, details["auto_class"], folder)
        else:
            return self.job.model_path
        return str(folder)

    def _export(self, source: str, out: Path, dtype: str) -> None:
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig
        from transformers import AutoTokenizer

        main_export(
            source,
            out,
            task="text-generation-with-past",
            library_name="transformers",
            ov_config=OVConfig(dtype=dtype),  # without one it would quantize large models as it likes
            convert_tokenizer=True,
            local_files_only=True,
            trust_remote_code=self.job.remote_code,
            model_loading_kwargs=_loading(self.job),
        )
        if not (out / f"{TOKENIZER}.xml").exists():
            # it says nothing about that; asked directly, the converter says why
            converter = importlib.import_module("openvino_tokenizers")
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=self.job.remote_code)
            converter.convert_tokenizer(tokenizer, with_detokenizer=True)
            raise RuntimeError("optimum-intel could not convert the tokenizer, and did not say why")

    def load(self) -> None:
        if self.job.kind in SCORING:
            self._compile()
        else:
            self._open_pipeline()

    def _open_pipeline(self) -> None:
        # Of the two forms the plain one: the other, paged, keeps what it read of earlier prompts.
        properties = _properties(self.job.precision, self.job.threads)
        self.pipeline = self.genai.LLMPipeline(self._path, DEVICE, ATTENTION_BACKEND="SDPA", **properties)

    def _compile(self) -> None:
        properties = _properties(self.job.precision, self.job.threads)
        core = self.openvino.Core()
        self.compiled = core.compile_model(str(Path(self._path) / f"{MODEL}.xml"), DEVICE, properties)
        self.request = self.compiled.create_infer_request()

    def generate(
        self,
        ids: Sequence[int],
        n: int,
        stop_ids: Sequence[int],
        on_token: OnToken,
        sampling: Sampling | None = None,
    ) -> list[int]:
        if self.pipeline is None:
            self._open_pipeline()
        config = self.genai.GenerationConfig(max_new_tokens=n, ignore_eos=not stop_ids)
        if stop_ids:  # both, or it would add those of the model's own generation settings
            config.eos_token_id, config.stop_token_ids = stop_ids[0], set(stop_ids)
        if sampling is not None:
            _draw(config, sampling)
        streamer = self.streamer(on_token)
        prompt = self.openvino.Tensor(self.numpy.array([ids], dtype=self.numpy.int64))
        self.pipeline.generate(prompt, config, streamer)
        new: list[int] = streamer.ids
        return new

    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        if self.compiled is None:
            self._compile()
        numpy = self.numpy
        self.request.reset_state()  # its KV cache
        named = {name for port in self.compiled.inputs for name in port.names}
        tokens = numpy.array([ids], dtype=numpy.int64)
        rows = max(1, SCORE_BYTES // (4 * self._width()))
        for start in range(0, len(ids), rows):
            end = min(start + rows, len(ids))
            inputs = {
                "input_ids": tokens[:, start:end],
                "attention_mask": numpy.ones((1, end), dtype=numpy.int64),
                "position_ids": numpy.arange(start, end)[None],
                "beam_idx": numpy.zeros(1, dtype=numpy.int32),
            }
            output = self.request.infer({name: value for name, value in inputs.items() if name in named})
            yield start, output["logits"][0].astype(numpy.float32, copy=False)

    def _width(self) -> int:
        width = self.compiled.output("logits").partial_shape[2]
        return int(width.get_length()) if width.is_static else self.job.vocabulary

    def tokenize(self, text: str) -> list[int] | None:
        tokenizer = self._tokenizer()
        rendered = any(asked["text"] == text and asked["messages"] for asked in self.job.texts)
        found = tokenizer.encode(text, add_special_tokens=not rendered).input_ids.data
        ids = [int(token) for token in found[0]]
        begin = tokenizer.get_bos_token_id()
        return ids[1:] if ids[:2] == [begin, begin] else ids  # the text brought it itself

    def render(self, messages: list[dict[str, str]]) -> str | None:
        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            return None
        try:
            return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        except RuntimeError:
            return ""  # its template language is a part of Jinja's, and nothing comes of what is not in it

    def _tokenizer(self) -> Any:
        return self.pipeline.get_tokenizer() if self.pipeline else self.genai.Tokenizer(self._path)

    def effective(self) -> dict[str, Any]:
        """A pipeline tells nothing of itself: these are the properties it was given, else the device's own."""
        properties = _properties(self.job.precision, self.job.threads)
        core = self.openvino.Core()
        asked = self.compiled.get_property if self.compiled else lambda name: core.get_property(DEVICE, name)
        precision = properties.get("INFERENCE_PRECISION_HINT") or asked("INFERENCE_PRECISION_HINT").to_string()
        return {
            "dtype": TORCH.get(precision, precision),
            "attention": "stateful SDPA",
            "kv_cache": properties["KV_CACHE_PRECISION"],
            "threads": self.job.threads,
            "devices": [DEVICE],
            "dynamic_quantization_group_size": int(asked("DYNAMIC_QUANTIZATION_GROUP_SIZE")),
            "processor": core.get_property(DEVICE, "FULL_DEVICE_NAME"),
        }

    def loaded_bytes(self) -> int | None:
        """The weights' file, which it maps into memory."""
        return (Path(self._path) / f"{MODEL}.bin").stat().st_size

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or any(sign in str(error).lower() for sign in OUT_OF_MEMORY)

    def close(self) -> None:
        self.pipeline = self.request = self.compiled = None

    @property
    def _path(self) -> str:
        assert self.job.prepared is not None
        return self.job.prepared


def _file_bytes(precision: str, model: Model) -> int:
    """Bytes of the exported weights, from the headers."""
    if precision in BYTES:
        return model.text_parameters * BYTES[precision]
    shape = model.shape
    row = 1 + 3 / shape.hidden  # a scale of two bytes and a zero point for every row
    if precision == "int8":
        return int(model.text_parameters * row)
    ends = min(shape.vocabulary * shape.hidden * (1 if shape.tied else 2), model.text_parameters)
    group = next((size for size in GROUPS if shape.hidden % size == 0), None)
    between = 0.5 + 2.5 / group if group else row  # what fits no group stays in 8 bits
    return int(ends * row + (model.text_parameters - ends) * between)


def _properties(precision: str, threads: int) -> dict[str, Any]:
    """OpenVINO's own choice but for the threads; full precision is not rounded anywhere."""
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": KV_CACHE[precision]}
    return properties | ({"INFERENCE_PRECISION_HINT": "f32"} if precision == "fp32" else {})


def _unpack(python: str, gguf: str, out: Path) -> None:
    """By the interpreter that weighin runs in: the older transformers beside the exporter misreads GGUF tokenizers."""
    command = [python, "-m", "weighin.unpack", "model", gguf, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the GGUF file could not be unpacked: {last}")


def _quantize(exported: Path, out: Path, precision: str) -> None:
    from optimum.intel import OVConfig, OVModelForCausalLM, OVQuantizer, OVWeightQuantizationConfig

    # Scales of rows shifted between layers (AWQ) without any text: better by a fifth on the demo, and just as fast.
    four = {"bits": 4, "group_size": GROUPS[0], "group_size_fallback": "adjust", "quant_method": "awq"}
    config = OVWeightQuantizationConfig(sym=False, **(four if precision == "int4" else {"bits": 8}))
    model = OVModelForCausalLM.from_pretrained(exported, export=False, compile=False, local_files_only=True)
    OVQuantizer.from_pretrained(model).quantize(ov_config=OVConfig(quantization_config=config), save_directory=out)


def _loading(job: Job) -> dict[str, Any]:
    return {} if job.allow_pickle else {"use_safetensors": True}


def _save_text_side(job: Job, auto_class: str, out: Path) -> None:
    """The language model of a multimodal one, as a model of its own."""
    import torch
    import transformers

    trust = {"trust_remote_code": job.remote_code}
    auto = getattr(transformers, auto_class)
    whole = auto.from_pretrained(job.model_path, dtype="auto", **_loading(job), **trust)
    with torch.device("meta"):  # a frame for the weights that are there
        text = transformers.AutoModelForCausalLM.from_config(whole.config.get_text_config(), dtype=whole.dtype)
    setattr(text, text.base_model_prefix, whole.get_decoder())
    text.set_output_embeddings(whole.get_output_embeddings())
    text.generation_config = whole.generation_config
    text.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(job.model_path, **trust).save_pretrained(out)


def _draw(config: Any, sampling: Sampling) -> None:
    config.do_sample = True
    config.temperature, config.top_p = sampling.temperature, sampling.top_p
    config.repetition_penalty, config.rng_seed = sampling.repetition_penalty, sampling.seed
    if sampling.top_k:
        config.top_k = sampling.top_k


def _streamer_class(genai: Any) -> Any:
    """What the pipeline hands each token to; its base is only known where the package is."""
    running = genai.StreamingStatus.RUNNING

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, on_token: OnToken) -> None:
            super().__init__()
            self.ids: list[int] = []
            self._on_token = on_token

        def write(self, token: int | list[int]) -> Any:
            for one in token if isinstance(token, list) else [token]:
                self._on_token(one)
                self.ids.append(one)
            return running

        def end(self) -> None:
            pass

    return Streamer


def _is_quantized(model: Model) -> bool:
    """Whether the checkpoint is quantized; a GGUF is unpacked instead."""
    return model.quantization is not None and model.kind != "gguf"


ENGINE = OpenVinoEngine
