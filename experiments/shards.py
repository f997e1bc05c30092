# SPDX-License-Identifier: Apache-2.0
"""Does training give the same bits on any number of devices and processes?

Trains every entry of a list (each loss, each argument of ``fit``, and the other
functions that take a mesh) on one device without a mesh, on 1, 2, 4, 8 devices of one
process, and in 1, 2, 4 processes that exchange sums over the loopback network. The
file of the model, all its arrays and the history must be equal to the bit. The devices
of one process are forced ones of the CPU; JAX and XLA have their default settings.

By default each eighth entry runs on 1,001 rows, two devices and two processes. With
40,011 rows one device computes in blocks of rows that a shard does not fill, and
training starts in another way. Processes have different numbers of rows.

    python experiments/shards.py --only huber "early stopping"
    python experiments/shards.py --every 1 --rows 1001 40011 --devices 1 2 4 8 \
        --processes 1 2 4

Written to --out: shards.json.
"""

import hashlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from experiment_tools import make_parser, read_processor, write_json

ALONE = "alone"
FEW = dict(num_rounds=3, max_depth=3)
ENTRIES: dict[str, "Entry"] = {}


class Entry(NamedTuple):
    """One item of the list.

    Attributes:
      loss: the name of a loss of ``jb.losses``, or a function that makes one.
      y: the name of the targets in the table.
      settings: further arguments of ``fit``.
      rows: names of the arguments of ``fit`` that have rows, and their columns.
      sets: "plain", "full" (weights and offsets), "named", or "none".
      kind: what is called, a function of this script.
      together: whether it runs in several processes, too.
      most: the number of rows taken from the table.
      empty: whether some processes have no rows.
    """

    loss: Any
    y: str
    settings: dict[str, Any]
    rows: dict[str, str]
    sets: str = "plain"
    kind: str = "fit"
    together: bool = True
    most: int = 2**31
    empty: bool = False


# ---- the list -----------------------------------------------------------------------
# fmt: off


def add(name, loss="squared_error", y="y", *, rows=None, **others):
    """Adds an entry; unknown keywords are arguments of ``fit``."""
    own = {key: others.pop(key) for key in Entry._fields[4:] if key in others}
    ENTRIES[name] = Entry(loss, y, others, rows or {}, **own)


def list_losses():
    """Adds all built-in losses, and losses of one's own."""
    targets = dict(
        poisson="counts", gamma="positive", tweedie="counts", logistic="label",
        focal="label", exponential="sign", hinge="sign", hinge_squared="sign",
    )
    for name in (
        "squared_error", "absolute_error", "huber", "pseudo_huber", "log_cosh",
        "quantile", "expectile", "poisson", "gamma", "tweedie", "logistic",
        "exponential", "focal", "hinge", "hinge_squared", "cauchy", "welsch",
    ):
        add(name, name, targets.get(name, "y"))
    add("softmax", "softmax", "classes", num_scores=3)
    add("softmax of 20 classes", "softmax", "many", num_scores=20)
    add("quantile 0.9", lambda losses: partial(losses.quantile, tau=0.9))
    add("expectile 0.8", lambda losses: partial(losses.expectile, tau=0.8))
    add("own", lambda losses: own_loss)
    add("own, normal", lambda losses: normal, num_scores=2)
    add("own, quartic", lambda losses: quartic)
    add("own, censored", lambda losses: censored, "pair")
    add("own, quantiles", lambda losses: quantiles, num_scores=3)
    add("own, of arrays", lambda losses: make_costs(), "classes")
    add("adaptive huber", lambda losses: losses.make_adaptive_huber())
    for name in ("weighted_quantile", "quantile", "mean", "scale"):
        maker = partial(make_adaptive, name=name)
        add(f"adaptive, {name}", maker, rows=dict(sample_weight="weight"))
    add("adaptive, own report", partial(make_adaptive, name="mean", report="first"))


