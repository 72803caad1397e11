"""One worker, started for real: how every way to end is told, and that nothing of it stays behind."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import alive, ids_of

from weighin import cache, runner
from weighin.engines import Job
from weighin.environments import this_interpreter
from weighin.plan import Contender
from weighin.runner import DEFAULT_LIMITS, Outcome, limit_of, worker_environment


class Ran(NamedTuple):
    outcome: Outcome
    events: list[dict[str, Any]]
    log: Path

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]


def job(model: Path, name: str, kind: str = "speed") -> Job:
    contender = Contender.parse(f"fake:{name}")
    return Job(
        kind=kind, round=1, contender=str(contender), engine="fake", precision=contender.precision,
        device=contender.device, options=contender.options, settings={"dependencies": []}, model_path=str(model),
        weight_files=[str(model / "model.safetensors")],
        prepared=None, out=None, threads=1, prompts=[ids_of("hello"), ids_of("bye")], lengths={}, stop_ids=[1],
        max_new_tokens=3, response_cap=5, repeats=2, remote_code=False, allow_pickle=False, spawned_at=0.0,
    )  # fmt: skip


def run(folder: Path, model: Path, name: str, kind: str = "speed", **limits: float) -> Ran:
    events: list[dict[str, Any]] = []
    log = folder / "logs" / "worker.log"
    return Ran(
        runner.run(job(model, name, kind), this_interpreter(), log, {**DEFAULT_LIMITS, **limits}, events.append),
        events,
        log,
    )


def test_a_job_that_goes_well(tmp_path: Path, tiny_model: Path, mark: str) -> None:
    ran = run(tmp_path, tiny_model, "fp32@cpu+token=0.5")
    assert ran.outcome.status == "ok"
    assert (ran.outcome.phase, ran.outcome.reason, ran.outcome.remedy) == (None, None, None)
    # 0.5 s import, 1 s load, three calls of three tokens and 1 ms for each prompt token: the engine's own time
    assert ran.outcome.seconds == pytest.approx(1.5 + 3 * 3 * 0.5 + 0.001 * (5 + 3 + 5))
    assert [e["phase"] for e in ran.of("phase")] == ["import", "load", "first_answer", "answers"]
    assert [e["value"] for e in ran.of("sample") if e["key"] == "decode_tokens_per_second"] == pytest.approx([2.0, 2.0])
    assert not ran.of("done")  # the outcome says it
    assert alive(mark) == []


def test_the_counters_of_the_machine_come_with_the_outcome(tmp_path: Path, tiny_model: Path) -> None:
    pressure = run(tmp_path, tiny_model, "fp32@cpu").outcome.pressure
    if Path("/proc/stat").exists():
        assert pressure is not None
        assert pressure["total_jiffies"] >= 0


@pytest.mark.parametrize(
    ("fail", "status", "phase", "reason"),
    [
        ("load.oom", "out_of_memory", "load", "MemoryError: scripted: out of memory at load"),
        ("import.error", "failed", "import", "RuntimeError: scripted: failed at import"),
        ("token2.error", "failed", "first_answer", "RuntimeError: scripted: failed at token2"),
        ("load.segv", "failed", "load", "ended by SIGSEGV without a word"),
        ("load.kill", "failed", "load", "ended by SIGKILL without a word"),
        ("token1.silent", "failed", "first_answer", "ended with exit code 0 without a word"),
    ],
)
def test_how_a_worker_ends_is_told_with_its_phase(
    tmp_path: Path, tiny_model: Path, mark: str, fail: str, status: str, phase: str, reason: str
) -> None:
    ran = run(tmp_path, tiny_model, f"fp32@cpu+fail={fail}")
    assert (ran.outcome.status, ran.outcome.phase) == (status, phase)
    assert reason in (ran.outcome.reason or "")
    assert ran.outcome.remedy
    assert alive(mark) == []


def test_memory_and_other_failures_have_different_remedies(tmp_path: Path, tiny_model: Path) -> None:
    assert "smaller precision" in (run(tmp_path, tiny_model, "fp32@cpu+fail=load.oom").outcome.remedy or "")
    ran = run(tmp_path, tiny_model, "fp32@cpu+fail=load.error")
    assert ran.outcome.remedy == f"see {ran.log}"
    assert "RuntimeError: scripted: failed at load" in ran.log.read_text()  # with the traceback


def test_a_worker_that_hangs_is_ended_with_all_it_started(tmp_path: Path, tiny_model: Path, mark: str) -> None:
    ran = run(tmp_path, tiny_model, "fp32@cpu+fail=load.hang", load=0.3)
    assert (ran.outcome.status, ran.outcome.phase) == ("timeout", "load")
    assert ran.outcome.reason == "load took longer than its limit of 0.3 s"
    assert "--limit load=SECONDS" in (ran.outcome.remedy or "")
    assert alive(mark) == []


def test_a_limit_is_of_a_phase_not_of_the_job(tmp_path: Path, tiny_model: Path) -> None:
    # 0.5 s of import really pass before the load, which would be too long if the limit ran on
    ran = run(tmp_path, tiny_model, "fp32@cpu+real+load=0.3+token=0.001", load=0.6)
    assert ran.outcome.status == "ok"


def test_a_numbered_phase_has_the_limit_of_its_kind(tmp_path: Path, tiny_model: Path) -> None:
    assert limit_of("response_12", {"response": 7.0}) == 7.0
    assert limit_of("first_answer", {"first": 1.0, "first_answer": 9.0}) == 9.0
    ran = run(tmp_path, tiny_model, "fp32@cpu+fail=token1.hang", "responses", response=0.3)
    assert (ran.outcome.status, ran.outcome.phase) == ("timeout", "response_1")
    assert "--limit response=SECONDS" in (ran.outcome.remedy or "")


def test_a_worker_that_dies_before_its_first_word(tmp_path: Path, tiny_model: Path) -> None:
    ran = run(tmp_path, tiny_model, "fp32@cpu+token=abc")
    assert (ran.outcome.status, ran.outcome.phase) == ("failed", "start")
    assert "could not convert string to float: 'abc'" in (ran.outcome.reason or "")
    assert ran.events == []


def test_the_log_is_kept_from_job_to_job(tmp_path: Path, tiny_model: Path) -> None:
    run(tmp_path, tiny_model, "fp32@cpu", "responses")
    log = run(tmp_path, tiny_model, "fp32@cpu").log.read_text()
    assert "--- fake:fp32@cpu, round 1, responses" in log
    assert "--- fake:fp32@cpu, round 1, speed" in log


def test_the_last_words_of_a_job_are_its_own(tmp_path: Path, tiny_model: Path) -> None:
    run(tmp_path, tiny_model, "fp32@cpu+fail=load.error")
    reason = run(tmp_path, tiny_model, "fp32@cpu+fail=load.silent").outcome.reason or ""
    assert "scripted: failed" not in reason  # that was the job before


def test_responses_stop_where_the_model_stops(tmp_path: Path, tiny_model: Path) -> None:
    ran = run(tmp_path, tiny_model, "fp32@cpu+says=70.71.1", "responses")
    assert [(e["ids"], e["finish"]) for e in ran.of("response")] == [([70, 71, 1], "stop")] * 2
    ran = run(tmp_path, tiny_model, "fp32@cpu+says=70.71", "responses")
    assert [(e["ids"], e["finish"]) for e in ran.of("response")] == [([70, 71, 71, 71, 71], "length")] * 2


def test_an_answer_is_told_token_by_token_and_a_timed_job_is_not(tmp_path: Path, tiny_model: Path) -> None:
    told = run(tmp_path, tiny_model, "fp32@cpu+says=70.71.1", "answer").of("token")
    assert [e["id"] for e in told] == [70, 71, 1] * 2
    assert not run(tmp_path, tiny_model, "fp32@cpu").of("token")


# ---- an engine that misbehaves: the fake one with a few lines of a stranger in its `load`

STRANGER = """
import os, subprocess, sys, json
print('{"event": "done", "virtual_seconds": 1.0}')
print('x' * 3_000_000)
print('ENVIRON ' + json.dumps(dict(os.environ)))
print('PATH ' + json.dumps(sys.path))
print('MODULES ' + json.dumps(sorted(sys.modules)))
subprocess.Popen(['sleep', '600'])
sys.stdout.flush()
"""


@pytest.fixture
def noisy(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> Ran:
    copy = tmp_path / "copy"
    shutil.copytree(cache.worker_copy(), copy)
    file = copy / "weighin" / "engines" / "fake.py"
    head, found, tail = file.read_text().partition('        self._fail("load")\n')
    assert found
    file.write_text(f"{head}        exec({STRANGER!r})\n{tail}")
    monkeypatch.setattr(cache, "worker_copy", lambda: copy)
    for name in (
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "my_password",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ):
        monkeypatch.setenv(name, "the-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    return run(tmp_path, tiny_model, "fp32@cpu")


def test_what_a_strangers_code_does_in_a_worker_stays_there(noisy: Ran, mark: str) -> None:
    assert noisy.outcome.status == "ok"
    assert noisy.outcome.seconds > 1.5  # the printed "done" was no event
    assert len(noisy.of("sample")) > 5
    log = noisy.log.read_text()
    assert "x" * 3_000_000 in log
    assert alive(mark) == []  # the sleep it started is gone
    found = {
        line.partition(" ")[0]: json.loads(line.partition(" ")[2])
        for line in log.splitlines()
        if line[:4] in ("ENVI", "PATH", "MODU")
    }
    assert "the-secret" not in json.dumps(found["ENVIRON"])
    assert found["ENVIRON"]["OMP_NUM_THREADS"] == "1"
    assert found["ENVIRON"]["WEIGHIN_TEST_MARK"] == mark  # the rest is the user's
    assert found["PATH"][0].endswith("copy")
    heavy = {"torch", "numpy", "transformers", "msgspec", "rich", "click", "weighin.compare", "weighin.plan"}
    assert not heavy & set(found["MODULES"])


def test_every_engine_gets_the_same_threads() -> None:
    variables = worker_environment(3)
    assert {variables[name] for name in runner.THREAD_VARIABLES} == {"3"}


def test_variables_that_only_sound_like_secrets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    kept = worker_environment(1)
    assert (kept["TOKENIZERS_PARALLELISM"], kept["HF_HOME"]) == ("false", "/somewhere")
