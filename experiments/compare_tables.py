# SPDX-License-Identifier: Apache-2.0
"""Tables and tasks of compare_libraries.py.

In: a folder per table with `data.parquet` and `meta.json` (target, drop_columns,
columns with a role, tasks). Out: training, validation and test rows of a task.

A table may have several targets. "wine_quality" is the one that its meta.json names;
"wine_quality rare" is derived from it as TARGETS says. The column that meta.json names
as the target is never a feature.
"""

import json
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

ROLES = ("weight", "exposure", "group", "init_score", "event", "time")
TARGETS = {  # table and target: (column, how the target is made from it)
    "abalone ages": ("rings", lambda y: 1 * (y > 8) + (y > 10)),
    "abalone old": ("rings", lambda y: y >= 15),
    "ausprivauto amount": ("ClaimAmount", lambda y: y),
    "ausprivauto claim": ("ClaimNb", lambda y: y > 0),
    "ausprivauto severity": ("ClaimAmount", lambda y: y.where(y > 0)),
    "california_housing capped": ("median_house_value", lambda y: y > 500_000),
    "diamonds cut": ("cut", lambda y: y),
    "diamonds dear": ("price", lambda y: y > 14_000),
    "hotel_bookings adr": ("adr", lambda y: y.where(y >= 0)),
    "hotel_bookings paid": ("adr", lambda y: y.where(y > 0)),
    "hotel_bookings requests": ("total_of_special_requests", lambda y: y),
    "randhie visit": ("mdvis", lambda y: y > 0),
    "surv_gbsg2 event": ("event", lambda y: y),
    "surv_gbsg2 nodes": ("pnodes", lambda y: y),
    "surv_rossi arrest": ("arrest", lambda y: y),
    "surv_rotterdam_gbsg event": ("event", lambda y: y),
    "surv_rotterdam_gbsg time": ("time", lambda y: y),
    "wine_quality classes": ("quality", lambda y: y.clip(4, 8)),
    "wine_quality rare": ("quality", lambda y: y >= 8),
}
CONTINUOUS = (
    "abalone", "bike_sharing_hour", "california_housing", "diamonds",
    "hotel_bookings adr", "sk_diabetes", "wine_quality",
)  # fmt: skip
TASKS = {  # task: {kind of loss: tables}
    "squared_error": {"squared_error": (*CONTINUOUS, "lgb_regression")},
    "logistic": {
        "logistic": (
            "abalone old", "adult", "ausprivauto claim", "bank_marketing",
            "california_housing capped", "diamonds dear", "give_me_some_credit",
            "hotel_bookings", "lgb_binary", "phoneme", "randhie visit",
            "sk_breast_cancer", "surv_gbsg2 event", "surv_rossi arrest",
            "surv_rotterdam_gbsg event", "titanic", "wine_quality rare", "xgb_agaricus",
        )
    },
    "softmax": {
        "softmax": (
            "abalone ages", "diamonds cut", "lgb_lambdarank", "lgb_multiclass",
            "sk_digits", "wine_quality classes",
        )
    },
    "poisson": {
        "poisson": (
            "abalone", "ausprivauto", "bike_sharing_hour", "hotel_bookings requests",
            "randhie", "surv_gbsg2 nodes",
        )
    },
    "gamma": {
        "gamma": (
            "ausprivauto severity", "bike_sharing_hour", "california_housing",
            "diamonds", "hotel_bookings paid", "surv_rotterdam_gbsg time",
        )
    },
    "tweedie": {
        "tweedie": (
            "ausprivauto amount", "bike_sharing_hour", "hotel_bookings adr", "randhie",
        )
    },
    "absolute_error": {"absolute_error": CONTINUOUS},
    "quantile": {"quantile 0.1": CONTINUOUS, "quantile 0.9": CONTINUOUS},
    "huber": {"huber": CONTINUOUS},
    "categories": {
        "squared_error": (
            "abalone", "bike_sharing_hour", "california_housing", "diamonds",
            "hotel_bookings adr",
        ),
        "logistic": (
            "adult", "bank_marketing", "hotel_bookings", "surv_gbsg2 event", "titanic",
        ),
        "softmax": ("diamonds cut",),
        "poisson": ("ausprivauto",),
    },
}  # fmt: skip
HALVES = ("choose", "report", "all")
CHOOSE = (  # the tables that defaults were chosen on
    "abalone", "adult", "california_housing", "lgb_binary", "lgb_regression", "phoneme",
    "randhie", "sk_diabetes", "sk_digits", "surv_gbsg2", "surv_rossi", "titanic",
)  # fmt: skip


class Case(NamedTuple):
    """A table, a target and a loss; "categories" is the task with native categories."""

    task: str
    kind: str
    table: str

    @property
    def folder(self) -> str:
        """The name of the table's folder."""
        return self.table.split()[0]


