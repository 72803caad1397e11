"""What it answers: greedy, until the model stops by itself or the cap is reached."""

from __future__ import annotations

from weighin.probes import Probe


class ResponsesProbe(Probe):
    jobs = ("responses", "answer")
    order = 10
    measures = {}  # noqa: RUF012 - answers are no figures

    def run(self) -> None:
        session, job = self.session, self.session.job
        for which, ids in enumerate(job.prompts):
            with session.phase(f"response_{which + 1}"):
                call = session.call("response", which, ids, job.response_cap, job.stop_ids)
            session.emit(
                {
                    "event": "response",
                    "prompt": which,
                    "ids": call.ids,
                    "finish": "stop" if call.ids[-1] in job.stop_ids else "length",
                    "seconds": call.seconds,
                }
            )


PROBE = ResponsesProbe
