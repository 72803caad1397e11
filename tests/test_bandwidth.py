import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin import bandwidth, machine, system_files

MIB = 1 << 20


@given(st.integers(min_value=1, max_value=(1 << 60) - 1))
def test_a_limit_is_read_back(value: int) -> None:
    assert system_files.parse_limit(f"{value}\n") == value


@given(st.one_of(st.integers(max_value=0), st.integers(min_value=1 << 60)).map(str) | st.sampled_from(["max", "", " "]))
def test_no_limit(text: str) -> None:
    assert system_files.parse_limit(text) is None


@given(st.none() | st.text(), st.none() | st.text())
def test_anything_is_a_sane_value_or_none(first: str | None, second: str | None) -> None:
    limit, quota = system_files.parse_limit(first), system_files.parse_quota(first, second)
    assert limit is None or 0 < limit < 1 << 60
    assert quota is None or quota > 0


@given(st.integers(1000, 10**9), st.integers(1000, 10**6))
def test_a_quota_is_in_cores(quota: int, period: int) -> None:
    assert system_files.parse_quota(str(quota), str(period)) == quota / period
    assert system_files.parse_quota("max", str(period)) is None
    assert system_files.parse_quota(str(-quota), str(period)) is None
    assert system_files.parse_quota(str(quota), "0") is None


@given(st.none() | st.integers(0, 1 << 31), st.integers(0, 1 << 42))
def test_the_array_outgrows_the_cache_but_not_the_machine(l3: int | None, available: int) -> None:
    size = bandwidth.array_bytes(l3, available)
    assert size >= 64 * MIB
    assert size == 64 * MIB or size <= available // 8
    assert size >= min(8 * (l3 or 0), available // 8)


def test_a_limit_already_exceeded_leaves_nothing_not_less(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("2000\n")
    assert system_files.available_memory(tmp_path) == 0


def test_a_real_child_gives_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module of the user's folder must not be taken for numpy.
    (tmp_path / "numpy.py").write_text("raise SystemExit('wrong numpy')")
    monkeypatch.chdir(tmp_path)
    assert bandwidth.measure(2, seconds=0.01) > 1e8


def test_a_figure_of_the_cache_is_not_one_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "l3_cache", lambda threads: 32 * MIB)
    monkeypatch.setattr(bandwidth, "available_memory", lambda: 700 * MIB)
    with pytest.raises(SystemExit, match="700 MiB of free memory are too few to read past 32 MiB of cache"):
        bandwidth.main(["1", "0.01"])


def test_a_thread_that_fails_ends_the_probe() -> None:
    with pytest.raises(bandwidth.NotMeasured, match="reading thread failed"):
        bandwidth.read(1, 0.01, 1 << 62)


def run(monkeypatch: pytest.MonkeyPatch, code: int = 0, out: str = "", err: str = "") -> None:
    result = SimpleNamespace(returncode=code, stdout=out, stderr=err)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: result)


@pytest.mark.parametrize(
    ("code", "out", "err", "reason"),
    [
        (1, "", "Traceback\nModuleNotFoundError: numpy", "ModuleNotFoundError: numpy"),
        (-9, "", "", "exit -9"),
        (0, "hello", "", "no figure"),
        (0, "{}", "", "no figure"),
        (0, '{"bytes_per_second": 0}', "", "cannot be"),
        (0, '{"bytes_per_second": NaN}', "", "cannot be"),
    ],
)
def test_a_failed_child_is_explained(
    monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str, reason: str
) -> None:
    run(monkeypatch, code, out, err)
    assert reason in (bandwidth.remembered("key", 1, None, True)[1] or "")


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("probe", 20)

    monkeypatch.setattr(subprocess, "run", hang)
    assert bandwidth.remembered("key", 1, None, True) == (None, "the bandwidth probe did not end within 20 s")


def test_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    value, reason = bandwidth.remembered("key", 1, None, True)
    assert value is None
    assert "did not start" in (reason or "")


class TestCache:
    @pytest.fixture
    def probes(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        asked: list[int] = []
        monkeypatch.setattr(bandwidth, "measure", lambda threads: asked.append(threads) or 30e9)
        return asked

    def test_measured_once(self, tmp_path: Path, probes: list[int]) -> None:
        cache = tmp_path / "new" / "cache"
        assert machine.look(cache, root=tmp_path).memory_bandwidth == 30e9
        assert machine.look(cache, root=tmp_path).memory_bandwidth == 30e9
        assert machine.look(cache, measure=False, root=tmp_path).memory_bandwidth == 30e9
        assert len(probes) == 1
        assert [path.name for path in cache.iterdir()] == ["machine.json"]

    def test_another_machine_is_measured_and_neither_forgotten(
        self, tmp_path: Path, probes: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for cores in ({0, 1}, {0}):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores, raising=False)
            machine.look(tmp_path, root=tmp_path)
        assert len(probes) == 2
        assert len(json.loads((tmp_path / "machine.json").read_text())["memory_bandwidth"]) == 2

    @pytest.mark.parametrize("text", ["", "{", "[]", "\0\xff", '{"memory_bandwidth": {"KEY": "fast"}}', "WRONG"])
    def test_corrupt_cache_is_written_anew(self, tmp_path: Path, probes: list[int], text: str) -> None:
        key = machine.look(measure=False, root=tmp_path).key
        bad = '{"memory_bandwidth": {"KEY": -5}}' if text == "WRONG" else text
        (tmp_path / "machine.json").write_text(bad.replace("KEY", key))
        assert machine.look(tmp_path, root=tmp_path).memory_bandwidth == 30e9
        assert json.loads((tmp_path / "machine.json").read_text()) == {"memory_bandwidth": {key: 30e9}}

    def test_cache_that_cannot_be_written(self, tmp_path: Path, probes: list[int]) -> None:
        (tmp_path / "file").write_text("")
        assert machine.look(tmp_path / "file" / "cache", root=tmp_path).memory_bandwidth == 30e9

    def test_not_asked(self, tmp_path: Path, probes: list[int]) -> None:
        found = machine.look(tmp_path, measure=False, root=tmp_path)
        assert (found.memory_bandwidth, found.reasons["memory_bandwidth"]) == (None, "not measured yet")
        assert probes == []
