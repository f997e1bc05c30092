# SPDX-License-Identifier: Apache-2.0
from .evaluation import (
    SurvivalCurve as SurvivalCurve,
)
from .evaluation import (
    brier_scores as brier_scores,
)
from .evaluation import (
    kaplan_meier as kaplan_meier,
)
from .hazards import (
    BaselineHazard as BaselineHazard,
)
from .hazards import (
    baseline_hazard as baseline_hazard,
)
from .hazards import (
    survival_curves as survival_curves,
)
