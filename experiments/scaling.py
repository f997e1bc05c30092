# SPDX-License-Identifier: Apache-2.0
"""How does training scale with processes, and what do the sums between them cost?

Starts 1, 2 (and more) processes on this machine, each with one core, which exchange
sums over the loopback network:

- strong scaling: one table, divided among the processes;
- weak scaling: as many rows for each process;
- one process with all the cores, without a mesh, and with one device per core;
- the time of a sum over all processes, by size.

Next to the times stand those of a cost model, whose three numbers are fitted to the
runs of one process and to the least times of sums: seconds a cell, a call, and a byte.
(The median of sums is greater where other programs use the cores.) With the
numbers of a network it predicts what 64 machines would take.

    python experiments/scaling.py --processes 1 2

Written to --out: scaling.json, scaling.svg.
"""

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from experiment_tools import (
    BLUE,
    GRAY,
    ORANGE,
    find_slope,
    make_figures,
    make_parser,
    open_figure,
    print_table,
    read_processor,
    save_figure,
    write_json,
)

CALLS = 9  # sums between processes a round, for squared error
SIZES = tuple(4**power for power in range(1, 13))  # bytes of a sum
HOSTS, HOST_CORES = 64, 32
NETWORKS = {"25 GbE": 2.9e9, "10 GbE": 1.15e9}  # bytes a second
STEP_SECONDS = 40e-6  # a message between two machines
TABLES = ((10**9, 100), (10**8, 100), (10**7, 28))


class Setup(NamedTuple):
    """One way to train.

    Attributes:
      name: in the table.
      processes: their number.
      rows: of all of them.
      cores: of each process.
      devices: of each process; 0: no mesh.
    """

    name: str
    processes: int
    rows: int
    cores: int
    devices: int


class Costs(NamedTuple):
    """The cost model: seconds a tree = cells * cell + CALLS * call + bytes * byte."""

    cell: float
    call: float
    byte: float


def main():
    """Times all setups in turn, and prints and writes a table."""
    args = parse()
    if args.worker:
        work(json.loads(args.worker))
        return
    setups = choose_setups(args)
    readings: dict[str, list] = {setup.name: [] for setup in setups}
    for turn in range(args.repeats):
        for setup in setups:
            print(f"turn {turn + 1} of {args.repeats}: {setup.name}", flush=True)
            found = start_processes(args, setup, "train")
            readings[setup.name].append([*zip(*found, strict=True)])
    trees = [describe_setup(args, setup, readings[setup.name]) for setup in setups]
    sums = time_sums(args)
    costs = fit_costs(args, trees, sums)
    predict_times(args, costs, trees)
    predictions = [predict_hosts(costs, *table) for table in TABLES]
    tables = tabulate(args, trees, sums, predictions)
    for table in tables.values():
        print_table(table)
    result = {
        "settings": vars(args), "processor": read_processor(), "trees": trees,
        "sums": sums, "costs": costs._asdict(), "hosts": predictions,
        "figures": make_figures(**tables),
    }  # fmt: skip
    write_json(args.out / "scaling.json", result)
    draw(args, trees, sums, costs)


def choose_setups(args):
    """Returns the ways to train."""
    most, setups = max(args.processes), []
    for number in args.processes:
        setups.append(Setup(f"strong, {number}", number, args.rows, 1, 1))
    each = args.rows // most
    for number in args.processes:
        setups.append(Setup(f"weak, {number}", number, number * each, 1, 1))
    setups.append(Setup(f"{most} cores, no mesh", 1, args.rows, most, 0))
    setups.append(Setup(f"{most} cores, {most} devices", 1, args.rows, most, most))
    return setups


# ---- processes ----------------------------------------------------------------------


