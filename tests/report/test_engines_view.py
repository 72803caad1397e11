"""What `weighin engines` shows."""

import io
import time

import pytest
from rich.console import Console

from weighin.environments import Row
from weighin.pip_lines import Step
from weighin.report.engines_view import Watch, view

READY = Row(
    name="llama.cpp",
    title="llama.cpp",
    state="ready",
    versions={"llama-cpp-python": "0.3.36"},
    where="its own environment",
    devices=("cpu", "cuda"),
    untested=("cuda",),
    precisions=("q4_0", "q4_k_m"),
    log_probabilities="full",
    bytes=312_000_000,
    needs_bytes=300_000_000,
)
HERE = Row(
    name="transformers", title="", state="ready", where="this Python", versions={"torch": "2.13.0"}, devices=("cpu",)
)
ABSENT = Row(
    name="vllm", title="", state="not installed", needs_bytes=5_100_000_000, remedy="weighin engines install vllm"
)
BROKEN = Row(
    name="openvino",
    title="",
    state="broken",
    problems=("files are missing or have another size: lib/\x1b[31mx.py",),
    where="its own environment",
    bytes=2_000_000_000,
    remedy="weighin engines install openvino",
)
OTHER = Row(
    name="onnxruntime",
    title="",
    state="made for other versions",
    problems=("this weighin wants other versions than it was made with",),
    where="its own environment",
    remedy="weighin engines upgrade onnxruntime",
)


def shown(*rows: Row, width: int = 160) -> str:
    console = Console(width=width, no_color=True, file=io.StringIO())
    console.print(view(list(rows)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_an_engine_is_and_can_do_stands_in_its_line() -> None:
    said = shown(READY, HERE)
    for part in ("llama.cpp", "ready", "llama-cpp-python 0.3.36", "its own environment", "q4_0, q4_k_m", "312 MB"):
        assert part in said
    assert "on cpu, cuda (untested)" in said
    assert "log-probabilities: full" in said
    assert "this Python" in said
    assert "no log-probabilities" in said
    assert "install" not in said


def test_what_to_do_about_an_engine_that_is_not_ready() -> None:
    said = shown(ABSENT, BROKEN, OTHER)
    assert "vllm is not installed. To install it: weighin engines install vllm" in said
    assert "would take 5.10 GB" in said
    assert "openvino is broken (files are missing or have another size: lib/␛[31mx.py)" in said
    assert "To install it anew: weighin engines install openvino" in said
    assert "onnxruntime is made for other versions" in said
    assert "weighin engines upgrade onnxruntime" in said


def test_an_own_environment_that_is_not_used_is_mentioned() -> None:
    idle = Row(name="x", title="", state="ready", where="this Python", problems=("its own environment is there too",))
    assert "x: its own environment is there too" in shown(idle)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_names_and_states_are_whole_on_any_terminal(width: int) -> None:
    said = shown(READY, HERE, ABSENT, BROKEN, OTHER, width=width)
    for row in (READY, HERE, ABSENT, BROKEN, OTHER):
        assert row.name in said
    assert max(map(len, said.splitlines())) <= width
    assert said.splitlines()[0].endswith("┓")  # nothing is cut off
    assert "…" not in said


def watch(terminal: bool) -> tuple[Watch, io.StringIO]:
    file = io.StringIO()
    return Watch(Console(file=file, width=100, force_terminal=terminal, no_color=True)), file


def test_without_a_screen_a_line_for_every_kind_of_step() -> None:
    it, file = watch(terminal=False)
    with it:
        it.say("small: making its environment in /somewhere/" + 100 * "x")
        it.tell(Step("collecting torch", time.monotonic() + 480))
        it.tell(Step("collecting numpy", time.monotonic() + 480))
        it.tell(Step("building \x1b[31m", time.monotonic() - 1))
        it.tell(Step("unpacking 3 packages", None))
    assert file.getvalue().splitlines() == [
        "small: making its environment in /somewhere/" + 100 * "x",
        "  collecting torch, about 8 min left",
        "  building ␛[31m, longer than expected",
        "  unpacking 3 packages",
    ]


def test_on_a_screen_the_step_of_now_is_drawn_and_goes_again() -> None:
    it, file = watch(terminal=True)
    with it:
        it.say("a sentence that stays")
        it.tell(Step("collecting torch", time.monotonic() + 480))
        it.live.refresh()
    assert "a sentence that stays\n" in file.getvalue()
    assert "collecting torch, about 8 min left" in file.getvalue()
