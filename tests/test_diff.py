"""Two comparisons: what changed, what is noise, and what cannot be compared at all."""

import io
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from conftest import Finished
from hypothesis import given
from report import hostile
from rich.console import Console

from weighin import intervals
from weighin.diff import (
    BETTER,
    EQUAL,
    HEADLINE,
    NO_DIFFERENCE,
    WORSE,
    Change,
    Diff,
    chance_apart,
    change,
    check_same_workload,
    diff,
    moses_rank,
    rank_sum_counts,
    unpaired_ratio,
)  # fmt: skip
from weighin.doubts import doubt
from weighin.errors import BadInput
from weighin.measurements import Comparison, Measurement, Sample
from weighin.report import changes

DECODE = "decode_tokens_per_second"
replace = msgspec.structs.replace


def measured(*values: float, better: str = "higher", unit: str = "tokens/s") -> Measurement:
    """A figure with one sample in each of several processes."""
    found = intervals.of_processes(values)
    return Measurement(
        label="decode", unit=unit, better=better, value=found.value, low=found.low, high=found.high,
        interval=found.interval, samples=[Sample(round=i, job="speed", value=v) for i, v in enumerate(values, start=1)],
    )  # fmt: skip


def around(center: float, n: int, spread: float = 0.01) -> list[float]:
    return [center * (1 + spread * (i - (n - 1) / 2) / n) for i in range(n)]


def with_first(comparison: Comparison, **fields: object) -> Comparison:
    """The comparison with its first contender changed."""
    first, *rest = comparison.contenders
    return replace(comparison, contenders=[replace(first, **fields), *rest])


def with_figures(comparison: Comparison, **figures: Measurement) -> Comparison:
    return with_first(comparison, measurements={**comparison.contenders[0].measurements, **figures})


def only(found: Diff, key: str = DECODE) -> Change:
    return next(c for c in found.contenders[0].changes if c.key == key)


