# SPDX-License-Identifier: Apache-2.0
"""The libraries that ``benchmark.py`` measures, bound to a case and generated data.

Equal parameters are: depth 6 and 64 leaves or depth 10 and 1,024; 255 bins for values
that are not missing; learning rate 0.1; XGBoost's lambda of 1 and minimum Hessian of a
leaf of 1 (jboost counts both in average rows; for squared error, log loss and softmax
the equivalent numbers follow from the Hessian of the loss at the start); at least 20
rows per leaf for absolute error and quantiles, else 1; the same rounds and threads.
XGBoost has no minimum number of rows, but the Hessian of the two losses that need 20
is 1 per row. Settings that only one library has (how LightGBM chooses its layout, the
bits of its quantized gradients) are its defaults.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from benchmark_cases import FOLDS, LOSSES, NUM_QUERY_ROWS, RANKING, TAU, Case

HELD_OUT = 20_000  # rows beside the training rows


# ---- data ---------------------------------------------------------------------------


class Table(NamedTuple):
    """Generated rows, training ones first, and what libraries made of them."""

    x: Any  # [N + HELD_OUT, F] float32, a sparse matrix, or a data frame
    signal: np.ndarray  # [N + HELD_OUT] float32
    kept: dict[tuple, Any]


def make_table(case: Case) -> Table:
    """Returns the rows of a case; those of the last one are kept."""
    return _make_table(case.num_rows, case.num_features, case.density, case.categorical)


@lru_cache(maxsize=1)
def _make_table(
    num_rows: int, num_features: int, density: float, categorical: bool
) -> Table:
    """Returns sums of sines and products of normal features, plus noise."""
    generator = np.random.default_rng(0)
    size = (num_rows + HELD_OUT, num_features)
    y = generator.standard_normal(size[0], np.float32)
    if categorical:
        return _make_frame(generator, size, y)
    x = generator.standard_normal(size, np.float32)
    if density < 1:
        x *= generator.random(size, np.float32) < density
    y = add_signal(y, x, np.sin)
    if density < 1:
        from scipy import sparse

        x = sparse.csr_matrix(x)
    return Table(x, y, {})


def add_signal(y, x, sin: Callable):
    """Returns y plus sums of sines and products of the first eight columns of x."""
    y = y + (x[:, 4] * x[:, 5] + x[:, 6] * x[:, 7])
    for j in range(4):
        y = y + sin((1 + j) * x[:, j])
    return y


def _make_frame(generator, size: tuple[int, int], y: np.ndarray) -> Table:
    """Returns columns of ten text categories, the first four of which matter."""
    import pandas as pd

    codes = generator.integers(0, 10, size)
    for j in range(4):
        y += generator.standard_normal(10, np.float32)[codes[:, j]]
    names = [f"kind {number}" for number in range(10)]
    columns = {
        f"column {j}": pd.Categorical.from_codes(column, names)
        for j, column in enumerate(codes.T)
    }
    return Table(pd.DataFrame(columns), y, {})


def forget_table() -> None:
    """Drops the last table."""
    _make_table.cache_clear()


def take_rows(x: Any, rows: slice) -> Any:
    """Returns some rows of a table."""
    return x.iloc[rows] if hasattr(x, "iloc") else x[rows]


def make_targets(case: Case, signal: np.ndarray) -> Any:
    """Returns what the loss compares scores with."""
    generator = np.random.default_rng(1)
    mean = np.exp(signal / 4)
    match case.loss:
        case "logistic":
            return np.float32(signal > 0)
        case "hinge":
            return np.where(signal > 0, 1, -1).astype(np.float32)
        case "softmax" | "lambda_rank" | "xendcg" | "pairwise_logistic":
            classes = case.num_classes or 5
            cuts = np.quantile(signal[: case.num_rows], np.arange(1, classes) / classes)
            return np.searchsorted(cuts, signal).astype(np.int32)
        case "poisson":
            return generator.poisson(mean).astype(np.float32)
        case "gamma":
            return (mean * generator.gamma(2, 0.5, len(mean))).astype(np.float32)
        case "tweedie":
            counts = generator.poisson(mean)
            return generator.gamma(counts + (counts == 0), 0.5).astype(np.float32) * (
                counts > 0
            )
        case "cox":
            time = generator.exponential(1 / mean).astype(np.float32)
            event = generator.integers(0, 2, len(mean)).astype(np.float32)
            return {"time": time, "event": event}
    return signal


def take_targets(y: Any, rows: slice) -> Any:
    """Returns the targets of some rows."""
    if isinstance(y, dict):
        return {name: column[rows] for name, column in y.items()}
    return y[rows]


def count_queries(case: Case, num_rows: int) -> np.ndarray | None:
    """Returns the sizes of consecutive queries, the last of which may be smaller."""
    if case.loss not in RANKING:
        return None
    sizes = np.full(num_rows // NUM_QUERY_ROWS, NUM_QUERY_ROWS)
    rest = num_rows % NUM_QUERY_ROWS
    return np.append(sizes, rest) if rest else sizes


def keep(kept: dict, key: tuple, build: Callable[[], Any]) -> Any:
    """Returns what ``build`` makes of a table; only the last one is kept."""
    if key not in kept:
        kept.clear()
        kept[key] = build()
    return kept[key]


# ---- the libraries ------------------------------------------------------------------


class Contender(NamedTuple):
    """A library bound to a case and training rows."""

    parameters: dict[str, Any]
    train: Callable[[int], Any]  # rounds -> model, from data built beforehand
    fit: Callable[[int], Any]  # the same from arrays
    predict: Callable[[Any, Any], Any]  # model, rows -> raw scores
    validate: Callable[[int], Any]  # rounds -> losses of folds
    explain: Callable[[Any, Any], Any]  # -> SHAP values and base


def draw_folds(num_rows: int) -> np.ndarray:
    """Returns the fold of each row, the same for every library."""
    return np.random.default_rng(1).permutation(num_rows) % FOLDS


def list_pairs(num_rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the rows outside each fold, and those in it."""
    folds = draw_folds(num_rows)
    pairs = [(folds != fold, folds == fold) for fold in range(FOLDS)]
    return [(np.flatnonzero(train), np.flatnonzero(test)) for train, test in pairs]