def list_leaves():
    """Adds leaf solvers, curvatures and initial scores."""
    for solver in ("newton", "hessian", "exact", "guarded", "line_search"):
        add(f"leaf_solver {solver}", "huber", leaf_solver=solver)
        add(f"leaf_solver {solver}, poisson", "poisson", "counts", leaf_solver=solver)
        add(
            f"leaf_solver {solver}, softmax", "softmax", "classes", num_scores=3,
            leaf_solver=solver,
        )
    add("leaf_solver median_step", "huber", leaf_solver="median_step")
    add("leaf_solver exact, own", lambda losses: own_loss, leaf_solver="exact")
    for policy in ("exact", "secant", "absolute", "unit"):
        add(f"curvature {policy}", "cauchy", curvature=policy)
        add(
            f"curvature {policy}, softmax", "softmax", "classes", num_scores=3,
            curvature=policy,
        )
    add("curvature of one's own", "poisson", "counts", curvature=own_curvature)
    add("init_score median", "huber", init_score="median")
    add("init_score a number", "logistic", "label", init_score=0.5)
    add("init_score numbers", "softmax", "classes", num_scores=3,
        init_score=[0.1, 0.2, -0.3])
    add("init_score fallback", lambda losses: bounded)


def list_rows():
    """Adds weights, offsets, samples, and uncommon tables."""
    weighted, shifted = dict(sample_weight="weight"), dict(offset="offset")
    add("sample_weight", "logistic", "label", rows=weighted)
    add("sample_weight, quantile", "absolute_error", rows=weighted)
    add("sample_weight, whole", "huber", rows=dict(sample_weight="whole"))
    add("sample_weight, zeros", "poisson", "counts", rows=dict(sample_weight="zeros"))
    add("offset", "poisson", "counts", rows=shifted)
    add("offset of 3 scores", "softmax", "classes", num_scores=3,
        rows=dict(offset="offsets"))
    add("offset, order statistics", "absolute_error", rows=shifted | weighted)
    for loss in ("squared_error", "absolute_error", "huber"):
        add(f"subsample, {loss}", loss, subsample=0.6, rows=weighted, seed=3)
    add("subsample, adaptive", lambda losses: losses.make_adaptive_huber(),
        subsample=0.6)
    for level in ("tree", "level", "node"):
        name = f"colsample_by{level}"
        add(name, "logistic", "label", **{name: 0.5})
    add("rows, 5", "huber", most=5, min_child_samples=1)
    add("rows, one", most=1, min_child_samples=1, sets="none")
    add("rows, some processes have none", "logistic", "label", empty=True)
    add("rows, some processes have none, medians", "absolute_error", empty=True)
    add("float64", rows=dict(x="double"))
    add("no missing values", rows=dict(x="whole_x"))
    add("data frame", rows=dict(x="frame"))
    add("data frame, strings", rows=dict(x="strings"))
    add("data frame, declared categories", rows=dict(x="declared"))
    add("structured array", rows=dict(x="records"))
    add("sparse x", rows=dict(x="sparse"))


def list_limits():
    """Adds what limits trees."""
    add("categorical", "logistic", "label", categorical=[4, 5])
    add("categorical, huber", "huber", categorical=[4], max_bins=8)
    add("categorical, softmax", "softmax", "classes", num_scores=3, categorical=[4])
    add("categorical, weights", categorical=[5], rows=dict(sample_weight="weight"))
    add("categorical, one by one", categorical=[4, 5], max_onehot=12)
    add("max_bins 16", "huber", max_bins=16)
    add("max_bins 1024", max_bins=1024)
    add("max_leaves", "logistic", "label", max_leaves=6, max_depth=4)
    add("monotone", "logistic", "label", monotone={0: 1, 1: -1})
    add("monotone, quantile", "quantile", monotone={0: 1})
    add("monotone, exact", "huber", monotone={0: 1}, leaf_solver="exact")
    add("interactions", "huber", interactions=[[0, 1], [2, 3, 4]])
    add("l1", "logistic", "label", l1=0.5)
    add("l2", "huber", l2=10.0)
    add("l2, quantile", "quantile", l2=10.0)
    add("max_delta_step", "poisson", "counts", max_delta_step=0.3)
    add("min_gain", "huber", min_gain=1.0)
    add("min_child_weight", "logistic", "label", min_child_weight=30.0)
    add("min_child_samples", "huber", min_child_samples=50)
    add("regularization absolute", "logistic", "label", regularization="absolute")
    add("regularization absolute, quantile", "quantile", regularization="absolute")
    add("rows_per_threshold", "huber", rows_per_threshold=100)
    add("parent_rows", "huber", parent_rows=3.0)
    add("linear_leaves", "huber", linear_leaves=True, num_rounds=3)
    add("leaf_rows sample", "huber", subsample=0.6, leaf_rows="sample")
    add("learning_rate a schedule", "huber", learning_rate=schedule)
    add("max_depth 7", "huber", max_depth=7, num_rounds=2)
    add("candidates local", candidates="local")
    add("candidates exact", candidates="exact")
    add("candidate_weights curvature", "poisson", "counts",
        candidate_weights="curvature")
    add("implementation xla", "huber", implementation="xla")
    add("implementation xla, categorical", categorical=[4], implementation="xla")
    add("implementation xla, softmax", "softmax", "classes", num_scores=3,
        implementation="xla", subsample=0.7)
    add("implementation xla, medians", "absolute_error", implementation="xla")


