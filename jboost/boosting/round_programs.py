# SPDX-License-Identifier: Apache-2.0
"""The stages of a round as separate programs, for loops that run on the host.

Out: the next state and its trees, equal bit for bit to those of
:func:`jboost.boosting.round.grow_round`:

    derive    derivatives of every row              compiled for each loss
    grow      sample, grow, Newton steps, scores    compiled once per kind of loss
    finish    losses; are the steps good enough?    compiled for each loss
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Complex64, Float, Int32

from jboost.boosting.derivatives import (
    RawDerivatives,
    RoundPlan,
    Scaling,
    differentiate,
    list_policies,
    note_lost,
    start_round,
)
from jboost.boosting.first_sums import SumGuesses
from jboost.boosting.method import Method, Numbers
from jboost.boosting.reports import RowLosses, add_to_sets, report_round
from jboost.boosting.round import (
    advance,
    are_steps_kept,
    count_round,
    find_newton_steps,
    fit_trees,
    grow_trees,
    judge_steps,
)
from jboost.boosting.state import Arrays, BoostState, Data, Problem, Static
from jboost.entry.collectives import every
from jboost.entry.stages import for_host
from jboost.kernels import grow_cpu
from jboost.kernels.library import choose
from jboost.numerics.arrays import pack
from jboost.objective.curvature import INFORMED, are_finite, count_lost
from jboost.objective.group_tracing import GroupLoss
from jboost.trees.joint_start import move_scores
from jboost.trees.leaf_operations import add_values
from jboost.trees.leaves import NewtonSteps
from jboost.trees.limits import limit_leaves
from jboost.trees.slopes import GivenLeaves, add_leaves, mix_leaves
from jboost.trees.tree import Tree


def are_joined(problem: Problem) -> bool:
    """Returns whether derivatives are joined: those of one score, if both take work."""
    loss = problem.loss
    alone = not loss.coupled and loss.num_scores == 1 and not loss.quadratic
    return alone and set(list_policies(problem.method)) != {"unit"}


def join_pairs(
    problem: Problem, raw: tuple[RawDerivatives, ...]
) -> tuple[RawDerivatives, ...]:
    """Joins the derivatives of one score in ``gradient``."""
    if not are_joined(problem):
        return raw
    nothing: Any = None
    return tuple(
        each._replace(
            gradient=jax.lax.complex(each.gradient, each.curvature), curvature=nothing
        )
        for each in raw
    )


def split_pairs(
    raw: tuple[RawDerivatives, ...],
    weights: Float[Array, " N"],
    all_finite: Bool[Array, ""] | None,
) -> tuple[tuple[RawDerivatives, ...], Bool[Array, ""], Int32[Array, "2"]]:
    """Undoes :func:`join_pairs`, and leaves out derivatives that are not finite.

    ``all_finite`` is the second result, if it is known: whether the derivatives of all
    rows of positive weight are finite. The third result is that of
    :func:`jboost.objective.curvature.count_lost` for joined derivatives, 0 for others,
    which :func:`differentiate` has counted.
    """
    found = [_split(each, weights, all_finite) for each in raw]
    finite = jnp.all(jnp.stack([each for _, each, _ in found]))
    return tuple(each for each, _, _ in found), finite, found[0][2]


def _split(raw, weights, all_finite):
    if raw.curvature is not None:
        pair = raw.gradient, raw.curvature
        finite = are_finite(*pair, weights) if all_finite is None else all_finite
        return raw, finite, jnp.zeros(2, jnp.int32)
    pairs = raw.gradient[0]
    run = choose(cpu=grow_cpu.split_pairs, xla=take_parts)
    gradient, curvature, finite = run(pairs, weights)
    raw = raw._replace(gradient=gradient[None], curvature=curvature[None])
    if all_finite is None:  # the rounds are made again if some are not finite
        return raw, every(finite), jnp.zeros(2, jnp.int32)
    lost = count_lost(~finite, lambda: ~jnp.isfinite(pairs) & (weights > 0))
    return raw, all_finite, lost


def take_parts(
    pairs: Complex64[Array, " N"], weights: Float[Array, " N"]
) -> tuple[Float[Array, " N"], Float[Array, " N"], Bool[Array, ""]]:
    """Returns real and imaginary parts, and whether those that count are finite.

    Both parts are 0 where one is not finite.
    """
    finite = jnp.isfinite(pairs)
    pairs = jnp.where(finite, pairs, 0.0)
    return jnp.real(pairs), jnp.imag(pairs), jnp.all(finite | (weights <= 0))


class RoundInputs(NamedTuple):
    """Inputs that differ from round to round: state and steps before it.

    ``entry`` is the index of the round in the buffers. ``given`` are leaves that only
    need new values.
    """

    state: BoostState
    set_steps: tuple[Float[Array, "K N"], ...]
    rate: Float[Array, ""]
    entry: Int32[Array, ""]
    given: GivenLeaves | None = None


class GrowOperands(NamedTuple):
    """Inputs of ``grow`` in every round: numbers, rows without targets, sets."""

    numbers: Numbers
    data: Data
    sets: tuple[Data, ...]


class RoundTrees(NamedTuple):
    """The trees of a round; their leaves may not have values yet.

    Attributes:
      plan: the plan of the round, without the derivatives of the rows.
      state, set_steps: the state after the round, without fields that depend on the
        loss, and steps of the validation sets; None if leaf values are no Newton steps.
      newton: the Newton steps of the leaves, unless they are the leaf values.
      scores: those after the round of the training rows, and of the validation sets
        that have rows of their own; () if ``finish`` contains the loss.
      moved, sloped: those of the training rows after the steps of each score alone, see
        :class:`RowLosses`, if the loss is to judge these and is not in ``finish``.
      words: the packed trees of all rounds so far.
    """

    plan: RoundPlan
    trees: Tree
    leaf: Int32[Array, "K N"]
    state: BoostState | None
    set_steps: tuple[Float[Array, "K N"], ...] | None
    newton: NewtonSteps | None
    scores: tuple[Float[Array, "K _"], ...]
    moved: tuple[Float[Array, "K N"], ...] | None
    sloped: tuple[Float[Array, "K N"], ...] | None
    words: Int32[Array, "R W"]
    all_finite: Bool[Array, ""]


class RoundBuffers(NamedTuple):
    """Outputs of rounds other than trees; axis 0 is the round, but not in ``sizes``.

    ``numbers`` holds each :class:`Summary`, packed by
    :func:`jboost.numerics.arrays.pack`.
    """

    numbers: Int32[Array, "R S"]
    snapshots: tuple[Float[Array, "R K N"], ...]
    parameters: Any
    sizes: Float[Array, " G"] | None


class Summary(NamedTuple):
    """The small results of a round.

    Attributes:
      losses, improvement: fields of :class:`jboost.boosting.reports.Report`.
      all_finite, enough, kept: whether ``derive`` left nothing out, ``finish`` got all
        that it needed, and Newton steps are good. If not, the rounds from here on must
        be made again by programs that contain more.
    """

    losses: Float[Array, " S"]
    improvement: Float[Array, ""] | None
    all_finite: Bool[Array, ""]
    enough: Bool[Array, ""]
    kept: Bool[Array, ""]


def for_derivatives(static: Static) -> Static:
    """Returns the part of the options that ``derive`` depends on."""
    method = replace(
        static.method, leaf_solver="newton", order_statistics=False, max_depth=1,
        num_bins=2, max_nodes=1, max_leaves=None, uniform=False, categorical=False,
        candidates="global", candidate_weights="samples", num_terms=0,
    )  # fmt: skip
    return Static(static.loss, method)


def for_growth(method: Method) -> Method:
    """Returns the part of the options that ``grow`` depends on, without the loss."""
    special = method.leaf_solver == "newton" and method.regularization == "absolute"
    return replace(
        method, curvature="exact", leaf_curvature="exact", order_statistics=False,
        leaf_solver="newton" if special else "hessian",
        regularization="absolute" if special else "relative",
    )  # fmt: skip


def for_finish(static: Static) -> Static:
    """Returns the part of the options that a ``finish`` without a loss depends on."""
    nothing: Any = None
    return Static(nothing, replace(for_growth(static.method), num_bins=2))


# Fields of the state that a round does not change: a program would copy them.
_HANDED_ON = (
    "start", "init_score", "pointed", "endless", "weight_unit", "known_shares",
    "least_rows", "words",
)  # fmt: skip
# Fields of the state that the derivatives of some losses change.
_DERIVED = ("minimizer", "kinks", "probe")


def without_loss(state: BoostState) -> BoostState:
    """Returns the state without the fields that differ in shape between losses."""
    return state._replace(
        minimizer=None, kinks=None, parameters=(), first_parameters=(), probe=None
    )


def with_loss(state: BoostState, before: BoostState) -> BoostState:
    """Restores the fields that ``grow`` leaves out, from the state before."""
    return _take(
        state, before, *_HANDED_ON, *_DERIVED, "parameters", "first_parameters"
    )


def _take(state, other, *names):
    """Returns the state with these fields of another one."""
    return state._replace(**{name: getattr(other, name) for name in names})


def with_derived(state: BoostState, changed: BoostState | None) -> BoostState:
    """Returns the state with the changes that :func:`derive` has made."""
    return state if changed is None else _take(state, changed, *_DERIVED)


# Newton steps of leaves: the loss judges them, they are the leaf values in any case, it
# improves on them, or (order statistics) leaf values are found without them.
Steps = Literal["judged", "kept", "improved", "none"]
FITTED = ("judged", "kept")  # in `grow`


class Derived(NamedTuple):
    """The derivatives of a round.

    Attributes:
      raw: the result of :func:`join_pairs`: derivatives by each curvature policy.
      all_finite: whether ``smooth`` was right; None: it was if all are finite.
    """

    raw: tuple[RawDerivatives, ...]
    all_finite: Bool[Array, ""] | None
    sizes: SumGuesses | None
    lost: Int32[Array, "3"]


@for_host
def derive(
    static: Static, smooth: bool | None, arrays: Arrays, state: BoostState
) -> tuple[BoostState | None, Derived]:
    """Computes the derivatives of all rows.

    The state is returned if they change it; see :func:`with_derived`.
    """
    problem = Problem(static, arrays)
    loss, policies = static.loss, set(list_policies(static.method))
    smoothable = state.minimizer is not None and bool(policies - {*INFORMED})
    redone = smooth is False and smoothable  # other programs do so if some are lost
    leave_out = not redone and not are_joined(problem)
    new, raw = differentiate(problem, state, smooth, leave_out)
    all_finite = None if redone else jnp.asarray(True)
    derived = Derived(join_pairs(problem, raw), all_finite, new.sizes, new.lost)
    if not (loss.coupled or loss.estimate is not None):
        return None, derived
    others = set(new._fields) - {*_DERIVED}
    return new._replace(**dict.fromkeys(others)), derived


@for_host
def grow(
    method: Method,
    scaling: Scaling,
    steps: Steps,
    scored: bool,
    growth: GrowOperands,
    turn: RoundInputs,
    derived: Derived,
    words: Int32[Array, "R W"],
) -> RoundTrees:
    """Grows the trees of a round, and sums the derivatives in their leaves.

    No loss is needed for leaf values that are Newton steps; with ``scored``, the scores
    where it is to be evaluated are returned. The state is one of :func:`without_loss`.
    """
    (numbers, data, sets), (state, set_steps, rate, entry, given) = growth, turn
    static: Any = Static(None, method)  # type: ignore[arg-type]
    problem = Problem(static, Arrays((), numbers, data))
    state = state._replace(sizes=derived.sizes, lost=derived.lost)
    raw, all_finite, lost = split_pairs(derived.raw, data.weights, derived.all_finite)
    state = note_lost(state, lost)
    plan = start_round(problem, scaling, state, raw)

    trees, leaf = grow_trees(problem, state, plan, given)
    after = new_steps = newton = moved = sloped = None
    scores = ()
    if steps != "none":
        newton = find_newton_steps(problem, plan, trees)
    if steps in FITTED:
        trees = fit_trees(problem, rate, state, plan, trees, leaf, False, newton)
        trees = trees if given is None else mix_leaves(trees, given)
        after = count_round(
            state, plan, add_leaves(state.steps, trees, leaf, data.values)
        )
        after = after._replace(**dict.fromkeys(_HANDED_ON))
        new_steps = add_to_sets(trees, sets, set_steps, after.steps)
        words = _store(words, pack(trees), entry)
    rest: Any = plan.for_leaves._replace(gradient=None, curvature=None)
    newton = None if steps == "kept" else newton
    if scored:
        scores = _list_scores(sets, state, after, new_steps)
        if newton is not None:
            moved, sloped = _list_trials(state, after, trees, newton, leaf)
    nothing: Any = None
    plan = plan._replace(
        for_splits=nothing, for_leaves=rest, shard_sums=None, projection=None,
        limits=limit_leaves(plan.limits),
    )  # fmt: skip
    return RoundTrees(
        plan, trees, leaf, after, new_steps, newton, scores, moved, sloped, words,
        all_finite,
    )  # fmt: skip


def _list_scores(sets, state, after, set_steps):
    """Returns the scores of the training rows, and of the sets with own rows."""
    begin = state.init_score.reshape(-1)
    others = [
        move_scores(rows.offset, begin) + steps
        for rows, steps in zip(sets, set_steps, strict=True)
        if rows.codes is not None
    ]
    return (state._replace(steps=after.steps).scores, *others)


def _list_trials(state, after, trees, newton, leaf):
    """Returns the scores after the steps of each score, and after its tree.

    The tree of a single score is not tried: it is that of the round.
    """
    moved = add_values(state.scores, newton.value, leaf)
    each, scores = range(len(leaf)), state.scores
    moved = tuple(scores.at[k].set(moved[k]) for k in each)
    if trees.slopes is None:
        return moved, None
    if len(leaf) == 1:
        return moved, ()
    steps = [state.steps.at[k].set(after.steps[k]) for k in each]
    return moved, tuple(state._replace(steps=one).scores for one in steps)


def _store(buffer, value, entry):
    """Writes a round's value; ``buffer.at[entry].set`` compiles to more than this."""
    return jax.lax.dynamic_update_index_in_dim(buffer, value, entry, 0)