def least_rows(case: Case) -> int:
    """Returns the minimum rows of a leaf: medians need more than one."""
    return 20 if case.loss in ("absolute_error", "quantile") else 1


def own_squared_error(score, target):
    """A custom loss, as a user of jboost writes it."""
    residual = score - target
    return residual * residual


def list_jboost(case: Case) -> dict[str, Any]:
    """Returns jboost's parameters.

    XGBoost's lambda of 1, in rows of average Hessian: 2 for r^2 (where XGBoost's is
    1), 1/4 for log loss; for K classes, the sum over K of 2 p (1 - p).
    """
    spread = 2 * (1 - 1 / max(2, case.num_classes))
    unit = {"logistic": 4.0, "softmax": 1 / spread}.get(case.loss, 1.0)
    parameters: dict[str, Any] = {
        "learning_rate": 0.1, "max_depth": case.max_depth, "max_bins": 256,
        "l2": unit, "min_child_weight": unit, "min_child_samples": least_rows(case),
        "subsample": 1.0, "rows_per_threshold": 0,
    }  # fmt: skip
    if case.num_classes:
        parameters["num_scores"] = case.num_classes
    kinds = case.candidates.split()
    if "curvature" in kinds:
        parameters["candidate_weights"] = "curvature"
    if {"exact", "local"} & {*kinds}:
        parameters["candidates"] = kinds[0]
    return parameters


def find_loss(case: Case) -> Callable:
    """Returns jboost's loss of a case."""
    import jboost as jb

    if case.loss == "own":
        return own_squared_error
    loss = getattr(jb.losses, case.loss)
    return partial(loss, tau=TAU) if case.loss == "quantile" else loss


def prepare_jboost(
    case: Case, x, y, kept: dict, threads: int, **choice: Any
) -> Contender:
    """JAX uses the cores that the process may run on. ``choice`` goes to ``fit``.

    ``fit`` computes the bins: ``train`` does, too, and the slope loses it.
    """
    import jax

    import jboost as jb

    parameters, loss = list_jboost(case) | choice, find_loss(case)
    sizes = count_queries(case, x.shape[0])
    if sizes is not None:
        parameters["groups"] = np.repeat(np.arange(len(sizes)), sizes)
    if case.loss == "cox":
        parameters["groups"] = "all"

    def fit(num_rounds):
        model, _ = jb.fit(x, y, loss, num_rounds=num_rounds, **parameters)
        return jax.block_until_ready(model)

    def predict(model, rows):
        return np.asarray(jb.predict(model, rows))

    def explain(model, rows):
        return [np.asarray(part) for part in jb.shap_values(model, rows)]

    def validate(num_rounds):
        chosen = parameters | {"num_rounds": num_rounds}
        return jb.cross_validate(x, y, loss, folds=draw_folds(len(y)), **chosen)

    return Contender(parameters, fit, fit, predict, validate, explain)


