"""THE PIPELINE: plan -> rounds of workers -> quality -> comparison -> reports."""

from __future__ import annotations

import functools
import os
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console

from weighin import intake, measurements, prompts, report, schedule
from weighin.errors import Interrupted, WeighinError
from weighin.folder import PLAN, check_unchanged, claimed, default_folder, load_plan, read_records
from weighin.jobs import draw_samples, job_of, prepare, run_tasks, warm_page_cache, work
from weighin.journal import Journal
from weighin.measurements import Comparison
from weighin.plan import Plan, parse_duration
from weighin.report import terminal
from weighin.schedule import State, Unit


class Show(Protocol):
    """What a person sees while it runs; called between jobs and on events, never while something is timed."""

    def planned(self, plan: Plan, folder: Path) -> None: ...
    def began(self, unit: Unit, state: State) -> None: ...
    def event(self, unit: Unit, event: dict[str, Any], state: State) -> None: ...
    def ended(self, unit: Unit, state: State) -> None: ...
    def finished(self) -> None: ...


class Silent:
    """Shows nothing."""

    def planned(self, plan: Plan, folder: Path) -> None: ...
    def began(self, unit: Unit, state: State) -> None: ...
    def event(self, unit: Unit, event: dict[str, Any], state: State) -> None: ...
    def ended(self, unit: Unit, state: State) -> None: ...
    def finished(self) -> None: ...


def compare(
    model: str,
    contenders: Sequence[str] = (),
    prompts: str | os.PathLike[str] | Sequence[str | dict[str, Any]] | None = None,
    *,
    out: str | Path | None = None,
    **options: Any,
) -> Comparison:
    """Compare ways of running a model: the Python form of `weighin compare`, with its options by their names."""
    if "budget" in options:
        options["budget_seconds"] = parse_duration(str(options.pop("budget")))
    request = intake.Request(model=str(model), contenders=tuple(contenders), prompts=prompts, **options)
    plan = intake.make_plan(request, say=print)
    show = terminal.Progress(Console(force_terminal=False))
    return start(plan, Path(out) if out else default_folder(plan), show)


def start(plan: Plan, folder: Path, show: Show) -> Comparison:
    """Carry out a plan in a new folder."""
    with claimed(folder, new=True):
        report.write_file(folder / PLAN, msgspec.json.format(msgspec.json.encode(plan), indent=1))
        return _carry_out(plan, folder, show)


def resume(folder: Path, show: Show) -> Comparison:
    """Finish what is missing in a folder; nothing that is complete runs twice."""
    plan = load_plan(folder)
    check_unchanged(plan, folder)
    with claimed(folder, new=False):
        return _carry_out(plan, folder, show)


def rebuild(folder: Path) -> Comparison:
    """The comparison of a folder, from its plan and journal alone."""
    plan = load_plan(folder)
    records = read_records(folder)
    return measurements.fold(plan, records, complete=schedule.next_unit(plan, State(records)) is None)


def _carry_out(plan: Plan, folder: Path, show: Show) -> Comparison:
    journal = Journal(folder)
    state = State(read_records(folder))
    show.planned(plan, folder)
    interrupted = False
    try:
        while (unit := schedule.next_unit(plan, state)) is not None:
            do(unit, plan, folder, journal, state, show)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        show.finished()
        journal.close()
    comparison = rebuild(folder)
    report.write(comparison, folder)
    if interrupted:
        raise Interrupted(f"Interrupted. What was measured is kept; finish it with: weighin compare --resume {folder}")
    return comparison


def do(unit: Unit, plan: Plan, folder: Path, journal: Journal, state: State, show: Show) -> None:
    """One unit: its job in a worker, every event of it on disk before the next, its texts decoded after it."""

    calls: list[dict[str, Any]] = []

    def record(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            show.event(unit, event, state)
            return
        entry = {"contender": unit.contender, "round": unit.round, "job": unit.job, **event}
        journal.append(entry)
        state.add(entry)
        if event["event"] == "call":
            calls.append(event)
        show.event(unit, event, state)

    if note := schedule.fewer_rounds(state, unit):
        journal.append(note)
        state.add(note)
    record({"event": "started", "at": time.time()})
    show.began(unit, state)
    if unit.job == "speed" and unit.round == 1:
        warm_page_cache(job_of(unit, plan, 1), plan)
    if unit.job == "prepare":
        outcome = prepare(unit, plan, folder, state, record)
    elif unit.job == "samples":
        outcome = draw_samples(unit, plan, folder, state, record)
    elif unit.job == "tasks":
        outcome = run_tasks(unit, plan, folder, state, record)
    else:
        outcome = work(unit, plan, folder, state, record)
    record({"event": "ended", "at": time.time(), **msgspec.to_builtins(outcome)})
    if outcome.status == "ok":
        _decode(unit, plan, calls, record, journal)
    show.ended(unit, state)


def _decode(unit: Unit, plan: Plan, calls: list[dict[str, Any]], record: Any, journal: Journal) -> None:
    """The texts of a job's answers: of its responses, and in round one of the very first call."""
    wanted = {"responses": "response", "speed": "first"}.get(unit.job) if unit.round == 1 else None
    mine = [call for call in calls if call["call"] == wanted]
    if not mine:
        return
    stop = set(plan.workload.stop_ids)
    answers = [_cut(call["ids"], stop) for call in mine]
    work = plan.workload
    opened = [work.rendered[call["prompt"]].thinking_open for call in mine]
    try:
        texts = prompts.decode(plan.tokenizer_path, answers, opened, work.thinking, plan.remote_code)
    except WeighinError as error:  # the figures are there all the same
        journal.append({"event": "note", "text": f"The answers of {unit.contender} could not be decoded: {error}"})
        return
    seen: dict[Any, int] = {}
    for call, text in zip(mine, texts, strict=True):
        seed = seen[call["prompt"]] = seen.get(call["prompt"], -1) + 1
        record({"event": "decoded", "prompt": call["prompt"], "seed": seed, **text})


def _cut(ids: list[int], stop: set[int]) -> list[int]:
    """A forced answer goes on past its end; a reader wants it up to there."""
    return next((ids[:i] for i, token in enumerate(ids) if token in stop), ids)


def exit_code(comparison: Comparison) -> int:
    """0 every attempted contender ok, 1 none, 4 some. What the default set could not try does not count."""
    counted = [c for c in comparison.contenders if c.named or c.status not in ("cannot_run", "not_installed")]
    ok = sum(c.status == "ok" for c in counted)
    if not counted or not ok:
        return 1
    return 0 if ok == len(counted) else 4


class _CallableModule(types.ModuleType):
    """`weighin.compare` is this module and the function in it: importing the one would hide the other."""

    @functools.wraps(compare)
    def __call__(self, *args: Any, **kwargs: Any) -> Comparison:
        return compare(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
