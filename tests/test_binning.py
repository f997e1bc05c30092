# SPDX-License-Identifier: Apache-2.0
"""fit_bins and apply_bins: exact bins, weighted quantiles, odd floats, the door."""

import warnings

import hypothesis.extra.numpy as numpy_strategies
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from hypothesis import example, given, settings

import jboost as jb
from jboost.tables.domains import warn_of_collisions

STRICT = settings(max_examples=60, deadline=None, derandomize=True, database=None)
INF = np.inf
TINY = np.finfo(np.float32).tiny
LARGEST = np.finfo(np.float32).max
DENORMAL = np.float32(1e-40)
ONE_UP = np.nextafter(np.float32(1), np.float32(2))
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def column(*values):
    return np.array(values, np.float32)[:, None]


def finite_thresholds(bins, feature=0):
    row = np.asarray(bins.thresholds[feature])
    return row[row < INF]


def codes_of(x, **kwargs):
    return np.asarray(jb.apply_bins(jb.fit_bins(x, **kwargs), x))


# Few distinct values.


def test_thresholds_lie_midway_between_distinct_values():
    x = column(7, 1, 2, 4, 2, 7, np.nan)
    assert finite_thresholds(jb.fit_bins(x)).tolist() == [1.5, 3.0, 5.5]
    assert codes_of(x)[:, 0].tolist() == [4, 1, 2, 3, 2, 4, 0]


def test_one_bin_per_value_up_to_the_most_bins():
    x = np.arange(255.0)[:, None]
    bins = jb.fit_bins(x, max_bins=256)
    assert finite_thresholds(bins).tolist() == (np.arange(254) + 0.5).tolist()
    assert codes_of(x, max_bins=256)[:, 0].tolist() == list(range(1, 256))


def test_features_are_binned_alone():
    x = np.stack([np.arange(9.0), np.zeros(9), np.arange(9.0) % 2], axis=1)
    bins = jb.fit_bins(x)
    for feature in range(3):
        alone = jb.fit_bins(x[:, [feature]])
        expected = finite_thresholds(alone).tolist()
        assert finite_thresholds(bins, feature).tolist() == expected


@pytest.mark.parametrize(
    ("num_distinct", "max_bins", "num_bins"),
    [(1, 256, 4), (3, 256, 4), (4, 256, 8), (100, 256, 128), (100, 90, 90), (9, 2, 2)],
)
def test_number_of_codes_is_rounded_up_to_the_most(num_distinct, max_bins, num_bins):
    bins = jb.fit_bins(np.arange(num_distinct)[:, None], max_bins=max_bins)
    assert bins.num_bins == num_bins
    assert bins.thresholds.dtype == np.float32
    assert np.all(np.asarray(bins.thresholds)[:, -1] == INF)


# Quantiles.


def random_columns(num_rows=500):
    rng = np.random.default_rng(0)
    mixed = np.where(rng.random(num_rows) < 0.7, 0.0, rng.normal(size=num_rows))
    x = np.stack([rng.normal(size=num_rows), mixed], axis=1)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x.astype(np.float32), rng


@pytest.mark.parametrize("max_bins", [8, 33, 256])
def test_weight_of_two_equals_a_duplicated_row(max_bins):
    x, rng = random_columns()
    weight = rng.integers(1, 4, len(x))
    weighted = jb.fit_bins(x, max_bins=max_bins, sample_weight=weight)
    repeated = jb.fit_bins(np.repeat(x, weight, axis=0), max_bins=max_bins)
    np.testing.assert_array_equal(weighted.thresholds, repeated.thresholds)


@pytest.mark.parametrize("max_bins", [8, 256])
def test_rows_of_weight_zero_are_not_looked_at(max_bins):
    x, rng = random_columns()
    weight = rng.integers(0, 3, len(x)).astype(np.float64)
    all_rows = jb.fit_bins(x, max_bins=max_bins, sample_weight=weight)
    kept = weight > 0
    some = jb.fit_bins(x[kept], max_bins=max_bins, sample_weight=weight[kept])
    np.testing.assert_array_equal(all_rows.thresholds, some.thresholds)
    unweighted = jb.fit_bins(x, max_bins=max_bins)
    assert not np.array_equal(all_rows.thresholds, unweighted.thresholds)


def test_weights_all_zero_leave_one_bin():
    bins = jb.fit_bins(column(1, 2, 3), sample_weight=np.zeros(3))
    assert finite_thresholds(bins).size == 0


def solve_cap(mass, num_bins):
    """Bisects for the cap with sum_i min(mass_i, cap) = cap * num_bins."""
    low, high = 0.0, mass.sum()
    for _ in range(200):
        cap = (low + high) / 2
        enough = np.minimum(mass, cap).sum() >= cap * num_bins
        low, high = (cap, high) if enough else (low, cap)
    return low


