"""`--fail-on`: rules for a machine that decides by exit code whether the figures are good enough."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Sequence

import msgspec

from weighin import diff, probes
from weighin.errors import BadInput, WeighinError
from weighin.measurements import Comparison, ContenderResult, Measurement
from weighin.plan import Contender
from weighin.report import changes
from weighin.report.table import figure, number, scale

REGRESSION = "regression"
SHAPE = re.compile(
    r"(?:(?P<contender>\S.*)/)?(?P<key>[A-Za-z][A-Za-z0-9_]*(?:@[0-9]+)?)\s*(?P<sign><=|>=|<|>)\s*"
    r"(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(?P<unit>[^\s0-9.]*)"
)
SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0}
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} | {
    f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", start=1)
}
RATES = {"tokens/s": 1.0, "tok/s": 1.0, "t/s": 1.0}
EXAMPLES = "decode_tokens_per_second<20, peak_ram_bytes>8GB or regression>5%"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What must not be: a figure below or above a number, or one worse than before by more than a share."""

    text: str  # as it was typed
    contender: str | None  # None: every one with a figure
    key: str  # of a measurement, or "regression"
    sign: str
    number: float  # in the key's own unit


class RuleFailed(WeighinError):
    """What was measured is saved, and breaks a rule that the user set."""

    exit_code = 3

    def __init__(self, sentences: Sequence[str]) -> None:
        head = "A --fail-on rule failed" if len(sentences) == 1 else "These --fail-on rules failed"
        super().__init__("\n".join([f"{head}:", *(f"- {sentence}" for sentence in sentences)]))


# ---- reading a rule


def parse(text: str) -> Rule:
    """Read a rule; an error says how one is written, or names the nearest key."""
    match = SHAPE.fullmatch(text.strip())
    if match is None:
        raise BadInput(
            f"'{text}' is not a rule. One reads KEY<NUMBER or CONTENDER/KEY<NUMBER, as in {EXAMPLES}; "
            "put it in quotes, or the shell takes the < or > for itself."
        )
    contender = str(Contender.parse(match["contender"])) if match["contender"] else None
    key, size = match["key"], float(match["number"])
    unit = None if key == REGRESSION else _unit(text, key)
    if unit is None and (match["unit"] != "%" or match["sign"] not in (">", ">=")):
        raise BadInput(f"'{text}': a regression is a share and too large above some limit; write regression>5%.")
    factor = 0.01 if unit is None else _factor(text, match["unit"], unit)
    if not math.isfinite(size * factor):
        raise BadInput(f"'{text}': the number is too large.")
    return Rule(text=text.strip(), contender=contender, key=key, sign=match["sign"], number=size * factor)


def _unit(text: str, key: str) -> str:
    """The unit of a key; figures that no probe declares are shares and ratios."""
    declared = probes.measures()
    base = key.partition("@")[0]
    if base in declared:
        return declared[base].unit
    if key in diff.HEADLINE:
        return ""
    known = [*declared, *(k for k in diff.HEADLINE if k not in declared), REGRESSION]
    nearest = max(known, key=lambda name: difflib.SequenceMatcher(None, base.lower(), name).ratio())
    raise BadInput(f"'{text}': there is no measurement '{key}'. Nearest: {nearest}.")


def _factor(text: str, given: str, unit: str) -> float:
    """What a number in the given unit is multiplied by to be in the key's."""
    if not given:
        return 1.0
    allowed = {"s": SECONDS, "B": BYTES, "B/token": BYTES, "tokens/s": RATES}.get(unit)
    if unit == "share":
        allowed = {"%": 0.01}
    if allowed is None:
        allowed = {"%": 0.01, unit: 1.0}  # where the unit is % itself, that is 1
    name = given.casefold().removesuffix("/token") if unit == "B/token" else given.casefold()
    for known, factor in allowed.items():
        if known.casefold() == name:
            return factor
    raise BadInput(f"'{text}': '{given}' is no unit of this figure; it takes {', '.join(filter(None, allowed))}.")


# ---- holding it against the figures


def check_possible(rules: Sequence[Rule], against: Comparison | None) -> None:
    """Refuse, before anything is measured, a rule that nothing could decide."""
    for rule in rules:
        if rule.key == REGRESSION and against is None:
            raise BadInput(
                f"'{rule.text}' needs an older comparison: give one with --against DIR, "
                f"or use weighin diff OLD NEW --fail-on '{rule.text}'."
            )


