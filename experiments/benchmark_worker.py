# SPDX-License-Identifier: Apache-2.0
"""The libraries that ``benchmark.py`` measures: a process holds one of them.

    python experiments/benchmark_worker.py serve LIBRARY THREADS

answers requests, one JSON per line, until its input ends: readings of one library
on generated data, after a call that is not timed.

    python experiments/benchmark_worker.py cold LIBRARY THREADS CASE
    python experiments/benchmark_worker.py cold-cv LIBRARY THREADS CASE
    python experiments/benchmark_worker.py memory LIBRARY THREADS CASE
    python experiments/benchmark_worker.py compile LIBRARY THREADS CASE

do one thing and end: import, fit and predict; import and cross-validate; the same as
cold, printing the peak memory after fit and after predict; two fits, printing their
seconds.

Equal parameters are: depth 6 and 64 leaves or depth 10 and 1,024; 255 bins for values
that are not missing; learning rate 0.1; XGBoost's lambda of 1 and minimum Hessian of a
leaf of 1 (jboost counts both in average rows; the equivalent numbers follow from the
Hessian of the loss at the start); at least 20 rows per leaf for absolute error and
quantiles, else 1; the same rounds and threads. scikit-learn has no limit on the Hessian
and no custom losses. XGBoost has no minimum number of rows, but the Hessian of the two
losses that need 20 is 1 per row. Settings that only one library has (how LightGBM
chooses its layout, the bits of its quantized gradients) are its defaults.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmark_timing import Reading, take, worst

LIBRARIES = ("jboost", "xgboost", "lightgbm", "lightgbm-q", "sklearn")
VARIANTS = ("jboost-avx2", "jboost-xla", "jboost-loop")  # for single measures
TAU = 0.9
LOSSES = {  # our name: those of XGBoost, LightGBM and scikit-learn
    "squared_error": ("reg:squarederror", "regression", "squared_error"),
    "absolute_error": ("reg:absoluteerror", "regression_l1", "absolute_error"),
    "quantile": ("reg:quantileerror", "quantile", "quantile"),
    "logistic": ("binary:logistic", "binary", "log_loss"),
    "softmax": ("multi:softprob", "multiclass", "log_loss"),
    "own": (None, None, None),
}
NUM_CLASSES = 10
HELD_OUT = 20_000  # rows beside the training rows
FOLDS = 5
RATES = tuple(np.geomspace(0.02, 0.5, 8).tolist())  # of the measure "sweep"
PREDICTED = 100_000  # models for the measure "predict" see that many rows


class UnsupportedError(Exception):
    """A library cannot do this."""


class Case(NamedTuple):
    """A size of data, a loss, a depth, and numbers of rounds."""

    num_rows: int
    num_features: int
    loss: str = "squared_error"
    max_depth: int = 6
    low: int = 5  # the two numbers of rounds of the slope
    high: int = 20
    rounds: int = 0  # of the measure "fit"

    @property
    def num_trees(self) -> int:
        """The trees of a round."""
        return NUM_CLASSES if self.loss == "softmax" else 1


# ---- data ---------------------------------------------------------------------------


class Table(NamedTuple):
    """Generated rows, training ones first, and what libraries made of them."""

    x: np.ndarray  # [N + HELD_OUT, F] float32
    signal: np.ndarray  # [N + HELD_OUT] float32
    kept: dict[str, Any]


@lru_cache(maxsize=1)
def make_table(num_rows: int, num_features: int) -> Table:
    """Returns sums of sines and products of normal features, plus noise."""
    generator = np.random.default_rng(0)
    size = (num_rows + HELD_OUT, num_features)
    x = generator.standard_normal(size, np.float32)
    y = generator.standard_normal(len(x), np.float32)
    y += x[:, 4] * x[:, 5] + x[:, 6] * x[:, 7]
    for j in range(4):
        y += np.sin((1 + j) * x[:, j])
    return Table(x, y, {})


def make_targets(case: Case, signal: np.ndarray) -> np.ndarray:
    """Returns numbers, 0 and 1, or classes (deciles of the training rows)."""
    if case.loss == "logistic":
        return np.float32(signal > 0)
    if case.loss == "softmax":
        shares = np.arange(1, NUM_CLASSES) / NUM_CLASSES
        cuts = np.quantile(signal[: case.num_rows], shares)
        return np.searchsorted(cuts, signal).astype(np.int32)
    return signal


# ---- the libraries ------------------------------------------------------------------


class Contender(NamedTuple):
    """A library bound to a case and training rows."""

    parameters: dict[str, Any]
    bin: Callable[[], Any] | None  # what training starts from; None: not separate
    train: Callable[[int], Any]  # rounds -> model, from what `bin` made beforehand
    fit: Callable[[int], Any]  # the same from arrays
    predict: Callable[[Any, np.ndarray], Any]  # model, rows -> raw scores
    validate: Callable[[int, float], Any]  # rounds, learning rate -> losses of folds
    explain: Callable[[Any, np.ndarray], Any] | None = None  # -> SHAP values and base
    sweep: Callable[[int], Any] | None = None  # rounds; None: one rate after another


def draw_folds(y) -> np.ndarray:
    """Returns the fold of each row, the same for every library."""
    return np.random.default_rng(1).permutation(len(y)) % FOLDS


def list_pairs(y) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the rows outside each fold, and those in it."""
    folds = draw_folds(y)
    return [(np.flatnonzero(folds != k), np.flatnonzero(folds == k)) for k in range(5)]


