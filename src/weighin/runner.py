"""One worker per contender, round and job: started fresh, listened to, limited in time, and always gone at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from weighin import cache
from weighin.engines import Job
from weighin.environments import Environment
from weighin.pressure import Pressure, snapshot
from weighin.probes.memory import PRIVATE_GROUP
from weighin.system_files import ROOT, groups

BOOT = "import sys; sys.path[:0] = [sys.argv[1]]; sys.path += sys.argv[2:]; from weighin.worker import main; main()"
DEFAULT_LIMITS = {
    "start": 120.0,
    "import": 300.0,
    "prepare": 7200.0,
    "load": 1800.0,
    "cold_token": 1800.0,
    "first_answer": 5400.0,  # 50 tokens of a model that pages from disk take up to an hour
    "answers": 3600.0,
    "prompt": 1800.0,
    "response": 1800.0,
    "samples": 3600.0,
    "score": 7200.0,
    "tasks": 86400.0,
}
OTHER_LIMIT = 1800.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
SECRET_NAMES = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "CREDENTIAL", "PRIVATE_KEY")
LONGEST_EVENT = 64 * 2**20
LOG_TAIL = 1500


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended."""

    status: str
    phase: str | None = None
    reason: str | None = None
    remedy: str | None = None
    seconds: float
    pressure: dict[str, Any] | None = None


def run(
    job: Job,
    environment: Environment,
    log: Path,
    limits: dict[str, float],
    on_event: Callable[[dict[str, Any]], None],
    *,
    private_group: bool = False,
    channel: int | None = None,
) -> Outcome:
    """Start a worker, hand it the job, pass on its events, and say how it ended. Blocks; never polls."""
    before, cpu_before = snapshot(), _children_cpu()
    began = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    receive, send = os.pipe()
    last: dict[str, Any] = {"phase": "start"}
    ended: dict[str, Any] | None = None
    late: str | None = None
    with log.open("ab") as output:
        output.write(f"--- {job.contender}, round {job.round}, {job.kind}\n".encode())
        output.flush()
        log_start = output.tell()
        process = subprocess.Popen(
            [environment.python, "-I", "-c", BOOT, str(cache.worker_copy()), *environment.paths],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(send,) if channel is None else (send, channel),
            env=worker_environment(job.threads),
            start_new_session=True,
        )
        os.close(send)
        group = _make_group(process.pid) if private_group else None
        try:
            _hand_over(process, dataclasses.replace(job, spawned_at=began, channel=channel), send)
            for event in _events(receive, process.pid, last, limits):
                if event["event"] == "timeout":
                    late = event["reason"]
                elif event["event"] in ("done", "failed"):
                    ended = event
                else:
                    on_event(event)
        finally:
            os.close(receive)
            _kill_group(process)
            _remove_group(group)
    wall = seconds = time.monotonic() - began
    if ended and ended.get("virtual_seconds") is not None:
        seconds = float(ended["virtual_seconds"])
    pressure = _pressure(before, wall, _children_cpu() - cpu_before)
    if ended and ended["event"] == "done":
        return Outcome(status="ok", seconds=seconds, pressure=pressure)
    verdict = _explain(ended, late, process.returncode, last["phase"], pressure, log, log_start)
    return Outcome(seconds=seconds, pressure=pressure, **verdict)


def _pressure(before: Pressure | None, wall: float, worker_cpu: float) -> dict[str, Any] | None:
    """What the kernel counted while the job ran, beside what the worker itself used."""
    after = snapshot()
    if after is None or before is None:
        return None
    return {**msgspec.to_builtins(after.since(before)), "wall_seconds": wall, "worker_cpu_seconds": worker_cpu}


def _children_cpu() -> float:
    """Processor seconds of the workers that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def worker_environment(threads: int) -> dict[str, str]:
    """The worker's variables: the user's, less secrets, with the same number of threads for every engine."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key == "TOKENIZERS_PARALLELISM" or not any(name in key.upper() for name in SECRET_NAMES)
    }
    return {**kept, **dict.fromkeys(THREAD_VARIABLES, str(threads))}


