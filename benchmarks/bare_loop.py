"""The calls a person would time by hand, and nothing of weighin: import, load, generate. Prints one JSON object.

python benchmarks/bare_loop.py FOLDER THREADS NEW_TOKENS REPEATS ids.json
"""

import json
import sys
import time
from pathlib import Path


class Stamps:
    """`generate` hands it the prompt first, then each token as it is there."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def peak_bytes():
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main():
    folder, threads, new_tokens, repeats = sys.argv[1], *map(int, sys.argv[2:5])
    prompts = json.loads(Path(sys.argv[5]).read_text())
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(folder))]  # its module, before the clock
    torch.set_num_threads(threads)
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    load_seconds = time.perf_counter() - began
    model.generation_config = GenerationConfig(do_sample=False)
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)

    def answer(ids):
        prompt = torch.tensor([ids])
        stamps = Stamps()
        model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=stamps
        )
        times = stamps.times[1:]
        assert len(times) == new_tokens
        return (new_tokens - 1) / (times[-1] - times[0])

    answer(prompts[0])
    decode = [answer(prompts[(i + 1) % len(prompts)]) for i in range(repeats)]
    print(json.dumps({"load_seconds": load_seconds, "decode": decode, "peak_ram_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
