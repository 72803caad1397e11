"""Are weighin's figures those of a bare loop of the same calls? Both on the same model, alternating, in one run.

    python benchmarks/honesty.py [ROUNDS] [--peer ROUNDS] [--new-tokens N] [--json FILE]

Each round starts one process of each, in turns; with --peer, optimum-benchmark's too (in an environment of its own).
Printed last: the paired ratio to the bare loop for decode speed, load time, peak memory and the time it took, with its
95% interval, and what weighin's own process cost while its worker was timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import peer as optimum_benchmark
import psutil
from rich.console import Console

from weighin import cache, intake, intervals, runner
from weighin.compare import do
from weighin.journal import Journal
from weighin.report import terminal
from weighin.schedule import REPEATS, State, Unit

CONTENDER = "transformers:fp32@cpu"
KEYS = {"decode": "decode_tokens_per_second", "load_seconds": "load_seconds", "peak_ram_bytes": "peak_ram_bytes"}
BARE = Path(__file__).with_name("bare_loop.py")


def bare(plan, ids_file: Path) -> dict[str, float]:
    command = [sys.executable, str(BARE), plan.model.path, str(plan.machine.threads)]
    command += [str(plan.workload.max_new_tokens), str(REPEATS), str(ids_file)]
    env = runner.worker_environment(plan.machine.threads)
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "decode": median(found["decode"]), "seconds": time.monotonic() - began}


def by_weighin(plan, number: int, folder: Path, journal: Journal, state: State, show) -> dict[str, float]:
    """One speed job, by the very code of a round of `weighin compare`: journal, live table and all."""
    unit = Unit(CONTENDER, number, "speed")
    began = time.monotonic()
    do(unit, plan, folder, journal, state, show)
    assert state.ended[unit]["status"] == "ok", state.ended[unit]
    figures = {ours: state.median(unit, key) for ours, key in KEYS.items()}
    return {**figures, "seconds": time.monotonic() - began}


def parent_cost(folder: Path) -> dict[str, float]:
    """CPU share and memory of weighin's own process during a real `weighin compare`, between its events."""
    command = [sys.executable, "-m", "weighin", "compare", "demo-base", "-c", CONTENDER]
    command += ["--no-quality", "--rounds", "1", "--response-tokens", "64", "--out", str(folder / "cost")]
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
    parser.add_argument("--peer", type=int, default=0, metavar="ROUNDS", help="run optimum-benchmark in so many rounds")
    parser.add_argument("--new-tokens", type=int, default=50, help="few make for many rounds: for load time and memory")
    arguments = parser.parse_args()
    request = intake.Request(
        model="demo-base", contenders=(CONTENDER,), prompt_tokens=(), max_new_tokens=arguments.new_tokens
    )
    plan = intake.make_plan(request, say=print)
    python = optimum_benchmark.environment(cache.root() / "peer") if arguments.peer else None
    raw: dict[str, list[dict[str, float]]] = {"bare": [], "weighin": [], "optimum-benchmark": []}
    with tempfile.TemporaryDirectory() as name, Path(os.devnull).open("w") as nowhere:
        folder = Path(name)
        ids_file = folder / "ids.json"
        ids_file.write_text(json.dumps([r.ids for r in plan.workload.rendered]))
        journal, state = Journal(folder), State()
        show = terminal.Progress(Console(file=nowhere, force_terminal=True, width=120))
        show.planned(plan, folder)
        tokens = len(plan.workload.rendered[0].ids)
        turns = {
            "bare": lambda number: bare(plan, ids_file),
            "weighin": lambda number: by_weighin(plan, number, folder, journal, state, show),
            "optimum-benchmark": lambda number: optimum_benchmark.measure(
                python, plan.model.path, plan.machine.threads, plan.workload.max_new_tokens, tokens
            ),
        }
        bare(plan, ids_file)  # warms the page cache for all
        for number in range(1, arguments.rounds + 1):
            names = [who for who in turns if who != "optimum-benchmark" or number <= arguments.peer]
            shift = number % len(names)
            for who in names[shift:] + names[:shift]:
                raw[who].append({**turns[who](number), "round": number})
            shown = {who: f"{raw[who][-1]['decode']:.2f}" for who in names}
            print(f"round {number} of {arguments.rounds}: decode tokens/s {shown}", file=sys.__stdout__, flush=True)
        show.finished()
        cost = parent_cost(folder)
    machine = plan.machine
    print(f"\n{machine.cpu}, {machine.threads} threads; {plan.model.name}, {CONTENDER}, {arguments.rounds} rounds")
    print(f"{'':36} {'bare':>11} {'it':>11}   it ÷ bare (95% interval; below six rounds the range)")
    for who in ("weighin", "optimum-benchmark"):
        for key in (*KEYS, "seconds"):
            values = {w: {int(s["round"]): s[key] for s in raw[w]} for w in ("bare", who)}
            if (ratio := intervals.paired_ratio(values[who], values["bare"])) is None:
                continue
            common = values[who].keys()
            mine, other = median(values[who].values()), median(v for r, v in values["bare"].items() if r in common)
            bounds = f"{ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"
            print(f"{who:18} {key:17} {other:11.4g} {mine:11.4g}   {bounds}")
    print(
        f"weighin's own process while a worker was timed: {cost['cpu_share']:.2%} of a core over "
        f"{cost['seconds_watched']:.0f} s, peak {cost['peak_rss_bytes'] / 1e6:.0f} MB"
    )
    if peers := raw["optimum-benchmark"]:
        print(f"optimum-benchmark's parent meanwhile: {median(p['parent_cpu_share'] for p in peers):.0%} of a core")
    if arguments.json:
        arguments.json.write_text(json.dumps({"raw": raw, "parent": cost, "cpu": machine.cpu}, indent=1) + "\n")


if __name__ == "__main__":
    main()
