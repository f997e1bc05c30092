"""Losses of groups: tables, derivatives, curvature, leaves, against brute force."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb
from jboost.boosting.groups import draw_bag, find_group_start
from jboost.objective import coupled
from jboost.objective.coupled import GroupObjective, group_gradient, group_values
from jboost.objective.group_tracing import trace_group_loss
from jboost.objective.probing import (
    Probe,
    raise_curvature,
    renew_probe,
    start_probe,
    use_product,
)
from jboost.tables.groups import make_groups, random_groups
from jboost.trees.joint import Stopping, solve_jointly

STOPPING = Stopping(steps=5, residual=0.1, least_bend=0.25, overshoot=0.0)
NUM_ROWS = 60
WORDS = np.array([3, 5], np.uint32)


def soft_rank(scores, targets, *, where):
    """A listwise loss with a penalty, so that a common shift of scores matters."""
    gain = jnp.where(where, targets, 0.0)
    scores = jnp.where(where, scores, 0.0)
    largest = jax.nn.logsumexp(jnp.where(where, scores, -jnp.inf))
    return jnp.sum(gain) * largest - jnp.sum(gain * scores) + jnp.sum(scores) ** 2 / 9


def pairs(scores, targets, *, where):
    """Pairwise logistic loss."""
    ordered = (targets[:, None] > targets[None]) & where[:, None] & where[None]
    margin = scores[:, None] - scores[None]
    return jnp.sum(jnp.where(ordered, jax.nn.softplus(-margin), 0.0))


def two_scores(scores, targets, *, where):
    """A loss of two scores that interact within a row and between rows."""
    first, second = jnp.where(where[:, None], scores, 0.0).T
    residual = jnp.where(where, targets - first, 0.0)
    return jnp.sum(jnp.exp(-second) * residual**2 + second) + jnp.sum(second) ** 2


@partial(jax.jit, static_argnums=(0, 1))
def run(function, loss, objective, *arguments):
    """Calls a function of an objective: one program for each loss and shape."""
    return function(objective._replace(loss=loss), *arguments)


def differentiate(objective, scores):
    """Returns the gradient."""
    return run(group_gradient, objective.loss, objective._replace(loss=None), scores)


def renew(objective, scores, number=0, probe=None):
    """Returns the gradient and the probe of a round."""
    probe = start_probe(scores) if probe is None else probe
    rest = objective._replace(loss=None)
    return run(renew_probe, objective.loss, rest, scores, probe, jnp.int32(number))


def make_rows(seed=0, num_scores=1):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 7, NUM_ROWS)
    targets = rng.integers(0, 4, NUM_ROWS).astype(np.float32)
    scores = rng.normal(size=(num_scores, NUM_ROWS)).astype(np.float32)
    weights = rng.uniform(0.5, 2, 7).astype(np.float32)[ids]
    weights[[3, 11]] = 0  # rows that leave their groups
    weights[ids == 2] = 0  # a group that does not count
    return ids, targets, scores, weights


def bind(loss, ids, targets, weights, num_scores=1, **options):
    groups = make_groups(ids)
    widths = [table.rows.shape[1] for table in groups.tables]
    if groups.kind == "all":
        widths = [len(targets)]
    traced, constants = trace_group_loss(loss, targets, widths, num_scores, **options)
    return GroupObjective(
        traced, constants, jnp.asarray(targets), jnp.asarray(weights),
        jax.device_put(groups), (), jnp.asarray(WORDS),
    )  # fmt: skip


def total_by_hand(loss, ids, targets, weights, scores):
    """Sums the weighted losses of groups that hold nothing but the rows that count."""
    total = 0.0
    for name in np.unique(ids):
        rows = np.flatnonzero((ids == name) & (weights > 0))
        if len(rows):
            part = scores[0][rows] if len(scores) == 1 else scores.T[rows]
            where = jnp.ones(len(rows), bool)
            total += weights[rows[0]] * loss(part, targets[rows], where=where)
    return total


@pytest.mark.parametrize("loss, num_scores", [(pairs, 1), (two_scores, 2)])
def test_values_and_derivatives(loss, num_scores):
    ids, targets, scores, weights = make_rows(num_scores=num_scores)
    objective = bind(loss, ids, targets, weights, num_scores)

    @jax.value_and_grad
    def by_hand(scores):
        return total_by_hand(loss, ids, targets, weights, scores)

    @jax.jit
    def along(scores, direction):
        (total, slope), (_, product) = jax.jvp(by_hand, (scores,), (direction,))
        return total, slope, product

    @jax.jit
    def multiply(scores, direction, differs):
        probe = Probe(scores, jnp.float32(2**-6), differs)
        multiply = lambda product: product(direction) * weights[None]  # noqa: E731
        return use_product(objective, scores, probe, multiply)

    scores = jnp.asarray(scores)
    direction = jnp.asarray(np.random.default_rng(1).normal(size=scores.shape), "f4")
    total, slope, expected = along(scores, direction)
    values, counts = jax.jit(partial(group_values, objective))(scores)
    np.testing.assert_allclose(jnp.sum(values * counts), total, rtol=1e-5)
    gradient = differentiate(objective, scores)
    np.testing.assert_allclose(gradient * weights[None], slope, atol=1e-5)
    for differs, tolerance in ((False, 1e-4), (True, 0.05)):
        product = multiply(scores, direction, jnp.asarray(differs))
        error = np.abs(product - expected).max() / np.abs(expected).max()
        assert error < tolerance


def test_tables_hold_every_row_once():
    rng = np.random.default_rng(0)
    sizes = np.concatenate([rng.integers(1, 60, 3000), [1500]])
    ids = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    groups = make_groups(ids)
    assert 2 <= len(groups.tables) <= 8
    flat = np.concatenate([table.rows.reshape(-1) for table in groups.tables])
    np.testing.assert_array_equal(flat[groups.slot], np.arange(len(ids)))
    for table in groups.tables:
        members = np.arange(table.rows.shape[1]) < table.size[:, None]
        number = np.broadcast_to(table.number[:, None], members.shape)[members]
        np.testing.assert_array_equal(groups.number[table.rows[members]], number)
    # One number for each id, in the order of appearance.
    _, first = np.unique(ids, return_index=True)
    np.testing.assert_array_equal(groups.number[np.sort(first)], np.arange(len(sizes)))


def test_ids_of_any_kind_are_the_same_groups():
    names = np.array(["b", "a", "b", "c"])
    kinds = [names, names.astype(object), [7, 2, 7, 1], np.array([2.0, 1, 2, 0])]
    kinds.append(np.array([*map(np.int64, [7, 2, 7, 1]), None], object)[:4])
    for ids in kinds:
        np.testing.assert_array_equal(make_groups(ids).number, [0, 1, 0, 2])


@pytest.mark.parametrize(
    "ids",
    [
        [1, np.nan],
        [None, "a"],
        np.array([np.float64("nan"), 1], object),
        [[1, 2]],
        [],
        "every",
        np.array(["NaT"], "M8[s]"),
    ],
)
def test_bad_ids_are_refused(ids):
    with pytest.raises(ValueError, match="groups"):
        make_groups(ids)


def test_losses_without_mask_see_groups_of_their_size():
    def no_mask(scores, targets):
        return jnp.mean(jnp.square(scores - targets)) + jnp.sum(scores) ** 2

    ids, targets, scores, _ = make_rows()
    ids = np.where(ids == 2, 3, ids)
    groups = make_groups(ids, padded=False)
    widths = [table.rows.shape[1] for table in groups.tables]
    traced, constants = trace_group_loss(no_mask, targets, widths)
    objective = GroupObjective(
        traced, constants, jnp.asarray(targets), jnp.ones(NUM_ROWS),
        jax.device_put(groups), (), jnp.asarray(WORDS),
    )  # fmt: skip
    expected, slopes = np.zeros(NUM_ROWS), jax.jit(jax.grad(no_mask))
    for name in np.unique(ids):
        rows = ids == name
        expected[rows] = slopes(scores[0][rows], targets[rows])
    gradient = differentiate(objective, jnp.asarray(scores))[0]
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    with pytest.raises(ValueError, match="different sizes"):
        make_groups(np.repeat(np.arange(65), np.arange(1, 66)), padded=False)


def test_random_groups_hold_every_row_that_counts_once():
    _, targets, scores, weights = make_rows()
    weights = (weights > 0).astype(np.float32)
    found = []

    def record(scores, targets, *, where):
        return jnp.sum(jnp.where(where, scores, 0.0)) ** 2

    traced, constants = trace_group_loss(record, targets, [8])
    for words in (WORDS, WORDS + 1):
        objective = GroupObjective(
            traced, constants, jnp.asarray(targets), jnp.asarray(weights),
            random_groups(8), (), jnp.asarray(words),
        )  # fmt: skip
        gradient = np.asarray(differentiate(objective, jnp.asarray(scores))[0])
        # The gradient of a row is twice the sum of the scores of its group.
        assert (gradient[weights == 0] == 0).all()
        sums, sizes = np.unique(gradient[weights > 0], return_counts=True)
        assert sorted(sizes)[:-1].count(8) >= len(sizes) - 2
        np.testing.assert_allclose(
            np.sum(sums) / 2, np.sum(scores[0][weights > 0]), rtol=1e-4
        )
        found.append(gradient)
    assert not np.array_equal(*found)


def test_probe_estimates_the_diagonal():
    ids, targets, scores, weights = make_rows(seed=1)
    objective, scores = bind(soft_rank, ids, targets, weights), jnp.asarray(scores)
    hessian = jax.jit(
        jax.hessian(lambda s: total_by_hand(soft_rank, ids, targets, weights, s[None]))
    )(scores[0])
    expected = np.where(weights > 0, np.diag(hessian) / np.maximum(weights, 1e-9), 0)

    @jax.jit
    def estimate(words):
        first = start_probe(scores)
        seeded = objective._replace(words=words)
        return renew_probe(seeded, scores, first, jnp.int32(0))[1].curvature[0]

    words = np.random.default_rng(2).integers(0, 2**32, (400, 2), np.uint32)
    found = np.asarray(jax.lax.map(estimate, jnp.asarray(words)))
    error = found.mean(0) - expected
    deviation = found.std(0) / np.sqrt(len(words))
    # Of 60 rows about 3 are beyond two standard errors.
    assert np.mean(np.abs(error) <= 2 * deviation + 1e-4) > 0.85


def test_small_groups_have_their_exact_diagonal():
    ids = np.repeat(np.arange(12), 5)
    _, targets, scores, _ = make_rows(seed=2, num_scores=2)
    objective = bind(two_scores, ids, targets, np.ones(NUM_ROWS, np.float32), 2)
    scores = jnp.asarray(scores)
    _, probe = renew(objective, scores, 7)
    whole = np.ones(NUM_ROWS)
    hessian = jax.jit(
        jax.hessian(lambda s: total_by_hand(two_scores, ids, targets, whole, s))
    )(scores)
    expected = [np.diag(hessian[k, :, k]) for k in range(2)]
    np.testing.assert_allclose(probe.curvature, expected, atol=1e-4)
    raised = raise_curvature(probe, jnp.ones(NUM_ROWS))
    least = 0.05 * np.maximum(expected, 0).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(raised, np.maximum(expected, least), rtol=1e-3)


def test_losses_without_curvature_use_differences():
    def hinge(scores, targets, *, where):
        ordered = (targets[:, None] > targets[None]) & where[:, None] & where[None]
        short = jnp.maximum(0, 1 - scores[:, None] + scores[None])
        return jnp.sum(jnp.where(ordered, short, 0.0))

    ids, targets, scores, weights = make_rows()
    for loss, expected in ((hinge, True), (pairs, False)):
        for scale in jnp.float32([1, 100]):  # the rule has no unit of its own
            at = scale * scores

            def scaled(scores, targets, *, where, loss=loss, scale=scale):
                return loss(scores / scale, targets, where=where)

            objective = bind(scaled, ids, targets, weights)
            _, probe = renew(objective, at)
            assert bool(probe.differs) is expected
            assert (probe.curvature > 0).any()


def correlation(scores, targets, *, where, unit=1e-4):
    """1 - correlation, where a spread of the scores far below the unit counts as 0."""

    def center(values):
        count = jnp.maximum(jnp.sum(where.astype(jnp.float32)), 1)
        mean = jnp.sum(jnp.where(where, values, 0.0)) / count
        return jnp.where(where, values - mean, 0.0)

    scores, targets = center(scores), center(targets)
    spreads = [jnp.sum(each**2) + unit**2 for each in (scores, targets)]
    return 1 - jnp.sum(scores * targets) / jnp.sqrt(spreads[0] * spreads[1])


def test_a_saddle_takes_steps_as_long_as_the_gradient_lasts():
    # Equal scores: the loss bends neither up nor down. The unit of the scores is the
    # only length there is.
    ids, targets, _, weights = make_rows()
    scores = jnp.zeros((1, NUM_ROWS))
    for unit in jnp.float32([1e-4, 1]):

        def loss(scores, targets, *, where, unit=unit):
            return correlation(scores, targets, where=where, unit=unit)

        objective = bind(loss, ids, targets, weights)
        gradient, probe = renew(objective, scores)
        counted = np.asarray(weights > 0)
        steps = np.abs(gradient[0] / probe.curvature[0])[counted]
        assert 0.1 * unit < np.sqrt(np.mean(steps**2)) < 10 * unit


def test_the_average_restarts_where_the_curvature_jumps():
    ids, targets, scores, weights = make_rows()
    objective = bind(pairs, ids, targets, weights)
    scores = jnp.asarray(scores)
    _, fresh = renew(objective, scores)
    wide = np.isin(ids, np.flatnonzero(np.bincount(ids) > 8))  # not exact ones
    for change in (3.0, 1 / 3, 1e4, 1e-4):
        before = fresh._replace(curvature=fresh.curvature * change)
        _, probe = renew(objective, scores, 19, before)
        mixed = 0.9 * before.curvature + 0.1 * fresh.curvature
        expected = mixed if 0.1 < change < 10 else fresh.curvature
        found = (probe.curvature[0, wide], expected[0, wide])
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_lambdas_that_jump_keep_their_hessian():
    # At equal scores every move changes the order, and with it the weights of pairs.
    def lambdas(scores, targets, *, where):
        return jb.losses.lambda_rank(scores, targets, where=where, normalize="both")

    ids, targets, _, weights = make_rows()
    scores = jnp.zeros((1, NUM_ROWS))
    objective = bind(lambdas, ids, targets, weights)
    _, probe = renew(objective, scores)
    assert not probe.differs
    assert 0 < jnp.max(probe.curvature) < 10


@jax.jit
def solve(matrix, gradient, diagonal, penalty):
    return solve_jointly(
        gradient, diagonal, penalty, lambda values: matrix @ values,
        lambda values: gradient + matrix @ values, STOPPING,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_joint_leaves_are_close_to_the_dense_solution(seed):
    rng = np.random.default_rng(seed)
    root, scale = rng.normal(size=(5, 3)), 10.0 ** rng.uniform(-2, 2, 5)
    matrix = np.float32((root @ root.T + np.eye(5)) * np.outer(scale, scale))
    gradient = np.float32(rng.normal(size=5) * scale)
    diagonal, penalty = np.diag(matrix), np.float32(0.01)
    found = np.asarray(solve(matrix, gradient, diagonal, penalty))
    system = np.asarray(matrix, float) + penalty * np.eye(5)
    expected = -np.linalg.solve(system, gradient)

    def size(residual):
        return np.sum(residual**2 / (diagonal + penalty))

    def distance(values):  # half of it is the loss above the least one
        return (values - expected) @ system @ (values - expected)

    assert size(gradient + system @ found) <= 0.1 * size(gradient)
    # One step along the diagonal's direction, as long as is best, is the least to ask.
    direction = -gradient / (diagonal + penalty)
    length = -(gradient @ direction) / (direction @ system @ direction)
    assert distance(found) <= distance(length * direction) * (1 + 1e-4)


def test_joint_leaves_without_coupling_are_newton_steps():
    gradient, curvature = jnp.array([3.0, -1.0, 0.0]), jnp.array([2.0, 0.5, 4.0])
    found = solve_jointly(
        gradient, curvature, jnp.float32(0.5), lambda values: curvature * values,
        lambda values: gradient + curvature * values, STOPPING,
    )  # fmt: skip
    np.testing.assert_allclose(found, -gradient / (curvature + 0.5), rtol=1e-6)


def test_joint_leaves_stop_where_the_slope_rises():
    # The slope along c is c^3 / 3 - 1 per leaf; a Newton step from 0 with curvature
    # 1/100 would go to 100.
    gradient, curvature = jnp.full(3, -1.0), jnp.full(3, 0.01)
    found = solve_jointly(
        gradient, curvature, jnp.float32(0), lambda values: 0.01 * values,
        lambda values: values**3 / 3 - 1, STOPPING,
    )  # fmt: skip
    assert 0 < found[0] < 3


def test_bags_never_divide_a_group():
    ids, _, _, weights = make_rows()
    groups = jax.device_put(make_groups(ids))
    seed = jnp.asarray(WORDS)
    bag = np.asarray(jax.jit(draw_bag)(groups, seed, weights, np.float32(0.5)))
    chosen = set(ids[bag].tolist())
    for name in chosen:
        np.testing.assert_array_equal(bag[ids == name], weights[ids == name] > 0)
    assert len(chosen) == 3  # half of six that count


def test_start_is_the_best_constant():
    ids, targets, _, weights = make_rows()
    offset = jnp.asarray(np.random.default_rng(1).normal(size=(1, NUM_ROWS)), "f4")
    objective = bind(soft_rank, ids, targets, weights)
    start, flat = jax.jit(partial(find_group_start, objective))(offset)
    assert not flat
    total = jax.jit(partial(total_by_hand, soft_rank, ids, targets, weights))
    losses = [
        total(offset + c)
        for c in np.asarray(start[0]) + np.array([-0.01, 0, 0.01], np.float32)
    ]
    assert np.argmin(losses) == 1
    objective = bind(pairs, ids, targets, weights)
    start, flat = jax.jit(partial(find_group_start, objective))(offset)
    assert flat and start[0] == 0


def test_joint_leaves_do_not_leap_where_curvature_vanishes():
    # Along (1, 1) the Hessian is almost 0, though not so its diagonal.
    matrix = jnp.array([[1.0, -0.9999], [-0.9999, 1.0]])
    gradient = -jnp.ones(2)
    found = solve_jointly(
        gradient, jnp.ones(2), jnp.float32(0), lambda values: matrix @ values,
        lambda values: gradient + matrix @ values, STOPPING,
    )  # fmt: skip
    assert (found > 1).all() and (found < 25).all()


def test_chunks_of_groups_change_nothing(monkeypatch):
    ids, targets, scores, weights = make_rows()
    objective = bind(pairs, ids, targets, weights)
    scores = jnp.asarray(scores)

    def evaluate():
        slope = jax.jit(partial(group_gradient, objective))
        return jax.jvp(slope, (scores,), (scores,))

    whole = evaluate()
    for count in (1, 2, 3):  # groups of a chunk, which do not always divide all groups
        monkeypatch.setattr(coupled, "_CHUNK", count * 16**2)
        for one, other in zip(whole, evaluate(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
