# SPDX-License-Identifier: Apache-2.0
"""Runs programs of training on the shards of a mesh.

In: a mesh, arrays of all rows. Out: the same results as on one device, bit for bit:
arrays of rows sharded, everything else the same on all devices.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jboost.boosting.settings import Settings
from jboost.boosting.state import BoostState, Data
from jboost.codes.codes import SparseCodes
from jboost.entry.collectives import Shards, are_apart, use_shards
from jboost.entry.stages import for_host
from jboost.numerics.derivatives import without_derivatives
from jboost.tables.sparse import SparseMatrix

EVERYWHERE = P()  # the same on all devices


def check_mesh(mesh: Any) -> Any:
    """Checks the argument ``mesh`` of public functions: None or a mesh.

    Its axes become those of kind "auto", since programs and not types of arrays say how
    rows are divided.
    """
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names)
    if mesh is None or isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh
    raise TypeError(
        "mesh must be a jax.sharding.Mesh, as jax.make_mesh makes, or None, got "
        f"{type(mesh).__name__}"
    )


def cut_evenly(mesh: Any, num_rows: int) -> Shards:
    """Divides rows into shards of equal size; the last ones may have fewer, or none."""
    count = mesh.size
    size = max(1, -(-num_rows // count))
    sizes = (min(size, max(0, num_rows - i * size)) for i in range(count))
    return Shards(tuple(mesh.axis_names), tuple(sizes), num_rows, are_apart(mesh))


def rows_of(shards: Shards, axis: int = 0) -> P:
    """Returns the sharding of arrays with rows along an axis."""
    return P(*[None] * axis, shards.axes)


def spec_of_data(shards: Shards) -> Any:
    """Returns the sharding of :class:`jboost.boosting.state.Data`."""
    rows: Any = rows_of(shards)
    columns: Any = rows_of(shards, 1)
    return Data(columns, rows, rows, offset=columns, values=rows)


def spec_of_state(shards: Shards) -> Any:
    """Returns the sharding of the state of a run, within a round."""
    every: Any = dict.fromkeys(BoostState._fields, EVERYWHERE)
    columns = rows_of(shards, 1)
    return BoostState(**every)._replace(start=columns, steps=columns, minimizer=columns)


def run_sharded(
    function: Callable[..., Any],
    mesh: Mesh,
    shards: Shards,
    operands: tuple[Any, ...],
    specs: tuple[Any, ...],
    results: Any,
) -> Any:
    """Returns ``function(*operands)``, which runs on every shard of the mesh.

    The function is traced with the shards in force. ``specs`` are the shardings of the
    operands, and ``results`` is that of the results.
    """

    @for_host
    def run(*operands):
        with use_shards(shards):
            return function(*operands)

    # JAX cannot check which results are the same on all devices: it does not look into
    # the calls of kernels, nor at a loss that was traced elsewhere. Tests do.
    call = jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False
    )
    return call(
        *without_derivatives(
            operands,
            "derivatives of training are not supported with a mesh; differentiate "
            "jb.boost without mesh, on one device",
        )
    )


def pad_shards(shards: Shards, data: Data) -> Data:
    """Repeats row 0 at weight 0 until all shards have the same number of rows."""
    short = len(shards.sizes) * max(shards.sizes) - data.weights.shape[0]
    if short == 0:
        return data

    def extend(array, axis=0):
        row = jax.lax.slice_in_dim(array, 0, 1, axis=axis)
        more = jnp.repeat(row, short, axis=axis)
        return jnp.concatenate([array, more], axis=axis)

    codes: Any = data.codes
    return Data(
        codes=replace(codes, columns=extend(codes.columns, 1), packed=None),
        targets=jax.tree.map(extend, data.targets),
        weights=jnp.pad(data.weights, (0, short)),
        offset=extend(data.offset, 1),
    )


def refuse_with_mesh(settings: Settings, codes: Any) -> None:
    """Raises for codes and settings that are not supported on several devices."""
    if isinstance(codes, SparseCodes | SparseMatrix):
        raise ValueError("x must be dense with a mesh, got a sparse matrix")
    if settings.sorts_rows:
        raise ValueError(
            "candidates must be 'global' and candidate_weights 'samples' with a mesh, "
            f"got {settings.candidates!r} and {settings.candidate_weights!r}"
        )
