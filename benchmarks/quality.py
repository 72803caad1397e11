"""What the quality pass finds and what it costs.

    python benchmarks/quality.py ladder OUT MODEL [CONTENDER...]      the ladder that the words are anchored to
    python benchmarks/quality.py cost [MODEL] [ROUNDS]                positions/s against a bare forward pass
    python benchmarks/quality.py memory                               a vocabulary of 262,144: extra memory, disk

`cost` and `memory` use transformers:fp32@cpu; both are ratios or differences within one process or run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from weighin import intake, intervals, quality, reference_rows
from weighin.compare import Silent, start
from weighin.engines.transformers import TransformersEngine
from weighin.jobs import job_of
from weighin.probes import Session
from weighin.probes.likelihood import LikelihoodProbe
from weighin.schedule import Unit

LADDER = ("fp32", "bf16", "int8", "nf4", "fp4")
CONTENDER = "transformers:fp32@cpu"


def ladder(out: Path, model: str, contenders: list[str]) -> None:
    names = contenders or [f"transformers:{precision}@cpu" for precision in LADDER]
    request = intake.Request(
        model=model, contenders=tuple(names), rounds=1, max_new_tokens=8, response_tokens=48, prompt_tokens=(512,)
    )
    plan = intake.make_plan(request, say=print)
    found = start(plan, out, Silent())
    print(f"\n{found.machine.cpu}, {found.machine.threads} threads; {found.model.name}; {'; '.join(found.model.notes)}")
    titles = f"{'contender':28} {'text':9} {'docs':>4} {'tokens':>6} {'KL mean (95%)':>28} {'p99':>8}"
    print(f"{titles} {'same next token':>22} word")
    for c in found.contenders:
        if c.fidelity is None:
            print(f"{c.name:28} {c.status}: {c.reason or c.fidelity_reason}")
            continue
        for s in c.fidelity.strata:
            kl, same = s.kl, s.top1_agreement
            print(
                f"{c.name:28} {s.name:9} {s.documents:4} {s.positions:6} "
                f"{kl.value:11.3g} ({kl.low:.3g}–{kl.high:.3g}) {s.kl_p99.value:8.3g} "
                f"{same.value:8.1%} ({same.low:.1%}–{same.high:.1%}) "
                f"{c.fidelity.word if s is c.fidelity.strata[0] else ''}"
            )


def loaded(model: str, **changes) -> tuple:
    request = intake.Request(model=model, contenders=(CONTENDER,), rounds=1, prompt_tokens=())
    plan = intake.make_plan(request, say=print)
    job = dataclasses.replace(job_of(Unit(CONTENDER, 1, "score"), plan, 1), **changes)
    engine = TransformersEngine(job)
    engine.import_packages()
    engine.load()
    return plan, job, engine


def cost(model: str, rounds: int) -> None:
    """The same documents through the bare model and through the probe, in turns."""
    import torch

    plan, job, engine = loaded(model)
    documents = quality.choose(plan.workload.documents, 2000)
    positions = sum(len(d.ids) for d in documents)
    with tempfile.TemporaryDirectory() as folder:

        def probe(writes: bool) -> float:
            told = dataclasses.replace(
                job, rows=folder, writes_rows=writes, documents=[dataclasses_of(d) for d in documents]
            )
            session = Session(told, engine, lambda event: None)
            mine = LikelihoodProbe(session)
            began = time.perf_counter()
            mine.run()
            return time.perf_counter() - began

        def bare() -> float:
            began = time.perf_counter()
            with torch.inference_mode():
                for document in documents:
                    engine.model(input_ids=torch.tensor([document.ids]), use_cache=False)
            return time.perf_counter() - began

        bare()
        probe(True)  # the reference's rows, and a warm-up
        raw: dict[str, list[float]] = {"bare": [], "weighin": []}
        for number in range(rounds):
            turns = {"bare": bare, "weighin": lambda: probe(False)}
            for who in list(turns)[:: 1 if number % 2 else -1]:
                raw[who].append(turns[who]())
    ratio = intervals.paired_ratio(dict(enumerate(raw["weighin"])), dict(enumerate(raw["bare"])))
    machine, vocabulary = plan.machine, plan.workload.vocabulary
    print(f"\n{machine.cpu}, {machine.threads} threads; {plan.model.name}, vocabulary {vocabulary}")
    for who, values in raw.items():
        print(f"{who:8} {positions / median(values):8.1f} positions/s ({positions} positions, {rounds} rounds)")
    print(f"weighin's time ÷ the bare forward pass's: {ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f})")
    print(json.dumps({"raw_seconds": raw, "positions": positions}))


def dataclasses_of(document) -> dict:
    return {"stratum": document.stratum, "name": document.name, "ids": document.ids, "counted": document.counted}


def memory() -> None:
    """A model with a vocabulary of 262,144 scores 4,000 positions; what the pass adds to its peak."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from weighin.engines import Job

    vocabulary, positions = 262_144, 4000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = AutoConfig.for_model(
            "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=2048, tie_word_embeddings=True,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        job = Job(
            kind="score", round=1, contender=CONTENDER, engine="transformers", precision="fp32", device="cpu",
            options={}, settings={"dtype": "float32", "device_map": "cpu", "dependencies": [],
                      "details": {"load_in": None, "double": False, "auto_class": "AutoModelForCausalLM"}},
            model_path=str(folder), weight_files=[], prepared=None, out=None, threads=os.cpu_count() or 1,
            prompts=[[1]], lengths={}, stop_ids=[], max_new_tokens=2, response_cap=2, repeats=1,
            remote_code=False, allow_pickle=False,
            spawned_at=0.0, vocabulary=vocabulary, rows=str(folder / "rows"), writes_rows=True,
        )  # fmt: skip
        engine = TransformersEngine(job)
        engine.import_packages()
        engine.load()
        with torch.inference_mode():
            engine.model(input_ids=torch.tensor([[1, 2, 3]]))
        documents = [
            {
                "stratum": "passages",
                "name": str(n),
                "ids": [(7 * n + 3 * i) % vocabulary for i in range(501)],
                "counted": [[1, 501]],
            }
            for n in range(8)
        ]
        for writes in (True, False):
            Path("/proc/self/clear_refs").write_text("5")
            before = _resident()
            told = dataclasses.replace(job, documents=documents, writes_rows=writes)
            began = time.perf_counter()
            LikelihoodProbe(Session(told, engine, lambda event: None)).run()
            seconds = time.perf_counter() - began
            who = "the reference, writing" if writes else "a contender, reading"
            print(f"{who}: {(_peak() - before) / 1e6:.0f} MB above the {before / 1e6:.0f} MB before, {seconds:.0f} s")
        size = sum(f.stat().st_size for f in (folder / "rows").iterdir())
        said = positions * reference_rows.bytes_per_row(vocabulary, 0)
        print(f"rows on disk: {size / 1e9:.2f} GB, said before: {said / 1e9:.2f} GB")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "ladder":
        ladder(Path(rest[0]), rest[1], rest[2:])
    elif command == "cost":
        cost(rest[0] if rest else "demo-base", int(rest[1]) if len(rest) > 1 else 12)
    else:
        memory()
