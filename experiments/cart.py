# SPDX-License-Identifier: Apache-2.0
"""How large should a single regression tree be, and is it the one scikit-learn grows?

The first part compares jb.cart.fit_tree with scikit-learn on this table and on
generated ones: the ratio of times (median of alternating runs), and whether both
find the same tree: the same number of nodes, the same values for the training rows, and
the same alphas of weakest-link pruning. scikit-learn breaks ties between splits of
equal gain at random. This changes neither values nor alphas if every column separates
the rows, but it may in tables with few distinct values.

The second part grows one tree without a limit, chooses alpha by cross-validation, and
draws the error against the number of leaves: on the training rows, cross-validated,
and on held-out rows, with the best alpha and with that of the one-standard-error rule
(Breiman et al. 1984).

    python experiments/cart.py
    python experiments/cart.py --data FILE --target COLUMN

Without --data the table is Friedman's first function of ten uniform variables, five of
them without effect, plus noise of variance 1, so that no tree can have an error below
1. Written to --out: a PNG, and a JSON with all numbers, the versions and the device.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from compare_losses import Table, load_table, split_rows
from experiment_tools import (
    BLACK,
    BLUE,
    GRAY,
    ORANGE,
    describe_machine,
    make_parser,
    open_figure,
    save_figure,
    write_json,
)
from sklearn.tree import DecisionTreeRegressor
from tqdm import tqdm

import jboost as jb

TRAINING, VALIDATED, HELD_OUT = GRAY, BLUE, ORANGE


def make_friedman(num_rows: int, seed: int) -> Table:
    """Returns 10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4 + noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(num_rows, 10)).astype(np.float32)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y += 10 * x[:, 3] + 5 * x[:, 4] + rng.normal(size=num_rows)
    return Table("friedman1", x, y.astype(np.float32))


# ---- against scikit-learn ------------------------------------------------------------


def make_cases(table: Table, options: argparse.Namespace) -> list[dict]:
    """Returns the cases to time."""
    rng = np.random.default_rng(options.seed)
    cases = [{"name": table.name, "x": table.x, "y": table.target}]
    sizes = [(1000, 10), (20_000, 8), (100_000, 20)]
    for num_rows, num_columns in sizes:
        x = rng.normal(size=(num_rows, num_columns)).astype(np.float32)
        y = x[:, 0] + np.sin(3 * x[:, 1]) + rng.normal(size=num_rows)
        shape = {"name": f"{num_rows:,} x {num_columns}", "x": x, "y": y}
        cases += [shape | {"max_depth": 6}, shape]
        if num_rows == 20_000:
            missing = np.where(rng.uniform(size=x.shape) < 0.1, np.float32(np.nan), x)
            weights = rng.uniform(0.5, 2, num_rows)
            cases.append(shape | {"name": f"{shape['name']}, weights", "w": weights})
            cases.append(shape | {"name": f"{shape['name']}, missing", "x": missing})
    return cases


def fit_jboost(case: dict) -> jb.cart.RegressionTree:
    """Returns jboost's tree."""
    depth, weights = case.get("max_depth"), case.get("w")
    return jb.cart.fit_tree(
        case["x"], case["y"], sample_weight=weights, max_depth=depth
    )


def fit_sklearn(case: dict) -> DecisionTreeRegressor:
    """Returns scikit-learn's tree."""
    tree = DecisionTreeRegressor(max_depth=case.get("max_depth"), random_state=0)
    return tree.fit(case["x"], case["y"], sample_weight=case.get("w"))


