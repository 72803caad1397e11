"""Whether an engine with a tokenizer and template of its own would have asked the same: its ids against ours."""

from __future__ import annotations

from weighin.probes import Probe


class ParityProbe(Probe):
    jobs = ("responses",)
    order = 20
    measures = {}  # noqa: RUF012 - it finds a doubt, or nothing

    def run(self) -> None:
        session, job, engine = self.session, self.session.job, self.session.engine
        with session.phase("parity"):
            for number, (text, ids) in enumerate(zip(job.texts, job.prompts, strict=False), start=1):
                rendered = engine.render(text["messages"]) if text["messages"] else None
                if rendered is not None and rendered != text["text"]:
                    self._doubt("template_differs", f"prompt {number}: {_where(rendered, text['text'])}")
                theirs = engine.tokenize(text["text"])
                if theirs is not None and theirs != ids:
                    self._doubt("tokenizer_differs", f"prompt {number}: {_where(theirs, ids)}")

    def _doubt(self, type_: str, evidence: str) -> None:
        self.session.emit({"event": "doubt", "type": type_, "evidence": evidence})


def _where(theirs: str | list[int], ours: str | list[int]) -> str:
    """Where two of a kind part, and how they go on."""
    place = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    what = "character" if isinstance(ours, str) else "token"
    mine, other = theirs[place : place + 8], ours[place : place + 8]
    return f"from {what} {place + 1} on the engine has {mine!r}, the model {other!r}"


PROBE = ParityProbe
