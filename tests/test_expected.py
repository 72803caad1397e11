"""What a user may expect of an answer, whether an answer meets it, and how sure an accuracy is."""

import json
import math
import random
import time
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighin.errors import BadInput
from weighin.expected import Against, accuracy, against, has_checks, last_number, newcombe, parse, passes

WHERE = "prompts.jsonl, line 3"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(["equals", "contains", "regex", "json", "number", "tolerance", "text"])
CASES = st.integers(1, 4).flatmap(
    lambda seeds: st.lists(
        st.tuples(*[st.lists(st.booleans(), min_size=seeds, max_size=seeds)] * 2), min_size=1, max_size=25
    )
)


def holds(expected: Any, answer: str) -> bool:
    expectation = parse(expected, WHERE)
    assert expectation is not None
    return passes(expectation, answer)


# ---- what may be written


def test_nothing_expected_is_none() -> None:
    assert parse(None, WHERE) is None


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ("", "an empty text"),
        ("  \n", "an empty text"),
        (True, "true or false"),
        (math.nan, "a number that is not finite"),
        (-math.inf, "a number that is not finite"),
        (10**400, "so large a number"),
        ([], "'expected' is an empty list"),
        ({}, "'expected' is an empty object"),
        ([["a"]], "a list inside a list"),
        (["a", None], "null"),
        (["a", {"text": "b"}], "an element of 'expected' checks nothing"),
        ({"contain": "a"}, "unknown key 'contain'"),
        ({"equals": 4}, "'equals' in 'expected' must be a text"),
        ({"equals": None}, "'equals' in 'expected' must be a text"),
        ({"contains": []}, "'contains' in 'expected' must be"),
        ({"contains": ["a", ""]}, "'contains' in 'expected' must be"),
        ({"contains": ["a", 4]}, "'contains' in 'expected' must be"),
        ({"regex": "(["}, "'regex' cannot be used"),
        ({"regex": ""}, "'regex' in 'expected' must be"),
        ({"json": ["a"]}, "'json' in 'expected' must be an object of fields"),
        ({"number": "4"}, "'number' in 'expected' must be a finite number"),
        ({"number": True}, "'number' in 'expected' must be a finite number"),
        ({"number": 4, "tolerance": -1}, "'tolerance' in 'expected' must be"),
        ({"tolerance": 1}, "'tolerance' belongs to 'number'"),
        ({"text": " "}, "'text' in 'expected' must be"),
    ],
)
def test_what_cannot_be_expected_is_refused_with_the_place_and_the_forms(expected: Any, said: str) -> None:
    with pytest.raises(BadInput) as raised:
        parse(expected, WHERE)
    message = str(raised.value)
    assert message.startswith(f"{WHERE}: ") and said in message
    assert all(form in message for form in ("text", "number", "list", "equals", "contains", "regex", "json"))


@settings(deadline=None, max_examples=300)
@given(JSON | st.dictionaries(KEYS, JSON, max_size=3) | st.lists(st.dictionaries(KEYS, JSON, max_size=2), max_size=3),
       st.text())  # fmt: skip
def test_any_json_is_either_understood_or_bad_input(expected: Any, answer: str) -> None:
    try:
        expectation = parse(expected, WHERE)
    except BadInput:
        return
    assert (expectation is None) == (expected is None)
    if expectation is not None and has_checks(expectation):
        assert passes(expectation, answer) in (True, False)


def test_what_is_nested_without_end_does_not_bring_it_down() -> None:
    deep: Any = "a"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(BadInput):
        parse(deep, WHERE)
    assert not holds({"json": {"a": 1}}, '{"a":' * 50_000)


def test_the_text_for_likelihood_checks_nothing_by_itself() -> None:
    only_text = parse({"text": "Hello there."}, WHERE)
    assert only_text is not None
    assert only_text.text == "Hello there." and not has_checks(only_text)
    with pytest.raises(ValueError, match="no check"):
        passes(only_text, "Hello there.")
    both = parse({"text": "The answer is 4.", "number": 4}, WHERE)
    assert both is not None
    assert both.text == "The answer is 4." and has_checks(both)
    assert passes(both, "4")


@pytest.mark.parametrize(
    ("expected", "text"),
    [("Paris", "Paris"), (4, None), (["Paris", "paree"], "Paris"), ([4, "four"], "four"), ({"equals": "a"}, None)],
)
def test_a_plain_text_is_the_text_too(expected: Any, text: str | None) -> None:
    expectation = parse(expected, WHERE)
    assert expectation is not None
    assert expectation.text == text and has_checks(expectation)


