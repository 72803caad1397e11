"""The command line: what is printed, the exit codes, and that bad input writes nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from click.testing import CliRunner, Result
from conftest import SMALL_CLI, Finished, cli, ids_of, make_model
from small_kits import engine, offer, quick_venv, wheel

from weighin import __version__
from weighin.cli import main
from weighin.measurements import Comparison


def quick(*arguments: Any) -> Result:
    """The command in this process: the same, and the start of Python is saved."""
    return CliRunner().invoke(main, [str(a) for a in arguments])


class Run(NamedTuple):
    done: subprocess.CompletedProcess[str]
    folder: Path


@pytest.fixture(scope="module")
def real_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One whole comparison by the command line, nothing of it replaced."""
    folder = tmp_path_factory.mktemp("cli") / "out"
    arguments = ["compare", tiny_model, "-c", "fake:fp32@cpu", "-c", "fake:nf4@cuda", *SMALL_CLI, "--out", folder]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-X", "importtime", "-m", "weighin", *map(str, arguments)]
    return Run(subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env), folder)


def test_a_comparison_by_the_command_line(real_run: Run) -> None:
    assert real_run.done.returncode == 4  # one of two ran
    said = real_run.done.stdout
    assert "1 of 2 contenders can run here" in said
    assert "fake:fp32@cpu speed round 1: ok" in said
    assert "20.0 tokens/s" in said
    assert "cannot_run: no CUDA GPU here" in said
    assert f"The report: {real_run.folder / 'report.md'}" in said
    assert (real_run.folder / "comparison.json").exists()


def test_no_escape_sequence_goes_to_what_is_no_terminal(real_run: Run) -> None:
    assert "\x1b" not in real_run.done.stdout


