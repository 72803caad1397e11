"""Which interpreter runs which engine."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_kits import Heard, engine, offer, quick_venv, wheel

from weighin import environments, kits
from weighin.engines import Engine
from weighin.engines.fake import FakeEngine
from weighin.environments import Environment, Missing, for_contender, missing, this_interpreter, versions
from weighin.errors import BadInput, WeighinError
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


# ---- environments of their own


@pytest.fixture
def small(tmp_path: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """The one engine there is: this Python does not satisfy it, its recipe does."""
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    quick_venv(monkeypatch, shared_folder)
    made = engine(wheel(tmp_path, "Small_One", "1.2"), needs=("small.one>=1", "click>=8"), bytes=34_000_000)
    offer(monkeypatch, made)
    return made


def row() -> environments.Row:
    (found,) = environments.table()
    return found


def test_an_engine_with_a_recipe_is_installed_by_weighin(small: type[Engine]) -> None:
    found = for_contender(small, FP32, MODEL)
    assert isinstance(found, Missing)
    assert found.reason == "this Python has no small.one>=1, and small's own environment is not installed"
    assert found.remedy == "weighin engines install small"
    assert (row().state, row().where, row().bytes, row().needs_bytes) == ("not installed", None, None, 34_000_000)
    assert row().remedy == "weighin engines install small"


def test_from_installed_to_broken_to_repaired_to_removed(small: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    environments.install(["small"], *(heard := Heard()).both)
    assert "small is ready: small.one 1.2, " in heard.said[-1]
    kit = kits.of(small)
    assert kit is not None
    assert for_contender(small, FP32, MODEL) == Environment(python=str(kit.python))
    assert versions(small) == {"small.one": "1.2"}  # click is here, and not there
    assert (row().state, row().where, row().problems, row().remedy) == ("ready", "its own environment", (), None)
    assert (row().untested, row().log_probabilities, row().precisions) == (("cuda",), "full", ("fp32", "q4"))
    assert row().bytes is not None and row().bytes > 1e6

    environments.install(["small"], *(heard := Heard()).both)
    assert heard.said == ["small is ready: small.one 1.2; nothing to do"]
    assert heard.steps == []

    (kit.site_packages / "Small_One" / "data.txt").unlink()
    kits._is_ready.cache_clear()  # another process would look anew
    assert row().state == "broken"
    assert "Small_One/data.txt" in row().problems[0]
    found = for_contender(small, FP32, MODEL)
    assert isinstance(found, Missing)
    assert "small's own environment is broken (files are missing" in found.reason
    assert found.remedy == "weighin engines install small"
    environments.install(["small"], *(heard := Heard()).both)
    assert heard.said[0].startswith("small is broken: files are missing or have another size: lib/")
    assert row().state == "ready"

    monkeypatch.setattr(small, "environment", None)
    offer(monkeypatch, newer := engine(*kit.recipe.packages, needs=small.requirements, options=("--no-deps",)))
    assert (row().state, row().remedy) == ("made for other versions", "weighin engines upgrade small")
    found = for_contender(newer, FP32, MODEL)
    assert isinstance(found, Missing) and found.remedy == "weighin engines upgrade small"
    environments.upgrade([], *(heard := Heard()).both)
    assert heard.said[0].startswith("small is made for other versions: ")
    assert row().state == "ready"

    environments.remove(["small"], (heard := Heard()).say)
    assert heard.said == ["small: removed"]
    assert row().state == "not installed"
    environments.remove(["small"], (heard := Heard()).say)
    assert heard.said == ["small is not installed"]


def test_this_python_comes_first(small: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    environments.install(["small"], *Heard().both)
    monkeypatch.setattr(small, "requirements", ("click>=8",))
    assert for_contender(small, FP32, MODEL) == this_interpreter()
    assert (row().state, row().where) == ("ready", "this Python")
    assert row().problems == ("its own environment is there too, and not used",)
    environments.install(["small"], *(heard := Heard()).both)
    assert "small runs in this Python as it is (click " in heard.said[0]
    assert heard.steps == []


def test_nothing_to_upgrade(small: type[Engine]) -> None:
    environments.upgrade([], *(heard := Heard()).both)
    assert heard.said == ["No engine has an environment of its own here."]
    environments.upgrade(["small"], *(heard := Heard()).both)
    assert heard.said == ["small is not installed; to install it: weighin engines install small"]


def test_one_that_fails_does_not_stop_the_next(small: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    bad = type("Bad", (engine("weighin-nobody-has-this==1"),), {"name": "bad"})
    offer(monkeypatch, bad, small)
    with pytest.raises(WeighinError, match="bad could not be installed"):
        environments.install(["bad", "small"], *Heard().both)
    assert [found.state for found in environments.table()] == ["not installed", "ready"]


def test_a_wrong_name_is_refused_before_anything_is_made(small: type[Engine]) -> None:
    with pytest.raises(BadInput, match="There is no engine 'smell' to install"):
        environments.install(["small", "smell"], *Heard().both)
    assert row().state == "not installed"


def test_the_table_lists_what_is_not_hidden_and_an_engine_without_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine()
    monkeypatch.setattr(plain, "environment", None)
    offer(monkeypatch, plain, FakeEngine)
    assert row().state == "not installed"
    assert row().problems == ("this Python has no weighin-nobody-has-this",)
    assert row().remedy == "pip install weighin-nobody-has-this"
