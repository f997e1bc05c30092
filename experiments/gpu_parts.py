# SPDX-License-Identifier: Apache-2.0
"""The processes that ``gpu.py`` starts: each measures one part, on one device.

    python experiments/gpu_parts.py PART FILE PLATFORM [quick]

What was measured so far is in FILE (JSON) at any moment, so that a process that crashes
or is killed leaves its figures.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_peers import (
    find_loss,
    list_jboost,
    make_table,
    make_targets,
)
from experiment_tools import describe_machine
from gpu_cases import TESTS
from gpu_peers import PEERS, find_peers, move_rows
from gpu_timing import (
    Rows,
    Task,
    draw_rows,
    make_trainer,
    read_slopes,
    time_latency,
    time_queue,
)
from gpu_user import fit_as_users

import jboost as jb

ROOT = Path(__file__).parents[1]
NODES = 32  # of the lowest level of a tree of depth 6
COMPARED = ("squared_error", "logistic")  # losses whose models are compared to the bit


# ---- the device ---------------------------------------------------------------------


def describe(task: Task) -> None:
    """The device, versions, and how fast its memory is.

    Raises:
      RuntimeError: JAX has fallen back to the CPU.
    """
    if task.platform == "cuda" and jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX finds only {jax.devices()}")
    names = {d.metadata["Name"] or "" for d in importlib.metadata.distributions()}
    wanted = ("jax-cuda", "nvidia-cuda-nvrtc", "xgboost", "cupy", "lightgbm")
    machine = describe_machine()
    machine["versions"] |= {
        name: importlib.metadata.version(name)
        for name in sorted(names)
        if name.startswith(wanted)
    }
    task.save(**machine, implementations=jb.implementations(), gpu=ask_driver())
    x = jnp.zeros(task.sizes.copied // 4, jnp.float32)
    seconds = time_queue(jax.jit(lambda x: x + 1), x) / 1e3
    task.save(copy_gb_per_s=2e-9 * task.sizes.copied / seconds)


def ask_driver() -> str:
    """Returns the GPU's name, driver, memory and highest clock, from nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return "nvidia-smi was not found"
    fields = "name,driver_version,memory.total,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or ran.stderr.strip()


