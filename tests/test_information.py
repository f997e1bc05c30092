# SPDX-License-Identifier: Apache-2.0
"""Curvatures from the Fisher information of a likelihood."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import FULL, ROWS, Classes, same_bits, squared_distance

import jboost as jb
from jboost.losses.likelihoods import find_information
from jboost.objective.coupling import find_coupling
from jboost.objective.curvature import information_diagonals, information_triangles
from jboost.objective.evaluation import Objective, loss_values
from jboost.objective.tracing import trace_loss

D, L = jb.distributions, jb.losses
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
NOISE = np.exp(X[:, 2] / 2) * RNG.normal(size=ROWS)
Y = (X[:, 0] + np.sin(2 * X[:, 1]) + NOISE).astype(np.float32)
# The start is given: its search is compiled for each loss, and tested elsewhere.
FEW = dict(num_rounds=4, max_depth=2, num_scores=2, init_score=(0.0, 0.5))
NORMAL = L.likelihood(D.normal)
LABELS = np.digitize(Y, [-1, 1]).astype(np.float32)
POLICIES = ("fisher", "standardized", "natural")


class Drawn:
    """A normal distribution that has nothing but a density and samples."""

    def __init__(self, score):
        self.inner = D.normal(score)

    def log_prob(self, value):
        return self.inner.log_prob(value)

    def sample(self, key, sample_shape=()):
        return self.inner.sample(key, sample_shape)


class Divergent(Drawn):
    """It has a divergence, too, as a method."""

    def kl_divergence(self, other):
        one, two = self.inner, other.inner
        ratio = jnp.square(one.scale / two.scale)
        away = jnp.square((one.loc - two.loc) / two.scale)
        return (ratio + away - 1 - jnp.log(ratio)) / 2


class Seeded(Drawn):
    """Samples are drawn as in distrax and TensorFlow Probability."""

    def sample(self, *, seed, sample_shape=()):
        return self.inner.sample(seed, sample_shape)


class Bare(Drawn):
    sample = None


DRAWN = L.likelihood(Drawn)


@pytest.fixture(scope="module")
def normal():
    """Model and history of the normal likelihood; nothing is drawn."""
    return jb.fit(X, Y, NORMAL, **FEW, **FULL)


@pytest.fixture(scope="module")
def drawn():
    return jb.fit(X, Y, DRAWN, seed=3, **FEW)


def bind(loss, y, num_scores):
    targets = jnp.asarray(y)
    traced, constants = trace_loss(loss, targets, num_scores)
    return Objective(traced, constants, targets, (), None)


def test_of_many_rows():
    """The information of blocks of rows is that of each row."""
    rows = 5000
    scores = jnp.asarray(RNG.normal(size=(3, rows)), jnp.float32)
    loss = L.likelihood(D.student_t)
    objective = bind(loss, np.zeros(rows, np.float32), 3)
    seed = jnp.zeros(2, jnp.uint32)
    found = np.asarray(information_triangles(objective, scores, seed))
    diagonal = np.asarray(information_diagonals(objective, scores, seed))
    one = find_information(loss, 3).evaluate
    expected = np.asarray(jax.jit(jax.vmap(one, (1, None)))(scores, seed))
    first, second = np.triu_indices(3)
    np.testing.assert_allclose(found, expected[:, first, second].T, rtol=1e-5)
    np.testing.assert_allclose(diagonal, np.diagonal(expected, 0, 1, 2).T, rtol=1e-5)


def test_of_one_score():
    loss = L.likelihood(lambda s: D.Gamma(jnp.exp(s), jnp.float32(2) + 0 * s))
    objective = bind(loss, np.ones(4, np.float32), 1)
    evaluate = jax.jit(partial(information_triangles, objective))
    found = evaluate(jnp.zeros((1, 4)), jnp.zeros(2, jnp.uint32))
    np.testing.assert_allclose(found, 2, rtol=1e-6)


def test_order_of_preference():
    """A formula, a divergence, samples, nothing."""
    score, seed = jnp.array([0.5, 0.7]), jnp.zeros(2, jnp.uint32)
    expected = np.diag([np.exp(-1.4), 2])
    for make, sampled in ((D.normal, False), (Divergent, False)):
        information = find_information(L.likelihood(make), 2)
        assert information.sampled is sampled
        found = jax.jit(information.evaluate)(score, seed)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    words = jnp.arange(20_000, dtype=jnp.uint32).reshape(-1, 2)
    for make in (Drawn, Seeded):
        information = find_information(L.likelihood(make), 2)
        assert information.sampled
        found = jax.jit(jax.vmap(partial(information.evaluate, score)))(words)
        found = np.mean(found, axis=0)
        np.testing.assert_allclose(found, expected, atol=0.03)
    assert find_information(L.likelihood(Bare), 2) is None


def test_of_a_divergence_with_a_kink():
    """That of Laplace has |loc - loc'|."""

    class Kinked(Drawn):
        def __init__(self, score):
            self.inner = D.laplace(score)

        def kl_divergence(self, other):
            one, two = self.inner, other.inner
            away = jnp.abs(one.loc - two.loc)
            near = one.scale * jnp.exp(-away / one.scale)
            return jnp.log(two.scale / one.scale) + (near + away) / two.scale - 1

    information = find_information(L.likelihood(Kinked), 2)
    assert not information.sampled
    evaluate = jax.jit(information.evaluate)
    found = evaluate(jnp.array([0.5, 0.7]), jnp.zeros(2, jnp.uint32))
    np.testing.assert_allclose(found, np.diag([np.exp(-1.4), 1]), atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_round_by_hand(policy):
    """Leaves are G / (H + penalty) of reweighted rows."""
    loss = NORMAL
    scale = np.exp(X[:, 1] / 2)  # information differs from row to row
    offset = np.stack([np.zeros(ROWS), np.log(scale)], axis=1).astype(np.float32)
    weight = RNG.uniform(0.5, 2, ROWS).astype(np.float32)
    model, _ = jb.fit(
        X, Y, loss, num_scores=2, num_rounds=1, max_depth=2, curvature=policy,
        leaf_solver="newton", learning_rate=1.0, init_score=0.0, offset=offset, l2=0.5,
        sample_weight=weight, regularization="absolute", min_child_weight=0.0,
    )  # fmt: skip
    leaf = np.asarray(jb.leaf_indices(model, X))[:, 0]
    z = (Y - offset[:, 0]) / scale
    gradient = np.stack([-z / scale, 1 - z**2], axis=1)
    information = np.stack([scale**-2.0, np.full(ROWS, 2.0)], axis=1)
    second = information
    if policy == "standardized":  # at least the mean at the start, and |l''|
        mean = np.average(information, axis=0, weights=weight)
        information = np.maximum(information, mean)
        own = np.stack([scale**-2.0, 2 * z**2], axis=1)
        second = np.maximum(information, own)
    exponent = {"fisher": 0.0, "standardized": -0.5, "natural": -1.0}[policy]
    factor = weight[:, None] * information**exponent
    for k in range(2):
        for value in np.unique(leaf[:, k]):
            rows = leaf[:, k] == value
            top = (factor * gradient)[rows, k].sum()
            bottom = (factor * second)[rows, k].sum() + 0.5
            found = model.leaf_value[0, k, value]
            np.testing.assert_allclose(found, -top / bottom, rtol=2e-4, atol=1e-5)


def test_what_auto_chooses(normal):
    _, history = normal
    assert history.choices["curvature"] == "standardized"
    _, other = jb.fit(X, Y, NORMAL, curvature="standardized", **FEW, **FULL)
    np.testing.assert_array_equal(history.train_loss, other.train_loss)
    _, bare = jb.fit(X, Y, L.likelihood(Bare), **FEW)
    assert bare.choices["curvature"] == "auto"
    assert bare.train_loss[-1] < bare.train_loss[0]


def test_leaves_by_the_hessian():
    """Their penalty is in units of the loss, as the information is."""
    settings = FEW | dict(leaf_solver="hessian")
    _, history = jb.fit(X, Y, NORMAL, **settings)
    assert history.choices["curvature"] == "fisher"
    for policy in ("standardized", "natural"):
        with pytest.raises(ValueError, match=r"leaf_solver must .*got 'hessian'"):
            jb.fit(X, Y, NORMAL, curvature=policy, **settings)


@pytest.mark.parametrize(
    ("policy", "loss"),
    [("fisher", L.likelihood(Bare)), ("natural", squared_distance)],
)
def test_what_needs_a_distribution(policy, loss):
    message = rf"curvature='{policy}' needs a loss from losses.likelihood"
    with pytest.raises(ValueError, match=message):
        jb.fit(X, Y, loss, curvature=policy, **FEW)
    with pytest.raises(ValueError, match="curvature must be one of"):
        jb.fit(X, Y, L.list_mle, groups="all", curvature=policy, num_rounds=2)


COUNTS = np.floor(np.exp(np.clip(Y, -2, 2))).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "target", "expected"),
    [
        (D.student_t, Y, (False, False, True)),
        (D.negative_binomial, COUNTS, (True, True)),
        (D.weibull, np.exp(Y), (False, False)),  # shape^2, and 1.82
        (Drawn, Y, (False, False)),  # by nodes
    ],
)
def test_scores_that_their_own_information_depends_on(make, target, expected):
    """Their rows are weighted alike; the others get the scale that others set."""
    coupling = couple(L.likelihood(make), target, len(expected))
    np.testing.assert_array_equal(coupling.self_informed, expected)


