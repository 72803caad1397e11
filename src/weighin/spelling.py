"""How texts become ids, in the child of tokens.py: prompts, the begin token, documents with the tokens that count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from weighin.errors import BadInput
from weighin.prompts import conversation

SHORTEST_WINDOW = 16  # tokens; the rest of a long text below this has too little before it to say much
BOS_PASSAGES = 4


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """A tokenizer with its template, and with what was asked about the begin token."""

    tokenizer: Any
    template: str  # "chat", "file" or "raw"
    template_text: str | None
    system: str | None
    begin: int | None  # the begin token, where one is known
    bos: str  # "auto", "add" or "none"
    head: list[int]  # what stands before every plain text
    tail: list[int]  # and after it

    @classmethod
    def of(cls, question: dict[str, Any], tokenizer: Any, template: str, begin: int | None) -> Spelling:
        """The spelling that a question asks for."""
        head, tail = _frame(tokenizer, question["length_text"])
        bos = question["bos"]
        return cls(
            tokenizer=tokenizer,
            template=template,
            template_text=question["template_text"],
            system=question["system"],
            begin=begin,
            bos=bos,
            head=_begun(head, begin, bos),
            tail=tail,
        )

    def prompt(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """A prompt as the text that the model reads, and its ids."""
        if self.template == "raw":
            if prompt.get("messages"):
                raise BadInput("--template raw takes plain prompts, not messages.")
            if self.system:
                raise BadInput("--system needs a chat template; with --template raw write it into the prompt.")
            text = prompt["text"]
            ids = list(self.tokenizer(text).input_ids)
        else:
            text = self._chat(conversation(prompt, self.system))
            ids = self.bare(text)
        ids = _begun(ids, self.begin, self.bos)
        if not ids:
            raise BadInput("A prompt gives no token at all; write something into it.")
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise BadInput(
                f"A prompt starts with the begin token twice (id {bos}): template and tokenizer both add it. "
                f"Take it out of the template, or use --template raw."
            )
        return {"text": text, "ids": ids}

    def bare(self, text: str) -> list[int]:
        """The ids of a text alone, nothing added."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def document(
        self, document: dict[str, Any], rendered: list[dict[str, Any]], longest: int
    ) -> list[tuple[list[int], int]]:
        """A document as ids, with the index from which its tokens count; a long plain text in several windows."""
        if "answer" in document:
            prompt = rendered[document["prompt"]]
            return [self._answered(prompt["text"], prompt["ids"], document["answer"])]
        if document.get("messages"):
            return [self._dialogue(document["messages"])]
        return self._windows(document["text"], longest)

    def plain_dialogue(self, messages: list[dict[str, str]]) -> tuple[list[int], int]:
        """A dialogue as plain text, for a model without a template, or with one that refuses it."""
        before = conversation({"messages": messages[:-1]}, self.system)
        text = "".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in before) + "Assistant:"
        # The space belongs to the answer's first word: most tokenizers have one token for both.
        return self._answered(text, [*self.head, *self._text(text)], f" {messages[-1]['content']}")

    def bos_documents(self, passages: Iterable[dict[str, Any]], longest: int) -> list[dict[str, Any]]:
        """Passages with the begin token if plain texts have none, else without it.

        Only what can be counted in both ways counts; a passage that begins with the token counts one more in front.
        """
        if self.begin is None:
            return []
        other = self.head[1:] if self.begins else [self.begin, *self.head]
        # In one of the two ways nothing stands before the first token of the text, so that one has no probability.
        start = len(other) + (0 if self.head and other else 1)
        found: list[dict[str, Any]] = []
        for passage in passages:
            body = [*self._text(passage["text"]), *self.tail]
            ids = [*other, *body]
            if start < len(ids) and max(len(other), len(self.head)) + len(body) <= longest:
                found.append(_entry("bos", passage["name"], ids, start))
        return found[:BOS_PASSAGES]

    @property
    def begins(self) -> bool:
        """Whether a plain text starts with the begin token."""
        return self.begin is not None and self.head[:1] == [self.begin]

    def _chat(self, messages: list[dict[str, str]]) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, chat_template=self.template_text, tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
            raise BadInput(
                f"The chat template refuses this conversation ({said}). Roles given: "
                f"{', '.join(m['role'] for m in messages)}. Some templates take no system message."
            ) from error

    def _text(self, text: str) -> list[int]:
        """The ids of a plain text without its head, also where the text itself spells out the begin token."""
        ids = self.bare(text)
        return _without(ids, self.begin) if self.begins or self.bos == "none" else ids

    def _dialogue(self, messages: list[dict[str, str]]) -> tuple[list[int], int]:
        if self.template == "raw":
            return self.plain_dialogue(messages)
        text = self._chat(conversation({"messages": messages[:-1]}, self.system))
        ids = _begun(self.bare(text), self.begin, self.bos)
        return self._answered(text, ids, messages[-1]["content"])

    def _answered(self, text: str, ids: list[int], answer: str) -> tuple[list[int], int]:
        """The ids of a prompt and of an answer to it, and where the answer starts."""
        before, joined = self.bare(text), self.bare(text + answer)
        # Where the last token of the prompt would swallow the answer's first letters, each is spelled on its own.
        more = joined[len(before) :] if joined[: len(before)] == before else self.bare(answer)
        return [*ids, *more], max(1, len(ids))

    def _windows(self, text: str, longest: int) -> list[tuple[list[int], int]]:
        body = [*self._text(text), *self.tail]
        room = max(1, longest - len(self.head))
        windows = [[*self.head, *body[at : at + room]] for at in range(0, len(body), room)]
        if len(windows) > 1 and len(windows[-1]) < SHORTEST_WINDOW:
            windows.pop()
        return [(ids, max(1, len(self.head))) for ids in windows]