def list_histories():
    """Adds what is measured, and when training stops."""
    add("validation none", "huber", sets="none")
    add("validation full", "poisson", "counts", sets="full",
        rows=dict(sample_weight="weight", offset="offset"))
    add("validation named", "logistic", "label", sets="named")
    stops = dict(early_stopping_rounds=1, num_rounds=8, learning_rate=1.0)
    add("early stopping", "huber", **stops)
    add("early stopping, by", "logistic", "label", by="auc", **stops)
    add("early stopping, adaptive", lambda losses: losses.make_adaptive_huber(),
        **stops)
    add("metrics of classes", "logistic", "label", sets="full",
        rows=dict(sample_weight="weight", offset="offset"),
        metrics=["auc", "average_precision", "log_loss", "brier", "accuracy",
                 "error"])
    add("metrics of numbers", "huber",
        metrics=["mae", "mse", "rmse", "mape", "r2"])
    add("metrics of counts", "poisson", "counts", metrics=["poisson_deviance"])
    add("metrics of gamma", "gamma", "positive", metrics=["gamma_deviance"])
    add("metrics of softmax", "softmax", "classes", num_scores=3,
        metrics=["auc", "log_loss", "accuracy"])
    add("metrics of one's own", "huber", by=("spread", "max"),
        metrics=dict(spread=traced_metric, numpy=numpy_metric,
                     sklearn=sklearn_metric))
    add("callbacks", "huber", callbacks=stop_at_second)
    add("progress", "squared_error", progress=True)
    add("feature_names", feature_names=list("abcdef"))
    for name in ("model", "checkpoint"):
        for loss, y in (("huber", "y"), ("logistic", "label")):
            add(f"{name}, {loss}", loss, y, kind=f"go_on_from_{name}", subsample=0.7)
    add("model, adaptive", lambda losses: losses.make_adaptive_huber(),
        kind="go_on_from_model")


def list_functions():
    """Adds other functions than fit."""
    alone = dict(together=False, sets="none")
    for kind in ("boost", "boost_in_jit"):
        name = kind.replace("_", " ")
        add(f"{name}, huber", "huber", kind=kind, subsample=0.7, **alone)
        add(f"{name}, quantile", "quantile", kind=kind, **alone)
        add(f"{name}, softmax", "softmax", "classes", num_scores=3, kind=kind, **alone)
    add("boost, adaptive", lambda losses: losses.make_adaptive_huber(), kind="boost",
        **alone)
    add("predict, one score", "huber", kind="predict", **alone)
    add("predict, softmax", "softmax", "classes", num_scores=3, kind="predict", **alone)
    add("predict, categories", categorical=[4], kind="predict", **alone)
    add("predict, offset and link", "poisson", "counts", kind="predict",
        rows=dict(offset="offset"), **alone)
    add("predict, deep", "huber", max_depth=9, kind="predict", **alone)
    add("sharded x", "huber", kind="fit_sharded", **alone)
    add("cross_validate", "huber", kind="cross_validate", **alone)
    add("cross_validate, softmax", "softmax", "classes", num_scores=3,
        kind="cross_validate", **alone)
    add("sweep", "logistic", "label", kind="sweep", **alone)


