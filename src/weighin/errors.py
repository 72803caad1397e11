"""The one tree of exceptions. A message says what happened, to what, and what to do."""


class WeighinError(Exception):
    """Anything weighin knows how to explain; `cli.py` prints it without a traceback."""

    exit_code = 1


class BadInput(WeighinError):
    """What the user gave cannot be used; nothing was written."""

    exit_code = 2


class Interrupted(WeighinError):
    """Ctrl-C; what was measured is on disk and can be resumed."""

    exit_code = 130
