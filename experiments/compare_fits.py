# SPDX-License-Identifier: Apache-2.0
"""The libraries of compare_libraries.py: one fit, two curves of losses.

In: training, validation and test rows, and what is given to all libraries (rounds,
learning rate, depth). Out: the mean loss of the validation and of the test rows after
the rounds in STAGES, in float64 and by the same code for all libraries.
"""

import hashlib
import importlib
import importlib.metadata
import inspect
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from compare_tables import Rows

LIBRARIES = (
    "jboost", "xgboost", "lightgbm", "sklearn", "catboost", "perpetual", "ydf",
)  # fmt: skip
# These choose their own rounds.
BARE_ONLY = {
    "perpetual": {"squared_error": "SquaredLoss", "logistic": "LogLoss"},
    "ydf": {"squared_error": "REGRESSION", "logistic": "CLASSIFICATION"},
}
CODES = "jboost-codes"  # jboost that reads categories as numbers
STAGES = (*range(1, 100), *range(100, 2001, 5))  # losses are measured here
POWER = 1.5  # of Tweedie's variance; the default of XGBoost and LightGBM
OBJECTIVES = {
    "squared_error": ("reg:squarederror", "regression", "squared_error", "RMSE"),
    "logistic": ("binary:logistic", "binary", "log_loss", "Logloss"),
    "softmax": ("multi:softprob", "multiclass", "log_loss", "MultiClass"),
    "poisson": ("count:poisson", "poisson", "poisson", "Poisson"),
    "gamma": ("reg:gamma", "gamma", "gamma", None),
    "tweedie": ("reg:tweedie", "tweedie", None, f"Tweedie:variance_power={POWER}"),
    "absolute_error": ("reg:absoluteerror", "l1", "absolute_error", "MAE"),
    "quantile": ("reg:quantileerror", "quantile", "quantile", "Quantile:alpha="),
    "huber": ("reg:pseudohubererror", "huber", None, "Huber:delta=1"),
}
BARE = 2000  # rounds at most where each library has its own rate and depth


class Settings(NamedTuple):
    """What all libraries are given.

    With ``bare`` they are given nothing but the rows. Peers make ``BARE`` rounds, and
    the best one on the validation rows counts, as with early stopping; jboost gets
    training and validation rows in one table.
    """

    rounds: int = 300
    rate: float = 0.1
    depth: int = 6
    bare: bool = False
    equal: bool = False  # the other parameters are equal too, not the defaults
    threads: int = 2  # of the peers
    own: dict[str, Any] = {}  # noqa: RUF012  # more arguments of jb.fit


def list_stages(rounds: int) -> list[int]:
    """Returns the stages of so many rounds."""
    return [number for number in STAGES if number <= rounds]


# ---- losses -------------------------------------------------------------------------


def held_out_loss(kind: str, score: np.ndarray, target: np.ndarray) -> float:
    """Returns the mean loss in float64; scores are raw (logits, log means).

    Those of poisson, gamma and tweedie are half the deviance.
    """
    score = np.asarray(score, np.float64)
    if kind == "softmax":
        chosen = np.take_along_axis(score, target[:, None], axis=1)[:, 0]
        return float(np.mean(np.logaddexp.reduce(score, axis=1) - chosen))
    y = target.astype(np.float64)
    residual = y - score
    match kind.split():
        case ["squared_error"]:
            loss = residual**2
        case ["absolute_error"]:
            loss = np.abs(residual)
        case ["quantile", tau]:
            loss = np.maximum(float(tau) * residual, (float(tau) - 1) * residual)
        case ["huber"]:
            near = np.minimum(np.abs(residual), 1.0)
            loss = near * (np.abs(residual) - near / 2)
        case ["logistic"]:
            loss = np.logaddexp(0, score) - y * score
        case ["poisson"]:  # y log y is 0 at 0
            loss = y * (np.log(np.maximum(y, 1)) - score) - y + np.exp(score)
        case ["gamma"]:
            loss = y * np.exp(-score) - 1 + score - np.log(y)
        case ["tweedie"]:
            a, b = 1 - POWER, 2 - POWER
            loss = y**b / (a * b) - y * np.exp(a * score) / a + np.exp(b * score) / b
        case _:
            raise ValueError(f"no loss for {kind=}")
    return float(np.mean(loss))