def couple(loss, target, num_scores):
    objective = bind(loss, target, num_scores)
    evaluate = jax.jit(partial(find_coupling, objective))
    return evaluate(jnp.full((num_scores, ROWS), 0.3), jnp.ones(ROWS))


def test_coupling_is_that_of_the_information():
    """The scores of a normal distribution are apart, those of classes compete."""
    coupling = couple(NORMAL, Y, 2)
    assert not coupling.competing.any() and not coupling.self_informed.any()
    np.testing.assert_allclose(coupling.start, [np.exp(-0.6), 2], rtol=1e-6)
    assert couple(L.likelihood(Classes), LABELS, 3).competing.all()


def test_a_single_score_weights_rows_alike():
    """The logarithm of a Poisson rate: F = l'', which Newton's method takes."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Poisson:
        score: Any

        def log_prob(self, value):
            return value * self.score - jnp.exp(self.score)

        def fisher_information(self):
            return jnp.exp(self.score)[None, None]

    loss = L.likelihood(Poisson)
    settings = FEW | dict(num_scores=1, init_score=0.5)
    one, other = (
        jb.fit(X, COUNTS, loss, curvature=policy, **settings)[0]
        for policy in ("standardized", "fisher")
    )
    np.testing.assert_array_equal(one.feature, other.feature)
    np.testing.assert_allclose(one.leaf_value, other.leaf_value, rtol=1e-5)


def test_units_of_scores_that_compete_do_not_matter():
    """They share one unit of ``l2``, also where rows are weighted score by score."""

    def train(units):
        loss = L.likelihood(lambda score: Classes(units * score))
        return jb.fit(X, LABELS, loss, **settings)[0]

    units = np.float32([1, 4, 0.5])
    settings = FEW | dict(num_scores=3, init_score=0.0, curvature="standardized")
    model, other = train(np.ones_like(units)), train(units)
    np.testing.assert_array_equal(model.feature, other.feature)
    values = np.asarray(other.leaf_value) * units[:, None]
    np.testing.assert_allclose(values, model.leaf_value, atol=1e-5)


def test_scores_that_hardly_differ_do_not_compete():
    """They would share a unit of ``l2``, as rate and gate of rare counts once did."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Alike:
        scores: Any

        def log_prob(self, value):
            return -jnp.square(value - jnp.sum(self.scores)) / 2

        def fisher_information(self):
            return jnp.array([[1, 0.999], [0.999, 1]])

    assert not couple(L.likelihood(Alike), Y, 2).competing.any()


