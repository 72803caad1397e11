"""The same contract for every engine that is ready here, on the demo's real weights, through weighin's own pipeline.

Engines are found by listing their folder. One that is not ready is skipped, with what would make it ready.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import alive

from weighin import cache, engines, environments, intake, jobs, runner
from weighin.compare import Silent, start
from weighin.engines import Job
from weighin.journal import read
from weighin.measurements import ContenderResult
from weighin.plan import Plan
from weighin.reference_rows import Rows, digest
from weighin.schedule import State, Unit

pytestmark = [pytest.mark.slow, pytest.mark.engines]

MODEL = "demo-base"
REFERENCE = "transformers:fp32@cpu"
FULL = ("f32", "fp32")
PRECISE = (*FULL, "fp16", "f16", "bf16", "int8")  # the contract is asked of an engine's most precise form
ENGINES = [name for name, engine in engines.everything().items() if not engine.hidden]
FORCED, CAP = 12, 96
# The second begins like the first and is much longer: an engine that keeps what it has read would show it.
SHORT = "hello good morning may i see the menu"
LONG = SHORT + " and then tell me about every dish on it, its price, what is in it and who cooks it" * 12
USERS_CACHE = os.environ.get("WEIGHIN_CACHE")  # before the tests get one of their own


@pytest.fixture(scope="module")
def users_environments(_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own that has the user's environments; what is prepared is prepared anew."""
    with pytest.MonkeyPatch.context() as patch:
        if USERS_CACHE is None:
            patch.delenv("WEIGHIN_CACHE")
        else:
            patch.setenv("WEIGHIN_CACHE", USERS_CACHE)
        theirs, ours = cache.root(), tmp_path_factory.mktemp("engines-cache")
        for name in ("environments", "demo"):
            if (theirs / name).is_dir():
                (ours / name).symlink_to(theirs / name)
        patch.setenv("WEIGHIN_CACHE", str(ours))
        yield


class Ran(NamedTuple):
    """An engine's run: the plan, what came of it, every event, what it logged, and what still runs of it."""

    plan: Plan
    result: ContenderResult
    events: list[dict[str, Any]]
    logs: str
    left_behind: list[str]  # processes

    def calls(self, kind: str, prompt: int) -> list[list[int]]:
        """The ids of every call of this kind, in order."""
        return [e["ids"] for e in self.events if e["event"] == "call" and (e["call"], e["prompt"]) == (kind, prompt)]


def plan_of(model: str, contender: str, **options: Any) -> Plan:
    """A plan for one contender with one thread: the contract is not about speed. Skips where it is not ready."""
    arguments = {"prompts": [SHORT, LONG], "max_new_tokens": FORCED, "response_tokens": CAP, "prompt_tokens": ()}
    request = intake.Request(model=model, contenders=(contender,), threads=1, **{**arguments, **options})
    plan = intake.make_plan(request, say=print)
    entry = plan.entries[0]
    if entry.status != "ok":
        pytest.skip(f"{contender}: {entry.status}: {entry.reason}; {entry.remedy or ''}")
    return plan


def work(plan: Plan, job: Job, folder: Path) -> list[dict[str, Any]]:
    """The events of a job that went well, in a worker in the engine's environment."""
    contender, events = plan.entries[0].contender, []
    environment = environments.for_contender(engines.everything()[contender.engine], contender, plan.model)
    assert isinstance(environment, environments.Environment)
    outcome = runner.run(job, environment, folder / "job.log", plan.limits, events.append)
    assert outcome.status == "ok", outcome.reason
    return events


