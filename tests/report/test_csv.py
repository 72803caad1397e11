"""report.csv, read back: a line per contender and measurement, no formula, no escape."""

import csv
import io

import hostile
import pytest
from conftest import Finished
from hypothesis import given
from hypothesis import strategies as st

from weighin.measurements import Comparison
from weighin.report import csv as csv_report
from weighin.report.csv import COLUMNS, FORMULA, safe


def lines(comparison: Comparison) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_report.render(comparison), newline="")))


def test_every_figure_is_there_with_its_samples(finished: Finished) -> None:
    found = {(line["contender"], line["key"]): line for line in lines(finished.comparison)}
    speed = found["fake:fp32@cpu", "decode_tokens_per_second"]
    assert {k: speed[k] for k in ("status", "label", "unit", "better", "interval", "processes")} == {
        "status": "ok", "label": "decode", "unit": "tokens/s", "better": "higher",
        "interval": "range", "processes": "2",
    }  # fmt: skip
    assert float(speed["value"]) == pytest.approx(20)
    assert [float(v) for v in speed["samples"].split()] == pytest.approx([20.0] * 6)
    assert set(speed) == set(COLUMNS)


def test_it_agrees_with_the_comparison(finished: Finished) -> None:
    found = {(line["contender"], line["key"]): line["value"] for line in lines(finished.comparison)}
    for result in finished.comparison.contenders[:2]:
        for key, m in result.measurements.items():
            told = found[result.name, key]
            assert told == "" if m.value is None else float(told) == pytest.approx(m.value, rel=1e-8)


def test_what_is_unknown_is_empty_with_its_reason_and_never_zero(finished: Finished) -> None:
    found = {(line["contender"], line["key"]): line for line in lines(finished.comparison)}
    vram = found["fake:fp32@cpu", "peak_vram_bytes"]
    assert (vram["value"], vram["low"], vram["high"], vram["samples"]) == ("", "", "", "")
    assert vram["reason"] == "it uses no GPU"


def test_one_that_cannot_run_keeps_a_line_with_its_reason(finished: Finished) -> None:
    mine = [line for line in lines(finished.comparison) if line["contender"] == "fake:int8@cuda"]
    assert [(line["status"], line["key"], line["value"], line["reason"]) for line in mine] == [
        ("cannot_run", "", "", "no CUDA GPU here")
    ]


def test_one_that_failed_keeps_its_reason_too(finished: Finished) -> None:
    mine = [line for line in lines(finished.comparison) if line["contender"] == "fake:bf16@cpu+fail=load.oom"]
    assert any("out of memory at load" in line["reason"] for line in mine)


def test_no_cell_is_a_formula_or_sends_an_escape(finished: Finished) -> None:
    evil = hostile.make(finished.comparison)
    rendered = csv_report.render(evil)
    assert not hostile.SENT_TO_NOBODY & set(rendered)
    rows = list(csv.reader(io.StringIO(rendered, newline="")))
    assert {len(row) for row in rows} == {len(COLUMNS)}
    words = [c for row in rows for c in row if not c.lstrip("-").replace(".", "").replace("e", "").isdigit()]
    assert [c for c in words if c.startswith(FORMULA)] == []
    assert "'+1 | " in rendered


@given(st.text())
def test_no_text_is_a_formula(raw: str) -> None:
    shown = safe(raw)
    assert not shown.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert shown.removeprefix("'").lstrip("'") == csv_report.visible(raw).lstrip("'")


@given(st.text(alphabet=st.sampled_from("=+-@ab\n\t\r\",; '|"), max_size=20))
def test_quotes_and_breaks_in_a_text_do_not_break_the_file(raw: str) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(["x", safe(raw), "y"])
    assert list(csv.reader(io.StringIO(out.getvalue(), newline=""))) == [["x", safe(raw), "y"]]
