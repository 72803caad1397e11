"""`--fail-on`: what a rule means, when it is broken, and that nothing passes unseen."""

from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from conftest import Finished
from hypothesis import example, given
from test_diff import around, measured, with_figures, with_first

from weighin.errors import BadInput
from weighin.measurements import Comparison
from weighin.rules import Rule, RuleFailed, check, check_possible, parse

DECODE = "decode_tokens_per_second"
FIRST, FAILED, NO_GPU = "fake:fp32@cpu", "fake:bf16@cpu+fail=load.oom", "fake:int8@cuda"
replace = msgspec.structs.replace


@pytest.mark.parametrize(("text", "key", "sign", "number"), [
    ("decode_tokens_per_second<20", DECODE, "<", 20),
    (" decode_tokens_per_second <= 20.5 tokens/s ", DECODE, "<=", 20.5),
    ("decode_tokens_per_second>=1e3tok/s", DECODE, ">=", 1000),
    ("decode_tokens_per_second@512<.5", f"{DECODE}@512", "<", 0.5),
    ("peak_ram_bytes>8GB", "peak_ram_bytes", ">", 8e9),
    ("peak_ram_bytes>8gib", "peak_ram_bytes", ">", 8 * 2**30),
    ("peak_ram_bytes>8000000", "peak_ram_bytes", ">", 8e6),
    ("disk_bytes_read_per_token>1MB/token", "disk_bytes_read_per_token", ">", 1e6),
    ("disk_bytes_read_per_token>1MB", "disk_bytes_read_per_token", ">", 1e6),
    ("first_token_seconds>500ms", "first_token_seconds", ">", 0.5),
    ("first_token_seconds>500\u00b5s", "first_token_seconds", ">", 0.0005),
    ("first_token_seconds>500\u03bcs", "first_token_seconds", ">", 0.0005),
    ("load_seconds>2min", "load_seconds", ">", 120),
    ("top1_agreement<95%", "top1_agreement", "<", 0.95),
    ("top1_agreement<0.95", "top1_agreement", "<", 0.95),
    ("regression>5%", "regression", ">", 0.05),
    ("regression >= 10 %", "regression", ">=", 0.10),
])  # fmt: skip
def test_what_a_rule_says(text: str, key: str, sign: str, number: float) -> None:
    rule = parse(text)
    assert (rule.contender, rule.key, rule.sign, rule.text) == (None, key, sign, text.strip())
    assert rule.number == pytest.approx(number)


@pytest.mark.parametrize("contender", ["fake:fp32@cpu", "fake:fp32@cpu+seed=a/b+token=0.05"])
def test_a_rule_for_one_contender(contender: str) -> None:
    assert parse(f"{contender}/{DECODE}<20").contender == contender
    assert parse(f"{contender}/regression>5%").contender == contender


def test_a_contender_is_known_by_any_order_of_its_options() -> None:
    assert parse(f"fake:fp32@cpu+token=0.1+seed=2/{DECODE}<20").contender == "fake:fp32@cpu+seed=2+token=0.1"


@pytest.mark.parametrize(("text", "said"), [
    ("decode_tokens_per_secnd<20", "Nearest: decode_tokens_per_second"),
    ("Regresion>5%", "Nearest: regression"),
    ("ram>8GB", "Nearest: peak_ram_bytes"),
    (DECODE, "put it in quotes"),
    (f"{DECODE}=20", "is not a rule"),
    (f"{DECODE}<-20", "is not a rule"),
    (f"{DECODE}<1e999", "too large"),
    ("peak_ram_bytes>8ms", "'ms' is no unit of this figure; it takes B, kB, MB"),
    (f"{DECODE}<95%", "it takes tokens/s"),
    ("top1_agreement<95ms", "it takes %"),
    ("regression>5", "write regression>5%"),
    ("regression<5%", "write regression>5%"),
    (f"fake:fp23@cpu/{DECODE}<20", "no precision 'fp23'"),
    (f"/{DECODE}<20", "is not a rule"),
    ("", "is not a rule"),
])  # fmt: skip
def test_what_is_no_rule(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said.replace("(", r"\(")):
        parse(text)