def least_rows(case: Case) -> int:
    """Returns the minimum rows of a leaf: medians need more than one."""
    return 20 if case.loss in ("absolute_error", "quantile") else 1


def own_squared_error(score, target):
    """A custom loss, as a user of jboost writes it."""
    residual = score - target
    return residual * residual


def prepare_jboost(
    case: Case, x, y, kept: dict, threads: int, *, loops: bool = False, **choice
) -> Contender:
    """JAX uses the cores that the process may run on. ``choice`` goes to all calls.

    With ``loops`` cross-validation fits fold by fold.

    Without a switch fit bins by itself: ``train`` does, too, and the slope loses it.
    """
    import jax

    import jboost as jb

    # XGBoost's lambda of 1, in rows of average Hessian: 2 for r^2 (where XGBoost's is
    # 1), 1/4 for log-loss; for K classes, the sum over K of 2 p (1 - p).
    spread = 2 * (1 - 1 / NUM_CLASSES)
    unit = {"logistic": 4.0, "softmax": 1 / spread}.get(case.loss, 1.0)
    parameters = {"learning_rate": 0.1, "max_depth": case.max_depth, "max_bins": 256}
    parameters |= {"l2": unit, "min_child_weight": unit}
    parameters |= {"min_child_samples": least_rows(case), **choice}
    if case.loss == "softmax":
        parameters["num_scores"] = NUM_CLASSES
    loss = own_squared_error
    if case.loss != "own":
        loss = getattr(jb.losses, case.loss)
    if case.loss == "quantile":
        loss = partial(loss, tau=TAU)

    def bin_rows():
        bins = jb.fit_bins(x)
        return jax.block_until_ready(jb.apply_bins(bins, x))

    def fit(num_rounds):
        model, _ = jb.fit(x, y, loss, num_rounds=num_rounds, **parameters)
        return jax.block_until_ready(model)

    def predict(model, rows):
        return jax.block_until_ready(jb.predict(model, rows, **choice))

    def explain(model, rows):
        values, base = jax.block_until_ready(jb.shap_values(model, rows, **choice))
        return np.asarray(values), np.asarray(base)

    def validate(num_rounds, rate):
        chosen = parameters | {"learning_rate": rate, "num_rounds": num_rounds}
        if not loops:
            return jb.cross_validate(x, y, loss, folds=draw_folds(y), **chosen)
        for train, test in list_pairs(y):
            held_out = (x[test], y[test])
            jb.fit(x[train], y[train], loss, validation=held_out, **chosen)

    def sweep(num_rounds):
        points = {"learning_rate": RATES}
        chosen = parameters | {"num_rounds": num_rounds}
        return jb.sweep(x, y, loss, points, folds=draw_folds(y), **chosen)

    return Contender(
        parameters,
        bin_rows,
        fit,
        fit,
        predict,
        validate,
        explain,
        None if loops else sweep,
    )


