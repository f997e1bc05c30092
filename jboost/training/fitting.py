# SPDX-License-Identifier: Apache-2.0
"""Training on raw tables: the public function fit.

Four steps: read the request, which checks all that needs no data (``request``); prepare
the rows (``preparing``); begin afresh, from a model or from a checkpoint
(``begin_run``); run chunks of rounds (``host_loop``).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, ParamSpec, TypeVar, Unpack

import numpy as np
from jax.sharding import Mesh
from jaxtyping import ArrayLike, Shaped
from tqdm import tqdm

from jboost import losses
from jboost.boosting.settings import (
    FitSettings,
    learning_rates,
    rate_by_rows,
    read_settings,
    takes_settings,
)
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.entry.exchanges import gather_numbers, num_processes, use_processes
from jboost.entry.messages import warn_user
from jboost.kernels.grow_cpu import keep_scratch
from jboost.kernels.library import resolve_implementation, takes_implementation
from jboost.model.ensemble import Ensemble
from jboost.tables.frames import RowSource
from jboost.training.checkpoints import (
    Checkpoint,
    compare_processes,
    describe_call,
    describe_run,
    lock_checkpoint,
    read_checkpoint,
    read_sharing,
    resume,
    take_fingerprint,
)
from jboost.training.chunks import open_bar
from jboost.training.continuing import continue_from
from jboost.training.host_loop import FitRun, refit_rounds, run_rounds
from jboost.training.metrics import By, Metrics
from jboost.training.preparing import (
    Prepared,
    divide_rows,
    make_job,
    make_leaf_job,
    prepare_rows,
)
from jboost.training.record import (
    Trained,
    TrainingError,
    TrainingInterrupted,
    average_models,
)
from jboost.training.request import (
    FitRequest,
    RawRows,
    read_mesh,
    read_request,
    refuse_large_run,
)
from jboost.training.sharded import spans_processes
from jboost.training.starting import start, start_position, start_record

P = ParamSpec("P")
R = TypeVar("R")
_LABELS = ({0.0, 1.0}, {-1.0, 1.0}, {1.0, 2.0})
_FEW = 20  # in fewer rows, two distinct values may be chance


def hint_at_classes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates ``fit`` to warn if y looks like labels and the loss is the default."""

    @functools.wraps(function)
    def hinted(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) < 3 and "loss" not in kwargs:
            _warn_of_labels(args[1] if len(args) > 1 else kwargs.get("y"))
        return function(*args, **kwargs)

    return hinted


def _warn_of_labels(y: Any) -> None:
    try:
        values = np.asarray(y)
        if values.dtype.kind not in "biuf" or values.size < _FEW:
            return
        values = values.astype(np.float64).reshape(-1)
        few = {*values[:_FEW].tolist()}
    except Exception:  # unreadable targets are refused later, by name
        return
    if len(few) <= 2 and {*np.unique(values).tolist()} in _LABELS:
        low, high = np.unique(values)
        warn_user(
            f"y has only the values {low:g} and {high:g}, and loss is squared_error, "
            "its default; pass jb.losses.logistic to learn the probability of 1 (with "
            "y of 0 and 1), use JBoostClassifier for labels of any kind, or pass "
            "loss=jb.losses.squared_error if it is meant"
        )


