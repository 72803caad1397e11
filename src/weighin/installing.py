"""An environment is made by venv and pip, whole or not at all, or removed; one weighin at a time."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import msgspec

from weighin import cache, kits, pip_lines
from weighin.errors import WeighinError
from weighin.kits import Kit
from weighin.pip_lines import Progress, Step

DISK_MARGIN = 1.4  # the environment, and the packed files it comes from
IMPORT = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"

Say = Callable[[str], None]
Tell = Callable[[Step], None]


class CommandFailed(Exception):
    """A command of a make ended badly; `lines` are those of its output that tell why."""

    def __init__(self, how: str, lines: list[str]) -> None:
        super().__init__(how)
        self.lines = lines


def make(kit: Kit, say: Say, tell: Tell) -> bool:
    """Make a kit's environment unless it is sound. Gives back whether it was made now.

    `say` gets the sentences that stay on the screen, `tell` the steps that pass.
    """
    with _lock(kit, say) as lock:
        if not kits.problems(kit):
            return False
        _check_disk(kit)
        say(announcement(kit))
        if kit.folder.exists():
            tell(Step("removing what was there", None))
        _clear(kit)
        try:
            with kit.log.open("wb") as log:
                _build(kit, Progress(kit.recipe.seconds, tell), functools.partial(run, log=log, lock=lock))
        except BaseException as error:
            _clear(kit)
            if isinstance(error, CommandFailed | OSError):
                raise WeighinError(_why(kit, error)) from error
            raise
    return True


def announcement(kit: Kit) -> str:
    """What making it will take, said before."""
    from weighin.report.table import figure_bytes

    recipe = kit.recipe
    size = f", about {figure_bytes(recipe.bytes)} on disk" if recipe.bytes else ""
    time_ = f", about {pip_lines.rough(recipe.seconds)} on two cores" if recipe.seconds else ""
    compiles = f"; pip compiles {recipe.compiles}" if recipe.compiles else ""
    return f"{kit.name}: making its environment in {kit.folder}{size}{time_}{compiles}"


def remove(kit: Kit, say: Say) -> bool:
    """Remove a kit's environment. Gives back whether there was one."""
    with _lock(kit, say):
        there = kit.folder.exists()
        _clear(kit)
        kit.log.unlink(missing_ok=True)
    return there


def _build(kit: Kit, progress: Progress, run: Callable[..., None]) -> None:
    """venv, pip, the repairs, a first import, and the stock of it all."""
    began = time.monotonic()
    python, recipe = str(kit.python), kit.recipe
    # isolated: neither the current folder nor a variable of the user's may bring in another package
    pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    progress.step("making an empty environment")
    run([sys.executable, "-I", "-m", "venv", str(kit.folder)], heard=progress.heard)
    install = ["install", "--progress-bar", "off", "--prefer-binary", *recipe.options, *recipe.packages]
    run([*pip, *install], heard=progress.heard)
    if recipe.remove:
        progress.step(f"removing {', '.join(recipe.remove)}")
        run([*pip, "uninstall", "--yes", *recipe.remove], heard=progress.heard)
    kit.complete(kit.site_packages)
    if recipe.modules:
        progress.step(f"trying to import {', '.join(recipe.modules)}")
        run([python, "-I", "-c", IMPORT, *recipe.modules], heard=progress.heard)
    _take_stock(kit, time.monotonic() - began)


def run(command: Sequence[str], *, log: BinaryIO, lock: int, heard: Callable[[str], None]) -> None:
    """Run a command, every line into the log and to `heard`. Whatever happens, nothing of it outlives the call.

    It inherits the lock: should weighin itself be killed, the next one waits until this command is gone too.
    """
    log.write(f"--- {shlex.join(command)}\n".encode())
    log.flush()
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_variables(),
        pass_fds=(lock,),
        start_new_session=True,  # Ctrl-C comes to us, and we end the whole group
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            for raw in process.stdout:
                log.write(raw)
                log.flush()
                lines.append(raw.decode(errors="replace").rstrip())
                heard(lines[-1])
        process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code := process.returncode:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise CommandFailed(how, pip_lines.telling(lines))


def _variables() -> dict[str, str]:
    """The user's variables, pip's among them, less what would bring other packages in or put these elsewhere."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, "PIP_USER": "0"}


def _take_stock(kit: Kit, seconds: float) -> None:
    from weighin.report import write_file

    stock = kits.Stock(
        fingerprint=kits.fingerprint(kit.recipe),
        python=str(kit.python.resolve()),
        seconds=seconds,
        bytes=sum(size for _, size in kits.files(kit.folder, compiled=True)),
        versions=kits.versions(kit),
        files=dict(kits.files(kit.folder)),
    )
    write_file(kit.folder / kits.MARKER, msgspec.json.encode(stock))


def _check_disk(kit: Kit) -> None:
    from weighin.report.table import figure_bytes

    stock = kits.stock_of(kit)  # what is there goes first
    free = shutil.disk_usage(cache.root()).free + (stock.bytes if stock else 0)
    needed = int(kit.recipe.bytes * DISK_MARGIN)
    if free < needed:
        raise WeighinError(
            f"{kit.name} needs about {figure_bytes(needed)} while it is made, the disk of {cache.root()} has "
            f"{figure_bytes(free)} free. Make room, or put the cache elsewhere with $WEIGHIN_CACHE."
        )


def _why(kit: Kit, error: CommandFailed | OSError) -> str:
    quoted = "".join(f"\n  {line}" for line in error.lines) if isinstance(error, CommandFailed) else ""
    what = f"the installation {error}" if isinstance(error, CommandFailed) else str(error)
    return (
        f"{kit.name} could not be installed: {what}.{quoted}\n"
        f"Nothing was left half-made. All that was said is in {kit.log}. When the cause is mended, try again with "
        f"weighin engines install {kit.name}: what was downloaded or built is kept by pip."
    )


def _clear(kit: Kit) -> None:
    """Remove an environment: out of the way at once, then file by file, which takes a while and may be interrupted."""
    if kit.folder.exists():
        kit.folder.rename(kit.folder.with_name(f".{kit.name}.gone-{time.time_ns()}"))
    for gone in kit.folder.parent.glob(f".{kit.name}.gone-*"):
        shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def _lock(kit: Kit, say: Say) -> Iterator[int]:
    """One at a time. A plain flock, since its descriptor can be handed on (see `run`)."""
    kit.lock.parent.mkdir(parents=True, exist_ok=True)
    with kit.lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{kit.name}: another weighin works on it; waiting until that is done")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
