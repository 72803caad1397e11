"""A GGUF file as a safetensors folder in float32, by transformers' own reader; runs in a child."""

from __future__ import annotations

import sys
from pathlib import Path

RECIPE = "safetensors-fp32"
TOKENIZER_RECIPE = "tokenizer"


def unpack(gguf: str, out: str) -> None:
    """Write config, dequantized weights, tokenizer and template of `gguf` into the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM

    file = Path(gguf)
    unpack_tokenizer(gguf, out)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    # What was dequantized must not be saved as quantized.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)


def unpack_tokenizer(gguf: str, out: str) -> None:
    """Write the tokenizer and template alone."""
    from transformers import AutoTokenizer

    file = Path(gguf)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(out)


if __name__ == "__main__":
    {"model": unpack, "tokenizer": unpack_tokenizer}[sys.argv[1]](sys.argv[2], sys.argv[3])