@STRICT
@given(
    mass=st.lists(st.sampled_from([1, 1, 1, 2, 5, 50, 1000]), min_size=10, max_size=80),
    num_bins=st.integers(2, 9),
)
@example(mass=[10**6] + [1] * 60, num_bins=8)
@example(mass=[1] * 30 + [10**6] + [1] * 30 + [10**5], num_bins=8)
def test_no_bin_holds_more_than_two_shares_of_capped_weight(mass, num_bins):
    mass = np.array(mass, np.float64)
    x = np.arange(len(mass), dtype=np.float32)[:, None]
    bins = jb.fit_bins(x, max_bins=num_bins + 1, sample_weight=mass)
    code = references.apply_bins(bins.thresholds, x)[:, 0]
    assert code.max() <= num_bins
    cap = solve_cap(mass, num_bins)
    held = np.bincount(code, np.minimum(mass, cap), minlength=num_bins + 1)
    # Values belong where their middle lies, so half a value sticks out on each side;
    # a millionth for the bisection.
    assert held.max() <= 2 * cap * (1 + 1e-6)


def test_a_heavy_value_does_not_use_up_the_bins_of_the_others():
    rng = np.random.default_rng(1)
    x = np.concatenate([np.zeros(9000), rng.random(1000) + 1])[:, None]
    code = codes_of(x, max_bins=33)[:, 0]
    shares = np.bincount(code[9000:], minlength=33)[1:]
    assert np.count_nonzero(shares) >= 31
    # 1000 rows in 31 bins: 32.3 each, and a row more or less where a cut falls.
    assert shares[shares > 0].max() <= 34


def test_equal_weights_give_equal_bins():
    x = np.random.default_rng(2).permutation(1000)[:, None]
    counts = np.bincount(codes_of(x, max_bins=11)[:, 0])
    assert counts.tolist() == [0] + [100] * 10


# Codes.


@pytest.mark.parametrize(
    ("num_distinct", "max_bins", "dtype"),
    [(300, 256, jnp.uint8), (255, 300, jnp.uint8), (300, 257, jnp.uint16)],
)
def test_codes_are_as_narrow_as_they_can_be(num_distinct, max_bins, dtype):
    x = np.arange(num_distinct)[:, None]
    bins = jb.fit_bins(x, max_bins=max_bins)
    codes = jb.apply_bins(bins, x)
    assert codes.dtype == dtype
    np.testing.assert_array_equal(codes, references.apply_bins(bins.thresholds, x))


def test_the_largest_code_fits_16_bits():
    x = np.arange(70_000)[:, None]
    codes = codes_of(x, max_bins=65536)[:, 0]
    assert codes.dtype == np.uint16
    assert codes.max() == 65535
    assert np.all(np.diff(codes.astype(np.int64)) >= 0)


def test_vmap_and_bare_calls_agree():
    x, _ = random_columns(64)
    bins = jb.fit_bins(x, max_bins=16)
    bare = jb.apply_bins(bins, x)
    halves = jnp.asarray(x).reshape(2, 32, 2)
    mapped = jax.vmap(jb.apply_bins, (None, 0))(bins, halves)
    np.testing.assert_array_equal(mapped.reshape(64, 2), bare)


@STRICT
@given(
    fitted=numpy_strategies.arrays(np.float32, (12, 1), elements=FLOATS),
    applied=numpy_strategies.arrays(np.float32, (16, 1), elements=FLOATS),
    max_bins=st.sampled_from([2, 4, 7, 256]),
)
def test_codes_equal_the_loop(fitted, applied, max_bins):
    bins = jb.fit_bins(fitted, max_bins=max_bins)
    thresholds = np.asarray(bins.thresholds)
    assert np.all(np.diff(finite_thresholds(bins)) > 0)
    expected = references.apply_bins(thresholds, applied)
    np.testing.assert_array_equal(jb.apply_bins(bins, applied), expected)


@STRICT
@given(x=numpy_strategies.arrays(np.float32, (16, 1), elements=FLOATS))
@example(x=np.repeat(column(-INF, -LARGEST, -0.0, 0.0, LARGEST, INF, 1, ONE_UP), 2, 0))
def test_order_of_codes_is_order_of_values(x):
    code = codes_of(x)[:, 0].astype(np.int64)
    value = np.where(np.abs(x[:, 0]) < TINY, np.float32(0), x[:, 0])
    missing = np.isnan(value)
    np.testing.assert_array_equal(code == 0, missing)
    value, code = value[~missing], code[~missing]
    above = value[:, None] > value[None, :]
    np.testing.assert_array_equal(code[:, None] > code[None, :], above)


