"""Speed: the first answer, then steady ones, then long prompts. Every call has a forced number of new tokens."""

from __future__ import annotations

from weighin.probes import Call, Measure, Probe
from weighin.probes.disk import bytes_read

LENGTH_TOKENS = 8  # new tokens after a long prompt: enough for a decode speed at that length
COLD_START = 100e6  # bytes from the disk from which a start is no warm one
LONG_CALL = 20.0  # seconds; where one answer takes longer, one steady answer a process must do
SHORT_CALL = 3.0  # seconds; a longer call is not repeated only to warm up


class SpeedProbe(Probe):
    jobs = ("speed",)
    order = 10
    measures = {  # noqa: RUF012 - a ClassVar of the contract
        "ready_seconds": Measure("start of the process to first token", "s", "lower"),
        "first_answer_seconds": Measure("first answer (the first call)", "s", "lower"),
        "answer_seconds": Measure("answer, steady", "s", "lower"),
        "first_token_seconds": Measure("first token, steady", "s", "lower"),
        "decode_tokens_per_second": Measure("decode", "tokens/s", "higher"),
        "prefill_tokens_per_second": Measure("prefill", "tokens/s", "higher"),
    }

    def run(self) -> None:
        session, job = self.session, self.session.job
        before = (bytes_read() or 0) - session.disk_read_before
        with session.phase("first_answer"):
            call = session.call("first", 0, job.prompts[0], job.max_new_tokens)
        self._first(call, before)

        repeats = 1 if call.seconds > LONG_CALL else job.repeats
        with session.phase("answers"):
            for i in range(repeats):
                # Two prompts take turns, so that an engine that remembers its last answer gains nothing; always the
                # same two, so that processes with more repeats time the same work.
                which = (i + 1) % min(2, len(job.prompts))
                call = session.call("steady", which, job.prompts[which], job.max_new_tokens)
                session.sample("answer_seconds", call.seconds)
                session.sample("first_token_seconds", call.first_token_seconds)
                session.sample("prefill_tokens_per_second", call.prompt_tokens / call.first_token_seconds)
                session.sample("decode_tokens_per_second", call.decode_tokens_per_second)

        for length, ids in job.lengths.items():
            try:
                self._long_prompt(length, ids)
            except Exception as error:
                # A prompt too long for its memory takes nothing away from what was measured before it.
                evidence = f"a prompt of {length} tokens: {type(error).__name__}: {error}"[:500]
                session.emit({"event": "doubt", "type": "failed_round", "evidence": evidence})
                return

    def _long_prompt(self, length: str, ids: list[int]) -> None:
        session = self.session
        with session.phase(f"prompt_{length}"):
            call = session.call("length_first", length, ids, LENGTH_TOKENS)
            if call.seconds < SHORT_CALL:
                call = session.call("length", length, ids, LENGTH_TOKENS)
            session.sample(f"first_token_seconds@{length}", call.first_token_seconds)
            session.sample(f"prefill_tokens_per_second@{length}", call.prompt_tokens / call.first_token_seconds)
            session.sample(f"decode_tokens_per_second@{length}", call.decode_tokens_per_second)

    def _first(self, call: Call, before: int) -> None:
        """What came cold from the disk would be told as the engine's slowness: such a start is `ready_cold_seconds`."""
        now = (bytes_read() or 0) - self.session.disk_read_before
        ready = call.times[0] - self.session.job.spawned_at
        for key, value, read in (
            ("ready_seconds", ready, now),
            ("first_answer_seconds", call.seconds, now - before),
        ):
            if read < COLD_START:
                self.session.sample(key, value)
            else:
                self.session.unknown(key, f"{read / 1e6:.0f} MB came from the disk, so this was no warm start")


PROBE = SpeedProbe
