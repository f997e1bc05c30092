# SPDX-License-Identifier: Apache-2.0
"""Parameters of losses outside their domain are refused; losses of optax are taken."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax.losses as peers
import pytest
from tables import make_regression

import jboost as jb
from jboost.sklearn import JBoostClassifier, JBoostRanker, JBoostRegressor

L = jb.losses
X, Y = make_regression()
CLASSES = np.arange(len(Y), dtype=np.int32) % 3
GROUPS = np.arange(len(Y)) // 20
RUN = dict(num_rounds=2, max_depth=3)
NAN, INF = float("nan"), float("inf")

# {loss: {parameter: (numbers inside of its domain, numbers outside)}}
POSITIVE = (1e-6, 1, 1e6), (0, -1, -1e-6, 1e-50, NAN, INF)
SHARE = (1e-6, 0.5), (0, 1, 1.5, 90, -0.1, 1 - 1e-9, NAN)
DOMAINS = {
    "huber": {"delta": POSITIVE},
    "pseudo_huber": {"delta": POSITIVE},
    "quantile": {"tau": SHARE},
    "expectile": {"tau": SHARE},
    "tweedie": {"power": ((1.01, 1.99), (0, 0.5, 1, 2, 3, NAN))},
    "focal": {"gamma": ((0, 0.5, 5), (-2, -1e-6, NAN, INF)), "alpha": SHARE},
    "cauchy": {"scale": POSITIVE},
    "welsch": {"scale": POSITIVE},
    "approx_ndcg": {"temperature": POSITIVE},
    "cox": {"ties": (("efron", "breslow"), ("exact", None))},
    "list_mle": {"ties": (("efron", "breslow"), ("exact",))},
    "lambda_rank": {
        "at": ((1, None), (0, -1)), "normalize": (("none", "both"), ("max", None)),
    },
}  # fmt: skip
CASES = [
    (name, parameter, *values)
    for name, parameters in DOMAINS.items()
    for parameter, values in parameters.items()
]
ERRORS = (TypeError, ValueError)
LOSSES = {**L.LOSSES, **L.GROUP_LOSSES}


def call(loss, **parameters):
    if loss.__name__ in L.LOSSES:
        return loss(jnp.float32(0.5), jnp.float32(1), **parameters)
    targets = jnp.array([0.0, 1.0, 2.0])
    if loss is L.cox:
        targets = dict(time=targets, event=jnp.ones(3))
    return loss(jnp.zeros(3), targets, **parameters)


def test_every_parameter_has_a_domain():
    for name, loss in LOSSES.items():
        order = [*inspect.signature(loss).parameters]
        found = {*order[2:]} - {"where", "weights", "key"}
        assert found == DOMAINS.get(name, {}).keys(), name


@pytest.mark.parametrize(("name", "parameter", "inside", "outside"), CASES)
def test_parameters_outside_their_domain_are_refused(name, parameter, inside, outside):
    loss = LOSSES[name]
    for value in inside:
        assert np.isfinite(call(loss, **{parameter: value}))
    for value in outside:
        forms = [value]
        if isinstance(value, float | int):
            forms += [np.float64(value), jnp.float32(value), jnp.array([1.5, value])]
        for given in forms:
            with pytest.raises(ERRORS, match=f"{parameter} of losses.{name} must"):
                call(loss, **{parameter: given})
    with pytest.raises(ERRORS, match=f"{parameter} of losses.{name} must"):
        call(loss, **{parameter: "0.9"})


def test_traced_parameters_pass():
    """An array of deltas outside of jit is checked, in jit and vmap nothing is."""
    deltas = jnp.array([0.5, -1.0, 2.0])

    def slope(delta):
        return jax.grad(partial(L.huber, delta=delta))(jnp.float32(3), jnp.float32(0))

    for found in (jax.vmap(slope)(deltas), jax.lax.map(slope, deltas)):
        np.testing.assert_array_equal(found, deltas)
    assert jax.jit(slope)(2.0) == 2
    text = str(jax.make_jaxpr(partial(L.huber, delta=2.0))(1.0, 0.0))
    bare = partial(inspect.unwrap(L.huber), delta=2.0)
    assert text == str(jax.make_jaxpr(bare)(1.0, 0.0))


QUANTILE = partial(L.quantile, tau=90)
GAIN = partial(L.approx_ndcg, temperature=0)
DOORS = {
    "fit": lambda: jb.fit(X, Y, QUANTILE, **RUN),
    "lambda": lambda: jb.fit(X, Y, lambda s, t: L.quantile(s, t, tau=90), **RUN),
    "sum": lambda: jb.fit(X, np.stack([Y, Y], 1), QUANTILE, **RUN),
    "sum_targets": lambda: jb.fit(
        X, np.stack([Y, Y], 1), L.sum_targets(QUANTILE), num_scores=2, **RUN
    ),
    "adaptive": lambda: jb.fit(
        X, Y,
        L.adaptive(
            lambda s, t, scale: L.quantile(s / scale, t / scale, tau=90),
            lambda s, t, w: L.weighted_quantile(abs(t - s), w, 0.5),
        ),
        **RUN,
    ),
    "cross_validate": lambda: jb.cross_validate(X, Y, QUANTILE, **RUN),
    "sweep": lambda: jb.sweep(X, Y, QUANTILE, {"l2": [1.0]}, **RUN),
    "stream": lambda: jb.fit(
        jb.stream(lambda: iter([(X, Y)]), memory=2**26), None, QUANTILE, **RUN
    ),
    "inspect": lambda: jb.inspect_loss(QUANTILE, 1.0),
    "regressor": lambda: JBoostRegressor(QUANTILE, **RUN).fit(X, Y),
    "classifier": lambda: JBoostClassifier(
        partial(L.focal, alpha=90), **RUN
    ).fit(X, Y > 0),
    "group": lambda: jb.fit(X, CLASSES, GAIN, groups=GROUPS, **RUN),
    "ranker": lambda: JBoostRanker(GAIN, **RUN).fit(X, CLASSES, qid=GROUPS),
    "estimate": lambda: jb.fit(
        X, Y,
        L.adaptive(
            lambda s, t, delta: L.huber(s, t, delta=delta),
            lambda s, t, w: L.weighted_quantile(abs(t - s), w, 90),
        ),
        **RUN,
    ),
    "maker": lambda: L.make_adaptive_huber(alpha=90),
    "recipe": lambda: jb.recipes.m_tree_boost(alpha=90),
    "variances": lambda: L.random_intercept(jnp.zeros(2), jnp.ones(2), (0.0, 90.0)),
    "intercepts": lambda: L.predict_intercepts([0.0], [1.0], (1.0, -90.0), ["a"]),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_every_door_names_the_parameter(door):
    with pytest.raises(
        ValueError, match=r"^[a-z]+ .*must be a number .*, got -?(90|0)"
    ):
        DOORS[door]()


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: L.huber(delta=3), r"partial\(jb.losses.huber, delta=3\)"),
        (lambda: L.quantile(0.9), r"partial\(jb.losses.quantile, tau=0.9\)"),
        (lambda: L.logistic(), r"the loss itself, jb.losses.logistic$"),
        (lambda: L.cox(ties="efron"), r"partial\(jb.losses.cox, ties='efron'\)"),
        (lambda: L.quantile(0.0, 1.0, alpha=0.9), r"no parameter 'alpha'.*: tau"),
        (lambda: L.hinge(0.0, 1.0, margin=2), r"no parameter 'margin'.*: none"),
    ],
)
def test_calls_without_data_are_answered(make, instead):
    with pytest.raises(TypeError, match=instead):
        make()


SHARES = np.random.default_rng(0).dirichlet(np.ones(3), size=len(Y)).astype(np.float32)
# Losses of a row with an optional ``where``: (the loss, targets)
OPTIONAL = {
    "softmax of labels": (peers.softmax_cross_entropy_with_integer_labels, CLASSES),
    "cosine": (peers.cosine_distance, SHARES),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_mask_is_left_alone(name):
    """The model is that of the same loss without such an argument."""
    loss, targets = OPTIONAL[name]
    run = dict(num_scores=3, init_score=[0.5, 0.25, -0.5], **RUN)
    model, _ = jb.fit(X, targets, loss, **run)
    other, _ = jb.fit(X, targets, lambda s, t: loss(s, t), **run)
    for found, wanted in zip(*map(jax.tree.leaves, (model, other)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert np.abs(model.leaf_value).max() > 0


@pytest.mark.usefixtures("full_search")
def test_a_loss_is_of_groups_where_groups_are_given():
    """Groups of two sizes are padded; a loss that does not look at the mask is not."""
    groups, run = (
        np.repeat(np.arange(20), [5, 15] * 10),
        dict(num_rounds=1, max_depth=3),
    )

    def total(scores, targets, *, where=None):
        return jnp.sum(jnp.square(scores - targets), where=where)

    by_group, _ = jb.fit(X, Y, total, groups=groups, curvature="auto", **run)
    by_row, _ = jb.fit(X, Y, total, **run)
    plain, _ = jb.fit(X, Y, L.squared_error, **run)
    for found, wanted in zip(*map(jax.tree.leaves, (by_row, plain)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
    close(jb.predict(by_group, X), jb.predict(by_row, X))
    none = dict(groups=groups, num_rounds=0, init_score=0.0)
    ranking, _ = jb.fit(X, Y, peers.ranking_softmax_loss, **none | run)
    assert np.corrcoef(jb.predict(ranking, X), Y)[0, 1] > 0.5
    labels, of_rows = OPTIONAL["softmax of labels"][::-1]
    found = jb.cross_validate(X, labels, of_rows, folds=2, num_scores=3, **none)
    # Folds hold whole groups out.
    assert all(len({*found.held_out[0][groups == each]}) == 1 for each in range(20))
    with pytest.raises(TypeError, match="loss of a group of rows, pass groups"):
        jb.fit(X, Y, peers.ranking_softmax_loss, **run)


@pytest.mark.parametrize("loss", [*L.GROUP_LOSSES.values(), L.make_random_intercept()])
def test_built_in_losses_of_groups_need_them(loss):
    targets = dict(time=np.abs(Y), event=Y > 0) if loss in (L.cox, L.concordance) else Y
    with pytest.raises(ValueError, match="groups must be given"):
        jb.fit(X, targets, loss, **RUN)
