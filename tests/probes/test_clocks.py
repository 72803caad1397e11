"""The clock while it answers, and what heat did to it."""

from pathlib import Path
from typing import Any

import pytest
from test_energy import stub_nvml
from test_probes import make_job, samples, work

from weighin.probes import clocks


def of_gpu(clock: Any, reasons: Any, monkeypatch: pytest.MonkeyPatch, device: str = "auto") -> list[dict[str, Any]]:
    stub_nvml(
        monkeypatch, NVML_CLOCK_SM=1, nvmlDeviceGetClockInfo=clock, nvmlDeviceGetCurrentClocksThrottleReasons=reasons
    )
    return work(make_job(device=device, settings={"dependencies": [], "uses_gpu": True}))


def doubts_of(events: list[dict[str, Any]]) -> list[str]:
    return [e["evidence"] for e in events if e["event"] == "doubt" and e["type"] == "drift"]


def test_the_processors_clock_is_that_of_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\ncpu MHz\t\t: 1000.5\n\nprocessor : 1\ncpu MHz\t\t: 3000.5\nother MHz : 7\n")
    monkeypatch.setattr(clocks, "Path", lambda _: file)
    assert samples(work(make_job()), "clock_mhz") == [2000.5]
    file.write_text("processor : 0\n")
    reasons = {e["key"]: e["reason"] for e in work(make_job()) if e["event"] == "unknown"}
    assert reasons["clock_mhz"] == "this system does not show the processor's clock"
    file.unlink()
    assert samples(work(make_job()), "clock_mhz") == []


def test_the_gpus_clock_is_that_of_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    events = of_gpu(lambda handle, kind: [210, 1980][handle] if kind == 1 else 0, lambda handle: 0x1, monkeypatch)
    assert samples(events, "clock_mhz") == [1980.0]
    assert doubts_of(events) == []  # idle is no heat


def test_a_contender_on_one_gpu_is_not_told_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    clock = lambda handle, kind: [210, 1980][handle]  # noqa: E731
    assert samples(of_gpu(clock, lambda handle: 0, monkeypatch, "cuda"), "clock_mhz") == [210.0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert samples(of_gpu(clock, lambda handle: 0, monkeypatch, "cuda"), "clock_mhz") == [1980.0]


@pytest.mark.parametrize("bit", [0x8, 0x20, 0x40])
def test_a_gpu_that_heat_slowed_down_raises_the_doubt_of_a_drift(bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    events = of_gpu(lambda handle, kind: 1000, lambda handle: [0, 0x4 | bit][handle], monkeypatch)
    assert doubts_of(events) == [f"the GPU was slowed down for heat (NVML's reasons {bit:#x})"]


def test_a_gpu_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> int:
        raise RuntimeError("Not Supported")

    events = of_gpu(lambda handle, kind: 1000, refuse, monkeypatch)
    reasons = {e["key"]: e["reason"] for e in events if e["event"] == "unknown"}
    assert reasons["clock_mhz"] == "NVML gives no clock (RuntimeError: Not Supported)"
