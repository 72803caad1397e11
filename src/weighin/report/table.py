"""The rows of the document and how a figure is written. Every report takes its words and numbers from here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from weighin import intervals
from weighin.fidelity import TITLES, Figure
from weighin.intervals import Interval
from weighin.measurements import Comparison, ContenderResult, Measurement
from weighin.plan import Instrument

NOTHING = "—"
FRACTIONS = (
    (1 / 8, "about an eighth"),
    (1 / 6, "about a sixth"),
    (1 / 5, "about a fifth"),
    (1 / 4, "about a quarter"),
    (1 / 3, "about a third"),
    (1 / 2, "about half"),
    (2 / 3, "about two thirds"),
    (3 / 4, "about three quarters"),
    (1.0, "the same"),
)
NEAR = 0.08
SMALLEST = 1e-6
MOST_ROUNDS_WORTH_SAYING = 500

Cell = Callable[[Comparison, ContenderResult], str]


class Row(NamedTuple):
    """A row of the document: its title, and what it says of a contender."""

    title: str
    cell: Cell


# ---- how a figure is written


def number(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < SMALLEST:
        return f"<{SMALLEST:f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}" if digits else f"{value:,.0f}"


def scale(value: float, unit: str) -> tuple[float, str]:
    """The factor and the name of the unit that a person would use for this size."""
    if unit == "s":
        if value < 1e-3:
            return 1e6, "µs"
        if value < 1:
            return 1e3, "ms"
        return (1.0, "s") if value < 300 else (1 / 60, "min")
    if unit in ("B", "B/token"):
        for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
            if value >= size:
                return 1 / size, name + unit[1:]
    return 1.0, unit


def figure(found: Measurement | None, *, interval: bool = True) -> str:
    """A measurement as text: its value with the bounds behind it."""
    if found is None or found.value is None:
        return NOTHING
    factor, unit = scale(found.value, found.unit)
    if found.unit == "share":
        factor, unit = 100.0, "%"
    text = f"{number(found.value * factor)} {unit}".rstrip().replace(" %", "%")
    enough = found.interval == "95%" or len({s.round for s in found.samples}) > 1
    if not interval or found.low is None or found.high is None or not enough:
        return text
    low, high = number(found.low * factor), number(found.high * factor)
    return text if low == high else f"{text} ({low}–{high})"


def share(ratio: float) -> str:
    """A ratio in words where a simple fraction is near, else as a factor."""
    near = min(FRACTIONS, key=lambda entry: abs(math.log(ratio / entry[0])))
    if abs(ratio / near[0] - 1) <= NEAR:
        return near[1]
    return f"{number(ratio)} times as much"


def against(comparison: Comparison, result: ContenderResult, key: str) -> str:
    """How a figure stands to the reference's: lower, higher or no difference shown, with the paired ratio."""
    if comparison.reference in (None, result.name):
        return ""
    ratio = comparison.ratio(key, result.name, str(comparison.reference))
    if ratio is None:
        return ""
    if ratio.low <= 1 <= ratio.high:
        return f"no difference shown to the reference{more_rounds(ratio)}"
    word = "lower" if ratio.value < 1 else "higher"
    if ratio.interval != "95%":
        word = f"so far {word}"  # a few rounds on one side are no proof
    bounds = f"{number(ratio.low)}–{number(ratio.high)}" if ratio.processes > 1 else "one round"
    return f"{word}: {number(ratio.value)} times the reference's ({bounds})"


def more_rounds(ratio: Interval) -> str:
    """What it would take to decide a ratio that is not decided."""
    needed = intervals.rounds_needed(ratio)
    if needed is None or needed > MOST_ROUNDS_WORTH_SAYING:
        return ""
    return f"; about {needed - ratio.processes} more rounds would"


def lines(*parts: str) -> str:
    """The parts that say something, one a line."""
    return "\n".join(part for part in parts if part)


# ---- the rows


def through(cell: Cell) -> Cell:
    """A row that only a contender with figures can fill; the others say why not."""

    def wrapped(comparison: Comparison, result: ContenderResult) -> str:
        return cell(comparison, result) if any(m.samples for m in result.measurements.values()) else NOTHING

    return wrapped


def _setting(name: str) -> Cell:
    return lambda _, result: str(result.settings.get(name) or NOTHING)


def _status(_: Comparison, result: ContenderResult) -> str:
    if result.status == "ok":
        return "ok"
    where = f" ({result.phase})" if result.phase not in (None, "plan") else ""
    return lines(f"{result.status}{where}", result.reason or "", f"→ {result.remedy}" if result.remedy else "")


def _size(comparison: Comparison, result: ContenderResult) -> str:
    loaded = result.measurements.get("loaded_bytes")
    value = result.value("loaded_bytes")
    planned = f"{figure_bytes(result.weight_bytes)} expected from the headers"
    parts = [f"{figure(loaded)} of weights in memory" if value else planned]
    reference = comparison.contender(comparison.reference).value("loaded_bytes") if comparison.reference else None
    if value and reference and comparison.reference != result.name:
        word = share(value / reference)
        parts.append(f"{word} of the reference's" if word.startswith("about") else f"{word} as the reference's")
    elif comparison.reference == result.name and result.settings.get("quantization") == "none":
        parts.append("full")
    disk = result.measurements.get("disk_bytes")
    if disk and disk.value:
        parts.append(f"{figure(disk)} on disk")
    return lines(*parts)


