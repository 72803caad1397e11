"""Documents as ids with the tokens that count, and the begin token as tokenizer, template or user have it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import BOS, EOS, VOCABULARY, ids_of, make_model
from conftest import tokenizer as tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from weighin import documents, prompts
from weighin.errors import BadInput
from weighin.spelling import Spelling, spell_documents

DIALOGUE = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "a table for two"},
    {"role": "assistant", "content": "Gladly, tonight at eight. 💥"},
]
ANSWER = DIALOGUE[-1]["content"]


def render(model: Path, *listed: dict[str, Any], **options: Any) -> dict[str, Any]:
    asked = options.pop("prompts", None) or [{"text": "hello"}]
    arguments = {"template": "auto", "system": None, "lengths": [], "vocabulary": VOCABULARY, **options}
    return prompts.render(str(model), asked, documents=listed, **arguments)


def cannot(model: Path, *listed: dict[str, Any], **options: Any) -> str:
    with pytest.raises(BadInput) as error:
        render(model, *listed, **options)
    return str(error.value)


def plain(text: str, name: str = "prose-1") -> dict[str, Any]:
    return {"stratum": "passages", "name": name, "text": text}


def dialogue(messages: list[dict[str, str]], name: str = "dialogue-1") -> dict[str, Any]:
    return {"stratum": "passages", "name": name, "messages": messages}


def expected(answer: str, prompt: int = 0) -> dict[str, Any]:
    return {"stratum": "expected", "name": f"expected-{prompt + 1}", "prompt": prompt, "answer": answer}


def only(found: dict[str, Any]) -> dict[str, Any]:
    assert found["notes"] == []
    [document] = found["documents"]
    return document


def counted(document: dict[str, Any]) -> list[int]:
    return [i for start, end in document["counted"] for i in document["ids"][start:end]]


def said(document: dict[str, Any]) -> str:
    """What the counted tokens say."""
    return str(tiny_tokenizer().decode(counted(document), skip_special_tokens=False))


def jinja(folder: Path, text: str) -> str:
    file = folder / "mine.jinja"
    file.write_text(text)
    return str(file)


def without_bos(folder: Path, *, named: bool = False, merges: list[list[str]] | None = None, **config: Any) -> Path:
    """A model whose tokenizer adds no begin token; `named`: it has one all the same."""
    model = make_model(folder, **config)
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"] = None
    for one, other in merges or []:
        content["model"]["merges"].append([one, other])
        content["model"]["vocab"][one + other] = 260 + len(content["model"]["merges"])
    file.write_text(json.dumps(content))
    if not named:
        settings = json.loads((model / "tokenizer_config.json").read_text())
        del settings["bos_token"]
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


# ---- what counts


def test_all_of_a_plain_text_counts_but_its_begin_token(quick_prompts: None, tiny_model: Path) -> None:
    found = only(render(tiny_model, plain("It rained.")))
    assert found == {
        "stratum": "passages", "name": "prose-1", "ids": [BOS, *ids_of("It rained.")], "counted": [[1, 11]],
    }  # fmt: skip


def test_the_first_token_never_counts(quick_prompts: None, tmp_path: Path) -> None:
    found = only(render(without_bos(tmp_path / "model"), plain("It rained.")))
    assert found["ids"] == ids_of("It rained.")
    assert said(found) == "t rained."


def test_a_text_that_spells_out_its_begin_token_has_it_once(quick_prompts: None, tiny_model: Path) -> None:
    found = only(render(tiny_model, plain("<s>It rained.")))
    assert found["ids"] == [BOS, *ids_of("It rained.")]
    assert said(found) == "It rained."


def test_only_the_last_answer_of_a_dialogue_counts(quick_prompts: None, tiny_model: Path) -> None:
    found = only(render(tiny_model, dialogue(DIALOGUE), system="be brief"))
    assert said(found) == ANSWER
    turns = [{"messages": DIALOGUE[:-1]}]
    prompt = render(tiny_model, prompts=turns, system="be brief")["rendered"][0]["ids"]
    assert found["ids"] == [*prompt, *ids_of(ANSWER)]


def test_a_dialogue_is_written_by_the_users_template(quick_prompts: None, tiny_model: Path, tmp_path: Path) -> None:
    template = jinja(tmp_path, "{% for m in messages %}{{ m.content }}|{% endfor %}")
    found = only(render(tiny_model, dialogue(DIALOGUE), template=template))
    assert found["ids"] == ids_of(f"hi|Hello.|a table for two|{ANSWER}")
    assert said(found) == ANSWER


PLAIN = "User: hi\nAssistant: Hello.\nUser: a table for two\nAssistant:"


def test_without_a_template_a_dialogue_is_plain_text(quick_prompts: None, tiny_model: Path, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", template=None)
    found = only(render(base, dialogue(DIALOGUE)))
    assert found["ids"] == [BOS, *ids_of(f"{PLAIN} {ANSWER}")]
    assert said(found) == f" {ANSWER}"
    assert only(render(tiny_model, dialogue(DIALOGUE), template="raw")) == found


def test_a_template_that_refuses_a_dialogue_is_noted(quick_prompts: None, tmp_path: Path) -> None:
    shy = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}"
    several = [dialogue(DIALOGUE, f"d{n}") for n in range(5)]
    found = render(make_model(tmp_path / "shy", template=shy), *several, dialogue(DIALOGUE[:2], "short"))
    assert [d["name"] for d in found["documents"]] == ["d0", "d1", "d2", "d3", "d4", "short"]
    assert found["documents"][0]["ids"] == [BOS, *ids_of(f"{PLAIN} {ANSWER}")]
    assert said(found["documents"][-1]) == "Hello."
    [note] = found["notes"]
    assert "plain text" in note
    assert "d0, d1, d2 and 2 more" in note
    assert "one turn only" in note


@pytest.mark.parametrize("template", ["chat", "raw"])
def test_an_expected_answer_follows_its_prompt(quick_prompts: None, tiny_model: Path, template: str) -> None:
    asked = [{"text": "one"}, {"text": "two?"}]
    found = render(tiny_model, expected(" Yes, two.", 1), prompts=asked, template=template)
    document = only(found)
    assert document["ids"] == [*found["rendered"][1]["ids"], *ids_of(" Yes, two.")]
    assert (document["stratum"], document["name"]) == ("expected", "expected-2")
    assert said(document) == " Yes, two."


def test_an_answer_is_spelled_as_in_the_whole_text(quick_prompts: None, tmp_path: Path) -> None:
    model = without_bos(tmp_path / "model", template=None, merges=[["c", "d"]])
    found = only(render(model, expected("cd"), prompts=[{"text": "ab"}]))
    assert found["ids"] == [*ids_of("ab"), 261]
    assert found["counted"] == [[2, 3]]


def test_a_prompt_stays_as_it_is_where_its_last_token_would_swallow_the_answer(
    quick_prompts: None, tmp_path: Path
) -> None:
    model = without_bos(tmp_path / "model", template=None, merges=[["b", "c"]])
    found = only(render(model, expected("cd"), prompts=[{"text": "ab"}]))
    assert found["ids"] == ids_of("abcd")
    assert said(found) == "cd"


# ---- too long


def test_a_long_text_is_cut_into_windows(quick_prompts: None, tiny_model: Path) -> None:
    text = "0123456789" * 7
    found = render(tiny_model, plain(text), longest_document=21)["documents"]
    assert [d["name"] for d in found] == ["prose-1", "prose-1#2", "prose-1#3"]  # the rest of 11 tokens is too short
    assert all(d["ids"][0] == BOS and len(d["ids"]) == 21 and d["counted"] == [[1, 21]] for d in found)
    assert "".join(map(said, found)) == text[:60]


def test_a_rest_of_sixteen_tokens_is_a_window(quick_prompts: None, tiny_model: Path) -> None:
    found = render(tiny_model, plain("x" * 35), longest_document=21)["documents"]
    assert [len(d["ids"]) for d in found] == [21, 16]


def test_a_dialogue_that_is_too_long_is_cut_at_its_end(quick_prompts: None, tiny_model: Path) -> None:
    whole = only(render(tiny_model, dialogue(DIALOGUE)))
    start = whole["counted"][0][0]
    found = only(render(tiny_model, dialogue(DIALOGUE), longest_document=start + 6))
    assert found["ids"] == whole["ids"][: start + 6]
    assert said(found) == ANSWER[:6]


def test_what_has_nothing_to_count_is_left_out_and_noted(quick_prompts: None, tmp_path: Path) -> None:
    model = without_bos(tmp_path / "model")
    found = render(model, dialogue(DIALOGUE), expected("yes"), plain("x"), plain("xyz", "prose-2"), longest_document=20)
    assert [d["name"] for d in found["documents"]] == ["prose-2"]
    [note] = found["notes"]
    assert "Left out" in note
    assert "within 20: dialogue-1, expected-1, prose-1." in note


class Bytes:
    """The tiny model's tokenizer in this process, as transformers would call it."""

    bos_token_id = BOS

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=TINY.encode(text, add_special_tokens=add_special_tokens).ids)


