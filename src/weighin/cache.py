"""Where prepared models, the demo, the worker's copy of weighin and the machine's figures are kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).parent
WORKER_FILES = (
    *("__init__.py", "errors.py", "worker.py", "unpack.py", "nvml.py", "reference_rows.py"),
    *("engines", "probes"),
)
DONE = ".complete"


def root() -> Path:
    """The cache's folder: $WEIGHIN_CACHE, else the system's place for caches."""
    import platformdirs

    named = os.environ.get("WEIGHIN_CACHE")
    folder = Path(named).expanduser().resolve() if named else Path(platformdirs.user_cache_dir("weighin"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def prepared(fingerprint: str, recipe: str) -> Path:
    """Where a model prepared by a recipe lies, whether it is there yet or not."""
    return root() / "prepared" / f"{fingerprint[:16]}-{recipe}"


def reference(fingerprint: str, recipe: str) -> Path:
    """Where the rows of a model's reference lie."""
    return root() / "references" / f"{fingerprint[:16]}-{recipe}"


def is_complete(folder: Path) -> bool:
    return (folder / DONE).exists()


def make(folder: Path, build: Callable[[Path], None]) -> bool:
    """Let `build` fill the folder, once: whole or not at all, also with two runs at the same time.

    Gives back whether it was built now.
    """
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if is_complete(folder):
            return False
        for left_over in (folder, *folder.parent.glob(f".{folder.name}-*")):  # of a run that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            build(temporary)
            (temporary / DONE).touch()
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return True


def worker_copy() -> Path:
    """A folder with a copy of what a worker needs of weighin, and nothing else, to put on its path."""
    sources = sorted(
        file
        for name in WORKER_FILES
        for file in ([PACKAGE / name] if (PACKAGE / name).is_file() else (PACKAGE / name).glob("*.py"))
    )
    digest = hashlib.sha256()
    for file in sources:
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes() + b"\0")

    def build(folder: Path) -> None:
        for file in sources:
            copy = folder / "weighin" / file.relative_to(PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)

    folder = root() / "worker" / digest.hexdigest()[:16]
    make(folder, build)
    return folder
