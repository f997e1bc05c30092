# SPDX-License-Identifier: Apache-2.0
"""Runs the tests strictly: no silent promotion, and annotated shapes are checked."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile

import elsewhere
import jax
import pytest
from shape_checks import install

# Most of the time goes into compiling small programs once. With these flags XLA does so
# in a third of it; results are as exact, if slower to come. The flags are its own and
# may go: then tests take longer. Most processes that tests start do without them, and
# test_as_compiled.py repeats there what must agree bit for bit. XLA_FLAGS="" in the
# environment compiles everything as users do.
QUICK = (
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 "  # the other cores run other tests
    "--xla_llvm_disable_expensive_passes=true"
)
if "XLA_FLAGS" not in os.environ:
    known = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=os.environ | {"XLA_FLAGS": QUICK}, capture_output=True, check=False,
    )  # fmt: skip
    os.environ["XLA_FLAGS"] = "" if known.returncode else QUICK

# Several devices, for the tests of meshes; the others use the first one.
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# A tenth of the time goes into garbage collection, and some into names of source lines
# in programs that nobody reads.
gc.set_threshold(100_000, 50, 100)
jax.config.update("jax_traceback_in_locations_limit", 0)

install()  # before jboost is imported
elsewhere.install(os.environ.get("JBOOST_TEST_PLATFORM") == elsewhere.NAME)

from jboost.boosting import settings  # noqa: E402
from jboost.entry import programs  # noqa: E402

programs.MOST_PROGRAMS = 128  # tests share more than users do


@pytest.fixture
def full_search(monkeypatch):
    """Makes "auto" stand for all rows and all thresholds.

    For tests with references that know of no draws, or with too few rows to draw from.
    """
    draw_nothing(monkeypatch)


@pytest.fixture(scope="module")
def full_search_of_file():
    """The same for all tests of a file and what they share."""
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        yield


@pytest.fixture
def constant_leaves(monkeypatch):
    """Makes leaves constant: sparse rows, streams and codes have no others."""
    monkeypatch.setattr(settings, "LINEAR_LEAVES", False)


@pytest.fixture(scope="module")
def constant_leaves_of_file():
    """The same for all tests of a file and what they share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "LINEAR_LEAVES", False)
        yield


def draw_nothing(patch):
    """Changes what "auto" stands for."""
    patch.setattr(settings, "SUBSAMPLE", 1.0)
    patch.setattr(settings, "ROWS_PER_THRESHOLD", 0)


@pytest.fixture
def young_heap():
    """Garbage collection leaves out what older tests left: it would take seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


# Tests that need arrays on a CPU: of its kernels, and of several devices.
ON_CPU = (
    "test_*_kernels.py", "test_as_compiled.py", "test_elsewhere.py",
    "test_implementation.py", "test_kernel_safety.py", "test_mesh*.py", "test_modes.py",
    "test_shard*.py", "test_stages.py",
)  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Skips what cannot run here.

    Leaves to test_as_compiled.py, where it runs, what it runs without the flags.
    """
    if jax.default_backend() == "gpu":
        skip = pytest.mark.skip(reason="needs arrays on a CPU")
        for item in items:
            if any(map(item.path.match, ON_CPU)):
                item.add_marker(skip)
    if not any(item.path.name == "test_as_compiled.py" for item in items):
        return
    from test_as_compiled import find_chosen

    chosen = {id(item) for item in find_chosen(items)[0]}
    config.hook.pytest_deselected(items=[i for i in items if id(i) in chosen])
    items[:] = [item for item in items if id(item) not in chosen]


def pytest_configure(config):
    """The processes that share the tests share what they compile, for this run.

    Where JAX is told to keep programs for longer, it does.
    """
    kept = "JAX_COMPILATION_CACHE_DIR" in os.environ
    if not kept and not hasattr(config, "workerinput"):
        config.programs = tempfile.mkdtemp(prefix="jboost-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.programs
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"


def pytest_unconfigure(config):
    """Removes it."""
    if hasattr(config, "programs"):
        shutil.rmtree(config.programs, ignore_errors=True)
