"""Doubts: each one of the closed list is provoked, for real where a test can, and each has a remedy."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import psutil
import pytest
from conftest import cli, make_model
from hypothesis import given
from hypothesis import strategies as st

from weighin import doubts, engines, jobs, machine, measurements, worker
from weighin.compare import PLAN, rebuild
from weighin.doubts import (
    REMEDIES,
    different_answers,
    doubt,
    drift,
    of_gpu,
    of_machine,
    of_speed,
    others_share,
    quartile_spread,
    slow_start,
)  # fmt: skip
from weighin.engines import Job, OnToken
from weighin.engines.fake import FakeEngine
from weighin.machine import Gpu, GpuProcess, Machine
from weighin.measurements import Call, Comparison
from weighin.probes.disk import bytes_read, evict

Fakes = Callable[..., Comparison]
TICKS = os.sysconf("SC_CLK_TCK")
MINE = set(REMEDIES) - {"machine_busy", "container_throttled"}  # these depend on what else the machine does


@pytest.fixture(scope="module")
def here() -> Machine:
    found = machine.look(measure=False)
    return msgspec.structs.replace(found, cores_logical=4, governor=None, on_battery=None, gpus=())


def found_in(comparison: Comparison, which: int = 0) -> dict[str, str]:
    return {d.type: d.evidence for d in comparison.contenders[which].doubts}


def types(found: list[doubts.Doubt]) -> list[str]:
    return [d.type for d in found]


@pytest.mark.parametrize("kind", REMEDIES)
def test_every_doubt_has_a_remedy(kind: str) -> None:
    found = doubt(kind, "seen")
    assert (found.type, found.evidence) == (kind, "seen")
    assert len(found.remedy) > 10


def test_the_list_of_doubts_is_closed() -> None:
    with pytest.raises(KeyError):
        doubt("a_feeling", "x")


def test_remedies_name_options_that_exist() -> None:
    named = set(re.findall(r"--[a-z-]+", " ".join(REMEDIES.values())))
    offered = cli("compare", "--help").stdout
    assert named
    assert [option for option in named if option not in offered] == []


def test_a_run_without_a_fault_leaves_no_doubt(fakes: Fakes) -> None:
    assert not MINE & set(found_in(fakes("fp32@cpu+says=70.1", rounds=6)))


# ---- the machine: made-up counters


def unit(job: str = "speed", **pressure: float | None) -> dict[str, Any]:
    """Ten seconds on a machine of four cores."""
    quiet = {"wall_seconds": 10.0, "worker_cpu_seconds": 9.0, "busy_jiffies": 9 * TICKS}
    return {"job": job, "pressure": {**quiet, **pressure}}


def test_a_quiet_machine_raises_none(here: Machine) -> None:
    assert of_machine([unit(steal_jiffies=0, total_jiffies=1000, throttled_us=0)], here) == []
    assert of_machine([], here) == []


def test_other_processes_are_what_the_worker_did_not_use(here: Machine) -> None:
    # of 40 core-seconds 9 are the worker's
    assert of_machine([unit(busy_jiffies=(9 + 1.9) * TICKS)], here) == []
    (found,) = of_machine([unit(busy_jiffies=(9 + 10) * TICKS)], here)
    assert (found.type, found.evidence) == (
        "machine_busy", "other processes used 25% of the processors while it was timed",
    )  # fmt: skip
    # a loud unit beside three quiet ones of the same length is a quarter of them
    assert of_machine([unit(busy_jiffies=(9 + 7) * TICKS), *[unit()] * 3], here) == []
    # the worker may seem to use more than the machine: two clocks
    assert others_share([unit(busy_jiffies=8 * TICKS)["pressure"]], 4) == 0.0


def test_time_that_other_machines_took(here: Machine) -> None:
    assert of_machine([unit(steal_jiffies=50, total_jiffies=1000)], here) == []
    units = [unit(steal_jiffies=100, total_jiffies=1000), unit(steal_jiffies=200, total_jiffies=1000)]
    (found,) = of_machine(units, here)
    assert (found.type, found.evidence) == (
        "machine_busy", "15% of the processor time went to other machines (steal)",
    )  # fmt: skip


def test_a_container_that_was_held_back(here: Machine) -> None:
    assert of_machine([unit(throttled_us=490_000)], here) == []
    (found,) = of_machine([unit(throttled_us=510_000)], here)
    assert (found.type, found.evidence) == ("container_throttled", "the container's quota held it back for 0.5 s")


def test_only_timed_jobs_count(here: Machine) -> None:
    busy = {"steal_jiffies": 900, "total_jiffies": 1000, "throttled_us": 10**9, "busy_jiffies": 40 * TICKS}
    assert len(of_machine([unit(**busy)], here)) == 3
    assert of_machine([unit(job, **busy) for job in ("prepare", "responses", "cold")], here) == []


def test_counters_that_cannot_be_read_raise_no_doubt(here: Machine) -> None:
    unread = {"steal_jiffies": None, "total_jiffies": None, "throttled_us": None, "busy_jiffies": None}
    assert of_machine([unit(**unread)], here) == []
    assert of_machine([{"job": "speed", "pressure": None}, {"job": "speed"}], here) == []
    assert of_machine([unit(steal_jiffies=0, total_jiffies=0)], here) == []
    assert others_share([], 4) is None


# ---- the machine: for real


def others_now(seconds: float) -> float:
    """The share of the cores that is in use."""
    return float(psutil.cpu_percent(interval=seconds)) / 100


@pytest.fixture
def hog() -> Iterator[Callable[[], None]]:
    """Starts a process for every core that does nothing but spin."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        code = "import os, sys; sys.stdout.write('!'); sys.stdout.flush()\nwhile os.getppid() == int(sys.argv[1]): pass"
        for _ in range(os.cpu_count() or 1):
            process = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], stdout=subprocess.PIPE)
            started.append(process)
            assert process.stdout is not None
            process.stdout.read(1)

    yield start
    for process in started:
        process.kill()
        process.communicate()


