"""Statistics of a contender against the reference: divergence, agreement, perplexity, and the word for them.

The unit is the document: tokens of one text are not independent. Intervals come from a bootstrap that draws documents,
the same ones for contender and reference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]

STRATA = ("text", "expected", "samples", "passages")  # in the order in which one leads
TITLES = {
    "text": "your text",
    "expected": "your expected answers",
    "samples": "the reference's own answers, drawn at temperature 1",
    "passages": "passages that weighin brings",
}
WINDOW = re.compile(r"#\d+$")  # of a text that was cut into several
DRAWS = 2000
LEVEL = 0.95
ENOUGH = 6  # documents; below that low and high are the range of the documents

# The words, by the mean KL divergence in nats per token. What they are anchored to is in benchmarks/README.md.
INDISTINGUISHABLE = "indistinguishable"
BROKEN = "broken"
WORDS = ((0.01, INDISTINGUISHABLE), (0.1, "slightly lower"), (1.0, "lower"), (math.inf, BROKEN))


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A value with its interval: "95%" by bootstrap over documents, "range" of the documents where there are few."""

    value: float
    low: float | None
    high: float | None
    interval: str | None


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of text, never pooled with another."""

    name: str
    documents: int
    positions: int
    kl: Figure | None  # the mean; None if a probability was no number
    kl_median: Figure | None
    kl_p95: Figure | None
    kl_p99: Figure | None
    kl_max: float | None  # the largest seen: an observation, which has no interval
    top1_agreement: Figure | None
    perplexity: Figure | None
    reference_perplexity: Figure | None
    perplexity_ratio: Figure | None
    kl_slack: float | None  # where only the reference's best tokens were kept: the mean KL may be larger by this
    not_numbers: int  # positions whose probabilities were NaN or infinite


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """What a contender loses against the reference, on each kind of text; the first stratum leads."""

    strata: list[Stratum]
    word: str
    why: str

    @property
    def headline(self) -> Stratum:
        return self.strata[0]


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found on one document, token by token; None where it was no number."""

    stratum: str
    name: str
    kl: list[float | None]
    nll: list[float | None]
    same: list[int]
    reference_nll: list[float | None]
    slack: list[float | None] | None = None


def judge(documents: Sequence[Scored]) -> Fidelity | None:
    """The fidelity of a contender from its scored documents; None without any."""
    strata = [_stratum(name, mine) for name in STRATA if (mine := [d for d in documents if d.stratum == name])]
    if not strata:
        return None
    # the first kind of text leads that has enough documents for an interval; the user's own always
    lead = next((s for s in strata if s.name == "text" or s.documents >= ENOUGH), strata[0])
    strata = [lead, *(s for s in strata if s is not lead)]
    word, why = word_for(strata)
    return Fidelity(strata=strata, word=word, why=why)


def word_for(strata: Sequence[Stratum]) -> tuple[str, str]:
    """The word by the leading stratum's interval of the mean KL; no number anywhere is "broken"."""
    bad = sum(s.not_numbers for s in strata)
    if bad:
        return BROKEN, f"{bad} of {sum(s.positions for s in strata)} positions gave NaN or infinite probabilities"
    figure = strata[0].kl
    assert figure is not None
    least = figure.value if figure.low is None else figure.low
    most = (figure.value if figure.high is None else figure.high) + (strata[0].kl_slack or 0.0)
    low, high = _class(least), _class(most)
    words = [word for _, word in WORDS]
    if low == high:
        return words[high], _limits(high)
    return f"{words[low]} to {words[high]}", "the interval of the KL divergence reaches over the limit between them"


def _class(kl: float) -> int:
    return next(i for i, (limit, _) in enumerate(WORDS) if kl <= limit)


def _limits(number: int) -> str:
    above = WORDS[number - 1][0] if number else 0.0
    below = WORDS[number][0]
    return f"KL above {above:g}" if math.isinf(below) else f"KL {above:g} to {below:g} nats a token"


