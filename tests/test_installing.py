"""An environment of an engine's own is made whole or not at all."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
from conftest import alive
from small_kits import COMPILER_SAYS, Heard, kit, quick_venv, source, wheel

from weighin import installing, kits
from weighin.errors import WeighinError
from weighin.installing import make, remove
from weighin.kits import READY, look, problems


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, shared_folder: Path) -> None:
    quick_venv(monkeypatch, shared_folder)


def test_made_by_venv_and_pip_and_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    monkeypatch.setenv("PIP_USER", "1")
    packages = wheel(tmp_path, "smallone"), wheel(tmp_path, "smalltwo", "2.0+cpu"), wheel(tmp_path, "torchvision")
    it = kit(*packages, remove=("torchvision",), modules=("smallone", "smalltwo"), bytes=120_000_000, seconds=480.0,
             compiles="one.c from source, 8 minutes")  # fmt: skip
    heard = Heard()
    assert make(it, *heard.both) is True
    assert heard.said == [
        f"small: making its environment in {it.folder}, about 120 MB on disk, about 8 min on two cores; "
        "pip compiles one.c from source, 8 minutes"
    ]
    assert heard.steps[0] == "making an empty environment"
    assert heard.steps[-3:] == ["unpacking 3 packages", "removing torchvision", "trying to import smallone, smalltwo"]
    assert look(it).word == READY
    assert {name: v for name, v in kits.versions(it).items() if name.startswith("small")} == {
        "smallone": "1.0",
        "smalltwo": "2.0+cpu",
    }
    assert "torchvision" not in kits.versions(it)
    done = subprocess.run(
        [it.python, "-I", "-c", "import smallone, sys; print(smallone.VALUE, sys.prefix)"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == f"1 {it.folder}\n"
    stock = kits.stock_of(it)
    assert stock is not None and stock.bytes > 1e6 and stock.seconds > 0

    assert make(it, *(again := Heard()).both) is False
    assert (again.said, again.steps) == ([], [])


@pytest.mark.usefixtures("quick")
def test_a_deleted_file_is_made_anew(tmp_path: Path) -> None:
    it = kit(wheel(tmp_path, "smallone"), modules=("smallone",))
    make(it, *Heard().both)
    (it.site_packages / "smallone" / "data.txt").unlink()
    assert "smallone/data.txt" in problems(it)[0]
    assert make(it, *Heard().both) is True
    assert problems(it) == []
    assert (it.site_packages / "smallone" / "data.txt").exists()


@pytest.mark.usefixtures("quick")
def test_repairs_come_before_the_stock_is_taken(tmp_path: Path) -> None:
    def repair(site_packages: Path) -> None:
        (site_packages / "smallone" / "__init__.py").write_text("VALUE = 'repaired'\n")
        (site_packages / "smallone-1.0.dist-info").rename(site_packages / "smaller-1.0+cpu.dist-info")

    it = kit(wheel(tmp_path, "smallone"), modules=("smallone",))
    it = kits.Kit(name=it.name, title=it.title, recipe=it.recipe, complete=repair)
    make(it, *Heard().both)
    assert problems(it) == []
    assert kits.versions(it)["smaller"] == "1.0+cpu"


# ---- what goes wrong


def failure(it: kits.Kit) -> str:
    with pytest.raises(WeighinError) as caught:
        make(it, *Heard().both)
    assert not it.folder.exists()
    assert look(it).word == kits.NOT_INSTALLED
    said = str(caught.value)
    assert said.startswith("small could not be installed: ")
    assert f"All that was said is in {it.log}." in said
    assert "weighin engines install small" in said
    return said


@pytest.mark.usefixtures("quick")
def test_a_package_that_is_not_there(tmp_path: Path) -> None:
    said = failure(kit(wheel(tmp_path, "smallone"), "weighin-nobody-has-this==1.0"))
    assert "the installation ended with exit code 1" in said
    assert "ERROR: No matching distribution found for weighin-nobody-has-this==1.0" in said


@pytest.mark.usefixtures("quick")
def test_a_build_that_fails_shows_what_the_compiler_said(tmp_path: Path) -> None:
    build = f"print({COMPILER_SAYS!r})\nraise SystemExit(1)"
    it = kit(source(tmp_path / "source", "breaks", build))
    said = failure(it)
    assert "one.c:3:10: fatal error: nothing.h: No such file or directory" in said
    assert "ninja: build stopped: subcommand failed." in said
    assert "\n  Building wheel for breaks (pyproject.toml) did not run successfully.\n" in said
    assert "\n  ERROR: Failed building wheel for breaks\n" in said.partition("ninja")[2]
    assert "[1/2] cc -c one.c" in it.log.read_text()


@pytest.mark.usefixtures("quick")
def test_what_does_not_import_is_not_installed(tmp_path: Path) -> None:
    it = kit(wheel(tmp_path, "smallone", code="import weighin_nobody_has_this\n"), modules=("smallone",))
    assert "ModuleNotFoundError: No module named 'weighin_nobody_has_this'" in failure(it)


def test_without_venv_its_words_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ensurepip is not available: apt install python3-venv'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "\n  ensurepip is not available: apt install python3-venv\n" in failure(kit())


def test_a_disk_that_is_too_small_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 0, 10**9))
    it, heard = kit("weighin-nobody-has-this==1", bytes=10**9), Heard()
    with pytest.raises(WeighinError, match=r"small needs about 1\.40 GB .* has 1\.00 GB free\. .*WEIGHIN_CACHE"):
        make(it, *heard.both)
    assert (heard.said, heard.steps) == ([], [])
    assert not it.folder.exists()


# ---- interrupted, and two at once


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("at", ["making", "trying"])
def test_an_interruption_leaves_nothing(tmp_path: Path, mark: str, at: str) -> None:
    def interrupt(words: str) -> None:
        if words.startswith(at):
            raise KeyboardInterrupt

    it = kit(wheel(tmp_path, "smallone"), modules=("smallone",))
    with pytest.raises(KeyboardInterrupt):
        make(it, *Heard(interrupt).both)
    assert not it.folder.exists()
    assert len(alive(mark)) == 0


SCRIPT = """
import pathlib, pytest, sys
sys.path.insert(0, sys.argv[1])
import small_kits
from weighin import installing
small_kits.quick_venv(pytest.MonkeyPatch(), pathlib.Path(sys.argv[3]))
it = small_kits.kit(sys.argv[2])
print("made", installing.make(it, lambda text: print(text, flush=True), lambda step: print(step.words, flush=True)))
"""


def in_a_process(package: str, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), package, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in process.stdout)


def test_ctrl_c_ends_the_compiler_too(tmp_path: Path, shared_folder: Path, mark: str) -> None:
    it = kit(source(tmp_path / "slow", "slow", "import time\ntime.sleep(300)"))
    process = in_a_process(it.recipe.packages[0], shared_folder)
    wait_for(process, "building slow")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not it.folder.exists()
    assert alive(mark) == []


def test_what_a_killed_make_left_is_half_made_and_made_anew(tmp_path: Path, shared_folder: Path, mark: str) -> None:
    waits = tmp_path / "go"
    build = f"import pathlib, time\nwhile not pathlib.Path({str(waits)!r}).exists():\n    time.sleep(0.05)"
    it = kit(source(tmp_path / "slow", "slow", build))
    process = in_a_process(it.recipe.packages[0], shared_folder)
    wait_for(process, "building slow")
    assert look(it).word == kits.BEING_MADE
    process.kill()
    process.communicate(timeout=30)
    assert look(it).word == kits.BEING_MADE  # pip is still at it, and holds the lock
    waits.touch()
    assert alive(mark) == []
    assert look(it).word == kits.BROKEN
    assert problems(it) == ["it was never finished"]
    assert remove(it, Heard().say) is True
    assert look(it).word == kits.NOT_INSTALLED


@pytest.mark.usefixtures("quick")
def test_two_at_once_make_one(tmp_path: Path) -> None:
    inside, results = threading.Event(), []
    second = Heard()

    def wait(words: str) -> None:
        inside.set()
        deadline = time.monotonic() + 10
        while not second.said and time.monotonic() < deadline:
            time.sleep(0.01)

    it = kit(wheel(tmp_path, "smallone"))
    other = threading.Thread(target=lambda: (inside.wait(10), results.append(make(it, *second.both))))
    other.start()
    assert make(it, *Heard(wait).both) is True
    other.join(30)
    assert results == [False]
    assert second.said == ["small: another weighin works on it; waiting until that is done"]
    assert problems(it) == []


# ---- removed


@pytest.mark.usefixtures("quick")
def test_removed_also_if_the_removal_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    it = kit(wheel(tmp_path, "smallone"))
    make(it, *Heard().both)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", interrupt)
        remove(it, Heard().say)
    assert look(it).word == kits.NOT_INSTALLED
    assert it.log.exists()
    assert remove(it, Heard().say) is False
    assert [path.name for path in it.folder.parent.iterdir()] == ["small.lock"]


def test_the_variables_of_pip_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/somewhere")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    found = installing._variables()
    assert found["PIP_FIND_LINKS"] == "/somewhere"
    assert "PYTHONPATH" not in found