def test_the_parent_never_imports_torch_or_transformers(real_run: Run) -> None:
    lines = [line for line in real_run.done.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "weighin" in imported
    assert not {"torch", "transformers", "bitsandbytes", "accelerate"} & imported


# ---- bad input


@pytest.fixture
def bad(tmp_path: Path, tiny_model: Path, finished: Finished) -> dict[str, Path]:
    """Things that cannot be used."""
    made = tmp_path / "input"
    made.mkdir()
    files = {
        "empty.txt": b"\n\n",
        "latin1.txt": b"caf\xe9\n",
        "broken.jsonl": b'{"prompt": "ok"}\n{"prompt": \n',
    }
    for name, content in files.items():
        (made / name).write_bytes(content)
    (made / "nothing").mkdir()
    make_model(made / "noconfig")
    (made / "noconfig" / "config.json").unlink()
    return {p.name: p for p in made.iterdir()} | {"tiny": tiny_model, "finished": finished.folder}


FAKE = ("-c", "fake:fp32@cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Which model?"),
        (("{tmp}/nope",), "does not exist"),
        (("./nope",), "does not exist"),
        (("{nothing}", *FAKE), "config.json"),
        (("{noconfig}", *FAKE), "config.json"),
        (("{tiny}", "-c", "transfomers:fp32@cpu"), "Nearest: transformers:fp32@cpu"),
        (("{tiny}", "-c", "fake"), "is not a contender"),
        (("{tiny}", "-c", "transformers:int3@cpu"), "no precision 'int3'"),
        (("{tiny}", *FAKE, "--reference", "nonsense"), "'nonsense' is not a contender"),
        (("{tiny}", *FAKE, "--prompts", "{empty.txt}"), "holds no prompt"),
        (("{tiny}", *FAKE, "--prompts", "{latin1.txt}"), "not UTF-8"),
        (("{tiny}", *FAKE, "--prompts", "{broken.jsonl}"), "broken.jsonl, line 2"),
        (("{tiny}", *FAKE, "--prompts", "{tmp}/none.txt"), "There is no prompt file"),
        (("{tiny}", *FAKE, "--max-new-tokens", "0"), "--max-new-tokens 0"),
        (("{tiny}", *FAKE, "--max-new-tokens", "-5"), "--max-new-tokens -5"),
        (("{tiny}", *FAKE, "--max-new-tokens", "1"), "at least 2"),
        (("{tiny}", *FAKE, "--max-new-tokens", "ten"), "is not a valid integer"),
        (("{tiny}", *FAKE, "--response-tokens", "0"), "--response-tokens 0"),
        (("{tiny}", *FAKE, "--rounds", "0"), "--rounds 0"),
        (("{tiny}", *FAKE, "--threads", "-1"), "--threads -1"),
        (("{tiny}", *FAKE, "--prompt-tokens", "0"), "--prompt-tokens 0"),
        (("{tiny}", *FAKE, "--prompt-tokens", "12,x"), "--prompt-tokens 12,x"),
        (("{tiny}", *FAKE, "--prompt-tokens", "512,4096"), "--prompt-tokens 4096: the model reads at most 2048"),
        (("{tiny}", *FAKE, "--budget", "soon"), "'soon' is not a duration"),
        (("{tiny}", *FAKE, "--budget", "0s"), "not between nothing and a year"),
        (("{tiny}", *FAKE, "--budget", "-5m"), "'-5m' is not a duration"),
        (("{tiny}", *FAKE, "--limit", "load"), "PHASE=TIME"),
        (("{tiny}", *FAKE, "--limit", "load=never"), "'never' is not a duration"),
        (("{tiny}", *FAKE, "--template", "{tmp}/none.jinja"), "there is no file"),
        (("{tiny}", *FAKE, "--out", "{finished}"), "already holds a comparison"),
        (("{tiny}", "--resume", "{finished}"), "leave out: model"),
        (("--resume", "{nothing}"), "holds no comparison"),
        (("{tiny}", "--wat"), "No such option"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    bad: dict[str, Path], tmp_path: Path, arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch,
    quick_prompts: None,
) -> None:  # fmt: skip
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    before = {p: p.stat().st_mtime_ns for p in bad["finished"].rglob("*")}
    places = {f"{{{name}}}": str(path) for name, path in bad.items()} | {"{tmp}": str(tmp_path)}
    filled = []
    for argument in arguments:
        for place, path in places.items():
            argument = argument.replace(place, path)  # noqa: PLW2901
        filled.append(argument)
    if "--out" not in filled and "--resume" not in filled:
        filled += ["--out", "out"]
    result = quick("compare", *filled)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert list(here.iterdir()) == []
    assert {p: p.stat().st_mtime_ns for p in bad["finished"].rglob("*")} == before


def test_an_unknown_architecture_by_the_command_line(tmp_path: Path) -> None:
    model = make_model(tmp_path / "new", model_type="brandnew", architectures=["BrandNewForCausalLM"])
    done = cli("compare", model, *FAKE, "-c", "transformers:fp32@cpu", "--out", tmp_path / "out")
    assert done.returncode == 4  # another engine may know it
    assert "BrandNewForCausalLM" in done.stdout
    assert "transformers:fp32@cpu: cannot_run" in done.stdout


def test_a_prompt_that_is_too_long_for_the_model(quick_prompts: None, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("x" * 2020)
    result = quick("compare", tiny_model, *FAKE, "--prompts", tmp_path / "p.txt", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "more than the 2048 the model reads" in result.output
    assert not (tmp_path / "out").exists()


def test_bad_input_leaves_no_folder_above_out(tmp_path: Path) -> None:
    assert quick("compare", "./nope", "--out", tmp_path / "a" / "b").exit_code == 2
    assert not (tmp_path / "a").exists()


def test_a_limit_of_no_phase_is_bad_input(quick_prompts: None, tiny_model: Path, tmp_path: Path) -> None:
    result = quick("compare", tiny_model, *FAKE, "--limit", "laod=5s", *SMALL_CLI, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "laod" in result.output


@pytest.mark.parametrize("option", [("--budget", "1h"), ("--rounds", "9"), ("-c", "fake:nf4@cpu"), ("--out", "x")])
def test_options_that_resume_does_not_use_are_refused(
    quick_prompts: None, finished: Finished, tmp_path: Path, option: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(finished.folder, tmp_path / "copy")
    assert quick("compare", "--resume", tmp_path / "copy", *option).exit_code == 2


def test_an_error_sends_no_escape_sequence_to_the_terminal(quick_prompts: None, tmp_path: Path) -> None:
    model = make_model(tmp_path / "evil", template="{{ raise_exception('\x1b]0;title\x07\u202e') }}")
    result = quick("compare", model, *FAKE, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "title" in result.output
    assert not {"\x1b", "\x07", "\u202e"} & set(result.output)


def test_an_interrupt_while_it_plans_is_130_too(tmp_path: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    model = make_model(tmp_path / "loop", template=loop)
    command = [sys.executable, "-m", "weighin", "compare", str(model), *FAKE, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(600):  # until its child is at the template
        if any("prompts" in " ".join(c.cmdline()) for c in psutil.Process(process.pid).children()):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert not (tmp_path / "out").exists()
    assert process.returncode == 130


# ---- exit codes and the other commands


@pytest.mark.parametrize(
    ("contenders", "code"),
    [(("fp32@cpu",), 0), (("fp32@cuda",), 1), (("fp32@cpu", "nf4@cpu+fail=load.error"), 4)],
)
def test_the_exit_code_of_a_comparison(
    fakes: Callable[..., Comparison], tmp_path: Path, contenders: tuple[str, ...], code: int
) -> None:
    fakes(*contenders)
    done = cli("compare", "--resume", tmp_path / "out")  # nothing is left to do
    assert done.returncode == code, done.stderr
    assert "contender" in done.stdout


def test_help_names_every_command_and_the_words_of_a_contender() -> None:
    done = cli("--help")
    assert done.returncode == 0
    for command in ("compare", "run", "machine", "report"):
        assert f"\n  {command} " in done.stdout
    for command in main.commands:
        result = quick(command, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.output
    assert "engine:precision@device" in quick("compare", "--help").output
    assert __version__ in quick("--version").output


def test_every_option_of_compare_says_what_it_does() -> None:
    import click

    for option in main.commands["compare"].params:
        if isinstance(option, click.Option):
            assert option.help, option.name


def test_machine_says_what_it_is_and_which_engines_are_ready() -> None:
    result = quick("machine")
    assert result.exit_code == 0
    for title in ("system", "processor", "cores", "memory", "bandwidth", "GPU", "engine transformers"):
        assert title in result.output
    assert "ready" in result.output
    assert "fake" not in result.output


def test_engines_are_shown_installed_broken_repaired_and_removed(
    tmp_path: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    quick_venv(monkeypatch, shared_folder)
    offer(monkeypatch, engine(wheel(tmp_path, "smallone"), needs=("smallone>=1",)))
    assert "small is not installed. To install it: weighin engines install small" in quick("engines").output
    assert "small is ready: smallone 1.0, " in quick("engines", "install", "small").output
    result = quick("engines")
    assert result.exit_code == 0
    for words in ("ready", "smallone 1.0", "its own environment", "cuda (untested)", "fp32, q4"):
        assert words in result.output
    assert "ready, in its own environment: smallone 1.0" in quick("machine").output
    next((tmp_path / "cache").rglob("data.txt")).unlink()
    assert "small is broken (files are missing" in quick("engines").output
    assert "small is ready" in quick("engines", "install", "small").output
    assert "small is ready: smallone 1.0; nothing to do" in quick("engines", "upgrade").output
    assert "small: removed" in quick("engines", "remove", "small").output


def test_an_engine_that_cannot_be_installed(tmp_path: Path, shared_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    quick_venv(monkeypatch, shared_folder)
    offer(monkeypatch, engine(str(tmp_path / "gone-1.0-py3-none-any.whl")))
    result = quick("engines", "install", "small")
    assert result.exit_code == 1
    assert "small could not be installed" in result.output
    assert quick("engines", "install", "smell").exit_code == 2
    assert quick("engines", "install").exit_code == 2


def test_engines_answers_without_torch() -> None:
    code = "import sys; from weighin.cli import main\ntry: main(['engines'])\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "transformers" in done.stdout.partition("weighin.cli")[0]
    assert not {"torch", "transformers", "bitsandbytes"} & set(done.stdout.splitlines()[-1].split())


def test_run_streams_one_answer(tiny_model: Path) -> None:
    said = ".".join(map(str, [*ids_of("hé 💥 \x1b[31m!"), 1, *ids_of("never")]))
    done = cli("run", tiny_model, "-c", f"fake:fp32@cpu+says={said}", "hello")
    assert (done.returncode, done.stderr) == (0, "looking at the machine and the model\nmaking the tokens\n")
    assert done.stdout == "hé 💥 ␛[31m!\n"


def test_run_says_why_a_contender_cannot_run(quick_prompts: None, tiny_model: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = quick("run", tiny_model, "-c", "fake:fp32@cuda", "hello")
    assert result.exit_code == 2
    assert "fake:fp32@cuda cannot run here: no CUDA GPU here" in result.output
    result = quick("run", tiny_model, "-c", "fake:fp32@cpu", " ")
    assert result.exit_code == 2


def test_run_that_fails_says_where(quick_prompts: None, tiny_model: Path) -> None:
    result = quick("run", tiny_model, "-c", "fake:fp32@cpu+fail=load.oom", "hello")
    assert result.exit_code == 1
    assert "out_of_memory in load: MemoryError: scripted" in result.output


def test_report_writes_the_files_anew_from_the_journal(finished: Finished, tmp_path: Path) -> None:
    names = ("comparison.json", "report.md", "report.csv")
    for name in ("plan.json", "journal.jsonl"):
        shutil.copy(finished.folder / name, tmp_path / name)
    result = quick("report", tmp_path)
    assert result.exit_code == 0
    for name in names:
        assert (tmp_path / name).read_bytes() == (finished.folder / name).read_bytes()
        assert name in result.output


@pytest.mark.parametrize(("format_", "name"), [("md", "report.md"), ("csv", "report.csv"), ("json", "comparison.json")])
def test_report_prints_one_format(finished: Finished, format_: str, name: str) -> None:
    result = quick("report", finished.folder, "--format", format_)
    assert result.exit_code == 0
    assert result.output == (finished.folder / name).read_text()


def test_report_of_no_comparison(tmp_path: Path) -> None:
    result = quick("report", tmp_path / "none")
    assert result.exit_code == 2
    assert "holds no comparison" in result.output


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    assert "Traceback" not in cli("report", tmp_path).stderr
    assert "Traceback" in cli("--debug", "report", tmp_path).stderr
