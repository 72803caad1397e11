"""Template and tokens: every prompt becomes ids once, in a short limited child that ends before any timing.

The parent's half is at the top, the child's at the bottom. The child keeps torch out: tokenizers do not need it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weighin.errors import BadInput, WeighinError

BUILT_IN = (
    "hello good morning may i see the menu",
    "ok i want two chicken biryani with couple of drinks",
)
LENGTH_TEXT = Path(__file__).parent / "texts" / "harbour.txt"
SECONDS = 180
MEMORY = 8 * 2**30
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))
LARGEST_FILE = 64 * 2**20


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a text file (one a line) or a JSONL file (`prompt` or `messages`, optional `expected`)."""
    if not path.is_file():
        raise BadInput(f"There is no prompt file {path}.")
    if path.stat().st_size > LARGEST_FILE:
        raise BadInput(f"{path} is larger than 64 MiB; a prompt file holds a prompt a line.")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8.") from error
    as_json = path.suffix in (".jsonl", ".json", ".ndjson")
    prompts = [
        _json_prompt(line, f"{path}, line {number}") if as_json else {"text": line.strip()}
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise BadInput(f"{path} holds no prompt; write one a line.")
    return prompts


def _json_prompt(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is not JSON ({error}). Each line is an object with 'prompt' or 'messages'.") from error
    return check(entry, where)


def check(entry: Any, where: str) -> dict[str, Any]:
    """A prompt that somebody else wrote, in our words."""
    if not isinstance(entry, dict):
        raise BadInput(f"{where} is not an object with 'prompt' or 'messages'.")
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where} holds what is no text or JSON ({error}).") from error
    text, messages = entry.get("prompt"), entry.get("messages")
    if (text is None) == (messages is None):
        raise BadInput(f"{where} needs either 'prompt' or 'messages'.")
    if text is not None and (not isinstance(text, str) or not text.strip()):
        raise BadInput(f"{where}: 'prompt' must be a text that is not empty.")
    if messages is not None and not (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
    ):
        raise BadInput(f"{where}: 'messages' must be a list of objects with 'role' and 'content', both texts.")
    kept = [{"role": m["role"], "content": m["content"]} for m in messages] if messages else None
    return {"text": text, "messages": kept, "expected": entry.get("expected")}


def render(
    model_path: str,
    prompts: list[dict[str, Any]],
    *,
    template: str,
    system: str | None,
    lengths: list[int],
    vocabulary: int,
    remote_code: bool = False,
) -> dict[str, Any]:
    """Ids of every prompt and of one prompt of each length; also what the tokenizer knows of stops and thinking.

    `template` is "auto", "chat", "raw", or the path of a Jinja file.
    """
    template_text = None
    if template not in ("auto", "chat", "raw"):
        file = Path(template)
        if not file.is_file():
            raise BadInput(f"--template takes chat, raw or a Jinja file; there is no file {template}.")
        try:
            template_text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"The template {file} is not UTF-8 text ({error.reason}); save it as UTF-8.") from error
        template = "file"
    return _ask(
        {
            "action": "render",
            "path": model_path,
            "prompts": prompts,
            "template": template,
            "template_text": template_text,
            "system": system,
            "lengths": lengths,
            "length_text": LENGTH_TEXT.read_text(encoding="utf-8"),
            "vocabulary": vocabulary,
            "remote_code": remote_code,
        }
    )


def decode(
    model_path: str, answers: list[list[int]], opened: list[bool], thinking: list[str] | None, remote_code: bool
) -> list[dict[str, Any]]:
    """The texts of id lists, special tokens left out, a thinking part apart; `opened` where the prompt began it."""
    question = {"action": "decode", "path": model_path, "answers": answers, "opened": opened}
    answer = _ask({**question, "thinking": thinking, "remote_code": remote_code})
    texts: list[dict[str, Any]] = answer["texts"]
    return texts


def _command() -> list[str]:
    from weighin.environments import this_interpreter

    package = str(Path(__file__).parent.parent)
    boot = "import sys; sys.path += sys.argv[1:]; from weighin.prompts import child; child()"
    return [sys.executable, "-I", "-c", boot, package, *this_interpreter().paths]


