"""Engines whose own environment is a tiny package written here, so that venv and pip are real, without a network."""

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from weighin import engines, installing, kits
from weighin.engines import Engine, Recipe
from weighin.engines.fake import FakeEngine
from weighin.kits import Kit
from weighin.model import Model
from weighin.plan import Contender

COMPILER_SAYS = """
[1/2] cc -c one.c
one.c:3:10: fatal error: nothing.h: No such file or directory
    3 | #include "nothing.h"
compilation terminated.
ninja: build stopped: subcommand failed.
"""


def wheel(folder: Path, name: str, version: str = "1.0", code: str = "VALUE = 1\n") -> str:
    """A wheel with one module in it, and one that pip will be asked to remove again where a test wants that."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": code,
        f"{name}/data.txt": "some data\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for at, text in files.items():
            archive.writestr(at, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{at},,\n" for at in [*files, f"{info}/RECORD"]))
    return str(path)


BACKEND = """
import pathlib

def prepare_metadata_for_build_wheel(folder, *_):
    info = pathlib.Path(folder) / "NAME-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: NAME\\nVersion: 1.0\\n")
    return info.name

def build_wheel(*_):
"""


def source(folder: Path, name: str, build: str) -> str:
    """A source package whose build runs this code."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(BACKEND.replace("NAME", name) + textwrap.indent(build, "    "))
    return str(folder)


def engine(*packages: str, needs: tuple[str, ...] = ("weighin-nobody-has-this",), **recipe: Any) -> type[Engine]:
    """An engine `small` that this Python does not satisfy, with this recipe."""

    class Small(FakeEngine):
        name = "small"
        title = "A small engine"
        hidden = False
        requirements = needs
        install = "pip install weighin-nobody-has-this"
        precisions = ("fp32", "q4")
        devices = ("cpu", "cuda")
        untested = ("cuda",)
        log_probabilities = "full"
        environment = Recipe(packages=packages, **recipe)

        @classmethod
        def requirements_for(cls, contender: Contender, model: Model) -> tuple[str, ...]:
            return cls.requirements

    return Small


def kit(*packages: str, **recipe: Any) -> Kit:
    found = kits.of(engine(*packages, **recipe))
    assert found is not None
    return found


def offer(monkeypatch: pytest.MonkeyPatch, *offered: type[Engine]) -> None:
    """These are all the engines there are."""
    monkeypatch.setattr(engines, "everything", lambda: {one.name: one for one in offered})
    monkeypatch.setattr(kits, "_harness_recipe", lambda: None)


def quick_venv(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Environments begin as links to one that was really made, once in this folder: making one takes seconds."""
    template = folder / "empty-environment"
    with FileLock(f"{template}.lock"):
        if not template.exists():
            subprocess.run([sys.executable, "-I", "-m", "venv", str(template)], check=True, timeout=120)
    really = installing.run

    def run(command: list[str], **rest: Any) -> None:
        if command[1:4] != ["-I", "-m", "venv"]:
            return really(command, **rest)
        shutil.copytree(template, command[4], symlinks=True, copy_function=os.link)
        return None

    monkeypatch.setattr(installing, "run", run)


class Heard:
    """What was said and told."""

    def __init__(self, on_step: Callable[[str], None] = lambda words: None) -> None:
        self.said: list[str] = []
        self.steps: list[str] = []
        self.on_step = on_step

    def say(self, text: str) -> None:
        self.said.append(text)

    def tell(self, step: Any) -> None:
        self.steps.append(step.words)
        self.on_step(step.words)

    @property
    def both(self) -> tuple[Callable[[str], None], Callable[[Any], None]]:
        return self.say, self.tell
