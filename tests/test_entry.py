# SPDX-License-Identifier: Apache-2.0
"""Public functions under JAX's transformations and settings, and after a fork."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from public_names import find_public_functions
from tables import ROWS, make_regression

import jboost as jb
from jboost.codes.binning import bin_columns
from jboost.entry import decorators as entry
from jboost.entry import importing
from jboost.entry import programs as executables
from jboost.entry.context import use_implementation
from jboost.objective.evaluation import Objective
from jboost.objective.minimizers import find_kinks
from jboost.objective.tracing import trace_loss
from jboost.trees import leaf_operations

L = jb.losses
X, Y = make_regression()
KEY = jax.random.key(0)
SMALL = dict(num_rounds=2, max_depth=3)
BINS = jb.fit_bins(X)
CODES = jb.apply_bins(BINS, X)
MODEL, _ = jb.fit(X, Y, L.squared_error, **SMALL)  # type: ignore
SKETCH = jb.sketches.update_sketch(jb.sketches.make_sketch(3), X)
SUMMARY = jb.sketches.make_summary(X[:, 0])
TREE = jb.cart.fit_tree(X, Y, max_depth=2)


def boost(loss=L.squared_error, **settings):
    return jb.boost(CODES, Y, loss, KEY, **{**SMALL, **settings})


# ---- every public function has been considered ---------------------------------------

# These run neither JAX nor anything that a traced value could enter.
PLAIN = {
    "array_batches", "implementations", "make_groups", "make_sketch",
    "merge_sketches", "parquet_batches", "random_groups", "rows", "stream",
}  # fmt: skip
# These are safe in a forked process, because they run NumPy only.
NUMPY = {
    "bound_ranks", "find_candidates", "find_thresholds", "make_summary",
    "merge_summaries", "prune_summary", "query_ranks", "save", "summarize_sketch",
    "update_sketch", "write_xgboost",
}  # fmt: skip
FUNCTIONS = {
    name.split(".")[-1]: function for name, function in find_public_functions().items()
}


def is_decorated(function):
    """By ours: type checkers wrap functions, too."""
    while function is not None:
        if function.__code__.co_filename == entry.__file__:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def test_public_functions_are_decorated():
    assert {n for n, f in FUNCTIONS.items() if not is_decorated(f)} == PLAIN


# ---- tracing -------------------------------------------------------------------------

TRACED = {
    "x": lambda v: jb.fit(v, Y, L.squared_error),
    "y": lambda v: jb.fit(X, v[:, 0], L.squared_error),
    "learning_rate": lambda v: jb.fit(X, Y, L.squared_error, learning_rate=v[0, 0]),
    "l2": lambda v: jb.cross_validate(X, Y, L.squared_error, l2=v[0, 0]),
    "validation": lambda v: jb.fit(X, Y, L.squared_error, validation=(v, Y)),
    "points": lambda v: jb.sweep(X, Y, L.squared_error, {"l2": [v[0, 0]]}),
    "sample_weight": lambda v: jb.fit_bins(X, sample_weight=v[:, 0]),
    "target": lambda v: jb.inspect_loss(L.squared_error, v[0, 0]),
    "metric": lambda v: jb.explanation.permutation_importance(
        MODEL, X, v, L.squared_error
    ),
    "values": lambda v: jb.sketches.make_summary(v[:, 0]),
    "sketch": lambda v: jb.sketches.update_sketch(SKETCH, v),
    "closes over": lambda v: jb.fit(X, Y, lambda s, t: (s - t) ** 2 * v[0, 0], **SMALL),
}


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
@pytest.mark.parametrize("name", [*TRACED])
def test_host_functions_refuse_traced_arguments(name, transform):
    """Also where the value hides in a container or in a closure."""
    shown = {"metric": "y", "sketch": "x", "points": "points"}.get(name, name)
    with pytest.raises(TypeError, match=rf"runs on the host.*\b{shown}\b"):
        transform(TRACED[name])(X if transform is jax.jit else X[None])


def test_errors_of_the_users_own_jit_are_theirs():
    """Only where jboost itself is traced is that the reason."""
    schedule = jax.jit(lambda number: 0.1 if number > 0 else 0.2)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jb.fit(X, Y, L.squared_error, learning_rate=schedule)


ON_MODELS = {
    "feature_importance": jb.feature_importance,
    "permutation_importance": lambda m: jb.explanation.permutation_importance(
        m, X, Y, L.squared_error
    ),
    "partial_dependence": lambda m: jb.partial_dependence(m, X, 0),
    "predict": lambda m: jb.predict(m, X),
    "predict sparse": lambda m: jb.predict(m, scipy.sparse.csr_matrix(X)),
    "staged_predict": lambda m: jb.staged_predict(m, X),
    "leaf_indices": lambda m: jb.leaf_indices(m, X),
    "truncate": lambda m: jb.truncate(m, 1),
    "shap_values": lambda m: jb.shap_values(m, X),
    "fit": lambda m: jb.fit(X, Y, L.squared_error, model=m),
    "refit": lambda m: jb.refit(m, X, Y),
    "refine": lambda m: jb.refine(m, X, Y),
    "write_xgboost": lambda m: jb.interchange.write_xgboost(m, "never"),
    "export_predict": lambda m: jb.interchange.export_predict(m, "never"),
}


@pytest.mark.parametrize("name", [*ON_MODELS])
def test_functions_of_a_model_refuse_several(name):
    """As vmap returns them; some of their arrays may be shared."""
    rates = jnp.array([0.1, 0.3])
    many = jax.vmap(lambda c: jax.tree.map(lambda a: a * c.astype(a.dtype), MODEL))
    with pytest.raises(ValueError, match=r"leaf_value.*\(2, 2, 1, 8\).*jax\.vmap"):
        ON_MODELS[name](many(rates))
    assert "(2, 2, 1, 8)" in repr(many(rates))


def test_training_may_be_held_constant():
    def scaled(v):
        settings = dict(learning_rate=jax.lax.stop_gradient(v), max_depth=1)
        return v * boost(**settings)[1].sum()

    value, slope = jax.value_and_grad(scaled)(0.5)
    np.testing.assert_allclose(slope, value / 0.5, rtol=1e-6)


# ---- settings of JAX -----------------------------------------------------------------


def test_debug_nans_finds_none_of_ours():
    """Rows without a minimizer, missing values, and sets of categories."""
    x, classes = np.where(X > 1, np.nan, X), np.arange(ROWS) % 2
    bins = jb.fit_bins(np.c_[classes], categorical=[0])
    tree, _ = jb.parts.grow_tree(
        jb.apply_bins(bins, np.c_[classes]), Y, categories=bins.categories, max_depth=1
    )
    trees = jb.parts.stack_trees([tree], 0.0)
    with jax.debug_nans(True):
        model, _ = jb.fit(x, classes, L.logistic, **SMALL)
        jb.predict(model, x)
        with use_implementation("xla"):
            bin_columns(BINS, x)
        jb.to_ensemble(trees, bins)


def test_no_minimizer_is_not_a_nan():
    state = jb.init(CODES, (Y > 0).astype(np.float32), L.logistic, KEY)
    assert np.all(np.isinf(state.minimizer))
    assert np.isnan(jb.inspect_loss(L.logistic, 1.0).minimizer)


def test_long_lists_are_not_searched_number_by_number(monkeypatch):
    looked = []
    search = entry._is_traced
    monkeypatch.setattr(entry, "_is_traced", lambda x: looked.append(0) or search(x))
    numbers = [0.5] * 1000
    assert not entry._is_traced(((numbers, [np.float32(1), None]), {"x": numbers}))
    assert len(looked) < 20
    mixed = jax.jit(lambda one: search(([*numbers, {0: 1, "x": [one]}], {})))
    assert mixed(1.0)


def test_disabled_jit_runs(monkeypatch):
    """Loops then count in Python, and NumPy arrays stay such."""
    monkeypatch.setattr(leaf_operations, "_DIGIT", 16)  # fewer steps
    y, ones, one = jnp.asarray(Y[:4]), jnp.ones(4), jnp.float32(1)
    traced, constants = trace_loss(L.absolute_error, y)
    objective = Objective(traced, constants, y, (), y[None])

    def search():
        medians = leaf_operations._find_plainly(
            y, 0 * ones, ones, one, 2 * one, one, jnp.arange(4) % 2, num_groups=2
        )
        return find_kinks(objective, ones).kind, medians, jb.predict(TREE, X)

    with jax.disable_jit():
        found = search()
        doubled = executables.compiled(lambda a: 2 * a)(np.ones(3, np.float32))
    for one, other in zip(found, jax.jit(search)(), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(doubled, 2)


@pytest.mark.parametrize(
    "run",
    [
        lambda: jb.fit(X, Y, L.squared_error, validation=(X, Y), **SMALL),
        lambda: jb.predict(MODEL, X, offset=Y),
        lambda: jb.predict(MODEL, scipy.sparse.csr_matrix(X)),
        lambda: jb.predict(jb.truncate(MODEL, 1), X, implementation="xla"),
        lambda: boost(),
        lambda: jb.shap_values(MODEL, X),
        lambda: jb.feature_importance(MODEL),
        lambda: jb.predict(TREE, X),
    ],
)
def test_transfers_that_a_call_implies_are_explicit(run):
    """test_modes.py looks at those of cross-validation."""
    with jax.transfer_guard("disallow"):
        run()
        with pytest.raises(RuntimeError, match="Disallowed"):
            jax.jit(lambda x: x + 1)(X)


def test_explicit_transfers_stay_disallowed():
    with jax.transfer_guard("disallow_explicit"), pytest.raises(RuntimeError):
        jb.predict(MODEL, X)


# ---- processes -----------------------------------------------------------------------

IMPORTED_LATE = """
    import os, signal
    import jax.numpy
    jax.numpy.zeros(1)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a deadlock ends
        import jboost as jb
        try:
            jb.fit([[0.0], [1.0]], [0.0, 1.0])
        except RuntimeError as error:
            os._exit(7 if "spawn" in str(error) else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_forked_processes_that_import_the_package_later_are_refused():
    """They would wait forever for threads of JAX, which are not there."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(IMPORTED_LATE)], check=True)


@pytest.mark.parametrize(
    ("variables", "worker", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, True, "3"),
        ({"OMP_NUM_THREADS": "3"}, False, None),
        ({"OMP_NUM_THREADS": "3", "PJRT_NPROC": "5"}, True, "5"),
        ({"OMP_NUM_THREADS": "3", "NPROC": "5"}, True, None),
        ({}, True, None),
    ],
)
def test_workers_keep_to_their_share_of_threads(
    variables, worker, expected, monkeypatch
):
    for name in ("OMP_NUM_THREADS", "PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parent = object() if worker else None
    monkeypatch.setattr(importing.multiprocessing, "parent_process", lambda: parent)
    importing.limit_threads()
    assert os.environ.get("PJRT_NPROC") == expected
    os.environ.pop("PJRT_NPROC", None)


IMPORTS = """
    import functools, io, os, signal, sys
    sys.modules["scipy.sparse"] = None  # an import of it fails
    import jboost as jb
    names = {"jax", "sklearn", "matplotlib", "pyarrow", "scipy"}
    print(*sorted(names & {*sys.modules}))

    def fork(child):
        if not hasattr(os, "fork"):
            return
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # a deadlock ends
            child()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    fork(lambda: jb.fit_bins([[0.0], [1.0]]))  # JAX has not started
    import jax, jax.numpy as jnp

    @jax.jit
    def train(codes, y):
        return jb.boost(codes, y, lambda score, target: (score - target) ** 2,
                        jax.random.key(0), num_rounds=1, max_depth=1, max_bins=4)

    codes, y = jnp.arange(8, dtype=jnp.uint8).reshape(4, 2) % 4, jnp.arange(4.0)
    assert train(codes, y) is not None
    import jboost.kernels.histogram_tpu, jboost.plotting
    jb.fit  # imports what training needs
    print(*sorted({"narwhals", "jax.experimental.pallas"} & {*sys.modules}))
    model, _ = jb.fit([[0.0], [1.0]], [0.0, 1.0], num_rounds=1, max_depth=1)
    print(*sorted({"matplotlib", "jax.experimental.sparse"} & {*sys.modules}))
    sys.modules["sklearn"] = None
    try:
        import jboost.sklearn
    except ImportError as error:
        print(error)

    def refused():
        for name in sys.argv[1].split():
            try:
                functools.reduce(getattr, name.split("."), jb)()
            except RuntimeError as error:
                for word in (name.split(".")[-1], "spawn", "loky", "threads"):
                    assert word in str(error), (name, error)
        jb.save(model, file := io.BytesIO())
        assert jb.sketches.make_summary([1.0]) and file.tell()

    fork(refused)

    def go_on(number, history, model):
        pid = os.fork() if number == 0 else 1
        if pid == 0:
            signal.alarm(60)
        elif number == 0:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    first = os.getpid()
    try:
        if hasattr(os, "fork"):
            given = dict(num_rounds=3, max_depth=1, callbacks=go_on)
            jb.fit([[0.0], [1.0]], [0.0, 1.0], **given)
    except RuntimeError as error:
        os._exit(7 if os.getpid() != first and "spawn" in str(error) else 8)
"""


def test_packages_are_imported_where_they_are_needed_and_forks_are_refused():
    """JAX takes most of the time of a small script; arrays need no data frames.

    Pallas is for TPUs only. The first call may be inside jit: modules that it imports
    must not take the trace for JAX's usual state.

    A forked process may save the model of its parent, but trains no further: it would
    wait forever for threads of JAX, which are not there.
    """
    skipped = PLAIN | NUMPY
    names = [n for n in find_public_functions() if n.split(".")[-1] not in skipped]
    command = [sys.executable, "-c", textwrap.dedent(IMPORTS), " ".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    needed = "jboost.sklearn needs scikit-learn, which is not installed: pip install "
    assert done.stdout == f"\n\n\n{needed}scikit-learn\n"


def test_a_name_that_is_elsewhere_is_answered_with_its_home():
    with pytest.raises(AttributeError, match=r"jboost\.interchange\.read_xgboost"):
        jb.read_xgboost  # noqa: B018
    assert not hasattr(jb, "no_such_name")