def time_call(function: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def compare(case: dict, repeats: int, bar: tqdm) -> dict:
    """Returns times and differences of the libraries in one case."""
    bar.set_description(case["name"])
    mine, its = fit_jboost(case), fit_sklearn(case)
    times: dict[str, list] = {"jboost": [], "sklearn": []}
    for _ in range(repeats):
        times["jboost"].append(time_call(lambda: fit_jboost(case)))
        times["sklearn"].append(time_call(lambda: fit_sklearn(case)))
        bar.update()
    ratios = [a / b for a, b in zip(times["jboost"], times["sklearn"], strict=True)]
    scores = np.asarray(jb.predict(mine, case["x"]), np.float64)
    difference = np.abs(scores - its.predict(case["x"])).max()
    return {
        "name": case["name"],
        "max_depth": case.get("max_depth"),
        "seconds": statistics.median(times["jboost"]),
        "ratio": statistics.median(ratios),
        "times": times,
        "num_nodes": mine.num_nodes,
        "same_size": mine.num_nodes == its.tree_.node_count,
        "difference": difference / np.std(case["y"]),
        "alphas": compare_alphas(case, mine),
    }


def compare_alphas(case: dict, tree: jb.cart.RegressionTree) -> float | None:
    """Returns the largest relative difference of alphas; None for large tables.

    scikit-learn divides alphas by the number of rows, and lists ties one by one.
    """
    if tree.num_leaves > 1500:
        return None
    peer = DecisionTreeRegressor(max_depth=case.get("max_depth"), random_state=0)
    path = peer.cost_complexity_pruning_path(
        case["x"], case["y"], sample_weight=case.get("w")
    )
    mine = jb.cart.pruning_path(tree).alphas / tree.weight[0]

    # Each alpha must be close to one of the other library.
    def miss(some, others):
        near = np.abs(some[:, None] - others[None, :]).min(axis=1)
        return float((near / others.max()).max())

    return max(miss(mine, path.ccp_alphas), miss(path.ccp_alphas, mine))


def print_comparison(rows: list[dict]) -> None:
    """Prints times and differences."""
    print(
        f"\n{'table':<24}{'depth':>6}{'nodes':>9}{'seconds':>9}{'/ sklearn':>11}"
        f"{'same size':>11}{'values':>9}{'alphas':>9}"
    )
    for row in rows:
        alphas = "-" if row["alphas"] is None else f"{row['alphas']:.0e}"
        print(
            f"{row['name']:<24}{row['max_depth'] or 'full':>6}{row['num_nodes']:>9,}"
            f"{row['seconds']:>9.4f}{row['ratio']:>11.2f}"
            f"{'yes' if row['same_size'] else 'no':>11}{row['difference']:>9.0e}"
            f"{alphas:>9}"
        )
    print("values, alphas: largest difference, over that of the target, of the alphas")


# ---- the size of a tree --------------------------------------------------------------


def measure_sizes(table: Table, options: argparse.Namespace) -> dict:
    """Returns errors of all subtrees: training, cross-validated, held out."""
    train, test = split_rows(len(table.x), [options.seed], options.test_share)
    x, y = table.x[train], table.target[train]
    choice = jb.cart.cross_validate_alpha(
        x, y, folds=options.folds, seed=options.seed,
        min_child_samples=options.min_child_samples,
    )  # fmt: skip
    training = jb.cart.pruning_path(choice.tree).squared_error / len(train)
    held_out = np.full(len(choice.alphas), np.nan)
    # Measuring all alphas would take long, and the picture could not show them.
    shown = np.unique(np.geomspace(1, len(choice.alphas), 60).round().astype(int))
    best, one_se = (
        list(choice.alphas).index(alpha)
        for alpha in (choice.best_alpha, choice.one_se_alpha)
    )
    shown = np.union1d(len(choice.alphas) - shown, [best, one_se])
    for i in tqdm(shown, desc="pruning", unit="tree"):
        tree = jb.cart.prune(choice.tree, choice.alphas[i])
        scores = np.asarray(jb.predict(tree, table.x[test]))
        held_out[i] = np.mean((scores - table.target[test]) ** 2)
    return {
        "rows": [len(train), len(test)],
        "num_leaves": choice.num_leaves,
        "alphas": choice.alphas,
        "training": training,
        "mean_error": choice.mean_error,
        "standard_error": choice.standard_error,
        "held_out": held_out,
        "best": best,
        "one_se": one_se,
    }


def print_sizes(sizes: dict, name: str) -> None:
    """Prints the trees of the best alpha and of the one-standard-error rule."""
    train, test = sizes["rows"]
    print(
        f"\n{name}: {train:,} training rows, {test:,} held out; mean squared errors\n"
    )
    print(
        f"{'tree':<20}{'alpha':>11}{'leaves':>8}{'training':>11}"
        f"{'cross-validated':>21}{'held out':>11}"
    )
    chosen = {
        "not pruned": 0, "best alpha": sizes["best"],
        "one standard error": sizes["one_se"], "root": len(sizes["alphas"]) - 1,
    }  # fmt: skip
    for label, i in chosen.items():
        validated = f"{sizes['mean_error'][i]:.4g} +- {sizes['standard_error'][i]:.2g}"
        print(
            f"{label:<20}{sizes['alphas'][i]:>11.4g}{sizes['num_leaves'][i]:>8,}"
            f"{sizes['training'][i]:>11.4g}{validated:>21}{sizes['held_out'][i]:>11.4g}"
        )


def plot_sizes(sizes: dict, title: str, path: Path) -> None:
    """Draws errors against leaves, and leaves against alpha."""
    figure, [[axis, second]] = open_figure(1, 2, (11, 4.6), width_ratios=[1.7, 1])
    leaves, mean = sizes["num_leaves"], sizes["mean_error"]
    spread = sizes["standard_error"]
    seen = np.isfinite(sizes["held_out"])
    axis.plot(leaves, sizes["training"], ":", color=TRAINING, lw=2, label="training")
    axis.plot(leaves, mean, color=VALIDATED, lw=2, label="cross-validated")
    axis.fill_between(
        leaves, mean - spread, mean + spread, color=VALIDATED, alpha=0.15, lw=0,
        label="+- one standard error",
    )  # fmt: skip
    axis.plot(
        leaves[seen], sizes["held_out"][seen], "--", color=HELD_OUT, lw=2,
        label="held out",
    )  # fmt: skip
    best = sizes["best"]
    axis.axhline(
        mean[best] + spread[best], color=VALIDATED, lw=0.8, ls=(0, (4, 4)),
        label="least + one standard error",
    )  # fmt: skip
    second.step(sizes["alphas"][1:-1], leaves[1:-1], color=BLACK, lw=1.5)
    for label, marker in (("best", "o"), ("one_se", "s")):
        i = sizes[label]
        name = "best alpha" if label == "best" else "one-standard-error rule"
        text = f"{name}: {leaves[i]:,} leaves"
        style = {"marker": marker, "ms": 9, "mfc": "white", "mew": 2, "ls": "none"}
        axis.plot(leaves[i], mean[i], color=VALIDATED, label=text, **style)
        if np.isfinite(sizes["alphas"][i]):
            second.plot(sizes["alphas"][i], leaves[i], color=VALIDATED, **style)
    axis.set(xscale="log", xlabel="leaves", ylabel="mean squared error")
    axis.set_ylim(0, 1.05 * max(mean.max(), np.nanmax(sizes["held_out"])))
    second.set(xscale="log", yscale="log", xlabel="alpha", ylabel="leaves")
    figure.suptitle(title, fontsize=12)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, path)


