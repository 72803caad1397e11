"""That "95%" is true after the stopping rule: whole comparisons in virtual time, stopped by the real schedule."""

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from weighin import intervals
from weighin.engines import Job
from weighin.engines.fake import FakeEngine
from weighin.probes import Call
from weighin.schedule import SPEED_KEY, State, Unit, next_unit

TRIALS = 3000
MOST = 30  # rounds that the budget has room for
TOKEN = {"a": 0.05, "b": 0.04}
TRUTH = TOKEN["a"] / TOKEN["b"]  # of b's speed to a's: both have the same noise, so its median is 1
NAMES = {"a": "fake:fp32@cpu", "b": "fake:int8@cpu"}


class Noise(NamedTuple):
    spread: float
    outliers: float = 0.0  # the share of processes whose tokens are heavy-tailed


NOISES = {"calm": Noise(0.01), "noisy": Noise(0.03), "heavy-tailed": Noise(0.015, 0.2)}


def speed(unit: Unit, noise: Noise, trial: int) -> float:
    """What a process of the fake engine would tell: one short answer, in virtual time."""
    options = {"token": str(TOKEN[unit.contender]), "spread": str(noise.spread), "seed": str(trial)}
    if noise.outliers and random.Random(f"{trial}|{unit}").random() < noise.outliers:
        options["script"] = "heavy-tailed"
    engine = FakeEngine(
        Job(
            kind="speed", round=unit.round, contender=NAMES[unit.contender], engine="fake", precision="fp32",
            device="cpu", options=options, settings={}, model_path="", weight_files=[], prepared=None, out=None,
            threads=1, prompts=[[5]], lengths={}, stop_ids=[], max_new_tokens=2, response_cap=1, repeats=1,
            remote_code=False, allow_pickle=False, spawned_at=0.0,
        )
    )  # fmt: skip
    times: list[float] = []
    ids = engine.generate([5], 2, [], lambda _: times.append(engine.clock()))
    found = Call(1, ids, 0.0, times).decode_tokens_per_second
    assert found is not None
    return found


def compare(noise: Noise, trial: int) -> State:
    """One whole comparison: every job takes a second, and the schedule says when it is enough."""
    entries = [SimpleNamespace(name=name, recipe=None) for name in NAMES]
    jobs_beside_rounds = 2 * len(entries)  # responses and cold loads
    plan: Any = SimpleNamespace(
        runnable=entries,
        rounds=None,
        reference="a",
        quality=None,
        budget_seconds=float(jobs_beside_rounds + MOST * len(entries)),
    )
    state = State()
    while (unit := next_unit(plan, state)) is not None:
        of = unit._asdict()
        state.add({**of, "event": "started"})
        if unit.job == "speed":
            state.add({**of, "event": "sample", "key": SPEED_KEY, "value": speed(unit, noise, trial)})
        state.add({**of, "event": "ended", "status": "ok", "seconds": 1.0})
    return state


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOISES)
def test_95_percent_of_the_ratios_hold_the_truth_though_the_run_stops_when_it_likes_them(kind: str) -> None:
    covered, rounds = 0, []
    for trial in range(TRIALS):
        state = compare(NOISES[kind], trial)
        ratio = intervals.paired_ratio(state.by_round("b", SPEED_KEY), state.by_round("a", SPEED_KEY))
        assert ratio is not None and ratio.interval == "95%"
        covered += ratio.low <= TRUTH <= ratio.high
        rounds.append(ratio.processes)
    early = sum(n < MOST for n in rounds) / TRIALS
    said = f"{kind}: coverage {covered / TRIALS:.4f}, stopped early {early:.1%}, rounds {min(rounds)}–{max(rounds)}"
    print(said)
    assert early > 0, said
    assert max(rounds) <= MOST and min(rounds) >= intervals.ENOUGH
    assert 0.93 <= covered / TRIALS <= 0.97, said


@pytest.mark.slow
def test_the_check_itself_can_fail() -> None:
    """The same comparisons with an interval of 80% do not pass for 95%: the bounds above are tight enough to see it."""
    covered = 0
    for trial in range(400):
        state = compare(NOISES["noisy"], trial)
        mine, other = state.by_round("b", SPEED_KEY), state.by_round("a", SPEED_KEY)
        low, high = intervals.median_interval(sorted(mine[r] / other[r] for r in mine), level=0.80)
        covered += low <= TRUTH <= high
    assert covered / 400 < 0.93
