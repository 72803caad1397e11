"""Typed warnings about what was measured, each with its evidence and its remedy. The list is closed."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import msgspec

from weighin import intervals
from weighin.machine import Machine

if TYPE_CHECKING:
    from weighin.measurements import Call, Measurement, Response
    from weighin.plan import Entry, Plan

REMEDIES = {
    "too_few_rounds": "give it more time with --budget, or a number with --rounds (six give a 95% interval)",
    "failed_round": "see the log; start a new comparison when the cause is gone",
    "machine_busy": "stop other programs and run again",
    "container_throttled": "raise the container's CPU quota, or run on a machine of your own",
    "paging": "choose a smaller precision, or a machine with more memory",
    "drift": "let the machine cool, set the performance governor, plug it in, and run again",
    "unstable": "stop other programs, or give it more rounds",
    "first_call_in_sample": "read the later answers: the engine was still warming up in its second call",
    "threads_differ": "set --threads to the cores that are really there",
    "gpu_occupied": "stop what holds the GPU's memory (in a notebook: delete the model, restart the kernel)",
    "warm_load_only": "the first load after a start of the machine is slower; empty the page cache to see it",
    "no_warm_load": "free memory, so that the model's files stay in the page cache",
    "tokens_differ": "the engine is not deterministic; compare its answers with care",
    "fp16_overflow": "use bf16, or fp32 on hardware without it: values above 65504 become infinite in fp16",
    "memory_upper_bound": "none is needed: the true peak is not above it",
    "cut_off": "raise --response-tokens",
    "repeats": "read the answer: a loop is a sign of a damaged model, or of a prompt that it was not tuned for",
    "empty_answer": "read the answer: the model ended at once; look at the chat template and the begin token",
    "tokenizer_differs": "a server of this engine would get other ids from the same text; check its tokenizer files",
    "template_differs": "a server of this engine would ask with another template; set it to the model's own",
    "begin_token_missing": "the model was trained with one; add it with --bos add",
    "begin_token_surplus": "the model was trained without one; leave it out with --bos none",
    "no_stop": "the tokenizer or generation_config.json names no end token; add eos_token_id there",
}
BUSY_SHARE = 0.05
PAGING_SHARE = 0.05
UNSTABLE_PROCESS = 1.5  # the fastest answer of one process against its slowest
UNSTABLE_SPREAD = 0.10  # between the quartiles of the processes, of their median
DRIFT_CHANGE = 0.05  # from the first to the last round
DRIFT_CHANCE = 0.01
SLOW_START = 1.10  # the first steady answer against the later ones of the same process
GPU_IDLE_SHARE, GPU_IDLE_BYTES = 0.02, 1.5e9  # what a driver and a desktop take


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A warning about a contender's figures."""

    type: str
    evidence: str
    remedy: str


def doubt(type_: str, evidence: str) -> Doubt:
    return Doubt(type=type_, evidence=evidence, remedy=REMEDIES[type_])


def of_machine(units: list[dict[str, Any]], machine: Machine) -> list[Doubt]:
    """What the kernel's counters say about a contender's timed jobs."""
    found = []
    timed = [u["pressure"] for u in units if u["job"] == "speed" and u.get("pressure")]
    others = others_share(timed, machine.cores_logical)
    if others is not None and others > BUSY_SHARE:
        found.append(doubt("machine_busy", f"other processes used {others:.0%} of the processors while it was timed"))
    steal = _share(timed, "steal_jiffies", "total_jiffies")
    if steal is not None and steal > BUSY_SHARE:
        found.append(doubt("machine_busy", f"{steal:.0%} of the processor time went to other machines (steal)"))
    throttled = sum(u.get("throttled_us") or 0 for u in timed) / 1e6
    wall = sum(u.get("wall_seconds") or 0.0 for u in timed)
    if wall and throttled / wall > BUSY_SHARE:
        found.append(doubt("container_throttled", f"the container's quota held it back for {throttled:.1f} s"))
    return found


