"""Inside the process: load the engine, run the probes, emit events. The standard library alone at the top."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
from typing import Any

from weighin import engines, probes
from weighin.engines import Engine, Job

REASON_LENGTH = 2000
PR_SET_PDEATHSIG = 1


def run(job: Job, emit: probes.Emit) -> None:
    """Do one job; whatever goes wrong becomes an event."""
    engine: Engine = engines.everything()[job.engine](job)
    session = probes.Session(job, engine, emit)
    try:
        if job.kind == "prepare":
            assert job.out is not None
            with session.phase("prepare"):
                engine.prepare(job.out)
        else:
            for probe in session.probes:
                gc.collect()
                probe.run()
            for probe in session.probes:
                probe.finish()
        engine.close()
    except BaseException as error:
        traceback.print_exc()
        out_of_memory = engine.is_out_of_memory(error)
        emit(
            {
                "event": "failed",
                "status": "out_of_memory" if out_of_memory else "failed",
                "phase": session.current,
                "reason": explain(error),
            }
        )
        with contextlib.suppress(Exception):
            engine.close()
        return
    emit({"event": "done", "virtual_seconds": engine.clock() - job.spawned_at if engine.virtual else None})


def explain(error: BaseException) -> str:
    """An error of somebody else's code in one line: its kind and the first thing it says."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}"[:REASON_LENGTH] if said else type(error).__name__


def _end_with_parent() -> None:
    """A worker whose weighin was killed must not go on beside the next one. Linux alone can promise that."""
    if sys.platform == "linux":
        import ctypes
        import signal

        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """Read the job from standard input; write events to the descriptor that the job names, one JSON line each."""
    _end_with_parent()
    message: dict[str, Any] = json.load(sys.stdin)
    fd = int(message.pop("events"))
    os.set_inheritable(fd, False)

    def emit(event: dict[str, Any]) -> None:
        line = (json.dumps(event, allow_nan=True) + "\n").encode()
        while line:
            line = line[os.write(fd, line) :]

    run(Job(**message), emit)
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreters with big libraries can crash or hang while they take themselves down; everything is said.
    os._exit(0)


if __name__ == "__main__":
    main()
