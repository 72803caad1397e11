"""The kernel's files: /proc, /sys and the container's groups, read with care: what is not there is None."""

import os
from pathlib import Path

ROOT = Path("/")  # every reader takes another one, so that a test can show it another machine
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number


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
