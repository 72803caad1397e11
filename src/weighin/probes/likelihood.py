"""How far a contender's probabilities are from the reference's: the same ids, the full vocabulary, row by row.

The reference's worker writes its rows to disk; a contender's streams its own against them. What leaves the worker is a
few numbers per counted token; `fidelity.py` does the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weighin import reference_rows
from weighin.probes import Measure, Probe
from weighin.reference_rows import Block, Rows

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]
    Chunks = Iterator[tuple[int, Array]]
    Blocks = Iterator[tuple[Array, Array]]

DIGITS = 7


class LikelihoodProbe(Probe):
    jobs = ("score", "floor")
    order = 10
    measures = {  # noqa: RUF012 - a ClassVar of the contract
        "kl_divergence": Measure("KL divergence from the reference", "nats/token", "lower"),
        "top1_agreement": Measure("the same next token as the reference, given the same text", "share", "higher"),
        "perplexity_ratio": Measure("perplexity ÷ the reference's", "", "lower"),
    }

    def run(self) -> None:
        session, job = self.session, self.session.job
        assert job.rows is not None
        rows = Rows(job.rows, job.vocabulary, job.rows_kept)
        names = [reference_rows.digest(d["ids"], d["counted"]) for d in job.documents]
        kept = [
            job.writes_rows and not _alone(d) and rows.complete(n) for d, n in zip(job.documents, names, strict=True)
        ]
        todo = [i for i, done in enumerate(kept) if not done]
        with session.phase("score"):
            for i, done in enumerate(kept):
                if done:
                    self._say(i, names[i], _of_reference(rows, names[i]))
            wanted = [job.documents[i]["ids"][: _last_row(job.documents[i]) + 1] for i in todo]
            for count, (number, chunks) in enumerate(session.engine.score_all(wanted), start=1):
                i = todo[number]
                self._say(i, names[i], self._document(job.documents[i], chunks, rows, names[i]))
                session.emit({"event": "progress", "done": count, "of": len(todo)})

    def _say(self, number: int, name: str, found: dict[str, Any]) -> None:
        document = self.session.job.documents[number]
        event = {"event": "scored", "stratum": document["stratum"], "name": document["name"], "rows": name}
        self.session.emit({**event, **found})

    def _document(self, document: dict[str, Any], chunks: Chunks, rows: Rows, name: str) -> dict[str, Any]:
        blocks = self._blocks(document, chunks)
        if "asked" in document:
            return {"at": _lookups(document, blocks)}
        if _alone(document):
            stats = [reference_rows.statistics(logits, targets) for logits, targets in blocks]
            return {"nll": [v for found in stats for v in _rounded(found["normalizer"] - found["target_logit"])]}
        if not self.session.job.writes_rows:
            return _against(blocks, rows, name)
        _write(blocks, rows, name)
        return _of_reference(rows, name)

    def _blocks(self, document: dict[str, Any], chunks: Chunks) -> Blocks:
        """The rows that predict the counted ids, cut to the vocabulary, a block at a time, with those ids."""
        import numpy as np

        ids, width = document["ids"], self.session.job.vocabulary
        wanted = np.zeros(len(ids), dtype=bool)
        wanted[reference_rows.counted_rows(_counted(document))] = True
        size = reference_rows.block_rows(width)
        seen = 0
        for start, logits in chunks:
            seen = start + len(logits)
            places = np.flatnonzero(wanted[start:seen])
            for first in range(0, len(places), size):
                chosen = places[first : first + size]
                if logits.shape[1] < width:
                    raise RuntimeError(f"the engine gave {logits.shape[1]} logits for a vocabulary of {width}")
                # neighbours need no copy: the engine's array is ours, and used up
                together = chosen[-1] - chosen[0] + 1 == len(chosen)
                rows = logits[chosen[0] : chosen[-1] + 1, :width] if together else logits[chosen, :width]
                block = np.ascontiguousarray(rows, dtype=np.float32)
                if not block.flags.writeable:
                    block = block.copy()
                yield block, np.asarray([ids[start + p + 1] for p in chosen])
        if seen <= _last_row(document):
            raise RuntimeError(f"the engine scored {seen} of {_last_row(document) + 1} tokens")


def _alone(document: dict[str, Any]) -> bool:
    """Whether a document is looked at by the reference alone, so that no row of it is kept."""
    return "asked" in document or document["stratum"] == "bos"


def _counted(document: dict[str, Any]) -> list[list[int]]:
    if "asked" in document:
        return [[place, place + 1] for place in sorted(int(p) for p in document["asked"])]
    ranges: list[list[int]] = document["counted"]
    return ranges


def _last_row(document: dict[str, Any]) -> int:
    return max(reference_rows.counted_rows(_counted(document)))


def _of_reference(rows: Rows, name: str) -> dict[str, Any]:
    stats = rows.stats(name)
    return {"nll": _rounded(stats["normalizer"] - stats["target_logit"])}


def _write(blocks: Blocks, rows: Rows, name: str) -> None:
    writer = rows.write(name)
    try:
        for logits, targets in blocks:
            writer.add(logits, targets)
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _lookups(document: dict[str, Any], blocks: Blocks) -> list[dict[str, Any]]:
    """What the model thinks at some places of a text: its two best tokens, and those it is asked about."""
    asked = {int(place): ids for place, ids in document["asked"].items()}
    found = []
    places = iter(sorted(asked))
    for logits, targets in blocks:
        normalizers = reference_rows.statistics(logits, targets)["normalizer"]
        for row, normalizer in zip(logits, normalizers, strict=True):
            place = next(places)
            best = [int(token) for token in row.argsort()[-2:][::-1]]
            values = [*best, *(t for t in asked[place] if 0 <= t < len(row))]
            known = {str(t): float(row[t] - normalizer) for t in values}
            if all(map(math.isfinite, known.values())):
                logprobs = [known[str(token)] for token in best]
                found.append({"position": place, "best": best, "logprobs": logprobs, "asked": known})
    return found


def _against(blocks: Blocks, rows: Rows, name: str) -> dict[str, Any]:
    reader = rows.read(name)
    kl: list[float | None] = []
    slack: list[float | None] = []
    nll: list[float | None] = []
    same: list[int] = []
    try:
        for logits, targets in blocks:
            found = divergence(logits, targets, reader.take(len(logits)))
            kl += _rounded(found["kl"])
            nll += _rounded(found["nll"])
            same += [int(s) for s in found["same"]]
            if "slack" in found:
                slack += _rounded(found["slack"])
    finally:
        reader.close()
    return {"kl": kl, "nll": nll, "same": same, **({"slack": slack} if slack else {})}


def divergence(logits: Array, targets: Array, theirs: Block) -> dict[str, Array]:
    """Per row: KL(reference ‖ contender), minus the log-probability of the counted token, whether the best is the same.

    Where only the reference's best were kept, `kl` counts the rest as one token and is a lower bound; `slack` bounds
    what it lacks.
    """
    import numpy as np

    stats = reference_rows.statistics(logits, targets)
    normalizer = stats["normalizer"]
    with np.errstate(all="ignore"):  # NaN and infinity go on as themselves
        found = _whole(logits, normalizer, theirs) if theirs.ids is None else _partial(logits, normalizer, theirs)
    found["nll"] = normalizer - stats["target_logit"]
    found["same"] = stats["best"] == theirs.stats["best"]
    return found


def _whole(logits: Array, normalizer: Array, theirs: Block) -> dict[str, Array]:
    """Float32 throughout, for speed; the rounding of the normalizers, the one part that does not average out, is
    put right in float64. The contender's block is used up."""
    import numpy as np

    mine, other = normalizer.astype(np.float32), theirs.stats["normalizer"].astype(np.float32)
    reference = theirs.logits
    reference -= other[:, None]
    logits -= mine[:, None]
    np.subtract(reference, logits, out=logits)
    np.exp(reference, out=reference)
    total = np.einsum("ij,ij->i", reference, logits).astype(np.float64)
    rounding = (other - theirs.stats["normalizer"]) - (mine - normalizer)
    return {"kl": np.maximum(total + rounding, 0.0)}