def own_cost(instrument: Instrument | None) -> str:
    """What weighin's harness itself adds, by its own measurement."""
    if instrument is None:
        return "weighin's own cost: not known (the null engine did not run)"
    token, run = figure_seconds(instrument.seconds_per_token), figure_seconds(instrument.seconds_per_run)
    return f"weighin's own cost, measured with an engine that does nothing: {token} a token, {run} a process"


def figure_bytes(value: float) -> str:
    factor, unit = scale(value, "B")
    return f"{number(value * factor)} {unit}"


def _startup(_: Comparison, result: ContenderResult) -> str:
    of = result.measurements
    prepared = f"prepare {figure_seconds(result.prepare_seconds)}, once" if result.prepare_seconds else ""
    return lines(
        f"load {figure(of['load_seconds'])} warm" if of["load_seconds"].value is not None else "load (warm) unknown",
        f"load {figure(of['load_cold_seconds'])} cold" if of["load_cold_seconds"].value is not None else "",
        f"import {figure(of['import_seconds'])}",
        f"first token {figure(of['ready_seconds'])} after the start",
        prepared,
    )


def figure_seconds(seconds: float) -> str:
    factor, unit = scale(seconds, "s")
    return f"{number(seconds * factor)} {unit}"


def _inference(comparison: Comparison, result: ContenderResult) -> str:
    of = result.measurements
    long = [key for key in of if key.startswith("prefill_tokens_per_second@")]
    return lines(
        f"first answer {figure(of['first_answer_seconds'])}",
        f"then {figure(of['answer_seconds'])}",
        f"first token {figure(of['first_token_seconds'])}",
        f"decode {figure(of['decode_tokens_per_second'])}",
        against(comparison, result, "decode_tokens_per_second"),
        *(f"prefill {figure(of[key])} at {key.partition('@')[2]} prompt tokens" for key in long),
    )


def _ram(comparison: Comparison, result: ContenderResult) -> str:
    of = result.measurements
    return lines(
        f"peak {figure(of['peak_ram_bytes'])}",
        f"{figure(of['answer_ram_bytes'])} while it answers" if of["answer_ram_bytes"].value is not None else "",
        f"{figure(of['peak_ram_anonymous_bytes'])} without mapped files"
        if of["peak_ram_anonymous_bytes"].value is not None
        else "",
        against(comparison, result, "peak_ram_bytes"),
    )


def _vram(_: Comparison, result: ContenderResult) -> str:
    of = result.measurements
    if of["peak_vram_bytes"].value is None:
        return NOTHING if result.settings.get("uses_gpu") else "none"
    driver = of["peak_vram_driver_bytes"]
    return lines(
        f"peak {figure(of['peak_vram_bytes'])} reserved",
        f"{figure(of['peak_vram_allocated_bytes'])} in tensors",
        f"{figure(driver)} by the driver" if driver.value is not None else f"by the driver: unknown, {driver.reason}",
    )


def _responses(comparison: Comparison, result: ContenderResult) -> str:
    if not result.responses:
        return NOTHING
    first = result.responses[0]
    text = " ".join(first.text.split())
    shown = text if len(text) <= 120 else text[:117] + "…"
    return lines(f"“{shown}”", f"{len(first.ids)} tokens, {first.finish}")


def _quality(comparison: Comparison, result: ContenderResult) -> str:
    if result.name == comparison.reference:
        return lines(f"the reference: {comparison.reference_note}", _floor(result), _accuracy(result))
    if comparison.reference is None:
        return f"unknown: {comparison.reference_note}"
    return lines(_fidelity(result), _same_answers(comparison, result), _accuracy(result))


def _floor(result: ContenderResult) -> str:
    """How far the reference is from itself: nothing below that is a difference."""
    found = result.fidelity
    if found is None or found.headline.kl is None:
        return ""
    kl, same = result.measurements["kl_divergence"], result.measurements["top1_agreement"]
    return f"against itself with other threads: KL {figure(kl)}, the same next token {figure(same)}"


def _fidelity(result: ContenderResult) -> str:
    """The word and the figures behind it, on the text that leads."""
    found = result.fidelity
    if found is None:
        return f"unknown: {result.fidelity_reason}"
    lead = found.headline
    if lead.kl is None:
        return f"{found.word}: {found.why}"
    of = result.measurements
    return lines(
        f"{found.word}: KL {figure(of['kl_divergence'])}",
        f"the same next token {figure(of['top1_agreement'])}, given the same text",
        f"perplexity {bounds(lead.perplexity_ratio)} times the reference's",
        f"on {TITLES[lead.name]}: {lead.documents} documents, {lead.positions} tokens",
    )


