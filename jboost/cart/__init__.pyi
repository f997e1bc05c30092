# SPDX-License-Identifier: Apache-2.0
from .tree import (
    AlphaChoice as AlphaChoice,
)
from .tree import (
    PruningPath as PruningPath,
)
from .tree import (
    RegressionTree as RegressionTree,
)
from .tree import (
    cross_validate_alpha as cross_validate_alpha,
)
from .tree import (
    fit_tree as fit_tree,
)
from .tree import (
    prune as prune,
)
from .tree import (
    pruning_path as pruning_path,
)
