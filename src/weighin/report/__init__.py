"""Reports: pure functions of a Comparison, and the writing of their files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from weighin.measurements import Comparison

FORMATS = ("md", "csv", "json")


def render(comparison: Comparison, format_: str) -> str:
    """The comparison in one of FORMATS."""
    from weighin.report import csv, markdown

    if format_ == "md":
        return markdown.render(comparison)
    if format_ == "csv":
        return csv.render(comparison)
    return msgspec.json.format(msgspec.json.encode(comparison), indent=1).decode() + "\n"


def write(comparison: Comparison, folder: Path) -> None:
    """All files of a result folder that are made from the comparison."""
    write_file(folder / "comparison.json", render(comparison, "json").encode())
    write_file(folder / "report.md", render(comparison, "md").encode())
    write_file(folder / "report.csv", render(comparison, "csv").encode())


def write_file(path: Path, data: bytes) -> None:
    """A file appears whole, by rename, or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
