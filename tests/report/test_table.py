"""The rows of the document, and how a figure is written."""

import math
from collections.abc import Callable

import msgspec
import pytest
from conftest import Finished
from hypothesis import given
from hypothesis import strategies as st

from weighin.measurements import Comparison, Measurement, Sample
from weighin.report import table
from weighin.report.table import NOTHING, figure, first_difference, number, scale, share, visible

TITLES = [
    "Status", "Code snippet", "Hardware", "Quantization", "Torch data type", "Device map", "Model size",
    "Startup time", "Inference time (4 new tokens)", "RAM", "VRAM", "Response output", "Accuracy / quality",
    "Best for", "Dependencies",
]  # fmt: skip


def cells(comparison: Comparison, which: int) -> dict[str, str]:
    return {row.title: row.cell(comparison, comparison.contenders[which]) for row in table.document(comparison)}


def measured(*values: float, unit: str = "s", low: float | None = None, high: float | None = None) -> Measurement:
    return Measurement(
        label="x", unit=unit, better="lower", value=sorted(values)[len(values) // 2], low=low or min(values),
        high=high or max(values), interval="range",
        samples=[Sample(round=i, job="speed", value=v) for i, v in enumerate(values)],
    )  # fmt: skip


# ---- words and numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1.00"), (12.345, "12.3"), (123.45, "123"), (1234567, "1,234,567"), (0.05, "0.0500"),
        (-2.5, "-2.50"), (999.6, "1,000"), (math.inf, "inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_three_digits_and_never_powers_of_ten(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(1e-3, 1e15))
def test_a_number_is_within_half_a_percent_of_what_it_says(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=0.0051)
    assert "e" not in number(value)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (5e-7, "s", "0.500 µs"), (0.0123, "s", "12.3 ms"), (1.5, "s", "1.50 s"), (299, "s", "299 s"),
        (600, "s", "10.0 min"), (512, "B", "512 B"), (2048, "B", "2.05 kB"), (3.2e9, "B", "3.20 GB"),
        (5e6, "B/token", "5.00 MB/token"), (20.0, "tokens/s", "20.0 tokens/s"),
    ],
)  # fmt: skip
def test_a_figure_has_the_unit_a_person_would_use(value: float, unit: str, text: str) -> None:
    assert figure(measured(value, unit=unit)) == text
    factor, name = scale(value, unit)
    assert text == f"{number(value * factor)} {name}"


def test_a_figure_shows_its_bounds_in_its_own_unit_from_two_rounds_on() -> None:
    assert figure(measured(1.0, 1.5, 2.0)) == "1.50 s (1.00–2.00)"
    assert figure(measured(0.9, 1.0, 1.1)) == "1.00 s (0.900–1.10)"
    assert figure(measured(1.5, 1.5)) == "1.50 s"
    assert figure(measured(1.5)) == "1.50 s"
    assert figure(measured(1.0, 1.5, 2.0), interval=False) == "1.50 s"


def test_what_is_not_known_is_a_dash() -> None:
    unknown = msgspec.structs.replace(measured(1.0), value=None, low=None, high=None, interval=None, samples=[])
    assert figure(None) == figure(unknown) == NOTHING == "—"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (1.0, "the same"), (1.05, "the same"), (0.5, "about half"), (0.52, "about half"), (0.25, "about a quarter"),
        (0.3333, "about a third"), (0.127, "about an eighth"),
        (0.14, "0.140 times as much"), (0.6, "0.600 times as much"),
        (0.66, "about two thirds"), (1.2, "1.20 times as much"), (4.0, "4.00 times as much"),
    ],
)  # fmt: skip
def test_a_share_is_a_word_where_a_simple_fraction_is_near(ratio: float, words: str) -> None:
    assert share(ratio) == words


@given(st.floats(1e-3, 1e3))
def test_the_words_of_a_share_are_never_far_from_it(ratio: float) -> None:
    words = share(ratio)
    named = {text: value for value, text in table.FRACTIONS}
    meant = named[words] if words in named else float(words.removesuffix(" times as much").replace(",", ""))
    assert meant == pytest.approx(ratio, rel=0.09)


