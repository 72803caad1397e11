"""What is measured: the formulas, and that an engine cannot cheat its way past them."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin import probes, worker
from weighin.engines import Job, OnToken
from weighin.engines.fake import FakeEngine
from weighin.probes import SETTLE_SECONDS, Call, Session
from weighin.probes.disk import bytes_read, evict, weight_files


def make_job(kind: str = "speed", **changes: Any) -> Job:
    return Job(**{
        "kind": kind, "round": 1, "contender": "fake:fp32@cpu", "engine": "fake", "precision": "fp32", "device": "cpu",
        "options": {}, "settings": {"dependencies": ["click", "no-such-package"]}, "model_path": "/nowhere",
        "weight_files": [], "prepared": None, "out": None, "threads": 1, "prompts": [[5, 6, 7], [8, 9]],
        "lengths": {"4": [1, 2, 3, 4]}, "stop_ids": [1], "max_new_tokens": 3, "response_cap": 4, "repeats": 2,
        "remote_code": False, "allow_pickle": False, "spawned_at": 100.0, **changes,
    })  # fmt: skip


def work(job: Job) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    worker.run(job, events.append)
    return events


def samples(events: list[dict[str, Any]], key: str) -> list[float]:
    return [e["value"] for e in events if e["event"] == "sample" and e["key"] == key]


# ---- one call


def test_decode_leaves_the_first_token_to_the_prefill() -> None:
    call = Call(prompt_tokens=7, ids=[1, 2, 3], began=10.0, times=[12.0, 12.5, 13.0])
    assert call.first_token_seconds == 2.0
    assert call.seconds == 3.0
    assert call.decode_tokens_per_second == 2.0


def test_one_token_or_no_time_has_no_decode_speed() -> None:
    assert Call(prompt_tokens=1, ids=[1], began=0.0, times=[1.0]).decode_tokens_per_second is None
    assert Call(prompt_tokens=1, ids=[1, 2], began=0.0, times=[1.0, 1.0]).decode_tokens_per_second is None


@given(st.floats(0.0, 1e5), st.floats(0.0, 10.0), st.floats(1e-4, 10.0), st.integers(2, 300))
def test_decode_is_one_over_the_time_of_a_token(began: float, prefill: float, token: float, n: int) -> None:
    times = [began + prefill + token * i for i in range(n)]
    speed = Call(prompt_tokens=1, ids=[1] * n, began=began, times=times).decode_tokens_per_second
    assert speed == pytest.approx(1 / token, rel=1e-4)


class Scripted(FakeEngine):
    """Gives and announces what it is told."""

    gives: list[int]
    announces: list[int]

    def generate(
        self, ids: Sequence[int], n: int, stop_ids: Sequence[int], on_token: OnToken, sampling: Any = None
    ) -> list[int]:
        for token in self.announces:
            self._pass(1.0)
            on_token(token)
        return self.gives


def session(gives: list[int], announces: list[int] | None = None, kind: str = "none") -> tuple[Session, list[Any]]:
    job = make_job(kind)
    engine = Scripted(job)
    engine.gives, engine.announces = gives, gives if announces is None else announces
    events: list[Any] = []
    return Session(job, engine, events.append), events


@pytest.mark.parametrize(
    ("gives", "announces", "stop", "words"),
    [
        ([1, 2], None, [], "asked for exactly 3 new tokens, the engine gave 2"),
        ([1, 2, 3, 4], None, [], "asked for exactly 3 new tokens, the engine gave 4"),
        ([1, 2, 3], [1, 2], [], "gave 3 tokens but announced 2"),
        ([1, 2, 3], [1, 2, 3, 3], [], "gave 3 tokens but announced 4"),
        ([], None, [9], "no token at all"),
    ],
)
def test_an_engine_that_gives_another_number_of_tokens_is_an_error(
    gives: list[int], announces: list[int] | None, stop: list[int], words: str
) -> None:
    one, events = session(gives, announces)
    with pytest.raises(RuntimeError, match=words):
        one.call("steady", 0, [5, 6], 3, stop)
    assert events == []


def test_an_engine_that_goes_on_past_the_cap_is_an_error() -> None:
    one, _ = session([7] * 10)
    with pytest.raises(RuntimeError):
        one.call("response", 0, [5, 6], 3, [1])


def test_a_call_is_one_event_after_its_last_token() -> None:
    one, events = session([7, 8, 9])
    call = one.call("steady", 1, [5, 6], 3)
    assert call.seconds == 3.0
    assert events == [
        {"event": "call", "call": "steady", "prompt": 1, "prompt_tokens": 2, "ids": [7, 8, 9], "times": [1.0, 2.0, 3.0]}
    ]
    assert one.tokens_in_phase == 3


class Timed(FakeEngine):
    """Of the world's time, so that settling is real."""

    virtual = False


def test_what_is_timed_begins_when_weighin_has_written_down_what_it_was_told() -> None:
    events: list[Any] = []
    one = Session(make_job("none"), Timed(make_job("none")), events.append)
    one.emit({"event": "x"})
    before = time.monotonic()
    one.settle()
    assert time.monotonic() - before >= 0.8 * SETTLE_SECONDS
    before = time.monotonic()
    one.settle()  # nothing was said since
    assert time.monotonic() - before < SETTLE_SECONDS
    assert events == [{"event": "x"}]


def test_virtual_time_need_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept {seconds} s"))
    one, _ = session([7])
    one.emit({"event": "x"})
    one.settle()


