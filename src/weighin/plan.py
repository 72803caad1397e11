"""Plan, Contender, Workload: what will be run. Frozen, validated, no side effects."""

from __future__ import annotations

import difflib
import hashlib
import re
from typing import Any

import msgspec

from weighin import engines
from weighin.errors import BadInput
from weighin.machine import Machine
from weighin.model import Model

CONTENDER_SHAPE = re.compile(
    r"(?P<engine>[\w.-]+):(?P<precision>[\w.-]+)@(?P<device>[\w.-]+)(?P<options>(\+[\w.,=/:-]+)*)"
)


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model: `engine:precision@device[+option]`."""

    engine: str
    precision: str
    device: str
    options: dict[str, str] = {}

    def __str__(self) -> str:
        tail = "".join(f"+{key}={value}" if value else f"+{key}" for key, value in sorted(self.options.items()))
        return f"{self.engine}:{self.precision}@{self.device}{tail}"

    def __hash__(self) -> int:
        return hash(str(self))

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Read a contender's name; an error names the nearest valid one."""
        known = engines.everything()
        match = CONTENDER_SHAPE.fullmatch(text.strip())
        if match is None:
            raise BadInput(
                f"'{text}' is not a contender. One reads engine:precision@device, for example {_nearest(text)}."
            )
        engine = known.get(match["engine"])
        if engine is None:
            raise BadInput(
                f"'{text}': there is no engine '{match['engine']}' (known: "
                f"{', '.join(n for n, e in known.items() if not e.hidden)}). Nearest: {_nearest(text)}."
            )
        if match["precision"] not in engine.precisions:
            raise BadInput(
                f"'{text}': {engine.name} has no precision '{match['precision']}' "
                f"(it has {', '.join(engine.precisions)}). Nearest: {_nearest(text)}."
            )
        if match["device"] not in engine.devices:
            raise BadInput(
                f"'{text}': {engine.name} does not run on '{match['device']}' "
                f"(it runs on {', '.join(engine.devices)}). Nearest: {_nearest(text)}."
            )
        options: dict[str, str] = {}
        for option in match["options"].split("+")[1:]:
            key, _, value = option.partition("=")
            values = engine.options.get(key)
            if values is None:
                there = f"it has {', '.join(sorted(engine.options))}" if engine.options else "it has none"
                raise BadInput(f"'{text}': {engine.name} has no option '{key}' ({there}).")
            if values != ("*",) and value not in (values or ("",)):
                wanted = f"one of {', '.join(values)}" if values else "no value"
                raise BadInput(f"'{text}': the option '{key}' takes {wanted}, not '{value}'.")
            if key in options:
                raise BadInput(f"'{text}': the option '{key}' is given twice.")
            options[key] = value
        return cls(engine=engine.name, precision=match["precision"], device=match["device"], options=options)


