"""One unit's job: what the worker is told, and what happens around it; preparing and drawing answers happen once."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec

from weighin import cache, engines, environments, harness, kits, prompts, quality, report, runner, schedule
from weighin.engines import Job
from weighin.errors import WeighinError
from weighin.plan import Plan, Workload
from weighin.probes.disk import weight_files
from weighin.schedule import State, Unit

WARM_SHARE = 0.5  # of the free memory: larger weights would not stay in the page cache


def work(
    unit: Unit,
    plan: Plan,
    folder: Path,
    state: State,
    record: Any,
    out: Path | None = None,
    channel: int | None = None,
) -> runner.Outcome:
    """The unit's job in a worker of its own."""
    entry = plan.entry(unit.contender)
    engine = engines.everything()[entry.contender.engine]
    environment = environments.for_contender(engine, entry.contender, plan.model)
    if isinstance(environment, environments.Missing):
        return runner.Outcome(
            status="not_installed", phase="start", reason=environment.reason, remedy=environment.remedy, seconds=0.0
        )
    job = job_of(unit, plan, schedule.repeats(state, unit), out)
    if unit.job in ("samples", "score", "floor"):
        job = dataclasses.replace(job, **_quality_job(unit, plan, state))
    log = folder / "logs" / f"{re.sub(r'[^A-Za-z0-9.=-]+', '_', unit.contender)}.log"
    private = engine.starts_processes(entry.contender)
    return runner.run(job, environment, log, plan.limits, record, private_group=private, channel=channel)


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
        vocabulary=work.vocabulary,
        sampling=work.sampling,
        seeds=work.seeds,
        texts=[_before_tokens(work, number) for number in range(len(work.prompts))],
        from_disk=entry.from_disk,
        memory_bytes=plan.machine.memory_available_bytes,
    )


def _before_tokens(work: Workload, number: int) -> dict[str, Any]:
    """A prompt as an engine with a tokenizer of its own would get it."""
    asked = msgspec.to_builtins(work.prompts[number])
    messages = prompts.conversation(asked, work.system) if work.template == "chat" else None
    return {"text": work.rendered[number].text, "messages": messages}


def _quality_job(unit: Unit, plan: Plan, state: State) -> dict[str, Any]:
    """What a job of the quality pass is told beyond the others."""
    assert plan.quality is not None
    if unit.job == "samples":
        samples, tokens = quality.how_many_samples(plan, state)
        return {"samples": samples, "sample_tokens": tokens}
    rows = {"rows": str(quality.rows_folder(plan)), "rows_kept": plan.quality.rows_kept}
    if unit.contender == plan.reference and unit.job == "score":
        return {**rows, "documents": quality.for_reference(plan, state), "writes_rows": True}
    told = {**rows, "documents": quality.for_contender(plan, state)}
    if unit.job == "floor":  # another thread count adds up in another order
        told["threads"] = plan.machine.threads - 1 or 2
    return told


def run_tasks(unit: Unit, plan: Plan, folder: Path, state: State, record: Any) -> runner.Outcome:
    """The tasks of lm-evaluation-harness: it asks, from a process in its own environment, and the worker answers."""
    assert plan.quality is not None
    environment = environments.of_kit(kits.find(harness.NAME))
    if isinstance(environment, environments.Missing):
        return runner.Outcome(
            status="not_installed", phase="start", reason=environment.reason, remedy=environment.remedy, seconds=0.0
        )
    with harness.start(
        environment.python,
        plan.tokenizer_path,
        plan.quality.tasks,
        folder / "logs" / "lm-eval.log",
        limit=plan.quality.task_limit,
        max_length=plan.model.shape.max_positions,
        stop_ids=plan.workload.stop_ids,
        remote_code=plan.remote_code,
    ) as asked:
        outcome = work(unit, plan, folder, state, record, channel=asked.worker_fd)
        found = asked.results()
    for result in found.results:
        record({"event": "task", "result": msgspec.to_builtins(result)})
    for failure in found.failures:
        record({"event": "task_failed", "failure": msgspec.to_builtins(failure)})
    return outcome


def draw_samples(unit: Unit, plan: Plan, folder: Path, state: State, record: Any) -> runner.Outcome:
    """The reference's own answers, drawn once per model and prompts and kept beside its rows."""
    file = quality.samples_file(plan, state)
    if file.is_file():
        for event in msgspec.json.decode(file.read_bytes()):
            record(event)
        return runner.Outcome(status="ok", seconds=0.0)
    drawn: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "sampled":
            drawn.append(event)
        record(event)

    outcome = work(unit, plan, folder, state, on_event)
    if outcome.status == "ok":
        file.parent.mkdir(parents=True, exist_ok=True)
        report.write_file(file, msgspec.json.encode(drawn))
    return outcome


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


def warm_page_cache(job: Job, plan: Plan) -> None:
    """Read the weights once before anything is timed, so that warm loads are warm; not where they would not stay."""
    files = weight_files(job)
    if sum(file.stat().st_size for file in files) > plan.machine.memory_available_bytes * WARM_SHARE:
        return
    buffer = bytearray(1 << 20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
