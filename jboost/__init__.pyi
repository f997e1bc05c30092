# SPDX-License-Identifier: Apache-2.0
# The public names. __init__.py imports each on first use.

__version__: str

from . import (
    cart as cart,
)
from . import (
    dask as dask,
)
from . import (
    distributions as distributions,
)
from . import (
    explanation as explanation,
)
from . import (
    interchange as interchange,
)
from . import (
    losses as losses,
)
from . import (
    metrics as metrics,
)
from . import (
    parts as parts,
)
from . import (
    plotting as plotting,
)
from . import (
    ray as ray,
)
from . import (
    recipes as recipes,
)
from . import (
    sketches as sketches,
)
from . import (
    sklearn as sklearn,
)
from . import (
    streams as streams,
)
from . import (
    survival as survival,
)
from .boosting.groups import rows as rows
from .boosting.inspection import (
    LossReport as LossReport,
)
from .boosting.inspection import (
    inspect_loss as inspect_loss,
)
from .boosting.loop import (
    boost as boost,
)
from .boosting.loop import (
    boost_step as boost_step,
)
from .boosting.loop import (
    init as init,
)
from .boosting.state import BoostState as BoostState
from .calibration import Intervals as Intervals
from .calibration import conformal as conformal
from .codes.binning import (
    apply_bins as apply_bins,
)
from .codes.binning import (
    fit_bins as fit_bins,
)
from .codes.bins import (
    Bins as Bins,
)
from .explanation.dependence import partial_dependence as partial_dependence
from .explanation.importance import feature_importance as feature_importance
from .explanation.shap import shap_values as shap_values
from .kernels.library import implementations as implementations
from .model.containers import FileError as FileError
from .model.ensemble import (
    Ensemble as Ensemble,
)
from .model.ensemble import (
    to_ensemble as to_ensemble,
)
from .model.ensemble import (
    truncate as truncate,
)
from .model.files import (
    load as load,
)
from .model.files import (
    save as save,
)
from .model.predicting import (
    leaf_indices as leaf_indices,
)
from .model.predicting import (
    predict as predict,
)
from .model.predicting import (
    staged_predict as staged_predict,
)
from .refitting.new_leaves import refit as refit
from .refitting.refining import Refinement as Refinement
from .refitting.refining import refine as refine
from .reports.report import report as report
from .selection.cross_validation import (
    CrossValidation as CrossValidation,
)
from .selection.cross_validation import (
    Sweep as Sweep,
)
from .selection.cross_validation import (
    cross_validate as cross_validate,
)
from .selection.cross_validation import (
    sweep as sweep,
)
from .selection.tuning import (
    Tuned as Tuned,
)
from .selection.tuning import (
    tune as tune,
)
from .streams.stream import stream as stream
from .tables.groups import make_groups as make_groups
from .tables.groups import random_groups as random_groups
from .training.fitting import fit as fit
from .training.record import (
    History as History,
)
from .training.record import (
    TrainingError as TrainingError,
)
from .training.record import (
    TrainingInterrupted as TrainingInterrupted,
)
from .trees.tree import BoostedTrees as BoostedTrees