# Odd floats.


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((-INF, INF), [1, 2]),
        ((-INF, 0, INF), [1, 2, 3]),
        ((-INF, -LARGEST, LARGEST, INF), [1, 2, 3, 4]),
        ((-LARGEST, LARGEST), [1, 2]),
        ((1, ONE_UP, INF), [1, 2, 3]),
        ((-0.0, 0.0, 1), [1, 1, 2]),
        ((0.0, DENORMAL, -DENORMAL, TINY), [1, 1, 1, 2]),
        ((-TINY, -DENORMAL, TINY), [1, 2, 3]),
        ((TINY, np.nextafter(TINY, np.float32(1))), [1, 2]),
        ((np.nan, np.nan), [0, 0]),
        ((5, 5), [1, 1]),
        ((5, np.nan), [1, 0]),
        ((INF, INF), [1, 1]),
    ],
)
def test_odd_values_are_kept_apart(values, expected):
    assert codes_of(column(*values))[:, 0].tolist() == expected


def test_thresholds_are_never_denormal():
    thresholds = finite_thresholds(jb.fit_bins(column(-TINY, 0, TINY, 2 * TINY)))
    assert len(thresholds) == 3
    assert np.all((thresholds == 0) | (np.abs(thresholds) >= TINY))


def test_new_values_beyond_the_fitted_ones_take_the_outer_codes():
    bins = jb.fit_bins(column(1, 2, 3))
    new = column(-INF, -9, 99, INF, np.nan)
    assert jb.apply_bins(bins, new)[:, 0].tolist() == [1, 1, 3, 3, 0]


def test_doubles_are_rounded_before_they_are_compared():
    x = np.array([[1.0], [1 + 1e-12], [1e300], [-1e300], [1e-300]])
    assert codes_of(x)[:, 0].tolist() == [3, 3, 4, 1, 2]


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint64, np.float16, jnp.bfloat16])
def test_every_kind_of_number_is_accepted(dtype):
    x = np.array([[0], [1], [1]]).astype(dtype)
    assert codes_of(x)[:, 0].tolist() == [1, 2, 2]


# Values that collide in float32.


def test_colliding_doubles_are_reported_with_their_column():
    x = np.zeros((1000, 2))
    x[:, 1] = 1e9 + np.arange(1000.0)
    with pytest.warns(UserWarning, match=r"column 1 of x.*1000"):
        warn_of_collisions(x)


def test_colliding_integers_are_reported():
    x = (2**40 + np.arange(1000))[:, None]
    with pytest.warns(UserWarning, match=r"int64 values .* but 1 in float32"):
        warn_of_collisions(x)


def test_fit_reports_collisions():
    x = (1e9 + np.arange(100.0))[:, None]
    with pytest.warns(UserWarning, match="column 0 of x"):
        jb.fit(x, np.arange(100.0), num_rounds=0)


@pytest.mark.parametrize("draw", ["normal", "random", "lognormal"])
def test_ordinary_doubles_are_not_reported(draw):
    x = getattr(np.random.default_rng(0), draw)(size=(100_000, 1))
    x[::7] = np.nan
    assert not np.array_equal(x, x.astype(np.float32), equal_nan=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_collisions(x)


# The door.


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.zeros(3), ValueError, r"x must be 2-D \[rows, features\].*\(3,\)"),
        (np.zeros((3, 1, 1)), ValueError, "x must be 2-D"),
        (np.zeros((0, 2)), ValueError, r"at least one row and one column.*\(0, 2\)"),
        (np.zeros((2, 0)), ValueError, "at least one row and one column"),
        (np.array([["a"], ["b"]]), TypeError, "x must hold numbers .* got dtype <U1"),
        (np.array([[1], ["b"]], object), TypeError, "x must hold .* types int and str"),
        (np.array([[1j]]), TypeError, "got dtype complex128"),
        (np.array([["2020-01-01"]], "M8[D]"), TypeError, "got dtype datetime64"),
        ([[1.0], [1.0, 2.0]], TypeError, "x must be a matrix of numbers"),
    ],
)
def test_bad_matrices_are_refused_by_name(x, error, message):
    with pytest.raises(error, match=message):
        jb.fit_bins(x)
    with pytest.raises(error, match=message):
        jb.apply_bins(jb.fit_bins(np.zeros((1, 1))), x)


@pytest.mark.parametrize("max_bins", [1, 0, -4, 65537, 2.5, "10", True])
def test_bad_max_bins_is_refused(max_bins):
    with pytest.raises(ValueError, match=r"max_bins .*2, 65536"):
        jb.fit_bins(np.zeros((2, 1)), max_bins=max_bins)


def test_wrong_number_of_columns_is_refused():
    with pytest.raises(ValueError, match=r"^x .*2 .*3"):
        jb.apply_bins(jb.fit_bins(np.zeros((4, 2))), np.zeros((4, 3)))


def test_wrong_number_of_weights_is_refused():
    with pytest.raises(ValueError, match=r"sample_weight .*\(4,\)"):
        jb.fit_bins(np.zeros((4, 2)), sample_weight=np.ones(3))
