# SPDX-License-Identifier: Apache-2.0
from .pruning import (
    AlphaChoice as AlphaChoice,
)
from .pruning import (
    PruningPath as PruningPath,
)
from .pruning import (
    cross_validate_alpha as cross_validate_alpha,
)
from .pruning import (
    prune as prune,
)
from .pruning import (
    pruning_path as pruning_path,
)
from .tree import (
    RegressionTree as RegressionTree,
)
from .tree import (
    fit_tree as fit_tree,
)
