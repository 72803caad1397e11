"""Doubts: raised by what the counters and the figures say, each with a remedy."""

from collections.abc import Callable
from typing import Any

import pytest

from weighin import doubts
from weighin.doubts import REMEDIES, doubt, of_units
from weighin.measurements import Comparison


def unit(job: str = "speed", seconds: float = 10.0, **pressure: int | None) -> dict[str, Any]:
    return {"job": job, "seconds": seconds, "pressure": pressure}


def types(*units: dict[str, Any], threads: int = 2) -> list[str]:
    return [d.type for d in of_units(list(units), threads)]


@pytest.mark.parametrize("kind", REMEDIES)
def test_every_doubt_has_a_remedy(kind: str) -> None:
    found = doubt(kind, "seen")
    assert (found.type, found.evidence) == (kind, "seen")
    assert len(found.remedy) > 10


def test_the_list_of_doubts_is_closed() -> None:
    with pytest.raises(KeyError):
        doubt("a_feeling", "x")


def test_a_quiet_machine_raises_none() -> None:
    assert types(unit(steal_jiffies=0, total_jiffies=1000, throttled_us=0)) == []
    assert types() == []


def test_time_that_other_machines_took() -> None:
    assert types(unit(steal_jiffies=50, total_jiffies=1000)) == []
    found = of_units([unit(steal_jiffies=100, total_jiffies=1000), unit(steal_jiffies=200, total_jiffies=1000)], 2)
    assert [d.type for d in found] == ["machine_busy"]
    assert "15%" in found[0].evidence


def test_a_container_that_was_held_back() -> None:
    # of 10 s times 2 threads
    assert types(unit(throttled_us=900_000)) == []
    assert types(unit(throttled_us=1_100_000)) == ["container_throttled"]
    assert types(unit(throttled_us=1_100_000), threads=4) == []


def test_only_timed_jobs_count() -> None:
    busy = {"steal_jiffies": 900, "total_jiffies": 1000, "throttled_us": 10**9}
    assert types(unit("prepare", **busy), unit("responses", **busy), unit("cold", **busy)) == []


def test_counters_that_cannot_be_read_raise_no_doubt() -> None:
    assert types(unit(steal_jiffies=None, total_jiffies=None, throttled_us=None)) == []
    assert types({"job": "speed", "seconds": 1.0, "pressure": None}) == []
    assert types(unit(steal_jiffies=0, total_jiffies=0)) == []


def found_in(comparison: Comparison) -> dict[str, str]:
    return {d.type: d.evidence for d in comparison.contenders[0].doubts}


def test_too_few_rounds_and_an_answer_that_was_cut_off(fakes: Callable[..., Comparison]) -> None:
    found = found_in(fakes("fp32@cpu+says=70", rounds=2))
    assert found["too_few_rounds"].startswith("2 of the 6 processes")
    assert found["cut_off"] == "answer 1 reached the cap of 6 tokens"


def test_an_answer_that_ended_by_itself_and_six_rounds_leave_no_doubt(fakes: Callable[..., Comparison]) -> None:
    found = found_in(fakes("fp32@cpu+says=70.1", rounds=6))
    assert not {"too_few_rounds", "cut_off", "no_stop", "failed_round"} & set(found)


@pytest.mark.parametrize(("fail", "words"), [("cold", "cold in round 1"), ("speed", "speed in round 2")])
def test_a_job_that_failed_later_is_a_doubt_not_a_failure(
    fakes: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch, fail: str, words: str
) -> None:
    from weighin import compare, runner

    really = runner.run

    def run(job: Any, *rest: Any) -> runner.Outcome:
        if job.kind == fail and (fail == "cold" or job.round == 2):
            return runner.Outcome(status="failed", phase="load", reason="broke", remedy="see log", seconds=1.0)
        return really(job, *rest)

    monkeypatch.setattr(compare.runner, "run", run)
    comparison = fakes("fp32@cpu", rounds=2)
    assert comparison.contenders[0].status == "ok"
    assert found_in(comparison)["failed_round"] == f"{words}: broke"


def test_reading_from_the_disk_for_every_token_is_paging(fakes: Callable[..., Comparison], tmp_path: Any) -> None:
    import json

    from weighin.compare import rebuild

    fakes("fp32@cpu")
    journal = tmp_path / "out" / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records:
        if record["event"] == "sample" and record["key"] == "disk_bytes_read_per_token":
            record["value"] = 5e6
    journal.write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "5 MB" in found_in(rebuild(tmp_path / "out"))["paging"]


def test_remedies_name_options_that_exist() -> None:
    import re

    from conftest import cli

    named = set(re.findall(r"--[a-z-]+", " ".join(doubts.REMEDIES.values())))
    offered = cli("compare", "--help").stdout
    assert named
    assert [option for option in named if option not in offered] == []