# fmt: on
# ---- losses and functions of one's own ----------------------------------------------


def own_loss(score, target):
    """Not convex."""
    import jax.numpy as jnp

    return jnp.log1p((score - target) ** 2)


def normal(score, target):
    """The likelihood of a normal distribution."""
    import jax.numpy as jnp

    return score[1] + 0.5 * ((target - score[0]) * jnp.exp(-score[1])) ** 2


def quartic(score, target):
    """A loss without bounded curvature."""
    return (score - target) ** 4


def censored(score, target):
    """Of a pytree of targets: a squared error, one-sided where a row is censored."""
    import jax.numpy as jnp

    error = target["time"] - score
    error = jnp.where(target["censored"] > 0, jnp.maximum(error, 0), error)
    return 0.5 * error**2


def quantiles(score, target):
    """Three quantiles at once."""
    import jax.numpy as jnp

    tau = jnp.array([0.1, 0.5, 0.9])
    return jnp.sum(jnp.maximum(tau * (target - score), (tau - 1) * (target - score)))


def bounded(score, target):
    """A loss whose gradient vanishes far from the target."""
    import jax.numpy as jnp

    return jnp.minimum(jnp.abs(score - target), 0.1)


def make_costs():
    """Returns a loss that closes over an array."""
    import jax.numpy as jnp

    costs = jnp.asarray(np.linspace(0.5, 2, 3, dtype=np.float32))
    return lambda score, target: costs[target] * (score - target) ** 2


def make_adaptive(losses, name, report="current"):
    """Returns an adaptive loss with an estimate of a kind."""
    import jax.numpy as jnp

    def estimate(scores, targets, weights):
        sizes = jnp.abs(targets - scores)
        if name == "weighted_quantile":
            return losses.weighted_quantile(sizes, weights, 0.9)
        if name == "quantile":
            return jnp.quantile(sizes, 0.9)
        if name == "mean":
            return jnp.sum(weights * sizes) / jnp.sum(weights)
        return 0.5 + jnp.std(targets - scores)

    def loss(score, target, delta):
        return losses.pseudo_huber(score, target, delta=delta)

    return losses.adaptive(loss, estimate, report=report)


def own_curvature(score, target):
    """The Fisher information of Poisson counts."""
    import jax.numpy as jnp

    return jnp.exp(score) + 0 * target


def schedule(number):
    """Falls by a tenth each round."""
    return 0.5 * 0.9**number


def traced_metric(scores, targets, weights):
    """A metric in jax.numpy."""
    import jax.numpy as jnp

    return jnp.sum(weights * jnp.square(scores - targets)) / jnp.sum(weights)


def numpy_metric(scores, targets, weights):
    """A metric in NumPy."""
    return np.average(np.abs(np.asarray(scores) - targets), weights=weights)


def sklearn_metric(y_true, y_pred, sample_weight=None):
    """A metric with the arguments of scikit-learn."""
    return np.average((y_true - y_pred) ** 2, weights=sample_weight)


def stop_at_second(number, history, model):
    """A callback."""
    return number == 1 and len(history.train_loss) == 2 and model.num_rounds == 2


# ---- rows ---------------------------------------------------------------------------