def shown(found: Diff, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(changes.view(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- the statistics


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (3, 3), (4, 2), (4, 5)])
def test_the_rank_sum_counts_are_those_of_all_orders(n: int, m: int) -> None:
    every = [
        sum(a > b for a in first for b in set(range(n + m)) - set(first))
        for first in itertools.combinations(range(n + m), n)
    ]
    assert rank_sum_counts(n, m) == [every.count(u) for u in range(n * m // 2 + 1)]


@pytest.mark.parametrize(
    ("n", "m", "critical"), [(4, 4, 0), (5, 5, 2), (6, 6, 5), (6, 8, 8), (8, 8, 13), (10, 10, 23), (12, 12, 37)]
)
def test_the_rank_is_that_of_the_published_tables(n: int, m: int, critical: int) -> None:
    assert moses_rank(n, m) == moses_rank(m, n) == critical + 1  # U at 5%, two-sided


def test_three_and_three_have_no_95_percent_interval() -> None:
    assert moses_rank(3, 3) == 0


def test_below_six_processes_it_is_the_extremes_of_both_ranges() -> None:
    found = unpaired_ratio([10, 12, 11], [20, 22, 24, 21, 23, 20.5, 23.5])
    assert (found.interval, found.old_processes, found.new_processes) == ("range", 3, 7)
    assert (found.low, found.high) == (pytest.approx(20 / 12), pytest.approx(24 / 10))


@pytest.mark.parametrize("n", [6, 8, 12])
@pytest.mark.parametrize("noise", ["normal", "lognormal"])
def test_95_percent_of_the_intervals_hold_the_true_ratio(n: int, noise: str) -> None:
    assert 0.93 <= coverage(n, n, noise, 1.0) <= 0.99


@pytest.mark.parametrize(("n", "m"), [(6, 6), (12, 12), (6, 20), (8, 12)])
def test_they_do_so_where_the_short_run_was_the_noisy_one(n: int, m: int) -> None:
    assert 0.93 <= coverage(n, m, "lognormal", 0.2) <= 0.99


def coverage(n: int, m: int, noise: str, quiet: float, times: int = 2000) -> float:
    """How often the interval holds the truth, 1.1, where the second run's noise is `quiet` times the first's."""
    random = np.random.default_rng(n * 100 + m)

    def draw(size: int, scale: float) -> list[float]:
        drawn = random.normal(size=size) * scale
        return list(np.exp(0.1 * drawn) if noise == "lognormal" else 1 + 0.05 * drawn)

    found = (unpaired_ratio(draw(n, 1.0), [1.1 * x for x in draw(m, quiet)]) for _ in range(times))
    return sum(ratio.low <= 1.1 <= ratio.high for ratio in found) / times


def test_ranges_come_apart_by_chance_as_often_as_said() -> None:
    assert chance_apart(2, 2) == pytest.approx(1 / 3)
    random = np.random.default_rng(7)
    apart = [max(a) < min(b) or max(b) < min(a) for a, b in random.normal(size=(4000, 2, 3))]
    assert sum(apart) / 4000 == pytest.approx(chance_apart(3, 3), abs=0.015)


POSITIVE = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=15)


@given(POSITIVE, POSITIVE)
def test_turned_round_it_is_the_inverse(old: list[float], new: list[float]) -> None:
    there, back = unpaired_ratio(old, new), unpaired_ratio(new, old)
    assert there.low <= there.value <= there.high
    for a, b in ((there.value, back.value), (there.low, back.high), (there.high, back.low)):
        assert a * b == pytest.approx(1)


# ---- one figure


@pytest.mark.parametrize(("better", "factor", "verdict"), [
    ("higher", 1.1, BETTER), ("higher", 0.9, WORSE), ("lower", 1.1, WORSE), ("lower", 0.9, BETTER),
    ("higher", 1.0005, NO_DIFFERENCE), ("lower", 1.0, NO_DIFFERENCE),
])  # fmt: skip
@pytest.mark.parametrize("n", [4, 8])
def test_the_verdict(n: int, better: str, factor: float, verdict: str) -> None:
    old, new = (measured(*around(20 * by, n), better=better) for by in (1, factor))
    found = change("x", old, new)
    assert found.verdict == verdict
    assert found.ratio is not None
    assert found.ratio.interval == ("range" if n < 6 else "95%")
    assert (found.ratio.low <= 1 <= found.ratio.high) == (verdict == NO_DIFFERENCE)


def test_one_process_shows_no_difference() -> None:
    found = change("x", measured(20), measured(40))
    assert found.verdict == NO_DIFFERENCE
    assert changes.amount(found) == "no difference shown: 2.00× (one process each)"


def test_samples_of_one_process_count_as_one() -> None:
    many = measured(20, 21)
    many = replace(many, samples=[Sample(round=1, job="speed", value=float(v)) for v in range(10, 31)])
    found = change("x", many, measured(30, 30))
    assert found.ratio is not None
    assert (found.ratio.old_processes, found.ratio.value) == (1, pytest.approx(1.5))


def test_what_is_counted_needs_no_repetition() -> None:
    old, new = measured(1000, better="lower", unit="B"), measured(1100, better="lower", unit="B")
    found = change("disk_bytes", old, new)
    assert (found.verdict, changes.amount(found)) == (WORSE, "1.10× higher: worse")
    assert change("disk_bytes", old, old).verdict == EQUAL
    assert change("peak_ram_bytes", old, new).verdict == NO_DIFFERENCE


def test_what_is_counted_but_moved_is_noise_like_all_else() -> None:
    moved = measured(*around(1000, 3), better="lower", unit="B")
    found = change("disk_bytes", moved, moved)
    assert (found.verdict, found.ratio is not None and found.ratio.interval) == (NO_DIFFERENCE, "range")


def test_zeros_have_no_ratio_but_a_verdict() -> None:
    nothing, something = (measured(*[v] * 4, better="lower", unit="B/token") for v in (0, 5e6))
    assert change("x", nothing, nothing).verdict == NO_DIFFERENCE
    assert change("x", nothing, something).verdict == WORSE
    found = change("x", something, nothing)
    assert (found.verdict, found.ratio, changes.amount(found)) == (BETTER, None, "better")


def test_a_figure_with_an_interval_of_its_own_is_compared_by_it() -> None:
    def agreement(value: float, spread: float) -> Measurement:
        return replace(measured(value, unit=""), low=value - spread, high=value + spread, interval="95%")

    assert change("top1_agreement", agreement(0.9, 0.03), agreement(0.88, 0.03)).verdict == NO_DIFFERENCE
    found = change("top1_agreement", agreement(0.9, 0.01), agreement(0.8, 0.01))
    assert found.verdict == WORSE
    assert found.ratio is not None
    # by hand: the two half-widths add up like the sides of a right angle
    low = math.log(8 / 9) - math.hypot(math.log(0.80 / 0.79), math.log(0.91 / 0.90))
    assert found.ratio.low == pytest.approx(math.exp(low))
    zero = replace(agreement(0.01, 0.01), low=0.0)
    assert change("kl_divergence", zero, zero).verdict == NO_DIFFERENCE


def test_the_words() -> None:
    def words(old: list[float], new: list[float]) -> str:
        return changes.amount(change("x", measured(*old), measured(*new)))

    assert re.fullmatch(r"1\.20× higher \(1\.1\d–1\.2\d\): better", words(around(20, 8), around(24, 8)))
    assert re.fullmatch(r"1\.20× lower \(1\.1\d–1\.2\d\): worse", words(around(24, 8), around(20, 8)))
    assert words([20, 20.2, 20.8, 21], [30, 30.3, 31.2, 31.5]) == "1.50× higher (range 1.43–1.57): better"
    assert re.fullmatch(r"no difference shown: 1\.00× \(0\.99\d–1\.0\d\)", words(around(20, 8), around(20, 8)))
    # small but sure
    assert (
        words([1000, 1000, 1000.1, 1000.1], [1003, 1003, 1003.2, 1003.2])
        == "0.305% higher (range 0.290–0.320%): better"
    )


# ---- two comparisons


def test_a_comparison_with_itself_shows_no_difference(finished: Finished) -> None:
    found = diff(finished.comparison, finished.comparison)
    assert [c.name for c in found.contenders] == ["fake:fp32@cpu", "fake:nf4@cpu+says=74.75.1"]
    assert {change.verdict for c in found.contenders for change in c.changes} == {EQUAL, NO_DIFFERENCE}
    assert (found.notes, found.statuses) == ([], [])
    assert all(not (c.dependencies or c.effective or c.doubts or c.unknown) for c in found.contenders)
    keys = [change.key for change in found.contenders[0].changes]
    headline = [key for key in keys if key in HEADLINE]
    assert keys[: len(headline)] == headline == [key for key in HEADLINE if key in keys]
    assert f"{DECODE}@16" in keys


def test_real_runs_of_a_faster_engine(fakes: Callable[..., Comparison], tmp_path: Path) -> None:
    name = "fake:fp32@cpu+spread=0.02+token=0.05"
    runs = [fakes(f"fp32@cpu+spread=0.02+token={t}", rounds=6, out=tmp_path / t) for t in ("0.05", "0.04")]
    old, new = (with_first(run, name=name) for run in runs)
    faster = diff(old, new)
    found = only(faster)
    assert found.verdict == BETTER
    assert found.ratio is not None
    assert (found.ratio.interval, found.ratio.old_processes) == ("95%", 6)
    assert found.ratio.low < 1.25 < found.ratio.high
    assert only(diff(new, old)).verdict == WORSE
    assert only(faster, "load_seconds").verdict == NO_DIFFERENCE
    assert only(faster, "disk_bytes").verdict == EQUAL
    report = changes.render(faster)
    assert "| decode | " in report
    assert "higher" in report
    assert "95% interval" in report
    assert "1.2" in shown(faster)


@pytest.mark.parametrize(("what", "said"), [
    ("model", "the model's content"), ("ids", "token ids"), ("tokens", r"max_new_tokens \(4 and 5\)"),
])  # fmt: skip
def test_another_workload_is_refused(finished: Finished, what: str, said: str) -> None:
    old = finished.comparison
    new = {
        "model": replace(old, model=replace(old.model, fingerprint="f" * 64)),
        "ids": replace(old, ids_hash="f" * 64),
        "tokens": replace(old, workload=replace(old.workload, max_new_tokens=5)),
    }[what]
    with pytest.raises(BadInput, match=said):
        diff(old, new)


def test_a_plan_can_be_checked_before_anything_is_measured(finished: Finished) -> None:
    from weighin.compare import load_plan

    plan = load_plan(finished.folder)
    check_same_workload(finished.comparison, plan)
    shorter = replace(plan, workload=replace(plan.workload, stop_ids=[5]))
    with pytest.raises(BadInput, match="token ids"):
        check_same_workload(finished.comparison, shorter)


def test_another_machine_is_said(finished: Finished) -> None:
    old = finished.comparison
    new = replace(old, machine=replace(old.machine, cpu="Abacus 9000", threads=64), weighin_version="99")
    notes = " ".join(diff(old, new).notes)
    assert "a difference between machines, not between engines" in notes
    assert "Abacus 9000 (64 threads" in notes
    assert "is 99." in notes
    assert "Abacus 9000" in shown(diff(old, new))


def test_figures_against_another_reference_are_left_out(finished: Finished) -> None:
    old = with_figures(finished.comparison, top1_agreement=measured(0.9, 0.9, unit=""))
    assert only(diff(old, old), "top1_agreement").verdict == NO_DIFFERENCE
    found = diff(old, replace(old, reference=None))
    assert "top1_agreement" not in [c.key for c in found.contenders[0].changes]
    assert "cannot be compared" in found.notes[0]


def test_versions_settings_and_doubts_that_changed(finished: Finished) -> None:
    few, busy = doubt("too_few_rounds", "2 of 6"), doubt("machine_busy", "12% of the time")
    old = with_first(
        finished.comparison, doubts=[few], effective={"dtype": "fp32"},
        dependencies={"torch": "2.6", "numpy": "1", "gone": "3"},
    )  # fmt: skip
    new = with_first(
        finished.comparison, doubts=[few, busy], effective={"dtype": "bf16"},
        dependencies={"torch": "2.7", "numpy": "1"},
    )  # fmt: skip
    new = with_figures(new, load_seconds=replace(measured(1), value=None, samples=[], reason="no load was warm"))
    report, terminal = changes.render(diff(old, new)), shown(diff(old, new))
    for words in (
        "torch was 2.6 and is 2.7",
        "gone was 3 and is not there",
        "dtype was fp32 and is bf16",
        "was known and is not any more: no load was warm",
        "in the new run alone: machine_busy: 12% of the time",
    ):
        assert words in report.replace("\\", "")
        assert words in terminal
    assert "numpy" not in report
    assert "too_few_rounds" not in terminal


def test_contenders_that_appear_vanish_or_fail(finished: Finished) -> None:
    old = finished.comparison
    first, second, third, fourth = old.contenders
    new = replace(old, contenders=[
        replace(first, status="out_of_memory", reason="too big", rounds=0), third, replace(fourth, name="x:y@z"),
    ])  # fmt: skip
    found = diff(old, new)
    assert found.contenders == []
    said = {s.name: s.sentence for s in found.statuses}
    assert said == {
        first.name: "was ok, is out_of_memory: too big",
        second.name: "is not there any more, was ok",
        fourth.name: "is not there any more, was cannot_run: no CUDA GPU here",
        "x:y@z": "is new, cannot_run: no CUDA GPU here",
    }
    report = changes.render(found)
    assert "No figure is in both" in report
    assert "was ok, is out\\_of\\_memory: too big" in report


def test_other_figures_are_shown_where_they_changed(finished: Finished) -> None:
    base = finished.comparison
    old = with_figures(base, peak_ram_bytes=measured(5, 5), extra=measured(*around(10, 4)), same=measured(1, 1))
    found = diff(old, with_figures(old, extra=measured(*around(20, 4))))
    labels = [line.label for line in changes.lines(found.contenders[0])]
    keys = [c.key for c in found.contenders[0].changes]
    assert {"extra", "same"} < set(keys)
    assert len(labels) == len([key for key in keys if key in HEADLINE]) + 1
    assert "1 better" in changes.summary(found)
    assert "by chance alone one time in 35;" in changes.legend(found)


def test_hostile_words_stay_words(finished: Finished) -> None:
    evil = hostile.make(finished.comparison)
    worse = with_first(evil, dependencies={hostile.ALL: hostile.ALL})
    gone = replace(worse, contenders=worse.contenders[:1], notes=[hostile.ALL])
    found = diff(evil, gone)
    report, terminal = changes.render(found), shown(found)
    assert not hostile.SENT_TO_NOBODY & set(report + terminal)
    assert "<script>" not in report
    assert "<img" not in report
    assert "\n# head" not in report


def test_it_can_be_saved_and_read(finished: Finished) -> None:
    found = diff(finished.comparison, finished.comparison)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Diff) == found
