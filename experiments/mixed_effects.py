# SPDX-License-Identifier: Apache-2.0
"""How well do random intercepts recover the fixed part, compared with GPBoost?

y = f(x) + b_group + error, where f, b and the error have variance 1 (the simulation of
Sigrist 2022, "Gaussian process boosting", section 4). Each function f is drawn several
times with 500 groups of 10 rows. The error of the fixed part is the root mean squared
error of the centered prediction of f on as many new rows, after a number of rounds and
at the best one. Depth, leaves, learning rate and the least rows of a leaf are equal;
everything else is the default of each library.

    python experiments/mixed_effects.py

"jboost" is `losses.make_random_intercept()`, "jboost, L2" knows nothing of the groups.
GPBoost is measured if it is installed (`pip install gpboost`).

Written to --out: mixed_effects.json and mixed_effects.png.
"""

import argparse
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from experiment_tools import (
    BLUE,
    GRAY,
    ORANGE,
    compare_pairs,
    describe_machine,
    make_parser,
    open_figure,
    save_figure,
    write_json,
)
from tqdm import tqdm

import jboost as jb

STEP = 10  # rounds between readings


class Sample(NamedTuple):
    """Rows of a simulation."""

    x: np.ndarray  # [N, 9]
    fixed: np.ndarray  # [N], f(x)
    target: np.ndarray  # [N]
    group: np.ndarray  # [N]


def hajjem(x: np.ndarray) -> np.ndarray:
    """Returns the function of Hajjem, Bellavance and Larocque 2014, of uniform x."""
    logs = np.log(np.maximum(x[:, 0], 1e-9))
    return 2 * x[:, 0] + x[:, 1] ** 2 + 4 * (x[:, 2] > 0.5) + 2 * logs * x[:, 2]


def friedman3(x: np.ndarray) -> np.ndarray:
    """Returns the third function of Friedman 1991, of uniform x."""
    first, second = 100 * x[:, 0], 40 * np.pi + 520 * np.pi * x[:, 1]
    fourth = 10 * x[:, 3] + 1
    return np.arctan((second * x[:, 2] - 1 / (second * fourth)) / first)


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "hajjem": hajjem, "friedman3": friedman3,
}  # fmt: skip


def draw_sample(name: str, seed: int, options: argparse.Namespace) -> list[Sample]:
    """Returns training and test rows, of different groups."""
    rng = np.random.default_rng(seed)
    half = options.groups * options.size
    x = rng.uniform(size=(2 * half, 9)).astype(np.float32)
    fixed = FUNCTIONS[name](x.astype(np.float64))
    fixed = (fixed - fixed.mean()) / fixed.std()
    group = np.repeat(np.arange(2 * options.groups), options.size)
    target = fixed + rng.normal(size=2 * options.groups)[group]
    target = (target + rng.normal(size=len(target))).astype(np.float32)
    columns = (x, fixed, target, group)
    return [
        Sample(*(c[part] for c in columns)) for part in (slice(half), slice(half, None))
    ]


def find_error(prediction: np.ndarray, test: Sample) -> float:
    """Returns the root mean squared error of the centered fixed part."""
    difference = prediction - test.fixed
    return float(np.std(difference))


def run_jboost(train: Sample, test: Sample, options, *, mixed: bool = True):
    """Returns the errors by rounds, and the estimated variances."""
    given: dict[str, Any] = {}
    if mixed:
        given = dict(loss=jb.losses.make_random_intercept(), groups=train.group)
    model, history = jb.fit(
        train.x, train.target, num_rounds=options.rounds, max_depth=options.depth,
        learning_rate=options.rate, min_child_samples=options.rows, **given,
    )  # fmt: skip
    stages = np.asarray(jb.staged_predict(model, test.x))
    curve = [find_error(stage, test) for stage in stages[STEP - 1 :: STEP]]
    return curve, [float(value) for value in history.parameters]


