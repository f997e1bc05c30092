# SPDX-License-Identifier: Apache-2.0
from .adaptive import (
    Adaptive as Adaptive,
)
from .adaptive import (
    Report as Report,
)
from .adaptive import (
    Variances as Variances,
)
from .adaptive import (
    adaptive as adaptive,
)
from .adaptive import (
    estimate_variances as estimate_variances,
)
from .adaptive import (
    make_adaptive_huber as make_adaptive_huber,
)
from .adaptive import (
    make_random_intercept as make_random_intercept,
)
from .adaptive import (
    predict_intercepts as predict_intercepts,
)
from .adaptive import (
    random_intercept as random_intercept,
)
from .adaptive import (
    weighted_quantile as weighted_quantile,
)
from .likelihoods import (
    Likelihood as Likelihood,
)
from .likelihoods import (
    likelihood as likelihood,
)
from .names import (
    GROUP_LOSSES as GROUP_LOSSES,
)
from .names import (
    LOSSES as LOSSES,
)
from .names import (
    bag as bag,
)
from .names import (
    sum_targets as sum_targets,
)
from .ranking import (
    approx_ndcg as approx_ndcg,
)
from .ranking import (
    lambda_rank as lambda_rank,
)
from .ranking import (
    list_mle as list_mle,
)
from .ranking import (
    listwise_softmax as listwise_softmax,
)
from .ranking import (
    pairwise_logistic as pairwise_logistic,
)
from .ranking import (
    xendcg as xendcg,
)
from .rows import (
    INVERSE_LINKS as INVERSE_LINKS,
)
from .rows import (
    absolute_error as absolute_error,
)
from .rows import (
    bare_loss as bare_loss,
)
from .rows import (
    cauchy as cauchy,
)
from .rows import (
    expectile as expectile,
)
from .rows import (
    exponential as exponential,
)
from .rows import (
    focal as focal,
)
from .rows import (
    gamma as gamma,
)
from .rows import (
    hinge as hinge,
)
from .rows import (
    hinge_squared as hinge_squared,
)
from .rows import (
    huber as huber,
)
from .rows import (
    inverse_link as inverse_link,
)
from .rows import (
    log_cosh as log_cosh,
)
from .rows import (
    logistic as logistic,
)
from .rows import (
    poisson as poisson,
)
from .rows import (
    pseudo_huber as pseudo_huber,
)
from .rows import (
    quantile as quantile,
)
from .rows import (
    softmax as softmax,
)
from .rows import (
    squared_error as squared_error,
)
from .rows import (
    tweedie as tweedie,
)
from .rows import (
    welsch as welsch,
)
from .survival import (
    concordance as concordance,
)
from .survival import (
    cox as cox,
)