def _child_environment() -> dict[str, str]:
    from weighin.runner import worker_environment

    return {**worker_environment(1), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _ask(question: dict[str, Any]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            _command(),
            input=json.dumps(question).encode(),
            capture_output=True,
            timeout=SECONDS,
            env=_child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"The tokenizer or chat template of {question['path']} did not finish in {SECONDS} s; it was stopped. "
            f"Try --template raw."
        ) from None
    if done.returncode != 0 or not done.stdout:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise BadInput(
            f"The tokenizer of {question['path']} could not be used ({last[0][:500]}). "
            f"The folder needs tokenizer.json (or tokenizer.model) and tokenizer_config.json."
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise BadInput(answer["error"])
    return answer


@contextmanager
def stream_decoder(model_path: str, remote_code: bool) -> Iterator[Any]:
    """A function from the next id to the text it adds, for `weighin run`; nothing is timed beside it."""
    with subprocess.Popen(
        _command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=_child_environment(),
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        question = {"action": "stream", "path": model_path, "remote_code": remote_code}
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()

        def add(token: int) -> str:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(f"{token}\n")
                process.stdin.flush()
            except BrokenPipeError as error:
                raise WeighinError(f"The tokenizer of {model_path} stopped while decoding.") from error
            return str(json.loads(process.stdout.readline() or '""'))

        yield add
        process.stdin.close()


# ---- the child


def child() -> None:
    """Answer one question from standard input with one JSON object on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    _limit()
    sys.modules["torch"] = None  # type: ignore[assignment]
    question = json.loads(sys.stdin.readline())
    try:
        if question["action"] == "stream":
            _stream(question, answers)
            return
        answer = _render(question) if question["action"] == "render" else _decode(question)
    except BadInput as error:
        answer = {"error": str(error)}
    json.dump(answer, answers)
    answers.flush()
    os._exit(0)


def _limit() -> None:
    """A template is a program from a stranger: it gets little memory and little time."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _tokenizer(question: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    folder = question["path"]
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=bool(question["remote_code"])
        )
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no message"])[0]
        raise BadInput(
            f"The tokenizer of {folder} does not load ({type(error).__name__}: {said[:500]}). "
            f"The folder needs tokenizer.json (or tokenizer.model) and tokenizer_config.json."
        ) from error


def _render(question: dict[str, Any]) -> dict[str, Any]:
    auto_class = _auto_class(Path(question["path"]))
    tokenizer = _tokenizer(question)
    template, note = _choose_template(question, tokenizer)
    rendered = [_render_one(question, tokenizer, template, prompt) for prompt in question["prompts"]]
    thinking = _thinking(tokenizer)
    for entry in rendered:
        entry["thinking_open"] = _ends_thinking(entry["text"], thinking)
    bos = tokenizer.bos_token_id
    starts_with_bos = bos is not None and all(entry["ids"][0] == bos for entry in rendered)
    lengths = _lengths(question, tokenizer, [bos] if starts_with_bos else [])
    ids = [i for listed in (*(entry["ids"] for entry in rendered), *lengths.values()) for i in listed]
    if max(ids) >= question["vocabulary"]:
        raise BadInput(
            f"The tokenizer of {question['path']} gives id {max(ids)}, but the model has only "
            f"{question['vocabulary']} embeddings. The tokenizer belongs to another model."
        )
    return {
        "rendered": rendered,
        "template": template,
        "template_note": note,
        "lengths": lengths,
        "eos_ids": [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [],
        "thinking": thinking,
        "auto_class": auto_class,
    }


def _auto_class(path: Path) -> str:
    """The class of transformers that loads the model. One that it does not know is an error now, not minutes later."""
    causal = "AutoModelForCausalLM"
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not config or "auto_map" in config:
        return causal
    import difflib

    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    model_type = str(config.get("model_type"))
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return causal
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return "AutoModelForImageTextToText"
    close = difflib.get_close_matches(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
    hint = f" Did the config mean '{close[0]}'?" if close else ""
    raise BadInput(
        f"{path}: transformers {transformers.__version__} knows no causal language model of the type '{model_type}' "
        f"(architecture {(config.get('architectures') or ['?'])[0]}).{hint} A newer transformers may."
    )


def _choose_template(question: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    asked = question["template"]
    has = bool(getattr(tokenizer, "chat_template", None))
    if asked == "file":
        return "file", "the template file that was given"
    if asked == "raw":
        return "raw", "raw text, as asked"
    if has:
        return "chat", "the model's own chat template"
    if asked == "chat" or any(prompt.get("messages") for prompt in question["prompts"]):
        raise BadInput(
            f"{question['path']} has no chat template. Use --template raw with plain prompts, or --template FILE."
        )
    return "raw", "raw text: the model has no chat template"


def _render_one(question: dict[str, Any], tokenizer: Any, template: str, prompt: dict[str, Any]) -> dict[str, Any]:
    if template == "raw":
        if prompt.get("messages"):
            raise BadInput("--template raw takes plain prompts, not messages.")
        if question["system"]:
            raise BadInput("--system needs a chat template; with --template raw write it into the prompt.")
        text = prompt["text"]
        ids = tokenizer(text).input_ids
    else:
        messages = conversation(prompt, question["system"])
        try:
            text = tokenizer.apply_chat_template(
                messages, chat_template=question["template_text"], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
            raise BadInput(
                f"The chat template refuses this conversation ({said}). Roles given: "
                f"{', '.join(m['role'] for m in messages)}. Some templates take no system message."
            ) from error
        ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise BadInput("A prompt gives no token at all; write something into it.")
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise BadInput(
            f"A prompt starts with the begin token twice (id {bos}): template and tokenizer both add it. "
            f"Take it out of the template, or use --template raw."
        )
    return {"text": text, "ids": list(ids)}


def conversation(prompt: dict[str, Any], system: str | None) -> list[dict[str, str]]:
    """The messages a prompt stands for."""
    messages: list[dict[str, str]] = prompt.get("messages") or [{"role": "user", "content": prompt["text"]}]
    return [{"role": "system", "content": system}, *messages] if system else messages


def _lengths(question: dict[str, Any], tokenizer: Any, head: list[int]) -> dict[str, list[int]]:
    body = tokenizer(question["length_text"], add_special_tokens=False).input_ids
    lengths = {}
    for length in question["lengths"]:
        copies = -(-length // len(body))
        lengths[str(length)] = (head + body * copies)[:length]
    return lengths


def _thinking(tokenizer: Any) -> list[str] | None:
    """The markers of the thinking part, where the template uses a pair that the vocabulary knows."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    vocabulary = tokenizer.get_vocab()
    for begin, end in THINKING:
        if end in vocabulary and (end in template or begin in vocabulary):
            return [begin, end]
    return None


def _ends_thinking(text: str, marks: list[str] | None) -> bool:
    """Whether a rendered prompt ends inside a thinking part, as some templates make it."""
    return marks is not None and text.rfind(marks[0]) > text.rfind(marks[1])


def _decode(question: dict[str, Any]) -> dict[str, Any]:
    tokenizer = _tokenizer(question)
    marks = question["thinking"]
    begin, end = tokenizer.convert_tokens_to_ids(marks) if marks else (None, None)

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    texts = []
    for ids, opened in zip(question["answers"], question["opened"], strict=True):
        thinking = None
        answer = ids
        if end is not None and end in ids:
            cut = ids.index(end)
            thinking, answer = text([i for i in ids[:cut] if i != begin]), ids[cut + 1 :]
        elif opened or (begin is not None and ids[:1] == [begin]):
            thinking, answer = text([i for i in ids if i != begin]), []  # cut off while still thinking
        texts.append({"text": text(answer), "thinking": thinking, "whole": text(ids)})
    return {"texts": texts}


def _stream(question: dict[str, Any], answers: Any) -> None:
    tokenizer = _tokenizer(question)
    ids: list[int] = []
    shown = ""
    for line in sys.stdin:
        ids.append(int(line))
        text = tokenizer.decode(ids, skip_special_tokens=True)
        # A character of several tokens is shown when it is whole.
        piece = "" if text.endswith("�") else text[len(shown) :]
        shown += piece
        answers.write(json.dumps(piece) + "\n")
        answers.flush()
