"""What each contender lost against the reference, put together from the journal's events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from weighin import divergence, expected, fidelity
from weighin.divergence import Divergence
from weighin.doubts import Doubt, doubt
from weighin.expected import Accuracy
from weighin.fidelity import Fidelity, Figure, Scored
from weighin.plan import Entry, Plan

if TYPE_CHECKING:
    from weighin.measurements import ContenderResult, Measurement

    Events = dict[str, list[dict[str, Any]]]

MOST_NATS = 700.0  # beyond it a perplexity is no number
FAR_BETTER = 0.8  # the perplexity with the begin token set the other way, as a share


def complete(plan: Plan, results: list[ContenderResult], events: Events) -> list[ContenderResult]:
    """The results with what was found out about quality."""
    reference = next((r for r in results if r.name == plan.reference), None)
    passed = {r.name: _passed(plan, r) for r in results}
    found = []
    for entry, result in zip(plan.entries, results, strict=True):
        fidelity_, reason = _fidelity(plan, entry, events)
        accuracy = expected.accuracy(passed[result.name])
        is_reference = reference is None or result.name == reference.name
        against = None if is_reference else expected.against(passed[result.name], passed[reference.name])  # type: ignore[union-attr]
        found.append(
            msgspec.structs.replace(
                result,
                fidelity=fidelity_,
                fidelity_reason=reason,
                divergences=[] if is_reference else _divergences(plan, result, reference, events),
                accuracy=accuracy,
                accuracy_against=against,
                measurements={**result.measurements, **_figures(result, fidelity_, reason, accuracy, events)},
                doubts=[*result.doubts, *(_begin_token(plan, events) if result.name == plan.reference else [])],
            )
        )
    return found


# ---- against the reference, token by token


def _scored(events: Events, contender: str, job: str) -> list[dict[str, Any]]:
    return [e for e in events.get(contender, []) if e["event"] == "scored" and e["job"] == job]


def _fidelity(plan: Plan, entry: Entry, events: Events) -> tuple[Fidelity | None, str | None]:
    """A contender's fidelity, or why there is none. The reference's own is its noise floor."""
    if plan.quality is None:
        return None, "quality was not asked for"
    if plan.reference is None:
        return None, plan.reference_note
    if not entry.log_probabilities:
        return None, "this engine gives no log-probabilities"
    ends = {(e["contender"], e["job"]): e for listed in events.values() for e in listed if e["event"] == "ended"}
    written = ends.get((plan.reference, "score"))
    if written is not None and written["status"] != "ok":
        return None, f"the reference could not be scored: {written['reason']}"
    job = "floor" if entry.name == plan.reference else "score"
    end = ends.get((entry.name, job))
    if end is None or end["status"] != "ok":
        return None, f"scoring failed: {end['reason']}" if end else "it was not scored"
    truth = {e["rows"]: e["nll"] for e in _scored(events, plan.reference, "score") if "nll" in e}
    if any(value is None for listed in truth.values() for value in listed):
        return None, "the reference itself gave NaN or infinite probabilities"
    documents = [
        Scored(
            stratum=e["stratum"],
            name=e["name"],
            kl=e["kl"],
            nll=e["nll"],
            same=e["same"],
            reference_nll=truth[e["rows"]],
            slack=e.get("slack"),
        )
        for e in _scored(events, entry.name, job)
        if e["rows"] in truth
    ]
    judged = fidelity.judge(documents)
    return judged, None if judged else "there was no text to score"


def _begin_token(plan: Plan, events: Events) -> list[Doubt]:
    """A doubt where the reference finds the passages far more likely with its begin token set the other way."""
    scored = _scored(events, plan.reference or "", "score")
    now = {e["name"]: e["nll"] for e in scored if e["stratum"] == "passages"}
    pairs = [(now[e["name"]][-len(e["nll"]) :], e["nll"]) for e in scored if e["stratum"] == "bos" and e["name"] in now]
    tokens = [(a, b) for mine, other in pairs for a, b in zip(mine, other, strict=True)]
    if not tokens or any(a is None or b is None for a, b in tokens):
        return []
    as_is, other_way = (math.exp(min(fmean(values), MOST_NATS)) for values in zip(*tokens, strict=True))
    if other_way > FAR_BETTER * as_is:
        return []
    starts = bool(plan.workload.starts_with_bos)
    evidence = (
        f"{'without' if starts else 'with'} a begin token the model's perplexity on {len(pairs)} passages is "
        f"{other_way:.3g} instead of {as_is:.3g}"
    )
    return [doubt("begin_token_surplus" if starts else "begin_token_missing", evidence)]


def _figures(
    result: ContenderResult, found: Fidelity | None, reason: str | None, accuracy: Accuracy | None, events: Events
) -> dict[str, Measurement]:
    """The leading text's figures as measurements, so that rules, diffs and tables find them by their keys."""
    from weighin.measurements import Sample

    def with_(key: str, figure: Figure | None, samples: list[float], why: str | None) -> Measurement:
        known = result.measurements[key]
        if figure is None:
            return msgspec.structs.replace(known, reason=why or "not known")
        return msgspec.structs.replace(
            known,
            value=figure.value,
            low=figure.low,
            high=figure.high,
            interval=figure.interval,
            samples=[Sample(round=1, job="score", value=v) for v in samples],  # documents, not processes
            reason=None,
        )

    lead = found.headline if found else None
    broken = found.why if found and lead and lead.kl is None else reason
    job = "floor" if lead and not any("kl" in e for e in _scored(events, result.name, "score")) else "score"
    documents = [e for e in _scored(events, result.name, job) if lead and e["stratum"] == lead.name and "kl" in e]
    numbers = lead is not None and lead.kl is not None
    means = {key: [fmean(e[key]) for e in documents] if numbers else [] for key in ("kl", "same")}
    task = (
        Figure(value=accuracy.value, low=accuracy.low, high=accuracy.high, interval=accuracy.interval)
        if accuracy
        else None
    )
    cases = [fmean(case) for case in accuracy.passed if case] if accuracy else []
    return {
        "kl_divergence": with_("kl_divergence", lead.kl if lead else None, means["kl"], broken),
        "top1_agreement": with_("top1_agreement", lead.top1_agreement if lead else None, means["same"], broken),
        "perplexity_ratio": with_("perplexity_ratio", lead.perplexity_ratio if lead else None, [], broken),
        "task_accuracy": with_("task_accuracy", task, cases, "no prompt says what answer is expected"),
    }


