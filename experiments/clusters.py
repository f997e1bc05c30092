# SPDX-License-Identifier: Apache-2.0
"""Do the doors to Dask and Ray give the bits of one process, and how fast?

- bits: models of ``jboost.dask.fit`` against ``jb.fit``, for losses, missing values,
  categories, weights, offsets, validation and early stopping, with several numbers of
  workers and partitions.
- kills: a worker is killed in a random round; the call must end with an error, and the
  next one must go on from the checkpoint to the bits of an undisturbed run.
- speed: seconds to XGBoost's on the same Dask cluster.
- memory: bytes of a worker and its training process for each byte of its rows.
- ray: models of ``jboost.ray.fit`` against ``jb.fit``.

    python experiments/clusters.py [--parts bits kills speed memory ray]

Needs Dask (``jboost[dask]``) and, for ray, ``jboost[ray]``. With one core a worker.
Written to --out: clusters.json.
"""

import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from experiment_tools import describe_machine, make_figures, make_parser, write_json

import jboost as jb
import jboost.dask
import jboost.ray

L = jb.losses
CASES = {
    "squared, weights": dict(loss=L.squared_error, weighted=True),
    "huber, early stopping": dict(loss=L.huber, early_stopping_rounds=3, num_rounds=30),
    "logistic, offset": dict(loss=L.logistic, y="label", shifted=True),
    "quantile, sampled": dict(loss=L.quantile, subsample=0.7, seed=3),
    "softmax": dict(loss=L.softmax, y="class", num_scores=3),
    "own": dict(loss=lambda s, t: jax.numpy.log1p((s - t) ** 2)),
}
RATIOS = {  # of the pages, by part
    "speed": ("to_xgboost", "first_to_later"), "memory": ("bytes_to_bytes_of_rows",),
}  # fmt: skip


def main():
    """Runs the parts, and prints what they find."""
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=["bits"])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    parts = dict(
        bits=compare_bits, kills=kill_workers, speed=time_calls, memory=measure_memory,
        ray=try_ray,
    )  # fmt: skip
    found = {name: parts[name](args) for name in args.parts}
    rows = [
        [name, f"{found[part][name]:.2f}"]
        for part in found
        for name in RATIOS.get(part, ())
    ]
    result = {"machine": describe_machine(), **found}
    result["figures"] = make_figures(ratios=[["figure", "value"], *rows])
    write_json(args.out / "clusters.json", result)


def open_cluster(workers):
    """Returns a Dask cluster whose workers have one thread each."""
    import dask
    from distributed import LocalCluster

    dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GB"})
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address=None,
        memory_limit=0,
    )  # fmt: skip


def make_rows(rows=3000):
    """Returns a table with gaps and categories, and columns of every role."""
    rng = np.random.default_rng(0)
    x = pd.DataFrame(rng.normal(size=(rows, 4)), columns=[*"abcd"])
    x["e"] = pd.Categorical(rng.choice([*"pqrst"], rows))
    x["f"] = rng.choice(["u", "v", "w"], rows)
    x.loc[rng.random(rows) < 0.1, "a"] = np.nan
    score = x.b + (x.e == "p") + rng.standard_t(3, rows)
    return x, pd.DataFrame({
        "y": score, "label": (score > 0).astype(int), "class": rng.integers(0, 3, rows),
        "weight": rng.integers(0, 4, rows), "offset": rng.integers(-4, 4, rows) / 8,
    })  # fmt: skip


def read_case(name, x, roles):
    """Returns the tables of a case, (x, y, weight, offset), and its settings."""
    given = dict(num_rounds=5) | CASES[name]
    used = {"weighted": "weight", "shifted": "offset"}
    chosen = [
        roles[column] if given.pop(key, False) else None for key, column in used.items()
    ]
    return (x, roles[given.pop("y", "y")], *chosen), given