def test_units_do_not_matter():
    unit, start = np.float32(1000), np.float32([0.25, 0.5])
    moved = np.float32([start[0] * unit, start[1] + np.log(unit)])
    model, history = jb.fit(X, Y, NORMAL, **FEW | dict(init_score=start))
    other, scaled = jb.fit(X, unit * Y, NORMAL, **FEW | dict(init_score=moved))
    np.testing.assert_array_equal(model.feature, other.feature)
    np.testing.assert_array_equal(model.threshold, other.threshold)
    expected = np.asarray(model.leaf_value) * np.array([[[unit], [1]]])
    scale = np.abs(expected).max(axis=(0, 2), keepdims=True)
    np.testing.assert_allclose(other.leaf_value / scale, expected / scale, atol=1e-4)
    np.testing.assert_allclose(
        scaled.train_loss - np.log(unit), history.train_loss, atol=1e-5
    )


def test_weights_count_rows():
    """Weight 2 equals a row that stands there twice; of weight 0 it may be anything."""
    weight = RNG.integers(0, 3, ROWS)
    twice = np.repeat(np.arange(ROWS), weight)
    y = np.where(weight > 0, Y, np.nan).astype(np.float32)
    settings = FEW | dict(min_child_samples=5)
    model, history = jb.fit(X, y, NORMAL, sample_weight=weight, **settings)
    _, repeated = jb.fit(X[twice], Y[twice], NORMAL, **settings)
    np.testing.assert_allclose(history.train_loss, repeated.train_loss, atol=0.02)
    assert np.isfinite(jb.predict(model, X)).all()