def run_tests(task: Task) -> None:
    """Names of the tests that passed, failed, and so on, as they end."""
    if importlib.util.find_spec("pytest") is None:
        task.save(note="pytest is not installed")
        return
    names = TESTS[:2] if task.quick else TESTS
    files = [path for name in names for path in sorted((ROOT / "tests").glob(name))]
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--color=no"]
    off = ["no:cacheprovider", "no:benchmark"]  # the latter refuses several processes
    command += ["-o", "addopts=", *(f"-p{name}" for name in off), *files]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(4, os.cpu_count() or 1))]
    found: dict[str, list[str]] = {}
    run = partial(subprocess.Popen, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with run(command) as process:
        for line in process.stdout:
            print(line, end="")
            ended = re.search(r"\b(PASSED|FAILED|SKIPPED|ERROR|XFAIL)\b", line)
            name = re.search(r"tests/(\S+::\S+)", line)
            if ended and name:
                found.setdefault(ended[1].lower(), []).append(name[1])
                task.save(tests=found)
    if process.returncode not in (0, 1):
        task.save(note=f"pytest ended with {process.returncode}: see gpu.log")


# ---- training -----------------------------------------------------------------------


def train(task: Task) -> None:
    """Milliseconds a tree, of a built-in loss and of one's own."""
    sizes, case = task.sizes, task.case
    rows = draw_rows(sizes.rows, sizes.features, keep=False)
    trainers = {
        "train_ms": make_trainer(rows, case),
        "own_ms": make_trainer(rows, case._replace(loss="own")),
    }
    read_slopes(task, trainers, sizes.rounds, {"own_ratio": ("own_ms", "train_ms")})


def train_plain(task: Task) -> None:
    """Milliseconds a tree in plain XLA, where something else is the default."""
    if task.implementation == "xla":
        task.save(note="plain XLA is the default")
        return
    sizes = task.sizes
    rows = draw_rows(sizes.rows, sizes.features, keep=False)
    trainers = {"xla_ms": make_trainer(rows, task.case, "xla")}
    read_slopes(task, trainers, sizes.rounds, {})


def compare(task: Task) -> None:
    """Milliseconds a tree, in turn with the peers that are found."""
    sizes = task.sizes
    rows = draw_rows(sizes.rows, sizes.features)
    peers = find_peers(task, rows, task.case, PEERS)
    trainers = {"jboost_ms": make_trainer(rows, task.case)}
    trainers |= {f"{name}_ms": peer.train for name, peer in peers.items()}
    ratios = {f"{name}_ratio": ("jboost_ms", f"{name}_ms") for name in peers}
    read_slopes(task, trainers, sizes.rounds, ratios)


def train_wide(task: Task) -> None:
    """Milliseconds a tree of the large table, in turn with XGBoost."""
    number, features = task.sizes.wide
    rows = draw_rows(number, features, importlib.util.find_spec("xgboost") is not None)
    case = task.case._replace(num_rows=number, num_features=features)
    peers = find_peers(task, rows, case, ["xgboost"])
    rows = rows._replace(x=None)
    trainers = {"wide_ms": make_trainer(rows, case)}
    trainers |= {f"wide_{name}_ms": peer.train for name, peer in peers.items()}
    ratios = {f"wide_{name}_ratio": ("wide_ms", f"wide_{name}_ms") for name in peers}
    read_slopes(task, trainers, task.sizes.wide_rounds, ratios)


# ---- single operations --------------------------------------------------------------


def time_operations(task: Task) -> None:
    """Milliseconds of the operations of a tree, and cells a second of histograms.

    The root's histogram of all features less that of half of them, divided by the
    cells that it has more, is free of what is done once for each row.
    """
    rows = draw_rows(task.sizes.rows, task.sizes.features)
    found: dict[str, dict[str, float]] = {}
    for implementation in dict.fromkeys((task.implementation, "xla")):
        times = found[implementation] = {}
        operations = list_operations(rows, task.sizes.depth, implementation)
        for name, (function, *arguments) in operations.items():
            try:
                times[name] = time_queue(jax.jit(function), *arguments)
            except Exception as error:
                task.note("errors", f"{implementation}, {name}", error)
            task.save(operations=found)
    times = found[task.implementation]
    whole, half = (times.get(f"histogram{of}") for of in ("", ", half the features"))
    if whole and half and whole > half:
        size = rows.binned.size
        more = size - rows.binned[:, : rows.binned.shape[1] // 2].size
        task.save(
            root_gcells_per_s=1e-6 * size / whole,
            cell_gcells_per_s=1e-6 * more / (whole - half),
        )


def list_operations(rows: Rows, depth: int, implementation: str) -> dict[str, tuple]:
    """Returns {name: (function, arguments)}."""
    parts, name = jb.parts, dict(implementation=implementation)
    binned, key = rows.binned, jax.random.key(0)
    few = binned[:, : binned.shape[1] // 2]
    codes, fewer = (parts.prepare_codes(some, **name) for some in (binned, few))
    gradient = rows.y - jnp.mean(rows.y)
    node = jax.random.randint(key, gradient.shape, 0, NODES)

    def sum_root(codes, gradient):
        return parts.build_histogram(codes, gradient, key=key, **name)

    def sum_level(codes, gradient, node):
        return parts.build_histogram(
            codes, gradient, node=node, num_nodes=NODES, key=key, **name
        )

    def grow(codes, gradient):
        return parts.grow_tree(codes, gradient, max_depth=depth, key=key, **name)

    tree, leaf = jax.jit(grow)(codes, gradient)
    level = jax.jit(sum_level)(codes, gradient, node)
    return {
        "histogram": (sum_root, codes, gradient),
        "histogram, half the features": (sum_root, fewer, gradient),
        f"histogram of {NODES} nodes": (sum_level, codes, gradient, node),
        f"splits of {NODES} nodes": (parts.find_split, level),
        "whole tree": (grow, codes, gradient),
        "leaves of all rows": (partial(parts.find_leaves, **name), tree, codes),
        "leaf sums": (partial(parts.fit_leaves, **name), tree, leaf, gradient),
        "scores of a tree": (partial(parts.predict_tree, **name), tree, codes),
        "codes of values": (partial(jb.apply_bins, **name), rows.bins, rows.x),
    }


# ---- prediction, many models, whole fits --------------------------------------------


def predict(task: Task) -> None:
    """Milliseconds to predict all rows of the main table, also with XGBoost."""
    sizes = task.sizes
    rows = draw_rows(sizes.rows, sizes.features)
    some = Rows(*(part if part is rows.bins else part[:20_000] for part in rows))
    trees, _ = make_trainer(some, task.case)(sizes.trees)
    for name, count in {"predict_ms": sizes.trees, "predict_tenth_ms": 0}.items():
        model = jb.to_ensemble(trees, rows.bins)
        model = jb.truncate(model, count or sizes.trees // 10)
        task.save(**{name: time_latency(jb.predict, model, rows.x)})
    peers = find_peers(task, some, task.case, ["xgboost"])
    if "xgboost" in peers:
        peer, x = peers["xgboost"], move_rows(task, rows)[0]
        model = peer.train(sizes.trees)
        taken = time_latency(lambda: float(peer.predict(model, x)[-1]))
        ratio = task.figures["predict_ms"] / taken
        task.save(predict_xgboost_ms=taken, predict_xgboost_ratio=ratio)


def train_many(task: Task) -> None:
    """Seconds of models side by side, and one after another; and whether they agree."""
    sizes = task.sizes
    rows = draw_rows(sizes.model_rows, sizes.features, keep=False)
    codes = jb.parts.prepare_codes(rows.binned)
    settings = list_jboost(task.case) | {"num_rounds": sizes.model_rounds}
    del settings["learning_rate"]
    rates = jnp.geomspace(0.01, 0.5, sizes.models, dtype=jnp.float32)

    def boost(codes, rate):
        return jb.boost(
            codes, rows.y, find_loss(task.case), jax.random.key(0),
            learning_rate=rate, **settings,
        )  # fmt: skip

    one, side = jax.jit(boost), jax.jit(jax.vmap(boost, (None, 0)))
    alone = [one(codes, rate) for rate in rates]
    together = jax.device_get(side(codes, rates))
    equal = [
        jax.tree.all(
            jax.tree.map(lambda a, b, i=i: np.array_equal(a, b[i]), own, together)
        )
        for i, own in enumerate(jax.device_get(alone))
    ]
    task.save(equal_models=f"{sum(equal)} of {len(equal)}")
    turn = time_latency(lambda: [one(codes, rate) for rate in rates])
    taken = time_latency(side, codes, rates)
    task.save(in_turn_ms=turn, side_by_side_ms=taken, many_ratio=taken / turn)


# ---- bits ---------------------------------------------------------------------------


def compare_bits(task: Task) -> None:
    """Whether two runs agree, and this device with the CPU, in a process of its own."""
    first = train_for_bits(task)
    task.save(rerun=compare_arrays(first, train_for_bits(task)))
    path = task.path.with_suffix(".npz")
    command = [sys.executable, __file__, "bits-of-cpu", path, "cpu"]
    command += ["quick"] * task.quick
    subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)
    task.save(cpu=compare_arrays(first, dict(np.load(path))))


def write_bits(task: Task) -> None:
    """Writes what :func:`compare_bits` compares with."""
    np.savez(task.path, **train_for_bits(task))


def train_for_bits(task: Task) -> dict[str, np.ndarray]:
    """Returns histograms and models of a table that is the same on every device."""
    sizes = task.sizes
    case = task.case._replace(num_rows=sizes.bit_rows)
    table = make_table(case)
    x, key = table.x[: sizes.bit_rows], jax.random.key(0)
    binned = jb.apply_bins(jb.fit_bins(x), x)
    gradient = make_targets(case, table.signal)[: sizes.bit_rows]
    node = np.arange(sizes.bit_rows) % NODES
    histogram = jb.parts.build_histogram(
        binned, gradient, node=node, num_nodes=NODES, key=key
    )
    found = {"histograms": histogram.sums, "unit of histograms": histogram.unit}
    for loss in COMPARED:
        case = case._replace(loss=loss)
        y = jnp.asarray(make_targets(case, table.signal)[: sizes.bit_rows])
        rows = Rows(None, y, None, jnp.asarray(binned))
        trees, scores = make_trainer(rows, case)(sizes.bit_rounds)
        for name in ("feature", "threshold", "leaf_value"):
            found[f"{loss}: {name}"] = getattr(trees.trees, name)
        found[f"{loss}: scores"] = scores
    return jax.tree.map(np.asarray, found)


def compare_arrays(ours: dict, theirs: dict) -> dict[str, dict[str, float]]:
    """Returns the share of numbers that differ, and the greatest difference."""
    found = {}
    for name, array in ours.items():
        other = theirs[name]
        bits = f"u{array.itemsize}"
        differing = np.mean(array.view(bits) != other.view(bits))
        greatest = np.abs(array.astype(np.float64) - other.astype(np.float64)).max()
        found[name] = dict(share=float(differing), greatest=float(greatest))
    return found


# ---- the process --------------------------------------------------------------------

PARTS: dict[str, Callable[[Task], None]] = {
    "device": describe,
    "tests": run_tests,
    "train": train,
    "plain": train_plain,
    "peers": compare,
    "operations": time_operations,
    "predict": predict,
    "many": train_many,
    "bits": compare_bits,
    "bits-of-cpu": write_bits,
    "wide": train_wide,
    "user": fit_as_users,
}


def main() -> None:
    """Measures a part; see the module docstring."""
    part, path, platform, *quick = sys.argv[1:]
    task = Task(Path(path), platform, bool(quick))
    PARTS[part](task)
    if part not in ("tests", "bits-of-cpu"):
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        task.save(peak_mib=None if peak is None else peak / 2**20)


if __name__ == "__main__":
    main()
