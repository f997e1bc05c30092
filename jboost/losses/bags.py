# SPDX-License-Identifier: Apache-2.0
"""A loss of bags of rows that share one label (multiple-instance learning).

In: scores [G] and targets [G] of the rows of one bag. Out: one number.
"""

import math

import jax.numpy as jnp

from jboost.losses.groups import clear, log, softplus, weigh_rows
from jboost.losses.parameters import built_in


@built_in()
def bag(scores, targets, *, where=None):
    """Returns the cross-entropy of a bag that is positive if one of its rows is.

    -log P for a positive bag and -log(1 - P) for a negative one, where 1 - P = prod_i
    (1 - sigmoid(s_i)) (noisy or): the score is the logit of a row. A bag of one row has
    the loss :func:`logistic`.

    Args:
      scores: [G].
      targets: [G]; the bag is positive if any of them is greater than 0. The label of
        the bag may stand in all of its rows.
      where: bool [G], the real rows; all by default.

    Returns:
      A scalar; 0 without real rows.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> loss = jb.losses.bag(jnp.zeros(2), jnp.array([1, 1]))
      >>> float(jnp.exp(-loss)).__round__(5)
      0.75

    References:
      Maron and Lozano-Perez 1998, "A framework for multiple-instance learning"; Zhang,
      Platt and Viola 2005, "Multiple instance boosting for object detection", eq. 2
      and 3 (noisy or).
    """
    real = weigh_rows(scores, where, None) > 0
    positive = jnp.any((jnp.asarray(targets, jnp.float32) > 0) & real)
    negative_loss = jnp.sum(clear(softplus(clear(scores, real)), real))
    # P = 1 - e^-x. Each form is accurate where the other is not (Maechler 2012).
    small = negative_loss < math.log(2)
    below = log(-jnp.expm1(-jnp.where(positive & small, negative_loss, 1)))
    above = jnp.log1p(-jnp.exp(-jnp.where(small, 1, negative_loss)))
    return jnp.where(positive, -jnp.where(small, below, above), negative_loss)
