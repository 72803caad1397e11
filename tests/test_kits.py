"""Whether an environment of an engine's own is sound: what was broken by hand is found."""

import os
import shutil
import sys
import types
from pathlib import Path

import pytest
from small_kits import Heard, engine, kit, offer, quick_venv, wheel

from weighin import installing, kits
from weighin.engines import Recipe
from weighin.errors import BadInput
from weighin.kits import Kit, look, problems


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> tuple[Path, str]:
    """A cache with one environment in it, to be linked, and the package it was made of."""
    folder = tmp_path_factory.mktemp("made")
    package = wheel(folder, "smallone", "1.2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHIN_CACHE", str(folder / "cache"))
        quick_venv(patch, shared_folder)
        installing.make(kit(package), *Heard().both)
    return folder / "cache", package


@pytest.fixture
def it(made: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    shutil.copytree(made[0], tmp_path / "cache", symlinks=True, copy_function=os.link)
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    return kit(made[1])


def test_a_sound_one(it: Kit) -> None:
    state = look(it)
    assert (state.word, state.problems) == ("ready", ())
    assert state.stock is not None and state.stock.versions["smallone"] == "1.2"
    assert kits.is_ready(it)


def test_compiled_python_may_come_and_go(it: Kit) -> None:
    for folder in list(it.folder.rglob("__pycache__")):
        shutil.rmtree(folder)
    (it.site_packages / "smallone" / "cache.bin").touch()
    assert problems(it) == []


def test_a_deleted_file_is_named(it: Kit) -> None:
    (it.site_packages / "smallone" / "data.txt").unlink()
    state = look(it)
    assert state.word == "broken"
    at = it.site_packages.relative_to(it.folder)
    assert state.problems == (f"files are missing or have another size: {at}/smallone/data.txt",)
    assert not kits.is_ready(it)


def test_a_file_that_was_replaced_and_many_that_are_gone(it: Kit) -> None:
    data = it.site_packages / "smallone" / "data.txt"
    data.unlink()
    data.write_text("other data\n")
    shutil.rmtree(it.site_packages / "pip")
    (found,) = problems(it)
    assert found.count(",") == 2
    assert " more" in found


def test_another_version_put_in_by_hand(it: Kit) -> None:
    (it.site_packages / "smallone-1.2.dist-info").rename(it.site_packages / "smallone-1.3.dist-info")
    assert problems(it)[0] == "smallone was 1.2 and is 1.3"
    shutil.rmtree(it.site_packages / "smallone-1.3.dist-info")
    assert problems(it)[0] == "smallone was 1.2 and is gone"


def test_its_python_is_gone(it: Kit, tmp_path: Path) -> None:
    python = it.folder / "bin" / "python"
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    stock = kits.stock_of(it)
    assert stock is not None
    assert look(it).problems == (f"its Python is gone: {stock.python}",)


@pytest.mark.parametrize("marker", [None, b"", b"{}", b'{"fingerprint": 1}'])
def test_half_made(it: Kit, marker: bytes | None) -> None:
    (it.folder / kits.MARKER).unlink()
    if marker is not None:
        (it.folder / kits.MARKER).write_bytes(marker)
    assert (look(it).word, look(it).problems) == ("broken", ("it was never finished",))
    assert not kits.is_ready(it)


def test_made_for_other_versions(it: Kit) -> None:
    for other in (
        Recipe(packages=("smallone==2",)),
        Recipe(packages=it.recipe.packages, options=("--no-deps",)),
        Recipe(packages=it.recipe.packages, remove=("torchvision",)),
    ):
        changed = Kit(name=it.name, title=it.title, recipe=other, complete=it.complete)
        state = look(changed)
        assert state.word == "made for other versions"
        assert state.problems == ("this weighin wants other versions than it was made with",)
        assert not kits.is_ready(changed)


def test_what_a_recipe_merely_tells_makes_no_other_environment(it: Kit) -> None:
    told = Recipe(packages=it.recipe.packages, bytes=5, seconds=5.0, compiles="nothing")
    assert problems(Kit(name=it.name, title=it.title, recipe=told, complete=it.complete)) == []


def test_one_that_was_made_again_in_this_process_is_seen(it: Kit) -> None:
    data = it.site_packages / "smallone" / "data.txt"
    data.unlink()
    assert not kits.is_ready(it)
    data.write_text("some data\n")
    marker = it.folder / kits.MARKER
    stock = marker.read_bytes()
    marker.unlink()
    marker.write_bytes(stock)
    assert kits.is_ready(it)


def test_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path))
    assert look(kit("x==1")) == kits.State(word="not installed")
    assert not kits.is_ready(kit("x==1"))


def test_names_that_have_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, engine("x==1"))
    assert kits.find("small").recipe.packages == ("x==1",)
    with pytest.raises(BadInput, match=r"There is no engine 'smal' to install \(there are small\)\."):
        kits.find("smal")
    plain = engine()
    monkeypatch.setattr(plain, "environment", None)
    offer(monkeypatch, plain)
    with pytest.raises(BadInput, match=r"small has no environment of its own: .*pip install weighin-nobody-has-this"):
        kits.find("small")


def test_the_harness_is_a_kit_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weighin.harness", types.SimpleNamespace(RECIPE=Recipe(packages=("lm-eval==1",))))
    found = kits.everything()["lm-eval"]
    assert found.recipe.packages == ("lm-eval==1",)
    found.complete(Path())
    monkeypatch.setitem(sys.modules, "weighin.harness", None)
    assert "lm-eval" not in kits.everything()
