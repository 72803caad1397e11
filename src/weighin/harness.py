"""The standard harness: lm-evaluation-harness, in an environment of its own, asks any of our engines.

Three processes: weighin, the engine's worker and the harness. Weighin makes the channel between the other two and
sleeps; `lm_eval_adapter.py` is the harness's end of it, `probes/tasks.py` the worker's:

    with harness.start(python, tokenizer_path, harness.parse(["wikitext", "./my-tasks"]), log) as asked:
        outcome = runner.run(job, ..., channel=asked.worker_fd)
        found = asked.results()
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from weighin.engines import Recipe
from weighin.errors import BadInput, WeighinError
from weighin.runner import worker_environment

NAME = "lm-eval"
INSTALL = f"weighin engines install {NAME}"
# It needs no torch: the engines have that. The tokenizers are those that weighin itself is tested with.
RECIPE = Recipe(
    packages=(
        "lm_eval==0.4.13",
        "datasets==5.2.0",
        "evaluate==0.4.6",
        "pyarrow==26.0.1",
        "transformers==5.22.2",
        "tokenizers==0.23.3",
        "sentencepiece==0.2.2",
        "protobuf==7.36.2",
        "numpy==2.4.6",
        "scikit-learn==1.9.1",
    ),
    bytes=860_000_000,
    seconds=85.0,
    modules=("lm_eval", "datasets", "transformers"),
)
ADAPTER = Path(__file__).with_name("lm_eval_adapter.py")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
SECONDS = 24 * 3600
CHECK_SECONDS = 600
LAST_SECONDS = 60  # once nobody answers any more, it has this long to say what it found
LOG_TAIL = 4000
Z = 1.96


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one task, or of a group of them."""

    task: str
    metric: str
    filter: str = ""  # how the answer was found in the text, where a task does that in several ways
    value: float
    stderr: float | None  # the harness's own; some metrics have none
    low: float | None  # of the 95% interval
    high: float | None
    higher_is_better: bool | None
    samples: int | None
    version: str | None


class TaskFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a task has no figures; where no task is named, why there are no more of them."""

    task: str | None
    kind: str  # "missing", "unknown_task", "no_data", "task", "tokenizer", "engine", "timeout" or "crash"
    reason: str
    remedy: str


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """What the harness found, and what it did not."""

    results: list[TaskResult]
    failures: list[TaskFailure]
    version: str | None  # of the harness


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A task, or group of them, whose data is here."""

    name: str
    tasks: list[str]
    documents: int
    asks: list[str]  # "loglikelihood", "loglikelihood_rolling", "multiple_choice" or "generate_until"


def parse(words: Sequence[str]) -> list[str]:
    """What `--tasks` was given, each comma-separated: names stay names, folders and YAML files become full paths."""
    tasks = [_task(word.strip()) for text in words for word in text.split(",") if word.strip()]
    if not tasks:
        raise BadInput("--tasks names no task. Give names or folders, such as --tasks arc_easy,./my-tasks.")
    return list(dict.fromkeys(tasks))


def _task(word: str) -> str:
    as_path = "/" in word or word.startswith((".", "~")) or word.endswith(".yaml")
    try:
        path = Path(word).expanduser()
        described = any(path.rglob("*.yaml")) if path.is_dir() else path.is_file() and path.suffix == ".yaml"
    except (OSError, RuntimeError):  # too long for a path, or the home of nobody
        path, described = Path(os.devnull), False
    if described:
        return str(path.resolve())
    if as_path and path.is_dir():
        raise BadInput(f"The task folder {word} holds no .yaml file; a task is described by one.")
    if as_path:
        raise BadInput(f"There is no task folder or .yaml file {word}.")
    return word


class Harness:
    """A harness that runs; `start` makes it."""

    def __init__(self, child: _Child, worker: socket.socket) -> None:
        self._child = child
        self._worker = worker

    @property
    def worker_fd(self) -> int:
        """The worker's end of the channel, for `runner.run`."""
        return self._worker.fileno()

    def results(self) -> Results:
        """What was found. To be asked when the worker has ended: then the harness has no more answers and ends too."""
        self._worker.close()
        return fold(*self._child.end(LAST_SECONDS))


@contextlib.contextmanager
def start(
    python: str,
    tokenizer_path: str,
    tasks: Sequence[str],
    log: Path,
    *,
    limit: int | None = None,
    max_length: int | None = None,
    stop_ids: Sequence[int] = (),
    remote_code: bool = False,
    seconds: float = SECONDS,
) -> Iterator[Harness]:
    """Start the harness on tasks as `parse` gives them. Nothing of it is left when the block ends.

    `limit`: the most documents of a task. `max_length`: the most tokens that the model takes; None: what the tokenizer
    says, else 2048. `seconds`: how long all of it may take.
    """
    question = {
        "action": "evaluate",
        "tasks": list(tasks),
        "tokenizer": tokenizer_path,
        "limit": limit,
        "max_length": max_length,
        "stop_ids": list(stop_ids),
        "remote_code": remote_code,
    }
    worker, other = socket.socketpair()
    with worker, contextlib.ExitStack() as stack:
        with other:  # the harness has its own copy; ours would keep the channel open when it is gone
            child = stack.enter_context(_child(python, {**question, "channel": other.fileno()}, log, seconds))
        yield Harness(child, worker)


