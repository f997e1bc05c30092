# SPDX-License-Identifier: Apache-2.0
"""Sketches of streamed rows: the guarantee under adversaries, merges, and bins."""

import pickle
from functools import reduce

import numpy as np
import pytest

import jboost as jb
from jboost.sketches.sketch import max_entries

INF = np.inf
EPS = 0.2  # small streams then reach level 3
ROWS = 40_000


class Ranks:
    """Exact ranks, in 64-bit integers."""

    def __init__(self, values, weight):
        order = np.argsort(values)
        self.values = values[order]
        self.sums = np.r_[0, np.cumsum(np.asarray(weight, np.int64)[order])]

    def below(self, at):
        return self.sums[np.searchsorted(self.values, at, side="left")]

    def upto(self, at):
        return self.sums[np.searchsorted(self.values, at, side="right")]

    @property
    def total(self):
        return self.sums[-1]


def check_guarantee(sketch, values, weight, feature=0):
    summary = jb.sketches.summarize_sketch(sketch, feature)
    check_summary(summary, sketch.eps, values, weight)


def check_summary(summary, eps, values, weight):
    """Bounds hold at every value and between them, and are no wider than eps."""
    ranks = Ranks(values, weight)
    distinct = np.unique(values)
    with np.errstate(over="ignore"):
        beyond = np.nextafter(distinct, np.float32(INF))
    at = np.concatenate([distinct, beyond, np.array([-INF, INF], np.float32)])
    found = jb.sketches.bound_ranks(summary, at)
    below, upto = ranks.below(found.value), ranks.upto(found.value)
    assert np.all(found.rmin <= below)
    assert np.all(found.rmax >= upto)
    assert np.all(found.weight <= upto - below)
    assert summary.total == ranks.total
    most = eps * ranks.total
    assert np.all(found.rmax - found.rmin - found.weight <= most)
    wanted = np.linspace(0, ranks.total, 101)
    answer = jb.sketches.query_ranks(summary, wanted)
    assert np.all(ranks.below(answer) - most / 2 <= wanted)
    assert np.all(ranks.upto(answer) + most / 2 >= wanted)


def stream(values, weight, sizes, eps=EPS):
    """Adds batches of one column, and looks at the memory after each."""
    sketch, start = jb.sketches.make_sketch(1, eps=eps), 0
    while start < len(values):
        rows = slice(start, start + int(next(sizes)))
        start = rows.stop
        sketch = jb.sketches.update_sketch(sketch, values[rows, None], weight[rows])
        assert sketch.num_entries <= max_entries(eps, min(start, len(values)))
    return sketch


def always(size):
    while True:
        yield size


def at_random(most):
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(1, most)


def alternate(first, second):
    return np.stack([first, second], axis=1).ravel()