def make_table(rows):
    """Returns columns of all rows, by name."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype(np.float32)
    x[:, 3] = np.round(x[:, 3], 1)
    x[:, 4] = rng.integers(0, 12, rows)
    x[:, 5] = rng.geometric(0.02, rows)
    center = x[:, 0] + np.sin(3 * x[:, 1]) + 0.3 * (x[:, 4] % 3)
    y = (center + rng.standard_t(3, size=rows)).astype(np.float32)
    whole = x.copy()
    x[rng.random(x.shape) < 0.05] = np.nan
    weight = rng.random(rows).astype(np.float32)
    table = dict(
        x=x, whole_x=whole, double=x.astype(np.float64) * (1 + 1e-9), y=y,
        label=(y > 0).astype(np.float32), sign=np.sign(y) + (y == 0).astype(np.float32),
        counts=np.abs(np.round(y)), positive=np.exp(0.3 * y) + np.float32(0.1),
        classes=np.clip(np.round(y + 1), 0, 2).astype(np.int32),
        many=np.clip(np.round(3 * y + 10), 0, 19).astype(np.int32),
        pair=dict(time=y, censored=(weight > 0.7).astype(np.int32)),
        weight=weight, offset=np.log(weight + np.float32(0.5)),
        whole=rng.integers(0, 4, rows).astype(np.float32),
        zeros=weight * (weight > 0.5),
        offsets=rng.normal(size=(rows, 3)).astype(np.float32),
    )  # fmt: skip
    return table


def take(table, name, cut):
    """Returns rows of a column; those of frames are made of ``x``."""
    if name in table:
        if isinstance(table[name], dict):
            return {key: column[cut] for key, column in table[name].items()}
        return table[name][cut]
    x = table["x"][cut]
    if name == "sparse":
        from scipy.sparse import csr_matrix

        return csr_matrix(np.nan_to_num(x))
    if name == "records":
        kinds = [(letter, np.float32) for letter in "abcdef"]
        return np.array([*map(tuple, x)], kinds)
    import pandas as pd

    frame = pd.DataFrame(x, columns=list("abcdef"))
    if name != "frame":
        words = np.array(["a", "bc", "", "é", "z", "aa", "b", "y", "k", "m", "n", "o"])
        codes = np.nan_to_num(x[:, 4], nan=0).astype(int)
        frame["e"] = pd.Series(words[codes], dtype=object)
        if name == "declared":
            frame["e"] = frame["e"].astype(pd.CategoricalDtype(sorted(words)))
    return frame


def cut_rows(rows, number, empty):
    """Returns where the rows of each process begin and end."""
    inner = np.sort(np.random.default_rng(number).integers(0, rows + 1, number - 1))
    if empty:
        inner = np.where(np.arange(number - 1) % 2 == 0, 0, rows // 2)
        inner = np.sort(inner)
    return [0, *inner.tolist(), rows]


def make_call(entry, table, losses, place, number):
    """Returns the rows and arguments of a call of ``fit``."""
    whole = min(entry.most, len(table["y"]))
    first, last = cut_rows(whole, number, entry.empty)[place : place + 2]
    cut = slice(first, last)
    x = take(table, entry.rows.get("x", "x"), cut)
    loss = (
        getattr(losses, entry.loss)
        if isinstance(entry.loss, str)
        else entry.loss(losses)
    )
    others = {
        key: take(table, name, cut) for key, name in entry.rows.items() if key != "x"
    }
    settings = {**FEW, **entry.settings, **others}
    if entry.sets != "none":
        rows = whole // 3
        first, last = cut_rows(rows, number, entry.empty)[place : place + 2]
        held = slice(whole - rows + first, whole - rows + last)
        names = [entry.rows.get("x", "x"), entry.y]
        weight = "weight" if entry.sets == "full" else None
        names += [weight, entry.rows.get("offset")]
        held_out = tuple(name and take(table, name, held) for name in names)
        sets = dict(
            one=held_out, two=tuple(name and take(table, name, cut) for name in names)
        )
        settings["validation"] = sets if entry.sets == "named" else held_out
    return x, take(table, entry.y, cut), loss, settings


# ---- what is called -----------------------------------------------------------------


def fit(jb, x, y, loss, settings, mesh, folder):
    """Trains a model."""
    del folder
    return record(jb, *jb.fit(x, y, loss, mesh=mesh, **settings))


def go_on_from_model(jb, x, y, loss, settings, mesh, folder):
    """Trains a model in two parts."""
    del folder
    first, _ = jb.fit(x, y, loss, mesh=mesh, **settings)
    return record(jb, *jb.fit(x, y, loss, mesh=mesh, model=first, **settings))


def go_on_from_checkpoint(jb, x, y, loss, settings, mesh, folder):
    """Trains a model in two parts, with a checkpoint."""
    path = Path(folder) / "checkpoint"
    jb.fit(x, y, loss, mesh=mesh, checkpoint=path, **settings)
    settings = {**settings, "num_rounds": 2 * settings["num_rounds"]}
    return record(jb, *jb.fit(x, y, loss, mesh=mesh, checkpoint=path, **settings))


def boost(jb, x, y, loss, settings, mesh, folder, traced=False):
    """Calls ``jb.boost``."""
    del folder
    import jax

    binned, key = np.asarray(jb.apply_bins(jb.fit_bins(x), x)), jax.random.key(3)

    def run(y):
        return jb.boost(binned, y, loss, key, mesh=mesh, **settings)

    return flatten(jax.device_get((jax.jit(run) if traced else run)(y)))


def boost_in_jit(*operands):
    """Calls ``jb.boost`` in a program of one's own."""
    return boost(*operands, traced=True)


