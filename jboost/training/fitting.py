# SPDX-License-Identifier: Apache-2.0
"""Training on raw tables: the public function fit.

Four steps: read the request, which checks all that needs no data (``request``); prepare
the rows (``preparing``); begin afresh, from a model or from a checkpoint
(``begin_run``); run chunks of rounds (``host_loop``).
"""

import functools
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, ParamSpec, TypeVar

import numpy as np
from jax.sharding import Mesh
from jaxtyping import ArrayLike, Shaped
from tqdm import tqdm

from jboost import losses
from jboost.boosting.settings import Regularization
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.entry.exchanges import gather_numbers, num_processes, use_processes
from jboost.entry.messages import warn_user
from jboost.kernels.grow_cpu import keep_scratch
from jboost.kernels.library import resolve_implementation, takes_implementation
from jboost.model.ensemble import Ensemble
from jboost.objective.curvature import Curvature
from jboost.tables.frames import RowSource
from jboost.tables.sparse import Absent
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
from jboost.training.history import Trained
from jboost.training.host_loop import FitRun, run_rounds
from jboost.training.preparing import Prepared, make_job, prepare_rows
from jboost.training.request import (
    FitRequest,
    read_mesh,
    read_request,
    refuse_large_run,
)
from jboost.training.scoring import By, Metrics
from jboost.training.sharded import spans_processes
from jboost.training.starting import start, start_position, start_record
from jboost.trees.candidates import Candidates, CandidateWeights
from jboost.trees.leaves import LeafSolver

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
    num_rounds: int = 100,
    learning_rate: Any = 0.1,
    max_depth: int = 6,
    max_bins: int = 256,
    absent: Absent | None = None,
    l1: float = 0.0,
    l2: Any = "auto",
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
    category_l2: float = 0.0,
    category_smoothing: float = 0.0,
    min_category_weight: float = 0.0,
    max_onehot: int = 4,
    num_scores: int = 1,
    curvature: Curvature = "auto",
    leaf_solver: LeafSolver = "auto",
    share_structure: bool | str = "auto",
    init_score: Any = "auto",
    early_stopping_rounds: int | None = None,
    seed: int = 0,
    progress: bool = False,
    callbacks: Any = (),
    feature_names: Sequence[str] | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
    model: Ensemble | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_rounds: int = 50,
) -> Trained:
    """Trains a model for any differentiable loss.

    F_0 = init_score + offset;  F_m = F_{m-1} + learning_rate * tree_m, where each
    tree minimizes the loss to second order around F_{m-1} (Friedman 2001; Chen and
    Guestrin 2016), with the curvature and leaf values that ``curvature`` and
    ``leaf_solver`` select.

    Args:
      x: numbers [N, F], used in float32; NaN and masked cells (``numpy.ma``) are
        missing. A matrix, a structured array, or a data frame of pandas, polars,
        pyarrow or another library that narwhals supports; ``predict`` then compares
        its labels. May be sparse (a ``scipy.sparse`` matrix, or BCOO or BCSR of
        ``jax.experimental.sparse``): the cost then grows with its stored entries. Or
        rows that are not in memory, from :func:`jboost.stream`; they include y,
        sample_weight and offset, which are then not given here.
      y: targets: an array [N] or [N, ...], a series, a frame, or a pytree of such; the
        loss receives one row of it. Rows are paired with those of x by their order,
        whatever their index. For y [N, K] a built-in loss of one score is summed over
        the K columns, where NaN is a missing target. A custom loss may take infinities
        and NaN.
      loss: ``loss(score, target) -> scalar`` for one row, in jax.numpy, with ``groups``
        ``loss(scores, targets, *, where)`` for the rows of a group; or the result of
        :func:`jboost.losses.adaptive`. See :mod:`jboost.losses`.
      sample_weight: row weights, >= 0; a row of weight 0 may hold NaN. XGBoost's
        scale_pos_weight=w is ``np.where(y == 1, w, 1.0)``.
      offset: [N] or [N, K], added to the score (a base margin: log exposure, say);
        must be passed to ``predict`` as well.
      groups: N ids in any order (queries, subjects, bags, strata), "all" for one group
        of all rows, or :func:`jboost.random_groups`. The loss is then one of a group,
        ``loss(scores, targets, *, where) -> scalar``, where scores are [G] or [G, K],
        targets have G rows, and the boolean mask ``where`` [G] marks the rows of the
        group; others are padding. The loss may also take ``weights`` [G] and ``key``,
        a new PRNG key in each round; if it does not take weights, ``sample_weight``
        must be the same in all rows of a group, and weighs the group. A row of weight
        0 is not in ``where``. ``subsample`` draws groups. See the page "Losses of
        groups". Not with streams or ``mesh``.
      validation: (x, y), (x, y, sample_weight) or (x, y, sample_weight, offset), or
        :func:`jboost.rows`, which names these parts and takes ``groups``; or a dict of
        such sets by name; early stopping uses the first.
      metrics: values to report for training and validation rows besides the loss: names
        of :mod:`jboost.metrics`, such as ["auc", "log_loss"]; functions; or {name:
        function}. A function is called as f(scores, targets, weights), with raw
        scores, in jax.numpy (compiled, for each number of rows) or NumPy; or, if its
        first argument is named ``y_true``, as in scikit-learn, as f(y_true, y_pred,
        sample_weight=...), where y_pred is the inverse link of the scores
        (:func:`jboost.losses.inverse_link`).
      by: the criterion that compares rounds, for early stopping and
        ``history.best_round``: "loss" (or None), the name of a metric, or (name,
        "max"). For a function of your own less is better, unless "max" is given;
        built-in metrics have a known direction, and need not be in ``metrics``.
      num_rounds: the number of trees (times K).
      learning_rate: a number, or a schedule: round -> number, as in optax.
      max_depth: levels of splits: the order of interaction. Depth 1 makes a sum of
        functions of one feature each, depth 2 of two.
      max_bins: codes per feature, including one for missing; see ``candidates``.
        Categories may have 16 times as many, see ``categorical``.
      absent: the meaning of entries that a sparse matrix does not store: "missing", so
        that they take the direction learned at each split, or "zero"; the result is
        that of the dense matrix with NaN or 0 in their places. The model keeps it for
        prediction. None: that of ``model``, or "missing" if x is sparse, or dense with
        a missing value in a row of positive weight. Otherwise validation sets and the
        model refuse sparse matrices that do not store every entry.
      l1: penalty alpha: moves the sum of a leaf's gradients toward 0 by this amount,
        so that weak leaves are 0; counted like ``l2`` (relative: XGBoost's alpha is l1
        times the unit of ``regularization``). Not for leaves that are order statistics.
      l2: penalty lambda: pulls leaf values to 0, counted in average rows (relative) or
        in units of the loss's second derivative (absolute, as in XGBoost). Medians and
        quantiles are those of the residuals and l2 added zeros (absolute: none). Rows
        are counted at weight min(1, mean weight), also for min_child_weight, min_gain
        and l1. "auto": 3, or 1 for medians and quantiles; absolute: 1.
      max_delta_step: the largest magnitude of a leaf value, before ``learning_rate``;
        inf, or 0 as in XGBoost: no limit.
      min_gain: the least gain kappa of a split; XGBoost's gamma is 2 min_gain.
      min_child_weight: the least curvature of a child, in the units of ``l2``.
      min_child_samples: the least rows of a child; "auto": one in 50 of the rows, from
        1 to 20; for leaves that are order statistics (absolute error, quantiles)
        2 / min(tau, 1 - tau) - 1, at most 20; 20 if 75 % of the rows have almost no
        curvature. Absolute, without order statistics: 1, as in XGBoost. Rows of the
        whole table count, whatever their weight and ``subsample``.
      regularization: "relative" divides gradient and curvature by the curvature of an
        average row, so that a loss times a million trains the same model; "absolute"
        leaves the loss's units. That curvature is the mean of this round, or, if that
        is less than the mean of the first round, the geometric mean of both (of sums
        over the scores where they compete for a row, as in softmax); times N / N_eff,
        where N_eff rows hold the information at the start. For a logistic loss it
        starts at 1/4, the greatest curvature, however rare positive rows are. See the
        page "Curvature" of the documentation.
      subsample: share of rows per round, drawn without replacement; below 1 the history
        has each round's improvement on the other rows.
      colsample_bytree, colsample_bylevel, colsample_bynode: share of columns.
      max_leaves: the most leaves of a tree; None: as many as ``max_depth`` allows.
        Trees still grow level by level: on each level the best splits are made first,
        up to this number of leaves. (LightGBM's num_leaves differs: a tree may go deep
        in one place before a level is full.)
      monotone: {index or name of a feature: sign}, or F signs: 1 where the score
        must not fall as the feature rises, -1 where it must not rise, 0 where it may
        do both. Missing values are outside that order. All K scores obey the signs.
      interactions: groups of features by index or name, [[0, 1], [1, 2, 3]]: on a
        path from root to leaf all features must be of one group. A feature of no
        group splits alone.
      candidates: thresholds that may split a node, eps = 1 / (max_bins - 1) of the
        weight apart (Chen and Guestrin 2016, section 3.2): "global" (chosen once,
        before training), "local" (chosen in each node from its own rows), or "exact"
        (every distinct value, whatever ``max_bins``). The last two sort the rows of
        each feature once, and take six to seven times as long as histograms. The order
        takes 4 bytes for each cell of x, and 16 more while a tree grows.
      candidate_weights: the weights of rows in the choice of candidates: "samples"
        (sample_weight) or "curvature" (sample_weight times the curvature of the loss);
        "global" ones are then chosen anew for each tree, as by XGBoost's "approx".
      categorical: "auto": the categorical columns of a data frame (strings, and columns
        declared categorical); a sequence: these columns as well, by name or index;
        None: no column. In a matrix a column of categories holds integers 0, 1, 2,
        ..., NaN where missing. Categories have no order: a split sends a set of them
        left, found by sorting those in the node by gradient over curvature (Fisher
        1958; Breiman et al. 1984, theorem 4.5), shrunk by the noise of the node's rows
        (DerSimonian and Laird 1986). The heaviest ``16 * max_bins - 2`` have a code
        each (fewer where all columns together would have more than 2^19 codes), the
        others share one. In prediction, categories unseen in training (in a matrix also
        integers < 0) are treated as missing; if unseen in a node, they follow its
        missing values. Not with sparse x, streams or other ``candidates``, nor with
        ``monotone`` signs on them.
      category_l2: an addition to ``l2`` in the gain of a split by a set of categories
        (LightGBM's cat_l2); it and the next two are counted like ``l2``.
      category_smoothing: the least s in the factor H_c / (H_c + s), which shrinks the
        mean of a category of curvature H_c toward that of the node (like LightGBM's
        cat_smooth); nodes choose a greater one by the noise of their rows.
      min_category_weight: the least curvature of a child of a split by a set of
        categories (similar to LightGBM's min_data_per_group, a number of rows).
      max_onehot: the most codes of a feature that sends one category left, the rest
        right, without ``category_l2`` and ``min_category_weight`` (as in LightGBM
        and XGBoost).
      num_scores: K, the scores of a row. The loss receives K scores, and each round
        grows K trees or, with ``share_structure``, one. A built-in loss of one score
        has a score for each column of y [N, K].
      curvature: the second-order weight of a row: "auto", "exact", "secant",
        "absolute" or "unit" (formulas: the page "Curvature"); for
        :func:`jboost.losses.likelihood` also "fisher", "natural" or "standardized"
        (which is "auto"; the page "Distributions"); for
        losses of groups only "probe" (which is "auto") or "unit"; or, for losses of
        one row, a function with the arguments of the loss that returns it: a number,
        for K > 1 K numbers or a K x K matrix (its diagonal is used). It should be
        positive (the Fisher information of a likelihood, for example).
      leaf_solver: "newton": -G / (H + l2), where H sums ``curvature``; "hessian": the
        same with the second derivatives of the loss, whatever ``curvature`` is;
        "exact": the argmin of the leaf's loss; "guarded": the Newton step, replaced by
        the argmin in leaves where it falls short of its predicted decrease, and in all
        leaves if 75 % of the rows have almost no curvature; "line_search": the Newton
        steps times one multiplier per tree; "median_step": one step from the median of
        the rows' own minimizers, without l2 (for Huber's loss and similar ones);
        "joint": one Newton step of all leaves for losses of groups, of the K values of
        a leaf with ``share_structure``; "auto": "joint" for these, "exact" for
        piecewise linear losses, "newton" for quadratic ones ("hessian" with unit
        curvature) and for more than 64 scores, else "guarded".
      share_structure: whether one tree serves all K scores of a round, with K values
        in each leaf; see "Scores that share a tree". "auto": for three scores or more
        if the learning rates sum to 30 over all rounds (300 rounds at 0.1), unless
        ``leaf_solver``, ``monotone`` or absolute ``regularization`` is given or y
        [N, K] holds several targets; a run that continues a model or a checkpoint
        keeps its choice.
      init_score: "auto" = argmin_c of the weighted loss (or, if no row has a gradient
        at this point, a point where the most rows have one; see ``history.choices``),
        "median" of the rows' own minimizers (the targets, for a loss that is least at
        the target), a number, or K numbers.
      early_stopping_rounds: the number of rounds without improvement of the first
        validation set's loss, or of the criterion ``by``, that ends training; the model
        is then that of the best round.
      seed: the random seed of the run.
      progress: show a bar with time left and current losses; at first it shows that
        programs are being compiled.
      callbacks: one or several ``callback(round, history, model_so_far)``, called for
        every round; a true return value stops training after that round.
      feature_names: F different names, kept in the model; a data frame has its own.
      implementation: "xla", "cpu" or "cuda" (the compiled kernels), or None for the
        best where the program runs; all give the same model. See
        :func:`jboost.implementations`.
      mesh: a ``jax.sharding.Mesh``; its devices share the rows, in order, and the model
        is the one that a single device trains, bit for bit, whatever the number of
        devices and processes. With several processes (``jax.distributed``) x, y,
        weights, offset and validation sets are the rows of this process, which may
        be none. None: the mesh of x if x is a ``jax.Array`` with rows sharded over a
        mesh; else one device. See the page "Many machines". Not with sparse x or
        ``candidates`` other than "global".
      model: a model to continue with ``num_rounds`` more rounds; x has its columns,
        and may have new categories. The same call with the same data and settings goes
        on as if it had not ended: seeds and schedules count the model's rounds, too.
        The history, early stopping and callbacks see the new rounds only.
      checkpoint: the path of a file that keeps the run: if it exists, the run continues
        from it, and the result is that of a run that was never interrupted, bit for
        bit. Repeat the call that was interrupted; only ``num_rounds`` may be raised.
        The file stays when the run is over, and the call then returns at once;
        :func:`jboost.load` gives its model. Its size does not grow with the rows; their
        scores are computed when the run continues. The code of metrics and callbacks
        is not compared; a run that a callback stopped continues. Two runs at once are
        refused.
      checkpoint_rounds: the number of rounds between two writes of the file.

    Returns:
      The model and its history, ``model, history = jb.fit(x, y)``.

    Raises:
      TypeError, ValueError: for bad arguments, before training; the checkpoint is of
        another run (the error names the differences), or damaged (a FileError).
      MemoryError: rows, histograms or the model cannot fit into memory, or it ran out
        before the first round.
      TrainingError: no row has a gradient to learn from, the loss stopped being
        finite, a metric or callback failed, a checkpoint cannot be written, memory
        ran out in a round, the machine is taken away, or another process of the run
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
    given = locals()
    with use_processes(spans_processes(mesh := read_mesh(given))):
        return _train(read_request(given, mesh))


def _train(request: FitRequest) -> Trained:
    """Prepares the rows, and makes the rounds."""
    if num_processes() > 1:
        compare_processes(describe_call(request))
    refuse_large_run(request)
    with lock_checkpoint(request.checkpoint):
        rows = prepare_rows(request)
        with (
            resolve_implementation(rows.training.rows.data.weights),
            open_bar(len(request.rates), request.progress) as bar,
            keep_scratch(),
        ):
            return run_rounds(begin_run(request, rows, bar))


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