def _nearest(text: str) -> str:
    names = [
        f"{engine.name}:{precision}@{device}"
        for engine in engines.everything().values()
        if not engine.hidden
        for precision in engine.precisions
        for device in engine.devices
    ]
    asked = text.strip().partition("+")[0]
    return max(names, key=lambda name: difflib.SequenceMatcher(None, asked, name).ratio())  # the first of equals


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the user gave it: a text or messages."""

    text: str | None = None
    messages: list[dict[str, str]] | None = None
    expected: Any = None

    @property
    def shown(self) -> str:
        """What a report calls it: the text, or the last message."""
        return self.text if self.text is not None else (self.messages or [{}])[-1].get("content", "")


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt after the template and the tokenizer."""

    text: str
    ids: list[int]
    thinking_open: bool = False  # it ends inside a thinking part, which the answer goes on with


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A text that quality is measured on. `counted` are ranges of its ids: those whose probability counts."""

    stratum: str  # "text", "expected", "samples" or "passages"; "bos" for the check of the begin token
    name: str
    ids: list[int]
    counted: list[list[int]]

    @property
    def positions(self) -> int:
        return sum(end - start for start, end in self.counted)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts and how much is asked of them. The ids are what every engine gets."""

    prompts: list[Prompt]
    rendered: list[Rendered]
    lengths: dict[str, list[int]]  # prompt length -> ids, for prefill
    template: str  # "raw", "chat" or "file"
    template_note: str
    system: str | None
    stop_ids: list[int]
    thinking: list[str] | None  # the markers around a thinking model's thinking part
    max_new_tokens: int
    response_cap: int
    vocabulary: int  # the ids that the tokenizer knows
    documents: list[Document] = []
    bos_other: list[Document] = []  # some of the passages with the begin token, if they have none, or without
    bos: str = "auto"  # the begin token: as the tokenizer does, "add" or "none"
    starts_with_bos: bool | None = None  # whether plain texts do; None: no begin token is known
    sampling: dict[str, Any] | None = None  # how responses are drawn; None: greedy
    seeds: int = 1

    @property
    def ids_hash(self) -> str:
        """One hash over every id that an engine is given."""
        everything = [[r.ids for r in self.rendered], sorted(self.lengths.items()), self.stop_ids]
        return hashlib.sha256(msgspec.json.encode(everything)).hexdigest()


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A contender in the plan: what it means here, or why it cannot run."""

    contender: Contender
    named: bool  # the user named it; else it is one of the default set
    settings: dict[str, Any]
    weight_bytes: int
    recipe: str | None
    status: str = "ok"  # else "cannot_run" or "not_installed"
    reason: str | None = None
    remedy: str | None = None
    snippet: str = ""
    versions: dict[str, str] = {}
    python: str = ""
    log_probabilities: str = ""  # of its engine
    samples: bool = False  # its engine can draw
    from_disk: bool = False  # as the reference, it is scored layer by layer, because it does not fit into memory

    @property
    def name(self) -> str:
        return str(self.contender)


class Instrument(msgspec.Struct, frozen=True, kw_only=True):
    """What weighin itself adds: to every token, and to every run of a worker."""

    seconds_per_token: float
    seconds_per_run: float


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """How much is spent on quality."""

    samples: int  # of the reference's own answers
    sample_tokens: int
    tokens: int  # that are scored at most
    rows_kept: int  # of each of the reference's rows; 0: the whole vocabulary
    rows_bytes: int  # that the reference's rows may take on disk
    tasks: list[str] = []  # of lm-evaluation-harness
    task_limit: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run needs; saved as plan.json before the first worker starts."""

    schema_version: int = 1
    weighin_version: str
    created: str
    model: Model
    tokenizer_path: str
    machine: Machine
    instrument: Instrument | None  # what weighin itself adds to a token and to a run
    entries: list[Entry]
    workload: Workload
    reference: str | None
    reference_note: str
    quality: Quality | None  # None: not asked for
    threads_asked: int | None  # by the user; else the machine's own number
    rounds: int | None  # None: until the interval is narrow enough or the budget ends
    budget_seconds: float
    limits: dict[str, float]  # phase -> seconds
    remote_code: bool
    allow_pickle: bool

    def entry(self, name: str) -> Entry:
        return next(e for e in self.entries if e.name == name)

    @property
    def runnable(self) -> list[Entry]:
        return [e for e in self.entries if e.status == "ok"]


LONGEST = 365 * 86400.0
DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")


def parse_duration(text: str) -> float:
    """Seconds of '90', '90s', '10m', '1h30m'."""
    match = DURATION.fullmatch(text.strip().lower())
    if not text.strip() or match is None:
        raise BadInput(f"'{text}' is not a duration. Write 90s, 10m or 1h30m.")
    seconds = sum(float(match[unit] or 0) * size for unit, size in (("h", 3600), ("m", 60), ("s", 1)))
    if not 0 < seconds <= LONGEST:
        raise BadInput(f"'{text}' is not between nothing and a year. Write 90s, 10m or 1h30m.")
    return seconds


SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<binary>i?)b?", re.IGNORECASE)


def parse_size(text: str) -> float:
    """Bytes of '500MB', '8GB', '4GiB'."""
    match = SIZE.fullmatch(text.strip())
    if match is None or not float(match["number"]) or (match["binary"] and not match["unit"]):
        raise BadInput(f"'{text}' is not a size. Write 500MB or 8GB.")
    power = " kmgt".index(match["unit"].lower() or " ")
    return float(match["number"]) * (1024.0 if match["binary"] else 1000.0) ** power
