"""The child of prompts.py: it alone loads a tokenizer. It keeps torch out, which tokenizers do not need."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from weighin.errors import BadInput
from weighin.prompts import SECONDS
from weighin.spelling import Spelling, spell_documents

MEMORY = 8 * 2**30
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"))


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
    path, longest = Path(question["path"]), question["longest_document"]
    config = _config(path)
    auto_class, auto_class_reason = _auto_class(path, config)
    tokenizer = _tokenizer(question)
    template, note = _choose_template(question, tokenizer)
    begin = _begin(question, tokenizer, config)
    spelling = Spelling.of(question, tokenizer, template, begin)
    rendered = [spelling.prompt(prompt) for prompt in question["prompts"]]
    thinking = _thinking(tokenizer)
    for entry in rendered:
        entry["thinking_open"] = _ends_thinking(entry["text"], thinking)
    head = [] if begin is None or any(entry["ids"][0] != begin for entry in rendered) else [begin]
    lengths = _lengths(question, spelling, head)
    documents, notes = spell_documents(spelling, question["documents"], rendered, longest)
    bos_documents = spelling.bos_documents(_prose(question["documents"]), longest)
    every = [*rendered, *documents, *bos_documents]
    _check_vocabulary(question, [*(entry["ids"] for entry in every), *lengths.values()])
    return {
        "rendered": rendered,
        "template": template,
        "template_note": note,
        "lengths": lengths,
        "documents": documents,
        "bos_check": {"id": begin, "now": spelling.begins, "documents": bos_documents},
        "notes": notes,
        "eos_ids": [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [],
        "thinking": thinking,
        "tokenizer_size": max(tokenizer.get_vocab().values()) + 1,
        "auto_class": auto_class,
        "auto_class_reason": auto_class_reason,
    }


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return config


def _begin(question: dict[str, Any], tokenizer: Any, config: dict[str, Any]) -> int | None:
    """The begin token: the tokenizer's, else the config's; one that the model has no embedding for is none."""
    inner = config.get("text_config")
    inner_id = inner.get("bos_token_id") if isinstance(inner, dict) else None
    named = (tokenizer.bos_token_id, config.get("bos_token_id"), inner_id)
    known = [i for i in named if type(i) is int and 0 <= i < question["vocabulary"]]
    if question["bos"] == "add" and not known:
        raise BadInput(
            f"--bos add: neither the tokenizer nor the config.json of {question['path']} names a begin token "
            f"(bos_token_id) that the model knows. Use --bos auto."
        )
    return known[0] if known else None


def _prose(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The passages on which the two ways to begin are compared: plain prose, which every model has read."""
    return [d for d in documents if d["stratum"] == "passages" and d.get("text") and d["name"].startswith("prose")]


def _check_vocabulary(question: dict[str, Any], listed: list[list[int]]) -> None:
    largest = max(max(ids) for ids in listed if ids)
    if largest >= question["vocabulary"]:
        raise BadInput(
            f"The tokenizer of {question['path']} gives id {largest}, but the model has only "
            f"{question['vocabulary']} embeddings. The tokenizer belongs to another model."
        )


def _auto_class(path: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The class of transformers that loads the model; where it knows none, why. Other engines may run it."""
    causal = "AutoModelForCausalLM"
    if not config or "auto_map" in config:
        return causal, None
    import difflib

    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    model_type = str(config.get("model_type"))
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return causal, None
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return "AutoModelForImageTextToText", None
    close = difflib.get_close_matches(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
    hint = f" Did the config mean '{close[0]}'?" if close else ""
    return None, (
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


def _lengths(question: dict[str, Any], spelling: Spelling, head: list[int]) -> dict[str, list[int]]:
    body = spelling.bare(question["length_text"])
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
