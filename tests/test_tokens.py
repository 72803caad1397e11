"""The child of prompts.py: templates, ids, and what a tokenizer or template of a stranger may do."""

from pathlib import Path
from typing import Any

import pytest
from conftest import BOS, END_THINK, EOS, THINK, VOCABULARY, ids_of, make_model

from weighin import prompts
from weighin.errors import BadInput
from weighin.prompts import decode


def saved(folder: Path, content: str, name: str) -> Path:
    file = folder / name
    file.write_text(content, encoding="utf-8")
    return file


def render(model: Path, *texts: str, **options: Any) -> dict[str, Any]:
    asked = options.pop("prompts", None) or [{"text": t} for t in texts or ("hello",)]
    arguments = {"template": "auto", "system": None, "lengths": [], "vocabulary": VOCABULARY, **options}
    return prompts.render(str(model), asked, **arguments)


def cannot(model: Path, *texts: str, **options: Any) -> str:
    with pytest.raises(BadInput) as error:
        render(model, *texts, **options)
    return str(error.value)


# ---- templates


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


def test_an_architecture_that_transformers_does_not_know_still_has_its_ids(quick_prompts: None, tmp_path: Path) -> None:
    model = make_model(tmp_path / "new", model_type="llamma", architectures=["LlammaForCausalLM"])
    found = render(model)
    assert found["rendered"][0]["text"] == "<s>[user] hello</s>[assistant]"
    assert found["auto_class"] is None
    assert "knows no causal language model of the type 'llamma'" in found["auto_class_reason"]
    assert "LlammaForCausalLM" in found["auto_class_reason"]
    assert "Did the config mean 'llama'?" in found["auto_class_reason"]


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
def test_the_class_that_loads_the_model(
    quick_prompts: None, tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    found = render(make_model(tmp_path / "model", **config))
    assert (found["auto_class"], found["auto_class_reason"]) == (expected, None)