def _stratum(name: str, documents: Sequence[Scored]) -> Stratum:
    import numpy as np

    kl, nll, theirs, same = (
        np.array([v if v is not None else math.nan for d in documents for v in getattr(d, field)], dtype=np.float64)
        for field in ("kl", "nll", "reference_nll", "same")
    )
    bad = int((~np.isfinite(kl) | ~np.isfinite(nll)).sum())
    # the windows of a long text are one document: they are no more independent than its sentences
    texts = list(dict.fromkeys(WINDOW.sub("", d.name) for d in documents))
    owners = [texts.index(WINDOW.sub("", d.name)) for d in documents]
    which = np.repeat(owners, [len(d.kl) for d in documents])
    base: dict[str, Any] = {"name": name, "documents": len(texts), "positions": len(kl), "not_numbers": bad}
    slack = [s for d in documents if d.slack for s in d.slack]
    known = Figures(which, len(texts))
    reference = known.mean(theirs, math.exp)
    if bad:
        return Stratum(
            **base, kl=None, kl_median=None, kl_p95=None, kl_p99=None, kl_max=None, top1_agreement=None, kl_slack=None,
            perplexity=None, reference_perplexity=reference, perplexity_ratio=None,
        )  # fmt: skip
    return Stratum(
        **base,
        kl=known.mean(kl),
        kl_median=known.quantile(kl, 0.5),
        kl_p95=known.quantile(kl, 0.95),
        kl_p99=known.quantile(kl, 0.99),
        kl_max=float(kl.max()),
        top1_agreement=known.mean(same),
        perplexity=known.mean(nll, math.exp),
        reference_perplexity=reference,
        perplexity_ratio=known.mean(nll - theirs, math.exp),
        kl_slack=float(np.mean([math.inf if s is None else s for s in slack])) if slack else None,
    )


class Figures:
    """Values and intervals of per-token numbers whose tokens belong to documents; every figure by the same draws."""

    def __init__(self, which: Array, documents: int) -> None:
        import numpy as np

        self.which = which
        self.documents = documents
        self.sizes = np.bincount(which, minlength=documents).astype(np.float64)
        random = np.random.default_rng(20250101)
        picks = random.integers(0, documents, size=(DRAWS, documents))
        self.weights = np.apply_along_axis(np.bincount, 1, picks, minlength=documents).astype(np.float64)

    def mean(self, values: Array, then: Callable[[float], float] = float) -> Figure:
        """The mean over tokens, with `then` applied to it and its bounds."""
        import numpy as np

        sums = np.bincount(self.which, weights=values, minlength=self.documents)
        drawn = (self.weights @ sums) / (self.weights @ self.sizes)
        return self._figure(float(values.mean()), drawn, sums / self.sizes, then)

    def quantile(self, values: Array, share: float) -> Figure:
        """A quantile over tokens."""
        import numpy as np

        order = np.argsort(values, kind="stable")
        ranked, owners = values[order], self.which[order]

        def of(weights: Array) -> float:
            running = np.cumsum(weights[owners])
            return float(ranked[min(int(np.searchsorted(running, share * running[-1])), len(ranked) - 1)])

        each = [
            float(np.quantile(values[self.which == d], share, method="inverted_cdf")) for d in range(self.documents)
        ]
        drawn = np.array([of(weights) for weights in self.weights]) if self.documents >= ENOUGH else np.zeros(0)
        return self._figure(of(np.ones(self.documents)), drawn, np.array(each), float)

    def _figure(self, value: float, drawn: Array, each: Array, then: Callable[[float], float]) -> Figure:
        import numpy as np

        if self.documents < 2:
            return Figure(value=_safe(then, value), low=None, high=None, interval=None)
        if self.documents < ENOUGH:
            low, high, kind = float(each.min()), float(each.max()), "range"
        else:
            tail = expanded_tail(self.documents)
            low, high = (float(q) for q in np.quantile(drawn, [tail, 1 - tail]))
            low, high, kind = min(low, value), max(high, value), "95%"
        return Figure(value=_safe(then, value), low=_safe(then, low), high=_safe(then, high), interval=kind)


def _safe(then: Callable[[float], float], value: float) -> float:
    try:
        return then(value)
    except OverflowError:
        return math.inf


def expanded_tail(n: int) -> float:
    """The tail of the bootstrap's distribution to cut off, so that a percentile interval of few documents is as wide
    as Student's would be: the plain percentiles are too narrow for them (Hesterberg's expanded percentile interval)."""
    from scipy.special import ndtr, stdtrit

    return float(ndtr(-math.sqrt(n / (n - 1)) * stdtrit(n - 1, 1 - (1 - LEVEL) / 2)))
