# SPDX-License-Identifier: Apache-2.0
from .classification import (
    accuracy as accuracy,
)
from .classification import (
    brier as brier,
)
from .classification import (
    error as error,
)
from .classification import (
    log_loss as log_loss,
)
from .classification import (
    second_class as second_class,
)
from .names import (
    GROUP_METRICS as GROUP_METRICS,
)
from .names import (
    LABELS as LABELS,
)
from .names import (
    MAXIMIZED as MAXIMIZED,
)
from .names import (
    METRICS as METRICS,
)
from .names import (
    PROBABILITIES as PROBABILITIES,
)
from .names import (
    RANKS as RANKS,
)
from .names import (
    TRUNCATED as TRUNCATED,
)
from .names import (
    find_metric as find_metric,
)
from .ranking import (
    auc as auc,
)
from .ranking import (
    average_precision as average_precision,
)
from .ranking import (
    concordance_index as concordance_index,
)
from .ranking import (
    mean_average_precision as mean_average_precision,
)
from .ranking import (
    mrr as mrr,
)
from .ranking import (
    ndcg as ndcg,
)
from .reading import (
    Link as Link,
)
from .regression import (
    gamma_deviance as gamma_deviance,
)
from .regression import (
    mae as mae,
)
from .regression import (
    mape as mape,
)
from .regression import (
    mse as mse,
)
from .regression import (
    poisson_deviance as poisson_deviance,
)
from .regression import (
    r2 as r2,
)
from .regression import (
    rmse as rmse,
)
