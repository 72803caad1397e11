"""The scales weigh themselves: an engine that does nothing, in a worker like any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weighin import cache, engines, environments, instrument, runner
from weighin.engines.null import NullEngine
from weighin.measurements import Comparison
from weighin.plan import Contender, Instrument

FOUND = Instrument(seconds_per_token=2e-6, seconds_per_run=0.3)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often it was measured."""
    times: list[int] = []

    def measure() -> Instrument:
        times.append(1)
        return FOUND

    monkeypatch.setattr(instrument, "measure", measure)
    return times


def test_a_token_and_a_run_cost_little() -> None:
    found = instrument.measure()
    assert found is not None
    assert 0 < found.seconds_per_token < 1e-3
    assert 0 < found.seconds_per_run < 60


def test_it_is_measured_once_for_a_machine(own_cache: Path, counted: list[int]) -> None:
    assert instrument.remembered("here") == instrument.remembered("here") == FOUND
    assert len(counted) == 1
    instrument.remembered("there")
    assert len(counted) == 2
    (file,) = own_cache.rglob("instrument-here.json")
    assert msgspec.json.decode(file.read_bytes(), type=Instrument) == FOUND


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"seconds_per_token": "x"}', b"\xff\x00"])
def test_a_damaged_file_is_measured_again_and_replaced(own_cache: Path, counted: list[int], content: bytes) -> None:
    file = cache.worker_copy() / "instrument-here.json"
    file.write_bytes(content)
    assert instrument.remembered("here") == FOUND
    assert len(counted) == 1
    assert instrument.remembered("here") == FOUND
    assert len(counted) == 1


def test_other_code_is_measured_anew(own_cache: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    instrument.remembered("here")
    (own_cache / "newer").mkdir()
    monkeypatch.setattr(cache, "worker_copy", lambda: own_cache / "newer")
    instrument.remembered("here")
    assert len(counted) == 2


@pytest.mark.parametrize("status", ["failed", "ok"])
def test_a_worker_that_fails_or_says_nothing_gives_none_and_is_not_remembered(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(runner, "run", lambda *_, **__: runner.Outcome(status=status, seconds=1.0))
    assert instrument.measure() is None
    assert instrument.remembered("here") is None
    assert list(own_cache.rglob("instrument-*")) == []


def test_a_comparison_carries_it(fakes: Callable[..., Comparison]) -> None:
    found = fakes("fp32@cpu").instrument
    assert found is not None
    assert 0 < found.seconds_per_token < 1e-3


def test_the_null_engine_is_never_offered_and_gives_what_is_asked() -> None:
    anything: Any = None
    assert engines.everything()["null"] is NullEngine
    assert NullEngine.hidden
    assert NullEngine.contenders(anything, anything) == []
    contender = Contender.parse("null:none@cpu")
    settings = NullEngine.settings(contender, anything, anything)
    assert NullEngine.weight_bytes(contender, settings, anything) == 0
    assert isinstance(environments.for_contender(NullEngine, contender, anything), environments.Environment)
    engine = NullEngine(anything)
    engine.import_packages()
    engine.load()
    seen: list[int] = []
    assert engine.generate([1, 2], 5, [], seen.append) == [0] * 5 == seen
