# SPDX-License-Identifier: Apache-2.0
"""Gradient boosting for any differentiable loss, as pure functions on JAX arrays."""

from importlib.metadata import PackageNotFoundError, version

from jboost import losses, metrics, recipes
from jboost.boosting.inspection import LossReport, inspect_loss
from jboost.boosting.loop import boost, boost_step, init
from jboost.boosting.rounds import BoostState
from jboost.cart.pruning import (
    AlphaChoice,
    PruningPath,
    cross_validate_alpha,
    prune,
    pruning_path,
)
from jboost.cart.tree import RegressionTree, fit_tree
from jboost.codes.binning import Bins, apply_bins, fit_bins
from jboost.codes.codes import SparseCodes
from jboost.explanation.dependence import PartialDependence, partial_dependence
from jboost.explanation.importance import (
    Importance,
    feature_importance,
    permutation_importance,
)
from jboost.explanation.shap import ShapValues, shap_interactions, shap_values
from jboost.explanation.tree_frame import trees_to_dataframe
from jboost.interchange.exporting import export_predict, to_matrix
from jboost.interchange.lightgbm_reader import read_lightgbm
from jboost.interchange.sklearn_reader import read_sklearn
from jboost.interchange.xgboost_reader import read_xgboost
from jboost.interchange.xgboost_writer import write_xgboost
from jboost.kernels.library import implementations
from jboost.model.containers import FileError
from jboost.model.ensemble import (
    Ensemble,
    leaf_indices,
    predict,
    staged_predict,
    to_ensemble,
    truncate,
)
from jboost.model.files import load, save
from jboost.selection.model_selection import CrossValidation, cross_validate
from jboost.selection.sweeps import Sweep, sweep
from jboost.sketches.sketch import (
    QuantileSketch,
    bins_from_sketch,
    find_thresholds,
    make_sketch,
    merge_sketches,
    summarize_sketch,
    update_sketch,
)
from jboost.sketches.summary import (
    QuantileSummary,
    bound_ranks,
    find_candidates,
    make_summary,
    merge_summaries,
    prune_summary,
    query_ranks,
)
from jboost.streams.batches import array_batches, parquet_batches
from jboost.streams.blocks import BlockError
from jboost.streams.streaming import Stream, stream
from jboost.training.fitting import fit
from jboost.training.history import History, TrainingError
from jboost.trees.growing import grow_tree
from jboost.trees.histogram import build_histogram
from jboost.trees.splitting import find_split
from jboost.trees.tree import BoostedTrees, Tree

try:
    __version__ = version("jboost")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "AlphaChoice",
    "Bins",
    "BlockError",
    "BoostState",
    "BoostedTrees",
    "CrossValidation",
    "Ensemble",
    "FileError",
    "History",
    "Importance",
    "LossReport",
    "PartialDependence",
    "PruningPath",
    "QuantileSketch",
    "QuantileSummary",
    "RegressionTree",
    "ShapValues",
    "SparseCodes",
    "Stream",
    "Sweep",
    "TrainingError",
    "Tree",
    "apply_bins",
    "array_batches",
    "bins_from_sketch",
    "boost",
    "boost_step",
    "bound_ranks",
    "build_histogram",
    "cross_validate",
    "cross_validate_alpha",
    "export_predict",
    "feature_importance",
    "find_candidates",
    "find_split",
    "find_thresholds",
    "fit",
    "fit_bins",
    "fit_tree",
    "grow_tree",
    "implementations",
    "init",
    "inspect_loss",
    "leaf_indices",
    "load",
    "losses",
    "make_sketch",
    "make_summary",
    "merge_sketches",
    "merge_summaries",
    "metrics",
    "parquet_batches",
    "partial_dependence",
    "permutation_importance",
    "predict",
    "prune",
    "prune_summary",
    "pruning_path",
    "query_ranks",
    "read_lightgbm",
    "read_sklearn",
    "read_xgboost",
    "recipes",
    "save",
    "shap_interactions",
    "shap_values",
    "staged_predict",
    "stream",
    "summarize_sketch",
    "sweep",
    "to_ensemble",
    "to_matrix",
    "trees_to_dataframe",
    "truncate",
    "update_sketch",
    "write_xgboost",
]