TINY = tiny_tokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=200)  # no "<s>" by chance


@given(text=TEXTS, answer=TEXTS, longest=st.integers(2, 64), bos=st.sampled_from(["auto", "add", "none"]))
def test_whatever_the_text_only_its_own_tokens_count(text: str, answer: str, longest: int, bos: str) -> None:
    question = {"template_text": None, "system": None, "bos": bos, "length_text": "sample"}
    spelling = Spelling.of(question, Bytes(), "raw", BOS)
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    listed = [
        {"stratum": "text", "name": "plain", "text": text},
        {"stratum": "text", "name": "turns", "messages": turns},
    ]
    found, notes = spell_documents(spelling, listed, [], longest)
    for document in found:
        [[start, end]] = document["counted"]
        assert 1 <= start < end == len(document["ids"]) <= longest
        assert (document["ids"][0] == BOS) == (bos != "none")
    body = [i for d in found if d["name"].startswith("plain") for i in d["ids"] if i != BOS]
    whole = ids_of(text)
    assert body == whole[: len(body)]
    assert len(body) > len(whole) - 16 or any("plain" in note for note in notes)
    for document in found:
        if document["name"] == "turns":
            assert counted(document) == ids_of(f" {answer}")[: len(counted(document))]


# ---- the begin token


def test_the_begin_token_is_taken_away_where_asked(quick_prompts: None, tiny_model: Path) -> None:
    listed = [plain("It rained."), dialogue(DIALOGUE), expected("yes")]
    found = render(tiny_model, *listed, bos="none", lengths=[32])
    every = [*found["rendered"], *found["documents"]]
    assert all(BOS not in entry["ids"] for entry in every)
    assert BOS not in found["lengths"]["32"]
    assert [said(d) for d in found["documents"]] == ["t rained.", ANSWER, "yes"]
    assert render(tiny_model, bos="none", template="raw")["rendered"][0]["ids"] == ids_of("hello")