_MOST_SCORES = 16  # each takes up to three calls of the program of the loss


class FinishOptions(NamedTuple):
    """The options that ``finish`` depends on besides loss and method.

    Attributes:
      keep: whether metrics need the scores.
      bagged: whether rounds leave rows out.
      solve: whether leaf values are computed here; if not, they are Newton steps.
      kind: the kind of the kinks of a piecewise linear loss; None: unknown.
      pointed: the flag of the state, if it decides how leaves are solved; else False.
    """

    keep: bool
    bagged: bool
    solve: bool
    kind: int | None
    pointed: bool


class ProgramOptions(NamedTuple):
    """Options of the programs of a round; see :func:`choose_options`.

    ``scored`` says that the losses of rows are computed by a program of their own, so
    that ``finish`` serves all losses.
    """

    smooth: bool | None
    steps: Steps
    scored: bool
    finish: FinishOptions


class IncludeFallbacks(NamedTuple):
    """Flags for the programs that contain rarely needed code."""

    derive: bool
    slopes: bool
    finish: bool

    def extend(self, made: Summary) -> "IncludeFallbacks":
        """Adds those that some round lacked: it will be needed again."""
        return IncludeFallbacks(
            derive=self.derive or not np.all(made.all_finite),
            slopes=self.slopes or not np.all(made.enough),
            finish=self.finish or not np.all(made.kept),
        )


