"""Memory: the kernel's own high-water mark of the process, and the device's.

Sampling misses short peaks; VmHWM cannot. (ru_maxrss would inherit the peak of whoever started the process.)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from weighin.probes import Measure, Probe, Session

PRIVATE_GROUP = "weighin-"  # how the control group of one job is named


class MemoryProbe(Probe):
    jobs = ("speed",)
    measures = {  # noqa: RUF012 - a ClassVar of the contract
        "peak_ram_bytes": Measure("peak RAM", "B", "lower"),
        "answer_ram_bytes": Measure("RAM while it answers", "B", "lower"),
        "peak_ram_anonymous_bytes": Measure("peak RAM that is not mapped files, sampled at phase ends", "B", "lower"),
        "peak_vram_bytes": Measure("peak VRAM, reserved by the engine", "B", "lower"),
        "peak_vram_allocated_bytes": Measure("peak VRAM, in tensors", "B", "lower"),
        "peak_vram_driver_bytes": Measure("VRAM of the process by the driver, at its end", "B", "lower"),
    }

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.anonymous: list[int] = []
        self.children: dict[int, int] = {}  # the peak of each process that the engine started, where it was seen

    def phase_ended(self, phase: str) -> None:
        status = _status()
        for child in _descendants(os.getpid()):
            self.children[child] = max(self.children.get(child, 0), _status(child).get("VmHWM", 0))
        if phase == "answers" and "VmRSS" in status:
            self.session.sample("answer_ram_bytes", float(status["VmRSS"]))
        if "RssAnon" in status:
            self.anonymous.append(status["RssAnon"])
        self.session.emit({"event": "memory", "phase": phase, **status, **self.session.engine.device_memory()})

    def finish(self) -> None:
        session = self.session
        session.sample("peak_ram_bytes", self._peak())
        if self.anonymous:
            session.sample("peak_ram_anonymous_bytes", float(max(self.anonymous)))
        else:
            session.unknown("peak_ram_anonymous_bytes", "this system does not tell anonymous memory from mapped files")
        device = session.engine.device_memory()
        if not device:
            reason = "the engine does not say" if session.job.settings.get("uses_gpu") else "it uses no GPU"
            for key in ("peak_vram_bytes", "peak_vram_allocated_bytes", "peak_vram_driver_bytes"):
                session.unknown(key, reason)
            return
        session.sample("peak_vram_bytes", float(device["reserved"]))
        session.sample("peak_vram_allocated_bytes", float(device["allocated"]))
        driver, reason = _driver_bytes()
        if driver is None:
            session.unknown("peak_vram_driver_bytes", reason)
        else:
            session.sample("peak_vram_driver_bytes", float(driver))

    def _peak(self) -> float | None:
        """This process's own peak; with children, their common group's, or else an upper bound that says so."""
        own = _status().get("VmHWM") or _peak_without_proc()
        ended = _ended_children_peak()
        if own is None or not (self.children or ended):
            return own
        if (group := _private_group_peak()) is not None:
            return float(group)
        bound = own + max(sum(self.children.values()), ended)
        evidence = "the peaks of the processes that it started are added up, whenever each of them was"
        self.session.emit({"event": "doubt", "type": "memory_upper_bound", "evidence": evidence})
        return bound


def _descendants(pid: int) -> list[int]:
    """The living processes below one, as far as the system shows them."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children] + [below for child in children for below in _descendants(int(child))]


def _ended_children_peak() -> float:
    """The largest peak of a child that has ended and was waited for."""
    try:
        import resource
    except ImportError:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit)


def _private_group_peak() -> int | None:
    """The peak of the control group that holds this job alone, if weighin could make one."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not Path(path).name.startswith(PRIVATE_GROUP):
                continue
            if "memory" in controllers.split(","):
                return int(Path(f"/sys/fs/cgroup/memory{path}/memory.max_usage_in_bytes").read_text())
            if not controllers:
                return int(Path(f"/sys/fs/cgroup{path}/memory.peak").read_text())
    except (OSError, ValueError):
        return None
    return None


def _status(pid: int | str = "self") -> dict[str, int]:
    """Bytes of VmHWM, VmRSS, RssAnon and RssFile of a process, where the system tells."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines)
    return {
        key: int(value.split()[0]) * 1024
        for key, _, value in fields
        if key in ("VmHWM", "VmRSS", "RssAnon", "RssFile") and value.split()
    }


def _peak_without_proc() -> float | None:
    """macOS has no /proc; its ru_maxrss is in bytes and belongs to the process alone."""
    try:
        import resource
    except ImportError:
        return None
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _driver_bytes() -> tuple[int | None, str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        found = [
            process.usedGpuMemory
            for index in range(pynvml.nvmlDeviceGetCount())
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
            if process.pid == os.getpid()
        ]
    except Exception as error:  # NVML fails in many ways: not installed, not permitted, another version
        return None, f"NVML does not say ({type(error).__name__}: {error})"
    if not found or any(value is None for value in found):
        return None, "NVML does not list this process (as in many containers)"
    return sum(found), ""


PROBE = MemoryProbe
