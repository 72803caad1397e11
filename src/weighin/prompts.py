"""Prompts: read, checked, and made into ids once, in a short limited child (tokens.py) that ends before any timing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
LARGEST_FILE = 64 * 2**20
JSON_LINES = (".jsonl", ".json", ".ndjson")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a text file (one a line) or a JSONL file (`prompt` or `messages`, optional `expected`)."""
    lines = file_text(path, "prompt", "a prompt file holds a prompt a line").split("\n")
    as_json = path.suffix in JSON_LINES
    prompts = [
        check(json_line(line, f"{path}, line {number}", "prompt"), f"{path}, line {number}")
        if as_json
        else {"text": line.strip()}
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise BadInput(f"{path} holds no prompt; write one a line.")
    return prompts


def file_text(path: Path, kind: str, advice: str) -> str:
    """The text of a file that the user named, if it is there, of a bearable size, and UTF-8."""
    if not path.is_file():
        raise BadInput(f"There is no {kind} file {path}.")
    if path.stat().st_size > LARGEST_FILE:
        raise BadInput(f"{path} is larger than 64 MiB; {advice}.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8.") from error


def json_line(line: str, where: str, key: str) -> Any:
    """What a line of a JSONL file holds."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is not JSON ({error}). Each line is an object with '{key}' or 'messages'.") from error


def check(entry: Any, where: str) -> dict[str, Any]:
    """A prompt that somebody else wrote, in our words."""
    text, messages = text_or_messages(entry, where, "prompt")
    return {"text": text, "messages": messages, "expected": entry.get("expected")}


def text_or_messages(entry: Any, where: str, key: str) -> tuple[str | None, list[dict[str, str]] | None]:
    """The text under `key`, or the messages: an object that somebody else wrote has one of them."""
    if not isinstance(entry, dict):
        raise BadInput(f"{where} is not an object with '{key}' or 'messages'.")
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where} holds what is no text or JSON ({error}).") from error
    text, messages = entry.get(key), entry.get("messages")
    if (text is None) == (messages is None):
        raise BadInput(f"{where} needs either '{key}' or 'messages'.")
    if text is not None and (not isinstance(text, str) or not text.strip()):
        raise BadInput(f"{where}: '{key}' must be a text that is not empty.")
    if messages is not None and not (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
    ):
        raise BadInput(f"{where}: 'messages' must be a list of objects with 'role' and 'content', both texts.")
    return text, [{"role": m["role"], "content": m["content"]} for m in messages] if messages else None


def conversation(prompt: dict[str, Any], system: str | None) -> list[dict[str, str]]:
    """The messages a prompt stands for."""
    messages: list[dict[str, str]] = prompt.get("messages") or [{"role": "user", "content": prompt["text"]}]
    return [{"role": "system", "content": system}, *messages] if system else messages


def render(
    model_path: str,
    prompts: list[dict[str, Any]],
    *,
    template: str,
    system: str | None,
    lengths: list[int],
    vocabulary: int,
    remote_code: bool = False,
    documents: Sequence[dict[str, Any]] = (),
    bos: str = "auto",
    longest_document: int = 1024,
) -> dict[str, Any]:
    """Ids of every prompt, of one prompt of each length and of every document; also what the tokenizer knows of stops.

    `template` is "auto", "chat", "raw", or the path of a Jinja file; `bos` is "auto", "add" or "none".
    """
    if bos not in ("auto", "add", "none"):
        raise BadInput(f"--bos takes auto, add or none, not '{bos}'.")
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
            "documents": list(documents),
            "bos": bos,
            "longest_document": longest_document,
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
    boot = "import sys; sys.path += sys.argv[1:]; from weighin.tokens import child; child()"
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
