"""The figures of fidelity against plain computations, their intervals against simulation, the words."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighin import fidelity
from weighin.fidelity import Figures, Scored, judge, word_for


def scored(stratum="passages", seed=0, tokens=40, kl=None, same=1, shift=0.0, name=None):
    draw = np.random.default_rng(seed)
    nll = draw.exponential(2.0, tokens)
    return Scored(
        stratum=stratum,
        name=name or f"d{seed}",
        kl=list(draw.exponential(0.05, tokens)) if kl is None else [kl] * tokens,
        nll=list(nll + shift),
        same=[same] * tokens,
        reference_nll=list(nll),
    )


def test_figures_are_those_of_a_plain_computation():
    documents = [scored(seed=i, tokens=20 + i, shift=0.1) for i in range(8)]
    found = judge(documents).headline
    kl = np.concatenate([d.kl for d in documents])
    nll = np.concatenate([d.nll for d in documents])
    assert found.positions == len(kl) and found.documents == 8
    assert found.kl.value == pytest.approx(kl.mean())
    assert found.kl_max == kl.max()
    assert found.kl_median.value == pytest.approx(np.quantile(kl, 0.5, method="inverted_cdf"))
    assert found.kl_p95.value == pytest.approx(np.quantile(kl, 0.95, method="inverted_cdf"))
    assert found.kl_p99.value == pytest.approx(np.quantile(kl, 0.99, method="inverted_cdf"))
    assert found.perplexity.value == pytest.approx(math.exp(nll.mean()))
    assert found.perplexity_ratio.value == pytest.approx(math.exp(0.1))
    # the same shift in every document: the pairing leaves nothing to be unsure of
    assert found.perplexity_ratio.high == pytest.approx(math.exp(0.1)) == pytest.approx(found.perplexity_ratio.low)
    assert found.perplexity.low < found.perplexity.value < found.perplexity.high


def test_kinds_of_text_are_never_pooled_and_the_users_own_lead():
    documents = [scored(name, seed=i, kl=k) for i, (name, k) in enumerate([("passages", 0.5), ("text", 0.001)] * 6)]
    found = judge(documents)
    assert [(s.name, round(s.kl.value, 9)) for s in found.strata] == [("text", 0.001), ("passages", 0.5)]
    assert found.word == "indistinguishable"


def test_what_is_no_number_is_broken_and_gives_no_figure():
    good = [scored(seed=i) for i in range(6)]
    bad = Scored(stratum="passages", name="b", kl=[None, 0.1], nll=[1.0, None], same=[0, 1], reference_nll=[1.0, 1.0])
    found = judge([*good, bad])
    assert found.word == "broken" and "2 of 242 positions" in found.why
    assert found.headline.kl is None and found.headline.perplexity is None and found.headline.not_numbers == 2


@pytest.mark.parametrize(
    ("kl", "word"),
    [
        (0.0, "indistinguishable"),
        (0.005, "indistinguishable"),
        (0.05, "slightly lower"),
        (0.5, "lower"),
        (3.0, "broken"),
    ],
)
def test_the_word_goes_by_the_mean_kl(kl, word):
    assert judge([scored(seed=i, kl=kl) for i in range(6)]).word == word


def test_an_interval_over_a_limit_names_both_words():
    documents = [scored(seed=i, kl=0.05 if i % 2 else 0.2) for i in range(8)]
    found = judge(documents)
    assert found.word == "slightly lower to lower"
    assert found.headline.kl.low < 0.1 < found.headline.kl.high


def test_few_documents_have_a_range_and_one_has_none():
    few = judge([scored(seed=i, kl=k) for i, k in enumerate((0.2, 0.3, 0.4))]).headline.kl
    assert (few.low, few.high, few.interval) == (pytest.approx(0.2), pytest.approx(0.4), "range")
    one = judge([scored(kl=0.2)]).headline.kl
    assert (one.value, one.low, one.interval) == (pytest.approx(0.2), None, None)


def test_nothing_scored_is_no_fidelity():
    assert judge([]) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(0, 5), min_size=1, max_size=20), min_size=2, max_size=12))
def test_a_value_lies_between_its_bounds(values):
    which = np.repeat(np.arange(len(values)), [len(v) for v in values])
    flat = np.concatenate(values)
    figures = Figures(which, len(values))
    for found in (figures.mean(flat), figures.quantile(flat, 0.95), figures.mean(flat, math.exp)):
        if found.interval == "95%":
            assert found.low <= found.value <= found.high


@pytest.mark.parametrize("documents", [6, 12, 30])
def test_the_interval_covers_the_truth(documents):
    """Documents differ, tokens of one are alike, lengths vary: what a bootstrap over tokens would be fooled by."""
    draw = np.random.default_rng(documents)
    truth, hits, trials = 0.1, 0, 400
    for _ in range(trials):
        sizes = draw.integers(20, 80, documents)
        levels = truth * draw.lognormal(-0.08, 0.4, documents)
        values = np.concatenate([draw.exponential(level, size) for level, size in zip(levels, sizes, strict=True)])
        found = Figures(np.repeat(np.arange(documents), sizes), documents).mean(values)
        hits += found.low <= truth <= found.high
    assert 0.90 <= hits / trials <= 0.985


def test_the_words_and_their_limits_are_in_order():
    limits = [limit for limit, _ in fidelity.WORDS]
    assert limits == sorted(limits) and math.isinf(limits[-1])
    assert word_for(judge([scored(seed=i, kl=0.05) for i in range(6)]).strata)[1] == "KL 0.01 to 0.1 nats a token"


def test_the_windows_of_one_text_are_one_document():
    documents = [scored("text", seed=i, kl=0.1 * i, name=f"book#{i}" if i > 1 else "book") for i in range(1, 9)]
    found = judge(documents).headline
    assert (found.documents, found.kl.interval) == (1, None)


def test_a_text_with_too_few_documents_does_not_lead_unless_it_is_the_users_own():
    few = [scored("expected", seed=9, kl=0.5, name="e")]
    many = [scored("samples", seed=i, kl=0.001, name=f"s{i}") for i in range(6)]
    assert [s.name for s in judge([*few, *many]).strata] == ["samples", "expected"]
    own = [scored("text", seed=9, kl=0.5, name="t")]
    assert judge([*own, *many]).headline.name == "text"


def test_what_was_not_kept_of_the_reference_counts_against_the_word():
    import msgspec

    documents = [msgspec.structs.replace(scored(seed=i, kl=0.005, name=f"d{i}"), slack=[0.3] * 40) for i in range(6)]
    assert judge(documents).word == "indistinguishable to lower"


def test_a_lower_bound_of_nothing_is_a_bound():
    documents = [scored(seed=i, kl=0.0 if i else 0.04, name=f"d{i}") for i in range(2)]
    assert judge(documents).word == "indistinguishable to slightly lower"


def test_a_quantile_lies_within_the_range_of_few_documents():
    documents = [scored(seed=i, tokens=20, name=f"d{i}") for i in range(2)]
    found = judge(documents).headline.kl_p99
    assert found.low <= found.value <= found.high
