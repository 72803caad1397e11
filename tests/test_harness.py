"""The standard harness: what it is asked, what it found, how it ends, and lm_eval itself where it is there."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import BOS, EOS, VOCABULARY, alive, ids_of
from hypothesis import given
from hypothesis import strategies as st

from weighin import harness, kits, runner
from weighin.engines import Job
from weighin.engines.fake import _logits
from weighin.environments import this_interpreter
from weighin.errors import BadInput, WeighinError
from weighin.harness import INSTALL, Results, TaskFailure, TaskResult, explain, fold, interval, parse
from weighin.plan import Contender

NO_LM_EVAL = "lm_eval is not there: weighin engines install lm-eval, or name a Python that has it in WEIGHIN_LM_EVAL"


def _python_with_lm_eval() -> str | None:
    """Looked for while the tests are collected: afterwards the cache is one of their own."""
    kit = kits.find(harness.NAME)
    return os.environ.get("WEIGHIN_LM_EVAL") or (str(kit.python) if kits.is_ready(kit) else None)


LM_EVAL = _python_with_lm_eval()

# ---- what was asked for


def test_names_stay_and_folders_become_full_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one.yaml").write_text("task: one\n")
    monkeypatch.chdir(tmp_path)
    asked = parse(["arc_easy, ./mine,", "mine/one.yaml", "arc_easy"])
    assert asked == ["arc_easy", str(tmp_path / "mine"), str(tmp_path / "mine" / "one.yaml")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "names no task"),
        ([" , "], "names no task"),
        (["./not-there"], "no task folder or .yaml file ./not-there"),
        (["not-there.yaml"], "no task folder or .yaml file not-there.yaml"),
        (["."], "holds no .yaml file"),
        (["~nobody-of-this-name/tasks"], "no task folder or .yaml file ~nobody"),
        (["./" + "x" * 5000], "no task folder or .yaml file"),
    ],
)
def test_tasks_that_cannot_be_meant(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=said):
        parse(words)


def test_a_folder_that_only_has_the_name_of_a_task_is_not_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wikitext").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse(["wikitext"]) == ["wikitext"]


@given(st.lists(st.text(st.characters(exclude_characters="/\0~", exclude_categories=["Cs"]), max_size=30), max_size=4))
def test_whatever_is_typed_is_names_or_a_clear_error(words: list[str]) -> None:
    try:
        asked = parse(words)
    except BadInput:
        return
    assert asked and len(set(asked)) == len(asked)
    assert all(word.strip() == word for word in asked)


# ---- what it found


def line(**changes: Any) -> dict[str, Any]:
    return {
        "event": "task",
        "task": "arc",
        "results": {
            "arc": {"name": "arc", "alias": "arc", "sample_len": 100, "acc,none": 0.5, "acc_stderr,none": 0.05}
        },
        "versions": {"arc": 1.0},
        "higher_is_better": {"arc": {"acc": True}},
        "shares": ["acc,none"],
        **changes,
    }


def test_a_figure_keeps_its_error_its_direction_and_its_number_of_samples() -> None:
    found = fold([{"event": "harness", "version": "0.4.13"}, line(), {"event": "done"}], None)
    assert found == Results(
        results=[
            TaskResult(
                task="arc", metric="acc", value=0.5, stderr=0.05, low=pytest.approx(0.402), high=pytest.approx(0.598),
                higher_is_better=True, samples=100, version="1.0",
            )
        ],
        failures=[],
        version="0.4.13",
    )  # fmt: skip


def test_a_metric_without_an_error_has_no_interval() -> None:
    figures = {"word_perplexity,none": 16.2, "word_perplexity_stderr,none": "N/A", "sample_len": 20}
    (only,) = fold(
        [line(results={"wiki": figures}, higher_is_better={"wiki": {"word_perplexity": False}})], None
    ).results
    assert (only.value, only.stderr, only.low, only.high) == (16.2, None, None, None)
    assert (only.higher_is_better, only.version) == (False, None)


def test_the_ways_of_finding_an_answer_are_told_apart() -> None:
    figures = {"exact_match,strict-match": 0.1, "exact_match,flexible-extract": 0.4}
    found = fold([line(results={"gsm8k": figures})], None).results
    assert [(one.metric, one.filter, one.value) for one in found] == [
        ("exact_match", "strict-match", 0.1),
        ("exact_match", "flexible-extract", 0.4),
    ]


def test_what_is_no_number_is_no_figure() -> None:
    assert fold([line(results={"arc": {"acc,none": math.nan, "f1,none": "N/A", "alias": "a,b"}})], None).results == []


def test_a_group_and_its_parts_each_have_their_figures() -> None:
    parts = {"mmlu": {"acc,none": 0.4, "acc_stderr,none": 0.01}, "mmlu_law": {"acc,none": 0.3, "sample_len": 10}}
    assert [one.task for one in fold([line(results=parts)], None).results] == ["mmlu", "mmlu_law"]


def test_what_one_task_found_outlives_the_failure_of_the_next() -> None:
    failure = {"task": "b", "kind": "no_data", "reason": "The data of b is not here.", "remedy": "Fetch it."}
    ended = explain(-signal.SIGKILL, "so it goes\n", Path("the.log"))
    found = fold([line(), {"event": "failed", "failure": failure}], ended)
    assert [one.task for one in found.results] == ["arc"]
    assert [one.kind for one in found.failures] == ["no_data", "crash"]


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 10_000))
def test_the_interval_of_a_share_is_one_of_shares(value: float, stderr: float, samples: int) -> None:
    low, high = interval(value, stderr, samples, share=True)
    assert low is not None and high is not None
    assert 0.0 <= low <= value <= high <= 1.0


@pytest.mark.parametrize(("value", "expected"), [(1.0, (0.8389, 1.0)), (0.0, (0.0, 0.1611))])
def test_all_right_of_twenty_is_not_surely_all(value: float, expected: tuple[float, float]) -> None:
    assert interval(value, 0.0, 20, share=True) == pytest.approx(expected, abs=1e-4)  # Wilson's


def test_other_figures_are_not_cut() -> None:
    assert interval(1.1, 0.5, 9, share=False) == pytest.approx((0.12, 2.08))


# ---- how it ends


@pytest.mark.parametrize(
    ("code", "tail", "kind", "words"),
    [
        (None, "", "timeout", "longer than its limit"),
        (-signal.SIGALRM, "at work\n", "timeout", "longer than its limit"),
        (1, "ModuleNotFoundError: No module named 'lm_eval'\n", "missing", "No module named 'lm_eval'"),
        (1, "x\nValueError: bad\n\n", "crash", "exit code 1; its last line was: ValueError: bad"),
        (-signal.SIGSEGV, "", "crash", "ended by SIGSEGV; its last line was: nothing"),
    ],
)
def test_how_it_ended_is_told(code: int | None, tail: str, kind: str, words: str) -> None:
    failure = explain(code, tail, Path("the.log"))
    assert (failure.task, failure.kind) == (None, kind)
    assert words in failure.reason
    assert failure.remedy


HEAD = """
import json, os, signal, socket, sys, time
question = json.load(sys.stdin)
said = os.fdopen(question["said"], "w")
def say(**event):
    print(json.dumps(event), file=said, flush=True)
