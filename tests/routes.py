# SPDX-License-Identifier: Apache-2.0
"""One law: every route trains the model that ``jb.fit`` trains.

A case is a set of arguments of ``fit``; together the cases have every feature of
training. A route is another way to train the same model. test_routes.py compares a
design in which every feature meets every route. All cases on all routes:

    XLA_FLAGS=--xla_force_host_platform_device_count=3 python tests/routes.py [CASE ...]
"""

import os
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
from tables import find_spread, huber_in_spreads, same_bits

import jboost as jb
from jboost.sklearn import JBoostClassifier, JBoostRanker, JBoostRegressor

L = jb.losses
ROWS, ROUNDS, DEPTH, DEVICES = 200, 3, 2, 3
RNG = np.random.default_rng(0)
# Few distinct values, so that parts of the rows have the thresholds of all.
X = np.clip(np.round(2 * RNG.normal(size=(ROWS, 3))), -3, 3).astype(np.float32)
SIGNAL = X[:, 0] + np.abs(X[:, 1]) - 0.5 * X[:, 0] * X[:, 2]
Y = (SIGNAL + RNG.standard_t(3, size=ROWS)).astype(np.float32)
HOLES = np.where(RNG.random(X.shape) < 0.1, np.nan, X).astype(np.float32)
LEVELS = np.c_[HOLES[:, :2], np.round(np.abs(HOLES[:, 2]))].astype(np.float32)
TWO_LEVELS = np.c_[HOLES[:, 0], np.abs(LEVELS[:, 1:])].astype(np.float32)
WEIGHTS = (RNG.integers(0, 5, ROWS) / 2).astype(np.float32)
OFFSET = (RNG.integers(-8, 9, ROWS) / 16).astype(np.float32)
LABELS = (Y > 0).astype(np.float32)
COUNTS = np.abs(np.round(Y)).astype(np.float32)
CLASSES = np.clip(Y + 1, 0, 2).astype(np.int32)
SIX = np.clip(np.round(Y) + 2, 0, 5).astype(np.int32)
ELEVEN = np.clip(np.round(2 * Y) + 5, 0, 10).astype(np.int32)
STARTS = 0.3 * np.random.default_rng(0).normal(size=11)
SEVERAL = np.stack([Y, -X[:, 0]], 1)
GROUPS = RNG.integers(0, 40, ROWS)
SURVIVAL = dict(time=np.exp(Y / 4).astype(np.float32), event=Y > -1)


def own_loss(score, target, spread):
    """A loss of a user, with a tail and no closed form of its minimizer."""
    return jnp.log1p(jnp.square((score - target) / spread))


def own_quantile(score, target):
    """A loss of a user that is linear but for a kink."""
    return jnp.maximum(0.7 * (target - score), 0.3 * (score - target))


def own_scores(scores, target):
    """A loss of two scores that interact."""
    residual = (target[0] - scores[0]) * jnp.exp(-scores[1])
    return scores[1] + 0.5 * jnp.square(residual) + jnp.square(target[1] - scores[1])


