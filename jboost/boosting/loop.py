# SPDX-License-Identifier: Apache-2.0
"""The boosting loop as pure functions of arrays: init, boost_step, boost.

Before them: refusals of targets, reading of arguments, derivatives that the caller
hands in instead of those of a loss, all rounds as one program.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Float, Key, Shaped

from jboost.boosting.auto import needs_minimizer
from jboost.boosting.groups import (
    check_first_group,
    find_widths,
    read_groups,
    refuse_bags,
)
from jboost.boosting.memory_needs import refuse_large_model
from jboost.boosting.method import initial_scores, make_method, refuse_sorting
from jboost.boosting.reports import weigh_losses
from jboost.boosting.round import STRUCTURE, grow_round
from jboost.boosting.settings import (
    BoostSettings,
    RoundSettings,
    Settings,
    learning_rates,
    read_settings,
    takes_settings,
)
from jboost.boosting.sharding import (
    EVERYWHERE,
    check_mesh,
    cut_evenly,
    pad_shards,
    refuse_with_mesh,
    rows_of,
    run_sharded,
    spec_of_data,
)
from jboost.boosting.state import (
    Arrays,
    BoostState,
    Data,
    Problem,
    StartPoint,
    Static,
    estimate_parameters,
    prepare_groups,
    start_state,
)
from jboost.codes.codes import Codes, DenseCodes, pack_codes
from jboost.codes.preparing import arrange_codes, check_codes
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments
from jboost.entry.checks import explain_failure
from jboost.entry.decorators import is_tracing, traceable
from jboost.entry.messages import show
from jboost.entry.programs import FULL, LOOP, compiled
from jboost.kernels.library import takes_implementation
from jboost.losses import Adaptive
from jboost.numerics.derivatives import without_derivatives
from jboost.numerics.random import seed_from_key
from jboost.objective.evaluation import Kinks, Objective, with_scores_first
from jboost.objective.faults import describe_gap, find_gaps, find_never_finite
from jboost.objective.group_tracing import GroupLoss
from jboost.objective.jaxprs import Program, trace_program
from jboost.objective.retracing import trace_loss_once
from jboost.objective.tracing import TracedLoss
from jboost.tables.categories import Categories
from jboost.tables.domains import check_domain, warn_of_rounding
from jboost.tables.frames import check_offset
from jboost.tables.targets import check_targets, check_weights
from jboost.trees.tree import BoostedTrees, LeafSums, Tree

_SIGNATURE = "derivatives(scores, targets, key)"


def no_loss(score: Any, target: Any) -> Array:
    """Stands in for a loss that is None, where nothing depends on its values."""
    del target
    return jnp.sum(jnp.square(score))


def read_loss(loss: Any, init_score: Any) -> Any:
    """Returns the loss; :func:`no_loss` if it is None."""
    if loss is None and isinstance(init_score, str):
        raise ValueError(
            "init_score must be a number or K numbers where loss is None, got "
            f"{show(init_score)}, which needs a loss"
        )
    return no_loss if loss is None else loss


def read_solver(settings: Settings, loss: Any) -> Settings:
    """Returns the settings of rounds with derivatives from the caller."""
    solver = settings.leaf_solver
    if solver == "hessian" or (loss is None and solver not in ("auto", "newton")):
        needs = "the derivatives" if solver == "hessian" else "the values"
        raise ValueError(
            "leaf_solver must be 'newton' (or 'auto', which is the same) where "
            f"derivatives are given and loss is {'' if loss is None else 'not '}None, "
            f"got {show(solver)}, which needs {needs} of a loss"
        )
    # The curvature policy is not used if derivatives are given.
    solver = "newton" if solver == "auto" else solver
    return settings.replace(leaf_solver=solver, curvature="auto")


def take_arrays(gradient: Any, settings: Any, scores: Any) -> Any:
    """Takes the curvature out of the settings where a gradient is handed in.

    Gradient and curvature must have the shape of the scores, [N] or [N, K], but the
    curvature may be one number. Both are returned as [K, N]; None without a gradient.
    """
    if gradient is None:
        if np.ndim(settings.get("curvature", "auto")):
            raise ValueError(
                "gradient must be given where curvature is an array, got None"
            )
        return None
    given = {"gradient": gradient, "curvature": settings.pop("curvature", "auto")}
    for name, value in given.items():
        if isinstance(value, str) or callable(value):
            raise TypeError(
                f"{name} must be an array of shape {scores.shape}, like the scores, "
                f"where gradient is given, got {show(value)}"
            )
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        given[name] = array
        _check_array(name, array, scores.shape, single=name == "curvature")
    least: Any = 0.0
    if not isinstance(given["curvature"], Tracer):
        least = np.min(np.asarray(given["curvature"]))
    if not least >= 0:
        raise ValueError(f"curvature must be >= 0 in every row, got {least}")
    return _by_score(given["gradient"], given["curvature"], scores.shape)


def trace_derivatives(
    function: Callable[..., Any],
    targets: Any,
    weights: Any,
    num_scores: int,
    constants: tuple[Any, ...],
) -> tuple[Program, tuple[Any, ...]]:
    """Traces ``function(scores, targets, key)``, which returns gradient and curvature.

    Only the shape of the weights is used. The constants of the function follow those of
    the loss.
    """
    if not callable(function):
        raise TypeError(
            f"derivatives must be callable as {_SIGNATURE}, got {show(function)}"
        )
    shape = (len(weights),) if num_scores == 1 else (len(weights), num_scores)
    rows = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), targets)
    key = jax.eval_shape(lambda: _round_key(jnp.zeros(2, jnp.uint32), jnp.int32(0)))
    inputs = (jax.ShapeDtypeStruct(shape, jnp.float32), rows, key)
    try:
        found = jax.eval_shape(function, *inputs)
    except Exception as error:
        raise TypeError(
            "derivatives failed; it must accept (scores, targets, key) of all rows and "
            f"be written in jax.numpy: {explain_failure(error)}"
        ) from error
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise TypeError(
            "derivatives must return the pair (gradient, curvature), got "
            f"{show(jax.tree.map(lambda a: a.shape, found))}"
        )
    for name, array in zip(("gradient", "curvature"), found, strict=True):
        whose = f"the {name} that derivatives returns"
        _check_array(whose, array, shape, single=name == "curvature")

    def by_score(*arguments):
        gradient, curvature = function(*arguments)
        return _by_score(gradient, curvature, shape)

    every = list(constants)
    program = trace_program(by_score, inputs, every)
    return program, tuple(every)


def hand_in(problem: Problem, program: Program | None, state: BoostState) -> Problem:
    """Returns the problem with the derivatives of this round, if they are handed in."""
    if program is None:
        return problem
    scores = state.scores[0] if state.scores.shape[0] == 1 else state.scores.T
    key = _round_key(state.words, state.round)
    given = program(problem.constants, scores, problem.data.targets, key)
    return problem._replace(arrays=problem.arrays._replace(given=tuple(given)))


def _round_key(words, number):
    """Returns a key for each round, from the seed of the run."""
    return jax.random.fold_in(
        jax.random.wrap_key_data(words, impl="threefry2x32"), number
    )


def _check_array(name, array, shape, *, single):
    alone = ", or a number" if single else ""
    if not hasattr(array, "shape") or np.dtype(array.dtype).kind not in "fiub":
        raise TypeError(f"{name} must hold numbers, got {show(array)}")
    if array.shape != shape and not (single and array.shape == ()):
        raise ValueError(
            f"{name} must have the shape of the scores, {shape}{alone}, got "
            f"{array.shape}"
        )


def _by_score(
    gradient: Any, curvature: Any, shape: tuple[int, ...]
) -> tuple[Float[Array, "K N"], Float[Array, "K N"]]:
    """Returns both as [K, N]; negative curvatures become 0."""
    gradient = jnp.asarray(gradient, jnp.float32)
    curvature = jnp.broadcast_to(jnp.asarray(curvature, jnp.float32), shape)
    return (
        with_scores_first(gradient),
        with_scores_first(jnp.maximum(curvature, jnp.float32(0))),
    )


def refuse_gaps(loss: Any, constants: tuple[Any, ...], data: Data) -> None:
    """Refuses targets that are not finite if the loss is finite at no score tried.

    Traced values are not checked, nor are rows of weight 0.
    """
    data, offset = data._replace(codes=None), data.offset
    assert offset is not None
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(data)):
        return
    rows = np.flatnonzero(find_gaps(data.targets, data.weights))
    if not len(rows):
        return
    parameters = estimate_parameters(loss, constants, data, offset)
    if loss.coupled:
        words = jnp.zeros(2, jnp.uint32)
        found = weigh_losses(loss, constants, parameters, data, offset, words)
        values, weights = map(np.asarray, found)
        bad = np.full(len(rows), not np.isfinite(values[weights > 0]).all())
    else:
        targets = jax.tree.map(lambda t: np.asarray(t)[rows], data.targets)
        objective = Objective(loss, constants, targets, parameters, None)
        bad = find_never_finite(objective, np.asarray(offset)[:, rows])
    if bad.any():
        row = int(rows[np.argmax(bad)])
        target = jax.tree.map(lambda t: np.asarray(t[row]).tolist(), data.targets)
        raise ValueError(describe_gap("y", target, row))


class RowArguments(NamedTuple):
    """Row arguments of the public functions besides codes; see :func:`jboost.init`."""

    y: Any
    sample_weight: Any = None
    offset: Any = None
    groups: Any = None


class Bound(NamedTuple):
    """A traced loss with its rows."""

    loss: TracedLoss | GroupLoss
    constants: tuple[Any, ...]
    data: Data


def read_codes(settings: Settings, binned: Any, mesh: Any = None) -> Codes:
    """Returns codes that are packed or sorted, as the settings require.

    With a mesh, each device packs its own.
    """
    max_bins = None if settings.sorts_rows else settings.max_bins
    codes = check_codes(binned, max_bins)
    if mesh is None:
        return arrange_codes(codes, max_bins)
    return codes if isinstance(codes, DenseCodes) else DenseCodes(codes.T)


def bind_rows(
    codes: Any,
    loss: Callable[..., Any] | Any,
    rows: RowArguments,
    num_scores: int,
    curvature: Any = None,
) -> Bound:
    """Checks the data of the rows, and traces the loss; codes only give the shape."""
    num_rows, (y, sample_weight, offset, groups) = codes.shape[0], rows
    weights = np.ones(num_rows, np.float32)
    if sample_weight is not None:
        weights = check_weights(sample_weight, num_rows, "sample_weight")
    targets = y
    if y is not None or loss is not no_loss:
        targets = check_targets(y, num_rows, weights, "y", warn=True)
    check_domain(loss, targets, weights, num_scores, "y")
    widths, own = None, False
    given = None if sample_weight is None else weights
    groups, given = read_groups(groups, loss, given, num_rows)
    if groups is not None:
        widths, own = find_widths([(groups, num_rows)]), groups.weights is not None
        concrete = not any(isinstance(t, Tracer) for t in jax.tree.leaves(targets))
        if concrete and not is_tracing():
            check_first_group(loss, groups, targets, num_scores, own)
    weights = weights if given is None else given
    traced, constants = trace_loss_once(
        loss, targets, num_scores, curvature, widths, own
    )
    start = np.zeros((num_scores, num_rows), np.float32)
    if offset is not None:
        start = check_offset(offset, num_rows, num_scores)
        warn_of_rounding(offset, "offset")
    targets, weights, start, groups = put_arrays((targets, weights, start, groups))
    data = Data(codes, targets, weights, groups, offset=start)
    refuse_gaps(traced, constants, data)
    return Bound(traced, constants, data)


def put_arrays(arrays: Any) -> Any:
    """Moves arrays to the device; ``jnp.asarray`` would compile for each shape."""
    return jax.tree.map(
        lambda a: a if isinstance(a, jax.Array) else jax.device_put(a), arrays
    )


def by_row(scores):
    """Returns scores as [N] for K = 1, else [N, K]."""
    return scores[0] if scores.shape[0] == 1 else scores.T


def scan_rounds(
    loss: Any, method: Any, program: Any, sampled: bool, *operands: Any
) -> Any:
    """Runs all rounds; returns the trees, and the scores of the rows.

    Args:
      program: the caller's program for the derivatives; None: those of the loss.
      sampled: whether rounds may leave rows out, if the loss is of groups.
      operands: constants, numbers, learning rates, data, initial score, seed.
    """
    constants, numbers, rates, data, init_score, seed = operands
    if loss.coupled:
        constants, rates, data = without_derivatives(
            (constants, rates, data),
            "derivatives of training are not supported for losses of groups",
        )
    data = prepare_groups(loss, constants, data, sampled)
    state, _ = start_state(loss, constants, data, StartPoint(init_score, seed))
    problem = Problem(Static(loss, method), Arrays(constants, numbers, data))

    @partial(jax.checkpoint, prevent_cse=False, policy=_choose_kept(data))
    def one_round(state, rate):
        return grow_round(hand_in(problem, program, state), rate, state)[:2]

    final, trees = jax.lax.scan(one_round, state, rates)
    return BoostedTrees(trees, state.init_score), by_row(final.scores)


def run_sharded_rounds(loss: Any, method: Any, mesh: Any, *operands: Any) -> Any:
    """Runs :func:`scan_rounds` on the devices of a mesh."""
    constants, numbers, rates, data, init_score, seed = operands
    num_rows = data.weights.shape[0]
    shards = cut_evenly(mesh, num_rows)
    data = pad_shards(shards, data)

    def run(constants, numbers, rates, data, init_score, seed):
        data = data._replace(codes=pack_codes(data.codes, method.num_bins))
        rows = (data, init_score, seed)
        return scan_rounds(loss, method, None, False, constants, numbers, rates, *rows)

    everywhere = (EVERYWHERE,) * 3
    specs = (*everywhere, spec_of_data(shards), *everywhere[:2])
    trees, scores = run_sharded(
        run, mesh, shards,
        (constants, numbers, rates, data, init_score, seed),
        specs, (EVERYWHERE, rows_of(shards)),
    )  # fmt: skip
    return trees, scores[:num_rows]


def _choose_kept(data):
    """Returns the checkpoint policy of a round: no tree is grown or solved twice.

    Besides the state, reverse mode keeps the structure of the trees, the leaves of the
    rows and all results of custom derivatives that have fewer numbers than rows: sums
    by leaf, leaf values. Derivatives of rows are evaluated again.
    """
    of_structure = jax.checkpoint_policies.save_only_these_names(STRUCTURE)

    def keep(primitive, *operands, **params):
        if primitive.name == "custom_jvp_call":
            results = params["call_jaxpr"].out_avals
            return all(result.size < len(data.weights) for result in results)
        return of_structure(primitive, *operands, **params)

    return keep


# Lets jax.export serialize programs that take or return these types.
for _container in (BoostState, BoostedTrees, Kinks, LeafSums, Tree):
    jax.export.register_namedtuple_serialization(
        _container, serialized_name=f"jboost.{_container.__name__}"
    )


@explain_arguments
@traceable
def init(
    binned: Shaped[ArrayLike, "N F"] | Codes,
    y: Any,
    loss: Callable[..., Any] | Adaptive | None,
    key: Key[Array, ""],
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    groups: Any = None,
    num_scores: int = 1,
    init_score: ArrayLike | str = "auto",
) -> BoostState:
    """Returns the state before the first round.

    Args:
      binned: codes from :func:`jboost.apply_bins`, of a dense or a sparse matrix, or
        from :func:`jboost.parts.prepare_codes`.
      y: targets: an array with N rows, or a pytree of such arrays.
      loss: ``loss(score, target) -> scalar`` for one row. None, with an ``init_score``
        in numbers, if all derivatives are handed to :func:`jboost.boost_step`; y may
        then be None, too.
      key: a key from ``jax.random.key``; seeds all random choices.
      sample_weight: weights of the rows, >= 0.
      offset: [N] or [N, K], added to the score.
      groups: the groups of a loss of a group of rows: the result of
        :func:`jboost.make_groups`, "all", or :func:`jboost.random_groups`; see
        :func:`jboost.fit`. Ids are also accepted if nothing is traced.
      num_scores: K, the scores of a row; the page "Parameters" explains it.
      init_score: the initial score: ``"auto"`` for the constant that minimizes the
        weighted loss, ``"median"`` for the median of the rows' own minimizers, or a
        number or K numbers.

    Raises:
      TypeError, ValueError: arguments are invalid or inconsistent.

    Example:
      >>> import jax, jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(8.0)[:, None], jnp.arange(8.0)
      >>> binned = jb.apply_bins(jb.fit_bins(x), x)
      >>> state = jb.init(binned, y, jb.losses.squared_error, jax.random.key(0))
      >>> float(state.init_score)
      3.5
    """
    given: dict[str, Any] = dict(num_scores=num_scores, init_score=init_score)
    chosen = read_settings(given).with_scores(loss, y)
    traced, constants, data = bind_rows(
        check_codes(binned, None), read_loss(loss, init_score),
        RowArguments(y, sample_weight, offset, groups), chosen.num_scores,
    )  # fmt: skip
    begin = initial_scores(chosen)
    data = data._replace(codes=None)  # the start does not depend on the features
    run = compiled(_init, traced, effort=FULL)
    return run(constants, data, begin, seed_from_key(key))


@explain_arguments
@traceable
@takes_implementation
@takes_settings
def boost_step(
    state: BoostState,
    binned: Shaped[ArrayLike, "N F"] | Codes,
    y: Any,
    loss: Callable[..., Any] | Adaptive | None,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    gradient: Shaped[ArrayLike, "N *K"] | None = None,
    groups: Any = None,
    categories: Categories | None = None,
    implementation: str | None = None,
    **settings: Unpack[RoundSettings],
) -> tuple[BoostState, Tree]:
    """Runs one round; returns the next state and K trees on codes.

    In a loop, prepare the codes once with :func:`jboost.parts.prepare_codes` and
    compile the step with ``jax.jit``, as in the example, or use ``jax.lax.scan``: a
    call outside ``jit`` takes one or two milliseconds to check its arguments.
    The page "Parameters" explains the hyperparameters at length.

    Args:
      state: the result of :func:`jboost.init` or of the previous step.
      binned, y, loss, sample_weight, groups: the arguments that :func:`jboost.init` was
        called with.
      gradient: [N] or [N, K]: the derivatives of this round in place of those of the
        loss, together with ``curvature``, then an array of the same shape, >= 0, or a
        number. Both are multiplied by ``sample_weight``. Leaves are Newton steps of
        these numbers; a ``leaf_solver`` that needs values of the loss still takes them
        from ``loss``.
      categories: ``bins.categories``; None if no column is categorical.
      implementation: "xla", "cpu" or "cuda", or None; see
        :func:`jboost.implementations`.
      {settings}

    Returns:
      The next state, with ``scores`` [N] or [N, K], and the round's trees, with a
      leading axis K.

    Example:
      >>> import jax, jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(8.0)[:, None], jnp.arange(8.0)
      >>> binned = jb.apply_bins(jb.fit_bins(x), x)
      >>> loss = jb.losses.squared_error
      >>> @jax.jit
      ... def step(state, codes, learning_rate):
      ...     return jb.boost_step(
      ...         state, codes, y, loss, max_depth=2, learning_rate=learning_rate
      ...     )
      >>> codes = jb.parts.prepare_codes(binned)
      >>> state = jb.init(codes, y, loss, jax.random.key(0))
      >>> for learning_rate in (0.5, 0.3, 0.1):
      ...     state, tree = step(state, codes, learning_rate)
      >>> state.scores.shape, tree.leaf_value.shape
      ((8,), (1, 4))
    """
    given = take_arrays(gradient, settings, state.steps)
    chosen = read_settings(settings)
    if given is not None:
        chosen, loss = read_solver(chosen, loss), read_loss(loss, None)
    refuse_sorting(chosen, binned)
    num_scores = 1 if state.steps.ndim == 1 else state.steps.shape[-1]
    codes = read_codes(chosen, binned)
    if given is not None and groups is not None:
        raise ValueError("groups must be None where gradient is given, got groups")
    traced, constants, data = bind_rows(
        codes, loss, RowArguments(y, sample_weight, None, groups), num_scores,
        chosen.own_curvature,
    )  # fmt: skip
    rows = (len(data.weights),)
    if state.steps.shape not in (rows, (*rows, num_scores)):
        raise ValueError(
            f"state must be a single run on the {rows[0]} rows of binned, with scores "
            f"[N] or [N, K], got scores of shape {state.steps.shape}"
        )
    same = needs_minimizer(traced) == (state.minimizer is not None)
    if not same or traced.coupled != (state.probe is not None):
        raise ValueError("loss must be the one that the state was made with by init")
    refuse_bags(traced, data.groups, chosen)
    method, numbers = make_method(
        chosen, traced, codes, num_rows=len(data.weights),
        uniform=sample_weight is None and given is None, max_bins=chosen.max_bins,
        num_features=codes.num_features, categories=categories,
    )  # fmt: skip
    rate = checks.check_number("learning_rate", chosen.learning_rate, least=0.0)
    run = compiled(_step, traced, method, effort=FULL)
    return run(constants, numbers, jnp.float32(rate), data, state, given)


@explain_arguments
@traceable
@takes_implementation
@takes_settings
def boost(
    binned: Shaped[ArrayLike, "N F"] | Codes,
    y: Any,
    loss: Callable[..., Any] | Adaptive | None,
    key: Key[Array, ""],
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    groups: Any = None,
    derivatives: Callable[..., Any] | None = None,
    categories: Categories | None = None,
    mesh: Mesh | None = None,
    implementation: str | None = None,
    **settings: Unpack[BoostSettings],
) -> tuple[BoostedTrees, Float[Array, "N *K"]]:
    """Runs ``num_rounds`` rounds as one pure function.

    Works under ``jax.jit``, and under ``jax.vmap`` over all arguments that do not
    determine shapes: learning rates, l2, parameters that the loss closes over, keys,
    sample weights. ``jax.export`` needs ``implementation="xla"``, because exported
    programs cannot contain the compiled kernels.

    Works under ``jax.grad``, ``jax.jvp`` and ``jax.hessian`` in arrays that the loss
    closes over, learning rate, ``l1``, ``l2``, ``max_delta_step``, weights, targets,
    offset and initial score. The structure of trees (features, thresholds, sampled
    rows) is held constant, and numbers that only shape it have derivative 0. Reverse
    mode keeps the scores and the leaf of every row for each round.

    Args:
      binned, y, loss, key, sample_weight, offset: arguments of :func:`jboost.init`.
      groups: the groups of a loss of a group of rows: index tables from
        :func:`jboost.make_groups` (which has concrete ids, because they determine
        shapes), "all" or :func:`jboost.random_groups`.
      derivatives: ``derivatives(scores, targets, key) -> (gradient, curvature)``, in
        place of the derivatives of the loss, for methods that do not descend one:
        Langevin boosting, GOSS, AdaBoost, policy gradients; see "Write your own loop".
        It is called once in each round with the scores of all rows, [N] or [N, K], the
        targets and a new key, and compiled into the loop. Both results have the shape
        of the scores (the curvature may be one number), must not be multiplied by
        ``sample_weight``, and the curvature counts as 0 where it is negative. Leaves
        are Newton steps of these numbers; a ``leaf_solver`` that needs values of the
        loss takes them from ``loss``. That may be None, with ``init_score`` in numbers
        (y, too, if ``derivatives`` does not use it).
      categories: ``bins.categories``; None if no column is categorical.
      mesh: a ``jax.sharding.Mesh``: its devices share the rows, in order, and the trees
        and scores are those of one device, bit for bit: sums over rows are sums of
        integers, and random numbers depend on the number of a row. ``binned`` and y may
        be sharded over the mesh already; scores are returned sharded, trees are the
        same on all devices. Not with sparse codes, ``candidates`` other than "global",
        ``derivatives`` or derivatives of training.
      implementation: "xla", "cpu" or "cuda", or None; see
        :func:`jboost.implementations`.
      {settings}

    Returns:
      The trees with their initial score (:func:`jboost.to_ensemble` converts codes to
      thresholds), and the scores of the training rows, [N] or [N, K].

    Example:
      >>> import jax, jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(8.0)[:, None], jnp.arange(8.0)
      >>> bins = jb.fit_bins(x)
      >>> binned = jb.apply_bins(bins, x)
      >>> def train(learning_rate):
      ...     return jb.boost(
      ...         binned, y, jb.losses.squared_error, jax.random.key(0),
      ...         num_rounds=5, max_depth=2, learning_rate=learning_rate,
      ...     )
      >>> trees, scores = jax.vmap(train)(jnp.array([0.1, 0.5]))
      >>> scores.shape
      (2, 8)
    """
    chosen = read_settings(settings).with_scores(loss, y)
    mesh = check_mesh(mesh)
    if mesh is not None:
        refuse_with_mesh(chosen, binned)
        for name, value in (("derivatives", derivatives), ("groups", groups)):
            if value is not None:
                raise ValueError(
                    f"{name} must be None with a mesh, got {type(value).__name__}"
                )
    if derivatives is not None:
        if groups is not None:
            raise ValueError(
                "groups must be None where derivatives is given, got groups"
            )
        checks.check_word("curvature", chosen.curvature, ("auto",))
        chosen = read_solver(chosen, loss)
        loss = read_loss(loss, chosen.init_score)
    refuse_sorting(chosen, binned)
    refuse_large_model(chosen)
    num_scores = chosen.num_scores
    rates = put_arrays(learning_rates(chosen.learning_rate, chosen.num_rounds))
    codes = read_codes(chosen, binned, mesh)
    traced, constants, data = bind_rows(
        codes, loss, RowArguments(y, sample_weight, offset, groups), num_scores,
        chosen.own_curvature,
    )  # fmt: skip
    program = None
    if derivatives is not None:
        program, constants = trace_derivatives(
            derivatives, data.targets, data.weights, num_scores, constants
        )
    refuse_bags(traced, data.groups, chosen)
    method, numbers = make_method(
        chosen, traced, codes, num_rows=len(data.weights),
        uniform=sample_weight is None and program is None, max_bins=chosen.max_bins,
        num_features=codes.num_features, categories=categories,
        num_devices=1 if mesh is None else mesh.size,
    )  # fmt: skip
    operands: Any = (constants, numbers, rates, data, initial_scores(chosen))
    operands += (seed_from_key(key),)
    if mesh is not None:
        run = compiled(run_sharded_rounds, traced, method, mesh, effort=LOOP)
        return run(*operands)
    static = traced, method, program, groups is not None and chosen.leaves_out
    return compiled(scan_rounds, *static, effort=LOOP)(*operands)


def _init(loss, constants, data, *start):
    state, _ = start_state(loss, constants, data, StartPoint(*start))
    return _by_row(state)


def _step(loss, method, constants, numbers, learning_rate, data, state, given):
    start, steps = (
        each[None] if each.ndim == 1 else each.T for each in (state.start, state.steps)
    )
    state = state._replace(start=start, steps=steps)
    problem = Problem(Static(loss, method), Arrays(constants, numbers, data, given))
    state, trees, _ = grow_round(problem, learning_rate, state)
    return _by_row(state), trees


def _by_row(state):
    return state._replace(start=by_row(state.start), steps=by_row(state.steps))