signal.alarm(int(question["seconds"]))
"""
ASK = """\
channel = socket.socket(fileno=question["channel"]).makefile("rwb")
def ask(**asked):
    try:
        channel.write(json.dumps(asked).encode() + b"\\n")
        channel.flush()
        return channel.readline()
    except ConnectionError:
        return b""
"""


@pytest.fixture
def plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script in the adapter's place, so that what surrounds it can be tried without lm_eval."""

    def play(body: str) -> None:
        script = tmp_path / "adapter.py"
        script.write_text(HEAD + (ASK if "ask(" in body else "") + textwrap.dedent(body))
        monkeypatch.setattr(harness, "ADAPTER", script)

    return play


def started(tmp_path: Path, **options: Any) -> Any:
    return harness.start(sys.executable, "/tokenizer", ["arc"], tmp_path / "logs" / "tasks.log", **options)


def last_words(tmp_path: Path) -> dict[str, Any]:
    """What the script in the adapter's place printed."""
    found: dict[str, Any] = json.loads((tmp_path / "logs" / "tasks.log").read_text().splitlines()[-1])
    return found


def job(model: Path, name: str) -> Job:
    contender = Contender.parse(f"fake:{name}")
    return Job(
        kind="tasks", round=1, contender=str(contender), engine="fake", precision=contender.precision,
        device=contender.device, options=contender.options, settings={"dependencies": []}, model_path=str(model),
        weight_files=[str(model / "model.safetensors")], prepared=None, out=None, threads=1, prompts=[], lengths={},
        stop_ids=[EOS], max_new_tokens=3, response_cap=5, repeats=1, remote_code=False, allow_pickle=False,
        spawned_at=0.0, vocabulary=VOCABULARY,
    )  # fmt: skip