# ---- the probes together


def test_every_key_is_declared_once_and_says_which_way_is_better() -> None:
    declared = Counter(key for probe in probes.everything() for key in probe.measures)
    assert [key for key, times in declared.items() if times > 1] == []
    for key, measure in probes.measures().items():
        assert measure.better in ("lower", "higher", ""), key
        assert measure.label and (measure.unit or "ratio" in key), key
        higher = ("per_second", "agreement", "accuracy")
        expected = "" if key == "clock_mhz" else "higher" if any(word in key for word in higher) else "lower"
        assert measure.better == expected, key


@pytest.mark.parametrize("kind", ["speed", "cold", "responses", "answer"])
def test_only_declared_keys_are_ever_emitted(kind: str) -> None:
    events = work(make_job(kind))
    assert events[-1]["event"] == "done"
    keys = {e["key"].partition("@")[0] for e in events if e["event"] in ("sample", "unknown")}
    assert keys <= set(probes.measures())


def test_loading_comes_first() -> None:
    for kind in ("speed", "cold", "responses", "answer"):
        phases = [e["phase"] for e in work(make_job(kind)) if e["event"] == "phase"]
        assert phases[:2] == ["import", "load"]


def test_the_figures_of_a_speed_job() -> None:
    events = work(make_job())
    assert samples(events, "import_seconds") == pytest.approx([0.5])
    assert samples(events, "load_seconds") == pytest.approx([1.0])
    assert samples(events, "first_answer_seconds") == pytest.approx([0.003 + 0.15])
    assert samples(events, "ready_seconds") == pytest.approx(
        [0.5 + 1.0 + 0.003 + 0.05]
    )  # from the start of the process
    # the prompts take turns, beginning with the one that the first call did not have
    assert samples(events, "first_token_seconds") == pytest.approx([0.052, 0.053])
    assert samples(events, "prefill_tokens_per_second") == pytest.approx([2 / 0.052, 3 / 0.053])
    assert samples(events, "decode_tokens_per_second") == pytest.approx([20.0, 20.0])
    assert samples(events, "prefill_tokens_per_second@4") == pytest.approx([4 / 0.054])
    assert samples(events, "decode_tokens_per_second@4") == pytest.approx([20.0])
    assert samples(events, "peak_ram_bytes")[0] > 1e6


def test_a_slow_answer_is_not_repeated_and_a_slow_long_prompt_not_warmed_up() -> None:
    calls = [e["call"] for e in work(make_job(options={"token": "10"})) if e["event"] == "call"]
    assert calls == ["first", "steady", "length_first"]
    calls = [e["call"] for e in work(make_job()) if e["event"] == "call"]
    assert calls == ["first", "steady", "steady", "length_first", "length"]


def test_without_a_gpu_its_memory_is_unknown_with_the_reason() -> None:
    events = work(make_job())
    reasons = {e["key"]: e["reason"] for e in events if e["event"] == "unknown"}
    assert reasons["peak_vram_bytes"] == reasons["peak_vram_driver_bytes"] == "it uses no GPU"
    assert samples(events, "peak_vram_bytes") == []


def test_versions_are_those_that_are_really_there() -> None:
    import importlib.metadata
    import platform

    found = next(e["versions"] for e in work(make_job()) if e["event"] == "versions")
    assert found == {"python": platform.python_version(), "click": importlib.metadata.version("click")}


def test_an_error_of_the_engine_is_told_in_one_line_with_its_phase() -> None:
    last = work(make_job(options={"fail": "load.error"}))[-1]
    assert last == {
        "event": "failed", "status": "failed", "phase": "load", "reason": "RuntimeError: scripted: failed at load",
    }  # fmt: skip
    assert worker.explain(ValueError("\n\n  first \nsecond")) == "ValueError: first"
    assert worker.explain(ValueError()) == "ValueError"
    assert len(worker.explain(ValueError("x" * 10**6))) <= worker.REASON_LENGTH


# ---- the disk


def test_asking_the_system_to_forget_a_file_harms_nothing(tmp_path: Path) -> None:
    file, empty = tmp_path / "model.safetensors", tmp_path / "empty.safetensors"
    file.write_bytes(b"weights" * 1000)
    empty.touch()
    before = file.stat()
    evict([file, empty])
    evict([])
    assert file.read_bytes() == b"weights" * 1000
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_the_size_on_disk_is_of_what_the_contender_needs(tmp_path: Path) -> None:
    for folder, size in (("model", 100), ("prepared", 7)):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").write_bytes(b"x" * size)
        (tmp_path / folder / "config.json").write_bytes(b"{}")
    model = tmp_path / "model"
    own = make_job(model_path=str(model), weight_files=[str(model / "model.safetensors")])
    assert weight_files(own) == [model / "model.safetensors"]
    assert samples(work(own), "disk_bytes") == [100.0]  # the weights alone
    made = make_job(model_path=str(model), weight_files=own.weight_files, prepared=str(tmp_path / "prepared"))
    assert sorted(f.name for f in weight_files(made)) == ["config.json", "model.safetensors"]
    assert samples(work(made), "disk_bytes") == [9.0]  # all that was made for it
    assert samples(work(make_job()), "disk_bytes") == [0.0]


def test_bytes_read_only_grow() -> None:
    first, second = bytes_read(), bytes_read()
    if Path("/proc/self/io").exists() and first is not None:
        assert second is not None and second >= first
