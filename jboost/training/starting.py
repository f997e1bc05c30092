# SPDX-License-Identifier: Apache-2.0
"""The state before the first round, and why a run cannot start or learns nothing.

In: a training run, checked and on the device. Out: its state, or an error that names
the first row of unusable loss; for runs that learn nothing, the reason.
"""

from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool

from jboost.boosting.auto import decide_by_data
from jboost.boosting.first_sums import no_sizes
from jboost.boosting.reports import find_values, weigh_losses
from jboost.boosting.sharding import EVERYWHERE, rows_of
from jboost.boosting.state import (
    Arrays,
    BoostState,
    Problem,
    StartPoint,
    Static,
    bind_groups,
    bind_objective,
    start_state,
)
from jboost.codes.bins import Bins
from jboost.entry.context import runs_on_cpu, use_implementation
from jboost.entry.decorators import fetch
from jboost.entry.exchanges import agree, gather_numbers
from jboost.entry.messages import show
from jboost.entry.programs import FEW, FULL, Compiled, compiled
from jboost.entry.stages import MANY, run_in_stages
from jboost.kernels.calls import host
from jboost.objective.coupled import group_gradient
from jboost.objective.curvature import derivatives
from jboost.objective.evaluation import Objective, gradients, loss_values
from jboost.objective.faults import (
    describe_gap,
    describe_lost_slope,
    find_gaps,
    find_lost_slopes,
    find_never_finite,
)
from jboost.training.chunks import Job, Position, choose_effort, no_trees
from jboost.training.record import UNNAMED, Record, explain_divergence
from jboost.training.rows import PaddedRows
from jboost.training.sharded import compile_for_rows, compile_start
from jboost.trees.initial import (
    START_RULES,
    MedianStart,
    RowCounts,
    count_group_slopes,
    count_slopes,
    is_unbounded,
)
from jboost.trees.tree import LeafSums, Tree


def check_values(
    place: str, problem: Problem, rows: PaddedRows, values: Any, state: BoostState
) -> None:
    """Raises for the first row of positive weight without a finite loss.

    The initial score, or a parameter of the loss, may be NaN because of one row of one
    process. The rows that are most likely the reason are named.

    Args:
      place: the name of a validation set, or "the data".
      values: the loss of each row at the start; for groups, their losses and weights.
    """
    doubt, message = 0, ""
    with agree():
        if rows.data.groups is not None:
            _check_group_values(place, rows, values)
            return
        values, weights = rows.fetch((values, rows.data.weights))
        bad = ~np.isfinite(values) & (weights > 0)
        if bad.any():
            doubt, message = _describe_rows(place, problem, rows, bad, state)
    worst = max(gather_numbers(doubt))
    with agree():
        if 0 < doubt == worst:
            raise ValueError(message)


def refuse_rows(
    place: str,
    problem: Problem,
    rows: PaddedRows,
    bad: np.ndarray,
    state: BoostState,
) -> NoReturn:
    """Raises for the first of the ``bad`` rows, those without a finite loss."""
    raise ValueError(_describe_rows(place, problem, rows, bad, state)[1])


def _describe_rows(place, problem, rows, bad, state):
    """Describes the first of the ``bad`` rows, those without a finite loss.

    Rows without a finite loss at any score come first; if these are all rows, those
    with a target that is not finite.

    Returns:
      How likely the row is the reason: 1, 2 or 3; and the description.
    """
    targets, weights = rows.real
    start = rows.fetch(rows.offset, axis=1)
    constants, parameters = fetch((problem.constants, state.parameters))
    objective = Objective(problem.loss, constants, targets, parameters, None)
    init_score = np.asarray(state.init_score).reshape(-1, 1)
    with run_in_stages():
        never = find_never_finite(objective, start) & (weights > 0)
        known = np.isfinite(init_score).all()
        start = jax.device_put(start + init_score if known else start)
        values = np.asarray(loss_values(objective, start))
        if not known:
            lost = np.asarray(find_lost_slopes(objective, start)) & np.isfinite(values)
            slope = _describe_lost(lost, targets, weights, start)
            if slope is not None:
                return 3, slope
    gaps = find_gaps(targets, weights)
    for likely in (never, gaps if (never | (weights == 0)).all() else never):
        bad = bad & likely if (bad & likely).any() else bad
    row = int(np.argmax(bad))
    target = jax.tree.map(lambda t: t[row].tolist(), targets)
    score = np.asarray(start)[:, row].tolist()
    if never[row] and gaps[row]:
        return 3, describe_gap(_name_targets(place), target, row)
    return 2 if never[row] else 1, (
        f"loss must be finite on {place}, got {float(values[row])} in row {row} "
        f"for target {show(target)} at score {score}; a target may lie "
        "outside what the loss is defined for, the arguments of the loss may be "
        "swapped (the call is loss(score, target)), or init_score may be needed"
    )