def short_quality(comparison: Comparison, result: ContenderResult) -> str:
    """The word, and how often the next token is the same."""
    if result.name == comparison.reference:
        return "the reference"
    if result.fidelity is None:
        return "unknown"
    same = result.measurements["top1_agreement"]
    return result.fidelity.word if same.value is None else f"{result.fidelity.word}\n{figure(same)} same next token"


def _accuracy(result: ContenderResult) -> str:
    """How many answers meet what was expected, and whether that differs from the reference's."""
    found = result.accuracy
    if found is None:
        return ""
    seeds = f", {found.seeds} answers each" if found.seeds > 1 else ""
    text = f"as expected {figure(result.measurements['task_accuracy'])} of {found.cases} prompts{seeds}"
    other = result.accuracy_against
    if other is None:
        return text
    if other.decided:
        return f"{text}; {'better' if other.difference > 0 else 'worse'} than the reference (p = {other.p_value:.2g})"
    more = f"; about {other.more_cases} more prompts would" if other.more_cases else ""
    return f"{text}; no difference shown to the reference{more}"


def bounds(found: Figure | None) -> str:
    """A figure of fidelity as text."""
    if found is None:
        return NOTHING
    if found.low is None or found.high is None:
        return number(found.value)
    return f"{number(found.value)} ({number(found.low)}–{number(found.high)})"


def _same_answers(comparison: Comparison, result: ContenderResult) -> str:
    theirs = {(r.prompt, r.seed): r for r in comparison.contender(str(comparison.reference)).responses}
    pairs = [(r, theirs[r.prompt, r.seed]) for r in result.responses if (r.prompt, r.seed) in theirs]
    if not pairs or comparison.workload.sampling is not None:
        return ""
    same = sum(mine.ids == other.ids for mine, other in pairs)
    firsts = [first_difference(mine.ids, other.ids) for mine, other in pairs if mine.ids != other.ids]
    where = f"first difference at token {', '.join(map(str, firsts))}" if firsts else ""
    return lines(
        f"the same answer as the reference on {same} of {len(pairs)} prompts",
        where,
    )


def first_difference(mine: list[int], other: list[int]) -> int:
    """The number (from 1) of the first token in which two answers differ."""
    return next(
        (i + 1 for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)) + 1
    )


def _best_for(comparison: Comparison, result: ContenderResult) -> str:
    if result.status != "ok":
        return NOTHING
    return ", ".join(comparison.verdict.best_for.get(result.name, [])) or "nothing sets it apart here"


def _dependencies(_: Comparison, result: ContenderResult) -> str:
    known = [f"{name} {version}" for name, version in result.dependencies.items()]
    missing = [name for name in result.settings.get("dependencies", []) if name not in result.dependencies]
    return ", ".join([*known, *missing]) or NOTHING


def document(comparison: Comparison) -> list[Row]:
    """The rows of the document, in its order."""
    return [
        Row("Status", _status),
        Row("Code snippet", lambda _, result: "below" if result.snippet else NOTHING),
        Row("Hardware", _setting("hardware")),
        Row("Quantization", _setting("quantization")),
        Row("Torch data type", _setting("dtype")),
        Row("Device map", _setting("device_map")),
        Row("Model size", _size),
        Row("Startup time", through(_startup)),
        Row(f"Inference time ({comparison.workload.max_new_tokens} new tokens)", through(_inference)),
        Row("RAM", through(_ram)),
        Row("VRAM", through(_vram)),
        Row("Response output", _responses),
        Row("Accuracy / quality", through(_quality)),
        Row("Best for", _best_for),
        Row("Dependencies", _dependencies),
    ]


def summary(comparison: Comparison) -> list[Row]:
    """The short table: the same figures, one line each."""

    def short(key: str) -> Cell:
        return lambda _, result: figure(result.measurements.get(key))

    def speed(_: Comparison, result: ContenderResult) -> str:
        if result.value("decode_tokens_per_second") is None:
            return NOTHING
        return f"{figure(result.measurements['decode_tokens_per_second'], interval=False)}, " + (
            f"{figure(result.measurements['answer_seconds'], interval=False)} an answer"
        )

    def memory(comparison: Comparison, result: ContenderResult) -> str:
        ram = figure(result.measurements["peak_ram_bytes"], interval=False)
        vram = result.measurements["peak_vram_bytes"]
        return f"{ram} RAM, {figure(vram, interval=False)} VRAM" if vram.value is not None else f"{ram} RAM"

    return [
        Row("Load time", through(short("load_seconds"))),
        Row("Inference speed", through(speed)),
        Row("Accuracy", through(short_quality)),
        Row("Memory", through(memory)),
        Row("Model size", through(short("loaded_bytes"))),
    ]


TURNERS = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they reverse what a reader sees


def visible(text: str) -> str:
    """Control characters as pictures: a model's output may be shown, never sent, to a terminal."""
    return "".join(map(_picture, text))


def _picture(character: str) -> str:
    code = ord(character)
    if code < 32 and character not in "\n\t":
        return chr(0x2400 + code)
    if code == 127:
        return "\u2421"
    return "\ufffd" if 0x80 <= code < 0xA0 or character in TURNERS else character