def limit_of(phase: str, limits: dict[str, float]) -> float:
    """The seconds a phase may take; `response_2` and `prompt_512` are kinds of `response` and `prompt`."""
    return limits.get(phase, limits.get(phase.rpartition("_")[0], OTHER_LIMIT))


def _hand_over(process: subprocess.Popen[bytes], job: Job, events: int) -> None:
    assert process.stdin is not None
    # A worker that is gone already is reported by its exit.
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps({**dataclasses.asdict(job), "events": events}).encode())


def _events(receive: int, pid: int, last: dict[str, Any], limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """The worker's events until it closes the pipe, ends, or takes too long over a phase."""
    os.set_blocking(receive, False)
    poll = select.poll()
    poll.register(receive, select.POLLIN)
    # The end of the process is watched too: a child of the worker could hold the pipe open.
    pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    buffer = b""
    limit = limit_of("start", limits)
    deadline = time.monotonic() + limit
    try:
        while True:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                yield {"event": "timeout", "reason": f"{last['phase']} took longer than its limit of {limit:g} s"}
                return
            open_, chunk = _drain(receive)
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            if len(buffer) > LONGEST_EVENT:
                yield {
                    "event": "failed",
                    "status": "failed",
                    "phase": last["phase"],
                    "reason": "an event of over 64 MiB",
                }
                return
            for line in lines:
                event = json.loads(line)
                if event["event"] == "phase":
                    last["phase"] = event["phase"]
                    limit = limit_of(event["phase"], limits)
                    deadline = time.monotonic() + limit
                yield event
            if not open_ or any(fd == pidfd for fd, _ in ready):
                return
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _drain(receive: int) -> tuple[bool, bytes]:
    """What the pipe holds now, and whether it is still open."""
    chunks: list[bytes] = []
    while True:
        try:
            chunk = os.read(receive, 1 << 16)
        except BlockingIOError:
            return True, b"".join(chunks)
        if not chunk:
            return False, b"".join(chunks)
        chunks.append(chunk)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Nothing of a worker outlives its job, whatever it started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5 if process.poll() is None else 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _make_group(pid: int) -> Path | None:
    """A control group for one worker and all that it starts, so that their memory is counted together; if we may."""
    for parent in groups(ROOT, "memory")[:1]:
        group = parent / f"{PRIVATE_GROUP}{pid}"
        try:
            group.mkdir()
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            _remove_group(group)
            return None
        return group
    return None


def _remove_group(group: Path | None) -> None:
    for _ in range(20):
        if group is None or not group.exists():
            return
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)  # its processes are killed, and gone in a moment


def _explain(
    ended: dict[str, Any] | None,
    late: str | None,
    code: int,
    phase: str,
    pressure: dict[str, Any] | None,
    log: Path,
    log_start: int,
) -> dict[str, Any]:
    """Status, phase, reason and remedy of a job that did not end well."""
    memory_remedy = "free memory, choose a smaller precision, or run it on a machine with more"
    if ended is not None:
        status = ended["status"]
        remedy = memory_remedy if status == "out_of_memory" else f"see {log}"
        return {"status": status, "phase": ended["phase"], "reason": ended["reason"], "remedy": remedy}
    if late is not None:
        return {
            "status": "timeout",
            "phase": phase,
            "reason": late,
            "remedy": f"raise it with --limit {phase.rstrip('_0123456789')}=SECONDS, or drop this contender",
        }
    killed_for_memory = bool(pressure and (pressure.get("oom_kills") or pressure.get("oom_kills_system")))
    if code == -signal.SIGKILL and killed_for_memory:
        return {
            "status": "out_of_memory",
            "phase": phase,
            "reason": "the system killed the worker because memory ran out",
            "remedy": memory_remedy,
        }
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return {
        "status": "failed",
        "phase": phase,
        "reason": f"the worker {how} without a word{_tail(log, log_start)}",
        "remedy": f"see {log}",
    }


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - LOG_TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.strip()]
    return f"; its last line was: {said[-1].strip()}" if said else ""
