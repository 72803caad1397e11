"""WHAT is measured: one file per probe, found by listing this folder.

A probe declares its measurements (label, unit, which direction is better), so that no other file lists them.
Probes run in the worker: the standard library alone at the top of a file.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from weighin.engines import Engine, Job, Sampling

Emit = Callable[[dict[str, Any]], None]
SETTLE_SECONDS = 0.05


@dataclass(frozen=True)
class Measure:
    """What a key means. `better` is "lower", "higher" or "" where neither is."""

    label: str
    unit: str
    better: str = ""


@dataclass(frozen=True)
class Call:
    """One call of `generate`: when it began and when each new token was there."""

    prompt_tokens: int
    ids: list[int]
    began: float
    times: list[float]

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.began

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.began

    @property
    def decode_tokens_per_second(self) -> float | None:
        """(n - 1) ÷ (t_n - t_1): the first token belongs to the prefill."""
        if len(self.times) < 2 or self.times[-1] <= self.times[0]:
            return None
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


class Session:
    """What a probe works with: the job, the loaded engine, a clock, phases, and a way to say what it found."""

    def __init__(self, job: Job, engine: Engine, emit: Emit) -> None:
        self.job = job
        self.engine = engine
        self.clock = engine.clock
        self.current = "start"
        self.tokens_in_phase = 0
        self.disk_read_before = 0  # bytes that were read before the job began; set by the probe that loads
        self._emit = emit
        self._said_at = 0.0
        self.probes = [probe(self) for probe in everything() if job.kind in probe.jobs]

    def emit(self, event: dict[str, Any]) -> None:
        """Say something to weighin's own process."""
        self._emit(event)
        self._said_at = time.monotonic()

    def settle(self) -> None:
        """Let weighin's own process write down what it was told, and sleep again, before the next thing is timed."""
        if not self.engine.virtual:
            time.sleep(max(0.0, self._said_at + SETTLE_SECONDS - time.monotonic()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named stretch of work: announced before it starts, looked at by every probe when it ends."""
        self.current = name
        self.tokens_in_phase = 0
        self.emit({"event": "phase", "phase": name})
        for probe in self.probes:
            probe.phase_begins(name)
        yield
        for probe in self.probes:
            probe.phase_ended(name)

    def sample(self, key: str, value: float | None) -> None:
        """One raw sample; None (not there to be measured) is no sample."""
        if value is not None and math.isfinite(value):
            self.emit({"event": "sample", "key": key, "value": value})
        elif value is not None:
            self.unknown(key, f"the figure came out as {value}")

    def unknown(self, key: str, reason: str) -> None:
        """Why a key has no figure here."""
        self.emit({"event": "unknown", "key": key, "reason": reason})

    def call(
        self,
        kind: str,
        prompt: int | str,
        ids: Sequence[int],
        n: int,
        stop_ids: Sequence[int] = (),
        sampling: Sampling | None = None,
    ) -> Call:
        """One timed call. Nothing is written between its first and last token; one event follows it."""
        times: list[float] = []
        clock, stamp = self.clock, times.append
        live = self.job.kind == "answer"  # somebody reads along and nothing is timed

        def on_token(token: int) -> None:
            stamp(clock())
            if live:
                self.emit({"event": "token", "id": token})

        if not live:
            self.settle()
        began = clock()
        new = self.engine.generate(ids, n, stop_ids, on_token, sampling)
        if len(new) != len(times):
            raise RuntimeError(f"the engine gave {len(new)} tokens but announced {len(times)}")
        if not new:
            raise RuntimeError("the engine gave no token at all")
        if not stop_ids and len(new) != n:
            raise RuntimeError(f"asked for exactly {n} new tokens, the engine gave {len(new)}")
        if len(new) > n:
            raise RuntimeError(f"asked for at most {n} new tokens, the engine gave {len(new)}")
        self.tokens_in_phase += len(new)
        call = Call(len(ids), list(new), began, times)
        self.emit(
            {
                "event": "call",
                "call": kind,
                "prompt": prompt,
                "prompt_tokens": len(ids),
                "ids": call.ids,
                "times": [round(t - began, 9) for t in times],
            }
        )
        return call


class Probe:
    """The contract. `run` does work of its own, in phases; the other methods watch the phases of all probes."""

    jobs: ClassVar[tuple[str, ...]]
    """The kinds of job it takes part in."""
    order: ClassVar[int] = 50
    """Probes that work run in this order: loading comes first."""
    measures: ClassVar[dict[str, Measure]]

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self) -> None:
        """Do this probe's own work."""

    def phase_begins(self, phase: str) -> None:
        """Before each phase, outside what is timed."""

    def phase_ended(self, phase: str) -> None:
        """After each phase, outside what is timed."""

    def finish(self) -> None:
        """Once, after all work."""


def everything() -> list[type[Probe]]:
    """Every probe, in the order they run."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__))
    probes: list[type[Probe]] = [importlib.import_module(f"{__name__}.{name}").PROBE for name in names]
    return sorted(probes, key=lambda probe: probe.order)


def measures() -> dict[str, Measure]:
    """Every measurement there is, by its key, in the order of the probes."""
    return {key: measure for probe in everything() for key, measure in probe.measures.items()}
