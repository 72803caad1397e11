"""report.md: the document, every row of it, then the summary, the answers, the transcript, doubts, failures, code."""

from __future__ import annotations

import html
import re

from weighin.measurements import Comparison, Response
from weighin.report import quality_part, table
from weighin.report.table import Row, figure, figure_seconds, number, visible

SPECIAL = re.compile(r"([\\`*_\[\]#|~])")


def render(comparison: Comparison) -> str:
    parts = [
        f"# How to run {text(comparison.model.name)}",
        _opening(comparison),
        "## The comparison",
        table_of(comparison, table.document(comparison)),
        _legend(comparison),
        "## Summary",
        table_of(comparison, table.summary(comparison)),
        *_quality(comparison),
        *_responses(comparison),
        *_transcript(comparison),
        *_doubts(comparison),
        *_failures(comparison),
        *_snippets(comparison),
        "## The machine and the model",
        _machine(comparison),
        _model(comparison),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def text(raw: str) -> str:
    """Anybody's words as plain text in Markdown: nothing in it is markup, in Markdown or in HTML."""
    return (
        SPECIAL.sub(r"\\\1", html.escape(visible(raw), quote=False))
        .replace("://", "&#58;//")
        .replace("www.", "www&#46;")
    )


def cell(raw: str) -> str:
    return text(raw.strip()).replace("\n", "<br>").replace("\t", " ")


def fence(raw: str, language: str = "") -> str:
    """A code block that its own content cannot end."""
    longest = max((len(run) for run in re.findall(r"`+", raw)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{visible(raw).rstrip()}\n{ticks}"


def _rows(titles: list[str], rows: list[list[str]]) -> str:
    head = f"| {' | '.join(cell(t) for t in titles)} |\n|{' --- |' * len(titles)}"
    return "\n".join([head, *(f"| {' | '.join(cell(c) for c in row)} |" for row in rows)])


def table_of(comparison: Comparison, rows: list[Row]) -> str:
    titles = ["", *(c.name for c in comparison.contenders)]
    return _rows(titles, [[row.title, *(row.cell(comparison, c) for c in comparison.contenders)] for row in rows])


def _opening(comparison: Comparison) -> str:
    through = sum(c.status == "ok" for c in comparison.contenders)
    state = "" if comparison.complete else " **The run is not complete**: it can be finished with `--resume`."
    first = (
        f"{through} of {len(comparison.contenders)} contenders ran on this machine, {comparison.rounds} "
        f"{'round' if comparison.rounds == 1 else 'rounds'}, {figure_seconds(comparison.spent_seconds)} of measuring, "
        f"by weighin {comparison.weighin_version} on {comparison.created}.{state}"
    )
    reference = f"Reference: {text(comparison.reference or 'none')} ({text(comparison.reference_note)})."
    prompts = f"Prompts: {len(comparison.workload.prompts)}, {text(comparison.workload.template_note)}."
    notes = "\n".join(f"- {text(note)}" for note in comparison.notes)
    return "\n\n".join(part for part in (first, f"{reference} {prompts}", notes) if part)


def _legend(comparison: Comparison) -> str:
    return (
        "A figure is the median over processes (one per contender and round, started fresh). Behind it in brackets: "
        "from six rounds on the 95% interval, below that the range of the rounds; nothing with a single round. "
        f"All engines had {comparison.machine.threads} threads. {table.NOTHING} is not known."
    )


def _quality(comparison: Comparison) -> list[str]:
    parts: list[str] = []
    if (found := quality_part.strata(comparison)) is not None:
        parts += [*map(text, quality_part.explained(comparison)), _rows(*found)]
    parts += ["\n".join(f"- {text(line)}" for line in quality_part.unknown(comparison))]
    if partings := quality_part.partings(comparison):
        parts += ["### Where answers part from the reference's", "\n".join(f"- {text(line)}" for line in partings)]
    if (tasks := quality_part.tasks(comparison)) is not None:
        parts += ["### lm-evaluation-harness", _rows(*tasks)]
    return ["## Quality", *parts] if any(parts) else []


def _responses(comparison: Comparison) -> list[str]:
    answered = [c for c in comparison.contenders if c.responses]
    if not answered:
        return []
    rows = []
    for number_, prompt in enumerate(comparison.workload.prompts):
        expected = f"\n(expected: {prompt.expected})" if prompt.expected is not None else ""
        row = [f"{number_ + 1}. {prompt.shown}{expected}"]
        for c in answered:
            answers = [r for r in c.responses if r.prompt == number_]
            row.append("\n".join(map(_answer, answers)) if answers else table.NOTHING)
        rows.append(row)
    how = "Greedy" if comparison.workload.sampling is None else f"Drawn {comparison.workload.seeds} times a prompt"
    explained = (
        f"{how}, each to its natural end or {comparison.workload.response_cap} tokens "
        "(stop: the model ended; length: the cap cut it off)."
    )
    return ["## Responses", explained, _rows(["prompt", *(c.name for c in answered)], rows)]


def _answer(found: Response) -> str:
    thought = f"(thinking: {len(found.thinking)} characters, left out here)\n" if found.thinking else ""
    faults = "".join(f"; {fault.evidence}" for fault in found.faults if fault.type != "cut_off")
    return f"{thought}{found.text}\n({len(found.ids)} tokens, {found.finish}{faults})"


def _transcript(comparison: Comparison) -> list[str]:
    parts = []
    for c in comparison.contenders:
        if not c.rounds:
            continue
        of = c.measurements
        said = [
            f"import {figure(of['import_seconds'], interval=False)}, "
            f"load {figure(of['load_seconds'], interval=False)}, "
            f"first token {figure(of['ready_seconds'], interval=False)} after the start",
            f"first call: {comparison.workload.max_new_tokens} tokens in "
            f"{figure(of['first_answer_seconds'], interval=False)}; later calls: "
            f"{figure(of['answer_seconds'], interval=False)}",
        ]
        for r in c.responses:
            said += ["", f"> {comparison.workload.prompts[r.prompt].shown}"]
            if r.thinking:
                said.append(f"[thinking] {r.thinking}")
            said += [r.text, f"[{len(r.ids)} tokens, {figure_seconds(r.seconds)}, {r.finish}]"]
        parts += [f"### {text(c.name)}", fence("\n".join(said), "text")]
    return ["## Transcript", *parts] if parts else []


def _doubts(comparison: Comparison) -> list[str]:
    lines = [
        f"- {text(c.name)}: **{text(d.type)}**: {text(d.evidence)}. Remedy: {text(d.remedy)}."
        for c in comparison.contenders
        for d in c.doubts
    ]
    return ["## Doubts", "\n".join(lines)] if lines else []


def _failures(comparison: Comparison) -> list[str]:
    lines = [
        f"- {text(c.name)}: **{c.status}**{f' in {text(c.phase)}' if c.phase and c.phase != 'plan' else ''}: "
        f"{text(c.reason or '')}." + (f" Remedy: {text(c.remedy)}." if c.remedy else "")
        for c in comparison.contenders
        if c.status != "ok"
    ]
    return ["## What did not run", "\n".join(lines)] if lines else []


def _snippets(comparison: Comparison) -> list[str]:
    parts: list[str] = []
    for c in comparison.contenders:
        parts += [f"### {text(c.name)}", fence(c.snippet, "python")]
    return ["## Code", *parts] if parts else []


def _machine(comparison: Comparison) -> str:
    m = comparison.machine
    bandwidth = f"{number(m.memory_bandwidth / 1e9)} GB/s read" if m.memory_bandwidth else "bandwidth not measured"
    limit = f", limited to {number(m.memory_limit_bytes / 1e9)} GB" if m.memory_limit_bytes else ""
    gpus = ", ".join(f"{g.name} ({number(g.memory_bytes / 1e9)} GB)" for g in m.gpus) or f"none ({m.gpu_reason})"
    return "\n".join(
        f"- {text(line)}"
        for line in (
            f"{m.system}, Python {m.python}",
            f"{m.cpu or 'unknown CPU'}: {m.cores_physical or '?'} cores, {m.threads} used; {', '.join(m.cpu_features)}",
            f"memory {number(m.memory_bytes / 1e9)} GB{limit}, {bandwidth}",
            f"GPU: {gpus}",
            table.own_cost(comparison.instrument),
        )
    )


def _model(comparison: Comparison) -> str:
    m = comparison.model
    window = f", sliding window {m.shape.sliding_window}" if m.shape.sliding_window else ""
    return "\n".join(
        f"- {text(line)}"
        for line in (
            f"{m.name}: {m.architecture}, {number(m.parameters / 1e6)} million parameters, "
            f"{m.shape.layers} layers, width {m.shape.hidden}, vocabulary {m.shape.vocabulary}{window}",
            f"checkpoint: {m.dtype}, {number(m.weight_bytes / 1e6)} MB of weights"
            + (f", quantized: {m.quantization}" if m.quantization else ""),
            f"content {m.fingerprint[:16]}, ids {comparison.ids_hash[:16]}",
        )
    )