PIECES = st.sampled_from([
    *("<", ">", "<=", ">=", "=", "/", "@", "%", "GB", "ms", "1e9", "9" * 400, "0.5", ".", "-", " ", "\n", "\u0663"),
    *(DECODE, "peak_ram_bytes", "regression", "fake:fp32@cpu", "+token=1", "top1_agreement", "@512"),
])  # fmt: skip


@given(st.text() | st.lists(PIECES, max_size=9).map("".join))
@example("regression>5%")
def test_any_text_is_a_rule_or_bad_input(text: str) -> None:
    try:
        assert isinstance(parse(text), Rule)
    except BadInput as error:
        assert str(error)


# ---- limits


def test_a_rule_that_holds_says_nothing(finished: Finished) -> None:
    assert (
        check([parse(f"{DECODE}<1"), parse("disk_bytes>8GB"), parse(f"{FIRST}/{DECODE}>1000")], finished.comparison)
        == []
    )


def test_every_contender_with_a_figure_is_judged(finished: Finished) -> None:
    (found,) = check([parse(f"{DECODE}<30")], finished.comparison)
    assert found.startswith(f"{DECODE}<30: {FIRST} has 20.0 tokens/s")
    assert len(check([parse(f"{DECODE}<100")], finished.comparison)) == 2


def test_the_sign(finished: Finished) -> None:
    figures = with_figures(finished.comparison, **{DECODE: measured(20.0, 20.0)})
    broken = [bool(check([parse(f"{FIRST}/{DECODE}{sign}20")], figures)) for sign in ("<", "<=", ">", ">=")]
    assert broken == [False, True, False, True]


@pytest.mark.parametrize(("values", "said"), [
    ((19.9, 19.1, 20.6), "; the range 19.1–20.6 includes 20.0: more rounds would decide"),
    ((19.0, 19.1, 19.2), "; the whole range 19.0–19.2 is below 20.0"),
    (around(19.5, 8, 0.001), "; the whole interval 19.5–19.5 is below 20.0"),
    (around(19.9, 8, 0.2), "includes 20.0: more rounds would decide"),
    ((19.5,), "; that is one process, so nothing says how far the next one would be from it"),
])  # fmt: skip
def test_whether_noise_could_have_broken_it(finished: Finished, values: tuple[float, ...], said: str) -> None:
    figures = with_figures(finished.comparison, **{DECODE: measured(*values)})
    (found,) = check([parse(f"{FIRST}/{DECODE}<20")], figures)
    assert found.startswith(f"{FIRST}/{DECODE}<20: {FIRST} has 19.")
    assert found.endswith(said)


def test_the_limit_is_told_in_the_unit_of_the_figure(finished: Finished) -> None:
    figures = with_figures(finished.comparison, first_token_seconds=measured(0.6, 0.4, 0.7, better="lower", unit="s"))
    (found,) = check([parse(f"{FIRST}/first_token_seconds>0.5")], figures)
    assert found.endswith("has 600 ms; the range 400–700 includes 500: more rounds would decide")


def test_a_contender_without_the_figure_does_not_pass_where_it_was_named(finished: Finished) -> None:
    rules = [parse(f"{name}/{DECODE}<1") for name in (FAILED, NO_GPU, "fake:int8@cpu")]
    oom, no_gpu, absent = check(rules, finished.comparison)
    assert "out_of_memory: " in oom
    assert "cannot_run: no CUDA GPU here" in no_gpu
    assert "fake:int8@cpu is not in this comparison" in absent
    assert check([parse(f"{DECODE}<1")], finished.comparison) == []


def test_a_rule_that_judged_nothing_does_not_pass(finished: Finished) -> None:
    (found,) = check([parse("peak_vram_bytes>8GB")], finished.comparison)
    assert "could not be judged: no contender has this figure" in found
    (found,) = check([parse(f"{DECODE}@4096<1")], finished.comparison)
    assert found.endswith("not measured")


# ---- regressions