def start_processes(args, setup, what):
    """Runs all processes of a setup; returns what each of them found."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    cores, running = sorted(os.sched_getaffinity(0)), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(setup.processes):
            first = rank * setup.cores
            own = [cores[(first + i) % len(cores)] for i in range(setup.cores)]
            task = dict(
                setup._asdict(), what=what, rank=rank, port=port, own=own,
                out=str(Path(folder) / f"{rank}.json"), few=args.few, many=args.many,
                features=args.features,
            )  # fmt: skip
            command = [sys.executable, __file__, "--worker", json.dumps(task)]
            flag = f"--xla_force_host_platform_device_count={max(1, setup.devices)}"
            settings = {
                **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag,
                "PJRT_NPROC": str(setup.cores),
            }  # fmt: skip
            running.append(subprocess.Popen(command, env=settings))
        codes = [process.wait(args.timeout) for process in running]
        if any(codes):
            raise SystemExit(f"{setup.name}: processes ended with {codes}")
        files = [Path(folder) / f"{rank}.json" for rank in range(setup.processes)]
        return [json.loads(file.read_text()) for file in files]


def work(task):
    """Does the work of one process."""
    os.sched_setaffinity(0, task["own"])
    import jax

    if task["processes"] > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{task['port']}", task["processes"], task["rank"]
        )
    mesh = None
    if task["devices"]:
        mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    do = {"train": train, "sum": sum_over_processes}[task["what"]]
    Path(task["out"]).write_text(json.dumps(do(task, mesh)))


def train(task, mesh):
    """Returns the least seconds of a short and of a long run."""
    import jboost as jb

    x, y = make_rows(task)
    lengths = task["few"], task["many"]
    seconds = {rounds: [] for rounds in lengths}
    for rounds in (lengths[1], *3 * lengths):  # the first one compiles
        begun = time.perf_counter()
        jb.fit(x, y, num_rounds=rounds, max_depth=6, mesh=mesh)
        seconds[rounds].append(time.perf_counter() - begun)
    return min(seconds[lengths[0]]), min(seconds[lengths[1]][1:])


def make_rows(task):
    """Returns the rows of this process."""
    random = np.random.default_rng(task["rank"])
    number = task["rows"] // task["processes"]
    x = random.normal(size=(number, task["features"])).astype(np.float32)
    y = x[:, 0] + x[:, 1] * x[:, 2] + random.normal(size=number).astype(np.float32)
    return x, y


def sum_over_processes(task, mesh):
    """Returns the least and the median seconds of a sum, for each size."""
    del task
    import jax
    from jax.sharding import PartitionSpec as P

    def add_up(values):  # as jboost does: each of few processes sends to each
        copies = jax.numpy.broadcast_to(values, (mesh.size, *values.shape))
        return jax.lax.all_to_all(copies, "rows", 0, 0).sum(0, dtype=values.dtype)

    found = []
    for size in SIZES:
        array = jax.make_array_from_process_local_data(
            jax.sharding.NamedSharding(mesh, P("rows")),
            np.ones((jax.local_device_count(), size // 4), np.int32),
        )
        add = jax.jit(
            jax.shard_map(
                add_up, mesh=mesh, in_specs=P("rows"), out_specs=P(), check_vma=False,
            )
        )  # fmt: skip
        seconds = []
        for _ in range(100):
            begun = time.perf_counter()
            add(array).block_until_ready()
            seconds.append(time.perf_counter() - begun)
        found.append([min(seconds[5:]), float(np.median(seconds[5:]))])
    return found


# ---- the cost model -----------------------------------------------------------------


def describe_setup(args, setup, readings):
    """Returns the seconds a tree; those of the slowest process count."""
    few, many = ([max(each) for each in turn] for turn in zip(*readings, strict=True))
    slope = find_slope(few, many, args.many - args.few)
    return {**setup._asdict(), "seconds": slope.value, "noise": slope.noise}


def time_sums(args):
    """Returns the seconds of sums by number of processes and size."""
    found = {}
    for number in args.processes:
        if number > 1:
            print(f"sums of {number} processes", flush=True)
            setup = Setup(f"sums, {number}", number, 0, 1, 1)
            ranks = start_processes(args, setup, "sum")
            found[number] = np.max(ranks, axis=0).tolist()
    return found


def count_bytes(features, bins=256, depth=6):
    """Returns the bytes that a tree of depth ``depth`` exchanges.

    Of a pair of children the smaller one is summed: 2^(depth - 1) histograms with the
    root, of integers for gradients and counts.
    """
    return 2 ** (depth - 1) * features * bins * 2 * 4


def fit_costs(args, trees, sums):
    """Fits the costs of a cell, of a call and of a byte."""
    alone = next(t for t in trees if t["processes"] == t["cores"] == 1)
    cell = alone["seconds"] / (alone["rows"] * args.features)
    if not sums:
        return Costs(cell, 0.0, 0.0)
    number = min(sums)
    seconds = [least for least, _ in sums[number]]
    moved = 2 * (number - 1) / number * SIZES[-1]
    return Costs(cell, seconds[0], (seconds[-1] - seconds[0]) / moved)


def predict_times(args, costs, trees):
    """Adds the prediction of the cost model to each measured time."""
    for tree in trees:
        cores = tree["processes"] * tree["cores"]
        computing = tree["rows"] * args.features / cores * costs.cell
        talking, number = 0.0, tree["processes"]
        if number > 1:
            share = 2 * (number - 1) / number
            talking = CALLS * costs.call
            talking += share * count_bytes(args.features) * costs.byte
        tree["predicted"] = computing + talking


def predict_hosts(costs, rows, features):
    """Predicts the seconds a tree of 64 machines on two networks."""
    computing = rows * features / (HOSTS * HOST_CORES) * costs.cell
    latency = CALLS * 2 * math.log2(HOSTS) * STEP_SECONDS
    found = {"rows": rows, "features": features, "computing": computing}
    for name, bandwidth in NETWORKS.items():
        share = 2 * (HOSTS - 1) / HOSTS
        whole = computing + latency + share * count_bytes(features) / bandwidth
        found[name] = {"seconds": whole, "efficiency": computing / whole}
    return found


# ---- results ------------------------------------------------------------------------


def tabulate(args, trees, sums, predictions):
    """Returns the tables of the pages, and of what they are computed from."""
    most = max(args.processes)
    by_name = {tree["name"]: tree["seconds"] for tree in trees}
    whole = by_name[f"{most} cores, no mesh"]
    ratios = {
        f"{most} processes of one core each": f"strong, {most}",
        f"{most} devices": f"{most} cores, {most} devices",
    }
    heads = [[name, "efficiency"] for name in NETWORKS]
    rows = [
        [f"{found['rows']:,} x {found['features']}", *chain(*map(show, cells))]
        for found in predictions
        for cells in [[found[name] for name in NETWORKS]]
    ]
    return {
        "trees": [["setup", "rows", "ms a tree", "noise", "by the formula"]]
        + [
            [tree["name"], f"{tree['rows']:,}"]
            + [f"{1e3 * tree[k]:.1f}" for k in ("seconds", "noise", "predicted")]
            for tree in trees
        ],
        "sums": [["processes", "bytes", "least, ms", "median, ms"]]
        + [
            [f"{number}", f"{size:,}", f"{1e3 * least:.3f}", f"{1e3 * median:.3f}"]
            for number, seconds in sums.items()
            for size, (least, median) in zip(SIZES, seconds, strict=True)
        ],
        "ratios": [["setup", f"to one process with {most} cores"]]
        + [[label, f"{by_name[name] / whole:.2f}"] for label, name in ratios.items()],
        "hosts": [["rows x features", *chain(*heads)], *rows],
    }


def show(predicted):
    """Returns the cells of a prediction."""
    return f"{1e3 * predicted['seconds']:.0f} ms", f"{predicted['efficiency']:.0%}"


def draw(args, trees, sums, costs):
    """Draws times a tree by processes, and times of sums by size."""
    figure, ((left, right),) = open_figure(1, 2, size=(9, 3.6))
    for kind, color in (("strong", BLUE), ("weak", ORANGE)):
        chosen = [t for t in trees if t["name"].startswith(kind)]
        numbers = [t["processes"] for t in chosen]
        for key, style in (("seconds", "o-"), ("predicted", "x--")):
            label = f"{kind}, {'measured' if key == 'seconds' else 'cost model'}"
            times = [1e3 * t[key] for t in chosen]
            left.plot(numbers, times, style, color=color, label=label)
    left.set(xlabel="processes of one core", ylabel="ms a tree", ylim=(0, None))
    left.set_xticks(args.processes)
    left.legend(frameon=False)
    for number, seconds in sums.items():
        share = 2 * (number - 1) / number
        model = [1e3 * (costs.call + share * size * costs.byte) for size in SIZES]
        for index, style, what in ((0, "o-", "least"), (1, ":", "median")):
            label = f"{number} processes, {what}"
            times = [1e3 * each[index] for each in seconds]
            right.plot(SIZES, times, style, color=BLUE, label=label)
        right.plot(SIZES, model, "--", color=GRAY, label=f"cost model, {number}")
    right.set(xlabel="bytes of a sum", ylabel="ms", xscale="log", yscale="log")
    if sums:
        right.legend(frameon=False)
    save_figure(figure, args.out / "scaling.svg")


def parse():
    """Returns the options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=28)
    parser.add_argument("--few", type=int, default=4, help="rounds of the short runs")
    parser.add_argument("--many", type=int, default=24, help="rounds of the long runs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a run")
    parser.add_argument("--worker", help="(the script's own: the task of a process)")
    args = parser.parse_args()
    if args.many <= args.few or 1 not in args.processes:
        parser.error("--many must be more than --few, and --processes contain 1")
    return args


if __name__ == "__main__":
    main()
