"""Measurement, ContenderResult, Comparison: what was found, rebuilt from the plan and the journal alone.

`comparison.schema.json`, beside this file, is the published JSON Schema of a Comparison; a test keeps it true.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

import msgspec

from weighin import divergence, doubts, intervals, losses, probes, verdict
from weighin.divergence import Divergence, Fault
from weighin.doubts import Doubt, doubt
from weighin.expected import Accuracy, Against
from weighin.fidelity import Fidelity
from weighin.harness import TaskFailure, TaskResult
from weighin.intervals import Interval
from weighin.machine import Machine
from weighin.model import Model
from weighin.plan import Entry, Instrument, Plan, Quality, Workload
from weighin.verdict import Verdict

SCHEMA_VERSION = 1
UNDECODED = {"text": "(the tokenizer could not decode this answer)", "thinking": None, "whole": ""}
STATUSES = ("ok", "failed", "timeout", "out_of_memory", "not_installed", "cannot_run", "not_finished")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One raw value, and the process it came from."""

    round: int
    job: str
    value: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A figure: its meaning, its median over processes, its interval, every raw sample. Unknown: null and a reason."""

    label: str
    unit: str
    better: str
    value: float | None
    low: float | None
    high: float | None
    interval: str | None  # "range" or "95%"
    samples: list[Sample]
    reason: str | None = None

    def by_round(self) -> dict[int, float]:
        """One value per timed process: the median of its samples."""
        grouped: dict[int, list[float]] = defaultdict(list)
        for sample in self.samples:
            if sample.job == "speed":
                grouped[sample.round].append(sample.value)
        return {which: median(values) for which, values in grouped.items()}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call with the time of every token, in seconds after its beginning."""

    round: int
    call: str
    prompt: int | str
    prompt_tokens: int
    ids: list[int]
    times: list[float]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: greedy or drawn, until the model stopped or the cap was reached."""

    prompt: int
    seed: int
    ids: list[int]
    finish: str  # "stop" or "length"
    seconds: float
    text: str
    thinking: str | None
    whole: str  # text and thinking together, as a plain decode gives it
    faults: list[Fault]
    decoded: bool = True  # else there is no text to judge


class ContenderResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found out about one contender."""

    name: str
    named: bool  # by the user; else it is one of the default set
    status: str
    phase: str | None
    reason: str | None
    remedy: str | None
    settings: dict[str, Any]
    effective: dict[str, Any]
    snippet: str
    dependencies: dict[str, str]
    weight_bytes: int
    prepare_seconds: float | None
    rounds: int
    measurements: dict[str, Measurement]
    responses: list[Response]
    first_answer: str | None  # the text of the first call, cut at its length
    doubts: list[Doubt]
    calls: list[Call]
    memory: list[dict[str, Any]]  # of the first round: by phase
    fidelity: Fidelity | None = None  # against the reference; of the reference itself: its noise floor
    fidelity_reason: str | None = None  # why there is none
    divergences: list[Divergence] = []  # where its answers part from the reference's
    accuracy: Accuracy | None = None  # on the prompts that say what is expected
    accuracy_against: Against | None = None  # the reference's
    tasks: list[TaskResult] = []  # of lm-evaluation-harness
    task_failures: list[TaskFailure] = []

    def value(self, key: str) -> float | None:
        found = self.measurements.get(key)
        return found.value if found else None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All of it: the only input of every report."""

    schema_version: int
    weighin_version: str
    created: str
    complete: bool
    model: Model
    machine: Machine
    instrument: Instrument | None
    workload: Workload
    ids_hash: str
    reference: str | None
    reference_note: str
    quality: Quality | None
    rounds: int
    budget_seconds: float
    spent_seconds: float
    prepare_seconds: float
    notes: list[str]
    contenders: list[ContenderResult]
    verdict: Verdict

    def contender(self, name: str) -> ContenderResult:
        return next(c for c in self.contenders if c.name == name)

    def ratio(self, key: str, mine: str, other: str) -> Interval | None:
        """How many times `other`'s figure `mine`'s is, paired by round."""
        a, b = (self.contender(name).measurements.get(key) for name in (mine, other))
        return intervals.paired_ratio(a.by_round(), b.by_round()) if a and b else None

    def __repr__(self) -> str:
        through = sum(c.status == "ok" for c in self.contenders)
        return (
            f"<Comparison of {self.model.name}: {through} of {len(self.contenders)} contenders, {self.rounds} rounds>"
        )

    def _repr_html_(self) -> str:
        from weighin.report import notebook

        return notebook.render(self)

    def __str__(self) -> str:
        from weighin.report import terminal

        return terminal.text(self)

    def to_pandas(self) -> Any:
        """One row per contender, one column per measurement (its median); needs pandas."""
        import pandas

        rows = [
            {"contender": c.name, "status": c.status, **{key: m.value for key, m in c.measurements.items()}}
            for c in self.contenders
        ]
        return pandas.DataFrame(rows).set_index("contender")


Unit = tuple[str, int, str]


def fold(plan: Plan, records: Iterable[dict[str, Any]], *, complete: bool) -> Comparison:
    """The comparison that a plan and its journal amount to."""
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    notes: list[str] = list(plan.model.notes)
    spent = prepare = 0.0
    for record in _last_attempts(records):
        if record["event"] == "note":
            notes.append(record["text"])
            continue
        events[record["contender"]].append(record)
        if record["event"] == "ended":
            if record["job"] == "prepare":
                prepare += record["seconds"]
            elif record["job"] != "tasks":
                spent += record["seconds"]
    results = [_result(plan, entry, events[entry.name]) for entry in plan.entries]
    results = losses.complete(plan, results, events)
    comparison = Comparison(
        schema_version=SCHEMA_VERSION,
        weighin_version=plan.weighin_version,
        created=plan.created,
        complete=complete,
        model=plan.model,
        machine=plan.machine,
        instrument=plan.instrument,
        workload=plan.workload,
        ids_hash=plan.workload.ids_hash,
        reference=plan.reference,
        reference_note=plan.reference_note,
        quality=plan.quality,
        rounds=max((r.rounds for r in results), default=0),
        budget_seconds=plan.budget_seconds,
        spent_seconds=spent,
        prepare_seconds=prepare,
        notes=list(dict.fromkeys([*notes, *_overrun(plan, spent)])),
        contenders=results,
        verdict=Verdict(),
    )
    return msgspec.structs.replace(comparison, verdict=verdict.decide(comparison))


def _overrun(plan: Plan, spent: float) -> list[str]:
    if plan.rounds is not None or spent <= plan.budget_seconds:
        return []
    return [
        f"The first round, the answers and the quality pass, which always run, took longer than the budget: "
        f"{spent:.0f} s instead of {plan.budget_seconds:.0f} s."
    ]


def _last_attempts(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A unit that was interrupted and run again counts once: what its last start left behind."""
    kept: dict[Unit | int, list[dict[str, Any]]] = {}
    for number, record in enumerate(records):
        if record["event"] == "note":
            kept[number] = [record]
            continue
        unit = (record["contender"], record["round"], record["job"])
        if record["event"] == "started":
            kept[unit] = []
        kept.setdefault(unit, []).append(record)
    return [record for group in kept.values() for record in group]


