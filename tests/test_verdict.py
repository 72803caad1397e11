"""Who is named best, and that nobody is where the intervals touch."""

from collections.abc import Callable

import msgspec
import pytest
from conftest import Finished

from weighin.measurements import Comparison, Measurement, Sample
from weighin.verdict import decide

DECODE = "decode_tokens_per_second"
FASTEST = "the fastest decoding"


def measured(better: str, *values: float) -> Measurement:
    """A figure whose processes gave these values."""
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


def six(low: float, high: float) -> tuple[float, ...]:
    """Six rounds that swing between two values."""
    return (low, high) * 3


def test_the_fastest_is_named(judged: Callable[..., dict[str, list[str]]]) -> None:
    figures = {"a": six(10, 11), "b": six(20, 21), "c": six(15, 16)}
    assert judged(DECODE, "higher", **figures) == {"a": [], "b": [FASTEST], "c": []}


def test_five_rounds_are_not_enough_to_be_best(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged(DECODE, "higher", a=six(10, 11), b=six(20, 21)) == {"a": [], "b": [FASTEST]}
    assert judged(DECODE, "higher", a=six(10, 11)[:5], b=six(20, 21)[:5]) == {"a": [], "b": []}
    # nor six rounds of which only five are common to both
    assert judged(DECODE, "higher", a=six(10, 11)[:5], b=six(20, 21)) == {"a": [], "b": []}


def test_best_is_who_wins_round_by_round_though_the_rounds_overlap(
    judged: Callable[..., dict[str, list[str]]],
) -> None:
    drifting = (10.0, 12.0, 14.0, 16.0, 18.0, 20.0)
    faster = tuple(1.1 * v for v in drifting)
    assert judged(DECODE, "higher", a=drifting, b=faster) == {"a": [], "b": [FASTEST]}
    # the same values in another order are no proof
    assert judged(DECODE, "higher", a=drifting, b=faster[::-1]) == {"a": [], "b": []}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (DECODE, FASTEST), ("peak_ram_bytes", "the least RAM"), ("peak_vram_bytes", "the least VRAM"),
        ("disk_bytes", "the least disk"), ("ready_seconds", "starting soonest"),
    ],
)  # fmt: skip
def test_what_one_can_be_best_for(judged: Callable[..., dict[str, list[str]]], key: str, words: str) -> None:
    better = "higher" if key == DECODE else "lower"
    a, b = (six(2, 2), six(1, 1)) if better == "higher" else (six(1, 1), six(2, 2))
    assert judged(key, better, a=a, b=b) == {"a": [words], "b": []}


def test_less_is_better_where_less_is_better(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged("peak_ram_bytes", "lower", a=six(10, 11), b=six(20, 21)) == {"a": ["the least RAM"], "b": []}


def test_nobody_is_named_where_a_ratio_may_be_one(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged(DECODE, "higher", a=six(10, 21), b=six(20, 20)) == {"a": [], "b": []}
    found = judged("peak_ram_bytes", "lower", a=six(10, 20), b=six(19, 19), c=six(50, 60))
    assert found == {"a": [], "b": [], "c": []}  # c is behind, but a and b cannot be told apart
    assert judged(DECODE, "higher", a=six(10, 10), b=six(10, 10)) == {"a": [], "b": []}


def test_one_round_is_not_enough_to_be_best(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged(DECODE, "higher", a=(10,), b=(99,)) == {"a": [], "b": []}


def test_who_runs_alone_is_not_best(judged: Callable[..., dict[str, list[str]]]) -> None:
    assert judged(DECODE, "higher", a=six(10, 11)) == {"a": []}


def test_the_reference_is_what_others_are_judged_by(judged: Callable[..., dict[str, list[str]]]) -> None:
    found = judged(DECODE, "higher", reference="b", a=six(10, 11), b=six(1, 2))
    assert found == {"a": [FASTEST], "b": ["the reference: full precision in 32 bits"]}


def test_only_contenders_that_ran_are_judged(finished: Finished) -> None:
    best_for = finished.comparison.verdict.best_for
    # two rounds: nobody is best yet
    assert best_for == {
        "fake:fp32@cpu": ["the reference: full precision in 32 bits"], "fake:nf4@cpu+says=74.75.1": [],
    }  # fmt: skip


def test_six_real_rounds_name_the_fastest(fakes: Callable[..., Comparison]) -> None:
    best_for = fakes("fp32@cpu", "nf4@cpu", rounds=6).verdict.best_for
    assert FASTEST in best_for["fake:nf4@cpu"]
    assert FASTEST not in best_for["fake:fp32@cpu"]


def test_noise_of_the_machine_makes_nobody_best(fakes: Callable[..., Comparison]) -> None:
    best_for = fakes("fp32@cpu+spread=0.3+seed=1", "fp32@cpu+spread=0.3+seed=2", rounds=6).verdict.best_for
    assert not any(FASTEST in strengths for strengths in best_for.values())
