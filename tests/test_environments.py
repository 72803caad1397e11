"""Which interpreter runs which engine."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weighin import environments
from weighin.engines.fake import FakeEngine
from weighin.environments import Environment, Missing, for_contender, missing, this_interpreter, versions
from weighin.model import Model
from weighin.plan import Contender

MODEL: Any = object()


class Picky(FakeEngine):
    requirements = ("click>=8", "rich>=9999", "weighin-nobody-has-this")

    @classmethod
    def requirements_for(cls, contender: Contender, model: Model) -> tuple[str, ...]:
        assert model is MODEL
        return cls.requirements if contender.precision == "nf4" else cls.requirements[:1]


FP32, NF4 = Contender.parse("fake:fp32@cpu"), Contender.parse("fake:nf4@cpu")


def test_an_engine_runs_in_this_interpreter_if_that_has_what_it_needs() -> None:
    found = for_contender(Picky, FP32, MODEL)
    assert isinstance(found, Environment)
    assert found.python == sys.executable


def test_what_is_missing_or_too_old_is_named_with_the_line_that_installs_it() -> None:
    found = for_contender(Picky, NF4, MODEL)
    assert isinstance(found, Missing)
    assert found.reason == "this Python has no rich>=9999, weighin-nobody-has-this"
    assert found.remedy == "pip install 'rich>=9999' 'weighin-nobody-has-this'"
    assert missing(Picky) == ["rich>=9999", "weighin-nobody-has-this"]


def test_versions_are_of_what_is_there() -> None:
    import click
    import rich  # noqa: F401

    found = versions(Picky)
    assert set(found) == {"click", "rich"}
    assert found["click"] == environments._version("click")
    assert click is not None


def test_a_worker_gets_the_folders_that_an_isolated_start_would_miss(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    code = "from weighin.environments import this_interpreter as t; print(t().python); print(*t().paths, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
        env={"PYTHONPATH": f"{tmp_path / 'mine'}:{tmp_path / 'gone'}", "PATH": "/usr/bin:/bin"}, cwd=tmp_path,
    )  # fmt: skip
    python, *paths = done.stdout.splitlines()
    assert python == sys.executable
    assert str(tmp_path / "mine") in paths
    assert str(tmp_path / "gone") not in paths
    assert str(tmp_path) not in paths  # the current folder is no folder of packages


def test_weighin_itself_is_not_handed_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    this_interpreter.cache_clear()
    own = str(Path(environments.__file__).parent.parent)
    monkeypatch.syspath_prepend(own)
    assert own not in this_interpreter().paths
    this_interpreter.cache_clear()
