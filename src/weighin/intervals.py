"""Medians and their intervals. The process is the unit: samples of one process count as one.

From six processes on, the 95% interval of a median is read off the sorted values, with the two neighbouring
order statistics interpolated (Hettmansperger and Sheather, 1986). It needs no assumption about the shape of the
noise, and unlike a percentile bootstrap of a median it keeps its coverage with six to twenty processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

ENOUGH = 6
# A little above 95%: whoever stops as soon as an interval is narrow stops early by luck now and then. With this level,
# 94 to 96% are left after the stopping rule of schedule.py; a simulation in the tests shows it.
LEVEL = 0.96


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A median with how far it can be trusted. `interval` says what low and high are: the range, or a 95% interval."""

    value: float
    low: float
    high: float
    interval: str
    processes: int


def of_processes(values: Sequence[float]) -> Interval:
    """The median of one value per process."""
    ordered = sorted(values)
    n = len(ordered)
    if n < ENOUGH:
        return Interval(value=median(ordered), low=ordered[0], high=ordered[-1], interval="range", processes=n)
    low, high = median_interval(ordered)
    return Interval(value=median(ordered), low=low, high=high, interval="95%", processes=n)


def median_interval(ordered: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The interpolated order-statistic interval of the median of sorted values."""
    n = len(ordered)
    # coverage(d): that the median lies between the d-th smallest and the d-th largest value
    d, coverage = 1, 1 - 2 * _below(n, 0)
    while d + 1 <= n // 2 and 1 - 2 * _below(n, d) >= level:
        d, coverage = d + 1, 1 - 2 * _below(n, d)
    if d >= n // 2 + n % 2 or coverage <= level:
        return ordered[d - 1], ordered[n - d]
    inner = 1 - 2 * _below(n, d)
    share = (coverage - level) / (coverage - inner)
    weight = (n - d) * share / (d + (n - 2 * d) * share)
    low = (1 - weight) * ordered[d - 1] + weight * ordered[d]
    high = (1 - weight) * ordered[n - d] + weight * ordered[n - d - 1]
    return low, high


def _below(n: int, k: int) -> float:
    """The chance that at most k of n values lie below the median."""
    return math.fsum(math.comb(n, i) for i in range(k + 1)) / 2.0**n


def rounds_needed(ratio: Interval) -> int | None:
    """About how many rounds would put 1 outside a ratio's interval, its width shrinking as 1/√n; None if none would."""
    effect = abs(math.log(ratio.value))
    reach = max(math.log(ratio.high) - math.log(ratio.value), math.log(ratio.value) - math.log(ratio.low))
    if effect == 0 or reach == 0:
        return None
    return math.ceil(max(ratio.processes, ENOUGH) * (reach / effect) ** 2) + 1


def paired_ratio(mine: Mapping[int, float], other: Mapping[int, float]) -> Interval | None:
    """mine ÷ other over the rounds both have, from the median log-ratio; None without a common round."""
    rounds = sorted(mine.keys() & other.keys())
    logs = [math.log(mine[r] / other[r]) for r in rounds if mine[r] > 0 and other[r] > 0]
    if not logs:
        return None
    found = of_processes(logs)
    return Interval(
        value=math.exp(found.value),
        low=math.exp(found.low),
        high=math.exp(found.high),
        interval=found.interval,
        processes=found.processes,
    )