def choose_options(
    problem: Problem,
    state: BoostState,
    reports: tuple[bool, bool],
    whole: IncludeFallbacks,
    apart: bool = False,
) -> ProgramOptions:
    """Decides from concrete values which code the programs of a round contain.

    ``reports`` are ``keep`` and ``bagged`` of :class:`FinishOptions`. With ``apart``,
    losses of rows are computed apart where that is possible.
    """
    method, kinks, loss = problem.method, state.kinks, problem.loss
    smooth, kind = None, None
    # Parameters may move the rows' minimizers.
    if not isinstance(loss, GroupLoss) and loss.estimate is None:
        if kinks is not None:
            kind = int(kinks.kind)
        policies = {method.curvature, method.leaf_curvature}
        looks = not loss.quadratic and bool(policies & {"auto", "secant"})
        known = state.minimizer is not None and not np.all(np.asarray(state.endless))
        if looks and known:
            smooth = True
        elif not whole.derive and not loss.piecewise_linear:
            smooth = False
    solve = method.leaf_solver not in ("newton", "hessian")
    if method.leaf_solver == "guarded":
        solve = whole.finish or bool(state.pointed)
    pointed = method.share_structure and bool(state.pointed)
    if solve:
        steps: Steps = "none" if method.order_statistics else "improved"
    else:
        steps = "judged" if method.leaf_solver == "guarded" else "kept"
    of_rows = not (isinstance(loss, GroupLoss) or loss.estimate is not None or solve)
    few = len(state.steps) <= _MOST_SCORES and not method.share_structure
    scored = apart and of_rows and few
    options = FinishOptions(*reports, solve, kind, pointed)
    return ProgramOptions(smooth, steps, scored, options)


