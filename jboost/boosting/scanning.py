# SPDX-License-Identifier: Apache-2.0
"""All rounds as one traced program: on one device, or on every shard of a mesh.

In: a traced loss, what its program takes, the rows. Out: the trees of all rounds, and
the scores of the rows.
"""

from functools import partial
from typing import Any

import jax

from jboost.boosting import own_derivatives as own
from jboost.boosting.round import STRUCTURE, grow_round
from jboost.boosting.sharding import (
    EVERYWHERE,
    cut_evenly,
    pad_shards,
    rows_of,
    run_sharded,
    spec_of_data,
)
from jboost.boosting.state import (
    Arrays,
    Problem,
    StartPoint,
    Static,
    prepare_groups,
    start_state,
)
from jboost.codes.codes import pack_codes
from jboost.numerics.derivatives import without_derivatives
from jboost.trees.tree import BoostedTrees


def by_row(scores):
    """Returns scores as [N] for K = 1, else [N, K]."""
    return scores[0] if scores.shape[0] == 1 else scores.T


def run_rounds(
    loss: Any, method: Any, program: Any, sampled: bool, *operands: Any
) -> Any:
    """Runs all rounds.

    Args:
      loss, method: of :class:`jboost.boosting.state.Static`.
      program: of derivatives that are handed in; None: those of the loss.
      sampled: whether rounds may leave rows out, where the loss is of groups.
      operands: constants, numbers, learning rates, data, initial score, seed.

    Returns:
      The trees, and the scores of the rows.
    """
    constants, numbers, rates, data, init_score, seed = operands
    if loss.coupled:
        constants, rates, data = without_derivatives(
            (constants, rates, data),
            "derivatives of training are not supported for losses of groups",
        )
    data = prepare_groups(loss, constants, data, sampled)
    state, _ = start_state(loss, constants, data, StartPoint(init_score, seed))
    problem = Problem(Static(loss, method), Arrays(constants, numbers, data))

    @partial(jax.checkpoint, prevent_cse=False, policy=_choose_kept(data))
    def one_round(state, rate):
        return grow_round(own.hand_in(problem, program, state), rate, state)[:2]

    final, trees = jax.lax.scan(one_round, state, rates)
    return BoostedTrees(trees, state.init_score), by_row(final.scores)


def run_sharded_rounds(loss: Any, method: Any, mesh: Any, *operands: Any) -> Any:
    """Does what :func:`run_rounds` does on the devices of a mesh."""
    constants, numbers, rates, data, init_score, seed = operands
    num_rows = data.weights.shape[0]
    shards = cut_evenly(mesh, num_rows)
    data = pad_shards(shards, data)

    def run(constants, numbers, rates, data, init_score, seed):
        data = data._replace(codes=pack_codes(data.codes, method.num_bins))
        rows = (data, init_score, seed)
        return run_rounds(loss, method, None, False, constants, numbers, rates, *rows)

    everywhere = (EVERYWHERE,) * 3
    specs = (*everywhere, spec_of_data(shards), *everywhere[:2])
    trees, scores = run_sharded(
        run, mesh, shards,
        (constants, numbers, rates, data, init_score, seed),
        specs, (EVERYWHERE, rows_of(shards)),
    )  # fmt: skip
    return trees, scores[:num_rows]


def _choose_kept(data):
    """Returns what reverse mode keeps of a round: no tree is grown or solved twice.

    Besides the state, it keeps the structure of the trees, the leaves of the rows and
    all results of custom derivatives that have fewer numbers than rows: sums by leaf,
    leaf values. Derivatives of rows are evaluated again.
    """
    of_structure = jax.checkpoint_policies.save_only_these_names(STRUCTURE)

    def keep(primitive, *operands, **params):
        if primitive.name == "custom_jvp_call":
            results = params["call_jaxpr"].out_avals
            return all(result.size < len(data.weights) for result in results)
        return of_structure(primitive, *operands, **params)

    return keep
