# SPDX-License-Identifier: Apache-2.0
"""Bad calls are refused at the door, naming argument, expectation and value."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special
from tables import make_regression

import jboost as jb

X, Y = make_regression()
N = len(Y)
NAN, INF = float("nan"), float("inf")


def fit(x=X, y=Y, loss=jb.losses.squared_error, **settings):
    return jb.fit(x, y, loss, **{"num_rounds": 1, **settings})


def changed(array, row, value):
    array = np.array(array, np.float64)
    array[row] = value
    return array


def bad_loss(score, target):
    return jnp.log(-1 - (score - target) ** 2)  # of a negative number


ONES = np.ones(N)
DATA = {
    "x 1-D": (dict(x=X[:, 0]), ValueError, r"x must be 2-D.*\(200,\)"),
    "x 3-D": (dict(x=X[None]), ValueError, r"x must be 2-D.*\(1, 200, 3\)"),
    "x number": (dict(x=3.0), ValueError, r"x must be 2-D.*\(\)"),
    "x no rows": (dict(x=X[:0], y=Y[:0]), ValueError, r"at least one row.*\(0, 3\)"),
    "x no columns": (dict(x=X[:, :0]), ValueError, r"one column.*\(200, 0\)"),
    "x strings": (dict(x=X.astype(str)), TypeError, r"x must hold numbers.*dtype <U"),
    "x objects": (
        dict(x=X.astype(str).astype(object)), TypeError, r"x must .*strings",
    ),
    "x complex": (dict(x=X + 1j), TypeError, r"x must hold numbers.*dtype complex"),
    "x ragged": (dict(x=[[1.0], [1.0, 2.0]]), TypeError, r"x must be a matrix"),
    "x none": (dict(x=None), TypeError, r"x must hold numbers.*object"),
    "y short": (dict(y=Y[:-1]), ValueError, r"y must have 200 rows.*\(199,\)"),
    "y number": (dict(y=3.0), ValueError, r"y must have 200 rows.*\(\)"),
    "y empty": (dict(y={}), ValueError, r"y must contain at least one array, got \{\}"),
    "y strings": (dict(y=Y.astype(str)), TypeError, r"y must hold numbers.*<U"),
    "y labels": (
        dict(y=np.where(Y > 0, "yes", "no")), TypeError, "JBoostClassifier takes label",
    ),
    "y objects": (
        dict(y=np.where(Y > 0, "yes", "no").astype(object)), TypeError,
        "y must hold numbers.*JBoostClassifier takes labels",
    ),
    "y nan": (
        dict(y=changed(Y, 7, NAN)), ValueError, r"y must be finite.*got nan in row 7",
    ),
    "y inf": (
        dict(y=changed(Y, 7, INF)), ValueError, r"y must be finite.*got inf in row 7",
    ),
    "y in a dict": (
        dict(y={"a": Y, "b": Y[:3]}), ValueError, r"y must have 200 rows.*\(3,\)",
    ),
    "y huge integers": (
        dict(y=np.full(N, 2**40)), ValueError, r"y must contain integers below 2\^31",
    ),
    "weights short": (
        dict(sample_weight=ONES[:5]), ValueError,
        r"sample_weight must have shape \(200,\), got \(5,\)",
    ),
    "weights nan": (
        dict(sample_weight=changed(ONES, 3, NAN)), ValueError,
        r"sample_weight must be finite and >= 0, got nan in row 3",
    ),
    "weights inf": (
        dict(sample_weight=changed(ONES, 3, INF)), ValueError,
        r"sample_weight must be finite and >= 0, got inf in row 3",
    ),
    "weights negative": (
        dict(sample_weight=changed(ONES, 3, -1)), ValueError,
        r"sample_weight must be finite and >= 0, got -1.0 in row 3",
    ),
    "weights zero": (
        dict(sample_weight=0 * ONES), ValueError,
        r"sample_weight must be positive .*, got only zeros",
    ),
    "weights strings": (
        dict(sample_weight=["a"] * N), TypeError, r"sample_weight must hold numbers",
    ),
    "weights of 1e-50": (
        dict(sample_weight=1e-50 * ONES.astype(float)), ValueError,
        r"sample_weight must be positive .*, got at most 1e-50",
    ),
    "weights of 1e300": (
        dict(sample_weight=changed(ONES.astype(float), 3, 1e300)), ValueError,
        r"sample_weight must be finite and >= 0, got 1e\+300 in row 3",
    ),
    "weights of a great sum": (
        dict(sample_weight=1e32 * ONES.astype(float)), ValueError,
        r"sample_weight must sum to 1e-30 to 1e\+30, got ",
    ),
    "weights of a small sum": (
        dict(sample_weight=1e-36 * ONES.astype(float)), ValueError,
        r"sample_weight must sum to 1e-30 to 1e\+30, got ",
    ),
    "y of 1e300": (
        dict(y=changed(Y.astype(float), 7, 1e300)), ValueError,
        r"y must be finite.*got 1e\+300 in row 7",
    ),
    "offset short": (
        dict(offset=ONES[:5]), ValueError,
        r"offset must have shape \(200,\), got \(5,\)",
    ),
    "offset 2-D": (
        dict(offset=np.ones((N, 2))), ValueError, r"offset must have shape \(200,\)",
    ),
    "offset nan": (
        dict(offset=changed(ONES, 3, NAN)), ValueError,
        r"offset must be finite.*got nan in row 3",
    ),
}  # fmt: skip

LOSSES = {
    "not callable": (dict(loss=3), TypeError, r"loss must be callable.*got 3"),
    "a word": (dict(loss="mse"), TypeError, r"loss must be callable.*got 'mse'"),
    "one argument": (
        dict(loss=lambda s: s**2), TypeError,
        r"loss <lambda> failed.*\(score, target\)",
    ),
    "three arguments": (
        dict(loss=lambda s, t, w: w * (s - t) ** 2), TypeError,
        r"loss <lambda> failed.*\(score, target\)",
    ),
    "vector": (
        dict(loss=lambda s, t: jnp.stack([s, t])), ValueError,
        r"loss <lambda> must return a scalar.*shape \(2,\)",
    ),
    "pair": (
        dict(loss=lambda s, t: (s, t)), ValueError, r"must return a scalar for one row",
    ),
    "nothing": (
        dict(loss=lambda s, t: None), ValueError, r"must return a scalar.*got None",
    ),
    "integer": (
        dict(loss=lambda s, t: jnp.int32(1)), TypeError,
        r"must return a floating-point number, got dtype int32",
    ),
    "boolean": (
        dict(loss=lambda s, t: s > t), TypeError,
        r"must return a floating-point number, got dtype bool",
    ),
    "not finite": (
        dict(loss=bad_loss), ValueError,
        r"loss must be finite on the data, got nan in row 0 for target .* at score",
    ),
    "numpy": (
        dict(loss=lambda s, t: np.square(float(s))), TypeError, r"written in jax.numpy",
    ),
    "if": (
        dict(loss=lambda s, t: (s - t) ** 2 if s > t else t - s), TypeError,
        r"write jnp\.where instead of if",
    ),
    "max": (
        dict(loss=lambda s, t: max(s - t, 0.0)), TypeError, r"jnp\.maximum instead of",
    ),
    "math": (
        dict(loss=lambda s, t: math.exp(s) - t * s), TypeError, r"write jnp\.exp for",
    ),
    "scipy": (
        dict(loss=lambda s, t: special.huber(1.0, np.asarray(s - t))), TypeError,
        r"write .*jax\.scipy",
    ),
    "list": (
        dict(loss=lambda s, t: (s - [1.0, 2.0][t]) ** 2, y=(Y > 0).astype(np.int32)),
        TypeError, r"write jnp\.asarray\(list\)\[index\]",
    ),
    "mask": (
        dict(
            loss=lambda s, t, *, where: jnp.sum(((s - t) ** 2)[where]),
            groups=np.arange(N) // 10,
        ),
        TypeError, r"write jnp\.where\(mask, values, 0\.0\)",
    ),
    "score[0]": (
        dict(loss=lambda s, t: (s[0] - t) ** 2), TypeError,
        r"write score, not score\[0\]",
    ),
    "softmax of one score": (
        dict(loss=jb.losses.softmax, y=np.arange(N) % 3), ValueError,
        "num_scores is 1; pass num_scores=3",
    ),
    "softmax of few scores": (
        dict(loss=jb.losses.softmax, y=np.arange(N) % 4, num_scores=3), ValueError,
        "num_scores is 3; pass num_scores=4",
    ),
    "softmax from 1": (
        dict(loss=jb.losses.softmax, y=1 + np.arange(N) % 3, num_scores=3), ValueError,
        "num_scores is 3; subtract 1",
    ),
    "softmax of signs": (
        dict(loss=jb.losses.softmax, y=np.sign(Y), num_scores=2), ValueError,
        "JBoostClassifier takes labels",
    ),
    "log probabilities": (
        dict(loss=optax.losses.kl_divergence, y=np.full((N, 2), 0.5), num_scores=2),
        ValueError, r"jax\.nn\.log_softmax",
    ),
}  # fmt: skip

WORDS = {
    name: ({name: "nonsense"}, ValueError, rf"{name} must be one of.*'nonsense'")
    for name in ("curvature", "leaf_solver", "regularization")
} | {
    f"{name} word": (
        {name: "nonsense"}, (TypeError, ValueError), f"{name} must be {wanted}, got",
    )
    for name, wanted in {
        "l2": "a number >= 0.0 or 'auto'",
        "min_child_samples": "an integer from 1 to 2147483647 or 'auto'",
        "init_score": "'auto', 'median', a number or 1 numbers",
        "share_structure": "'auto', True or False",
        "learning_rate": "a number > 0.0, 'auto' or a schedule, round -> number",
        "max_leaves": "an integer from 2 to 2147483647 or None",
        "early_stopping_rounds": "an integer from 1 to 2147483647, None or 'auto'",
        "absent": r"one of \('missing', 'zero'\) or None",
        "curvature": "one of .* or a function .*",
    }.items()
}  # fmt: skip

NUMBERS = {
    f"{name}={value!r}": ({name: value}, error, rf"{name} must be an? .*{shown}")
    for name, value, error, shown in [
        ("num_rounds", -1, ValueError, "-1"),
        ("num_rounds", 2.5, TypeError, "2.5"),
        ("num_rounds", True, TypeError, "True"),
        ("max_depth", 0, ValueError, "got 0"),
        ("max_depth", 21, ValueError, "got 21"),
        ("max_depth", 3.0, TypeError, "got 3.0"),
        ("max_bins", 1, ValueError, "got 1"),
        ("max_bins", 70_000, ValueError, "got 70000"),
        ("num_scores", 0, ValueError, "got 0"),
        ("num_scores", "2", TypeError, "got '2'"),
        ("seed", -1, ValueError, "got -1"),
        ("seed", 1.5, TypeError, "got 1.5"),
        ("min_child_samples", 0, ValueError, "got 0"),
        ("min_child_samples", 2.5, TypeError, "got 2.5"),
        ("learning_rate", 0.0, ValueError, "got 0.0"),
        ("learning_rate", -0.1, ValueError, "got -0.1"),
        ("learning_rate", NAN, ValueError, "got nan"),
        ("learning_rate", "fast", TypeError, "got 'fast'"),
        ("learning_rate", [0.1, 0.2], TypeError, r"got \[0.1, 0.2\]"),
        ("l2", -1.0, ValueError, "got -1.0"),
        ("l2", INF, ValueError, "got inf"),
        ("l2", None, TypeError, "got None"),
        ("min_gain", -1, ValueError, "got -1"),
        ("min_child_weight", -1, ValueError, "got -1"),
        ("subsample", 0.0, ValueError, "got 0.0"),
        ("subsample", 1.1, ValueError, "got 1.1"),
        ("colsample_bytree", 0, ValueError, "got 0"),
        ("colsample_bylevel", 2, ValueError, "got 2"),
        ("colsample_bynode", -0.5, ValueError, "got -0.5"),
    ]
}

OTHERS = {
    "schedule": (
        dict(learning_rate=lambda step: -1.0), ValueError,
        r"learning_rate\(0\) must be a number >= 0",
    ),
    "init_score nan": (
        dict(init_score=NAN), ValueError, r"init_score must be finite, got nan",
    ),
    "init_score shape": (
        dict(init_score=[1.0, 2.0]), ValueError, r"init_score must be .*shape \(2,\)",
    ),
    "init_score median": (
        dict(init_score="median", loss=jb.losses.logistic, y=Y > 1), ValueError,
        r"init_score='median' needs .* minimum of its own .* got none in row 0 for "
        r"target (True|False)",
    ),
    "median_step without minimum": (
        dict(leaf_solver="median_step", loss=jb.losses.logistic, y=Y > 1), ValueError,
        r"leaf_solver='median_step' needs .* minimum of its own .* got none in row 0",
    ),
    "median_step straight": (
        dict(leaf_solver="median_step", loss=jb.losses.absolute_error), ValueError,
        r"leaf_solver='median_step' needs .*second derivative.* by 'exact'",
    ),
    "median_step quadratic": (
        dict(leaf_solver="median_step"), ValueError,
        r"leaf_solver='median_step' needs .*second derivative.* by 'newton'",
    ),
    "stopping without validation": (
        dict(x=X[:1], y=Y[:1], early_stopping_rounds=3), ValueError,
        r"early_stopping_rounds needs validation.* too few rows",
    ),
    "stopping after nothing": (
        dict(early_stopping_rounds=0, validation=(X, Y)), ValueError,
        r"early_stopping_rounds must be an integer from 1.*got 0",
    ),
    "validation columns": (
        dict(validation=(X[:, :2], Y)), ValueError,
        r"validation x must have 3 columns, as x has, got 2",
    ),
    "validation rows": (
        dict(validation={"a": (X, Y[:9])}), ValueError,
        r"validation\['a'\] y must have",
    ),
    "validation of other targets": (
        dict(validation=(X, (Y, Y))), ValueError,
        r"validation y must have the structure of y",
    ),
    "validation of wider targets": (
        dict(validation=(X, np.stack([Y, Y], axis=1))), ValueError,
        r"validation y must have rows of shape \(\), like y, got \(2,\)",
    ),
    "validation of fractions": (
        dict(y=np.arange(len(Y)) % 3, validation=(X, Y + 0.25)), ValueError,
        r"validation y must contain values that int32, the dtype of y, can",
    ),
    "validation of one": (
        dict(validation=(X,)), ValueError, r"validation must be \(x, y\).*tuple of 1",
    ),
    "validation of a matrix": (
        dict(validation=X), ValueError, r"validation must be \(x, y\).*ndarray",
    ),
    "validation weights": (
        dict(validation=(X, Y, -ONES)), ValueError,
        r"validation sample_weight must be finite and >= 0",
    ),
    "validation without offset": (
        dict(validation=(X, Y), offset=ONES), ValueError,
        r"validation must be .*offset",
    ),
    "validation nan": (
        dict(validation=(X, changed(Y, 2, NAN))), ValueError,
        r"validation y must be finite.*nan in row 2",
    ),
    "metrics list": (
        dict(metrics=[3]), TypeError, r"metrics must be a dict.*got 3",
    ),
    "metric": (
        dict(metrics={"a": 3}), TypeError, r"metrics\['a'\] must be callable.*got 3",
    ),
    "callback": (
        dict(callbacks=[3]), TypeError, r"callbacks must be callable.*got 3",
    ),
    "callbacks number": (dict(callbacks=3), TypeError, r"callbacks must be .*got 3"),
}  # fmt: skip

TABLE = {**DATA, **LOSSES, **WORDS, **NUMBERS, **OTHERS}


@pytest.mark.parametrize("name", TABLE)
def test_fit_refuses(name):
    arguments, error, message = TABLE[name]
    with pytest.raises(error, match=f"(?s){message}"):
        fit(**arguments)


def test_unknown_arguments_and_positions_are_refused():
    with pytest.raises(TypeError, match="n_estimators"):
        fit(n_estimators=3)
    with pytest.raises(TypeError, match="positional"):
        jb.fit(X, Y, jb.losses.squared_error, ONES)


def make_model():
    return jb.Ensemble(
        feature=jnp.zeros((1, 1, 1), jnp.int32),
        threshold=jnp.zeros((1, 1, 1)),
        missing_left=jnp.ones((1, 1, 1), bool),
        leaf_value=jnp.ones((1, 1, 2)),
        init_score=jnp.float32(0),
        num_features=3,
    )


@pytest.mark.parametrize("function", [jb.predict, jb.staged_predict, jb.leaf_indices])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m, x: (m, x[:, :2]), ValueError, "x must have 3 columns.*got 2"),
        (lambda m, x: (m, x[:, 0]), ValueError, "x must be 2-D"),
        (lambda m, x: (m, x.astype(str)), TypeError, "x must hold numbers"),
        (lambda m, x: ((m, None), x), TypeError, "got the pair.*unpack it"),
        (lambda m, x: (3, x), TypeError, "model must be an Ensemble.*, got int"),
    ],
)
def test_predict_refuses(function, change, error, message):
    with pytest.raises(error, match=message):
        function(*change(make_model(), X))


def test_predict_refuses_offsets():
    for offset, message in [
        (ONES[:5], r"offset must have shape \(200,\), got \(5,\)"),
        (changed(ONES, 2, NAN), "offset must be finite.*row 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            jb.predict(make_model(), X, offset=offset)


def test_truncate_refuses():
    for rounds, error in [(2, ValueError), (-1, ValueError), (0.5, TypeError)]:
        with pytest.raises(error, match=rf"num_rounds .*{rounds}"):
            jb.truncate(make_model(), rounds)
    with pytest.raises(TypeError, match="got the pair"):
        jb.truncate((make_model(), None), 1)


CODES = jnp.ones((N, 3), jnp.uint8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(binned=X), ValueError, "binned must be .*float32"),
        (dict(binned=CODES[0]), ValueError, r"binned must be .*\(3,\)"),
        (dict(y=Y[:5]), ValueError, r"y must have 200 rows.*\(5,\)"),
        (dict(sample_weight=-ONES), ValueError, "sample_weight must be finite"),
        (dict(loss=None), TypeError, "loss must be callable.*None"),
        (dict(l2=-1.0), ValueError, "l2 must be .*-1.0"),
        (dict(l2=jnp.ones(3)), TypeError, "l2 must be a number"),
        (dict(num_rounds=jnp.ones(3)), TypeError, "num_rounds must be an integer"),
        (dict(learning_rate=-1), ValueError, "learning_rate must be"),
        (dict(curvature="newton"), ValueError, "curvature must be one of"),
    ],
)
def test_boost_refuses(arguments, error, message):
    data = dict(binned=CODES, y=Y, loss=jb.losses.squared_error) | arguments
    positional = [data.pop(name) for name in ("binned", "y", "loss")]
    with pytest.raises(error, match=message):
        jb.boost(*positional, jax.random.key(0), **data)


def test_sizes_cannot_be_traced():
    def train(depth):
        return jb.boost(
            CODES, Y, jb.losses.squared_error, jax.random.key(0), max_depth=depth
        )

    with pytest.raises(TypeError, match=r"max_depth .*traced"):
        jax.jit(train)(3)
