"""THE PIPELINE: plan -> rounds of workers -> comparison -> reports."""

from __future__ import annotations

import datetime
import functools
import os
import re
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console

from weighin import __version__, cache, engines, environments, intake, measurements, prompts, report, runner, schedule
from weighin.engines import Job
from weighin.errors import BadInput, Interrupted, WeighinError
from weighin.journal import Journal, read
from weighin.measurements import Comparison
from weighin.plan import Plan, parse_duration
from weighin.probes.disk import weight_files
from weighin.report import terminal
from weighin.schedule import State, Unit

PLAN = "plan.json"
LOCK = ".lock"
RESULTS = "weighin-results"
WARM_SHARE = 0.5
UNIT_FIELDS = {"event", "contender", "round", "job"}


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
    with _claimed(folder, new=True):
        report.write_file(folder / PLAN, msgspec.json.format(msgspec.json.encode(plan), indent=1))
        return _carry_out(plan, folder, show)


def resume(folder: Path, show: Show) -> Comparison:
    """Finish what is missing in a folder; nothing that is complete runs twice."""
    plan = load_plan(folder)
    _check_unchanged(plan, folder)
    with _claimed(folder, new=False):
        return _carry_out(plan, folder, show)


def rebuild(folder: Path) -> Comparison:
    """The comparison of a folder, from its plan and journal alone."""
    plan = load_plan(folder)
    records = _records(folder)
    return measurements.fold(plan, records, complete=schedule.next_unit(plan, State(records)) is None)


def _records(folder: Path) -> list[dict[str, Any]]:
    """The journal's records; one that does not say what it belongs to is damage, not a record."""
    records = list(read(folder))
    for number, record in enumerate(records, start=1):
        if record.get("event") != "note" and not record.keys() >= UNIT_FIELDS:
            raise WeighinError(f"{folder / 'journal.jsonl'}, line {number} is damaged; the run cannot be rebuilt.")
    return records


def _carry_out(plan: Plan, folder: Path, show: Show) -> Comparison:
    journal = Journal(folder)
    state = State(_records(folder))
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
        _warm_page_cache(job_of(unit, plan, 1), plan)
    if unit.job == "prepare":
        outcome = prepare(unit, plan, folder, state, record)
    else:
        outcome = work(unit, plan, folder, state, record)
    record({"event": "ended", "at": time.time(), **msgspec.to_builtins(outcome)})
    if outcome.status == "ok":
        _decode(unit, plan, calls, record, journal)
    show.ended(unit, state)


def work(unit: Unit, plan: Plan, folder: Path, state: State, record: Any, out: Path | None = None) -> runner.Outcome:
    entry = plan.entry(unit.contender)
    engine = engines.everything()[entry.contender.engine]
    environment = environments.for_contender(engine, entry.contender, plan.model)
    if isinstance(environment, environments.Missing):
        return runner.Outcome(
            status="not_installed", phase="start", reason=environment.reason, remedy=environment.remedy, seconds=0.0
        )
    job = job_of(unit, plan, schedule.repeats(state, unit), out)
    log = folder / "logs" / f"{re.sub(r'[^A-Za-z0-9.=-]+', '_', unit.contender)}.log"
    private = engine.starts_processes(entry.contender)
    return runner.run(job, environment, log, plan.limits, record, private_group=private)


def job_of(unit: Unit, plan: Plan, repeats: int, out: Path | None = None) -> Job:
    """What a worker is told."""
    entry, work = plan.entry(unit.contender), plan.workload
    return Job(
        kind=unit.job,
        round=unit.round,
        contender=entry.name,
        engine=entry.contender.engine,
        precision=entry.contender.precision,
        device=entry.contender.device,
        options=entry.contender.options,
        settings=entry.settings,
        model_path=plan.model.path,
        weight_files=list(plan.model.weight_files),
        prepared=str(cache.prepared(plan.model.fingerprint, entry.recipe)) if entry.recipe else None,
        out=str(out) if out else None,
        threads=plan.machine.threads,
        prompts=[r.ids for r in work.rendered],
        lengths=work.lengths,
        stop_ids=work.stop_ids,
        max_new_tokens=work.max_new_tokens,
        response_cap=work.response_cap,
        repeats=repeats,
        remote_code=plan.remote_code,
        allow_pickle=plan.allow_pickle,
        spawned_at=0.0,
    )


