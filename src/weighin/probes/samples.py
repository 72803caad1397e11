"""What the reference itself would say at temperature 1: texts on which contenders are judged, not flattered."""

from __future__ import annotations

from weighin.engines import Sampling
from weighin.probes import Probe


class SamplesProbe(Probe):
    jobs = ("samples",)
    order = 10
    measures = {}  # noqa: RUF012 - texts are no figures

    def run(self) -> None:
        session, job = self.session, self.session.job
        with session.phase("samples"):
            for number in range(job.samples):
                which = number % len(job.prompts)
                ids = session.engine.generate(
                    job.prompts[which], job.sample_tokens, job.stop_ids, _ignore, Sampling(seed=number)
                )
                session.emit({"event": "sampled", "prompt": which, "seed": number, "ids": list(ids)})


def _ignore(token: int) -> None:
    pass


PROBE = SamplesProbe
