# SPDX-License-Identifier: Apache-2.0
"""Records the calls of kernels in small runs of all kinds, to make them again."""

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import scipy.sparse

import jboost as jb
from jboost.codes import binning
from jboost.entry import programs
from jboost.explanation import shap
from jboost.kernels import calls

FOLDER = Path(calls.__file__).parent / "native"
# Large enough that loops are divided among threads.
ROWS, FEATURES = 5003, 7


class Call(NamedTuple):
    """A call of a kernel; its operands are NumPy arrays."""

    name: str
    results: Any
    operands: tuple[np.ndarray, ...]
    aliases: dict[int, int]
    attributes: dict[str, int]

    def kind(self) -> tuple[Any, ...]:
        """Tells calls apart that may take other ways through a kernel."""
        shapes = ((np.ndim(each), each.dtype.char) for each in self.operands)
        return self.name, *shapes, *sorted(self.attributes.items())

    def run(self) -> list[np.ndarray]:
        """Makes the call again; returns its results."""
        operands = [each.copy() for each in self.operands]
        into = [np.zeros(s.shape, s.dtype) for s in jax.tree.leaves(self.results)]
        for operand, result in self.aliases.items():
            into[result] = operands[operand]
        calls.call_on_host(self.name, into, *operands, **self.attributes)
        return into


def record_calls(run) -> list[Call]:
    """Runs a function; returns one call of each kind that programs made meanwhile."""
    found: dict[Any, Call] = {}

    def keep(name, results, aliases, attributes, *operands):
        operands = tuple(np.array(each) for each in operands)
        attributes = {key: int(value) for key, value in attributes.items()}
        call = Call(name, results, operands, dict(aliases or {}), attributes)
        found.setdefault(call.kind(), call)

    def make(name, results, **options):
        aliases = options.get("input_output_aliases")

        def run(*operands, **attributes):
            known = partial(keep, name, results, aliases, attributes)
            jax.debug.callback(known, *operands)
            return made(name, results, **options)(*operands, **attributes)

        return made(name, results, **options) if name == "relay" else run

    def call_on_host(name, results, *operands, keep=None, **attributes):
        if keep is None and name != "open_model":  # else operands are addresses
            inputs, shapes, aliases = calls._list_arrays(results, operands)
            record(name, shapes, aliases, attributes, *inputs)
        return called(name, results, *operands, keep=keep, **attributes)

    record = keep
    made, called = calls._make_call, calls.call_on_host
    forget_programs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_make_call", make)
        for module in calls, binning, shap:
            patch.setattr(module, "call_on_host", call_on_host)
        run()
        jax.effects_barrier()
    forget_programs()
    return list(found.values())


def forget_programs() -> None:
    """Releases all programs, so that they are made with kernels as they are now."""
    with programs._lock:
        programs._programs.clear()
        programs._small_programs.clear()
    jax.clear_caches()


def list_functions() -> set[str]:
    """Returns the names of all handlers and other functions of the library."""
    sources = (path.read_text() for path in FOLDER.glob("*.cc"))
    text = "".join(each for each in sources if "jboost_fail_threads" not in each)
    exported = r"extern \"C\" __attribute__\(\(visibility\(\"default\"\)\)\)"
    names = rf"(?:JBOOST_HANDLER\(|{exported}[\w\s*]*?)\bjboost_(\w+)"
    return set(re.findall(names, text))


def make_rows():
    """Returns numbers with gaps, whole numbers that stand for categories, targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    x[:, -1] = rng.integers(0, 40, ROWS)
    x[rng.random(x.shape) < 0.05] = np.nan
    known = np.nan_to_num(x)
    y = known[:, 0] + known[:, 1] * known[:, 2] + rng.standard_t(2, ROWS)
    return x, y.astype(np.float32)


def run_everything() -> None:
    """Trains and predicts so that every kernel runs at least once."""
    x, y = make_rows()
    positive = (y > 0).astype(np.float32)
    classes = np.digitize(y, [-1, 1]).astype(np.int32)
    weights = np.linspace(0, 2, ROWS, dtype=np.float32)
    gaps = scipy.sparse.csr_array(np.where(np.abs(x) < 1, np.nan_to_num(x), 0))
    mesh = jax.make_mesh(
        (2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:2],
    )  # fmt: skip
    fit = partial(jb.fit, num_rounds=2, max_depth=3)

    def stream(x, y, **settings):
        batches = [(x[:3000], y[:3000]), (x[3000:], y[3000:])]
        return fit(jb.stream(batches, memory="1 GB", block_rows=1000), **settings)

    fit(x, y, jb.losses.absolute_error, sample_weight=weights)
    fit(x, positive, jb.losses.logistic, subsample=0.5, colsample_bynode=0.5)
    fit(x, classes, jb.losses.softmax, num_scores=3, max_bins=400)
    fit(x, y, categorical=[FEATURES - 1], max_leaves=6, monotone=[1] + [0] * 6)
    fit(x, y, interactions=[[0, 1, 2], [3, 4, 5, 6]])
    fit(x, y, candidates="exact")
    fit(x, y, candidates="local", max_bins=64)
    fit(x, y, candidate_weights="curvature", max_bins=64)
    fit(gaps, y)
    fit(x, y, jb.losses.absolute_error, mesh=mesh)
    fit(x, y, categorical=[FEATURES - 1], mesh=mesh)
    stream(x, y, loss=jb.losses.absolute_error)
    stream(x, positive, loss=jb.losses.logistic, subsample=0.5)
    bins = jb.fit_bins(x, sample_weight=weights, implementation="cpu")
    binned = jb.apply_bins(bins, x)
    jb.parts.build_histogram(binned, y)
    model, _ = fit(x, y)
    for predict in jb.predict, jb.staged_predict, jb.leaf_indices:
        jax.block_until_ready(jax.jit(predict)(model, x))
    jb.shap_values(model, x[:300])
