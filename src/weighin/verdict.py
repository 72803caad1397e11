"""Which contender for whom, from the figures and their intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from weighin.measurements import Comparison, ContenderResult


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What each contender is best for; an empty list says that nothing sets it apart."""

    best_for: dict[str, list[str]] = {}


FEWEST = 2  # rounds: one figure alone has no interval, and nothing can be apart from it
STRENGTHS = (
    ("decode_tokens_per_second", "the fastest answers"),
    ("peak_ram_bytes", "the least RAM"),
    ("peak_vram_bytes", "the least VRAM"),
    ("disk_bytes", "the least disk"),
    ("ready_seconds", "starting soonest"),
)


def decide(comparison: Comparison) -> Verdict:
    """Name a contender best only where its interval is apart from every other's."""
    through = [c for c in comparison.contenders if c.status == "ok"]
    best_for: dict[str, list[str]] = {c.name: [] for c in through}
    for key, words in STRENGTHS:
        if best := _apart(through, key):
            best_for[best].append(words)
    if comparison.reference in best_for:
        best_for[comparison.reference].append("the reference: full precision, against which the others are judged")
    return Verdict(best_for=best_for)


def _apart(contenders: list[ContenderResult], key: str) -> str | None:
    """The contender whose figure is better than all others', by intervals that do not touch."""
    known = [(c.name, m) for c in contenders if (m := c.measurements.get(key)) and m.value is not None]
    if len(known) < 2 or any(len(m.by_round()) < FEWEST for _, m in known):
        return None
    higher = known[0][1].better == "higher"
    sign = -1.0 if higher else 1.0
    bounds = sorted(
        (max(sign * (m.low or 0.0), sign * (m.high or 0.0)), min(sign * (m.low or 0.0), sign * (m.high or 0.0)), name)
        for name, m in known
    )
    worst_of_best = bounds[0][0]
    return bounds[0][2] if all(worst_of_best < best for _, best, _ in bounds[1:]) else None