def prepare_xgboost(case: Case, x, y, kept: dict, threads: int) -> Contender:
    """Custom losses are objectives in Python that return two arrays."""
    import xgboost

    parameters = {
        "objective": LOSSES[case.loss][0],
        "tree_method": "hist",
        "learning_rate": 0.1,
        "max_depth": case.max_depth,
        "max_bin": 256,
        "reg_lambda": 1.0,
        "min_child_weight": float(least_rows(case)),
        "nthread": threads,
    }
    if case.loss == "quantile":
        parameters["quantile_alpha"] = TAU
    if case.loss == "softmax":
        parameters["num_class"] = NUM_CLASSES
    own = case.loss == "own"
    if own:
        del parameters["objective"]
    ones = np.ones(len(y), np.float32)

    def objective(score, _):
        return score - y, ones

    def build():
        return xgboost.QuantileDMatrix(x, y, max_bin=256, nthread=threads)

    def fit(num_rounds, data=None):
        data = build() if data is None else data
        data.set_label(y)  # cases of one table share it
        chosen = objective if own else None
        return xgboost.train(parameters, data, num_rounds, obj=chosen)

    def train(num_rounds):
        if "xgboost" not in kept:
            kept["xgboost"] = build()
        return fit(num_rounds, kept["xgboost"])

    def predict(model, rows):
        return model.inplace_predict(rows, predict_type="margin")

    def explain(model, rows):
        found = model.predict(
            xgboost.DMatrix(rows, nthread=threads), pred_contribs=True
        )
        return found[..., :-1], found[..., -1]

    def validate(num_rounds, rate):
        data, chosen = xgboost.DMatrix(x, y), parameters | {"learning_rate": rate}
        return xgboost.cv(chosen, data, num_rounds, folds=list_pairs(y))

    return Contender(parameters, build, train, fit, predict, validate, explain)


def prepare_lightgbm(
    case: Case, x, y, kept: dict, threads: int, **quantized
) -> Contender:
    """LightGBM counts the bin of missing values separately: 255 others."""
    import lightgbm

    parameters = {
        "objective": LOSSES[case.loss][1],
        "learning_rate": 0.1,
        "max_depth": case.max_depth,
        "num_leaves": 2**case.max_depth,
        "max_bin": 255,
        "min_data_in_bin": 1,
        "lambda_l2": 1.0,
        "min_sum_hessian_in_leaf": 1.0,
        "min_data_in_leaf": least_rows(case),
        "feature_pre_filter": False,
        "num_threads": threads,
        "verbosity": -1,
        **quantized,
    }
    if case.loss == "quantile":
        parameters["alpha"] = TAU
    if case.loss == "softmax":
        parameters["num_class"] = NUM_CLASSES
    if case.loss == "own":
        ones = np.ones(len(y), np.float32)
        parameters["objective"] = lambda score, _: (np.float32(score - y), ones)

    def build():
        return lightgbm.Dataset(x, y, params=parameters).construct()

    def fit(num_rounds, data=None):
        data = build() if data is None else data
        data.set_label(y)  # cases of one table share it
        return lightgbm.train(parameters, data, num_rounds)

    def train(num_rounds):
        if "lightgbm" not in kept:
            kept["lightgbm"] = build()
        return fit(num_rounds, kept["lightgbm"])

    def predict(model, rows):
        return model.predict(rows, raw_score=True, num_threads=threads)

    def explain(model, rows):
        found = model.predict(rows, pred_contrib=True, num_threads=threads)
        return found[..., :-1], found[..., -1]

    def validate(num_rounds, rate):
        data, chosen = lightgbm.Dataset(x, y), parameters | {"learning_rate": rate}
        return lightgbm.cv(chosen, data, num_rounds, folds=list_pairs(y))

    return Contender(parameters, build, train, fit, predict, validate, explain)


def prepare_sklearn(case: Case, x, y, kept: dict, threads: int) -> Contender:
    """Each fit computes the bins, as in jboost."""
    from sklearn import ensemble, model_selection
    from threadpoolctl import threadpool_limits

    if case.loss == "own":
        raise UnsupportedError("no custom losses")
    classes = case.loss in ("logistic", "softmax")
    name = "HistGradientBoosting" + ("Classifier" if classes else "Regressor")
    parameters = {
        "loss": LOSSES[case.loss][2],
        "learning_rate": 0.1,
        "max_depth": case.max_depth,
        "max_leaf_nodes": 2**case.max_depth,
        "max_bins": 255,
        "l2_regularization": 1.0,
        "min_samples_leaf": least_rows(case),
        "early_stopping": False,
    }
    if case.loss == "quantile":
        parameters["quantile"] = TAU

    def fit(num_rounds):
        model = getattr(ensemble, name)(max_iter=num_rounds, **parameters)
        with threadpool_limits(threads):
            return model.fit(x, y)

    def predict(model, rows):
        with threadpool_limits(threads):
            return (model.decision_function if classes else model.predict)(rows)

    def validate(num_rounds, rate):
        chosen = parameters | {"learning_rate": rate, "max_iter": num_rounds}
        model = getattr(ensemble, name)(**chosen)
        with threadpool_limits(threads):
            return model_selection.cross_validate(model, x, y, cv=list_pairs(y))

    return Contender(parameters, None, fit, fit, predict, validate)