def predict(jb, x, y, loss, settings, mesh, folder):
    """Predicts rows that are sharded."""
    del folder
    import jax

    keys = {key: settings.pop(key) for key in ("offset",) if key in settings}
    model, _ = jb.fit(x, y, loss, **settings, **keys)
    rows = len(x) // 8 * 8  # JAX shards evenly only
    operands = [x[:rows], *(keys[key][:rows] for key in keys)]
    if mesh is not None:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        operands = [jax.device_put(each, sharding) for each in operands]
    found = {}
    for link in (None, jb.losses.inverse_link(loss)):
        others = dict(zip(keys, operands[1:], strict=True))
        scores = jb.predict(model, operands[0], inverse_link=link, **others)
        if mesh is not None:
            assert scores.sharding.is_equivalent_to(operands[0].sharding, scores.ndim)
        found["scores" if link is None else "inverse link"] = np.asarray(scores)
    return found


def fit_sharded(jb, x, y, loss, settings, mesh, folder):
    """Trains with rows that are sharded already."""
    del folder
    import jax

    rows = len(x) // 8 * 8
    x, y = x[:rows], y[:rows]
    if mesh is not None:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        x, y = jax.device_put((x, y), sharding)
    return record(jb, *jb.fit(x, y, loss, **settings))


def cross_validate(jb, x, y, loss, settings, mesh, folder):
    """Compares folds."""
    del folder
    found = jb.cross_validate(
        x, y, loss, mesh=mesh, folds=3, return_models=True, **settings
    )
    return flatten([found.models, found.mean])


def sweep(jb, x, y, loss, settings, mesh, folder):
    """Compares settings."""
    del folder
    points = dict(learning_rate=[0.1, 0.3, 0.5], l2=[1.0, 5.0, 2.0])
    return flatten(jb.sweep(x, y, loss, points, folds=2, mesh=mesh, **settings).mean)


def flatten(tree):
    """Returns the arrays of a pytree by their paths."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def record(jb, model, history):
    """Returns all that a model and a history hold, and a digest of the model's file."""
    curves = {
        name: getattr(history, name)
        for name in ("train_loss", "validation_loss", "metrics", "best_round",
                     "oob_improvement", "parameters")
    }  # fmt: skip
    found = flatten({"history": curves, "model": model})
    found["choices"] = np.array(repr(history.choices))
    with tempfile.TemporaryDirectory() as folder:
        jb.save(model, Path(folder) / "model")
        content = (Path(folder) / "model").read_bytes()
    found["file"] = np.array(hashlib.sha256(content).hexdigest())
    return found


# ---- processes ----------------------------------------------------------------------