@pytest.mark.parametrize(
    ("mine", "other", "where"), [([1, 2, 3], [1, 9, 3], 2), ([1, 2], [1, 2, 3], 3), ([9], [1], 1), ([], [1], 1)]
)
def test_the_first_difference_is_counted_from_one(mine: list[int], other: list[int], where: int) -> None:
    assert first_difference(mine, other) == where


@given(st.text())
def test_nothing_that_moves_a_terminal_is_left_visible(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c in table.TURNERS for c in shown)


def test_what_is_harmless_stays_as_it_is() -> None:
    assert visible("héllo 💥\n\tعربي 中文") == "héllo 💥\n\tعربي 中文"
    assert visible("\x1b[31m\r\x7f\x9b\u202e") == "␛[31m␍␡\ufffd\ufffd"


# ---- the rows


def test_every_row_of_the_document_in_its_order(finished: Finished) -> None:
    assert [row.title for row in table.document(finished.comparison)] == TITLES
    assert [row.title for row in table.summary(finished.comparison)] == [
        "Load time", "Inference speed", "Accuracy", "Memory", "Model size",
    ]  # fmt: skip


def test_a_contender_that_ran_has_figures_in_every_row(finished: Finished) -> None:
    found = cells(finished.comparison, 0)
    assert [title for title, cell in found.items() if cell == NOTHING] == []
    assert found["Status"] == "ok"
    assert "load 1.00 s warm\nload 1.00 s cold\nimport 500 ms" in found["Startup time"]
    assert "decode 20.0 tokens/s" in found["Inference time (4 new tokens)"]
    assert "tokens/s at 16 prompt tokens" in found["Inference time (4 new tokens)"]
    assert found["VRAM"] == "none"
    assert found["Accuracy / quality"] == "the reference: full precision in 32 bits"
    assert found["Hardware"] == "CPU only"
    assert "python 3." in found["Dependencies"]
    assert "55.6 kB expected from the headers" in found["Model size"]


def test_the_other_is_told_against_the_reference(finished: Finished) -> None:
    found = cells(finished.comparison, 1)
    assert "so far higher: 2.00 times the reference's (2.00–2.00)" in found["Inference time (4 new tokens)"]
    assert "the same answer as the reference on 0 of 2 prompts" in found["Accuracy / quality"]
    assert "first difference at token 1, 1" in found["Accuracy / quality"]
    assert "“ij”" in found["Response output"]
    assert "3 tokens, stop" in found["Response output"]
    assert found["Best for"] == "nothing sets it apart here"  # two rounds decide nothing


def with_speeds(comparison: Comparison, *speeds: tuple[float, ...]) -> Comparison:
    """The comparison with other decode speeds for its first contenders; the first is the reference."""
    changed = list(comparison.contenders)
    for i, values in enumerate(speeds):
        figures = {**changed[i].measurements, "decode_tokens_per_second": measured(*values, unit="tokens/s")}
        changed[i] = msgspec.structs.replace(changed[i], measurements=figures)
    return msgspec.structs.replace(comparison, contenders=changed)


@pytest.mark.parametrize(
    ("rounds", "times", "words"),
    [
        (1, 2.0, "so far higher: 2.00 times the reference's (one round)"),
        (5, 2.0, "so far higher: 2.00 times the reference's (2.00–2.00)"),
        (6, 2.0, "higher: 2.00 times the reference's (2.00–2.00)"),
        (5, 0.5, "so far lower: 0.500 times the reference's (0.500–0.500)"),
        (6, 0.5, "lower: 0.500 times the reference's (0.500–0.500)"),
    ],
)
def test_below_six_rounds_a_difference_is_only_so_far(
    finished: Finished, rounds: int, times: float, words: str
) -> None:
    comparison = with_speeds(finished.comparison, (10.0,) * rounds, (10.0 * times,) * rounds)
    assert table.against(comparison, comparison.contenders[1], "decode_tokens_per_second") == words


def test_what_is_not_decided_says_how_many_rounds_would(finished: Finished) -> None:
    comparison = with_speeds(finished.comparison, (10.0,) * 6, (10.0, 10.2, 10.4, 10.4, 10.6, 9.8))
    said = table.against(comparison, comparison.contenders[1], "decode_tokens_per_second")
    ratio = comparison.ratio("decode_tokens_per_second", *(c.name for c in comparison.contenders[1::-1]))
    assert ratio is not None
    # the median is 1.03; the far bound lies some effects away, and the distance shrinks with the root of the rounds
    effect = math.log(ratio.value)
    reach = max(math.log(ratio.high) - effect, effect - math.log(ratio.low))
    more = math.ceil(6 * (reach / effect) ** 2) + 1 - 6
    assert said == f"no difference shown to the reference; about {more} more rounds would"
    assert more > 0


