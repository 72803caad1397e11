"""The reference's logits on disk: written once by the reference's worker, read by every contender's, row by row.

A document's counted rows lie in one file, float32, whole: the vocabulary, or past a cap the best k and what the rest
amounts to. Beside them a few numbers per row; they are written last, and so say that the rows are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]

BLOCK_BYTES = 1 << 20  # rows are looked at in blocks that stay in the processor's cache
COLUMNS = ("normalizer", "best", "target_logit", "rest_entropy")


def digest(ids: Sequence[int], counted: Sequence[Sequence[int]]) -> str:
    """The name of a document's rows: its ids and which of them count."""
    return hashlib.sha256(json.dumps([list(ids), [list(c) for c in counted]]).encode()).hexdigest()[:24]


def counted_rows(counted: Sequence[Sequence[int]]) -> list[int]:
    """The rows that predict the counted ids: the one before each."""
    return [place - 1 for start, end in counted for place in range(start, end)]


def bytes_per_row(vocabulary: int, keep: int) -> int:
    """Bytes on disk of one row; `keep` is 0 for the whole vocabulary, else how many of the best are kept."""
    return (keep * 8 if keep else vocabulary * 4) + len(COLUMNS) * 8


def how_many_to_keep(positions: int, vocabulary: int, cap: int) -> int:
    """0 if every row fits under the cap whole, else the number of best entries that do."""
    if positions * bytes_per_row(vocabulary, 0) <= cap:
        return 0
    return max(64, min(vocabulary - 1, (cap // max(positions, 1) - len(COLUMNS) * 8) // 8))


@dataclass(frozen=True)
class Block:
    """Some rows of the reference: logits (the best `keep` of them, with their ids, where not all were kept)."""

    logits: Array
    ids: Array | None
    stats: dict[str, Array]


class Rows:
    """A folder of reference rows."""

    def __init__(self, folder: str | Path, vocabulary: int, keep: int) -> None:
        self.folder = Path(folder)
        self.vocabulary = vocabulary
        self.keep = keep

    def complete(self, name: str) -> bool:
        return self._stats(name).is_file() and self._rows(name).is_file()

    def stats(self, name: str) -> dict[str, Array]:
        """The few numbers per row."""
        import numpy as np

        table = np.load(self._stats(name), allow_pickle=False)
        return {column: table[:, i] for i, column in enumerate(COLUMNS)}

    def write(self, name: str) -> Writer:
        return Writer(self, name)

    def read(self, name: str) -> Reader:
        return Reader(self, name)

    def _tag(self) -> str:
        return f"top{self.keep}" if self.keep else "full"

    def _rows(self, name: str) -> Path:
        return self.folder / f"{name}-{self._tag()}.f32"

    def _stats(self, name: str) -> Path:
        return self.folder / f"{name}-{self._tag()}.npy"


class Writer:
    """Takes a document's rows in order; nothing is there until `close`."""

    def __init__(self, rows: Rows, name: str) -> None:
        self.rows = rows
        self.name = name
        rows.folder.mkdir(parents=True, exist_ok=True)
        fd, self.temporary = tempfile.mkstemp(dir=rows.folder, prefix=f".{name}-")
        self.file = os.fdopen(fd, "wb")
        self.table: list[Array] = []

    def add(self, logits: Array, targets: Array) -> dict[str, Array]:
        """Append rows (already cut to the vocabulary); gives back their statistics."""
        import numpy as np

        stats = statistics(logits, targets)
        if self.rows.keep:
            best, kept = _best(logits, self.rows.keep)
            stats["rest_entropy"] = _rest_entropy(logits, best, stats["normalizer"])
            # row by row, since whoever reads may take other blocks than were written
            self.file.write(np.concatenate([kept.view(np.int32), best], axis=1).tobytes())
        else:
            self.file.write(logits.tobytes())
        self.table.append(np.stack([stats[column] for column in COLUMNS], axis=1))
        return stats

    def close(self) -> None:
        """Make what was written appear, the numbers last."""
        import numpy as np

        self.file.close()
        Path(self.temporary).replace(self.rows._rows(self.name))
        fd, temporary = tempfile.mkstemp(dir=self.rows.folder, prefix=f".{self.name}-")
        with os.fdopen(fd, "wb") as file:
            np.save(file, np.concatenate(self.table) if self.table else np.zeros((0, len(COLUMNS))), allow_pickle=False)
        Path(temporary).replace(self.rows._stats(self.name))

    def abandon(self) -> None:
        Path(self.temporary).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk fails here again
            self.file.close()


class Reader:
    """Gives a document's rows back in order, never more than asked for in memory."""

    def __init__(self, rows: Rows, name: str) -> None:
        self.rows = rows
        self.file = rows._rows(name).open("rb", buffering=0)
        self.table = rows.stats(name)
        self.at = 0

    def take(self, count: int) -> Block:
        import numpy as np

        keep = self.rows.keep
        if keep:
            both = self._array(np.int32, count, 2 * keep)
            logits, ids = np.ascontiguousarray(both[:, :keep]).view(np.float32), both[:, keep:]
        else:
            logits, ids = self._array(np.float32, count, self.rows.vocabulary), None
        stats = {column: values[self.at : self.at + count] for column, values in self.table.items()}
        self.at += count
        return Block(logits, ids, stats)

    def _array(self, kind: Any, count: int, width: int) -> Array:
        import numpy as np

        array = np.empty((count, width), dtype=kind)
        if self.file.readinto(array.data.cast("B")) != array.nbytes:
            raise RuntimeError("the reference's rows on disk are shorter than they should be; clean the cache")
        return array

    def close(self) -> None:
        self.file.close()


def block_rows(vocabulary: int) -> int:
    """How many rows make a block."""
    return max(1, BLOCK_BYTES // (vocabulary * 4))


def statistics(logits: Array, targets: Array) -> dict[str, Array]:
    """What is kept of each row: its log of the sum of exponentials, its best token, and the counted token's logit."""
    import numpy as np

    rows = np.arange(len(logits))
    best = logits.argmax(axis=1)
    top = logits[rows, best]
    with np.errstate(all="ignore"):  # NaN and infinity go on as themselves
        exponentials = logits - top[:, None]
        np.exp(exponentials, out=exponentials)
        # summed in pairs, so float32 loses next to nothing, and float64 would cost as much as all the rest
        normalizer = top.astype(np.float64) + np.log(exponentials.sum(axis=1).astype(np.float64))
    return {
        "normalizer": normalizer,
        "best": best.astype(np.float64),
        "target_logit": logits[rows, targets].astype(np.float64),
        "rest_entropy": np.zeros(len(logits)),
    }


def _best(logits: Array, keep: int) -> tuple[Array, Array]:
    import numpy as np

    best = np.argpartition(logits, -keep, axis=1)[:, -keep:].astype(np.int32)
    return best, np.take_along_axis(logits, best, axis=1)


def _rest_entropy(logits: Array, best: Array, normalizer: Array) -> Array:
    """Minus the sum of p·log p over all that was not kept."""
    import numpy as np

    logs = logits.astype(np.float64) - normalizer[:, None]
    np.put_along_axis(logs, best, -np.inf, axis=1)
    with np.errstate(all="ignore"):
        terms = np.where(np.isfinite(logs), -np.exp(logs) * logs, 0.0)
    total: Array = terms.sum(axis=1)
    return total
