"""KL, agreement and perplexity of the worker against a plain float64 computation, whole rows and best-k alike."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighin import reference_rows
from weighin.probes import likelihood
from weighin.reference_rows import Rows


def plain(reference, contender, targets):
    """The same in float64, as the textbook writes it."""
    p, q = (logits.astype(np.float64) for logits in (reference, contender))
    p = p - np.log(np.exp(p - p.max(1, keepdims=True)).sum(1, keepdims=True)) - p.max(1, keepdims=True)
    q = q - np.log(np.exp(q - q.max(1, keepdims=True)).sum(1, keepdims=True)) - q.max(1, keepdims=True)
    rows = np.arange(len(p))
    return (np.exp(p) * (p - q)).sum(1), -q[rows, targets], -p[rows, targets]


def against(tmp_path, reference, contender, targets, keep=0):
    rows = Rows(tmp_path, reference.shape[1], keep)
    writer = rows.write("d")
    writer.add(reference.copy(), targets)
    writer.close()
    reader = rows.read("d")
    found = likelihood.divergence(contender.copy(), targets, reader.take(len(reference)))
    reader.close()
    return found, rows.stats("d")


def logits(seed, rows=7, vocabulary=5000, scale=4.0, shift=0.0):
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * scale + shift).astype(np.float32)


@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.01, 0.3, 3.0])
@pytest.mark.parametrize("shift", [0.0, 40.0, -300.0])
def test_equal_to_float64(tmp_path, noise, shift):
    reference = logits(1, shift=shift)
    contender = (reference + noise * logits(2, scale=1.0)).astype(np.float32)
    targets = np.arange(7) * 11
    found, stats = against(tmp_path, reference, contender, targets)
    kl, nll, reference_nll = plain(reference, contender, targets)
    assert found["kl"] == pytest.approx(kl, abs=2e-6 * max(1, abs(shift) / 40), rel=1e-4)
    assert found["nll"] == pytest.approx(nll, abs=1e-4)
    assert stats["normalizer"] - stats["target_logit"] == pytest.approx(reference_nll, abs=1e-4)
    assert list(found["same"]) == list(reference.argmax(1) == contender.argmax(1))


def test_the_same_logits_diverge_by_nothing(tmp_path):
    reference = logits(3, vocabulary=50_000)
    found, _ = against(tmp_path, reference, reference, np.zeros(7, dtype=int))
    assert found["kl"].max() < 1e-6 and found["same"].all()


def test_a_shift_of_all_logits_changes_nothing(tmp_path):
    reference = logits(3)
    found, _ = against(tmp_path, reference, reference + np.float32(8.0), np.zeros(7, dtype=int))
    assert found["kl"].max() < 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 300), st.floats(0.0, 4.0), st.floats(0.1, 6.0))
def test_with_the_best_alone_the_truth_lies_between_the_bounds(tmp_path_factory, seed, keep, noise, scale):
    reference = logits(seed, rows=3, vocabulary=400, scale=scale)
    contender = (reference + noise * logits(seed + 1, rows=3, vocabulary=400, scale=1.0)).astype(np.float32)
    targets = np.array([0, 1, 2])
    found, _ = against(tmp_path_factory.mktemp("rows"), reference, contender, targets, keep)
    kl, nll, _ = plain(reference, contender, targets)
    assert (found["kl"] <= kl + 1e-5).all()
    assert (found["kl"] + found["slack"] >= kl - 1e-5).all()
    assert found["nll"] == pytest.approx(nll, abs=1e-4)


def test_nan_and_infinity_stay_what_they_are(tmp_path):
    reference = logits(5)
    contender = reference.copy()
    contender[0, 3], contender[1, 3], contender[2, :] = np.nan, np.inf, -np.inf
    found, _ = against(tmp_path, reference, contender, np.zeros(7, dtype=int))
    assert not np.isfinite(found["kl"][:3]).any() or not np.isfinite(found["nll"][:3]).any()
    bad = [None in likelihood._rounded(np.array([k, n])) for k, n in zip(found["kl"], found["nll"], strict=True)]
    assert bad == [True, True, True, False, False, False, False]


def test_rows_on_disk_are_whole_or_not_there(tmp_path):
    rows = Rows(tmp_path, 10, 0)
    writer = rows.write("d")
    writer.add(logits(1, vocabulary=10), np.zeros(7, dtype=int))
    assert not rows.complete("d")
    writer.abandon()
    assert not rows.complete("d") and not list(tmp_path.iterdir())


def test_rows_that_were_cut_short_are_an_error(tmp_path):
    rows = Rows(tmp_path, 10, 0)
    writer = rows.write("d")
    writer.add(logits(1, vocabulary=10), np.zeros(7, dtype=int))
    writer.close()
    file = next(tmp_path.glob("*.f32"))
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(RuntimeError, match="shorter"):
        rows.read("d").take(7)


def test_how_much_is_kept_follows_the_cap():
    assert reference_rows.how_many_to_keep(4000, 262_144, int(8e9)) == 0
    assert 4000 * reference_rows.bytes_per_row(262_144, 0) == pytest.approx(4.2e9, rel=0.01)
    kept = reference_rows.how_many_to_keep(4000, 262_144, int(1e9))
    assert 0 < kept < 262_144 and 4000 * reference_rows.bytes_per_row(262_144, kept) <= 1e9


def test_the_row_before_a_counted_token_predicts_it():
    assert reference_rows.counted_rows([[3, 6], [9, 10]]) == [2, 3, 4, 8]


def test_the_best_alone_may_be_read_in_other_blocks_than_they_were_written_in(tmp_path):
    """Engines give their logits in pieces of their own sizes."""
    reference, targets = logits(7, rows=9, vocabulary=300), np.arange(9)
    rows = Rows(tmp_path, 300, 20)
    writer = rows.write("d")
    for start, end in ((0, 4), (4, 9)):
        writer.add(reference[start:end].copy(), targets[start:end])
    writer.close()
    reader = rows.read("d")
    blocks = [reader.take(count) for count in (1, 6, 2)]
    kept = np.concatenate([block.logits for block in blocks])
    ids = np.concatenate([block.ids for block in blocks])
    assert (kept == np.take_along_axis(reference, ids, axis=1)).all()
    assert (np.sort(kept, axis=1) == np.sort(reference, axis=1)[:, -20:]).all()