PREPARE = {
    "jboost": prepare_jboost,
    "jboost-avx2": prepare_jboost,  # JBOOST_ISA is set
    "jboost-xla": partial(prepare_jboost, implementation="xla"),
    "jboost-loop": partial(prepare_jboost, loops=True),
    "xgboost": prepare_xgboost,
    "lightgbm": prepare_lightgbm,
    "lightgbm-q": partial(prepare_lightgbm, use_quantized_grad=True),
    "sklearn": prepare_sklearn,
}


def prepare(library: str, case: Case, threads: int, most: int | None = None):
    """Returns the contender, on all training rows or the first ``most``."""
    table = make_table(case.num_rows, case.num_features)
    rows = slice(min(most or case.num_rows, case.num_rows))
    kept = {} if most else table.kept
    y = make_targets(case, table.signal)
    return PREPARE[library](case, table.x[rows], y[rows], kept, threads)


# ---- the measures: each warms up and returns what takes a reading -------------------


def prepare_train(library: str, case: Case, threads: int) -> Callable[[], Reading]:
    """Milliseconds a tree, as the slope between two numbers of rounds."""
    contender = prepare(library, case, threads)
    contender.train(case.low)

    def read():
        low = take(lambda: contender.train(case.low))
        high = take(lambda: contender.train(case.high))
        trees = (case.high - case.low) * case.num_trees
        return Reading(1e3 * (high.value - low.value) / trees, worst(low, high))

    return read


def read_call(function: Callable[[], Any]) -> Callable[[], Reading]:
    """Returns what times one call, in milliseconds."""

    def read():
        reading = take(function)
        return Reading(1e3 * reading.value, reading.load)

    return read


def prepare_fit(library: str, case: Case, threads: int) -> Callable[[], Reading]:
    """Milliseconds from a matrix of floats to a model."""
    contender = prepare(library, case, threads)
    contender.fit(2)
    return read_call(lambda: contender.fit(case.rounds))


def prepare_cv(library: str, case: Case, threads: int) -> Callable[[], Reading]:
    """Milliseconds from a matrix of floats to the losses of five folds."""
    contender = prepare(library, case, threads)
    contender.validate(2, 0.1)
    return read_call(lambda: contender.validate(case.rounds, 0.1))


def prepare_sweep(library: str, case: Case, threads: int) -> Callable[[], Reading]:
    """Milliseconds for the losses of five folds at eight learning rates."""
    contender = prepare(library, case, threads)

    def sweep(rounds):
        if contender.sweep is not None:
            return contender.sweep(rounds)
        return [contender.validate(rounds, rate) for rate in RATES]

    sweep(2)
    return read_call(lambda: sweep(case.rounds))


def prepare_binning(library: str, case: Case, threads: int) -> Callable[[], Reading]:
    """Milliseconds from a matrix of floats to the data that training starts from."""
    function = prepare(library, case, threads).bin
    if function is None:
        raise UnsupportedError("binning is part of fit")
    function()
    return read_call(function)


def prepare_predict(
    num_rounds: int, library: str, case: Case, threads: int
) -> Callable[[], Reading]:
    """Milliseconds for raw scores of all training rows, from a matrix of floats."""
    contender = prepare(library, case, threads, most=PREDICTED)
    model = contender.fit(num_rounds)
    x = make_table(case.num_rows, case.num_features).x[: case.num_rows]
    contender.predict(model, x)
    return read_call(lambda: contender.predict(model, x))


def prepare_shap(library: str, case: Case, threads: int) -> Callable[[], Reading]:
    """Milliseconds for SHAP values of all training rows, from a matrix of floats."""
    contender = prepare(library, case, threads)
    explain = contender.explain
    if explain is None:
        raise UnsupportedError("no SHAP values")
    model = contender.fit(case.rounds)
    x = make_table(case.num_rows, case.num_features).x[: case.num_rows]
    values, base = explain(model, x[:1000])
    score = np.asarray(contender.predict(model, x[:1000]))
    np.testing.assert_allclose(values.sum(axis=1) + base, score, rtol=0, atol=1e-3)
    return read_call(lambda: explain(model, x))


def prepare_loss(library: str, case: Case, threads: int) -> Callable[[], Reading]:
    """Mean loss of held-out rows; does not need a quiet machine."""
    from compare_fits import held_out_loss

    names = {"own": "squared_error", "quantile": f"quantile {TAU}"}
    kind = names.get(case.loss, case.loss)
    table = make_table(case.num_rows, case.num_features)
    x = table.x[case.num_rows :]
    y = make_targets(case, table.signal)[case.num_rows :]

    def read():
        contender = prepare(library, case, threads)
        score = np.asarray(contender.predict(contender.train(case.high), x))
        return Reading(held_out_loss(kind, score, y), None)

    return read


