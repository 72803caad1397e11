"""What `weighin diff` shows: per contender the figures that count, and all others that changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weighin.diff import (
    BETTER,
    EQUAL,
    FEWEST,
    HEADLINE,
    NO_DIFFERENCE,
    WORSE,
    Change,
    Changed,
    ContenderDiff,
    Diff,
    Ratio,
    chance_apart,
)
from weighin.report.markdown import cell, text
from weighin.report.table import figure, number, visible

TITLES = ("figure", "old", "new", "change")
STYLES = {BETTER: "green", WORSE: "red", EQUAL: "dim", NO_DIFFERENCE: "dim"}


class Line(NamedTuple):
    """A row: the figure's name, what it was, what it is, and what that amounts to."""

    label: str
    old: str
    new: str
    change: str
    verdict: str


def render(diff: Diff) -> str:
    """The changes as Markdown."""
    parts = [
        f"# What changed: {text(diff.model)}",
        _bullets([f"Old: {diff.old}", f"New: {diff.new}", *diff.notes]),
        text(summary(diff)),
    ]
    for contender in diff.contenders:
        rows = [f"| {' | '.join(map(cell, line[:4]))} |" for line in lines(contender)]
        head = f"| {' | '.join(TITLES)} |\n|{' --- |' * len(TITLES)}"
        parts += [
            f"## {text(contender.name)}",
            "\n".join([head, *rows]) if rows else "",
            _bullets(list(remarks(contender))),
        ]
    if diff.statuses:
        parts += ["## What runs", _bullets([f"{s.name}: {s.sentence}" for s in diff.statuses])]
    parts.append(text(legend(diff)))
    return "\n\n".join(part for part in parts if part) + "\n"


def view(diff: Diff) -> RenderableType:
    """The same for a terminal."""
    parts: list[RenderableType] = [
        Text(visible(f"{diff.model}\nold: {diff.old}\nnew: {diff.new}")),
        *(Text(visible(note), style="yellow") for note in diff.notes),
    ]
    for contender in diff.contenders:
        table = Table(title=Text(visible(contender.name)), title_justify="left")
        for title in TITLES:
            table.add_column(title, justify="left" if title in ("figure", "change") else "right")
        for line in lines(contender):
            *cells, change = (Text(visible(part).replace(" (", "\n(")) for part in line[:4])
            change.stylize(STYLES[line.verdict])
            table.add_row(*cells, change)
        parts += [table, *(Text(visible(remark)) for remark in remarks(contender))]
    parts += [Text(visible(f"{s.name} {s.sentence}"), style="yellow") for s in diff.statuses]
    parts += [Text(summary(diff), style="bold"), Text(legend(diff), style="dim")]
    return Group(*parts)


# ---- the words, the same in both


def told(contender: ContenderDiff) -> list[Change]:
    """The headline figures, whatever became of them; of the others those that changed."""
    return [c for c in contender.changes if c.key in HEADLINE or c.verdict in (BETTER, WORSE)]


def lines(contender: ContenderDiff) -> list[Line]:
    return [
        Line(change.new.label, figure(change.old), figure(change.new), amount(change), change.verdict)
        for change in told(contender)
    ]


def amount(change: Change) -> str:
    """How much it changed and what that means: "1.12× higher (1.08–1.15): better"."""
    ratio = change.ratio
    if change.verdict == EQUAL or ratio is None:
        return change.verdict
    if change.verdict == NO_DIFFERENCE:
        return f"{NO_DIFFERENCE}: {number(ratio.value)}× ({_bounds(ratio, number(ratio.low), number(ratio.high))})"
    word, value, low, high = "higher", ratio.value, ratio.low, ratio.high
    if value < 1:
        word, value, low, high = "lower", 1 / value, 1 / high, 1 / low
    shown, sign, tail = [number(x) for x in (value, low, high)], "×", ""
    if shown[1] == number(1.0):  # small but sure: "1.00× higher (1.00–1.00)" would say nothing
        near, far = sorted((ratio.low, ratio.high), key=lambda x: abs(1 - x))
        shown, sign, tail = [number(100 * abs(1 - x)) for x in (ratio.value, near, far)], "%", "%"
    bounds = f" ({_bounds(ratio, shown[1], shown[2])}{tail})" if ratio.interval != "exact" else ""
    return f"{shown[0]}{sign} {word}{bounds}: {change.verdict}"


def _bounds(ratio: Ratio, low: str, high: str) -> str:
    if ratio.interval == "range":
        few = min(ratio.old_processes, ratio.new_processes)
        if few < FEWEST:
            return "one process each" if ratio.old_processes == ratio.new_processes else "one process on a side"
        return f"range {low}–{high}"
    return f"{low}–{high}"


def remarks(contender: ContenderDiff) -> Iterator[str]:
    """What else is another than before: it may be the cause."""
    for changed in (*contender.dependencies, *contender.effective):
        yield _changed(changed)
    for key, reason in contender.unknown.items():
        yield f"{key} was known and is not any more: {reason}"
    yield from contender.doubts


def _changed(changed: Changed) -> str:
    return f"{changed.what} was {changed.old or 'not there'} and is {changed.new or 'not there'}"


def summary(diff: Diff) -> str:
    """How many figures are better, worse, or neither."""
    counts = Counter(change.verdict for contender in diff.contenders for change in contender.changes)
    if not counts:
        return "No figure is in both comparisons."
    return f"Of {counts.total()} figures: " + ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in (BETTER, WORSE, EQUAL, NO_DIFFERENCE) if counts[verdict]
    )


def legend(diff: Diff) -> str:
    """What the brackets mean, and how often they are wrong."""
    ratios = [change.ratio for contender in diff.contenders for change in told(contender) if change.ratio]
    parts = []
    if any(ratio.interval == "95%" for ratio in ratios):
        parts.append(
            "In brackets the 95% interval of new ÷ old: of twenty figures that did not change, one may look changed."
        )
    ranges = [r for r in ratios if r.interval == "range" and min(r.old_processes, r.new_processes) >= FEWEST]
    if ranges:
        fewest = max(ranges, key=lambda r: chance_apart(r.old_processes, r.new_processes))
        often = 1 / chance_apart(fewest.old_processes, fewest.new_processes)
        parts.append(
            "A range goes from the new run's lowest process ÷ the old one's highest to the reverse: with "
            f"{fewest.old_processes} and {fewest.new_processes} processes it leaves 1 out by chance alone one time in "
            f"{round(often)}; six rounds in both runs give a 95% interval."
        )
    if any(r.interval == "range" and min(r.old_processes, r.new_processes) < FEWEST for r in ratios):
        parts.append("A single process shows no difference: nothing says how far the next one would be from it.")
    return " ".join(parts)


def _bullets(words: list[str]) -> str:
    return "\n".join(f"- {text(' '.join(word.split()))}" for word in words)
