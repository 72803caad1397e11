"""Which contender for whom, from the figures and their intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from weighin.measurements import Comparison, ContenderResult


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What each contender is best for; an empty list says that nothing sets it apart."""

    best_for: dict[str, list[str]] = {}


STRENGTHS = (
    ("decode_tokens_per_second", "the fastest decoding"),
    ("peak_ram_bytes", "the least RAM"),
    ("peak_vram_bytes", "the least VRAM"),
    ("disk_bytes", "the least disk"),
    ("ready_seconds", "starting soonest"),
)


def decide(comparison: Comparison) -> Verdict:
    """Name a contender best only where its paired ratio to every other one is beyond noise, by a 95% interval."""
    through = [c for c in comparison.contenders if c.status == "ok"]
    best_for: dict[str, list[str]] = {c.name: [] for c in through}
    for key, words in STRENGTHS:
        if best := _best(comparison, through, key):
            best_for[best].append(words)
    if comparison.reference in best_for:
        best_for[comparison.reference].append(f"the reference: {comparison.reference_note}")
    return Verdict(best_for=best_for)


def _best(comparison: Comparison, contenders: list[ContenderResult], key: str) -> str | None:
    """The contender whose figure is better than every other's; None where one of them cannot be told from it."""
    known = {c.name: m for c in contenders if (m := c.measurements.get(key)) and m.value is not None}
    if len(known) < 2:
        return None
    higher = next(iter(known.values())).better == "higher"
    best = (max if higher else min)(known, key=lambda name: known[name].value or 0.0)
    for other in known:
        ratio = comparison.ratio(key, best, other) if other != best else None
        if other == best:
            continue
        if ratio is None or ratio.interval != "95%" or not (ratio.low > 1 if higher else ratio.high < 1):
            return None
    return best
