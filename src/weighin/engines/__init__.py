"""HOW a model is run: one file per engine, found by listing this folder.

An engine's file is read in two places: in weighin's own process, to say what it needs and what it would do, and in
the worker, to do it. So the top of the file imports the standard library alone; packages are imported in methods.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    import numpy

    from weighin.machine import Machine
    from weighin.model import Model
    from weighin.plan import Contender

OnToken = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a contender means on this machine, decided before it runs; the rows of the report that need no measuring."""

    hardware: str
    quantization: str
    dtype: str
    device_map: str
    dependencies: tuple[str, ...]
    uses_gpu: bool = False
    details: dict[str, Any] = field(default_factory=dict)  # the engine's own; it reads them back in `load`


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an engine's own environment is made: pip's words, every version exact."""

    packages: tuple[str, ...]
    remove: tuple[str, ...] = ()  # what comes along and must go again
    options: tuple[str, ...] = ()  # further words for `pip install`
    bytes: int = 0  # on disk, as measured
    seconds: float = 0.0  # to make, as measured on two cores
    compiles: str = ""  # what pip compiles from source, and how long that takes; said before
    modules: tuple[str, ...] = ()  # what must be importable in it


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn; without one it is the most likely."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job for one contender: all that a worker is told."""

    kind: str  # "prepare", "speed", "cold", "responses", "samples", "score", "floor", "tasks" or "answer"
    round: int
    contender: str
    engine: str
    precision: str
    device: str
    options: dict[str, str]
    settings: dict[str, Any]
    model_path: str
    weight_files: list[str]  # of the model as it came; what was prepared has its own
    prepared: str | None  # what `prepare` made, if it made anything
    out: str | None  # where `prepare` may write
    threads: int
    prompts: list[list[int]]
    lengths: dict[str, list[int]]  # prompt length -> ids of that length
    stop_ids: list[int]
    max_new_tokens: int
    response_cap: int
    repeats: int
    remote_code: bool
    allow_pickle: bool
    spawned_at: float  # CLOCK_MONOTONIC, which all processes of a machine share
    vocabulary: int = 0  # the ids that the tokenizer knows; logits beyond them are padding
    sampling: dict[str, Any] | None = None  # how responses are drawn; None: greedy
    seeds: int = 1  # how often a response is drawn
    texts: list[dict[str, Any]] = field(default_factory=list)  # the prompts before the tokenizer: text, messages
    samples: int = 0
    sample_tokens: int = 0
    documents: list[dict[str, Any]] = field(default_factory=list)  # texts to score: stratum, name, ids, counted
    rows: str | None = None  # the folder of the reference's rows
    rows_kept: int = 0  # of each row; 0: the whole vocabulary
    writes_rows: bool = False  # it is the reference
    memory_bytes: int = 0  # free when the plan was made, by the container's limit too
    from_disk: bool = False  # the weights do not fit into memory: score them layer by layer
    channel: int | None = None  # a socket over which this job is asked


