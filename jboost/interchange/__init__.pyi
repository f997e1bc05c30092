# SPDX-License-Identifier: Apache-2.0
from .exporting import (
    export_predict as export_predict,
)
from .exporting import (
    to_matrix as to_matrix,
)
from .lightgbm_reader import read_lightgbm as read_lightgbm
from .sklearn_reader import read_sklearn as read_sklearn
from .xgboost_reader import read_xgboost as read_xgboost
from .xgboost_writer import write_xgboost as write_xgboost
