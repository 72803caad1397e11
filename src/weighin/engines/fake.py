"""A full engine with scripted times in virtual time and scripted outputs, so that the whole program runs in seconds.

`fake:fp32@cpu+script=bimodal` and so on. It is never offered by default and never stands in for another engine.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weighin.engines import Engine, Job, OnToken, Sampling, Settings, SnippetPrompt

if TYPE_CHECKING:
    from weighin.machine import Machine
    from weighin.model import Model
    from weighin.plan import Contender

TOKEN_SECONDS = {"fp32": 0.05, "bf16": 0.03, "nf4": 0.025, "int8": 0.04}
BYTES = {"fp32": 4.0, "bf16": 2.0, "nf4": 0.5625, "int8": 1.0}
SCRIPTS = ("constant", "slow-first", "slow-second", "bimodal", "drifting", "heavy-tailed", "noisy", "fickle")
NOISE = {"fp32": 0.0, "bf16": 0.01, "nf4": 0.5, "int8": 0.1}  # of the logits
SCORE_ROWS = 128
FAILURES = ("error", "oom", "segv", "kill", "hang", "silent")


class FakeEngine(Engine):
    name = "fake"
    title = "scripted times, for tests"
    precisions = tuple(TOKEN_SECONDS)
    devices = ("cpu", "cuda")
    options = {  # noqa: RUF012 - a ClassVar of the contract
        "script": SCRIPTS,
        "token": ("*",),  # seconds per token
        "load": ("*",),  # seconds to load
        "spread": ("*",),  # between processes, as the sigma of a log-normal factor
        "seed": ("*",),
        "fail": ("*",),  # PHASE.KIND[.ROUND], e.g. load.oom
        "says": ("*",),  # ids it answers, dot-separated; then it repeats the last
        "real": (),  # really sleep
        "alloc": ("*",),  # MiB that are there for 5 ms while it loads, for real
        "mapped": ("*",),  # MiB of a file that it maps and reads
        "fork": ("*",),  # MiB that a child of its own holds while it answers
        "threads": ("*",),  # it says that it runs with so many
        "missing": (),  # pretend not to be installed
        "noise": ("*",),  # how far its logits are off, as a standard deviation
        "nan": (),  # its logits are no numbers
        "blind": (),  # it says no probabilities
        "spelling": (),  # its own tokenizer gives other ids
    }
    hidden = True
    virtual = True
    log_probabilities = "full"
    samples = True

    @classmethod
    def contenders(cls, machine: Machine, model: Model) -> list[str]:
        return []

    @classmethod
    def requirements_for(cls, contender: Contender, model: Model) -> tuple[str, ...]:
        return ("weighin-fake-engine-that-nobody-has",) if "missing" in contender.options else ()

    @classmethod
    def cannot_run(cls, contender: Contender, machine: Machine, model: Model) -> str | None:
        return "no CUDA GPU here" if contender.device == "cuda" and not machine.gpus else None

    @classmethod
    def probabilities_of(cls, contender: Contender) -> str:
        return "" if "blind" in contender.options else cls.log_probabilities

    @classmethod
    def starts_processes(cls, contender: Contender) -> bool:
        return "fork" in contender.options

    @classmethod
    def settings(cls, contender: Contender, machine: Machine, model: Model) -> Settings:
        return Settings(
            hardware="CPU only" if contender.device == "cpu" else "NVIDIA GPU with CUDA",
            quantization="none" if contender.precision in ("fp32", "bf16") else contender.precision,
            dtype=contender.precision,
            device_map=contender.device,
            dependencies=(),
            uses_gpu=contender.device == "cuda",
        )

    @classmethod
    def weight_bytes(cls, contender: Contender, settings: Settings, model: Model) -> int:
        return int(model.parameters * BYTES[contender.precision])

    @classmethod
    def snippet(
        cls, contender: Contender, settings: Settings, path: str, prompt: SnippetPrompt, cap: int, stop_ids: list[int]
    ) -> str:
        return f"print('scripted: {contender}')\n"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.virtual_now = job.spawned_at
        options = job.options
        self.real = "real" in options
        self.script = options.get("script", "constant")
        self.token_seconds = float(options.get("token") or TOKEN_SECONDS[job.precision])
        self.load_seconds = float(options.get("load") or 1.0)
        phase, _, rest = options.get("fail", "").partition(".")
        kind, _, which_round = rest.partition(".")
        self.failure = (phase, kind) if phase and which_round in ("", str(job.round)) else ("", "")
        # Every process draws anew, and the same process draws the same again.
        seed = f"{options.get('seed', '0')}|{job.contender}|{job.round}|{job.kind}"
        self.random = random.Random(hashlib.sha256(seed.encode()).digest())
        spread = float(options.get("spread") or 0.0)
        self.factor = self.random.lognormvariate(0.0, spread) if spread else 1.0
        if self.script == "bimodal":
            self.factor *= 2.0 if job.round % 2 == 0 else 1.0
        if self.script == "drifting":
            self.factor *= 1.0 + 0.1 * (job.round - 1)
        self.calls = 0
        self.children: list[int] = []

    def clock(self) -> float:
        return self.virtual_now

    def import_packages(self) -> None:
        self._fail("import")
        self._pass(0.5)

    def load(self) -> None:
        self._fail("load")
        self._pass(self.load_seconds)
        self._use_memory()

    def generate(
        self,
        ids: Sequence[int],
        n: int,
        stop_ids: Sequence[int],
        on_token: OnToken,
        sampling: Sampling | None = None,
    ) -> list[int]:
        self.calls += 1
        if sampling is not None:
            draw = random.Random(sampling.seed)
            ids = [draw.randrange(2, self.job.vocabulary) for _ in range(n)]
        said = [int(i) for i in self.job.options.get("says", "").split(".") if i] or list(ids)
        if self.script == "fickle":
            said = [said[0] + self.job.round % 2]
        new: list[int] = []
        self._pass(0.001 * len(ids) * self.factor)
        for i in range(n):
            self._fail(f"token{i + 1}")
            slow_calls = {"slow-first": 1, "slow-second": 2}.get(self.script, 0)
            slow = 5.0 if self.calls <= slow_calls else 1.0
            tail = self.random.paretovariate(1.5) if self.script == "heavy-tailed" else 1.0
            noise = self.random.lognormvariate(0.0, 0.1) if self.script == "noisy" else 1.0
            self._pass(self.token_seconds * self.factor * slow * tail * noise)
            new.append(said[min(i, len(said) - 1)])
            on_token(new[-1])
            if new[-1] in stop_ids:
                break
        return new

    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        import numpy as np

        self._fail("score")
        self._pass(0.001 * len(ids) * self.factor)
        for start in range(0, len(ids), SCORE_ROWS):
            chunk = ids[start : start + SCORE_ROWS]
            rows = [_logits(self.job.vocabulary, tuple(ids[: start + i + 1][-3:])) for i in range(len(chunk))]
            logits = np.stack(rows)
            noise = float(self.job.options.get("noise") or NOISE[self.job.precision])
            for i in range(len(logits)):
                draw = np.random.default_rng([start + i, len(ids), int(noise * 1e6)])
                logits[i] += noise * draw.standard_normal(logits.shape[1])
            if "nan" in self.job.options:
                logits[-1, 0] = np.nan
            yield start, logits.astype(np.float32)

    def tokenize(self, text: str) -> list[int] | None:
        return [1, 2, 3] if "spelling" in self.job.options else None

    def loaded_bytes(self) -> int | None:
        return None

    def effective(self) -> dict[str, Any]:
        threads = int(self.job.options.get("threads") or self.job.threads)
        return {"dtype": self.job.precision, "threads": threads, "devices": [self.job.device]}

    def close(self) -> None:
        for child in self.children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def _use_memory(self) -> None:
        """Memory that is really used, so that what a probe reports can be checked against what is known."""
        options = self.job.options
        if "alloc" in options:
            held = bytearray(_mib(options["alloc"]))
            _touch(held)
            time.sleep(0.005)
            del held
        if "mapped" in options:
            with tempfile.TemporaryFile() as file:
                file.truncate(_mib(options["mapped"]))
                self.mapped = mmap.mmap(file.fileno(), 0)
                _touch(self.mapped)
        if "fork" in options:
            ready, done = os.pipe()
            child = os.fork()
            if child == 0:
                held = bytearray(_mib(options["fork"]))
                _touch(held)
                os.write(done, b"!")
                time.sleep(3600)
            os.read(ready, 1)
            self.children.append(child)

    def _pass(self, seconds: float) -> None:
        self.virtual_now += seconds
        if self.real:
            time.sleep(seconds)

    def _fail(self, phase: str) -> None:
        if self.failure[0] != phase:
            return
        kind = self.failure[1]
        if kind == "oom":
            raise MemoryError(f"scripted: out of memory at {phase}")
        if kind == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "silent":
            os._exit(0)
        if kind == "hang":
            time.sleep(3600)
        raise RuntimeError(f"scripted: failed at {phase}")


def _logits(vocabulary: int, before: tuple[int, ...]) -> Any:
    """What every fake finds likely after these tokens, before its own noise."""
    import numpy as np

    return 3.0 * np.random.default_rng(before).standard_normal(vocabulary)


def _mib(text: str) -> int:
    return int(text) << 20


def _touch(memory: bytearray | mmap.mmap) -> None:
    """Every page, so that it is there and not only promised."""
    for start in range(0, len(memory), mmap.PAGESIZE):
        memory[start] = 1


ENGINE = FakeEngine
