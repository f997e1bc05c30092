# SPDX-License-Identifier: Apache-2.0
"""Training where a Ray cluster holds the rows.

``fit`` divides the rows of a ``ray.data.Dataset`` in their order among the workers of a
``JaxTrainer``, which train as the page "Many machines" describes. For predictions, give
a model to the dataset:

    dataset.map_batches(lambda part: {"score": jb.predict(model, part[features])},
                        batch_format="pandas")
"""

import pickle
import socket
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax

from jboost import losses
from jboost.dask import ClusterTask, dump, refuse_settings, train_share
from jboost.training.record import Trained

_FOUND = "model_and_history.pickle"


def fit(
    dataset: Any,
    label: str | Sequence[str],
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
    scaling_config: Any,
    run_config: Any = None,
    validation: Any = None,
    sample_weight: str | None = None,
    offset: str | Sequence[str] | None = None,
    **settings: Any,
) -> Trained:
    """Trains on the workers of a Ray cluster.

    The dataset is executed once, its blocks in order, and each worker gets the next
    share of rows: the model has the bits of ``jb.fit`` on ``dataset.to_pandas()``, for
    any number of workers and blocks.

    Args:
      dataset: a ``ray.data.Dataset`` of features, targets, weights and offset.
      label, sample_weight, offset: columns; several for several scores.
      loss: any loss of :func:`jboost.fit`, but not of groups.
      scaling_config: a ``ray.train.ScalingConfig``: workers, and CPUs of each.
      run_config: a ``ray.train.RunConfig``: where results are kept, how often a failed
        run starts again. With ``checkpoint`` it goes on where it was.
      validation: a dataset with the same columns, or a dict of such.
      **settings: the other arguments of :func:`jboost.fit`, but groups, mesh and
        implementation. All workers see the path ``checkpoint``, and run callbacks.

    Returns:
      The model and its history.

    Raises:
      ValueError: a column is not there, or an argument must not be given.
      ray.train.TrainingFailedError: training failed; names the error of a worker.

    Example:
      >>> import jboost as jb, jboost.ray, ray  # doctest: +SKIP
      >>> from ray.train import ScalingConfig  # doctest: +SKIP
      >>> rows = ray.data.range(99).add_column("y", lambda t: -t.id)  # doctest: +SKIP
      >>> workers = ScalingConfig(num_workers=2)  # doctest: +SKIP
      >>> model, _ = jb.ray.fit(rows, "y", scaling_config=workers)  # doctest: +SKIP
    """
    data: Any = import_module("ray.train").DataConfig
    trainer: Any = import_module("ray.train.v2.jax").JaxTrainer
    refuse_settings(settings)
    sets = validation if isinstance(validation, dict) else {"": validation}
    datasets = {"training": dataset} | {
        f"validation {name}": each for name, each in sets.items() if each is not None
    }
    columns = label, sample_weight, offset
    used = {name for role in columns for name in _list(role)}
    for name, each in datasets.items():
        if missing := sorted(used.difference(each.columns())):
            raise ValueError(
                f"the {name.strip()} dataset must have the columns {missing}, has "
                f"{each.columns()}"
            )

    # Now: once the workers run, no CPU may be left for the tasks of datasets.
    shares = {
        name: _divide(each, scaling_config.num_workers)
        for name, each in datasets.items()
    }

    class InOrder(data):
        """Gives each worker the rows that follow those of the worker before it."""

        def configure(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
            """Returns the shares of the workers."""
            return [
                {name: each[rank].iterator() for name, each in shares.items()}
                for rank in range(scaling_config.num_workers)
            ]

    task = ClusterTask(loss, settings, isinstance(validation, dict))
    result = trainer(
        _work,
        train_loop_config=dict(
            task=dump(task),
            columns=columns,
            names=[*datasets],
        ),
        scaling_config=scaling_config,
        run_config=run_config,
        datasets=datasets,
        dataset_config=InOrder(),
    ).fit()
    with result.checkpoint.as_directory() as folder:
        return Trained(*pickle.loads((Path(folder) / _FOUND).read_bytes()))


def _list(role):
    return () if role is None else (role,) if isinstance(role, str) else (*role,)


def _divide(dataset, count):
    """Splits a dataset into parts of as many rows, in order."""
    dataset.context.execution_options.preserve_order = True
    dataset = dataset.materialize()
    total = dataset.count()
    if total < count:
        raise ValueError(
            f"dataset must have a row for each of {count} workers, got {total}"
        )
    return dataset.split_at_indices([total * i // count for i in range(1, count)])


def _work(config):
    """Runs on a worker."""
    train, collective = map(import_module, ("ray.train", "ray.train.collective"))
    here, util = train.get_context(), import_module("ray.util")
    with socket.socket() as probe:  # any free port
        probe.bind(("", 0))
        host, port = util.get_node_ip_address(), probe.getsockname()[1]
    place = dict(
        address=collective.broadcast_from_rank_zero(f"{host}:{port}"),
        rank=here.get_world_rank(), count=here.get_world_size(),
    )  # fmt: skip
    tables = {
        None if name == "training" else name.removeprefix("validation "): _read(
            train.get_dataset_shard(name), *config["columns"]
        )
        for name in config["names"]
    }
    found = train_share(pickle.loads(config["task"]), place, tables)
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if found is not None:
            (Path(folder) / _FOUND).write_bytes(found)
            checkpoint = train.Checkpoint.from_directory(folder)
        train.report({}, checkpoint=checkpoint)


def _read(shard, label, weight, offset):
    """Returns the rows of a shard: (x, y, weights, offset)."""
    import pandas as pd

    parts = shard.iter_batches(batch_size=None, batch_format="pandas")
    table = pd.concat([*parts], ignore_index=True)
    roles = [
        None if role is None else table[role if isinstance(role, str) else [*role]]
        for role in (label, weight, offset)
    ]
    used = {*_list(label), *_list(weight), *_list(offset)}
    return table[[name for name in table if name not in used]], *roles