def test_a_regression_needs_something_to_regress_from(finished: Finished) -> None:
    with pytest.raises(BadInput, match=r"--against DIR, or use weighin diff OLD NEW --fail-on 'regression>5%'"):
        check([parse("regression>5%")], finished.comparison, None)
    check_possible([parse(f"{DECODE}<1")], None)
    check_possible([parse("regression>5%")], finished.comparison)


@pytest.mark.parametrize(("slower", "spread", "broken"), [
    (1.0, 0.001, False), (1.04, 0.001, False), (1.10, 0.001, True), (0.5, 0.001, False), (1.10, 0.2, False),
])  # fmt: skip
@pytest.mark.parametrize(("key", "better"), [("answer_seconds", "lower"), (DECODE, "higher")])
@pytest.mark.parametrize("n", [4, 8])
def test_worse_by_more_than_the_share_beyond_noise(
    finished: Finished, n: int, key: str, better: str, slower: float, spread: float, broken: bool
) -> None:
    factor = slower if better == "lower" else 1 / slower
    old, new = (
        with_figures(finished.comparison, **{key: measured(*around(20 * by, n, spread), better=better)})
        for by in (1, factor)
    )
    found = check([parse("regression>5%")], new, old)
    assert bool(found) == broken
    if broken:
        assert found[0].startswith(f"regression>5%: {FIRST}: decode 20.0 tokens/s before, ")
        assert found[0].endswith(": worse")
        assert check([parse("regression>20%")], new, old) == []
        other = finished.comparison.contenders[1].name
        assert check([parse(f"{other}/regression>5%")], new, old) == []


def test_figures_that_are_no_headline_do_not_count(finished: Finished) -> None:
    old, new = (with_figures(finished.comparison, extra=measured(v, v)) for v in (20.0, 10.0))
    assert check([parse("regression>5%")], new, old) == []


def test_bytes_that_are_counted_need_no_rounds(finished: Finished) -> None:
    old, new = (
        with_figures(finished.comparison, disk_bytes=measured(v, better="lower", unit="B")) for v in (1e9, 1.1e9)
    )
    (found,) = check([parse("regression>5%")], new, old)
    assert found.endswith("1.00 GB before, 1.10 GB now, 1.10× higher: worse")


def test_what_ran_and_does_not_any_more_is_a_regression(finished: Finished) -> None:
    new = with_first(finished.comparison, status="out_of_memory", reason="too big", rounds=0)
    assert check([parse("regression>5%")], new, finished.comparison) == [
        f"regression>5%: {FIRST} was ok, is out_of_memory: too big"
    ]
    assert check([parse("regression>5%")], finished.comparison, new) == []


def test_a_regression_of_nothing_does_not_pass(finished: Finished) -> None:
    renamed = replace(finished.comparison, contenders=finished.comparison.contenders[2:])
    (found,) = check([parse("regression>5%")], renamed, finished.comparison)
    assert "could not be judged" in found
    (found,) = check([parse("fake:int8@cpu/regression>5%")], finished.comparison, finished.comparison)
    assert "no figures of fake:int8@cpu" in found


def test_another_workload_is_no_regression(finished: Finished) -> None:
    with pytest.raises(BadInput, match="different workloads"):
        check([parse("regression>5%")], replace(finished.comparison, ids_hash="f" * 64), finished.comparison)


def test_a_real_regression(fakes: Callable[..., Comparison], tmp_path: Path) -> None:
    runs = [fakes(f"fp32@cpu+token={t}", rounds=4, out=tmp_path / t) for t in ("0.05", "0.06")]
    old, new = (with_first(run, name=FIRST) for run in runs)
    found = check([parse("regression>5%")], new, old)
    assert any("decode 20.0 tokens/s before, 16.7 tokens/s now, 1.20× lower" in sentence for sentence in found)
    assert not any("decode" in sentence for sentence in check([parse("regression>5%")], old, new))


def test_the_error_lists_every_sentence() -> None:
    error = RuleFailed(["a<1: x", "b>2: y"])
    assert error.exit_code == 3
    assert str(error) == "These --fail-on rules failed:\n- a<1: x\n- b>2: y"
    assert str(RuleFailed(["a<1: x"])) == "A --fail-on rule failed:\n- a<1: x"
