"""The texts that quality is measured on: the passages weighin ships, the user's own, and the answers they expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weighin.errors import BadInput
from weighin.prompts import JSON_LINES, file_text, json_line, text_or_messages

PASSAGES = Path(__file__).parent / "texts" / "passages.jsonl"
WORDS = 5  # from which on a plain text under `expected` is taken as the whole answer
SHORTEST_BLOCK = 200  # characters; a heading alone says nothing about quality


def shipped() -> list[dict[str, Any]]:
    """The passages written for weighin; every first part of the list holds all kinds in turn."""
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()
    return [{"stratum": "passages", **json.loads(line)} for line in lines]


def read(path: Path) -> list[dict[str, Any]]:
    """The documents of a JSONL file (`text` or `messages`, optional `name`), or the blocks of a plain text."""
    lines = file_text(path, "text", "a few hundred kilobytes of text are enough to measure on").split("\n")
    found = _of_json(lines, path) if path.suffix in JSON_LINES else _of_text(lines)
    if not found:
        raise BadInput(f"{path} holds no text to measure on; write some, with blank lines between the documents.")
    return [{"stratum": "text", **document} for document in found]


def of_expected(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers that the user wrote down whole, each with the index of its prompt."""
    answers = [_whole(prompt.get("expected")) for prompt in prompts]
    return [
        {"stratum": "expected", "name": f"expected-{index + 1}", "prompt": index, "answer": answer}
        for index, answer in enumerate(answers)
        if answer is not None
    ]


def _whole(expected: Any) -> str | None:
    if isinstance(expected, str) and len(expected.split()) < WORDS:
        return None  # a keyword that the answer contains is no answer
    candidates = (expected.get("text"), expected.get("equals")) if isinstance(expected, dict) else (expected,)
    return next((c for c in candidates if isinstance(c, str) and c.strip()), None)


def _of_json(lines: list[str], path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    names: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        document = _document(json_line(line, where, "text"), where, f"text-{len(found) + 1}")
        name = document["name"]
        if name in names:
            raise BadInput(f"{where}: line {names[name]} has the name '{name}' too; give each its own, or none.")
        names[name] = number
        found.append(document)
    return found


def _document(entry: Any, where: str, default_name: str) -> dict[str, Any]:
    text, messages = text_or_messages(entry, where, "text")
    name = default_name if entry.get("name") is None else entry["name"]
    if not isinstance(name, str) or not name.strip():
        raise BadInput(f"{where}: 'name' must be a text that is not empty; it may be left out.")
    if messages is None:
        return {"name": name, "text": text}
    last = messages[-1]
    if len(messages) < 2 or last["role"] != "assistant" or not last["content"].strip():
        raise BadInput(f"{where}: the last of the 'messages' must be the assistant's answer to those before it.")
    return {"name": name, "messages": messages}


def _of_text(lines: list[str]) -> list[dict[str, Any]]:
    return [{"name": f"text-{number}", "text": block} for number, block in enumerate(_blocks(lines), start=1)]


def _blocks(lines: list[str]) -> list[str]:
    """The blocks between blank lines; a short one goes with the next, the last with the one before."""
    blocks: list[str] = []
    for block in _paragraphs(lines):
        if blocks and len(blocks[-1]) < SHORTEST_BLOCK:
            blocks[-1] += f"\n\n{block}"
        else:
            blocks.append(block)
    if len(blocks) > 1 and len(blocks[-1]) < SHORTEST_BLOCK:
        last = blocks.pop()
        blocks[-1] += f"\n\n{last}"
    return blocks


def _paragraphs(lines: list[str]) -> list[str]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(paragraph) for paragraph in found if paragraph]
