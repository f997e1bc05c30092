# SPDX-License-Identifier: Apache-2.0
"""Arguments of the public steps of growing a tree: checked, and put into one form."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jboost.codes.codes import Codes
from jboost.codes.preparing import arrange_codes, check_codes
from jboost.entry import checks, feature_checks
from jboost.tables.categories import Categories
from jboost.trees.limits import (
    TreeLimits,
    as_float,
    limit_categories,
    limit_values,
)


def read_codes(binned: Any, max_bins: int) -> Codes:
    """Returns codes that are packed for the kernels."""
    max_bins = checks.check_integer("max_bins", max_bins, least=2, most=65536)
    return arrange_codes(check_codes(binned, max_bins), max_bins)


def read_rows(name, values, codes) -> Any:
    """Returns one float32 number per row."""
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    if values.shape != (codes.shape[0],):
        raise ValueError(
            f"{name} must have shape ({codes.shape[0]},), one number for each row, got "
            f"shape {values.shape}"
        )
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{name} must hold numbers, got {values.dtype}")
    return values.astype(np.float32)


def read_curvature(curvature, codes) -> Any:
    """Returns the curvature of each row, and whether it is one number for all."""
    if np.ndim(curvature) > 0:
        return read_rows("curvature", curvature, codes), False
    checks.check_number("curvature", curvature, least=0.0)
    full: Any = jnp.full if isinstance(curvature, Tracer) else np.full
    return full(codes.shape[0], curvature, np.float32), True


def read_mask(mask, codes) -> Any:
    """Returns which rows count; all where the mask is None."""
    if mask is None:
        return np.ones(codes.shape[0], bool)
    if np.shape(mask) != (codes.shape[0],) or mask.dtype != bool:
        raise ValueError(
            f"mask must be {codes.shape[0]} booleans, one for each row, got shape "
            f"{np.shape(mask)}"
        )
    return mask


def make_limits(
    num_features: int,
    *,
    l1: Any,
    l2: Any,
    max_delta_step: Any,
    min_gain: Any,
    min_child_weight: Any,
    min_child_samples: Any,
    monotone: Any,
    interactions: Any = None,
    colsample_bytree: Any = 1.0,
    colsample_bylevel: Any = 1.0,
    colsample_bynode: Any = 1.0,
) -> TreeLimits:
    """Checks the numbers that shape a tree, and puts them into a container."""
    for name, value in (
        ("l1", l1), ("l2", l2), ("min_gain", min_gain),
        ("min_child_weight", min_child_weight),
    ):  # fmt: skip
        checks.check_number(name, value, least=0.0)
    checks.check_number("max_delta_step", max_delta_step, least=0.0, finite=False)
    if not isinstance(min_child_samples, Tracer):
        checks.check_integer("min_child_samples", min_child_samples, least=1)
        min_child_samples = np.int32(min_child_samples)
    shares: dict[str, Any] = dict(
        colsample_bytree=colsample_bytree, colsample_bylevel=colsample_bylevel,
        colsample_bynode=colsample_bynode,
    )  # fmt: skip
    for name, value in shares.items():
        checks.check_number(name, value, above=0.0, most=1.0)
    signs = feature_checks.check_monotone(monotone, num_features)
    groups: Any = feature_checks.check_interactions(interactions, num_features)
    return TreeLimits(
        l2=as_float(l2),
        min_gain=as_float(min_gain),
        min_child_weight=as_float(min_child_weight),
        min_child_samples=min_child_samples,
        **{name: as_float(share) for name, share in shares.items()},
        values=limit_values(l1, max_delta_step, signs, num_features),
        groups=groups,
    )


def add_categories(
    limits: TreeLimits,
    codes: Codes,
    categories: Any,
    *,
    category_l2: Any,
    category_smoothing: Any,
    min_category_weight: Any,
    max_onehot: Any,
) -> TreeLimits:
    """Adds the limits on category splits, if there are categorical features."""
    checks.check_number("category_l2", category_l2, least=0.0)
    checks.check_number("category_smoothing", category_smoothing, least=0.0)
    checks.check_number("min_category_weight", min_category_weight, least=0.0)
    if not isinstance(max_onehot, Tracer):
        checks.check_integer("max_onehot", max_onehot, least=0)
    if categories is None:
        return limits
    if not isinstance(categories, Categories):
        raise TypeError(
            "categories must be those of the bins (bins.categories) or None, got "
            f"{type(categories).__name__}"
        )
    features = categories.features
    if codes.is_sparse or features[-1] >= codes.num_features:
        raise ValueError(
            "categories must be those of the bins that the dense codes are from, got "
            f"categorical columns {features} and {codes.shape=}"
        )
    signs: Any = None if limits.values is None else limits.values.monotone
    if not isinstance(signs, Tracer | None) and np.any(signs[list(features)]):
        raise ValueError(
            "monotone must be 0 for categorical columns, which have no order, got "
            f"{signs.tolist()} and categorical columns {features}"
        )
    found = limit_categories(
        categories, category_l2, category_smoothing, min_category_weight, max_onehot
    )
    return limits._replace(categories=found)