def run_gpboost(train: Sample, test: Sample, options):
    """Returns the errors by rounds, and the estimated variances."""
    gpboost = importlib.import_module("gpboost")  # optional, so not a dependency
    settings = dict(
        objective="regression_l2", learning_rate=options.rate, verbose=-1,
        max_depth=options.depth, num_leaves=2**options.depth,
        min_data_in_leaf=options.rows, num_threads=options.threads,
    )  # fmt: skip
    effects = gpboost.GPModel(group_data=train.group, likelihood="gaussian")
    data = gpboost.Dataset(train.x, train.target)
    model = gpboost.train(
        params=settings, train_set=data, gp_model=effects,
        num_boost_round=options.rounds,
    )  # fmt: skip
    curve = []
    for rounds in range(STEP, options.rounds + 1, STEP):
        found = model.predict(
            data=test.x, group_data_pred=test.group, pred_latent=True,
            num_iteration=rounds,
        )  # fmt: skip
        curve.append(find_error(found["fixed_effect"], test))
    return curve, np.ravel(effects.get_cov_pars()).tolist()


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "jboost": (BLUE, run_jboost),
    "jboost, L2": (GRAY, lambda *parts: run_jboost(*parts, mixed=False)),
    "GPBoost": (ORANGE, run_gpboost),
}


def compare(methods: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Returns curves of errors and variances, by function and method."""
    found: dict[str, dict] = {
        name: {method: dict(curves=[], variances=[]) for method in methods}
        for name in FUNCTIONS
    }
    cases = [(name, seed) for name in FUNCTIONS for seed in range(options.draws)]
    for name, seed in tqdm(cases, disable=None):
        parts = draw_sample(name, seed, options)
        for method, columns in found[name].items():
            curve, variances = METHODS[method][1](*parts, options)
            columns["curves"].append(curve)
            columns["variances"].append(variances)
    return found


def report(found: dict[str, Any]) -> list[str]:
    """Prints errors; returns what was found by function."""
    said = []
    for name, methods in found.items():
        print(f"\n{name:28} {'last round':>10} {'best round':>10}  variances")
        best = {}
        for method, columns in methods.items():
            curves = np.array(columns["curves"])
            best[method] = curves.min(axis=1)
            variances = np.mean(columns["variances"], axis=0).round(3)
            print(
                f"{method:28} {curves[:, -1].mean():10.4f} {best[method].mean():10.4f}"
                f"  {', '.join(f'{each:g}' for each in np.atleast_1d(variances))}"
            )
        if "GPBoost" in best:
            ratio = best["jboost"].mean() / best["GPBoost"].mean()
            value, error = compare_pairs(best["jboost"], best["GPBoost"])
            said.append(
                f"the error for {name} is {ratio:.3f} of GPBoost's (difference "
                f"{value:+.4f} +- {error:.4f})"
            )
        else:
            ratio = best["jboost"].mean() / best["jboost, L2"].mean()
            said.append(f"the error for {name} is {ratio:.3f} of that of L2")
    return said


def draw(found: dict[str, Any], path) -> None:
    """Draws the error by rounds."""
    figure, (row,) = open_figure(1, len(found), (10, 4))
    for axes, (name, methods) in zip(row, found.items(), strict=True):
        for method, columns in methods.items():
            curve = np.mean(columns["curves"], axis=0)
            rounds = STEP * (1 + np.arange(len(curve)))
            axes.plot(rounds, curve, color=METHODS[method][0], label=method)
        axes.set_title(name)
        axes.set_xlabel("rounds")
    row[0].set_ylabel("error of the fixed part")
    row[-1].legend()
    save_figure(figure, path)


def main() -> None:
    """Compares the methods on all functions."""
    parser = make_parser(__doc__)
    parser.add_argument("--draws", type=int, default=10, help="of each function")
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--size", type=int, default=10, help="rows of a group")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rows", type=int, default=20, help="at least in a leaf")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="GPBoost's")
    options = parser.parse_args()
    methods = [*METHODS]
    if importlib.util.find_spec("gpboost") is None:
        print("GPBoost is not installed and not measured.")
        methods.remove("GPBoost")
    found = compare(methods, options)
    said = report(found)
    draw(found, options.out / "mixed_effects.png")
    print(f"\nFound: {'; '.join(said)}.")
    result = dict(arguments=vars(options), functions=found)
    write_json(options.out / "mixed_effects.json", result | describe_machine())


if __name__ == "__main__":
    main()
