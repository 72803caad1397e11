"""Energy per token: the GPU's own counter, or the processor's (RAPL), where they can be read."""

from __future__ import annotations

from pathlib import Path

from weighin import nvml
from weighin.probes import Measure, Probe, Session

RAPL = Path("/sys/class/powercap")


class EnergyProbe(Probe):
    jobs = ("speed",)
    measures = {  # noqa: RUF012 - a ClassVar of the contract
        "energy_joules_per_token": Measure("energy per token while it answers", "J/token", "lower"),
    }

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.on_gpu = bool(session.job.settings.get("uses_gpu"))
        self.before: float | None = None
        self.reason = ""

    def phase_begins(self, phase: str) -> None:
        if phase == "answers":
            self.before, self.reason = self._joules()

    def phase_ended(self, phase: str) -> None:
        if phase != "answers":
            return
        after, reason = self._joules()
        if self.before is None or after is None:
            self.session.unknown("energy_joules_per_token", self.reason or reason)
        elif after < self.before:
            self.session.unknown("energy_joules_per_token", "the energy counter began anew in between")
        elif self.session.tokens_in_phase:
            self.session.sample("energy_joules_per_token", (after - self.before) / self.session.tokens_in_phase)

    def _joules(self) -> tuple[float | None, str]:
        return _gpu_joules(self.session.job.device) if self.on_gpu else _processor_joules()


def _gpu_joules(device: str) -> tuple[float | None, str]:
    """Of the GPUs that it uses, since the driver was loaded."""
    try:
        library, handles = nvml.used(device)
        return sum(library.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1000, ""
    except Exception as error:  # NVML fails in many ways: not installed, not permitted, not supported
        return None, f"NVML gives no energy ({type(error).__name__}: {error})"


def _processor_joules() -> tuple[float | None, str]:
    """Of all processor packages. Root alone may read it as a rule, and a virtual machine has none."""
    packages = [p for p in sorted(RAPL.glob("*-rapl:*")) if p.name.count(":") == 1]
    if not packages:
        return None, "this machine shows no energy counter (RAPL), as virtual machines do not"
    try:
        return sum(int((package / "energy_uj").read_text()) for package in packages) / 1e6, ""
    except (OSError, ValueError) as error:
        return None, f"the energy counter (RAPL) cannot be read: {error}"


PROBE = EnergyProbe
