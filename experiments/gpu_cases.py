# SPDX-License-Identifier: Apache-2.0
"""What ``gpu.py`` measures: sizes, parts with their time, and targets.

Out: ``PARTS`` in the order in which they are measured, and ``list_rows``, the rows of
the table.
"""

from typing import NamedTuple


class Sizes(NamedTuple):
    """How much is measured.

    Attributes:
      rows, features, depth: of the main table and its trees.
      rounds: the two numbers of rounds of a slope.
      turns: readings of each.
      wide: rows and features of the large table.
      wide_rounds: the two numbers of rounds there.
      models, model_rows, model_rounds: of the models side by side.
      trees: of the model that predicts.
      bit_rows, bit_rounds: where bits are compared.
      fit_rounds: of ``fit`` on NumPy arrays.
      copied: bytes copied to measure the memory's speed.
    """

    rows: int = 1_000_000
    features: int = 28
    depth: int = 6
    rounds: tuple[int, int] = (10, 60)
    turns: int = 5
    wide: tuple[int, int] = (10_000_000, 100)
    wide_rounds: tuple[int, int] = (2, 12)
    models: int = 64
    model_rows: int = 100_000
    model_rounds: int = 10
    trees: int = 500
    bit_rows: int = 100_000
    bit_rounds: int = 20
    fit_rounds: int = 100
    copied: int = 2**30


QUICK = Sizes(
    rows=20_000, depth=2, rounds=(3, 33), turns=2, wide=(50_000, 40),
    wide_rounds=(2, 12),
    models=4, model_rows=2_000, model_rounds=3, trees=20, bit_rows=5_000, bit_rounds=5,
    fit_rounds=5, copied=2**22,
)  # fmt: skip


FULL = Sizes()


class Part(NamedTuple):
    """What one process measures.

    Attributes:
      title: beside the progress bar.
      seconds: that it takes, as a guess for the progress bar.
      limit: seconds after which it is killed, in a run of ``SECONDS``. Its figures so
        far are kept.
    """

    title: str
    seconds: int
    limit: int


PARTS = {
    "device": Part("the device", 10, 60),
    "tests": Part("the tests", 75, 90),
    "train": Part("training", 60, 100),
    "operations": Part("single operations", 40, 80),
    "peers": Part("training, with the peers", 30, 80),
    "predict": Part("prediction", 30, 60),
    "many": Part("many models", 35, 80),
    "bits": Part("bits", 40, 70),
    "wide": Part("the large table", 60, 110),
    "plain": Part("training in plain XLA", 40, 80),
    "user": Part("fits from NumPy arrays", 200, 240),
}
SECONDS, QUICK_SECONDS = 660, 220  # of a whole run
TESTS = (
    "test_cuda*.py", "test_histogram.py", "test_splitting.py", "test_tree.py",
    "test_reproducible.py", "test_boosting.py", "test_ensemble.py", "test_leaves.py",
)  # fmt: skip


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      label: in the table and in the picture.
      part, figure: where its number is.
      reach, aim: targets; lower is better. None: there is none.
      form: how the number is written.
    """

    label: str
    part: str
    figure: str
    reach: float | None = None
    aim: float | None = None
    form: str = ".2f"


def list_rows(sizes: Sizes) -> list[Row]:
    """Returns the rows; times have targets for full sizes only."""
    table = f"{sizes.rows:,} x {sizes.features}"
    wide = "{:,} x {}".format(*sizes.wide)
    deep = f"depth {sizes.depth}"
    many = f"{sizes.models} models of {sizes.model_rows:,} x {sizes.features}"
    rows = [
        Row(f"{table}, {deep}, ms a tree", "train", "train_ms", 2.5, 0.9),
        Row(f"{wide}, {deep}, ms a tree", "wide", "wide_ms", 40, 20, ".1f"),
        Row(f"predict {table}, {sizes.trees} trees of {deep}, ms",
            "predict", "predict_ms", 15, 5),
        Row(f"to XGBoost, {table}, a tree", "peers", "xgboost_ratio", 1.0, 0.6),
        Row(f"to XGBoost, {wide}, a tree", "wide", "wide_xgboost_ratio", 1.0, 0.6),
        Row("custom loss to the equal built-in, a tree", "train", "own_ratio",
            1.02, 1.0, ".3f"),
        Row(f"{many}, side by side, to in turn", "many", "many_ratio", 0.5, 0.2),
    ]  # fmt: skip
    if sizes != FULL:
        none = dict(reach=None, aim=None)
        rows = [r._replace(**none) if r.figure.endswith("_ms") else r for r in rows]
    return rows


def list_others(sizes: Sizes) -> list[Row]:
    """Returns figures without targets."""
    table, tenth = f"{sizes.rows:,} x {sizes.features}", sizes.trees // 10
    return [
        Row("copying in the device's memory, GB/s", "device", "copy_gb_per_s"),
        Row("histogram at the root, 10^9 cells/s", "operations", "root_gcells_per_s"),
        Row("the same without work per row, 10^9 cells/s", "operations",
            "cell_gcells_per_s"),
        Row(f"{table} in plain XLA, ms a tree", "plain", "xla_ms"),
        Row(f"{table}, a custom loss, ms a tree", "train", "own_ms"),
        Row(f"XGBoost, {table}, ms a tree", "peers", "xgboost_ms"),
        Row(f"LightGBM, {table}, ms a tree", "peers", "lightgbm_ms"),
        Row("XGBoost, large table, ms a tree", "wide", "wide_xgboost_ms"),
        Row(f"predict {table}, {tenth} trees, ms", "predict", "predict_tenth_ms"),
        Row(f"predict {table}, {sizes.trees} trees with XGBoost, ms", "predict",
            "predict_xgboost_ms"),
        Row("models side by side, ms", "many", "side_by_side_ms"),
        Row(f"predict {table} from NumPy, s", "user", "predict_numpy_s", form=".3f"),
        Row("predict one row, microseconds", "user", "predict_row_us", 100, 30, ".1f"),
        Row("SHAP values of 5,000 rows, s", "user", "shap_s", form=".3f"),
        Row("cross_validate, 100,000 rows, first, s", "user",
            "cross_validate_first_s"),
        Row("the same again, s", "user", "cross_validate_s"),
        Row("fit to boost, logistic", "user", "fit_to_boost", 1.3),
        Row("fit with CUDA graphs to that without, logistic", "user",
            "graphs_to_none"),
        Row("import of jax and jboost, s", "user", "import_s"),
    ]  # fmt: skip
