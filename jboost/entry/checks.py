# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments of public functions, and their conversion to NumPy arrays.

Errors name argument, expectation and value. Of traced values, the shape is checked.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jboost.entry.messages import show


def is_masked_array(values: Any) -> bool:
    """Checks for a masked array, or a list that holds one."""
    if isinstance(values, list | tuple):
        return any(isinstance(value, np.ma.MaskedArray) for value in values)
    return isinstance(values, np.ma.MaskedArray)


def as_array(values: Any, expected: str) -> np.ndarray:
    """Returns values as an array of native byte order; masks are left out.

    ``expected`` begins the message of errors.
    """
    try:
        array = np.asarray(values)
    except Exception as error:  # __array__ of any class may raise anything
        text = f"{type(error).__name__}: {error}"
        raise TypeError(f"{expected}, but conversion raised {text}") from error
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def refuse_mask(values: Any, name: str) -> Any:
    """Returns values without a mask; raises if some are masked."""
    if not is_masked_array(values):
        return values
    array = np.ma.asarray(values)
    mask = np.ma.getmaskarray(array)
    mask = mask if mask.dtype.names is None else mask.view(np.bool_)
    if mask.any():
        raise ValueError(
            f"{name} must not have masked values, got a masked array with "
            f"{np.count_nonzero(mask)} of {mask.size} values masked; leave their rows "
            "out"
        )
    return array.data


def fill_mask(x: Any) -> Any:
    """Replaces masked cells of a table by missing values: NaN, or None for strings."""
    if not is_masked_array(x):
        return x
    x = np.ma.asarray(x)
    if x.dtype.names is not None:
        return x  # its columns are filled one by one
    mask = np.ma.getmaskarray(x)
    if not mask.any():
        return x.data
    if x.dtype.kind in "fc":
        return x.filled(np.nan)
    if x.dtype.kind in "iub" or str(x.dtype) == "bfloat16":
        return np.where(mask, np.nan, x.data.astype(np.float64))
    data = np.strings.decode(x.data, "utf-8") if x.dtype.kind == "S" else x.data
    cells = data.astype(object)
    cells[mask] = None
    return cells


Words = tuple[str, ...]
# {an error of JAX about traced values: the code to write instead}.
_INSTEAD = {
    jax.errors.TracerBoolConversionError: "jnp.where instead of if, and, or, not; "
    "jnp.minimum and jnp.maximum instead of min and max",
    jax.errors.TracerIntegerConversionError: "jnp.asarray(list)[index] for list[index]",
    jax.errors.TracerArrayConversionError: "jax.numpy for NumPy, jax.scipy for SciPy",
    jax.errors.NonConcreteBooleanIndexError: "jnp.where(mask, values, 0.0) for "
    "values[mask]",
    jax.errors.ConcretizationTypeError: "jnp.exp for math.exp; no float() and int()",
}


def check_word(name: str, value: Any, words: Words, *, also: str = "") -> Any:
    """Checks that an option is one of the given strings, and returns it."""
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} must be one of {words}{also}, got {show(value)}")
    return value


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -np.inf,
    most: float = np.inf,
    above: float | None = None,
    below: float | None = None,
    finite: bool = True,
    scalar: bool = True,
    also: str = "",
) -> Any:
    """Returns a number with least <= value <= most and above < value < below.

    Args:
      finite: whether infinities are refused.
      scalar: whether arrays are refused; otherwise all their numbers are checked.
      also: other values that the caller accepts, for the error: " or 'auto'".
    """
    if isinstance(value, Tracer):
        if scalar and value.ndim != 0:
            raise ValueError(f"{name} must be a scalar, got shape {value.shape}")
        return value
    low = f"> {above}" if above is not None else f">= {least}"
    expected = f"{name} must be a number {low}"
    if below is not None or most < np.inf:
        expected += f" and < {below}" if below is not None else f" and <= {most}"
    expected += also
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{expected}, got {show(value)}") from None
    is_number = array.dtype.kind in "fiu" or array.dtype.name == "bfloat16"
    if not is_number or (scalar and array.ndim != 0) or np.ma.is_masked(value):
        raise TypeError(f"{expected}, got {show(value)}")
    with np.errstate(over="ignore", under="ignore"):
        numbers = array.astype(np.float32)  # as computations will see them
    inside = (least <= array) & (array <= most) & (np.isfinite(numbers) | (not finite))
    if above is not None:
        inside &= numbers > above
    if below is not None:
        inside &= numbers < below
    if not np.all(inside):
        wrong = array[~inside][0] if array.ndim else show(value)
        more = " and finite" if finite and np.isinf(numbers[~inside]).any() else ""
        raise ValueError(f"{expected}{more}, got {wrong}")
    return value


def check_integer(
    name: str, value: Any, *, least: int, most: int = 2**31 - 1, also: str = ""
) -> int:
    """Checks and returns a Python integer in [least, most], which cannot be traced."""
    expected = f"{name} must be an integer from {least} to {most}{also}"
    if isinstance(value, Tracer):
        raise TypeError(f"{expected}; it is a size and cannot be traced")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{expected}, got {show(value)}")
    if not least <= value <= most:
        raise ValueError(f"{expected}, got {show(value)}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Checks that a value is True or False, and returns it as a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {show(value)}")
    return bool(value)


def check_callable(name: str, value: Any, signature: str) -> Callable[..., Any]:
    """Checks that a value is callable; the error shows ``signature``."""
    if not callable(value):
        raise TypeError(f"{name} must be callable as {signature}, got {show(value)}")
    return value


def explain_failure(error: Exception) -> str:
    """Returns the code to write instead if JAX cannot trace, or else the error."""
    wanted = [text for kind, text in _INSTEAD.items() if isinstance(error, kind)]
    return f"write {wanted[0]}" if wanted else f"{type(error).__name__}: {error}"


def check_link(
    inverse_link: Any, score_shape: tuple[int, ...], *, single: bool = False
) -> Callable[..., Any] | None:
    """Checks that an inverse link is a jax.numpy function of the score of one row.

    Args:
      single: whether it must return one array instead of a pytree.
    """
    if inverse_link is None or (score_shape, single) in _find_checked(inverse_link):
        return inverse_link
    check_callable("inverse_link", inverse_link, "inverse_link(score)")
    structures = []

    def find_leaves(score):
        # Pytrees of other libraries may refuse to be made from shapes.
        leaves, structure = jax.tree.flatten(inverse_link(score))
        structures.append(structure)
        return leaves

    try:
        jax.eval_shape(find_leaves, jax.ShapeDtypeStruct(score_shape, jnp.float32))
    except Exception as error:
        raise TypeError(
            "inverse_link must be a jax.numpy function of the score of one row, which "
            f"has shape {score_shape}: {explain_failure(error)}"
        ) from error
    found = structures[0]
    if single and found != jax.tree.structure(0):
        raise TypeError(f"inverse_link must return one array here, got {show(found)}")
    if not found.num_leaves:
        raise TypeError(
            f"inverse_link must return an array or a pytree of arrays, got "
            f"{show(found)}"
        )
    _find_checked(inverse_link).add((score_shape, single))
    return inverse_link


_checked: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


def _find_checked(link):
    """Returns how a link has been checked, because tracing takes longer than a row."""
    try:
        return _checked.setdefault(link, set())
    except TypeError:  # not hashable, or without weak references
        return set()
