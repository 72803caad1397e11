"""What pip says: its lines as progress, and of a failure those that tell why."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import unquote

UNPACKING_SHARE = 0.5  # at most this much of the time is left once pip unpacks what it has got
FIRST_ERRORS, LAST_LINES, PIP_ERRORS = 3, 8, 3
LONGEST_LINE, HEAD, TAIL = 300, 200, 80

FETCHED = re.compile(r"^\s*Downloading (?:\S*/)?([^/\s]+?)(?:\.whl|\.tar\.gz|\.zip) \(([\d.]+ \w+)\)$")
COLLECTED = re.compile(r"^\s*Collecting ([A-Za-z0-9][\w.\-]*)")
BUILT = re.compile(r"^\s*Building wheel for (\S+) ")
UNPACKED = re.compile(r"^Installing collected packages: (.+)$")
BLOCK_BEGIN, BLOCK_END = re.compile(r"\[\d+ lines of output\]"), "[end of output]"
ERROR = re.compile(r"\b(error|fatal|killed|undefined reference|no space left|cannot|not found)\b", re.IGNORECASE)


class Step(NamedTuple):
    """What is being done now, and the moment (of `time.monotonic`) when all should be done, if anybody knows."""

    words: str
    until: float | None


class Progress:
    """Turns lines into steps, with the time that should be left by what the recipe took where it was measured."""

    def __init__(self, seconds: float, tell: Callable[[Step], None]) -> None:
        self.seconds = seconds
        self.tell = tell
        self.until = time.monotonic() + seconds if seconds else None

    def step(self, words: str) -> None:
        """Something begins that pip does not announce."""
        self.tell(Step(words, self.until))

    def heard(self, line: str) -> None:
        """A line of pip's."""
        if UNPACKED.match(line) and self.until is not None:
            self.until = min(self.until, time.monotonic() + self.seconds * UNPACKING_SHARE)
        if words := in_words(line):
            self.step(words)


def in_words(line: str) -> str | None:
    """What a line of pip's says it does, None where it says nothing that matters."""
    if found := FETCHED.match(line):
        name, _, rest = unquote(found[1]).partition("-")
        return f"downloading {name} {rest.partition('-')[0]} ({found[2]})"
    if found := COLLECTED.match(line):
        return f"collecting {found[1]}"
    if found := BUILT.match(line):
        return None if line.endswith("'done'") else f"building {found[1]}"
    if found := UNPACKED.match(line):
        count = found[1].count(",") + 1
        return f"unpacking {count} package{'s' if count > 1 else ''}"
    return None


def rough(seconds: float) -> str:
    """A time that nobody knows exactly: "20 s", "8 min"."""
    return f"{max(10, round(seconds / 10) * 10)} s" if seconds < 90 else f"{round(seconds / 60)} min"


def telling(lines: Sequence[str]) -> list[str]:
    """Of a failed command's output the lines to look at: a compiler's first errors and last words, and pip's errors."""
    said = [line.strip() for line in lines if line.strip()]
    title, block = _last_block(said)
    errors = [line for line in block if ERROR.search(line)][:FIRST_ERRORS]
    pip = [line for line in said if line.startswith("ERROR:") and line not in block][-PIP_ERRORS:]
    chosen = [*title, *errors, *block[-LAST_LINES:], *pip] or said[-LAST_LINES:]
    return [_short(line) for line in dict.fromkeys(chosen)]


def _last_block(said: list[str]) -> tuple[list[str], list[str]]:
    """What a build printed, as pip quotes it when the build fails, and pip's sentence above it."""
    begins = [at for at, line in enumerate(said) if BLOCK_BEGIN.search(line)]
    if not begins:
        return [], []
    above, block = said[: begins[-1]], said[begins[-1] + 1 :]
    title = [line.lstrip("× ") for line in above if line.startswith("×")][-1:]
    return title, block[: block.index(BLOCK_END)] if BLOCK_END in block else block


def _short(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[:HEAD]} … {line[-TAIL:]}"
