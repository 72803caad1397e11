"""Whether an engine with a tokenizer and template of its own would have asked the same: its ids against ours."""

from __future__ import annotations

from typing import Any

from weighin.probes import Probe


class ParityProbe(Probe):
    jobs = ("responses",)
    order = 20
    measures = {}  # noqa: RUF012 - it finds a doubt, or nothing

    def run(self) -> None:
        session, job = self.session, self.session.job
        with session.phase("parity"):
            for number, (text, ids) in enumerate(zip(job.texts, job.prompts, strict=False), start=1):
                try:
                    if self._differs(number, text, ids):
                        return  # one is enough to know
                except Exception as error:  # its answers are there all the same
                    evidence = f"prompt {number}: the engine's own failed ({type(error).__name__}: {error})"[:500]
                    self._doubt("template_differs", evidence)
                    return

    def _differs(self, number: int, text: dict[str, Any], ids: list[int]) -> bool:
        engine = self.session.engine
        rendered = engine.render(text["messages"]) if text["messages"] else None
        if rendered is not None and rendered != text["text"]:
            self._doubt("template_differs", f"prompt {number}: {_where(rendered, text['text'])}")
            return True
        theirs = engine.tokenize(text["text"])
        if theirs is not None and theirs != ids:
            self._doubt("tokenizer_differs", f"prompt {number}: {_where(theirs, ids)}")
            return True
        return False

    def _doubt(self, type_: str, evidence: str) -> None:
        self.session.emit({"event": "doubt", "type": type_, "evidence": evidence})


def _where(theirs: str | list[int], ours: str | list[int]) -> str:
    """Where two of a kind part, and how they go on."""
    place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    what = "character" if isinstance(ours, str) else "token"
    mine, other = theirs[place : place + 8], ours[place : place + 8]
    return f"from {what} {place + 1} on the engine has {mine!r}, the model {other!r}"


PROBE = ParityProbe