def test_rounds_can_be_continued(drawn):
    """Samples depend on the seed and on the number of the round."""
    whole, settings = drawn[0], FEW | dict(num_rounds=2)
    half, _ = jb.fit(X, Y, DRAWN, seed=3, **settings)
    settings.pop("init_score")
    rest, _ = jb.fit(X, Y, DRAWN, seed=3, model=half, **settings)
    np.testing.assert_array_equal(whole.leaf_value, rest.leaf_value)
    other, _ = jb.fit(X, Y, DRAWN, seed=4, **FEW)
    assert (whole.leaf_value != other.leaf_value).any()


@pytest.mark.usefixtures("full_search")
def test_seeds_do_not_matter_without_samples(normal):
    other, _ = jb.fit(X, Y, NORMAL, seed=4, **FEW)
    np.testing.assert_array_equal(normal[0].leaf_value, other.leaf_value)


def test_on_a_mesh(normal):
    mesh = jax.make_mesh(
        (3,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:3],
    )  # fmt: skip
    same_bits(normal[0], jb.fit(X, Y, NORMAL, mesh=mesh, **FEW, **FULL)[0])
    none = dict(FEW, num_rounds=0, mesh=mesh)
    with pytest.raises(ValueError, match=r"mesh must be None .*samples.*3 devices"):
        jb.fit(X, Y, DRAWN, **none)
    jb.fit(X, Y, DRAWN, curvature="absolute", **none)


def test_from_a_stream(drawn, tmp_path):
    source = jb.streams.array_batches(X, Y, batch_rows=100)
    stream = jb.stream(
        source, memory="1GB", directories=tmp_path, block_rows=128, bins=jb.fit_bins(X)
    )
    _, history = jb.fit(stream, None, DRAWN, seed=3, **FEW)
    np.testing.assert_allclose(history.train_loss, drawn[1].train_loss, atol=1e-5)


def test_folds_are_runs_of_fit():
    """In one program for all of them, by ``vmap``."""
    # Few values, so that a fold has the thresholds of all rows.
    x, held = np.clip(np.round(2 * X), -3, 3), np.arange(0, ROWS, 3)
    fold = np.setdiff1d(np.arange(ROWS), held), held
    found = jb.cross_validate(
        x, Y, NORMAL, folds=[fold, fold], return_models=True, **FEW
    )
    kept = np.isin(np.arange(ROWS), fold[0]).astype(np.float32)
    settings = FEW | dict(num_rounds=found.best_round + 1)
    model, _ = jb.fit(x, Y, NORMAL, sample_weight=kept, **settings)
    same_bits(jax.tree.map(lambda array: array[1], found.models), model)


@pytest.mark.usefixtures("full_search")
def test_outliers_do_not_lead_to_infinity():
    """Steps of a logarithm of a scale can be too long; the guard shortens them."""
    y = Y.copy()
    y[:3] = 1e6
    for policy in ("standardized", "natural"):
        settings = FEW | dict(num_rounds=8, learning_rate=1.0, min_child_samples=1)
        _, history = jb.fit(X, y, NORMAL, curvature=policy, **settings)
        assert np.isfinite(history.train_loss).all()
        assert history.train_loss[-1] < history.train_loss[0]


def test_the_loss_falls_faster_than_by_second_derivatives():
    """Those of a density are negative where a residual is small."""
    objective = bind(NORMAL, Y, 2)
    start = loss_values(objective, jnp.zeros((2, ROWS))).mean()
    settings = FEW | dict(num_rounds=30)
    by_information, by_hessian = (
        jb.fit(X, Y, NORMAL, curvature=policy, **settings)[1].train_loss[-1]
        for policy in ("auto", "absolute")
    )
    assert by_information < start
    assert by_information < by_hessian + 0.1