def check(rules: Sequence[Rule], comparison: Comparison, against: Comparison | None = None) -> list[str]:
    """A sentence for every time that a rule is broken; none: all is well."""
    check_possible(rules, against)
    found: list[str] = []
    for rule in rules:
        if rule.key == REGRESSION:
            assert against is not None
            found += _regressions(rule, against, comparison)
        else:
            found += _limit(rule, comparison)
    return list(dict.fromkeys(found))


def _limit(rule: Rule, comparison: Comparison) -> list[str]:
    asked = [c for c in comparison.contenders if rule.contender in (None, c.name)]
    if not asked:
        return [f"{rule.text}: {rule.contender or 'any contender'} is not in this comparison"]
    judged = [(c, m) for c in asked if (m := c.measurements.get(rule.key)) is not None and m.value is not None]
    if not judged:  # a rule that judged nothing must not look as if it held
        who = asked[0].name if rule.contender else "no contender has this figure, for example"
        return [f"{rule.text} could not be judged: {who}: {_why_unknown(asked[0], rule.key)}"]
    broken = [  # no number is worse than any number
        f"{rule.text}: {c.name} is {c.fidelity.word}: {c.fidelity.why}"
        for c in asked
        if rule.key in diff.AGAINST_REFERENCE and c.fidelity and c.fidelity.headline.kl is None
    ]
    found = [_sentence(rule, c, m) for c, m in judged if m.value is not None and SIGNS[rule.sign](m.value, rule.number)]
    return [*found, *broken]


def _why_unknown(result: ContenderResult, key: str) -> str:
    if result.status != "ok":
        return f"{result.status}: {result.reason}"
    found = result.measurements.get(key)
    return (found.reason if found else None) or "not measured"


def _sentence(rule: Rule, result: ContenderResult, found: Measurement) -> str:
    """The figure, and whether all of its interval is beyond the limit or only the median."""
    said = f"{rule.text}: {result.name} has {figure(found, interval=False)}"
    if found.value is None or found.low is None or found.high is None or rule.key in diff.COUNTED:
        return said
    if found.interval == "range" and len({(s.round, s.job) for s in found.samples}) < 2:
        return f"{said}; that is one process, so nothing says how far the next one would be from it"
    factor, _ = scale(found.value, found.unit)
    limit = number(rule.number * factor)
    bounds = f"{'interval' if found.interval == '95%' else 'range'} {number(found.low * factor)}–" + (
        number(found.high * factor)
    )
    if all(SIGNS[rule.sign](bound, rule.number) for bound in (found.low, found.high)):
        return f"{said}; the whole {bounds} is {'below' if '<' in rule.sign else 'above'} {limit}"
    return f"{said}; the {bounds} includes {limit}: more rounds would decide"


def _regressions(rule: Rule, old: Comparison, new: Comparison) -> list[str]:
    """Headline figures that are worse by more than the share, noise taken off; and what ran and does not any more."""
    found = diff.diff(old, new)
    mine = [c for c in found.contenders if rule.contender in (None, c.name)]
    broken = [s for s in found.statuses if s.old == "ok" and s.new is not None and rule.contender in (None, s.name)]
    if not mine and not broken:
        who = rule.contender or "any contender"
        return [f"{rule.text} could not be judged: there are no figures of {who} in both comparisons"]
    return [f"{rule.text}: {s.name} {s.sentence}" for s in broken] + [
        f"{rule.text}: {contender.name}: {change.new.label} {figure(change.old, interval=False)} before, "
        f"{figure(change.new, interval=False)} now, {changes.amount(change)}"
        for contender in mine
        for change in contender.changes
        if change.key in diff.HEADLINE and _beyond(rule, change)
    ]


def _beyond(rule: Rule, change: diff.Change) -> bool:
    """Whether all of the interval is worse by more than the share."""
    if change.verdict != diff.WORSE:
        return False
    if change.ratio is None:  # from nothing to something is more than any share
        return True
    least = 1 - change.ratio.high if change.new.better == "higher" else change.ratio.low - 1
    return SIGNS[rule.sign](least, rule.number)
