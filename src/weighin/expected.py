"""Does an answer meet what the user expected of its prompt, and how sure is the share of answers that do."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from statistics import NormalDist, fmean
from typing import Any

import msgspec

from weighin.errors import BadInput

FORMS = (
    "'expected' may be a text (the answer contains it), a number (the last one in the answer), a list of which one "
    "must hold, or an object with equals, contains, regex, json, number (and its tolerance) or text."
)
NO_FORMS = {
    bool: "true or false",
    type(None): "null",
    str: "an empty text",
    int: "so large a number",
    float: "a number that is not finite",
    list: "a list inside a list",
}
REGEX_SECONDS = 1.0
LEVEL = 0.05
Z, Z_POWER = NormalDist().inv_cdf(1 - LEVEL / 2), NormalDist().inv_cdf(0.8)
DRAWS, SEED = 4000, 20240501
FEWEST = 6  # cases that differ, all one way: fewer cannot be decided at 0.05 by an exact two-sided test
# A minus counts where it cannot be a hyphen (not in "3-4"), digits where they are no part of a word ("km2") or of a
# version ("1.2.3").
NUMBER = re.compile(
    r"""(?<![A-Za-z\d])(?<!\d\.)(?:([-−+])[$€£]?)?
    (\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\.)\.\d+)
    (?:[eE]([-−+]?\d+)|\s*(?:[×x*·]|\\times)\s*10(?:\^\{?([-−+]?\d+)|([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)))?""",
    re.VERBOSE,
)
PLAIN = str.maketrans("−⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "--+0123456789", ",")


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer should be: all that is given must hold. `text` is the whole wanted answer and checks nothing."""

    equals: str | None = None
    contains: list[str] = []
    regex: str | None = None
    json: dict[str, Any] | None = None
    number: int | float | None = None
    tolerance: int | float = 0
    text: str | None = None
    any_of: list[Expectation] = []  # one of them must hold; then nothing but the text is given beside


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The share of cases that passed, with its interval. A case is a prompt with checks."""

    value: float
    low: float
    high: float
    interval: str
    cases: int
    seeds: int  # answers per case; the most that a case has
    passed: list[list[bool]]  # per case, per seed


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """One contender's cases against another's, paired by case."""

    better: int
    worse: int
    same: int
    p_value: float
    decided: bool
    difference: float  # of the accuracies, mine less theirs
    low: float
    high: float
    # about how many more would decide it; None: it is decided, or no difference was seen, so that no number of cases
    # like these would decide it
    more_cases: int | None


# ---- what is expected


def parse(expected: Any, where: str) -> Expectation | None:
    """What the user wrote under 'expected', checked; `where` names the place in messages.

    The text of a list is its first text.
    """
    if expected is None:
        return None
    if not isinstance(expected, list):
        return _one(expected, where)
    parts = [_one(part, where) for part in expected]
    if not parts or not all(map(has_checks, parts)):
        raise _bad(where, "an element of 'expected' checks nothing" if parts else "'expected' is an empty list")
    return Expectation(any_of=parts, text=next((part.text for part in parts if part.text is not None), None))


def has_checks(expectation: Expectation) -> bool:
    """Whether an answer can pass or fail it; a text alone is for likelihood only."""
    e = expectation
    return bool(e.any_of or e.contains) or any(check is not None for check in (e.equals, e.regex, e.json, e.number))


def _bad(where: str, what: str) -> BadInput:
    return BadInput(f"{where}: {what}. {FORMS}")


def _one(expected: Any, where: str) -> Expectation:
    if _is_text(expected):
        return Expectation(contains=[expected], text=expected)
    if _is_number(expected):
        return Expectation(number=expected)
    if isinstance(expected, dict):
        return _of_object(expected, where)
    raise _bad(where, f"'expected' cannot be {NO_FORMS.get(type(expected), type(expected).__name__)}")


def _of_object(expected: dict[str, Any], where: str) -> Expectation:
    if not expected:
        raise _bad(where, "'expected' is an empty object")
    for key, value in expected.items():
        if key not in KINDS:
            raise _bad(where, f"'expected' has the unknown key {key!r}")
        holds, kind = KINDS[key]
        if not holds(value):
            raise _bad(where, f"{key!r} in 'expected' must be {kind}")
    if "tolerance" in expected and "number" not in expected:
        raise _bad(where, "'tolerance' belongs to 'number', which is missing")
    if "regex" in expected:
        try:
            _compiled(expected["regex"])
        except Exception as error:  # odd patterns raise more than the package's own error
            raise _bad(where, f"'regex' cannot be used ({error})") from error
    contains = expected.get("contains", [])
    return Expectation(**{**expected, "contains": [contains] if isinstance(contains, str) else contains})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _are_texts(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, list) and bool(value) and all(map(_is_text, value)))


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "equals": (lambda value: isinstance(value, str), "a text"),
    "contains": (_are_texts, "a text that is not empty, or a list of them"),
    "regex": (_is_text, "a regular expression that is not empty"),
    "json": (lambda value: isinstance(value, dict), "an object of fields"),
    "number": (_is_number, "a finite number"),
    "tolerance": (lambda value: _is_number(value) and value >= 0, "a number that is not negative"),
    "text": (_is_text, "a text that is not empty"),
}


# ---- whether an answer meets it


def passes(expectation: Expectation, answer: str) -> bool:
    """Whether an answer meets it. Ask `has_checks` first: without a check there is nothing to pass."""
    e = expectation
    if not has_checks(e):
        raise ValueError("this expectation has no check that an answer could pass")
    if e.any_of:
        return any(passes(part, answer) for part in e.any_of)
    return (
        (e.equals is None or answer.strip() == e.equals.strip())
        and (not e.contains or all(_flat(part) in _flat(answer) for part in e.contains))
        and (e.number is None or _near(last_number(answer), e.number, e.tolerance))
        and (e.json is None or _has_fields(answer, e.json))
        and (e.regex is None or _matches(e.regex, answer))
    )


def last_number(answer: str) -> Decimal | None:
    """The last number of an answer, as 1,234.5 or 1.5e3 or 1.5 × 10^3 is written in English; None if there is none."""
    last = deque(NUMBER.finditer(answer), maxlen=1)
    if not last:
        return None
    sign, digits, *exponents = last[0].groups(default="")
    text = f"{sign}{digits}e{''.join(exponents) or 0}".translate(PLAIN)
    rough = float(text)
    if math.isinf(rough):
        return None
    return Decimal(text) if rough else Decimal(0)


def _near(found: Decimal | None, wanted: float, tolerance: float) -> bool:
    # in decimal, as people write numbers: 1.1 is within 0.1 of 1, which it is not in binary
    return found is not None and abs(found - Decimal(str(wanted))) <= Decimal(str(tolerance))


def _flat(text: str) -> str:
    return " ".join(text.casefold().split())


def _compiled(pattern: str) -> Any:
    import regex  # type: ignore[import-untyped]  # unlike re it can be given a time limit

    return regex.compile(pattern)


def _matches(pattern: str, answer: str) -> bool:
    try:
        return _compiled(pattern).search(answer, timeout=REGEX_SECONDS) is not None
    except (TimeoutError, MemoryError):  # it backtracked for too long or too far
        return False


def _has_fields(answer: str, fields: dict[str, Any]) -> bool:
    try:
        return _agrees(fields, _first_object(answer))
    except RecursionError:
        return False


def _first_object(answer: str) -> Any:
    decoder = json.JSONDecoder()
    start = answer.find("{")
    while start >= 0:
        try:
            return decoder.raw_decode(answer, start)[0]
        except ValueError as error:
            # go on behind the mistake: an object inside a broken one is not the answer's
            start = answer.find("{", max(start + 1, getattr(error, "pos", 0)))
    return None


def _agrees(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(k in found and _agrees(wanted[k], found[k]) for k in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(wanted) == len(found) and all(map(_agrees, wanted, found))
    if isinstance(wanted, bool) or isinstance(found, bool):
        return wanted is found
    if isinstance(wanted, int | float):
        return isinstance(found, int | float) and -math.inf < wanted == found < math.inf
    return bool(wanted == found)


# ---- how sure


def accuracy(passed: list[list[bool]]) -> Accuracy | None:
    """The mean over cases of the mean over seeds, with Wilson's interval; None without cases.

    The interval counts cases, not answers, since the seeds of a case are not independent. That is conservative: the
    mean of several seeds varies less than the single answer that the interval allows for.
    """
    cases = [fmean(case) for case in passed if case]
    if not cases:
        return None
    value = fmean(cases)
    low, high = wilson(value, len(cases))
    seeds = max(map(len, passed))
    return Accuracy(value=value, low=low, high=high, interval="95%", cases=len(cases), seeds=seeds, passed=passed)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of n."""
    centre, scale = share + Z**2 / (2 * n), 1 + Z**2 / n
    reach = Z * math.sqrt(share * (1 - share) / n + (Z / (2 * n)) ** 2)
    return max(0.0, min(share, (centre - reach) / scale)), min(1.0, max(share, (centre + reach) / scale))


def against(mine: list[list[bool]], theirs: list[list[bool]]) -> Against | None:
    """Whether mine passes more than theirs, case by case; None without a case that both answered.

    The test flips the signs of the cases' differences in every way, exactly; with one seed that is McNemar's exact
    test. The interval is Newcombe's method 10 with one seed (or where all cases differ alike), else a bootstrap by
    case; where the test does not decide it is stretched to hold 0, so that the two cannot disagree.
    """
    kept = [(a, b) for a, b in zip(mine, theirs, strict=True) if a and b]
    if not kept:
        return None
    pairs = [(Fraction(sum(a), len(a)), Fraction(sum(b), len(b))) for a, b in kept]
    differences = [a - b for a, b in pairs]
    difference = sum(differences, Fraction()) / len(differences)
    single = all(len(a) == len(b) == 1 for a, b in kept)
    low, high = newcombe(pairs) if single or len(set(differences)) == 1 else _bootstrap(differences)
    p_value = _sign_flip(differences)
    decided = p_value < LEVEL
    held = (float(difference),) if decided else (float(difference), 0.0)
    return Against(
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
        same=sum(d == 0 for d in differences),
        p_value=p_value,
        decided=decided,
        difference=float(difference),
        low=max(-1.0, min(low, *held)),
        high=min(1.0, max(high, *held)),
        more_cases=None if decided or not difference else _more_cases(differences, difference),
    )


def _whole(differences: Sequence[Fraction]) -> tuple[list[int], int]:
    """The differences as whole numbers of one small unit, and how many of it make 1; sums are then exact."""
    unit = math.lcm(*(d.denominator for d in differences))
    return [int(d * unit) for d in differences], unit


def _sign_flip(differences: Sequence[Fraction]) -> float:
    """The chance of a mean at least as far from 0 if each case's sign were a coin's: all 2^n ways are counted."""
    values = [d for d in _whole(differences)[0] if d]
    ways = {0: 1}  # of reaching a sum by the cases whose sign is positive
    for size, times in Counter(map(abs, values)).items():
        grown: Counter[int] = Counter()
        for positive in range(times + 1):
            choices = math.comb(times, positive)
            for total, count in ways.items():
                grown[total + positive * size] += count * choices
        ways = grown
    whole, seen = sum(map(abs, values)), abs(sum(values))
    extreme = sum(count for total, count in ways.items() if abs(2 * total - whole) >= seen)
    share: float = extreme / 2 ** len(values)
    return share


def newcombe(pairs: Sequence[tuple[Fraction, Fraction]]) -> tuple[float, float]:
    """Newcombe's interval (1998, method 10): both Wilson intervals, with the correlation between them."""
    n = len(pairs)
    mine, theirs = sum(a for a, _ in pairs) / n, sum(b for _, b in pairs) / n
    # the fourfold table's ad − bc, drawn towards 0 by n/2 where it is positive
    cross = n * sum(a * b for a, b in pairs) - n**2 * mine * theirs
    corrected = float(cross if cross < 0 else max(0, cross - Fraction(n, 2)))
    spread = math.sqrt(mine * (1 - mine) * theirs * (1 - theirs))
    correlation = corrected / (n**2 * spread) if spread else 0.0
    p, q = float(mine), float(theirs)
    (p_low, p_high), (q_low, q_high) = wilson(p, n), wilson(q, n)

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))

    return p - q - reach(p - p_low, q_high - q), p - q + reach(q - q_low, p_high - p)


def _bootstrap(differences: Sequence[Fraction]) -> tuple[float, float]:
    """Percentiles of the mean over cases drawn again, widened as Student's t is for few cases."""
    values, unit = _whole(differences)
    n, generator = len(values), random.Random(SEED)
    sums = sorted(sum(generator.choices(values, k=n)) for _ in range(DRAWS))
    cut = round(DRAWS * LEVEL / 2)
    wider = math.sqrt(n / (n - 1)) * (1 + (Z**2 + 1) / (4 * (n - 1)))
    centre = sum(values)
    low, high = (centre + (bound - centre) * wider for bound in (sums[cut], sums[-1 - cut]))
    return low / (n * unit), high / (n * unit)


def _more_cases(differences: Sequence[Fraction], mean: Fraction) -> int:
    """Connor's sample size for paired shares (power 0.8), less the cases there are."""
    n = len(differences)
    square = sum(d * d for d in differences) / n  # with one seed the share of cases that differ
    needed = (Z * math.sqrt(square) + Z_POWER * math.sqrt(square - mean**2)) ** 2 / float(mean**2)
    differing = sum(d != 0 for d in differences)
    return max(1, math.ceil(max(needed, FEWEST * n / differing)) - n)
