# SPDX-License-Identifier: Apache-2.0
"""Quantile summaries: bounds that always hold, merge, prune, query, candidates."""

from fractions import Fraction
from functools import reduce

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import jboost as jb
from jboost.sketches.summary import spread_between

STRICT = settings(max_examples=40, deadline=None, derandomize=True, database=None)
INF = np.inf
TINY = np.finfo(np.float32).tiny
# Few values, so that parts share some; integer weights, whose sums are exact.
ROWS = st.lists(
    st.tuples(st.integers(-15, 15), st.sampled_from([0, 1, 1, 1, 2, 7, 100, 10**6])),
    min_size=1,
    max_size=60,
)


def split(rows):
    values, weight = np.array(rows).T
    return values.astype(np.float32), weight.astype(np.float64)


def summarize(rows):
    return jb.sketches.make_summary(*split(rows))


def exact_ranks(values, weight, at):
    """Weight below, up to and at each of ``at``, value by value."""
    below = np.array([weight[values < y].sum() for y in at])
    upto = np.array([weight[values <= y].sum() for y in at])
    return below, upto, upto - below


def everywhere(values):
    """All values, points between them and beyond."""
    distinct = np.unique(values).astype(np.float32)
    return np.concatenate([distinct, distinct + np.float32(0.5), [-99, 99]])


def check_bounds(summary, values, weight, error):
    """Bounds hold at every value and between; they are no wider than the error."""
    at = everywhere(values)
    found = jb.sketches.bound_ranks(summary, at)
    below, upto, own = exact_ranks(values, weight, at)
    assert np.all(found.rmin <= below)
    assert np.all(found.rmax >= upto)
    assert np.all(found.weight <= own)
    assert np.all(found.rmax - found.rmin - found.weight <= error)
    assert summary.error <= error


def laws_of_entries(summary):
    assert np.all(np.diff(summary.value) > 0)
    assert np.all(summary.rmin[:-1] + summary.weight[:-1] <= summary.rmin[1:])
    assert np.all(summary.rmax[:-1] <= summary.rmax[1:] - summary.weight[1:])


@STRICT
@given(rows=ROWS)
def test_a_column_is_summed_up_exactly(rows):
    values, weight = split(rows)
    summary = jb.sketches.make_summary(values, weight)
    assert summary.value.tolist() == np.unique(values[weight > 0]).tolist()
    below, upto, own = exact_ranks(values, weight, summary.value)
    np.testing.assert_array_equal(summary.weight, own)
    np.testing.assert_array_equal(summary.rmin, below)
    np.testing.assert_array_equal(summary.rmax, upto)
    assert summary.is_exact
    assert summary.error == 0
    assert summary.total == weight.sum()


@STRICT
@given(rows=ROWS, cuts=st.lists(st.integers(1, 59), max_size=4))
def test_merged_parts_equal_the_whole(rows, cuts):
    parts = np.split(np.array(rows), sorted(min(cut, len(rows)) for cut in cuts))
    parts = [jb.sketches.make_summary(part[:, 0], part[:, 1]) for part in parts]
    merged = reduce(jb.sketches.merge_summaries, parts)
    for field, expected in zip(merged, summarize(rows), strict=True):
        np.testing.assert_array_equal(field, expected)


@STRICT
@given(rows=ROWS, num_ranks=st.integers(1, 20))
def test_pruning_adds_at_most_one_share(rows, num_ranks):
    values, weight = split(rows)
    pruned = jb.sketches.prune_summary(
        jb.sketches.make_summary(values, weight), num_ranks
    )
    assert pruned.num_entries <= num_ranks + 1
    check_bounds(pruned, values, weight, weight.sum() / num_ranks)
    laws_of_entries(pruned)
    assert pruned.weight.sum() + spread_between(pruned).sum() == weight.sum()
    if weight.sum():
        assert pruned.value[0] == values[weight > 0].min()
        assert pruned.value[-1] == values[weight > 0].max()


@STRICT
@given(rows=ROWS, num_ranks=st.integers(2, 20))
def test_heavy_values_do_not_count_in_the_share(rows, num_ranks):
    values, weight = split(rows)
    whole = jb.sketches.make_summary(values, weight)
    pruned = jb.sketches.prune_summary(whole, num_ranks)
    heaviest = np.sort(whole.weight)[::-1]
    for num_heavy in range(num_ranks):
        share = heaviest[num_heavy:].sum() / (num_ranks - num_heavy)
        assert pruned.error <= share * (1 + 1e-12)  # for the division
        heavy = whole.value[whole.weight > share]
        if len(heavy) <= num_heavy:
            assert np.all(np.isin(heavy, pruned.value))


