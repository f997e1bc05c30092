# SPDX-License-Identifier: Apache-2.0
"""Trains and predicts on a device that is not the CPU, with the same bits."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import references
from elsewhere import NAME, find_device
from implementations import needs_cpu_kernels

import jboost as jb
from jboost.codes.codes import DenseCodes
from jboost.numerics.random import sample_in_xla
from jboost.trees.histogram import sum_plain_histogram

DEVICE = find_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="JAX_PLATFORMS names others")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 5)).astype(np.float32)
Y = X[:, 0] + X[:, 1] ** 2
WEIGHTS = RNG.integers(0, 4, len(Y)).astype(np.float32)
SETTINGS = dict(num_rounds=2, max_depth=2, subsample=0.5, colsample_bynode=0.6)


def fit(**settings):
    settings = {**SETTINGS, "sample_weight": WEIGHTS, "validation": (X, Y), **settings}
    return jb.fit(X, Y, **settings)


@pytest.fixture(scope="module")
def here():
    """The model and its history from the CPU, with its kernels if there are any."""
    return fit()


@pytest.fixture(scope="module")
def there():
    with jax.default_device(DEVICE):
        return fit()


def assert_same(left, right):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def platforms(arrays):
    return {d.platform for array in jax.tree.leaves(arrays) for d in array.devices()}


def test_models_have_the_same_bits(here, there):
    assert_same(there[0], here[0])
    assert_same(there[1].train_loss, here[1].train_loss)
    assert platforms(there[0]) == {NAME}


def test_predictions_are_made_there(here, there, monkeypatch):
    monkeypatch.setattr("jboost.model.preparing._FEW_STEPS", 0)
    expected = jb.predict(here[0], X, implementation="xla")
    with jax.default_device(DEVICE):
        found = jb.predict(there[0], X)
        # The model is copied to the host once.
        monkeypatch.setattr("jboost.model.preparing._pad_model", None)
        again = jb.predict(there[0], X)
    assert platforms((found, again)) == {NAME}
    assert_same((found, again), (expected, expected))


@needs_cpu_kernels
def test_the_host_helps_out_with_few_rows_and_explanations(here, there, monkeypatch):
    """Starting a program there takes longer."""
    offset = np.linspace(0, 1, len(X), dtype=np.float32)
    operations = (
        lambda model: [jb.predict(model, X[:1]) for _ in range(20)],
        lambda model: jb.predict(model, X, offset=offset),
        lambda model: (jb.staged_predict(model, X), jb.leaf_indices(model, X)),
        lambda model: jb.shap_values(model, X),
    )
    expected = [operation(here[0]) for operation in operations]
    for program in ("model.preparing.pad_rows", "explanation.shap._explain_matrix"):
        monkeypatch.setattr(f"jboost.{program}", None)
    with jax.default_device(DEVICE):
        found = [operation(there[0]) for operation in operations]
    assert platforms(found) == {NAME}
    assert_same(found, expected)


@pytest.mark.parametrize("operation", [jb.predict, jb.staged_predict, jb.leaf_indices])
def test_many_rows_are_not_copied_to_the_host(here, there, operation, monkeypatch):
    expected = operation(here[0], X[:333], implementation="xla")
    with jax.default_device(DEVICE):
        operation(there[0], X)  # keeps the model
    for module in ("jboost.numerics.arrays", "jboost.model.ensemble"):
        monkeypatch.setattr(f"{module}._MANY_BYTES", 0)
    others = {name: getattr(np, name) for name in dir(np) if name != "asarray"}
    monkeypatch.setattr("jboost.numerics.arrays.np", SimpleNamespace(**others))
    with jax.default_device(DEVICE):
        found = operation(there[0], jax.device_put(X[:333], DEVICE))
    assert platforms(found) == {NAME}
    assert_same(found, expected)


@pytest.mark.parametrize("most", [0, 2**40])
def test_rows_follow_the_model(here, there, most, monkeypatch):
    """However many they are."""
    for module in ("jboost.numerics.arrays", "jboost.model.ensemble"):
        monkeypatch.setattr(f"{module}._MANY_BYTES", most)
    cpu = jax.local_devices(backend="cpu")[0]
    expected = jb.predict(here[0], X, implementation="xla")
    model = jax.device_put(there[0], DEVICE)
    found = jb.predict(model, jax.device_put(X, cpu))
    assert platforms(found) == {NAME}
    assert_same(found, expected)
    found = jb.predict(jax.device_put(here[0], cpu), jax.device_put(X, DEVICE))
    assert platforms(found) == {"cpu"}
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("children", "most"), [(True, 1), (True, 2000), (False, 2000), (False, 10**6)]
)
def test_histograms_of_groups_of_features(children, most, monkeypatch):
    monkeypatch.setattr("jboost.kernels.xla._MOST_CELLS", most)
    columns = RNG.integers(0, 8, (5, 400)).astype(np.uint8)
    values = RNG.integers(-99, 99, (400, 3)).astype(np.int32)
    node = np.where(np.arange(400) % 2, RNG.integers(0, 3, 400), -1).astype(np.int32)
    with jax.default_device(DEVICE):
        rows = map(jax.numpy.asarray, (values, node))
        codes = DenseCodes(jax.numpy.asarray(columns))
        count = np.bincount(node[node >= 0], minlength=3).astype(np.int32)
        rows = *rows, True, jax.numpy.asarray(count) if children else None
        found = sum_plain_histogram(codes, *rows, num_nodes=3, num_bins=8)
    expected = references.histogram(columns, values, node, 3, 8)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("few", [True, False])
def test_codes_are_made_there(few, monkeypatch):
    monkeypatch.setattr("jboost.codes.binning._FEW_CELLS", X.size if few else 0)
    x = X.copy()
    x[0, 0] = np.nan
    bins = jb.fit_bins(x)
    with jax.default_device(DEVICE):
        codes = jb.apply_bins(bins, x)
        prepared = jb.parts.prepare_codes(codes)
    assert platforms((codes, prepared)) == {NAME}
    assert prepared.packed is None  # for CPU kernels
    assert_same(codes, jb.apply_bins(bins, x, implementation="xla"))


def test_rows_on_the_cpu_are_moved(there, monkeypatch):
    """They would take the programs of the rounds with them."""
    monkeypatch.setattr("jboost.codes.binning._FEW_CELLS", 0)
    cpu = jax.local_devices(backend="cpu")[0]
    x = jax.device_put(X, cpu)
    with jax.default_device(DEVICE):
        model, _ = jb.fit(
            x, Y, sample_weight=WEIGHTS, validation=(x, Y), **SETTINGS
        )  # fmt: skip
    assert platforms(model) == {NAME}
    assert_same(model, there[0])


def test_samples_are_the_same():
    """Rows are sampled by sorting there, and by counting on a CPU."""
    share = np.float32(0.37)
    seed = np.array([3, 4], np.uint32)
    run = jax.jit(sample_in_xla)
    cpu = run(seed, WEIGHTS > 0, share)
    with jax.default_device(DEVICE):
        other = run(seed, WEIGHTS > 0, share)
    assert platforms(other) == {NAME}
    assert_same(other, cpu)
