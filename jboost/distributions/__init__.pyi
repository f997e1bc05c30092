# SPDX-License-Identifier: Apache-2.0
from .counts import (
    NegativeBinomial as NegativeBinomial,
)
from .counts import (
    ZeroInflatedPoisson as ZeroInflatedPoisson,
)
from .counts import (
    negative_binomial as negative_binomial,
)
from .counts import (
    zero_inflated_poisson as zero_inflated_poisson,
)
from .distribution import (
    Distribution as Distribution,
)
from .positive import (
    Beta as Beta,
)
from .positive import (
    Gamma as Gamma,
)
from .positive import (
    LogNormal as LogNormal,
)
from .positive import (
    Weibull as Weibull,
)
from .positive import (
    beta as beta,
)
from .positive import (
    gamma as gamma,
)
from .positive import (
    log_normal as log_normal,
)
from .positive import (
    weibull as weibull,
)
from .real import (
    Laplace as Laplace,
)
from .real import (
    Normal as Normal,
)
from .real import (
    NormalMixture as NormalMixture,
)
from .real import (
    StudentT as StudentT,
)
from .real import (
    laplace as laplace,
)
from .real import (
    normal as normal,
)
from .real import (
    normal_mixture as normal_mixture,
)
from .real import (
    student_t as student_t,
)