MEASURES = {
    "binning": prepare_binning,
    "train": prepare_train,
    "fit": prepare_fit,
    "cv": prepare_cv,
    "sweep": prepare_sweep,
    "predict 50": partial(prepare_predict, 50),
    "predict 500": partial(prepare_predict, 500),
    "shap": prepare_shap,
    "loss": prepare_loss,
}


# ---- real tables --------------------------------------------------------------------


def measure_table(
    library: str, folder: str, table: str, kind: str, split: int, rounds: int
) -> float:
    """Returns the held-out loss of one split of a real table."""
    from compare_fits import Settings, measure
    from compare_tables import Case, split_table

    own = {"implementation": "xla"} if library == "jboost-xla" else {}
    name = "jboost" if library.startswith("jboost") else library
    settings = Settings(rounds, rate=0.1, depth=6, equal=True, own=own)
    parts = split_table(Case("", kind, table), Path(folder), split)
    return measure(name, kind, parts, settings)["test"][-1]


# ---- fresh processes ----------------------------------------------------------------


def run_cold(library: str, case: Case, threads: int) -> None:
    """Imports, fits and predicts."""
    contender = prepare(library, case, threads)
    x = make_table(case.num_rows, case.num_features).x[: case.num_rows]
    contender.predict(contender.fit(case.rounds), x)


def run_cold_cv(library: str, case: Case, threads: int) -> None:
    """Imports and cross-validates."""
    prepare(library, case, threads).validate(case.rounds, 0.1)


def run_memory(library: str, case: Case, threads: int) -> None:
    """Does the same and prints the peak memory, MiB, after fit and after predict."""
    contender = prepare(library, case, threads)
    model = contender.fit(case.high)
    fitted = read_peak()
    contender.predict(
        model, make_table(case.num_rows, case.num_features).x[: case.num_rows]
    )
    print(fitted, read_peak())


def read_peak() -> float:
    """Returns the peak resident memory of this process in MiB.

    ru_maxrss is the last resort: on Linux it starts with that of the parent.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(s.split()[1]) for s in lines if s.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 1024)


def run_compile(library: str, case: Case, threads: int) -> None:
    """Prints the seconds of a first and a second fit, without importing."""
    contender = prepare(library, case, threads)
    for _ in range(2):
        begin = time.perf_counter()
        contender.fit(case.rounds)
        print(time.perf_counter() - begin)


# ---- the process that answers -------------------------------------------------------


class Server:
    """Answers requests about one library."""

    def __init__(self, library: str, threads: int):
        """Nothing is imported yet."""
        self.library, self.threads = library, threads
        self.readers: dict[tuple, Callable[[], Reading]] = {}

    def prepare(self, measure: str, case: list) -> dict:
        """Gets ready; says the parameters."""
        key, made = (measure, *case), Case(*case)
        if key not in self.readers:
            reader = MEASURES[measure](self.library, made, self.threads)
            self.readers[key] = reader
        shown = prepare(self.library, made, self.threads).parameters
        return {name: str(value) for name, value in shown.items()}

    def read(self, measure: str, case: list) -> Reading:
        """Takes one reading."""
        return self.readers[measure, *case]()

    def forget(self) -> None:
        """Drops models and data; the next case may need the memory."""
        self.readers.clear()

    def table(self, **arguments) -> float:
        """The loss on one split of a real table."""
        return measure_table(self.library, **arguments)

    def describe(self) -> dict:
        """Returns what jboost computes with."""
        import jax

        import jboost as jb

        device = jax.devices()[0]
        return {
            "device": f"{device.platform}: {device.device_kind}",
            "implementations": str(jb.implementations()),
        }


def serve(library: str, threads: int) -> None:
    """Answers {"do": name, argument: value, ...} until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print does not belong to the answers
    server = Server(library, threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(server, request.pop("do"))(**request)}
        except UnsupportedError as error:
            answer = {"unsupported": str(error)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def main() -> None:
    """Does what the command line says; see the module docstring."""
    task, library, threads, *case = sys.argv[1:]
    if task == "serve":
        serve(library, int(threads))
    else:
        runs = {"cold": run_cold, "cold-cv": run_cold_cv}
        runs |= {"memory": run_memory, "compile": run_compile}
        runs[task](library, Case(*json.loads(case[0])), int(threads))


if __name__ == "__main__":
    main()
