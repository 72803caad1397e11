"""Typed warnings about what was measured, each with its evidence and its remedy. The list is closed."""

from __future__ import annotations

from typing import Any

import msgspec

from weighin.machine import Machine

REMEDIES = {
    "too_few_rounds": "give it more time with --budget, or a number with --rounds (six give a 95% interval)",
    "failed_round": "see the log; start a new comparison when the cause is gone",
    "paging": "choose a smaller precision, or a machine with more memory",
    "machine_busy": "stop other programs and run again",
    "container_throttled": "raise the container's CPU quota, or run on a machine of your own",
    "gpu_occupied": "stop what holds the GPU's memory (in a notebook: delete the model, restart the kernel)",
    "no_warm_load": "free memory, so that the model's files stay in the page cache",
    "cut_off": "raise --response-tokens",
    "no_stop": "the tokenizer or generation_config.json names no end token; add eos_token_id there",
}
BUSY_SHARE = 0.05
PAGING_SHARE = 0.05
GPU_IDLE_SHARE, GPU_IDLE_BYTES = 0.02, 1.5e9  # what a driver and a desktop take


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A warning about a contender's figures."""

    type: str
    evidence: str
    remedy: str


def doubt(type_: str, evidence: str) -> Doubt:
    return Doubt(type=type_, evidence=evidence, remedy=REMEDIES[type_])


def of_gpu(machine: Machine) -> list[Doubt]:
    """Whether somebody else held a GPU's memory before we began: a notebook, as a rule."""
    found = []
    for gpu in machine.gpus:
        used = gpu.memory_bytes - gpu.memory_free_bytes
        if used < max(GPU_IDLE_SHARE * gpu.memory_bytes, GPU_IDLE_BYTES) and not gpu.processes:
            continue
        who = ", ".join(
            f"{p.name or 'a process'} (pid {p.pid}{', the session weighin was started from' if p.ours else ''})"
            for p in gpu.processes
        )
        evidence = f"{used / 1e9:.1f} of {gpu.memory_bytes / 1e9:.1f} GB of {gpu.name} were taken before the start"
        found.append(doubt("gpu_occupied", evidence + (f" by {who}" if who else "")))
    return found


def of_units(units: list[dict[str, Any]], threads: int) -> list[Doubt]:
    """What the machine's counters say about a contender's jobs."""
    found = []
    timed = [u for u in units if u["job"] == "speed" and u.get("pressure")]
    steal = _share(timed, "steal_jiffies", "total_jiffies")
    if steal is not None and steal > BUSY_SHARE:
        found.append(doubt("machine_busy", f"{steal:.0%} of the processor time was taken by other machines (steal)"))
    throttled = sum(u["pressure"].get("throttled_us") or 0 for u in timed) / 1e6
    seconds = sum(u["seconds"] for u in timed)
    if seconds and throttled / (seconds * threads) > BUSY_SHARE:
        found.append(doubt("container_throttled", f"the container's quota held it back for {throttled:.1f} s"))
    return found


def _share(units: list[dict[str, Any]], part: str, whole: str) -> float | None:
    parts = [u["pressure"].get(part) for u in units]
    wholes = [u["pressure"].get(whole) for u in units]
    if not units or None in parts or None in wholes or not sum(wholes):
        return None
    return float(sum(parts) / sum(wholes))