class Rows(NamedTuple):
    """A table, or its training, validation or test part."""

    x: np.ndarray  # [N, F] float32, NaN = missing
    target: np.ndarray  # [N] float32, or int32 classes
    offset: np.ndarray  # [N] float32, all 0 where the table has none
    categorical: tuple[int, ...]  # columns; () if they are to be read as numbers

    def take(self, rows: np.ndarray) -> "Rows":
        """Returns some of the rows."""
        x, target, offset, categorical = self
        return Rows(x[rows], target[rows], offset[rows], categorical)

    def join(self, other: "Rows") -> "Rows":
        """Returns these rows, then those of another part."""
        pairs = zip(self[:3], other[:3], strict=True)
        return Rows(*map(np.concatenate, pairs), self.categorical)


def find_half(folder: str) -> str:
    """Returns the half of a table, the same for all of its targets.

    It depends on nothing but the name: a table does not move when others are added.
    """
    if folder in {case.folder for case in list_cases([*TASKS])}:
        return "choose" if folder in CHOOSE else "report"
    return "choose" if zlib.crc32(folder.encode()) % 2 else "report"


def list_cases(tasks: Sequence[str]) -> list[Case]:
    """Returns the cases of some tasks that TASKS lists."""
    return [
        Case(task, kind, table)
        for task in tasks
        for kind, tables in TASKS[task].items()
        for table in tables
    ]


def find_cases(tables: Path, tasks: Sequence[str]) -> list[Case]:
    """Returns the cases of some tasks whose table is there.

    Tables beyond those of TASKS say in meta.json what they are good for:
    {"tasks": {"quantile": ["quantile 0.9"], ...}}.

    Raises:
      ValueError: a meta.json names a task or a kind of loss that TASKS lacks.
    """
    paths = {path.parent.name: path for path in sorted(tables.glob("*/meta.json"))}
    found = [case for case in list_cases(tasks) if case.folder in paths]
    known = {case.folder for case in list_cases([*TASKS])}
    for name in [name for name in paths if name not in known]:
        listed = json.loads(paths[name].read_text()).get("tasks", {})
        for case in [
            Case(task, kind, name) for task in listed for kind in listed[task]
        ]:
            if case.kind not in TASKS.get(case.task, ()):
                said = {task: [*kinds] for task, kinds in TASKS.items()}
                raise ValueError(f"{paths[name]} has {case}, must be among {said}")
            found += [case] if case.task in tasks else []
    return sorted(found, key=lambda case: tasks.index(case.task))


@lru_cache(maxsize=8)
def load_table(folder: Path, table: str) -> Rows:
    """Returns a whole table; categories become ranks among the sorted ones.

    Rows without a target are left out.
    """
    meta = json.loads((folder / "meta.json").read_text())
    frame = pd.read_parquet(folder / "data.parquet")
    column, make = TARGETS.get(table, (meta["target"], lambda y: y))
    target = make(frame[column])
    frame, target = frame[target.notna()], target[target.notna()]
    if not pd.api.types.is_numeric_dtype(target):
        target = pd.Series(pd.factorize(target.astype(object), sort=True)[0])
    roles = [meta[f"{role}_column"] for role in ROLES if f"{role}_column" in meta]
    own = [meta["target"]] if isinstance(meta["target"], str) else meta["target"]
    gone = {*own, column, *meta["drop_columns"], *roles}
    features = frame[[name for name in frame if name not in gone]]
    coded = meta.get("integer_coded_categoricals", ())
    x = np.empty(features.shape, np.float32)
    categorical = []
    for position, name in enumerate(features):
        values = features[name]
        if name in coded or not pd.api.types.is_numeric_dtype(values):
            codes, _ = pd.factorize(values.astype(object), sort=True)
            values = np.where(codes < 0, np.nan, codes)
            categorical.append(position)
        x[:, position] = values
    exposure = frame[meta["exposure_column"]] if "exposure_column" in meta else 1.0
    offset = np.zeros(len(x), np.float32) + np.log(np.asarray(exposure, np.float32))
    return Rows(x, target.to_numpy(np.float32), offset, tuple(categorical))


def split_table(
    case: Case, tables: Path, split: int, most: int | None = None
) -> tuple[Rows, Rows, Rows]:
    """Returns 64 % training, 16 % validation and 20 % test rows.

    They are drawn from `most` rows at most, with the split as the seed.
    """
    table = load_table(tables / case.folder, case.table)
    order = np.random.default_rng(split).permutation(len(table.x))[:most]
    test, rest = np.split(order, [len(order) // 5])
    validation, train = np.split(rest, [len(rest) // 5])
    target = table.target
    if case.kind == "huber":
        center = np.median(target[train])
        target = target / np.median(np.abs(target[train] - center))
    if case.kind == "softmax":
        target = (target - target.min()).astype(np.int32)
    offset = table.offset
    if case.kind not in ("poisson", "tweedie"):  # sums over an exposure
        offset = np.zeros_like(offset)
    categorical = table.categorical if case.task == "categories" else ()
    rows = Rows(table.x, target, offset, categorical)
    return rows.take(train), rows.take(validation), rows.take(test)
