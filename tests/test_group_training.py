"""Training with losses of groups: fit, boost, cross-validation and what they refuse."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import FULL

import jboost as jb
from jboost.selection.comparison import is_of_groups

RNG = np.random.default_rng(0)
ROWS = 240
IDS = np.repeat(np.arange(40), 6)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
TABLE = np.round(X)  # thresholds that do not depend on weights
LATENT = (X[:, 0] + np.sin(2 * X[:, 1])).astype(np.float32)
Y = np.digitize(LATENT + 0.3 * RNG.normal(size=ROWS), [-0.5, 0.5]).astype(np.float32)
SMALL: dict[str, Any] = dict(
    num_rounds=6, max_depth=2, max_bins=16, linear_leaves=False, init_score=0.0, **FULL
)
ONCE = SMALL | dict(num_rounds=1)
ORDER = RNG.permutation(ROWS)


def listwise(scores, targets, *, where):
    """Cross-entropy of the relevances with a softmax over the group."""
    masked = jnp.where(where, scores, -jnp.inf)
    weights = jnp.where(where, targets, 0.0)
    return jnp.sum(weights) * jax.nn.logsumexp(masked) - jnp.sum(weights * scores)


def fair(scores, targets, *, where, penalty):
    """Logistic loss and the squared gap of mean probability between two kinds."""
    chance = jax.nn.sigmoid(scores)
    loss = jnp.where(where, jb.losses.logistic(scores, targets["y"]), 0.0)

    def mean(rows):
        number = jnp.sum(rows, dtype=jnp.float32)
        return jnp.sum(jnp.where(rows, chance, 0.0)) / number

    gap = mean(where & (targets["kind"] > 0)) - mean(where & (targets["kind"] == 0))
    return jnp.sum(loss) + penalty * jnp.sum(where, dtype=jnp.float32) * gap**2


def weighing(scores, targets, *, where, weights=None):
    """Squared error of a group, which weighs its rows."""
    square = jnp.square(jnp.where(where, scores - targets, 0.0))
    return jnp.sum(square if weights is None else weights * square)


def leaves(model):
    return jax.tree.map(np.asarray, jax.tree.leaves(model))


def assert_same(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def trained():
    return jb.fit(X, Y, listwise, groups=IDS, **SMALL | dict(init_score="auto"))


def test_choices_of_losses_of_groups_are_told(trained):
    _, history = trained
    assert history.choices["leaf_solver"] == "joint"
    assert history.choices["init_score_rule"] == "shift-invariant"
    assert (np.diff(history.train_loss) < 0).all()


def test_order_and_names_of_groups_do_not_matter(trained):
    names = np.array([f"query {i}" for i in RNG.permutation(40)])[IDS]
    model, _ = jb.fit(X[ORDER], Y[ORDER], listwise, groups=names[ORDER], **SMALL)
    expected = jb.predict(trained[0], X)
    np.testing.assert_allclose(jb.predict(model, X), expected, atol=1e-5)


def test_sum_of_row_losses_is_the_loss_of_rows():
    settings = dict(sample_weight=np.ones(ROWS), **SMALL)
    model, _ = jb.fit(X, LATENT, weighing, groups=IDS, **settings)
    rows, _ = jb.fit(X, LATENT, jb.losses.squared_error, **settings)
    expected = jb.predict(rows, X)
    np.testing.assert_allclose(jb.predict(model, X), expected, atol=1e-5)


def test_weight_two_is_a_second_group_and_zero_is_none():
    weights = np.repeat(RNG.integers(0, 3, 40), 6).astype(np.float32)
    weighted, _ = jb.fit(X, Y, listwise, groups=IDS, sample_weight=weights, **SMALL)
    rows = np.concatenate([np.flatnonzero(weights > 0), np.flatnonzero(weights > 1)])
    ids = IDS[rows] + 40 * (np.arange(len(rows)) >= np.sum(weights > 0))
    repeated, _ = jb.fit(X[rows], Y[rows], listwise, groups=ids, **SMALL)
    one, other = (jb.predict(m, X[rows]) for m in (weighted, repeated))
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_loss_weighs_rows_itself():
    weights = RNG.uniform(0.5, 2, ROWS).astype(np.float32)
    weights[RNG.random(ROWS) < 0.2] = 0
    settings = dict(sample_weight=weights, l2=0.0, **SMALL)
    model, _ = jb.fit(X, LATENT, weighing, groups=IDS, **settings)
    rows, _ = jb.fit(X, LATENT, jb.losses.squared_error, **settings)
    expected = jb.predict(rows, X)
    error = jb.predict(model, X) - expected
    assert np.std(error) < 0.2 * np.std(expected)


@pytest.mark.parametrize("in_training", [True, False])
def test_missing_weights_are_one(in_training):
    """A loss is traced once for training and validation rows."""
    weights = RNG.uniform(0.5, 2, ROWS)

    def train(ones):
        own, other = (weights, ones) if in_training else (ones, weights)
        sets = dict(a=jb.rows(X, LATENT, sample_weight=other), b=(X, LATENT))
        return jb.fit(
            X, LATENT, weighing, groups="all", sample_weight=own, validation=sets,
            **ONCE,
        )  # fmt: skip

    (model, history), (same, other) = train(None), train(np.ones(ROWS))
    assert_same(model, same)
    assert_same(history.validation_loss, other.validation_loss)
    assert history.train_loss[0] != history.validation_loss["a"][0]


def test_a_checkpoint_of_other_groups_is_refused(tmp_path):
    kept = dict(checkpoint=tmp_path / "run", **SMALL)
    jb.fit(X, Y, listwise, groups=IDS, **kept)
    with pytest.raises(ValueError, match="groups"):
        jb.fit(X, Y, listwise, groups=np.roll(IDS, 1), **kept)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 100.0])
def test_penalties_on_all_rows_train_monotonically(penalty):
    targets = dict(y=(Y > 0).astype(np.float32), kind=(X[:, 0] > 0).astype(np.float32))

    size = jnp.float32(penalty)  # a number that is traced: one program for all

    def loss(scores, targets, *, where):
        return fair(scores, targets, where=where, penalty=size)

    settings = SMALL | dict(num_rounds=15)
    model, history = jb.fit(X, targets, loss, groups="all", **settings)
    assert (np.diff(history.train_loss) <= 0).all()
    chance = np.asarray(jax.nn.sigmoid(jb.predict(model, X)))
    kind = targets["kind"] > 0
    gap = chance[kind].mean() - chance[~kind].mean()
    assert gap < 0.02 if penalty == 100 else gap > 0.05


def test_early_stopping_by_a_metric_of_groups():
    held = IDS >= 30
    other = Y[ORDER]  # noise, by which no round is much better than another
    model, history = jb.fit(
        X, Y, listwise, groups=IDS,
        validation=jb.rows(X[held], other[held], groups=IDS[held]),
        metrics="ndcg@3", by="ndcg@3", early_stopping_rounds=3,
        **SMALL | dict(num_rounds=40),
    )  # fmt: skip
    values = history.metrics["validation"]["ndcg@3"]
    assert history.best_round == np.argmax(values) and len(values) < 40
    scores = np.asarray(jb.predict(model, X[held]))
    ndcg = jax.jit(partial(jb.metrics.ndcg, at=3))
    by_hand = [ndcg(scores[IDS[held] == i], other[i == IDS]) for i in range(30, 40)]
    assert values.max() == pytest.approx(np.nanmean(by_hand), abs=1e-5)


def test_folds_hold_whole_groups_out():
    found = jb.cross_validate(X, Y, listwise, folds=2, groups=IDS, **SMALL)
    own = jax.jit(listwise)
    for losses, held in zip(found.validation_loss, found.held_out, strict=True):
        names = np.unique(IDS[held])
        np.testing.assert_array_equal(held, np.isin(IDS, names))
        rows = [np.flatnonzero(name == IDS) for name in names]
        by_hand = [own(found.scores[r], Y[r], where=np.ones(6, bool)) for r in rows]
        assert losses[found.best_round] == pytest.approx(np.mean(by_hand), rel=1e-5)
    with pytest.raises(ValueError, match="divide"):
        half = np.arange(ROWS) % 2
        jb.cross_validate(X, Y, listwise, folds=half, groups=IDS, **SMALL)


def test_folds_weigh_rows_in_losses_and_metrics():
    """An index that a fold repeats multiplies the weight of its row."""
    weights = RNG.uniform(0.5, 2, ROWS)
    given = dict(groups="all", **ONCE)
    rows = RNG.integers(0, ROWS, ROWS)
    held, counts = (
        np.setdiff1d(np.arange(ROWS), rows),
        np.bincount(rows, minlength=ROWS),
    )

    def error(scores, targets, *, where, weights):
        return weighing(scores, targets, where=where, weights=weights) / weights.sum()

    found = jb.cross_validate(
        TABLE, LATENT, weighing, folds=[(rows, held)], metrics=dict(error=error),
        sample_weight=weights, **given,
    )  # fmt: skip
    sets = (TABLE[held], LATENT[held], weights[held])
    _, history = jb.fit(
        TABLE, LATENT, weighing, sample_weight=counts * weights, validation=sets,
        **given,
    )  # fmt: skip
    assert found.train_loss[0] == pytest.approx(history.train_loss, rel=1e-5)
    assert found.validation_loss[0] == pytest.approx(history.validation_loss, rel=1e-5)
    squares = np.square(found.scores[held] - LATENT[held])
    expected = np.average(squares, weights=weights[held])
    assert found.metrics["error"][0, 0] == pytest.approx(expected, rel=1e-5)


def test_counts_of_folds_suit_losses_without_weights():
    once, held = np.arange(120), np.arange(120, ROWS)
    given = dict(groups=IDS, **ONCE)
    twice = np.concatenate([once, once[IDS[once] == 3]])
    weights = np.where(IDS == 3, 2.0, 1.0)
    found, expected = (
        jb.cross_validate(TABLE, Y, listwise, folds=[(rows, held)], **given, **more)
        for rows, more in [(twice, {}), (once, dict(sample_weight=weights))]
    )
    np.testing.assert_array_equal(found.train_loss, expected.train_loss)
    with pytest.raises(ValueError, match=r"folds\[0\], how often .* got 1 and 2"):
        jb.cross_validate(X, Y, listwise, folds=[([*once, 3], held)], **given)
    with pytest.raises(ValueError, match="points must have losses that take weights"):
        points = dict(loss=[weighing, listwise])
        jb.sweep(
            X, Y, None, points, folds=2, sample_weight=weights, by=("ndcg", "max"),
            **given,
        )  # fmt: skip


def test_estimates_see_the_weights_that_the_loss_takes():
    def loss(scores, targets, mean, *, where, weights):
        return weighing(scores, targets - mean, where=where, weights=weights)

    def estimate(scores, targets, weights):
        return jnp.sum(weights * targets) / jnp.sum(weights)

    weights = RNG.uniform(0, 2, ROWS).astype(np.float32)
    state = jb.init(
        jb.apply_bins(jb.fit_bins(X), X), LATENT, jb.losses.adaptive(loss, estimate),
        jax.random.key(0), groups="all", sample_weight=weights, init_score=0.0,
    )  # fmt: skip
    assert state.parameters == pytest.approx(np.average(LATENT, weights=weights))


def centered(scores, targets):
    """Accepts one row, too; the sum of its losses is not that of a group."""
    error = scores - targets
    return jnp.sum(jnp.square(error - jnp.mean(error))) + 1e-3 * jnp.sum(scores**2)


def sized(scores, targets):
    return centered(scores, targets) / len(scores)


def adapted(score, target, mean):
    return jnp.square(score - target - mean)


def estimate(scores, targets, weights):
    return jnp.mean(targets)


def estimate_by_group(scores, targets, weights, groups):
    return jnp.mean(targets)


@pytest.mark.parametrize(
    "loss, groups, expected",
    [
        (listwise, None, True),
        (centered, None, False),
        (centered, jb.make_groups(IDS, padded=False), True),
        (sized, IDS, True),
        (jb.losses.squared_error, IDS, False),
        (lambda s, t: jnp.sum(jnp.square(s - t)), list(IDS), False),
        (lambda s, t, *, key: jnp.sum(jnp.square(s - t)), IDS, True),
        (jb.losses.adaptive(adapted, estimate), IDS, False),
        (jb.losses.adaptive(adapted, estimate_by_group), IDS, True),
        (jb.losses.squared_error, IDS[:9], False),
    ],
)
def test_losses_of_a_row_and_of_a_group_are_told_apart(loss, groups, expected):
    assert is_of_groups(loss, groups, LATENT, 1) == expected


def test_losses_of_several_scores_are_told_apart():
    targets = np.stack([LATENT, -LATENT], axis=1)
    for loss in (lambda s, t: jnp.mean(jnp.square(s - t)), jb.losses.squared_error):
        assert not is_of_groups(loss, IDS, targets, 2)
    assert is_of_groups(lambda s, t: jnp.sum(s[:, 0] * t[:, 1]), IDS, targets, 2)
    with pytest.raises(ValueError, match="accepts both"):
        is_of_groups(lambda s, t: jnp.linalg.norm(s - t), IDS, targets, 2)


def test_folds_of_losses_without_mask_need_ids():
    given = dict(folds=2, num_rounds=0, init_score=0.0)
    with pytest.raises(ValueError, match=r"if loss centered is of a group.*labels"):
        jb.cross_validate(X, LATENT, centered, groups=IDS, **given)
    for groups in ("all", jb.random_groups(60)):
        with pytest.raises(ValueError, match="an id for each row"):
            jb.cross_validate(X, LATENT, centered, groups=groups, **given)
    tables = jb.make_groups(IDS, padded=False)
    found = jb.cross_validate(X, LATENT, centered, groups=tables, **given)
    held = found.held_out.reshape(2, 40, 6)
    assert (held == held[:, :, :1]).all()


def no_mask(scores, targets, *, where):
    return jnp.mean(jnp.square(scores - targets))


def of_first(scores, targets, *, where):
    return listwise(scores, targets[0], where=where)


def own_metric(scores, targets, *, where):
    return {}["missing"]


UNEVEN = np.random.default_rng(1).uniform(1, 2, ROWS)


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(groups=None), "groups"),
        (dict(groups=IDS[:9]), "groups must be an id for each of the 240 rows"),
        (dict(groups=np.where(IDS == 3, np.nan, IDS)), "nan.* in row 18"),
        (dict(loss=no_mask), "must not depend on rows outside where"),
        (dict(loss=jb.losses.squared_error), "scalar for a group"),
        (dict(loss=lambda s, t, *, mask: s), "name the mask where, not mask"),
        (dict(loss="rank:ndcg"), r"did you mean jb\.losses\.lambda_rank"),
        (dict(sample_weight=UNEVEN), "the same in all rows of a group"),
        (dict(curvature="exact"), "curvature must be one of"),
        (dict(leaf_solver="exact"), "leaf_solver must be one of"),
        (dict(init_score="median"), "init_score"),
        (dict(validation=(X, Y)), "validation must have groups"),
        (dict(metrics="log_loss"), "log_loss"),
        (dict(by="map@5"), "did you mean 'mean_average_precision@5'"),
        (dict(by="ndgc@10"), "did you mean 'ndcg@10'"),
        (dict(metrics="auc@5"), "or 'ndcg@10' .* did you mean 'auc'"),
        (dict(metrics="concordance_index"), "concordance_index.* time and event"),
        (dict(metrics="ndcg", y=(Y, Y), loss=of_first), "ndcg.* one array, got"),
        (
            dict(metrics="ndcg", y=Y - 1, loss=jb.losses.pairwise_logistic),
            r"ndcg.* relevances from 0 to 100, .* got -1\.0",
        ),
        (
            dict(metrics={"own": own_metric}),
            r"KeyError.*called as metric\(scores, targets, \*, where\)",
        ),
        (dict(mesh=jax.make_mesh((1,), ("rows",))), "mesh"),
    ],
)
def test_what_does_not_fit_is_refused(given, expected):
    call = dict(y=Y, loss=listwise, groups=IDS, **ONCE) | given
    with pytest.raises((TypeError, ValueError, jb.TrainingError), match=expected):
        jb.fit(X, **call)


def total(scores, targets):
    """Squared error of a group, without a mask."""
    return jnp.sum(jnp.square(scores - targets))


ONE = IDS[:236]  # and one group of two rows


SAMPLED = dict(subsample=0.5, leaf_rows="sample")


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(groups=jb.make_groups(ONE)), "^groups must be ids, or jb.make_groups"),
        (
            dict(groups=jb.random_groups(50)),
            "^groups must .* divides the 236 rows, .* size of 50",
        ),
        (dict(groups="all", **SAMPLED), "subsample must be 1"),
        (dict(groups=jb.random_groups(59), **SAMPLED), "subsample must be 1"),
    ],
)
def test_groups_of_losses_without_mask_are_full(given, expected):
    x, y = X[: len(ONE)], LATENT[: len(ONE)]
    codes, settings = np.zeros((len(x), 1), np.uint8), dict(num_rounds=1) | given
    with pytest.raises(ValueError, match=expected):
        jb.fit(x, y, total, **settings)
    with pytest.raises(ValueError, match=expected):
        jax.jit(lambda y: jb.boost(codes, y, total, jax.random.key(0), **settings))(y)
    if "subsample" in given:
        state = jb.init(codes, y, total, jax.random.key(0), groups=given["groups"])
        with pytest.raises(ValueError, match=expected):
            jb.boost_step(state, codes, y, total, **given)
        return
    with pytest.raises(ValueError, match=expected):
        jb.init(codes, y, total, jax.random.key(0), **given)
    with pytest.raises(ValueError, match=f"validation {expected.lstrip('^')}"):
        sets = jb.rows(x, y, **given)
        jb.fit(X, LATENT, total, groups=IDS, validation=sets, num_rounds=1)


@pytest.mark.parametrize("loss", [total, weighing])
def test_weights_may_be_traced(loss):
    def start(weights):
        return jb.init(
            codes, LATENT, loss, jax.random.key(0), groups=groups,
            sample_weight=weights,
        ).init_score  # fmt: skip

    codes, groups = np.zeros((ROWS, 1), np.uint8), jb.make_groups(IDS, padded=False)
    weights = np.repeat(RNG.uniform(0.5, 2, 40), 6)
    found = jax.jit(start)(jnp.asarray(weights, jnp.float32))
    assert found == pytest.approx(np.average(LATENT, weights=weights), abs=1e-5)


@pytest.mark.parametrize(
    "groups, held, numbers",
    [(jb.random_groups(59), None, (4, 4)),
     (jb.make_groups(ONE, padded=False), "all", (40, 1))],
)  # fmt: skip
def test_losses_without_mask_see_no_padding(groups, held, numbers):
    x, y = X[: len(ONE)], LATENT[: len(ONE)]
    _, history = jb.fit(
        x, y, total, groups=groups, validation=jb.rows(x, y, groups=held),
        learning_rate=1e-6, leaf_solver="newton", **ONCE,
    )  # fmt: skip
    found = [history.train_loss[0], history.validation_loss[0]]
    expected = [np.sum(np.square(y)) / number for number in numbers]
    assert found == pytest.approx(expected, rel=1e-4)


TIME = np.arange(1.0, ROWS + 1)


@pytest.mark.parametrize(
    "name, y, expected",
    [
        ("listwise_softmax", Y - 1.0, "y must contain relevances .* got -1"),
        ("lambda_rank", 60.0 * Y, r"from 0 to 100, .* got 120\.0"),
        ("cox", TIME, r"time and event, got an array of shape \("),
        ("cox", dict(t=TIME, event=TIME), "must have time and event, got"),
        ("cox", dict(time=TIME, event=1 + IDS % 2), r"y\['event'\] .* got 2 in row "),
        ("concordance", dict(time=TIME, event=1 + IDS % 2), r"y\['event'\] .* got 2"),
        (
            "cox", dict(time=TIME, event=IDS % 2, entry=TIME - 3 * (TIME < 9)),
            r"y\['entry'\] must be less .* entry 9\.0 and time 9\.0 in row 8",
        ),
    ],
)  # fmt: skip
def test_targets_of_built_in_losses_are_checked(name, y, expected):
    loss, binned = jb.losses.GROUP_LOSSES[name], jnp.zeros((ROWS, 1), jnp.uint8)
    for call in (
        lambda: jb.fit(X, y, loss, groups=IDS, **SMALL),
        lambda: jb.init(binned, y, loss, jax.random.key(0), groups=IDS),
    ):
        with pytest.raises((TypeError, ValueError), match=expected):
            call()


def test_rows_of_weight_0_may_have_any_targets():
    y = np.where(IDS == 3, -1, Y)
    weights = (IDS != 3).astype(np.float32)
    none = dict(num_rounds=0, init_score=0.0)  # targets are looked at before
    jb.fit(X, y, jb.losses.listwise_softmax, groups=IDS, sample_weight=weights, **none)


def test_losses_of_rows_refuse_what_is_for_groups():
    with pytest.raises(ValueError, match="joint"):
        jb.fit(X, LATENT, leaf_solver="joint", **SMALL)
    with pytest.raises(ValueError, match="needs groups"):
        jb.fit(X, LATENT, metrics="ndcg", **SMALL)
    with pytest.raises(ValueError, match="where"):
        jb.inspect_loss(listwise, Y)
    with pytest.raises(ValueError, match="stream"):
        batches = jb.stream(lambda: iter([(X, Y)]), memory="1GB")
        jb.fit(batches, None, listwise, groups=IDS, **SMALL)
