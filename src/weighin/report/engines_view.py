"""What `weighin engines` shows: the table, and an installation while it goes on."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weighin import kits
from weighin.environments import HERE, Row
from weighin.pip_lines import Step, rough
from weighin.report.table import NOTHING, figure_bytes, visible

STYLES = {kits.READY: "green", kits.NOT_INSTALLED: "dim", kits.BROKEN: "red"}
UNTESTED = "untested"
QUIET_SECONDS = 15.0  # between two lines about the same kind of step, where no line can be drawn anew


def view(rows: list[Row]) -> RenderableType:
    """A line per engine, and below what to do about those that are not ready."""
    table = Table(show_lines=True)
    for title in ("engine", "state", "version", "runs in", "can do"):
        table.add_column(title, no_wrap=title == "engine", overflow="fold")
    for row in rows:
        state = Text(visible(row.state), style=STYLES.get(row.state, "yellow"))
        versions = "\n".join(f"{name} {version}" for name, version in row.versions.items())
        cells = (Text(visible(cell or NOTHING)) for cell in (versions, place(row), abilities(row)))
        table.add_row(Text(visible(row.name)), state, *cells)
    return Group(table, *(Text(visible(text)) for row in rows for text in remarks(row)))


def place(row: Row) -> str:
    """Where it runs, and what its own environment takes on the disk or would take."""
    size = row.needs_bytes if row.bytes is None else row.bytes
    if row.where == HERE or size is None:
        return row.where or ""
    return f"{row.where}\n{figure_bytes(size)}" if row.bytes is not None else f"would take {figure_bytes(size)}"


def abilities(row: Row) -> str:
    """The precisions and devices of its contenders, and whether it can score texts."""
    if not row.devices:
        return row.title
    devices = ", ".join(f"{device} ({UNTESTED})" if device in row.untested else device for device in row.devices)
    scores = f"log-probabilities: {row.log_probabilities}" if row.log_probabilities else "no log-probabilities"
    return f"{', '.join(row.precisions)}\non {devices}\n{scores}"


def remarks(row: Row) -> list[str]:
    """Why it is not ready and the line that changes it."""
    why = "; ".join(row.problems)
    if row.remedy is None:
        return [f"{row.name}: {why}"] if why else []
    said = f"{row.name} is {row.state}" + (f" ({why})" if why else "")
    to_do = {kits.BROKEN: "install it anew", kits.OTHER_VERSIONS: "make it anew"}.get(row.state, "install it")
    return [f"{said}. To {to_do}: {row.remedy}"]


class Watch:
    """An installation as it goes: sentences that stay, and below them the step of now with the time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.screen = console.is_terminal and not console.is_dumb_terminal  # where a line can be drawn anew
        self.now: Step | None = None
        self.printed: dict[str, float] = {}
        self.live = Live(get_renderable=self._line, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.screen:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def say(self, text: str) -> None:
        """A sentence that stays."""
        self.now = None
        self.console.print(Text(visible(text)), soft_wrap=True)

    def tell(self, step: Step) -> None:
        """What is done now; without a screen a line now and then."""
        self.now = step
        kind = step.words.partition(" ")[0]
        if self.screen or time.monotonic() - self.printed.get(kind, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self.printed[kind] = time.monotonic()
        self.console.print(self._line(), soft_wrap=True)

    def _line(self) -> Text:
        if self.now is None:
            return Text("")
        return Text(f"  {visible(self.now.words)}{time_left(self.now)}", no_wrap=True, overflow="ellipsis")


def time_left(step: Step) -> str:
    """How long it should still take, in words."""
    if step.until is None:
        return ""
    left = step.until - time.monotonic()
    return f", about {rough(left)} left" if left > 0 else ", longer than expected"
