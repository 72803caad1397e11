"""The whole pipeline on a CUDA GPU: the demo's real weights, then Gemma-3-4B shapes with random ones.

    python benchmarks/gpu_pipeline.py OUT [ROUNDS_OF_THE_DEMO] [ROUNDS_OF_THE_SHAPES]

Checks what can be checked (the snippets give the report's answers, VRAM figures are there), copies the reports to OUT
and prints the tables last. Made for a machine without a network: the demo's GGUF must be in the cache.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import random_model

from weighin import cache
from weighin.compare import rebuild

GPU_CONTENDERS = ("transformers:nf4@cuda", "transformers:bf16@cuda", "transformers:int8@cuda")


def weighin(*arguments: str) -> int:
    command = [sys.executable, "-m", "weighin", *arguments]
    print("$ weighin", *arguments, flush=True)
    began = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    print(f"exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code


def compare(name: str, out: Path, *arguments: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="weighin-bench-")) / name
    weighin("compare", *arguments, "--out", str(folder))
    for file in ("report.md", "report.csv", "comparison.json"):
        shutil.copyfile(folder / file, out / f"{name}.{file}")
    for log in sorted((folder / "logs").iterdir()):
        tail = log.read_text(errors="replace").splitlines()[-3:]
        print(log.name, *tail, sep="\n  ", flush=True)
    return folder


def check_snippets(folder: Path) -> list[str]:
    """Run every snippet in a fresh process and compare its answer with the report's, word for word."""
    lines = []
    for result in rebuild(folder).contenders:
        if result.status != "ok":
            continue
        done = subprocess.run([sys.executable, "-c", result.snippet], capture_output=True, text=True, check=False)
        same = done.stdout == result.responses[0].whole + "\n"
        detail = "" if same else f"  got {done.stdout!r} {done.stderr[-300:]!r}"
        lines.append(f"snippet of {result.name}: {'same answer' if same else 'DIFFERENT'}{detail}")
    return lines


def main() -> None:
    out = Path(sys.argv[1])
    demo_rounds, shape_rounds = sys.argv[2:4] if len(sys.argv) > 3 else ("6", "3")
    out.mkdir(parents=True, exist_ok=True)
    weighin("machine")
    contenders = [part for name in (*GPU_CONTENDERS, "transformers:fp32@cpu") for part in ("-c", name)]
    demo = compare("demo", out, "demo-base", *contenders, "--rounds", demo_rounds, "--response-tokens", "128")
    checks = check_snippets(demo)
    tokenizer = next(p for p in (cache.root() / "prepared").iterdir() if (p / "tokenizer.json").exists())
    began = time.monotonic()
    gemma = random_model.make("gemma-3-4b", Path(tempfile.mkdtemp()) / "gemma-3-4b", tokenizer, "cuda")
    print(f"random Gemma-3-4B shapes made in {time.monotonic() - began:.0f} s", flush=True)
    contenders = [part for name in GPU_CONTENDERS for part in ("-c", name)]
    shapes = compare("gemma", out, str(gemma), *contenders, "--rounds", shape_rounds, "--response-tokens", "50")
    print(*checks, sep="\n")
    for folder in (demo, shapes):
        comparison = rebuild(folder)
        print(comparison)
        for result in comparison.contenders:
            shown = ("vram", "cold", "loaded", "energy", "clock")
            vram = [
                f"{k} {m.value} {m.reason or ''}"
                for k, m in result.measurements.items()
                if any(part in k for part in shown)
            ]
            print(result.name, result.effective, *vram, *(d.evidence for d in result.doubts), sep="\n  ")


if __name__ == "__main__":
    main()
