"""The texts that quality is measured on: what is shipped, what a user's file may hold, what is expected."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin import documents
from weighin.errors import BadInput

LONG = "A sentence that is repeated until the block is long enough to stand alone. " * 3


def saved(folder: Path, content: str | bytes, name: str = "text.jsonl") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def refused(file: Path) -> str:
    with pytest.raises(BadInput) as error:
        documents.read(file)
    return str(error.value)


# ---- the passages


def kind(document: dict[str, object]) -> str:
    return str(document["name"]).partition("-")[0]


def test_the_passages_are_of_five_kinds_each_with_its_own_name() -> None:
    found = documents.shipped()
    assert len({d["name"] for d in found}) == len(found) == 30
    assert {d["stratum"] for d in found} == {"passages"}
    assert Counter(map(kind, found)) == {"dialogue": 8, "prose": 7, "language": 7, "code": 5, "numbers": 3}


def test_the_first_passages_hold_every_kind_in_its_share() -> None:
    kinds = [kind(d) for d in documents.shipped()]
    assert set(kinds[:8]) == set(kinds)
    for taken in range(1, len(kinds) + 1):
        for name, count in Counter(kinds).items():
            assert abs(kinds[:taken].count(name) - count * taken / len(kinds)) <= 1, (taken, name)


def test_a_dialogue_takes_turns_and_ends_with_an_answer_of_some_length() -> None:
    dialogues = [d for d in documents.shipped() if kind(d) == "dialogue"]
    for document in dialogues:
        roles = [m["role"] for m in document["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert 60 <= len(document["messages"][-1]["content"].split()) <= 140


def test_every_other_passage_is_a_text_of_some_length() -> None:
    for document in documents.shipped():
        if kind(document) != "dialogue":
            text = document["text"]
            assert text == text.strip()
            assert 250 <= len(text) <= 900, document["name"]


# ---- the user's file


def test_a_text_file_has_a_document_a_block(tmp_path: Path) -> None:
    file = saved(tmp_path, f"\ufeff{LONG}\r\nits second line\r\n\r\n \t\n\n  {LONG}!\n", "mine.txt")
    assert documents.read(file) == [
        {"stratum": "text", "name": "text-1", "text": f"{LONG}\nits second line"},
        {"stratum": "text", "name": "text-2", "text": f"  {LONG}!"},
    ]


def test_a_short_block_goes_with_the_next_and_the_last_with_the_one_before(tmp_path: Path) -> None:
    file = saved(tmp_path, f"A heading\n\nAnother\n\n{LONG}\n\n{LONG}\n\nThe end", "mine.md")
    assert [d["text"] for d in documents.read(file)] == [f"A heading\n\nAnother\n\n{LONG}", f"{LONG}\n\nThe end"]


def test_a_single_short_text_is_a_document(tmp_path: Path) -> None:
    assert [d["text"] for d in documents.read(saved(tmp_path, "hello", "mine.txt"))] == ["hello"]


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.ndjson", "mine.json"])
def test_jsonl_takes_texts_and_messages_with_or_without_a_name(tmp_path: Path, name: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello!"}]
    lines = [{"text": " two\nlines "}, {"messages": messages, "name": "greeting", "other": 1}]
    assert documents.read(saved(tmp_path, "\n\n".join(map(json.dumps, lines)), name)) == [
        {"stratum": "text", "name": "text-1", "text": " two\nlines "},
        {"stratum": "text", "name": "greeting", "messages": messages},
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{oops", "is not JSON"),
        ("[1]", "is not an object with 'text' or 'messages'"),
        ('{"prompt": "hello"}', "needs either 'text' or 'messages'"),
        ('{"text": " "}', "'text' must be a text that is not empty"),
        ('{"text": "a\\ud800"}', "no text"),
        ('{"text": "a", "name": 5}', "'name' must be a text"),
        ('{"text": "a", "name": ""}', "'name' must be a text"),
        ('{"messages": []}', "must be a list of objects"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "must be the assistant's answer"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
            "the assistant's answer",
        ),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}', "answer"),
        ('{"text": "b", "name": "fine"}', "line 1 has the name 'fine' too"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, words: str) -> None:
    message = refused(saved(tmp_path, f'{{"text": "fine", "name": "fine"}}\n\n{line}\n'))
    assert "text.jsonl, line 3" in message
    assert words in message


@pytest.mark.parametrize("content", ["", "\n \n\t\n", "\ufeff"])
@pytest.mark.parametrize("name", ["mine.txt", "mine.jsonl"])
def test_a_file_without_a_text(tmp_path: Path, name: str, content: str) -> None:
    assert "holds no text" in refused(saved(tmp_path, content, name))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "There is no text file" in refused(tmp_path / "none.txt")
    assert "There is no text file" in refused(tmp_path)
    assert "not UTF-8 text (invalid start byte at byte 6)" in refused(saved(tmp_path, b"hello\n\xff", "mine.txt"))
    big = saved(tmp_path, "", "big.txt")
    os.truncate(big, 65 * 2**20)
    assert "larger than 64 MiB" in refused(big)


@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda t: t.encode(errors="replace")))
@pytest.mark.parametrize("name", ["f.txt", "f.jsonl"])
def test_any_file_gives_documents_or_bad_input(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: bytes
) -> None:
    file = saved(tmp_path_factory.getbasetemp(), data, name)
    try:
        found = documents.read(file)
    except BadInput as error:
        assert str(file) in str(error)
    else:
        assert found
        assert len({d["name"] for d in found}) == len(found)


LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\ufeff"), max_size=120)


@given(lines=st.lists(LINES | st.just("") | st.just(LONG), min_size=1, max_size=30))
def test_no_line_of_a_text_is_lost_and_no_document_is_short(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    kept = [line for line in lines if line.strip()]
    if not kept:
        return
    found = documents.read(saved(tmp_path_factory.getbasetemp(), "\n".join(lines), "property.txt"))
    assert [line for d in found for line in d["text"].split("\n") if line.strip()] == kept
    assert len(found) == 1 or all(len(d["text"]) >= 200 for d in found)


# ---- expected answers


def test_expected_answers_that_are_whole_texts_become_documents() -> None:
    expected = [
        "The capital of it is Paris.", None, {"text": "It is 4.", "number": 4}, {"equals": "yes"}, 4, ["a", "b"],
        {"contains": "x"}, {"equals": 5}, "Paris", {"text": 1, "equals": "no"},
    ]  # fmt: skip
    prompts = [{"text": "q", "messages": None, "expected": e} for e in expected]
    found = documents.of_expected([*prompts, {"text": "a prompt of a plain file"}])
    assert [(d["name"], d["prompt"], d["answer"]) for d in found] == [
        ("expected-1", 0, "The capital of it is Paris."),
        ("expected-3", 2, "It is 4."),
        ("expected-4", 3, "yes"),
        ("expected-10", 9, "no"),
    ]
    assert {d["stratum"] for d in found} == {"expected"}
