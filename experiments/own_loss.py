# SPDX-License-Identifier: Apache-2.0
"""What does it take to train with a loss that no library has?

It takes five lines: the loss of one row, as a plain function. In this script it is an
asymmetric log-cosh, for which a prediction that is too high costs four times as much as
one that is too low. jboost derives gradient, curvature, initial score and leaf values.

    python experiments/own_loss.py

On scikit-learn's diabetes table (targets from 25 to 346) this loss is a hard case for
second-order boosting: the Hessian of log cosh r, 1 - tanh(r)^2, is about 1e-8 at a
residual of 10 and underflows beyond. The picture shows the loss, its gradient, its
Hessian together with the curvature that `curvature="auto"` uses, and the held-out loss
by round for training with this loss, with its exact Hessian, and with squared error.
Written to --out: own_loss.png and own_loss.json.
"""

import jax.numpy as jnp
import numpy as np
from experiment_tools import (
    BLACK,
    BLUE,
    ORANGE,
    describe_machine,
    make_parser,
    open_figure,
    save_figure,
    write_json,
)
from sklearn.datasets import load_diabetes
from tqdm import tqdm

import jboost as jb


def asymmetric_log_cosh(score, target):
    """Returns log cosh r of one row, four times that for r = score - target > 0."""
    residual = score - target
    cost = jnp.logaddexp(residual, -residual) - jnp.log(2.0)
    return jnp.where(residual > 0, 4.0, 1.0) * cost


# The curves of the last panel: name, loss to train with, settings, line.
RUNS = (
    ("this loss", asymmetric_log_cosh, {}, (BLUE, "-")),
    (
        "this loss, exact Hessian",
        asymmetric_log_cosh,
        {"curvature": "exact", "leaf_solver": "newton"},
        (ORANGE, "--"),
    ),
    ("squared error", jb.losses.squared_error, {}, (BLACK, ":")),
)


def mean_own_loss(scores, targets, weights):
    """Returns the mean of the loss over all rows: a metric for `jb.fit`."""
    return jnp.average(asymmetric_log_cosh(scores, targets), weights=weights)


def train(num_rounds: int) -> dict[str, np.ndarray]:
    """Returns the held-out loss of every run by round, mean over five splits."""
    x, y = load_diabetes(return_X_y=True)
    curves: dict[str, list] = {name: [] for name, *_ in RUNS}
    jobs = [(split, *run) for split in range(5) for run in RUNS]
    bar = tqdm(jobs, unit="fit")
    for split, name, loss, settings, _ in bar:
        bar.set_description(name)
        order = np.random.default_rng(split).permutation(len(x))
        test, rows = order[: len(x) // 5], order[len(x) // 5 :]
        _, history = jb.fit(
            x[rows], y[rows], loss,
            validation=(x[test], y[test]), metrics={"own": mean_own_loss},
            num_rounds=num_rounds, learning_rate=0.1, max_depth=3,
            min_child_samples=20, subsample=1.0, rows_per_threshold=0, **settings,
        )  # fmt: skip
        curves[name].append(history.metrics["validation"]["own"])
    return {name: np.mean(splits, axis=0) for name, splits in curves.items()}


def plot_loss(axes, report: jb.LossReport) -> None:
    """Draws loss, gradient and curvature of one row with target 0."""
    near = np.abs(report.scores) <= 6
    scores = report.scores[near]
    axes[0].plot(scores, report.value[near], color=BLUE, linewidth=2)
    axes[0].set_title("loss of a row with target 0")
    axes[1].plot(scores, report.gradient[near], color=BLUE, linewidth=2)
    axes[1].set_title("gradient")
    for name, line in (("hessian", (ORANGE, "--")), ("curvature", (BLUE, "-"))):
        label = {"hessian": "Hessian", "curvature": 'what "auto" uses'}[name]
        color, dashes = line
        values = getattr(report, name)[near]
        axes[2].plot(scores, values, dashes, color=color, linewidth=2, label=label)
    axes[2].set_title("curvature")
    axes[2].legend(frameon=False)
    for axis in axes[:3]:
        axis.set_xlabel("score")


def plot_curves(axis, curves: dict[str, np.ndarray]) -> None:
    """Draws the held-out loss by round."""
    for name, _, _, (color, dashes) in RUNS:
        rounds = np.arange(1, len(curves[name]) + 1)
        axis.plot(rounds, curves[name], dashes, color=color, linewidth=2, label=name)
    axis.set_title("held-out loss, mean of 5 splits")
    axis.set_xlabel("round")
    axis.legend(frameon=False, title="trained with")


def main() -> None:
    """Trains, prints what jboost derives from the loss, and draws the picture."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    report = jb.inspect_loss(asymmetric_log_cosh, 0.0)
    print(report, end="\n\n")
    curves = train(options.rounds)
    print("\nheld-out loss after the last round, and at its lowest")
    for name, curve in curves.items():
        print(f"{name:28}{curve[-1]:10.2f}{curve.min():10.2f}")
    lowest = {name: curve.min() for name, curve in curves.items()}
    print(
        f"\nFound: the lowest held-out loss is {lowest['this loss']:.4g}; "
        f"{lowest['this loss, exact Hessian']:.4g} with the exact Hessian, "
        f"{lowest['squared error']:.4g} when trained with squared error."
    )
    result = {"arguments": vars(options), **describe_machine(), "curves": curves}
    write_json(options.out / "own_loss.json", result)
    figure, axes = open_figure(2, 2, (9, 6.6))
    plot_loss(axes.flat, report)
    plot_curves(axes.flat[3], curves)
    save_figure(figure, options.out / "own_loss.png")


if __name__ == "__main__":
    main()