def _name_targets(place):
    if place == "the data":
        return "y"
    return "validation y" if place == UNNAMED else f"validation[{show(place)}] y"


def _check_group_values(place, rows, pair):
    """Raises for the first group of positive weight without a finite loss."""
    values, weights = map(np.asarray, pair)
    bad = ~np.isfinite(values) & (weights > 0)
    if not bad.any():
        return
    groups, at = rows.data.groups, int(np.argmax(bad))
    members = np.arange(rows.size)
    which = "a group of random rows" if groups.kind == "random" else "all rows"
    if groups.kind == "ids":
        number = np.concatenate([np.asarray(table.number) for table in groups.tables])
        members = np.flatnonzero(np.asarray(groups.number)[: rows.size] == number[at])
        which = f"the group of rows {members[:8].tolist()}"
    refuse_group(place, rows, members, values[at], which)


def refuse_group(
    place: str, rows: PaddedRows, members: Any, value: Any, which: str
) -> NoReturn:
    """Raises for a group without a finite loss.

    Args:
      members: the rows that may be the reason.
      which: a description of the group.
    """
    gaps, reason = np.intersect1d(members, np.flatnonzero(find_gaps(*rows.real))), ""
    if len(gaps):
        target = jax.tree.map(lambda t: t[gaps[0]].tolist(), rows.real[0])
        reason = f" ({_name_targets(place)} is {show(target)} in row {gaps[0]})"
    raise ValueError(
        f"loss must be finite on {place}, got {value} for {which}{reason}; a target "
        "may lie outside what the loss is defined for, the arguments may be swapped "
        "(the call is loss(scores, targets, *, where)), or init_score may be needed"
    )


def check_slopes(problem: Problem, rows: PaddedRows, state: BoostState) -> None:
    """Raises for the first row with a finite loss but a gradient of NaN.

    A gradient of NaN at a kink is allowed if it is a number beside the kink.
    """
    if problem.loss.coupled:
        return
    constants, data = problem.constants, problem.data
    if rows.spread is None:
        with run_in_stages():
            lost = _find_lost(problem.loss, constants, data, state)
    else:
        spec = rows_of(rows.spread.shards)
        run = compile_for_rows(rows.spread, _find_lost, problem.loss, results=spec)
        lost = run(constants, data, state)
    with agree():
        lost, (targets, weights) = rows.fetch(lost), rows.real
        scores = rows.fetch(state.scores, axis=1)
        message = _describe_lost(lost, targets, weights, scores)
        if message is not None:
            raise ValueError(message)


def _describe_lost(lost, targets, weights, scores):
    """Describes the first row of positive weight with a lost gradient, if any."""
    bad = np.asarray(lost) & (weights > 0)
    if bad.any():
        row = int(np.argmax(bad))
        target = jax.tree.map(lambda t: t[row].tolist(), targets)
        score = np.asarray(scores)[:, row].tolist()
        return describe_lost_slope(target, row, f"score {score}")
    return None


def _find_lost(loss, constants, data, state):
    objective = Objective(loss, constants, data.targets, state.parameters, None)
    return find_lost_slopes(objective, state.scores)