def prepare(unit: Unit, plan: Plan, folder: Path, state: State, record: Any) -> runner.Outcome:
    """Prepare into the cache, unless it is there."""
    recipe = plan.entry(unit.contender).recipe
    assert recipe is not None
    outcomes: list[runner.Outcome] = []

    def build(out: Path) -> None:
        outcomes.append(work(unit, plan, folder, state, record, out))
        if outcomes[0].status != "ok":
            raise WeighinError(outcomes[0].reason or "preparing failed")

    try:
        cache.make(cache.prepared(plan.model.fingerprint, recipe), build)
    except WeighinError:
        return outcomes[0]
    return outcomes[0] if outcomes else runner.Outcome(status="ok", seconds=0.0)


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
    for call, text in zip(mine, texts, strict=True):
        record({"event": "decoded", "prompt": call["prompt"], **text})


def _cut(ids: list[int], stop: set[int]) -> list[int]:
    """A forced answer goes on past its end; a reader wants it up to there."""
    return next((ids[:i] for i, token in enumerate(ids) if token in stop), ids)


def _warm_page_cache(job: Job, plan: Plan) -> None:
    """Read the weights once before anything is timed, so that warm loads are warm; not where they would not stay."""
    files = weight_files(job)
    if sum(file.stat().st_size for file in files) > plan.machine.memory_available_bytes * WARM_SHARE:
        return
    buffer = bytearray(1 << 20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def default_folder(plan: Plan) -> Path:
    """weighin-results/MODEL-TIME under the current folder."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.model.name).strip("-.") or "model"
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(RESULTS) / f"{name}-{stamp}"


def load_plan(folder: Path) -> Plan:
    file = folder / PLAN
    if not file.is_file():
        raise BadInput(f"{folder} holds no comparison ({PLAN} is not there).")
    try:
        return msgspec.json.decode(file.read_bytes(), type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} cannot be read ({error}); was it made by another version of weighin?") from error


@contextmanager
def _claimed(folder: Path, *, new: bool) -> Iterator[None]:
    """The folder is ours alone while we write into it."""
    from filelock import FileLock, Timeout

    check_folder(folder, new=new)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BadInput(f"{folder} is in use by another weighin; wait for it, or choose another --out.") from None
    try:
        yield
    finally:
        lock.release()  # the file stays: whoever waits for it has it open already


def check_new_folder(folder: Path) -> None:
    """Refuse, before anything costly, a folder that a new comparison cannot have; leave no trace of the look."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise BadInput(f"The output folder {folder} cannot be made: {nearest} is a file. Choose another --out.")
    if not os.access(nearest, os.W_OK):
        raise BadInput(
            f"The output folder {folder} cannot be written ({nearest} does not allow it). Choose another --out."
        )
    if folder.is_dir():
        _check_empty(folder)


def check_folder(folder: Path, *, new: bool) -> None:
    """Make the folder if need be; refuse one that cannot be written or holds something else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(
            f"The output folder {folder} cannot be written ({error.strerror}). Choose another --out."
        ) from error
    if new:
        _check_empty(folder)


def _check_empty(folder: Path) -> None:
    if (folder / PLAN).exists():
        raise BadInput(
            f"{folder} already holds a comparison. Finish it with --resume {folder}, or choose another --out."
        )
    if any(file.name != LOCK for file in folder.iterdir()):
        raise BadInput(f"{folder} holds other files; give a new or empty folder with --out.")


def _check_unchanged(plan: Plan, folder: Path) -> None:
    """Figures of two different things must not end up in one table."""
    from weighin import machine, model

    now = model.inspect(
        plan.model.source,
        Path(plan.model.path),
        remote_code="trust" if plan.remote_code else "ignore",
        allow_pickle=plan.allow_pickle,
    )
    here = machine.look(cache.root(), measure=False)
    if plan.threads_asked:
        here = msgspec.structs.replace(here, threads=plan.threads_asked)
    differences = []
    if plan.weighin_version != __version__:
        differences.append(f"weighin was {plan.weighin_version} and is {__version__} now")
    if now.fingerprint != plan.model.fingerprint:
        differences.append(f"the model at {plan.model.path} has changed")
    if here.key != plan.machine.key:
        differences.append(f"the machine is another ({here.cpu}, {here.threads} threads)")
    for entry in plan.runnable:
        current = environments.versions(engines.everything()[entry.contender.engine])
        for package in sorted(current.keys() | entry.versions.keys()):
            before, after = entry.versions.get(package), current.get(package)
            if before != after:
                differences.append(f"{package} was {before or 'missing'} and is {after or 'missing'} now")
    if differences:
        raise BadInput(f"{folder} cannot be resumed: {'; '.join(dict.fromkeys(differences))}. Start a new comparison.")


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
