"""How busy the machine was: the kernel's counters, of machines made up and of this one."""

import os
import sys
import time
from pathlib import Path

import pytest
from test_machine import v2, write

from weighin.pressure import Pressure, snapshot


def test_v2(tmp_path: Path) -> None:
    files = {f"proc/pressure/{k}": f"some avg10=0.00 total={n}\nfull total=9" for k, n in (("cpu", 5), ("io", 7))}
    files |= {"proc/stat": "cpu  1 2 3 4 5 6 7 8 100 100\ncpu0 1 1", "proc/vmstat": "nr_free 4\noom_kill 3"}
    stat = {"user/job/cpu.stat": "nr_throttled 2\nthrottled_usec 500", "user/cpu.stat": "nr_throttled 1\nx 1"}
    files |= v2(**stat, **{"user/job/memory.events": "low 0\noom_kill 1", "user/memory.events": "oom_kill 40"})
    assert snapshot(write(tmp_path, files)) == Pressure(
        cpu_some_us=5, io_some_us=7, steal_jiffies=8, total_jiffies=36, busy_jiffies=19, throttled=3, throttled_us=500,
        oom_kills=1, oom_kills_system=3,
    )  # fmt: skip


def test_v1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "2:memory:/a\n1:cpu:/",
        "sys/fs/cgroup/cpu/cpu.stat": "nr_throttled 4\nthrottled_time 7000000",
        "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
    }
    expected = Pressure(throttled=4, throttled_us=7000, oom_kills=2)
    assert snapshot(write(tmp_path, files)) == expected


def test_since() -> None:
    before = Pressure(cpu_some_us=10, oom_kills=1)
    after = Pressure(cpu_some_us=25, oom_kills=1, io_some_us=4)
    assert after.since(before) == Pressure(cpu_some_us=15, oom_kills=0)


def test_a_system_without_counters_has_none(tmp_path: Path) -> None:
    assert snapshot(tmp_path) is None


def test_a_line_of_another_shape_is_no_counter(tmp_path: Path) -> None:
    assert snapshot(write(tmp_path, {"proc/stat": "cpu 1 2 3", "proc/pressure/cpu": "full total=9"})) is None


def test_a_counter_that_began_anew_is_not_negative() -> None:
    assert Pressure(throttled=1).since(Pressure(throttled=5)) == Pressure(throttled=0)


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
def test_work_of_this_machine_is_counted_as_busy() -> None:
    before, cpu, end = snapshot(), time.process_time(), time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    after, used = snapshot(), time.process_time() - cpu
    assert before is not None and after is not None
    found = after.since(before)
    assert found.busy_jiffies is not None and found.total_jiffies is not None
    ticks = os.sysconf("SC_CLK_TCK")
    assert found.busy_jiffies / ticks >= used - 0.05  # the clock ticks in hundredths
    assert found.busy_jiffies <= found.total_jiffies
