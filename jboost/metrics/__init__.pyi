# SPDX-License-Identifier: Apache-2.0
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
from .rows import (
    accuracy as accuracy,
)
from .rows import (
    brier as brier,
)
from .rows import (
    error as error,
)
from .rows import (
    gamma_deviance as gamma_deviance,
)
from .rows import (
    log_loss as log_loss,
)
from .rows import (
    mae as mae,
)
from .rows import (
    mape as mape,
)
from .rows import (
    mse as mse,
)
from .rows import (
    poisson_deviance as poisson_deviance,
)
from .rows import (
    r2 as r2,
)
from .rows import (
    rmse as rmse,
)
from .rows import (
    second_class as second_class,
)
