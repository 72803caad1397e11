"""The part of report.md on quality: every figure on every kind of text, and where the answers part."""

from __future__ import annotations

from weighin import divergence
from weighin.fidelity import TITLES, WORDS, Stratum
from weighin.measurements import Comparison, ContenderResult
from weighin.report.table import NOTHING, bounds, figure_bytes, number

Table = tuple[list[str], list[list[str]]]


def explained(comparison: Comparison) -> list[str]:
    """What the figures are, in sentences."""
    limits = ", ".join(f"{word} up to {limit:g}" if limit < float("inf") else f"{word} above" for limit, word in WORDS)
    said = [
        "Every contender is given the same ids as the reference and asked how likely it finds each next token, over "
        "the whole vocabulary. The KL divergence (nats a token) says how far its probabilities are from the "
        "reference's; agreement is how often its likeliest next token is the same, given the same text. In brackets "
        "the 95% interval by a bootstrap over documents, below six documents their range. The kinds of text are never "
        "pooled; the first one leads.",
        f"The words go by the mean KL divergence and its interval: {limits}. NaN or infinite probabilities are broken.",
    ]
    kept = comparison.quality.rows_kept if comparison.quality else 0
    if kept:
        said.append(
            f"To stay under the cap on disk, only the reference's {kept} likeliest tokens of each row were kept, with "
            f"what the rest sums up to: KL is a lower bound, and 'may be more by' says by how much it can be too low."
        )
    if comparison.quality:
        said.append(f"The reference's rows take {figure_bytes(comparison.quality.rows_bytes)} on disk at most.")
    return said


def strata(comparison: Comparison) -> Table | None:
    """One line per contender and kind of text."""
    rows = [
        [_name(comparison, c), *_cells(s), c.fidelity.word if s is c.fidelity.headline else ""]
        for c in comparison.contenders
        if c.fidelity
        for s in c.fidelity.strata
    ]
    titles = [
        *("contender", "text", "documents, tokens", "KL mean", "median", "95th percentile", "99th", "largest seen"),
        *("same next token", "perplexity", "÷ the reference's", "in a word"),
    ]
    return (titles, rows) if rows else None


def _name(comparison: Comparison, c: ContenderResult) -> str:
    return f"{c.name} (again, other threads: the noise floor)" if c.name == comparison.reference else c.name


def _cells(s: Stratum) -> list[str]:
    if s.kl is None:
        return [TITLES[s.name], f"{s.documents}, {s.positions}", f"{s.not_numbers} no numbers", *[NOTHING] * 7]
    slack = f"; may be more by {number(s.kl_slack)}" if s.kl_slack is not None else ""
    agreement = s.top1_agreement
    percent = NOTHING
    if agreement is not None:
        percent = f"{number(100 * agreement.value)}%"
        if agreement.low is not None and agreement.high is not None:
            percent += f" ({number(100 * agreement.low)}–{number(100 * agreement.high)})"
    return [
        TITLES[s.name],
        f"{s.documents}, {s.positions}",
        bounds(s.kl) + slack,
        bounds(s.kl_median),
        bounds(s.kl_p95),
        bounds(s.kl_p99),
        number(s.kl_max) if s.kl_max is not None else NOTHING,
        percent,
        bounds(s.perplexity),
        bounds(s.perplexity_ratio),
    ]


def unknown(comparison: Comparison) -> list[str]:
    """Those without figures, and why."""
    return [
        f"{c.name}: no figures of quality, {c.fidelity_reason}"
        for c in comparison.contenders
        if c.fidelity is None and c.status == "ok" and c.fidelity_reason and comparison.quality
    ]


def partings(comparison: Comparison) -> list[str]:
    """Where each answer leaves the reference's."""
    return [
        f"{c.name}, prompt {d.prompt + 1}: {divergence.sentence(d)}"
        for c in comparison.contenders
        for d in c.divergences
    ]


def tasks(comparison: Comparison) -> Table | None:
    """The figures of lm-evaluation-harness."""
    rows = [
        [
            c.name,
            t.task,
            t.metric + (f" ({t.filter})" if t.filter else ""),
            number(t.value)
            + (f" ({number(t.low)}–{number(t.high)})" if t.low is not None and t.high is not None else ""),
            str(t.samples or NOTHING),
        ]
        for c in comparison.contenders
        for t in c.tasks
    ]
    rows += [
        [c.name, f.task or NOTHING, NOTHING, f"{f.reason} {f.remedy}", NOTHING]
        for c in comparison.contenders
        for f in c.task_failures
    ]
    return (["contender", "task", "metric", "value", "samples"], rows) if rows else None
