"""The README says what is there."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import readme  # noqa: E402


def test_the_file_tree_is_the_code():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.fill(text, "tree", readme.tree()) == text, "run: make docs"


def test_every_command_of_the_readme_exists():
    from weighin.cli import main

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"^weighin (\w+)", text, flags=re.MULTILINE))
    assert commands == set(main.commands)


def test_every_option_of_the_readme_exists():
    from weighin.cli import main

    known = {
        opt
        for command in main.commands.values()
        for param in command.params
        for opt in (*param.opts, *param.secondary_opts)
    } | {"-c"}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text)) <= known