def start_score(kind: str, train: Rows, rows: Rows) -> np.ndarray:
    """Returns the best constant for `train`, plus the rows' offset: [N] or [N, K]."""
    y = train.target
    match kind.split():
        case ["squared_error"]:
            constant = np.mean(y, dtype=np.float64)
        case ["absolute_error"] | ["huber"]:  # Huber's own best is not far
            constant = np.median(y)
        case ["quantile", tau]:
            constant = np.quantile(y, float(tau))
        case ["logistic"]:
            constant = np.log(np.mean(y) / np.mean(1 - y))
        case ["softmax"]:
            counts = np.maximum(np.bincount(y), 0.5)  # a class may have no row
            return np.tile(np.log(counts / len(y)), (len(rows.x), 1))
        case _:  # the mean is the exponential of the score
            constant = np.log(np.mean(y) / np.mean(np.exp(train.offset)))
    return rows.offset + constant


# ---- parameters ---------------------------------------------------------------------


def list_parameters(
    library: str, kind: str, settings: Settings
) -> dict[str, Any] | None:
    """Returns the parameters as a library names them; None if it lacks the loss."""
    name, *tau = kind.split()
    tau = float(tau[0]) if tau else None
    if library in BARE_ONLY:
        known = settings.bare and name in BARE_ONLY[library]
        return {"objective": BARE_ONLY[library][name]} if known else None
    peers = dict(zip(LIBRARIES[1:5], OBJECTIVES[name], strict=True))
    if library in peers and peers[library] is None:
        return None
    match library:
        case "xgboost":
            named = {"objective": peers[library], "quantile_alpha": tau}
            named |= {"tree_method": "hist"}
        case "lightgbm":
            alpha = 1.0 if name == "huber" else tau
            named = {"objective": peers[library], "alpha": alpha, "verbosity": -1}
            named |= {"deterministic": True, "force_row_wise": True}
        case "sklearn":
            named = {"loss": peers[library], "quantile": tau, "early_stopping": False}
        case "catboost":
            level = tau if name == "quantile" else ""
            named = {"loss_function": f"{peers[library]}{level}"}
        case _:
            named = {}
    if not settings.bare:
        named |= {"learning_rate": settings.rate, "max_depth": settings.depth}
    if settings.equal:
        named |= list_equal(library, name, settings.depth)
    if library not in peers:
        named |= settings.own
    return {key: value for key, value in named.items() if value is not None}


def list_equal(library: str, name: str, depth: int) -> dict[str, Any]:
    """Returns equal limits: 256 bins, l2 of 1, weight of 1, 20 rows for medians."""
    median = name in ("absolute_error", "quantile")
    rows = 20 if median else 1
    # XGBoost counts no rows, but the curvature of its median losses is 1.
    weight = float(rows) if library == "xgboost" else 1.0
    return {
        "jboost": dict(
            max_bins=256, l2=1.0, min_child_weight=weight, min_child_samples=rows,
            subsample=1.0, rows_per_threshold=0,
        ),
        "xgboost": dict(max_bin=256, reg_lambda=1.0, min_child_weight=weight),
        "lightgbm": dict(
            max_bin=255, lambda_l2=1.0, min_sum_hessian_in_leaf=weight,
            min_data_in_leaf=rows, num_leaves=2**depth, min_data_in_bin=1,
            feature_pre_filter=False,
        ),
        "sklearn": dict(
            max_bins=255, l2_regularization=1.0, min_samples_leaf=rows,
            max_leaf_nodes=2**depth,
        ),
        "catboost": dict(border_count=254, l2_leaf_reg=1.0, min_data_in_leaf=rows),
    }[library.removesuffix("-codes")]  # fmt: skip


# ---- the libraries ------------------------------------------------------------------

# Scores of some rows after each of the stages.
Staged = Callable[[Rows], Iterator[np.ndarray]]


def fit_jboost(
    kind: str, parameters: dict, train: Rows, settings: Settings
) -> tuple[Staged, float]:
    """Returns a function to scores after each stage, and the seconds of fitting."""
    import jax

    import jboost as jb

    name, *tau = kind.split()
    loss = getattr(jb.losses, name)
    bound = {"huber": {"delta": 1.0}, "tweedie": {"power": POWER}}.get(name, {})
    bound |= {"tau": float(tau[0])} if tau else {}
    if bound:
        loss = partial(loss, **bound)
    given = train.offset.any()
    if kind == "softmax":
        parameters["num_scores"] = int(train.target.max()) + 1
    rounds = {} if settings.bare else {"num_rounds": settings.rounds}
    begin = time.perf_counter()
    model, _ = jb.fit(
        train.x, train.target, loss, **rounds,
        offset=train.offset if given else None,
        categorical=train.categorical or None, **parameters,
    )  # fmt: skip
    jax.block_until_ready(model)
    seconds = time.perf_counter() - begin

    def stage(rows: Rows):
        offset = rows.offset if given else None
        if settings.bare:
            yield np.asarray(jb.predict(model, rows.x, offset=offset))
            return
        scores = jb.staged_predict(model, rows.x, offset=offset)
        yield from (np.asarray(scores[s - 1]) for s in list_stages(settings.rounds))

    return stage, seconds


