# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of training for rows that are divided among devices.

In: a function that a program of one device consists of, and how its operands and
results are divided. Out: a program that runs it on every shard and returns the same
bits; its collectives are those of :mod:`jboost.entry.collectives`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec as P

from jboost.boosting.round_programs import (
    Derived,
    Finish,
    Grown,
    Growth,
    Stored,
    Turn,
)
from jboost.boosting.row_derivatives import RowDerivatives
from jboost.boosting.row_sample import Round
from jboost.boosting.sharding import (
    EVERYWHERE,
    rows_of,
    run_sharded,
    spec_of_data,
    spec_of_state,
)
from jboost.boosting.state import Arrays, StartPoint
from jboost.entry.collectives import Shards
from jboost.entry.programs import Compiled, compiled
from jboost.training.spreading import Spread


def compile_start(spread: Spread, find_start: Callable[..., Any], loss: Any) -> Any:
    """Compiles a function of constants, data and a StartPoint for every shard.

    It returns the state, and numbers of which the second is one for each row.
    """
    shards = spread.shards
    columns = rows_of(shards, 1)
    start = fill_spec(StartPoint, minimizer=columns)
    specs = (EVERYWHERE, spec_of_data(shards), start)
    results = (spec_of_state(shards), EVERYWHERE, rows_of(shards), EVERYWHERE)
    return compile_shards(find_start, (loss,), spread, specs, results)


def compile_for_rows(
    spread: Spread, function: Callable[..., Any], *static: Any, results: Any
) -> Compiled:
    """Compiles a function of constants, data and a state for every shard."""
    shards = spread.shards
    specs = (EVERYWHERE, spec_of_data(shards), spec_of_state(shards))
    return compile_shards(function, static, spread, specs, results)


def compile_round(
    spread: Spread, function: Callable[..., Any], *static: Any, **options: Any
) -> Compiled:
    """Compiles a program of :mod:`jboost.boosting.round_programs` for every shard."""
    specs, results = _ROUND[function.__name__](spread.shards, static)
    return compile_shards(function, static, spread, specs, results, **options)


def _spec_derive(shards, static):
    changes = static[0].loss.estimate is not None
    state = spec_of_state(shards) if changes else EVERYWHERE  # of None
    return (spec_of_arrays(shards), spec_of_state(shards)), (state, _derived(shards))


def _spec_grow(shards, static):
    *_, steps = static
    data = spec_of_data(shards)
    growth = fill_spec(Growth, data=data, sets=data)
    specs = (growth, _turn(shards), _derived(shards), EVERYWHERE)
    return specs, _grown(shards, steps)


def _spec_finish(shards, static):
    options = next(each for each in static if isinstance(each, Finish))
    stored = fill_spec(Stored, snapshots=P(None, *rows_of(shards, 1)))
    grown = _grown(shards, not options.solve)
    specs = (spec_of_arrays(shards), spec_of_data(shards), _turn(shards), grown)
    solved = (spec_of_state(shards), rows_of(shards, 1), EVERYWHERE)
    found = solved if options.solve else EVERYWHERE
    return (*specs, stored, EVERYWHERE), (found, stored, EVERYWHERE)


_ROUND = dict(derive=_spec_derive, grow=_spec_grow, finish=_spec_finish)


def spec_of_arrays(shards: Shards) -> Any:
    """Returns the sharding of :class:`jboost.boosting.state.Arrays`."""
    return fill_spec(Arrays, data=spec_of_data(shards))


def _derived(shards):
    return fill_spec(Derived, raw=rows_of(shards, 1))


def _turn(shards):
    columns = rows_of(shards, 1)
    return fill_spec(Turn, state=spec_of_state(shards), set_steps=columns)


def _grown(shards, steps):
    columns, nothing = rows_of(shards, 1), None
    fitted = fill_spec(
        RowDerivatives, gradient=nothing, curvature=nothing, factor=columns,
        known=columns,
    )  # fmt: skip
    now = fill_spec(Round, shape=nothing, fitted=fitted, in_bag=rows_of(shards))
    grown = fill_spec(Grown, now=now, leaf=columns)
    if not steps:
        return grown
    return grown._replace(state=spec_of_state(shards), set_steps=columns)


def fill_spec(kind: Any, **specs: Any) -> Any:
    """Returns a NamedTuple of shardings; what is not given is the same everywhere."""
    return kind(**{**dict.fromkeys(kind._fields, EVERYWHERE), **specs})


def compile_shards(
    function: Callable[..., Any],
    static: tuple[Any, ...],
    spread: Spread,
    specs: tuple[Any, ...],
    results: Any,
    **options: Any,
) -> Compiled:
    """Compiles ``function(*static, *operands)`` for every shard.

    Args:
      specs: the sharding of each operand, and ``results`` that of the results; see
        :func:`jboost.boosting.sharding.run_sharded`.
      options: of :func:`jboost.entry.programs.compiled`.
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
