"""A tiny model made by hand, a cache of our own, no network, and ways to run weighin: its CLI, and in process."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import weighin
from weighin import prompts
from weighin.errors import BadInput
from weighin.measurements import Comparison

# A busy machine is no failure.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

BOS, EOS, THINK, END_THINK = 0, 1, 258, 259  # ids 2 to 257 are the bytes
VOCABULARY = 272
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def shapes() -> dict[str, tuple[int, ...]]:
    wide, inner = 16, 32
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, wide)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.{p}_proj.weight": (wide, wide) for p in "qkvo"}
        found |= {f"{at}.mlp.{p}_proj.weight": (inner, wide) for p in ("gate", "up")}
        found |= {f"{at}.mlp.down_proj.weight": (wide, inner)}
        found |= {f"{at}.{p}_layernorm.weight": (wide,) for p in ("input", "post_attention")}
    return found | {"model.norm.weight": (wide,), "lm_head.weight": (VOCABULARY, wide)}


def weights() -> bytes:
    """A safetensors file of small float32 values, made by hand."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    values: list[float] = []
    for name, shape in shapes().items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        table[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [4 * len(values), 4 * (len(values) + count)],
        }
        values += [((i * 37) % 101 - 50) / 500 for i in range(count)]
    header = json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack(f"<{len(values)}f", *values)


def tokenizer(*, thinking: bool = False) -> Tokenizer:
    """A tokenizer with a token for every byte, so that every text has ids and every id a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": BOS, "</s>": EOS, **{c: i for i, c in enumerate(alphabet, start=2)}}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", *(["<think>", "</think>"] if thinking else [])])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return made


def make_model(folder: Path, *, template: str | None = TEMPLATE, thinking: bool = False, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "bos_token_id": BOS}))
    (folder / "model.safetensors").write_bytes(weights())
    tokenizer(thinking=thinking).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def ids_of(text: str) -> list[int]:
    """The ids of a plain text in the tiny model's vocabulary, no begin token."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all test processes of a session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session", autouse=True)
def _cache(shared_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHIN_CACHE", str(shared_folder / "weighin-cache"))
        yield


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> Any:
        if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"):
            return connect(self, address)
        raise OSError("the tests have no network")

    monkeypatch.setattr(socket.socket, "connect", local_only)


CHILD = """
import json, sys
sys.modules["torch"] = None
from weighin import tokens
from weighin.errors import BadInput
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    question = json.loads(line)
    try:
        answer = {"render": tokens._render, "decode": tokens._decode}[question["action"]](question)
    except BadInput as error:
        answer = {"error": str(error)}
    except Exception:
        answer = {"crashed": True}
    print(json.dumps(answer), file=answers, flush=True)
"""


@pytest.fixture(scope="session")
def tokenizer_process() -> Iterator[subprocess.Popen[str]]:
    """The child of prompts.py, kept for the whole session: importing transformers for each question takes a second."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    ) as process:  # fmt: skip
        yield process
        assert process.stdin is not None
        process.stdin.close()


def keep_asking(patch: pytest.MonkeyPatch, process: subprocess.Popen[str]) -> None:
    """prompts.py asks the kept child instead of a fresh one each time; its code is the same."""
    fresh = prompts._ask

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        if "crashed" in answer:
            return fresh(question)
        if "error" in answer:
            raise BadInput(answer["error"])
        return answer

    patch.setattr(prompts, "_ask", ask)


@pytest.fixture
def quick_prompts(tokenizer_process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    keep_asking(monkeypatch, tokenizer_process)


SMALL = {
    "quality": False,
    "rounds": 1,
    "max_new_tokens": 4,
    "response_tokens": 6,
    "prompt_tokens": (),
    "prompts": ["hello"],
}


@pytest.fixture
def fakes(
    quick_prompts: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Comparison]:
    """`weighin.compare` in this process, small: fakes("fp32@cpu", "nf4@cpu+fail=load.oom", rounds=2)."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*contenders: str, **options: Any) -> Comparison:
        names = [f"fake:{name}" for name in contenders]
        arguments: dict[str, Any] = {"model": str(tiny_model), "out": tmp_path / "out", **SMALL, **options}
        return weighin.compare(contenders=names, **arguments)

    return run


class Finished(NamedTuple):
    folder: Path
    comparison: Comparison


FINISHED = ("fp32@cpu", "nf4@cpu+says=74.75.1", "bf16@cpu+fail=load.oom", "int8@cuda")


@pytest.fixture(scope="session")
def finished(
    tokenizer_process: subprocess.Popen[str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """A comparison of two rounds with two contenders that ran, one that failed and one that cannot run. Copy it."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        keep_asking(patch, tokenizer_process)
        options = {**SMALL, "rounds": 2, "prompts": ["hello", "how | are you?"], "prompt_tokens": (16,)}
        found = weighin.compare(str(tiny_model), [f"fake:{name}" for name in FINISHED], out=folder, **options)
    return Finished(folder, found)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable that everything started by this test has in its environment."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("WEIGHIN_TEST_MARK", value)
    return value


def alive(mark: str) -> list[str]:
    """Processes with the mark; the kernel takes a moment over those that were killed."""
    for _ in range(50):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("WEIGHIN_TEST_MARK") == mark and process.status() != "zombie":
                    found.append(f"{process.pid}: {process.cmdline()}")
            except psutil.Error:
                continue
        if not found:
            return []
        time.sleep(0.05)
    return found


def cli(*arguments: Any, timeout: float = 120, **changes: str) -> subprocess.CompletedProcess[str]:
    """`weighin ARGUMENTS` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "weighin", *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", **changes},
    )  # fmt: skip


SMALL_CLI = ("--no-quality", "--rounds", 1, "--max-new-tokens", 4, "--response-tokens", 6, "--prompt-tokens", 16)
