# SPDX-License-Identifier: Apache-2.0
"""Plots models, training and losses with matplotlib.

In: the objects that jboost's functions return. Out: matplotlib axes. Every function
draws on the axes that the caller passes, or else creates a new figure. No function
shows or saves a figure: call ``plt.show()`` or ``ax.figure.savefig(...)``. Colors come
from the current matplotlib style.
"""

from jboost.plotting.curves import learning_curve, loss, tuning
from jboost.plotting.explanations import importance, partial_dependence, shap_summary
from jboost.plotting.trees import tree, tree_to_dot

__all__ = [
    "importance",
    "learning_curve",
    "loss",
    "partial_dependence",
    "shap_summary",
    "tree",
    "tree_to_dot",
    "tuning",
]