# ---- what passes


@pytest.mark.parametrize(
    ("expected", "answer", "passed"),
    [
        ("chicken biryani", "Two  CHICKEN\n biryani, please", True),
        ("chicken biryani", "chicken and biryani", False),
        ("STRASSE", "Die Straße", True),
        (["yes", "sure"], "Sure thing", True),
        (["yes", 7, {"equals": "OK"}], "it is 7", True),
        (["yes", 7, {"equals": "OK"}], "ok", False),
        ({"equals": "Yes."}, "\n Yes.  ", True),
        ({"equals": "Yes."}, "yes.", False),
        ({"equals": "Yes."}, "Yes. Sure.", False),
        ({"equals": ""}, " \n", True),
        ({"contains": "two"}, "Two drinks", True),
        ({"contains": ["two", "drinks"]}, "drinks: TWO", True),
        ({"contains": ["two", "drinks"]}, "two", False),
        ({"regex": r"^\d+ drinks?$"}, "2 drinks", True),
        ({"regex": r"^\d+ drinks?$"}, "2 Drinks", False),
        ({"regex": r"(?i)drinks"}, "two DRINKS", True),
        ({"contains": "two", "regex": "drinks"}, "two drinks", True),
        ({"contains": "two", "regex": "drinks"}, "two", False),
        ({"contains": "two", "number": 3}, "two and 3", True),
        ({"contains": "two", "number": 3}, "two and 4", False),
    ],
)
def test_texts(expected: Any, answer: str, passed: bool) -> None:
    assert holds(expected, answer) is passed


ORDER = '{"items": [{"dish": "biryani", "count": 2}], "drinks": 2.0, "paid": false, "note": null, "at": {"table": 4}}'


@pytest.mark.parametrize(
    ("fields", "answer", "passed"),
    [
        ({"drinks": 2}, ORDER, True),
        ({"drinks": 3}, ORDER, False),
        ({"drinks": 2}, f"Here you are:\n```json\n{ORDER}\n```\nEnjoy {{it}}!", True),
        ({"drinks": 2}, f"In {{braces}} first. {ORDER}", True),
        ({"drinks": 2}, f'{{"drinks": 1}} {ORDER}', False),  # the first object counts
        ({"at": {"table": 4}}, ORDER, True),
        ({"at": {}}, ORDER, True),
        ({"at": {"seat": 4}}, ORDER, False),
        ({"items": [{"count": 2}]}, ORDER, True),
        ({"items": [{"count": 2}, {}]}, ORDER, False),
        ({"items": {}}, ORDER, False),
        ({"paid": False}, ORDER, True),
        ({"paid": 0}, ORDER, False),
        ({"note": None}, ORDER, True),
        ({"tip": None}, ORDER, False),
        ({"drinks": "2"}, ORDER, False),
        ({}, ORDER, True),
        ({}, "no object", False),
        ({}, "[1, 2]", False),
        ({"a": 1}, '{"b": {"a": 1}', False),  # inside one that is cut off
        ({"a": 1}, '{"b": {"a": 1},}', False),  # inside a broken one
        ({"a": 1}, '{"b": 2,} {"a": 1}', True),
        ({"a": 1e999}, '{"a": 1e999}', False),
        ({"a": 1}, '{"a": ' + "1" * 5000 + "}", False),
    ],
)
def test_json_fields(fields: dict[str, Any], answer: str, passed: bool) -> None:
    assert holds({"json": fields}, answer) is passed


@settings(deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.text(alphabet=st.characters(exclude_characters="{")))
def test_an_object_has_its_own_fields(fields: dict[str, Any], before: str) -> None:
    if "NaN" in json.dumps(fields) or "Infinity" in json.dumps(fields):
        return
    assert holds({"json": fields}, f"{before}```json\n{json.dumps(fields)}\n```")


