"""What the quality pass scores: which texts, how many of them, and where the reference's rows lie.

Pure functions of the plan and of what is done, so that a resumed run asks for the same.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from weighin import cache, reference_rows
from weighin.fidelity import ENOUGH, STRATA
from weighin.plan import Document, Entry, Plan, Workload

if TYPE_CHECKING:
    from weighin.schedule import State

SAMPLES, FEWEST_SAMPLES = 12, 6
SAMPLE_TOKENS, FEWEST_SAMPLE_TOKENS = 64, 16
TOKENS = 4000  # scored at most, over all texts
SHARE_OF_BUDGET = 0.3  # for scoring, of all contenders together
SHARE_FOR_SAMPLES = 0.1  # for drawing the reference's answers
WITHOUT_BUDGET = 600.0  # seconds, where a number of rounds was asked for instead
LONGEST_DOCUMENT = 1024
MOST_LOOKUPS = 16  # answers whose parting is looked at
ROWS_FORMAT = 2  # of the files on disk


def rows_folder(plan: Plan) -> Path:
    """The folder of the reference's rows: another one for another model, way of running it, version or vocabulary."""
    assert plan.reference is not None
    entry = plan.entry(plan.reference)
    settings = [entry.settings["dtype"], plan.machine.threads, plan.remote_code, entry.from_disk]
    recipe = [entry.name, sorted(entry.versions.items()), plan.workload.vocabulary, settings, ROWS_FORMAT]
    return cache.reference(plan.model.fingerprint, hashlib.sha256(msgspec.json.encode(recipe)).hexdigest()[:16])


def samples_file(plan: Plan, state: State) -> Path:
    """Where the reference's own answers to this workload's prompts are kept."""
    asked = [[r.ids for r in plan.workload.rendered], plan.workload.stop_ids, how_many_samples(plan, state)]
    return rows_folder(plan) / f"samples-{hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:16]}.json"


def how_many_samples(plan: Plan, state: State) -> tuple[int, int]:
    """Answers to draw and tokens of each: fewer where the reference is so slow that they would eat up the budget."""
    assert plan.quality is not None and plan.reference is not None
    speeds = state.by_round(plan.reference, "decode_tokens_per_second")
    speed = speeds.get(1)
    if not speed:
        return plan.quality.samples, plan.quality.sample_tokens
    affordable = speed * _seconds(plan) * SHARE_FOR_SAMPLES
    count = max(FEWEST_SAMPLES, min(plan.quality.samples, int(affordable / plan.quality.sample_tokens)))
    return count, max(FEWEST_SAMPLE_TOKENS, min(plan.quality.sample_tokens, int(affordable / count)))


def of_samples(workload: Workload, sampled: Sequence[dict[str, Any]]) -> list[Document]:
    """The reference's answers as documents: the prompt does not count, the answer does, its end included."""
    found = []
    for event in sampled:
        prompt = workload.rendered[event["prompt"]].ids
        # an embedding may be padded with ids that no text has: nobody can be asked about those
        drawn = list(itertools.takewhile(lambda token: token < workload.vocabulary, event["ids"]))
        if not drawn:
            continue
        ids = [*prompt, *drawn]
        name = f"sample-{event['seed'] + 1} of prompt {event['prompt'] + 1}"
        found.append(Document(stratum="samples", name=name, ids=ids, counted=[[len(prompt), len(ids)]]))
    return found


def chosen(plan: Plan, state: State) -> list[Document]:
    """The documents that the reference scores and keeps rows of: as many of each kind of text as there is time for."""
    assert plan.quality is not None
    everything = [*plan.workload.documents, *of_samples(plan.workload, state.sampled)]
    return choose(everything, min(plan.quality.tokens, affordable_tokens(plan, state)))


def choose(documents: Sequence[Document], tokens: int) -> list[Document]:
    """Each kind of text gets an equal share of the tokens, what one leaves over goes to the next, and none less than
    the documents that an interval needs."""
    groups = [group for name in STRATA if (group := [d for d in documents if d.stratum == name])]
    groups.sort(key=lambda group: sum(len(d.ids) for d in group))
    kept: list[Document] = []
    for number, group in enumerate(groups):
        share = tokens / (len(groups) - number)
        spent = 0
        for count, document in enumerate(group):
            if count >= ENOUGH and spent + len(document.ids) > share:
                break
            kept.append(document)
            spent += len(document.ids)
        tokens -= spent
    return sorted(kept, key=lambda d: STRATA.index(d.stratum))


def affordable_tokens(plan: Plan, state: State) -> int:
    """The tokens that every contender can score within its share of the budget, by the prefill speeds of round one."""
    seconds_a_token = 0.0
    for entry in scoring(plan, state):
        speeds = [state.prefill(entry.name)] if not entry.from_disk else []
        passes = 2 if entry.name == plan.reference else 1  # the reference again, as the noise floor
        seconds_a_token += sum(passes / speed for speed in speeds if speed)
    return int(_seconds(plan) * SHARE_OF_BUDGET / seconds_a_token) if seconds_a_token else TOKENS


def _seconds(plan: Plan) -> float:
    return WITHOUT_BUDGET if plan.rounds else plan.budget_seconds


def scoring(plan: Plan, state: State) -> list[Entry]:
    """Those whose probabilities are looked at: the reference first, then every contender that can say them."""
    if plan.quality is None or plan.reference is None:
        return []
    mine = [
        e
        for e in plan.entries
        if (e.from_disk and e.name == plan.reference) or (e.status == "ok" and not state.failed(e.name))
    ]
    able = [e for e in mine if e.log_probabilities]
    reference = [e for e in able if e.name == plan.reference]
    return [*reference, *(e for e in able if e.name != plan.reference)] if reference else []


def for_reference(plan: Plan, state: State) -> list[dict[str, Any]]:
    """What the reference's job scores: the documents, the begin-token check, and the places where answers part."""
    documents: list[dict[str, Any]] = [msgspec.to_builtins(d) for d in (*chosen(plan, state), *plan.workload.bos_other)]
    return [*documents, *lookups(plan, state)]


def lookups(plan: Plan, state: State) -> list[dict[str, Any]]:
    """The reference's own answers, with the places where a contender went another way and what it said there."""
    assert plan.reference is not None
    mine = state.responses.get(plan.reference, {})
    found: list[dict[str, Any]] = []
    if plan.workload.sampling is not None:  # drawn answers part by chance
        return found
    for prompt, ids in sorted(mine.items()):
        asked: dict[str, list[int]] = {}
        start = len(plan.workload.rendered[prompt].ids)
        for contender, theirs in state.responses.items():
            other = theirs.get(prompt)
            if contender == plan.reference or other is None or other == ids:
                continue
            place = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), None)
            if place is not None:
                asked.setdefault(str(start + place), []).append(other[place])
        if asked and len(found) < MOST_LOOKUPS:
            whole = [*plan.workload.rendered[prompt].ids, *ids]
            found.append(
                {"stratum": "answers", "name": f"answer {prompt + 1}", "ids": whole, "counted": [], "asked": asked}
            )
    return found


def for_contender(plan: Plan, state: State) -> list[dict[str, Any]]:
    """What a contender scores: the documents whose rows the reference has written."""
    there = set(state.rows_written)
    return [msgspec.to_builtins(d) for d in chosen(plan, state) if reference_rows.digest(d.ids, d.counted) in there]
