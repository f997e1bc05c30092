# SPDX-License-Identifier: Apache-2.0
"""The boosting loop as pure functions of arrays: init, boost_step, boost.

In: codes, targets, a loss, a key. Out: trees on codes and the scores of the rows.
All of it may be jitted, vmapped and scanned; ``jboost.fit`` is the same loop with a
host around it.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Key, Shaped, UInt32

from jboost import checks
from jboost.candidates import Candidates, CandidateWeights, sort_rows
from jboost.curvature import Curvature, needs_minimiser
from jboost.histogram import hash_words
from jboost.initial import MedianStart
from jboost.kernels.library import check_implementation
from jboost.leaves import LeafSolver
from jboost.levels import Tree, TreeLimits
from jboost.losses import Adaptive
from jboost.rounds import (
    ORDER_STATISTIC_SAMPLES,
    BoostState,
    Data,
    Method,
    Numbers,
    Regularization,
    grow_round,
    init_state,
)
from jboost.sorted_growth import MOST_CODES
from jboost.sparse import SparseCodes, SparseMatrix
from jboost.splitting import UNBOUNDED, ValueLimits
from jboost.tracing import TracedLoss, trace_loss
from jboost.tree import pack_codes

_MOST_PROGRAMS = 64  # compiled programs kept; the least recently used goes first
_MOST_DEPTH = 20  # a heap of 2^20 leaves
_MOST_CELLS = 2**30  # of a level's histograms of sparse data: 4 GiB


class BoostedTrees(NamedTuple):
    """Trees on codes, and the score they start from.

    Attributes:
      trees: a :class:`jboost.Tree` whose arrays have axes [R, K] in front.
      init_score: [] for one score, else [K].
    """

    trees: Tree
    init_score: Float[Array, "*K"]


def init(
    binned: Shaped[ArrayLike, "N F"] | SparseCodes,
    y: Any,
    loss: Callable[..., Any] | Adaptive,
    key: Key[Array, ""],
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    num_scores: int = 1,
    init_score: ArrayLike | str = "auto",
) -> BoostState:
    """Makes the state before the first round.

    Args:
      binned: codes from :func:`jboost.apply_bins`, of a dense or a sparse matrix.
      y: targets: an array with N rows, or a pytree of such.
      loss: ``loss(score, target) -> scalar`` for one row.
      key: from ``jax.random.key``; seeds all that is random.
      sample_weight: >= 0.
      offset: [N] or [N, K], added to the score.
      num_scores: K.
      init_score: where to start: ``"auto"`` = argmin_c of the weighted loss,
        ``"median"`` of the rows' own minimisers, or a number or K numbers.

    Raises:
      TypeError, ValueError: for arguments that do not fit together.
    """
    traced, constants, data, offset = _bind(
        binned, y, loss, sample_weight, offset, num_scores, None
    )
    begin = initial_scores(init_score, num_scores)
    run = compiled(init_state, traced)
    return run(constants, data, offset, begin, seed_words(key))


def boost_step(
    state: BoostState,
    binned: Shaped[ArrayLike, "N F"] | SparseCodes,
    y: Any,
    loss: Callable[..., Any] | Adaptive,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    learning_rate: Float[ArrayLike, ""] | float = 0.1,
    max_depth: int = 6,
    max_bins: int = 256,
    l1: Float[ArrayLike, ""] | float = 0.0,
    l2: Float[ArrayLike, ""] | float = 1.0,
    max_delta_step: Float[ArrayLike, ""] | float = float("inf"),
    min_gain: Float[ArrayLike, ""] | float = 0.0,
    min_child_weight: Float[ArrayLike, ""] | float = 1.0,
    min_child_samples: Any = "auto",
    regularization: Regularization = "relative",
    subsample: Float[ArrayLike, ""] | float = 1.0,
    colsample_bytree: Float[ArrayLike, ""] | float = 1.0,
    colsample_bylevel: Float[ArrayLike, ""] | float = 1.0,
    colsample_bynode: Float[ArrayLike, ""] | float = 1.0,
    max_leaves: int | None = None,
    monotone: Any = None,
    interactions: Any = None,
    candidates: Candidates = "global",
    candidate_weights: CandidateWeights = "samples",
    curvature: Curvature = "auto",
    leaf_solver: LeafSolver = "auto",
    implementation: str | None = None,
) -> tuple[BoostState, Tree]:
    """Makes one round: returns the next state, and its K trees on codes.

    The arguments mean what they mean for :func:`jboost.fit`; data and loss are those
    that ``state`` was made with.

    Example:
      >>> import jax, jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(8.0)[:, None], jnp.arange(8.0)
      >>> binned = jb.apply_bins(jb.fit_bins(x), x)
      >>> loss = jb.losses.squared_error
      >>> state = jb.init(binned, y, loss, jax.random.key(0))
      >>> state, tree = jb.boost_step(state, binned, y, loss, max_depth=2)
      >>> tree.leaf_value.shape
      (1, 4)
    """
    num_scores = state.scores.shape[0]
    traced, constants, data, _ = _bind(
        binned, y, loss, sample_weight, None, num_scores,
        None if sorts_rows(candidates, candidate_weights, binned) else max_bins,
    )  # fmt: skip
    if state.scores.shape[1] != len(data.weights):
        raise ValueError(
            f"binned must have {state.scores.shape[1]} rows, as the state has, got "
            f"{len(data.weights)}"
        )
    if needs_minimiser(traced) != (state.minimiser is not None):
        raise ValueError("loss must be the one that the state was made with by init")
    method, numbers = make_settings(
        traced, data, uniform=sample_weight is None, max_depth=max_depth,
        max_bins=max_bins, num_features=data.columns.shape[1], l1=l1, l2=l2,
        max_delta_step=max_delta_step, min_gain=min_gain,
        min_child_weight=min_child_weight, min_child_samples=min_child_samples,
        regularization=regularization, subsample=subsample,
        colsample_bytree=colsample_bytree, colsample_bylevel=colsample_bylevel,
        colsample_bynode=colsample_bynode, max_leaves=max_leaves, monotone=monotone,
        interactions=interactions, candidates=candidates,
        candidate_weights=candidate_weights, curvature=curvature,
        leaf_solver=leaf_solver, implementation=implementation,
    )  # fmt: skip
    checks.check_number("learning_rate", learning_rate, least=0.0)
    run = compiled(_step, traced, method)
    return run(constants, numbers, jnp.float32(learning_rate), data, state)


def boost(
    binned: Shaped[ArrayLike, "N F"] | SparseCodes,
    y: Any,
    loss: Callable[..., Any] | Adaptive,
    key: Key[Array, ""],
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    num_rounds: int = 100,
    learning_rate: Any = 0.1,
    max_depth: int = 6,
    max_bins: int = 256,
    l1: Float[ArrayLike, ""] | float = 0.0,
    l2: Float[ArrayLike, ""] | float = 1.0,
    max_delta_step: Float[ArrayLike, ""] | float = float("inf"),
    min_gain: Float[ArrayLike, ""] | float = 0.0,
    min_child_weight: Float[ArrayLike, ""] | float = 1.0,
    min_child_samples: Any = "auto",
    regularization: Regularization = "relative",
    subsample: Float[ArrayLike, ""] | float = 1.0,
    colsample_bytree: Float[ArrayLike, ""] | float = 1.0,
    colsample_bylevel: Float[ArrayLike, ""] | float = 1.0,
    colsample_bynode: Float[ArrayLike, ""] | float = 1.0,
    max_leaves: int | None = None,
    monotone: Any = None,
    interactions: Any = None,
    candidates: Candidates = "global",
    candidate_weights: CandidateWeights = "samples",
    num_scores: int = 1,
    curvature: Curvature = "auto",
    leaf_solver: LeafSolver = "auto",
    init_score: ArrayLike | str = "auto",
    implementation: str | None = None,
) -> tuple[BoostedTrees, Float[Array, "N *K"]]:
    """Makes ``num_rounds`` rounds as one pure function.

    Works under ``jax.jit`` and under ``jax.vmap`` over anything that is not a size:
    learning rates, l2, parameters that the loss closes over, keys, sample weights.
    The arguments mean what they mean for :func:`jboost.fit`.

    Returns:
      The trees with their initial score (:func:`jboost.to_ensemble` turns codes into
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
    num_rounds = checks.check_integer("num_rounds", num_rounds, least=0)
    rates = jnp.asarray(checks.learning_rates(learning_rate, num_rounds))
    traced, constants, data, offset = _bind(
        binned, y, loss, sample_weight, offset, num_scores,
        None if sorts_rows(candidates, candidate_weights, binned) else max_bins,
    )  # fmt: skip
    method, numbers = make_settings(
        traced, data, uniform=sample_weight is None, max_depth=max_depth,
        max_bins=max_bins, num_features=data.columns.shape[1], l1=l1, l2=l2,
        max_delta_step=max_delta_step, min_gain=min_gain,
        min_child_weight=min_child_weight, min_child_samples=min_child_samples,
        regularization=regularization, subsample=subsample,
        colsample_bytree=colsample_bytree, colsample_bylevel=colsample_bylevel,
        colsample_bynode=colsample_bynode, max_leaves=max_leaves, monotone=monotone,
        interactions=interactions, candidates=candidates,
        candidate_weights=candidate_weights, curvature=curvature,
        leaf_solver=leaf_solver, implementation=implementation,
    )  # fmt: skip
    begin = initial_scores(init_score, num_scores)
    run = compiled(_boost, traced, method)
    return run(constants, numbers, rates, data, offset, begin, seed_words(key))


def make_settings(
    loss: TracedLoss,
    data: Data,
    *,
    uniform: bool,
    max_depth: int,
    max_bins: int,
    num_features: int,
    l1: Any,
    l2: Any,
    max_delta_step: Any,
    min_gain: Any,
    min_child_weight: Any,
    min_child_samples: Any,
    regularization: Regularization,
    subsample: Any,
    colsample_bytree: Any,
    colsample_bylevel: Any,
    colsample_bynode: Any,
    max_leaves: int | None,
    monotone: Any,
    interactions: Any,
    candidates: Candidates,
    candidate_weights: CandidateWeights,
    curvature: Curvature,
    leaf_solver: LeafSolver,
    implementation: str | None,
    feature_names: Any = None,
) -> tuple[Method, Numbers]:
    """Checks what shapes training and sorts it into what is static and what is not."""
    max_depth = checks.check_integer("max_depth", max_depth, least=1, most=_MOST_DEPTH)
    max_bins = checks.check_integer("max_bins", max_bins, least=2, most=65536)
    checks.check_word("regularization", regularization, checks.REGULARIZATIONS)
    sorts_rows(candidates, candidate_weights, data.columns)
    checks.check_word("curvature", curvature, checks.CURVATURES)
    checks.check_word("leaf_solver", leaf_solver, checks.LEAF_SOLVERS)
    if leaf_solver == "median_step" and loss.quadratic:
        better = "exact" if loss.straight else "newton"
        raise ValueError(
            "leaf_solver='median_step' needs a loss whose second derivative changes "
            f"with the score, as Huber's; this one has its minimum by {better!r}"
        )
    check_implementation(implementation)
    for name, value in (
        ("l1", l1), ("l2", l2), ("min_gain", min_gain),
        ("min_child_weight", min_child_weight),
    ):  # fmt: skip
        checks.check_number(name, value, least=0.0)
    checks.check_number("max_delta_step", max_delta_step, least=0.0, finite=False)
    for name, value in (
        ("subsample", subsample), ("colsample_bytree", colsample_bytree),
        ("colsample_bylevel", colsample_bylevel),
        ("colsample_bynode", colsample_bynode),
    ):  # fmt: skip
        checks.check_number(name, value, above=0.0, most=1.0)
    samples, num_rows = resolve_samples(loss, min_child_samples), len(data.weights)
    known = not isinstance(samples, Tracer) and samples > 0
    largest: Any = num_rows // samples if known else num_rows
    method = Method(
        curvature=curvature,
        leaf_solver=leaf_solver,
        regularization=regularization,
        max_depth=max_depth,
        # A size for histograms alone: in sorted growth it is just a number.
        num_bins=max_bins if candidates == "global" else MOST_CODES,
        max_nodes=min(2 ** (max_depth - 1), 1 << (max(1, largest) - 1).bit_length()),
        max_leaves=_check_leaves(max_leaves, max_depth),
        uniform=uniform,
        candidates=candidates,
        candidate_weights=candidate_weights,
        implementation=implementation,
    ).resolve(loss)
    _check_size(data.columns, method)
    limits = TreeLimits(
        l2=l2,
        min_gain=min_gain,
        min_child_weight=min_child_weight,
        min_child_samples=samples,
        colsample_bytree=colsample_bytree,
        colsample_bylevel=colsample_bylevel,
        colsample_bynode=colsample_bynode,
    )
    limits = jax.tree.map(_as_float, limits)
    samples = samples if isinstance(samples, Tracer) else np.int32(samples)
    limits = limits._replace(
        min_child_samples=_minimum(samples, num_rows),
        max_bins=np.int32(max_bins),
        values=_limit_values(
            l1,
            max_delta_step,
            checks.check_monotone(monotone, num_features, feature_names),
            num_features,
        ),
        groups=checks.check_interactions(interactions, num_features, feature_names),
    )
    if candidates != "global" and limits.values is not None:
        raise ValueError(
            "candidates must be 'global' with l1, max_delta_step or monotone, which "
            f"searches of sorted rows do not know, got {candidates!r}"
        )
    return method, Numbers(limits, _as_float(subsample))


def _limit_values(l1, max_delta_step, signs: Any, num_features):
    """What holds leaf values back; None if nothing does, which is known here.

    A traced number may be anything: it is taken for a limit.
    """
    known = not isinstance(l1, Tracer) and not isinstance(max_delta_step, Tracer)
    if signs is None and known and l1 == 0 and max_delta_step in (0, np.inf):
        return None
    step = _as_float(max_delta_step)
    numpy: Any = jnp if isinstance(step, jax.Array) else np
    most = numpy.float32(UNBOUNDED)
    step = numpy.where(step == 0, most, numpy.minimum(step, most))
    bounds = numpy.stack([-step, step])
    signs = np.zeros(num_features, np.int32) if signs is None else signs
    return ValueLimits(_as_float(l1), bounds, signs)


def _check_leaves(max_leaves, max_depth):
    """None where every tree of that depth has as few leaves."""
    if max_leaves is None:
        return None
    max_leaves = checks.check_integer("max_leaves", max_leaves, least=2)
    return max_leaves if max_leaves < 2**max_depth else None


def sorts_rows(candidates: Any, candidate_weights: Any, data: Any) -> bool:
    """Whether trees are grown from sorted rows, with a code for every value.

    Raises:
      ValueError: words that are not known, or do not go together, or with sparse data.
    """
    checks.check_word("candidates", candidates, checks.CANDIDATES)
    words = checks.CANDIDATE_WEIGHTS
    checks.check_word("candidate_weights", candidate_weights, words)
    if candidates == "exact" and candidate_weights != "samples":
        raise ValueError(
            "candidate_weights must be 'samples' with candidates='exact', which tries "
            f"every value whatever it weighs, got {candidate_weights!r}"
        )
    sorts = candidates != "global" or candidate_weights != "samples"
    if sorts and isinstance(data, SparseCodes | SparseMatrix):
        raise ValueError(
            "candidates must be 'global' and candidate_weights 'samples' for sparse "
            f"data, got {candidates!r} and {candidate_weights!r}"
        )
    return sorts


def _check_size(columns, method):
    """Refuses what cannot be addressed, or hardly held."""
    if not isinstance(columns, SparseCodes):
        if columns.size >= 2**31:
            raise ValueError(
                "x must have fewer than 2^31 cells (rows, padded, times columns), got "
                f"{columns.size}"
            )
        return
    # Stored entries may be few, but every node has a sum for each feature and code.
    nodes = min(method.max_nodes, method.max_leaves or method.max_nodes)
    sizes = (nodes, columns.num_features, method.num_bins, 3)
    if np.prod(sizes, dtype=np.float64) > _MOST_CELLS:
        raise ValueError(
            "a level's histograms must have at most 2^30 cells (4 GiB), got nodes x "
            f"features x codes x channels = {' x '.join(map(str, sizes))}; use a "
            "smaller max_depth or max_bins, or a larger min_child_samples"
        )


def _as_float(number) -> Any:
    """float32, by NumPy where that can be: it compiles nothing."""
    if isinstance(number, jax.Array):
        return number.astype(jnp.float32)
    return np.float32(number)


def _minimum(samples, num_rows):
    if isinstance(samples, Tracer):
        return jnp.minimum(samples, num_rows).astype(jnp.int32)
    return np.minimum(samples, np.int32(num_rows))


def resolve_samples(loss: TracedLoss, min_child_samples: Any) -> Any:
    """A number; for "auto" 20 where leaves are medians, else 0: the rows decide."""
    if isinstance(min_child_samples, str):
        checks.check_word("min_child_samples", min_child_samples, ("auto",))
        return ORDER_STATISTIC_SAMPLES if loss.straight else 0
    if isinstance(min_child_samples, Tracer):
        return min_child_samples
    return checks.check_integer("min_child_samples", min_child_samples, least=1)


def initial_scores(init_score: Any, num_scores: int) -> Array | MedianStart | None:
    """The initial scores [K], or how to find them: None asks for the argmin."""
    if isinstance(init_score, str):
        checks.check_word("init_score", init_score, ("auto", "median"))
        return MedianStart() if init_score == "median" else None
    array = jnp.asarray(init_score, jnp.float32)
    if array.shape not in ((), (num_scores,)):
        raise ValueError(
            f"init_score must be 'auto', 'median', a number or {num_scores} numbers, "
            f"got shape {array.shape}"
        )
    if not isinstance(array, Tracer) and not np.isfinite(array).all():
        raise ValueError(f"init_score must be finite, got {init_score!r}")
    return jnp.broadcast_to(array, (num_scores,))


def seed_words(key: Key[Array, ""]) -> UInt32[Array, "2"]:
    """The seed that everything random is derived from.

    Its own words: whatever uses them hashes them first.
    """
    data = jax.random.key_data(key).astype(jnp.uint32)
    # A key of four words (rbg) repeats itself: to XOR its halves would leave nothing.
    return data[:2] if data.shape[0] == 2 else hash_words(data[2:4], data[:2])


@lru_cache(maxsize=_MOST_PROGRAMS)
def compiled(function: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    """``function`` with its static arguments bound, jitted; equal losses share it."""
    return jax.jit(partial(function, *static))


def _bind(binned, y, loss, sample_weight, offset, num_scores, max_bins):
    """Checks data that is already on codes, and traces the loss for it."""
    num_scores = checks.check_integer("num_scores", num_scores, least=1)
    codes = _check_codes(binned, max_bins)
    num_rows = codes.shape[0]
    weights = np.ones(num_rows, np.float32)
    if sample_weight is not None:
        weights = checks.check_weights(sample_weight, num_rows, "sample_weight")
    targets = checks.check_targets(y, num_rows, weights, "y")
    traced, constants = trace_loss(loss, targets, num_scores)
    if offset is None:
        offset = jnp.zeros((num_scores, num_rows), jnp.float32)
    else:
        offset = checks.check_offset(offset, num_rows, num_scores)
    data = Data(codes, jax.tree.map(jnp.asarray, targets), jnp.asarray(weights))
    return traced, constants, data, offset


def _check_codes(binned, max_bins):
    """Codes as arrays of JAX's, all below ``max_bins``."""
    if isinstance(binned, SparseCodes):
        codes, parts = binned, (binned.codes, binned.absent)
    else:
        codes, parts = jnp.asarray(binned), (binned,)
        if codes.ndim != 2 or codes.dtype not in (jnp.uint8, jnp.uint16, jnp.uint32):
            raise ValueError(
                "binned must be a matrix of uint8, uint16 or uint32 codes from "
                f"apply_bins, got {codes.shape=} and {codes.dtype=}"
            )
        if max_bins is not None and codes.dtype == jnp.uint32:
            raise ValueError(
                "binned must hold uint8 or uint16 codes for histograms (candidates="
                "'global', candidate_weights='samples'), got uint32; fit bins with "
                "max_bins, or choose other candidates"
            )
    if max_bins is None:
        return codes
    for part in parts:
        if isinstance(part, Tracer) or not np.size(part):
            continue
        highest = int(np.asarray(part).max())
        if highest >= max_bins:
            raise ValueError(
                f"binned must hold codes below max_bins={max_bins}, got {highest}; "
                "pass the max_bins that the bins were made with"
            )
    return codes


def _by_column(data, method):
    if isinstance(data.columns, SparseCodes):
        return data
    columns = data.columns.T
    if method.sorts_rows:
        return data._replace(columns=columns, order=sort_rows(columns))
    packed = pack_codes(columns, method.num_bins, method.implementation)
    return data._replace(columns=columns, packed=packed)


def _step(loss, method, constants, numbers, learning_rate, data, state):
    data = _by_column(data, method)
    state, trees, _ = grow_round(
        loss, constants, method, numbers, learning_rate, data, state
    )
    return state, trees


def _boost(loss, method, constants, numbers, rates, data, offset, init_score, words):
    state = init_state(
        loss, constants, data, offset, init_score, words, method.implementation
    )
    data = _by_column(data, method)

    def one_round(state, rate):
        return grow_round(loss, constants, method, numbers, rate, data, state)[:2]

    final, trees = jax.lax.scan(one_round, state, rates)
    scores = final.scores[0] if final.scores.shape[0] == 1 else final.scores.T
    return BoostedTrees(trees, state.init_score), scores