def test_a_regex_that_never_ends_does_not_pass_and_takes_a_second() -> None:
    began = time.monotonic()
    assert not holds({"regex": r"(a|aa)+$"}, "a" * 80 + "b")
    assert time.monotonic() - began < 30  # the limit is in processor time, and a machine may be busy


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("42", "42"),
        ("It is 42.", "42"),
        ("first 1, then 2", "2"),
        ("1,2,3", "3"),
        ("€1,234.50 in all", "1234.50"),
        ("1,234,567", "1234567"),
        ("-5", "-5"),
        ("x = −5", "-5"),
        ("-$5.00", "-5.00"),
        ("+3", "3"),
        ("3-4", "4"),
        ("gpt-4", "4"),
        ("- 42", "42"),
        (".5", "0.5"),
        ("so...5", "5"),
        ("45%", "45"),
        ("1.5e3", "1500"),
        ("1E-2 m", "0.01"),
        ("1.5 × 10^3", "1500"),
        (r"\(2 \times 10^{-3}\)", "0.002"),
        ("3×10⁸ m/s", "300000000"),
        ("25 km2", "25"),
        ("**42**", "42"),
        ("_42_", "42"),
        ("答案是42", "42"),
        ("version 1.2.3", "1.2"),
        ("1e-99999999999999999999", "0"),
    ],
)
def test_the_last_number(answer: str, number: str) -> None:
    assert last_number(answer) == Fraction(number)
    assert holds(float(number), answer)
    assert not holds(float(number) + 1, answer)


@pytest.mark.parametrize("answer", ["", "none", "nan", "inf", "-Infinity", "1e999", "x2"])
def test_no_number(answer: str) -> None:
    assert last_number(answer) is None
    assert not holds({"number": 0, "tolerance": 1e300}, answer)


def test_a_tolerance_is_decimal_and_inclusive() -> None:
    assert holds({"number": 1, "tolerance": 0.1}, "1.1")  # in binary 1.1 − 1 > 0.1
    assert not holds({"number": 1, "tolerance": 0.1}, "1.1000001")
    assert holds({"number": 0.3}, "0.30")
    assert not holds({"number": 12345678901234567890}, "12345678901234567891")


@settings(deadline=None)
@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False), st.text(alphabet="abc ,.!%\n"))
def test_a_number_is_found_as_it_is_written(number: float, after: str) -> None:
    try:
        float(number)
    except OverflowError:
        return
    assert holds(number, f"The answer is {number} {after}")
    if isinstance(number, int):
        assert holds(number, f"The answer is {number:,} {after}")


@settings(deadline=None)
@given(st.text(alphabet="0123456789.,-−+eE^×10⁸ \n") | st.text())
def test_any_text_has_a_finite_last_number_or_none(answer: str) -> None:
    number = last_number(answer)
    assert number is None or math.isfinite(number)


# ---- how sure


def once(passed: int, cases: int) -> list[list[bool]]:
    return [[i < passed] for i in range(cases)]


@pytest.mark.parametrize(
    ("passed", "cases", "low", "high"),
    [
        # the roots of (p − k/n)² = z²p(1 − p)/n, solved for k = 0 and k = n by hand, else published (Newcombe 1998)
        (0, 10, 0.0, 1.959964**2 / (10 + 1.959964**2)),
        (10, 10, 10 / (10 + 1.959964**2), 1.0),
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(passed: int, cases: int, low: float, high: float) -> None:
    found = accuracy(once(passed, cases))
    assert found is not None
    assert (found.value, found.cases, found.seeds, found.interval) == (passed / cases, cases, 1, "95%")
    assert (found.low, found.high) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


def test_seeds_are_averaged_within_their_case_and_do_not_count_as_cases() -> None:
    found = accuracy([[True, True], [True, False], [False, False], [True, True]])
    assert found is not None
    assert (found.value, found.cases, found.seeds) == (0.625, 4, 2)
    again = accuracy([case * 10 for case in found.passed])
    assert again is not None
    assert (again.low, again.high) == (found.low, found.high)


def test_without_cases_there_is_no_accuracy() -> None:
    assert accuracy([]) is None
    assert accuracy([[], []]) is None


def test_a_case_without_an_answer_is_left_out() -> None:
    found = accuracy([[True], [], [False]])
    assert found is not None
    assert (found.value, found.cases) == (0.5, 2)


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=40))
def test_an_interval_holds_its_value_and_stays_between_0_and_1(passed: list[list[bool]]) -> None:
    found = accuracy(passed)
    assert found is not None
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.low < found.high