# ---- answers


def _divergences(plan: Plan, result: ContenderResult, reference: Any, events: Events) -> list[Divergence]:
    theirs = {(r.prompt, r.seed): r for r in reference.responses}
    thoughts: dict[tuple[str, int], dict[str, Any]] = {}
    for event in _scored(events, reference.name, "score"):
        for at in event.get("at", []):
            thoughts[event["name"], at["position"]] = at
    found = []
    for mine in result.responses:
        other = theirs.get((mine.prompt, mine.seed))
        if other is None or plan.workload.sampling is not None:  # drawn answers part by chance
            continue
        start = len(plan.workload.rendered[mine.prompt].ids)
        parts = next((i for i, (a, b) in enumerate(zip(mine.ids, other.ids, strict=False)) if a != b), -1)
        at = thoughts.get((f"answer {mine.prompt + 1}", start + parts))
        there = {**at, "position": parts} if at else None
        parted = divergence.compare(mine.prompt, mine.ids, mine.whole, other.ids, other.whole, there)
        if parted is not None:
            found.append(parted)
    return found


def _passed(plan: Plan, result: ContenderResult) -> list[list[bool]]:
    """Per prompt that says what is expected, whether each answer meets it; empty where there is no answer."""
    passed = []
    for number, prompt in enumerate(plan.workload.prompts):
        wanted = expected.parse(prompt.expected, f"prompt {number + 1}")
        if wanted is not None and expected.has_checks(wanted):
            mine: Sequence[Any] = [r for r in result.responses if r.prompt == number and r.decoded]
            passed.append([expected.passes(wanted, r.text) for r in mine])
    return passed
