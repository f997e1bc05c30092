# SPDX-License-Identifier: Apache-2.0
"""Distributions as losses: the built-in ones, NumPyro's, and a user's own."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from tables import ROWS, make_columns

import jboost as jb
from jboost.objective.curvature import _weigh
from jboost.sklearn.regressor import FAMILIES

D, L = jb.distributions, jb.losses
RNG = np.random.default_rng(0)
X = make_columns()
MEAN = X[:, 0] + np.sin(2 * X[:, 1])
Y = (MEAN + np.exp(X[:, 2] / 2) * RNG.normal(size=ROWS)).astype(np.float32)
SETTINGS = dict(num_rounds=6, max_depth=3)
# The start of several scores is searched in programs of each loss.
FROM_ZERO = dict(num_scores=2, init_score=0.0, **SETTINGS)
NORMAL = L.likelihood(D.normal)
# Targets in the support of each family, and where training starts.
TRAINED = {
    "normal": (Y, None), "laplace": (Y, (0, 0)),
    "student_t": (X[:, 0] + RNG.normal(size=ROWS), (0, 0, 1)),
    "log_normal": (np.exp(Y / 3), (0, 0)), "gamma": (np.exp(Y / 3), (0, 0)),
    "weibull": (np.exp(Y / 3), (0, 0)), "beta": (1 / (1 + np.exp(-Y)), (0, 1)),
    "negative_binomial": (RNG.poisson(np.exp(Y / 3)), (0, 1)),
    "zero_inflated_poisson": (
        RNG.poisson(np.exp(1 + X[:, 0])) * (X[:, 1] <= 0), (0, 0),
    ),
    "normal_mixture": (np.where(X[:, 1] > 0, Y, Y + 6), (0, 4, 0, 0, 0)),
}  # fmt: skip


@pytest.fixture(scope="module")
def normal():
    """The model of the normal likelihood that starts at 0, and its history."""
    return jb.fit(X, Y, NORMAL, **FROM_ZERO)


@pytest.fixture(scope="module")
def numpyro():
    return pytest.importorskip("numpyro.distributions")


def as_usual(function):
    """Libraries promote dtypes and ranks as NumPy does."""

    def run(*arguments):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*arguments)

    return run


# Families that are trained to the end.
LONG = {"student_t": 60, "zero_inflated_poisson": 100}


@pytest.mark.parametrize(("unit", "shared"), [(1024.0, False), (1e-3, True)])
def test_units_of_targets_move_location_and_scale(unit, shared):
    """Up to rounding: the logarithm of a scale is rounded near log(unit)."""
    settings = SETTINGS | dict(num_scores=2, share_structure=shared)
    own, other = (
        jb.fit(X, Y * np.float32(by), NORMAL, **settings)[0] for by in (1.0, unit)
    )
    np.testing.assert_array_equal(own.feature, other.feature)
    np.testing.assert_array_equal(own.threshold, other.threshold)
    expected, found = (np.asarray(jb.predict(model, X)) for model in (own, other))
    found = found / [unit, 1.0] - [0.0, np.log(unit)]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@cache
def train(name):
    y, start = TRAINED[name]
    settings = SETTINGS | dict(num_scores=FAMILIES[name])
    if start is not None:
        settings["init_score"] = start
    if name in LONG:
        settings |= dict(num_rounds=LONG[name], learning_rate=0.3)
    return jb.fit(X, y, L.likelihood(getattr(D, name)), **settings)


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("name", TRAINED)
def test_every_family_trains(name):
    assert {*TRAINED} == {*FAMILIES}
    (model, history), (y, _), make = train(name), TRAINED[name], getattr(D, name)
    losses = np.asarray(history.train_loss, np.float64)
    assert np.isfinite(losses).all()
    assert np.all(np.diff(losses) <= 2e-6 * np.abs(losses[:-1]))  # no round raises it

    @jax.jit
    def log_prob(found):
        return found.log_prob(jnp.asarray(y, jnp.float32))

    begun = np.tile(np.asarray(model.init_score)[:, None], ROWS)
    begun = np.mean(log_prob(jax.jit(jax.vmap(make, 1))(begun)))
    found = jb.predict(model, X, inverse_link=make)
    reached = np.asarray(log_prob(found))
    assert losses[-1] < losses[0] < -begun + 1e-5
    assert reached.shape == (ROWS,)
    np.testing.assert_allclose(-reached.mean(), losses[-1], rtol=1e-4, atol=1e-5)
    drawn = jax.eval_shape(lambda found: found.sample(jax.random.key(0)), found)
    assert drawn.shape == found.mean.shape == (ROWS,)


def test_degrees_of_freedom_of_normal_noise():
    """They grow without bound; quantiles are those of the normal limit."""
    model, _ = train("student_t")
    found = jb.predict(model, X, inverse_link=D.student_t)
    shares = np.float32([0.05, 0.5, 0.95])
    reference = st.t(
        *(np.asarray(v, float) for v in (found.df, found.loc, found.scale))
    )
    quantiles = jax.jit(jax.vmap(found.icdf))(shares)
    expected = [reference.ppf(share) for share in shares.astype(float)]
    np.testing.assert_allclose(quantiles, expected, rtol=1e-4, atol=1e-4)
    far = jnp.stack([jnp.zeros(50), jnp.zeros(50), jnp.full(50, 30.0)])
    # No row knows anything of the degrees of freedom.
    information = jnp.full((3, 50), 1.0).at[2].set(0)
    second = jnp.zeros((3, 50))
    for more in ((), (second,), (second * jnp.nan, np.zeros(3, bool))):
        weighed = _weigh(far, information, *more)
        assert all(np.isfinite(each).all() for each in weighed)


def test_inflated_counts_train_to_the_end():
    """A gate of 1 in float32 once had a NaN derivative, which ended training."""
    model, history = train("zero_inflated_poisson")
    moved = np.abs(model.leaf_value).reshape(100, -1).max(axis=1)
    assert (moved > 0).all()
    assert history.train_loss[-1] < history.train_loss[40]


class Rare:
    """Counts of which most are zeros: rate and gate have nearly the same effect."""

    def __init__(self, score):
        self.inner = D.zero_inflated_poisson(score)

    def log_prob(self, value):
        return self.inner.log_prob(value)

    def sample(self, key, sample_shape=()):
        return self.inner.sample(key, sample_shape)


@pytest.mark.parametrize("family", [D.zero_inflated_poisson, Rare])
def test_no_round_raises_the_loss_of_scores_that_hardly_differ(family):
    x = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)
    rates = np.exp(-2.1 + 0.35 * x[:, 0] + 0.2 * x[:, 1] * x[:, 2])
    y = np.random.default_rng(2).poisson(rates * 2)
    settings = SETTINGS | dict(num_scores=2, num_rounds=40, learning_rate=0.3)
    _, history = jb.fit(x, y, L.likelihood(family), **settings)
    losses = np.asarray(history.train_loss, np.float64)
    assert np.all(np.diff(losses) <= 2e-6 * losses[:-1])
    assert losses[-1] < 0.95 * losses[0]


def test_equal_to_the_formula():
    """The same model as that of a loss written by hand."""

    def gaussian(s, t):
        return (t - s[0]) ** 2 * jnp.exp(-2 * s[1]) / 2 + s[1] + np.log(2 * np.pi) / 2

    settings = dict(curvature="absolute", **FROM_ZERO)
    log_prob = jax.jit(jax.vmap(NORMAL, (None, 0)))
    for y in (Y, Y.astype(np.float64), np.round(Y).astype(np.int32)):
        expected = st.norm(0.3, np.exp(-0.4)).logpdf(y[:5])
        found = log_prob(np.float32([0.3, -0.4]), y[:5])
        np.testing.assert_allclose(-found, expected, rtol=1e-5)
    model, history = jb.fit(X, Y, NORMAL, **settings)
    other, expected = jb.fit(X, Y, gaussian, **settings)
    np.testing.assert_array_equal(model.feature, other.feature)
    np.testing.assert_allclose(model.leaf_value, other.leaf_value, atol=1e-4)
    np.testing.assert_allclose(history.train_loss, expected.train_loss, rtol=1e-4)


@jax.tree_util.register_pytree_node_class
class Stale:
    """Keeps its ``batch_shape`` under vmap, as NumPyro's, and holds a constant.

    Made of anything but arrays it fails, as those of TensorFlow Probability.
    """

    def __init__(self, loc):
        self.loc, self.inner = loc, jnp.ones(1)
        self.batch_shape = jnp.shape(loc)

    def tree_flatten(self):
        return (self.loc, self.inner), self.batch_shape

    @classmethod
    def tree_unflatten(cls, batch_shape, children):
        found = object.__new__(cls)
        found.loc, found.inner = map(jnp.asarray, children)
        found.batch_shape = batch_shape
        return found


def test_distributions_with_constants_are_made_again(normal):
    model, _ = normal
    found = jb.predict(model, X, inverse_link=lambda score: Stale(score[0]))
    assert found.batch_shape == found.loc.shape == (ROWS,)
    with pytest.raises(TypeError, match="axes of its own"):
        jb.predict(model, X, inverse_link=Stale)


def test_numpyro_trains_the_same_model(numpyro, normal):
    @as_usual
    def theirs(score):
        return numpyro.Normal(score[0], jnp.exp(score[1]))

    with jax.numpy_dtype_promotion("standard"):
        model, _ = jb.fit(X, Y, L.likelihood(theirs), **FROM_ZERO)
        found = jb.predict(model, X, inverse_link=theirs)
    own, _ = normal
    np.testing.assert_array_equal(model.feature, own.feature)
    np.testing.assert_allclose(model.leaf_value, own.leaf_value, rtol=1e-3, atol=1e-5)
    assert found.batch_shape == (ROWS,)
    expected = jb.predict(own, X, inverse_link=D.normal)
    np.testing.assert_allclose(
        found.icdf(0.9), expected.icdf(0.9), rtol=1e-3, atol=1e-4
    )
    assert len(np.unique(found.sample(jax.random.key(0)) - found.mean)) > ROWS / 2


def test_classes_are_cast_to_integers(numpyro):
    """log_prob of a categorical distribution takes nothing else."""

    @as_usual
    def classes(score):
        return numpyro.Categorical(logits=score)

    loss = L.likelihood(classes)
    score = jnp.array([0.1, 0.5, -1.0])
    expected = jb.losses.softmax(score, 2)
    for target in (2, 2.0, np.int8(2)):
        found = as_usual(loss)(score, jnp.asarray(target))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isnan(as_usual(loss)(score, jnp.asarray(1.5)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        y = (Y > 0).astype(np.float64)
        model, history = jb.fit(X, y, loss, **FROM_ZERO)
        assert history.train_loss[-1] < history.train_loss[0]
        with pytest.raises(TypeError, match=r"inverse_link .*parameters.*Categorical"):
            jb.predict(model, X, inverse_link=classes)


class Exponential:
    """A user's own distribution: only a density."""

    def __init__(self, rate):
        self.rate = rate

    def log_prob(self, value):
        return jnp.log(self.rate) - self.rate * value


