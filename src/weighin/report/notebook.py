"""How a Comparison shows itself in a notebook: the document's table as HTML."""

from __future__ import annotations

from html import escape

from weighin.measurements import Comparison
from weighin.report import table


def render(comparison: Comparison) -> str:
    def cell(tag: str, raw: str) -> str:
        shown = escape(table.visible(raw)).replace("\n", "<br>")
        return f'<{tag} style="text-align:left;vertical-align:top">{shown}</{tag}>'

    head = "".join(cell("th", name) for name in ["", *(c.name for c in comparison.contenders)])
    rows = "".join(
        f"<tr>{cell('th', row.title)}{''.join(cell('td', row.cell(comparison, c)) for c in comparison.contenders)}</tr>"
        for row in table.document(comparison)
        if row.title != "Code snippet"
    )
    return f"<h3>How to run {escape(table.visible(comparison.model.name))}</h3><table><tr>{head}</tr>{rows}</table>"
