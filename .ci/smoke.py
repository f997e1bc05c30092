# SPDX-License-Identifier: Apache-2.0
"""Smoke test of an installed jboost: calls each CPU kernel, compares with plain XLA.

It needs only jboost and the packages that jboost installs. `python .ci/smoke.py xla`
is for an installation without the kernels.
"""

import os
import sys
import tempfile
import time
from functools import partial
from importlib.resources import files
from pathlib import Path

flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental.sparse import BCOO  # noqa: E402

import jboost as jb  # noqa: E402

ROWS, FEATURES = 3001, 5
REPEATS = 40  # for few rows of a frequent shape, a program is compiled
BEST = sys.argv[1] if len(sys.argv) > 1 else "cpu"
KERNELS = ("xla", "cpu") if BEST == "cpu" else ("xla",)
L = jb.losses

rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
x[:, -1] = rng.integers(0, 40, ROWS)
x[rng.random(x.shape) < 0.05] = np.nan
known = np.nan_to_num(x)
y = (known[:, 0] + known[:, 1] * known[:, 2] + rng.normal(size=ROWS)).astype(np.float32)
weights = np.linspace(0, 2, ROWS, dtype=np.float32)
positive = (y > 0).astype(np.float32)
classes = np.digitize(y, [-1, 1]).astype(np.int32)
groups = np.arange(ROWS) // 10
gaps = BCOO.fromdense(np.where(np.abs(known) < 1, known, 0))
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((2,), ("rows",), axis_types=auto)


def stream(y):
    """Returns the rows as a stream."""
    halves = [(x[:2000], y[:2000]), (x[2000:], y[2000:])]
    return jb.stream(halves, memory="1 GB", block_rows=1000)


def sum_by_group(scores, targets, *, where):
    """Returns the loss of a group."""
    return (where * (scores - targets)).sum() ** 2


RUNS = {
    "medians": ((x, y, L.absolute_error), dict(sample_weight=weights)),
    "a sample": ((x, positive, L.logistic), dict(subsample=0.5)),
    "three scores": ((x, classes, L.softmax), dict(num_scores=3, max_bins=400)),
    "categories": ((x, y), dict(categorical=[FEATURES - 1])),
    "limits": ((x, y), dict(max_leaves=6, monotone={0: 1}, interactions=[[0, 1, 2]])),
    "all thresholds": ((x, y), dict(candidates="exact")),
    "thresholds of nodes": ((x, y), dict(candidates="local", max_bins=64)),
    "weighted": ((x, y), dict(candidate_weights="curvature", max_bins=64)),
    "sparse": ((gaps, y), {}),
    "groups": ((x, y, sum_by_group), dict(groups=groups)),
    "two devices": ((x, y, L.absolute_error), dict(mesh=mesh)),
    "two devices, categories": ((x, y), dict(categorical=[FEATURES - 1], mesh=mesh)),
    "stream": ((stream(y), None, L.absolute_error), {}),
    "linear leaves": ((x, y), dict(linear_leaves=True)),
}
# Plain XLA takes ten times as long to compile, so that only these run on both.
COMPARED = "medians", "categories", "all thresholds", "sparse", "linear leaves"


def train(name, kernels):
    """Returns predictions of a new model."""
    args, settings = RUNS[name]
    settings = dict(num_rounds=2, max_depth=2, implementation=kernels) | settings
    model, _ = jb.fit(*args, **settings)
    return jb.predict(model, x, implementation=kernels)


def use(model, kernels):
    """Returns all that kernels compute with a model."""
    rows, how = x[:500], dict(implementation=kernels)
    calls = jb.predict, jb.staged_predict, jb.leaf_indices
    results = [call(model, rows, **how) for call in calls]
    results += [jax.jit(partial(call, **how))(model, rows) for call in calls]
    results += [jb.predict(model, np.tile(x, (20, 1)), **how)]  # on several threads
    results += [jb.predict(model, rows[:1], **how) for _ in range(REPEATS)]
    results += [jb.predict(model, gaps, **how)]
    bins = jb.fit_bins(x, sample_weight=weights, **how)
    codes = jb.apply_bins(bins, x, **how)
    return [*results, codes]


def compare(name, make, kernels=KERNELS, error=0.0):
    """Checks that all kernels give the same finite numbers."""
    begun = time.perf_counter()
    for made in zip(*(jax.tree.leaves(make(each)) for each in kernels), strict=True):
        first, *others = (np.asarray(each, np.float64) for each in made)
        assert np.isfinite(first).all(), name
        for other in others:
            most = np.abs(first - other).max()
            assert most <= error, f"{name}: kernels and XLA differ by {most}"
    print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)


def check_files(model):
    """Checks what is written and what the package brings."""
    with tempfile.TemporaryDirectory() as folder:
        jb.save(model, path := Path(folder) / "model")
        assert np.array_equal(jb.predict(jb.load(path), x), jb.predict(model, x))
        page = jb.report(model, x[:300], y[:300], path=Path(folder) / "report.html")
        assert page.read_text().startswith("<!DOCTYPE html>")
    names = "py.typed", "__init__.pyi", "kernels/cuda/prelude.h", "reports/trees.js"
    for name in names:
        assert files("jboost").joinpath(name).is_file(), name
    assert not files("jboost").joinpath("kernels/native").is_dir()


def main():
    """Runs all checks."""
    found = jb.implementations()
    print(
        f"jboost {jb.__version__} in {Path(jb.__file__).parent}, JAX", jax.__version__
    )
    print(found)
    instructions = found.pop("instructions")
    assert set(found.values()) == {BEST}, f"expected {BEST}"
    assert instructions == os.environ.get("JBOOST_ISA", instructions)
    for name in RUNS:
        kernels = KERNELS if name in COMPARED else (BEST,)
        compare(name, partial(train, name), kernels)
    model, _ = jb.fit(x, y, num_rounds=5, max_depth=4)
    compare("use of a model", partial(use, model))
    shap = partial(jb.shap_values, model, x[:50])
    compare("SHAP", lambda each: shap(implementation=each).values, error=1e-6)
    tree = jb.cart.fit_tree(known[:300], y[:300], max_depth=4)
    compare("one tree", lambda each: jb.predict(tree, x, implementation=each))
    jb.parts.build_histogram(jb.apply_bins(jb.fit_bins(x), x), y)
    check_files(model)
    print("passed")


if __name__ == "__main__":
    main()