def work(model: Path, name: str, log: Path, channel: int) -> runner.Outcome:
    limits = runner.DEFAULT_LIMITS
    return runner.run(job(model, name), this_interpreter(), log, limits, lambda event: None, channel=channel)


def test_a_harness_and_a_worker_talk_to_each_other(plays: Any, tmp_path: Path, tiny_model: Path, mark: str) -> None:
    plays(
        """
        scored = json.loads(ask(ask="score", requests=[{"context": [5], "continuation": [6]}]))
        new = json.loads(ask(ask="generate", ids=[7, 8], n=2, stop_ids=[]))
        print(json.dumps({"scored": scored, "new": new, "question": question}))
        say(event="done")
        """
    )
    with started(tmp_path, limit=3, max_length=64, stop_ids=[1]) as asked:
        outcome = work(tiny_model, "fp32@cpu", tmp_path / "worker.log", asked.worker_fd)
        found = asked.results()
    heard = last_words(tmp_path)
    assert outcome.status == "ok"
    assert (found.results, found.failures) == ([], [])
    assert -20 < heard["scored"]["answers"][0]["logprob"] < 0
    assert heard["new"] == {"ids": [7, 8]}
    assert {key: heard["question"][key] for key in ("tasks", "limit", "max_length", "stop_ids", "remote_code")} == {
        "tasks": ["arc"], "limit": 3, "max_length": 64, "stop_ids": [1], "remote_code": False,
    }  # fmt: skip
    assert alive(mark) == []


def test_the_worker_hears_that_the_harness_is_gone(plays: Any, tmp_path: Path) -> None:
    plays("sys.exit(3)")
    with started(tmp_path) as asked, socket.socket(fileno=os.dup(asked.worker_fd)) as worker:
        worker.settimeout(20)
        assert worker.recv(1) == b""
        (failure,) = asked.results().failures
    assert (failure.kind, failure.reason) == ("crash", "The harness ended with exit code 3; its last line was: nothing")
    assert str(tmp_path) in failure.remedy


def test_the_harness_hears_that_the_worker_is_gone(plays: Any, tmp_path: Path, tiny_model: Path, mark: str) -> None:
    plays(
        """
        heard = ask(ask="score", requests=[{"context": [5], "continuation": [6]}])
        failure = {"task": "arc", "kind": "engine", "reason": f"heard {heard!r}", "remedy": "none"}
        say(event="failed", failure=failure)
        say(event="done")
        """
    )
    with started(tmp_path) as asked:
        outcome = work(tiny_model, "fp32@cpu+fail=load.segv", tmp_path / "worker.log", asked.worker_fd)
        found = asked.results()
    assert outcome.status == "failed"
    assert found.failures == [TaskFailure(task="arc", kind="engine", reason="heard b''", remedy="none")]
    assert alive(mark) == []


def test_one_that_takes_too_long_ends_by_itself(plays: Any, tmp_path: Path, mark: str) -> None:
    plays("time.sleep(100)")
    with started(tmp_path, seconds=1) as asked:
        (failure,) = asked.results().failures
    assert failure.kind == "timeout"
    assert alive(mark) == []


