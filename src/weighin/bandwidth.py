"""How fast memory is read: the ceiling of every decode speed.

The reading happens in a child (`python -m weighin.bandwidth THREADS SECONDS`), so that the parent stays slim.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec

from weighin.errors import WeighinError
from weighin.system_files import available_memory, l3_cache

TIMEOUT_SECONDS = 20.0
MIB = 1 << 20
# Each of our threads reads alone; a BLAS that starts threads of its own would measure something else.
ONE_THREAD = {
    f"{library}_THREADS": "1" for library in ("OPENBLAS_NUM", "OMP_NUM", "MKL_NUM", "BLIS_NUM", "VECLIB_MAXIMUM")
}


class Cache(msgspec.Struct):
    """machine.json: by machine key, since a home folder may be shared by several machines."""

    memory_bandwidth: dict[str, Annotated[float, msgspec.Meta(gt=0)]]


class NotMeasured(WeighinError):
    """The bandwidth could not be measured; the message says why."""


def array_bytes(l3_bytes: int | None, available_bytes: int) -> int:
    """Much more than the last cache holds, yet never a load on a small machine."""
    return max(64 * MIB, min(max(256 * MIB, 8 * (l3_bytes or 0)), available_bytes // 8))


def measure(threads: int, seconds: float = 1.0) -> float:
    """Bytes per second that `threads` threads read together; raises NotMeasured with the reason."""
    # -P: a numpy.py in the folder the user happens to stand in is not ours.
    command = [sys.executable, "-P", "-m", "weighin.bandwidth", str(threads), str(seconds)]
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
            env={**os.environ, **ONE_THREAD},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"the bandwidth probe did not end within {TIMEOUT_SECONDS:g} s") from None
    except OSError as error:
        raise NotMeasured(f"the bandwidth probe did not start: {error}") from None
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotMeasured(f"the bandwidth probe failed (exit {child.returncode}): {last}")
    try:
        value = float(json.loads(child.stdout)["bytes_per_second"])
    except (ValueError, KeyError, TypeError):
        raise NotMeasured("the bandwidth probe gave no figure") from None
    if not 0 < value < float("inf"):
        raise NotMeasured(f"the bandwidth probe gave {value:g} bytes/s, which cannot be")
    return value


def remembered(key: str, threads: int, cache: Path | None, measure_now: bool) -> tuple[float | None, str | None]:
    """The figure that `cache` holds for the machine `key`, else a new one; where there is none, why."""
    figures: dict[str, float] = {}
    file = cache / "machine.json" if cache else None
    if file:
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # a broken cache is written anew
            figures = msgspec.json.decode(file.read_bytes(), type=Cache).memory_bandwidth
    if key in figures:
        return figures[key], None
    if not measure_now:
        return None, "not measured yet"
    try:
        value = measure(threads)
    except NotMeasured as error:
        return None, str(error)
    if file:
        # A cache that cannot be written costs a second next time, nothing else.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f"machine.json.{os.getpid()}")
            try:
                new.write_bytes(msgspec.json.encode(Cache(memory_bandwidth={**figures, key: value})))
                new.replace(file)
            finally:
                new.unlink(missing_ok=True)
    return value, None


def read(threads: int, seconds: float, total_bytes: int) -> float:
    """The child's work: best pass of all threads reading their own slice of `total_bytes`, in bytes per second."""
    import numpy as np

    length = total_bytes // 4 // threads
    start, end = threading.Barrier(threads + 1), threading.Barrier(threads + 1)
    sweeps = 1  # how often each pass reads the slices; 0 ends the threads
    failures: list[BaseException] = []

    def reader() -> None:
        try:
            # Filled by the thread that reads it: its pages are then real, and near its core.
            part: Any = np.ones(length, dtype=np.float32)
            while True:
                start.wait()
                if sweeps == 0:
                    return
                for _ in range(sweeps):
                    np.dot(part, part)  # releases the GIL, and reads faster than np.add.reduce on one core
                end.wait()
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            failures.append(error)
            start.abort()
            end.abort()

    def one_pass() -> float:
        began = time.perf_counter()  # before the start: this thread may be the last to wake
        start.wait()
        end.wait()
        return time.perf_counter() - began

    for _ in range(threads):
        threading.Thread(target=reader, daemon=True).start()
    best = 0.0
    try:
        one_pass()  # the first pass waits for the pages and fills the TLB
        # Passes of about 50 ms: waking the threads must not count, also where memory is very fast.
        sweeps = max(1, round(0.05 / max(one_pass(), 1e-6)))
        began = time.perf_counter()
        while best == 0.0 or time.perf_counter() - began < seconds:
            best = max(best, sweeps * threads * length * 4 / one_pass())
        sweeps = 0
        start.wait()
    except threading.BrokenBarrierError:
        raise NotMeasured(f"a reading thread failed: {failures[0] if failures else 'unknown'}") from None
    return best


def main(arguments: list[str]) -> None:
    threads, seconds = int(arguments[0]), float(arguments[1])
    l3, available = l3_cache(threads=threads), available_memory()
    size = array_bytes(l3, available)
    if size < 4 * (l3 or 0):
        # Half of it would come from the cache: here 64 MiB read 1.6 times as fast as 1 GiB did.
        sys.exit(f"{available // MIB} MiB of free memory are too few to read past {(l3 or 0) // MIB} MiB of cache")
    best = read(threads, seconds, size)
    print(json.dumps({"bytes_per_second": best, "threads": threads}))


if __name__ == "__main__":
    main(sys.argv[1:])
