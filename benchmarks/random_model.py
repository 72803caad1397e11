"""Make a model folder of given shapes with random weights: speed and memory need no real ones.

python benchmarks/random_model.py gemma-3-4b OUT --tokenizer FOLDER
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

SHAPES = {
    # Gemma 3 4B's text side: 34 layers, five of six with a sliding window, a tied head of 262,208 rows
    "gemma-3-4b": (
        "gemma3_text",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
        },
    ),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make(shape: str, out: Path, tokenizer: Path, device: str = "cpu", dtype: str = "bfloat16") -> Path:
    """Write the folder; on a GPU a model of this size takes seconds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = SHAPES[shape]
    config = AutoConfig.for_model(model_type, **values)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, out / name)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model folder to take the tokenizer from")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    make(arguments.shape, arguments.out, arguments.tokenizer, arguments.device)
