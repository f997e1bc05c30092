# SPDX-License-Identifier: Apache-2.0
"""Training on the devices of a mesh gives the bits of training on one device.

The references are the same functions without a mesh: JAX cannot check that programs of
shards exchange what they must. test_routes.py compares models of other losses on three
devices; here are histories, other shares of the rows, and what both of them leave.
"""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from routes import HOLES, LABELS, OFFSET, WEIGHTS, X, Y
from tables import same_bits, same_histories, squared_distance

import jboost as jb
from jboost import losses
from jboost.entry.programs import FULL, QUICK, compiled
from jboost.objective.coupling import _find_direction
from jboost.objective.evaluation import Objective, gradients, hessians, loss_values
from jboost.objective.retracing import trace_loss_once

DEVICES = 4
FEW = dict(num_rounds=2, max_depth=2)
SEVERAL = np.stack([Y, -X[:, 0]], 1)


def make_mesh(count):
    return jax.make_mesh((count,), ("rows",), devices=jax.devices()[:count])


MESH = make_mesh(DEVICES)


def compare(*data, mesh=MESH, **call):
    """Asserts that models and histories are the same; returns the history."""
    (one, history), (many, other) = (
        jb.fit(*data, **call, **more) for more in ({}, dict(mesh=mesh))
    )
    same_bits(one, many)
    same_histories(history, other)
    return history


def test_early_stopping_by_a_metric():
    """Of 199 rows one device has fewer."""
    part = slice(199)
    held = (X[:51], LABELS[::-1][:51], WEIGHTS[:51], OFFSET[:51])
    history = compare(
        HOLES[part], LABELS[part], losses.logistic, sample_weight=WEIGHTS[part],
        offset=OFFSET[part], validation=held, metrics=["log_loss"], by="auc",
        early_stopping_rounds=2, num_rounds=8, max_depth=2, learning_rate=0.9,
        leaf_solver="exact", max_leaves=3, colsample_bynode=0.7,
        interactions=[[0, 1], [2]],
    )  # fmt: skip
    assert history.best_round < 7


def test_samples_and_median_steps():
    held = dict(validation=(X[:51], Y[:51]))
    compare(HOLES, Y, losses.huber, subsample=0.6, leaf_solver="median_step", **held,
            **FEW)  # fmt: skip


def test_devices_may_have_no_row():
    compare(
        X[:1], Y[:1], losses.huber, min_child_samples=1, mesh=make_mesh(3),
        leaf_solver="median_step", init_score="median", **FEW,
    )  # fmt: skip


@pytest.mark.parametrize("jitted", [True, False])
def test_boost(jitted):
    y, loss, more = (
        (Y, losses.squared_error, {})
        if jitted
        else (SEVERAL, squared_distance, dict(num_scores=2, init_score=[0.5, -0.25]))
    )
    bins = jb.fit_bins(X)

    def run(codes, y):
        return jb.boost(codes, y, loss, jax.random.key(0), mesh=MESH, **FEW, **more)

    rows = NamedSharding(MESH, PartitionSpec("rows"))
    codes = jb.apply_bins(bins, jax.device_put(X, rows) if jitted else X)
    trees, scores = (jax.jit(run) if jitted else run)(codes, y)
    expected, _ = jb.fit(X, y, loss, linear_leaves=False, **FEW, **more)
    same_bits(jb.to_ensemble(trees, bins), expected)
    np.testing.assert_allclose(scores, jb.predict(expected, X), rtol=1e-5, atol=1e-6)


def test_training_goes_on_with_other_devices(tmp_path):
    """From a model, and from a checkpoint; sharded rows bring their mesh."""
    settings = dict(loss=losses.squared_error, max_depth=2, subsample=0.7)
    whole, _ = jb.fit(X, Y, num_rounds=5, **settings)
    run = partial(jb.fit, X, Y, checkpoint=tmp_path / "run", **settings)
    part, _ = run(num_rounds=3, mesh=MESH)
    found, _ = jb.fit(X, Y, num_rounds=2, mesh=make_mesh(1), model=part, **settings)
    same_bits(whole, found)
    same_bits(whole, run(num_rounds=5)[0])
    rows = jax.device_put(X, NamedSharding(MESH, PartitionSpec("rows")))
    same_bits(part, jb.fit(rows, Y, num_rounds=3, **settings)[0])
    scores = jb.predict(part, rows)
    assert scores.sharding.is_equivalent_to(rows.sharding, 1)
    np.testing.assert_array_equal(scores, jb.predict(part, X))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mesh=4), "mesh must be a jax.sharding.Mesh"),
        (dict(candidates="exact"), "candidates must be 'global'"),
        (
            dict(y=np.where(np.arange(200) == 170, np.inf, Y), loss=squared_distance),
            "row 170",
        ),
    ],
)
def test_refusals(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        jb.fit(X, **{"y": Y, "mesh": MESH, **FEW, **changes})


def test_derivatives_of_training_are_refused():
    codes = np.asarray(jb.apply_bins(jb.fit_bins(X), X))

    def train(y):
        return jb.boost(codes, y, losses.squared_error, jax.random.key(0), mesh=MESH,
                        **FEW)[1].sum()  # fmt: skip

    with pytest.raises(NotImplementedError, match="with a mesh"):
        jax.grad(train)(Y)


def test_models_of_a_comparison_share_the_devices():
    """Three models, and six, on four devices."""
    settings = dict(folds=3, **FEW)
    run = partial(jb.cross_validate, X, Y, return_models=True, **settings)
    same_bits(run().models, run(mesh=MESH).models)
    points = dict(l2=[1.0, 5.0])
    run = partial(jb.sweep, X, Y, losses.squared_error, points, **settings)
    np.testing.assert_array_equal(run().mean, run(mesh=MESH).mean)


@pytest.mark.parametrize(("rows", "num_rounds"), [(8200, 2), (11_000, 0)])
def test_padding_of_shards_changes_no_bit(rows, num_rounds):
    """One device counts as few what the padded shards together would count as many.

    Of many, the programs at the start are compiled apart on one device only.
    """
    x = np.random.default_rng(1).normal(size=(rows, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)
    settings = dict(num_scores=3, max_depth=2)
    compare(x, y, losses.softmax, num_rounds=num_rounds, **settings)


@pytest.mark.parametrize(
    ("program", "num_scores"), [(loss_values, 3), (gradients, 20), (hessians, 3)]
)
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
        same_bits(quick(hessian), full(hessian))
