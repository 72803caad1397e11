"""What pip says, in our words; and what to look at when it fails."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin.pip_lines import LONGEST_LINE, Progress, Step, in_words, rough, telling

FAILED_BUILD = """\
Collecting llama-cpp-python==0.3.36
  Building wheel for llama-cpp-python (pyproject.toml): finished with status 'error'
  error: subprocess-exited-with-error

  × Building wheel for llama-cpp-python (pyproject.toml) did not run successfully.
  │ exit code: 1
  ╰─> [43 lines of output]
      *** Configuring CMake...
      [1/99] Building C object one.c.o
      [2/99] Building CXX object two.cpp.o
      FAILED: two.cpp.o
      g++: fatal error: Killed signal terminated program cc1plus
      compilation terminated.
      [3/99] Building CXX object three.cpp.o
      [4/99] Building CXX object four.cpp.o
      [5/99] Building CXX object five.cpp.o
      [6/99] Building CXX object six.cpp.o
      [7/99] Building CXX object seven.cpp.o
      [8/99] Building CXX object eight.cpp.o
      ninja: build stopped: subcommand failed.

      *** CMake build failed
      [end of output]

  note: This error originates from a subprocess, and is likely not a problem with pip.
  ERROR: Failed building wheel for llama-cpp-python
Failed to build llama-cpp-python
ERROR: Could not build wheels for llama-cpp-python, which is required to install it
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Collecting torch==2.13.0 (from weighin)", "collecting torch"),
        ("Collecting optimum-intel[nncf]>=1", "collecting optimum-intel"),
        ("  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.1 MB)", "downloading torch 2.13.0 (190.1 MB)"),
        ("Downloading https://a.b/c/torch-2.1%2Bcpu-cp311.whl (9 kB)", "downloading torch 2.1+cpu (9 kB)"),
        ("  Downloading llama_cpp_python-0.3.36.tar.gz (48 MB)", "downloading llama_cpp_python 0.3.36 (48 MB)"),
        ("  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl.metadata (29 kB)", None),
        ("  Building wheel for llama-cpp-python (pyproject.toml): started", "building llama-cpp-python"),
        ("  Building wheel for llama-cpp-python (pyproject.toml): still running...", "building llama-cpp-python"),
        ("  Building wheel for llama-cpp-python (pyproject.toml): finished with status 'done'", None),
        ("Installing collected packages: mpmath, sympy, torch", "unpacking 3 packages"),
        ("Installing collected packages: mpmath", "unpacking 1 package"),
        ("Successfully installed mpmath-1.3.0", None),
        ("", None),
    ],
)
def test_lines_in_words(line: str, words: str | None) -> None:
    assert in_words(line) == words


def test_the_time_left_is_the_recipes_and_less_once_it_unpacks() -> None:
    steps: list[Step] = []
    progress = Progress(600.0, steps.append)
    began = time.monotonic()
    progress.step("making an empty environment")
    progress.heard("Collecting torch==2.13.0")
    progress.heard("Looking in links: somewhere")
    progress.heard("Installing collected packages: mpmath, sympy, torch")
    progress.step("trying to import torch")
    assert [step.words.split()[0] for step in steps] == ["making", "collecting", "unpacking", "trying"]
    left = [round(step.until - began, -1) for step in steps if step.until is not None]
    assert left == [600, 600, 300, 300]


def test_a_time_that_nobody_measured_is_not_told() -> None:
    steps: list[Step] = []
    Progress(0.0, steps.append).heard("Installing collected packages: mpmath")
    assert steps == [Step("unpacking 1 package", None)]


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "10 s"), (44, "40 s"), (89, "90 s"), (480, "8 min")])
def test_rough_times(seconds: float, words: str) -> None:
    assert rough(seconds) == words


def test_of_a_failed_build_the_first_error_the_last_lines_and_pips_own() -> None:
    assert telling(FAILED_BUILD.splitlines()) == [
        "Building wheel for llama-cpp-python (pyproject.toml) did not run successfully.",
        "g++: fatal error: Killed signal terminated program cc1plus",
        "[3/99] Building CXX object three.cpp.o",
        "[4/99] Building CXX object four.cpp.o",
        "[5/99] Building CXX object five.cpp.o",
        "[6/99] Building CXX object six.cpp.o",
        "[7/99] Building CXX object seven.cpp.o",
        "[8/99] Building CXX object eight.cpp.o",
        "ninja: build stopped: subcommand failed.",
        "*** CMake build failed",
        "ERROR: Failed building wheel for llama-cpp-python",
        "ERROR: Could not build wheels for llama-cpp-python, which is required to install it",
    ]


def test_of_pips_own_failure_its_errors_shortened() -> None:
    versions = ", ".join(f"1.{n}" for n in range(500))
    lines = [
        "Looking in links: somewhere",
        f"ERROR: Could not find a version that satisfies the requirement x==9 (from versions: {versions})",
        "ERROR: No matching distribution found for x==9",
    ]
    first, second = telling(lines)
    assert first.startswith("ERROR: Could not find a version that satisfies the requirement x==9 (from versions: 1.0")
    assert first.endswith("1.498, 1.499)")
    assert second == lines[2]


def test_of_anything_else_the_last_lines() -> None:
    lines = [f"line {n}" for n in range(20)]
    assert telling([*lines, "", "  "]) == lines[-8:]
    assert telling([]) == []


@given(st.lists(st.one_of(st.text(), st.sampled_from(FAILED_BUILD.splitlines()))))
def test_whatever_it_said_a_few_short_lines_of_it_are_shown(lines: list[str]) -> None:
    shown = telling(lines)
    assert len(shown) <= 15
    assert bool(shown) == any(line.strip() for line in lines) or "lines of output]" in "".join(lines)
    assert all(len(line) <= LONGEST_LINE for line in shown)
    for line in lines:
        in_words(line)