def check(python: str, tasks: Sequence[str], log: Path, *, seconds: float = CHECK_SECONDS) -> list[Known]:
    """Look for tasks and their data before anything costly is done; what cannot be had is an error."""
    with _child(python, {"action": "check", "tasks": list(tasks)}, log, seconds) as child:
        said, ended = child.end(seconds + LAST_SECONDS)
    failures = fold(said, ended).failures
    if failures:
        error = BadInput if all(f.kind in ("unknown_task", "no_data", "task") for f in failures) else WeighinError
        raise error("\n".join(f"{f.reason} {f.remedy}" for f in failures))
    return [msgspec.convert(line["known"], Known) for line in said if line["event"] == "known"]


class _Child:
    """The harness's process, the file it writes what it found to, and its log."""

    def __init__(self, process: subprocess.Popen[bytes], said: IO[bytes], log: Path, log_begins: int) -> None:
        self.process = process
        self.said = said
        self.log = log
        self.log_begins = log_begins

    def end(self, seconds: float) -> tuple[list[dict[str, Any]], TaskFailure | None]:
        """Wait for it; all that it said, and what went wrong if it did not come to its end."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=seconds)
        self.said.seek(0)
        lines = [json.loads(line) for line in self.said.read().splitlines(keepends=True) if line.endswith(b"\n")]
        if any(line["event"] == "done" for line in lines):
            return lines, None
        return lines, explain(code, self._tail(), self.log)

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self.log_begins, self.log.stat().st_size - LOG_TAIL))
            return file.read().decode(errors="replace")

    def kill(self) -> None:
        """End it with all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def _child(python: str, question: dict[str, Any], log: Path, seconds: float) -> Iterator[_Child]:
    log.parent.mkdir(parents=True, exist_ok=True)
    channel = [question["channel"]] if "channel" in question else []
    with tempfile.TemporaryFile() as said, log.open("ab") as output:
        output.write(f"--- {NAME}, {question['action']}: {', '.join(question['tasks'])}\n".encode())
        output.flush()
        begins = output.tell()
        try:
            process = subprocess.Popen(
                [python, "-I", str(ADAPTER)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(said.fileno(), *channel),
                env={**worker_environment(1), **OFFLINE},
                start_new_session=True,
            )
        except OSError as error:
            raise WeighinError(f"{python} cannot be started ({error.strerror}). Make it anew: {INSTALL}") from error
        child = _Child(process, said, log, begins)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # one that is gone is told by its exit
                process.stdin.write(json.dumps({**question, "said": said.fileno(), "seconds": seconds}).encode())
            yield child
        finally:
            child.kill()


def explain(code: int | None, tail: str, log: Path) -> TaskFailure:
    """Why a harness ended before its end, from its exit code (None: it had to be ended) and its last words."""
    if code in (None, -signal.SIGALRM):
        reason = "The harness took longer than its limit."
        return TaskFailure(task=None, kind="timeout", reason=reason, remedy="Ask for fewer documents, or fewer tasks.")
    if _last_line(tail).startswith("ModuleNotFoundError"):
        return TaskFailure(
            task=None,
            kind="missing",
            reason=f"lm-evaluation-harness is not there, or not whole ({_last_line(tail)}).",
            remedy=f"Install it: {INSTALL}",
        )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    reason = f"The harness {how}; its last line was: {_last_line(tail)}"
    return TaskFailure(task=None, kind="crash", reason=reason, remedy=f"See {log}")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing")[:500]


def fold(said: list[dict[str, Any]], ended: TaskFailure | None) -> Results:
    """What the harness said, in our words."""
    failures = [msgspec.convert(line["failure"], TaskFailure) for line in said if line["event"] == "failed"]
    return Results(
        results=[result for line in said if line["event"] == "task" for result in _results(line)],
        failures=failures + ([ended] if ended else []),
        version=next((line["version"] for line in said if line["event"] == "harness"), None),
    )


def _results(line: dict[str, Any]) -> Iterator[TaskResult]:
    """The metrics of a task and of its parts: `acc,none` with `acc_stderr,none` beside it."""
    for task, figures in line["results"].items():
        for key, value in figures.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or _number(value) is None:
                continue
            stderr = _number(figures.get(f"{metric}_stderr,{filtered}"))
            samples = figures.get("sample_len")
            low, high = interval(value, stderr, samples, share=key in line["shares"])
            version = line["versions"].get(task)
            yield TaskResult(
                task=task,
                metric=metric,
                filter="" if filtered == "none" else filtered,
                value=value,
                stderr=stderr,
                low=low,
                high=high,
                higher_is_better=line["higher_is_better"].get(task, {}).get(metric),
                samples=samples,
                version=None if version is None else str(version),
            )


def _number(value: Any) -> float | None:
    """Some metrics have no standard error and say "N/A"."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def interval(
    value: float, stderr: float | None, samples: int | None, *, share: bool
) -> tuple[float | None, float | None]:
    """95%: 1.96 standard errors to each side; a share stays within 0 and 1."""
    if stderr is None:
        return None, None
    low, high = value - Z * stderr, value + Z * stderr
    if not share:
        return low, high
    if stderr == 0 and samples and value in (0.0, 1.0):
        # All alike have no spread, which does not make them sure: Wilson's interval of none or all.
        edge = Z * Z / (samples + Z * Z)
        low, high = (0.0, edge) if value == 0.0 else (1.0 - edge, 1.0)
    return max(low, 0.0), min(high, 1.0)
