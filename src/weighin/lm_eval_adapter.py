"""The harness's end of the channel: lm-evaluation-harness with one of our engines as its model.

A script for an environment that has lm_eval and transformers; `harness.py` starts it, and nothing of weighin is on its
path. It tokenizes as lm_eval's own Hugging Face model does, sends ids, and leaves the rest to lm_eval.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import itertools
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

NEW_TOKENS = 256  # where a task does not say; lm_eval's own default
NEAREST = 3
REASON_LENGTH = 1000

Say = Callable[[dict[str, Any]], None]


class Problem(Exception):
    """A task that cannot be run, for a reason that a person can do something about."""

    def __init__(self, kind: str, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.remedy = remedy


class EngineGone(Exception):
    """Nobody answers any more; why is the worker's to say."""


class Channel:
    """Questions to the worker, one JSON object a line, each with its answer."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._answers = self._socket.makefile("rb")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self._socket.sendall(json.dumps(question).encode() + b"\n")
            line = self._answers.readline()
        except ConnectionError as error:
            raise EngineGone from error
        if not line.endswith(b"\n"):
            raise EngineGone
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Problem("engine", f"The engine cannot answer: {answer['error']}.", "Choose another task.")
        return answer


class EngineLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """An engine as a model of the harness. What is encoded how is as in `lm_eval.models.huggingface`."""

    def __init__(self, channel: Channel, tokenizer: Any, max_length: int, stop_ids: list[int]) -> None:
        super().__init__()
        self.channel = channel
        self.tokenizer = tokenizer
        self.max_length = max_length
        end = tokenizer.eos_token_id
        self.stop_ids = sorted({*stop_ids, *([end] if end is not None else [])})

    @property
    def eot_token_id(self) -> int | None:
        """The end of a text."""
        end: int | None = self.tokenizer.eos_token_id
        return end

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        reason = "The tokenizer has neither a begin nor an end token, so that nothing can stand before a text's first."
        raise Problem("task", reason, "Choose another task.")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text; the begin token is not added twice."""
        if add_special_tokens is None and self._begins(string):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **special)
        return ids

    def _begins(self, string: str) -> bool:
        return bool(has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Requests that differ in their last id alone go together: the engine then reads them once."""
        alike: dict[tuple[int, ...], list[int]] = {}
        pairs = [self._fitted(context, continuation) for _, context, continuation in requests]
        for which, (context, continuation) in enumerate(pairs):
            alike.setdefault((*context, *continuation[:-1]), []).append(which)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for members in alike.values():
            asked = [{"context": pairs[which][0], "continuation": pairs[which][1]} for which in members]
            answers = self.channel.ask({"ask": "score", "requests": asked})["answers"]
            for which, answer in zip(members, answers, strict=True):
                found[which] = (answer["logprob"], answer["greedy"])
        return found

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """What is too long loses its beginning; the last id is predicted, not read."""
        if not continuation or len(continuation) > self.max_length:
            reason = f"A continuation of {len(continuation)} tokens: the model takes 1 to {self.max_length}."
            raise Problem("task", reason, "Choose another task, or a model with a longer context.")
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows as long as the model takes, each token predicted once."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, cut at the first of the task's stop strings."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, asked: dict[str, Any]) -> str:
        wanted = normalize_gen_kwargs(asked, NEW_TOKENS)
        if wanted["do_sample"]:
            reason = "The task wants its answers drawn at random; the harness gets greedy answers alone."
            raise Problem("task", reason, "Choose a task that does not sample.")
        n = wanted["max_gen_toks"]
        if n >= self.max_length:
            reason = f"The task asks for {n} new tokens; the model takes {self.max_length} in all."
            raise Problem("task", reason, "Choose another task, or a model with a longer context.")
        special = {"add_special_tokens": False} if has_bos_prefix(context, self.tokenizer.bos_token) else {}
        ids = self.tokenizer.encode(context, **special)[-(self.max_length - n) :] or [self.prefix_token_id]
        question = {"ask": "generate", "ids": ids, "n": n, "stop_ids": self.stop_ids}
        new = self.channel.ask(question)["ids"]
        if new and new[-1] in self.stop_ids:
            new = new[:-1]
        end = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        stop = handle_stop_sequences(wanted["until"], eos=end)
        return str(postprocess_generated_text(generation=text, stop=stop, think_end_token=None))


def main() -> None:
    """Read the question from standard input; write what is found to the descriptor that it names, a line each."""
    question: dict[str, Any] = json.load(sys.stdin)
    signal.alarm(max(1, int(question["seconds"])))  # no handler: the kernel ends it, whatever it hangs in
    with os.fdopen(question["said"], "w", encoding="utf-8") as said:

        def say(event: dict[str, Any]) -> None:
            said.write(json.dumps(event, default=_plain) + "\n")
            said.flush()

        say({"event": "harness", "version": importlib.metadata.version("lm_eval")})
        try:
            manager, names = find(question["tasks"])
        except Problem as problem:
            say(_failed(None, problem))
        else:
            (check if question["action"] == "check" else evaluate)(question, manager, names, say)
        say({"event": "done"})


def find(tasks: list[str]) -> tuple[TaskManager, list[str]]:
    """A manager that knows the tasks asked for, and their names: those given, and those of the folders given."""
    places = [Path(task) for task in tasks if Path(task).is_absolute()]
    folders = [place if place.is_dir() else place.parent for place in places]
    manager = TaskManager(include_path=folders, include_defaults=False)
    inside = {place: _names_in(place, manager.task_index) for place in places}
    # The index of lm_eval's own tasks takes seconds; it is read where one of them is named, here or by a group.
    if len(places) < len(tasks) or not _grouped(manager.task_index) <= manager.task_index.keys():
        manager = TaskManager(include_path=folders)
    names = []
    for task in tasks:
        if Path(task) in inside:
            names += inside[Path(task)]
        elif task in manager.task_index:
            names.append(task)
        else:
            near = difflib.get_close_matches(task, manager.all_tasks, n=NEAREST, cutoff=0.5)
            hint = f"Nearest: {', '.join(near)}." if near else "Give a name that lm_eval knows, or a folder."
            raise Problem("unknown_task", f"There is no task '{task}'.", hint)
    return manager, list(dict.fromkeys(names))


def _names_in(place: Path, index: dict[str, Any]) -> list[str]:
    """The tasks of a folder or a file; those that belong to a group of the folder run as part of it."""
    files = set(place.rglob("*.yaml")) if place.is_dir() else {place}
    for file in sorted(files):
        try:
            load_yaml(file, resolve_func=False)
        except Exception as error:  # lm_eval would leave it out without a word
            raise Problem("task", f"{file} cannot be read ({_first_line(error)}).", "Mend the file.") from error
    here = {name: entry for name, entry in index.items() if entry.yaml_path in files}
    grouped = _grouped(here)
    grouped |= {task for name in grouped if name in index and index[name].kind == Kind.TAG for task in index[name].tags}
    names = [name for name in here if name not in grouped]
    if not names:
        raise Problem("unknown_task", f"{place} describes no task.", "A task's .yaml file has a line 'task: NAME'.")
    return names


def _grouped(index: dict[str, Any]) -> set[str]:
    """What the groups of an index are made of."""
    groups = [entry for entry in index.values() if entry.kind == Kind.GROUP]
    return {name for group in groups for name in _members(group.cfg.get("task"))}


def _members(task: Any) -> Iterator[str]:
    """The names in a group's list; its entries may be lists and objects in turn."""
    if isinstance(task, str):
        yield task
    elif isinstance(task, list):
        for one in task:
            yield from _members(one)
    elif isinstance(task, dict):
        yield from _members(task.get("group"))
        yield from _members(task.get("task"))


def load(manager: TaskManager, name: str) -> dict[str, Any]:
    """A task with its data, or why it cannot be had."""
    try:
        loaded: dict[str, Any] = manager.load([name])
    except ImportError as error:
        reason = f"The task {name} needs a package that is not in the harness's environment ({_first_line(error)})."
        raise Problem(
            "task", reason, f"Add it with {sys.executable} -m pip install, or choose another task."
        ) from error
    except (ConnectionError, FileNotFoundError) as error:
        reason = f"The data of the task {name} is not on this machine ({_first_line(error)})."
        remedy = "Tasks run offline: fetch it once with the datasets package, or name local files in a task folder."
        raise Problem("no_data", reason, remedy) from error
    except Exception as error:
        traceback.print_exc()
        reason = f"The task {name} cannot be loaded ({_first_line(error)})."
        raise Problem("task", reason, "Mend it, or choose another task.") from error
    return loaded


def check(question: dict[str, Any], manager: TaskManager, names: list[str], say: Say) -> None:
    """Say of each task what it is, or why it cannot be had."""
    for name in names:
        try:
            tasks = load(manager, name)["tasks"]
        except Problem as problem:
            say(_failed(name, problem))
            continue
        known = {
            "name": name,
            "tasks": list(tasks),
            "documents": sum(len(task.eval_docs) for task in tasks.values()),
            "asks": sorted({task.OUTPUT_TYPE for task in tasks.values()}),
        }
        say({"event": "known", "known": known})


def evaluate(question: dict[str, Any], manager: TaskManager, names: list[str], say: Say) -> None:
    """Run the tasks, each by itself: what one of them found is kept, whatever becomes of the next."""
    try:
        model = _model(question)
    except Exception as error:
        traceback.print_exc()
        reason = f"The tokenizer of {question['tokenizer']} could not be used ({_first_line(error)})."
        say(_failed(None, Problem("tokenizer", reason, "The folder needs its tokenizer's files.")))
        return
    for name in names:
        try:
            loaded = load(manager, name)
            # a group comes with its parts; they would count as asked for twice
            items = [loaded["groups"][name]] if name in loaded["groups"] else [*loaded["tasks"].values()]
            found = simple_evaluate(model=model, tasks=items, limit=question["limit"], task_manager=manager)
        except Problem as problem:
            say(_failed(name, problem))
        except EngineGone:
            say(_failed(name, Problem("engine", f"The engine ended before {name} was done.", "See its own row.")))
            return
        except Exception as error:
            traceback.print_exc()
            say(_failed(name, Problem("task", f"The task {name} failed ({_first_line(error)}).", "See lm-eval.log.")))
        else:
            kept = {key: found[key] for key in ("results", "versions", "higher_is_better")}
            say({"event": "task", "task": name, **kept, "shares": shares(found["samples"])})


def _model(question: dict[str, Any]) -> EngineLM:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        question["tokenizer"], local_files_only=True, trust_remote_code=bool(question["remote_code"])
    )
    length = question["max_length"] or resolve_max_length(None, tokenizer)
    return EngineLM(Channel(question["channel"]), tokenizer, length, question["stop_ids"])


def shares(samples: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The metrics whose value for every single document is between 0 and 1: their mean is a share."""
    found: dict[str, bool] = {}
    for document in itertools.chain.from_iterable(samples.values()):
        for metric in document["metrics"]:
            key = f"{metric},{document['filter']}"
            found[key] = found.get(key, True) and _within_one(document[metric])
    return sorted(key for key, share in found.items() if share)


def _plain(value: Any) -> Any:
    """A number of NumPy's as one of Python's."""
    return value.item() if hasattr(value, "item") else str(value)


def _within_one(value: Any) -> bool:
    try:
        return 0.0 <= float(value) <= 1.0
    except (TypeError, ValueError):
        return False


def _failed(task: str | None, problem: Problem) -> dict[str, Any]:
    failure = {"task": task, "kind": problem.kind, "reason": str(problem), "remedy": problem.remedy}
    return {"event": "failed", "failure": failure}


def _first_line(error: BaseException) -> str:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}"[:REASON_LENGTH] if said else type(error).__name__


if __name__ == "__main__":
    main()