SAMPLED = dict(subsample=0.7, colsample_bytree=0.7, colsample_bynode=0.7, seed=3)
LIMITED = dict(monotone={0: 1}, interactions=[[0, 1], [2]], max_leaves=3, l1=0.1)
HELD = dict(x=HOLES, sample_weight=WEIGHTS)
# Features of growth, and deeper trees, share cases of squared error, which compiles
# fast.
MANY = dict(
    sample_weight=WEIGHTS, offset=OFFSET, rows_per_threshold=20, parent_rows=3.0,
    learning_rate=lambda number: 0.5 / (1 + number), max_depth=3, **SAMPLED,
)  # fmt: skip
# {name: (features beside the loss, arguments of fit)}.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "squared": (
        "weights offset missing sampling schedule drawn pulled", dict(x=HOLES, **MANY)
    ),
    "squared categories": (
        "weights offset missing sampling schedule drawn pulled categories monotone",
        dict(x=TWO_LEVELS, categorical=[1, 2], monotone={0: 1}, max_onehot=2,
             min_child_samples=9, **MANY),
    ),
    "slopes": (
        "weights offset missing sampling schedule drawn pulled categories monotone "
        "slopes",
        dict(x=LEVELS, categorical=[2], monotone={0: 1}, max_delta_step=0.7,
             linear_leaves=True, **MANY),
    ),
    "quantile": (
        "weights missing linear own",
        dict(loss=own_quantile, init_score="median", **HELD),
    ),
    "adaptive candidates": (
        "adaptive weights missing curved own recut",
        dict(loss=L.adaptive(own_loss, find_spread), max_bins=4,
             candidate_weights="curvature", curvature="secant", leaf_solver="exact",
             **HELD),
    ),
    "adaptive limited": (
        "adaptive weights missing curved own monotone",
        dict(loss=L.adaptive(huber_in_spreads, find_spread), leaf_solver="line_search",
             regularization="absolute", **HELD, **LIMITED),
    ),
    "softmax": (
        "scores weights missing competing pulled",
        dict(y=SIX, loss=L.softmax, num_scores=6, parent_rows=1.0,
             init_score=STARTS[1:7], **HELD),
    ),
    "shared trees": (
        "scores shared weights missing own",
        dict(y=SEVERAL, loss=own_scores, num_scores=2, share_structure=True,
             init_score=[0.5, -0.25], **HELD),
    ),
    "slopes of three": (
        "slopes scores shared categories sampling weights missing",
        dict(x=LEVELS, y=CLASSES, loss=L.softmax, num_scores=3, categorical=[2],
             share_structure=True, subsample=0.7, linear_leaves=True,
             sample_weight=WEIGHTS, init_score=STARTS[:3]),
    ),
    "shared classes": (
        "scores shared weights missing",
        dict(y=ELEVEN, loss=L.softmax, num_scores=11, share_structure=True,
             init_score=STARTS, **HELD),
    ),
    "ranking": (
        "groups missing weights exact",
        dict(loss=L.lambda_rank, x=HOLES, y=CLASSES, groups=GROUPS,
             sample_weight=WEIGHTS[GROUPS], candidates="exact"),
    ),
    "ranking sampled": (
        "groups sampling offset monotone",
        dict(loss=L.listwise_softmax, y=LABELS, groups=GROUPS, offset=OFFSET,
             monotone={0: 1}, subsample=0.7),
    ),
    "cox": (
        "groups categories missing",
        dict(loss=L.cox, y=SURVIVAL, x=TWO_LEVELS, categorical=[1, 2], groups="all"),
    ),
}  # fmt: skip
# Sums over many classes or all rows once depended on the program.
MORE = [("shared classes", "mesh"), ("cox", "checkpoint")]


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
    given |= dict(linear_leaves=False)  # codes do not have slopes
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
    # Trees that choose their own candidates choose among all values.
    most = None if "candidate_weights" in settings else settings.get("max_bins", 256)
    weights = run.rows.get("sample_weight")
    bins = jb.fit_bins(run.x, max_bins=most, categorical=columns, sample_weight=weights)
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
    assert len(devices) == DEVICES or jax.default_backend() == "gpu"
    return run.fit(mesh=jax.sharding.Mesh(devices, "rows"))


def by_sparse(run):
    """Trains on a sparse matrix that does not store missing values."""
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
    """Trains two folds; ``fit`` gives weight 0 to the rows held out of the second."""
    held = _draw_held_out(run)
    folds = [(np.flatnonzero(~mask), np.flatnonzero(mask)) for mask in held]
    found = jb.cross_validate(
        run.x, run.y, run.loss, folds=folds, return_models=True,
        **run.rows, **run.settings,
    )  # fmt: skip
    weights = run.rows.get("sample_weight", np.ones(ROWS, np.float32)) * ~held[1]
    expected = run.fit(sample_weight=weights, num_rounds=found.best_round + 1)
    return jax.tree.map(lambda a: a[1], found.models), expected


def _draw_held_out(run):
    """Returns two masks of 20 rows each, or of some whole groups, to hold out."""
    groups = run.rows.get("groups")
    if isinstance(groups, np.ndarray):
        return np.array([groups >= 36, groups < 4])
    rows = np.arange(ROWS)
    return np.array([rows >= ROWS - 20, rows < 20])


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
    # Splits decide what "auto" stands for, and refit does not know them.
    choices = jb.fit(
        run.x, run.y, run.loss, **run.rows, **{**run.settings, "num_rounds": 0}
    )[1].choices
    same |= {name: choices[name] for name in ("l2", "parent_rows")}
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

