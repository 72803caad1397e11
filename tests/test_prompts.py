"""Prompts become ids: files, templates, and what a tokenizer or template of a stranger may do."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import BOS, END_THINK, EOS, THINK, VOCABULARY, ids_of, make_model
from hypothesis import given
from hypothesis import strategies as st

from weighin import prompts
from weighin.errors import BadInput
from weighin.prompts import decode, read_prompts


def saved(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def refused(file: Path) -> str:
    with pytest.raises(BadInput) as error:
        read_prompts(file)
    return str(error.value)


# ---- files


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = saved(tmp_path, "\ufeffhello there\r\n\n   \n  what is this? \nünï 💥", "prompts.txt")
    assert read_prompts(file) == [{"text": "hello there"}, {"text": "what is this?"}, {"text": "ünï 💥"}]


def test_a_line_of_text_may_look_like_json(tmp_path: Path) -> None:
    assert read_prompts(saved(tmp_path, '{"prompt": "x"}\n', "prompts.txt")) == [{"text": '{"prompt": "x"}'}]


def test_jsonl_takes_prompts_messages_and_what_is_expected(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    lines = [{"prompt": "two\nlines", "expected": {"a": 1}}, {"messages": messages, "other": 1}]
    assert read_prompts(saved(tmp_path, "\n".join(map(json.dumps, lines)))) == [
        {"text": "two\nlines", "messages": None, "expected": {"a": 1}},
        {"text": None, "messages": messages, "expected": None},
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{oops", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not an object"),
        ("null", "is not an object"),
        ("{}", "needs either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "needs either 'prompt' or 'messages'"),
        ('{"prompt": " "}', "must be a text that is not empty"),
        ('{"prompt": 5}', "must be a text"),
        ('{"messages": []}', "must be a list of objects"),
        ('{"messages": "hello"}', "must be a list of objects"),
        ('{"messages": [{"role": "user"}]}', "with 'role' and 'content'"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "both texts"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, words: str) -> None:
    message = refused(saved(tmp_path, f'{{"prompt": "fine"}}\n\n{line}\n'))
    assert "prompts.jsonl, line 3" in message
    assert words in message


@pytest.mark.parametrize("content", ["", "\n \n\t\n", "\ufeff"])
@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_file_without_a_prompt(tmp_path: Path, name: str, content: str) -> None:
    assert "holds no prompt" in refused(saved(tmp_path, content, name))


def test_a_file_that_is_not_utf8_says_where(tmp_path: Path) -> None:
    message = refused(saved(tmp_path, b"hello\n\xff\xfe", "prompts.txt"))
    assert "not UTF-8" in message
    assert "byte 6" in message


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    assert "There is no prompt file" in refused(tmp_path / "none.txt")
    assert "There is no prompt file" in refused(tmp_path)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "big.txt"
    with file.open("wb") as stream:
        os.truncate(stream.fileno(), 65 * 2**20)
    assert "larger than 64 MiB" in refused(file)


@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda t: t.encode(errors="replace")))
@pytest.mark.parametrize("name", ["f.txt", "f.jsonl"])
def test_any_file_gives_prompts_or_bad_input(tmp_path_factory: pytest.TempPathFactory, name: str, data: bytes) -> None:
    file = saved(tmp_path_factory.getbasetemp(), data, name)
    try:
        found = read_prompts(file)
    except BadInput as error:
        assert str(file) in str(error)
    else:
        assert found
        assert all(p.get("text") or p.get("messages") for p in found)


@pytest.mark.parametrize("line", ['{"prompt": "a\\ud800"}', '{"prompt": "a", "expected": "\\ud800"}'])
def test_half_a_character_is_bad_input_that_names_its_line(tmp_path: Path, line: str) -> None:
    assert "line 1" in refused(saved(tmp_path, line))


# ---- templates


def render(model: Path, *texts: str, **options: Any) -> dict[str, Any]:
    asked = options.pop("prompts", None) or [{"text": t} for t in texts or ("hello",)]
    arguments = {"template": "auto", "system": None, "lengths": [], "vocabulary": VOCABULARY, **options}
    return prompts.render(str(model), asked, **arguments)


def cannot(model: Path, *texts: str, **options: Any) -> str:
    with pytest.raises(BadInput) as error:
        render(model, *texts, **options)
    return str(error.value)


def test_a_model_with_a_chat_template_gets_it_without_asking(quick_prompts: None, tiny_model: Path) -> None:
    found = render(tiny_model, "hello", "bye", system="be brief")
    assert found["template"] == "chat"
    assert found["template_note"] == "the model's own chat template"
    assert found["rendered"][0]["text"] == "<s>[system] be brief</s>[user] hello</s>[assistant]"
    assert found["rendered"][1]["ids"] == [
        BOS, *ids_of("[system] be brief"), EOS, *ids_of("[user] bye"), EOS, *ids_of("[assistant]"),
    ]  # fmt: skip
    assert found["eos_ids"] == [EOS]
    assert found["thinking"] is None


def test_a_conversation_is_rendered_whole(quick_prompts: None, tiny_model: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    asked = [{"messages": [{"role": r, "content": c} for r, c in turns]}]
    assert (
        render(tiny_model, prompts=asked)["rendered"][0]["text"]
        == "<s>[user] a</s>[assistant] b</s>[user] c</s>[assistant]"
    )


def test_raw_is_the_text_with_what_the_tokenizer_adds(quick_prompts: None, tiny_model: Path) -> None:
    found = render(tiny_model, "hello 💥", template="raw")
    assert found["template"] == "raw"
    assert found["rendered"] == [{"text": "hello 💥", "ids": [BOS, *ids_of("hello 💥")], "thinking_open": False}]


def test_a_model_without_a_chat_template_gets_raw_text(quick_prompts: None, tmp_path: Path) -> None:
    model = make_model(tmp_path / "base", template=None)
    found = render(model)
    assert found["template"] == "raw"
    assert "has no chat template" in found["template_note"]
    assert "has no chat template" in cannot(model, template="chat")
    assert "has no chat template" in cannot(model, prompts=[{"messages": [{"role": "user", "content": "x"}]}])


def test_raw_takes_neither_messages_nor_a_system_text(quick_prompts: None, tiny_model: Path) -> None:
    asked = [{"messages": [{"role": "user", "content": "x"}]}]
    assert "takes plain prompts, not messages" in cannot(tiny_model, template="raw", prompts=asked)
    assert "--system needs a chat template" in cannot(tiny_model, template="raw", system="be brief")


def test_a_template_file_is_used_in_place_of_the_models(quick_prompts: None, tiny_model: Path, tmp_path: Path) -> None:
    file = saved(tmp_path, "{{ bos_token }}{{ messages[-1].content | upper }}!", "mine.jinja")
    found = render(tiny_model, template=str(file))
    assert found["template"] == "file"
    assert found["rendered"] == [{"text": "<s>HELLO!", "ids": [BOS, *ids_of("HELLO!")], "thinking_open": False}]


def test_a_template_file_that_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    assert "there is no file" in cannot(tiny_model, template=str(tmp_path / "none.jinja"))
    assert "there is no file" in cannot(tiny_model, template=str(tmp_path))


def test_a_template_file_that_is_not_utf8(tiny_model: Path, tmp_path: Path) -> None:
    assert "UTF-8" in cannot(tiny_model, template=str(saved(tmp_path, b"\xff\xfe{{ messages }}", "mine.jinja")))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system please') }}", ["no system please", "Roles given: system, user"]),
        ("{% if %}", ["refuses this conversation"]),
        ("{{ messages[7].content }}", ["refuses this conversation"]),
        ("{{ ''.__class__.__mro__ }}", ["refuses this conversation"]),
        ("{{ 1 / 0 }}", ["division by zero"]),
        ("", ["gives no token at all"]),
        ("<s><s>{{ messages[0].content }}", ["begin token twice", "Take it out of the template"]),
    ],
)
def test_a_template_that_does_not_work_is_bad_input(
    quick_prompts: None, tiny_model: Path, tmp_path: Path, template: str, words: list[str]
) -> None:
    message = cannot(tiny_model, template=str(saved(tmp_path, template, "bad.jinja")), system="be brief")
    for word in words:
        assert word in message


def test_a_raw_prompt_that_brings_its_own_begin_token(quick_prompts: None, tiny_model: Path) -> None:
    assert "begin token twice" in cannot(tiny_model, "<s>hello", template="raw")


def test_a_template_that_loops_for_ever_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    model = make_model(tmp_path / "loop", template=loop)
    monkeypatch.setattr(prompts, "SECONDS", 2.5)
    message = cannot(model)
    assert "did not finish in 2.5 s; it was stopped" in message
    assert "--template raw" in message


# ---- ids


@pytest.mark.parametrize("template", ["chat", "raw"])
def test_prompts_of_a_length_have_exactly_that_length(quick_prompts: None, tiny_model: Path, template: str) -> None:
    wanted = [1, 7, 512, 100_000]
    found = render(tiny_model, template=template, lengths=wanted)["lengths"]
    assert {k: len(v) for k, v in found.items()} == {str(n): n for n in wanted}
    assert all(ids[0] == BOS and BOS not in ids[1:] for ids in found.values())
    assert len(set(found["512"])) > 20  # a text, not one token again and again


def test_a_length_has_a_begin_token_only_where_the_prompts_have_one(
    quick_prompts: None, tiny_model: Path, tmp_path: Path
) -> None:
    file = saved(tmp_path, "{{ messages[0].content }}", "plain.jinja")
    assert BOS not in render(tiny_model, template=str(file), lengths=[64])["lengths"]["64"]


def test_a_tokenizer_of_another_model_is_found_by_its_ids(quick_prompts: None, tiny_model: Path) -> None:
    message = cannot(tiny_model, "zebra", vocabulary=80)
    assert "only 80 embeddings" in message
    assert "belongs to another model" in message


def test_ids_of_the_lengths_must_be_in_the_vocabulary_too(quick_prompts: None, tiny_model: Path) -> None:
    assert "embeddings" in cannot(tiny_model, "hello", template="raw", vocabulary=100, lengths=[64])


def test_an_architecture_that_transformers_does_not_know(quick_prompts: None, tmp_path: Path) -> None:
    message = cannot(make_model(tmp_path / "new", model_type="llamma", architectures=["LlammaForCausalLM"]))
    assert "knows no causal language model of the type 'llamma'" in message
    assert "LlammaForCausalLM" in message
    assert "Did the config mean 'llama'?" in message


@pytest.mark.parametrize("damage", ["gone", "broken"])
def test_a_tokenizer_that_does_not_load_says_what_the_folder_needs(
    quick_prompts: None, tmp_path: Path, damage: str
) -> None:
    model = make_model(tmp_path / "model")
    if damage == "gone":
        (model / "tokenizer.json").unlink()
    else:
        (model / "tokenizer.json").write_text('{"version": "1.0"}')
    message = cannot(model)
    assert str(model) in message
    assert "needs tokenizer.json" in message


# ---- texts of ids


def test_decoding_leaves_out_special_tokens_only(quick_prompts: None, tiny_model: Path) -> None:
    answers = [[BOS, *ids_of("héllo 💥\n<s"), EOS], [EOS], []]
    assert decode(str(tiny_model), answers, [False] * len(answers), None, False) == [
        {"text": "héllo 💥\n<s", "thinking": None, "whole": "héllo 💥\n<s"},
        {"text": "", "thinking": None, "whole": ""},
        {"text": "", "thinking": None, "whole": ""},
    ]


def test_the_thinking_part_is_told_apart(quick_prompts: None, tmp_path: Path) -> None:
    model = make_model(tmp_path / "thinker", thinking=True)
    marks = render(model)["thinking"]
    assert marks == ["<think>", "</think>"]
    hm, so = ids_of("hm"), ids_of("so")
    answers = [[THINK, *hm, END_THINK, *so, EOS], [*hm, END_THINK, *so], [THINK, *hm], so, [END_THINK]]
    found = decode(str(model), answers, [False] * len(answers), marks, False)
    assert [(f["thinking"], f["text"]) for f in found] == [
        ("hm", "so"),
        ("hm", "so"),  # the template had opened it
        ("hm", ""),  # cut off while still thinking
        (None, "so"),
        ("", ""),
    ]
    assert found[0]["whole"] == "hmso"


OPENING = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "opened"),
    [
        (OPENING, True),
        (OPENING.replace("<think>", "<think>\n"), True),
        (OPENING.replace("<think>", "<think>\n</think>"), False),  # thinking is switched off
        (OPENING.replace("<think>", "") + "{# <think> #}", False),
    ],
)
def test_a_prompt_that_ends_inside_a_thinking_part_is_marked(
    quick_prompts: None, tmp_path: Path, template: str, opened: bool
) -> None:
    found = render(make_model(tmp_path / "thinker", template=template, thinking=True), "hello", "bye")
    assert found["thinking"] == ["<think>", "</think>"]
    assert [entry["thinking_open"] for entry in found["rendered"]] == [opened, opened]


def test_an_answer_to_an_opened_thinking_part_without_its_end_is_all_thinking(
    quick_prompts: None, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "thinker", template=OPENING, thinking=True)
    hm, so = ids_of("hm"), ids_of("so")
    answers = [hm, hm, [*hm, END_THINK, *so, EOS], [THINK, *hm]]
    found = decode(str(model), answers, [True, False, True, True], ["<think>", "</think>"], False)
    assert [(f["thinking"], f["text"], f["whole"]) for f in found] == [
        ("hm", "", "hm"),  # cut off before it came to an answer
        (None, "hm", "hm"),
        ("hm", "so", "hmso"),
        ("hm", "", "hm"),
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "AutoModelForCausalLM"),
        ({"model_type": "llava"}, "AutoModelForImageTextToText"),
        ({"model_type": "unheard-of", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "AutoModelForCausalLM"),
    ],
)
def test_the_class_that_loads_the_model(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    assert prompts._auto_class(make_model(tmp_path / "model", **config)) == expected


def test_the_class_comes_with_the_answer(quick_prompts: None, tiny_model: Path) -> None:
    assert render(tiny_model)["auto_class"] == "AutoModelForCausalLM"


def test_the_real_child_answers_and_never_imports_torch(tiny_model: Path) -> None:
    """Most tests keep one child for all; this one starts it as prompts.py does."""
    python, *rest = prompts._command()
    question = {"action": "decode", "path": str(tiny_model), "answers": [ids_of("ok")], "opened": [False],
                "thinking": None}  # fmt: skip
    done = subprocess.run(
        [python, "-X", "importtime", *rest],
        input=json.dumps({**question, "remote_code": False}), capture_output=True, text=True, check=True, timeout=120,
        env=prompts._child_environment(),
    )  # fmt: skip
    assert json.loads(done.stdout)["texts"][0]["text"] == "ok"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "transformers" in imported
    assert not any(name.partition(".")[0] == "torch" for name in imported)


def test_what_a_library_prints_does_not_spoil_the_answer(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = prompts._command()
    noisy = "import weighin.prompts as p; f = p._render; p._render = lambda q: (print('noise'), f(q))[1]; child()"
    command[3] = command[3].replace("child()", noisy)
    monkeypatch.setattr(prompts, "_command", lambda: command)
    assert render(tiny_model)["rendered"][0]["text"] == "<s>[user] hello</s>[assistant]"
