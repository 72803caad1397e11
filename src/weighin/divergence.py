"""Where two answers part and whether that says anything, and what is odd about one answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

# In nats: a ratio of 1.2 between two probabilities. Below it, rounding in another order or precision decides which
# token comes first, and two runs of the same weights part there too.
NEAR_TIE = 0.2
LONGEST_RUN, FEWEST_TIMES, FEWEST_TOKENS = 40, 4, 24  # of a loop at the end
GRAM, GRAM_TOKENS, GRAM_SHARE = 4, 60, 0.5  # of an answer that says the same again and again
SHOWN, BEFORE, IN_SENTENCE = 60, 30, 30  # characters
LONGEST_WORD = 20  # characters; a longer one is a script without spaces, and its start says nothing


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something odd about one answer: "empty", "cut_off" or "repeats"."""

    type: str
    evidence: str


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where an answer leaves the reference's, and what the reference thinks of that."""

    prompt: int
    position: int  # of the first token that differs, from 0
    mine: int | None  # the token there; None: it had ended
    reference: int | None
    mine_text: str  # what it says from the word on in which the texts part; empty: it ends, or the texts are the same
    reference_text: str
    common_text: str  # what both say before
    reference_best: list[int]  # the reference's two likeliest tokens there; empty: not known
    margin: float | None  # log of the ratio of their probabilities
    behind: float | None  # by how many nats the reference finds mine less likely than its best; None: not known
    kind: str  # "near_tie", "change" or "unknown"


# ---- one answer


def faults(ids: Sequence[int], text: str, finish: str) -> list[Fault]:
    """What is odd about an answer; with finish "stop" its last id is the stop token."""
    found = []
    if not text.strip():
        evidence = f"{_tokens(len(ids))} and {'only whitespace' if text else 'no text'}"
        found.append(Fault(type="empty", evidence=evidence))
    if finish == "length":
        found.append(Fault(type="cut_off", evidence=f"it had not ended after {_tokens(len(ids))}"))
    said = ids[:-1] if finish == "stop" else ids
    if evidence := _loop(said) or _same_again(said):
        found.append(Fault(type="repeats", evidence=evidence))
    return found


def _tokens(count: int) -> str:
    return f"{count} {'token' if count == 1 else 'tokens'}"


def _loop(ids: Sequence[int]) -> str:
    """What the answer's end repeats, in words; empty if it repeats nothing. The last time may be incomplete."""
    for run in range(1, min(LONGEST_RUN, len(ids) // FEWEST_TIMES) + 1):
        length = run
        while length < len(ids) and ids[-1 - length] == ids[-1 - length + run]:
            length += 1
        if length >= max(FEWEST_TOKENS, FEWEST_TIMES * run):
            return f"the last {length} tokens repeat {'one token' if run == 1 else f'a run of {run}'}"
    return ""


def _same_again(ids: Sequence[int]) -> str:
    if len(ids) < GRAM_TOKENS:
        return ""
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    again = len(grams) - len(set(grams))
    return f"{again} of its {len(grams)} runs of {GRAM} tokens came before" if again > GRAM_SHARE * len(grams) else ""


# ---- two answers


def compare(
    prompt: int,
    mine_ids: Sequence[int],
    mine_text: str,
    reference_ids: Sequence[int],
    reference_text: str,
    at: dict[str, Any] | None,
) -> Divergence | None:
    """Where mine leaves the reference's answer; None where the ids are the same.

    `at` is what the reference thinks at that position: its two best ids with their log-probabilities, and those of
    the ids it was asked about.
    """
    if list(mine_ids) == list(reference_ids):
        return None
    position = _common(mine_ids, reference_ids)
    mine = mine_ids[position] if position < len(mine_ids) else None
    start = _parting(mine_text, reference_text)
    best, margin, behind = _opinion(at, mine) if at and at["position"] == position else ([], None, None)
    return Divergence(
        prompt=prompt,
        position=position,
        mine=mine,
        reference=reference_ids[position] if position < len(reference_ids) else None,
        mine_text=_clip(mine_text[start:], SHOWN),
        reference_text=_clip(reference_text[start:], SHOWN),
        common_text=("…" if start > BEFORE else "") + mine_text[max(0, start - BEFORE) : start],
        reference_best=best,
        margin=_finite(margin),
        behind=_finite(behind),
        kind=_kind(mine, best, margin, behind),
    )


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How long the common beginning is."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _parting(mine: str, reference: str) -> int:
    """Where the word begins in which two texts part."""
    parting = _common(mine, reference)
    if not (mine[parting : parting + 1].strip() or reference[parting : parting + 1].strip()):
        return parting  # the word had ended in both
    start = parting
    while start > 0 and not mine[start - 1].isspace():
        start -= 1
    return start if parting - start <= LONGEST_WORD else parting


def _clip(text: str, characters: int) -> str:
    """The beginning of a text, at the end of a word where there is one, with an ellipsis where it is cut."""
    if len(text) <= characters:
        return text
    kept = text[:characters]
    word_end = kept.rfind(" ")
    return (kept[:word_end] if word_end > characters // 2 else kept) + "…"


def _opinion(at: dict[str, Any], mine: int | None) -> tuple[list[int], float | None, float | None]:
    best, logprobs = list(at["best"]), list(at["logprobs"])
    known = {str(id_): logprob for id_, logprob in zip(best, logprobs, strict=True)} | at["asked"]
    margin = logprobs[0] - logprobs[1] if len(logprobs) > 1 else None
    if (asked := known.get(str(mine))) is None:
        return best, margin, None
    behind = logprobs[0] - asked
    return best, margin, 0.0 if behind < 0 else behind  # a rounding may put it before the best


def _kind(mine: int | None, best: Sequence[int], margin: float | None, behind: float | None) -> str:
    if behind is not None and not math.isnan(behind):
        return "near_tie" if behind <= NEAR_TIE else "change"
    # whatever is not among the two best is at least as far behind as the second
    known = mine is not None and mine not in best and margin is not None and margin > NEAR_TIE
    return "change" if known else "unknown"


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


# ---- in words


def sentence(divergence: Divergence, characters: int = IN_SENTENCE) -> str:
    """One line for a report; tokens are counted from 1, each quoted text is cut to so many characters."""
    d = divergence
    mine, reference = _clip(d.mine_text, characters), _clip(d.reference_text, characters)
    where = f"parts at token {d.position + 1}"
    if not mine and not reference:
        return f"{where}, but the texts are the same; {_meaning(d)}"
    if d.common_text:
        where += f' after "{d.common_text.rstrip(" ")}"'
    if not mine:
        how = f'it ends where the reference goes on with "{reference.lstrip(" ")}"'
    elif not reference:
        how = f'it goes on with "{mine.lstrip(" ")}" where the reference ends'
    else:
        how = f'"{mine}" instead of "{reference}"'
    return f"{where}: {how}; {_meaning(d)}"


def _meaning(divergence: Divergence) -> str:
    if divergence.kind == "unknown":
        return "how likely the reference finds it is not known"
    words = "a near-tie" if divergence.kind == "near_tie" else "a real change"
    return f"{words} (the reference {_less_likely(divergence.behind)})"


def _less_likely(behind: float | None) -> str:
    if behind is None:
        return "has two likelier tokens"
    if behind > math.log(1e6):
        return "finds it over a million times less likely"
    times = math.exp(behind)
    if times < 1.05:
        return "finds it just as likely"
    return f"finds it {times:.1f} times less likely" if times < 3 else f"finds it {times:,.0f} times less likely"
