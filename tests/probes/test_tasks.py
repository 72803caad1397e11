"""What the worker answers to the standard harness, through a real channel."""

import json
import math
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_probes import make_job

from weighin import worker
from weighin.engines.fake import FakeEngine
from weighin.probes import Session
from weighin.probes.tasks import TasksProbe, parse

VOCABULARY = 50
PADDING = 7  # columns beyond the tokenizer's vocabulary


def logits_after(ids: Sequence[int]) -> np.ndarray:
    """What the scripted engine finds likely after these ids; the padding would win if it were looked at."""
    drawn = np.random.default_rng([len(ids), *ids[-4:]]).standard_normal(VOCABULARY)
    return np.concatenate([5 * drawn, np.full(PADDING, 1000.0)]).astype(np.float32)


class Scripted(FakeEngine):
    """Gives known logits, a few rows at a time, and counts how often it was asked."""

    rows = 5
    broken_after: int | None = None

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self.read: list[list[int]] = []

    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        self.read.append(list(ids))
        for start in range(0, len(ids), self.rows):
            found = [logits_after(ids[: i + 1]) for i in range(start, min(start + self.rows, len(ids)))]
            if self.broken_after is not None and start <= self.broken_after < start + len(found):
                found[self.broken_after - start][3] = np.nan
            yield start, np.stack(found)


class Blind(FakeEngine):
    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        raise NotImplementedError


class Scanty(Scripted):
    """Leaves out the last rows."""

    def score(self, ids: Sequence[int]) -> Iterator[tuple[int, Any]]:
        yield from list(super().score(ids))[:-1]


class Asked:
    """The harness's end, with the probe at work at the other."""

    def __init__(self, engine: type[FakeEngine] = Scripted, **changes: Any) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(20)
        job = make_job("tasks", vocabulary=VOCABULARY, channel=theirs.detach(), **changes)
        self.engine = engine(job)
        self.events: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.probe = TasksProbe(Session(job, self.engine, self.events.append))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.answers = self.ours.makefile("rb")

    def _run(self) -> None:
        try:
            self.probe.run()
        except BaseException as error:
            self.error = error

    def send(self, line: bytes) -> None:
        self.ours.sendall(line)

    def ask(self, **question: Any) -> dict[str, Any]:
        self.send(json.dumps(question).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self.answers.readline())
        return answer

    def score(self, *pairs: tuple[list[int], list[int]]) -> list[dict[str, Any]]:
        asked = [{"context": context, "continuation": continuation} for context, continuation in pairs]
        found: list[dict[str, Any]] = self.ask(ask="score", requests=asked)["answers"]
        return found

    def end(self) -> None:
        self.answers.close()
        self.ours.close()
        self.thread.join(timeout=20)
        assert not self.thread.is_alive(), "the probe hangs"


@contextmanager
def asked(engine: type[FakeEngine] = Scripted, **changes: Any) -> Iterator[Asked]:
    one = Asked(engine, **changes)
    try:
        yield one
    finally:
        one.end()