def others_share(timed: list[dict[str, Any]], cores: int) -> float | None:
    """The share of all cores that neither idled nor worked for the worker."""
    if not timed or any(u.get("busy_jiffies") is None or u.get("wall_seconds") is None for u in timed):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    others: float = sum(u["busy_jiffies"] / ticks - u["worker_cpu_seconds"] for u in timed)
    wall: float = sum(u["wall_seconds"] for u in timed)
    return max(0.0, others) / (wall * cores)


def _share(timed: list[dict[str, Any]], part: str, whole: str) -> float | None:
    pairs = [(u[part], u[whole]) for u in timed if u.get(part) is not None and u.get(whole) is not None]
    total: int = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / total if total else None


def of_gpu(machine: Machine) -> list[Doubt]:
    """Whether somebody else held a GPU's memory before we began: a notebook, as a rule."""
    found = []
    for gpu in machine.gpus:
        used = gpu.memory_bytes - gpu.memory_free_bytes
        if used < max(GPU_IDLE_SHARE * gpu.memory_bytes, GPU_IDLE_BYTES):
            continue
        who = ", ".join(
            f"{p.name or 'a process'} (pid {p.pid}{', the session weighin was started from' if p.ours else ''})"
            for p in gpu.processes
        )
        evidence = f"{used / 1e9:.1f} of {gpu.memory_bytes / 1e9:.1f} GB of {gpu.name} were taken before the start"
        found.append(doubt("gpu_occupied", evidence + (f" by {who}" if who else "")))
    return found


def of_speed(by_round: Mapping[int, float], calls: Sequence[Call], machine: Machine) -> list[Doubt]:
    """What the timed answers say about themselves."""
    found = []
    values = [by_round[r] for r in sorted(by_round)]
    if 0 < len(values) < intervals.ENOUGH:
        found.append(
            doubt("too_few_rounds", f"{len(values)} of the {intervals.ENOUGH} processes that a 95% interval needs")
        )
    if (change := drift(values)) is not None:
        found.append(
            doubt("drift", f"decode speed went {change:+.0%} from the first rounds to the last{_power(machine)}")
        )
    elif (spread := quartile_spread(values)) is not None and spread > UNSTABLE_SPREAD:
        found.append(doubt("unstable", f"half of the processes lie {spread:.0%} of the median apart"))
    elif (within := spread_within(calls)) > UNSTABLE_PROCESS:
        found.append(doubt("unstable", f"answers of one process took up to {within:.1f} times as long as others"))
    if (slow := slow_start(calls)) is not None and slow > SLOW_START:
        found.append(doubt("first_call_in_sample", f"the first steady answer took {slow:.2f} times the later ones"))
    if differing := different_answers(calls):
        found.append(doubt("tokens_differ", f"the same prompt got different tokens in rounds {differing}"))
    return found


def _power(machine: Machine) -> str:
    known = [f"governor {machine.governor}"] if machine.governor else []
    known += ["on battery"] if machine.on_battery else []
    return f" ({', '.join(known)})" if known else ""


def quartile_spread(values: Sequence[float]) -> float | None:
    """The distance of the quartiles as a share of the median; None below four values."""
    if len(values) < 4:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / median(values)


