"""Memory: how much there is, what the container leaves us, and how fast it is read (the ceiling of every decode speed).

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

TIMEOUT_SECONDS = 20.0
MIB = 1 << 20
ROOT = Path("/")  # every reader takes another one, so that a test can show it another machine
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number
# Each of our threads reads alone; a BLAS that starts threads of its own would measure something else.
ONE_THREAD = {
    f"{library}_THREADS": "1" for library in ("OPENBLAS_NUM", "OMP_NUM", "MKL_NUM", "BLIS_NUM", "VECLIB_MAXIMUM")
}


class Cache(msgspec.Struct):
    """machine.json: by machine key, since a home folder may be shared by several machines."""

    memory_bandwidth: dict[str, Annotated[float, msgspec.Meta(gt=0)]]


class NotMeasured(WeighinError):
    """The bandwidth could not be measured; the message says why."""


def parse_limit(text: str | None) -> int | None:
    """A cgroup memory limit in bytes; None for "max", v1's huge number, or anything that is not a limit."""
    value = number(text)
    return value if value is not None and 0 < value < UNLIMITED else None


def parse_quota(quota: str | None, period: str | None) -> float | None:
    """A cgroup CPU quota in cores; None for "max", -1, or anything that is not a quota."""
    run, every = number(quota), number(period)
    return run / every if run is not None and every is not None and run > 0 and every > 0 else None


def available_memory(root: Path = ROOT) -> int:
    """What can still be allocated: the machine's, or what the tightest container above us leaves."""
    available = table(root / "proc/meminfo").get("MemAvailable")
    if available is None:
        import psutil

        left = int(psutil.virtual_memory().available)
    else:
        left = available * 1024
    for group in groups(root, "memory"):
        limit = memory_limit(group)
        if limit is None:
            continue
        used = number(read_text(group / "memory.current") or read_text(group / "memory.usage_in_bytes")) or 0
        stat = table(group / "memory.stat")
        # Cached files give way to an allocation. v1 counts the groups below under total_*.
        total = "total_" if "total_cache" in stat else ""
        names = (f"{total}inactive_file", f"{total}active_file", "slab_reclaimable")
        reclaimable = sum(stat.get(name, 0) for name in names)
        left = min(left, limit - max(0, used - reclaimable))
    return max(0, left)


def l3_cache(root: Path = ROOT, threads: int | None = None) -> int | None:
    """All level-3 caches that the allowed cores reach, each counted once; or as many as `threads` fill at a time."""
    sizes = {}
    for core in allowed_cores():
        for index in (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
            size = number((read_text(index / "size") or "").removesuffix("K"))
            if read_text(index / "level") == "3" and size:
                sizes[read_text(index / "shared_cpu_list") or str(core)] = size * 1024
    return sum(sorted(sizes.values(), reverse=True)[:threads]) or None


def machine_memory(root: Path) -> tuple[int, int]:
    """The machine's memory and swap."""
    info = table(root / "proc/meminfo")
    if "MemTotal" in info:
        return info["MemTotal"] * 1024, info.get("SwapTotal", 0) * 1024
    import psutil

    return int(psutil.virtual_memory().total), int(psutil.swap_memory().total)


def memory_limit(group: Path) -> int | None:
    return parse_limit(read_text(group / "memory.max") or read_text(group / "memory.limit_in_bytes"))


def cpu_quota(group: Path) -> float | None:
    v1 = f"{read_text(group / 'cpu.cfs_quota_us')} {read_text(group / 'cpu.cfs_period_us')}"
    quota, _, period = (read_text(group / "cpu.max") or v1).partition(" ")
    return parse_quota(quota, period)


def groups(root: Path, controller: str) -> list[Path]:
    """The folders of our cgroup and of those above it, for one controller; innermost first."""
    ours = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        ours.update({name: path for name in names.split(",")})  # v2's name is ""
    name = controller if controller in ours else ""
    top, inside = root / "sys/fs/cgroup" / name, ours.get(name)
    if inside is None:
        return []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        mount, _, kind = (part.split() for part in line.partition(" - "))
        if len(mount) < 5 or len(kind) < 3 or kind[0] != ("cgroup" if name else "cgroup2"):
            continue
        if not name or name in kind[2].split(","):
            # A container may mount only its own part, under the path that the host knows it by.
            top = root / mount[4].lstrip("/")
            inside = inside.removeprefix(mount[3]) if inside.startswith(mount[3]) else "/"
            break
    parts = Path(inside.strip("/")).parts
    steps = [] if ".." in parts else parts
    return [p for n in range(len(steps), -1, -1) if (p := top.joinpath(*steps[:n])).is_dir()]


def allowed_cores() -> set[int]:
    # macOS has no affinity.
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def table(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as in /proc/meminfo and memory.stat."""
    rows = [line.replace(":", " ").split() for line in (read_text(path) or "").splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def read_text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


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
