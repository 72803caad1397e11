"""optimum-benchmark on the same weights, in its own environment and through its own command line.

    python benchmarks/peer.py MODEL_FOLDER [--cache FOLDER] [--threads N] [--new-tokens N] [--prompt-tokens N]

The figures are the peer's own, in its own definitions; only the wall time and its parent's CPU are taken here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import psutil

from weighin import cache, runner
from weighin.schedule import REPEATS

REQUIREMENTS = Path(__file__).with_name("peer-requirements.txt")
# What the peer's child logs before its first measurement and after its last.
FIRST, LAST = "Running model loading tracking", "Sending report dictionary"
LONGEST = 1800  # seconds, for one run
TARGETS = ("load_model", "first_generate", "prefill", "decode")


def environment(folder: Path) -> Path:
    """The python of the peer's environment under `folder`, made where it is not there with these very versions."""
    folder = folder.resolve()
    python = folder / "venv" / "bin" / "python"
    wanted, made = REQUIREMENTS.read_text(), folder / "installed.txt"
    if made.is_file() and made.read_text() == wanted and python.is_file():
        print(f"the peer's environment: {folder} (made before)", flush=True)
        return python
    print(f"making the peer's environment in {folder} (a few minutes, about 1.5 GB, once)", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    made.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
    subprocess.run(install, check=True)
    made.write_text(wanted)
    return python


def repaired(model_folder: Path, folder: Path) -> dict:
    """The model's folder as transformers 4 reads it: links to the same files, its two configs rewritten."""
    folder.mkdir()
    for file in model_folder.iterdir():
        if file.name not in {"config.json", "tokenizer_config.json"}:
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model_folder / "config.json").read_text())
    rope = config.pop("rope_parameters", None)
    if rope:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = json.loads((model_folder / "tokenizer_config.json").read_text())
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("backend", "is_local", "local_files_only"):
        tokenizer.pop(key, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    return config


def configuration(model: Path, model_type: str, threads: int, new_tokens: int, prompt_tokens: int) -> dict:
    return {
        "defaults": ["benchmark", {"launcher": "process"}, {"scenario": "inference"}, {"backend": "pytorch"}, "_self_"],
        "name": "peer",
        "backend": {
            "model": str(model),
            "library": "transformers",
            "task": "text-generation",
            "model_type": model_type,
            "device": "cpu",
            "torch_dtype": "float32",
            # 0.6.0 has the two the wrong way round: `inter_op` is what it gives torch.set_num_threads. Both, then.
            "inter_op_num_threads": threads,
            "intra_op_num_threads": threads,
        },
        "scenario": {
            "latency": True,
            "memory": True,
            "iterations": REPEATS,
            "duration": 0,
            "warmup_runs": 1,
            "input_shapes": {"batch_size": 1, "sequence_length": prompt_tokens},
            "generate_kwargs": {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens},
        },
    }


def watched(command: list[str], folder: Path, env: dict[str, str]) -> tuple[float, float]:
    """Run the peer; its wall time, and the CPU of its parent process alone ÷ wall time while its child measures."""
    began = time.monotonic()
    process = psutil.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    samples: list[tuple[float, float, bool]] = []
    measuring, stop = threading.Event(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            try:
                samples.append((time.monotonic(), sum(process.cpu_times()[:2]), measuring.is_set()))
            except psutil.Error:
                return
            if time.monotonic() - began > LONGEST:
                os.killpg(process.pid, signal.SIGKILL)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    tail: deque[str] = deque(maxlen=40)
    try:
        for line in process.stdout:
            tail.append(line)
            if FIRST in line:
                measuring.set()
            elif LAST in line:
                measuring.clear()
        code = process.wait()
        seconds = time.monotonic() - began
    finally:
        stop.set()
        thread.join()
        if process.poll() is None:  # its child would outlive it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise RuntimeError(f"optimum-benchmark ended with {code}:\n{''.join(tail)}")
    wall = cpu = 0.0
    for (t0, c0, was), (t1, c1, now) in itertools.pairwise(samples):
        if was and now:
            wall += t1 - t0
            cpu += c1 - c0
    if not wall:
        raise RuntimeError(f"optimum-benchmark did not say when it measured:\n{''.join(tail)}")
    return seconds, cpu / wall


def measure(python: Path, model_folder: str, threads: int, new_tokens: int, prompt_tokens: int) -> dict[str, float]:
    """One run of optimum-benchmark: its decode tokens/s, load time and peak memory, as it reports them."""
    with tempfile.TemporaryDirectory(prefix="peer-") as name:
        folder = Path(name).resolve()
        (folder / "tmp").mkdir()
        model = folder / "model"
        config = repaired(Path(model_folder), model)
        chosen = configuration(model, config["model_type"], threads, new_tokens, prompt_tokens)
        (folder / "peer.yaml").write_text(json.dumps(chosen, indent=1))
        env = {
            **runner.worker_environment(threads),
            "HF_HUB_OFFLINE": "1",
            "LOG_LEVEL": "INFO",
            "TMPDIR": str(folder / "tmp"),  # it leaves a pickle of every report there
        }
        command = [str(python), str(python.with_name("optimum-benchmark"))]
        command += ["--config-dir", str(folder), "--config-name", "peer", "hydra.run.dir=.", "hydra.output_subdir=null"]
        seconds, share = watched(command, folder, env)
        report = json.loads((folder / "benchmark_report.json").read_text())
    peaks = [report[target]["memory"] for target in TARGETS]
    speed, load = report["decode"]["throughput"], report["load_model"]["latency"]
    units = {speed["unit"], load["unit"], *(peak["unit"] for peak in peaks)}
    assert units == {"tokens/s", "s", "MB"}, units
    assert report["decode"]["latency"]["count"] == REPEATS
    return {
        "decode": speed["value"],
        "load_seconds": load["mean"],
        "peak_ram_bytes": round(max(peak["max_ram"] for peak in peaks) * 1e6),
        "seconds": seconds,
        "parent_cpu_share": share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_folder", help="a folder that transformers 5 has written")
    parser.add_argument("--cache", type=Path, help="where the peer's environment is kept")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--new-tokens", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    given = parser.parse_args()
    python = environment(given.cache or cache.root() / "peer")
    found = measure(python, given.model_folder, given.threads, given.new_tokens, given.prompt_tokens)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