def test_a_density_is_enough():
    y = np.exp(Y / 2)
    loss = L.likelihood(lambda score: Exponential(jnp.exp(-score)))
    model, history = jb.fit(X, y, loss, **SETTINGS)
    assert history.train_loss[-1] < history.train_loss[0]
    np.testing.assert_allclose(np.exp(model.init_score), y.mean(), rtol=1e-4)
    with pytest.raises(TypeError, match=r"inverse_link .* not a valid JAX type"):
        jb.predict(model, X, inverse_link=lambda s: Exponential(jnp.exp(-s)))


def test_targets_may_be_pytrees():
    """Censored times: what log_prob takes is up to the distribution."""

    class Censored(Exponential):
        def log_prob(self, value):
            event = value["event"] * jnp.log(self.rate)
            return event - self.rate * value["time"]

    y = dict(time=np.exp(Y / 2), event=(X[:, 1] > 0).astype(np.float32))
    loss = L.likelihood(lambda score: Censored(jnp.exp(-score)))
    model, _ = jb.fit(X, y, loss, **SETTINGS)
    expected = y["time"].sum() / y["event"].sum()
    np.testing.assert_allclose(np.exp(model.init_score), expected, rtol=1e-4)


def test_targets_outside_the_support_are_named():
    y = np.exp(Y)
    y[17] = -1
    with pytest.raises(ValueError, match=r"\b17\b"):
        jb.fit(X, y, L.likelihood(D.gamma), **FROM_ZERO)


def test_what_is_no_distribution_is_refused():
    with pytest.raises(TypeError, match=r"make_distribution .* got 'normal'"):
        L.likelihood("normal")
    with pytest.raises(TypeError, match=r"likelihood\(softmax\).*log_prob"):
        jb.fit(X, Y, L.likelihood(jax.nn.softmax), num_scores=2)
    with pytest.raises(ValueError, match="num_scores must be 3 M - 1"):
        D.normal_mixture(jnp.zeros(3))