@pytest.mark.parametrize("truth", [0.5, 0.8, 0.95])
def test_95_percent_of_the_intervals_hold_the_truth(truth: float) -> None:
    n, covered = 20, 0.0
    for passed in range(n + 1):  # every outcome with its chance: a simulation without its noise
        found = accuracy(once(passed, n))
        assert found is not None
        if found.low <= truth <= found.high:
            covered += math.comb(n, passed) * truth**passed * (1 - truth) ** (n - passed)
    assert 0.92 <= covered <= 0.99


def test_several_seeds_cover_too_and_more() -> None:
    generator, hits = random.Random(5), 0
    for _ in range(1000):  # cases are as hard as a beta distribution says: 0.8 on average
        chances = [generator.betavariate(2, 0.5) for _ in range(20)]
        found = accuracy([[generator.random() < chance for _ in range(3)] for chance in chances])
        assert found is not None
        hits += found.low <= 0.8 <= found.high
    assert hits >= 940


# ---- one against another


def fourfold(both: int, mine_only: int, theirs_only: int, neither: int) -> tuple[list[list[bool]], list[list[bool]]]:
    cells = [(True, True)] * both + [(True, False)] * mine_only + [(False, True)] * theirs_only
    cells += [(False, False)] * neither
    return [[a] for a, _ in cells], [[b] for _, b in cells]


def compared(mine: list[list[bool]], theirs: list[list[bool]]) -> Against:
    found = against(mine, theirs)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("better", "worse"), [(0, 0), (1, 0), (5, 0), (0, 6), (6, 16), (1, 7), (12, 2), (10, 10), (40, 20), (300, 200)]
)
def test_one_seed_is_mcnemars_exact_test(better: int, worse: int) -> None:
    found = compared(*fourfold(7, better, worse, 3))
    n = better + worse
    tail = sum(Fraction(math.comb(n, i), 2**n) for i in range(min(better, worse) + 1))
    assert found.p_value == pytest.approx(float(min(Fraction(1), 2 * tail)), rel=1e-12)
    assert (found.better, found.worse, found.same) == (better, worse, 10)
    assert found.difference == pytest.approx((better - worse) / (n + 10))
    assert found.decided == (found.p_value < 0.05)


def test_five_that_differ_cannot_decide_and_six_can() -> None:
    assert not compared(*fourfold(20, 5, 0, 0)).decided
    assert compared(*fourfold(20, 6, 0, 0)).decided


@pytest.mark.parametrize(
    ("cells", "low", "high"),
    [((59, 6, 16, 80), -0.1186, -0.0046), ((1, 1, 7, 12), -0.507, -0.026)],  # in Fagerland, Lydersen and Laake
)
def test_newcombes_interval_as_published(cells: tuple[int, int, int, int], low: float, high: float) -> None:
    mine, theirs = fourfold(*cells)
    pairs = [(Fraction(a[0]), Fraction(b[0])) for a, b in zip(mine, theirs, strict=True)]
    digits = 0.6 * 10.0 ** -len(str(low).split(".")[1])
    assert newcombe(pairs) == (pytest.approx(low, abs=digits), pytest.approx(high, abs=digits))
    # McNemar's exact test does not decide either of them: what is reported holds 0
    found = compared(mine, theirs)
    assert (found.low, found.high, found.decided) == (pytest.approx(low, abs=digits), 0.0, False)


def test_several_seeds_count_every_way_of_the_signs() -> None:
    mine = [[True, True, True], [True, True, False], [True, False, False], [True, True, True], [False] * 3]
    theirs = [[True, False, False], [True, False, False], [True, True, False], [False] * 3, [False] * 3]
    differences = [2, 1, -1, 3, 0]
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((1, -1), repeat=5)]
    found = compared(mine, theirs)
    assert found.p_value == sum(s >= 5 for s in sums) / 32
    assert found.difference == pytest.approx(5 / 15)
    assert (found.better, found.worse, found.same) == (3, 1, 1)


def test_many_cases_with_several_seeds_against_random_flips() -> None:
    generator = random.Random(3)
    mine = [[generator.random() < 0.7 for _ in range(3)] for _ in range(40)]
    theirs = [[generator.random() < 0.6 for _ in range(3)] for _ in range(40)]
    differences = [sum(a) - sum(b) for a, b in zip(mine, theirs, strict=True)]
    seen = abs(sum(differences))
    flips = sum(abs(sum(d if generator.random() < 0.5 else -d for d in differences)) >= seen for _ in range(5000))
    assert compared(mine, theirs).p_value == pytest.approx(flips / 5000, abs=0.03)


