"""A bare loop over each engine's own API, nothing of weighin: load, answer once, then time answers. One JSON object.

    PYTHON_OF_THE_ENGINE benchmarks/bare_engines.py ENGINE PATH THREADS NEW_TOKENS REPEATS ids.json

PATH is what the engine loads: a GGUF file, a folder of ONNX Runtime GenAI or OpenVINO, a Hugging Face folder.
"""

import json
import sys
import time
from pathlib import Path


def llama_cpp(path, threads, new_tokens):
    import llama_cpp as library

    model = library.Llama(
        path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False, flash_attn=True
    )

    def answer(ids):
        model.reset()
        times = []
        for _ in model.generate(ids, temp=0.0, reset=True):
            times.append(time.perf_counter())
            if len(times) == new_tokens:
                return times

    return answer


def onnxruntime(path, threads, new_tokens):
    import onnxruntime_genai as og

    config = og.Config(path)
    session = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = og.Model(config)

    def answer(ids):
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=len(ids) + new_tokens, do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(ids)
        times = []
        while len(times) < new_tokens:
            generator.generate_next_token()
            generator.get_next_tokens()
            times.append(time.perf_counter())
        return times

    return answer


def openvino(path, threads, new_tokens):
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
    config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)

    class Stamps(openvino_genai.StreamerBase):
        def __init__(self):
            super().__init__()
            self.times = []

        def write(self, token):
            self.times += [time.perf_counter()] * (len(token) if isinstance(token, list) else 1)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self):
            pass

    def answer(ids):
        stamps = Stamps()
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(np.array([ids], dtype=np.int64)), openvino.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        )
        pipeline.generate(inputs, config, stamps)
        return stamps.times

    return answer


def transformers(path, threads, new_tokens):
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map="cpu")
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)

    class Stamps:
        def __init__(self):
            self.times = []

        def put(self, _):
            self.times.append(time.perf_counter())

        def end(self):
            pass

    def answer(ids):
        stamps = Stamps()
        prompt = torch.tensor([ids])
        model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=stamps
        )
        return stamps.times[1:]

    return answer


LOOPS = {"llama.cpp": llama_cpp, "onnxruntime": onnxruntime, "openvino": openvino, "transformers": transformers}


def main():
    engine, path, threads, new_tokens, repeats = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    prompts = json.loads(Path(sys.argv[6]).read_text())
    answer = LOOPS[engine](path, threads, new_tokens)
    answer(prompts[0])
    decode = []
    for i in range(repeats):
        times = answer(prompts[(i + 1) % min(2, len(prompts))])
        assert len(times) == new_tokens, (len(times), new_tokens)
        decode.append((new_tokens - 1) / (times[-1] - times[0]))
    print(json.dumps({"decode": decode}))


if __name__ == "__main__":
    main()