@STRICT
@given(
    parts=st.lists(ROWS, min_size=2, max_size=6),
    ranks=st.lists(st.integers(2, 12), min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_errors_of_any_tree_of_merges_and_prunings_add_up(parts, ranks, order):
    """Each node of the tree: its rows, its summary, and the error it may have."""
    nodes, ranks = [], iter(ranks)

    def prune(summary, error):
        num_ranks = next(ranks)
        return jb.sketches.prune_summary(
            summary, num_ranks
        ), error + summary.total / num_ranks

    for rows in parts:
        summary, error = prune(summarize(rows), 0)
        nodes.append((rows, summary, error))
    while len(nodes) > 1:
        order.shuffle(nodes)
        (rows, one, error), (more, other, another) = nodes.pop(), nodes.pop()
        merged = jb.sketches.merge_summaries(one, other)
        check_bounds(merged, *split(rows + more), error + another)
        nodes.append((rows + more, *prune(merged, error + another)))
    rows, summary, error = nodes[0]
    check_bounds(summary, *split(rows), error)
    laws_of_entries(summary)


@STRICT
@given(rows=ROWS, num_ranks=st.integers(1, 12), shares=st.lists(st.floats(0, 1)))
def test_queries_are_within_half_the_error(rows, num_ranks, shares):
    values, weight = split(rows)
    if not weight.sum():
        return
    pruned = jb.sketches.prune_summary(
        jb.sketches.make_summary(values, weight), num_ranks
    )
    ranks = np.array(shares) * pruned.total
    found = jb.sketches.query_ranks(pruned, ranks)
    below, upto, _ = exact_ranks(values, weight, found)
    assert np.all(below - pruned.error / 2 <= ranks)
    assert np.all(ranks <= upto + pruned.error / 2)


@STRICT
@given(rows=ROWS, eps=st.sampled_from([0.02, 0.1, 0.3, 1.0]), first=st.booleans())
def test_candidates_are_less_than_eps_apart(rows, eps, first):
    """On the summary of the rows, and on one that has an error already."""
    values, weight = split(rows)
    summary = jb.sketches.make_summary(values, weight)
    if first:
        summary = jb.sketches.prune_summary(summary, int(np.ceil(2 / eps)))
    found = jb.sketches.find_candidates(summary, eps=eps).value
    total = weight.sum()
    if not total:
        assert len(found) == 0
        return
    assert found[0] == values[weight > 0].min()
    assert found[-1] == values[weight > 0].max()
    assert len(found) <= (8 / 3 if first else 8 / 7) / eps + 2
    below, upto, own = exact_ranks(values, weight, found)
    assert np.all(below[1:] - upto[:-1] < eps * total)
    light = own[:-1] < eps / 8 * total
    assert np.all((below[1:] - below[:-1])[light] < eps * total)


def test_candidates_follow_the_hessians():
    hessian = np.r_[np.ones(500), np.full(500, 9.0)]
    found = jb.sketches.find_candidates(
        jb.sketches.make_summary(np.arange(1000), hessian), eps=0.02
    )
    # A tenth of the weight lies in the lower half: 57 ranks of 1/57 each.
    assert np.sum(found.value < 500) == pytest.approx(5.7, abs=1)
    assert np.sum(found.value >= 500) == pytest.approx(52.3, abs=1)


def test_every_value_is_a_candidate_where_they_are_few():
    values = np.arange(9).repeat(3)
    bins = jb.fit_bins(values[:, None])
    found = jb.sketches.find_thresholds(jb.sketches.make_summary(values), eps=0.1)
    assert found.tolist() == [row for row in bins.thresholds[0] if row < INF]


def test_fractional_weights_err_by_rounding_only():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 40, 300).astype(np.float32)
    weight = 10 ** rng.uniform(-12, 12, 300)
    pruned = [
        jb.sketches.prune_summary(
            jb.sketches.make_summary(values[part], weight[part]), 10
        )
        for part in np.split(np.arange(300), 6)
    ]
    merged = jb.sketches.prune_summary(reduce(jb.sketches.merge_summaries, pruned), 10)
    found = jb.sketches.bound_ranks(merged, everywhere(values))
    slack = Fraction(300 * 2.0**-53 * weight.sum())  # one rounding per addition
    for y, rmin, rmax in zip(found.value, found.rmin, found.rmax, strict=True):
        assert Fraction(rmin) <= sum(map(Fraction, weight[values < y])) + slack
        assert Fraction(rmax) >= sum(map(Fraction, weight[values <= y])) - slack
    assert merged.error <= weight.sum() / 5 * (1 + 1e-12)


def test_exact_parts_stay_exact_despite_rounding():
    weight = np.random.default_rng(0).random((2, 500))
    parts = [
        jb.sketches.make_summary(np.arange(500) % (200 + i), weight[i]) for i in (0, 1)
    ]
    merged = jb.sketches.merge_summaries(*parts)
    assert merged.is_exact
    assert merged.error == 0
    assert not spread_between(merged).any()


def test_weights_too_far_apart_to_be_added_still_prune():
    weight = np.ones(1000) * 1e-12
    weight[[3, 500]] = 1e12
    pruned = jb.sketches.prune_summary(
        jb.sketches.make_summary(np.arange(1000), weight), 10
    )
    assert pruned.num_entries <= 11
    assert {3.0, 500.0} <= set(pruned.value.tolist())
    gaps = np.diff(np.searchsorted(np.delete(np.arange(1000), [3, 500]), pruned.value))
    assert gaps.max() <= 998 / 8 + 1  # the others share what two leave of 10


def test_odd_values():
    values = [INF, -INF, np.nan, 1e-40, -0.0, 0.0, TINY, 1e300, np.nan]
    summary = jb.sketches.make_summary(values)
    assert summary.value.tolist() == [-INF, 0.0, TINY, INF]
    assert summary.weight.tolist() == [1, 3, 1, 2]
    assert jb.sketches.bound_ranks(summary, [-1e-40]).rmax.tolist() == [4]
    assert jb.sketches.query_ranks(summary, [0, 7]).tolist() == [-INF, INF]


@pytest.mark.parametrize("values", [[], [np.nan, np.nan]])
def test_nothing_known(values):
    summary = jb.sketches.make_summary(values)
    assert (summary.num_entries, summary.total, summary.error) == (0, 0, 0)
    one = jb.sketches.make_summary([5.0])
    assert jb.sketches.merge_summaries(summary, one).value.tolist() == [5.0]
    assert jb.sketches.merge_summaries(one, summary).value.tolist() == [5.0]
    assert jb.sketches.bound_ranks(summary, [3.0]).rmax.tolist() == [0]
    assert jb.sketches.find_thresholds(summary, eps=0.1).tolist() == []
    assert jb.sketches.find_thresholds(one, eps=0.1).tolist() == []
    with pytest.raises(ValueError, match="at least one"):
        jb.sketches.query_ranks(summary, [0.0])


# The door.


@pytest.mark.parametrize(
    ("values", "weight", "error", "message"),
    [
        (np.zeros((2, 2)), None, ValueError, r"values must be 1-D, got shape \(2, 2\)"),
        (["a"], None, TypeError, "values must hold numbers"),
        (np.array([np.ones(2), None], object), None, TypeError, "values must hold"),
        ([1.0, 2.0], [1.0], ValueError, r"weight must have shape \(2,\), got \(1,\)"),
        ([1.0, 2.0], [1.0, -2.0], ValueError, r">= 0, got -2.0 in row 1"),
        ([1.0], [np.nan], ValueError, r"weight must be finite and >= 0, got nan"),
        ([1.0], [INF], ValueError, "weight must be finite"),
        ([1.0], ["heavy"], TypeError, "weight must hold numbers"),
    ],
)
def test_bad_columns_are_refused(values, weight, error, message):
    with pytest.raises(error, match=message):
        jb.sketches.make_summary(values, weight)


@pytest.mark.parametrize("eps", [0.0, -0.1, 1.5, np.nan])
def test_bad_eps_is_refused(eps):
    with pytest.raises(ValueError, match=r"eps .*1\.0"):
        jb.sketches.find_candidates(jb.sketches.make_summary([1.0]), eps=eps)


def test_eps_below_the_error_is_refused():
    pruned = jb.sketches.prune_summary(jb.sketches.make_summary(np.arange(1000)), 10)
    with pytest.raises(ValueError, match=r"0\.099"):
        jb.sketches.find_candidates(pruned, eps=0.15)


@pytest.mark.parametrize("rank", [-1.0, 4.0, np.nan])
def test_ranks_beyond_the_total_are_refused(rank):
    with pytest.raises(ValueError, match=r"ranks .*3\.0"):
        jb.sketches.query_ranks(jb.sketches.make_summary([1.0, 2.0, 3.0]), rank)


def test_bad_queries_are_refused():
    summary = jb.sketches.make_summary([1.0])
    with pytest.raises(TypeError, match="ranks must be numbers"):
        jb.sketches.query_ranks(summary, "middle")
    with pytest.raises(ValueError, match=r"values .*NaN"):
        jb.sketches.bound_ranks(summary, [np.nan])
    with pytest.raises(ValueError, match=r"num_ranks .*1"):
        jb.sketches.prune_summary(summary, 0)