def describe_idleness(
    problem: Problem, rows: PaddedRows, state: BoostState
) -> str | None:
    """Explains why no tree can learn from the gradients at a state; None if one can.

    Rows that are all at their own minimum leave nothing to learn, which is no error.
    """
    found = _count_slopes(problem, rows, state)
    if not found.not_finite and not found.stuck():
        return None
    start = np.asarray(state.init_score).tolist()
    branch = (
        ". A gradient is NaN beside a finite loss where a branch of jnp.where that is "
        "not taken has no derivative"
    )
    advice = "look at the loss there with jb.inspect_loss, or pass another init_score"
    if problem.loss.coupled:
        advice = (
            "a ranking needs rows of different relevance in one group, survival an "
            "event with other rows at risk; else pass an offset or another init_score"
        )
    return (
        f"of {found.rows} rows of positive weight, {found.not_finite} have a gradient "
        f"that is NaN or infinite and {found.zero} one that is zero (init_score "
        f"{start}); {advice}{branch if found.not_finite else ''}"
    )


def has_split(trees: Tree) -> Bool[ArrayLike, ""]:
    """Returns whether some tree has rows in more than one leaf; may be traced."""
    assert trees.sums is not None
    return ((trees.sums.weight > 0).sum(axis=-1) > 1).any()


def describe_limits(
    problem: Problem,
    rows: PaddedRows,
    state: BoostState,
    bins: Bins,
    sums: LeafSums | None = None,
) -> str | None:
    """Explains why no tree of a run has a split; None if there is nothing to learn.

    Without a slope in any row, with one target for all or with constant features, no
    tree would learn.

    Args:
      state: the state after the last round.
      sums: the leaf sums of a tree; its first leaf holds all rows. None: unknown.
    """
    found = _count_slopes(problem, rows, state)
    targets, weights = rows.real
    real = weights > 0
    known = [target[real] for target in jax.tree.leaves(targets)]
    alike = all(t.size == 0 or np.all(t == t.reshape(-1)[0]) for t in known)
    constant = bins.categories is None and not np.isfinite(bins.thresholds).any()
    if found.zero + found.not_finite >= found.rows or alike or constant:
        return None
    method, limits = problem.method, problem.arrays.numbers.limits
    samples = decide_by_data(
        np.asarray(state.pointed), np.asarray(state.least_rows), method.leaf_solver,
        limits.min_child_samples,
    ).min_child_samples  # fmt: skip
    samples = np.min(samples)  # least of all scores
    size, reasons = int(found.rows), []
    if samples > size:  # larger numbers have been cut
        reasons.append(
            f"min_child_samples asks for more than the {size} rows there are"
        )
    elif 2 * samples > size:
        reasons.append(
            f"min_child_samples={int(samples)} asks for {2 * int(samples)} rows in two "
            f"children, and there are {size}"
        )
    least, total = float(limits.min_child_weight), _find_curvature(problem, sums)
    if total == 0:
        return None  # which has been said before training
    if total is None and method.regularization == "relative":
        total = size  # an average row has 1
    if total is not None and 2 * least > total:
        reasons.append(
            f"min_child_weight={least:g} asks for a curvature of {2 * least:g} in two "
            f"children, and the rows of a round have {total:.3g}"
        )
    others = {"min_gain": limits.min_gain}
    if total is None:
        others["min_child_weight"] = limits.min_child_weight
    constraints = "interactions and " if limits.groups is not None else ""
    if limits.values is not None:
        others["l1"] = limits.values.l1
        constraints += "monotone and " if np.any(limits.values.monotone) else ""
    named = ", ".join(f"{k}={float(v):g}" for k, v in others.items() if float(v) > 0)
    named = constraints + named if named else constraints.removesuffix(" and ")
    if not reasons and named:
        return f"no split of {size} rows gains enough with {named}"
    return "; ".join(reasons) or f"no split of {size} rows lowers the loss"


