"""Hugging Face Transformers: `generate` in full precision, or with bitsandbytes' 4 and 8 bits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weighin import unpack
from weighin.engines import Engine, Job, OnToken, Sampling, Settings, SnippetPrompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weighin.machine import Machine
    from weighin.model import Model
    from weighin.plan import Contender

TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
BITSANDBYTES = ("nf4", "fp4", "int8")
OWN = "own"  # an already quantized checkpoint, as it is
# what transformers needs beside itself to run a checkpoint that is already quantized
QUANTIZERS = {
    "bitsandbytes": "bitsandbytes>=0.45",
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "compressed-tensors": "compressed-tensors",
}
SCORE_BYTES = 64 << 20
DISK_SHARE = 0.6  # of the free memory, for a reference that is scored from disk


class TransformersEngine(Engine):
    name = "transformers"
    title = "Hugging Face Transformers"
    requirements = ("torch>=2.6", "transformers>=5.0", "accelerate>=1.1", "bitsandbytes>=0.45")
    install = "pip install 'torch>=2.6' 'transformers>=5' accelerate bitsandbytes"
    precisions = (*TORCH, *BITSANDBYTES, OWN)
    devices = ("cpu", "cuda", "auto", "mps")
    options = {"compute": tuple(TORCH), "double": ()}  # noqa: RUF012 - a ClassVar of the contract
    log_probabilities = "full"
    samples = True
    scores_from_disk = True

    # ---- in weighin's own process

    @classmethod
    def contenders(cls, machine: Machine, model: Model) -> list[str]:
        gpu = bool(machine.gpus)
        if _is_quantized(model):
            devices = ["cuda"] if gpu else ["cpu"]
            return [f"{cls.name}:{OWN}@{device}" for device in devices]
        names = []
        if gpu:
            half = "bf16" if _gpu_has_bf16(machine) else "fp16"
            names += [f"{p}@cuda" for p in ("nf4", "int8", half)]
        else:
            names += ["nf4@cuda"]  # the row says why it cannot run here
        if machine.mps:
            names += ["bf16@mps"]
        names += [f"{p}@cpu" for p in ("fp32", "bf16", "int8", "nf4")]
        return [f"{cls.name}:{name}" for name in names]

    @classmethod
    def requirements_for(cls, contender: Contender, model: Model) -> tuple[str, ...]:
        base = tuple(r for r in cls.requirements if not r.startswith("bitsandbytes"))
        if contender.precision in BITSANDBYTES:
            return (*base, QUANTIZERS["bitsandbytes"])
        return (*base, *_own_requirement(model)) if contender.precision == OWN else base

    @classmethod
    def cannot_run(cls, contender: Contender, machine: Machine, model: Model) -> str | None:
        if model.auto_class is None:
            return model.auto_class_reason
        if contender.device == "cuda" and not machine.gpus:
            reason = machine.gpu_reason or "none was found"
            return f"no CUDA GPU here: {reason}; run it on a machine with an NVIDIA GPU and its driver"
        if contender.device == "mps" and not machine.mps:
            return "no Apple GPU here"
        if contender.device == "mps" and contender.precision in BITSANDBYTES:
            return "bitsandbytes does not run on Apple GPUs; try transformers:bf16@mps"
        if _is_quantized(model) and contender.precision != OWN:
            return (
                f"the checkpoint is already quantized ({model.quantization}); "
                f"run it as it is: {cls.name}:{OWN}@{contender.device}"
            )
        if not _is_quantized(model) and contender.precision == OWN:
            return f"the checkpoint is not quantized; name a precision, such as {cls.name}:bf16@{contender.device}"
        if "double" in contender.options and contender.precision not in ("nf4", "fp4"):
            return f"double quantization belongs to nf4 and fp4, not {contender.precision}"
        if "compute" in contender.options and contender.precision not in BITSANDBYTES:
            return f"the compute option belongs to {', '.join(BITSANDBYTES)}: {contender.precision} computes in itself"
        return None

    @classmethod
    def settings(cls, contender: Contender, machine: Machine, model: Model) -> Settings:
        on_gpu = contender.device == "cuda" or (contender.device == "auto" and bool(machine.gpus))
        precision = contender.precision
        bnb = precision in BITSANDBYTES
        if precision in TORCH:
            dtype, quantization = precision, "none"
        elif precision == OWN:
            dtype, quantization = model.dtype if model.dtype in TORCH else "auto", f"{model.quantization}, as it is"
        else:
            dtype = contender.options.get("compute") or _compute_dtype(machine, on_gpu)
            bits = "8-bit (bitsandbytes LLM.int8)" if precision == "int8" else f"4-bit (bitsandbytes {precision})"
            quantization = bits + (", double" if "double" in contender.options else "")
        hardware = {"cuda": "NVIDIA GPU with CUDA", "mps": "Apple GPU"}.get(contender.device, "CPU only")
        if contender.device == "auto":
            hardware = "NVIDIA GPU with CUDA, the rest on the CPU" if on_gpu else "CPU only"
        packages = ["transformers", "torch", "accelerate"]
        packages += ["bitsandbytes"] if bnb else [r.split(">")[0] for r in _own_requirement(model) if precision == OWN]
        return Settings(
            hardware=hardware,
            quantization=quantization,
            dtype=TORCH.get(dtype, dtype),
            device_map=contender.device,
            dependencies=(*packages, *(["CUDA"] if on_gpu else [])),
            uses_gpu=on_gpu or contender.device == "mps",
            details={
                "load_in": precision if bnb else None,
                "double": "double" in contender.options,
                "auto_class": model.auto_class,
            },
        )

    @classmethod
    def weight_bytes(cls, contender: Contender, settings: Settings, model: Model) -> int:
        if contender.precision == OWN:
            return model.weight_bytes
        if contender.precision in BYTES:
            return int(model.parameters * BYTES[contender.precision])
        # bitsandbytes leaves embeddings and head alone, and keeps a scale for every block of 64 (4-bit) or row (8-bit).
        shape = model.shape
        left = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
        scales = 1 / 64 if settings.details["double"] else 4 / 64
        per_parameter = 1.0 if contender.precision == "int8" else 0.5 + scales
        compute = 4.0 if settings.dtype == "float32" else 2.0
        return int(left * compute + max(model.parameters - left, 0) * per_parameter)

    @classmethod
    def recipe(cls, contender: Contender, model: Model) -> str | None:
        return unpack.RECIPE if model.kind == "gguf" else None

    @classmethod
    def prepared_bytes(cls, contender: Contender, model: Model) -> int:
        return model.parameters * 4 if model.kind == "gguf" else 0

    @classmethod
    def snippet(
        cls, contender: Contender, settings: Settings, path: str, prompt: SnippetPrompt, cap: int, stop_ids: list[int]
    ) -> str:
        bnb = settings.details["load_in"]
        dtype = f"torch.{settings.dtype}" if settings.dtype in TORCH.values() else f'"{settings.dtype}"'
        lines = ["import torch"] if dtype.startswith("torch.") or bnb else []
        auto = settings.details["auto_class"] or "AutoModelForCausalLM"
        names = [auto, "AutoTokenizer", *(["BitsAndBytesConfig"] if bnb else []), "GenerationConfig"]
        lines += [f"from transformers import {', '.join(names)}", ""]
        lines += [f"path = {path!r}"]
        if bnb:
            lines += [f"quantization = {_bnb_arguments(settings)}"]
        extra = ", quantization_config=quantization" if bnb else ""
        trust = ", trust_remote_code=True" if prompt.remote_code else ""
        extra += trust
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained(path{trust})",
            f"model = {auto}.from_pretrained(path, dtype={dtype}, device_map={settings.device_map!r}{extra})",
            f"model.generation_config = GenerationConfig(max_new_tokens={cap}, do_sample=False, "
            f"eos_token_id={stop_ids or None}, pad_token_id={stop_ids[0] if stop_ids else 0})",
            "",
        ]
        if prompt.messages is not None:
            lines += [
                f"messages = {prompt.messages!r}",
                "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
                "return_tensors='pt', return_dict=True)",
            ]
        else:
            special = ", add_special_tokens=False" if prompt.template_file else ""
            lines += [f"inputs = tokenizer({prompt.text!r}, return_tensors='pt'{special})"]
        lines += [
            "inputs = inputs.to(model.device)",
            "output = model.generate(**inputs)",
            "new = output[0, inputs['input_ids'].shape[1]:]",
            "print(tokenizer.decode(new, skip_special_tokens=True))",
        ]
        return "\n".join(lines) + "\n"

    # ---- in the worker

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.model: Any = None
        self.torch: Any = None
        self.auto: Any = None
        self.offload: Any = None  # where accelerate keeps what is not in the model's own files

    def import_packages(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # the files are here; nothing may be fetched behind the report
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch
        import transformers
        from transformers import BitsAndBytesConfig, GenerationConfig  # noqa: F401 - they import much; not in `load`
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.auto = getattr(transformers, self.job.settings["details"]["auto_class"])
        if self.job.settings["details"]["load_in"]:
            import bitsandbytes  # noqa: F401
        if self.job.kind != "prepare" and not self.job.remote_code:
            # transformers imports a model's own module late; that is importing, not loading.
            config = transformers.AutoConfig.from_pretrained(self._path, trust_remote_code=False)
            self.auto._model_mapping[type(config)]
        self.torch = torch
        torch.set_num_threads(self.job.threads)

    def prepare(self, out: str) -> None:
        unpack.unpack(self.job.model_path, out)

    def load(self) -> None:
        from transformers import BitsAndBytesConfig, GenerationConfig

        torch, settings = self.torch, self.job.settings
        dtype = getattr(torch, settings["dtype"], settings["dtype"])
        arguments: dict[str, Any] = {
            "dtype": dtype,
            "device_map": settings["device_map"],
            "trust_remote_code": self.job.remote_code,
        }
        if not self.job.allow_pickle:
            arguments["use_safetensors"] = True
        if self.job.from_disk:
            arguments |= self._from_disk()
        load_in = settings["details"]["load_in"]
        if load_in == "int8":
            arguments["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
        elif load_in:
            arguments["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=load_in,
                bnb_4bit_compute_dtype=dtype,
                bnb_4bit_use_double_quant=settings["details"]["double"],
            )
        self.model = self.auto.from_pretrained(self._path, **arguments)
        self.model.eval()
        # A model's own settings (a repetition penalty, sampling) would make runs differ between engines.
        self.model.generation_config = GenerationConfig(do_sample=False)
        self._synchronize()

    def _from_disk(self) -> dict[str, Any]:
        """What does not fit stays in the model's own files; accelerate reads each layer when its turn comes."""
        import tempfile

        self.offload = tempfile.TemporaryDirectory(prefix="weighin-offload-")
        room = int(self.job.memory_bytes * DISK_SHARE)
        return {"device_map": "auto", "max_memory": {"cpu": room}, "offload_folder": self.offload.name}

    def generate(
        self,
        ids: Sequence[int],
        n: int,
        stop_ids: Sequence[int],
        on_token: OnToken,
        sampling: Sampling | None = None,
    ) -> list[int]:
        from transformers import GenerationConfig

        drawing: dict[str, Any] = {"do_sample": False}
        if sampling is not None:
            self.torch.manual_seed(sampling.seed)
            drawing = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "repetition_penalty": sampling.repetition_penalty,
            }
        config = GenerationConfig(
            max_new_tokens=n,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=stop_ids[0] if stop_ids else 0,
            **drawing,
        )
        prompt = self.torch.tensor([list(ids)], device=self.model.device)
        streamer = _TokenStreamer(on_token)
        self.model.generate(
            input_ids=prompt,
            attention_mask=self.torch.ones_like(prompt),
            generation_config=config,
            streamer=streamer,
        )
        return streamer.ids

    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        torch = self.torch
        rows = self._score_rows()
        with torch.inference_mode():
            cache = None
            for start in range(0, len(ids), rows):
                chunk = torch.tensor([list(ids[start : start + rows])], device=self.model.device)
                output = self.model(input_ids=chunk, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                yield start, output.logits[0].float().cpu().numpy()

    def _score_rows(self) -> int:
        """Rows at a time: their logits must stay small, however large the vocabulary is."""
        return max(1, SCORE_BYTES // (4 * self.job.vocabulary))

    def score_all(self, documents: Sequence[Sequence[int]]) -> Iterator[tuple[int, Iterator[tuple[int, Any]]]]:
        if not self.job.from_disk:
            yield from super().score_all(documents)
            return
        if not documents:
            return
        hidden = self._hidden_states(documents)
        for number, ids in enumerate(documents):
            yield number, self._head(hidden[number, : len(ids)])

    def _hidden_states(self, documents: Sequence[Sequence[int]]) -> Any:
        """All documents through the layers in one pass, so that every weight is read from disk once."""
        torch = self.torch
        longest = max(map(len, documents))
        ids = torch.zeros((len(documents), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, listed in enumerate(documents):  # padded at the end: no earlier token sees it
            ids[row, : len(listed)] = torch.tensor(list(listed))
            mask[row, : len(listed)] = 1
        with torch.inference_mode():
            output = self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        return output.last_hidden_state

    def _head(self, hidden: Any) -> Iterator[tuple[int, Any]]:
        """The logits of hidden states, by the model's own code for what comes after its layers."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        torch, rows = self.torch, self._score_rows()
        base = self.model.base_model
        forward = base.forward
        try:
            for start in range(0, len(hidden), rows):
                part = hidden[None, start : start + rows]
                base.forward = lambda *_, part=part, **__: BaseModelOutputWithPast(last_hidden_state=part)
                with torch.inference_mode():
                    output = self.model(input_ids=torch.zeros((1, part.shape[1]), dtype=torch.long), use_cache=False)
                yield start, output.logits[0].float().cpu().numpy()
        finally:
            base.forward = forward

    def effective(self) -> dict[str, Any]:
        config = self.model.config
        device_map = getattr(self.model, "hf_device_map", None) or {"": str(self.model.device)}
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": getattr(config, "_attn_implementation", None),
            "kv_cache": "dynamic, " + str(self.model.dtype).removeprefix("torch."),
            "threads": self.torch.get_num_threads(),
            "devices": sorted({str(place) for place in device_map.values()}),
            "class": type(self.model).__name__,
        }

    def loaded_bytes(self) -> int | None:
        # bitsandbytes keeps the scales of its blocks beside the parameters, where get_memory_footprint does not look
        return int(self.model.get_memory_footprint()) + sum(map(_scale_bytes, self.model.parameters()))

    def device_memory(self) -> dict[str, int]:
        torch = self.torch
        if torch is not None and self.job.device == "mps":
            return {"allocated": torch.mps.current_allocated_memory(), "reserved": torch.mps.driver_allocated_memory()}
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return {}
        devices = range(torch.cuda.device_count())
        return {
            "allocated": sum(torch.cuda.max_memory_allocated(d) for d in devices),
            "reserved": sum(torch.cuda.max_memory_reserved(d) for d in devices),
        }

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or any(
            sign in str(error) for sign in ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory")
        )

    def close(self) -> None:
        if self.offload is not None:
            self.offload.cleanup()

    @property
    def _path(self) -> str:
        return self.job.prepared or self.job.model_path

    def _synchronize(self) -> None:
        if self.torch.cuda.is_available() and self.torch.cuda.is_initialized():
            self.torch.cuda.synchronize()
        if self.job.device == "mps":
            self.torch.mps.synchronize()


class _TokenStreamer:
    """What `generate` hands each token to; it brings the prompt first."""

    def __init__(self, on_token: OnToken) -> None:
        self.ids: list[int] = []
        self._on_token = on_token
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        token = int(value.reshape(-1)[0])
        self.ids.append(token)
        self._on_token(token)

    def end(self) -> None:
        pass


def _is_quantized(model: Model) -> bool:
    """Whether the checkpoint is quantized in a way that transformers runs as it is; a GGUF is unpacked instead."""
    return model.quantization is not None and model.kind != "gguf"


def _own_requirement(model: Model) -> tuple[str, ...]:
    """What an already quantized checkpoint needs to run; nothing if it is not, or transformers does it alone."""
    method = (model.quantization or "").partition(" ")[0]
    return (QUANTIZERS[method],) if method in QUANTIZERS else ()


def _scale_bytes(parameter: Any) -> int:
    """Bytes of a quantized parameter's scales, beside its own."""
    state = getattr(parameter, "quant_state", None)
    parts = [getattr(parameter, "SCB", None), getattr(state, "absmax", None), getattr(state, "code", None)]
    nested = getattr(state, "state2", None)
    parts += [getattr(nested, "absmax", None), getattr(nested, "code", None)]
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def _gpu_has_bf16(machine: Machine) -> bool:
    return all(float(gpu.compute_capability or "0") >= 8.0 for gpu in machine.gpus)


def _compute_dtype(machine: Machine, on_gpu: bool) -> str:
    if on_gpu:
        return "bf16" if _gpu_has_bf16(machine) else "fp16"
    return "bf16" if {"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_features) else "fp32"


def _bnb_arguments(settings: Settings) -> str:
    if settings.details["load_in"] == "int8":
        return "BitsAndBytesConfig(load_in_8bit=True)"
    double = ", bnb_4bit_use_double_quant=True" if settings.details["double"] else ""
    return (
        f"BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type={settings.details['load_in']!r}, "
        f"bnb_4bit_compute_dtype=torch.{settings.dtype}{double})"
    )


ENGINE = TransformersEngine
