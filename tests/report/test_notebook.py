"""How a comparison shows itself in a notebook."""

from html.parser import HTMLParser

import hostile
from conftest import Finished
from test_table import TITLES

from weighin.measurements import Comparison


class Page(HTMLParser):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.rows: list[list[str]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "br":
            self.rows[-1][-1] += "\n"

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def page(comparison: Comparison) -> Page:
    return Page(comparison._repr_html_())


def test_every_row_of_the_document_in_its_order(finished: Finished) -> None:
    rows = page(finished.comparison).rows
    assert rows[0] == ["", *(c.name for c in finished.comparison.contenders)]
    assert [row[0] for row in rows[1:]] == [title for title in TITLES if title != "Code snippet"]
    assert {len(row) for row in rows} == {5}
    found = {row[0]: row[1:] for row in rows}
    assert "decode 20.0 tokens/s" in found["Inference time (4 new tokens)"][0]
    assert found["Status"][3] == "cannot_run\nno CUDA GPU here"
    assert found["RAM"][3] == "—"
    assert "—" in found["RAM"][2] and not any(c.isdigit() for c in found["RAM"][2])  # it failed before it was known
    assert "import 500 ms" in found["Startup time"][2]


def test_hostile_words_are_text(finished: Finished) -> None:
    found = page(hostile.make(finished.comparison))
    assert {tag for tag, _ in found.tags} == {"h3", "table", "tr", "th", "td", "br"}
    assert {names for _, names in found.tags} <= {(), ("style",)}
    text = "".join(cell for row in found.rows for cell in row)
    assert "<script>alert(1)</script>" in text
    assert not hostile.SENT_TO_NOBODY & set(text)


def test_a_model_name_that_turns_the_text_around(finished: Finished) -> None:
    assert "\u202e" not in hostile.make(finished.comparison)._repr_html_()
