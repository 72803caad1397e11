"""Is each engine as fast under weighin as in a bare loop over its own API, and how far apart are the engines?

    python benchmarks/engines.py [ROUNDS] [--json FILE] [CONTENDER...]

Every round starts a process of each contender and one of its bare loop (`bare_engines.py`, in the engine's own
environment), in turns. Printed last: decode speed of both, the paired ratio with its 95% interval, and the speed
against transformers:fp32@cpu in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console

from weighin import cache, engines, environments, intake, intervals, jobs, runner
from weighin.compare import do
from weighin.journal import Journal
from weighin.report import terminal
from weighin.schedule import REPEATS, SPEED_KEY, State, Unit

BARE = Path(__file__).with_name("bare_engines.py")
DEFAULT = (
    "transformers:fp32@cpu", "llama.cpp:q4_k_m@cpu", "llama.cpp:q8_0@cpu", "onnxruntime:int4@cpu", "openvino:int4@cpu",
)  # fmt: skip


def bare(plan, entry, ids_file: Path) -> float:
    engine = engines.everything()[entry.contender.engine]
    environment = environments.for_contender(engine, entry.contender, plan.model)
    path = Path(cache.prepared(plan.model.fingerprint, entry.recipe)) if entry.recipe else Path(plan.model.path)
    if (path / "model.gguf").exists():
        path = path / "model.gguf"
    command = [environment.python, "-I", str(BARE), engine.name, str(path), str(plan.machine.threads)]
    command += [str(plan.workload.max_new_tokens), str(REPEATS), str(ids_file)]
    env = runner.worker_environment(plan.machine.threads)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"the bare loop of {entry.name}: {done.stderr[-800:]}")
    return median(json.loads(done.stdout.splitlines()[-1])["decode"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=8)
    parser.add_argument("contenders", nargs="*", default=list(DEFAULT))
    parser.add_argument("--json", type=Path, help="write the raw samples here")
    arguments = parser.parse_args()
    request = intake.Request(model="demo-base", contenders=tuple(arguments.contenders), prompt_tokens=(), quality=False)
    plan = intake.make_plan(request, say=print)
    for entry in plan.entries:
        if entry.status != "ok":
            print(f"{entry.name}: {entry.status}: {entry.reason}; {entry.remedy or ''}")
    raw: dict[str, dict[str, dict[int, float]]] = {e.name: {"bare": {}, "weighin": {}} for e in plan.runnable}
    with tempfile.TemporaryDirectory() as name, Path(os.devnull).open("w") as nowhere:
        folder = Path(name)
        ids_file = folder / "ids.json"
        ids_file.write_text(json.dumps([r.ids for r in plan.workload.rendered]))
        journal, state = Journal(folder), State()
        show = terminal.Progress(Console(file=nowhere, force_terminal=True, width=120))
        show.planned(plan, folder)
        for entry in plan.runnable:
            if entry.recipe:
                outcome = jobs.prepare(Unit(entry.name, 0, "prepare"), plan, folder, state, lambda event: None)
                assert outcome.status == "ok", outcome
        for number in range(1, arguments.rounds + 1):
            for entry in plan.runnable:
                for who in ("bare", "weighin")[:: 1 if number % 2 else -1]:
                    if who == "bare":
                        raw[entry.name][who][number] = bare(plan, entry, ids_file)
                        continue
                    unit = Unit(entry.name, number, "speed")
                    do(unit, plan, folder, journal, state, show)
                    assert state.ended[unit]["status"] == "ok", state.ended[unit]
                    raw[entry.name][who][number] = state.median(unit, SPEED_KEY)
            print(f"round {number} of {arguments.rounds}", file=sys.__stdout__, flush=True)
        show.finished()
    machine = plan.machine
    print(f"\n{machine.cpu}, {machine.threads} threads; {plan.model.name}, 50 new tokens, {arguments.rounds} rounds")
    print(f"{'tokens/s, decode':26} {'bare':>8} {'weighin':>8}   weighin ÷ bare          ÷ transformers:fp32@cpu")
    base = raw.get("transformers:fp32@cpu", {}).get("weighin", {})
    for name, found in raw.items():
        ratio = intervals.paired_ratio(found["weighin"], found["bare"])
        faster = intervals.paired_ratio(found["weighin"], base) if base else None
        words = [f"{r.value:.3f} ({r.low:.3f}–{r.high:.3f})" if r else "" for r in (ratio, faster)]
        speeds = [median(found[who].values()) for who in ("bare", "weighin")]
        print(f"{name:26} {speeds[0]:8.1f} {speeds[1]:8.1f}   {words[0]:22}  {words[1]}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"raw": raw, "cpu": machine.cpu}, indent=1) + "\n")


if __name__ == "__main__":
    main()
