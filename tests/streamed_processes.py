# SPDX-License-Identifier: Apache-2.0
"""What test_streamed_processes.py runs in each process: a stream of its own rows."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tables import FULL

import jboost as jb
from jboost import losses

SHARES = {1: (1.0,), 3: (0.55, 0.0, 0.45)}
NUM_ROWS = 1201
SMALL = dict(num_rounds=3, max_depth=2)


def find_spread(scores, targets, weights):
    """Estimates a parameter that depends on the order of all rows."""
    return losses.weighted_quantile(jnp.abs(targets - scores), weights, 0.9)


def tilted(score, target, spread):
    """A loss of quantiles: it is linear but for a kink."""
    return losses.quantile(score, target, tau=spread / (1 + spread))


CASES: dict[str, dict[str, Any]] = {
    "softmax": dict(
        loss=losses.softmax, num_scores=3, offset=True, init_score=[0.5, 0.0, -0.25]
    ),
    "adaptive": dict(
        loss=losses.adaptive(tilted, find_spread), l2=0.0, implementation="xla"
    ),
    "validated": dict(
        loss=losses.logistic, early_stopping_rounds=3, metrics=["auc"], by="auc",
        validated=True, sketched=True, weighted=True, subsample=0.6,
        leaf_rows="sample", colsample_bynode=0.6,
    ),
}  # fmt: skip
# The area falls in the second round and rises in the third, which is the last.
STOPPED: dict[str, Any] = dict(
    num_rounds=4, early_stopping_rounds=1, by=("auc", "min")
)  # fmt: skip


def make_table():
    """Numbers with ties and missing values; targets, weights, offsets."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(NUM_ROWS, 6)).astype(np.float32)
    x[:, 1] = np.round(x[:, 1])
    x[rng.random(NUM_ROWS) < 0.2, 2] = np.nan
    y = x[:, 0] * x[:, 1] + np.nan_to_num(x[:, 2]) + rng.normal(size=NUM_ROWS)
    weights = rng.choice([0, 0.3, 1, 2.5], NUM_ROWS).astype(np.float32)
    return x, y.astype(np.float32), weights, rng.normal(size=(NUM_ROWS, 3))


def take_share(rank, count, arrays):
    """Returns the rows of a process."""
    ends = np.round(np.cumsum((0, *SHARES[count])) * len(arrays[0])).astype(int)
    return tuple(array[slice(*ends[rank : rank + 2])] for array in arrays)


def make_targets(settings, y):
    """Returns classes for losses of classes."""
    if settings.get("num_scores"):
        return np.digitize(y, [-1.0, 1.0]).astype(np.int32)
    if settings.get("validated"):
        return (y > 0).astype(np.int32)
    return y


def find_mesh(devices=None):
    """Returns a mesh of so many devices, or of all; None for one."""
    devices = jax.device_count() if devices is None else devices
    return None if devices == 1 else jax.sharding.Mesh(jax.devices()[:devices], "rows")


def make_stream(rank, count, case, bins, folder, block_rows=207, batch_rows=160):
    """Returns the stream of a process, and settings of fit."""
    settings: dict[str, Any] = SMALL | CASES[case]
    x, y, weights, offset = make_table()
    y = make_targets(settings, y)
    settings.pop("sketched", None)
    if settings.pop("validated", False):
        rows = take_share(rank, count, (x[:360], y[:360]))
        settings["validation"] = rows
    x, y, weights, offset = take_share(rank, count, (x, y, weights, offset))
    given = dict(
        sample_weight=weights if settings.pop("weighted", False) else None,
        offset=offset if settings.pop("offset", False) else None,
    )

    def batches():
        for first in range(0, max(1, len(x)), batch_rows):
            part = slice(first, first + batch_rows)
            yield tuple(
                None if array is None else array[part]
                for array in (x, y, given["sample_weight"], given["offset"])
            )

    stream = jb.stream(
        batches, memory="64 MiB", bins=bins, block_rows=block_rows, directories=folder
    )
    return stream, settings


def train(rank, count, case, folder, devices=None, **options):
    """Trains on a stream in each process; returns the arrays of the model, and curves.

    Args:
      devices: of the mesh; 1: no mesh.
    """
    bins = None  # from a sketch
    if "sketched" not in CASES[case]:
        bins = jb.fit_bins(make_table()[0], max_bins=32)
    stream, settings = make_stream(rank, count, case, bins, folder)
    settings = dict(max_bins=32) | FULL | settings | options
    return describe(jb.fit(stream, mesh=find_mesh(devices), **settings))


def train_in_memory(case):
    """Trains on arrays what ``train`` trains on a stream."""
    x, y, _, offset = make_table()
    settings: dict[str, Any] = SMALL | FULL | CASES[case] | dict(implementation=None)
    settings["offset"] = offset if settings.get("offset") else None
    return describe(jb.fit(x, make_targets(settings, y), max_bins=32, **settings))


def describe(trained):
    """Returns the arrays of a model, and its curves."""
    model, history = trained
    curves = [history.train_loss, *jax.tree.leaves(history.metrics)]
    return jax.device_get(jax.tree.leaves(model)), np.stack(curves)


def run_in_turn(rank, count, folder, path):
    """Trains twice: a callback stops it, with a checkpoint; then a metric does.

    Returns what these and then ``fail_in_turn`` return.
    """
    call = (rank, count, "validated", folder)
    by_callback = train(
        *call, checkpoint=path, checkpoint_rounds=1,
        callbacks=lambda number, history, model: number == 1,
    )  # fmt: skip
    return by_callback, train(*call, **STOPPED), fail_in_turn(rank, count, folder)


def fail_in_turn(rank, count, folder):
    """Does all that fails on the last process; returns the errors by their kinds."""
    kinds = ("source", "columns", "memory", "block", "nothing")
    return {
        each: fail(rank, count, each, Path(folder, each, str(rank))) for each in kinds
    }


def fail(rank, count, what, own):
    """Does what fails on the last process; returns the error of this process."""
    bins = jb.fit_bins(make_table()[0], max_bins=32)
    stream, settings = make_stream(rank, count, "validated", bins, own)
    wrong = rank == count - 1
    if what == "source" and wrong:
        stream.source = break_after_one(stream.source)
    if what == "columns" and wrong:
        narrow = [(np.zeros((9, 2), np.float32), np.zeros(9, np.float32))]
        stream = jb.stream(narrow, memory="64 MiB", bins=jb.fit_bins(narrow[0][0]))
    if what == "nothing" and wrong:
        stream = jb.stream([], memory="64 MiB", bins=bins, directories=own)
    if what == "memory" and wrong:
        stream.memory = 1 << 16

    def harm(number, history, model):
        if what == "block" and wrong:
            for path in own.rglob("*.block"):
                path.write_bytes(b"")

    settings = dict(max_bins=32) | FULL | settings  # as train, which compiled for them
    try:
        jb.fit(stream, mesh=find_mesh(), callbacks=harm, **settings)
    except Exception as error:
        return type(error).__name__, str(error)
    return None, None


def break_after_one(source):
    """Returns a source that fails in its second batch."""

    def batches():
        yield next(iter(source()))
        raise OSError("the disk is gone")

    return batches
