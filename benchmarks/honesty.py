"""Are weighin's figures those of a bare loop of the same calls? Both on the same model, alternating, in one run.

    python benchmarks/honesty.py [ROUNDS] [--json FILE]

Each round starts one process of each, in turns. Printed last: the paired ratio weighin ÷ bare for decode speed, load
time and peak memory with its 95% interval, and what weighin's own process cost while its worker was timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import psutil

from weighin import environments, intake, intervals, runner
from weighin.compare import job_of
from weighin.engines import everything
from weighin.schedule import REPEATS, Unit

CONTENDER = "transformers:fp32@cpu"
KEYS = {"decode": "decode_tokens_per_second", "load_seconds": "load_seconds", "peak_ram_bytes": "peak_ram_bytes"}
BARE = Path(__file__).with_name("bare_loop.py")


def bare(plan, ids_file: Path) -> dict[str, float]:
    command = [sys.executable, str(BARE), plan.model.path, str(plan.machine.threads)]
    command += [str(plan.workload.max_new_tokens), str(REPEATS), str(ids_file)]
    env = runner.worker_environment(plan.machine.threads)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "decode": median(found["decode"])}


def by_weighin(plan, number: int, folder: Path) -> dict[str, float]:
    """One speed job, as a round of `weighin compare` runs it."""
    entry = plan.entry(CONTENDER)
    environment = environments.for_contender(everything()["transformers"], entry.contender)
    events: list[dict] = []
    outcome = runner.run(
        job_of(Unit(CONTENDER, number, "speed"), plan, REPEATS), environment, folder / "log", plan.limits, events.append
    )
    assert outcome.status == "ok", outcome
    return {
        ours: median(e["value"] for e in events if e["event"] == "sample" and e["key"] == key)
        for ours, key in KEYS.items()
    }


def parent_cost(folder: Path) -> dict[str, float]:
    """CPU share and memory of weighin's own process during a real `weighin compare`, between its events."""
    command = [sys.executable, "-m", "weighin", "compare", "demo-base", "-c", CONTENDER]
    command += ["--rounds", "1", "--response-tokens", "64", "--out", str(folder / "cost")]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    samples: list[tuple[float, float, bool]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            try:
                used = sum(process.cpu_times()[:2])
                timed = any("weighin.worker" in " ".join(c.cmdline()) for c in process.children())
                samples.append((time.monotonic(), used, timed))
                peaks.append(process.memory_info().rss)
            except psutil.Error:
                return

    peaks: list[int] = []
    thread = threading.Thread(target=watch)
    thread.start()
    process.wait()
    stop.set()
    thread.join()
    wall = cpu = 0.0
    for (t0, c0, was), (t1, c1, now) in itertools.pairwise(samples):
        if was and now:
            wall += t1 - t0
            cpu += c1 - c0
    return {"seconds_watched": wall, "cpu_share": cpu / wall, "peak_rss_bytes": max(peaks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the raw samples here")
    arguments = parser.parse_args()
    plan = intake.make_plan(intake.Request(model="demo-base", contenders=(CONTENDER,), prompt_tokens=()), say=print)
    raw: dict[str, list[dict[str, float]]] = {"bare": [], "weighin": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids_file = folder / "ids.json"
        ids_file.write_text(json.dumps([r.ids for r in plan.workload.rendered]))
        bare(plan, ids_file)  # warms the page cache for both
        for number in range(1, arguments.rounds + 1):
            turns = [("bare", lambda: bare(plan, ids_file)), ("weighin", lambda n=number: by_weighin(plan, n, folder))]
            for who, measure in turns if number % 2 else reversed(turns):
                raw[who].append(measure())
            shown = {who: f"{samples[-1]['decode']:.2f}" for who, samples in raw.items()}
            print(f"round {number} of {arguments.rounds}: decode tokens/s {shown}", flush=True)
        cost = parent_cost(folder)
    machine = plan.machine
    print(f"\n{machine.cpu}, {machine.threads} threads; {plan.model.name}, {CONTENDER}, {arguments.rounds} rounds")
    print(f"{'':16} {'bare':>14} {'weighin':>14}   weighin ÷ bare (95% interval)")
    for key in KEYS:
        values = {who: {i: s[key] for i, s in enumerate(samples)} for who, samples in raw.items()}
        ratio = intervals.paired_ratio(values["weighin"], values["bare"])
        middle = {who: median(v.values()) for who, v in values.items()}
        print(
            f"{key:16} {middle['bare']:14.4g} {middle['weighin']:14.4g}   "
            f"{ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"
        )
    print(
        f"weighin's own process while a worker was timed: {cost['cpu_share']:.2%} of a core over "
        f"{cost['seconds_watched']:.0f} s, peak {cost['peak_rss_bytes'] / 1e6:.0f} MB"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"raw": raw, "parent": cost, "cpu": machine.cpu}, indent=1) + "\n")


if __name__ == "__main__":
    main()
