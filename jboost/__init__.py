# SPDX-License-Identifier: Apache-2.0
"""Gradient boosting for any differentiable loss, as pure functions on JAX arrays."""

from jboost import losses
from jboost.binning import Bins, apply_bins, fit_bins
from jboost.boosting import BoostedTrees, boost, boost_step, init
from jboost.ensemble import (
    Ensemble,
    leaf_indices,
    predict,
    staged_predict,
    to_ensemble,
    truncate,
)
from jboost.rounds import BoostState
from jboost.tree import Tree, grow_tree
from jboost.history import History, TrainingError
from jboost.training import fit
