"""Which texts are scored, how many of them, and by whom: the schedule of the quality pass and its cache."""

import json
from pathlib import Path

import pytest

from weighin import quality
from weighin.folder import load_plan, read_records
from weighin.plan import Document
from weighin.schedule import State


def document(stratum, tokens, name="d"):
    return Document(stratum=stratum, name=name, ids=list(range(tokens)), counted=[[1, tokens]])


def lengths(chosen, stratum):
    return [len(d.ids) for d in chosen if d.stratum == stratum]


def test_each_kind_of_text_gets_its_share_and_what_one_leaves_over():
    documents = [*(document("passages", 100) for _ in range(30)), *(document("samples", 50) for _ in range(12))]
    chosen = quality.choose(documents, 2000)
    assert len(lengths(chosen, "samples")) == 12
    assert len(lengths(chosen, "passages")) == 14  # 1,000 of its own and 400 that the samples left
    assert [d.stratum for d in chosen] == ["samples"] * 12 + ["passages"] * 14


def test_no_kind_gets_fewer_documents_than_an_interval_needs():
    documents = [*(document("passages", 1000) for _ in range(30)), *(document("expected", 1000) for _ in range(30))]
    chosen = quality.choose(documents, 10)
    assert len(lengths(chosen, "passages")) == len(lengths(chosen, "expected")) == 6


def test_the_users_text_alone_is_taken_as_it_is():
    assert len(quality.choose([document("text", 10)], 4000)) == 1


CONTENDERS = ("fp32@cpu", "nf4@cpu+says=74.75.1", "int8@cpu+nan", "bf16@cpu+blind")
TEXT = "The harbour lay quiet in the morning, and the boats came in one by one with what the night had given them. " * 2
OPTIONS = {"quality": True, "rounds": 1, "prompts": ["hello", "how are you?"], "quality_tokens": 3000}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "mine.txt"
    file.write_text("\n\n".join(f"{number}. {TEXT}" for number in range(8)))
    return file


def units(folder: Path) -> list[tuple[str, str]]:
    return [(r["contender"], r["job"]) for r in read_records(folder) if r["event"] == "started"]


def test_the_reference_draws_scores_and_scores_again_and_the_others_score_once(fakes, tmp_path):
    found = fakes(*CONTENDERS, **OPTIONS)
    passes = [u for u in units(tmp_path / "out") if u[1] in ("samples", "score", "floor")]
    reference = "fake:fp32@cpu"
    assert passes == [
        (reference, "samples"),
        (reference, "score"),
        (reference, "floor"),
        ("fake:nf4@cpu+says=74.75.1", "score"),
        ("fake:int8@cpu+nan", "score"),
    ]
    by_name = {c.name: c for c in found.contenders}
    floor, worse = by_name[reference].fidelity, by_name["fake:nf4@cpu+says=74.75.1"].fidelity
    assert [s.name for s in worse.strata] == ["samples", "passages"]
    assert floor.headline.kl.value < 1e-6 < worse.headline.kl.value
    assert worse.headline.documents == 12 and worse.headline.kl.interval == "95%"
    assert by_name["fake:int8@cpu+nan"].fidelity.word == "broken"
    assert by_name["fake:int8@cpu+nan"].measurements["kl_divergence"].value is None
    blind = by_name["fake:bf16@cpu+blind"]
    assert blind.fidelity is None and blind.fidelity_reason == "this engine gives no log-probabilities"
    assert blind.status == "ok" and blind.value("kl_divergence") is None
    measured = by_name["fake:nf4@cpu+says=74.75.1"].measurements["top1_agreement"]
    assert 0 < measured.value < 1 and measured.low < measured.value < measured.high and len(measured.samples) == 12


def test_the_users_text_replaces_all_others_and_leads(fakes, text_file):
    found = fakes("fp32@cpu", "nf4@cpu", text=str(text_file), **OPTIONS)
    strata = found.contender("fake:nf4@cpu").fidelity.strata
    assert [(s.name, s.documents) for s in strata] == [("text", 8)]


