"""report.md, read back by a Markdown parser: everybody's words are text, never markup."""

import re

import hostile
import msgspec
import pytest
from conftest import Finished
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from test_table import TITLES

from weighin.report import markdown
from weighin.report.markdown import cell, fence, text

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
MARKUP = {"html_inline", "html_block", "link_open", "image", "em_open", "s_open", "code_inline", "blockquote_open"}


def tokens(source: str) -> list[Token]:
    return [inner for token in PARSER.parse(source) for inner in (token, *(token.children or []))]


def read(source: str) -> str:
    """The text of a line of Markdown, as a reader sees it."""
    return "".join(
        "\n" if t.content == "<br>" else t.content
        for t in tokens(source)
        if t.type in ("text", "html_inline", "text_special")
    )


def tables(source: str) -> list[list[list[str]]]:
    found: list[list[list[str]]] = []
    for token in PARSER.parse(source):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and found and token.level >= 4:
            found[-1][-1].append(token.content)
    return found


@pytest.fixture(scope="module")
def report(finished: Finished) -> str:
    return markdown.render(finished.comparison)


@pytest.fixture(scope="module")
def evil(finished: Finished) -> str:
    return markdown.render(hostile.make(finished.comparison))


def test_the_document_has_every_row_in_its_order_for_every_contender(report: str) -> None:
    document, summary, responses = tables(report)
    assert [row[0] for row in document[1:]] == TITLES
    assert [row[0] for row in summary[1:]] == ["Load time", "Inference speed", "Accuracy", "Memory", "Model size"]
    assert {len(row) for row in document} == {5}
    assert document[0][1:] == [
        "fake:fp32@cpu",
        "fake:nf4@cpu+says=74.75.1",
        "fake:bf16@cpu+fail=load.oom",
        "fake:int8@cuda",
    ]
    assert [len(row) for row in responses] == [3, 3, 3]  # two answered two prompts


def test_the_sections(report: str) -> None:
    assert re.findall(r"^#+ .*", report, re.M)[:3] == ["# How to run tiny", "## The comparison", "## Summary"]
    assert re.findall(r"^## (.*)", report, re.M)[2:] == [
        "Quality", "Responses", "Transcript", "Doubts", "What did not run", "Code", "The machine and the model",
    ]  # fmt: skip
    assert "2 of 4 contenders ran on this machine, 2 rounds" in report
    assert "**out\\_of\\_memory** in load" in report or "**out_of_memory** in load" in report
    assert "The run is not complete" not in report


def test_two_places_never_disagree(report: str) -> None:
    document, summary, _ = tables(report)
    speed = next(row[1] for row in summary if row[0] == "Inference speed")
    assert speed.split(",")[0] in next(row[1] for row in document if row[0].startswith("Inference"))


def test_a_run_that_is_not_complete_says_so(finished: Finished) -> None:
    torn = msgspec.structs.replace(finished.comparison, complete=False)
    assert "**The run is not complete**" in markdown.render(torn)


def test_a_comparison_in_which_nothing_ran(finished: Finished) -> None:
    nothing = msgspec.structs.replace(
        finished.comparison, contenders=finished.comparison.contenders[3:], reference=None
    )
    report = markdown.render(nothing)
    assert "0 of 1 contenders ran" in report
    assert "## Responses" not in report
    assert "## Transcript" not in report


def test_hostile_words_are_text_everywhere(evil: str) -> None:
    found = [t for t in tokens(evil) if t.type in MARKUP and t.content not in ("<br>", "--resume")]
    assert [(t.type, t.content[:80]) for t in found] == []
    assert not hostile.SENT_TO_NOBODY & set(evil)
    assert "alert(1)" in evil  # it is shown


def test_hostile_words_do_not_break_the_tables(evil: str) -> None:
    assert [sorted({len(row) for row in table}) for table in tables(evil)] == [[5], [5], [3]]
    assert [len(table) for table in tables(evil)] == [16, 6, 3]


def test_hostile_words_make_no_headings_and_end_no_code(evil: str) -> None:
    headings = [t.content for t in PARSER.parse(evil) if t.type == "inline" and t.level == 1 and t.map]
    assert "head" not in headings
    blocks = [t.content for t in PARSER.parse(evil) if t.type == "fence"]
    assert len(blocks) == 2 + 4  # two transcripts, four snippets
    assert any("`````python\nimport os\n```" in block for block in blocks)


def test_bare_addresses_are_not_made_links(evil: str) -> None:
    outside = "".join(t.content for t in PARSER.parse(evil) if t.type == "inline")
    assert "https://evil" not in outside
    assert "www.evil" not in outside


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"])))
def test_a_text_reads_back_as_itself_with_no_markup(raw: str) -> None:
    source = f"x{text(raw)}x"
    assert not [t for t in tokens(source) if t.type in MARKUP]
    assert read(source) == f"x{markdown.visible(raw)}x"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_cell_stays_one_cell(raw: str) -> None:
    (found,) = tables(f"| a | b |\n| --- | --- |\n| {cell(raw)} | end |\n")
    assert len(found) == 2
    assert found[1][-1] == "end"
    assert len(found[1]) == 2


@given(st.text(alphabet="`~ab\n ", max_size=40))
def test_a_code_block_ends_where_it_should(raw: str) -> None:
    blocks = [t for t in PARSER.parse(f"{fence(raw)}\n\nafter\n") if t.type != "inline"]
    assert [b.type for b in blocks] == ["fence", "paragraph_open", "paragraph_close"]
    assert blocks[0].content.rstrip() == raw.rstrip()
