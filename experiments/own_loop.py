# SPDX-License-Identifier: Apache-2.0
"""Times loops of one's own against ``jboost.fit``, per round.

The loops are those of docs/own-loop.md: DART, AdaBoost, Nesterov momentum. Each is run
for few and for many rounds, in turn with ``fit`` of the same depth; what more rounds
take, divided by their number, is the time of a round. Prints medians and their ratio.
"""

import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from experiment_tools import describe_machine, make_parser, write_json

import jboost as jb

PAGE = Path(__file__).parent.parent / "docs" / "own-loop.md"
SIZES = ((100_000, 28), (5_000, 10))
FEW, MANY = 5, 45


def read_page(x, y):
    """Returns the functions of the page, on these data; its examples do not run."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.M)
    bins = jb.fit_bins(x)
    codes = jb.parts.prepare_codes(jb.apply_bins(bins, x))
    names = dict(
        jax=jax, jnp=jnp, np=np, jb=jb, x=x, y=jnp.asarray(y), bins=bins, codes=codes
    )
    for block in blocks[1:-1]:
        exec(re.split(r"\n\n\n(?=label|trees)", block)[0], names)
    return names


def make_runs(names, x, y):
    """{algorithm: (its loop, fit with the same depth)}, each of a number of rounds."""
    label, key = (y > 0).astype(np.float32), jax.random.key(0)
    codes, targets, signs = names["codes"], names["y"], jnp.asarray(2 * label - 1)

    def fit(target, loss, **settings):
        def run(rounds):
            return jb.fit(x, target, loss, num_rounds=rounds, **settings)

        return run

    squared = jb.losses.squared_error
    return {
        "DART": (
            lambda rounds: names["dart"](codes, targets, key, 0.1, rounds),
            fit(y, squared, max_depth=4, learning_rate=0.3),
        ),
        "AdaBoost": (
            lambda rounds: names["adaboost"](codes, signs, rounds),
            fit(label, jb.losses.logistic, max_depth=1),
        ),
        "Nesterov": (
            lambda rounds: names["accelerate"](codes, targets, key, rounds),
            fit(y, squared, max_depth=4, learning_rate=0.1),
        ),
    }


def time_round(run, clock):
    """Returns the seconds of one more round."""
    seconds = []
    for rounds in (FEW, MANY):
        start = clock()
        jax.block_until_ready(jax.tree.leaves(run(rounds)))
        seconds.append(clock() - start)
    return (seconds[1] - seconds[0]) / (MANY - FEW)


def main():
    """Times all loops on all sizes."""
    parser = make_parser(__doc__)
    parser.add_argument("--turns", type=int, default=5, help="repetitions (default: 5)")
    parser.add_argument(
        "--process-time", action="store_true",
        help="processor time of all threads instead of wall time: for busy machines",
    )  # fmt: skip
    asked = parser.parse_args()
    clock = time.process_time if asked.process_time else time.perf_counter
    found = []
    for rows, columns in SIZES:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(rows, columns)).astype(np.float32)
        y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * rng.normal(size=rows)
        y = y.astype(np.float32)
        for name, runs in make_runs(read_page(x, y), x, y).items():
            for run in runs:  # compiles
                time_round(run, clock)
            turns = np.array(
                [[time_round(run, clock) for run in runs] for _ in range(asked.turns)]
            )
            own, fit = 1e3 * np.median(turns, axis=0)
            ratio = float(np.median(turns[:, 0] / turns[:, 1]))
            print(
                f"{rows:7} x {columns:2}  {name:9} {own:7.2f} ms a round, "
                f"fit {fit:7.2f} ms, ratio {ratio:.2f}", flush=True,
            )  # fmt: skip
            sizes = dict(loop=name, rows=rows, columns=columns)
            found.append(dict(sizes, ms=float(own), fit_ms=float(fit), ratio=ratio))
    result = dict(machine=describe_machine(), loops=found)
    write_json(asked.out / "own_loop.json", result)


if __name__ == "__main__":
    main()
