"""Answers for the standard harness, which asks through a channel: log-probabilities of given ids, and greedy answers.

One JSON object a line, each way; ids only, so that every engine is asked the same:
{"ask": "score", "requests": [{"context": ids, "continuation": ids}]} -> {"answers": [{"logprob", "greedy"}]}
{"ask": "generate", "ids": ids, "n": most, "stop_ids": ids} -> {"ids": ids}
What the engine cannot do is answered by {"error": why}; the next request may be one that it can.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weighin.probes import Probe, Session

if TYPE_CHECKING:
    import numpy

LONGEST_REQUEST = 64 * 2**20
PROGRESS_SECONDS = 5.0


class Unanswerable(Exception):
    """The engine cannot answer this request; others it may."""


@dataclass(frozen=True)
class Pair:
    """A context, and what follows it."""

    context: list[int]
    continuation: list[int]

    @property
    def read(self) -> tuple[int, ...]:
        """What the engine has to read: all but the last id, which is only predicted."""
        return (*self.context, *self.continuation[:-1])


@dataclass(frozen=True)
class Score:
    """How likely is each continuation after its context, and is it what greedy decoding would say?"""

    pairs: list[Pair]


@dataclass(frozen=True)
class Generate:
    """What does the model say next?"""

    ids: list[int]
    n: int
    stop_ids: list[int]


class TasksProbe(Probe):
    jobs = ("tasks",)
    order = 10
    measures = {}  # noqa: RUF012 - the harness makes the figures

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.done = 0
        self.said_at = time.monotonic()

    def run(self) -> None:
        channel = self.session.job.channel
        if channel is None:
            raise RuntimeError("a job of the kind 'tasks' needs a channel to the harness")
        os.set_inheritable(channel, False)  # what the engine starts must not keep it open
        # A harness that is gone, at whatever moment, is the end of the work; why it went is its own to say.
        with self.session.phase("tasks"), suppress(ConnectionError), socket.socket(fileno=channel) as connection:
            self._serve(connection)
        self._progress()

    def _serve(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as requests:
            while line := requests.readline(LONGEST_REQUEST):
                if len(line) == LONGEST_REQUEST:
                    raise RuntimeError("the harness sent a request of over 64 MiB")
                if not line.endswith(b"\n"):
                    return  # it ended in the middle of a request
                try:
                    answer = self._answer(parse(line))
                except Unanswerable as reason:
                    answer = {"error": str(reason)}
                connection.sendall(json.dumps(answer).encode() + b"\n")
                if time.monotonic() - self.said_at >= PROGRESS_SECONDS:
                    self._progress()

    def _progress(self) -> None:
        """A sign of life, so that a long task is not taken for one that hangs."""
        self.session.emit({"event": "progress", "done": self.done})
        self.said_at = time.monotonic()

    def _answer(self, request: Score | Generate) -> dict[str, Any]:
        if isinstance(request, Score):
            return {"answers": self._score(request.pairs)}
        self._check(request.ids)
        new = self.session.engine.generate(request.ids, request.n, request.stop_ids, lambda _: None)
        self.done += 1
        return {"ids": [int(token) for token in new]}

    def _score(self, pairs: list[Pair]) -> list[dict[str, Any]]:
        """Choices of one token after the same context need the same reading: it is done once for all of them."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for which, pair in enumerate(pairs):
            self._check([*pair.context, *pair.continuation])
            alike.setdefault(pair.read, []).append(which)
        answers: list[dict[str, Any]] = [{} for _ in pairs]
        for read, members in alike.items():
            found = self._likelihoods(list(read), [pairs[which].continuation for which in members])
            for which, (logprob, greedy) in zip(members, found, strict=True):
                answers[which] = {"logprob": logprob, "greedy": greedy}
        self.done += len(pairs)
        return answers

    def _likelihoods(self, ids: list[int], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Of continuations that end one id after `ids`: they differ in where they begin and in their last id."""
        import numpy

        shared: list[tuple[float, bool]] = []  # of every position but the last: log-probability, and is it the best
        last: list[tuple[float, bool]] = []  # of each continuation's own last id
        for row, logits in self._rows(ids, len(ids) - max(map(len, continuations))):
            best = int(logits.argmax())
            highest = float(logits[best])
            total = highest + math.log(float(numpy.exp(logits - highest).sum())) if math.isfinite(highest) else math.nan
            targets = [ids[row + 1]] if row + 1 < len(ids) else [continuation[-1] for continuation in continuations]
            found = [(float(logits[target]) - total, best == target) for target in targets]
            if not all(math.isfinite(logprob) for logprob, _ in found):
                raise Unanswerable(
                    f"token {row + 2} of {len(ids) + 1} has no finite log-probability: the model is broken, or the "
                    f"engine gives those of its best tokens alone"
                )
            (shared if row + 1 < len(ids) else last).extend(found)
        if len(last) != len(continuations):
            raise RuntimeError(f"the engine was asked to score {len(ids)} ids and gave only some of the rows")
        answers = []
        for continuation, end in zip(continuations, last, strict=True):
            each = [*shared[len(shared) + 1 - len(continuation) :], end]
            answers.append((math.fsum(logprob for logprob, _ in each), all(greedy for _, greedy in each)))
        return answers

    def _rows(self, ids: list[int], first: int) -> Iterator[tuple[int, numpy.ndarray[Any, Any]]]:
        """The logits after each id from `first` on, one position at a time, in float64, no columns but real tokens."""
        import numpy

        expected = first
        try:
            for start, logits in self.session.engine.score(ids):
                for row in range(max(start, expected), min(start + len(logits), len(ids))):
                    if row != expected:
                        raise RuntimeError(f"the engine left out the row of token {expected + 1}")
                    expected += 1
                    yield row, logits[row - start, : self.session.job.vocabulary].astype(numpy.float64)
        except NotImplementedError:
            raise Unanswerable("this engine gives no log-probabilities; it can only be asked to generate") from None

    def _check(self, ids: list[int]) -> None:
        """An id that the model has no row for can end an engine without a word."""
        vocabulary = self.session.job.vocabulary
        unknown = next((token for token in ids if not 0 <= token < vocabulary), None)
        if unknown is not None:
            raise Unanswerable(f"the tokenizer gives the id {unknown}, the model knows {vocabulary} tokens")


def parse(line: bytes) -> Score | Generate:
    """A request as it came; anything else is an error of the harness's side."""
    try:
        request = json.loads(line)
        if request["ask"] == "score":
            pairs = [Pair(_ids(one["context"]), _ids(one["continuation"])) for one in request["requests"]]
            if not all(pair.context and pair.continuation for pair in pairs):
                raise ValueError("a context or a continuation is empty")
            return Score(pairs)
        if request["ask"] == "generate":
            ids, n = _ids(request["ids"]), request["n"]
            if not ids or not isinstance(n, int) or n < 1:
                raise ValueError("nothing to start from, or nothing to generate")
            return Generate(ids, n, _ids(request["stop_ids"]))
        raise ValueError(f"{request['ask']!r} is none of the questions")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RuntimeError(f"the harness sent what is no request: {type(error).__name__}: {error}") from error


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("ids must be a list of whole numbers")
    return value


PROBE = TasksProbe