@explain_arguments
@hint_at_classes
@on_host("call jb.boost there")
@takes_implementation
@takes_settings
def fit(
    x: Any,
    y: Any = None,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    groups: Any = None,
    validation: Any = None,
    metrics: Metrics = None,
    by: By = None,
    progress: bool = False,
    callbacks: Any = (),
    feature_names: Sequence[str] | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    model: Ensemble | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_rounds: int = 50,
    **settings: Unpack[FitSettings],
) -> Trained:
    """Trains a model for any differentiable loss.

    F_0 = init_score + offset;  F_m = F_{m-1} + learning_rate * tree_m, where each
    tree minimizes the loss to second order around F_{m-1} (Friedman 2001; Chen and
    Guestrin 2016), with the curvature and leaf values that ``curvature`` and
    ``leaf_solver`` select. The page "Parameters" explains each argument at length.

    Args:
      x: numbers [N, F], used in float32; NaN and masked cells are missing. A matrix, a
        data frame (pandas, polars, pyarrow or another library that narwhals supports),
        a sparse matrix (``scipy.sparse``, BCOO or BCSR), or rows that are not in
        memory, from :func:`jboost.stream`, which include y, weights and offset.
      y: targets: an array [N] or [N, ...], a series, a frame, or a pytree of such; the
        loss receives one row of it. In y [N, K] of a built-in loss of one score, NaN is
        a missing target.
      loss: ``loss(score, target) -> scalar`` for one row, in jax.numpy, with ``groups``
        ``loss(scores, targets, *, where)`` for the rows of a group; or the result of
        :func:`jboost.losses.adaptive`. See :mod:`jboost.losses`.
      sample_weight: row weights, >= 0; a row of weight 0 may hold NaN. None: all are 1.
      offset: [N] or [N, K], added to the score (a base margin: log exposure, say);
        must be passed to ``predict`` as well.
      groups: N ids in any order (queries, subjects, bags), "all" for one group of all
        rows, or :func:`jboost.random_groups`; see the page "Losses of groups".
      validation: (x, y), (x, y, sample_weight) or (x, y, sample_weight, offset), or
        :func:`jboost.rows`; or a dict of such sets; early stopping uses the first.
      metrics: values to report for training and validation rows besides the loss: names
        of :mod:`jboost.metrics`, functions f(scores, targets, weights) or, as in
        scikit-learn, f(y_true, y_pred, sample_weight=...); or {name: function}.
      by: the criterion that compares rounds, for early stopping and
        ``history.best_round``: "loss" (or None), the name of a metric, or (name,
        "max"). For custom functions lower is better unless you pass (name, "max").
      progress: show a bar with time left and current losses.
      callbacks: one or several ``callback(round, history, model_so_far)``, called for
        every round; return a true value to stop training after that round. Their
        exceptions become a TrainingError, which holds the model so far.
      feature_names: F different names, kept in the model; a data frame has its own.
      implementation: "xla", "cpu" or "cuda", or None for the best where the program
        runs; all give the same model. See :func:`jboost.implementations`.
      mesh: a ``jax.sharding.Mesh`` of devices that share the rows, in order; the model
        is that of one device, bit for bit. See the page "Many machines".
      model: a model to continue with ``num_rounds`` more rounds.
      checkpoint: the path of a file that keeps the run; the same call continues from
        it, bit for bit. Only ``num_rounds`` may be raised.
      checkpoint_rounds: the number of rounds between two writes of the file.
      {settings}

    Returns:
      The model and its history, ``model, history = jb.fit(x, y)``.

    Raises:
      TypeError, ValueError: for bad arguments, before training; the checkpoint is of
        another run (the error names the differences), or damaged (a FileError).
      MemoryError: the run does not fit into memory.
      TrainingError: no row has a gradient to learn from, the loss stopped being
        finite, a metric or callback failed, a checkpoint cannot be written, memory
        ran out in a round, the machine is preempted, or another process of the run
        was lost; carries the model until then.
      TrainingInterrupted: ctrl-C; a KeyboardInterrupt that carries the model so far.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> model, history = jb.fit(x, y, lambda score, target: (score - target) ** 4)
      >>> bool(history.train_loss[-1] < history.train_loss[0])
      True
    """
    rows = RawRows(x, y, sample_weight, offset, feature_names, groups)
    with use_processes(spans_processes(mesh := read_mesh(mesh, x))):
        request = read_request(
            rows, loss, read_settings(settings, FitSettings), mesh,
            validation=validation, metrics=metrics, by=by, callbacks=callbacks,
            progress=progress, model=model,
            checkpoint=checkpoint, checkpoint_rounds=checkpoint_rounds,
        )  # fmt: skip
        return _train(request)


def _train(request: FitRequest) -> Trained:
    """Prepares the rows, and makes the rounds."""
    if num_processes() > 1:
        compare_processes(describe_call(request))
    refuse_large_run(request)
    with lock_checkpoint(request.checkpoint):
        prepared, count = prepare_rows(request), request.settings.members
        with (
            resolve_implementation(prepared.training.rows.data.weights),
            keep_scratch(),
        ):
            each = [_train_member(request, prepared, i) for i in range(count)]
    return each[0] if count == 1 else _average(each)


def _train_member(request, prepared, member):
    prepared = divide_rows(request, prepared, member)
    if request.holds_out and not prepared.sets:
        request = request.with_fixed_rounds()
    request = _choose_rate(request, prepared.training.rows)
    seed = (request.settings.seed + member) % 2**32
    request = request._replace(settings=request.settings.replace(seed=seed))
    with open_bar(len(request.rates), request.progress) as bar:
        run = begin_run(request, prepared, bar)
        trained = run_rounds(run)
        if prepared.whole is None:
            return trained
        found = run.position.state.minimizer if request.holds_out else None
        return _refit(request, prepared.whole, run.record, trained, found)


