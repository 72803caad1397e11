"""The terminal: a table that fills while the run goes on, and the comparison when it is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weighin.machine import Machine
from weighin.measurements import Comparison, ContenderResult, Measurement
from weighin.plan import Plan
from weighin.report.table import NOTHING, figure, figure_bytes, figure_seconds, number, scale, visible
from weighin.schedule import State, Unit, round_seconds

COLUMNS = (
    ("load", "load_seconds"),
    ("first token", "first_token_seconds"),
    ("answer", "answer_seconds"),
    ("decode", "decode_tokens_per_second"),
    ("peak RAM", "peak_ram_bytes"),
    ("peak VRAM", "peak_vram_bytes"),
)
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
        budget = f"{plan.rounds} rounds" if plan.rounds else f"a budget of {figure_seconds(plan.budget_seconds)}"
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
        columns = [c for c in COLUMNS if c[1] != "peak_vram_bytes" or self.plan.machine.gpus]
        table = Table(title=None, expand=False)
        table.add_column("contender", no_wrap=True)
        for title, _ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("answers", ratio=1)
        table.add_column("now", max_width=32)
        for entry in self.plan.entries:
            values = self.values[entry.name]
            cells = [_provisional(values.get(key), key) for _, key in columns]
            said = " ".join(visible(self.said.get(entry.name, "")).split())
            table.add_row(
                Text(entry.name), *map(Text, cells), Text(said[:60] + ("…" if len(said) > 60 else "")),
                Text(visible(self.doing[entry.name])[:200]),
            )  # fmt: skip
        spent = figure_seconds(time.monotonic() - self.began_at)
        return Group(table, Text(f"provisional; {spent} so far{', ' + self.left if self.left else ''}", style="dim"))


def _provisional(values: list[float] | None, key: str) -> str:
    if not values:
        return NOTHING
    from weighin.probes import measures

    value = sorted(values)[len(values) // 2]
    factor, unit = scale(value, measures()[key].unit)
    return f"{number(value * factor)} {unit}"


def result(comparison: Comparison) -> RenderableType:
    """The table of a finished comparison."""
    columns = [c for c in COLUMNS if c[1] != "peak_vram_bytes" or comparison.machine.gpus]
    table = Table()
    table.add_column("contender", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right")
    table.add_column("against the reference", justify="right")
    for c in comparison.contenders:
        if not c.rounds:
            table.add_row(Text(c.name), *[NOTHING] * len(columns), Text(visible(f"{c.status}: {c.reason}")))
            continue
        cells = [figure(c.measurements.get(key)).replace(" (", "\n(") for _, key in columns]
        table.add_row(Text(c.name), *map(Text, cells), Text(_speed_against(comparison, c)))
    parts: list[RenderableType] = [table]
    bracket = "from six rounds on 95% intervals" if comparison.rounds >= 6 else "the range of the rounds"
    parts.append(
        Text(f"Medians over {comparison.rounds} round(s) of fresh processes; in brackets {bracket}.", style="dim")
    )
    for c in comparison.contenders:
        if c.status == "ok" and (strengths := comparison.verdict.best_for.get(c.name)):
            parts.append(Text(f"{c.name}: best for {', '.join(strengths)}"))
    doubts: dict[tuple[str, str], list[str]] = {}
    for c in comparison.contenders:
        for d in c.doubts:
            doubts.setdefault((d.type, f"{d.evidence}; {d.remedy}"), []).append(c.name)
    for (kind, evidence), names in doubts.items():
        who = (
            "all"
            if len(names) > 1 and len(names) == sum(c.rounds > 0 for c in comparison.contenders)
            else ", ".join(names)
        )
        parts.append(Text(visible(f"doubt: {kind} ({who}): {evidence}"), style="yellow"))
    parts += [Text(visible(note), style="dim") for note in comparison.notes]
    return Group(*parts)


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
        return "no difference shown"
    faster, value, low, high = "faster", ratio.value, ratio.low, ratio.high
    if value < 1:
        faster, value, low, high = "slower", 1 / value, 1 / high, 1 / low
    bounds = f"{number(low)}–{number(high)}" if ratio.processes > 1 else "one round"
    return f"{number(value)}× {faster}\n({bounds})"


def text(comparison: Comparison) -> str:
    """The finished table as plain text."""
    console = Console(width=160, no_color=True, force_terminal=False, record=True, file=None, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(result(comparison))
    return capture.get()


def machine_view(machine: Machine, engines: list[tuple[str, str, str]]) -> RenderableType:
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
    rows += [(f"engine {name}", f"{state}{chr(10) + remedy if remedy else ''}") for name, state, remedy in engines]
    for title, value in rows:
        table.add_row(Text(title), Text(visible(value)))
    return table


__all__ = ["Measurement", "Progress", "machine_view", "result", "text"]
