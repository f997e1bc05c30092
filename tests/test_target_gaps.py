# SPDX-License-Identifier: Apache-2.0
"""Targets may be infinite or NaN wherever the loss is finite.

The law: what a gap in the targets says can be said by a mask beside them, too, and the
model is then the same, bit for bit.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from tables import ROWS, make_columns, squared_distance

import jboost as jb

RNG = np.random.default_rng(7)
X = make_columns()
FULL = np.stack([X[:, 0] + X[:, 1] ** 2, X[:, 2]], 1).astype(np.float32)
KNOWN = RNG.uniform(size=FULL.shape) < 0.7
GAPPY = np.where(KNOWN, FULL, np.nan).astype(np.float32)
MASKED = dict(value=np.where(KNOWN, FULL, 3.0).astype(np.float32), known=KNOWN)
SETTINGS = dict(num_rounds=3, max_depth=1, seed=1)
# Routes in programs of their own start here: a search compiles for long.
START = dict(init_score=0.25)
ROW = 7
BINS = jb.fit_bins(X)
CODES = jb.apply_bins(BINS, X)


def on_known(score, value, known):
    """Two measurements of one number, some of them missing."""
    error = score - jnp.where(known, value, 0.0)
    return jnp.sum(jnp.where(known, jnp.logaddexp(error, -error), 0.0))


def of_gaps(score, target):
    return on_known(score, target, ~jnp.isnan(target))


def of_mask(score, target):
    return on_known(score, target["value"], target["known"])


def single_where(score, target):
    """Finite, but the derivative of the branch that is not taken is NaN."""
    known = ~jnp.isnan(target)
    return jnp.sum(jnp.where(known, (score - target) ** 4, 0.0))


def fit(targets, loss, x=X, **more):
    model, history = jb.fit(x, targets, loss, **SETTINGS, **more)
    return (*trees_of(model), history.train_loss, history.validation_loss)


def trees_of(model):
    return model.feature, model.threshold, model.leaf_value, model.init_score


def fit_frame(targets, loss):
    wraps = partial(
        jax.tree.map, lambda a: pd.DataFrame(a, columns=["first", "second"])
    )
    return fit(wraps(targets), loss, x=pd.DataFrame(X, columns=["a", "b", "c"]))


def fit_validated(targets, loss):
    return fit(targets, loss, validation=(X, targets))


def fit_stream(targets, loss, **start):
    source = jb.streams.array_batches(X, targets, batch_rows=64)
    model, history = jb.fit(
        jb.stream(source, memory="256 MiB", bins=BINS), None, loss, **start, **SETTINGS
    )
    return (*trees_of(model), history.train_loss)


def fit_mesh(targets, loss):
    return fit(targets, loss, **START, mesh=jax.make_mesh((3,), ("rows",)))


def fit_checkpoint(targets, loss, path):
    jb.fit(X, targets, loss, **SETTINGS | dict(num_rounds=2), checkpoint=path)
    return fit(targets, loss, checkpoint=path)


def boost(targets, loss):
    trees, _ = jb.boost(
        CODES, targets, loss, jax.random.key(1), num_rounds=3, max_depth=1, **START
    )
    return trees_of(jb.to_ensemble(trees, BINS))


def step(targets, loss):
    state = jb.init(CODES, targets, loss, jax.random.key(1), **START)
    state, tree = jb.boost_step(state, CODES, targets, loss, max_depth=1)
    return tree.leaf_value, state.scores


def validate(targets, loss):
    result = jb.cross_validate(X, targets, loss, folds=3, **START, **SETTINGS)
    return result.validation_loss, result.scores


def refit(targets, loss):
    return trees_of(jb.refit(train_masked(), X, targets, loss))


@cache
def train_masked():
    return jb.fit(X, MASKED, of_mask, **SETTINGS)[0]


ROUTES = dict(
    fit=fit, frame=fit_frame, validated=fit_validated,
    stream=partial(fit_stream, **START), mesh=fit_mesh, boost=boost, step=step,
    cross_validate=validate, refit=refit,
)  # fmt: skip


@pytest.mark.usefixtures("constant_leaves")
def test_gaps_are_as_good_as_a_mask(tmp_path):
    """However it is trained, and wherever it starts."""
    searched = fit(MASKED, of_mask)
    given = fit(MASKED, of_mask, **START)
    names = ("fit", "boost", "mesh", "stream")
    found = {name: ROUTES[name](GAPPY, of_gaps) for name in names}

    found["checkpoint"] = fit_checkpoint(GAPPY, of_gaps, tmp_path / "run")
    for name, arrays in found.items():
        expected = searched if name in ("fit", "checkpoint") else given
        for gaps, mask in zip(arrays[:5], expected, strict=False):
            np.testing.assert_array_equal(gaps, mask, name)
    assert np.isfinite(found["fit"][4]).all()
    folds = validate(GAPPY, of_gaps), validate(MASKED, of_mask)
    for gaps, mask in zip(*folds, strict=True):
        np.testing.assert_array_equal(gaps, mask)
    assert np.isfinite(folds[0][0]).all()


def test_infinite_bounds_are_as_good_as_a_mask():
    """Intervals as XGBoost writes them: an upper bound of infinity where censored."""
    lower = np.exp(FULL[:, 0] / 3)
    censored = KNOWN[:, 0]
    upper = np.where(censored, np.inf, 2 * lower)

    def survival(score, bound):
        return jax.nn.sigmoid(score - jnp.log(bound))

    def interval(score, lower, upper, open_end):
        beyond = jnp.where(
            open_end, 0.0, survival(score, jnp.where(open_end, 1.0, upper))
        )
        return -jnp.log(survival(score, lower) - beyond)

    def of_bounds(score, target):
        return interval(score, *target, jnp.isinf(target[1]))

    def of_flags(score, target):
        return interval(score, target["lower"], target["upper"], target["censored"])

    given = (
        (np.stack([lower, upper], 1), of_bounds),
        (dict(lower=lower, upper=2 * lower, censored=censored), of_flags),
    )
    models = (jb.fit(X, *each, **START, **SETTINGS)[0] for each in given)
    for gaps, mask in zip(*map(trees_of, models), strict=True):
        np.testing.assert_array_equal(gaps, mask)


@pytest.mark.parametrize(
    ("name", "value"), [*((name, np.nan) for name in ROUTES), ("fit", np.inf)]
)
def test_gaps_without_a_loss_are_refused(name, value):
    targets = FULL.copy()
    targets[ROW, 1] = value
    word = str(value)
    with pytest.raises(
        ValueError, match=rf"y must be finite.*, {word}\] in row {ROW};"
    ):
        ROUTES[name](targets, squared_distance)


def test_the_row_is_named_beside_rows_that_may_have_gaps():
    targets = GAPPY.copy()
    targets[ROW] = -99.0

    def loss(score, target):
        return of_gaps(score, target) + jnp.where(target[0] < -50, jnp.nan, 0.0)

    with pytest.raises(ValueError, match=rf"loss must be finite .* in row {ROW} "):
        fit(targets, loss)
    with pytest.raises(ValueError, match=rf"on validation, .* in row {ROW} "):
        fit(GAPPY, loss, validation=(X, targets))
    bad = int(np.argmin(KNOWN.all(1)))
    with pytest.raises(ValueError, match=rf"validation y must be .* in row {bad};"):
        fit(FULL, squared_distance, validation=(X, GAPPY))


@pytest.mark.parametrize(
    "name", ["fit", "frame", "stream", "mesh", "cross_validate", "refit"]
)
def test_gradients_lost_behind_a_branch_are_refused(name):
    row = int(np.argmin(KNOWN.all(1)))
    with pytest.raises(ValueError, match=rf"NaN in row {row} .* jnp.where\(known"):
        ROUTES[name](GAPPY, single_where)


def test_gradients_lost_in_refinement_are_refused():
    model = train_masked()
    row = int(np.argmin(KNOWN.all(1)))
    with pytest.raises(ValueError, match=rf"NaN in row {row} .* jnp.where\(known"):
        jb.refine(model, X, GAPPY, single_where, num_epochs=1)


def test_gradients_lost_in_groups_are_explained():

    def single(scores, targets, *, where):
        known = where & ~jnp.isnan(targets)
        return jnp.sum(jnp.where(known, (scores - targets) ** 4, 0.0))

    with pytest.warns(UserWarning, match=r"round 0 .* branch of jnp\.where"):
        fit(GAPPY[:, 0], single, groups=np.arange(ROWS) // 10, **START)


def test_a_kink_without_a_gradient_is_no_fault():
    """The square root of a square has no derivative at 0, but one on both sides."""
    targets = np.round(FULL[:, 0]).astype(np.float32)
    _, history = jb.fit(
        X,
        targets,
        lambda s, t: jnp.sqrt((s - t) ** 2),
        init_score=0.0,
        **SETTINGS,
    )
    assert (targets == 0).any() and history.train_loss[-1] < history.train_loss[0]


def test_rows_of_weight_zero_may_hold_anything():
    weights = KNOWN.all(1).astype(np.float32)
    found = fit(GAPPY, squared_distance, sample_weight=weights)
    expected = fit(np.nan_to_num(GAPPY), squared_distance, sample_weight=weights)
    for gaps, filled in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(gaps, filled)


def test_estimated_parameters_and_groups_name_the_row():
    targets = FULL[:, 0].copy()
    targets[ROW] = np.nan

    def scale(scores, targets, weights):
        return jnp.sum(weights * (targets - scores) ** 2) / jnp.sum(weights)

    def normal(score, target, variance):
        return jnp.log(variance) + (target - score) ** 2 / variance

    def spread(scores, targets, *, where):
        return jnp.sum(jnp.where(where, (scores - targets) ** 2, 0.0))

    adaptive = jb.losses.adaptive(normal, scale)
    ids = np.arange(ROWS) // 10
    with pytest.raises(ValueError, match=rf"y must be finite .* row {ROW}"):
        jb.init(CODES, targets, adaptive, jax.random.key(0), **START)
    with pytest.raises(ValueError, match=rf"nan in row {ROW}|is nan in row {ROW}"):
        jb.fit(X, targets, spread, groups=ids, **START)
