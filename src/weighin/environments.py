"""Which interpreter runs which engine: this one where it satisfies the engine, else the engine's own environment."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from weighin import engines, installing, kits
from weighin.engines import Engine
from weighin.errors import WeighinError
from weighin.installing import Say, Tell
from weighin.kits import Kit
from weighin.model import Model
from weighin.plan import Contender

HERE, OWN = "this Python", "its own environment"


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter, and the folders that an isolated start of it would miss."""

    python: str
    paths: tuple[str, ...] = ()


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Why no interpreter here can run an engine, and what to do."""

    reason: str
    remedy: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What `weighin engines` tells of one engine."""

    name: str
    title: str
    state: str  # one of the words of kits.py
    problems: tuple[str, ...] = ()  # why it is not ready, or what else to know
    versions: dict[str, str] = {}
    where: str | None = None  # HERE, OWN; None where it runs nowhere yet
    devices: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    log_probabilities: str = ""
    bytes: int | None = None  # of its own environment
    needs_bytes: int | None = None  # what that would take
    remedy: str | None = None  # the line that makes it ready


# ---- which interpreter


def for_contender(engine: type[Engine], contender: Contender, model: Model) -> Environment | Missing:
    """The environment a contender runs in."""
    unmet = [text for text in engine.requirements_for(contender, model) if not _met(text)]
    if not unmet:
        return this_interpreter()
    kit = kits.of(engine)
    if kit is None:
        return Missing(reason=_has_no(unmet), remedy=f"pip install {' '.join(repr(text) for text in unmet)}")
    return of_kit(kit, f"{_has_no(unmet)}, and ")


def of_kit(kit: Kit, before: str = "") -> Environment | Missing:
    """The environment of a kit's own, if it is made and sound; `before` begins the reason if it is not."""
    if kits.is_ready(kit):
        return Environment(python=str(kit.python))
    state = kits.look(kit)
    why = f" ({'; '.join(state.problems)})" if state.problems else ""
    return Missing(reason=f"{before}{kit.name}'s own environment is {state.word}{why}", remedy=_line(kit, state.word))


def missing(engine: type[Engine]) -> list[str]:
    """The engine's requirements that this interpreter does not meet."""
    return [text for text in engine.requirements if not _met(text)]


def versions(engine: type[Engine]) -> dict[str, str]:
    """The versions of an engine's requirements where it would run, those that are there."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    names = [Requirement(text).name for text in engine.requirements]
    kit = kits.of(engine)
    if kit is None or not missing(engine) or not kits.is_ready(kit):
        return {name: version for name in names if (version := _version(name)) is not None}
    own = kits.versions(kit)
    return {name: own[key] for name in names if (key := canonicalize_name(name)) in own}


def _has_no(unmet: list[str]) -> str:
    return f"this Python has no {', '.join(unmet)}"


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


# ---- all of them


def table() -> list[Row]:
    """Every engine that is listed, and the other kits after them."""
    found = [_row(engine) for engine in engines.everything().values() if not engine.hidden]
    named = {row.name for row in found}
    return found + [_kit_row(kit) for kit in kits.everything().values() if kit.name not in named]


def _row(engine: type[Engine]) -> Row:
    kit, unmet = kits.of(engine), missing(engine)
    if kit is not None and unmet:
        row = _kit_row(kit)
    else:
        idle = kit is not None and kits.look(kit).word != kits.NOT_INSTALLED
        row = Row(
            name=engine.name,
            title=engine.title,
            state=kits.NOT_INSTALLED if unmet else kits.READY,
            problems=(_has_no(unmet),) if unmet else ((f"{OWN} is there too, and not used",) if idle else ()),
            where=None if unmet else HERE,
            remedy=engine.install if unmet else None,
        )
    return msgspec.structs.replace(
        row,
        versions=versions(engine),
        devices=engine.devices,
        untested=engine.untested,
        precisions=engine.precisions,
        log_probabilities=engine.log_probabilities,
    )


def _kit_row(kit: Kit) -> Row:
    state = kits.look(kit)
    return Row(
        name=kit.name,
        title=kit.title,
        state=state.word,
        problems=state.problems,
        versions=_kit_versions(kit),
        where=None if state.word == kits.NOT_INSTALLED else OWN,
        bytes=state.stock.bytes if state.stock else None,
        needs_bytes=kit.recipe.bytes or None,
        remedy=None if state.word == kits.READY else _line(kit, state.word),
    )


def _kit_versions(kit: Kit) -> dict[str, str]:
    """Of a kit that is no engine the package with its name."""
    version = kits.versions(kit).get(kit.name)
    return {kit.name: version} if version else {}


def _line(kit: Kit, word: str) -> str:
    return f"weighin engines {'upgrade' if word == kits.OTHER_VERSIONS else 'install'} {kit.name}"


# ---- what a person asks for


def install(names: Sequence[str], say: Say, tell: Tell) -> None:
    """Make the environments of these engines; a sound one stays as it is, any other is made anew."""
    _each([kits.find(name) for name in names], lambda kit: _install(kit, say, tell))


def upgrade(names: Sequence[str], say: Say, tell: Tell) -> None:
    """Make those environments again that this weighin wants in other versions; without a name, of all there are."""
    chosen = [kits.find(name) for name in names] or list(kits.everything().values())
    made = [kit for kit in chosen if kit.folder.exists()]
    for kit in chosen if names else []:
        if kit not in made:
            say(f"{kit.name} is not installed; to install it: {_line(kit, kits.NOT_INSTALLED)}")
    if not names and not made:
        say("No engine has an environment of its own here.")
    _each(made, lambda kit: _install(kit, say, tell))


def remove(names: Sequence[str], say: Say) -> None:
    """Remove the environments of these engines."""
    for kit in [kits.find(name) for name in names]:
        say(f"{kit.name}: removed" if installing.remove(kit, say) else f"{kit.name} is not installed")


def _install(kit: Kit, say: Say, tell: Tell) -> None:
    from weighin.report.table import figure_bytes, figure_seconds

    engine = engines.everything().get(kit.name)
    if engine is not None and not missing(engine):
        say(f"{kit.name} runs in this Python as it is ({_listed(versions(engine))}): {OWN} would not be used")
        return
    state = kits.look(kit)
    if state.stock is not None and state.word != kits.READY:
        say(f"{kit.name} is {state.word}: {'; '.join(state.problems)}")
    made = installing.make(kit, say, tell)
    stock = kits.stock_of(kit)
    said = f"{kit.name} is ready: {_listed(versions(engine) if engine is not None else _kit_versions(kit))}"
    if made and stock is not None:
        said += f", {figure_bytes(stock.bytes)}, made in {figure_seconds(stock.seconds)}"
    say(said if made else f"{said}; nothing to do")


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _each(chosen: list[Kit], do: Callable[[Kit], None]) -> None:
    """One that fails does not keep the others from their turn."""
    failures = []
    for kit in chosen:
        try:
            do(kit)
        except WeighinError as error:
            failures.append(str(error))
    if failures:
        raise WeighinError("\n".join(failures))
