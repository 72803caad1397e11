"""Medians and their intervals: what they say must hold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin.intervals import ENOUGH, LEVEL, Interval, median_interval, of_processes, paired_ratio, rounds_needed

POSITIVE = st.floats(1e-6, 1e9)


def test_one_process_has_no_spread() -> None:
    found = of_processes([7.0])
    assert (found.value, found.low, found.high, found.interval, found.processes) == (7.0, 7.0, 7.0, "range", 1)


def test_below_six_processes_it_is_the_range() -> None:
    found = of_processes([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.value, found.low, found.high, found.interval) == (3.0, 1.0, 5.0, "range")


def test_six_processes_give_a_95_percent_interval_a_little_inside_the_range() -> None:
    found = of_processes([6.0, 1.0, 3.0, 2.0, 5.0, 4.0])
    assert (found.value, found.interval, found.processes) == (3.5, "95%", 6)
    # Hettmansperger and Sheather by hand: the range covers 1 - 2/64, the next pair 1 - 14/64
    for level, (low, high) in ((0.96, (found.low, found.high)), (0.95, median_interval([1, 2, 3, 4, 5, 6], 0.95))):
        share = (62 / 64 - level) / (62 / 64 - 50 / 64)
        weight = 5 * share / (1 + 4 * share)
        assert low == pytest.approx(1 + weight)
        assert high == pytest.approx(6 - weight)
        assert 1 < low < 1.5


def test_ten_processes_against_the_published_method() -> None:
    low, high = median_interval([float(i) for i in range(1, 11)], level=0.95)
    # d = 2 covers 1 - 22/1024, d = 3 covers 1 - 112/1024
    share = (1002 / 1024 - 0.95) / (1002 / 1024 - 912 / 1024)
    weight = 8 * share / (2 + 6 * share)
    assert (low, high) == (pytest.approx(2 + weight), pytest.approx(9 - weight))


def test_the_order_of_the_processes_does_not_matter() -> None:
    values = [3.0, 9.0, 1.0, 4.0, 1.5, 9.2, 6.0]
    assert of_processes(values) == of_processes(values[::-1]) == of_processes(sorted(values))


@given(st.lists(POSITIVE, min_size=1, max_size=40))
def test_the_value_lies_in_its_interval_and_the_interval_in_the_range(values: list[float]) -> None:
    found = of_processes(values)
    slack = 1e-12 * max(values)
    assert min(values) - slack <= found.low <= found.value + slack
    assert found.value - slack <= found.high <= max(values) + slack
    assert found.interval == ("95%" if len(values) >= ENOUGH else "range")
    assert found.processes == len(values)


@given(st.lists(POSITIVE, min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_another_unit_scales_everything(values: list[float], factor: float) -> None:
    one, other = of_processes(values), of_processes([v * factor for v in values])
    for a, b in ((one.value, other.value), (one.low, other.low), (one.high, other.high)):
        assert b == pytest.approx(a * factor, rel=1e-9)


@given(st.lists(POSITIVE, min_size=1, max_size=20), st.integers(0, 19), st.floats(1, 100))
def test_a_slower_process_never_lowers_a_bound(values: list[float], which: int, factor: float) -> None:
    before = of_processes(values)
    values[which % len(values)] *= factor
    after = of_processes(values)
    assert after.value >= before.value * (1 - 1e-12)
    assert after.low >= before.low * (1 - 1e-12)
    assert after.high >= before.high * (1 - 1e-12)


@pytest.mark.parametrize("n", [6, 7, 8, 10, 15])
@pytest.mark.parametrize("noise", ["normal", "lognormal", "exponential"])
def test_95_percent_of_the_intervals_hold_the_true_median(n: int, noise: str) -> None:
    random = np.random.default_rng(20240501 + n)
    draws = getattr(random, noise)(size=(n, 20_000))
    truth = {"normal": 0.0, "lognormal": 1.0, "exponential": math.log(2)}[noise]
    ordered = np.sort(draws, axis=0)  # it works on columns: one is one run
    covered = []
    for level in (0.95, LEVEL):
        low, high = median_interval(ordered, level=level)
        covered.append(float(np.mean((low <= truth) & (truth <= high))))
    assert 0.93 <= covered[0] <= 0.97
    # what is used is a little wider, to make up for stopping as soon as it is narrow (test_coverage.py)
    assert covered[0] < covered[1] <= 0.98


def test_a_ratio_is_paired_by_round_so_a_drift_of_the_machine_cancels() -> None:
    drift = {r: 10.0 * 1.3**r for r in range(1, 9)}
    found = paired_ratio({r: 2 * v for r, v in drift.items()}, drift)
    assert found is not None
    assert found.value == pytest.approx(2)
    assert found.low == pytest.approx(2)
    assert found.high == pytest.approx(2)
    assert (found.interval, found.processes) == ("95%", 8)


def test_a_ratio_uses_the_rounds_that_both_have() -> None:
    found = paired_ratio({1: 4.0, 2: 6.0, 5: 100.0}, {1: 2.0, 2: 2.0, 3: 1.0})
    assert found is not None
    assert (found.processes, found.interval) == (2, "range")
    assert (found.low, found.high) == (pytest.approx(2), pytest.approx(3))
    assert found.value == pytest.approx(math.sqrt(6))


def test_without_a_common_round_there_is_no_ratio() -> None:
    assert paired_ratio({1: 4.0}, {2: 2.0}) is None
    assert paired_ratio({}, {}) is None
    assert paired_ratio({1: 0.0}, {1: 2.0}) is None


@given(st.dictionaries(st.integers(1, 12), st.tuples(POSITIVE, POSITIVE), min_size=1))
def test_turning_a_ratio_around_turns_its_interval_around(rounds: dict[int, tuple[float, float]]) -> None:
    mine, other = {r: a for r, (a, _) in rounds.items()}, {r: b for r, (_, b) in rounds.items()}
    one, two = paired_ratio(mine, other), paired_ratio(other, mine)
    assert one is not None and two is not None
    assert one.value == pytest.approx(1 / two.value, rel=1e-6)
    assert one.low == pytest.approx(1 / two.high, rel=1e-6)
    assert one.high == pytest.approx(1 / two.low, rel=1e-6)


def ratio_of(value: float, low: float, high: float, processes: int) -> Interval:
    return Interval(value=value, low=low, high=high, interval="95%", processes=processes)


def test_how_many_rounds_would_decide() -> None:
    # it reaches twice as far as the effect: four times the rounds halve it, and one more puts 1 outside
    wide = ratio_of(math.exp(0.05), math.exp(-0.05), math.exp(0.15), 10)
    assert rounds_needed(wide) in (41, 42)  # a rounding error may cost one
    few = ratio_of(math.exp(0.05), math.exp(-0.05), math.exp(0.15), 2)
    assert rounds_needed(few) in (25, 26)  # two rounds say little about the spread: counted as six


def test_no_number_of_rounds_decides_what_shows_no_effect_or_no_spread() -> None:
    assert rounds_needed(ratio_of(1.0, 0.9, 1.1, 8)) is None
    assert rounds_needed(ratio_of(1.0, 1.0, 1.0, 8)) is None
    assert rounds_needed(ratio_of(2.0, 2.0, 2.0, 8)) is None
