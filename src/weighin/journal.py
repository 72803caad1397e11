"""The append-only journal of a run: every event is on disk before the next one; all else is rebuilt from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from weighin.errors import WeighinError

NAME = "journal.jsonl"


class Journal:
    """One record per line. A line is written whole and synced, or (after a crash) torn and ignored."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        torn = _torn_bytes(self.path)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if torn:
            os.ftruncate(self._fd, self.path.stat().st_size - torn)

    def append(self, record: dict[str, Any]) -> None:
        line = msgspec.json.encode(record) + b"\n"
        try:
            while line:
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError as error:
            raise WeighinError(
                f"The journal {self.path} cannot be written ({error.strerror}). What was measured so far is in it; "
                f"make room and run: weighin compare --resume {self.path.parent}"
            ) from error

    def close(self) -> None:
        os.close(self._fd)


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """The records of a run's folder; a torn last line is no record."""
    path = folder / NAME
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise WeighinError(f"{path}, line {number} is damaged ({error}); the run cannot be rebuilt.") from error
            if not isinstance(record, dict):
                raise WeighinError(f"{path}, line {number} is not a record; the run cannot be rebuilt.")
            yield record


def _torn_bytes(path: Path) -> int:
    """Bytes after the last whole line."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        data = file.read()
    return len(data) - (data.rfind(b"\n") + 1)