def _result(plan: Plan, entry: Entry, events: list[dict[str, Any]]) -> ContenderResult:
    of = defaultdict(list)
    for event in events:
        of[event["event"]].append(event)
    ended = of["ended"]
    speed_ok = [e for e in ended if e["job"] == "speed" and e["status"] == "ok"]
    failure = _failure(entry, ended)
    measurements = _measurements(of["sample"], of["unknown"])
    decoded = {(e["job"], e["prompt"], e["seed"]): e for e in of["decoded"]}
    responses = [
        Response(
            prompt=e["prompt"],
            seed=e["seed"],
            ids=e["ids"],
            finish=e["finish"],
            seconds=e["seconds"],
            text=text["text"],
            thinking=text["thinking"],
            whole=text["whole"],
            faults=divergence.faults(e["ids"], text["whole"], e["finish"]) if text is not UNDECODED else [],
            decoded=text is not UNDECODED,
        )
        for e in of["response"]
        if (text := decoded.get(("responses", e["prompt"], e["seed"]), UNDECODED))
    ]
    first = decoded.get(("speed", 0, 0))
    # the noise floor is measured with other threads on purpose
    loads: list[dict[str, Any]] = [e["effective"] for e in of["effective"] if e["job"] != "floor"]
    effective = loads[-1] if loads else {}
    calls = [
        Call(**{key: e[key] for key in ("round", "call", "prompt", "prompt_tokens", "ids", "times")})
        for e in of["call"]
    ]
    prepared = [e["seconds"] for e in ended if e["job"] == "prepare" and e["status"] == "ok"]
    versions: dict[str, str] = of["versions"][-1]["versions"] if of["versions"] else entry.versions
    return ContenderResult(
        name=entry.name,
        named=entry.named,
        **failure,
        settings=entry.settings,
        effective=effective,
        snippet=entry.snippet,
        dependencies=versions,
        weight_bytes=entry.weight_bytes,
        prepare_seconds=prepared[0] if prepared else None,
        rounds=len(speed_ok),
        measurements=measurements,
        responses=responses,
        first_answer=first["text"] if first else None,
        doubts=[
            *(doubt(e["type"], e["evidence"]) for e in of["doubt"]),
            *doubts.of_contender(plan, entry, ended, measurements, responses, calls, effective),
        ],
        calls=calls,
        tasks=[msgspec.convert(e["result"], TaskResult) for e in of["task"]],
        task_failures=[msgspec.convert(e["failure"], TaskFailure) for e in of["task_failed"]],
        memory=[
            {k: v for k, v in e.items() if k not in ("event", "contender", "round", "job")}
            for e in of["memory"]
            if e["round"] == 1
        ],
    )


