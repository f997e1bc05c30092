# SPDX-License-Identifier: Apache-2.0
"""fit: the loop of ``boosting`` with a host around it.

In: raw tables. Out: a model and its history. The host checks input, pads rows to few
sizes, and hands the run to ``loop``. It holds no mathematics.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, Shaped
from tqdm import tqdm

from jboost import losses
from jboost.boosting.auto import decide_by_data
from jboost.boosting.method import initial_scores, make_method, refuse_sorting
from jboost.boosting.settings import (
    Regularization,
    read_settings,
)
from jboost.codes.binning import fit_frame
from jboost.codes.bins import Bins
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.kernels.library import settle_implementation, takes_implementation
from jboost.model.ensemble import Ensemble
from jboost.objective.curvature import Curvature
from jboost.objective.tracing import trace_loss
from jboost.streams.block_rounds import plan_run
from jboost.streams.streaming import Stream, load_rows
from jboost.tables.collisions import warn_of_collisions
from jboost.tables.domains import check_domain
from jboost.tables.frames import Schema, read_frame
from jboost.tables.sparse import Absent, SparseMatrix, check_gaps
from jboost.tables.targets import check_weights
from jboost.training.checkpoints import (
    Checkpoint,
    check_checkpoint,
    read_checkpoint,
    resume,
    take_fingerprint,
)
from jboost.training.chunks import Job, no_trees, start
from jboost.training.continuing import (
    check_start,
    continue_from,
    match_categories,
    match_columns,
)
from jboost.training.history import History, Record
from jboost.training.host_loop import Position, first_position, run_rounds
from jboost.training.rows import Rows, make_rows, make_sets, name_sets
from jboost.training.scoring import (
    By,
    Metrics,
    bind_metrics,
    check_metrics,
    read_by,
    try_metrics,
)
from jboost.trees.candidates import Candidates, CandidateWeights
from jboost.trees.leaves import LeafSolver


@explain_arguments
@on_host("call jb.boost there")
@takes_implementation
def fit(
    x: Any,
    y: Any = None,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    validation: Any = None,
    metrics: Metrics = None,
    by: By = None,
    num_rounds: int = 100,
    learning_rate: Any = 0.1,
    max_depth: int = 6,
    max_bins: int = 256,
    absent: Absent | None = None,
    l1: float = 0.0,
    l2: float = 1.0,
    max_delta_step: float = float("inf"),
    min_gain: float = 0.0,
    min_child_weight: float = 1.0,
    min_child_samples: Any = "auto",
    regularization: Regularization = "relative",
    subsample: float = 1.0,
    colsample_bytree: float = 1.0,
    colsample_bylevel: float = 1.0,
    colsample_bynode: float = 1.0,
    max_leaves: int | None = None,
    monotone: Any = None,
    interactions: Any = None,
    candidates: Candidates = "global",
    candidate_weights: CandidateWeights = "samples",
    categorical: Any = "auto",
    category_l2: float = 50.0,
    category_smoothing: float = 20.0,
    min_category_weight: float = 25.0,
    max_onehot: int = 4,
    num_scores: int = 1,
    curvature: Curvature = "auto",
    leaf_solver: LeafSolver = "auto",
    init_score: Any = "auto",
    early_stopping_rounds: int | None = None,
    seed: int = 0,
    progress: bool = False,
    callbacks: Any = (),
    feature_names: Sequence[str] | None = None,
    implementation: str | None = None,
    model: Ensemble | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_rounds: int = 50,
) -> tuple[Ensemble, History]:
    """Trains a model for any differentiable loss.

    F_0 = init_score + offset;  F_m = F_{m-1} + learning_rate * tree_m, where each
    tree minimizes the loss to second order around F_{m-1} (Friedman 2001; Chen and
    Guestrin 2016), with the curvature and leaf values that ``curvature`` and
    ``leaf_solver`` say.

    Args:
      x: numbers [N, F], NaN = missing; computed with in float32. A matrix, a
        structured array, or a data frame of pandas, polars, pyarrow or another library
        that narwhals knows, whose names ``predict`` then checks. May be sparse (a
        ``scipy.sparse`` matrix, or BCOO or BCSR of ``jax.experimental.sparse``): the
        cost then grows with its stored entries. Or rows that are not in memory, from
        :func:`jboost.stream`; then y, sample_weight and offset come with them and are
        not given here.
      y: targets: an array [N] or [N, ...], a series or a frame of one column, or a
        pytree of such; one row of it is what the loss gets. Rows are paired with those
        of x by their order, whatever their index.
      loss: ``loss(score, target) -> scalar`` for one row, in jax.numpy, or what
        :func:`jboost.losses.adaptive` returns. See :mod:`jboost.losses`.
      sample_weight: >= 0; a row of weight 0 may hold NaN. XGBoost's scale_pos_weight=w
        is ``np.where(y == 1, w, 1.0)``.
      offset: [N] or [N, K], added to the score (a base margin: log exposure, say);
        to be given to ``predict`` as well.
      validation: (x, y), (x, y, sample_weight) or (x, y, sample_weight, offset), or
        a dict of such sets by name; early stopping looks at the first.
      metrics: what is reported of training and validation rows besides the loss: names
        of :mod:`jboost.metrics`, such as ["auc", "log_loss"]; functions; or {name:
        function}. A function is called as f(scores, targets, weights), with raw
        scores, in jax.numpy (compiled, for each number of rows) or NumPy; or, if its
        first argument is named ``y_true``, as scikit-learn's are, as f(y_true, y_pred,
        sample_weight=...), where y_pred is the inverse link of the scores
        (:func:`jboost.losses.inverse_link`).
      by: what rounds are compared by, for early stopping and ``history.best_round``:
        "loss" (None is the same), the name of a metric, or (name, "max"). Of a
        function of your own less is better, unless "max" is said; which way is better
        is known of built-in metrics, which need not be listed in ``metrics``.
      num_rounds: how many trees (times K).
      learning_rate: a number, or a schedule: round -> number, as in optax.
      max_depth: levels of splits: the order of interaction. Depth 1 makes a sum of
        functions of one feature each, depth 2 of two.
      max_bins: codes per feature, the missing one included; see ``candidates``.
      absent: how entries that a sparse matrix does not store are read: "missing", so
        that they take the direction learned at each split, or "zero"; the result is
        that of the dense matrix with NaN or 0 there. The model keeps it for
        prediction. None: that of ``model``, or "missing" if x is sparse, or dense with
        a missing value in a row of positive weight. Otherwise validation sets and the
        model refuse sparse matrices that do not store every entry.
      l1: alpha: moves the sum of a leaf's gradients toward 0 by so much, so that
        weak leaves are 0; counted like ``l2`` (relative: XGBoost's alpha is l1 times
        the mean curvature). Leaves that are order statistics take neither l1 nor l2.
      l2: Lambda: pulls leaf values to 0, counted in average rows (relative) or in
        units of the loss's second derivative (absolute, as in XGBoost).
      max_delta_step: the largest magnitude of a leaf value, before ``learning_rate``;
        inf, or 0 as in XGBoost: none.
      min_gain: kappa: what a split must gain; XGBoost's gamma is 2 min_gain.
      min_child_weight: least curvature of a child, in the units of ``l2``.
      min_child_samples: least rows of a child; "auto": 20 where leaves are order
        statistics (absolute error, quantiles) or much like them (no curvature at
        three quarters of the rows), else 1.
      regularization: "relative" divides gradient and curvature by the mean curvature
        of this round or the first, whichever is larger (for scores that compete for
        a row, as in softmax, by its sum over them), so that a loss times a million
        trains the same model; "absolute" leaves the loss's units.
      subsample: share of rows per round, without replacement; below 1 the history
        tells each round's improvement on the others.
      colsample_bytree, colsample_bylevel, colsample_bynode: share of columns.
      max_leaves: of a tree; None: as many as ``max_depth`` allows. Trees grow level
        by level all the same: on each level the best splits are made first, until
        there are so many leaves. (LightGBM's num_leaves is another thing: it may go
        deep in one place before a level is full.)
      monotone: {place or name of a feature: sign}, or F signs: 1 where the score
        must not fall as the feature rises, -1 where it must not rise, 0 where it may
        do both. Missing values are outside that order. Of K scores each obeys.
      interactions: groups of features by place or name, [[0, 1], [1, 2, 3]]: on a
        path from root to leaf all features must be of one group. A feature of no
        group splits alone.
      candidates: thresholds that may split a node, eps = 1 / (max_bins - 1) of the
        weight apart (Chen and Guestrin 2016, section 3.2): "global" (chosen once,
        before training), "local" (chosen in each node from its own rows), or "exact"
        (every distinct value, whatever ``max_bins``). The last two sort the rows of
        each feature once and run in plain XLA: about XGBoost's exact search in time,
        fifty times and more that of histograms. The order takes 4 bytes for each cell
        of x, and 8 more while a tree grows. They refuse l1, max_delta_step and
        monotone.
      candidate_weights: what rows weigh for candidates: "samples" (their
        sample_weight) or "curvature" (that of the loss, times it); "global" ones are
        then chosen anew for each tree, as by XGBoost's "approx".
      categorical: "auto": the columns that a data frame says are categories (strings,
        and what is declared so); a sequence: these columns as well, by name or place;
        None: no column. In a matrix a column of categories holds integers 0, 1, 2,
        ..., NaN where missing. Categories have no order: a split sends a set of them
        left, found by sorting those in the node by gradient over curvature (Fisher
        1958; Breiman et al. 1984, theorem 4.5). The ``max_bins - 2`` heaviest have a
        code each, the others share one. What training did not see is missing in
        prediction; what a node did not see goes the way of its missing values.
        Not with sparse x, streams, other ``candidates`` or ``monotone`` on them.
      category_l2: added to ``l2`` in the gain of a split by a set of categories, so
        that sets must earn what choosing them fits by chance (LightGBM's cat_l2); it
        and the next two are counted like ``l2``.
      category_smoothing: added to the curvature of each category in the sort, so that
        rare ones stand in the middle (LightGBM's cat_smooth).
      min_category_weight: least curvature of a child of a split by a set of
        categories (LightGBM's min_data_per_group asks likewise for rows).
      max_onehot: features of so many codes or fewer send one category left, the rest
        right, without ``category_l2`` and ``min_category_weight`` (as in LightGBM
        and XGBoost).
      num_scores: K. The loss then gets K scores, and each round grows K trees.
      curvature: the second-order weight of a row: "auto", "exact", "secant",
        "absolute" or "unit"; see :func:`jboost.objective.curvature.derivatives`.
      leaf_solver: "newton": -G / (H + l2), where H sums ``curvature``; "hessian": the
        same with the second derivatives of the loss, whatever ``curvature`` is;
        "exact": the argmin of the leaf's loss; "guarded": the Newton step, replaced by
        the argmin in leaves where it falls short of its predicted decrease, and in all
        leaves if 75 % of the rows have almost no curvature; "line_search": the Newton
        steps times one multiplier per tree; "median_step": one step from the median of
        the rows' own minimizers, without l2 (for Huber's loss and similar ones);
        "auto": "exact" for piecewise linear losses, "newton" for quadratic ones
        ("hessian" with unit curvature), else "guarded".
      init_score: "auto" = argmin_c of the weighted loss (or, where no row has a
        gradient there, a point where the most rows have one; see
        ``history.choices``), "median" of the rows' own minimizers (the targets, where
        a loss is least there), a number, or K numbers.
      early_stopping_rounds: stop when the first validation set's loss, or what ``by``
        says, has not improved for so many rounds; the model is then that of the best
        round.
      seed: of everything random.
      progress: show a bar with time left and current losses.
      callbacks: one or several ``callback(round, history, model_so_far)``, called for
        every round; a true answer stops after that round.
      feature_names: F different names, kept in the model; those of a data frame's
        columns need not be given.
      implementation: "xla", "cpu" (the compiled kernels), or None for the best where
        the program runs; all give the same model. See
        :func:`jboost.implementations`.
      model: training goes on from it, with ``num_rounds`` more rounds; x has its
        columns. The same call with the same data and settings goes on as if it had
        not ended: seeds and schedules of the learning rate count the model's rounds,
        too. The history, early stopping and callbacks see the new rounds only.
      checkpoint: a path, where the run is kept: if the file is there, the run goes on
        from it, and its result is that of a run that was never interrupted, bit for
        bit. Repeat the call that was interrupted; only ``num_rounds`` may be raised.
        The file stays when the run is over, and the call then returns at once;
        :func:`jboost.load` gives its model. What metrics and callbacks do is not
        compared; a run that a callback stopped goes on.
      checkpoint_rounds: after how many rounds the file is written anew.

    Returns:
      The model and its history.

    Raises:
      TypeError, ValueError: for bad arguments, before training; the checkpoint is of
        another run (the error names what differs), or damaged (a FileError).
      TrainingError: no row has a gradient to learn from, the loss stopped being
        finite, a metric or callback failed, or a checkpoint cannot be written;
        carries the model until then.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> model, history = jb.fit(x, y, lambda score, target: (score - target) ** 4)
      >>> bool(history.train_loss[-1] < history.train_loss[0])
      True
    """
    settings = read_settings(locals())
    num_rounds, num_scores = settings.num_rounds, settings.num_scores
    path = check_checkpoint(checkpoint, checkpoint_rounds)
    earlier = 0
    if model is not None:
        model = check_start(model, init_score, num_scores, absent)
        settings = settings.replace(init_score=model.init_score, absent=model.absent)
        earlier = model.num_rounds
    rates = np.asarray(checks.learning_rates(learning_rate, num_rounds, earlier))
    watchers = _check_callbacks(callbacks)
    begin = initial_scores(settings)
    padded = not isinstance(loss, losses.Adaptive)  # estimates see real rows only
    criterion, measures = read_by(by, check_metrics(metrics))
    measures = bind_metrics(measures, loss, num_scores)
    given_sets = name_sets(validation)
    if criterion.metric is not None and not given_sets:
        raise ValueError(f"by={by!r} needs validation=(x, y), got None")
    if early_stopping_rounds is not None and not given_sets:
        raise ValueError("early_stopping_rounds needs validation=(x, y), got None")
    if isinstance(x, Stream):
        _check_streamed(y, sample_weight, offset, settings)

        def check_columns(num_features, names):
            names = checks.check_names(feature_names, names, num_features)
            if model is not None:
                names = match_columns(model, num_features, names)
            checks.check_monotone(monotone, num_features, names)
            checks.check_interactions(interactions, num_features, names)

        table = x.prepare(settings.max_bins, progress, check_columns)
        given = _read_stream(table, settings, padded)
    else:
        table = None
        given = bin_arrays(
            x, y, sample_weight, offset, settings, padded, feature_names, model
        )
    bins, rows = given.bins, given.rows
    names = checks.check_names(feature_names, given.schema.names, bins.num_features)
    if model is not None:
        names = match_columns(model, bins.num_features, names)
        match_categories(model, bins.categories)
        model = replace(model, absent=bins.absent)  # known once rows have been seen
    sets = make_sets(
        validation, bins, given.schema._replace(names=names), rows.data.targets,
        num_scores, padded, given.with_offset,
    )  # fmt: skip
    check_domain(loss, rows.data.targets, rows.data.weights, num_scores, "y")
    for place, (name, _) in given_sets.items():
        data = sets[place].data
        check_domain(loss, data.targets, data.weights, num_scores, f"{name} y")
    traced, constants = trace_loss(loss, rows.data.targets, num_scores)
    method, numbers = make_method(
        settings, traced, rows.data.codes, num_rows=len(rows.data.weights),
        uniform=given.uniform,
        max_bins=settings.max_bins if given.sorted else bins.num_bins,
        num_features=bins.num_features, categories=bins.categories,
        feature_names=names,
    )  # fmt: skip
    for part in (rows, *sets.values()):
        try_metrics(measures, *part.real, num_scores)
    job = Job(traced, constants, method, numbers, rates, rows, sets, measures)
    with settle_implementation(rows.data.weights):
        blocks = None
        if isinstance(x, Stream) and table is not None:
            blocks = plan_run(job, table, x, begin)
        keep = path and Checkpoint(
            path,
            checkpoint_rounds,
            take_fingerprint(
                job, settings, bins, blocks and blocks.reader, model, begin, names,
                criterion,
            ),
            rates,
        )  # fmt: skip
        found = keep and read_checkpoint(keep)
        state, rule = start(job, begin, settings.seed)
        position = first_position(job, state)
        if model is not None and not found:
            position = continue_from(model, job, position, x, validation)
        record = _start_record(
            job, bins, position.state, rule, validation, names, model, criterion
        )
        if found:
            position = Position(*resume(found, record, *position))
        with tqdm(
            total=num_rounds,
            initial=record.num_rounds,
            disable=not progress,
            unit="round",
        ) as bar:
            kept = run_rounds(
                job,
                blocks,
                position,
                record,
                early_stopping_rounds,
                watchers,
                keep,
                bar,
            )
    return record.model(kept), record.history(record.num_rounds, kept)


class Given(NamedTuple):
    """The training rows.

    Attributes:
      uniform: whether no weights were given.
      with_offset: whether an offset was.
      sorted: whether trees are grown on sorted rows.
      schema: what their columns are.
    """

    bins: Bins
    rows: Rows
    uniform: bool
    with_offset: bool
    sorted: bool
    schema: Schema


def _check_streamed(y, sample_weight, offset, settings):
    """Refuses what the batches hold, and settings that streams do not support."""
    for name, value in dict(y=y, sample_weight=sample_weight, offset=offset).items():
        if value is not None:
            raise ValueError(
                f"{name} must not be given where x is a stream, because the batches "
                f"of the stream hold it, got {type(value).__name__}"
            )
    for name, only in (
        ("candidates", "global"),
        ("candidate_weights", "samples"),
        ("categorical", "auto"),
    ):
        value = getattr(settings, name)
        if value is not None and (not isinstance(value, str) or value != only):
            raise ValueError(
                f"{name} must be {only!r} where x is a stream, whose rows are dense "
                f"numbers and whose thresholds are chosen once, got {value!r}"
            )


def _read_stream(table, settings, padded):
    rows = load_rows(table, settings.num_scores, padded)
    bins = replace(table.bins, absent=settings.absent or table.bins.absent)
    return Given(
        bins, rows, not table.weighted, table.num_offsets > 0, False,
        Schema(table.names),
    )  # fmt: skip


def bin_arrays(
    x, y, sample_weight, offset, settings, padded, feature_names=None, model=None
):
    """Thresholds, and the rows on the device."""
    known = schema = None
    absent, categorical = settings.absent, settings.categorical
    if model is not None and model.categories is not None:
        # A code goes on to stand for the same category.
        known, schema = model.categories, model.schema
        if isinstance(categorical, str) and categorical == "auto":
            categorical = known.features
    frame = read_frame(
        x, "x", schema=schema, sparse=True, categorical=categorical is not None
    )
    matrix = frame.matrix
    if model is not None and isinstance(matrix, SparseMatrix):
        check_gaps(absent, matrix, "x")
    names = checks.check_names(feature_names, frame.names, matrix.shape[1])
    if y is None:
        raise ValueError("y must be given where x is an array, got None")
    warn_of_collisions(x)
    weights = sample_weight
    if weights is not None:
        weights = check_weights(weights, matrix.shape[0], "sample_weight")
    refuse_sorting(settings, matrix)
    bins = fit_frame(
        frame,
        max_bins=None if settings.sorts_rows else settings.max_bins,
        sample_weight=weights,
        absent=absent,
        categorical=categorical,
        feature_names=names,
        known=known,
    )
    rows = make_rows(bins, matrix, y, weights, offset, settings.num_scores, padded, "")
    sorts = settings.sorts_rows
    rows = rows.sorted() if sorts else rows
    return Given(bins, rows, weights is None, offset is not None, sorts, frame.schema)


def _start_record(job, bins, state, rule, validation, names, model, criterion):
    method, numbers = job.method, job.numbers
    init_score = np.asarray(state.init_score)
    decided = decide_by_data(
        np.asarray(state.pointed), method.leaf_solver, numbers.limits.min_child_samples
    )
    return Record(
        bins=bins,
        init_score=init_score,
        set_names=tuple(job.sets),
        named=isinstance(validation, dict),
        no_trees=no_trees(method, job.rows.scores.shape[0]),
        choices=dict(
            curvature=method.curvature,
            leaf_solver="exact" if decided.exact_leaves else method.leaf_solver,
            regularization=method.regularization,
            min_child_samples=int(decided.min_child_samples),
            init_score=init_score.tolist(),
            init_score_rule=rule,
            num_bins=bins.num_bins,
        ),
        feature_names=names,
        metric_names=tuple(job.metrics),
        bagged=bool(numbers.subsample < 1),
        before=model,
        parameters=[jax.device_get(state.parameters)],
        by=criterion,
    )


def _check_callbacks(callbacks):
    signature = "callback(round, history, model), or several such"
    if not callable(callbacks) and not isinstance(callbacks, tuple | list):
        raise TypeError(f"callbacks must be callable as {signature}, got {callbacks!r}")
    watchers = (callbacks,) if callable(callbacks) else tuple(callbacks)
    for watch in watchers:
        checks.check_callable("callbacks", watch, signature)
    return watchers