def test_expected_answers_are_a_text_of_their_own(fakes):
    prompts = [{"prompt": f"question {n}", "expected": f"the answer to it is {n}"} for n in range(7)]
    found = fakes("fp32@cpu", "nf4@cpu", **{**OPTIONS, "prompts": prompts})
    strata = {s.name: s for s in found.contender("fake:nf4@cpu").fidelity.strata}
    assert list(strata) == ["expected", "samples", "passages"]
    assert strata["expected"].documents == 7
    assert strata["expected"].positions == sum(len(p["expected"]) for p in prompts)  # a token a byte: answers alone


def test_the_references_rows_and_answers_are_reused(fakes, tmp_path):
    fakes("fp32@cpu", "nf4@cpu", **OPTIONS)
    plan = load_plan(tmp_path / "out")
    rows = sorted(quality.rows_folder(plan).glob("*.f32"))
    before = [file.stat().st_mtime_ns for file in rows]
    again = fakes("fp32@cpu", "nf4@cpu", out=tmp_path / "again", **OPTIONS)
    assert rows and [file.stat().st_mtime_ns for file in rows] == before
    drawn = [r for r in read_records(tmp_path / "again") if r["event"] == "ended" and r["job"] == "samples"]
    assert drawn[0]["seconds"] == 0.0
    assert again.contender("fake:nf4@cpu").fidelity is not None


def test_a_reference_that_cannot_be_scored_says_so_and_costs_nothing_else(fakes):
    found = fakes("fp32@cpu+fail=score.error+seed=9", "nf4@cpu", **OPTIONS)
    assert [c.status for c in found.contenders] == ["ok", "ok"]
    reason = found.contender("fake:nf4@cpu").fidelity_reason
    assert reason.startswith("the reference could not be scored: RuntimeError: scripted: failed at score")


def test_a_contender_that_cannot_be_scored_keeps_its_other_figures(fakes):
    found = fakes("fp32@cpu", "nf4@cpu+fail=score.segv", **OPTIONS)
    worse = found.contender("fake:nf4@cpu+fail=score.segv")
    assert worse.status == "ok" and worse.value("decode_tokens_per_second") == pytest.approx(40)
    assert worse.fidelity is None and "SIGSEGV" in worse.fidelity_reason


def test_a_small_cap_on_disk_keeps_the_best_and_bounds_the_error(fakes, tmp_path):
    found = fakes("fp32@cpu", "nf4@cpu", reference_disk_bytes=1.5e6, **OPTIONS)
    assert 0 < found.quality.rows_kept < 272
    lead = found.contender("fake:nf4@cpu").fidelity.headline
    whole = fakes("fp32@cpu", "nf4@cpu", out=tmp_path / "whole", **OPTIONS).contender("fake:nf4@cpu").fidelity.headline
    assert lead.kl.value <= whole.kl.value + 1e-6 <= lead.kl.value + lead.kl_slack + 2e-6
    assert lead.top1_agreement == whole.top1_agreement


def test_slow_contenders_score_fewer_documents(fakes, tmp_path):
    fakes("fp32@cpu", "nf4@cpu", **OPTIONS)
    plan, state = load_plan(tmp_path / "out"), State(read_records(tmp_path / "out"))
    assert quality.affordable_tokens(plan, state) > 10_000
    for values in state._values.values():
        for key in values:
            if key.startswith("prefill"):
                values[key] = [2.0]
    assert quality.affordable_tokens(plan, state) == pytest.approx(600 * 0.3 / 1.5, abs=1)
    few = quality.chosen(plan, state)
    assert [d.stratum for d in few] == ["samples"] * 6 + ["passages"] * 6


