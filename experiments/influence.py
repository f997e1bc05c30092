# SPDX-License-Identifier: Apache-2.0
"""Does the gradient in the weights find the rows that harm a model?

Five percent of the training labels of scikit-learn's breast cancer table are flipped.
The derivative of the validation loss in the weight of a training row says whether the
row harms the model: one gradient gives it for all rows. Leaving out one row after
another and training again answers the same question at the price of one training for
each row. Both rank the rows by harm; the area under the ROC curve says how well the
flipped labels are found.

    python experiments/influence.py

Written to --out: influence.json.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from experiment_tools import (
    describe_machine,
    make_figures,
    make_parser,
    print_table,
    write_json,
)
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from tqdm import tqdm

import jboost as jb


def make_split(split: int, share: float):
    """Returns codes and labels of all rows, which ones train, and which were flipped.

    The first half trains. Bins are those of its rows.
    """
    x, y = load_breast_cancer(return_X_y=True)
    rng = np.random.default_rng(split)
    order = rng.permutation(len(x))
    x, y = x[order].astype(np.float32), y[order].astype(np.float32)
    trains = np.arange(len(x)) < len(x) // 2
    flipped = rng.permutation(trains.sum())[: round(share * trains.sum())]
    y[flipped] = 1 - y[flipped]
    codes = jb.apply_bins(jb.fit_bins(x[trains]), x)
    return jb.parts.prepare_codes(codes), jnp.asarray(y), trains, flipped


def validation_loss(weights, codes, y, trains, num_rounds: int):
    """Trains with these weights; returns the mean loss of the other rows.

    Rows of weight 0 are not trained on, but have scores.
    """
    weights = jnp.where(trains, weights, 0.0)
    _, scores = jb.boost(
        codes, y, jb.losses.logistic, jax.random.key(0), sample_weight=weights,
        num_rounds=num_rounds, max_depth=3,
    )  # fmt: skip
    return jnp.mean(jax.vmap(jb.losses.logistic)(scores, y), where=~trains)


def leave_each_out(weights, codes, y, trains, num_rounds: int):
    """Returns by how much the validation loss falls without each training row."""

    def leave_out(row):
        rest = weights.at[row].set(0.0)
        return validation_loss(rest, codes, y, trains, num_rounds)

    losses = jax.lax.map(leave_out, jnp.arange(len(y) // 2))
    return validation_loss(weights, codes, y, trains, num_rounds) - losses


WAYS = {
    "gradient": jax.jit(jax.grad(validation_loss), static_argnums=4),
    "leave one out": jax.jit(leave_each_out, static_argnums=4),
}


def compare(split: int, share: float, num_rounds: int) -> dict[str, float]:
    """Returns areas under the curve and times of both ways, for one split."""
    codes, y, trains, flipped = make_split(split, share)
    ones, found = jnp.ones(len(y), jnp.float32), {}
    is_flipped = np.isin(np.arange(trains.sum()), flipped)
    for name, measure in WAYS.items():
        operands = (ones, codes, y, trains, num_rounds)
        jax.block_until_ready(measure(*operands))  # compiles
        begin = time.perf_counter()
        harm = np.asarray(measure(*operands))[: len(is_flipped)]
        found[f"{name}, seconds"] = time.perf_counter() - begin
        found[name] = float(roc_auc_score(is_flipped, harm))
    return found


def main() -> None:
    """Ranks the rows of every split both ways and prints the areas."""
    parser = make_parser(__doc__)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.05, help="of flipped labels")
    options = parser.parse_args()
    splits = range(options.splits)
    every = [compare(s, options.share, options.rounds) for s in tqdm(splits)]
    means = {name: float(np.mean([e[name] for e in every])) for name in every[0]}
    spread = {name: float(np.std([e[name] for e in every])) for name in every[0]}
    table = [["way", "area under the curve", "deviation", "seconds"]]
    for name in WAYS:
        seconds = f"{means[f'{name}, seconds']:.3f}"
        table.append([name, f"{means[name]:.2f}", f"{spread[name]:.2f}", seconds])
    print_table(table)
    print(
        "\nFound: the gradient finds flipped labels with an area of "
        f"{means['gradient']:.3f}, leave one out with {means['leave one out']:.3f}, at "
        f"{means['leave one out, seconds'] / means['gradient, seconds']:.0f} times the "
        "cost."
    )
    result = {"arguments": vars(options), **describe_machine(), "splits": every}
    result["figures"] = make_figures(areas=table)
    write_json(options.out / "influence.json", result)


if __name__ == "__main__":
    main()