def work(task):
    """Runs entries in one of several processes, or on devices of one process."""
    import jax

    number, place = task["processes"], task["place"]
    if number > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{task['port']}", number, place, heartbeat_timeout_seconds=30,
        )  # fmt: skip
    import jboost as jb

    out, tables = Path(task["out"]), {}
    for rows, name in task["entries"]:
        if rows not in tables:
            tables = {rows: make_table(rows)}
        entry = ENTRIES[name]
        for devices in task["devices"] if number == 1 else [number]:
            mesh = None
            if devices:
                mesh = jax.make_mesh(
                    (devices,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,),
                    devices=jax.devices()[:devices],
                )  # fmt: skip
            found = call(jb, entry, tables[rows], mesh, place, number, task["shared"])
            path = name_file(out, rows, name, devices, place)
            part = path.with_name(path.name + ".part")
            part.write_bytes(pickle.dumps(found))
            part.rename(path)


def call(jb, entry, table, mesh, place, number, shared):
    """Runs one entry; returns arrays, or the text of an error."""
    if place == 0:
        for file in Path(shared).iterdir():
            file.unlink()
    try:
        x, y, loss, settings = make_call(entry, table, jb.losses, place, number)
        run: Callable[..., Any] = globals()[entry.kind]
        return run(jb, x, y, loss, settings, mesh, shared)
    except Exception as error:  # all kinds are told
        return f"{type(error).__name__}: {error}"


def name_file(out, rows, name, number, place):
    """Returns where a process writes what it found."""
    return out / f"{rows} {name}, {number}, {place}"


def list_files(out, entry, processes, devices):
    """Returns the files that an entry writes last."""
    last = max(devices) if processes == 1 else processes
    return [name_file(out, *entry, last, place) for place in range(processes)]


def run_all(args, entries, processes, devices, out):
    """Runs entries on all devices of one process, or in several processes.

    Where nothing happens for a while, the entry at hand is given up.
    """
    out.mkdir(parents=True, exist_ok=True)
    done = lambda entry: all(  # noqa: E731
        file.exists() for file in list_files(out, entry, processes, devices)
    )
    entries = [entry for entry in entries if not done(entry)]
    while entries:
        if left := run_until_stuck(args, entries, processes, devices, out):
            print(f"{processes} processes are stuck at {left[0]}", flush=True)
        entries = left[1:]


def run_until_stuck(args, entries, processes, devices, out):
    """Returns the entries that are left, the first of which is stuck."""
    last = max(devices) if processes == 1 else processes
    files = [list_files(out, each, processes, devices) for each in entries]
    with socket.socket() as server, tempfile.TemporaryDirectory() as shared:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.close()
        flags = f"--xla_force_host_platform_device_count={last}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if processes == 1 and last > 1:
            environment["XLA_FLAGS"] = flags
        running = []
        for place in range(processes):
            task = dict(
                processes=processes, place=place, devices=devices, port=port,
                out=str(out), shared=shared, entries=entries,
            )  # fmt: skip
            command = [sys.executable, __file__, "--worker", json.dumps(task)]
            running.append(
                subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            )
        count, begun = 0, time.monotonic()
        while count < len(files):
            if all(file.exists() for file in files[count]):
                count, begun = count + 1, time.monotonic()
                continue
            ended = any(process.poll() is not None for process in running)
            if ended or time.monotonic() > begun + args.timeout:
                break
            time.sleep(0.05)
        for process in running:
            if count < len(files):
                process.kill()
            try:
                process.wait(args.timeout)
            except subprocess.TimeoutExpired:
                process.kill()
    return entries[count:]


# ---- results ------------------------------------------------------------------------


def compare(expected, found):
    """Returns "equal", or what differs."""
    if expected is None or found is None:
        return "no result"
    if isinstance(found, str) or isinstance(expected, str):
        if found == expected:
            return f"refused without a mesh, too: {found}"
        return f"refused: {found}" if isinstance(found, str) else "ran with a mesh only"
    if {*expected} != {*found}:
        return f"differs: {sorted({*expected} ^ {*found})}"
    # The curves first, the file last.
    for name in sorted(expected, key=lambda name: (name == "file", "model" in name)):
        one = expected[name]
        other = found[name]
        if one.dtype == other.dtype and one.tobytes() == other.tobytes():
            continue
        if one.shape != other.shape or one.dtype.kind not in "fiu":
            return f"differs: {name}: {one} is {other}"
        gap = np.abs(one.astype(np.float64) - other.astype(np.float64))
        return (
            f"differs: {name} by {np.nanmax(gap):.2g} in {np.count_nonzero(gap)} places"
        )
    return "equal"


