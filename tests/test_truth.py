"""Scripted engines through the whole pipeline: the figures, intervals and doubts that they must give, worked out here.

The expectations do not come from weighin: the draws of the fake engine are made again, and medians and intervals are
written down from their definitions.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from weighin.measurements import Comparison, ContenderResult

Fakes = Callable[..., Comparison]
DECODE = "decode_tokens_per_second"
TOKENS = 4
PROMPT = 25  # tokens of "hello" in the tiny model's template, at 1 ms each
ROUNDS = 8
STEADY = 2  # answers a process; loading is a small part of it with tokens of half a second
TOKEN = 0.5
RARE = {"warm_load_only", "no_warm_load", "machine_busy", "container_throttled"}  # of the machine the tests run on


def middle(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def bounds_of_eight(values: list[float]) -> tuple[float, float]:
    """Hettmansperger and Sheather for eight values at 96%, by hand.

    The range covers 1 - 2/256, the second values 1 - 18/256: so it lies between the first and the second ones.
    """
    assert len(values) == 8
    outer, inner = 1 - 2 / 256, 1 - 18 / 256
    share = (outer - 0.96) / (outer - inner)
    weight = (8 - 1) * share / (1 + (8 - 2) * share)
    v = sorted(values)
    return v[0] + weight * (v[1] - v[0]), v[7] - weight * (v[7] - v[6])


def run(fakes: Fakes, options: str, **changes: Any) -> ContenderResult:
    options = f"fp32@cpu+says=70.1+token={TOKEN}{options}"
    (found,) = fakes(options, rounds=ROUNDS, max_new_tokens=TOKENS, **changes).contenders
    assert (found.status, found.rounds) == ("ok", ROUNDS)
    return found


def doubts(found: ContenderResult) -> dict[str, str]:
    return {d.type: d.evidence for d in found.doubts if d.type not in RARE}


def check(found: ContenderResult, key: str, per_round: list[float]) -> None:
    figure = found.measurements[key]
    low, high = bounds_of_eight(per_round)
    by_round = figure.by_round()
    assert [by_round[r] for r in range(1, ROUNDS + 1)] == pytest.approx(per_round, rel=1e-6)
    assert (figure.value, figure.low, figure.high) == pytest.approx((middle(per_round), low, high), rel=1e-6)
    assert figure.interval == "95%"


def test_constant(fakes: Fakes) -> None:
    found = run(fakes, "")
    check(found, DECODE, [2.0] * ROUNDS)
    check(found, "answer_seconds", [0.001 * PROMPT + 4 * TOKEN] * ROUNDS)
    check(found, "first_token_seconds", [0.001 * PROMPT + TOKEN] * ROUNDS)
    check(found, "ready_seconds", [0.5 + 1.0 + 0.001 * PROMPT + TOKEN] * ROUNDS)
    check(found, "prefill_tokens_per_second", [PROMPT / (0.001 * PROMPT + TOKEN)] * ROUNDS)
    assert len(found.measurements[DECODE].samples) == STEADY * ROUNDS
    assert doubts(found) == {}


def test_a_slow_first_call_is_told_as_such_and_touches_nothing_else(fakes: Fakes) -> None:
    found = run(fakes, "+script=slow-first")
    check(found, DECODE, [2.0] * ROUNDS)
    check(found, "answer_seconds", [0.001 * PROMPT + 4 * TOKEN] * ROUNDS)
    check(found, "first_answer_seconds", [0.001 * PROMPT + 4 * TOKEN * 5] * ROUNDS)
    check(found, "ready_seconds", [0.5 + 1.0 + 0.001 * PROMPT + TOKEN * 5] * ROUNDS)
    assert doubts(found) == {}


def test_two_modes(fakes: Fakes) -> None:
    found = run(fakes, "+script=bimodal")
    check(found, DECODE, [2.0, 1.0] * (ROUNDS // 2))
    figure = found.measurements[DECODE]
    assert (figure.low, figure.value, figure.high) == pytest.approx((1.0, 1.5, 2.0))
    # the quartiles are the modes: 1 token/s apart, of a median of 1.5
    assert doubts(found) == {"unstable": "half of the processes lie 67% of the median apart"}


def test_a_drift(fakes: Fakes) -> None:
    found = run(fakes, "+script=drifting")
    speeds = [2.0 / (1 + 0.1 * r) for r in range(ROUNDS)]
    check(found, DECODE, speeds)
    change = middle(speeds[-2:]) / middle(speeds[:2]) - 1  # the last quarter of eight rounds against the first
    assert list(doubts(found)) == ["drift"]
    assert doubts(found)["drift"].startswith(f"decode speed went {change:+.0%} from the first rounds to the last")


def test_heavy_tails(fakes: Fakes) -> None:
    found = run(fakes, "+script=heavy-tailed+seed=5")
    assert found.name == f"fake:fp32@cpu+says=70.1+script=heavy-tailed+seed=5+token={TOKEN}"
    per_round, answers, firsts = [], [], []
    for number in range(1, ROUNDS + 1):
        draw = random.Random(hashlib.sha256(f"5|{found.name}|{number}|speed".encode()).digest())
        calls = [[TOKEN * draw.paretovariate(1.5) for _ in range(TOKENS)] for _ in range(1 + STEADY)]
        if sum(calls[0]) + 0.001 * PROMPT > 20:  # such a process answers once
            calls = calls[:2]
        # the first token belongs to the prefill
        per_round.append(middle([(TOKENS - 1) / sum(call[1:]) for call in calls[1:]]))
        answers.append(middle([0.001 * PROMPT + sum(call) for call in calls[1:]]))
        firsts.append(0.001 * PROMPT + sum(calls[0]))
    check(found, DECODE, per_round)
    check(found, "answer_seconds", answers)
    check(found, "first_answer_seconds", firsts)
    assert max(per_round) / min(per_round) > 1.5  # the tails are there
    v = sorted(per_round)
    # the quartiles of eight lie three quarters of the way from the 2nd to the 3rd, a quarter from the 6th to the 7th
    spread = (v[5] + 0.25 * (v[6] - v[5]) - (v[1] + 0.75 * (v[2] - v[1]))) / middle(v)
    assert spread > 0.10
    assert doubts(found)["unstable"] == f"half of the processes lie {spread:.0%} of the median apart"


def test_a_spread_between_processes_is_one_draw_a_process(fakes: Fakes) -> None:
    found = run(fakes, "+spread=0.2+seed=9")
    factors = []
    for number in range(1, ROUNDS + 1):
        draw = random.Random(hashlib.sha256(f"9|{found.name}|{number}|speed".encode()).digest())
        factors.append(draw.lognormvariate(0.0, 0.2))
    check(found, DECODE, [2.0 / f for f in factors])
    check(found, "first_token_seconds", [(0.001 * PROMPT + TOKEN) * f for f in factors])


def test_a_paired_ratio_takes_out_what_both_share(fakes: Fakes) -> None:
    names = (f"fp32@cpu+script=drifting+token={TOKEN}", "nf4@cpu+script=drifting+token=0.2")
    comparison = fakes(*names, rounds=ROUNDS, max_new_tokens=TOKENS)
    slow, fast = (c.name for c in comparison.contenders)
    ratio = comparison.ratio(DECODE, fast, slow)
    assert ratio is not None
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.5, 2.5, 2.5), rel=1e-6)
    assert (ratio.interval, ratio.processes) == ("95%", ROUNDS)
    # while each figure by itself drifts over a third of its size
    figure = comparison.contender(slow).measurements[DECODE]
    assert figure.high is not None and figure.low is not None and figure.high / figure.low > 1.4
    assert comparison.verdict.best_for[fast][0] == "the fastest decoding"