@for_host
def finish(
    static: Static,
    options: FinishOptions,
    arrays: Arrays,
    sets: tuple[Data, ...],
    turn: RoundInputs,
    grown: RoundTrees,
    stored: RoundBuffers,
    losses: RowLosses,
) -> tuple[Any, RoundBuffers, Float[Array, " N"] | None]:
    """Completes a round, and stores it; losses that are not given are computed here.

    If all are given, neither ``static`` nor the operands hold a loss.

    Returns the state (with parameters, else as that of ``grow``), the steps of the
    validation sets and the packed trees, if ``options.solve``, else the parameters of
    an adaptive loss; the buffers with this round; and the losses of the training rows
    after it, if those before are given.
    """
    state, set_steps, rate, entry, given = turn
    if not options.bagged:
        all_rows: Any = None
        grown = grown._replace(plan=grown.plan._replace(in_bag=all_rows))
    problem, plan, before = Problem(static, arrays), grown.plan, state
    trees, words, after = grown.trees, grown.words, losses.after
    kept = enough = jnp.asarray(True)
    if options.solve:
        start = state
        if options.kind is not None and state.kinks is not None:
            start = state._replace(kinks=state.kinks._replace(kind=options.kind))
        trees = fit_trees(
            problem, rate, start, plan, trees, grown.leaf, options.pointed, grown.newton
        )
        trees = trees if given is None else mix_leaves(trees, given)
        words = _store(words, pack(trees), entry)
        table = problem.data.values
        steps = add_leaves(state.steps, trees, grown.leaf, table)
        set_steps = add_to_sets(trees, sets, set_steps, steps)
    else:
        assert grown.state is not None and grown.set_steps is not None
        steps, set_steps = grown.state.steps, grown.set_steps
        if grown.newton is not None:
            judged = problem, state, plan, trees, grown.leaf, grown.newton
            if static.loss is None:
                kept, enough = judge_steps(*judged, losses)
            else:
                kept, found = are_steps_kept(*judged, steps, losses.before)
                after = found if static.loss.estimate is None else None
    if static.loss is None:
        state = count_round(state, plan, steps)
    else:
        state = advance(problem, state, plan, steps)
    in_bag = plan.in_bag if options.bagged else None
    report = report_round(
        problem, options.keep, sets, before, state, set_steps, in_bag,
        sizes=stored.sizes, losses=losses._replace(after=after),
    )  # fmt: skip
    summary = Summary(report.losses, report.improvement, grown.all_finite, enough, kept)
    made = RoundBuffers(pack(summary), report.snapshots, state.parameters, None)
    stored = stored._replace(sizes=None)
    stored = jax.tree.map(partial(_store, entry=entry), stored, made)
    stored = stored._replace(sizes=report.sizes)
    row_losses = None if losses.before is None else report.row_losses
    found = state.parameters
    if options.solve:
        parts = dict.fromkeys(_HANDED_ON)
        state = without_loss(state)._replace(**parts, parameters=found)
        found = state, set_steps, words
    return found, stored, row_losses
