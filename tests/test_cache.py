"""What is kept is whole or not there, also with two runs at once."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from weighin import cache


def test_the_cache_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "a" / "b"))
    assert cache.root() == tmp_path / "a" / "b"
    assert cache.root().is_dir()
    assert cache.prepared("f" * 64, "nf4").is_relative_to(tmp_path)
    assert cache.prepared("f" * 64, "nf4") != cache.prepared("f" * 64, "int8") != cache.prepared("e" * 64, "int8")


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "weights").write_text("w")

    target = tmp_path / "made" / "it"
    assert cache.make(target, build) is True
    assert cache.make(target, build) is False
    assert len(built) == 1
    assert (target / "weights").read_text() == "w"
    assert cache.is_complete(target)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise error

    target = tmp_path / "it"
    with pytest.raises(error):
        cache.make(target, fail)
    assert not target.exists()
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    assert cache.make(target, lambda folder: None) is True


def test_what_a_killed_build_left_is_made_anew(tmp_path: Path) -> None:
    target = tmp_path / "it"
    target.mkdir()
    (target / "half").touch()
    assert not cache.is_complete(target)
    assert cache.make(target, lambda folder: (folder / "whole").touch()) is True
    assert sorted(p.name for p in target.iterdir()) == [cache.DONE, "whole"]


def test_two_at_the_same_time_build_once(tmp_path: Path) -> None:
    inside, built = threading.Event(), []

    def build(folder: Path) -> None:
        built.append(folder)
        inside.set()
        threading.Event().wait(0.1)
        (folder / "whole").touch()

    def second() -> None:
        inside.wait(10)
        assert cache.make(tmp_path / "it", build) is False
        assert (tmp_path / "it" / "whole").exists()
        seen.append(True)

    seen: list[bool] = []
    other = threading.Thread(target=second)
    other.start()
    cache.make(tmp_path / "it", build)
    other.join(10)
    assert len(built) == 1
    assert seen == [True]


def test_a_worker_needs_nothing_but_its_copy_and_the_standard_library() -> None:
    copy = cache.worker_copy()
    assert copy == cache.worker_copy()  # named by its content
    code = (
        "import sys; sys.path[:] = [sys.argv[1], *[p for p in sys.path if 'site-packages' not in p]]\n"
        "import weighin.worker, weighin.probes, weighin.engines\n"
        "print(weighin.worker.__file__, sorted(weighin.engines.everything()), len(weighin.probes.measures()))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(copy)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert str(copy) in done.stdout
    assert "fake" in done.stdout
    assert not (copy / "weighin" / "cli.py").exists()


def test_another_source_is_another_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    before = cache.worker_copy()
    package = tmp_path / "weighin"
    shutil.copytree(cache.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "PACKAGE", package)
    assert cache.worker_copy() == before
    (package / "probes" / "speed.py").write_text("changed = True\n")
    assert cache.worker_copy() != before
