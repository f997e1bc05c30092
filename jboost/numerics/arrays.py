# SPDX-License-Identifier: Apache-2.0
"""Small tools for arrays: padded sizes, packed words, numbers of ids, float32.

Sizes are rounded up to a few values, because each size compiles another program. A
program that returns one packed array is compiled, called and read faster than one that
returns a dozen.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int32

from jboost.entry.checks import refuse_mask
from jboost.entry.context import is_on_cpu
from jboost.entry.programs import compiled
from jboost.kernels.xla import from_ordered_bits, ordered_bits

_TINY = float(np.finfo(np.float32).tiny)  # smaller magnitudes are denormal
Floats = TypeVar("Floats", Array, np.ndarray)


def flush_denormals(x: Floats) -> Floats:
    """Replaces denormals by 0, because processors differ in whether they do so."""
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    return numpy.where(numpy.abs(x) < _TINY, np.float32(0), x)


def middle_float(
    low: Float[Array | np.ndarray, "*n"], high: Float[Array | np.ndarray, "*n"]
) -> Any:
    """Returns the float32 halfway from low to high in the order of bit patterns.

    About 32 such halvings reach adjacent floats from any interval of any scale, while
    arithmetic means need as many halvings as the exponents differ.
    """
    first, second = ordered_bits(low), ordered_bits(high)
    middle = (first & second) + ((first ^ second) >> 1)  # cannot overflow
    return from_ordered_bits(middle)


def read_ids(ids: Any, name: str = "groups") -> np.ndarray:
    """Returns concrete ids, none of them missing, as an array of one dimension."""
    if isinstance(ids, Tracer):
        raise TypeError(
            f"{name} must be concrete, because they determine shapes; make them with "
            "jb.make_groups(ids) outside jit and pass the result"
        )
    array = np.asarray(refuse_mask(ids, name))
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(
            f"{name} must be an id for each row, got an array of shape {array.shape}"
        )
    missing = np.zeros(len(array), bool)
    if array.dtype.kind in "fMm":
        missing = np.isnan(array) if array.dtype.kind == "f" else np.isnat(array)
    elif array.dtype.kind == "O":
        missing = np.array([_is_missing(each) for each in array])
    if missing.any():
        row = int(np.argmax(missing))
        raise ValueError(
            f"{name} must be an id for each row, got {array[row]} in row {row}"
        )
    return array


def _is_missing(value):
    """Returns whether an object is None, NaN, which differs from itself, or NA."""
    if value is None:
        return True
    equal = value == value
    return not (isinstance(equal, bool | np.bool_) and equal)


def number_ids(ids: np.ndarray) -> tuple[np.ndarray, list[Any]]:
    """Returns the number of each id, in order of appearance, and the distinct ids."""
    if ids.dtype.kind == "O":
        numbers: dict[Any, int] = {}
        number = [numbers.setdefault(each, len(numbers)) for each in ids.tolist()]
        return np.array(number), [*numbers]
    names, first, number = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(first), np.int64)
    rank[order] = np.arange(len(first))
    return rank[number.reshape(-1)], names[order].tolist()


def pack(tree: Any) -> Int32[Array, " W"]:
    """Concatenates the bits of all arrays."""
    return jnp.concatenate([_to_words(leaf) for leaf in jax.tree.leaves(tree)])


def count_words(like: Any) -> int:
    """Returns W, the number of words of a pytree of such shapes."""
    return sum(np.size(leaf) for leaf in jax.tree.leaves(like))


def unpack(words: Int32[np.ndarray, "R W"], like: Any) -> Any:
    """Returns the pytree that was packed in each row, with an axis R in front.

    ``like`` has the shapes and types of the arrays that were packed.
    """
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([np.size(leaf) for leaf in leaves])
    parts = np.split(words, ends[:-1], axis=1)
    return jax.tree.unflatten(structure, map(_from_words, parts, leaves))


def _to_words(leaf):
    if leaf.dtype == jnp.bool_:
        return leaf.reshape(-1).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(leaf.reshape(-1), jnp.int32)


def _from_words(words, like):
    shape = (len(words), *np.shape(like))
    if like.dtype == bool:
        return words.astype(bool).reshape(shape)
    return np.ascontiguousarray(words).view(like.dtype).reshape(shape)


_MANY_BYTES = 2**24  # from this size on, compiling takes less time than copying


def padded_size(size: int, least: int = 64) -> int:
    """Rounds up to 8 sizes per power of two: nearby sizes share programs."""
    if size <= least:
        return least
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


def pad_rows(array: Any, size: int) -> Any:
    """Pads to ``size`` rows with copies of row 0, in NumPy, which compiles nothing.

    An array without rows gets zeros. Large arrays on another device than the CPU are
    padded by a program that is compiled for their size.
    """
    if is_large_elsewhere(array, _MANY_BYTES):
        if len(array) == size:
            return array
        return compiled(_repeat_row, size - len(array), small=True)(array)
    array = np.asarray(array)
    if len(array) == size:
        return array
    shape = (size - len(array), *array.shape[1:])
    first = np.broadcast_to(array[:1] if len(array) else array.dtype.type(), shape)
    return np.concatenate([array, first])


def _repeat_row(times, array):
    first = jnp.broadcast_to(array[:1], (times, *array.shape[1:]))
    return jnp.concatenate([array, first])


def is_large_elsewhere(array: Any, least: int) -> bool:
    """Returns whether an array of ``least`` bytes or more is not on the CPU."""
    large = isinstance(array, jax.Array) and array.nbytes >= least
    return large and not isinstance(array, Tracer) and not is_on_cpu(array)