@pytest.mark.parametrize("where", ["tokenizer", "config", "text_config"])
def test_the_begin_token_is_put_in_front_where_asked(quick_prompts: None, tmp_path: Path, where: str) -> None:
    config = {"bos_token_id": 5} if where == "config" else {"bos_token_id": None, "text_config": {"bos_token_id": 5}}
    model = without_bos(tmp_path / "model", named=where == "tokenizer", template="{{ messages[0].content }}:", **config)
    listed = [plain("It rained."), dialogue(DIALOGUE[:2]), expected("yes")]
    begin = BOS if where == "tokenizer" else 5
    auto, found = (render(model, *listed, bos=bos, lengths=[32]) for bos in ("auto", "add"))
    for kind in ("rendered", "documents"):
        assert [e["ids"] for e in found[kind]] == [[begin, *e["ids"]] for e in auto[kind]]
    assert found["lengths"]["32"] == [begin, *auto["lengths"]["32"][:-1]]
    assert [said(d) for d in found["documents"]] == ["It rained.", "Hello.", "yes"]


def test_a_begin_token_that_is_there_is_not_put_in_front_again(quick_prompts: None, tiny_model: Path) -> None:
    listed = [plain("It rained."), dialogue(DIALOGUE), expected("yes")]
    assert render(tiny_model, *listed, bos="add", lengths=[8]) == render(tiny_model, *listed, lengths=[8])