def describe_halt(
    problem: Problem, rows: PaddedRows, state: BoostState, sums: LeafSums
) -> str | None:
    """Explains why a round moved no row: a Newton step takes the loss to -inf.

    Args:
      state: the state after the round.
      sums: the leaf sums of its trees, [K, L]; the longest step is tried in all rows.

    Returns:
      None if the loss is larger, and where rows depend on each other or are divided.
    """
    if problem.loss.coupled or rows.spread is not None:
        return None
    curvature = np.where(sums.curvature > 0, sums.curvature + sums.l2[:, None], np.inf)
    steps = np.asarray(-sums.gradient / curvature)
    longest = np.argmax(np.abs(steps), axis=1, keepdims=True)
    step = np.take_along_axis(steps, longest, axis=1)
    objective = bind_objective(problem, state)
    moved = state.scores + jnp.asarray(step)
    with run_in_stages(), np.errstate(over="ignore", invalid="ignore"):
        here, after = (loss_values(objective, each) for each in (state.scores, moved))
        counted = np.where(problem.data.weights > 0, problem.data.weights, np.nan)
        fall = np.nansum(np.asarray(after) * counted)
        size = np.nansum((np.abs(here) + np.abs(after)) * counted)
    if np.isfinite(size) or not fall < 0:
        return None
    return (
        f"its leaves would take the loss from {np.nanmean(here):.3g} to where float32 "
        f"ends; {explain_divergence([], -np.inf)}"
    )


def _find_curvature(problem, sums):
    """Returns the curvature of all rows in the units of ``min_child_weight``."""
    if sums is None:
        return None
    method, limits = problem.method, problem.arrays.numbers.limits
    total, unit = sums.curvature, np.float32(1)
    if method.curvature == "unit":
        total = sums.weight
    elif method.curvature != method.leaf_curvature:
        return None
    elif method.regularization == "relative":
        if limits.l2 == 0:
            return None
        unit = np.asarray(sums.l2)[..., None] / limits.l2  # l2 has the same unit
    return float(np.max(np.asarray(total) / unit))


def _count_slopes(problem, rows, state) -> RowCounts:
    static = (_idleness_program, problem.loss, problem.method.curvature)
    run: Any = compiled(*static)
    if rows.spread is not None:
        run = compile_for_rows(rows.spread, *static, results=EVERYWHERE)
    return run(problem.constants, problem.data, state)


def _idleness_program(loss, curvature, constants, data, state):
    if loss.coupled:
        none: Any = None
        problem = Problem(Static(loss, none), Arrays(constants, none, data))
        objective = bind_groups(problem, state, data.weights)
        slopes = group_gradient(objective, state.scores)
        return count_group_slopes(slopes, data.weights)
    objective = Objective(
        loss, constants, data.targets, state.parameters, state.minimizer, state.kinks,
        state.coupling,
    )  # fmt: skip
    slopes, _ = derivatives(
        objective, state.scores, data.weights, curvature, seed=state.words
    )
    return count_slopes(objective, slopes, state.scores, data.weights)


def start(
    job: Job,
    init_score: Array | MedianStart | None,
    seed: int,
    in_memory: bool = True,
    minimizer: Array | None = None,
) -> tuple[BoostState, str]:
    """Makes the state before the first round, and checks that the loss is finite.

    Args:
      job: the run.
      init_score: the score to start from, a :class:`MedianStart`, or None: the argmin.
      seed: the random seed of the run.
      in_memory: whether all rows are in memory. If so, small programs that compile in a
        fraction of the time of one may find the start. Streams use one program, because
        its memory is known beforehand, unless they have few rows and K > 1.
      minimizer: each row's own minimizer, if it is known.

    Returns:
      The state, and the rule that gave the initial score; see
      :class:`jboost.training.record.History`.
    """
    words = np.array([0, seed], np.uint32)  # as seed_from_key(jax.random.key(seed))
    begin = StartPoint(init_score, words, minimizer)
    found = _start_in_stages(job, begin, in_memory)
    (state, rule, values, endless), problem = found, job.problem
    if endless:
        refuse_unbounded()
    if isinstance(init_score, MedianStart):
        check_minimizers(problem, job.rows, state, "init_score='median'")
    if problem.method.leaf_solver == "median_step":
        check_minimizers(problem, job.rows, state, "leaf_solver='median_step'")
    check_values("the data", problem, job.rows, values, state)
    check_slopes(problem, job.rows, state)
    for name, rows in job.sets.items():
        values = _find_set_values(problem, rows, state)
        check_values(name, problem, rows, values, state)
    if init_score is None:
        if problem.loss.coupled:
            return state, "shift-invariant" if rule else "argmin"
        return state, START_RULES[np.asarray(rule).item()]
    return state, "median" if isinstance(init_score, MedianStart) else "given"


