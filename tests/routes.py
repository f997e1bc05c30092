# SPDX-License-Identifier: Apache-2.0
"""One law: every route trains the model that ``jb.fit`` trains.

A case is a set of arguments of ``fit``; together the cases have every feature of
training. A route is another way to train the same model. test_routes.py compares a
design in which every feature meets every route. All cases on all routes:

    XLA_FLAGS=--xla_force_host_platform_device_count=3 python tests/routes.py [CASE ...]
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from tables import same_bits

import jboost as jb
from jboost.sklearn import JBoostClassifier, JBoostRanker, JBoostRegressor

L = jb.losses
ROWS, ROUNDS, DEPTH, DEVICES = 200, 3, 3, 3
RNG = np.random.default_rng(0)
# Few distinct values, so that parts of the rows have the thresholds of all.
X = np.clip(np.round(2 * RNG.normal(size=(ROWS, 3))), -3, 3).astype(np.float32)
SIGNAL = X[:, 0] + np.abs(X[:, 1]) - 0.5 * X[:, 0] * X[:, 2]
Y = (SIGNAL + RNG.standard_t(3, size=ROWS)).astype(np.float32)
HOLES = np.where(RNG.random(X.shape) < 0.1, np.nan, X).astype(np.float32)
LEVELS = np.c_[X[:, :2], np.round(np.abs(HOLES[:, 2]))].astype(np.float32)
TWO_LEVELS = np.c_[X[:, 0], np.abs(LEVELS[:, 1:])].astype(np.float32)
WEIGHTS = (RNG.integers(0, 5, ROWS) / 2).astype(np.float32)
OFFSET = (RNG.integers(-8, 9, ROWS) / 16).astype(np.float32)
LABELS = (Y > 0).astype(np.float32)
COUNTS = np.abs(np.round(Y)).astype(np.float32)
CLASSES = np.clip(Y + 1, 0, 2).astype(np.int32)
SEVERAL = np.stack([Y, -X[:, 0]], 1)
GROUPS = RNG.integers(0, 40, ROWS)
SURVIVAL = dict(time=np.exp(Y / 4).astype(np.float32), event=Y > -1)


def own_loss(score, target):
    """A loss of a user, with a tail and no closed form of its minimizer."""
    return jnp.log1p(jnp.square(score - target))


def own_scores(scores, target):
    """A loss of two scores that interact."""
    return scores[1] + 0.5 * jnp.square((target - scores[0]) * jnp.exp(-scores[1]))


def squared_distance(scores, target):
    """A loss of two scores that do not interact."""
    return jnp.sum(jnp.square(scores - target))


def _spread(scores, targets, weights):
    return jnp.sum(weights * jnp.abs(targets - scores)) / jnp.sum(weights)


def _spread_huber(score, target, delta):
    return L.huber(score, target, delta=delta)


SAMPLED = dict(subsample=0.7, colsample_bytree=0.7, colsample_bynode=0.7, seed=3)
LIMITED = dict(monotone={0: 1}, interactions=[[0, 1], [2]], max_leaves=5, l1=0.1)
FALLING = dict(learning_rate=lambda number: 0.5 / (1 + number))
# {name: (features beside the loss, arguments of fit)}.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "squared": ("", dict(loss=L.squared_error)),
    "squared sampled": (
        "weights offset missing sampling",
        dict(x=HOLES, sample_weight=WEIGHTS, offset=OFFSET, **SAMPLED),
    ),
    "squared limited": ("monotone missing", dict(x=HOLES, **LIMITED)),
    "squared categories": (
        "categories weights schedule",
        dict(x=TWO_LEVELS, categorical=[1, 2], sample_weight=WEIGHTS, **FALLING),
    ),
    "absolute": (
        "weights missing linear",
        dict(x=HOLES, loss=L.absolute_error, sample_weight=WEIGHTS),
    ),
    "quantile sampled": (
        "sampling offset linear schedule",
        dict(
            loss=lambda s, t: L.quantile(s, t, tau=0.9), offset=OFFSET, **SAMPLED,
            **FALLING,
        ),
    ),
    "logistic": (
        "weights offset curved", dict(loss=L.logistic, y=LABELS, sample_weight=WEIGHTS,
                               offset=OFFSET, leaf_solver="line_search"),
    ),
    "logistic categories": (
        "categories sampling missing monotone curved",
        dict(x=LEVELS, y=LABELS, loss=L.logistic, categorical=[2], monotone={0: 1},
             **SAMPLED),
    ),
    "poisson": (
        "offset schedule curved",
        dict(loss=L.poisson, y=COUNTS, offset=OFFSET, min_child_samples=9, **FALLING),
    ),
    "huber": ("sampling curved", dict(loss=L.huber, leaf_solver="exact", **SAMPLED)),
    "huber median": (
        "weights",
        dict(loss=L.huber, leaf_solver="median_step", init_score="median",
             sample_weight=WEIGHTS),
    ),
    "own": ("missing own", dict(loss=own_loss, x=HOLES, curvature="secant")),
    "own absolute": (
        "monotone weights own",
        dict(loss=own_loss, regularization="absolute", sample_weight=WEIGHTS,
             **LIMITED),
    ),
    "adaptive": (
        "adaptive weights curved",
        dict(loss=L.adaptive(_spread_huber, _spread), sample_weight=WEIGHTS),
    ),
    "two scores": (
        "scores offset sampling",
        dict(y=SEVERAL, loss=squared_distance, num_scores=2, share_structure=False,
             offset=np.stack([OFFSET, -OFFSET], 1), **SAMPLED),
    ),
    "shared trees": (
        "scores shared weights missing",
        dict(x=HOLES, y=SEVERAL, loss=squared_distance, num_scores=2,
             share_structure=True, sample_weight=WEIGHTS),
    ),
    "shared limited": (
        "scores shared monotone categories",
        dict(x=TWO_LEVELS, y=SEVERAL, loss=squared_distance, num_scores=2,
             share_structure=True, categorical=[1, 2], monotone={0: 1}),
    ),
    "softmax": (
        "scores weights missing competing",
        dict(x=HOLES, y=CLASSES, loss=L.softmax, num_scores=3, sample_weight=WEIGHTS,
             init_score=[0.5, 0.0, -0.25]),
    ),
    "own scores": (
        "scores own", dict(loss=own_scores, num_scores=2, init_score=[0.0, 0.5])
    ),
    "ranking": ("groups missing", dict(loss=L.lambda_rank, x=HOLES, y=CLASSES,
                                       groups=GROUPS)),
    "ranking sampled": (
        "groups sampling offset monotone",
        dict(loss=L.listwise_softmax, y=LABELS, groups=GROUPS, offset=OFFSET,
             monotone={0: 1}, subsample=0.7),
    ),
    "cox": ("groups categories", dict(loss=L.cox, y=SURVIVAL, x=TWO_LEVELS,
                                      categorical=[1, 2], groups="all")),
    "exact": (
        "exact missing weights",
        dict(x=HOLES, candidates="exact", sample_weight=WEIGHTS),
    ),
    "curvature": (
        "exact", dict(loss=own_loss, candidates="global", max_bins=8,
                      candidate_weights="curvature"),
    ),
}  # fmt: skip


class Run(NamedTuple):
    """The arguments of ``fit`` of a case, apart."""

    x: Any
    y: Any
    loss: Callable[..., Any]
    rows: dict[str, Any]  # weights, offset, groups
    settings: dict[str, Any]

    def fit(self, x: Any = None, **changes: Any) -> Any:
        """Trains as ``fit`` does; returns the model."""
        x = self.x if x is None else x
        given = {**self.rows, **self.settings, **changes}
        return jb.fit(x, self.y, self.loss, **given)[0]


def read_case(name: str) -> Run:
    """Returns a case with the arguments that it leaves out."""
    given = dict(x=X, y=Y, loss=L.squared_error, num_rounds=ROUNDS, max_depth=DEPTH)
    given |= CASES[name][1]
    rows = {
        each: given.pop(each) for each in ("sample_weight", "offset", "groups")
        if each in given
    }  # fmt: skip
    return Run(given.pop("x"), given.pop("y"), given.pop("loss"), rows, given)


def find_features(name: str) -> set[str]:
    """Returns the features of a case."""
    return {*CASES[name][0].split()}


# Routes: each returns the model that it trains, or a pair: it and the expected one.


def by_xla(run):
    return run.fit(implementation="xla")


def prepare_loop(run):
    """Returns bins, arguments and settings of boost and boost_step."""
    settings = dict(run.settings)
    columns = settings.pop("categorical", None)
    bins = jb.fit_bins(
        run.x, max_bins=settings.get("max_bins", 256), categorical=columns,
        sample_weight=run.rows.get("sample_weight"),
    )  # fmt: skip
    key = jax.random.key(settings.pop("seed", 0))
    rows = dict(run.rows)
    if isinstance(rows.get("groups"), np.ndarray):
        rows["groups"] = jb.make_groups(rows["groups"])
    codes = jb.apply_bins(bins, run.x)
    return bins, codes, key, rows, dict(settings, categories=bins.categories)


def by_boost(run):
    bins, codes, key, rows, settings = prepare_loop(run)
    trees, _ = jb.boost(codes, run.y, run.loss, key, **rows, **settings)
    return jb.to_ensemble(trees, bins)


def by_vmap(run):
    """Trains two models under jit and vmap; returns that of the case."""
    bins, codes, key, rows, settings = prepare_loop(run)
    rate = settings.pop("learning_rate", 0.1)

    @jax.jit
    @jax.vmap
    def train(factor):
        rates = (lambda number: factor * rate(number)) if callable(rate) else None
        return jb.boost(
            codes, run.y, run.loss, key, learning_rate=rates or factor * rate,
            **rows, **settings,
        )[0]  # fmt: skip

    trees = train(jnp.array([1.0, 0.5]))
    return jb.to_ensemble(jax.tree.map(lambda a: a[0], trees), bins)


def by_steps(run):
    bins, codes, key, rows, settings = prepare_loop(run)
    start = {
        name: settings.pop(name) for name in ("num_scores", "init_score")
        if name in settings
    }  # fmt: skip
    rate = settings.pop("learning_rate", 0.1)
    state = jb.init(codes, run.y, run.loss, key, **rows, **start)
    rows.pop("offset", None)
    trees = []
    for number in range(settings.pop("num_rounds")):
        state, tree = jb.boost_step(
            state, codes, run.y, run.loss, **rows, **settings,
            learning_rate=rate(number) if callable(rate) else rate,
        )  # fmt: skip
        trees.append(tree)
    together = jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)
    return jb.to_ensemble(jb.BoostedTrees(together, state.init_score), bins)


def by_stream(run):
    weights, offset = (run.rows.get(name) for name in ("sample_weight", "offset"))
    batches = jb.streams.array_batches(
        run.x, run.y, sample_weight=weights, offset=offset, batch_rows=53
    )
    bins = jb.fit_bins(
        run.x, sample_weight=weights, max_bins=run.settings.get("max_bins", 256)
    )
    rows = jb.stream(batches, bins=bins, memory="64 MiB", block_rows=70)
    return jb.fit(rows, loss=run.loss, **run.settings, groups=run.rows.get("groups"))[0]


def by_mesh(run):
    devices = jax.devices()[:DEVICES]
    return run.fit(mesh=jax.sharding.Mesh(devices, "rows"))


def by_sparse(run):
    """Trains on the stored entries of the table, of which one in ten is missing."""
    known = ~np.isnan(run.x)
    stored = scipy.sparse.csr_matrix(
        (run.x[known], np.nonzero(known)), shape=run.x.shape
    )
    return run.fit(stored, absent="missing"), replace(run.fit(), absent="missing")


def by_parts(run):
    first = run.fit(num_rounds=2)
    return run.fit(num_rounds=ROUNDS - 2, model=first, init_score="auto")


def by_checkpoint(run):
    """Interrupts a run in its last round, and repeats the call."""

    def interrupt(number, history, model):
        if number == 2:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        file = dict(checkpoint=Path(folder) / "run", checkpoint_rounds=1)
        try:
            run.fit(callbacks=interrupt, **file)
        except KeyboardInterrupt:
            return run.fit(**file)
    raise AssertionError("the run was not interrupted")


def by_fold(run):
    """Trains two folds, of which the second one holds the same rows out.

    ``fit`` gives these rows no weight.
    """
    held = np.flatnonzero(_draw_held_out(run))
    rest = np.setdiff1d(np.arange(ROWS), held)
    given = {**run.rows, **run.settings}
    found = jb.cross_validate(
        run.x, run.y, run.loss, folds=[(rest, held), (rest, held)],
        return_models=True, **given,
    )  # fmt: skip
    models, last = found.models, found.best_round + 1
    expected = run.fit(
        sample_weight=run.rows.get("sample_weight", np.ones(ROWS, np.float32))
        * ~_draw_held_out(run),
        num_rounds=last,
    )
    return jax.tree.map(lambda a: a[1], models), expected


def _draw_held_out(run):
    """Returns a mask of 20 rows, or of some whole groups, to hold out."""
    groups = run.rows.get("groups")
    return np.arange(ROWS) < 20 if groups is None else groups < 4


def by_refit(run):
    """Fits the leaves of a model anew that does not know its old ones."""
    model = run.fit()
    reached = np.asarray(model.sums.weight) > 0
    blank = replace(
        model, leaf_value=np.where(reached, 99, model.leaf_value).astype(np.float32),
        sums=None, init_score=0 * model.init_score,
    )  # fmt: skip
    same = {
        name: value for name, value in run.settings.items()
        if name in (
            "learning_rate", "l1", "regularization", "curvature", "leaf_solver",
            "init_score",
        )
    }  # fmt: skip
    return jb.refit(blank, run.x, run.y, run.loss, **run.rows, **same)


def by_estimator(run):
    rows, settings = dict(run.rows), dict(run.settings)
    settings["random_state"] = settings.pop("seed", 0)
    settings.pop("num_scores", None)
    make: Any = JBoostClassifier if run.loss is L.softmax else JBoostRegressor
    if "groups" in rows:
        make, rows["qid"] = JBoostRanker, rows.pop("groups")
    return make(run.loss, absent=None, **settings).fit(run.x, run.y, **rows).model_


def by_file(run):
    with tempfile.TemporaryDirectory() as folder:
        jb.save(run.fit(), path := Path(folder) / "model")
        return jb.load(path)


def _within(context: Callable[[], AbstractContextManager[Any]]):
    def route(run):
        with context():
            return run.fit()

    return route


ROUTES: dict[str, Callable[[Run], Any]] = {
    "xla": by_xla, "boost": by_boost, "vmap": by_vmap, "steps": by_steps,
    "stream": by_stream, "mesh": by_mesh, "sparse": by_sparse, "parts": by_parts,
    "checkpoint": by_checkpoint, "fold": by_fold, "refit": by_refit,
    "estimator": by_estimator, "file": by_file,
    "64 bits": _within(lambda: jax.enable_x64(True)),
    "NaN check": _within(lambda: jax.debug_nans(True)),
    "transfer guard": _within(lambda: jax.transfer_guard("disallow")),
}  # fmt: skip

# {(feature, route): the error, or the reason why the models differ}.
REFUSED: dict[tuple[str, str], str] = {
    ("categories", "stream"): "categorical must be 'auto' where x is a stream",
    ("categories", "sparse"): "x must be dense where columns are categorical",
    ("groups", "stream"): "groups must not be given where x is a stream",
    ("groups", "mesh"): "groups must be None with a mesh",
    ("groups", "refit"): "unexpected keyword argument 'groups'",
    ("exact", "stream"): "candidates must be 'global' where x is a stream",
    ("exact", "mesh"): "candidates must be 'global'",
    ("exact", "sparse"): "candidates must be 'global'",
}
# Routes that may round otherwise: a batch of runs is another program.
CLOSE = {"vmap"}
# {(feature, route): why leaves differ, where splits do not}.
LEAVES: dict[tuple[str, str], str] = {
    ("sampling", "refit"): "they are fitted to all rows",
    ("monotone", "refit"): "they may break the signs",
}


def meet(case: str, route: str) -> None:
    """Trains a case on a route, and compares the model with that of ``fit``.

    Raises:
      AssertionError: the models differ, or a refusal is not the expected one.
    """
    run, features = read_case(case), find_features(case)
    refusals = [
        words for (f, r), words in REFUSED.items() if f in features and r == route
    ]
    try:
        found = ROUTES[route](run)
    except (TypeError, ValueError) as error:
        assert any(words in str(error) for words in refusals), error
        return
    assert not refusals
    found, expected = found if isinstance(found, tuple) else (found, _train(case))
    found, expected = _widen(found), _widen(expected)
    if any((feature, route) in LEAVES for feature in features):
        found, expected = _without_values(found), _without_values(expected)
    if route in CLOSE:
        for name in ("leaf_value", "init_score"):
            values = getattr(found, name), getattr(expected, name)
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-6)
        found, expected = _without_values(found), _without_values(expected)
    same_bits(found, expected)


@cache
def _train(case):
    return read_case(case).fit()


def _without_values(model):
    zeros = np.zeros_like(model.leaf_value)
    return replace(model, leaf_value=zeros, sums=None, init_score=0)


def _widen(model):
    """Pads sets of codes, which are as wide as the codes that a route has."""
    if model.left_codes is None:
        return model
    room = 8 - model.left_codes.shape[-1]
    pad = [(0, 0)] * (model.left_codes.ndim - 1) + [(0, room)]
    return replace(model, left_codes=np.pad(model.left_codes, pad))


@cache
def choose_cells() -> list[tuple[str, str]]:
    """Returns few cells (case, route) in which every feature meets every route."""
    chosen = []
    for route in ROUTES:
        left = set().union(*map(find_features, CASES))
        while left:
            case = max(CASES, key=lambda name: len(find_features(name) & left))
            chosen.append((case, route))
            left -= find_features(case)
    return chosen


if __name__ == "__main__":
    failed = 0
    for name in sys.argv[1:] or CASES:
        for route in ROUTES:
            try:
                meet(name, route)
            except Exception as error:
                failed += 1
                print(f"{name} by {route}: {type(error).__name__}: {error}"[:400])
        print(f"{name}: met all routes", flush=True)
    sys.exit(f"{failed} models differ" if failed else 0)
