"""Energy per token: from counters that are made up, and the reason where there is none."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_probes import make_job

from weighin.engines import OnToken
from weighin.engines.fake import FakeEngine
from weighin.probes import Session, energy
from weighin.probes.energy import EnergyProbe

KEY = "energy_joules_per_token"


def counters(folder: Path, **microjoules: int) -> None:
    for name, value in microjoules.items():
        place = folder / name.replace("_", ":").replace("rapl:", "-rapl:", 1)
        place.mkdir(parents=True, exist_ok=True)
        (place / "energy_uj").write_text(f"{value}\n")


class Hungry(FakeEngine):
    """Every token takes energy."""

    eats: Any = staticmethod(lambda: None)

    def generate(
        self, ids: Sequence[int], n: int, stop_ids: Sequence[int], on_token: OnToken, sampling: Any = None
    ) -> list[int]:
        new = super().generate(ids, n, stop_ids, on_token)
        for _ in new:
            self.eats()
        return new


def answers(eats: Any, *, gpu: bool = False) -> list[dict[str, Any]]:
    """What the probe says of a phase of three answers of four tokens, and of a load before it."""
    job = make_job(settings={"dependencies": [], "uses_gpu": gpu})
    engine = Hungry(job)
    engine.eats = eats
    events: list[dict[str, Any]] = []
    session = Session(job, engine, events.append)
    session.probes = [EnergyProbe(session)]
    for phase in ("load", "answers"):
        with session.phase(phase):
            for _ in range(3):
                session.call("steady", 0, [5], 4)
    return [e for e in events if e.get("key") == KEY]


@pytest.fixture
def rapl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(energy, "RAPL", tmp_path)
    return tmp_path


def test_all_packages_count_and_their_parts_do_not(rapl: Path) -> None:
    used = [0]

    def write() -> None:
        used[0] += 1
        mine = 2_000_000 * used[0]
        counters(rapl, intelrapl_0=7 + mine, intelrapl_1=9 + mine // 2, intelrapl_0_0=mine * 1000)

    write()
    assert {p.name for p in rapl.iterdir()} == {"intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"}
    (found,) = answers(write)
    assert found["event"] == "sample"
    assert found["value"] == pytest.approx(3.0)  # 2 J of one package and 1 J of the other, for each token


def test_a_counter_that_began_anew_is_no_figure(rapl: Path) -> None:
    counters(rapl, intelrapl_0=10**9)
    (found,) = answers(lambda: counters(rapl, intelrapl_0=5))
    # it had fallen during the load already: from 5 to 5 is no energy, but no restart either
    assert (found["event"], found["value"]) == ("sample", 0.0)
    counters(rapl, intelrapl_0=10**9)
    calls = [0]

    def falls_late() -> None:
        calls[0] += 1
        counters(rapl, intelrapl_0=10**9 if calls[0] < 20 else 5)

    (found,) = answers(falls_late)
    assert found == {"event": "unknown", "key": KEY, "reason": "the energy counter began anew in between"}


def test_a_machine_without_a_counter_says_so(rapl: Path) -> None:
    (found,) = answers(lambda: None)
    assert found["event"] == "unknown"
    assert "no energy counter (RAPL)" in found["reason"]


def test_a_counter_that_may_not_be_read_says_so(rapl: Path) -> None:
    (rapl / "intel-rapl:0" / "energy_uj").mkdir(parents=True)  # root may read every file, but no folder as one
    (found,) = answers(lambda: None)
    assert found["event"] == "unknown"
    assert "cannot be read" in found["reason"]


def test_a_counter_that_vanishes_in_between_has_a_reason(rapl: Path) -> None:
    counters(rapl, intelrapl_0=5)
    calls = [0]

    def vanish() -> None:
        calls[0] += 1
        if calls[0] == 20:
            (rapl / "intel-rapl:0" / "energy_uj").unlink()

    (found,) = answers(vanish)
    assert found["event"] == "unknown"
    assert found["reason"]


def stub_nvml(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    nvml = ModuleType("pynvml")
    everything = {
        "nvmlInit": lambda: None, "nvmlDeviceGetCount": lambda: 2, "nvmlDeviceGetHandleByIndex": lambda i: i,
        **functions,
    }  # fmt: skip
    for name, value in everything.items():
        setattr(nvml, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_a_gpus_energy_is_the_drivers(monkeypatch: pytest.MonkeyPatch, rapl: Path) -> None:
    millijoules = [1000, 50]

    def eat() -> None:
        millijoules[0] += 4000
        millijoules[1] += 500

    stub_nvml(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=lambda handle: millijoules[handle])
    (found,) = answers(eat, gpu=True)
    assert found["value"] == pytest.approx(4.0)  # of the GPU in use, not of its neighbour


def test_a_gpu_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> int:
        raise RuntimeError("Not Supported")

    stub_nvml(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=refuse)
    (found,) = answers(lambda: None, gpu=True)
    assert (found["event"], found["reason"]) == ("unknown", "NVML gives no energy (RuntimeError: Not Supported)")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (found,) = answers(lambda: None, gpu=True)
    assert found["reason"].startswith("NVML gives no energy (ModuleNotFoundError")