def plainly(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The same by the definition, all in float64."""
    total, greedy = 0.0, True
    for i, token in enumerate(continuation):
        row = logits_after([*context, *continuation[:i]])[:VOCABULARY].astype(np.float64)
        total += row[token] - math.log(np.exp(row).sum())
        greedy = greedy and int(row.argmax()) == token
    return total, greedy


def best_after(context: list[int], n: int) -> list[int]:
    found: list[int] = []
    for _ in range(n):
        found.append(int(logits_after([*context, *found])[:VOCABULARY].argmax()))
    return found


def test_log_probabilities_are_those_of_the_definition() -> None:
    pairs = [([1, 2, 3], [4, 5]), ([7], [8]), (list(range(20)), [3] * 11)]
    with asked() as one:
        for pair, answer in zip(pairs, one.score(*pairs), strict=True):
            logprob, greedy = plainly(*pair)
            assert answer == {"logprob": pytest.approx(logprob, abs=1e-9), "greedy": greedy}


def test_greedy_says_whether_the_model_would_have_said_it() -> None:
    best = best_after([1, 2], 4)
    other = [*best[:-1], (best[-1] + 1) % VOCABULARY]
    with asked() as one:
        assert [answer["greedy"] for answer in one.score(([1, 2], best), ([1, 2], other))] == [True, False]


def test_only_the_continuation_of_a_long_context_counts() -> None:
    context = [(i * 7) % VOCABULARY for i in range(3000)]
    with asked() as one:
        one.engine.rows = 128
        answer = one.score((context, [4, 5]))[0]
    assert answer["logprob"] == pytest.approx(plainly(context, [4, 5])[0], abs=1e-9)


ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=6), st.integers(1, 9))
def test_an_answer_does_not_depend_on_what_is_asked_beside_it(
    pairs: list[tuple[list[int], list[int]]], rows: int
) -> None:
    split = [(context + continuation[:1], continuation[1:]) for context, continuation in pairs if len(continuation) > 1]
    with asked() as one:
        one.engine.rows = rows
        for pair, answer in zip(pairs + split, one.score(*pairs, *split), strict=True):
            logprob, greedy = plainly(*pair)
            assert answer == {"logprob": pytest.approx(logprob, abs=1e-9), "greedy": greedy}


def test_choices_of_one_token_are_read_once() -> None:
    with asked() as one:
        found = one.score(([1, 2], [3]), ([1, 2], [4]), ([1], [2, 5]))
        assert one.engine.read == [[1, 2]]
    for pair, answer in zip([([1, 2], [3]), ([1, 2], [4]), ([1], [2, 5])], found, strict=True):
        assert answer["logprob"] == pytest.approx(plainly(*pair)[0], abs=1e-9)


def test_it_answers_greedily_up_to_a_stop() -> None:
    with asked(options={"says": "11.12.1.13"}) as one:
        assert one.ask(ask="generate", ids=[5, 6], n=4, stop_ids=[1]) == {"ids": [11, 12, 1]}
        assert one.ask(ask="generate", ids=[5, 6], n=2, stop_ids=[1]) == {"ids": [11, 12]}


def test_the_end_of_the_channel_is_the_end_of_the_work() -> None:
    with asked() as one:
        one.score(([1, 2], [3]), ([1, 2], [4]))
        one.ask(ask="generate", ids=[5], n=1, stop_ids=[])
    assert one.error is None
    assert one.events[0] == {"event": "phase", "phase": "tasks"}
    assert one.events[-1] == {"event": "progress", "done": 3}


def test_a_harness_that_goes_in_the_middle_of_a_request_is_no_error_of_the_engine() -> None:
    with asked() as one:
        one.send(b'{"ask": "score", "requ')
    assert one.error is None


def test_a_harness_that_does_not_wait_for_its_answer_is_no_error_of_the_engine() -> None:
    with asked() as one:
        for _ in range(50):
            one.send(json.dumps({"ask": "generate", "ids": [1], "n": 3, "stop_ids": []}).encode() + b"\n")
    assert one.error is None


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"[1, 2]",
        b"{}",
        b'{"ask": "sing"}',
        b'{"ask": "score"}',
        b'{"ask": "score", "requests": [{"context": [1], "continuation": []}]}',
        b'{"ask": "score", "requests": [{"context": [], "continuation": [1]}]}',
        b'{"ask": "score", "requests": [{"context": "abc", "continuation": [1]}]}',
        b'{"ask": "score", "requests": [{"context": [1.5], "continuation": [1]}]}',
        b'{"ask": "generate", "ids": [1], "n": 0, "stop_ids": []}',
        b'{"ask": "generate", "ids": [true], "n": 1, "stop_ids": []}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_what_is_no_request_is_an_error_and_no_hang(line: bytes) -> None:
    with asked() as one:
        one.send(line + b"\n")
        one.thread.join(timeout=20)
        assert isinstance(one.error, RuntimeError)
        assert "the harness sent what is no request" in str(one.error)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_clear_error(line: bytes) -> None:
    try:
        parse(line)
    except RuntimeError as error:
        assert "no request" in str(error)


def test_garbage_fails_the_job_in_its_phase() -> None:
    ours, theirs = socket.socketpair()
    events: list[dict[str, Any]] = []
    with ours:
        ours.sendall(b"garbage\n")
        worker.run(make_job("tasks", vocabulary=VOCABULARY, channel=theirs.detach()), events.append)
    assert (events[-1]["event"], events[-1]["status"], events[-1]["phase"]) == ("failed", "failed", "tasks")


def test_a_whole_job_loads_the_model_first() -> None:
    ours, theirs = socket.socketpair()
    events: list[dict[str, Any]] = []
    ours.close()
    worker.run(make_job("tasks", vocabulary=VOCABULARY, channel=theirs.detach()), events.append)
    assert [e["phase"] for e in events if e["event"] == "phase"] == ["import", "load", "tasks"]
    assert events[-1]["event"] == "done"


def test_an_engine_without_log_probabilities_says_so_and_can_still_generate() -> None:
    with asked(Blind) as one:
        said = one.ask(ask="score", requests=[{"context": [1], "continuation": [2]}])
        assert "no log-probabilities" in said["error"]
        assert one.ask(ask="generate", ids=[5, 6], n=1, stop_ids=[]) == {"ids": [5]}


def test_logits_that_are_no_numbers_are_told_not_summed() -> None:
    with asked() as one:
        one.engine.broken_after = 2
        assert "logprob" in one.score(([1], [2]))[0]
        said = one.ask(ask="score", requests=[{"context": [1, 2], "continuation": [3, 4, 5]}])
        assert "token 4 of 5 has no finite log-probability" in said["error"]


def test_an_id_that_the_model_does_not_know_never_reaches_the_engine() -> None:
    with asked() as one:
        said = one.ask(ask="score", requests=[{"context": [1, VOCABULARY], "continuation": [2]}])
        assert f"the id {VOCABULARY}" in said["error"]
        assert "error" in one.ask(ask="generate", ids=[-1], n=1, stop_ids=[])
        assert one.engine.read == []


def test_an_engine_that_leaves_rows_out_is_an_error() -> None:
    with asked(Scanty) as one:
        one.send(json.dumps({"ask": "score", "requests": [{"context": [1] * 9, "continuation": [2]}]}).encode() + b"\n")
        one.thread.join(timeout=20)
        assert "gave only some of the rows" in str(one.error)


def test_a_job_without_a_channel_is_an_error() -> None:
    job = make_job("tasks", vocabulary=VOCABULARY)
    with pytest.raises(RuntimeError, match="needs a channel"):
        TasksProbe(Session(job, Scripted(job), lambda event: None)).run()