def _failure(entry: Entry, ended: list[dict[str, Any]]) -> dict[str, Any]:
    """Status, phase, reason and remedy: of what the plan ruled out, else of the first job it cannot do without."""
    if entry.status != "ok":
        return {"status": entry.status, "phase": "plan", "reason": entry.reason, "remedy": entry.remedy}
    needed = [e for e in ended if e["job"] in ("prepare", "responses") or (e["job"] == "speed" and e["round"] == 1)]
    for end in needed:
        if end["status"] != "ok":
            return {key: end[key] for key in ("status", "phase", "reason", "remedy")}
    if {e["job"] for e in needed} >= {"speed", "responses"}:
        return {"status": "ok", "phase": None, "reason": None, "remedy": None}
    return {
        "status": "not_finished",
        "phase": None,
        "reason": "the run was stopped before this contender was through",
        "remedy": "weighin compare --resume",
    }


def _measurements(samples: list[dict[str, Any]], unknowns: list[dict[str, Any]]) -> dict[str, Measurement]:
    grouped: dict[str, list[Sample]] = defaultdict(list)
    for e in samples:
        grouped[e["key"]].append(Sample(round=e["round"], job=e["job"], value=e["value"]))
    reasons = {e["key"]: e["reason"] for e in unknowns}
    declared = probes.measures()
    keys = [*declared, *(key for key in grouped if "@" in key)]
    return {key: _measurement(key, declared[key.partition("@")[0]], grouped.get(key, []), reasons) for key in keys}


def _measurement(key: str, measure: probes.Measure, samples: list[Sample], reasons: dict[str, str]) -> Measurement:
    length = key.partition("@")[2]
    label = f"{measure.label} after {length} prompt tokens" if length else measure.label
    if not samples:
        reason = reasons.get(key, "not measured")
        return Measurement(
            label=label, unit=measure.unit, better=measure.better, value=None, low=None, high=None, interval=None,
            samples=[], reason=reason,
        )  # fmt: skip
    grouped: dict[tuple[int, str], list[float]] = defaultdict(list)
    # The timed processes count, where there are any: those of other jobs load and import too, one each.
    timed = [sample for sample in samples if sample.job == "speed"] or samples
    for sample in timed:
        grouped[sample.round, sample.job].append(sample.value)
    found = intervals.of_processes([median(values) for values in grouped.values()])
    return Measurement(
        label=label, unit=measure.unit, better=measure.better, value=found.value, low=found.low, high=found.high,
        interval=found.interval, samples=samples,
    )  # fmt: skip