def test_one_that_does_not_end_is_ended(plays: Any, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LAST_SECONDS", 0.5)
    plays("time.sleep(100)")
    with started(tmp_path) as asked:
        (failure,) = asked.results().failures
    assert failure.kind == "timeout"
    assert alive(mark) == []


def test_nothing_is_left_of_it_when_nobody_asks_for_results(plays: Any, tmp_path: Path, mark: str) -> None:
    plays("import subprocess; subprocess.Popen(['sleep', '100']); time.sleep(100)")
    with pytest.raises(KeyboardInterrupt), started(tmp_path):
        raise KeyboardInterrupt
    assert alive(mark) == []


def test_it_is_offline_and_has_no_secrets(plays: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    plays("print(json.dumps(dict(os.environ)))")
    with started(tmp_path) as asked:
        asked.results()
    has = last_words(tmp_path)
    assert (has["HF_HUB_OFFLINE"], has["HF_DATASETS_OFFLINE"]) == ("1", "1")
    assert "HF_TOKEN" not in has


def test_an_environment_that_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(WeighinError, match=INSTALL), harness.start("/no/python", "/t", ["a"], tmp_path / "log"):
        pass


def test_a_python_without_the_harness_says_how_to_install_it(tmp_path: Path) -> None:
    without = [sys.executable, "-I", "-c", "import importlib.util as u; print(u.find_spec('lm_eval') is None)"]
    if subprocess.run(without, capture_output=True, text=True, check=True).stdout.strip() != "True":
        pytest.skip("this Python has lm_eval")
    with started(tmp_path) as asked:
        (failure,) = asked.results().failures
    assert failure.kind == "missing"
    assert failure.remedy == f"Install it: {INSTALL}"


def test_the_recipe_pins_every_package_and_takes_no_torch() -> None:
    assert all("==" in package for package in harness.RECIPE.packages)
    assert not any(package.startswith("torch") for package in harness.RECIPE.packages)
    assert harness.RECIPE.bytes and harness.RECIPE.seconds


def test_a_look_at_the_tasks_gives_what_they_are(plays: Any, tmp_path: Path) -> None:
    known = {"name": "arc", "tasks": ["arc_easy"], "documents": 3, "asks": ["multiple_choice"]}
    plays(f"say(event='known', known={known!r}); say(event='done')")
    assert harness.check(sys.executable, ["arc"], tmp_path / "log") == [harness.Known(**known)]


@pytest.mark.parametrize(("kind", "error"), [("unknown_task", BadInput), ("tokenizer", WeighinError)])
def test_what_a_look_does_not_find_is_an_error(
    plays: Any, tmp_path: Path, kind: str, error: type[WeighinError]
) -> None:
    failure = {"task": None, "kind": kind, "reason": "There is no task 'ark'.", "remedy": "Nearest: arc."}
    plays(f"say(event='failed', failure={failure!r}); say(event='done')")
    with pytest.raises(WeighinError, match=r"There is no task 'ark'\. Nearest: arc\.") as raised:
        harness.check(sys.executable, ["ark"], tmp_path / "log")
    assert raised.type is error


# ---- lm_eval itself

DOCUMENTS = [
    {"q": "The sky is", "choices": ["blue", "cheese"], "gold": 0, "text": "It was a dark and stormy night."},
    {"q": "Two and two are", "choices": ["a tree", "four"], "gold": 1, "text": "Hello there."},
    {"q": "Water is", "choices": ["wet", "made of iron"], "gold": 0, "text": "How are you today, and how is she?"},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
metadata: {{version: 1.5}}
"""
KINDS = {
    "choose": """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]
""",
    "roll": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "say": """
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, body in KINDS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + body)
    return folder


def logprob(context: Sequence[int], continuation: Sequence[int]) -> float:
    """What the fake engine thinks, by the definition."""
    total, ids = 0.0, [*context, *continuation]
    for i in range(len(context), len(ids)):
        row = _logits(VOCABULARY, tuple(ids[:i][-3:])).astype("float32").astype("float64")
        total += row[ids[i]] - math.log(sum(math.exp(x) for x in row))
    return total


def rolled(text: str, length: int) -> float:
    """The begin token stands before the text's own ids, which begin with it too: as lm_eval's own model has it."""
    ids = [BOS, *ids_of(text)]
    total = logprob([BOS], ids[:length])
    for begin in range(length, len(ids), length):
        end = min(begin + length, len(ids))
        total += logprob(ids[end - length - 1 : begin], ids[begin:end])
    return total


@pytest.mark.slow
@pytest.mark.skipif(LM_EVAL is None, reason=NO_LM_EVAL)
def test_the_figures_of_lm_eval_are_those_of_the_definition(task_folder: Path, tiny_model: Path, mark: str) -> None:
    assert LM_EVAL is not None
    log, length = task_folder / "log", 16
    says = ".".join(map(str, ids_of("blue.x")))
    with harness.start(LM_EVAL, str(tiny_model), parse([str(task_folder)]), log, max_length=length) as asked:
        outcome = work(tiny_model, f"fp32@cpu+says={says}", log, asked.worker_fd)
        found = asked.results()
    assert (outcome.status, found.failures) == ("ok", [])
    assert found.version == harness.RECIPE.packages[0].partition("==")[2]
    figures = {(one.task, one.metric): one for one in found.results}
    right = 0
    for document in DOCUMENTS:
        context = [BOS, *ids_of(document["q"])]
        likely = []
        for choice in document["choices"]:
            continuation = ids_of(f" {choice}")
            likely.append(logprob(context[-(length + 1 - len(continuation)) :], continuation))
        right += likely.index(max(likely)) == document["gold"]
    assert figures["choose", "acc"].value == pytest.approx(right / 3)
    assert (figures["choose", "acc"].samples, figures["choose", "acc"].version) == (3, "1.5")
    assert figures["choose", "acc"].higher_is_better is True
    low, high = figures["choose", "acc"].low, figures["choose", "acc"].high
    assert low is not None and high is not None and 0.0 <= low < high <= 1.0
    texts = [document["text"] for document in DOCUMENTS]
    bits = -sum(rolled(text, length) for text in texts) / sum(map(len, texts)) / math.log(2)
    assert figures["roll", "bits_per_byte"].value == pytest.approx(bits, rel=1e-6)
    assert figures["roll", "bits_per_byte"].higher_is_better is False
    assert figures["say", "exact_match"].value == pytest.approx(1 / 3)  # "blue", cut at the stop string
    assert alive(mark) == []


@pytest.mark.slow
@pytest.mark.skipif(LM_EVAL is None, reason=NO_LM_EVAL)
def test_a_broken_model_fails_what_needs_its_probabilities_and_nothing_else(
    task_folder: Path, tiny_model: Path
) -> None:
    assert LM_EVAL is not None
    log = task_folder / "log"
    with harness.start(LM_EVAL, str(tiny_model), parse([str(task_folder)]), log, limit=1) as asked:
        outcome = work(tiny_model, "fp32@cpu+nan", log, asked.worker_fd)
        found = asked.results()
    assert outcome.status == "ok"
    assert {(one.task, one.kind) for one in found.failures} == {("choose", "engine"), ("roll", "engine")}
    assert "no finite log-probability" in found.failures[0].reason
    assert [(one.task, one.samples) for one in found.results] == [("say", 1)]


@pytest.mark.slow
@pytest.mark.skipif(LM_EVAL is None, reason=NO_LM_EVAL)
def test_a_folder_is_looked_through(task_folder: Path) -> None:
    assert LM_EVAL is not None
    (task_folder / "both.yaml").write_text("group: both\ntask: [choose, say]\n")
    (task_folder / "outer.yaml").write_text("group: outer\ntask: [both]\n")
    known = harness.check(LM_EVAL, parse([str(task_folder)]), task_folder / "log")
    assert {one.name: (sorted(one.tasks), one.documents) for one in known} == {
        "outer": (["choose", "say"], 6),
        "roll": (["roll"], 3),
    }


@pytest.mark.slow
@pytest.mark.skipif(LM_EVAL is None, reason=NO_LM_EVAL)
def test_a_group_within_a_group_runs_once_and_has_a_figure_of_its_own(task_folder: Path, tiny_model: Path) -> None:
    assert LM_EVAL is not None
    metric = "aggregate_metric_list: [{metric: acc, aggregation: mean}]\n"
    (task_folder / "inner.yaml").write_text(f"group: inner\ntask: [choose]\n{metric}")
    (task_folder / "outer.yaml").write_text(f"group: outer\ntask: [inner]\n{metric}")
    log = task_folder / "log"
    with harness.start(LM_EVAL, str(tiny_model), parse([str(task_folder / "outer.yaml")]), log) as asked:
        work(tiny_model, "fp32@cpu", log, asked.worker_fd)
        found = asked.results()
    assert found.failures == []
    assert sorted(one.task for one in found.results) == ["choose", "inner", "outer"]
    assert len({one.value for one in found.results}) == 1


@pytest.mark.slow
@pytest.mark.skipif(LM_EVAL is None, reason=NO_LM_EVAL)
@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("arc_eazy", "There is no task 'arc_eazy'. Nearest: arc_easy"),
        ("arc_easy", "The data of the task arc_easy is not on this machine"),
        ("broken", "bad.yaml cannot be read"),
        ("empty", "describes no task"),
        ("moved", "The data of the task choose is not on this machine"),
    ],
)
def test_what_cannot_be_had_is_told_before_anything_runs(task_folder: Path, task: str, words: str) -> None:
    assert LM_EVAL is not None
    if task in ("broken", "empty"):
        for file in task_folder.iterdir():
            file.unlink()
        (task_folder / "bad.yaml").write_text("task: [unclosed\n" if task == "broken" else "description: nothing\n")
    if task == "moved":
        (task_folder.parent / "data.jsonl").unlink()
    asked = [task] if task.startswith("arc") else [str(task_folder)]
    with pytest.raises(BadInput, match=words):
        harness.check(LM_EVAL, parse(asked), task_folder / "log")