def logits_of(plan: Plan, documents: list[list[int]], folder: Path) -> list[Any]:
    """A contender's rows of logits on these ids, by a worker that keeps them as the reference's are kept."""
    entry = plan.entries[0]
    engine = engines.everything()[entry.contender.engine]
    if engine.probabilities_of(entry.contender) != "full":
        pytest.skip(f"{entry.name} gives no probabilities of the whole vocabulary")
    if entry.recipe is not None:
        outcome = jobs.prepare(Unit(entry.name, 0, "prepare"), plan, folder, State(), lambda event: None)
        assert outcome.status == "ok", outcome.reason
    asked = [{"stratum": "text", "name": str(i), "ids": d, "counted": [[1, len(d)]]} for i, d in enumerate(documents)]
    job = dataclasses.replace(
        jobs.job_of(Unit(entry.name, 1, "score"), plan, 1), documents=asked, rows=str(folder / "rows"), writes_rows=True
    )
    work(plan, job, folder)
    rows = Rows(folder / "rows", plan.workload.vocabulary, 0)
    return [rows.read(digest(d["ids"], d["counted"])).take(len(d["ids"]) - 1).logits for d in asked]


def log_probabilities(logits: Any) -> Any:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def divergence(reference: Any, other: Any) -> tuple[float, float]:
    """The mean KL divergence and the share of rows with the same best token."""
    p, q = log_probabilities(reference), log_probabilities(other)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean()), float((p.argmax(axis=1) == q.argmax(axis=1)).mean())


def is_full(contender: str) -> bool:
    """Whether it computes in 32 bits, and so all but exactly."""
    return contender.partition(":")[2].partition("@")[0] in FULL


