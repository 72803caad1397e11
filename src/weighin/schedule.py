"""Which job comes next: a pure function of the plan and of what the journal says is done."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from weighin import intervals, quality
from weighin.plan import Entry, Plan

PRECISE = 0.03  # the paired decode ratio's interval is narrow enough within ±3%
MOST_ROUNDS = 60
REPEATS = 2
MORE_REPEATS = 4
LOADING_SHARE = 1 / 3
SPEED_KEY = "decode_tokens_per_second"
# Without these a contender still has its figures of speed and memory.
EXTRA_JOBS = ("cold", "samples", "score", "floor", "tasks")


class Unit(NamedTuple):
    """What is done whole or run again: one job of one contender in one round."""

    contender: str
    round: int
    job: str


class State:
    """What is done so far, kept up to date record by record."""

    def __init__(self, records: Iterable[dict[str, Any]] = ()) -> None:
        self.ended: dict[Unit, dict[str, Any]] = {}
        self.spent = 0.0
        self.notes: set[str] = set()
        self.sampled: list[dict[str, Any]] = []  # the reference's own answers
        self.responses: dict[str, dict[int, list[int]]] = defaultdict(dict)  # contender -> prompt -> ids
        self.rows_written: list[str] = []  # by the reference
        self._values: dict[Unit, dict[str, list[float]]] = {}
        for record in records:
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        if record["event"] == "note":
            self.notes.add(record["text"])
            return
        unit = Unit(record["contender"], record["round"], record["job"])
        if record["event"] == "started":
            self._values[unit] = defaultdict(list)
            if unit.job == "samples":
                self.sampled = []
        elif record["event"] == "sampled":
            self.sampled.append(record)
        elif record["event"] == "response" and record.get("seed", 0) == 0:
            self.responses[unit.contender][record["prompt"]] = record["ids"]
        elif record["event"] == "scored" and "kl" not in record and unit.job == "score":
            self.rows_written.append(record["rows"])
        elif record["event"] == "sample":
            self._values.setdefault(unit, defaultdict(list))[record["key"]].append(record["value"])
        elif record["event"] == "ended":
            self.ended[unit] = record
            if unit.job not in ("prepare", "tasks"):  # what the user asks for on top is not the budget's
                self.spent += record["seconds"]

    def failed(self, contender: str) -> bool:
        """Whether a job failed without which the others make no sense."""
        return any(
            end["status"] != "ok" and unit.job not in EXTRA_JOBS
            for unit, end in self.ended.items()
            if unit.contender == contender
        )

    def median(self, unit: Unit, key: str) -> float | None:
        values = self._values.get(unit, {}).get(key)
        return statistics.median(values) if values else None

    def by_round(self, contender: str, key: str) -> dict[int, float]:
        return {
            unit.round: value
            for unit in self.ended
            if unit.contender == contender and unit.job == "speed" and (value := self.median(unit, key)) is not None
        }

    def prefill(self, contender: str) -> float | None:
        """Prompt tokens a second in round one: of the longest prompts, else of the short ones."""
        values = self._values.get(Unit(contender, 1, "speed"), {})
        keys = sorted((k for k in values if k.startswith("prefill_tokens_per_second")), key=lambda k: (len(k), k))
        return statistics.median(values[keys[-1]]) if keys else None

    def loading_share(self, contender: str) -> float | None:
        """The share of its first job that a contender spent on importing and loading."""
        unit = Unit(contender, 1, "speed")
        end = self.ended.get(unit)
        if end is None or not end["seconds"]:
            return None
        parts = (self.median(unit, key) or 0.0 for key in ("import_seconds", "load_seconds"))
        return sum(parts) / float(end["seconds"])


def next_unit(plan: Plan, state: State) -> Unit | None:
    """The first unit that is not done: prepare, round one, responses, quality, cold loads, more rounds."""
    alive = [e for e in plan.runnable if not state.failed(e.name)]
    prepares: dict[str, Unit] = {}
    for entry in alive:
        if entry.recipe:
            prepares.setdefault(entry.recipe, Unit(entry.name, 0, "prepare"))
    firsts = [
        *prepares.values(),
        *(Unit(e.name, 1, "speed") for e in alive),
        *(Unit(e.name, 1, "responses") for e in alive),
    ]
    for unit in firsts:
        if unit not in state.ended:
            return unit
    if (missing_quality := _quality_unit(plan, state)) is not None:
        return missing_quality
    for entry in alive:
        unit = Unit(entry.name, 1, "cold")
        if unit not in state.ended and (plan.rounds or state.spent < plan.budget_seconds):
            return unit
    for number in range(2, (plan.rounds or MOST_ROUNDS) + 1):
        missing = [unit for unit in _round(alive, number) if unit not in state.ended]
        begun = len(missing) < len(alive)
        if missing and (begun or worth_a_round(plan, state, alive, number)):
            return missing[0]
        if missing:
            return None
    return None


def _quality_unit(plan: Plan, state: State) -> Unit | None:
    """The next job of the quality pass: the reference draws its answers, scores, scores again; then the others."""
    entries = quality.scoring(plan, state)
    return (_scoring_unit(plan, state, entries) if entries else None) or _tasks_unit(plan, state)


def _tasks_unit(plan: Plan, state: State) -> Unit | None:
    if plan.quality is None or not plan.quality.tasks:
        return None
    able = [e for e in plan.runnable if e.log_probabilities and not state.failed(e.name)]
    return next((unit for e in able if (unit := Unit(e.name, 1, "tasks")) not in state.ended), None)


def _scoring_unit(plan: Plan, state: State, entries: list[Entry]) -> Unit | None:
    reference, *others = entries
    draws = Unit(reference.name, 1, "samples")
    scores = Unit(reference.name, 1, "score")
    can_draw = reference.samples and not reference.from_disk and plan.quality is not None and plan.quality.samples
    if can_draw and draws not in state.ended:
        return draws
    if scores not in state.ended:
        return scores
    if state.ended[scores]["status"] != "ok":
        return None
    units = [Unit(reference.name, 1, "floor"), *(Unit(e.name, 1, "score") for e in others)]
    return next((unit for unit in units if unit not in state.ended), None)


def _round(alive: list[Entry], number: int) -> list[Unit]:
    """The contenders take turns in coming first, so that a drift of the machine favours nobody."""
    shift = (number - 1) % len(alive) if alive else 0
    return [Unit(e.name, number, "speed") for e in alive[shift:] + alive[:shift]]


def worth_a_round(plan: Plan, state: State, alive: list[Entry], number: int) -> bool:
    """Whether to start this round: as many as asked; else while the budget has room and ratios are not yet precise."""
    if not alive:
        return False
    if plan.rounds is not None:
        return number <= plan.rounds
    if state.spent + round_seconds(state, alive) > plan.budget_seconds:
        return False
    return number <= intervals.ENOUGH or not _precise(state, alive, plan.reference)


def round_seconds(state: State, alive: list[Entry]) -> float:
    """What a round takes, from the last time each contender ran."""
    latest: dict[str, float] = {}
    for unit, end in state.ended.items():
        if unit.job == "speed":
            latest[unit.contender] = end["seconds"]
    return sum(latest.get(e.name, 0.0) for e in alive)


def _precise(state: State, alive: list[Entry], reference: str | None) -> bool:
    """Whether every contender's decode ratio to the reference (or else the first one) is known to ±3%."""
    names = [e.name for e in alive]
    base = reference if reference in names else names[0]
    for name in names:
        if name == base:
            continue
        ratio = intervals.paired_ratio(state.by_round(name, SPEED_KEY), state.by_round(base, SPEED_KEY))
        if ratio is None or ratio.interval != "95%":
            return False
        if ratio.high / ratio.value > 1 + PRECISE or ratio.low / ratio.value < 1 - PRECISE:
            return False
    return True


def repeats(state: State, unit: Unit) -> int:
    """Steady answers in one process: more, and so fewer rounds, where loading costs over a third of a round."""
    share = state.loading_share(unit.contender)
    return MORE_REPEATS if unit.round > 1 and share is not None and share > LOADING_SHARE else REPEATS


def fewer_rounds(state: State, unit: Unit) -> dict[str, Any] | None:
    """The note, once, that loading costs so much of a round that fewer are run."""
    share = state.loading_share(unit.contender)
    if unit.job != "speed" or share is None or repeats(state, unit) != MORE_REPEATS:
        return None
    text = (
        f"{unit.contender}: importing and loading take {share:.0%} of a round, so each process answers "
        f"{MORE_REPEATS} times instead of {REPEATS} and fewer rounds fit into the budget."
    )
    return None if text in state.notes else {"event": "note", "text": text}