SLEEPER = "fp32@cpu+real+token=0.02+load=0.1"  # answers 3 times 28 tokens: two seconds, nearly all of it asleep


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc/stat")
def test_a_real_hog_makes_the_machine_busy(fakes: Fakes, hog: Callable[[], None]) -> None:
    hog()
    found = found_in(fakes(SLEEPER, max_new_tokens=28))
    share = re.fullmatch(r"other processes used (\d+)% of the processors while it was timed", found["machine_busy"])
    assert share is not None
    assert int(share[1]) > 60


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc/stat")
def test_without_a_hog_it_is_not(fakes: Fakes, tmp_path: Path) -> None:
    for attempt in range(2):
        if others_now(0.5) > 0.02:
            continue
        found = found_in(fakes(SLEEPER, max_new_tokens=28, out=tmp_path / f"out{attempt}"))
        if others_now(0.5) > 0.02:
            continue  # somebody may have come in the middle
        assert "machine_busy" not in found
        return
    pytest.skip("other programs are running on this machine")


HELD_BACK = """
import json, os, sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from test_runner import job
from weighin import runner
from weighin.environments import this_interpreter
this_interpreter()
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
outcome = runner.run(job(Path(sys.argv[3]), "fp32@cpu"), this_interpreter(), Path(sys.argv[4]),
                     runner.DEFAULT_LIMITS, lambda event: None)
print(json.dumps({"status": outcome.status, "pressure": outcome.pressure}))
"""