def load(out, rows, name, number, place):
    """Returns what a process found, or None."""
    path = name_file(out, rows, name, number, place)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def judge(args, entries, outs):
    """Returns a verdict for each entry and each number of devices and processes."""
    verdicts = []
    for rows, name in entries:
        expected = load(outs[1], rows, name, 0, 0)
        found = {}
        if isinstance(expected, str):
            found[ALONE] = expected
        for number in args.devices:
            result = load(outs["devices"], rows, name, number, 0)
            found[f"{number} devices"] = compare(expected, result)
        for number in args.processes:
            if number > 1 and ENTRIES[name].together:
                results = [
                    load(outs[number], rows, name, number, i) for i in range(number)
                ]
                words = {compare(expected, result): None for result in results}
                found[f"{number} processes"] = "; ".join(words)
        verdicts.append({"rows": rows, "entry": name, "found": found})
    return verdicts


def report(verdicts):
    """Prints a line for each entry, and what was found."""
    equal = refused = 0
    for verdict in verdicts:
        kinds: dict[str, list[str]] = {}
        for place, words in verdict["found"].items():
            kinds.setdefault(words, []).append(place)
        alike = [*kinds] == ["equal"]
        equal += alike
        refused += not alike and all(word.startswith("refused") for word in kinds)
        said = (
            "equal"
            if alike
            else "; ".join(
                f"{', '.join(places)}: {words[:300]}" for words, places in kinds.items()
            )
        )
        print(f"{verdict['rows']:7d} {verdict['entry']:40s} {said}", flush=True)
    print(
        f"\nFound: of {len(verdicts)} entries {equal} are equal to the bit for all "
        f"numbers of devices and processes, {refused} are refused, and "
        f"{len(verdicts) - equal - refused} differ or are refused by some."
    )


def main():
    """Runs all entries, and compares."""
    args = parse()
    if args.worker:
        work(json.loads(args.worker))
        return
    names = args.only or [*ENTRIES][:: args.every]
    if unknown := {*names} - {*ENTRIES}:
        raise SystemExit(f"no such entries: {', '.join(sorted(unknown))}")
    entries = [(rows, name) for rows in args.rows for name in names]
    with tempfile.TemporaryDirectory() as folder:
        outs: dict[Any, Path] = {}
        for what in ("devices", 1, *args.processes):
            outs[what] = Path(args.keep or folder) / str(what)
        run_all(args, entries, 1, [0], outs[1])
        print("one device: done", flush=True)
        if args.devices:
            run_all(args, entries, 1, args.devices, outs["devices"])
            print("devices: done", flush=True)
        for number in args.processes:
            if number > 1:
                several = [each for each in entries if ENTRIES[each[1]].together]
                run_all(args, several, number, [0], outs[number])
                print(f"{number} processes: done", flush=True)
        verdicts = judge(args, entries, outs)
    report(verdicts)
    write_json(
        args.out / "shards.json",
        {"settings": vars(args), "processor": read_processor(), "verdicts": verdicts},
    )


def parse():
    """Returns the options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1001])
    parser.add_argument("--devices", type=int, nargs="*", default=[2])
    parser.add_argument("--processes", type=int, nargs="*", default=[2])
    parser.add_argument("--only", nargs="+", metavar="ENTRY", help="entries to run")
    parser.add_argument(
        "--every", type=int, default=8, help="runs each eighth entry; 1: all of them"
    )
    parser.add_argument(
        "--timeout", type=float, default=180, help="seconds that an entry may take"
    )
    parser.add_argument(
        "--keep", metavar="DIR", help="keep what entries find; what is there is not run"
    )
    parser.add_argument("--worker", help="(the script's own: the task of processes)")
    return parser.parse_args()


for _list in (
    list_losses, list_leaves, list_rows, list_limits, list_histories, list_functions
):  # fmt: skip
    _list()

if __name__ == "__main__":
    main()