def conclude(rows: list[dict], sizes: dict) -> str:
    """Returns the result in one sentence."""
    said = []
    if rows:
        alike = sum(row["same_size"] for row in rows)
        ratios = [row["ratio"] for row in rows]
        said.append(
            f"{alike} of {len(rows)} trees have the size of scikit-learn's, in "
            f"{min(ratios):.2f} to {max(ratios):.2f} times its time"
        )
    i = sizes["best"]
    said.append(
        f"the best alpha leaves {sizes['num_leaves'][i]:,} of "
        f"{sizes['num_leaves'][0]:,} leaves, and a held-out error of "
        f"{sizes['held_out'][i]:.4g} instead of {sizes['held_out'][0]:.4g}"
    )
    return f"Found: {'; '.join(said)}."


def parse_options() -> argparse.Namespace:
    """Returns the options of the command line, checked."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="CSV or parquet file (default: generated)")
    add("--target", help="the column to predict, with --data")
    add("--rows", type=int, default=4000, help="of the generated table")
    add("--folds", type=int, default=10)
    add(
        "--min-child-samples",
        type=int,
        default=1,
        help="minimum rows of a leaf, for the sizes",
    )
    add("--test-share", type=float, default=0.5)
    add("--repeats", type=int, default=5, help="alternating runs; 0: no comparison")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if (options.data is None) != (options.target is None):
        parser.error("--data and --target go together")
    if not 0 < options.test_share < 1 or options.folds < 2 or options.repeats < 0:
        parser.error("--test-share must lie in (0, 1), --folds >= 2, --repeats >= 0")
    return options


def main() -> None:
    """Compares, measures sizes, prints tables, and writes the PNG and the JSON."""
    options = parse_options()
    if options.data is None:
        table = make_friedman(options.rows, options.seed)
    else:
        table = load_table(options.data, options.target)
    rows = []
    if options.repeats:
        cases = make_cases(table, options)
        with tqdm(total=len(cases) * options.repeats, unit="run") as bar:
            rows = [compare(case, options.repeats, bar) for case in cases]
        print_comparison(rows)
    sizes = measure_sizes(table, options)
    print_sizes(sizes, table.name)
    print(f"\n{conclude(rows, sizes)}")
    result = {
        "arguments": vars(options),
        **describe_machine(),
        "comparison": rows,
        "sizes": sizes,
    }
    write_json(options.out / f"cart_{table.name}.json", result)
    train, test = sizes["rows"]
    title = f"{table.name}: one tree, {train:,} training rows, {test:,} held out"
    plot_sizes(sizes, title, options.out / f"cart_{table.name}.png")


if __name__ == "__main__":
    main()