RISING = np.arange(ROWS, dtype=np.float32)
HALF = ROWS // 2
ORDERS = {
    "rising": RISING,
    "falling": RISING[::-1],
    "shuffled": np.random.default_rng(0).permutation(RISING),
    "zoom in": alternate(RISING[:HALF], RISING[HALF:][::-1]),
    "zoom out": alternate(RISING[HALF:], RISING[:HALF][::-1]),
    "extremes": alternate(-RISING[:HALF], RISING[:HALF] + HALF),
    "organ pipe": np.r_[RISING[::2], RISING[::-2]],
    "blocks": RISING // 500,
    "comb": (RISING * 7919) % ROWS,
    "few": RISING % 7,
    "one": RISING * 0,
}
WEIGHTS = {
    "equal": lambda x: np.ones(ROWS),
    "with the value": lambda x: 1 + np.abs(x) // 10,
    "against it": lambda x: 1 + (ROWS - np.abs(x)) // 10,
    "geometric": lambda x: 2.0 ** (np.arange(ROWS) // 1400),
    "falling": lambda x: 2.0 ** (28 - np.arange(ROWS) // 1400),
    "giants": lambda x: np.where(np.arange(ROWS) % 997 == 5, 10.0**9, 1.0),
    "zeros": lambda x: (np.arange(ROWS) % 3 == 0) * 1.0,
}


# Every order, with equal weights and with others; all weights in two orders.
ADVERSARIES = [(order, "equal") for order in ORDERS]
ADVERSARIES += [
    (order, weights) for weights in WEIGHTS for order in ("shuffled", "zoom in")
    if weights != "equal"
]  # fmt: skip
ADVERSARIES += zip([*ORDERS][5:], [*WEIGHTS][1:], strict=True)


@pytest.mark.parametrize(("order", "weights"), ADVERSARIES)
def test_the_guarantee_holds_in_any_order_and_weight(order, weights):
    values = ORDERS[order]
    weight = WEIGHTS[weights](values)
    for sizes in (always(150), at_random(1500)):
        sketch = stream(values, weight, sizes)
        check_guarantee(sketch, values[weight > 0], weight[weight > 0])


def test_streams_fill_several_levels():
    """Or the tests of the guarantee would show little."""
    sketch = stream(ORDERS["shuffled"], np.ones(ROWS), always(150))
    assert len(sketch.levels[0]) >= 4
    error = jb.sketches.summarize_sketch(sketch, 0).error
    assert 0.2 * EPS * ROWS < error <= EPS * ROWS


def test_one_row_at_a_time():
    values = np.random.default_rng(1).normal(size=3000).astype(np.float32)
    sketch = stream(values, np.ones(3000), always(1), eps=0.4)
    assert len(sketch.levels[0]) >= 3
    check_guarantee(sketch, values, np.ones(3000))


def floats_between(low, high, size):
    """Evenly spaced in the order of positive floats; high not among them."""
    ends = np.array([low, high], np.float32).view(np.int32)
    spaced = np.linspace(int(ends[0]) + 1, int(ends[1]), size, endpoint=False)
    return np.unique(spaced.astype(np.int32)).view(np.float32)


@pytest.mark.parametrize("size", [40, 400])
@pytest.mark.parametrize("grow", [1.0, 1.2])
def test_an_adversary_who_looks_for_the_widest_gap(size, grow):
    """Each batch goes where the sketch knows least: the argument of lower bounds."""
    sketch = jb.sketches.make_sketch(1, eps=0.2)
    values, weight, low, high = [], [], np.float32(1), np.float32(2**60)
    for batch in range(60):
        values.append(np.random.default_rng(batch).permutation(
            floats_between(low, high, size)
        ))  # fmt: skip
        weight.append(np.full(len(values[-1]), np.floor(100 * grow**batch)))
        sketch = jb.sketches.update_sketch(sketch, values[-1][:, None], weight[-1])
        summary = jb.sketches.summarize_sketch(sketch, 0)
        after = (summary.rmin + summary.weight)[:-1]
        gap = (summary.rmax - summary.weight)[1:] - after
        room = np.diff(summary.value.view(np.int32)) > 2 * size
        widest = np.argmax(np.where(room, gap, -1))
        low, high = summary.value[widest : widest + 2]
    check_guarantee(sketch, np.concatenate(values), np.concatenate(weight))


# Merges.


def make_parts(sizes):
    rng = np.random.default_rng(2)
    for number, size in enumerate(sizes):
        values = rng.normal(number % 5, 1 + number % 3, size).astype(np.float32)
        weight = rng.integers(0, 2 ** (number % 20), size, endpoint=True)
        yield values, weight.astype(np.float64)


def merge_balanced(parts):
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [reduce(jb.sketches.merge_sketches, pair) for pair in pairs]
    return parts[0]


def merge_at_random(parts):
    parts, rng = list(parts), np.random.default_rng(3)
    while len(parts) > 1:
        rng.shuffle(parts)
        parts.append(jb.sketches.merge_sketches(parts.pop(), parts.pop()))
    return parts[0]


TREES = {
    "chain": lambda parts: reduce(jb.sketches.merge_sketches, parts),
    "other way": lambda parts: reduce(
        lambda a, b: jb.sketches.merge_sketches(b, a), parts
    ),
    "balanced": merge_balanced,
    "random": merge_at_random,
}
SIZES = {
    "small": [30] * 400,
    "equal": [700] * 32,
    "growing": [1 + 3 * i * i for i in range(30)],
    "a giant": [12_000] + [5] * 100,
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_guarantee_holds_in_any_tree_of_merges(tree, sizes):
    rows = list(make_parts(SIZES[sizes]))
    merged = TREES[tree]([stream(*part, at_random(500)) for part in rows])
    values, weight = (np.concatenate(column) for column in zip(*rows, strict=True))
    check_guarantee(merged, values[weight > 0], weight[weight > 0])
    assert merged.num_entries <= max_entries(EPS, len(values))


def stretch(sketch, factor):
    """The sketch of the rows, each value times the factor."""
    levels = tuple(
        summary._replace(value=summary.value * np.float32(factor))
        for summary in sketch.levels[0]
    )
    return sketch._replace(levels=(levels,))


def test_long_streams_need_little_memory():
    """Merged with a stretched copy a sketch stands for twice the rows: 2^30 * 5000."""
    rng = np.random.default_rng(4)
    sketch = stream(rng.random(5000, np.float32), np.ones(5000), always(1000))
    assert not sketch.pending
    for _ in range(30):
        sketch = jb.sketches.merge_sketches(sketch, stretch(sketch, rng.uniform(1, 2)))
    num_rows = 5000 * 2**30
    assert sketch.num_entries <= max_entries(EPS, num_rows) < 25_000
    assert len(sketch.levels[0]) > 6
    summary = jb.sketches.summarize_sketch(sketch, 0)
    assert summary.total == num_rows
    assert summary.error <= EPS * num_rows


# Rows and features.


def test_heavy_values_do_not_widen_the_error_of_the_others():
    """The bound of 1.2 eps of the others' weight, for up to 1 / (8 eps) values."""
    rng = np.random.default_rng(5)
    eps, num_rows = 1 / 64, 100_000
    for num_heavy in (1, 8):
        values = rng.normal(size=num_rows).astype(np.float32)
        heavy = rng.random(num_rows) < 0.7
        values[heavy] = rng.integers(0, num_heavy, heavy.sum())
        weight = np.where(heavy, 1000.0, 1.0)
        sketch = stream(values, weight, always(5000), eps=eps)
        assert len(sketch.levels[0]) > 1
        check_guarantee(sketch, values, weight)
        error = jb.sketches.summarize_sketch(sketch, 0).error
        assert 0 < error <= 1.2 * eps * weight[~heavy].sum()


def test_features_are_sketched_alone():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(4000, 4)).astype(np.float32)
    x[:, 1] = np.round(x[:, 1])
    x[rng.random(x.shape) < 0.2] = np.nan
    x[:, 3] = np.nan
    weight = rng.integers(0, 3, 4000).astype(np.float64)
    sketch = jb.sketches.make_sketch(4, eps=EPS)
    for rows in np.split(np.arange(4000), 20):
        sketch = jb.sketches.update_sketch(sketch, x[rows], weight[rows])
    np.testing.assert_array_equal(sketch.missing, weight @ np.isnan(x))
    for feature in range(3):
        known = ~np.isnan(x[:, feature]) & (weight > 0)
        check_guarantee(sketch, x[known, feature], weight[known], feature)
    assert jb.sketches.summarize_sketch(sketch, 1).is_exact
    assert jb.sketches.summarize_sketch(sketch, 3).num_entries == 0


def test_weight_of_one_is_the_weight_of_rows_without():
    x = np.random.default_rng(7).normal(size=(3000, 1))
    x[::9] = np.nan
    bare, weighted, mixed = (jb.sketches.make_sketch(1, eps=EPS) for _ in range(3))
    for number, rows in enumerate(np.split(np.arange(3000), 30)):
        ones = np.ones(100)
        bare = jb.sketches.update_sketch(bare, x[rows])
        weighted = jb.sketches.update_sketch(weighted, x[rows], ones)
        mixed = jb.sketches.update_sketch(mixed, x[rows], ones if number % 2 else None)
    for other in (weighted, mixed):
        assert bare.missing == other.missing
        for field, expected in zip(
            jb.sketches.summarize_sketch(other, 0),
            jb.sketches.summarize_sketch(bare, 0),
            strict=True,
        ):
            np.testing.assert_array_equal(field, expected)


def test_sketches_are_values():
    """An update leaves the old sketch and needs no more of the batch."""
    batch = np.arange(50, dtype=np.float32)[:, None]
    empty = jb.sketches.make_sketch(1)
    sketch = jb.sketches.update_sketch(empty, batch)
    batch[:] = -1
    jb.sketches.merge_sketches(sketch, sketch)
    assert jb.sketches.summarize_sketch(empty, 0).total == 0
    assert jb.sketches.summarize_sketch(sketch, 0).value.tolist() == list(range(50))
    copied = jb.sketches.merge_sketches(pickle.loads(pickle.dumps(sketch)), sketch)
    assert jb.sketches.summarize_sketch(copied, 0).total == 100


# Bins.


def streamed_bins(x, weight=None, *, max_bins=256, batch=500):
    sketch = jb.sketches.make_sketch(x.shape[1], eps=1 / (8 * max_bins))
    for start in range(0, len(x), batch):
        rows = slice(start, start + batch)
        part = None if weight is None else weight[rows]
        sketch = jb.sketches.update_sketch(sketch, x[rows], part)
    return jb.sketches.bins_from_sketch(sketch, max_bins=max_bins), sketch


def odd_columns(num_rows=6000):
    rng = np.random.default_rng(8)
    x = np.stack(
        [
            rng.integers(0, 90, num_rows) / 7,
            rng.integers(0, 900, num_rows),
            np.where(rng.random(num_rows) < 0.8, 0, rng.normal(size=num_rows)),
            np.full(num_rows, 3.0),
            rng.choice([-INF, -1e-40, 0, 1e-40, 5, np.nan, INF], num_rows),
            np.full(num_rows, np.nan),
        ],
        axis=1,
    )
    return x.astype(np.float32), rng


@pytest.mark.parametrize("max_bins", [8, 33, 256])
@pytest.mark.parametrize("weighted", [False, True])
def test_thresholds_equal_fit_bins_where_all_values_are_known(max_bins, weighted):
    x, rng = odd_columns()
    weight = rng.integers(0, 4, len(x)) if weighted else None
    bins, sketch = streamed_bins(x, weight, max_bins=max_bins)
    expected = jb.fit_bins(x, max_bins=max_bins, sample_weight=weight)
    known = [jb.sketches.summarize_sketch(sketch, f).is_exact for f in range(6)]
    assert known == [True] * 6 if max_bins > 8 else known.count(True) >= 4
    for feature in np.flatnonzero(known):
        np.testing.assert_array_equal(
            np.unique(bins.thresholds[feature]),
            np.unique(expected.thresholds[feature]),
        )
    if all(known):
        assert bins.num_bins == expected.num_bins


def test_fractional_weights_give_the_same_few_thresholds():
    x, rng = odd_columns()
    weight = 10 ** rng.uniform(-12, 12, len(x))
    bins, _ = streamed_bins(x[:, [0, 3, 4]], weight)
    expected = jb.fit_bins(x[:, [0, 3, 4]], sample_weight=weight)
    np.testing.assert_array_equal(bins.thresholds, expected.thresholds)


@pytest.mark.parametrize("weighted", [False, True])
def test_thresholds_lie_within_the_error_of_equal_shares(weighted):
    rng = np.random.default_rng(9)
    x = rng.lognormal(size=(60_000, 1)).astype(np.float32)
    weight = rng.integers(1, 30, 60_000) if weighted else np.ones(60_000)
    bins, sketch = streamed_bins(x, weight, max_bins=33)
    assert not jb.sketches.summarize_sketch(sketch, 0).is_exact
    ranks = Ranks(x[:, 0], weight)
    thresholds = bins.thresholds[0, :-1]
    assert len(thresholds) == 31
    ideal = ranks.total * np.arange(1, 32) / 32
    error = np.abs(ranks.upto(thresholds) - ideal)
    # The error of the sketch, and the value that the cut falls on.
    assert error.max() <= ranks.total / (8 * 33) + weight.max() * 2


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_heavy_value_leaves_the_bins_to_the_others(share):
    rng = np.random.default_rng(10)
    x = rng.normal(size=(200_000, 1)).astype(np.float32)
    x[rng.random(len(x)) < share] = 0
    weight = np.where(x[:, 0] == 0, 20.0, 1.0)
    bins, sketch = streamed_bins(x, weight, max_bins=9, batch=2000)
    assert len(sketch.levels[0]) > 1
    held = np.bincount(np.asarray(jb.apply_bins(bins, x))[:, 0], x[:, 0] != 0)
    fair = np.sum(x != 0) / 7
    # A sixth for each end of a bin.
    assert np.sum(held > fair / 2) >= 6
    assert held.max() <= fair * (1 + 2 / 6)


def test_empty_sketches_give_one_bin():
    bins = jb.sketches.bins_from_sketch(jb.sketches.make_sketch(3))
    assert np.all(bins.thresholds == INF)
    assert (bins.num_features, bins.num_bins) == (3, 4)


# The door.


@pytest.mark.parametrize("eps", [0.0, -1.0, 0.6, np.nan, INF])
def test_bad_eps_is_refused(eps):
    with pytest.raises(ValueError, match=r"eps .*0\.5"):
        jb.sketches.make_sketch(2, eps=eps)
    with pytest.raises(TypeError, match="eps must be a number"):
        jb.sketches.make_sketch(2, eps="fine")


def test_bad_batches_are_refused():
    sketch = jb.sketches.make_sketch(2)
    with pytest.raises(ValueError, match=r"^x .*2 "):
        jb.sketches.update_sketch(sketch, np.zeros((4, 3)))
    with pytest.raises(ValueError, match="x must be 2-D"):
        jb.sketches.update_sketch(sketch, np.zeros(4))
    with pytest.raises(TypeError, match="x must hold numbers"):
        jb.sketches.update_sketch(sketch, np.array([["a", "b"]]))
    with pytest.raises(ValueError, match=r"sample_weight .*\(4,\)"):
        jb.sketches.update_sketch(sketch, np.zeros((4, 2)), np.ones(3))
    with pytest.raises(ValueError, match=r"-1\.0.* row 1"):
        jb.sketches.update_sketch(sketch, np.zeros((2, 2)), [1.0, -1.0])


def test_sketches_that_differ_are_not_merged():
    sketch = jb.sketches.make_sketch(2, eps=0.1)
    with pytest.raises(ValueError, match=r"same eps, got 0.1 and 0.2"):
        jb.sketches.merge_sketches(sketch, jb.sketches.make_sketch(2, eps=0.2))
    with pytest.raises(ValueError, match="2 and 3"):
        jb.sketches.merge_sketches(sketch, jb.sketches.make_sketch(3, eps=0.1))


def test_bad_questions_are_refused():
    sketch = jb.sketches.make_sketch(2, eps=0.01)
    with pytest.raises(ValueError, match=r"feature .*0 .*1"):
        jb.sketches.summarize_sketch(sketch, 2)
    with pytest.raises(ValueError, match=r"max_bins .*26 .*0\.01"):
        jb.sketches.bins_from_sketch(sketch, max_bins=27)
    assert jb.sketches.bins_from_sketch(sketch, max_bins=26).num_bins == 4
    with pytest.raises(ValueError, match="max_bins"):
        jb.sketches.bins_from_sketch(sketch, max_bins=1)
    with pytest.raises(TypeError, match="num_features"):
        jb.sketches.make_sketch(2.0)
