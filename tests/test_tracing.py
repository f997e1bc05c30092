# SPDX-License-Identifier: Apache-2.0
"""Traced losses compare by what they compute, and know what kind they are."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import SMALL, make_regression

import jboost as jb
from jboost.objective.jaxprs import split_program, trace_program
from jboost.objective.tracing import trace_loss

TARGETS = np.zeros(5, np.float32)


def trace(loss, targets=TARGETS, num_scores=1):
    return trace_loss(loss, targets, num_scores)


def same_structure(first, second):
    """Whether two losses share compiled programs."""
    return first == second and hash(first) == hash(second)


def make_square():
    return lambda score, target: (score - target) ** 2


def make_scaled(delta):
    return lambda score, target: jnp.square(score - target) * delta


def make_lookup(table):
    return lambda score, target: jnp.square(score - table[target])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (make_square(), make_square()),
        (make_square(), lambda a, b: (a - b) ** 2),
        (partial(jb.losses.huber, delta=1.0), partial(jb.losses.huber, delta=1.0)),
        (partial(jb.losses.huber, delta=1.0), lambda s, t: jb.losses.huber(s, t)),
        (jax.jit(make_square()), jax.jit(make_square())),
    ],
)
def test_equal_losses_are_equal(first, second):
    (one, constants), (two, others) = trace(first), trace(second)
    assert same_structure(one, two)
    assert [float(c) for c in constants] == [float(c) for c in others]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (make_scaled(2.0), make_scaled(3.0)),
        (make_scaled(jnp.float32(2)), make_scaled(jnp.float32(3))),
        (partial(jb.losses.huber, delta=1.0), partial(jb.losses.huber, delta=0.1)),
        (
            partial(jb.losses.huber, delta=jnp.float32(1)),
            partial(jb.losses.huber, delta=jnp.float32(0.1)),
        ),
        (partial(jb.losses.quantile, tau=0.1), partial(jb.losses.quantile, tau=0.9)),
        (
            partial(optax.huber_loss, delta=1.0),
            partial(optax.huber_loss, delta=3.0),
        ),
    ],
)
def test_other_numbers_are_other_constants(first, second):
    (one, constants), (two, others) = trace(first), trace(second)
    assert same_structure(one, two)
    assert [float(c) for c in constants] != [float(c) for c in others]


def test_closed_over_arrays_are_constants():
    targets = np.zeros(5, np.int32)
    tables = np.float32([1, 2, 3]), np.float32([4, 5, 6])
    losses = [make_lookup(jnp.asarray(table)) for table in tables]
    (one, first), (two, second) = (trace(loss, targets) for loss in losses)
    assert same_structure(one, two)
    for constants, table in ((first, tables[0]), (second, tables[1])):
        value = one.value(constants, jnp.float32(0), jnp.int32(2), ())
        assert float(value) == table[2] ** 2
    longer, _ = trace(make_lookup(jnp.zeros(4)), targets)
    assert longer != one


@pytest.mark.parametrize(
    "loss",
    [
        jb.losses.absolute_error,
        jb.losses.huber,
        lambda s, t: (s - t) ** 4,
        lambda s, t: (s + t) ** 2,
        lambda s, t: (s - 2 * t) ** 2,
        lambda s, t: jnp.where(s - t >= 0, (s - t) ** 2, 0.0),
    ],
)
def test_other_formulas_differ(loss):
    assert trace(loss)[0] != trace(make_square())[0]


def test_other_branches_of_one_primitive_differ():
    def branch(function):
        return lambda s, t: jax.lax.cond(s > t, function, jnp.square, s - t)

    one, same, other = (trace(branch(f))[0] for f in (jnp.sin, jnp.sin, jnp.cos))
    assert same_structure(one, same)
    assert one != other


def test_target_types_matter():
    whole, _ = trace(jb.losses.squared_error, np.zeros(5, np.int32))
    assert whole != trace(jb.losses.squared_error)[0]
    more_rows, _ = trace(jb.losses.squared_error, np.zeros(50, np.float32))
    assert same_structure(more_rows, trace(jb.losses.squared_error)[0])


def epsilon_insensitive(score, target):
    return jnp.maximum(0.0, jnp.abs(score - target) - 0.1)


def pinball(score, target):
    return jnp.maximum(0.3 * (target - score), -0.7 * (target - score))


# loss: quadratic, uniform, straight
KINDS = {
    "squared": (jb.losses.squared_error, True, True, False),
    "optax squared": (optax.squared_error, True, True, False),
    "optax l2": (optax.l2_loss, True, True, False),
    "power": (make_square(), True, True, False),
    "jitted": (jax.jit(make_square()), True, True, False),
    "times a number": (make_scaled(2.0), True, True, False),
    "times an array": (make_scaled(jnp.float32(2)), True, True, False),
    "absolute": (jb.losses.absolute_error, True, True, True),
    "jnp.abs": (lambda s, t: jnp.abs(s - t), True, True, True),
    "pinball by where": (jb.losses.quantile, True, True, True),
    "pinball by maximum": (pinball, True, True, True),
    "hinge": (jb.losses.hinge, True, True, True),
    "optax hinge": (optax.hinge_loss, True, True, True),
    "epsilon-insensitive": (epsilon_insensitive, True, True, True),
    "huber": (jb.losses.huber, False, False, False),
    "optax huber": (optax.huber_loss, False, False, False),
    "expectile": (jb.losses.expectile, False, False, False),
    "logistic": (jb.losses.logistic, False, False, False),
    "poisson": (jb.losses.poisson, False, False, False),
    "log-cosh": (jb.losses.log_cosh, False, False, False),
    "optax log-cosh": (optax.log_cosh, False, False, False),
    "optax logistic": (optax.sigmoid_binary_cross_entropy, False, False, False),
    "root of a square": (lambda s, t: jnp.sqrt((s - t) ** 2), False, False, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_kind(name):
    loss, quadratic, uniform, piecewise_linear = KINDS[name]
    traced, _ = trace(loss)
    found = traced.quadratic, traced.uniform, traced.piecewise_linear
    assert found == (quadratic, uniform, piecewise_linear)


def test_a_weight_in_the_target_is_quadratic_but_not_uniform():
    targets = {"y": TARGETS, "w": TARGETS}
    traced, _ = trace(lambda s, t: t["w"] * (s - t["y"]) ** 2, targets)
    assert (traced.quadratic, traced.uniform) == (True, False)
    assert not traced.piecewise_linear


def test_several_scores_are_of_no_simple_kind():
    traced, _ = trace(lambda s, t: jnp.sum((s - t) ** 2), num_scores=2)
    assert (traced.quadratic, traced.uniform, traced.piecewise_linear) == (False,) * 3


def with_cond(score, target):
    return jax.lax.cond(score > target, jnp.square, jnp.abs, score - target)


def with_scan(score, target):
    def add(total, power):
        return total + jnp.abs(score - target) ** power, None

    return jax.lax.scan(add, jnp.float32(0), jnp.array([1.5, 2.0, 3.0]))[0]


def with_fori_loop(score, target):
    return jax.lax.fori_loop(0, 3, lambda _, v: v * (score - target), score)


@jax.custom_jvp
def clipped(residual):
    return residual**2 / 2


@clipped.defjvp
def _clipped_jvp(primals, tangents):
    return clipped(*primals), jnp.clip(primals[0], -1, 1) * tangents[0]


@jax.custom_vjp
def doubled(residual):
    return residual**3


doubled.defvjp(lambda r: (r**3, r), lambda r, upstream: (6 * r**2 * upstream,))


@pytest.mark.parametrize(
    "loss",
    [
        with_cond,
        with_scan,
        with_fori_loop,
        lambda s, t: clipped(s - t),
        lambda s, t: doubled(s - t),
        lambda s, t: jax.jit(clipped)(jnp.sin(s - t)),
    ],
    ids=["cond", "scan", "fori_loop", "custom_jvp", "custom_vjp", "jit of custom_jvp"],
)
def test_control_flow_and_custom_rules(loss):
    """Programs give what jax.grad gives, custom rules included."""
    traced, constants = trace(loss)
    again, _ = trace(loss)
    assert same_structure(traced, again)
    functions = (*map(jax.jit, (loss, jax.grad(loss), jax.grad(jax.grad(loss)))),)
    programs = [
        jax.jit(lambda *row, run=run: run(constants, *row, ()))
        for run in (traced.value, traced.gradient, traced.hessian)
    ]
    for score in np.float32([-2.0, -0.3, 0.4, 1.7]):
        row = score, np.float32(0.1)
        for program, function in zip(programs, functions, strict=True):
            # float32 rounding: the programs are compiled apart
            np.testing.assert_allclose(
                program(*row), function(*row), rtol=1e-5, atol=1e-6
            )


def test_targets_may_be_any_pytree():
    targets = {"time": TARGETS, "event": np.zeros((5, 2), bool)}

    def loss(score, target):
        events = jnp.sum(target["event"].astype(jnp.float32))
        return jnp.exp(score) * target["time"] - score * events

    traced, constants = trace(loss, targets)
    row = {"time": jnp.float32(2), "event": jnp.array([True, True])}
    value = traced.value(constants, jnp.float32(0), row, ())
    assert float(value) == 2
    gradient = traced.gradient(constants, jnp.float32(0), row, ())
    assert float(gradient) == 0


def test_an_adaptive_loss_traces_its_estimate():
    traced, constants = trace(jb.losses.make_adaptive_huber(alpha=0.5))
    other, others = trace(jb.losses.make_adaptive_huber(alpha=0.9))
    assert same_structure(traced, other)
    assert [float(c) for c in constants] != [float(c) for c in others]
    scores = jnp.arange(5, dtype=jnp.float32)
    delta = traced.estimate(constants, scores, jnp.zeros(5), jnp.ones(5))
    assert float(delta) == 2


def test_the_closure_of_a_loss_can_be_freed_after_fit(young_heap):
    x, y = make_regression()
    table = jnp.asarray(np.random.default_rng(0).normal(size=100_000), jnp.float32)

    def loss(score, target):
        return jnp.square(score - target) + 0 * table[0]

    arrays, functions = weakref.ref(table), weakref.ref(loss)
    jb.fit(x, y, loss, num_rounds=1, max_depth=SMALL["max_depth"])
    del table, loss
    gc.collect()
    assert arrays() is None
    assert functions() is None


def stepping(score, target):
    return jax.lax.while_loop(lambda c: c < 1, lambda c: 2 * c, (score - target) ** 2)


def calling_back(score, target):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(lambda s, t: np.float32(s - t), shape, score, target)


@pytest.mark.parametrize(
    ("loss", "reason"), [(stepping, "while_loop"), (calling_back, "pure_callback")]
)
def test_losses_without_derivatives_are_named_with_the_reason(loss, reason):
    with pytest.raises(TypeError, match=f"loss {loss.__name__} .*{reason}"):
        trace(loss)


def test_estimates_that_fail_are_named():
    def sizes(scores, targets, weights):
        return float(scores.sum())

    with pytest.raises(TypeError, match=r"estimate sizes .*float"):
        trace(jb.losses.adaptive(lambda s, t, p: s * p, sizes))


def test_split_programs_compute_what_the_whole_one_does():
    """Sorted once; the table of all pairs is computed again, its sums are kept."""

    def function(score, target):
        order = jnp.argsort(target)
        pairs = target[:, None] > target[None]
        counts = jnp.sum(pairs.astype(jnp.float32), axis=1)
        ranked = jnp.cumsum(score[order]) * counts
        return jnp.sum(jnp.where(pairs, ranked[:, None] + score[None], 0.0))

    score, target = (
        np.random.default_rng(s).normal(size=9).astype(np.float32) for s in (0, 1)
    )
    constants: list = []
    program = trace_program(jax.grad(function), (score, target), constants)
    early, late = split_program(program, (score,), 18)
    found = jax.jit(lambda *given: early(*given))(tuple(constants), target)
    assert all(each.size <= 18 for each in found)
    names = {equation.primitive.name for equation in late.jaxpr.eqns}
    assert "sort" not in names and "sort" in {
        equation.primitive.name for equation in early.jaxpr.eqns
    }
    expected = jax.jit(jax.grad(function))(score, target)
    result = jax.jit(lambda *given: late(*given))(
        tuple(constants), score, target, found
    )
    np.testing.assert_allclose(result, expected, rtol=1e-5)