def prepare_levels(case: Case, x, y, kept: dict, threads: int) -> Contender:
    """The last column holds 1,000 categories in place of its numbers."""
    x = x.copy()
    x[:, -1] = np.random.default_rng(2).integers(0, 1000, len(x))
    return prepare_jboost(case, x, y, kept, threads, categorical=[x.shape[1] - 1])


def list_xgboost(case: Case, threads: int, **choice: Any) -> dict[str, Any]:
    """Returns XGBoost's parameters."""
    methods = {"exact": "exact", "local": "approx", "curvature": "approx"}
    parameters: dict[str, Any] = {
        "objective": LOSSES[case.loss][0],
        "tree_method": methods.get(case.candidates.partition(" ")[0], "hist"),
        "learning_rate": 0.1, "max_depth": case.max_depth, "max_bin": 256,
        "reg_lambda": 1.0, "min_child_weight": float(least_rows(case)),
        "nthread": threads, "verbosity": 0, **choice,
    }  # fmt: skip
    if case.loss == "quantile":
        parameters["quantile_alpha"] = TAU
    if case.loss == "huber":
        parameters["huber_slope"] = 1.0
    if case.loss in RANKING:  # all pairs of a query, as in jboost
        parameters["lambdarank_num_pair_per_sample"] = NUM_QUERY_ROWS
    if case.num_classes:
        parameters["num_class"] = case.num_classes
    if case.loss == "own":
        del parameters["objective"]
    return parameters


def prepare_xgboost(
    case: Case, x, y, kept: dict, threads: int, **choice: Any
) -> Contender:
    """Custom losses are objectives in Python that return two arrays."""
    import xgboost

    parameters = list_xgboost(case, threads, **choice)
    label: Any = y
    if case.loss == "cox":  # times of censored rows are negative
        label = np.where(y["event"] > 0, y["time"], -y["time"])
    if case.loss == "hinge":
        label = np.float32(y > 0)
    ones = np.ones(x.shape[0], np.float32)
    queries = count_queries(case, x.shape[0])

    def objective(score, _):
        return score - label, ones

    def build():
        made = dict(nthread=parameters["nthread"], enable_categorical=case.categorical)
        if case.candidates:  # these methods read the values
            return xgboost.DMatrix(x, label, **made)
        return xgboost.QuantileDMatrix(x, label, max_bin=256, **made)

    def fit(num_rounds, data=None):
        data = build() if data is None else data
        data.set_label(label)  # cases of one table share it
        if queries is not None:
            data.set_group(queries)
        chosen = objective if case.loss == "own" else None
        return xgboost.train(parameters, data, num_rounds, obj=chosen)

    def train(num_rounds):
        key = ("xgboost", bool(case.candidates), queries is None)
        return fit(num_rounds, keep(kept, key, build))

    def predict(model, rows):
        return model.inplace_predict(rows, predict_type="margin")

    def explain(model, rows):
        found = model.predict(
            xgboost.DMatrix(rows, nthread=threads), pred_contribs=True
        )
        return found[..., :-1], found[..., -1]

    def validate(num_rounds):
        data = xgboost.DMatrix(x, label)
        return xgboost.cv(parameters, data, num_rounds, folds=list_pairs(len(label)))

    return Contender(parameters, train, fit, predict, validate, explain)


def list_lightgbm(case: Case, threads: int, **choice: Any) -> dict[str, Any]:
    """Returns LightGBM's parameters; missing values have a bin beside the 255."""
    parameters: dict[str, Any] = {
        "objective": LOSSES[case.loss][1], "learning_rate": 0.1,
        "max_depth": case.max_depth, "num_leaves": 2**case.max_depth,
        "max_bin": 255, "min_data_in_bin": 1, "lambda_l2": 1.0,
        "min_sum_hessian_in_leaf": 1.0, "min_data_in_leaf": least_rows(case),
        "feature_pre_filter": False, "num_threads": threads, "verbosity": -1,
        **choice,
    }  # fmt: skip
    if case.loss == "quantile":
        parameters["alpha"] = TAU
    if case.loss == "huber":
        parameters["alpha"] = 1.0
    if case.num_classes:
        parameters["num_class"] = case.num_classes
    return parameters


