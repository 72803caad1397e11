"""What it answers: greedy, or as the model's own settings draw, until it stops by itself or the cap is reached."""

from __future__ import annotations

from weighin.engines import Sampling
from weighin.probes import Measure, Probe


class ResponsesProbe(Probe):
    jobs = ("responses", "answer")
    order = 10
    measures = {  # noqa: RUF012 - a ClassVar of the contract
        "task_accuracy": Measure("answers that meet what was expected", "share", "higher"),
    }

    def run(self) -> None:
        session, job = self.session, self.session.job
        for which, ids in enumerate(job.prompts):
            with session.phase(f"response_{which + 1}"):
                for seed in range(job.seeds):
                    sampling = Sampling(**{**job.sampling, "seed": seed}) if job.sampling is not None else None
                    call = session.call("response", which, ids, job.response_cap, job.stop_ids, sampling)
                    session.emit(
                        {
                            "event": "response",
                            "prompt": which,
                            "seed": seed,
                            "ids": call.ids,
                            "finish": "stop" if call.ids[-1] in job.stop_ids else "length",
                            "seconds": call.seconds,
                        }
                    )


PROBE = ResponsesProbe
