"""`weighin run`: one answer of one contender, streamed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weighin import intake, prompts
from weighin.errors import BadInput, WeighinError
from weighin.jobs import prepare, work
from weighin.report.table import visible
from weighin.schedule import State, Unit


def stream(request: intake.Request, say: Callable[[str], None], write: Callable[[str], None]) -> None:
    """Load the contender in a worker and write its answer as it comes."""
    plan = intake.make_plan(request, say)
    entry = plan.entries[0]
    if entry.status != "ok":
        remedy = f" {entry.remedy}" if entry.remedy else ""
        raise BadInput(f"{entry.name} cannot run here: {entry.reason}.{remedy}")
    stop = set(plan.workload.stop_ids)
    with (
        tempfile.TemporaryDirectory(prefix="weighin-") as folder,
        prompts.stream_decoder(plan.tokenizer_path, plan.remote_code) as add,
    ):

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "token" and event["id"] not in stop:
                write(visible(add(event["id"])))

        unit = Unit(entry.name, 1, "answer")
        if entry.recipe:
            prepared = prepare(Unit(entry.name, 0, "prepare"), plan, Path(folder), State(), lambda _: None)
            _check(prepared)
        outcome = work(unit, plan, Path(folder), State(), on_event)
        write("\n")
        _check(outcome)


def _check(outcome: Any) -> None:
    if outcome.status != "ok":
        raise WeighinError(f"{outcome.status} in {outcome.phase}: {outcome.reason}")