def fit_xgboost(
    kind: str, parameters: dict, train: Rows, settings: Settings
) -> tuple[Staged, float]:
    """Does the same with XGBoost; building its matrix is part of the time."""
    import xgboost

    if kind == "softmax":
        parameters["num_class"] = int(train.target.max()) + 1
    parameters["nthread"] = settings.threads
    types = ["q"] * train.x.shape[1]
    for position in train.categorical:
        types[position] = "c"

    def make_matrix(rows):
        given = kind == "huber" or train.offset.any()
        return xgboost.DMatrix(
            rows.x, rows.target, feature_types=types, enable_categorical=True,
            base_margin=start_score(kind, train, rows) if given else None,
        )  # fmt: skip

    begin = time.perf_counter()
    model = xgboost.train(parameters, make_matrix(train), settings.rounds)
    seconds = time.perf_counter() - begin

    def stage(rows):
        data = make_matrix(rows)

        def score(first, end):
            some = model.predict(data, output_margin=True, iteration_range=(first, end))
            return some.astype(np.float64)

        stages = list_stages(settings.rounds)
        total = score(0, 1)
        yield total
        # Each range adds the initial score, which no call returns by itself.
        start = total + score(1, 2) - score(0, 2) if len(stages) > 1 else 0.0
        for first, end in pairwise(stages):
            total = total + score(first, end) - start
            yield total

    return stage, seconds


def fit_lightgbm(
    kind: str, parameters: dict, train: Rows, settings: Settings
) -> tuple[Staged, float]:
    """Does the same with LightGBM, which may end early where no split is left."""
    import lightgbm

    if kind == "softmax":
        parameters["num_class"] = int(train.target.max()) + 1
    parameters["num_threads"] = settings.threads
    given = train.offset.any()
    begin = time.perf_counter()
    data = lightgbm.Dataset(
        train.x, train.target, categorical_feature=list(train.categorical),
        init_score=start_score(kind, train, train) if given else None,
    )  # fmt: skip
    model = lightgbm.train(parameters, data, settings.rounds)
    seconds = time.perf_counter() - begin

    def stage(rows):
        total = start_score(kind, train, rows) if given else 0.0
        for first, end in pairwise([0, *list_stages(settings.rounds)]):
            if first < model.current_iteration():
                part = {"start_iteration": first, "num_iteration": end - first}
                total = total + model.predict(rows.x, raw_score=True, **part)
            yield np.asarray(total)

    return stage, seconds


def fit_sklearn(
    kind: str, parameters: dict, train: Rows, settings: Settings
) -> tuple[Staged, float]:
    """Does the same with scikit-learn's HistGradientBoosting.

    It fits rates weighted by exposure, which is the loss with an offset. Columns of
    more than 255 categories, which it does not take, remain numbers.
    """
    from sklearn import ensemble
    from threadpoolctl import threadpool_limits

    classes = kind in ("logistic", "softmax")
    name = "HistGradientBoosting" + ("Classifier" if classes else "Regressor")
    few = [c for c in train.categorical if np.nanmax(train.x[:, c]) < 255]
    estimator = getattr(ensemble, name)(
        max_iter=settings.rounds, categorical_features=few or None, **parameters
    )
    exposure = np.exp(train.offset)
    weight = exposure if train.offset.any() else None
    with threadpool_limits(settings.threads):
        begin = time.perf_counter()
        estimator.fit(train.x, train.target / exposure, sample_weight=weight)
        seconds = time.perf_counter() - begin

    def stage(rows):
        run = (
            estimator.staged_decision_function if classes else estimator.staged_predict
        )
        for done, score in enumerate(run(rows.x), 1):
            if done in STAGES:
                score = score if kind == "softmax" else np.ravel(score)
                log = kind in ("poisson", "gamma")
                yield np.log(score) + rows.offset if log else score

    return stage, seconds


def fit_catboost(
    kind: str, parameters: dict, train: Rows, settings: Settings
) -> tuple[Staged, float]:
    """Does the same with CatBoost; categories become strings, as it takes them."""
    import catboost
    import pandas as pd

    given = train.offset.any()

    def make_pool(rows):
        frame = pd.DataFrame(rows.x)
        for position in rows.categorical:
            frame[position] = rows.x[:, position].astype(str)
        start = start_score(kind, train, rows) if given else None
        return catboost.Pool(
            frame, rows.target, cat_features=list(rows.categorical), baseline=start
        )

    begin = time.perf_counter()
    model = catboost.CatBoost(
        dict(
            iterations=settings.rounds, thread_count=settings.threads, verbose=False,
            allow_writing_files=False, **parameters,
        )
    )  # fmt: skip
    model.fit(make_pool(train))
    seconds = time.perf_counter() - begin

    def stage(rows):
        pool, total = make_pool(rows), 0.0
        for first, end in pairwise([0, *list_stages(settings.rounds)]):
            part = {"ntree_start": first, "ntree_end": end}
            # Each range adds the baseline, but only the first the initial score.
            score = model.predict(pool, prediction_type="RawFormulaVal", **part)
            total = total + score
            if given and first > 0:
                total = total - start_score(kind, train, rows)
            yield total

    return stage, seconds