def passages(plan: Plan) -> list[list[int]]:
    """Ids of texts in several languages, one of them long enough to be scored in more than one piece."""
    kept = [document.ids for document in plan.workload.documents if document.stratum == "passages"]
    return [*kept[:4], [token for ids in kept for token in ids][:200]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, users_environments: None) -> tuple[list[Any], list[Any]]:
    """Texts as ids, and transformers' float32 logits on them."""
    plan = plan_of(MODEL, REFERENCE)
    documents = passages(plan)
    return documents, logits_of(plan, documents, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module", params=ENGINES)
def contender(request: pytest.FixtureRequest) -> str:
    """An engine's most precise form on the CPU."""
    engine = engines.everything()[request.param]
    precision = next((p for p in PRECISE if p in engine.precisions), engine.precisions[0])
    return f"{engine.name}:{precision}@cpu"


@pytest.fixture(scope="module")
def ran(contender: str, tmp_path_factory: pytest.TempPathFactory, users_environments: None) -> Ran:
    """Two rounds in fresh processes, and the answers."""
    plan = plan_of(MODEL, contender, rounds=2, quality=False)
    folder, mark = tmp_path_factory.mktemp("ran") / "out", uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHIN_TEST_MARK", mark)
        result = start(plan, folder, Silent()).contenders[0]
    logs = "\n".join(file.read_text(errors="replace") for file in (folder / "logs").glob("*.log"))
    assert (result.status, result.reason) == ("ok", None), logs[-3000:]
    return Ran(plan, result, list(read(folder)), logs, alive(mark))


def test_the_length_is_forced_and_every_id_is_one_of_the_models(ran: Ran) -> None:
    calls = [*ran.calls("first", 0), *ran.calls("steady", 1), *ran.calls("steady", 0)]
    assert len(calls) >= 6
    assert all(len(ids) == FORCED for ids in calls)
    assert all(0 <= token < ran.plan.model.shape.vocabulary for ids in calls for token in ids)


def test_greedy_answers_are_the_same_in_every_process(ran: Ran) -> None:
    first = ran.calls("first", 0)
    assert len(first) == 2
    assert first[0] == first[1]


def test_an_answer_does_not_depend_on_what_was_asked_before(ran: Ran, tmp_path: Path) -> None:
    job = jobs.job_of(Unit(ran.result.name, 1, "responses"), ran.plan, 1)
    job = dataclasses.replace(job, prompts=job.prompts[::-1], texts=job.texts[::-1])
    events = work(ran.plan, job, tmp_path)
    backwards = [event["ids"] for event in events if event["event"] == "response"]
    assert backwards[::-1] == [response.ids for response in ran.result.responses]


def test_an_answer_ends_where_the_model_ends_it(ran: Ran) -> None:
    answer, stops = ran.result.responses[0], set(ran.plan.workload.stop_ids)
    assert answer.finish == "stop"
    assert FORCED < len(answer.ids) < CAP
    assert answer.ids[-1] in stops
    assert not stops & set(answer.ids[:-1])
    assert answer.ids[:FORCED] == ran.calls("first", 0)[0]
    assert "Hello" in answer.text


def test_memory_is_reported(ran: Ran) -> None:
    weights = ran.result.weight_bytes
    assert ran.result.value("peak_ram_bytes") > 0.5 * weights
    loaded = ran.result.value("loaded_bytes")
    assert loaded is None or loaded == pytest.approx(weights, rel=0.1)


def test_what_was_really_used_is_said(ran: Ran) -> None:
    assert ran.result.effective.keys() >= {"dtype", "attention", "kv_cache", "threads", "devices"}
    assert ran.result.effective["threads"] == 1
    assert all(
        ran.result.dependencies[package] for package in ("python", *ran.plan.entries[0].settings["dependencies"])
    )


def test_its_own_tokenizer_and_template_agree_with_the_models(ran: Ran) -> None:
    assert not [d.evidence for d in ran.result.doubts if d.type in ("template_differs", "tokenizer_differs")]


def test_it_closes_without_a_word_and_nothing_of_it_is_left(ran: Ran) -> None:
    assert ran.left_behind == []
    assert "Traceback" not in ran.logs


def test_its_snippet_prints_the_reports_answer(ran: Ran) -> None:
    snippet = ran.result.snippet
    done = subprocess.run(
        [ran.plan.entries[0].python, "-I", "-c", snippet], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ran.result.responses[0].whole + "\n"
    assert 8 <= len(snippet.strip().splitlines()) <= 25


def test_probabilities_sum_to_one_and_name_the_tokens_that_were_generated(ran: Ran, tmp_path: Path) -> None:
    prompt, answer = ran.plan.workload.rendered[0].ids, ran.result.responses[0].ids
    (rows,) = logits_of(ran.plan, [[*prompt, *answer]], tmp_path)
    assert rows.dtype == np.float32
    assert np.isfinite(rows).all()
    logs = log_probabilities(rows)
    assert np.exp(logs).sum(axis=1) == pytest.approx(1.0, abs=1e-9)
    said = logs[len(prompt) - 1 :]
    lost = said.max(axis=1) - said[np.arange(len(answer)), answer]
    assert (lost == 0).mean() > 0.9
    assert lost.max() < (0.01 if is_full(ran.result.name) else 0.3)  # what is not the best is all but equal to it


def test_scoring_starts_from_nothing_and_does_not_look_ahead(ran: Ran, tmp_path: Path) -> None:
    text = passages(plan_of(MODEL, ran.result.name))[-1]
    whole, start_, other = logits_of(ran.plan, [text, text[:150], text[20:60]], tmp_path)
    again = logits_of(ran.plan, [text[20:60]], tmp_path / "again")[0]
    noise = 1e-6 if is_full(ran.result.name) else 1e-2
    assert divergence(whole[:149], start_)[0] < noise
    assert divergence(other, again)[0] < noise
    assert divergence(whole[20:59], other)[0] > 0.01


def test_the_same_weights_say_the_same_in_every_engine(
    contender: str, reference: tuple[list[Any], list[Any]], tmp_path: Path
) -> None:
    documents, expected = reference
    found = logits_of(plan_of(MODEL, contender, quality=False), documents, tmp_path)
    kl, same = divergence(np.concatenate(expected), np.concatenate(found))
    print(f"{contender}: KL {kl:.2g}, the same next token {same:.2%}")
    assert kl < (1e-3 if is_full(contender) else 0.02)
    assert same > (0.99 if is_full(contender) else 0.9)
