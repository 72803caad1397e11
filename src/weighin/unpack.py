"""A GGUF file as a safetensors folder in float32, by transformers' own reader; runs in a child."""

from __future__ import annotations

import sys
from pathlib import Path


def unpack(gguf: str, out: str) -> None:
    """Write config, dequantized weights, tokenizer and template of `gguf` into the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(gguf)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    # What was dequantized must not be saved as quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    unpack(sys.argv[1], sys.argv[2])
