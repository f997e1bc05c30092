# SPDX-License-Identifier: Apache-2.0
"""What ``gpu.py`` measures as a user feels it: seconds from NumPy arrays to a model.

In: a task. Out: for each case the seconds of the first and the second fit of this
process, in turn with XGBoost where it has the loss, and the milliseconds of a round;
then predictions, explanations, cross-validation and the import; and a fit to ``boost``,
also with CUDA graphs in the programs that the host calls.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_cases import Case
from benchmark_peers import make_table
from gpu_timing import Rows as DeviceRows
from gpu_timing import Task, make_trainer, time_latency, wait_for

import jboost as jb
import jboost.entry.programs as programs

L = jb.losses
GROUP = 20  # rows of a group of the ranking
FEW = 0.1  # share of the rounds of a short fit


class UserCase(NamedTuple):
    """A fit.

    Attributes:
      label: in the table.
      ours: the loss, and settings of ``fit`` besides rounds, rate and depth.
      peer: parameters of XGBoost; None: it has no such loss.
      size: rows and features at full size.
      target: makes the targets from the signal.
      holes: the share of values that are missing.
      levels: the numbers of levels of the first columns, which are categories.
    """

    label: str
    ours: dict[str, Any]
    peer: dict[str, Any] | None
    size: tuple[int, int] = (1_000_000, 28)
    target: Callable[[np.ndarray], np.ndarray] = lambda signal: signal
    holes: float = 0.0
    levels: tuple[int, ...] = ()


def log_cosh(score, target):
    """Returns the logarithm of cosh of the residual, up to a constant."""
    away = jnp.abs(score - target)
    return away + jnp.log1p(jnp.exp(-2 * away))


def count(signal: np.ndarray) -> np.ndarray:
    """Returns Poisson counts whose logarithmic rate is a fifth of the signal."""
    return np.random.default_rng(1).poisson(np.exp(signal / 5)).astype(np.float32)


def grade(number: int, signal: np.ndarray) -> np.ndarray:
    """Returns the class of each row among equally frequent ones."""
    cuts = np.quantile(signal, np.arange(1, number) / number)
    return np.searchsorted(cuts, signal)


SQUARED = {"objective": "reg:squarederror"}
CLASSES = {"objective": "multi:softprob", "num_class": 10}
MANY = dict(size=(100_000, 28), target=partial(grade, 10))
ORDERED = (1, -1, *[0] * 26)
CASES = (
    UserCase("squared error", dict(loss=L.squared_error), SQUARED),
    UserCase("logistic", dict(loss=L.logistic), {"objective": "binary:logistic"},
        target=lambda signal: (signal > 0).astype(np.float32)),
    UserCase("own loss, log cosh", dict(loss=log_cosh), None),
    UserCase("absolute error", dict(loss=L.absolute_error),
        {"objective": "reg:absoluteerror"}),
    UserCase("quantile .9", dict(loss=partial(L.quantile, tau=0.9)),
        {"objective": "reg:quantileerror", "quantile_alpha": 0.9}),
    UserCase("Poisson", dict(loss=L.poisson), {"objective": "count:poisson"},
        target=count),
    UserCase("softmax, 10 classes, shared trees",
        dict(loss=L.softmax, num_scores=10, share_structure=True), CLASSES, **MANY),
    UserCase("the same, a tree for each class",
        dict(loss=L.softmax, num_scores=10, share_structure=False), CLASSES, **MANY),
    UserCase("missing 10 %", dict(loss=L.squared_error), SQUARED, holes=0.1),
    UserCase("categories (1000 + 30 levels)",
        dict(loss=L.squared_error, categorical=[0, 1]), SQUARED, levels=(1000, 30)),
    UserCase("monotone", dict(loss=L.squared_error, monotone=ORDERED),
        SQUARED | {"monotone_constraints": ORDERED}),
    UserCase("row and column sampling",
        dict(loss=L.squared_error, subsample=0.7, colsample_bytree=0.7),
        SQUARED | {"subsample": 0.7, "colsample_bytree": 0.7}),
    UserCase("depth 10", dict(loss=L.squared_error, max_depth=10),
        SQUARED | {"max_depth": 10}),
    UserCase("lambda_rank, groups of 20", dict(loss=L.lambda_rank),
        {"objective": "rank:ndcg"}, (100_000, 28), partial(grade, 5)),
    UserCase("2,000 x 20", dict(loss=L.squared_error), SQUARED, (2_000, 20)),
    UserCase("20,000 x 1,000", dict(loss=L.squared_error), SQUARED, (20_000, 1_000)),
)  # fmt: skip


def make_rows(case: UserCase, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and targets of a case, or a share of its rows."""
    (rows, features), generator = case.size, np.random.default_rng(2)
    rows = max(200, int(rows * share) // GROUP * GROUP)
    table = make_table(Case(rows, features))
    x, y = table.x[:rows], case.target(table.signal[:rows])
    if case.holes or case.levels:
        x = x.copy()
    if case.holes:
        x[generator.random(x.shape) < case.holes] = np.nan
    for column, number in enumerate(case.levels):
        x[:, column] = generator.integers(0, number, rows)
    return x, y


def time_ours(
    task: Task, case: UserCase, x: np.ndarray, y: np.ndarray, share: float = 1.0
) -> float:
    """Returns the seconds of a fit with a share of the rounds."""
    sizes = task.sizes
    rounds = max(1, round(share * sizes.fit_rounds))
    settings = dict(num_rounds=rounds, max_depth=sizes.depth) | case.ours
    if case.ours["loss"] is L.lambda_rank:
        settings["groups"] = np.arange(len(y)) // GROUP
    begin = time.perf_counter()
    wait_for(lambda: jb.fit(x, y, **settings)[0])
    return time.perf_counter() - begin


def time_peer(task: Task, case: UserCase, x: np.ndarray, y: np.ndarray) -> float:
    """Returns the seconds of XGBoost, its matrix included."""
    import xgboost

    made: dict[str, Any] = {}
    if case.levels:
        kinds = ["c"] * len(case.levels) + ["float"] * (x.shape[1] - len(case.levels))
        made = dict(enable_categorical=True, feature_types=kinds)
    if case.ours["loss"] is L.lambda_rank:
        made = dict(qid=np.arange(len(y)) // GROUP)
    assert case.peer is not None
    chosen: dict[str, Any] = dict(device=task.platform, eta=0.1, tree_method="hist")
    chosen["max_depth"] = task.sizes.depth
    begin = time.perf_counter()
    matrix = xgboost.QuantileDMatrix(x, y, **made)
    model = xgboost.train(chosen | case.peer, matrix, task.sizes.fit_rounds)
    model.num_boosted_rounds()
    return time.perf_counter() - begin


def fit_as_users(task: Task) -> None:
    """Seconds of two fits of every case, in turn with XGBoost, and of what follows."""
    # Programs that an earlier run has left would hide what a first fit costs.
    jax.config.update("jax_enable_compilation_cache", False)
    share = task.sizes.rows / 1_000_000
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        x, y = make_rows(case, share)
        times = found[case.label] = {}
        for turn in ("first", "second"):
            for name, run in (("jboost", time_ours), ("xgboost", time_peer)):
                if name == "xgboost" and case.peer is None:
                    continue
                try:
                    times[f"{name}, {turn}"] = run(task, case, x, y)
                except Exception as error:
                    task.note("errors", f"{case.label}, {name}", error)
                task.save(user=found)
        if "jboost, second" in times:
            few = time_ours(task, case, x, y, FEW)
            rounds = (1 - FEW) * task.sizes.fit_rounds
            times["ms of a round"] = 1e3 * (times["jboost, second"] - few) / rounds
            task.save(user=found)
    time_inference(task, share)
    time_boost(task, share)


def time_inference(task: Task, share: float) -> None:
    """Predictions and explanations from NumPy rows, cross-validation, the import."""
    x, y = make_rows(CASES[0], share)
    model = jb.fit(x, y, num_rounds=task.sizes.fit_rounds, max_depth=6)[0]
    row, some = x[:1], x[: max(10, int(5_000 * share))]
    code = "import time; t = time.perf_counter(); import jax, jboost; jboost.fit; "
    code += "print(time.perf_counter() - t)"
    taken = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    task.save(
        predict_numpy_s=time_latency(jb.predict, model, x) / 1e3,
        predict_row_us=1e3 * time_latency(jb.predict, model, row),
        shap_s=time_latency(jb.shap_values, model, some) / 1e3,
        import_s=float(taken.stdout),
    )
    few = max(200, int(100_000 * share))
    for name in ("cross_validate_first_s", "cross_validate_s"):
        begin = time.perf_counter()
        jb.cross_validate(x[:few], y[:few], num_rounds=task.sizes.fit_rounds)
        task.save(**{name: time.perf_counter() - begin})


def time_boost(task: Task, share: float) -> None:
    """The second fit of a logistic loss, to ``boost`` on codes that are on the device.

    Both make the same number of rounds; ``boost`` is compiled before. Then the same fit
    with CUDA graphs, to that without.
    """
    case = task.case._replace(loss="logistic")
    x, y = make_rows(CASES[1], share)
    bins = jb.fit_bins(x)
    rows = DeviceRows(None, jnp.asarray(y), bins, jnp.asarray(jb.apply_bins(bins, x)))
    train = make_trainer(rows, case)
    alone = time_latency(train, task.sizes.fit_rounds) / 1e3
    times = task.figures["user"].get("logistic", {})
    if "jboost, second" not in times:
        return
    task.save(fit_to_boost=times["jboost, second"] / alone)
    graphs, programs.NO_GRAPHS = programs.NO_GRAPHS, ()
    for kept in (programs._programs, programs._small_programs):
        kept.clear()
    for name in ("first", "second"):
        times[f"with graphs, {name}"] = time_ours(task, CASES[1], x, y)
    programs.NO_GRAPHS = graphs
    task.save(graphs_to_none=times["with graphs, second"] / times["jboost, second"])