def _partial(logits: Array, normalizer: Array, theirs: Block) -> dict[str, Array]:
    """Of the reference only its best tokens are known, what the rest sums up to, and the rest's entropy."""
    import numpy as np

    assert theirs.ids is not None
    log_q = logits.astype(np.float64) - normalizer[:, None]
    log_p = theirs.logits.astype(np.float64) - theirs.stats["normalizer"][:, None]
    q_kept = np.take_along_axis(log_q, theirs.ids, axis=1)
    p = np.exp(log_p)
    rest_p = np.clip(1.0 - p.sum(axis=1), 1e-300, 1.0)
    rest_q = np.clip(1.0 - np.exp(q_kept).sum(axis=1), 1e-300, 1.0)
    lower = (p * (log_p - q_kept)).sum(axis=1) + rest_p * np.log(rest_p / rest_q)
    # What is left is the rest's own divergence. At most, all of the rest's mass sits on the tokens that the contender
    # finds least likely, none with more than the least of the kept.
    np.put_along_axis(log_q, theirs.ids, np.inf, axis=1)
    slack = [
        -entropy - mass * math.log(mass / other) + _dearest(row, mass, least)
        for row, mass, other, least, entropy in zip(
            log_q, rest_p, rest_q, p.min(axis=1), theirs.stats["rest_entropy"], strict=True
        )
    ]
    return {"kl": np.maximum(lower, 0.0), "slack": np.maximum(slack, 0.0)}


def _dearest(log_q: Array, mass: float, most: float) -> float:
    """The largest cross-entropy that `mass` can have, with at most `most` on a token."""
    import numpy as np

    if most <= 0.0:
        return math.inf
    full = int(mass / most)
    count = min(full + 1, len(log_q) - 1)
    least = np.sort(np.partition(log_q, count - 1)[:count])
    full = min(full, count)
    return float(-most * least[:full].sum() - (mass - full * most) * least[min(full, count - 1)])


def _rounded(values: Array) -> list[float | None]:
    """Few digits: a journal holds thousands of them. What is no number is None."""
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values]


PROBE = LikelihoodProbe
