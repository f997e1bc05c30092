# SPDX-License-Identifier: Apache-2.0
"""Pictures of models, training and losses, drawn with matplotlib.

In: what jboost's functions return. Out: matplotlib axes, which every function takes,
too; without them it makes a figure of its own. Nothing is shown and nothing is saved:
that is the caller's (``plt.show()``, ``ax.figure.savefig(...)``). Colors are those of
the style in use.
"""

from jboost.plotting.bars import importance
from jboost.plotting.curves import learning_curve
from jboost.plotting.dependence import partial_dependence
from jboost.plotting.loss_panels import loss
from jboost.plotting.swarms import shap_summary
from jboost.plotting.tree_drawing import tree
from jboost.plotting.tree_tables import tree_to_dot

__all__ = [
    "importance",
    "learning_curve",
    "loss",
    "partial_dependence",
    "shap_summary",
    "tree",
    "tree_to_dot",
]
