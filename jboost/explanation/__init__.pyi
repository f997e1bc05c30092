# SPDX-License-Identifier: Apache-2.0
from .dependence import (
    PartialDependence as PartialDependence,
)
from .dependence import (
    partial_dependence as partial_dependence,
)
from .importance import (
    Importance as Importance,
)
from .importance import (
    feature_importance as feature_importance,
)
from .importance import (
    permutation_importance as permutation_importance,
)
from .importance import trees_to_dataframe as trees_to_dataframe
from .shap import (
    ShapValues as ShapValues,
)
from .shap import (
    shap_interactions as shap_interactions,
)
from .shap import (
    shap_values as shap_values,
)