def is_same(first, second):
    """Returns whether all arrays of two models have the same bits."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(*map(np.asarray, pair), equal_nan=True) for pair in pairs)


def compare_bits(args):
    """Trains each case on clusters of several sizes."""
    import dask.dataframe as dd
    from distributed import Client

    x, roles = make_rows()
    later = np.arange(len(x)) >= 2500
    found, partitions = [], itertools.cycle([1, 5, 13, 2, 8])
    for workers in args.workers:
        with open_cluster(workers) as cluster, Client(cluster) as client:
            for name in CASES:
                tables, settings = read_case(name, x, roles)
                count = next(partitions)

                def train(fit, change, tables=tables, settings=settings):
                    (a, y, weight, offset), held = (
                        [None if t is None else change(t[rows]) for t in tables]
                        for rows in (~later, later)
                    )
                    return fit(
                        a, y, sample_weight=weight, offset=offset,
                        validation=tuple(held), **settings,
                    )[0]  # fmt: skip

                models = (
                    train(jb.fit, lambda table: table),
                    train(
                        partial(jboost.dask.fit, client),
                        partial(dd.from_pandas, npartitions=count),
                    ),
                )
                found.append(dict(
                    case=name, workers=workers, partitions=count,
                    same=is_same(*models), rounds=models[0].num_rounds,
                ))  # fmt: skip
                print(found[-1], flush=True)
    print(f"{sum(each['same'] for each in found)} of {len(found)} have the same bits")
    return found


def kill_workers(args):
    """Kills a worker in random rounds of runs with a checkpoint."""
    import dask.array as da
    from distributed import Client

    rng, chance, found = np.random.default_rng(0), random.Random(0), []
    x = rng.normal(size=(20_000, 10)).astype(np.float32)
    y = x[:, 0] + rng.standard_t(3, len(x)).astype(np.float32)
    settings = dict(num_rounds=60, checkpoint_rounds=1)
    expected, _ = jb.fit(x, y, L.huber, num_rounds=60)
    for number in range(args.kills):
        round_of_kill, parent = chance.randrange(1, 50), chance.random() < 0.5
        with (
            tempfile.TemporaryDirectory() as folder,
            open_cluster(2) as cluster, Client(cluster) as client,
        ):  # fmt: skip
            rows = [
                da.from_array(each, chunks=(2500, *each.shape[1:])) for each in (x, y)
            ]
            file, seen = Path(folder) / "run", Path(folder) / "seen"
            pids = [*client.run(os.getpid).values()]
            victim = pids[number % 2]

            def watch(number, history, model, seen=seen):
                seen.write_text(str(number))
                time.sleep(0.05)

            def kill(victim=victim, seen=seen, last=round_of_kill, parent=parent):
                while not seen.exists() or int(seen.read_text() or 0) < last:
                    time.sleep(0.01)
                children = find_children(victim)
                os.kill(victim if parent else children[0], 9)
                kill.time = time.monotonic()

            threading.Thread(target=kill, daemon=True).start()
            try:
                jboost.dask.fit(
                    client, *rows, L.huber, checkpoint=file, callbacks=watch, **settings
                )
                error, late = "none", None
            except Exception as raised:
                error, late = repr(raised)[:300], time.monotonic() - kill.time
            client.wait_for_workers(2)
            rows = [
                da.from_array(each, chunks=(2500, *each.shape[1:])) for each in (x, y)
            ]
            resumed, _ = jboost.dask.fit(
                client, *rows, L.huber, checkpoint=file, **settings
            )
            found.append(dict(
                round=round_of_kill, killed="worker" if parent else "process",
                seconds_to_error=late, error=error, same=is_same(expected, resumed),
            ))  # fmt: skip
            print(found[-1], flush=True)
    return found


def find_children(pid):
    """Returns the processes that a process has started (Linux)."""
    path = Path(f"/proc/{pid}/task")
    texts = [(each / "children").read_text() for each in path.iterdir()]
    found = [int(number) for text in texts for number in text.split()]
    return [each for each in found if "jboost.dask" in read_command(each)]


def read_command(pid):
    """Returns the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def time_calls(args):
    """Compares seconds with those of XGBoost on the same cluster."""
    import xgboost.dask as peer
    from distributed import Client

    settings = dict(max_depth=6, subsample=1.0, rows_per_threshold=0)
    binary = dict(objective="binary:logistic", max_depth=6, tree_method="hist")
    seconds = {"jboost": [], "xgboost": []}
    with open_cluster(2) as cluster, Client(cluster) as client:
        parts = draw_parts(client, args.rows)
        for _ in range(4):  # the first call compiles
            begun = time.perf_counter()
            jboost.dask.fit(
                client, *parts, L.logistic, num_rounds=args.rounds, **settings
            )
            seconds["jboost"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            matrix = peer.DaskQuantileDMatrix(client, *parts)
            peer.train(client, binary, matrix, num_boost_round=args.rounds)
            seconds["xgboost"].append(time.perf_counter() - begun)
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    found = dict(
        seconds=seconds, to_xgboost=medians["jboost"] / medians["xgboost"],
        first_to_later=seconds["jboost"][0] / medians["jboost"],
    )  # fmt: skip
    print(found, flush=True)
    return found


def measure_memory(args):
    """Finds how memory of a worker and its process grows with the worker's rows."""
    from distributed import Client

    peaks = {}
    for rows in (args.rows, 3 * args.rows):
        with open_cluster(2) as cluster, Client(cluster) as client:
            parts = draw_parts(client, rows)
            peak, over = [0.0], threading.Event()
            pids = [*client.run(os.getpid).values()]
            watch = threading.Thread(target=follow_memory, args=(pids, peak, over))
            watch.start()
            jboost.dask.fit(client, *parts, L.logistic, num_rounds=5)
            over.set()
            watch.join()
            peaks[rows * 28 * 4 // 2] = peak[0]
    (few, low), (many, high) = peaks.items()
    found = dict(peaks=peaks, bytes_to_bytes_of_rows=(high - low) / (many - few))
    print(found, flush=True)
    return found


def draw_parts(client, rows):
    """Returns 28 features and labels in eight partitions, kept by the workers."""
    import dask.array as da
    from distributed import wait

    draw = da.random.default_rng(0)
    x = draw.normal(size=(rows, 28), chunks=(rows // 8, 28)).astype("f4")
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("f4")
    parts = client.persist([x, y])
    wait(parts)
    return parts


def read_memory(pid):
    """Returns the bytes of a process that it shares with nobody (Linux)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    own = [line for line in text.splitlines() if line.startswith("Private")]
    return 1024 * sum(int(line.split()[1]) for line in own)


def follow_memory(pids, peak, over):
    """Keeps the most memory of a worker and its training process."""
    while not over.wait(0.1):
        for pid in pids:
            try:
                each = [read_memory(p) for p in (pid, *find_children(pid))]
            except OSError:
                continue
            peak[0] = max(peak[0], sum(each))


def try_ray(args):
    """Trains on a Ray cluster of two workers, and predicts by batches."""
    import ray
    from ray.train import RunConfig, ScalingConfig

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")
    x, roles = make_rows()
    x["e"] = x["e"].astype(str)
    table = pd.concat([x, roles], axis=1)
    found = []
    for name in ("squared, weights", "logistic, offset", "own"):
        (_, y, weight, offset), settings = read_case(name, x, roles)
        names = {
            k: None if t is None else t.name
            for k, t in dict(sample_weight=weight, offset=offset).items()
        }
        used = [*x, y.name, *filter(None, names.values())]
        rows = ray.data.from_pandas(table[used]).repartition(5)
        with tempfile.TemporaryDirectory() as folder:
            model, _ = jboost.ray.fit(
                rows, y.name, scaling_config=ScalingConfig(
                    num_workers=2, resources_per_worker={"CPU": 1}
                ), run_config=RunConfig(storage_path=folder), **names, **settings,
            )  # fmt: skip
        expected, _ = jb.fit(x, y, sample_weight=weight, offset=offset, **settings)
        found.append(dict(case=name, same=is_same(model, expected)))
        print(found[-1], flush=True)
    ray.shutdown()
    return found


if __name__ == "__main__":
    main()