@settings(deadline=None)
@given(CASES)
def test_turning_it_around_mirrors_it(cases: list[tuple[list[bool], list[bool]]]) -> None:
    mine, theirs = [a for a, _ in cases], [b for _, b in cases]
    one, other = compared(mine, theirs), compared(theirs, mine)
    assert (one.better, one.worse, one.same) == (other.worse, other.better, other.same)
    assert (one.p_value, one.decided, one.more_cases) == (other.p_value, other.decided, other.more_cases)
    assert one.difference == -other.difference
    assert (one.low, one.high) == (pytest.approx(-other.high, abs=1e-12), pytest.approx(-other.low, abs=1e-12))


@settings(deadline=None)
@given(CASES)
def test_bounds_hold_the_difference_and_agree_with_the_test(cases: list[tuple[list[bool], list[bool]]]) -> None:
    found = compared([a for a, _ in cases], [b for _, b in cases])
    assert -1 <= found.low <= found.difference <= found.high <= 1
    assert found.low < found.high
    assert 0 < found.p_value <= 1
    assert found.better + found.worse + found.same == len(cases)
    if not found.decided:
        assert found.low <= 0 <= found.high


@settings(deadline=None)
@given(CASES, st.integers(1, 30), st.booleans())
def test_cases_that_both_answer_alike_leave_the_p_value(
    cases: list[tuple[list[bool], list[bool]]], more: int, passed: bool
) -> None:
    mine, theirs = [a for a, _ in cases], [b for _, b in cases]
    alike = [[passed] * len(mine[0])] * more
    assert compared(mine + alike, theirs + alike).p_value == compared(mine, theirs).p_value


def test_a_difference_of_nothing_over_three_cases_is_not_sure() -> None:
    for seeds in (1, 3):
        found = compared([[True] * seeds] * 3, [[True] * seeds] * 3)
        assert (found.difference, found.p_value, found.decided, found.more_cases) == (0.0, 1.0, False, None)
        assert found.low < -0.3 and found.high > 0.3


def test_bootstrapped_intervals_hold_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighin.expected.DRAWS", 400)  # for the test's speed
    generator, hits = random.Random(12), 0
    for _ in range(800):
        chances = [generator.betavariate(2, 1) for _ in range(25)]
        mine = [[generator.random() < 0.85 * chance for _ in range(3)] for chance in chances]
        theirs = [[generator.random() < chance for _ in range(3)] for chance in chances]
        found = compared(mine, theirs)
        hits += found.low <= -0.15 * 2 / 3 <= found.high
    assert 0.92 * 800 <= hits <= 0.98 * 800


def test_how_many_more_cases_would_decide() -> None:
    # Connor by hand: 12 of 80 differ, 8 one way: 0.15 and 0.05
    found = compared(*fourfold(40, 8, 4, 28))
    needed = (1.959964 * math.sqrt(0.15) + 0.841621 * math.sqrt(0.15 - 0.05**2)) ** 2 / 0.05**2
    assert not found.decided
    assert found.more_cases == math.ceil(needed) - 80


def test_more_cases_are_never_fewer_than_an_exact_test_needs() -> None:
    for better in range(1, 6):
        assert compared(*fourfold(0, better, 0, 0)).more_cases == 6 - better


def test_so_many_more_cases_like_these_do_decide_it_four_times_in_five() -> None:
    found = compared(*fourfold(20, 8, 3, 9))
    assert found.more_cases is not None
    n, generator, decided = 40 + found.more_cases, random.Random(2), 0
    for _ in range(400):
        drawn = generator.choices((1, -1, 0), (8, 3, 29), k=n)
        decided += compared(*fourfold(drawn.count(0), drawn.count(1), drawn.count(-1), 0)).decided
    assert 0.7 <= decided / 400 <= 0.9


def test_no_number_of_cases_decides_what_is_decided_or_shows_no_difference() -> None:
    assert compared(*fourfold(5, 9, 0, 5)).more_cases is None
    assert compared(*fourfold(5, 3, 3, 5)).more_cases is None


def test_only_cases_that_both_answered_are_compared() -> None:
    assert against([], []) is None
    assert against([[], [True]], [[True], []]) is None
    assert compared([[True], [], [True]], [[False], [True], [True]]).same == 1
    with pytest.raises(ValueError):
        against([[True]], [])
