"""The terminal: a table that fills while the run goes on, and the comparison when it is done."""

from __future__ import annotations

import io
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weighin.intervals import ENOUGH
from weighin.machine import Machine
from weighin.measurements import Comparison, ContenderResult
from weighin.plan import Instrument, Plan
from weighin.report.table import (
    NOTHING,
    figure,
    figure_bytes,
    figure_seconds,
    more_rounds,
    number,
    own_cost,
    scale,
    short_quality,
    visible,
)
from weighin.schedule import State, Unit, round_seconds

COLUMNS = (
    ("load", "load_seconds"),
    ("first token", "first_token_seconds"),
    ("answer", "answer_seconds"),
    ("decode", "decode_tokens_per_second"),
    ("peak RAM", "peak_ram_bytes"),
    ("peak VRAM", "peak_vram_bytes"),
)
WIDE, MIDDLING = 120, 100  # columns of a terminal below which the table leaves some out
NOW_WIDTH = 32
PHASES = {
    "prepare": "preparing",
    "import": "importing",
    "load": "loading",
    "first_answer": "first answer",
    "answers": "steady answers",
    "cold_token": "first token, cold",
}


class Progress:
    """The live view. It redraws when an event arrives and at no other time: nothing here runs beside a timed job."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None
        self.plan: Plan | None = None
        self.values: dict[str, dict[str, list[float]]] = {}
        self.said: dict[str, str] = {}
        self.doing: dict[str, str] = {}
        self.began_at = time.monotonic()
        self.left = ""

    def planned(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        budget = (
            f"{plan.rounds} round{'s' if plan.rounds > 1 else ''}"
            if plan.rounds
            else f"a budget of {figure_seconds(plan.budget_seconds)}"
        )
        model = plan.model
        self.console.print(
            Text(
                f"{visible(model.name)}: {number(model.parameters / 1e6)} million parameters, "
                f"{figure_bytes(model.weight_bytes)} as {model.dtype}. "
                f"{len(plan.runnable)} of {len(plan.entries)} contenders can run here, {plan.machine.threads} threads, "
                f"{budget}. Results go to {folder}"
            )
        )
        for entry in plan.entries:
            self.values[entry.name] = {}
            self.doing[entry.name] = "waiting" if entry.status == "ok" else f"{entry.status}: {entry.reason}"
        self.live = Live(self._view(), console=self.console, auto_refresh=False, transient=True)
        self.live.start()

    def began(self, unit: Unit, state: State) -> None:
        assert self.plan is not None
        alive = [e for e in self.plan.runnable if not state.failed(e.name)]
        left = self.plan.budget_seconds - state.spent
        if unit.round >= 2 and self.plan.rounds:
            left = (self.plan.rounds - unit.round + 1) * round_seconds(state, alive)
        self.left = f"{figure_seconds(max(left, 0.0))} left" if not self.plan.rounds or unit.round >= 2 else ""
        self.doing[unit.contender] = f"{unit.job}, round {unit.round}"
        self._redraw()

    def event(self, unit: Unit, event: dict[str, Any], state: State) -> None:
        if event["event"] == "sample" and unit.job in ("speed", "responses"):
            self.values[unit.contender].setdefault(event["key"], []).append(event["value"])
        elif event["event"] == "decoded":
            if event["prompt"] == 0:
                self.said[unit.contender] = event["text"] or event["whole"]
        elif event["event"] == "phase":
            self.doing[unit.contender] = PHASES.get(event["phase"], event["phase"].replace("_", " "))
            self._redraw()

    def ended(self, unit: Unit, state: State) -> None:
        end = state.ended[unit]
        rounds = sum(u.contender == unit.contender and u.job == "speed" for u in state.ended)
        done = f"{rounds} round{'s' if rounds != 1 else ''}"
        self.doing[unit.contender] = done if end["status"] == "ok" else f"{end['status']}: {end['reason']}"
        self._redraw()
        if not self.console.is_terminal:
            self.console.print(
                Text(
                    f"{unit.contender} {unit.job} round {unit.round}: {end['status']}, {figure_seconds(end['seconds'])}"
                )
            )

    def finished(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _redraw(self) -> None:
        if self.live is not None:
            self.live.update(self._view(), refresh=True)

    def _view(self) -> RenderableType:
        assert self.plan is not None
        columns = _columns(self.plan.machine, self.console.width - NOW_WIDTH)
        table = Table(title=None, expand=False)
        table.add_column("contender", no_wrap=True)
        for title, _ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("now", max_width=NOW_WIDTH)
        for entry in self.plan.entries:
            values = self.values[entry.name]
            cells = [_provisional(values.get(key), key) for _, key in columns]
            table.add_row(Text(visible(entry.name)), *map(Text, cells), Text(visible(self.doing[entry.name])[:100]))
        answers = [Text(f"> {visible(self.plan.workload.prompts[0].shown)}", no_wrap=True, overflow="ellipsis")]
        for name, said in self.said.items():
            line = f"{name}: {' '.join(visible(said).split())}"
            answers.append(Text(line, no_wrap=True, overflow="ellipsis"))
        spent = figure_seconds(time.monotonic() - self.began_at)
        state = Text(f"provisional; {spent} so far{', ' + self.left if self.left else ''}", style="dim")
        return Group(table, *(answers if self.said else []), state)


def _provisional(values: list[float] | None, key: str) -> str:
    if not values:
        return NOTHING
    from weighin.probes import measures

    value = median(values)
    factor, unit = scale(value, measures()[key].unit)
    return f"{number(value * factor)} {unit}"


def result(comparison: Comparison, width: int = 160) -> RenderableType:
    """The table of a finished comparison; a narrow terminal gets the columns that matter most."""
    columns = _columns(comparison.machine, width)
    table = Table()
    table.add_column("contender", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("to the reference", justify="right")
    for c in comparison.contenders:
        if c.rounds:
            cells = [figure(c.measurements.get(key)).replace(" (", "\n(") for _, key in columns]
            table.add_row(Text(visible(c.name)), *map(Text, cells), Text(_speed_against(comparison, c)))
        else:
            table.add_row(Text(visible(c.name)), *[NOTHING] * len(columns), Text(c.status))
    lines = [Text(_brackets(comparison), style="dim")]
    for c in comparison.contenders:  # too long for a column
        if c.fidelity and c.name != comparison.reference:
            lines.append(Text(visible(f"{c.name}: quality {short_quality(comparison, c).replace(chr(10), ', ')}")))
    for c in comparison.contenders:
        if c.status != "ok":
            where = f" in {c.phase}" if c.phase not in (None, "plan") else ""
            remedy = f" ({c.remedy})" if c.remedy else ""
            lines.append(Text(visible(f"{c.name}: {c.status}{where}: {c.reason}{remedy}"), style="red"))
    for c in comparison.contenders:
        if strengths := comparison.verdict.best_for.get(c.name):
            lines.append(Text(visible(f"{c.name}: {'; '.join(strengths)}")))
    doubts: dict[str, list[str]] = {}
    for c in comparison.contenders:
        for d in c.doubts:
            doubts.setdefault(f"{d.type}: {d.evidence}; {d.remedy}", []).append(c.name)
    ran = sum(c.rounds > 0 for c in comparison.contenders)
    for words, names in doubts.items():
        who = "all contenders" if 1 < len(names) == ran else ", ".join(names)
        lines.append(Text(visible(f"doubt about {who}: {words}"), style="yellow"))
    lines += [Text(visible(note), style="dim") for note in comparison.notes]
    return Group(table, *lines)


def _columns(machine: Machine, width: int) -> list[tuple[str, str]]:
    columns = [c for c in COLUMNS if c[1] != "peak_vram_bytes" or machine.gpus]
    less = [] if width >= WIDE else ["first_token_seconds", *(["load_seconds"] if width < MIDDLING else [])]
    return [c for c in columns if c[1] not in less]


def _brackets(comparison: Comparison) -> str:
    if comparison.rounds >= ENOUGH:
        return f"Medians over {comparison.rounds} rounds of fresh processes; in brackets 95% intervals."
    if comparison.rounds > 1:
        return f"Medians over {comparison.rounds} rounds of fresh processes; in brackets their range."
    return "One round: these figures have no interval yet." if comparison.rounds else "Nothing was measured."


def _speed_against(comparison: Comparison, c: ContenderResult) -> str:
    if c.name == comparison.reference:
        return "the reference"
    ratio = (
        comparison.ratio("decode_tokens_per_second", c.name, comparison.reference or "")
        if comparison.reference
        else None
    )
    if ratio is None:
        return NOTHING
    if ratio.low <= 1 <= ratio.high:
        return f"no difference shown{more_rounds(ratio)}"
    faster, value, low, high = "faster", ratio.value, ratio.low, ratio.high
    if value < 1:
        faster, value, low, high = "slower", 1 / value, 1 / high, 1 / low
    bounds = f"{number(low)}–{number(high)}" if ratio.processes > 1 else "one round"
    so_far = "" if ratio.interval == "95%" else "so far "
    return f"{so_far}{number(value)}× {faster}\n({bounds})"


def text(comparison: Comparison, width: int = 160) -> str:
    """The finished table as plain text."""
    console = Console(width=width, no_color=True, file=io.StringIO())
    console.print(result(comparison, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def machine_view(
    machine: Machine, engines: list[tuple[str, str, str]], instrument: Instrument | None
) -> RenderableType:
    """What `weighin machine` shows."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    unknown = machine.reasons
    bandwidth = (
        f"{number(machine.memory_bandwidth / 1e9)} GB/s, read by {machine.threads} threads, measured"
        if machine.memory_bandwidth
        else f"unknown: {unknown.get('memory_bandwidth', 'not measured')}"
    )
    quota = f", container quota {machine.quota_cores:g} cores" if machine.quota_cores else ""
    limit = f", container limit {figure_bytes(machine.memory_limit_bytes)}" if machine.memory_limit_bytes else ""
    rows = [
        ("system", f"{machine.system}, Python {machine.python}"),
        ("processor", f"{machine.cpu or unknown.get('cpu', 'unknown')}"),
        (
            "cores",
            f"{machine.cores_physical or '?'} physical, {machine.cores_logical} logical, "
            f"{machine.cores_allowed} allowed"
            f"{quota}: every engine gets {machine.threads} threads",
        ),
        ("instructions", ", ".join(machine.cpu_features) or "none that matter"),
        (
            "memory",
            f"{figure_bytes(machine.memory_bytes)}, {figure_bytes(machine.memory_available_bytes)} available{limit}, "
            f"swap {figure_bytes(machine.swap_bytes)}",
        ),
        ("bandwidth", bandwidth),
        ("disk", f"{figure_bytes(machine.disk_free_bytes)} free" if machine.disk_free_bytes else "unknown"),
    ]
    for gpu in machine.gpus:
        held = "; ".join(
            f"held by {p.name or 'a process'} (pid {p.pid}{', this session' if p.ours else ''})" for p in gpu.processes
        )
        rows.append(
            (
                f"GPU {gpu.index}",
                f"{gpu.name}, {figure_bytes(gpu.memory_bytes)}, {figure_bytes(gpu.memory_free_bytes)} free, "
                f"compute capability {gpu.compute_capability or '?'}, driver {gpu.driver or '?'}"
                + (f"; {held}" if held else ""),
            )
        )
    if not machine.gpus:
        rows.append(("GPU", f"none: {machine.gpu_reason}"))
    rows.append(("instrument", own_cost(instrument)))
    rows += [(f"engine {name}", f"{state}{chr(10) + remedy if remedy else ''}") for name, state, remedy in engines]
    for title, value in rows:
        table.add_row(Text(title), Text(visible(value)))
    return table
