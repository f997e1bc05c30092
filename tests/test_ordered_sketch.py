# SPDX-License-Identifier: Apache-2.0
"""Sketches in row order: a function of the rows, however they are divided."""

import numpy as np
import pytest
from ordered_rows import BLOCK, EPS, ROWS, make_rows, sketch_rows
from test_sketch import ADVERSARIES, ORDERS, WEIGHTS, Ranks, check_summary

import jboost as jb
from jboost.sketches.ordered import OrderedSketch, block_size


def assert_same(found, expected):
    for array, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def sketch_column(values, weight, eps, batch=3000):
    sketch = OrderedSketch(1, eps)
    for start in range(0, len(values), batch):
        rows = slice(start, start + batch)
        sketch.add(values[rows, None], weight[rows])
    return sketch


# The same bits.


@pytest.mark.parametrize("weighted", [False, True])
def test_batches_do_not_change_the_summaries(weighted):
    x, weight = make_rows(ROWS)
    weight = weight if weighted else None
    sizes = [[ROWS], [1, 2, 5000], [BLOCK], [BLOCK - 1, 1], [517]]
    sketches = [sketch_rows(x, weight, each) for each in sizes]
    expected = sketches[0]
    for feature in range(x.shape[1]):
        for other in sketches[1:]:
            assert_same(other.summarize(feature), expected.summarize(feature))
    assert not expected.summarize(0).is_exact
    for other in sketches[1:]:
        assert_same(other.make_bins(5).thresholds, expected.make_bins(5).thresholds)


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_are_those_of_the_docstring(whole):
    assert block_size(EPS) == BLOCK
    x, _ = make_rows(BLOCK * (8 if whole else 7))
    summary = sketch_rows(x, None, [1000]).summarize(0)
    # Level 1 keeps 3 / eps + 1 entries of a block, level 2 6 / eps + 1 of 8 blocks.
    assert summary.num_entries == (97 if whole else 7 * 49)


def test_streams_have_the_same_thresholds_for_any_batches():
    x, weight = make_rows(50_000)
    weight = np.abs(weight) + 0.5
    found = []
    for size in (50_000, 7919):
        source = jb.streams.array_batches(
            x, x[:, 1], sample_weight=weight, batch_rows=size
        )
        found.append(jb.stream(source, memory="64 MiB").prepare(16).bins.thresholds)
    np.testing.assert_array_equal(*found)


# What the summaries promise.


@pytest.mark.parametrize(("order", "weights"), ADVERSARIES)
def test_the_guarantee_holds_in_any_order_and_weight(order, weights):
    values = ORDERS[order]
    weight = WEIGHTS[weights](values)
    summary = sketch_column(values, weight, eps=0.2).summarize(0)
    check_summary(summary, 0.2, values[weight > 0], weight[weight > 0])


def test_three_levels_are_filled():
    """Or the test of the guarantee would show little."""
    summary = sketch_column(ORDERS["shuffled"], np.ones(40_000), 0.2).summarize(0)
    assert 0.2 * 0.2 * 40_000 < summary.error <= 0.2 * 40_000
    assert 40_000 // block_size(0.2) > 64


def test_heavy_values_do_not_widen_the_error_of_the_others():
    """The bound of 1.2 eps of the others' weight, for up to 1 / (8 eps) values."""
    rng = np.random.default_rng(5)
    eps, num_rows = 1 / 64, 100_000
    values = rng.normal(size=num_rows).astype(np.float32)
    heavy = rng.random(num_rows) < 0.7
    values[heavy] = rng.integers(0, 8, heavy.sum())
    weight = np.where(heavy, 1000.0, 1.0)
    summary = sketch_column(values, weight, eps).summarize(0)
    check_summary(summary, eps, values, weight)
    assert 0 < summary.error <= 1.2 * eps * weight[~heavy].sum()


@pytest.mark.parametrize("weighted", [False, True])
def test_few_distinct_values_are_exact(weighted):
    """24 / eps of them, of which a block has only a part."""
    rng = np.random.default_rng(6)
    values = np.arange(ROWS, dtype=np.float32) % 4001 // 3 % 384
    x = np.stack([values, rng.permutation(values), np.full(ROWS, np.nan)], axis=1)
    x = x.astype(np.float32)
    assert len(np.unique(values)) == 24 / EPS
    weight = rng.integers(0, 4, ROWS).astype(np.float64) if weighted else None
    sketch = sketch_rows(x, weight, [999])
    expected = jb.fit_bins(x, max_bins=5, sample_weight=weight)
    np.testing.assert_array_equal(sketch.make_bins(5).thresholds, expected.thresholds)
    counts = np.bincount(values.astype(np.int64), weight)
    for feature, total in [(0, counts), (1, None)]:
        summary = sketch.summarize(feature)
        assert summary.is_exact
        if total is not None:
            np.testing.assert_array_equal(summary.weight, total[total > 0])


def test_thresholds_lie_within_the_error_of_equal_shares():
    rng = np.random.default_rng(9)
    x = rng.lognormal(size=(60_000, 1)).astype(np.float32)
    weight = rng.integers(1, 30, 60_000).astype(np.float64)
    sketch = sketch_column(x[:, 0], weight, 1 / 264)
    assert not sketch.summarize(0).is_exact
    thresholds = np.asarray(sketch.make_bins(33).thresholds)[0, :31]
    ranks = Ranks(x[:, 0], weight.astype(np.int64))
    error = np.abs(ranks.upto(thresholds) - ranks.total * np.arange(1, 32) / 32)
    # The error of the sketch, and the value that the cut falls on.
    assert error.max() <= ranks.total / 264 + weight.max() * 2


VALUES = {
    "continuous": lambda rows: np.arange(rows) * 7919 % rows,
    "few": lambda rows: np.arange(rows) % 384,
    "runs": lambda rows: np.arange(rows) // 3,
    "mixed": lambda rows: np.where(np.arange(rows) // BLOCK % 2, np.arange(rows), 0),
}


@pytest.mark.parametrize("first_row", [0, BLOCK - 1, 5 * BLOCK])
@pytest.mark.parametrize("values", VALUES)
def test_memory_is_bounded(values, first_row):
    """Twice as many nodes and rows where another process has the rows before."""
    rows = 70 * BLOCK
    x = VALUES[values](rows).astype(np.float32)[:, None]
    sides, most = 1 + (first_row > 0), 0
    for height in range(7):
        ranks = {0: 48, 1: 96, 2: 160}[height // 3]  # 3, 6, 10 / eps
        most += max(8 * 49, 2 ** (height % 3) * (ranks + 1))
    sketch = OrderedSketch(1, EPS, first_row)
    for part in np.array_split(x, 100):
        sketch.add(part, None)
        assert sketch.num_bytes <= sides * (28 * most + 4 * BLOCK)


def test_a_sketch_copies_its_rows():
    batch = np.arange(50, dtype=np.float32)[:, None]
    sketch = OrderedSketch(1, EPS)
    sketch.add(batch, None)
    batch[:] = -1
    assert sketch.summarize(0).value.tolist() == list(range(50))
    assert repr(sketch) == "OrderedSketch(num_features=1, rows=0:50)"


def test_no_rows_give_one_bin():
    bins = OrderedSketch(3, EPS).make_bins(5)
    assert np.all(bins.thresholds == np.inf)
    assert bins.absent is None
