"""The terminal: the table that fills, and the one at the end. A model's words never reach it as orders."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import hostile
import msgspec
from conftest import EOS, SMALL, Finished, ids_of
from rich.console import Console
from test_table import with_speeds

from weighin import intake
from weighin.compare import start
from weighin.measurements import Comparison
from weighin.report import terminal
from weighin.report.table import NOTHING


def test_the_finished_table(finished: Finished) -> None:
    shown = terminal.text(finished.comparison)
    line = {
        name: next(row for row in shown.splitlines() if name in row) for name in ("fp32@cpu", "nf4@cpu", "int8@cuda")
    }
    assert "20.0 tokens/s" in line["fp32@cpu"]
    assert "the reference" in line["fp32@cpu"]
    assert "so far 2.00× faster" in " ".join(shown.split())
    assert "so far" in line["nf4@cpu"]
    assert line["int8@cuda"].count(NOTHING) == 5
    assert "cannot_run" in line["int8@cuda"]
    assert "Medians over 2 round" in shown
    assert "range" in shown
    assert "95% intervals" not in shown
    assert "the fastest decoding" not in shown  # two rounds decide nothing
    assert "fake:fp32@cpu: the reference: full precision in 32 bits" in shown
    assert "too_few_rounds" in shown
    assert "no CUDA GPU here" in shown
    assert "out of memory at load" in shown
    assert "peak VRAM" not in shown  # there is no GPU


def test_a_slower_one_is_told_as_slower(finished: Finished) -> None:
    turned = msgspec.structs.replace(finished.comparison, reference="fake:nf4@cpu+says=74.75.1")
    assert "2.00× slower" in terminal.text(turned)


def test_six_rounds_are_told_without_so_far_and_name_the_fastest(fakes: Callable[..., Comparison]) -> None:
    shown = terminal.text(fakes("fp32@cpu", "nf4@cpu", rounds=6))
    assert "2.00× faster" in shown
    assert "so far" not in shown
    assert "95% intervals" in shown
    assert "fake:nf4@cpu: the fastest decoding" in shown
    assert "too_few_rounds" not in shown


def test_a_difference_that_is_not_shown_says_what_it_would_take(finished: Finished) -> None:
    speeds = ((10.0,) * 6, (10.0, 10.2, 10.4, 10.4, 10.6, 9.8))
    near = with_speeds(finished.comparison, *speeds)
    said = terminal._speed_against(near, near.contenders[1])
    assert re.fullmatch(r"no difference shown; about [1-9][0-9]* more rounds would", said)


def test_the_finished_table_of_hostile_words(finished: Finished) -> None:
    shown = terminal.text(hostile.make(finished.comparison))
    assert not hostile.SENT_TO_NOBODY & set(shown)
    assert "␛]0;title" in shown


def test_a_hostile_contender_name(finished: Finished) -> None:
    ok = msgspec.structs.replace(finished.comparison.contenders[0], name="fake:fp32@cpu+says=\x1b[31m")
    evil = msgspec.structs.replace(finished.comparison, contenders=[ok], reference=None)
    assert "\x1b" not in terminal.text(evil)


def live(tiny_model: Path, folder: Path, *contenders: str, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=is_terminal, color_system=None, _environ={})
    request = intake.Request(model=str(tiny_model), contenders=contenders, **{**SMALL, "response_tokens": 60})
    start(intake.make_plan(request, print), folder, terminal.Progress(console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_while_it_runs_the_table_fills(quick_prompts: None, tiny_model: Path, tmp_path: Path) -> None:
    said = ".".join(map(str, [*ids_of("\x1b[31mred\x1b]0;t\x07 \u202eb"), EOS]))
    shown = live(
        tiny_model,
        tmp_path / "out",
        f"fake:fp32@cpu+says={said}",
        "fake:nf4@cpu+missing",
        "fake:bf16@cpu",
        is_terminal=True,
    )
    assert "2 of 3 contenders can run here" in shown
    assert "waiting" in shown
    assert "not_installed" in shown
    for phase in ("importing", "loading", "first answer", "steady answers", "first token, cold", "1 round"):
        assert phase in shown
    assert "provisional" in shown
    assert "20.0 tokens/s" in shown
    # what the model said is there, and is harmless; what remains are the moves of the live table itself
    assert "␛[31mred␛]0;t␇" in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown
    assert set(re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", shown)) <= {"A", "K", "h", "l", "m"}
    assert "\x1b[31m" not in shown
    assert "\x1b]" not in shown


def test_what_is_no_terminal_gets_a_line_a_job(quick_prompts: None, tiny_model: Path, tmp_path: Path) -> None:
    shown = live(tiny_model, tmp_path / "out", "fake:fp32@cpu", "fake:nf4@cpu+fail=load.oom", is_terminal=False)
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert any(line.startswith("fake:fp32@cpu speed round 1: ok, 2.1") for line in lines)
    assert any(line.startswith("fake:nf4@cpu+fail=load.oom speed round 1: out_of_memory") for line in lines)
    assert any(line.startswith("fake:fp32@cpu responses round 1: ok") for line in lines)
