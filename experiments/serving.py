# SPDX-License-Identifier: Apache-2.0
"""How long does a call of ``predict`` take, and what do linear leaves cost?

    python experiments/serving.py

Models have 28 features and trees of depth 6. Calls go from a float32 NumPy matrix to a
NumPy array, and their times are medians. Linear and constant leaves take turns.

Written to --out: serving.json.
"""

import statistics
import time
from functools import partial

import jax
import numpy as np
import pandas as pd
from experiment_tools import (
    describe_machine,
    make_figures,
    make_parser,
    print_table,
    write_json,
)
from tqdm import tqdm

import jboost as jb

FEATURES = 28
SIZES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
MOST_SECONDS = 2.0  # of the calls of one kind
FEW, MANY = 4, 24  # rounds whose difference is the time of a tree


def main():
    """Times all calls."""
    options = make_parser(__doc__).parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SIZES[-1], FEATURES)).astype(np.float32)
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + rng.normal(size=len(x))
    parts = {"calls": time_sizes, "extras": time_extras, "leaves": compare_leaves}
    tables = {name: part(x, y) for name, part in tqdm(parts.items())}
    for table in tables.values():
        print_table(table)
    one, *_, many = tables["calls"][1:]
    print(f"Found: a call takes {one[1]} for one row, {many[2]} a row for {many[0]}.")
    result = {**describe_machine(), "figures": make_figures(**tables)}
    write_json(options.out / "serving.json", result)


def train(x, y, rounds=100, linear=True):
    """Returns a model of some of the rows."""
    model, _ = jb.fit(
        x[:20_000], y[:20_000], jb.losses.squared_error, num_rounds=rounds, max_depth=6,
        linear_leaves=linear,
    )  # fmt: skip
    return model


def time_calls(*calls):
    """Returns the median seconds of each call; they take turns."""
    readings = [[] for _ in calls]
    for call in calls:
        call()  # compiles
    begun = time.perf_counter()
    while time.perf_counter() - begun < MOST_SECONDS or len(readings[0]) < 5:
        for call, own in zip(calls, readings, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in readings]


def predict(model, x, **settings):
    """Returns scores as a NumPy array."""
    return np.asarray(jb.predict(model, x, **settings))


def time_sizes(x, y):
    """Returns the table of calls by their number of rows."""
    model = train(x, y)
    rows = [["rows", "time of a call", "per row", '`implementation="xla"`']]
    for size in SIZES:
        part = x[:size]
        (took,) = time_calls(partial(predict, model, part))
        plain = ""
        if size <= 100_000:
            (seconds,) = time_calls(partial(predict, model, part, implementation="xla"))
            plain = show(seconds)
        rows.append([f"{size:,}", show(took), show(took / size), plain])
    return rows


def time_extras(x, y):
    """Returns what a call for one row takes in other ways."""
    model, one = train(x, y), x[:1]
    names = [f"f{i}" for i in range(FEATURES)]
    framed, _ = jb.fit(
        pd.DataFrame(x[:5000], columns=names), y[:5000], jb.losses.squared_error,
        num_rounds=100, max_depth=6,
    )  # fmt: skip
    fixed = jax.jit(jb.predict)
    took = time_calls(
        partial(predict, model, one),
        lambda: np.asarray(fixed(model, one)),
        partial(predict, model, one, inverse_link=jax.nn.sigmoid),
        partial(predict, framed, pd.DataFrame(one, columns=names)),
    )
    labels = ("`predict`", "`jax.jit(predict)`", "`inverse_link`", "a data frame")
    cells = [[label, show(each)] for label, each in zip(labels, took, strict=True)]
    return [["one row by", "time of a call"], *cells]


def compare_leaves(x, y):
    """Returns the time of linear leaves divided by that of constant ones."""
    rows = [["what", "linear / constant leaves"]]
    models = [train(x, y, linear=linear) for linear in (True, False)]
    for label, size in (("predict one row", 1), ("predict 1,000,000 rows", SIZES[-1])):
        linear, constant = time_calls(*(partial(predict, m, x[:size]) for m in models))
        rows.append([label, f"{linear / constant:.2f}"])
    took = time_calls(
        *(
            partial(
                jb.fit, x, y, jb.losses.squared_error, num_rounds=rounds, max_depth=6,
                linear_leaves=linear,
            )
            for linear in (True, False)
            for rounds in (FEW, MANY)
        )
    )  # fmt: skip
    ratio = (took[1] - took[0]) / (took[3] - took[2])
    return [*rows, ["train a tree, 1,000,000 x 28", f"{ratio:.2f}"]]


def show(seconds):
    """Returns a time with two digits and its unit."""
    units = {1: "s", 1e3: "ms", 1e6: "µs"}
    factor = next((f for f in units if seconds * f >= 1), 1e6)
    return f"{float(f'{seconds * factor:.2g}'):g} {units[factor]}"


if __name__ == "__main__":
    main()
