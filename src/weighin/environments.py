"""Which interpreter runs which engine: this one where it satisfies the engine, else the engine's own environment."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import msgspec

from weighin.engines import Engine
from weighin.model import Model
from weighin.plan import Contender


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter, and the folders that an isolated start of it would miss."""

    python: str
    paths: tuple[str, ...] = ()


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Why no interpreter here can run an engine, and what to do."""

    reason: str
    remedy: str


def for_contender(engine: type[Engine], contender: Contender, model: Model) -> Environment | Missing:
    """The environment a contender runs in."""
    unmet = [text for text in engine.requirements_for(contender, model) if not _met(text)]
    if not unmet:
        return this_interpreter()
    return Missing(
        reason=f"this Python has no {', '.join(unmet)}", remedy=f"pip install {' '.join(repr(text) for text in unmet)}"
    )


def missing(engine: type[Engine]) -> list[str]:
    """The engine's requirements that this interpreter does not meet."""
    return [text for text in engine.requirements if not _met(text)]


def versions(engine: type[Engine]) -> dict[str, str]:
    """The versions of an engine's requirements in this interpreter, those that are there."""
    from packaging.requirements import Requirement

    names = [Requirement(text).name for text in engine.requirements]
    return {name: version for name in names if (version := _version(name)) is not None}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _met(text: str) -> bool:
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


@functools.cache
def this_interpreter() -> Environment:
    """The interpreter weighin runs in, with the folders that PYTHONPATH or a user's site added to it.

    A worker starts isolated, so what the user measures with must be handed to it by name; weighin itself is not.
    """
    isolated = subprocess.run(
        [sys.executable, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    own = str(Path(__file__).parent.parent)
    standard = {*json.loads(isolated.stdout), own, "", "."}
    paths = [path for path in sys.path if path not in standard and Path(path).is_dir()]
    return Environment(python=sys.executable, paths=tuple(paths))
