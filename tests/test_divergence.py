"""Where two answers part, in words that a report can use, and what is odd about one answer."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighin.divergence import NEAR_TIE, Divergence, compare, faults, sentence

STOP = 99
MENU = "ok, I would like two chicken curry and rice"


def types(ids: list[int], text: str = "words", finish: str = "stop") -> list[str]:
    return [fault.type for fault in faults(ids, text, finish)]


def at(position: int, best: tuple[int, int], logprobs: tuple[float, float], **asked: float) -> dict[str, Any]:
    named = {name.removeprefix("id"): value for name, value in asked.items()}
    return {"position": position, "best": list(best), "logprobs": list(logprobs), "asked": named}


def parted(at_: dict[str, Any] | None, mine: list[int] | None = None) -> Divergence:
    found = compare(0, [1, 2, 7, 8] if mine is None else mine, "a b x y", [1, 2, 3, 4], "a b c d", at_)
    assert found is not None
    return found


def texts(mine: str, reference: str) -> tuple[str, str, str]:
    found = compare(0, [1], mine, [2], reference, None)
    assert found is not None
    return found.common_text, found.mine_text, found.reference_text


# ---- one answer


def test_a_plain_answer_has_no_fault() -> None:
    assert types(list(range(200))) == []
    assert types([STOP], "x") == []


@pytest.mark.parametrize(
    ("ids", "text", "evidence"),
    [
        ([STOP], "", "1 token and no text"),
        ([5, 6, STOP], " \n\t", "3 tokens and only whitespace"),
    ],
)
def test_an_empty_answer(ids: list[int], text: str, evidence: str) -> None:
    (fault,) = faults(ids, text, "stop")
    assert (fault.type, fault.evidence) == ("empty", evidence)


def test_an_answer_that_was_cut_off() -> None:
    (fault,) = faults(list(range(100)), "words", "length")
    assert (fault.type, fault.evidence) == ("cut_off", "it had not ended after 100 tokens")


@pytest.mark.parametrize(
    ("ids", "evidence"),
    [
        ([*range(100, 110), *[1, 2, 3] * 12], "the last 36 tokens repeat a run of 3"),
        ([*range(100, 110), *[1, 2, 3] * 12, 1, 2], "the last 38 tokens repeat a run of 3"),  # the last incomplete
        ([100, *[7] * 24], "the last 24 tokens repeat one token"),
        ([*range(40)] * 4, "the last 160 tokens repeat a run of 40"),
    ],
)
def test_a_loop_at_the_end(ids: list[int], evidence: str) -> None:
    for finish, said in (("length", ids), ("stop", [*ids, STOP])):
        (fault,) = [f for f in faults(said, "words", finish) if f.type == "repeats"]
        assert fault.evidence == evidence


@pytest.mark.parametrize(
    "ids",
    [
        [*range(100, 110), *[7] * 23],  # too short
        [*range(100, 200), *[*range(20)] * 3],  # three times only
        [*[1, 2, 3] * 12, *range(100, 140)],  # it came out of it
        [],
    ],
)
def test_no_loop(ids: list[int]) -> None:
    assert types(ids, finish="length") == ["cut_off"]


def test_an_answer_that_says_the_same_again_and_again_without_a_plain_loop() -> None:
    ids = [token for i in range(15) for token in (1, 2, 3, 4, 5, 6, 7, 8, 100 + i)]
    (fault,) = faults([*ids, STOP], "words", "stop")
    # of 132 runs of four, the five that lie within 1 to 8 come again 14 times
    assert (fault.type, fault.evidence) == ("repeats", "70 of its 132 runs of 4 tokens came before")
    assert types(ids[:59], finish="stop") == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=200), st.text(max_size=5), st.sampled_from(["stop", "length"]))
def test_each_fault_is_named_once_and_has_evidence(ids: list[int], text: str, finish: str) -> None:
    found = faults(ids, text, finish)
    assert len({fault.type for fault in found}) == len(found)
    assert {fault.type for fault in found} <= {"empty", "cut_off", "repeats"}
    assert all(fault.evidence for fault in found)


@settings(deadline=None)
@given(st.lists(st.integers(), min_size=1, max_size=40), st.integers(4, 9), st.lists(st.integers(), max_size=20))
def test_every_long_loop_is_found(run: list[int], times: int, before: list[int]) -> None:
    looped = before + run * max(times, math.ceil(24 / len(run)))
    assert "repeats" in types(looped, finish="length")


# ---- where they part


def test_the_same_ids_do_not_part() -> None:
    assert compare(0, [1, 2], "a b", [1, 2], "a b", None) is None


def test_where_they_part_and_what_each_says() -> None:
    mine = "ok, I would like two chicken biryani with rice"
    found = compare(3, [1, 2, 7, 8], mine, [1, 2, 3], MENU, None)
    assert found is not None
    assert (found.prompt, found.position, found.mine, found.reference) == (3, 2, 7, 3)
    assert found.common_text == "ok, I would like two chicken "
    assert (found.mine_text, found.reference_text) == ("biryani with rice", "curry and rice")
    assert (found.kind, found.reference_best, found.margin, found.behind) == ("unknown", [], None, None)


def test_one_that_had_ended() -> None:
    found = compare(0, [1, 2], "a b", [1, 2, 3], "a b c", None)
    assert found is not None
    assert (found.position, found.mine, found.reference, found.mine_text, found.reference_text) == (
        2,
        None,
        3,
        "",
        " c",
    )
    found = compare(0, [1, 2, 3], "a b c", [1, 2], "a b", None)
    assert found is not None
    assert (found.mine, found.reference) == (3, None)


@pytest.mark.parametrize(
    ("mine", "reference", "shown"),
    [
        ("two chickens", "two chicken", ("two ", "chickens", "chicken")),
        ("two chicken, no", "two chicken no", ("two ", "chicken, no", "chicken no")),
        ("two chicken", "two chicken curry", ("two chicken", "", " curry")),
        ("abc", "abc", ("abc", "", "")),
        ("x", "y", ("", "x", "y")),
        ("字" * 20 + "再见", "字" * 20 + "您好", ("", "字" * 20 + "再见", "字" * 20 + "您好")),
        ("字" * 21 + "再见", "字" * 21 + "您好", ("字" * 21, "再见", "您好")),  # no spaces there: no word's start
    ],
)
def test_the_texts_begin_with_the_word_in_which_they_part(mine: str, reference: str, shown: tuple[str, ...]) -> None:
    assert texts(mine, reference) == shown


def test_long_texts_are_cut_at_a_word_with_an_ellipsis() -> None:
    before = "word " * 20
    common, mine, reference = texts(before + "alpha " * 30, before + "beta" * 30)
    assert common == "…" + before[-30:]
    assert mine == ("alpha " * 10)[:-1] + "…"
    assert reference == ("beta" * 15) + "…"


def test_control_characters_are_left_as_they_are() -> None:
    found = compare(0, [1], "a \x1b[31mred\x00", [2], "a \nblue", None)
    assert found is not None
    assert (found.mine_text, found.reference_text) == ("\x1b[31mred\x00", "\nblue")
    assert "\x1b[31mred\x00" in sentence(found) and "\nblue" in sentence(found)


@settings(deadline=None)
@given(st.text(), st.text(), st.text())
def test_what_is_shown_is_in_the_texts(before: str, mine: str, reference: str) -> None:
    common, one, other = texts(before + mine, before + reference)
    assert (before + mine).startswith(common) or common.startswith("…")
    assert common.removeprefix("…") + one.removesuffix("…") in before + mine
    assert common.removeprefix("…") + other.removesuffix("…") in before + reference
    assert max(len(common), len(one), len(other)) <= 61


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_the_position_is_the_first_that_differs(mine: list[int], reference: list[int]) -> None:
    found = compare(0, mine, "a", reference, "b", None)
    if found is None:
        assert mine == reference
        return
    assert mine[: found.position] == reference[: found.position]
    assert found.mine != found.reference


# ---- what the reference thinks


def test_a_near_tie_and_a_change() -> None:
    near = parted(at(2, (3, 7), (-0.70, -0.80), id7=-0.80))
    assert (near.kind, near.reference_best) == ("near_tie", [3, 7])
    assert (near.margin, near.behind) == (pytest.approx(0.1), pytest.approx(0.1))
    change = parted(at(2, (3, 5), (-0.70, -0.75), id7=-2.8))
    assert (change.kind, change.margin, change.behind) == ("change", pytest.approx(0.05), pytest.approx(2.1))


@pytest.mark.parametrize(("behind", "kind"), [(NEAR_TIE - 1e-9, "near_tie"), (NEAR_TIE + 1e-9, "change")])
def test_the_border_between_them(behind: float, kind: str) -> None:
    assert parted(at(2, (3, 5), (0.0, -9.0), id7=-behind)).kind == kind


def test_the_second_best_needs_no_asking() -> None:
    assert parted(at(2, (3, 7), (-0.70, -0.80))).kind == "near_tie"
    assert parted(at(2, (3, 7), (-0.10, -3.0))).kind == "change"


def test_one_that_was_not_asked_is_at_least_as_far_behind_as_the_second() -> None:
    change = parted(at(2, (3, 5), (-0.1, -3.0)))
    assert (change.kind, change.behind) == ("change", None)
    assert parted(at(2, (3, 5), (-0.70, -0.80))).kind == "unknown"


def test_an_opinion_about_another_position_says_nothing() -> None:
    found = parted(at(1, (3, 7), (-0.70, -0.80), id7=-0.80))
    assert (found.kind, found.reference_best, found.margin, found.behind) == ("unknown", [], None, None)


def test_one_that_ended_without_a_token_has_no_likelihood() -> None:
    assert parted(at(2, (3, 5), (-0.1, -3.0)), mine=[1, 2]).kind == "unknown"


def test_the_references_own_best_is_not_behind() -> None:
    found = parted(at(2, (7, 3), (-0.70, -0.71), id7=-0.69999))
    assert (found.kind, found.behind) == ("near_tie", 0.0)


@pytest.mark.parametrize(("logprob", "kind"), [(-math.inf, "change"), (math.nan, "unknown")])
def test_what_json_cannot_hold_is_not_known(logprob: float, kind: str) -> None:
    found = parted(at(2, (7, 3), (-0.7, -0.8), id7=logprob))
    assert (found.kind, found.behind) == (kind, None)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Divergence) == found


# ---- in words


def test_a_sentence_about_a_near_tie() -> None:
    mine = "ok, I would like two chicken biryani with"
    found = compare(0, [1, 2, 7], mine, [1, 2, 3], MENU, at(2, (3, 7), (-0.7, -0.8)))
    assert found is not None
    assert sentence(found) == (
        'parts at token 3 after "ok, I would like two chicken": "biryani with" instead of "curry and rice"; '
        "a near-tie (the reference finds it 1.1 times less likely)"
    )


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (0.0, "a near-tie (the reference finds it just as likely)"),
        (math.log(2.5), "a real change (the reference finds it 2.5 times less likely)"),
        (math.log(8), "a real change (the reference finds it 8 times less likely)"),
        (math.log(1234), "a real change (the reference finds it 1,234 times less likely)"),
        (5000.0, "a real change (the reference finds it over a million times less likely)"),
    ],
)
def test_how_much_less_likely(behind: float, words: str) -> None:
    assert sentence(parted(at(2, (3, 5), (0.0, -9.0), id7=-behind))).endswith(f"; {words}")


def test_a_sentence_about_a_change_of_unknown_size_and_about_nothing_known() -> None:
    assert sentence(parted(at(2, (3, 5), (-0.1, -3.0)))).endswith(
        "; a real change (the reference has two likelier tokens)"
    )
    assert sentence(parted(None)).endswith("; how likely the reference finds it is not known")


@pytest.mark.parametrize(
    ("mine", "reference", "words"),
    [
        ("a b", "a b c", 'parts at token 1 after "a b": it ends where the reference goes on with "c"; '),
        ("a b c", "a b", 'parts at token 1 after "a b": it goes on with "c" where the reference ends; '),
        ("x", "y", 'parts at token 1: "x" instead of "y"; '),
        ("a b", "a b", "parts at token 1, but the texts are the same; "),
        ("alpha beta gamma delta epsilon", "z", 'parts at token 1: "alpha beta gamma…" instead of "z"; '),
    ],
)
def test_a_sentence_about_what_they_say(mine: str, reference: str, words: str) -> None:
    found = compare(0, [1], mine, [2], reference, None)
    assert found is not None
    assert sentence(found, characters=20).startswith(words)
