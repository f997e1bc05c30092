# SPDX-License-Identifier: Apache-2.0
"""Does jboost reproduce the textbook's worked examples, number for number?

There are three small tables: rents boosted with absolute error and with squared error
(stumps, learning rate 1), and grades boosted with squared error (learning rate 0.1) on
trees with given leaves. All numbers are computed, except data and headings:

    python experiments/worked_examples.py

The settings are those of Friedman's classical methods: with `curvature="unit"` trees
fit the negative gradient by least squares, and with l2 = 0 leaf values are not shrunk:
they are medians for absolute error and means for squared error.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from experiment_tools import describe_machine, make_parser, write_json

import jboost as jb

SQUARE_FEET = np.array([[750.0], [800.0], [850.0], [900.0], [950.0]])
RENT = np.array([1160.0, 1200.0, 1280.0, 1450.0, 2000.0])

GRADE = np.array([90.0, 55.0, 84.0, 64.0, 78.0, 67.0])
# Each student's leaf in tree 1, {1,3,5} {2} {4} {6}, and in tree 2, {1,3,5} {2} {4,6}.
LEAVES = np.array([[0, 0], [1, 1], [0, 0], [2, 2], [0, 0], [3, 2]], np.float32)
NEW_STUDENT = np.array([[0, 0]], np.float32)  # falls in {1,3,5} of both trees

CLASSICAL = {"curvature": "unit", "l2": 0.0, "min_child_weight": 0.0}
CLASSICAL["min_child_samples"] = 1


def format_row(name: str, values: np.ndarray, digits: int = 0, tail: str = "") -> str:
    """Returns one line of a table, with `digits` after the point."""
    return f"{name:<24}" + "".join(f"{v:9.{digits}f}" for v in values) + tail


def format_errors(score: np.ndarray) -> str:
    """Returns MSE and MAE of rents as the end of a line."""
    residual = RENT - score
    return f"{np.mean(residual**2):12.1f}{np.mean(np.abs(residual)):9.1f}"


def find_leaf_error(leaves: np.ndarray, residual: np.ndarray, values, center) -> float:
    """Returns the difference of leaf values to NumPy's centers of residuals."""
    expected = np.array([center(residual[leaves == leaf]) for leaf in leaves])
    return float(np.abs(values - expected).max())


def print_rent(
    heading: str, loss: Callable, name: str, direction: Callable, center: Callable
) -> float:
    """Prints scores, gradients and trees of three rounds of stumps.

    Returns the largest difference of a leaf value to the center of its residuals.
    """
    settings = dict(num_rounds=3, learning_rate=1.0, max_depth=1, **CLASSICAL)
    model, _ = jb.fit(SQUARE_FEET, RENT, loss, **settings)
    stages = np.asarray(jb.staged_predict(model, SQUARE_FEET), np.float64)
    score = np.full(len(RENT), float(model.init_score))
    print(f"\n{heading}\n")
    print(format_row("square feet", SQUARE_FEET[:, 0]) + f"{'MSE':>12}{'MAE':>9}")
    print(format_row("rent", RENT))
    print(format_row("F_0", score, 1, format_errors(score)))
    errors = []
    for number, after in enumerate(stages, start=1):
        threshold = float(model.threshold[number - 1, 0, 0])
        print(format_row(f"{name} at F_{number - 1}", direction(RENT - score), 1))
        print(format_row(f"tree {number}, split at {threshold:g}", after - score, 1))
        print(format_row(f"F_{number}", after, 1, format_errors(after)))
        leaves = (SQUARE_FEET[:, 0] <= threshold).astype(int)
        errors.append(find_leaf_error(leaves, RENT - score, after - score, center))
        score = after
    return max(errors)


def fit_given_leaves(leaves: np.ndarray, target: np.ndarray) -> jb.Ensemble:
    """Fits one tree per column of `leaves`, with these leaves.

    The number of the leaf is the only feature that a tree sees (code 0 would be a
    missing value), and 3 levels of splits separate 4 numbers.
    """
    loss = jb.losses.squared_error
    bins = jb.fit_bins(leaves)
    binned = jb.apply_bins(bins, leaves)
    state = jb.init(binned, target, loss, jax.random.key(0))
    trees = []
    for column in range(leaves.shape[1]):
        visible = jnp.where(jnp.arange(leaves.shape[1]) == column, binned, 0)
        state, tree = jb.boost_step(
            state, visible, target, loss, learning_rate=0.1, max_depth=3, **CLASSICAL
        )
        trees.append(tree)
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)
    return jb.to_ensemble(jb.BoostedTrees(stacked, state.init_score), bins)


def print_grades() -> float:
    """Prints residuals, leaf values and scores of two trees with given leaves.

    Returns the largest difference of a leaf value to the mean of its residuals.
    """
    model = fit_given_leaves(LEAVES, GRADE)
    score = np.full(len(GRADE), float(model.init_score))
    print("\nGrades, squared error, learning rate 0.1, leaves given\n")
    print(f"{'student':<24}" + "".join(f"{i:9d}" for i in range(1, 7)))
    print(format_row("grade", GRADE))
    print(format_row("F_0", score))
    stages = np.asarray(jb.staged_predict(model, LEAVES), np.float64)
    errors = []
    for number, after in enumerate(stages, start=1):
        print(format_row(f"residual at F_{number - 1}", GRADE - score, 3))
        print(format_row(f"tree {number}, times 0.1", after - score, 3))
        print(format_row(f"F_{number}", after, 3))
        leaves = LEAVES[:, number - 1]
        values = (after - score) / 0.1
        errors.append(find_leaf_error(leaves, GRADE - score, values, np.mean))
        score = after
    new = float(jb.predict(model, NEW_STUDENT)[0])
    print(f"\na new student in leaf {{1,3,5}} of both trees: {new:.2f}")
    return max(errors)


def main() -> None:
    """Prints the three tables, and their differences to medians and means."""
    options = make_parser(__doc__).parse_args()
    absolute, squared = jb.losses.absolute_error, jb.losses.squared_error
    errors = {
        "medians": print_rent(
            "Rent, absolute error", absolute, "signs", np.sign, np.median
        ),
        "means": print_rent(
            "Rent, squared error", squared, "residuals", np.array, np.mean
        ),
        "means of grades": print_grades(),
    }
    said = ", ".join(f"{value:.1g} ({name})" for name, value in errors.items())
    print(f"\nFound: leaf values differ from NumPy's by at most {said}.")
    result = {**describe_machine(), "largest_differences": errors}
    write_json(options.out / "worked_examples.json", result)


if __name__ == "__main__":
    main()
