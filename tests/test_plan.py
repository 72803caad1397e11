"""What a person types: contenders and durations."""

import contextlib
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin import engines
from weighin.errors import BadInput
from weighin.plan import Contender, Prompt, Rendered, Workload, parse_duration

ENGINES = list(engines.everything().values())
VALUES = st.text("abcXYZ0189_.,=/:-", max_size=8).filter(lambda text: not re.search(r"\s", text))


@st.composite
def contenders(draw: st.DrawFn) -> Contender:
    engine = draw(st.sampled_from(ENGINES))
    keys = draw(st.sets(st.sampled_from(sorted(engine.options)))) if engine.options else set()
    options = {}
    for key in keys:
        values = engine.options[key]
        options[key] = draw(VALUES) if values == ("*",) else draw(st.sampled_from(values or ("",)))
    return Contender(
        engine=engine.name,
        precision=draw(st.sampled_from(engine.precisions)),
        device=draw(st.sampled_from(engine.devices)),
        options=options,
    )


def refused(text: str) -> str:
    with pytest.raises(BadInput) as error:
        Contender.parse(text)
    return str(error.value)


@given(contenders())
def test_a_contenders_name_reads_back_as_the_same_contender(contender: Contender) -> None:
    again = Contender.parse(str(contender))
    assert again == contender
    assert hash(again) == hash(contender)


@given(contenders())
def test_the_order_of_options_does_not_matter(contender: Contender) -> None:
    tail = [f"+{k}={v}" if v else f"+{k}" for k, v in contender.options.items()]
    head = f"{contender.engine}:{contender.precision}@{contender.device}"
    assert Contender.parse(head + "".join(tail)) == Contender.parse(head + "".join(reversed(tail))) == contender


@given(st.text() | st.text(alphabet=":@+=.fakepr32cu ") | st.from_regex(r"(fake|transformers):\w+@\w+(\+\w+=?\w*)*"))
def test_any_text_is_a_contender_or_bad_input(text: str) -> None:
    try:
        found = Contender.parse(text)
    except BadInput as error:
        assert text in str(error)
    else:
        assert Contender.parse(str(found)) == found


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("transfomers:fp32@cpu", "transformers:fp32@cpu"),
        ("transformers:fp23@cpu", "transformers:fp32@cpu"),
        ("transformers:fp32@cup", "transformers:fp32@cpu"),
        ("transformers/fp32@cpu", "transformers:fp32@cpu"),
        ("transformers:fp32", "transformers:fp32@"),
        ("tranformers:nf4@cudaa+graph", "transformers:nf4@cuda"),
    ],
)
def test_an_error_names_the_nearest_contender(typed: str, meant: str) -> None:
    message = refused(typed)
    assert typed in message
    assert meant in message


@pytest.mark.parametrize("typed", ["", "zzz", "???", "llamacpp:q4_k_m@cpu", ":@", "💥"])
def test_the_named_contender_is_always_a_valid_one(typed: str) -> None:
    named = re.findall(r"[a-z.]+:\w+@\w+", refused(typed).replace(f"'{typed}'", ""))
    assert named
    assert Contender.parse(named[-1])


def test_an_unknown_engine_is_answered_with_those_that_are_offered() -> None:
    message = refused("tgi:bf16@cpu")
    assert "no engine 'tgi'" in message
    assert "transformers" in message
    assert "fake" not in message  # it is for tests


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("fake:fp9@cpu", ["no precision 'fp9'", "fp32", "bf16", "nf4", "int8"]),
        ("fake:fp32@tpu", ["does not run on 'tpu'", "cpu", "cuda"]),
        ("fake:fp32@cpu+nope", ["no option 'nope'", "script", "token"]),
        ("fake:fp32@cpu+script=odd", ["'script' takes one of", "bimodal", "not 'odd'"]),
        ("fake:fp32@cpu+script", ["'script' takes one of", "not ''"]),
        ("fake:fp32@cpu+real=yes", ["'real' takes no value", "'yes'"]),
        ("fake:fp32@cpu+seed=1+seed=2", ["'seed' is given twice"]),
        ("fake:fp32@cpu+seed=1 +token=1", ["is not a contender"]),
        ("fake:fp32@cpu+", ["is not a contender"]),
        ("fake:fp32@cpu@cuda", ["is not a contender"]),
    ],
)
def test_each_part_that_is_wrong_is_named_with_what_would_be_right(typed: str, words: list[str]) -> None:
    message = refused(typed)
    for word in words:
        assert word in message


def test_space_around_a_contender_is_no_part_of_it() -> None:
    assert str(Contender.parse("  fake:fp32@cpu\n")) == "fake:fp32@cpu"


@given(st.integers(0, 99), st.integers(0, 999), st.integers(0, 9999))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int) -> None:
    total = hours * 3600 + minutes * 60 + seconds
    text = "".join(f"{n}{unit}" for n, unit in ((hours, "h"), (minutes, "m"), (seconds, "s")) if n)
    if total:
        assert parse_duration(text) == total
        assert parse_duration(f" {text.upper()} ") == total
    else:
        with pytest.raises(BadInput):
            parse_duration(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5m", 90), ("1h30m", 5400), ("0.5s", 0.5), ("2h0m1", 7201)]
)
def test_the_ways_to_write_a_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "0", "0s", "-5m", "ten", "5d", "1m1h", "1.2.3s", "nan", "inf", "1 m", "m"])
def test_what_is_no_duration_is_answered_with_how_to_write_one(text: str) -> None:
    with pytest.raises(BadInput, match=re.escape(f"'{text}'") + ".*Write 90s, 10m or 1h30m"):
        parse_duration(text)


@given(st.text(max_size=12) | st.text(alphabet="0123456789.hms", max_size=12))
def test_any_text_is_a_positive_duration_or_bad_input(text: str) -> None:
    with contextlib.suppress(BadInput):
        assert parse_duration(text) > 0


def test_a_duration_beyond_all_numbers_is_bad_input() -> None:
    with pytest.raises(BadInput):
        parse_duration("9" * 400)


def workload(**changes: object) -> Workload:
    base = Workload(
        prompts=[Prompt(text="hello")],
        rendered=[Rendered(text="hello", ids=[1, 2, 3])],
        lengths={"4": [1, 1, 1, 1]},
        template="raw", template_note="", system=None, stop_ids=[9], thinking=None, max_new_tokens=5, response_cap=9,
        vocabulary=272,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def test_the_hash_of_the_ids_covers_every_id_and_nothing_else() -> None:
    same = workload().ids_hash
    assert workload(template_note="another", max_new_tokens=6).ids_hash == same
    assert workload(rendered=[Rendered(text="hello", ids=[1, 2, 4])]).ids_hash != same
    assert workload(lengths={"4": [1, 1, 1, 2]}).ids_hash != same
    assert workload(stop_ids=[8]).ids_hash != same


def test_a_report_shows_a_conversation_by_its_last_message() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert Prompt(messages=messages).shown == "hello"
    assert Prompt(text="hi").shown == "hi"