def _start_in_stages(job, begin, in_memory):
    """Finds the start in stages, where all rows can be on one device."""
    rows, loss, constants = job.rows, job.problem.loss, job.problem.constants
    if loss.coupled:
        return _start_in_one_program(job, begin)
    num_scores, size = rows.offset.shape
    if rows.spread is not None:
        size = rows.spread.shards.padded
    # One program may round few rows in another way than stages do, so streams of few
    # rows take stages, too. For one score both give the same bits, and the plan of the
    # stream's memory has compiled the one program.
    few = num_scores * size <= FEW and (in_memory or num_scores > 1)
    if not few and not (in_memory and rows.spread is None):
        return _start_in_one_program(job, begin)
    data = job.problem.data._replace(codes=None, values=None)
    if rows.spread is not None:
        constants = fetch(constants)  # from all devices
        data = rows.gather()
    # Of few rows the start is found on the CPU, also where another device trains: for
    # it programs take several times as long to compile, and calls to start.
    away = num_scores * size <= MANY and not runs_on_cpu() and host() is not None
    operands: Any = (constants, data, begin)
    operands = fetch(operands) if away else operands
    with run_in_stages(), _on_host() if away else nullcontext():
        # On the device once for all stages.
        found = _find_start(loss, *jax.device_put(operands))
    found = jax.device_put(fetch(found)) if away else found
    if rows.spread is None:
        # A buffer that stands twice could not be donated.
        return found if in_memory else jax.tree.map(jnp.array, found)
    state, rule, values, endless = fetch(found)
    first = rows.spread.first_row
    own = slice(first, first + rows.size)
    by_row = {
        name: None if value is None else rows.put_scores(value[:, own])
        for name in ("start", "steps", "minimizer")
        for value in [getattr(state, name)]
    }
    state = state._replace(**dict.fromkeys(by_row), sizes=fetch(no_sizes(num_scores)))
    state = rows.spread.put_everywhere(state)._replace(**by_row)
    return state, rule, rows.spread.put(values[own]), endless


@contextmanager
def _on_host():
    with use_implementation(None), jax.default_device(host()):
        yield


def _start_in_one_program(job, begin):
    """Finds the start in one program."""
    program, operands = start_program(job, begin)
    return program(*operands)


def _find_set_values(problem, rows, state):
    """Returns the loss of each row of a validation set at the start."""
    # In NumPy, because sets of other sizes would need other programs.
    init_score = np.asarray(state.init_score).reshape(-1, 1)
    start = rows.put_scores(rows.fetch(rows.offset, axis=1) + init_score)
    state = state._replace(start=start, steps=rows.put_scores(rows.no_steps()))
    loss, constants = problem.loss, problem.constants
    if loss.coupled:
        effort = choose_effort(problem, rows.padded)
        run = compiled(_find_state_values, loss, effort=effort)
        return run(constants, rows.data, state)
    if rows.spread is None:
        with run_in_stages():
            return find_values(loss, constants, rows.data, start, state.parameters)
    state = state._replace(minimizer=None)
    run = compile_for_rows(
        rows.spread, _find_state_values, loss, results=rows_of(rows.spread.shards)
    )
    return run(constants, rows.data, state)


def start_position(job: Job, state: BoostState) -> Position:
    """Returns the position before the first round."""
    return Position(state, tuple(s.put_scores(s.no_steps()) for s in job.sets.values()))


def start_program(job: Job, start: StartPoint) -> tuple[Compiled, tuple[Any, ...]]:
    """Returns the start as one program, and its operands."""
    loss, data, spread = job.problem.loss, job.problem.data, job.rows.spread
    operands = (job.problem.constants, data, start)
    if spread is None:
        effort = choose_effort(job.problem, job.rows.padded)
        return compiled(
            _find_start, loss, effort=effort if loss.coupled else FULL
        ), operands
    # The start does not depend on the features.
    operands = (job.problem.constants, data._replace(codes=None), start)
    return compile_start(spread, _find_start, loss), operands


