# SPDX-License-Identifier: Apache-2.0
"""Rows on the devices of a mesh, and the programs of training on every shard.

The global order of rows is that of processes, and of arrays within a process. Each
device holds a shard of the same length. Programs return the bits of a single device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jboost.boosting.derivatives import RoundPlan, RowDerivatives
from jboost.boosting.reports import RowLosses, find_values
from jboost.boosting.round_programs import (
    FITTED,
    Derived,
    FinishOptions,
    GrowOperands,
    RoundBuffers,
    RoundInputs,
    RoundTrees,
)
from jboost.boosting.sharding import (
    EVERYWHERE,
    rows_of,
    run_sharded,
    spec_of_data,
    spec_of_state,
)
from jboost.boosting.state import Arrays, Data, StartPoint
from jboost.entry.collectives import Shards, are_apart
from jboost.entry.exchanges import gather_numbers
from jboost.entry.programs import Compiled, compiled
from jboost.numerics.arrays import pad_rows, padded_size
from jboost.objective.evaluation import (
    Objective,
    RowPrograms,
    gradients,
)
from jboost.trees.slopes import GivenLeaves

_SMALL_SIZES = (256, 1024, 2048, 4096, 8192)


class RowLayout(NamedTuple):
    """The division of a table among the devices of a mesh.

    Attributes:
      shards: the shards of all rows.
      own: which of the shards are on devices of this process.
    """

    mesh: Mesh
    shards: Shards
    own: tuple[int, ...]

    @property
    def length(self) -> int:
        """The rows of a shard, with padding."""
        return padded_rows(max(self.shards.sizes))

    @property
    def first_row(self) -> int:
        """The global number of the first row of this process."""
        return self.shards.first_rows[self.own[0]] if self.own else 0

    def put(self, array: Any, axis: int = 0, padding: Any = None) -> Array:
        """Returns the array of all rows; padding repeats the first row.

        Args:
          array: the values of the rows of this process, along ``axis``.
          padding: an array of one row, which padding repeats instead.
        """
        array = np.asarray(array)
        shape = list(array.shape)
        shape[axis] = len(self.own) * self.length
        whole = np.empty(shape, array.dtype)  # the only copy: tables may be large
        rooms = np.split(np.moveaxis(whole, axis, 0), max(1, len(self.own)))
        array = np.moveaxis(array, axis, 0)
        ends = np.cumsum([self.shards.sizes[i] for i in self.own])
        spare = array[:1] if padding is None else padding
        for room, part in zip(rooms, np.split(array, ends[:-1]), strict=True):
            room[: len(part)] = part
            if short := len(room) - len(part):
                room[len(part) :] = pad_rows(spare, short)
        return jax.make_array_from_process_local_data(self.place(axis), whole)

    def place(self, axis: int = 0) -> NamedSharding:
        """Returns the sharding of arrays with rows along an axis."""
        return NamedSharding(self.mesh, rows_of(self.shards, axis))

    def put_zeros(self, shape: tuple[int, ...]) -> Array:
        """Returns zeros [*shape, rows], with the rows divided among the shards."""
        local = np.zeros((*shape, len(self.own) * self.length), np.float32)
        return jax.make_array_from_process_local_data(self.place(len(shape)), local)

    def put_everywhere(self, arrays: Any) -> Any:
        """Returns arrays that every device holds whole."""
        sharding = NamedSharding(self.mesh, EVERYWHERE)

        def put(array):
            if isinstance(array, jax.Array) and array.sharding == sharding:
                return array
            array = np.asarray(array)
            return jax.make_array_from_process_local_data(sharding, array, array.shape)

        return jax.tree.map(put, arrays)

    def describe(self, array: Array) -> jax.ShapeDtypeStruct:
        """Returns the shape of an array [n, ...] of all rows without padding."""
        shape = (sum(self.shards.sizes), *array.shape[1:])
        return jax.ShapeDtypeStruct(shape, array.dtype)

    def fetch(self, array: Array, axis: int = 0) -> np.ndarray:
        """Returns the rows of this process, without padding."""
        parts = []
        for shard in array.addressable_shards:
            index = (shard.index[axis].start or 0) // self.length
            part = np.moveaxis(np.asarray(shard.data), axis, 0)
            parts.append((index, part[: self.shards.sizes[index]]))
        parts = [part for _, part in sorted(parts, key=lambda pair: pair[0])]
        return np.moveaxis(np.concatenate(parts), 0, axis)


def padded_rows(num_rows: int) -> int:
    """Rounds a number of training rows up, so that small tables have few sizes."""
    larger = (size for size in _SMALL_SIZES if size >= num_rows)
    return next(larger, padded_size(num_rows))


def spread_rows(mesh: Mesh, num_rows: int, padded: bool) -> RowLayout:
    """Divides the rows of all processes; each process divides its own evenly.

    Args:
      num_rows: the number of rows of this process.
      padded: whether one device would hold padded rows.
    """
    owners = [device.process_index for device in mesh.devices.flat]
    ranks = sorted(set(owners))
    counts, sizes = gather_numbers(num_rows), []
    for rank, rows in zip(ranks, counts, strict=True):
        devices = owners.count(rank)
        each = -(-rows // devices)
        sizes += [min(each, max(0, rows - i * each)) for i in range(devices)]
    total = padded_rows(sum(sizes)) if padded else sum(sizes)
    own = tuple(i for i, owner in enumerate(owners) if owner == jax.process_index())
    shards = Shards(tuple(mesh.axis_names), tuple(sizes), total, are_apart(mesh))
    return RowLayout(mesh, shards, own)


def spans_processes(mesh: Mesh | None) -> bool:
    """Returns whether a mesh has devices of other processes."""
    if mesh is None:
        return False
    return any(d.process_index != jax.process_index() for d in mesh.devices.flat)


def check_devices(mesh: Mesh) -> None:
    """Raises unless a mesh has devices of every process, in the order of processes.

    A mesh with devices of this process alone passes, too.
    """
    owners = [device.process_index for device in mesh.devices.flat]
    if not spans_processes(mesh):
        return
    if owners != sorted(owners) or set(owners) != set(range(jax.process_count())):
        raise ValueError(
            "mesh must hold devices of every process, in the order of processes, as "
            f"jax.make_mesh((jax.device_count(),), ('rows',)) does, got {owners}"
        )


def compile_start(spread: RowLayout, find_start: Callable[..., Any], loss: Any) -> Any:
    """Compiles a function of constants, data and a StartPoint for every shard.

    It returns state, rule, the loss of each row, and the result of
    :func:`jboost.trees.initial.is_unbounded`.
    """
    shards = spread.shards
    columns = rows_of(shards, 1)
    start = fill_spec(StartPoint, minimizer=columns)
    specs = (EVERYWHERE, spec_of_data(shards), start)
    results = (spec_of_state(shards), EVERYWHERE, rows_of(shards), EVERYWHERE)
    return compile_shards(find_start, (loss,), spread, specs, results)


def compile_for_rows(
    spread: RowLayout,
    function: Callable[..., Any],
    *static: Any,
    results: Any,
    **options: Any,
) -> Compiled:
    """Compiles a function of constants, data and a state for every shard."""
    shards = spread.shards
    specs = (EVERYWHERE, spec_of_data(shards), spec_of_state(shards))
    return compile_shards(function, static, spread, specs, results, **options)


def bind_shards(
    spread: RowLayout, loss: Any, constants: Any, data: Data, effort: Any
) -> RowPrograms:
    """Returns the programs of a loss of rows that several devices share."""
    shards = spread.shards
    columns = rows_of(shards, 1)
    specs = (EVERYWHERE, spec_of_data(shards), columns)

    def bind(function, results):
        run = compile_shards(function, (loss,), spread, specs, results, effort=effort)
        return partial(run.of_one_shape(), constants, data)

    return RowPrograms(bind(find_values, rows_of(shards)), bind(_find_slopes, columns))


def _find_slopes(loss, constants, data, scores):
    return gradients(Objective(loss, constants, data.targets, (), None), scores)


def compile_round(
    spread: RowLayout,
    given: bool,
    function: Callable[..., Any],
    *static: Any,
    **options: Any,
) -> Compiled:
    """Compiles a program of :mod:`jboost.boosting.round_programs` for every shard.

    ``given`` says whether rounds have leaves.
    """
    turn = _turn(spread.shards, given)
    specs, results = _ROUND[function.__name__](spread.shards, static, turn)
    return compile_shards(function, static, spread, specs, results, **options)


def _spec_derive(shards, static, _):
    changes = static[0].loss.estimate is not None
    state = spec_of_state(shards) if changes else EVERYWHERE  # the spec of None
    return (spec_of_arrays(shards), spec_of_state(shards)), (state, _derived(shards))


def _spec_grow(shards, static, turn):
    *_, steps, _ = static
    data = spec_of_data(shards)
    growth = fill_spec(GrowOperands, data=data, sets=data)
    specs = (growth, turn, _derived(shards), EVERYWHERE)
    return specs, _grown(shards, steps in FITTED)


def _spec_finish(shards, static, turn):
    options = next(each for each in static if isinstance(each, FinishOptions))
    stored = fill_spec(RoundBuffers, snapshots=P(None, *rows_of(shards, 1)))
    grown = _grown(shards, not options.solve)
    rows, columns = rows_of(shards), rows_of(shards, 1)
    each: Any = dict.fromkeys(RowLosses._fields, rows)
    losses = RowLosses(**{**each, "slope": columns})
    specs = (spec_of_arrays(shards), spec_of_data(shards), turn, grown)
    solved = (spec_of_state(shards), rows_of(shards, 1), EVERYWHERE)
    found = solved if options.solve else EVERYWHERE
    return (*specs, stored, losses), (found, stored, rows)


_ROUND = dict(derive=_spec_derive, grow=_spec_grow, finish=_spec_finish)


def spec_of_arrays(shards: Shards) -> Any:
    """Returns the sharding of :class:`jboost.boosting.state.Arrays`."""
    return fill_spec(Arrays, data=spec_of_data(shards))


def _derived(shards):
    return fill_spec(Derived, raw=rows_of(shards, 1))


def _turn(shards, given):
    columns = rows_of(shards, 1)
    leaves = fill_spec(GivenLeaves, leaf=columns) if given else EVERYWHERE
    return fill_spec(
        RoundInputs, state=spec_of_state(shards), set_steps=columns, given=leaves
    )


def _grown(shards, steps):
    columns, nothing = rows_of(shards, 1), None
    fitted = fill_spec(
        RowDerivatives, gradient=nothing, curvature=nothing, factor=columns,
        known=columns,
    )  # fmt: skip
    plan = fill_spec(
        RoundPlan, for_splits=nothing, for_leaves=fitted, in_bag=rows_of(shards)
    )
    scores = dict(scores=columns, moved=columns, sloped=columns)
    grown = fill_spec(RoundTrees, plan=plan, leaf=columns, **scores)
    if not steps:
        return grown
    return grown._replace(state=spec_of_state(shards), set_steps=columns)


def fill_spec(kind: Any, **specs: Any) -> Any:
    """Returns a NamedTuple of shardings; fields not given are the same everywhere."""
    return kind(**{**dict.fromkeys(kind._fields, EVERYWHERE), **specs})


def compile_shards(
    function: Callable[..., Any],
    static: tuple[Any, ...],
    spread: RowLayout,
    specs: tuple[Any, ...],
    results: Any,
    **options: Any,
) -> Compiled:
    """Compiles ``function(*static, *operands)`` for every shard.

    Args:
      specs: the sharding of each operand, and ``results`` that of the results; see
        :func:`jboost.boosting.sharding.run_sharded`.
      options: the options of :func:`jboost.entry.programs.compiled`.
    """
    fixed = (function, static, spread.mesh, spread.shards, specs, results)
    return compiled(_run, *fixed, **options)


def _run(
    function: Callable[..., Any],
    static: tuple[Any, ...],
    mesh: Any,
    shards: Shards,
    specs: Any,
    results: Any,
    *operands: Any,
) -> Any:
    run = partial(function, *static)
    specs = tuple(map(_match, operands, specs))
    return run_sharded(run, mesh, shards, operands, specs, results)


def _match(operand, spec):
    """Repeats the sharding of one validation set for all of them."""
    if spec is None or isinstance(spec, P):
        return spec
    if type(operand) is tuple:
        return tuple(_match(each, spec) for each in operand)
    return type(spec)(*map(_match, operand, spec))