# {(feature or case, route): the error}.
REFUSED: dict[tuple[str, str], str] = {
    **{
        ("slopes", route): "linear_leaves must be 'auto' or False for"
        for route in ("boost", "vmap", "steps", "stream", "sparse")
    },
    ("categories", "stream"): "categorical must be 'auto' where x is a stream",
    ("categories", "sparse"): "x must be dense where columns are categorical",
    ("groups", "stream"): "groups must not be given where x is a stream",
    ("groups", "mesh"): "groups must be None with a mesh",
    ("exact", "stream"): "candidates must be 'global' where x is a stream",
    ("exact", "mesh"): "candidates must be 'global'",
    ("exact", "sparse"): "candidates must be 'global'",
    ("recut", "stream"): "candidate_weights must be 'samples' where x is a stream",
    ("recut", "mesh"): "candidates must be 'global' and candidate_weights 'samples'",
    ("recut", "sparse"): "candidates must be 'global' and candidate_weights 'samples'",
    ("cox", "estimator"): "y must hold a number for each row",
}
# Pairs in which the models differ by design: refitted leaves may break the signs.
DIFFERENT = {("monotone", "refit")}
# Routes and cases whose values may differ in their last bits. A batch of runs is
# another program than one run, and a loss with sums over a group has its own order of
# the terms in each program. As users compile, XLA may contract a product and a sum of
# the loss in any program; the flags of the tests keep it from that.
# On a GPU every program may round otherwise.
CLOSE: set[Any] = {"vmap", "ranking sampled"}
if "optimization_level=0" not in os.environ.get("XLA_FLAGS", ""):
    CLOSE |= {"boost", "steps", "stream", "fold", "refit"}
if jax.default_backend() == "gpu":
    CLOSE |= {*ROUTES}


def find_compared(case: str, route: str) -> set[str]:
    """Returns the features that a cell compares; of a refused one, the reasons."""
    features = find_features(case)
    if any((feature, route) in DIFFERENT for feature in features):
        return set()
    refused = {each for each in {case, *features} if (each, route) in REFUSED}
    return refused or features


def meet(case: str, route: str) -> None:
    """Trains a case on a route, and compares the model with that of ``fit``.

    Raises:
      AssertionError: the models differ, or a refusal is not the expected one.
    """
    refusals = [
        REFUSED[each, route] for each in {case, *find_features(case)}
        if (each, route) in REFUSED
    ]  # fmt: skip
    try:
        found = ROUTES[route](read_case(case))
    except (TypeError, ValueError) as error:
        if not any(words in str(error) for words in refusals):
            raise
        return
    assert not refusals
    found, expected = found if isinstance(found, tuple) else (found, _train(case))
    found, expected = _widen(found), _widen(expected)
    if {case, route} & CLOSE:
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
    """Returns few cells (case, route) in which every feature meets every route.

    The cells of a case follow each other, since the package keeps few programs.
    """
    chosen = [*MORE]
    features = set().union(*map(find_features, CASES))
    for route in ROUTES:
        left = set().union(*(find_compared(case, route) for case in CASES)) & features
        left = left.difference(
            *(find_compared(*cell) for cell in MORE if cell[1] == route)
        )
        while left:
            new = {case: len(find_compared(case, route) & left) for case in CASES}
            case = max(CASES, key=new.__getitem__)
            chosen.append((case, route))
            left -= find_compared(case, route)
    return sorted(chosen, key=lambda cell: [*CASES].index(cell[0]))


if __name__ == "__main__":
    failed = 0
    for name in sys.argv[1:] or CASES:
        for route in ROUTES:
            if not find_compared(name, route):
                continue
            try:
                meet(name, route)
            except Exception as error:
                failed += 1
                print(f"{name} by {route}: {type(error).__name__}: {error}"[:400])
        print(f"{name}: met all routes", flush=True)
    sys.exit(f"{failed} models differ" if failed else 0)