def test_a_real_quota_holds_the_container_back(here: Machine, tiny_model: Path, tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/cpu/weighin-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("20000")
    except OSError:
        if group.exists():
            group.rmdir()
        pytest.skip("no control group with a quota can be made here")
    try:
        done = subprocess.run(
            [sys.executable, "-c", HELD_BACK, str(group), str(Path(__file__).parent), str(tiny_model),
             str(tmp_path / "log")], capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
    finally:
        for _ in range(40):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == "ok"
    found = {d.type: d.evidence for d in of_machine([{"job": "speed", "pressure": told["pressure"]}], here)}
    assert found["container_throttled"].startswith("the container's quota held it back for ")
    assert not group.exists()


# ---- the GPU


def gpu(used: float, total: float = 16e9, *processes: GpuProcess) -> Gpu:
    return Gpu(
        index=0, name="NVIDIA T4", memory_bytes=int(total), memory_free_bytes=int(total - used),
        compute_capability="7.5", driver="580", processes=processes,
    )  # fmt: skip


def test_a_gpu_that_somebody_else_holds(here: Machine) -> None:
    notebook = GpuProcess(pid=77, name="python", bytes=3 * 10**9, ours=True)
    other = GpuProcess(pid=78, name=None, bytes=None, ours=False)
    (found,) = of_gpu(msgspec.structs.replace(here, gpus=(gpu(4e9, 16e9, notebook, other),)))
    assert found.type == "gpu_occupied"
    assert found.evidence == (
        "4.0 of 16.0 GB of NVIDIA T4 were taken before the start by python (pid 77, the session weighin was started "
        "from), a process (pid 78)"
    )
    (nobody,) = of_gpu(msgspec.structs.replace(here, gpus=(gpu(4e9),)))
    assert nobody.evidence.endswith("were taken before the start")


@pytest.mark.parametrize(("used", "total", "occupied"), [
    (0.3e9, 16e9, False), (1.4e9, 16e9, False), (1.6e9, 16e9, True), (1.6e9, 141e9, False), (3e9, 141e9, True),
])  # fmt: skip
def test_what_a_driver_and_a_desktop_take_is_no_doubt(here: Machine, used: float, total: float, occupied: bool) -> None:
    assert bool(of_gpu(msgspec.structs.replace(here, gpus=(gpu(used, total),)))) == occupied


def edit_plan(folder: Path, change: Callable[[dict[str, Any]], None]) -> Comparison:
    """The comparison of a folder as if its plan had been another."""
    plan = json.loads((folder / PLAN).read_text())
    change(plan)
    (folder / PLAN).write_text(json.dumps(plan))
    return rebuild(folder)


def test_a_held_gpu_is_a_doubt_about_those_who_use_it_alone(fakes: Fakes, tmp_path: Path) -> None:
    fakes("fp32@cpu", "nf4@cpu")

    def occupy(plan: dict[str, Any]) -> None:
        plan["machine"]["gpus"] = [msgspec.to_builtins(gpu(4e9))]
        plan["entries"][1]["settings"]["uses_gpu"] = True

    comparison = edit_plan(tmp_path / "out", occupy)
    assert "gpu_occupied" not in found_in(comparison, 0)
    assert "gpu_occupied" in found_in(comparison, 1)


# ---- what the speeds say


@pytest.mark.parametrize(("rounds", "few"), [(1, True), (5, True), (6, False)])
def test_too_few_rounds(here: Machine, rounds: int, few: bool) -> None:
    found = of_speed(dict.fromkeys(range(1, rounds + 1), 20.0), [], here)
    assert types(found) == (["too_few_rounds"] if few else [])
    if few:
        assert found[0].evidence == f"{rounds} of the 6 processes that a 95% interval needs"


def test_too_few_rounds_of_a_run(fakes: Fakes) -> None:
    assert found_in(fakes("fp32@cpu", rounds=2))["too_few_rounds"].startswith("2 of the 6 processes")


def test_no_speed_at_all_is_no_doubt_about_it(here: Machine) -> None:
    assert of_speed({}, [], here) == []


def test_processes_that_lie_apart(fakes: Fakes) -> None:
    found = found_in(fakes("fp32@cpu+script=bimodal", rounds=6))
    # three times 20 and three times 10: quartiles 10 and 20, median 15
    assert found["unstable"] == "half of the processes lie 67% of the median apart"
    assert "drift" not in found


def test_the_spread_is_that_of_the_quartiles() -> None:
    assert quartile_spread([1.0, 2.0, 3.0]) is None
    assert quartile_spread([5.0] * 4) == 0.0
    assert quartile_spread([4.0, 1.0, 5.0, 2.0, 3.0]) == pytest.approx((4 - 2) / 3)
    # one process in eight that went wrong is no instability
    assert quartile_spread([10.0] * 7 + [1.0]) == 0.0


def test_a_spread_of_ten_percent_is_where_it_begins(here: Machine) -> None:
    def speeds(half: float) -> dict[int, float]:
        return dict(enumerate([10 - half, 10 + half, 10.0, 10 - half, 10 + half, 10.0, 10 - half, 10 + half], start=1))

    assert "unstable" not in types(of_speed(speeds(0.49), [], here))
    assert "unstable" in types(of_speed(speeds(0.6), [], here))


@pytest.mark.parametrize(("governor", "battery", "power"), [
    (None, None, ""), ("powersave", False, " (governor powersave)"),
    ("powersave", True, " (governor powersave, on battery)"), (None, True, " (on battery)"),
])  # fmt: skip
def test_a_drift_names_what_may_be_its_cause(
    here: Machine, governor: str | None, battery: bool | None, power: str
) -> None:
    powered = msgspec.structs.replace(here, governor=governor, on_battery=battery)
    (found,) = of_speed({r: 20.0 / (1 + 0.1 * (r - 1)) for r in range(1, 7)}, [], powered)
    # the median of the last third against the first: (1/1.4 + 1/1.5) against (1 + 1/1.1)
    assert found.evidence == f"decode speed went -28% from the first rounds to the last{power}"
    assert found.type == "drift"


def test_a_drift_of_a_run(fakes: Fakes) -> None:
    found = found_in(fakes("fp32@cpu+script=drifting", rounds=6))
    assert found["drift"].startswith("decode speed went -28% from the first rounds to the last")
    assert "unstable" not in found  # one cause is told once


def test_a_drift_needs_six_rounds_a_trend_and_five_percent() -> None:
    falling = [20 * 0.97**r for r in range(8)]
    assert drift(falling) == pytest.approx(0.97**6 - 1)
    assert drift(falling[::-1]) == pytest.approx(0.97**-6 - 1)
    assert drift(falling[:5]) is None
    assert drift([20 * 0.995**r for r in range(8)]) is None  # -3%
    assert drift([10.0, 20.0] * 6) is None
    assert drift([10.0] * 12) is None


@given(st.permutations(list(range(8))))
def test_a_trend_is_what_mann_and_kendall_call_one(order: list[int]) -> None:
    values = [10.0 + rank for rank in order]
    pairs = [(a, b) for i, a in enumerate(values) for b in values[i + 1 :]]
    s = sum(1 if b > a else -1 for a, b in pairs)
    chance = 2 * (1 - NormalDist().cdf((abs(s) - 1) / (8 * 7 * 21 / 18) ** 0.5))
    change = sum(values[-2:]) / sum(values[:2]) - 1
    assert (drift(values) is not None) == (chance < 0.01 and abs(change) > 0.05)


def test_noise_is_hardly_ever_called_a_drift() -> None:
    import random

    draw = random.Random(7)
    wrong = sum(drift([draw.lognormvariate(0, 0.2) for _ in range(10)]) is not None for _ in range(2000))
    assert wrong / 2000 < 0.02


def steady(number: int, prompt: int, seconds: float, ids: Sequence[int] = (1,), kind: str = "steady") -> Call:
    return Call(round=number, call=kind, prompt=prompt, prompt_tokens=1, ids=list(ids), times=[0.1, seconds])


def test_a_slow_start_is_told_by_the_same_prompt_in_the_least_slow_process() -> None:
    calls = [steady(1, 1, 5.0), steady(1, 0, 1.0), steady(1, 1, 2.0), steady(1, 0, 1.0)]
    assert slow_start(calls) is None  # one process
    calls += [steady(2, 1, 3.0), steady(2, 0, 99.0), steady(2, 1, 2.0)]
    assert slow_start(calls) == pytest.approx(1.5)
    assert slow_start([*calls, steady(3, 1, 1.0), steady(3, 1, 1.0)]) == pytest.approx(1.0)
    assert slow_start([steady(r, p, 1.0) for r in (1, 2) for p in (1, 0)]) is None  # no prompt came twice
    assert slow_start([]) is None


def test_an_engine_that_is_still_warming_up_in_its_second_call(fakes: Fakes) -> None:
    # with a long load each process after the first answers four times: to both prompts twice
    comparison = fakes("fp32@cpu+script=slow-second+load=20", rounds=3, prompts=["hello", "how are you?"])
    share = re.fullmatch(
        r"the first steady answer took (\d\.\d\d) times the later ones", found_in(comparison)["first_call_in_sample"]
    )
    assert share is not None
    prompt = len(comparison.workload.rendered[1].ids)
    assert float(share[1]) == pytest.approx((0.001 * prompt + 4 * 0.25) / (0.001 * prompt + 4 * 0.05), abs=0.006)


def test_one_that_is_slow_in_its_first_call_alone_is_not(fakes: Fakes) -> None:
    found = found_in(fakes("fp32@cpu+script=slow-first+load=20", rounds=3, prompts=["hello", "how are you?"]))
    assert "first_call_in_sample" not in found


def test_the_same_prompt_with_other_tokens(fakes: Fakes) -> None:
    found = found_in(fakes("fp32@cpu+script=fickle", rounds=3))
    assert found["tokens_differ"] == "the same prompt got different tokens in rounds 1, 2"


def test_answers_are_compared_by_prompt_and_only_where_they_are_forced() -> None:
    calls = [steady(1, 0, 1.0, [1, 2], "first"), steady(1, 1, 1.0, [3]), steady(2, 0, 1.0, [1, 2])]
    assert different_answers(calls) == ""
    assert different_answers([*calls, steady(3, 1, 1.0, [4])]) == "1, 3"
    assert different_answers([*calls, steady(1, 0, 1.0, [9, 9], "response")]) == ""  # it stops where it likes
    assert different_answers([*calls, steady(1, 0, 1.0, [7])]) == "1"


# ---- the contender's own jobs


@pytest.mark.parametrize("kind", ["error", "oom", "segv"])
def test_a_later_round_that_failed_is_a_doubt_not_a_failure(fakes: Fakes, kind: str) -> None:
    comparison = fakes(f"fp32@cpu+fail=load.{kind}.2", rounds=3)
    (found,) = comparison.contenders
    assert (found.status, found.rounds) == ("ok", 1)
    assert found_in(comparison)["failed_round"].startswith("speed in round 2: ")


def test_a_cold_load_that_failed_is_a_doubt(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    from weighin import runner

    really = runner.run

    def run(job: Job, *rest: Any, **more: Any) -> runner.Outcome:
        if job.kind == "cold":
            return runner.Outcome(status="failed", phase="load", reason="broke", remedy="see log", seconds=1.0)
        return really(job, *rest, **more)

    monkeypatch.setattr(jobs.runner, "run", run)
    comparison = fakes("fp32@cpu")
    assert comparison.contenders[0].status == "ok"
    assert found_in(comparison)["failed_round"] == "cold in round 1: broke"
    assert found_in(comparison)["warm_load_only"] == "no cold load was measured: not measured"


def test_a_prompt_too_long_for_it_takes_nothing_away(fakes: Fakes) -> None:
    # four tokens are timed and four answered; after a long prompt there are eight
    comparison = fakes("fp32@cpu+fail=token5.oom", prompt_tokens=(16, 32), response_tokens=4, rounds=2)
    (found,) = comparison.contenders
    assert (found.status, found.rounds) == ("ok", 2)
    assert found.value("decode_tokens_per_second") == pytest.approx(20.0)
    said = found_in(comparison)["failed_round"]
    assert said == "a prompt of 16 tokens: MemoryError: scripted: out of memory at token5"


def test_no_time_for_a_cold_load(fakes: Fakes) -> None:
    found = found_in(fakes("fp32@cpu", rounds=None, budget="0.001"))
    assert found["warm_load_only"] == "no cold load was measured: not measured"
    assert "no_warm_load" not in found


def test_threads_that_were_not_asked_for(fakes: Fakes) -> None:
    comparison = fakes("fp32@cpu+threads=7", "nf4@cpu", threads=1)
    assert found_in(comparison)["threads_differ"] == "it ran with 7 threads, not the 1 asked for"
    assert "threads_differ" not in found_in(comparison, 1)


def test_more_threads_than_cores(fakes: Fakes) -> None:
    allowed = len(os.sched_getaffinity(0))
    found = found_in(fakes("fp32@cpu", threads=allowed + 3))
    assert found["threads_differ"] == f"{allowed + 3} threads on {allowed} cores that are allowed here"


@pytest.mark.parametrize(("dtype", "model", "overflow"), [
    ("float16", "bf16", True), ("float16", "fp16", False), ("bfloat16", "bf16", False), ("float16", "fp32", False),
])  # fmt: skip
def test_fp16_does_not_hold_what_bf16_does(
    fakes: Fakes, tmp_path: Path, dtype: str, model: str, overflow: bool
) -> None:
    fakes("fp32@cpu")

    def change(plan: dict[str, Any]) -> None:
        plan["entries"][0]["settings"]["dtype"] = dtype
        plan["model"]["dtype"] = model

    assert ("fp16_overflow" in found_in(edit_plan(tmp_path / "out", change))) == overflow


def test_an_answer_that_reached_the_cap(fakes: Fakes) -> None:
    found = found_in(fakes("fp32@cpu+says=70", prompts=["a", "b"]))
    assert found["cut_off"] == "answer 1, 2 reached the cap of 6 tokens"
    assert "no_stop" not in found


def test_a_model_that_names_no_end(fakes: Fakes, tmp_path: Path) -> None:
    model = make_model(tmp_path / "endless", template=None, eos_token_id=None)
    (model / "generation_config.json").write_text("{}")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    comparison = fakes("fp32@cpu+says=70.1", model=str(model))
    assert comparison.workload.stop_ids == []
    found = found_in(comparison)
    assert found["no_stop"] == "no end token is known, so every answer ran to the cap"
    assert "cut_off" not in found


def test_memory_of_processes_that_are_counted_apart(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    from weighin import runner

    monkeypatch.setattr(runner, "_make_group", lambda pid: None)
    found = found_in(fakes("fp32@cpu+fork=16"))
    assert found["memory_upper_bound"].startswith("the peaks of the processes that it started are added up")


# ---- the disk: bytes that are really read


class Reader(FakeEngine):
    """Reads a file from the disk, really, while it loads or for every token."""

    file: Path
    when: str

    def _read(self) -> None:
        evict([self.file])
        with self.file.open("rb", buffering=0) as stream:
            while stream.read(1 << 20):
                pass

    def load(self) -> None:
        super().load()
        if self.when == "load":
            self._read()

    def generate(
        self, ids: Sequence[int], n: int, stop_ids: Sequence[int], on_token: OnToken, sampling: Any = None
    ) -> list[int]:
        def read_too(token: int) -> None:
            if self.when == "token":
                self._read()
            on_token(token)

        return super().generate(ids, n, stop_ids, read_too)


SIZE = 4 << 20


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[dict[str, Any]]]:
    """The events of a job whose engine reads its weights again at that time."""
    Reader.file = tmp_path / "model.safetensors"
    Reader.file.write_bytes(os.urandom(SIZE))
    before = bytes_read()
    Reader._read(object.__new__(Reader))
    if before is None or (bytes_read() or 0) - before < SIZE:
        pytest.skip("the page cache cannot be emptied here, or bytes read cannot be seen")
    monkeypatch.setattr(engines, "everything", lambda: {"fake": Reader})

    def run(when: str) -> list[dict[str, Any]]:
        from probes.test_probes import make_job

        Reader.when = when
        events: list[dict[str, Any]] = []
        worker.run(make_job(weight_files=[str(Reader.file)]), events.append)
        assert events[-1]["event"] == "done", events[-1]
        return [{"contender": "x", "round": 1, "job": "speed", **e} for e in events]

    return run


def figures(events: list[dict[str, Any]]) -> dict[str, measurements.Measurement]:
    of = {kind: [e for e in events if e["event"] == kind] for kind in ("sample", "unknown")}
    return measurements._measurements(of["sample"], of["unknown"])


def test_bytes_that_are_read_for_every_token_are_seen(reads: Callable[[str], list[dict[str, Any]]]) -> None:
    found = figures(reads("token"))["disk_bytes_read_per_token"].value
    assert found == pytest.approx(SIZE, rel=0.1)
    quiet = figures(reads("never"))["disk_bytes_read_per_token"].value
    assert quiet is not None and quiet < 0.05 * SIZE


def test_a_load_from_the_disk_is_no_warm_one(reads: Callable[[str], list[dict[str, Any]]]) -> None:
    found = figures(reads("load"))
    assert found["load_seconds"].value is None
    assert found["load_cold_seconds"].value is not None
    (one,) = doubts._of_loads(found)
    assert one.type == "no_warm_load"
    assert re.fullmatch(r"\d+% of the weights came from the disk, so this was no warm load", one.evidence)
    (one,) = doubts._of_loads(figures(reads("never")))
    assert one.type == "warm_load_only"


@pytest.mark.parametrize(("share", "paging"), [(0.04, False), (0.06, True)])
def test_reading_from_the_disk_for_every_token_is_paging(
    fakes: Fakes, tmp_path: Path, share: float, paging: bool
) -> None:
    weight = fakes("fp32@cpu").contenders[0].weight_bytes
    journal = tmp_path / "out" / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records:
        if record["event"] == "sample" and record["key"] == "disk_bytes_read_per_token":
            record["value"] = share * weight
    journal.write_text("".join(json.dumps(r) + "\n" for r in records))
    found = found_in(rebuild(tmp_path / "out"))
    assert ("paging" in found) == paging
    if paging:
        assert re.fullmatch(r"it read \d+ MB from the disk for every token", found["paging"])
