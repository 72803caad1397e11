"""Which job comes next: driven to its end with scripted outcomes, no process at all."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin import schedule
from weighin.schedule import State, Unit, next_unit

SPEED = "decode_tokens_per_second"


def plan(
    *names: str,
    rounds: int | None = None,
    budget: float = 600.0,
    recipes: dict[str, str] | None = None,
    reference: str | None = None,
) -> Any:
    entries = [SimpleNamespace(name=name, recipe=(recipes or {}).get(name)) for name in names]
    return SimpleNamespace(
        runnable=entries, entries=entries, rounds=rounds, budget_seconds=budget, reference=reference, quality=None
    )


def records(unit: Unit, status: str = "ok", seconds: float = 1.0, **samples: float) -> list[dict[str, Any]]:
    of = {"contender": unit.contender, "round": unit.round, "job": unit.job}
    said = [{**of, "event": "sample", "key": key, "value": value} for key, value in samples.items()]
    return [{**of, "event": "started"}, *said, {**of, "event": "ended", "status": status, "seconds": seconds}]


def speed_of(unit: Unit) -> float:
    return {"a": 20.0, "b": 40.0, "c": 33.0}[unit.contender] * (1 + 0.001 * (unit.round % 3))


def drive(
    a_plan: Any, state: State, failing: tuple[Unit, ...] = (), seconds: float = 1.0, **samples: float
) -> tuple[list[Unit], list[dict[str, Any]]]:
    """Do all that is to be done, in no time."""
    done: list[Unit] = []
    journal: list[dict[str, Any]] = []
    while (unit := next_unit(a_plan, state)) is not None:
        assert len(done) < 500
        done.append(unit)
        measured = {SPEED: speed_of(unit), **samples} if unit.job == "speed" else {}
        for record in records(unit, "failed" if unit in failing else "ok", seconds, **measured):
            state.add(record)
            journal.append(record)
    return done, journal


def test_the_order_is_prepare_round_one_responses_cold_then_rounds_that_take_turns() -> None:
    done, _ = drive(plan("a", "b", "c", rounds=3, recipes={"b": "q4", "c": "q8"}), State())
    assert done == [
        Unit("b", 0, "prepare"), Unit("c", 0, "prepare"),
        Unit("a", 1, "speed"), Unit("b", 1, "speed"), Unit("c", 1, "speed"),
        Unit("a", 1, "responses"), Unit("b", 1, "responses"), Unit("c", 1, "responses"),
        Unit("a", 1, "cold"), Unit("b", 1, "cold"), Unit("c", 1, "cold"),
        Unit("b", 2, "speed"), Unit("c", 2, "speed"), Unit("a", 2, "speed"),
        Unit("c", 3, "speed"), Unit("a", 3, "speed"), Unit("b", 3, "speed"),
    ]  # fmt: skip


def test_contenders_with_the_same_recipe_are_prepared_once() -> None:
    done, _ = drive(plan("a", "b", rounds=1, recipes={"a": "q4", "b": "q4"}), State())
    assert [u for u in done if u.job == "prepare"] == [Unit("a", 0, "prepare")]


def test_when_preparing_fails_the_next_contender_of_the_recipe_tries() -> None:
    done, _ = drive(plan("a", "b", rounds=1, recipes={"a": "q4", "b": "q4"}), State(), (Unit("a", 0, "prepare"),))
    assert done[:2] == [Unit("a", 0, "prepare"), Unit("b", 0, "prepare")]
    assert {u.contender for u in done[2:]} == {"b"}


@pytest.mark.parametrize("job", ["speed", "responses"])
def test_a_failed_contender_is_left_out_and_the_others_go_on(job: str) -> None:
    done, _ = drive(plan("a", "b", "c", rounds=3), State(), (Unit("b", 1, job),))
    after = done[done.index(Unit("b", 1, job)) + 1 :]
    assert not any(u.contender == "b" for u in after)
    for name in ("a", "c"):
        assert [u.round for u in done if u.contender == name and u.job == "speed"] == [1, 2, 3]


def test_a_contender_that_fails_in_a_later_round_is_left_out_from_there() -> None:
    done, _ = drive(plan("a", "b", rounds=4), State(), (Unit("b", 3, "speed"),))
    assert [u.round for u in done if u.contender == "b" and u.job == "speed"] == [1, 2, 3]
    assert [u.round for u in done if u.contender == "a" and u.job == "speed"] == [1, 2, 3, 4]


def test_a_cold_load_that_fails_costs_the_contender_nothing_else() -> None:
    done, _ = drive(plan("a", "b", rounds=2), State(), (Unit("a", 1, "cold"),))
    assert Unit("a", 2, "speed") in done


def test_everybody_failing_ends_it() -> None:
    done, _ = drive(plan("a", "b", rounds=5), State(), (Unit("a", 1, "speed"), Unit("b", 1, "speed")))
    assert done == [Unit("a", 1, "speed"), Unit("b", 1, "speed")]
    assert next_unit(plan(), State()) is None


def test_the_number_of_rounds_that_was_asked_for_is_run_whatever_the_budget() -> None:
    done, _ = drive(plan("a", "b", rounds=9, budget=0.001), State(), seconds=100)
    assert Counter(u.job for u in done) == {"speed": 18, "responses": 2, "cold": 2}


def test_many_rounds_are_run_too_when_they_are_asked_for() -> None:
    done, _ = drive(plan("a", rounds=70), State())
    assert max(u.round for u in done) == 70


def test_a_spent_budget_still_gives_round_one_and_the_responses() -> None:
    done, _ = drive(plan("a", "b", budget=0.5), State(), seconds=100)
    assert Counter((u.round, u.job) for u in done) == {(1, "speed"): 2, (1, "responses"): 2}


def test_no_round_is_begun_that_the_budget_has_no_room_for() -> None:
    # round one, responses and cold take 60 s; a round takes 20 s
    done, _ = drive(plan("a", "b", budget=99.0), State(), seconds=10)
    assert max(u.round for u in done) == 2
    done, _ = drive(plan("a", "b", budget=101.0), State(), seconds=10)
    assert max(u.round for u in done) == 3


def test_preparing_does_not_count_against_the_budget() -> None:
    a_plan = plan("a", budget=5.0, recipes={"a": "q4"})
    state = State(records(Unit("a", 0, "prepare"), seconds=1000.0))
    assert state.spent == 0
    done, _ = drive(a_plan, state)
    assert Unit("a", 2, "speed") in done


def test_it_stops_at_six_rounds_when_every_ratio_is_precise() -> None:
    done, _ = drive(plan("a", "b", "c"), State())
    assert max(u.round for u in done) == 6


def test_it_goes_on_while_a_ratio_is_not_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = {r: 1.3 if r % 2 else 1.0 for r in range(1, 100)}
    monkeypatch.setitem(globals(), "speed_of", lambda u: 20.0 * noise[u.round] if u.contender == "b" else 20.0)
    done, _ = drive(plan("a", "b", budget=1e6), State())
    assert max(u.round for u in done) == schedule.MOST_ROUNDS
    done, _ = drive(plan("a", "b", budget=50.0), State())
    assert 6 < max(u.round for u in done) < schedule.MOST_ROUNDS


def test_ratios_are_to_the_reference_and_else_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """a and c swing by 4% in turns, b stands still: all are near enough to b, but a and c not to each other."""
    swings = {"a": (1.04, 1.0), "b": (1.0, 1.0), "c": (1.0, 1.04)}
    monkeypatch.setitem(globals(), "speed_of", lambda u: 20.0 * swings[u.contender][u.round % 2])
    for reference, precise in (("b", True), (None, False), ("a", False), ("c", False), ("not here", False)):
        done, _ = drive(plan("a", "b", "c", budget=150.0, reference=reference), State())
        assert (max(u.round for u in done) == 6) == precise, reference
    # a reference that failed is none: the first of those that are left stands in for it
    done, _ = drive(plan("a", "b", "c", budget=150.0, reference="b"), State(), (Unit("b", 1, "speed"),))
    assert max(u.round for u in done) > 6


def test_a_drift_of_the_whole_machine_does_not_keep_it_going(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "speed_of", lambda u: {"a": 10.0, "b": 30.0}[u.contender] * 1.5**u.round)
    done, _ = drive(plan("a", "b", budget=1e6), State())
    assert max(u.round for u in done) == 6


@given(st.data())
def test_resuming_after_any_line_runs_nothing_complete_twice(data: st.DataObject) -> None:
    names = ("a", "b", "c")[: data.draw(st.integers(1, 3))]
    rounds = data.draw(st.integers(1, 7) | st.none())
    recipes = {n: "q4" for n in data.draw(st.sets(st.sampled_from(names)))}
    jobs = [
        Unit(n, r, j)
        for n in names
        for r, j in ((0, "prepare"), (1, "speed"), (1, "responses"), (1, "cold"), (3, "speed"))
    ]
    failing = tuple(data.draw(st.sets(st.sampled_from(jobs), max_size=2)))
    a_plan = plan(*names, rounds=rounds, budget=60.0, recipes=recipes)
    done, journal = drive(a_plan, State(), failing)
    assert len(set(done)) == len(done)
    kept = journal[: data.draw(st.integers(0, len(journal)))]
    again, _ = drive(a_plan, State(kept), failing)
    complete = [Unit(r["contender"], r["round"], r["job"]) for r in kept if r["event"] == "ended"]
    assert complete + again == done


def test_an_interrupted_unit_counts_by_its_last_start() -> None:
    unit = Unit("a", 1, "speed")
    torn = records(unit, **{SPEED: 1.0})[:-1]
    state = State([*torn, *records(unit, **{SPEED: 20.0})])
    assert state.by_round("a", SPEED) == {1: 20.0}


def loaded(import_seconds: float, load_seconds: float, seconds: float) -> State:
    samples = {"import_seconds": import_seconds, "load_seconds": load_seconds}
    return State(records(Unit("a", 1, "speed"), seconds=seconds, **samples))


@pytest.mark.parametrize(("seconds", "times"), [(10.0, 2), (9.01, 2), (8.99, 4), (4.0, 4)])
def test_a_process_answers_more_often_where_loading_is_over_a_third_of_it(seconds: float, times: int) -> None:
    state = loaded(1.0, 2.0, seconds)
    assert schedule.repeats(state, Unit("a", 2, "speed")) == times
    assert schedule.repeats(state, Unit("a", 1, "speed")) == 2  # not known yet
    assert schedule.repeats(state, Unit("b", 2, "speed")) == 2


def test_the_note_about_fewer_rounds_comes_once_and_with_the_share() -> None:
    state = loaded(1.0, 2.0, 6.0)
    note = schedule.fewer_rounds(state, Unit("a", 2, "speed"))
    assert note is not None
    assert note["event"] == "note"
    assert "a: importing and loading take 50% of a round" in note["text"]
    assert "4 times instead of 2" in note["text"]
    state.add(note)
    assert schedule.fewer_rounds(state, Unit("a", 3, "speed")) is None


def test_there_is_no_such_note_where_loading_is_cheap() -> None:
    assert schedule.fewer_rounds(loaded(1.0, 2.0, 60.0), Unit("a", 2, "speed")) is None
    assert schedule.fewer_rounds(loaded(1.0, 2.0, 6.0), Unit("a", 1, "responses")) is None


def test_what_a_round_takes_is_what_each_contender_last_took() -> None:
    state = State([
        *records(Unit("a", 1, "speed"), seconds=100.0), *records(Unit("b", 1, "speed"), seconds=5.0),
        *records(Unit("a", 1, "responses"), seconds=1000.0), *records(Unit("a", 2, "speed"), seconds=10.0),
    ])  # fmt: skip
    assert schedule.round_seconds(state, plan("a", "b").runnable) == 15.0
    assert schedule.round_seconds(state, plan("b").runnable) == 5.0
