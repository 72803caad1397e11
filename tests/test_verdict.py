"""Who is named best, and that nobody is where the intervals touch."""

from collections.abc import Callable

import msgspec
import pytest
from conftest import Finished

from weighin.measurements import Comparison, Measurement, Sample
from weighin.verdict import decide

DECODE = "decode_tokens_per_second"
FASTEST = "the fastest answers"


def measured(better: str, *values: float) -> Measurement:
    samples = [Sample(round=i, job="speed", value=v) for i, v in enumerate(values, start=1)]
    ordered = sorted(values)
    return Measurement(
        label="x", unit="x", better=better, value=ordered[len(ordered) // 2], low=ordered[0], high=ordered[-1],
        interval="range", samples=samples,
    )  # fmt: skip


@pytest.fixture
def judged(finished: Finished) -> Callable[..., dict[str, list[str]]]:
    """The verdict over contenders a, b, ... with these figures of one key."""

    def judge(
        key: str, better: str, reference: str | None = None, **figures: tuple[float, ...]
    ) -> dict[str, list[str]]:
        base = finished.comparison.contenders[0]
        assert base.status == "ok"
        contenders = [
            msgspec.structs.replace(base, name=name, measurements={key: measured(better, *values)})
            for name, values in figures.items()
        ]
        return decide(msgspec.structs.replace(finished.comparison, contenders=contenders, reference=reference)).best_for

    return judge


def test_the_fastest_is_named(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged(DECODE, "higher", a=(10, 11), b=(20, 21), c=(15, 16)) == {"a": [], "b": [FASTEST], "c": []}


def test_less_is_better_where_less_is_better(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged("peak_ram_bytes", "lower", a=(10, 11), b=(20, 21)) == {"a": ["the least RAM"], "b": []}


def test_nobody_is_named_where_intervals_touch(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged(DECODE, "higher", a=(10, 20), b=(20, 30)) == {"a": [], "b": []}
    assert judged("peak_ram_bytes", "lower", a=(10, 20), b=(19, 30), c=(50, 60)) == {"a": [], "b": [], "c": []}
    assert judged(DECODE, "higher", a=(10, 10), b=(10, 10)) == {"a": [], "b": []}


def test_one_round_is_not_enough_to_be_best(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged(DECODE, "higher", a=(10,), b=(99,)) == {"a": [], "b": []}


def test_who_runs_alone_is_not_best(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged(DECODE, "higher", a=(10, 11)) == {"a": []}


def test_the_reference_is_what_others_are_judged_by(judged: Callable[..., dict[str, list[str]]]) -> None:
    found = judged(DECODE, "higher", reference="b", a=(10, 11), b=(1, 2))
    assert found["a"] == [FASTEST]
    assert len(found["b"]) == 1
    assert "against which the others are judged" in found["b"][0]


def test_only_contenders_that_ran_are_judged(finished: Finished) -> None:
    best_for = finished.comparison.verdict.best_for
    assert set(best_for) == {"fake:fp32@cpu", "fake:nf4@cpu+says=74.75.1"}
    assert FASTEST in best_for["fake:nf4@cpu+says=74.75.1"]


def test_noise_of_the_machine_makes_nobody_best(fakes: Callable[..., Comparison]) -> None:
    best_for = fakes("fp32@cpu+spread=0.3+seed=1", "fp32@cpu+spread=0.3+seed=2", rounds=4).verdict.best_for
    assert not any(FASTEST in strengths for strengths in best_for.values())