def _choose_rate(request, rows):
    """Returns the request with the learning rate that suits the number of rows."""
    settings = request.settings
    stops = request.automatic and settings.early_stopping_rounds is not None
    auto = isinstance(settings.given["learning_rate"], str)
    if not (stops and auto and settings.regularization == "relative"):
        return request
    counted = np.count_nonzero(rows.real[1] > 0)
    rate = rate_by_rows(sum(gather_numbers(int(counted))))
    rates = np.asarray(learning_rates(rate, len(request.rates)))
    return request._replace(settings=settings.replace(learning_rate=rate), rates=rates)


def _average(each):
    """Returns one model: its scores are the mean of those of the members."""
    models, history = [model for model, _ in each], each[0].history
    rounds = [model.num_rounds for model in models]
    history = replace(history, choices={**history.choices, "rounds_of_members": rounds})
    return Trained(average_models(models, np.ones(len(models))), history)


def begin_run(request: FitRequest, prepared: Prepared, bar: tqdm) -> FitRun:
    """Begins a run: fresh, from a model, or from a checkpoint."""
    request = _keep_structure(request, prepared)
    job = make_job(request, prepared)
    if num_processes() > 1:
        compare_processes(describe_run(request, prepared, job))
    runner = prepared.training.make_runner(job, request.begin)
    checkpoint = found = None
    if request.checkpoint is not None:
        fingerprint = take_fingerprint(request, prepared, job, runner)
        checkpoint = Checkpoint(
            request.checkpoint, request.checkpoint_rounds, fingerprint, request.rates
        )
        found = read_checkpoint(checkpoint)
    in_memory = not isinstance(request.rows.x, RowSource)
    state, rule = start(job, request.begin, request.settings.seed, in_memory)
    position = start_position(job, state)
    xs = [request.rows.x, *(parts[0] for _, parts in request.sets.values())]
    if prepared.model is not None and not found:
        position = continue_from(prepared.model, job, position, xs)
    record = start_record(request, prepared, job, position.state, rule)
    if found:
        position = resume(found, record, position, job, xs)
    return FitRun(
        job=job,
        runner=runner,
        position=position,
        record=record,
        patience=request.settings.early_stopping_rounds,
        watchers=request.watchers,
        watched=sum(gather_numbers(len(request.watchers))) > 0,
        checkpoint=checkpoint,
        bar=bar,
    )


def _refit(request, rows, record, trained, minimizer):
    """Fits the leaf values of all rounds to rows that include those held out.

    ``minimizer`` is each row's own minimizer, if the run had the same rows.
    """
    (model, history), settings = trained, request.settings
    settings = settings.replace(
        subsample=1.0,
        min_child_weight=0.0,  # below it, a root of training adds nothing
        share_structure=model.num_scores > 1 and model.shares_structure,
    )
    rates = request.rates[: model.num_rounds]
    job = make_leaf_job(settings, request.loss, rows, rates, model.ranges)
    tables = [request.rows.x]
    if not request.holds_out:  # the first validation set
        tables.append(next(iter(request.sets.values()))[1][0])
    try:
        if job.problem.loss.estimate is not None or job.rows.spread is not None:
            minimizer = None  # it moves with parameters, or lies on several devices
        state, _ = start(job, request.begin, settings.seed, minimizer=minimizer)
        return Trained(refit_rounds(model, tables, job, state), history)
    except ValueError as error:
        raise TrainingError(
            f"leaf values could not be fitted to all rows: {error}; the error's .model "
            "and .history are those of the rows that were not held out, as with "
            "refit=False",
            record,
            record.num_rounds - 1,
        ) from error
    except KeyboardInterrupt as interrupt:
        raise TrainingInterrupted(
            "training was interrupted while leaf values were fitted to all rows; the "
            "error's .model and .history are those of the rows that were not held out",
            model.num_rounds,
            model=model,
            history=history,
        ).with_traceback(interrupt.__traceback__) from None


def _keep_structure(request, prepared):
    """Returns the request with scores that share trees as in the run it continues."""
    settings, shares = request.settings, None
    if settings.share_structure != "auto":
        return request
    if request.checkpoint is not None:
        shares = read_sharing(request.checkpoint)
    if shares is None and prepared.model is not None and prepared.model.num_rounds:
        shares = prepared.model.shares_structure
    if shares is None:
        return request
    return request._replace(settings=settings.replace(share_structure=shares))
