"""The clock while it answers, and whether heat held it back: a figure that drifts has its cause here."""

from __future__ import annotations

import re
from pathlib import Path

from weighin import nvml
from weighin.probes import Measure, Probe

# NVML's bits for slowdowns by heat: by hardware, by software, by hardware for temperature
HEAT = 0x8 | 0x20 | 0x40


class ClocksProbe(Probe):
    jobs = ("speed",)
    measures = {  # noqa: RUF012 - a ClassVar of the contract
        "clock_mhz": Measure("clock at the end of the answers", "MHz"),
    }

    def phase_ended(self, phase: str) -> None:
        if phase != "answers":
            return
        session = self.session
        if session.job.settings.get("uses_gpu"):
            value, reason, held_back = _gpu(session.job.device)
            if held_back:
                evidence = f"the GPU was slowed down for heat (NVML's reasons {held_back:#x})"
                session.emit({"event": "doubt", "type": "drift", "evidence": evidence})
        else:
            value, reason = _processor()
        if value is None:
            session.unknown("clock_mhz", reason)
        else:
            session.sample("clock_mhz", value)


def _gpu(device: str) -> tuple[float | None, str, int]:
    try:
        library, handles = nvml.used(device)
        clocks = [library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM) for handle in handles]
        reasons = [library.nvmlDeviceGetCurrentClocksThrottleReasons(handle) for handle in handles]
    except Exception as error:  # NVML fails in many ways: not installed, not permitted, not supported
        return None, f"NVML gives no clock ({type(error).__name__}: {error})", 0
    return float(max(clocks)), "", next((r & HEAT for r in reasons if r & HEAT), 0)


def _processor() -> tuple[float | None, str]:
    try:
        speeds = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        speeds = []
    if not speeds:
        return None, "this system does not show the processor's clock"
    return sum(map(float, speeds)) / len(speeds), ""


PROBE = ClocksProbe
