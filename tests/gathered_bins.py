# SPDX-License-Identifier: Apache-2.0
"""What test_gathering.py runs in each process."""

import numpy as np
import pandas as pd
from ordered_rows import ENDS, find_bins

from jboost.codes.binning import fit_frame
from jboost.codes.gathering import unite_frames
from jboost.entry.exchanges import (
    use_processes,
)
from jboost.tables.frames import Frame, read_frame

CASES = {
    "numbers": dict(weighted=False),
    "weights": dict(weighted=True),
    "categories": dict(weighted=True, categorical=[3]),
}
SHARES = {1: (1.0,), 3: (0.2, 0.8, 0.0)}


def make_rows(num_rows, seed=0):
    """Numbers with ties, missing values and categories; weights, some of them 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 5)).astype(np.float32)
    x[:, 1] = np.round(x[:, 1])
    x[rng.random(num_rows) < 0.1, 2] = np.nan
    x[:, 3] = rng.integers(0, 40, num_rows) ** 2 // 50
    x[:, 4] = 7
    return x, rng.choice([0, 1, 0.1, 2.5], num_rows)


def fit(rank, count, num_rows, options):
    """Fits bins to the share of this process; returns arrays."""
    x, weight = make_rows(num_rows)
    ends = np.round(np.cumsum((0, *SHARES[count])) * num_rows).astype(int)
    part = slice(*ends[rank : rank + 2])
    options = {"categorical": None, "max_bins": 64, **options}
    if options.pop("weighted"):
        options["sample_weight"] = weight[part]
    with use_processes(True):
        bins = fit_frame(
            Frame(x[part]), **{"sample_weight": None, "absent": None, **options}
        )
    codes = None if bins.categories is None else np.asarray(bins.categories.codes)
    return np.asarray(bins.thresholds), bins.absent, codes


def disagree(rank, what):
    """Returns the error that each process raises; only process 1 does what is wrong."""
    x, weight = make_rows(50)
    options = dict(max_bins=8, sample_weight=weight, absent=None, categorical=None)
    if rank == 1 and what == "columns":
        x = x[:, :3]
    if rank == 1 and what == "weights":
        options["sample_weight"] = weight[:7]
    if what == "categories":
        options["categorical"] = [0] if rank == 1 else [3]
        x = np.abs(x) if rank == 1 else x
    try:
        with use_processes(True):
            frame = unite_frames(read_frame(x, "x"), None)
            fit_frame(frame, **options)
    except ValueError as error:
        return str(error)
    return None


def make_frame(num_rows):
    """Returns strings, declared levels, and numbers with gaps or as categories."""
    rng = np.random.default_rng(1)
    words = np.array([f"w{i}" for i in range(30)], object)
    levels = rng.choice([3, 1, 8], num_rows)
    levels[: num_rows // 3] = 1
    return pd.DataFrame(
        {
            "words": words[np.minimum(rng.geometric(0.1, num_rows), 29)],
            "declared": pd.Categorical(
                rng.choice(["b", "a", None], num_rows), ["c", "b", "a"]
            ),
            "numbers": np.where(rng.random(num_rows) < 0.1, np.nan, 2.5),
            "levels": pd.Categorical(levels),
            "late": np.where(np.arange(num_rows) < num_rows // 2, None, "x"),
        }
    )


def unite(rank, count, num_rows, numbers_on=None, known_rows=0):
    """Returns the share of this process, with the categories of all processes.

    Those of the first rows may be known already, from a model.
    """
    schema = None
    if known_rows:
        schema = read_frame(make_frame(num_rows)[:known_rows], "x", categorical=True)
        schema = schema.schema
    ends = np.round(np.cumsum((0, *SHARES[count])) * num_rows).astype(int)
    table = make_frame(num_rows).iloc[slice(*ends[rank : rank + 2])]
    if rank == numbers_on:
        table = table.assign(words=1.5)
    frame = read_frame(
        table, "x", schema=schema, categorical=True, extend=True, least_rows=0
    )
    try:
        with use_processes(True):
            frame = unite_frames(frame, frame.names, schema)
    except ValueError as error:
        return str(error)
    return frame.matrix, frame.categories


def run_all(rank, count):
    """Returns what one of so many processes finds, and its errors, by name."""
    found = {case: fit(rank, count, 3000, CASES[case]) for case in CASES}
    found["frames"] = unite(rank, count, 300)
    found["frames of a model"] = unite(rank, count, 300, known_rows=200)
    for what in ("columns", "weights", "categories"):
        found["wrong " + what] = disagree(rank, what)
    found["wrong frames"] = unite(rank, count, 300, 1)
    found["sketches"] = find_bins(rank, ENDS)
    return found
