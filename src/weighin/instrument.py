"""The instrument measures itself: a worker with an engine that does nothing, timed like any other."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from statistics import median

import msgspec

from weighin import cache, environments, runner
from weighin.engines import Job
from weighin.plan import Instrument
from weighin.report import write_file

TOKENS = 1000
REPEATS = 5


def remembered(machine_key: str) -> Instrument | None:
    """The cost on this machine with this very code, measured once."""
    file = cache.worker_copy() / f"instrument-{machine_key}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(file.read_bytes(), type=Instrument)
    found = measure()
    if found is not None:
        with contextlib.suppress(OSError):
            write_file(file, msgspec.json.encode(found))
    return found


def measure() -> Instrument | None:
    """Run the null engine once, in a worker of its own; None if that failed."""
    job = Job(
        kind="speed", round=1, contender="null:none@cpu", engine="null", precision="none", device="cpu", options={},
        settings={"dependencies": []}, model_path="", weight_files=[], prepared=None, out=None, threads=1,
        prompts=[[0]], lengths={},
        stop_ids=[], max_new_tokens=TOKENS, response_cap=1, repeats=REPEATS, remote_code=False, allow_pickle=False,
        spawned_at=0.0,
    )  # fmt: skip
    speeds: list[float] = []

    def on_event(event: dict[str, object]) -> None:
        if event["event"] == "sample" and event["key"] == "decode_tokens_per_second":
            speeds.append(float(str(event["value"])))

    with tempfile.TemporaryDirectory(prefix="weighin-") as folder:
        outcome = runner.run(
            job, environments.this_interpreter(), Path(folder) / "log", runner.DEFAULT_LIMITS, on_event
        )
    if outcome.status != "ok" or not speeds:
        return None
    return Instrument(seconds_per_token=1 / median(speeds), seconds_per_run=outcome.seconds)
