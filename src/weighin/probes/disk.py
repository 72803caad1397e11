"""Bytes: of the model on disk, and read from it per token (one that does not fit is read again and again)."""

from __future__ import annotations

import os
from pathlib import Path

from weighin.engines import Job
from weighin.probes import Measure, Probe, Session


class DiskProbe(Probe):
    jobs = ("speed",)
    measures = {  # noqa: RUF012 - a ClassVar of the contract
        "disk_bytes": Measure("weights on disk", "B", "lower"),
        "loaded_bytes": Measure("weights once loaded", "B", "lower"),
        "disk_bytes_read_per_token": Measure("read from disk per token", "B/token", "lower"),
    }

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._before: int | None = None

    def phase_begins(self, phase: str) -> None:
        if phase == "answers":
            self._before = bytes_read()

    def phase_ended(self, phase: str) -> None:
        if phase == "load":
            job = self.session.job
            self.session.sample("disk_bytes", float(sum(file.stat().st_size for file in weight_files(job))))
            loaded = self.session.engine.loaded_bytes()
            self.session.sample("loaded_bytes", None if loaded is None else float(loaded))
        if phase == "answers":
            after = bytes_read()
            if self._before is None or after is None:
                self.session.unknown("disk_bytes_read_per_token", "bytes read cannot be seen here (/proc/self/io)")
            elif self.session.tokens_in_phase:
                read = after - self._before
                self.session.sample("disk_bytes_read_per_token", read / self.session.tokens_in_phase)


def weight_files(job: Job) -> list[Path]:
    """The files that this contender reads its weights from: what was prepared for it, else the model's own."""
    if job.prepared:
        return [file for file in sorted(Path(job.prepared).rglob("*")) if file.is_file()]
    return [Path(file) for file in job.weight_files]


def bytes_read() -> int | None:
    """Bytes this process made the disk read so far; None where the system does not say."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return int(next(line for line in text.splitlines() if line.startswith("read_bytes")).split()[1])


def evict(files: list[Path]) -> None:
    """Ask the system to forget its cached pages of these files; whether it did is seen in the bytes read after."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages not yet written cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


PROBE = DiskProbe