@pytest.mark.parametrize("speeds", [(10.0,) * 6, (8.0, 12.5) * 3, (5.0, 20.0, 5.0, 20.0, 10.0, 10.001)])
def test_what_no_sensible_number_of_rounds_decides_says_nothing_of_it(
    finished: Finished, speeds: tuple[float, ...]
) -> None:
    comparison = with_speeds(finished.comparison, (10.0,) * 6, speeds)
    said = table.against(comparison, comparison.contenders[1], "decode_tokens_per_second")
    assert said == "no difference shown to the reference"


@pytest.mark.parametrize(
    ("which", "status"),
    [
        (2, "out_of_memory (load)\nMemoryError: scripted: out of memory at load\n→ free memory"),
        (3, "cannot_run\nno CUDA GPU here"),
    ],
)
def test_one_that_did_not_run_keeps_its_row_its_reason_and_no_figure(
    finished: Finished, which: int, status: str
) -> None:
    found = cells(finished.comparison, which)
    assert found["Status"].startswith(status)
    for title in ("Response output", "Best for"):
        assert found[title] == NOTHING
    for title in ("Inference time (4 new tokens)", "RAM", "VRAM"):
        assert not any(c.isdigit() for c in found[title]), title
    # one had come as far as importing, the other was never started
    assert found["Startup time"] == NOTHING if which == 3 else "import 500 ms" in found["Startup time"]
    assert "load (warm) unknown" in found["Startup time"] or which == 3
    assert "expected from the headers" in found["Model size"]
    result = finished.comparison.contenders[which]
    short = [row.cell(finished.comparison, result) for row in table.summary(finished.comparison)]
    assert not any(c.isdigit() for cell in short for c in cell)
    if which == 3:
        assert set(short) == {NOTHING}


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (250e6, "about a quarter of the reference's"), (140e6, "0.140 times as much as the reference's"),
        (1e9, "the same as the reference's"), (2e9, "2.00 times as much as the reference's"),
    ],
)  # fmt: skip
def test_a_size_is_told_against_the_reference(finished: Finished, loaded: float, words: str) -> None:
    changed = [
        msgspec.structs.replace(c, measurements={**c.measurements, "loaded_bytes": measured(size, unit="B")})
        for c, size in zip(finished.comparison.contenders, (1e9, loaded), strict=False)
    ]
    comparison = msgspec.structs.replace(finished.comparison, contenders=changed)
    assert words in cells(comparison, 1)["Model size"].splitlines()
    assert "full" in cells(comparison, 0)["Model size"].splitlines()


def test_one_that_failed_late_shows_what_was_measured_before(fakes: Callable[..., Comparison]) -> None:
    # four tokens go well while it is timed; its answer breaks at the fifth
    comparison = fakes("fp32@cpu", "nf4@cpu+fail=token5.error", rounds=2)
    found = cells(comparison, 1)
    assert found["Status"].startswith("failed (response_1)\nRuntimeError: scripted: failed at token5")
    assert "decode 40.0 tokens/s" in found["Inference time (4 new tokens)"]
    assert "load 1.00 s warm" in found["Startup time"]
    assert found["RAM"].startswith("peak ") and any(c.isdigit() for c in found["RAM"])
    assert found["Accuracy / quality"] == "unknown: quality was not asked for"
    assert found["Best for"] == found["Response output"] == NOTHING


def test_a_difference_within_the_noise_is_no_difference(finished: Finished) -> None:
    near = with_speeds(finished.comparison, (10, 12, 11), (11, 11, 12))
    assert "no difference shown to the reference" in cells(near, 1)["Inference time (4 new tokens)"]


def test_without_a_reference_nothing_is_compared(finished: Finished) -> None:
    alone = msgspec.structs.replace(finished.comparison, reference=None, reference_note="none runs")
    assert cells(alone, 1)["Accuracy / quality"] == "unknown: none runs"
    assert "reference" not in cells(alone, 1)["Inference time (4 new tokens)"]