def spread_within(calls: Sequence[Call]) -> float:
    """How many times its shortest steady answer a process's longest took, in the worst process."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for call in calls:
        if call.call == "steady" and len(call.times) > 1:
            by_round[call.round].append(call.times[-1] - call.times[0])
    return max((max(times) / min(times) for times in by_round.values() if min(times) > 0), default=1.0)


def drift(values: Sequence[float]) -> float | None:
    """The change over the rounds where a trend is beyond chance (Mann and Kendall's test) and over 5%; else None."""
    n = len(values)
    if n < intervals.ENOUGH:
        return None
    sign = sum((values[j] > values[i]) - (values[j] < values[i]) for i in range(n) for j in range(i + 1, n))
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    z = (abs(sign) - 1) / deviation
    third = max(1, n // 3)
    change = median(values[-third:]) / median(values[:third]) - 1
    return change if math.erfc(z / math.sqrt(2)) < DRIFT_CHANCE and abs(change) > DRIFT_CHANGE else None


def slow_start(calls: Sequence[Call]) -> float | None:
    """How many times the later answers to the same prompt the first steady one took; the least of the processes."""
    by_round: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.call == "steady":
            by_round[call.round].append(call)
    ratios = []
    for first, *later in by_round.values():
        if again := [call.times[-1] for call in later if call.prompt == first.prompt]:
            ratios.append(first.times[-1] / median(again))
    return min(ratios) if len(ratios) >= 2 else None


def different_answers(calls: Sequence[Call]) -> str:
    """The rounds whose greedy tokens differ from the first round's, as a text; empty if none do."""
    seen: dict[tuple[str, int | str], tuple[int, list[int]]] = {}
    rounds: set[int] = set()
    for call in calls:
        if call.call in ("first", "steady"):
            first_round, ids = seen.setdefault(("", call.prompt), (call.round, call.ids))
            if call.ids != ids:
                rounds |= {first_round, call.round}
    return ", ".join(map(str, sorted(rounds)))


def of_contender(
    plan: Plan,
    entry: Entry,
    ended: list[dict[str, Any]],
    measurements: Mapping[str, Measurement],
    responses: Sequence[Response],
    calls: Sequence[Call],
    effective: Mapping[str, Any],
) -> list[Doubt]:
    """Every doubt about one contender."""
    ok = [e for e in ended if e["status"] == "ok"]
    found = of_machine(ok, plan.machine)
    if entry.settings.get("uses_gpu"):
        found += of_gpu(plan.machine)
    found += of_speed(measurements["decode_tokens_per_second"].by_round(), calls, plan.machine)
    for end in ended:
        if end["status"] != "ok" and (end["job"] == "cold" or (end["job"] == "speed" and end["round"] > 1)):
            found.append(doubt("failed_round", f"{end['job']} in round {end['round']}: {end['reason']}"))
    read = measurements["disk_bytes_read_per_token"].value
    if read is not None and read > PAGING_SHARE * entry.weight_bytes:
        found.append(doubt("paging", f"it read {read / 1e6:.0f} MB from the disk for every token"))
    if any(e["job"] == "speed" for e in ok):
        found += _of_loads(measurements)
    threads = effective.get("threads")
    if threads is not None and threads != plan.machine.threads:
        found.append(
            doubt("threads_differ", f"it ran with {threads} threads, not the {plan.machine.threads} asked for")
        )
    elif plan.machine.threads > plan.machine.cores_allowed:
        evidence = f"{plan.machine.threads} threads on {plan.machine.cores_allowed} cores that are allowed here"
        found.append(doubt("threads_differ", evidence))
    if entry.settings["dtype"] == "float16" and plan.model.dtype == "bf16":
        found.append(doubt("fp16_overflow", "the checkpoint is bf16, whose range fp16 does not have"))
    found += _of_answers(responses)
    cut = [r.prompt + 1 for r in responses if r.finish == "length"]
    if cut and not plan.workload.stop_ids:
        found.append(doubt("no_stop", "no end token is known, so every answer ran to the cap"))
    elif cut:
        which = ", ".join(map(str, cut))
        found.append(doubt("cut_off", f"answer {which} reached the cap of {plan.workload.response_cap} tokens"))
    return found


def _of_answers(responses: Sequence[Response]) -> list[Doubt]:
    """Answers that say nothing or the same again and again."""
    types = {"repeats": "repeats", "empty": "empty_answer"}
    return [
        doubt(types[fault.type], f"answer {response.prompt + 1}: {fault.evidence}")
        for response in responses
        for fault in response.faults
        if fault.type in types
    ]


def _of_loads(measurements: Mapping[str, Measurement]) -> list[Doubt]:
    warm, cold = measurements["load_seconds"], measurements["load_cold_seconds"]
    if warm.value is None:
        return [doubt("no_warm_load", warm.reason or "no load was warm")]
    if cold.value is None:
        return [doubt("warm_load_only", f"no cold load was measured: {cold.reason}")]
    return []
