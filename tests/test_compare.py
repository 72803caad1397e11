"""The pipeline from end to end, with real worker processes and the fake engine's virtual time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from conftest import EOS, FINISHED, SMALL, Finished, alive, ids_of, make_model
from filelock import FileLock

import weighin
from weighin import intake, measurements
from weighin.compare import PLAN, Silent, exit_code, rebuild, resume, start
from weighin.errors import BadInput, WeighinError
from weighin.journal import NAME, read
from weighin.measurements import Comparison, ContenderResult

Fakes = Callable[..., Comparison]
BUILT = ("comparison.json", "report.md", "report.csv")
RENDERED = 25  # tokens of "hello" in the tiny model's chat template


def units(folder: Path, event: str) -> Counter[tuple[str, int, str]]:
    return Counter((r["contender"], r["round"], r["job"]) for r in read(folder) if r["event"] == event)


def values(result: ContenderResult, *keys: str) -> list[float | None]:
    return [result.value(key) for key in keys]


# ---- figures, exactly as scripted


def test_every_figure_is_the_scripted_one(fakes: Fakes) -> None:
    found = fakes("fp32@cpu", rounds=2, prompt_tokens=(16, 32)).contenders[0]
    assert (found.status, found.phase, found.reason, found.rounds) == ("ok", None, None, 2)
    prefill, token, n = 0.001 * RENDERED, 0.05, 4
    expected = {
        "import_seconds": 0.5,
        "load_seconds": 1.0,
        "load_cold_seconds": 1.0,
        "ready_seconds": 1.5 + prefill + token,
        "ready_cold_seconds": 1.5 + prefill + token,
        "first_answer_seconds": prefill + n * token,
        "answer_seconds": prefill + n * token,
        "first_token_seconds": prefill + token,
        "prefill_tokens_per_second": RENDERED / (prefill + token),
        "decode_tokens_per_second": 20.0,
        "decode_tokens_per_second@16": 20.0,
        "prefill_tokens_per_second@32": 32 / (0.032 + token),
    }
    assert {key: found.value(key) for key in expected} == pytest.approx(expected, rel=1e-6)
    assert found.measurements["decode_tokens_per_second"].interval == "range"
    assert found.value("peak_vram_bytes") is None
    assert found.measurements["peak_vram_bytes"].reason == "it uses no GPU"
    assert found.value("loaded_bytes") is None


def test_every_raw_sample_is_kept_with_its_process(fakes: Fakes) -> None:
    found = fakes("fp32@cpu", rounds=3).contenders[0].measurements["decode_tokens_per_second"]
    assert Counter((s.round, s.job) for s in found.samples) == {(1, "speed"): 2, (2, "speed"): 4, (3, "speed"): 4}
    assert found.by_round() == pytest.approx({1: 20.0, 2: 20.0, 3: 20.0})


def test_a_slow_first_call_does_not_slow_the_steady_figures(fakes: Fakes) -> None:
    found = fakes("fp32@cpu+script=slow-first").contenders[0]
    first, steady, decode = values(found, "first_answer_seconds", "answer_seconds", "decode_tokens_per_second")
    assert first == pytest.approx(0.001 * RENDERED + 4 * 0.05 * 5)
    assert steady == pytest.approx(0.001 * RENDERED + 4 * 0.05)
    assert decode == pytest.approx(20.0)


def test_the_process_is_the_unit_of_repetition(fakes: Fakes) -> None:
    found = fakes("fp32@cpu+script=bimodal", rounds=4).contenders[0].measurements["decode_tokens_per_second"]
    assert (found.value, found.low, found.high) == pytest.approx((15.0, 10.0, 20.0))
    assert found.interval == "range"


def test_six_rounds_give_a_95_percent_interval(fakes: Fakes) -> None:
    found = fakes("fp32@cpu+spread=0.1", rounds=6).contenders[0].measurements["decode_tokens_per_second"]
    per_round = sorted(found.by_round().values())
    assert found.interval == "95%"
    assert found.low is not None and found.high is not None and found.value is not None
    assert per_round[0] < found.low < found.value < found.high < per_round[-1]


def test_a_ratio_is_taken_round_by_round(fakes: Fakes) -> None:
    comparison = fakes("fp32@cpu+script=drifting", "nf4@cpu+script=drifting", rounds=3)
    ratio = comparison.ratio("decode_tokens_per_second", *(c.name for c in comparison.contenders[::-1]))
    assert ratio is not None
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_process_answers_more_often_where_loading_is_most_of_it_and_a_note_says_so(fakes: Fakes) -> None:
    comparison = fakes("fp32@cpu+load=100", rounds=2)
    assert "answers 4 times instead of 2" in " ".join(comparison.notes)
    calls = Counter((c.round, c.call) for c in comparison.contenders[0].calls)
    assert (calls[1, "steady"], calls[2, "steady"]) == (2, 4)


def test_a_figure_that_cannot_be_had_is_null_and_never_zero(fakes: Fakes) -> None:
    found = fakes("fp32@cpu+token=0").contenders[0]
    decode = found.measurements["decode_tokens_per_second"]
    assert (decode.value, decode.low, decode.high, decode.interval, decode.samples) == (None, None, None, None, [])
    assert decode.reason


# ---- what it answers


def test_an_answer_stops_where_the_model_stops(fakes: Fakes) -> None:
    said = ".".join(map(str, [*ids_of("hé!"), EOS]))
    found = fakes(f"fp32@cpu+says={said}", prompts=["hello", "again"], response_tokens=20).contenders[0]
    assert [(r.prompt, r.text, r.finish, len(r.ids)) for r in found.responses] == [
        (0, "hé!", "stop", 5),
        (1, "hé!", "stop", 5),
    ]
    assert found.first_answer == "hé!"  # four tokens were forced out of it; a reader sees it up to its end


def test_an_answer_that_does_not_stop_is_cut_at_the_cap(fakes: Fakes) -> None:
    found = fakes(f"fp32@cpu+says={ids_of('x')[0]}", response_tokens=9).contenders[0]
    assert [(r.text, r.finish) for r in found.responses] == [("x" * 9, "length")]
    assert found.first_answer == "xxxx"


def test_a_thinking_part_is_kept_apart(fakes: Fakes, tmp_path: Path) -> None:
    model = make_model(tmp_path / "thinker", thinking=True)
    said = ".".join(map(str, [258, *ids_of("hm"), 259, *ids_of("so"), EOS]))
    found = fakes(f"fp32@cpu+says={said}", model=str(model), response_tokens=20).contenders[0].responses[0]
    assert (found.thinking, found.text, found.whole) == ("hm", "so", "hmso")


def test_messages_and_what_is_expected_come_through(fakes: Fakes, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}], "expected": {"json": {"a": [1]}}}\n')
    workload = fakes("fp32@cpu", prompts=str(file), system="be brief").workload
    assert workload.prompts[0].expected == {"json": {"a": [1]}}
    assert workload.rendered[0].text == "<s>[system] be brief</s>[user] hi</s>[assistant]"
    assert workload.stop_ids == [EOS]


# ---- failure is a result


@pytest.mark.parametrize(
    ("failing", "status", "phase"),
    [
        ("nf4@cpu+fail=load.oom", "out_of_memory", "load"),
        ("nf4@cpu+fail=token2.error", "failed", "first_answer"),
        ("nf4@cpu+fail=import.segv", "failed", "import"),
        ("nf4@cpu+fail=load.hang", "timeout", "load"),
        ("nf4@cpu+missing", "not_installed", "plan"),
        ("nf4@cuda", "cannot_run", "plan"),
    ],
)
def test_one_that_fails_keeps_its_row_and_the_others_run(fakes: Fakes, failing: str, status: str, phase: str) -> None:
    comparison = fakes(failing, "fp32@cpu", limits={"load": 0.4})
    bad, good = comparison.contenders
    assert (bad.status, bad.phase) == (status, phase)
    assert bad.reason
    assert (bad.rounds, bad.responses, bad.first_answer) == (0, [], None)
    assert all(m.value is None for k, m in bad.measurements.items() if "token" in k or "answer" in k)
    assert good.status == "ok"
    assert exit_code(comparison) == 4
    assert comparison.complete


def test_a_weight_that_does_not_fit_is_not_started(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "HEADROOM_BYTES", 1e18)
    found = fakes("fp32@cpu").contenders[0]
    assert found.status == "cannot_run"
    assert "its weights need" in (found.reason or "")
    assert "--force" in (found.remedy or "")


def test_force_starts_it_all_the_same(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "HEADROOM_BYTES", 1e18)
    assert fakes("fp32@cpu", force=True).contenders[0].status == "ok"


@pytest.mark.parametrize(
    ("contenders", "code"),
    [
        (("fp32@cpu",), 0),
        (("fp32@cpu+fail=load.error",), 1),
        (("fp32@cuda",), 1),
        (("fp32@cpu", "nf4@cpu+fail=load.error"), 4),
        (("fp32@cpu", "nf4@cpu+missing"), 4),
    ],
)
def test_the_exit_code_says_whether_all_some_or_none_ran(fakes: Fakes, contenders: tuple[str, ...], code: int) -> None:
    assert exit_code(fakes(*contenders)) == code


def test_what_nobody_asked_for_by_name_does_not_count(finished: Finished) -> None:
    unnamed = [msgspec.structs.replace(c, named=False) for c in finished.comparison.contenders]
    tried = [c for c in unnamed if c.status in ("ok", "cannot_run")]
    assert exit_code(msgspec.structs.replace(finished.comparison, contenders=tried)) == 0
    assert exit_code(msgspec.structs.replace(finished.comparison, contenders=unnamed)) == 4
    assert exit_code(msgspec.structs.replace(finished.comparison, contenders=[])) == 1


def test_two_spellings_of_one_contender_are_one(fakes: Fakes) -> None:
    comparison = fakes("fp32@cpu+seed=1+token=1", "fp32@cpu+token=1+seed=1", "fp32@cpu+seed=1+token=1")
    assert [c.name for c in comparison.contenders] == ["fake:fp32@cpu+seed=1+token=1"]


def test_the_reference_is_the_named_one_else_full_precision(fakes: Fakes, tmp_path: Path) -> None:
    assert fakes("nf4@cpu", "fp32@cpu").reference == "fake:fp32@cpu"
    named = fakes("nf4@cpu", reference="fake:bf16@cpu", out=tmp_path / "two")
    assert (named.reference, named.reference_note) == ("fake:bf16@cpu", "as asked")
    assert [c.name for c in named.contenders] == ["fake:nf4@cpu", "fake:bf16@cpu"]
    none = fakes("nf4@cpu", out=tmp_path / "three")
    assert (none.reference, none.reference_note) == (None, "no contender here runs in full precision")


# ---- the folder


def test_a_folder_holds_all_of_it(finished: Finished) -> None:
    names = {p.name for p in finished.folder.iterdir()}
    assert names == {PLAN, NAME, *BUILT, "logs", ".lock"}
    assert len(list((finished.folder / "logs").iterdir())) == 3  # one for each that was started


def test_the_saved_comparison_is_the_one_given_back(finished: Finished) -> None:
    saved = msgspec.json.decode((finished.folder / "comparison.json").read_bytes(), type=Comparison)
    assert saved == finished.comparison
    assert [c.name for c in saved.contenders] == [f"fake:{name}" for name in FINISHED]
    assert saved.ids_hash == saved.workload.ids_hash


def test_the_saved_comparison_keeps_to_its_schema(finished: Finished) -> None:
    schema = msgspec.json.schema(Comparison)
    published = Path(measurements.__file__).with_name("comparison.schema.json")
    if published.exists():
        found = json.loads(published.read_text())
        ours = {"$schema", "$id", "title", "description"}
        assert {k: v for k, v in found.items() if k not in ours} == {k: v for k, v in schema.items() if k not in ours}
        schema = found
    jsonschema.Draft202012Validator(schema).validate(json.loads((finished.folder / "comparison.json").read_text()))


def test_all_reports_are_rebuilt_from_plan_and_journal_alone(finished: Finished, tmp_path: Path) -> None:
    from weighin import report

    for name in (PLAN, NAME):
        shutil.copy(finished.folder / name, tmp_path / name)
    report.write(rebuild(tmp_path), tmp_path)
    for name in BUILT:
        assert (tmp_path / name).read_bytes() == (finished.folder / name).read_bytes(), name


def test_a_model_may_be_gone_when_a_report_is_rebuilt(finished: Finished, tmp_path: Path, tiny_model: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "copy")
    plan = tmp_path / "copy" / PLAN
    plan.write_text(plan.read_text().replace(str(tiny_model), "/gone/for/good"))
    assert rebuild(tmp_path / "copy").contenders[0].status == "ok"


@pytest.mark.parametrize("content", [b"{}", b"nonsense", b""])
def test_a_plan_that_cannot_be_read_is_bad_input(finished: Finished, tmp_path: Path, content: bytes) -> None:
    (tmp_path / PLAN).write_bytes(content)
    with pytest.raises(BadInput, match=r"plan\.json cannot be read"):
        rebuild(tmp_path)


def test_a_plan_that_is_not_utf8_is_bad_input(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / PLAN).write_bytes((finished.folder / PLAN).read_bytes().replace(b"tiny", b"t\xffny"))
    with pytest.raises(BadInput):
        rebuild(tmp_path)


def test_a_record_without_its_fields_is_a_damaged_journal(finished: Finished, tmp_path: Path) -> None:
    shutil.copy(finished.folder / PLAN, tmp_path)
    (tmp_path / NAME).write_bytes(b"{}\n" + (finished.folder / NAME).read_bytes())
    with pytest.raises(WeighinError, match="line 1"):
        rebuild(tmp_path)


def test_a_folder_that_holds_a_comparison_is_refused(fakes: Fakes, finished: Finished) -> None:
    before = (finished.folder / PLAN).read_bytes()
    with pytest.raises(BadInput, match=r"already holds a comparison.*--resume"):
        fakes("fp32@cpu", out=finished.folder)
    assert (finished.folder / PLAN).read_bytes() == before


def test_a_folder_that_cannot_be_written_is_refused(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be written"):
        fakes("fp32@cpu", out=tmp_path / "file")
    with pytest.raises(BadInput, match="cannot be written"):
        fakes("fp32@cpu", out=tmp_path / "file" / "below")


def test_a_read_only_folder_is_refused(fakes: Fakes, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(BadInput, match="cannot be written"):
        fakes("fp32@cpu", out=closed / "below")


def test_two_runs_do_not_share_a_folder(fakes: Fakes, tmp_path: Path, finished: Finished) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(BadInput, match="in use by another weighin"):
        fakes("fp32@cpu")
    assert not (tmp_path / "out" / PLAN).exists()
    with FileLock(finished.folder / ".lock"), pytest.raises(BadInput, match="in use by another weighin"):
        resume(finished.folder, Silent())


def test_a_comparison_shows_itself(finished: Finished) -> None:
    assert "fake:fp32@cpu" in str(finished.comparison)
    assert "20.0 tokens/s" in str(finished.comparison)
    assert finished.comparison._repr_html_().startswith("<h3>How to run tiny</h3><table>")
    frame = finished.comparison.to_pandas()
    assert frame.loc["fake:fp32@cpu", "decode_tokens_per_second"] == pytest.approx(20.0)
    assert frame.loc["fake:int8@cuda", "status"] == "cannot_run"


def test_the_default_folder_is_named_after_the_model(
    quick_prompts: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weighin.compare(str(tiny_model), ["fake:fp32@cpu"], **SMALL)
    (made,) = (tmp_path / "weighin-results").iterdir()
    assert made.name.startswith("tiny-20")


# ---- the Python form


def test_prompts_may_be_given_as_the_file_has_them(fakes: Fakes) -> None:
    messages = [{"role": "user", "content": "hi"}]
    workload = fakes("fp32@cpu", prompts=["hello", {"messages": messages, "expected": 5}]).workload
    assert [p.shown for p in workload.prompts] == ["hello", "hi"]
    assert workload.prompts[1].expected == 5


@pytest.mark.parametrize("given", [[], [""], [" "], [{"messages": []}], [{}]])
def test_an_empty_prompt_is_bad_input(fakes: Fakes, tmp_path: Path, given: Any) -> None:
    with pytest.raises(BadInput, match=r"prompts is empty|^prompts\[0\]"):
        fakes("fp32@cpu", prompts=given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [[{"prompt": "hi"}], Path("p.txt")])
def test_prompts_in_python_are_what_they_are_in_a_file(fakes: Fakes, tmp_path: Path, given: Any) -> None:
    if isinstance(given, Path):
        given = tmp_path / given
        given.write_text("hi")
    assert [p.shown for p in fakes("fp32@cpu", prompts=given).workload.prompts] == ["hi"]


@pytest.mark.parametrize("given", [[{"text": 5}], [5], [{"messages": [{"role": "user"}]}]])
def test_prompts_in_python_that_are_none_are_bad_input(fakes: Fakes, given: Any) -> None:
    with pytest.raises(BadInput, match="prompt"):
        fakes("fp32@cpu", prompts=given)


# ---- resume


@pytest.mark.parametrize("lines", [0, 1, 2, 15, 40, 90, 10_000])
def test_a_run_that_lost_its_last_lines_is_finished_without_doing_anything_twice(
    quick_prompts: None, finished: Finished, tmp_path: Path, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = tmp_path / "copy"
    shutil.copytree(finished.folder, folder)
    journal = folder / NAME
    whole = journal.read_bytes().splitlines(keepends=True)
    kept = whole[: max(0, len(whole) - lines)]
    journal.write_bytes(b"".join(kept) + b'{"event":"sam')  # and a torn one
    complete = units(folder, "ended")
    found = resume(folder, Silent())
    assert found.complete
    again = units(folder, "ended")
    assert set(again.values()) == {1}
    assert again == units(finished.folder, "ended")
    assert all(units(folder, "started")[unit] == 1 for unit in complete)
    assert journal.read_bytes().startswith(b"".join(kept))
    for one, other in zip(found.contenders, finished.comparison.contenders, strict=True):
        assert (one.status, one.reason, one.responses) == (other.status, other.reason, other.responses)
        assert one.value("decode_tokens_per_second") == pytest.approx(other.value("decode_tokens_per_second"))
        assert len(one.measurements["answer_seconds"].samples) == len(other.measurements["answer_seconds"].samples)


def test_what_was_answered_before_is_asked_with_the_same_ids(quick_prompts: None, fakes: Fakes, tmp_path: Path) -> None:
    """The ids are those of the plan, whatever the template would give today."""
    fakes("fp32@cpu")
    plan = json.loads((tmp_path / "out" / PLAN).read_text())
    plan["rounds"] = 2
    plan["workload"]["rendered"][0]["ids"] = [7] * 100
    (tmp_path / "out" / PLAN).write_text(json.dumps(plan))
    calls = resume(tmp_path / "out", Silent()).contenders[0].calls
    assert {c.prompt_tokens for c in calls if c.round == 2} == {100}


@pytest.mark.parametrize("change", ["weights", "config", "tokenizer"])
def test_resume_is_refused_when_the_model_has_changed(fakes: Fakes, tmp_path: Path, change: str) -> None:
    model = make_model(tmp_path / "model")
    fakes("fp32@cpu", model=str(model))
    if change == "weights":
        data = bytearray((model / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (model / "model.safetensors").write_bytes(data)
    elif change == "config":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    else:
        (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text().replace('"Ġ": ', '"Ġ":  '))
    with pytest.raises(BadInput, match=r"cannot be resumed: the model at .* has changed.*Start a new comparison"):
        resume(tmp_path / "out", Silent())


def test_resume_is_refused_on_another_machine_and_with_other_versions(finished: Finished, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished.folder, folder)
    plan = json.loads((folder / PLAN).read_text())
    plan["machine"]["cpu"] = "Another CPU"
    for entry in plan["entries"]:
        entry["versions"] = {"torch": "1.0"}
    (folder / PLAN).write_text(json.dumps(plan))
    with pytest.raises(BadInput, match=r"the machine is another.*torch was 1\.0 and is missing now"):
        resume(folder, Silent())


def test_a_run_with_threads_of_its_own_can_be_resumed(fakes: Fakes, tmp_path: Path) -> None:
    other = (os.cpu_count() or 1) + 1
    fakes("fp32@cpu", threads=other)
    assert resume(tmp_path / "out", Silent()).machine.threads == other


def test_a_failure_is_a_result_that_resume_does_not_repeat(fakes: Fakes, tmp_path: Path) -> None:
    failed = fakes("fp32@cpu+fail=load.error.2", rounds=2).contenders[0]
    remedy = next(d.remedy for d in failed.doubts if d.type == "failed_round")
    assert "new comparison" in remedy
    resume(tmp_path / "out", Silent())
    assert units(tmp_path / "out", "started")["fake:fp32@cpu+fail=load.error.2", 2, "speed"] == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_in_the_middle_can_be_finished(
    quick_prompts: None, tiny_model: Path, tmp_path: Path, mark: str, how: signal.Signals
) -> None:
    folder = tmp_path / "out"
    name = "fake:fp32@cpu+load=0.5+real+token=0.001"
    plan = intake.make_plan(intake.Request(model=str(tiny_model), contenders=(name,), **SMALL), print)
    folder.mkdir()
    (folder / PLAN).write_bytes(msgspec.json.encode(plan))  # so that the process need not make it
    process = subprocess.Popen(
        [sys.executable, "-m", "weighin", "compare", "--resume", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(1200):
        seen = list(read(folder))
        if any(r["event"] == "phase" and r["job"] == "responses" and r["phase"] == "load" for r in seen):
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(how)
    _, said = process.communicate(timeout=30)
    assert units(folder, "ended") == {(name, 1, "speed"): 1}
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert f"finish it with: weighin compare --resume {folder}" in said
        assert alive(mark) == []
        saved = msgspec.json.decode((folder / "comparison.json").read_bytes(), type=Comparison)
        assert not saved.complete
        assert saved.contenders[0].status == "not_finished"
        assert "The run is not complete" in (folder / "report.md").read_text()
    else:
        assert process.returncode == -signal.SIGKILL
        for _ in range(100):  # the worker ends with its parent, so that the next one is not timed beside it
            if not alive(mark):
                break
            time.sleep(0.05)
        assert alive(mark) == []
    found = resume(folder, Silent())
    assert found.complete
    assert found.contenders[0].status == "ok"
    assert units(folder, "started") == {(name, 1, "speed"): 1, (name, 1, "responses"): 2, (name, 1, "cold"): 1}
    assert units(folder, "ended") == {(name, 1, job): 1 for job in ("speed", "responses", "cold")}
    assert alive(mark) == []


def test_what_a_person_sees_while_it_runs(quick_prompts: None, tiny_model: Path, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Notes(Silent):
        def planned(self, plan: Any, folder: Path) -> None:
            seen.append("planned")

        def began(self, unit: Any, state: Any) -> None:
            seen.append(tuple(unit)[1:])

        def event(self, unit: Any, event: dict[str, Any], state: Any) -> None:
            assert list(read(tmp_path / "out"))[-1]["event"] == event["event"]  # on disk before it is shown

        def finished(self) -> None:
            seen.append("finished")

    request = intake.Request(model=str(tiny_model), contenders=("fake:fp32@cpu",), **SMALL)
    start(intake.make_plan(request, print), tmp_path / "out", Notes())
    assert seen == ["planned", (1, "speed"), (1, "responses"), (1, "cold"), "finished"]
