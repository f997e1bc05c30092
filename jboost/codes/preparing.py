# SPDX-License-Identifier: Apache-2.0
"""Prepares codes once for all rounds: by feature, packed for the kernels, sorted.

The results are DenseCodes or SparseCodes, which every function of training takes.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Int32, Shaped

from jboost.codes.codes import Codes, DenseCodes, SparseCodes, pack_codes
from jboost.entry import checks
from jboost.entry.context import current_implementation, is_on_cpu
from jboost.entry.decorators import is_tracing, traceable
from jboost.entry.programs import IdentityCache, compiled
from jboost.kernels.library import resolve_implementation, takes_implementation

_highest = IdentityCache()  # the highest code of an array
_arranged = IdentityCache()  # the DenseCodes made of an array


@traceable
@takes_implementation
def prepare_codes(
    binned: Shaped[ArrayLike, "N F"] | Codes,
    *,
    max_bins: int | None = 256,
    implementation: str | None = None,
) -> Codes:
    """Arranges codes once for all rounds, as the training kernels read them.

    :func:`jboost.init`, :func:`jboost.boost_step`, :func:`jboost.boost` and the
    functions of ``jboost.parts`` take the result wherever they take ``binned``, and
    give the same results with it. Inside ``jax.jit`` pass it as an argument: codes that
    the compiled function closes over would become constants of the program.

    Args:
      binned: codes from :func:`jboost.apply_bins`, of a dense or a sparse matrix.
      max_bins: the number of codes, as for :func:`jboost.boost`; None sorts the rows
        by each feature instead, for ``candidates`` or ``candidate_weights`` other than
        the defaults.
      implementation: "xla", "cpu", or None for the best where the codes are.

    Returns:
      Codes that take about twice (with ``max_bins=None`` five times) the memory of
      ``binned``; sparse codes are returned as they are.

    Raises:
      TypeError, ValueError: binned does not hold codes below ``max_bins``.

    Example:
      >>> import jax, jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(8.0)[:, None], jnp.arange(8.0)
      >>> codes = jb.parts.prepare_codes(jb.apply_bins(jb.fit_bins(x), x))
      >>> codes.shape
      (8, 1)
      >>> loss = jb.losses.squared_error
      >>> state = jb.init(codes, y, loss, jax.random.key(0))
      >>> state, tree = jb.boost_step(state, codes, y, loss, max_depth=2)
    """
    if max_bins is not None:
        max_bins = checks.check_integer("max_bins", max_bins, least=2, most=65536)
    return arrange_codes(check_codes(binned, max_bins), max_bins)


def check_codes(binned: Any, max_bins: int | None) -> Any:
    """Checks codes by row or prepared codes; returns arrays as JAX arrays.

    Args:
      max_bins: the number of codes; None for codes that are to be sorted, which may
        have any number.
    """
    if isinstance(binned, SparseCodes):
        parts = (binned.codes, binned.absent)
    elif isinstance(binned, DenseCodes):
        return _check_prepared(binned, max_bins)
    else:
        binned = binned if isinstance(binned, jax.Array) else np.asarray(binned)
        parts = (binned,)
        if binned.ndim != 2 or binned.dtype not in (jnp.uint8, jnp.uint16, jnp.uint32):
            raise ValueError(
                "binned must be a matrix of uint8, uint16 or uint32 codes from "
                f"apply_bins, got {binned.shape=} and {binned.dtype=}"
            )
        _check_width(binned.dtype, max_bins)
    if max_bins is not None:
        for part in parts:
            _check_highest(part, max_bins)
    if isinstance(binned, np.ndarray):
        return jax.device_put(binned)
    return binned


def _check_prepared(codes, max_bins):
    """Checks codes from :func:`prepare_codes`, which store their number of bins."""
    _check_width(codes.columns.dtype, max_bins)
    if max_bins is None:
        return codes
    if codes.max_bins is None:
        _check_highest(codes.columns, max_bins)
        return replace(codes, packed=None)  # packed for an unknown number of bins
    if codes.max_bins > max_bins:
        raise ValueError(
            f"binned must be prepared with at most max_bins={max_bins}, got codes "
            f"prepared with max_bins={codes.max_bins}"
        )
    return codes


def _check_width(dtype, max_bins):
    if max_bins is not None and dtype == jnp.uint32:
        raise ValueError(
            "binned must hold uint8 or uint16 codes for histograms (candidates="
            "'global', candidate_weights='samples'), got uint32; fit bins with "
            "max_bins, or choose other candidates"
        )


def _check_highest(codes, max_bins):
    if isinstance(codes, Tracer) or not np.size(codes):
        return
    highest = _highest.recall(codes, None, lambda: _find_highest(codes))
    if highest >= max_bins:
        raise ValueError(
            f"binned must hold codes below max_bins={max_bins}, got {highest}; "
            "pass the max_bins that the bins were made with"
        )


def _find_highest(codes):
    """Returns the highest code; of an array on a GPU, only that is copied."""
    if isinstance(codes, jax.Array) and not is_tracing() and not is_on_cpu(codes):
        return int(jnp.max(codes))
    return int(np.asarray(codes).max())


def arrange_codes(binned: Any, max_bins: int | None) -> Codes:
    """Returns codes packed for ``max_bins``, or with sorted rows if it is None."""
    if isinstance(binned, SparseCodes):
        return binned
    run = compiled(_arrange, max_bins)
    if isinstance(binned, DenseCodes):
        lacks = binned.order if max_bins is None else binned.max_bins
        return run(binned.columns.T) if lacks is None else binned
    if is_tracing():  # results of the program being traced must not outlive it
        return run(binned)
    with resolve_implementation(binned):
        key = (max_bins, current_implementation())
        return _arranged.recall(binned, key, lambda: run(binned))


def _arrange(max_bins, binned):
    columns = binned.T
    if max_bins is None:
        return DenseCodes(columns, order=sort_rows(columns))
    codes = DenseCodes(columns, max_bins=max_bins)
    return pack_codes(codes, max_bins)


def sort_rows(columns: Shaped[Array | np.ndarray, "F N"]) -> Int32[Array, "F N"]:
    """Sorts the rows by the codes of each feature; equal codes keep their order.

    NumPy sorts codes on the host: several times faster than XLA on a CPU, and nothing
    is compiled.
    """
    if isinstance(columns, np.ndarray):
        order = np.empty(columns.shape, np.int32)
        for feature, codes in enumerate(columns):
            order[feature] = np.argsort(codes, kind="stable")
        return jnp.asarray(order)

    def sort(codes):
        return jnp.argsort(codes, stable=True).astype(jnp.int32)

    return jax.lax.map(sort, columns)
