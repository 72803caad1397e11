"""Prompts: what a file may hold, and how the child that makes ids of them is asked."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import VOCABULARY, ids_of, make_model
from hypothesis import given
from hypothesis import strategies as st

from weighin import prompts
from weighin.errors import BadInput
from weighin.prompts import read_prompts


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


# ---- the child


def render(model: Path, *texts: str, **options: Any) -> dict[str, Any]:
    asked = options.pop("prompts", None) or [{"text": t} for t in texts or ("hello",)]
    arguments = {"template": "auto", "system": None, "lengths": [], "vocabulary": VOCABULARY, **options}
    return prompts.render(str(model), asked, **arguments)


def cannot(model: Path, *texts: str, **options: Any) -> str:
    with pytest.raises(BadInput) as error:
        render(model, *texts, **options)
    return str(error.value)


def test_a_template_file_that_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    assert "there is no file" in cannot(tiny_model, template=str(tmp_path / "none.jinja"))
    assert "there is no file" in cannot(tiny_model, template=str(tmp_path))


def test_a_template_file_that_is_not_utf8(tiny_model: Path, tmp_path: Path) -> None:
    assert "UTF-8" in cannot(tiny_model, template=str(saved(tmp_path, b"\xff\xfe{{ messages }}", "mine.jinja")))


def test_a_word_about_the_begin_token_that_is_none(tiny_model: Path) -> None:
    assert "--bos takes auto, add or none, not 'yes'" in cannot(tiny_model, bos="yes")


def test_a_template_that_loops_for_ever_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    model = make_model(tmp_path / "loop", template=loop)
    monkeypatch.setattr(prompts, "SECONDS", 2.5)
    message = cannot(model)
    assert "did not finish in 2.5 s; it was stopped" in message
    assert "--template raw" in message


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
    noisy = "import weighin.tokens as t; f = t._render; t._render = lambda q: (print('noise'), f(q))[1]; child()"
    command[3] = command[3].replace("child()", noisy)
    monkeypatch.setattr(prompts, "_command", lambda: command)
    assert render(tiny_model)["rendered"][0]["text"] == "<s>[user] hello</s>[assistant]"