def test_where_answers_part_the_reference_is_asked_what_it_thinks(fakes, tmp_path):
    found = fakes("fp32@cpu+says=5.6.7.1", "nf4@cpu+says=5.9.7.1", **OPTIONS)
    parted = found.contender("fake:nf4@cpu+says=5.9.7.1").divergences
    assert [(d.prompt, d.position, d.mine, d.reference) for d in parted] == [(0, 1, 9, 6), (1, 1, 9, 6)]
    assert all(d.kind in ("near_tie", "change") and len(d.reference_best) == 2 and d.margin >= 0 for d in parted)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "fake:nf4@cpu+says=5.9.7.1, prompt 1: parts at token 2" in report


def test_accuracy_is_by_what_the_prompts_expect(fakes):
    says = ".".join(str(i) for i in _ids("it is 42")) + ".1"
    prompts = [{"prompt": "6 times 7?", "expected": 42}, {"prompt": "say so", "expected": {"contains": "IT  is"}}]
    found = fakes(
        f"fp32@cpu+says={says}", "nf4@cpu+says=5.6.1", **{**OPTIONS, "response_tokens": 20, "prompts": prompts}
    )
    right, wrong = found.contenders
    assert (right.value("task_accuracy"), wrong.value("task_accuracy")) == (1.0, 0.0)
    assert wrong.accuracy_against.worse == 2 and not wrong.accuracy_against.decided
    assert wrong.accuracy_against.more_cases == 4


def _ids(text):
    from conftest import ids_of

    return ids_of(text)


def test_drawn_answers_have_three_seeds(fakes, tiny_model, tmp_path):
    import shutil

    model = tmp_path / "drawing"
    shutil.copytree(tiny_model, model)
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": 1}
    (model / "generation_config.json").write_text(json.dumps(settings))
    found = fakes("fp32@cpu", model=str(model), sampling="model", **{**OPTIONS, "quality": False})
    answers = found.contenders[0].responses
    assert [(r.prompt, r.seed) for r in answers] == [(p, s) for p in (0, 1) for s in (0, 1, 2)]
    assert len({tuple(r.ids) for r in answers if r.prompt == 0}) == 3
    assert found.workload.sampling["temperature"] == 0.7 and found.workload.sampling["top_k"] == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "model"}, "names no sampling"),
        ({"sampling": "beam"}, "--sampling takes greedy, model"),
        ({"bos": "maybe"}, "--bos takes auto, add, none"),
        ({"text": "/nowhere/file.txt"}, "/nowhere/file.txt"),
        ({"prompts": [{"prompt": "a", "expected": {"regexp": "a"}}]}, "unknown key 'regexp'"),
        ({"quality": False, "tasks": ("wikitext",)}, "--tasks belongs to quality"),
        ({"quality_tokens": 0}, "--quality-tokens 0"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(fakes, tmp_path, options, message):
    from weighin.errors import BadInput

    with pytest.raises(BadInput, match=message):
        fakes("fp32@cpu", **{**OPTIONS, **options})
    assert not (tmp_path / "out").exists()


def test_a_model_that_says_no_numbers_breaks_a_rule_about_them(fakes):
    from weighin import rules

    found = fakes("fp32@cpu", "int8@cpu+nan", **OPTIONS)
    broken = rules.check([rules.parse("kl_divergence>5")], found)
    assert len(broken) == 1 and "fake:int8@cpu+nan is broken" in broken[0]


def test_a_reference_that_says_no_numbers_judges_nobody(fakes):
    found = fakes("fp32@cpu+nan", "nf4@cpu", **OPTIONS)
    assert found.contender("fake:nf4@cpu").fidelity is None
    assert "the reference itself gave NaN" in found.contender("fake:nf4@cpu").fidelity_reason


def test_a_reference_that_is_not_installed_keeps_its_row(fakes, tmp_path):
    found = fakes("nf4@cpu", reference="fake:fp32@cpu+missing", **OPTIONS)
    assert found.contender("fake:fp32@cpu+missing").status == "not_installed"
    assert (tmp_path / "out" / "report.md").is_file()
