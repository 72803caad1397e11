"""What a plan and its journal amount to: which processes count, what is told of what went wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished
from filelock import FileLock

from weighin import compare, prompts
from weighin.compare import Silent, rebuild, resume
from weighin.errors import BadInput
from weighin.folder import LOCK, PLAN
from weighin.journal import NAME, read
from weighin.measurements import UNDECODED, Comparison, Measurement, _measurements

Fakes = Callable[..., Comparison]


def sample(value: float, round_: int = 1, job: str = "speed", key: str = "load_seconds") -> dict[str, Any]:
    return {"event": "sample", "round": round_, "job": job, "key": key, "value": value}


def loads(*samples: dict[str, Any], unknown: str | None = None) -> Measurement:
    reasons = [{"key": "load_seconds", "reason": unknown}] if unknown else []
    return _measurements(list(samples), reasons)["load_seconds"]


def test_timed_processes_count_where_there_are_any_and_every_sample_is_kept() -> None:
    found = loads(sample(1.0), sample(3.0, 2), sample(99.0, 1, "responses"), sample(98.0, 1, "cold"))
    assert (found.value, found.low, found.high, found.interval) == (2.0, 1.0, 3.0, "range")
    assert [s.value for s in found.samples] == [1.0, 3.0, 99.0, 98.0]
    assert found.by_round() == {1: 1.0, 2: 3.0}


def test_other_processes_count_where_there_is_no_timed_one() -> None:
    found = loads(sample(5.0, 1, "responses"), sample(7.0, 1, "cold"))
    assert (found.value, found.low, found.high) == (6.0, 5.0, 7.0)
    assert found.by_round() == {}


def test_a_process_counts_once_however_often_it_answered() -> None:
    found = loads(sample(1.0), sample(1.0), sample(1.0), sample(4.0, 2))
    assert found.value == 2.5


def test_what_was_not_measured_has_its_reason() -> None:
    assert loads(unknown="no disk").reason == "no disk"
    assert loads().reason == "not measured"
    known = loads(sample(1.0), unknown="only once")
    assert (known.value, known.reason) == (1.0, None)


def test_the_figure_of_a_run_is_that_of_its_timed_processes(fakes: Fakes) -> None:
    found = fakes("fp32@cpu", rounds=6).contenders[0].measurements["load_seconds"]
    assert found.interval == "95%"
    assert {s.job for s in found.samples} == {"speed", "responses"}
    assert len(found.by_round()) == 6


# ---- texts that cannot be had


def test_a_failing_decode_is_a_note_and_not_the_end(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> list[dict[str, Any]]:
        raise BadInput("the tokenizer fell over")

    monkeypatch.setattr(prompts, "decode", fail)
    comparison = fakes("fp32@cpu", "nf4@cpu", rounds=2)
    assert comparison.complete
    for found in comparison.contenders:
        assert (found.status, found.rounds, found.first_answer) == ("ok", 2, None)
        assert found.value("decode_tokens_per_second") is not None
        (answer,) = found.responses
        assert len(answer.ids) == 6
        assert (answer.text, answer.thinking, answer.whole) == (UNDECODED["text"], None, "")
        said = f"The answers of {found.name} could not be decoded: the tokenizer fell over"
        assert comparison.notes.count(said) == 1
    assert "could not decode" in UNDECODED["text"]


def test_a_text_that_the_journal_lacks_is_said_to_be_missing(finished: Finished, tmp_path: Path) -> None:
    shutil.copy(finished.folder / PLAN, tmp_path)
    kept = [r for r in read(finished.folder) if r["event"] != "decoded"]
    (tmp_path / NAME).write_text("".join(json.dumps(r) + "\n" for r in kept))
    first, *_ = rebuild(tmp_path).contenders
    assert {r.text for r in first.responses} == {UNDECODED["text"]}
    assert [r.ids for r in first.responses] == [r.ids for r in finished.comparison.contenders[0].responses]


# ---- time


def test_a_first_round_that_overran_the_budget_is_noted(fakes: Fakes) -> None:
    comparison = fakes("fp32@cpu+load=30", rounds=None, budget="10")
    assert comparison.contenders[0].status == "ok"
    (note,) = [n for n in comparison.notes if "budget" in n]
    assert note == (
        "The first round, the answers and the quality pass, which always run, took longer than the budget: "
        f"{comparison.spent_seconds:.0f} s instead of 10 s."
    )
    assert comparison.spent_seconds > 60


def test_a_run_within_its_budget_or_without_one_has_no_such_note(fakes: Fakes, tmp_path: Path) -> None:
    within = fakes("fp32@cpu", rounds=None, budget="20")
    assert within.spent_seconds <= 20
    assert not any("budget:" in n for n in within.notes)
    asked = fakes("fp32@cpu+load=30", rounds=1, budget="10", out=tmp_path / "two")  # the rounds count, not the budget
    assert not any("budget:" in n for n in asked.notes)


# ---- the folder


def test_another_version_of_weighin_does_not_go_on(finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "copy")
    file = tmp_path / "copy" / PLAN
    file.write_text(json.dumps({**json.loads(file.read_text()), "weighin_version": "0.0.1"}))
    with pytest.raises(BadInput, match=r"cannot be resumed: weighin was 0\.0\.1 and is .* now"):
        resume(tmp_path / "copy", Silent())


def test_the_lock_stays_and_is_free_after_the_run(
    quick_prompts: None, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(finished.folder, tmp_path / "copy")
    lock = tmp_path / "copy" / LOCK
    assert lock.exists()
    with FileLock(lock, timeout=0):
        pass
    before = lock.stat().st_ino
    resume(tmp_path / "copy", Silent())
    assert lock.stat().st_ino == before  # whoever waits for it waits for the same file


def test_a_run_that_breaks_frees_its_folder(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(compare.schedule, "next_unit", broken)
    with pytest.raises(RuntimeError):
        fakes("fp32@cpu")
    with FileLock(tmp_path / "out" / LOCK, timeout=0):
        pass
