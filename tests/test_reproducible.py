# SPDX-License-Identifier: Apache-2.0
"""The same data and seed give the same bytes for any number of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Enough rows for the compiler to share the work between threads. Pinning comes
# before the import of JAX, which counts cores when it starts its threads.
SCRIPT = """
import os, sys
if sys.argv[1] == "one":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import hashlib
import jax, numpy as np, jboost as jb
from functools import partial

generator = np.random.default_rng(0)
x = generator.normal(size=(20_000, 5)).astype(np.float32)
y = x[:, 0] * x[:, 1] + generator.standard_t(3, size=20_000)
quantile = partial(jb.losses.quantile, tau=0.8)
for loss, y in ((jb.losses.logistic, y > 0), (quantile, y)):
    model, history = jb.fit(
        x, y, loss, num_rounds=6, max_depth=2, subsample=0.7, colsample_bynode=0.5
    )
    digest = hashlib.sha256()
    for array in jax.tree.leaves(model):
        digest.update(np.asarray(array).tobytes())
    digest.update(history.train_loss.tobytes())
    print(model.num_rounds, digest.hexdigest())
"""


def start(cores):
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, cores],
        env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cores():
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else 1


@pytest.mark.skipif(cores() < 2, reason="needs two cores to compare with one")
def test_any_number_of_threads():
    processes = [start("one"), start("all")]
    results = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    alone, together = (out.split("\n") for out, _ in results)
    assert len([line for line in alone if line.startswith("6 ")]) == 2
    assert alone == together
