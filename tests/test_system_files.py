"""The kernel's files: what is there is read, what is not is None."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_machine import GIB, MEMINFO, UNLIMITED_V1, v2, write

from weighin.system_files import (
    available_memory,
    cpu_quota,
    groups,
    l3_cache,
    machine_memory,
    memory_limit,
    number,
    parse_limit,
    parse_quota,
    read_text,
    table,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max", None), (UNLIMITED_V1, None), ("0", None), ("-1", None), ("", None), (None, None), ("4096", 4096)],
)
def test_a_memory_limit(text: str | None, limit: int | None) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [
        ("150000", "100000", 1.5), ("max", "100000", None), ("-1", "100000", None), ("100000", "0", None),
        ("100000", None, None), (None, None, None), ("x", "y", None),
    ],
)  # fmt: skip
def test_a_processor_quota(quota: str | None, period: str | None, cores: float | None) -> None:
    assert parse_quota(quota, period) == cores


@given(st.text())
def test_no_text_breaks_a_reader(text: str) -> None:
    assert number(text) is None or isinstance(number(text), int)
    assert parse_limit(text) is None or parse_limit(text) > 0
    assert parse_quota(text, text) in (None, 1.0)


def test_limits_of_both_kinds_of_groups(tmp_path: Path) -> None:
    one = write(tmp_path / "v1", {"memory.limit_in_bytes": str(GIB), "cpu.cfs_quota_us": "50000",
                                  "cpu.cfs_period_us": "100000"})  # fmt: skip
    two = write(tmp_path / "v2", {"memory.max": str(GIB), "cpu.max": "50000 100000"})
    assert memory_limit(one) == memory_limit(two) == GIB
    assert cpu_quota(one) == cpu_quota(two) == 0.5
    assert memory_limit(tmp_path) is None
    assert cpu_quota(tmp_path) is None


def test_groups_are_ours_and_those_above_innermost_first(tmp_path: Path) -> None:
    root = write(tmp_path, v2(**{"user/job/x": "", "user/x": ""}))
    top = tmp_path / "sys/fs/cgroup"
    assert groups(root, "memory") == [top / "user/job", top / "user", top]
    assert groups(tmp_path / "nothing", "memory") == []


def test_of_two_hierarchies_the_one_that_has_the_controller(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/box\n0::/other", "sys/fs/cgroup/memory/box/x": "", "sys/fs/cgroup/x": ""}
    root = write(tmp_path, files)
    assert groups(root, "memory") == [tmp_path / "sys/fs/cgroup/memory/box", tmp_path / "sys/fs/cgroup/memory"]
    assert groups(root, "cpu") == [tmp_path / "sys/fs/cgroup"]  # "other" is not mounted here


def test_memory(tmp_path: Path) -> None:
    root = write(tmp_path, MEMINFO)
    assert machine_memory(root) == (32 * GIB, GIB)
    assert available_memory(root) == 24 * GIB
    total, _ = machine_memory(tmp_path / "macos")  # from psutil
    assert 0 < available_memory(tmp_path / "macos") <= total


def test_a_container_over_its_limit_leaves_nothing_and_never_less(tmp_path: Path) -> None:
    files = v2(**{"user/job/memory.max": str(GIB), "user/job/memory.current": str(2 * GIB)})
    assert available_memory(write(tmp_path, MEMINFO | files)) == 0


def test_a_cache_that_is_shared_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    files = {}
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2")):
        at = f"sys/devices/system/cpu/cpu{cpu}/cache/index3/"
        files |= {at + "level": "3", at + "size": "1024K", at + "shared_cpu_list": shared}
        files |= {at.replace("index3", "index2") + "level": "2", at.replace("index3", "index2") + "size": "512K"}
    root = write(tmp_path, files)
    assert l3_cache(root) == 2 << 20
    assert l3_cache(root, threads=1) == 1 << 20
    assert l3_cache(tmp_path / "none") is None


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    assert read_text(tmp_path / "gone") is None
    assert read_text(tmp_path) is None
    (tmp_path / "odd").write_bytes(b"MemTotal: 5 kB\n\xff\xfe 7\nshort\nname x\n")
    assert table(tmp_path / "odd")["MemTotal"] == 5
    assert "name" not in table(tmp_path / "odd")
    assert table(tmp_path / "gone") == {}