@pytest.mark.parametrize("named", [None, VOCABULARY])
def test_a_begin_token_that_nobody_names_cannot_be_added(quick_prompts: None, tmp_path: Path, named: Any) -> None:
    model = without_bos(tmp_path / "model", bos_token_id=named, template=None)
    message = cannot(model, bos="add")
    assert str(model) in message
    assert "names a begin token" in message
    assert "Use --bos auto" in message
    assert render(model, plain("It rained."))["bos_check"] == {"id": None, "now": False, "documents": []}


PROSE = [plain(f"Passage number {n}.", f"prose-{n}") for n in range(1, 7)]
OTHERS = [dialogue(DIALOGUE), plain("x = 1", "code-1"), {**plain("mine"), "stratum": "text"}]


@pytest.mark.parametrize("now", [True, False])
def test_the_check_has_the_prose_the_other_way_with_the_same_tokens(
    quick_prompts: None, tiny_model: Path, tmp_path: Path, now: bool
) -> None:
    model = tiny_model if now else without_bos(tmp_path / "model", named=True)
    found = render(model, *OTHERS, *PROSE)
    check = found["bos_check"]
    assert (check["id"], check["now"]) == (BOS, now)
    assert [d["name"] for d in check["documents"]] == ["prose-1", "prose-2", "prose-3", "prose-4"]
    as_now = {d["name"]: d for d in found["documents"] if d["stratum"] == "passages"}
    for document in check["documents"]:
        assert document["stratum"] == "bos"
        assert (document["ids"][0] == BOS) != now
        same = counted(document)
        assert said(document) == f"assage number {document['name'][-1]}."
        # With a begin token in front, the passage's own first letter counts too.
        assert counted(as_now[document["name"]])[int(now) :] == same


def test_the_check_follows_what_was_asked(quick_prompts: None, tiny_model: Path) -> None:
    check = render(tiny_model, *PROSE, bos="none")["bos_check"]
    assert check["now"] is False
    assert [d["ids"][0] for d in check["documents"]] == [BOS] * 4


def test_the_check_takes_no_passage_that_would_be_cut(quick_prompts: None, tiny_model: Path) -> None:
    check = render(tiny_model, plain("x" * 40), plain("y" * 30, "prose-2"), longest_document=40)["bos_check"]
    assert [d["name"] for d in check["documents"]] == ["prose-2"]


def test_without_documents_there_is_nothing_to_check(quick_prompts: None, tiny_model: Path) -> None:
    found = render(tiny_model)
    assert (found["documents"], found["notes"]) == ([], [])
    assert found["bos_check"] == {"id": BOS, "now": True, "documents": []}


# ---- all together


def test_ids_of_documents_must_be_in_the_vocabulary(quick_prompts: None, tiny_model: Path) -> None:
    message = cannot(tiny_model, plain("\x7f"), vocabulary=200, lengths=[])
    assert "belongs to another model" in message


def test_every_shipped_passage_becomes_a_document(quick_prompts: None, tiny_model: Path) -> None:
    passages = documents.shipped()
    found = render(tiny_model, *passages, longest_document=4096)
    assert found["notes"] == []
    assert [d["name"] for d in found["documents"]] == [p["name"] for p in passages]
    for passage, document in zip(passages, found["documents"], strict=True):
        assert said(document) == (passage.get("text") or passage["messages"][-1]["content"])
        assert EOS not in counted(document)
    assert len(found["bos_check"]["documents"]) == 4
