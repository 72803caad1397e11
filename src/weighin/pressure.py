"""How busy the machine was while a job ran: the kernel's counters, before and after."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weighin.system_files import ROOT, groups, number, read_text, table


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """Counters that only grow; two snapshots tell whether the machine was busy in between. None: not readable here."""

    cpu_some_us: int | None = None  # time in which some task waited for a core
    memory_some_us: int | None = None
    io_some_us: int | None = None
    steal_jiffies: int | None = None  # taken by the hypervisor, of total_jiffies
    total_jiffies: int | None = None
    busy_jiffies: int | None = None  # of all processes, ours among them
    throttled: int | None = None  # times our container's CPU quota stopped it
    throttled_us: int | None = None
    oom_kills: int | None = None  # in our container
    oom_kills_system: int | None = None

    def since(self, earlier: Pressure) -> Pressure:
        """What happened after `earlier`."""
        pairs = {name: (getattr(self, name), getattr(earlier, name)) for name in self.__struct_fields__}
        return Pressure(**{k: None if None in pair else max(0, pair[0] - pair[1]) for k, pair in pairs.items()})


def snapshot(root: Path = ROOT) -> Pressure | None:
    """The counters now; None where the system has none of them (macOS)."""
    proc = root / "proc"
    some = {}
    for what in ("cpu", "memory", "io"):
        line = (read_text(proc / "pressure" / what) or "").partition("\n")[0]
        some[f"{what}_some_us"] = number(line.rpartition("total=")[2]) if line.startswith("some ") else None
    # user nice system idle iowait irq softirq steal; the guest times after them are already in user
    jiffies = [int(n) for n in (read_text(proc / "stat") or "").partition("\n")[0].split()[1:9] if n.isdecimal()]
    # A quota above ours stops us too; v1 counts nanoseconds.
    cpu = [t for t in (table(group / "cpu.stat") for group in groups(root, "cpu")) if "nr_throttled" in t]
    throttled_us = [t["throttled_usec"] if "throttled_usec" in t else t.get("throttled_time", 0) // 1000 for t in cpu]
    # Our own group only: v2 counts the groups below it, and those above it count our neighbours.
    events = [table(g / f) for g in groups(root, "memory") for f in ("memory.events", "memory.oom_control")]
    found = Pressure(
        **some,
        steal_jiffies=jiffies[7] if len(jiffies) == 8 else None,
        total_jiffies=sum(jiffies) if len(jiffies) == 8 else None,
        busy_jiffies=sum(jiffies[:3] + jiffies[5:7]) if len(jiffies) == 8 else None,
        throttled=sum(t["nr_throttled"] for t in cpu) if cpu else None,
        throttled_us=sum(throttled_us) if cpu else None,
        oom_kills=next((t["oom_kill"] for t in events if "oom_kill" in t), None),
        oom_kills_system=table(proc / "vmstat").get("oom_kill"),
    )
    return None if found == Pressure() else found
