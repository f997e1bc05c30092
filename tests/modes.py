# SPDX-License-Identifier: Apache-2.0
"""Representative calls, whose results depend neither on JAX's configuration nor on
how numbers are handed over.

    python tests/modes.py [name ...]

prints a line for each call: its name, and a digest of the bits, dtypes and weak types
of all that it returned. ``.ci/modes`` compares the lines of many configurations.
"""

import dataclasses
import hashlib
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

import jboost as jb

L = jb.losses
N = 120
SMALL = dict(num_rounds=3, max_depth=3)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 4))  # float64, so that all modes have to convert it
X[:, 3] = RANDOM.integers(0, 6, N)
SIGNAL = X[:, 0] + X[:, 1] * X[:, 2]
Y = SIGNAL + RANDOM.normal(size=N) * 0.3
X[RANDOM.random(X.shape) < 0.1] = np.nan
CLASSES = np.digitize(SIGNAL, [-1.0, 0.5])  # int64
GROUPS = np.sort(RANDOM.integers(0, 12, N))
WEIGHT = RANDOM.integers(1, 5, N) / 2
SURVIVAL = dict(time=np.exp(Y / 2), event=Y > -0.5)
with jax.transfer_guard("allow"):
    KEY = jax.random.PRNGKey(0)  # of any implementation of random numbers
EVERY = ("cpu", "xla") if jb.implementations()["training"] == "cpu" else ("xla",)


def own_loss(score, target):
    """Of a user: written for any precision."""
    return jnp.where(score > target, 0.3, 0.7) * jnp.log(jnp.cosh(score - target))


def find_spread(scores, target, weight):
    """The parameter of an adaptive loss."""
    return jnp.sum(weight * jnp.abs(target - scores)) / jnp.sum(weight)


def huber_in_spreads(score, target, spread):
    """Huber's loss, which that parameter scales."""
    return L.huber(score, target, delta=spread)


