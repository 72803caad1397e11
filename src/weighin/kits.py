"""Environments of the engines' own: which there can be, and whether one is sound, by the stock taken at its making."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weighin import cache, engines
from weighin.engines import Engine, Recipe
from weighin.errors import BadInput

HARNESS = "lm-eval"
MARKER = "weighin.json"  # written last: an environment without it is half-made
READY, NOT_INSTALLED, BROKEN = "ready", "not installed", "broken"
OTHER_VERSIONS, BEING_MADE = "made for other versions", "being made"
COMPILED = "__pycache__"
NAMED_FILES = 3


@dataclass(frozen=True, kw_only=True)
class Kit:
    """Something that weighin can make an environment for: an engine, or the harness."""

    name: str
    title: str
    recipe: Recipe
    complete: Callable[[Path], None]  # repairs, once pip is done

    @property
    def folder(self) -> Path:
        """Where its environment is, or would be. It cannot be moved: the scripts in it hold its path."""
        return cache.root() / "environments" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(iter(self.folder.glob("lib/python*/site-packages")), self.folder / "lib" / "site-packages")

    @property
    def lock(self) -> Path:
        """Held by whoever makes or removes it."""
        return self.folder.with_name(f"{self.name}.lock")

    @property
    def log(self) -> Path:
        """What venv and pip said when it was last made; beside the environment, so that it outlives a failure."""
        return self.folder.with_name(f"{self.name}.log")


class Stock(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished environment consists of, by which a deleted or replaced file is found."""

    fingerprint: str  # of the recipe
    python: str  # the interpreter it was made with
    seconds: float
    bytes: int
    versions: dict[str, str]
    files: dict[str, int]  # path -> size, without compiled Python, which comes and goes


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment is now: one of the words above, and what is wrong with it."""

    word: str
    problems: tuple[str, ...] = ()
    stock: Stock | None = None


def of(engine: type[Engine]) -> Kit | None:
    """The kit of an engine; None if it has no recipe."""
    if engine.environment is None:
        return None
    return Kit(name=engine.name, title=engine.title, recipe=engine.environment, complete=engine.complete_environment)


def everything() -> dict[str, Kit]:
    """Every kit by its name."""
    found = [kit for engine in engines.everything().values() if (kit := of(engine))]
    if recipe := _harness_recipe():
        title = "lm-evaluation-harness, for --tasks"
        found.append(Kit(name=HARNESS, title=title, recipe=recipe, complete=_nothing_to_repair))
    return {kit.name: kit for kit in found}


def _harness_recipe() -> Recipe | None:
    try:
        recipe: Recipe = importlib.import_module("weighin.harness").RECIPE
    except ModuleNotFoundError as error:
        if error.name != "weighin.harness":
            raise
        return None
    return recipe


def _nothing_to_repair(site_packages: Path) -> None:
    pass


def find(name: str) -> Kit:
    """The kit of this name."""
    found = everything()
    if name in found:
        return found[name]
    engine = engines.everything().get(name)
    if engine is not None and not engine.hidden:
        raise BadInput(f"{name} has no environment of its own: it runs in this Python, with {engine.install}.")
    raise BadInput(f"There is no engine '{name}' to install (there are {', '.join(found) or 'none'}).")


def fingerprint(recipe: Recipe) -> str:
    """Another one means another environment."""
    return hashlib.sha256(json.dumps([recipe.packages, recipe.remove, recipe.options]).encode()).hexdigest()


def look(kit: Kit) -> State:
    """What a kit's environment is now. Only names and sizes are read, so it takes a fraction of a second."""
    if not kit.folder.exists():
        return State(word=NOT_INSTALLED)
    stock = stock_of(kit)
    if stock is None and _is_locked(kit):
        return State(word=BEING_MADE, problems=("another weighin makes it at this moment",))
    found = tuple(problems(kit))
    if not found:
        return State(word=READY, stock=stock)
    other = stock is not None and stock.fingerprint != fingerprint(kit.recipe)
    return State(word=OTHER_VERSIONS if other else BROKEN, problems=found, stock=stock)


def problems(kit: Kit) -> list[str]:
    """What is wrong with a kit's environment, in words; nothing if it is sound."""
    stock = stock_of(kit)
    if stock is None:
        return ["it was never finished"]
    if stock.fingerprint != fingerprint(kit.recipe):
        return ["this weighin wants other versions than it was made with"]
    if not kit.python.exists():  # a link, to an interpreter that may be gone
        return [f"its Python is gone: {stock.python}"]
    there = dict(files(kit.folder))
    bad = [path for path, size in stock.files.items() if there.get(path) != size]
    named = ", ".join(bad[:NAMED_FILES]) + (f" and {len(bad) - NAMED_FILES} more" if bad[NAMED_FILES:] else "")
    return [
        *_other_versions(stock.versions, versions(kit)),
        *([f"files are missing or have another size: {named}"] if bad else []),
    ]


def _other_versions(then: dict[str, str], now: dict[str, str]) -> list[str]:
    changed = sorted(name for name in then if now.get(name) != then[name])
    return [f"{name} was {then[name]} and is {now.get(name, 'gone')}" for name in changed]


def is_ready(kit: Kit) -> bool:
    """Whether it can be used. Asked before every job, so a process checks the files of one make once."""
    try:
        made_at = (kit.folder / MARKER).stat().st_mtime_ns
    except OSError:
        return False
    return _is_ready(kit, kit.folder, made_at)


@functools.cache
def _is_ready(kit: Kit, folder: Path, made_at: int) -> bool:
    return not problems(kit)


def versions(kit: Kit) -> dict[str, str]:
    """Every package in the environment with its version, by the names of the folders that hold their metadata."""
    from packaging.utils import canonicalize_name

    found = {}
    for metadata in kit.site_packages.glob("*.dist-info"):
        name, _, version = metadata.name.removesuffix(".dist-info").rpartition("-")
        found[str(canonicalize_name(name))] = version
    return found


def stock_of(kit: Kit) -> Stock | None:
    """The stock of a finished environment; None if it is not there or not finished."""
    try:
        return msgspec.json.decode((kit.folder / MARKER).read_bytes(), type=Stock)
    except (OSError, msgspec.DecodeError):
        return None


def files(folder: Path, *, compiled: bool = False) -> Iterator[tuple[str, int]]:
    """Every file below a folder, by its path from there, with its size; half of them are compiled Python."""
    start = len(str(folder)) + 1
    waiting = [str(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if compiled or entry.name != COMPILED:
                        waiting.append(entry.path)
                else:
                    yield entry.path[start:], entry.stat(follow_symlinks=False).st_size


def _is_locked(kit: Kit) -> bool:
    try:
        with kit.lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
