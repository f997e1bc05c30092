# SPDX-License-Identifier: Apache-2.0
"""Without memory, functions raise errors; they work again when there is some."""

import os
import subprocess
import sys

import pytest

SANITIZED = any(name in os.environ for name in ("ASAN_OPTIONS", "TSAN_OPTIONS"))
PROCESS = """
import resource, jax, numpy as np, jboost as jb
from jboost.entry.memory import release_free_memory

rng = np.random.default_rng(0)
x = rng.normal(size=(60_000, 8)).astype(np.float32)
y = x[:, 0] + x[:, 1] ** 2
model, _ = jb.fit(x, y, num_rounds=8)
blocks = [(x[i : i + 10_000], y[i : i + 10_000]) for i in range(0, len(x), 10_000)]
stream = lambda: jb.stream(blocks, memory="1 GB")
tree = lambda: jb.cart.fit_tree(x, y, max_depth=3)
FUNCTIONS = dict(
    fit=lambda: jb.fit(x, y, num_rounds=8)[0],
    stream=lambda: jb.fit(stream(), num_rounds=4)[0],
    predict=lambda: jb.predict(model, x),
    stages=lambda: jb.staged_predict(model, x),
    leaves=lambda: jb.leaf_indices(model, x),
    shap=lambda: jb.shap_values(model, x),
    cart=lambda: np.asarray(tree().threshold),
)


def limit(more):
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    new = used + more if more else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (new, resource.RLIM_INFINITY))


def compare(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


for name, function in FUNCTIONS.items():
    expected = jax.block_until_ready(function())
    for kilobytes in 500, 1500, 3000, 12000:
        found = None
        release_free_memory()
        limit(1000 * kilobytes)
        try:
            found = jax.block_until_ready(function())
            outcome = "result"
        except (MemoryError, jb.TrainingError, jax.errors.JaxRuntimeError) as error:
            limit(0)
            outcome = type(error).__name__
            text = str(error)
            if outcome == "TrainingError":
                compare(error.model, jb.truncate(expected, error.model.num_rounds))
        limit(0)
        again = jax.block_until_ready(function())
        compare(again, expected)
        compare(again if found is None else found, expected)
        print(name, kilobytes, outcome, "" if outcome == "result" else text[:120])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of Linux")
@pytest.mark.skipif(SANITIZED, reason="sanitizers need much address space")
def test_functions_raise_where_memory_is_limited():
    # One heap, which returns what is free, so that little is left below the limit.
    heap = dict(
        MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="65536",
        MALLOC_TRIM_THRESHOLD_="65536",
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", PROCESS], env=os.environ | heap, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "MemoryError" in ended.stdout, "memory was not short"
