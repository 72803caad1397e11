"""report.csv: a line per contender and measurement, for a spreadsheet."""

from __future__ import annotations

import csv
import io

from weighin.measurements import Comparison
from weighin.report.table import visible

COLUMNS = (
    *("contender", "status", "key", "label", "unit", "better"),
    *("value", "low", "high", "interval", "processes", "samples", "reason"),
)
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def render(comparison: Comparison) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in comparison.contenders:
        if result.status != "ok":
            writer.writerow([safe(result.name), result.status, *[""] * 10, safe(result.reason or "")])
        if not any(m.samples for m in result.measurements.values()):
            continue
        for key, m in result.measurements.items():
            processes = len({(s.round, s.job) for s in m.samples})
            samples = " ".join(f"{s.value:.9g}" for s in m.samples)
            figures = ["" if x is None else f"{x:.9g}" for x in (m.value, m.low, m.high)]
            meaning = [safe(result.name), result.status, key, m.label, m.unit, m.better]
            writer.writerow([*meaning, *figures, m.interval or "", processes, samples, safe(m.reason or "")])
    return out.getvalue()


def safe(text: str) -> str:
    """A text that a spreadsheet will not run as a formula."""
    shown = visible(text)
    return f"'{shown}" if shown.startswith(FORMULA) else shown