class Engine(ABC):
    """The contract. One instance lives in one worker and serves one contender.

    Everything above `import_packages` is a class method that weighin's own process calls; it must be quick and must
    import nothing heavy. Everything from there on runs in the worker.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    requirements: ClassVar[tuple[str, ...]] = ()
    """Requirement specifiers of the engine as a whole; `requirements_for` says what a contender needs of them."""
    install: ClassVar[str] = ""
    """The line that installs what is missing."""
    precisions: ClassVar[tuple[str, ...]] = ()
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    options: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Option name -> the values it takes; an empty tuple is a flag, ("*",) takes anything."""
    hidden: ClassVar[bool] = False
    """Not offered by default nor listed: only for those who name it."""
    environment: ClassVar[Recipe | None] = None
    """Its own environment, for where the interpreter that weighin runs in does not meet the requirements."""
    untested: ClassVar[tuple[str, ...]] = ()
    """Devices that it was never run on by its authors."""
    log_probabilities: ClassVar[str] = ""
    """"full" where `score` works, "" where it does not."""
    samples: ClassVar[bool] = False
    """Whether `generate` can draw."""
    scores_from_disk: ClassVar[bool] = False
    """Whether it can score a model that does not fit into memory, layer by layer."""

    @classmethod
    @abstractmethod
    def contenders(cls, machine: Machine, model: Model) -> list[str]:
        """The contenders that make sense for this model here, and those whose row should say why they cannot run."""

    @classmethod
    def requirements_for(cls, contender: Contender, model: Model) -> tuple[str, ...]:
        """What this contender needs for this model."""
        return cls.requirements

    @classmethod  # noqa: B027 - most need nothing
    def complete_environment(cls, site_packages: Path) -> None:
        """Repairs in its own environment after pip; the standard library alone."""

    @classmethod
    def cannot_run(cls, contender: Contender, machine: Machine, model: Model) -> str | None:
        """Why this contender cannot run here, as a sentence with a remedy; None if nothing speaks against it."""
        return None

    @classmethod
    def probabilities_of(cls, contender: Contender) -> str:
        """`log_probabilities` of this contender."""
        return cls.log_probabilities

    @classmethod
    def starts_processes(cls, contender: Contender) -> bool:
        """Whether it has processes of its own beside the worker's; their memory is then counted in one group."""
        return False

    @classmethod
    @abstractmethod
    def settings(cls, contender: Contender, machine: Machine, model: Model) -> Settings:
        """What the contender means here. Decided once; `load`, the report and the snippet all use this answer."""

    @classmethod
    @abstractmethod
    def weight_bytes(cls, contender: Contender, settings: Settings, model: Model) -> int:
        """Bytes of weights in memory once loaded, from the headers."""

    @classmethod
    def recipe(cls, contender: Contender, model: Model) -> str | None:
        """The name of what `prepare` makes, in the cache's key; None if nothing needs preparing.

        Contenders with the same recipe share what was prepared.
        """
        return None

    @classmethod
    def prepared_bytes(cls, contender: Contender, model: Model) -> int:
        """Bytes that `prepare` will write, so that a full disk is noticed before."""
        return 0

    @classmethod
    @abstractmethod
    def snippet(
        cls, contender: Contender, settings: Settings, path: str, prompt: SnippetPrompt, cap: int, stop_ids: list[int]
    ) -> str:
        """The 10 to 20 lines a person would paste to get the same answer, without weighin."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def clock(self) -> float:
        """Seconds. Every time in the worker is read here, so that a scripted engine can have a time of its own."""
        return time.perf_counter()

    virtual: ClassVar[bool] = False
    """True if `clock` is not the world's: durations then come from it, also in weighin's own process."""

    def prepare(self, out: str) -> None:
        """Convert, quantize, fill caches, into the empty folder `out`. Never called without a recipe."""
        raise NotImplementedError

    @abstractmethod
    def import_packages(self) -> None:
        """Import what the engine needs, and nothing else: this is timed as `import_seconds`."""

    @abstractmethod
    def load(self) -> None:
        """After this the next call can be `generate`. Work that the first call would do lazily is left to it."""

    @abstractmethod
    def generate(
        self,
        ids: Sequence[int],
        n: int,
        stop_ids: Sequence[int],
        on_token: OnToken,
        sampling: Sampling | None = None,
    ) -> list[int]:
        """Batch 1, from an empty KV cache, greedy unless told how to draw. Gives back the new ids, a stop id included
        if it ended there.

        `on_token` is called once per new id, as soon as it is on the host. Empty `stop_ids` forces `n` new ids.
        """

    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, numpy.ndarray[Any, Any]]]:
        """Yield (start, float32 logits[rows, V]) in order, from an empty KV cache; row i predicts id start+i+1.

        At most 64 MB at a time, in an array that the caller may write into.
        """
        raise NotImplementedError

    def score_all(
        self, documents: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, Iterator[tuple[int, numpy.ndarray[Any, Any]]]]]:
        """(number of the document, its `score`), in any order: an engine that reads its weights from disk does all at
        once."""
        for number, ids in enumerate(documents):
            yield number, self.score(ids)

    def tokenize(self, text: str) -> list[int] | None:
        """The engine's own ids of a text with its special tokens written in it, None if it has no tokenizer."""
        return None

    def render(self, messages: list[dict[str, str]]) -> str | None:
        """The engine's own chat template on a conversation, None if it has none."""
        return None

    def effective(self) -> dict[str, Any]:
        """After `load`: what was really used (dtype, attention, KV cache, threads, device map)."""
        return {}

    def loaded_bytes(self) -> int | None:
        """Bytes of the weights as they lie in memory, None if the engine does not say."""
        return None

    def device_memory(self) -> dict[str, int]:
        """Peak bytes on the device since the start: `reserved` and `allocated`. Empty where the engine does not say."""
        return {}

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether this error of the engine means that memory ran out."""
        return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"

    def close(self) -> None:  # noqa: B027 - most engines have nothing to close
        """Give back what outlives the process."""


@dataclass(frozen=True, kw_only=True)
class SnippetPrompt:
    """The prompt of a snippet, as a person would write it: messages for a chat template, or plain text."""

    messages: list[dict[str, str]] | None
    text: str
    template_file: bool = False  # `text` was rendered by a template of the user's
    remote_code: bool = False  # the user trusts the code that the model brings


def modules() -> list[str]:
    """The module names of this folder's engines."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def of_module(module: str) -> type[Engine]:
    """The engine that a file of this folder defines."""
    engine: type[Engine] = importlib.import_module(f"{__name__}.{module}").ENGINE
    return engine


def everything() -> dict[str, type[Engine]]:
    """Every engine by its name."""
    return {engine.name: engine for engine in map(of_module, modules())}
