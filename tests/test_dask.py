# SPDX-License-Identifier: Apache-2.0
"""Dask clusters: the model of one process, predictions by partition, refusals.

experiments/clusters.py has more losses and workers, killed workers, and Ray.
"""

import os
import time

import jax
import numpy as np
import pandas as pd
import pytest
import scipy.sparse

import jboost as jb

SHORT = dict(num_rounds=3, max_depth=2)
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Dask itself
da = pytest.importorskip("dask.array")
dd = pytest.importorskip("dask.dataframe")
dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def client():
    """Two workers in this process; training processes run beside them."""
    flags = os.environ["XLA_FLAGS"].rpartition(" --xla_force_host_platform")[0]
    with (
        pytest.MonkeyPatch.context() as patch,
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        patch.setenv("XLA_FLAGS", flags)  # one device for each process
        yield client


@pytest.fixture(scope="module")
def table():
    """Rows with gaps, an odd index, and a category that not all partitions have."""
    rng = np.random.default_rng(0)
    x = pd.DataFrame(rng.normal(size=(600, 2)), columns=["a", "b"])
    x.loc[rng.random(600) < 0.1, "a"] = np.nan
    x["c"] = pd.Categorical(np.where(np.arange(600) < 500, "p", "q"))
    x.index = 10 * x.index + 7
    y = x.b + (x.c == "q") + rng.normal(size=600)
    weights = pd.Series(rng.integers(1, 4, 600), index=x.index)
    return x, y, weights


@pytest.fixture(scope="module")
def model(table):
    x, y, weights = table
    return jb.fit(x, y, jb.losses.huber, sample_weight=weights, **SHORT)[0]


def test_training_on_a_cluster_is_that_of_one_process(client, table, model):
    """The second call has the processes of the first one."""
    x, y, weights = (dd.from_pandas(each, npartitions=3) for each in table)
    settings = dict(sample_weight=weights, **SHORT)
    seen = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="of 600 rows move between workers"):
            found, history = jb.dask.fit(client, x, y, jb.losses.huber, **settings)
        for own, expected in zip(*map(jax.tree.leaves, (found, model)), strict=True):
            np.testing.assert_array_equal(own, expected)
        assert len(history.train_loss) == 3
        seen.append({child.pid for child in jb.dask._children.values()})
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2
    with pytest.raises(ValueError, match="num_rounds must"):
        jb.dask.fit(client, x, y, num_rounds=-1)
    end = time.monotonic() + 30
    while jb.dask._children and time.monotonic() < end:
        time.sleep(0.01)
    assert not jb.dask._children  # an error ends them


def test_predictions_keep_divisions_and_index(table, model):
    x, *_ = table
    expected = jb.predict(model, x)
    parts = dd.from_pandas(x, npartitions=4)
    found = jb.dask.predict(model, parts)
    assert found.divisions == parts.divisions
    with dask.config.set(scheduler="sync"):
        found = found.compute()
        pieces = dask.compute(jb.dask.predict(model, [*parts.to_delayed()]))[0]
    pd.testing.assert_series_equal(
        found, pd.Series(expected, index=x.index), check_names=False
    )
    np.testing.assert_array_equal(np.concatenate(pieces), expected)


@pytest.mark.parametrize("num_scores", [1, 3])
def test_arrays_are_predicted_by_block(num_scores):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4)).astype(np.float32)
    y = rng.integers(0, 3, 90)
    loss = jb.losses.softmax if num_scores == 3 else jb.losses.squared_error
    model, _ = jb.fit(x, y, loss, num_scores=num_scores, **SHORT)
    blocks = da.from_array(x, chunks=(40, 2))
    found = jb.dask.predict(model, blocks)
    expected = jb.predict(model, x)
    assert found.shape == expected.shape
    with dask.config.set(scheduler="sync"):
        np.testing.assert_array_equal(found.compute(), expected)


def test_bad_collections_are_refused(client, table):
    x, y, _ = (dd.from_pandas(each, npartitions=3) for each in table)
    sparse = [dask.delayed(scipy.sparse.csr_array)(np.eye(3))]
    short = dd.from_pandas(table[1][:590], npartitions=3)
    for error, message, arguments in [
        (TypeError, "x must be a Dask data frame", (table[0], y)),
        (ValueError, r"y, sample_weight and offset .* 3 partitions", (x, [y, y])),
        (TypeError, "x must be dense on a cluster", (sparse, sparse)),
        (ValueError, "same rows, got .* in partition", (x, short)),
    ]:
        with pytest.raises(error, match=message):
            jb.dask.fit(client, *arguments)
    with pytest.raises(ValueError, match="groups must not be given here"):
        jb.dask.fit(client, x, y, groups=y)
