# SPDX-License-Identifier: Apache-2.0
"""Can Huber's delta be learned by gradient descent on the validation loss?

A fifth of the targets of Friedman's first function carry heavy noise. The delta of
Huber's loss, and then delta and the learning rate together, are moved by optax along
the derivative of the validation loss through training; the structure of the trees is
held constant within a step and grown anew in the next. A grid over delta shows how low
the validation loss can get, and rows that neither of them saw are the judge.

    python experiments/hypergradients.py

Written to --out: hypergradients.json.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiment_tools import describe_machine, make_parser, write_json
from tqdm import tqdm

import jboost as jb

RATE = 0.1  # where delta alone is learned


def draw(rng, num_rows: int, outliers: float):
    """Draws rows of Friedman's first function; some targets with heavy noise."""
    x = rng.uniform(size=(num_rows, 10)).astype(np.float32)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y += 10 * x[:, 3] + 5 * x[:, 4] + rng.normal(size=num_rows)
    y += (rng.uniform(size=num_rows) < outliers) * rng.normal(size=num_rows) * 30
    return x, y.astype(np.float32)


def mean_absolute_error(scores, targets):
    """Returns the mean of |score - target|."""
    return jnp.mean(jnp.abs(scores - targets))


def make_objective(rows, valid, test, num_rounds: int):
    """Returns the validation loss, and the test loss, of log delta and log rate."""
    x, y = rows
    bins = jb.fit_bins(x)
    codes = jb.parts.prepare_codes(jb.apply_bins(bins, x))

    def objective(numbers):
        delta = jnp.exp(numbers["delta"])

        def loss(score, target):
            return jb.losses.huber(score, target, delta=delta)

        trees, _ = jb.boost(
            codes, y, loss, jax.random.key(0), num_rounds=num_rounds, max_depth=4,
            learning_rate=jnp.exp(numbers["rate"]),
        )  # fmt: skip
        model = jb.to_ensemble(trees, bins)
        losses = [
            mean_absolute_error(jb.predict(model, x), y) for x, y in (valid, test)
        ]
        return losses[0], losses[1]

    return objective


def descend(step, numbers, learned, optimizer, steps: int):
    """Follows the gradient; returns the best validation loss, its test loss, numbers.

    Args:
      step: returns ((validation loss, test loss), gradient).
      learned: names of the numbers that move.
    """
    state = optimizer.init(numbers)
    path = []
    for _ in tqdm(range(steps), desc=" and ".join(learned)):
        (value, test), gradient = step(numbers)
        path.append((float(value), float(test), jax.tree.map(float, numbers)))
        gradient = {k: g if k in learned else 0.0 * g for k, g in gradient.items()}
        updates, state = optimizer.update(gradient, state)
        numbers = optax.apply_updates(numbers, updates)
    return min(path, key=lambda point: point[0]), path


def main() -> None:
    """Runs the grid and both descents, and prints their losses."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--grid", type=int, default=30, help="values of delta")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    rows, valid = (draw(rng, options.rows, 0.2) for _ in range(2))
    test = draw(rng, 10 * options.rows, 0.0)
    objective = make_objective(rows, valid, test, options.rounds)
    step = jax.jit(jax.value_and_grad(objective, has_aux=True))
    first = {"delta": jnp.float32(np.log(10)), "rate": jnp.float32(np.log(RATE))}

    grid = []
    for delta in tqdm(np.geomspace(0.1, 30.0, options.grid), desc="grid"):
        (value, apart), _ = step({**first, "delta": jnp.float32(np.log(delta))})
        grid.append((float(value), float(apart), float(delta)))
    best = min(grid)
    optimizer = optax.adam(0.2)
    alone, path = descend(step, first, ("delta",), optimizer, options.steps)
    both, path_of_both = descend(
        step, first, ("delta", "rate"), optimizer, options.steps
    )
    print(f"\n{'':24}{'delta':>8}{'rate':>8}{'validation':>12}{'test':>8}")
    for name, value, apart, delta, rate in (
        ("start", *path[0][:2], 10.0, RATE),
        (f"grid of {options.grid}", *best, RATE),
        ("delta learned", *alone[:2], np.exp(alone[2]["delta"]), RATE),
        ("delta and rate learned", *both[:2], *np.exp([*both[2].values()])),
    ):
        print(f"{name:24}{delta:8.3f}{rate:8.3f}{value:12.4f}{apart:8.4f}")
    print(
        f"\nFound: {options.steps} steps along the gradient in delta reach a "
        f"validation loss of {alone[0]:.4f}, a grid of {options.grid} reaches "
        f"{best[0]:.4f}; with the learning rate as well it is {both[0]:.4f}."
    )
    result = {"grid": grid, "delta": path, "delta and rate": path_of_both}
    result = {"arguments": vars(options), **describe_machine(), **result}
    write_json(options.out / "hypergradients.json", result)


if __name__ == "__main__":
    main()
