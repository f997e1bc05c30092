# SPDX-License-Identifier: Apache-2.0
from .containers import FileError as FileError
from .ensemble import Ensemble as Ensemble
from .ensemble import Links as Links
from .ensemble import Model as Model
from .ensemble import to_ensemble as to_ensemble
from .ensemble import truncate as truncate
from .files import load as load
from .files import save as save
from .predicting import leaf_indices as leaf_indices
from .predicting import predict as predict
from .predicting import staged_predict as staged_predict
from .regression_tree import RegressionTree as RegressionTree
