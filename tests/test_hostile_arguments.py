# SPDX-License-Identifier: Apache-2.0
"""Arguments of odd types, layouts and numbers: the plain result, or a clear error.

``experiments/fuzz.py`` draws more of the random cases, for hours.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from fuzz_arguments import FUNCTIONS
from fuzzing import run_case
from tables import same_bits

import jboost as jb
from jboost.sklearn import JBoostClassifier, JBoostRegressor

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = X[:, 0] + 1
RUN = dict(num_rounds=2, max_depth=2)
MODEL, _ = jb.fit(X, Y, absent="zero", **RUN)
FEW = dict(cross_validate=4, stream=8, refit=8, permutation=8, regressor=12)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_hostile_arguments(function, tmp_path):
    for number in range(FEW.get(function, 25)):
        run_case(function, number, tmp_path)


# Masks of numpy.ma.

MASK = np.random.default_rng(1).random(X.shape) < 0.3


def test_masked_cells_are_missing():
    gaps = np.where(MASK, np.float32(np.nan), X)
    model, _ = jb.fit(gaps, Y, **RUN)
    whole = np.round(3 * X)
    for x, plain in (
        (np.ma.array(X, mask=MASK, fill_value=7), gaps),
        (np.ma.array(X.astype(float), mask=MASK), gaps),
        ([*np.ma.array(X, mask=MASK)], gaps),
        (np.ma.array(whole.astype(np.int64), mask=MASK), np.where(MASK, np.nan, whole)),
    ):
        same_bits(jb.fit(x, Y, **RUN)[0], jb.fit(plain, Y, **RUN)[0])
        same_bits(jb.predict(model, x), jb.predict(model, plain))
        bins = jb.fit_bins(x, max_bins=8)
        same_bits(bins, jb.fit_bins(plain, max_bins=8))
        same_bits(jb.apply_bins(bins, x), jb.apply_bins(bins, plain))


def test_masked_fields_of_records_are_missing():
    kinds = [("a", "f4"), ("b", "U1"), ("c", "i4"), ("d", "S1")]
    rows = [(number % 5, "uvw"[number % 3], number % 4, b"s") for number in range(40)]
    table = np.ma.array(rows, kinds)
    for name in "abc":
        table[name][:7] = np.ma.masked
    plain = {name: [row[i] for row in rows] for i, name in enumerate("abcd")}
    plain["d"] = ["s"] * 40
    for name in "abc":
        plain[name][:7] = [None] * 7
    frame = pd.DataFrame(plain).astype({"a": "float32", "c": "float64"})
    model, _ = jb.fit(frame, Y, **RUN)
    same_bits(jb.fit(table, Y, **RUN)[0], model)
    same_bits(jb.predict(model, table), jb.predict(model, frame))


@pytest.mark.parametrize("name", ["y", "sample_weight", "offset", "validation y"])
def test_masked_values_of_rows_are_refused(name):
    masked = np.ma.array(np.abs(Y), mask=np.arange(40) == 3)
    given = dict(y=Y) | {name: masked}
    if name == "validation y":
        given = dict(y=Y, validation=(X, masked))
    with pytest.raises(ValueError, match=rf"{name} must not .* masked .* 1 of 40"):
        jb.fit(X, **given, **RUN)
    none = np.ma.array(np.abs(Y), mask=False)
    given = dict(y=Y) | {name: none}
    if name == "validation y":
        given = dict(y=Y, validation=(X, none))
    jb.fit(X, **given, **RUN)


def test_estimators_read_masks():
    masked, gaps = np.ma.array(X, mask=MASK, fill_value=7), np.where(MASK, np.nan, X)
    model = JBoostRegressor(**RUN).fit(gaps, Y)
    same_bits(JBoostRegressor(**RUN).fit(masked, Y).model_, model.model_)
    np.testing.assert_array_equal(model.predict(masked), model.predict(gaps))
    y = np.ma.array(Y, mask=Y > 2)
    for call in (
        lambda: JBoostRegressor(**RUN).fit(X, y),
        lambda: JBoostClassifier(**RUN).fit(X, y > 1),
        lambda: jb.cart.fit_tree(X, y),
        lambda: jb.sketches.update_sketch(jb.sketches.make_sketch(3), X, y),
    ):
        with pytest.raises(ValueError, match=r"(y|weight) must not have masked values"):
            call()


def test_masked_labels_are_refused():
    labels = np.ma.array(np.arange(40) % 2, mask=Y > 1)
    for name in ("folds", "stratify", "groups"):
        with pytest.raises(ValueError, match=f"{name} must not have masked values"):
            jb.cross_validate(X, Y, **{name: labels}, **RUN)
    with pytest.raises(ValueError, match="groups must not have masked values"):
        jb.make_groups(labels)
    with pytest.raises((TypeError, ValueError), match="monotone must"):
        jb.fit(X, Y, monotone=np.ma.array([1, 0, 1], mask=[1, 0, 0]), **RUN)


def test_masked_settings_are_refused():
    for value in (np.ma.masked, np.ma.array(0.5, mask=True)):
        for name in ("learning_rate", "l2", "subsample", "init_score"):
            with pytest.raises((TypeError, ValueError), match=name):
                jb.fit(X, Y, **{name: value}, **RUN)


# Numbers that float32 cannot hold.


@pytest.mark.parametrize("value", [1e39, -1e39, 1e-50, 10**400], ids=[*"abcd"])
@pytest.mark.parametrize(
    "name", ["learning_rate", "subsample", "min_gain", "init_score"]
)
def test_settings_are_numbers_in_float32(name, value):
    if value == 1e-50 and name in ("min_gain", "init_score"):
        jb.fit(X, Y, **{name: value}, **RUN)  # 0
        return
    with pytest.raises((TypeError, ValueError), match=name):
        jb.fit(X, Y, **{name: value}, **RUN)


def test_integers_beyond_floats_are_infinite():
    column = np.array([10**400, -(10**400), 1] * 2, object)
    x = np.empty(6, [("a", object)])
    x["a"] = column
    thresholds = np.asarray(jb.fit_bins(x).thresholds)
    plain = np.array([np.inf, -np.inf, 1] * 2)[:, None]
    np.testing.assert_array_equal(thresholds, np.asarray(jb.fit_bins(plain).thresholds))
    with pytest.raises(ValueError, match="y must be finite"):
        jb.fit(X[:6], column, **RUN)


# Sparse matrices whose indices lead elsewhere: SciPy's own conversions follow them.


def broken(kind, change):
    matrix = scipy.sparse.csr_array(np.where(MASK, X, 0)).asformat(kind)
    change(matrix)
    return matrix


def set_index(value):
    def change(matrix):
        matrix.indices[1] = value

    return change


def set_start(place, value):
    def change(matrix):
        matrix.indptr[place] = value

    return change


def set_coordinate(matrix):
    matrix.coords[1][2] = 3


def shorten(matrix):
    matrix.data = matrix.data[:-1]


BROKEN = {
    "csr beyond": ("csr", set_index(3)),
    "csr before": ("csr", set_index(-1)),
    "csc beyond": ("csc", set_index(40)),
    "csc far": ("csc", set_index(2**31 - 1)),
    "bsr beyond": ("bsr", set_index(3)),
    "no order": ("csr", set_start(2, 10**6)),
    "below": ("csc", set_start(1, -1)),
    "end": ("csr", set_start(-1, 10**6)),
    "begin": ("csr", set_start(0, 1)),
    "coo": ("coo", set_coordinate),
    "short": ("csr", shorten),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_sparse_matrices_are_refused(name):
    x = broken(*BROKEN[name])
    for call in (
        lambda: jb.fit(x, Y, absent="zero", **RUN),
        lambda: jb.predict(MODEL, x),
        lambda: jb.fit_bins(x, absent="zero"),
    ):
        with pytest.raises(ValueError, match="x must be a valid sparse matrix"):
            call()


# Others, each by its cause.


class Failing:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("no array")


def test_errors_of_conversion_name_the_argument():
    with pytest.raises(TypeError, match=r"x must .*RuntimeError: no array"):
        jb.fit_bins(Failing())
    with pytest.raises(TypeError, match=r"y must .*RuntimeError: no array"):
        jb.fit(X, Failing(), **RUN)
    with pytest.raises(TypeError, match=r"values must .*RuntimeError: no array"):
        jb.sketches.make_summary(Failing())
    with pytest.raises(TypeError, match=r"y must hold numbers"):
        jb.fit(X, [[1.0], [1.0, 2.0]], **RUN)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (">f4", "fit"), (">i4", "fit"), (">i8", "fit"), (">f8", "boost"),
        (">i2", "boost"), (">u2", "boost"),
    ],
)  # fmt: skip
def test_targets_of_another_byte_order(kind, function):
    y, given = np.arange(40) % 7, [jb.losses.squared_error]
    native = y.astype(np.dtype(kind).newbyteorder("="))
    train, x = jb.fit, X
    if function == "boost":
        train, x = jb.boost, jb.apply_bins(jb.fit_bins(X), X)
        given = [*given, jax.random.key(0)]
    same_bits(
        train(x, y.astype(kind), *given, **RUN)[0], train(x, native, *given, **RUN)[0]
    )


@pytest.mark.parametrize("value", [np.array(["auto"]), np.array([1, 2]), ["auto"], {}])
@pytest.mark.parametrize(
    "name", ["curvature", "leaf_solver", "absent", "implementation"]
)
def test_words_are_strings(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
        jb.fit(X, Y, **{name: value}, **RUN)


@pytest.mark.parametrize("value", [None, 1, "yes", np.zeros(0), np.ones(2, bool)])
def test_flags_are_true_or_false(value):
    for name, call in (
        ("progress", jb.fit), ("progress", jb.cross_validate),
        ("return_models", jb.cross_validate), ("shuffle", jb.cross_validate),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            call(X, Y, **{name: value}, **RUN)
    with pytest.raises(TypeError, match="per_split must be True or False"):
        jb.feature_importance(MODEL, per_split=value)
    with pytest.raises(TypeError, match="grid must be True or False"):
        jb.sweep(X, Y, jb.losses.squared_error, dict(l2=[1.0]), grid=value, **RUN)


def test_names_are_a_sequence():
    for names in (0.5, np.array(0.5), object(), jnp.ones(3), [1, 2, 3]):
        with pytest.raises(TypeError, match="feature_names must be"):
            jb.fit(X, Y, feature_names=names, **RUN)
