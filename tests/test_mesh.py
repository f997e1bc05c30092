# SPDX-License-Identifier: Apache-2.0
"""Training on the devices of a mesh gives the bits of training on one device.

The references are the same functions without a mesh: JAX cannot check that programs of
shards exchange what they must, so every rule that looks at rows is compared here.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jboost as jb
from jboost import losses
from jboost.entry.programs import FULL, QUICK, compiled
from jboost.objective.coupling import _find_direction
from jboost.objective.evaluation import Objective, gradients, hessians, loss_values
from jboost.objective.retracing import trace_loss_once

ROWS, FEATURES = 1001, 5
DEVICES = 4


def make_mesh(count):
    return jax.make_mesh(
        (count,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:count],
    )  # fmt: skip


MESH = make_mesh(DEVICES)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
X[RNG.random(X.shape) < 0.05] = np.nan
CENTER = np.nan_to_num(X[:, 0]) + np.sin(3 * np.nan_to_num(X[:, 1]))
Y = (CENTER + RNG.standard_t(2, size=ROWS)).astype(np.float32)
LABELS = (Y > 0).astype(np.float32)
COUNTS = np.abs(np.round(Y)).astype(np.float32)
CLASSES = np.clip(Y + 1, 0, 2).astype(np.int32)
WEIGHTS = RNG.random(ROWS).astype(np.float32)
OFFSET = np.log(WEIGHTS + np.float32(0.5))
FEW = dict(num_rounds=3, max_depth=3)


def normal(score, target):
    return score[1] + 0.5 * ((target - score[0]) * jnp.exp(-score[1])) ** 2


def odd(score, target):
    return jnp.log1p((score - target) ** 2)


def quantile_of_residuals(score, target, weight):
    return jnp.quantile(jnp.abs(score - target), 0.9)


ADAPTIVE = losses.adaptive(
    lambda s, t, p: losses.huber(s, t, delta=p), quantile_of_residuals
)
CASES = {
    "squared": (losses.squared_error, Y, {}),
    "absolute": (losses.absolute_error, Y, dict(sample_weight=WEIGHTS)),
    "quantile": (partial(losses.quantile, tau=0.9), Y, {}),
    "logistic": (losses.logistic, LABELS, dict(leaf_solver="line_search")),
    "poisson": (losses.poisson, COUNTS, dict(offset=OFFSET)),
    "huber": (losses.huber, Y, dict(subsample=0.6, leaf_solver="exact")),
    "median": (losses.huber, Y, dict(leaf_solver="median_step", init_score="median")),
    "softmax": (losses.softmax, CLASSES, dict(num_scores=3)),
    "normal": (normal, Y, dict(num_scores=2)),
    "odd": (odd, Y, dict(colsample_bynode=0.5, l1=0.1)),
    "limited": (
        losses.squared_error, Y,
        dict(monotone={0: 1}, interactions=[[0, 1], [2, 3, 4]], max_leaves=6),
    ),
    "adaptive": (ADAPTIVE, Y, {}),
}  # fmt: skip


def assert_same_model(model, other):
    chex.assert_trees_all_equal(model, other)


@pytest.mark.parametrize("name", CASES)
def test_fit(name):
    loss, y, settings = CASES[name]
    settings = {**FEW, **settings}
    offset = settings.get("offset")
    held = (X[:99], y[:99], None, None if offset is None else offset[:99])
    run = partial(jb.fit, X, y, loss, validation=held, **settings)
    one, history = run()
    many, other = run(mesh=MESH)
    assert_same_model(one, many)
    np.testing.assert_array_equal(history.train_loss, other.train_loss)
    np.testing.assert_array_equal(history.validation_loss, other.validation_loss)
    assert history.choices == other.choices


@pytest.mark.parametrize(("rows", "count"), [(65, 1), (2, 2), (7, 2), (1, 3), (65, 3)])
def test_any_number_of_rows_on_any_number_of_devices(count, rows):
    """Devices may have no row at all."""
    run = partial(jb.fit, X[:rows], Y[:rows], losses.huber, **FEW, min_child_samples=1)
    assert_same_model(run()[0], run(mesh=make_mesh(count))[0])


@pytest.mark.parametrize(("name", "jitted"), [("squared", True), ("softmax", False)])
def test_boost(name, jitted):
    """The tests of fit search where several scores start, in smaller programs."""
    loss, y, settings = CASES[name]
    if name == "softmax":
        settings = settings | dict(init_score=np.array([0.5, 0.0, -0.2], np.float32))
    binned = np.asarray(jb.apply_bins(jb.fit_bins(X), X))

    def run(binned, y, **mesh):
        key = jax.random.key(0)
        return jb.boost(binned, y, loss, key, **mesh, **FEW, **settings)

    many = partial(run, mesh=MESH)
    found = (jax.jit(many) if jitted else many)(binned, y)
    chex.assert_trees_all_equal(run(binned, y), jax.device_get(found))


def test_sharded_rows_bring_their_mesh():
    x, y = X[:1000], Y[:1000]
    rows = jax.device_put(x, NamedSharding(MESH, PartitionSpec("rows")))
    model, _ = jb.fit(rows, y, **FEW)
    assert_same_model(model, jb.fit(x, y, **FEW)[0])
    scores = jb.predict(model, rows)
    assert scores.sharding.is_equivalent_to(rows.sharding, 1)
    np.testing.assert_array_equal(scores, jb.predict(model, x))


def test_early_stopping_by_a_metric():
    settings = dict(num_rounds=12, learning_rate=0.9, max_depth=3, by="auc",
                    early_stopping_rounds=2, metrics=["log_loss"])  # fmt: skip
    run = partial(
        jb.fit, X, LABELS, losses.logistic, validation=(X[:301], LABELS[::-1][:301])
    )
    one, history = run(**settings)
    many, other = run(**settings, mesh=MESH)
    assert_same_model(one, many)
    chex.assert_trees_all_equal(history.metrics, other.metrics)
    assert history.best_round == other.best_round < 11


def test_training_goes_on_with_other_devices(tmp_path):
    """From a model, and from a checkpoint."""
    settings = dict(loss=losses.logistic, max_depth=3, subsample=0.7)
    whole, _ = jb.fit(X, LABELS, num_rounds=6, **settings)
    run = partial(jb.fit, X, LABELS, checkpoint=tmp_path / "run", **settings)
    part, _ = run(num_rounds=3, mesh=MESH)
    found, _ = jb.fit(
        X, LABELS, num_rounds=3, mesh=make_mesh(2), model=part, **settings
    )
    assert_same_model(whole, found)
    assert_same_model(whole, run(num_rounds=6)[0])


def test_categories():
    x = np.nan_to_num(X)
    x[:, 4] = RNG.integers(0, 12, ROWS)
    run = partial(jb.fit, x, Y, categorical=[4], **FEW)
    assert_same_model(run()[0], run(mesh=MESH)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mesh=4), "mesh must be a jax.sharding.Mesh"),
        (dict(candidates="exact"), "candidates must be 'global'"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jb.fit(X, Y, **{**FEW, "mesh": MESH, **changes})


def test_derivatives_of_training_are_refused():
    binned = np.asarray(jb.apply_bins(jb.fit_bins(X), X))

    def train(y):
        return jb.boost(binned, y, losses.squared_error, jax.random.key(0), mesh=MESH,
                        **FEW)[1].sum()  # fmt: skip

    with pytest.raises(NotImplementedError, match="with a mesh"):
        jax.grad(train)(Y)


def test_errors_name_the_row():
    y = LABELS.copy()
    y[700] = np.inf
    with pytest.raises(ValueError, match="700"):
        jb.fit(X, y, lambda s, t: (s - t) ** 2, mesh=MESH, **FEW)


def test_models_of_a_comparison_share_the_devices():
    settings = dict(folds=3, num_rounds=4, max_depth=2)
    run = partial(jb.cross_validate, X, Y, losses.huber, return_models=True, **settings)
    chex.assert_trees_all_equal(run().models, run(mesh=MESH).models)
    points = dict(learning_rate=[0.1, 0.3], l2=[1.0, 5.0])
    run = partial(jb.sweep, X, LABELS, losses.logistic, points, **settings)
    np.testing.assert_array_equal(run().mean, run(mesh=MESH).mean)


@pytest.mark.parametrize("rows", [8200, 11_000])
def test_padding_of_shards_changes_no_bit(rows):
    """One device counts as few what the padded shards together would count as many.

    Of many, the programs at the start are compiled apart on one device only.
    """
    x = np.random.default_rng(1).normal(size=(rows, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)
    run = partial(jb.fit, x, y, losses.softmax, num_scores=3, **FEW)
    assert_same_model(run()[0], run(mesh=MESH)[0])


@pytest.mark.parametrize("program", [loss_values, gradients, hessians])
@pytest.mark.parametrize("num_scores", [3, 20])
def test_several_scores_round_alike_for_any_number_of_rows(num_scores, program):
    """A shard evaluates fewer rows at once than one device does."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(num_scores, 10_240)).astype(np.float32)
    targets = rng.integers(0, num_scores, scores.shape[1]).astype(np.int32)
    loss, constants = trace_loss_once(losses.softmax, targets, num_scores, None)

    @jax.jit
    def run(scores, targets):
        return program(Objective(loss, constants, targets, (), None), scores)

    whole = run(scores, targets)
    for size in (256, 5120):
        part = run(scores[:, :size], targets[:size])
        np.testing.assert_array_equal(part, whole[..., :size])


def test_how_scores_compete_rounds_alike_in_all_programs():
    """On one device a small program finds it, on several the whole start does."""
    quick, full = (compiled(_find_direction, effort=each) for each in (QUICK, FULL))
    for share in np.random.default_rng(0).dirichlet(np.ones(4), 20):
        hessian = (np.diag(share) - np.outer(share, share)).astype(np.float32)
        chex.assert_trees_all_equal(quick(hessian), full(hessian))