def fit_perpetual(
    kind: str, parameters: dict, train: Rows, settings: Settings
) -> tuple[Staged, float]:
    """Fits Perpetual, which decides by itself when to end."""
    import perpetual

    begin = time.perf_counter()
    model = perpetual.PerpetualBooster(num_threads=settings.threads, **parameters)
    model.fit(train.x, train.target.astype(np.float64))
    seconds = time.perf_counter() - begin

    def stage(rows):
        if kind == "logistic":
            score = find_logit(np.asarray(model.predict_proba(rows.x))[:, -1])
        else:
            score = np.asarray(model.predict(rows.x))
        yield from [score] * len(list_stages(settings.rounds))

    return stage, seconds


def fit_ydf(
    kind: str, parameters: dict, train: Rows, settings: Settings
) -> tuple[Staged, float]:
    """Fits YDF, which holds out rows of its own to end early."""
    import ydf

    def make_columns(rows):
        columns = {f"column {j}": column for j, column in enumerate(rows.x.T)}
        for position in rows.categorical:
            columns[f"column {position}"] = rows.x[:, position].astype(str)
        kinds = np.int64 if kind == "logistic" else np.float32
        return columns | {"y": rows.target.astype(kinds)}

    ydf.verbose(0)
    begin = time.perf_counter()
    learner = ydf.GradientBoostedTreesLearner(
        label="y", task=getattr(ydf.Task, parameters["objective"]),
        num_threads=settings.threads,
    )  # fmt: skip
    model = learner.train(make_columns(train))
    seconds = time.perf_counter() - begin

    def stage(rows):
        found = np.asarray(model.predict(make_columns(rows)), np.float64)
        score = find_logit(found) if kind == "logistic" else found
        yield from [score] * len(list_stages(settings.rounds))

    return stage, seconds


def find_logit(chance: np.ndarray) -> np.ndarray:
    """Returns scores from probabilities, which are kept from 0 and 1."""
    chance = np.clip(np.asarray(chance, np.float64), 1e-7, 1 - 1e-7)
    return np.log(chance / (1 - chance))


FITS = {
    "catboost": fit_catboost,
    "perpetual": fit_perpetual,
    "ydf": fit_ydf,
    "jboost": fit_jboost,
    CODES: fit_jboost,
    "xgboost": fit_xgboost,
    "lightgbm": fit_lightgbm,
    "sklearn": fit_sklearn,
}


def measure(
    library: str, kind: str, parts: tuple[Rows, Rows, Rows], settings: Settings
) -> dict[str, Any]:
    """Fits once.

    Returns:
      rounds, seconds, "validation" and "test" (the losses after each of the stages),
      and "constant", the test loss of a model without features.

    Raises:
      FloatingPointError: a loss is not finite.
    """
    if library == CODES:
        parts = tuple(rows._replace(categorical=()) for rows in parts)
    train, validation, test = parts
    if settings.bare and library.startswith(("jboost", *BARE_ONLY)):
        train = train.join(validation)
    parameters = list_parameters(library, kind, settings)
    stage, seconds = FITS[library](kind, parameters, train, settings)
    result = {"rounds": settings.rounds, "seconds": round(seconds, 4)}
    for name, rows in {"validation": validation, "test": test}.items():
        losses = [held_out_loss(kind, score, rows.target) for score in stage(rows)]
        if not np.isfinite(losses).all():
            round_ = STAGES[np.argmin(np.isfinite(losses))]
            raise FloatingPointError(f"the {name} loss of round {round_} is not finite")
        result[name] = [float(f"{loss:.8g}") for loss in losses]
    start = start_score(kind, train, test)
    return {"constant": held_out_loss(kind, start, test.target), **result}


@lru_cache
def find_version(library: str) -> str:
    """Returns the version of a library; for jboost, a digest of its files."""
    module = importlib.import_module(library.removesuffix("-codes"))
    if not library.startswith("jboost"):
        found = getattr(module, "__version__", None)
        return found or importlib.metadata.version(library)
    digest = hashlib.sha256()
    for path in sorted(Path(inspect.getfile(module)).parent.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