def check_minimizers(
    problem: Problem, rows: PaddedRows, state: BoostState, setting: str
) -> None:
    """Raises if a row has no minimizer of its own, which a setting needs.

    Rows of weight 0 and rows without a slope do not need one.
    """
    if state.minimizer is None:
        return
    data = problem.data
    objective = bind_objective(problem, state)._replace(minimizer=None, kinks=None)
    if rows.spread is None:
        with run_in_stages():
            slopes = gradients(objective, state.scores)
    else:
        columns = rows_of(rows.spread.shards, 1)
        run = compile_for_rows(rows.spread, _find_slopes, problem.loss, results=columns)
        slopes = run(problem.constants, data, state)
    with agree():
        _check_found(rows, state, slopes, setting)


def _check_found(rows, state, slopes, setting):
    slopes, minimizer = rows.fetch((slopes, state.minimizer), axis=1)
    missing = ~np.isfinite(minimizer) & (slopes != 0)
    targets, weights = rows.real
    bad = missing.any(axis=0) & (weights > 0)
    if bad.any():
        row = int(np.argmax(bad))
        target = jax.tree.map(lambda t: t[row].tolist(), targets)
        raise ValueError(
            f"{setting} needs a loss that has a minimum of its own in every row, got "
            f"none in row {row} for target {show(target)}"
        )


def refuse_unbounded() -> NoReturn:
    """Raises for a loss that :func:`is_unbounded`."""
    raise ValueError(
        "loss must have a minimum in the score, got one without a minimum for any row "
        "of positive weight: it is linear or concave in the score, so unbounded below; "
        "its arguments may be swapped (the call is loss(score, target)), or its sign "
        "may be wrong"
    )


def _find_start(loss, constants, data, start):
    state, rule = start_state(loss, constants, data, start)
    if loss.coupled:
        values = _find_state_values(loss, constants, data, state)
        return state, rule, values, False
    values = find_values(loss, constants, data, state.scores, state.parameters)
    objective = Objective(
        loss, constants, data.targets, state.parameters, state.minimizer
    )
    endless = is_unbounded(objective, state.scores, data.weights)
    return state, rule, values, endless


def _find_state_values(loss, constants, data, state):
    if loss.coupled:
        return weigh_losses(
            loss, constants, state.parameters, data, state.scores, state.words
        )
    return find_values(loss, constants, data, state.scores, state.parameters)


def _find_slopes(loss, constants, data, state):
    parameters = state.parameters
    objective = Objective(loss, constants, data.targets, parameters, None)
    return gradients(objective, state.scores)


def start_record(request: Any, prepared: Any, job: Job, state: BoostState, rule: str):
    """Returns the record of a run before its first round."""
    method, bins = job.problem.method, prepared.bins
    limits = job.problem.arrays.numbers.limits
    decided = decide_by_data(
        np.asarray(state.pointed),
        np.asarray(state.least_rows),
        method.leaf_solver,
        limits.min_child_samples,
    )
    init_score = np.asarray(state.init_score)
    return Record(
        bins=bins,
        init_score=init_score,
        set_names=tuple(job.sets),
        named=request.named,
        no_trees=no_trees(method, request.settings.num_scores),
        choices=dict(
            curvature=method.curvature,
            leaf_solver="exact" if decided.exact_leaves else method.leaf_solver,
            regularization=method.regularization,
            l2=float(limits.l2),
            min_child_samples=np.asarray(decided.min_child_samples).tolist(),
            init_score=init_score.tolist(),
            init_score_rule=rule,
            num_bins=bins.num_bins,
            share_structure=method.share_structure,
            subsample=float(request.settings.subsample),
            rows_per_threshold=request.settings.rows_per_threshold,
            parent_rows=float(request.settings.parent_rows),
            linear_leaves=method.num_terms > 0,
            learning_rate=_shorten(request.rates[0]) if len(request.rates) else None,
            early_stopping_rounds=request.settings.early_stopping_rounds,
            refit=prepared.whole is not None,
        ),
        feature_names=prepared.feature_names,
        metric_names=tuple(job.metrics),
        measured=tuple(job.real),
        bagged=job.bagged,
        before=prepared.model,
        parameters=[fetch(state.parameters)],
        by=request.by,
    )


def _shorten(rate):
    """Returns a float32 number as people write it: 0.1, not 0.10000000149."""
    return float(f"{float(rate):.7g}")
