"""Memory that is really used, by real workers, against what the probe says of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weighin import runner
from weighin.engines import Job
from weighin.engines.fake import FakeEngine
from weighin.environments import this_interpreter
from weighin.plan import Contender
from weighin.probes.memory import PRIVATE_GROUP
from weighin.system_files import ROOT, groups

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="VmHWM and control groups are Linux's")
MIB = 1 << 20
PEAK, ANONYMOUS = "peak_ram_bytes", "peak_ram_anonymous_bytes"


def measured(folder: Path, name: str) -> tuple[dict[str, float], list[str]]:
    """The figures of one real worker and the doubts that it raises, as compare.py would start it."""
    contender = Contender.parse(f"fake:{name}")
    job = Job(
        kind="speed", round=1, contender=str(contender), engine="fake", precision=contender.precision, device="cpu",
        options=contender.options, settings={"dependencies": []}, model_path="", weight_files=[], prepared=None,
        out=None, threads=1, prompts=[[5, 6]], lengths={}, stop_ids=[], max_new_tokens=3, response_cap=3, repeats=2,
        remote_code=False, allow_pickle=False, spawned_at=0.0,
    )  # fmt: skip
    events: list[dict[str, Any]] = []
    outcome = runner.run(
        job, this_interpreter(), folder / "log", runner.DEFAULT_LIMITS, events.append,
        private_group=FakeEngine.starts_processes(contender),
    )  # fmt: skip
    assert outcome.status == "ok", outcome
    found = {e["key"]: e["value"] for e in events if e["event"] == "sample"}
    return found, [e["type"] for e in events if e["event"] == "doubt"]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The control groups that were made; none of them is there after the test."""
    groups_made: list[Path] = []
    really = runner._make_group

    def make(pid: int) -> Path | None:
        group = really(pid)
        groups_made.extend([group] if group else [])
        return group

    monkeypatch.setattr(runner, "_make_group", make)
    yield groups_made
    assert [group for group in groups_made if group.exists()] == []


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What a worker takes that uses no memory of its own; the first one of all also compiles its modules."""
    measured(tmp_path_factory.mktemp("first"), "fp32@cpu")
    return measured(tmp_path_factory.mktemp("baseline"), "fp32@cpu")[0]


def test_a_peak_of_five_milliseconds_is_seen(tmp_path: Path, baseline: dict[str, float]) -> None:
    found, doubts = measured(tmp_path, "fp32@cpu+alloc=512")
    assert found[PEAK] == pytest.approx(baseline[PEAK] + 512 * MIB, rel=0.02)
    # it is gone when the phase ends, and so no part of what is sampled there
    assert found[ANONYMOUS] == pytest.approx(baseline[ANONYMOUS], rel=0.2)
    assert doubts == []


@pytest.mark.parametrize("size", [64, 200])
def test_half_as_much_is_half_as_much(tmp_path: Path, baseline: dict[str, float], size: int) -> None:
    found, _ = measured(tmp_path, f"fp32@cpu+alloc={size}")
    assert found[PEAK] == pytest.approx(baseline[PEAK] + size * MIB, rel=0.02)


def test_a_small_one_after_a_large_one_is_small(tmp_path: Path, baseline: dict[str, float]) -> None:
    large, _ = measured(tmp_path, "fp32@cpu+alloc=512")
    small, _ = measured(tmp_path, "fp32@cpu")
    assert large[PEAK] > 512 * MIB
    assert small[PEAK] == pytest.approx(baseline[PEAK], rel=0.05)


FAT = """
import json, sys
held = bytearray(600 << 20)
for start in range(0, len(held), 4096):
    held[start] = 1
import resource
import weighin
found = weighin.compare(
    sys.argv[1], ["fake:fp32@cpu"], prompts=["hello"], out=sys.argv[2], rounds=1, max_new_tokens=3,
    response_tokens=3, prompt_tokens=(),
)
print(json.dumps({"mine": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                  "worker": found.contenders[0].value("peak_ram_bytes")}))
"""


def test_a_worker_of_a_fat_program_is_not_fat(tmp_path: Path, tiny_model: Path, baseline: dict[str, float]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAT, str(tiny_model), str(tmp_path / "out")], capture_output=True, text=True,
        check=True, timeout=120, env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mine"] > 600 * MIB
    assert found["worker"] == pytest.approx(baseline[PEAK], rel=0.10)


def test_a_mapped_file_counts_but_not_as_anonymous(tmp_path: Path, baseline: dict[str, float]) -> None:
    found, _ = measured(tmp_path, "fp32@cpu+mapped=256")
    assert found[PEAK] == pytest.approx(baseline[PEAK] + 256 * MIB, rel=0.02)
    assert found[ANONYMOUS] == pytest.approx(baseline[ANONYMOUS], rel=0.2)
    assert found[ANONYMOUS] < 64 * MIB


def may_make_groups() -> bool:
    for group in groups(ROOT, "memory")[:1]:
        try:
            made = group / f"test-{os.getpid()}"
            made.mkdir()
            made.rmdir()
        except OSError:
            return False
        return True
    return False


def test_the_memory_of_a_child_is_counted_in_a_common_group(
    tmp_path: Path, baseline: dict[str, float], made: list[Path]
) -> None:
    if not may_make_groups():
        pytest.skip("this user may make no control group")
    found, doubts = measured(tmp_path, "fp32@cpu+fork=256")
    assert found[PEAK] == pytest.approx(baseline[PEAK] + 256 * MIB, rel=0.05)
    assert doubts == []
    (group,) = made
    assert group.name.startswith(PRIVATE_GROUP)
    assert not group.exists()


def test_a_worker_that_dies_leaves_no_group(tmp_path: Path, made: list[Path]) -> None:
    if not may_make_groups():
        pytest.skip("this user may make no control group")
    with pytest.raises(AssertionError, match="SIGKILL"):
        measured(tmp_path, "fp32@cpu+fork=16+fail=token1.kill")
    assert len(made) == 1
    assert not made[0].exists()


def test_without_a_group_it_is_an_upper_bound_that_says_so(
    tmp_path: Path, baseline: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_make_group", lambda pid: None)
    found, doubts = measured(tmp_path, "fp32@cpu+fork=256")
    assert doubts == ["memory_upper_bound"]
    truth = baseline[PEAK] + 256 * MIB
    assert found[PEAK] >= truth * 0.999
    # what is counted twice is the child's view of its parent, no more
    assert found[PEAK] <= truth + 1.5 * baseline[PEAK]
