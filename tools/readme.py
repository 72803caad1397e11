"""Rewrite the parts of README.md that are made from code: the file tree, and the example from a real run's folder.

python tools/readme.py [--example RESULT_FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PACKAGE = ROOT / "src" / "weighin"
# the order of the data flow; what is not named here comes after it, by name
FLOW = (
    *("cli", "compare", "intake", "model", "safetensors_header", "gguf_header", "hub", "demo", "unpack", "machine"),
    *("bandwidth", "plan", "prompts", "documents", "tokens", "spelling", "schedule", "quality", "jobs", "environments"),
    *("kits", "installing", "pip_lines", "runner", "journal", "folder", "worker", "engines", "probes"),
    *("reference_rows", "harness", "lm_eval_adapter", "measurements", "intervals", "losses", "fidelity", "divergence"),
    *("expected", "doubts", "verdict", "report", "answer", "cache", "errors"),
)
LEFT_OUT = ("__init__", "__main__")


def tree() -> str:
    """Every file of the package with the first line of its docstring."""
    names = {p.stem: p for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and (p / "__init__.py").exists())}
    order = [*FLOW, *sorted(set(names) - set(FLOW))]
    lines = ["src/weighin/"]
    for name in order:
        path = names.get(name)
        if path is None or name in LEFT_OUT:
            continue
        if path.is_dir():
            lines.append(_line(2, f"{name}/", path / "__init__.py"))
            lines += [_line(4, p.name, p) for p in sorted(path.glob("*.py")) if p.stem not in LEFT_OUT]
        else:
            lines.append(_line(2, path.name, path))
    return "```\n" + "\n".join(lines) + "\n```"


def _line(indent: int, name: str, path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return f"{' ' * indent}{name:<{26 - indent}}{docstring.splitlines()[0].rstrip('.:')}".rstrip()


def example(folder: Path) -> str:
    """The terminal's table and the document's first rows, of a real run."""
    from weighin.compare import rebuild
    from weighin.report import markdown, table, terminal

    comparison = rebuild(folder)
    names = " ".join(f"-c {c.name}" for c in comparison.contenders)
    shown = "\n".join(line.rstrip() for line in terminal.text(comparison, 110).splitlines())
    rows = [r for r in table.document(comparison) if r.title not in ("Code snippet", "Dependencies")]
    machine = comparison.machine
    return (
        f"On {machine.threads} cores of a cloud machine ({machine.cpu}), "
        f"`weighin compare {comparison.model.source} {names}`:\n\n"
        f"```\n{shown}\n```\n\nAnd in its `report.md`, among others:\n\n{markdown.table_of(comparison, rows)}"
    )


def fill(text: str, mark: str, content: str) -> str:
    """Put content between a mark's begin and end."""
    pattern = rf"(<!-- {mark}: begin -->\n).*?(<!-- {mark}: end -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", type=Path, help="the result folder of a real run")
    arguments = parser.parse_args()
    text = fill(README.read_text(encoding="utf-8"), "tree", tree())
    if arguments.example:
        text = fill(text, "example", example(arguments.example))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