def prepare_lightgbm(
    case: Case, x, y, kept: dict, threads: int, **choice: Any
) -> Contender:
    """Custom losses are objectives in Python that return two arrays."""
    import lightgbm

    parameters = list_lightgbm(case, threads, **choice)
    queries = count_queries(case, x.shape[0])
    if case.loss == "own":
        ones = np.ones(len(y), np.float32)
        parameters["objective"] = lambda score, _: (np.float32(score - y), ones)

    def build():
        chosen = {name: v for name, v in parameters.items() if not callable(v)}
        return lightgbm.Dataset(x, y, group=queries, params=chosen).construct()

    def fit(num_rounds, data=None):
        data = build() if data is None else data
        data.set_label(y)  # cases of one table share it
        return lightgbm.train(parameters, data, num_rounds)

    def train(num_rounds):
        return fit(num_rounds, keep(kept, ("lightgbm", queries is None), build))

    threads = parameters["num_threads"]

    def predict(model, rows):
        return model.predict(rows, raw_score=True, num_threads=threads)

    def explain(model, rows):
        found = model.predict(rows, pred_contrib=True, num_threads=threads)
        return found[..., :-1], found[..., -1]

    def validate(num_rounds):
        data = lightgbm.Dataset(x, y)
        return lightgbm.cv(parameters, data, num_rounds, folds=list_pairs(len(y)))

    return Contender(parameters, train, fit, predict, validate, explain)


CONTENDERS: dict[str, Callable[..., Contender]] = {
    "jboost": prepare_jboost,
    "jboost-shared": partial(prepare_jboost, share_structure=True),
    "jboost-avx2": prepare_jboost,  # JBOOST_ISA is set
    "jboost-cached": prepare_jboost,  # the compilation cache is on
    "jboost-levels": prepare_levels,
    "jboost-built-in": prepare_jboost,  # trains the built-in loss in place of "own"
    "xgboost": prepare_xgboost,
    "xgboost-multi": partial(prepare_xgboost, multi_strategy="multi_output_tree"),
    "xgboost-1": partial(prepare_xgboost, nthread=1),
    "lightgbm": prepare_lightgbm,
    "lightgbm-1": partial(prepare_lightgbm, num_threads=1),
    "lightgbm-q": partial(prepare_lightgbm, use_quantized_grad=True),
}


def prepare(source: str, case: Case, threads: int, most: int | None = None):
    """Returns the contender, on all training rows or the first ``most``."""
    if source == "jboost-built-in":
        case = case._replace(loss="squared_error")
    table = make_table(case)
    rows = slice(min(most or case.num_rows, case.num_rows))
    kept = {} if most else table.kept
    y = take_targets(make_targets(case, table.signal), rows)
    x = take_rows(table.x, rows)
    return CONTENDERS[source](case, x, y, kept, threads)


# ---- single trees, many models ------------------------------------------------------


def prepare_single_tree(source: str, case: Case) -> Callable[[], Any]:
    """Returns what grows one tree without a limit."""
    table = make_table(case)
    x, y = table.x[: case.num_rows], table.signal[: case.num_rows]
    if source == "sklearn":
        from sklearn.tree import DecisionTreeRegressor

        return lambda: DecisionTreeRegressor().fit(x, y)
    import jboost as jb

    return lambda: jb.cart.fit_tree(x, y)


def prepare_many(source: str, case: Case, threads: int) -> Callable[[], Any]:
    """Returns what trains a model on each of many small tables, from arrays."""
    size = case.num_rows * case.num_models
    table = make_table(case._replace(num_rows=size))
    x = table.x[:size].reshape(case.num_models, case.num_rows, -1)
    y = table.signal[:size].reshape(case.num_models, case.num_rows)
    if source == "jboost-vmap":
        return partial(train_side_by_side, case, x, y)
    contenders = [
        CONTENDERS[source](case, *pair, {}, threads) for pair in zip(x, y, strict=True)
    ]
    return lambda: [contender.fit(case.rounds) for contender in contenders]


def train_side_by_side(case: Case, x: np.ndarray, y: np.ndarray) -> Any:
    """Trains models by ``jax.vmap`` over ``jb.boost``; the bins of each are its own."""
    import jax

    import jboost as jb

    bins = [jb.fit_bins(rows) for rows in x]
    pairs = zip(bins, x, strict=True)
    binned = np.stack([np.asarray(jb.apply_bins(*pair)) for pair in pairs])
    trees, _ = jax.device_get(_boost_all(case)(binned, y))
    return [
        jb.to_ensemble(jax.tree.map(itemgetter(number), trees), found)
        for number, found in enumerate(bins)
    ]


@lru_cache(maxsize=1)
def _boost_all(case: Case) -> Callable:
    """Returns the program that trains all models."""
    import jax

    import jboost as jb

    settings: dict[str, Any] = list_jboost(case) | {"num_rounds": case.rounds}

    def train(binned, y):
        return jb.boost(binned, y, find_loss(case), jax.random.key(0), **settings)

    return jax.jit(jax.vmap(train))
