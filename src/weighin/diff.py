"""What got better or worse between two comparisons, and whether it is more than noise.

The rounds of two runs are not paired, so their processes are compared as two independent samples. The ratio is the
median of all ratios of a new process to an old one (Hodges and Lehmann, 1963). From six processes a side it has a 95%
interval that spans two. Moses' is read off the same sorted ratios, at the rank that the exact rank-sum distribution
gives; it needs no assumption about the shape of the noise, but that both runs have the same. A short noisy run against
a long quiet one would be called a change too often by it alone (17% of the time with 6 and 20 processes), so the bounds
also hold the interval that the two medians' own intervals give together (Zou and Donner's MOVER, 2008).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import msgspec

from weighin.errors import BadInput
from weighin.intervals import ENOUGH, median_interval
from weighin.machine import Machine
from weighin.measurements import Comparison, ContenderResult, Measurement
from weighin.plan import Plan

LEVEL = 0.95  # nobody stopped a run because this interval was narrow, so it needs no reserve for that
BETTER, WORSE, EQUAL, NO_DIFFERENCE = "better", "worse", "equal", "no difference shown"
HEADLINE = (
    *("decode_tokens_per_second", "answer_seconds", "first_token_seconds", "load_seconds", "ready_seconds"),
    *("peak_ram_bytes", "peak_vram_bytes", "disk_bytes"),
    *("top1_agreement", "kl_divergence", "perplexity_ratio", "task_accuracy"),
    *("energy_joules_per_token", "cost_per_million_tokens"),
)
AGAINST_REFERENCE = ("top1_agreement", "kl_divergence", "perplexity_ratio")  # they mean nothing without it
COUNTED = ("disk_bytes", "loaded_bytes")  # counted, not timed: the same again in every process


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """New ÷ old. `interval` says what low and high are: the extremes of both ranges, a 95% interval, or exact."""

    value: float
    low: float
    high: float
    interval: str  # "range", "95%" or "exact"
    old_processes: int
    new_processes: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One figure in both comparisons. No ratio: one of them has zeros."""

    key: str
    old: Measurement
    new: Measurement
    ratio: Ratio | None
    verdict: str  # "better", "worse", "equal" or "no difference shown"


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """Something beside the figures that is another in the new comparison; None: it was, or is, not there."""

    what: str
    old: str | None
    new: str | None


class ContenderDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A contender with figures in both comparisons."""

    name: str
    changes: list[Change]  # the headline figures first
    unknown: dict[str, str]  # figures that are no longer known, and why
    dependencies: list[Changed]
    effective: list[Changed]  # what the engine really did: dtype, threads, devices
    doubts: list[str]  # of one of the two runs alone


class StatusChange(msgspec.Struct, frozen=True, kw_only=True):
    """A contender that appeared, vanished, or ended otherwise than before."""

    name: str
    old: str | None
    new: str | None
    reason: str | None

    @property
    def sentence(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        if self.old is None:
            return f"is new, {self.new}{why}"
        if self.new is None:
            return f"is not there any more, was {self.old}{why}"
        return f"was {self.old}, is {self.new}{why}"


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """All of it: what `report/changes.py` shows."""

    model: str
    old: str  # which run: when, by which weighin
    new: str
    notes: list[str]
    contenders: list[ContenderDiff]
    statuses: list[StatusChange]


def diff(old: Comparison, new: Comparison) -> Diff:
    """What got better or worse from `old` to `new`; refused, with the difference, where the workload is another."""
    check_same_workload(old, new)
    before = {c.name: c for c in old.contenders}
    same_reference = old.reference == new.reference
    return Diff(
        model=new.model.name,
        old=_run(old),
        new=_run(new),
        notes=_notes(old, new),
        contenders=[
            _contender(before[c.name], c, same_reference)
            for c in new.contenders
            if c.name in before and _has_figures(c) and _has_figures(before[c.name])
        ],
        statuses=_statuses(old, new),
    )


def check_same_workload(old: Comparison | Plan, new: Comparison | Plan) -> None:
    """Refuse figures of two different things. A plan will do, so that it can be known before anything is measured."""
    differences = []
    if old.model.fingerprint != new.model.fingerprint:
        differences.append(
            f"the model's content ({old.model.name} {old.model.fingerprint[:12]} and "
            f"{new.model.name} {new.model.fingerprint[:12]})"
        )
    ids = [side.ids_hash if isinstance(side, Comparison) else side.workload.ids_hash for side in (old, new)]
    if ids[0] != ids[1]:
        differences.append(f"the prompts' token ids ({ids[0][:12]} and {ids[1][:12]})")
    if old.workload.max_new_tokens != new.workload.max_new_tokens:
        differences.append(f"max_new_tokens ({old.workload.max_new_tokens} and {new.workload.max_new_tokens})")
    if differences:
        raise BadInput(
            f"The two comparisons ran different workloads; they differ in {', '.join(differences)}. "
            "Run the new one with the old one's model, prompts and options."
        )


# ---- two samples


def unpaired_ratio(old: Sequence[float], new: Sequence[float]) -> Ratio:
    """New ÷ old from one positive value per process, the processes of the two sides having nothing in common."""
    before, after = (sorted(map(math.log, values)) for values in (old, new))
    logs = sorted(b - a for a in before for b in after)
    low, high = logs[0], logs[-1]  # the range: min(new)/max(old) to max(new)/min(old)
    enough = min(len(old), len(new)) >= ENOUGH
    if enough:
        rank = moses_rank(len(old), len(new))
        (a_low, a_high), (b_low, b_high) = (median_interval(side, LEVEL) for side in (before, after))
        joint = _difference((a_low, median(before), a_high), (b_low, median(after), b_high))
        low, high = min(logs[rank - 1], joint[0]), max(logs[-rank], joint[1])
    return Ratio(
        value=math.exp(median(logs)),
        low=math.exp(low),
        high=math.exp(high),
        interval="95%" if enough else "range",
        old_processes=len(old),
        new_processes=len(new),
    )


def _difference(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float]:
    """The interval of b - a from (low, value, high) of each, by MOVER: each side keeps its own lopsidedness."""
    value = b[1] - a[1]
    return value - math.hypot(b[1] - b[0], a[2] - a[1]), value + math.hypot(b[2] - b[1], a[1] - a[0])


@lru_cache
def moses_rank(n: int, m: int, level: float = LEVEL) -> int:
    """The rank, from either end, of the bounds among the n·m sorted differences; 0 where too few have any."""
    allowed = (1 - level) / 2 * math.comb(n + m, n)
    rank, beyond = 0, 0
    for count in rank_sum_counts(n, m):
        beyond += count
        if beyond > allowed:
            break
        rank += 1
    return rank


def rank_sum_counts(n: int, m: int) -> list[int]:
    """How many of the C(n+m, n) orders of two samples have U = 0, 1, … n·m÷2 (the rest mirrors them).

    They are the coefficients of the Gaussian binomial, built up by one member of the first sample at a time.
    """
    size = n * m // 2 + 1
    counts = [1] + [0] * (size - 1)
    for i in range(1, n + 1):
        for u in range(size - 1, m + i - 1, -1):  # times 1 - q^(m+i)
            counts[u] -= counts[u - m - i]
        for u in range(i, size):  # over 1 - q^i
            counts[u] += counts[u - i]
    return counts


def chance_apart(n: int, m: int) -> float:
    """How often the ranges of n and m processes come apart where nothing changed."""
    return 2 / math.comb(n + m, n)


def _of_intervals(old: Measurement, new: Measurement) -> Ratio | None:
    """New ÷ old of figures that bring 95% intervals of their own; None where one touches zero.

    Quality is one process with an interval over its texts. Both sides read the same texts, which makes this interval
    too wide rather than too narrow.
    """
    bounds = [x for m in (old, new) for x in (m.low, m.value, m.high) if x is not None and x > 0]
    if len(bounds) < 6:
        return None
    a_low, a, a_high, b_low, b, b_high = map(math.log, bounds)
    low, high = _difference((a_low, a, a_high), (b_low, b, b_high))
    return Ratio(
        value=math.exp(b - a), low=math.exp(low), high=math.exp(high), interval="95%", old_processes=1, new_processes=1
    )


# ---- one figure


FEWEST = 4  # processes a side: with fewer, two equal runs come apart by chance more often than one time in twenty


def change(key: str, old: Measurement, new: Measurement) -> Change:
    """What became of one figure; both have a value."""
    before, after = _processes(old), _processes(new)
    few = min(len(before), len(after)) < FEWEST
    positive = min(*before, *after) > 0
    ratio: Ratio | None = None
    if key in COUNTED and len({s.value for s in old.samples}) == len({s.value for s in new.samples}) == 1:
        few = False
        if positive:
            ratio = msgspec.structs.replace(unpaired_ratio(before[:1], after[:1]), interval="exact")
        if before[0] == after[0]:
            return Change(key=key, old=old, new=new, ratio=ratio, verdict=EQUAL)
    elif len(before) < ENOUGH and len(after) < ENOUGH and old.interval == new.interval == "95%":
        ratio = _of_intervals(old, new)
        few = ratio is None
    elif positive:
        ratio = unpaired_ratio(before, after)
    if few:  # one process says nothing about the next
        verdict = NO_DIFFERENCE
    elif ratio is not None:
        verdict = _verdict(new.better, rose=ratio.low > 1, fell=ratio.high < 1)
    else:
        verdict = _verdict(new.better, rose=min(after) > max(before), fell=max(after) < min(before))
    return Change(key=key, old=old, new=new, ratio=ratio, verdict=verdict)


def _verdict(better: str, *, rose: bool, fell: bool) -> str:
    if not rose and not fell:
        return NO_DIFFERENCE
    return BETTER if rose == (better == "higher") else WORSE


def _processes(found: Measurement) -> list[float]:
    """One value per process: the median of its samples. A figure worked out from others counts as one process."""
    grouped: dict[tuple[int, str], list[float]] = defaultdict(list)
    for sample in found.samples:
        grouped[sample.round, sample.job].append(sample.value)
    assert found.value is not None
    return [median(values) for values in grouped.values()] or [found.value]


# ---- one contender, one run


def _has_figures(result: ContenderResult) -> bool:
    return result.rounds > 0  # one that failed has the time of its import, at most


def _contender(old: ContenderResult, new: ContenderResult, same_reference: bool) -> ContenderDiff:
    comparable = [
        key
        for key, found in new.measurements.items()
        if found.better in ("higher", "lower") and (same_reference or key not in AGAINST_REFERENCE)
    ]
    ordered = [key for key in HEADLINE if key in comparable] + [key for key in comparable if key not in HEADLINE]
    known = [key for key in ordered if old.value(key) is not None]
    return ContenderDiff(
        name=new.name,
        changes=[
            change(key, old.measurements[key], new.measurements[key]) for key in known if new.value(key) is not None
        ],
        unknown={key: new.measurements[key].reason or "no reason given" for key in known if new.value(key) is None},
        dependencies=_changed(old.dependencies, new.dependencies),
        effective=_changed(old.effective, new.effective),
        doubts=[*_doubts(old, new, "old"), *_doubts(new, old, "new")],
    )


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Changed]:
    return [
        Changed(what=what, old=_word(old.get(what)), new=_word(new.get(what)))
        for what in dict.fromkeys([*old, *new])
        if old.get(what) != new.get(what)
    ]


def _word(value: Any) -> str | None:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return None if value is None else str(value)


def _doubts(mine: ContenderResult, other: ContenderResult, which: str) -> list[str]:
    """A doubt that both runs share does not tell them apart."""
    known = {d.type for d in other.doubts}
    return [f"in the {which} run alone: {d.type}: {d.evidence}" for d in mine.doubts if d.type not in known]


def _statuses(old: Comparison, new: Comparison) -> list[StatusChange]:
    before, after = ({c.name: c for c in side.contenders} for side in (old, new))
    found = []
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name), after.get(name)
        if was is None or now is None or was.status != now.status:
            known = now or was
            found.append(
                StatusChange(
                    name=name,
                    old=was.status if was else None,
                    new=now.status if now else None,
                    reason=known.reason if known else None,
                )
            )
    return found


def _run(comparison: Comparison) -> str:
    rounds = "1 round" if comparison.rounds == 1 else f"{comparison.rounds} rounds"
    return f"{comparison.created}, {rounds}, weighin {comparison.weighin_version}"


def _notes(old: Comparison, new: Comparison) -> list[str]:
    notes = []
    if old.machine.key != new.machine.key:
        notes.append(
            f"The machine was {_machine(old.machine)} and is {_machine(new.machine)}: "
            "what follows is a difference between machines, not between engines."
        )
    for what, was, now in (
        ("system", old.machine.system, new.machine.system),
        ("GPU driver", _drivers(old.machine), _drivers(new.machine)),
        ("weighin version", old.weighin_version, new.weighin_version),
    ):
        if was != now:
            notes.append(f"The {what} was {was or 'unknown'} and is {now or 'unknown'}.")
    if old.reference != new.reference:
        notes.append(
            f"The reference was {old.reference or 'none'} and is {new.reference or 'none'}: "
            "figures against the reference cannot be compared and are left out."
        )
    notes += [f"The {which} run is not complete." for which, c in (("old", old), ("new", new)) if not c.complete]
    return notes


def _machine(machine: Machine) -> str:
    gpus = "".join(f", {gpu.name}" for gpu in machine.gpus)
    gib = round((machine.memory_limit_bytes or machine.memory_bytes) / 2**30)
    return f"{machine.cpu or 'an unknown CPU'} ({machine.threads} threads, {gib} GiB{gpus})"


def _drivers(machine: Machine) -> str:
    return ", ".join(dict.fromkeys(gpu.driver or "unknown" for gpu in machine.gpus))