def spell_documents(
    spelling: Spelling, documents: list[dict[str, Any]], rendered: list[dict[str, Any]], longest: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Every document as ids with its counted tokens, and sentences about those that did not go as meant."""
    found: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    lost: list[str] = []
    for document in documents:
        try:
            pieces = spelling.document(document, rendered, longest)
        except BadInput as error:
            refused[document["name"]] = str(error)
            pieces = [spelling.plain_dialogue(document["messages"])]
        kept = [(ids[:longest], start) for ids, start in pieces if start < min(len(ids), longest)]
        if not kept:
            lost.append(document["name"])
        for number, (ids, start) in enumerate(kept, start=1):
            name = document["name"] if number == 1 else f"{document['name']}#{number}"
            found.append(_entry(document["stratum"], name, ids, start))
    notes = []
    if refused:
        why = next(iter(refused.values()))
        notes.append(f"Written as plain text ('User: …', 'Assistant: …'): {_listed(list(refused))}. {why}")
    if lost:
        notes.append(f"Left out, since none of their tokens can be counted within {longest}: {_listed(lost)}.")
    return found, notes


def _entry(stratum: str, name: str, ids: list[int], start: int) -> dict[str, Any]:
    """A document with its ids, counted from `start` to the end."""
    return {"stratum": stratum, "name": name, "ids": ids, "counted": [[start, len(ids)]]}


def _frame(tokenizer: Any, sample: str) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a plain text."""
    whole = list(tokenizer(sample).input_ids)
    bare = list(tokenizer(sample, add_special_tokens=False).input_ids)
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []


def _begun(ids: list[int], begin: int | None, bos: str) -> list[int]:
    """Ids with or without the begin token in front, as was asked."""
    if begin is None or bos == "auto":
        return ids
    if bos == "none":
        return _without(ids, begin)
    return ids if ids[:1] == [begin] else [begin, *ids]


def _without(ids: list[int], begin: int | None) -> list[int]:
    while ids and ids[0] == begin:
        ids = ids[1:]
    return ids


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