def use_model(implementation):
    """Trains with many options, then does most of what can be done with a model."""
    use = dict(implementation=implementation)
    model, history = jb.fit(
        X, Y, L.squared_error, categorical=[3], sample_weight=WEIGHT,
        validation=(X[:40], Y[:40]), early_stopping_rounds=2, subsample=0.7,
        colsample_bynode=0.5, metrics=jb.metrics.rmse, **SMALL, **use,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        jb.save(model, path := Path(folder) / "model")
        contents, loaded = path.read_bytes(), jb.load(path)
    return [
        model, history, contents, loaded,
        jb.predict(model, X, **use),
        jb.predict(model, X[:1], offset=WEIGHT[:1], **use),
        jax.jit(lambda x: jb.predict(model, x, **use))(
            jax.device_put(X.astype(np.float32))
        ),
        jb.staged_predict(model, X, **use),
        jb.leaf_indices(model, X, **use),
        jb.shap_values(model, X[:20], **use),
        jb.feature_importance(model),
        jb.refit(model, X, Y + 1),
        jb.truncate(model, 1),
        jb.partial_dependence(model, X, 0),
    ]  # fmt: skip


def train(loss, target, implementation, **options):
    """Trains, and predicts."""
    model, history = jb.fit(
        X, target, loss, implementation=implementation, **SMALL, **options
    )
    return model, history, jb.predict(model, X, implementation=implementation)


def boost(implementation):
    """Trains under jit and vmap."""
    use = dict(implementation=implementation)
    bins = jb.fit_bins(X, max_bins=32)
    codes = jb.apply_bins(bins, X, **use)
    y = Y.astype(np.float32)

    def run(learning_rate):
        trees, scores = jb.boost(
            codes, y, L.squared_error, KEY, learning_rate=learning_rate, **SMALL, **use
        )
        return jb.to_ensemble(trees, bins), scores

    rates = jax.device_put(np.array([0.1, 0.3], np.float32))
    rate = jax.device_put(np.float32(0.1))
    state = jb.init(codes, y, L.squared_error, KEY)
    state = jb.boost_step(state, codes, y, L.squared_error, max_depth=3, **use)
    return bins, codes, run(0.3), jax.jit(run)(rate), jax.vmap(run)(rates), state


def select(implementation):
    """Compares settings."""
    fixed = dict(folds=3, implementation=implementation, **SMALL)
    return [
        jb.cross_validate(X, Y, L.squared_error, **fixed),
        jb.sweep(X, Y, L.squared_error, {"learning_rate": [0.1, 0.3]}, **fixed),
    ]


def stream(implementation):
    """Trains from batches."""
    batches = jb.stream(lambda: [(X[:70], Y[:70]), (X[70:], Y[70:])], memory="1MB")
    return jb.fit(
        batches, None, L.squared_error, implementation=implementation, **SMALL
    )


def train_sparse(implementation):
    """Trains on a sparse matrix."""
    x = scipy.sparse.csr_matrix(np.where(X > 0, X, 0))
    model, history = jb.fit(
        x, Y, L.squared_error, implementation=implementation, **SMALL
    )
    return model, history, jb.predict(model, x, implementation=implementation)


def use_estimators():
    """Calls the interface of scikit-learn."""
    from jboost.sklearn import JBoostClassifier, JBoostRegressor

    classifier = JBoostClassifier(num_rounds=2).fit(X, CLASSES)
    regressor = JBoostRegressor(num_rounds=2).fit(X, Y, sample_weight=WEIGHT)
    return [
        classifier.predict_proba(X),
        classifier.predict(X),
        regressor.predict(X),
        regressor.score(X, Y),
    ]


def use_parts():
    """Calls what needs neither training nor a model."""
    summary = jb.sketches.make_summary(X[:, 3])
    sketch = jb.sketches.update_sketch(jb.sketches.make_sketch(4), X)
    tree = jb.cart.fit_tree(X, Y, max_depth=3)
    # Losses and metrics are for programs; their constants are transfers elsewhere.
    signal, y, weight = jax.device_put(np.float32([SIGNAL, Y, WEIGHT]))
    return [
        tree, jb.predict(tree, X), jb.cart.pruning_path(tree),
        jb.sketches.bins_from_sketch(sketch), jb.sketches.query_ranks(summary, [0.5]),
        jb.survival.kaplan_meier(SURVIVAL),
        jb.survival.baseline_hazard(SIGNAL, SURVIVAL),
        jax.jit(partial(L.weighted_quantile, q=0.3))(y, weight),
        L.predict_intercepts(SIGNAL, Y, (1.0, 0.5), GROUPS),
        jax.jit(lambda s, w: (jb.metrics.auc(s, w > 1), jb.metrics.log_loss(s, w > 1)))(
            signal, weight
        ),
    ]  # fmt: skip


def inspect():
    """Looks along losses; of an adaptive one, the rows give the parameter."""
    adaptive = L.adaptive(huber_in_spreads, find_spread)
    return [repr(jb.inspect_loss(loss, 1.5)) for loss in (own_loss, adaptive)]


LOSSES = {
    "logistic": partial(train, L.logistic, Y > 0),
    "softmax": partial(train, L.softmax, CLASSES, num_scores=3),
    "quantile": partial(train, partial(L.quantile, tau=0.8), Y, sample_weight=WEIGHT),
    "huber": partial(train, L.huber, Y, leaf_solver="median_step"),
    "poisson": partial(train, L.poisson, CLASSES, candidates="exact"),
    "own": partial(train, own_loss, Y),
    "rank": partial(train, L.lambda_rank, CLASSES, groups=GROUPS),
    "list": partial(train, L.xendcg, CLASSES, groups=GROUPS),
    "cox": partial(train, L.cox, SURVIVAL, groups=np.zeros(N, int)),
    "normal": partial(train, L.likelihood(jb.distributions.normal), Y, num_scores=2),
    "intercept": partial(train, L.make_random_intercept(), Y, groups=GROUPS),
}
TRAINING = {
    "model": use_model, "boost": boost, "select": select, "stream": stream,
    "sparse": train_sparse, **LOSSES,
}  # fmt: skip
CALLS = {
    f"{name}/{implementation}": partial(call, implementation=implementation)
    for name, call in TRAINING.items()
    for implementation in EVERY
} | {"estimators": use_estimators, "parts": use_parts, "reports": inspect}


def digest(result):
    """Returns a hash of every number of a result, with its type."""
    found = hashlib.sha256()
    for leaf in _flatten(result):
        found.update(_describe(leaf))
    return found.hexdigest()[:16]


def _flatten(result):
    """Returns the numbers, arrays and texts in a tree of containers."""
    leaves = []
    for leaf in jax.tree.leaves(result, is_leaf=dataclasses.is_dataclass):
        if dataclasses.is_dataclass(leaf):
            leaves += _flatten(
                [getattr(leaf, f.name) for f in dataclasses.fields(leaf)]
            )
        else:
            leaves.append(leaf)
    return leaves


def _describe(leaf):
    if isinstance(leaf, bytes | str):
        return leaf if isinstance(leaf, bytes) else leaf.encode()
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    assert array.dtype != object, leaf
    kind = type(leaf).__name__, array.dtype, array.shape, getattr(leaf, "weak_type", 0)
    return repr(kind).encode() + array.tobytes()


if __name__ == "__main__":
    for name in sys.argv[1:] or CALLS:
        print(name, digest(CALLS[name]()), flush=True)
