"""A result folder: what it holds, whose it is, and whether what it holds still is what is here."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from weighin import __version__, cache, engines, environments
from weighin.errors import BadInput, WeighinError
from weighin.journal import read
from weighin.plan import Plan

PLAN = "plan.json"
LOCK = ".lock"
RESULTS = "weighin-results"
UNIT_FIELDS = {"event", "contender", "round", "job"}


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
def claimed(folder: Path, *, new: bool) -> Iterator[None]:
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


def check_unchanged(plan: Plan, folder: Path) -> None:
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
    for entry in (e for e in plan.entries if e.status == "ok" or e.from_disk):
        current = environments.versions(engines.everything()[entry.contender.engine])
        for package in sorted(current.keys() | entry.versions.keys()):
            before, after = entry.versions.get(package), current.get(package)
            if before != after:
                differences.append(f"{package} was {before or 'missing'} and is {after or 'missing'} now")
    if differences:
        raise BadInput(f"{folder} cannot be resumed: {'; '.join(dict.fromkeys(differences))}. Start a new comparison.")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The journal's records; one that does not say what it belongs to is damage, not a record."""
    records = list(read(folder))
    for number, record in enumerate(records, start=1):
        if record.get("event") != "note" and not record.keys() >= UNIT_FIELDS:
            raise WeighinError(f"{folder / 'journal.jsonl'}, line {number} is damaged; the run cannot be rebuilt.")
    return records
