# SPDX-License-Identifier: Apache-2.0
"""What does XLA make of a round of training on an H100? Needs no GPU.

XLA compiles for a GPU that is only described. For each case the script compiles ten
rounds of ``jb.boost``, and the programs that ``jb.fit`` runs one after the other,
and counts what one round launches: fusions of XLA, kernels of jboost, copies. What a
loop launches counts as often as it runs, once if that is not known; of the branches of
a condition the one with fewer launches counts. A condition, or a loop of unknown
length, waits until the host has read a number from the GPU. It takes about five
minutes.

    python3 -m pip install "jax[cuda13]"
    python experiments/gpu_programs.py
"""

import os
import re
from collections import Counter
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

import jax
import jax.numpy as jnp
import numpy as np
from experiment_tools import make_figures, make_parser, print_table, write_json
from jax.experimental import topologies

import jboost as jb
import jboost.training.chunks as chunks
from jboost.entry.context import use_implementation
from jboost.entry.programs import Compiled

ROUNDS = 10
PROGRAMS = ("derive", "grow", "_loss_values", "finish")  # of a round of fit
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
COLUMNS = ("fusion", "kernel", "copy", "conditional", "while", "unknown length")
SCORES = dict(num_scores=10)
CASES = {  # loss and settings
    "squared error": ("squared_error", {}),
    "logistic": ("logistic", {}),
    "absolute error": ("absolute_error", {}),
    "softmax, 10 classes": ("softmax", dict(SCORES, share_structure=True)),
    "the same, a tree for each": ("softmax", dict(SCORES, share_structure=False)),
    "categories": ("squared_error", dict(categorical=[0, 1])),
    "monotone": ("squared_error", dict(monotone={0: 1, 1: -1})),
    "lambda_rank, groups of 16": ("lambda_rank", {}),
}
BOOSTED = [*CASES][:5]


def find_sharding():
    """Returns where programs for the described GPU have their arrays."""
    import jax._src.xla_bridge as bridge  # JAX has no public way without a GPU

    known = bridge.canonicalize_platform
    bridge.canonicalize_platform = lambda name: "cuda" if name == "gpu" else known(name)
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=H100
    )
    mesh = topologies.make_mesh(topology, (1,), ("rows",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compile_rounds(case, implementation, size, sharding):
    """Returns the text of the compiled program of ten rounds."""
    name, more = CASES[case]
    if more:
        more = dict(more, init_score=jnp.zeros(more["num_scores"]))

    def train(codes, y):
        with use_implementation(implementation):
            return jb.boost(
                codes, y, getattr(jb.losses, name), jax.random.key(0),
                num_rounds=ROUNDS, max_depth=size.depth, **more,
            )  # fmt: skip

    labels = jnp.int32 if more else jnp.float32
    shapes = ((size.rows, size.features), jnp.uint8), ((size.rows,), labels)
    operands = [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in shapes]
    lowered = jax.jit(train).trace(*operands).lower(lowering_platforms=("cuda",))
    return lowered.compile().as_text()


def record_fit(case, size):
    """Runs a fit on the CPU, as if on a GPU; returns its programs and operands."""
    (name, more), generator = CASES[case], np.random.default_rng(0)
    x = generator.normal(size=(size.rows, size.features)).astype(np.float32)
    y = np.abs(x[:, 2]).astype(np.float32)
    if name in ("softmax", "lambda_rank"):
        y = (y * 4).astype(np.int32) % 10
    if name == "logistic":
        y = (y > 1).astype(np.float32)
    if name == "lambda_rank":
        more = dict(groups=np.arange(size.rows) // 16)
    if "categorical" in more:
        x[:, :2] = generator.integers(0, (200, 30), (size.rows, 2))
    found, look_up = {}, Compiled.jitted

    def shape(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    def record(self, *operands):
        name = self.function.__name__
        if name in PROGRAMS:  # other programs may follow that a few rounds need
            shapes = jax.tree.map(shape, jax.tree.map(jnp.asarray, operands))
            found.setdefault(name, (self, shapes))
        return look_up(self, *operands)

    Compiled.jitted = record
    on_cpu, chunks.is_on_cpu = chunks.is_on_cpu, lambda _: False
    try:
        jb.fit(x, y, getattr(jb.losses, name), num_rounds=1, max_depth=size.depth,
               **more)  # fmt: skip
    finally:
        Compiled.jitted, chunks.is_on_cpu = look_up, on_cpu
    return found


def compile_fit(case, implementation, size, sharding):
    """Yields the text of each compiled program of a round of fit, once for each call.

    Losses of rows are computed after the round, and after the step of each score.
    """
    found = record_fit(case, size)
    *_, scored = found["grow"][0].static
    calls = {"_loss_values": scored * (1 + CASES[case][1].get("num_scores", 1))}
    for name, (program, shapes) in found.items():

        def run(*operands, program=program):
            with use_implementation(implementation):
                return program.function(*program.static, *operands)

        operands = jax.tree.map(partial(_place, sharding), shapes)
        traced = jax.jit(run, donate_argnums=program.donate).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
        yield from [text] * calls.get(name, 1)


def _place(sharding, leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def count_program(text):
    """Counts the instructions of a program, with those of its branches and loops."""
    bodies = _read_bodies(text)
    return _count(bodies, re.search(r"^ENTRY %?([\w.\-]+)", text, re.M).group(1))


def count_launches(text):
    """Counts the instructions of one round of boost, as ``count_program`` does."""
    bodies = _read_bodies(text)
    rounds = [
        re.search(r"body=%?([\w.\-]+)", line).group(1)
        for body in bodies.values()
        for line in body.splitlines()
        if " while(" in line and _find_length(line) == ROUNDS
    ]
    # Loops over ten scores run as often, but launch less.
    return max((_count(bodies, name) for name in rounds), key=_count_all)


def _read_bodies(text):
    pattern = r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\) -> .*? \{\n(.*?)^\}"
    return dict(re.findall(pattern, text, re.M | re.S))


def _count(bodies, name):
    counts = Counter()
    for line in bodies[name].splitlines():
        for kind in ("fusion", "custom-call", "copy", "conditional", "while"):
            if f" {kind}(" in line:
                counts["kernel" if kind == "custom-call" else kind] += 1
        if " while(" in line:
            body = _count(bodies, re.search(r"body=%?([\w.\-]+)", line).group(1))
            length = _find_length(line)
            counts["unknown length"] += length is None
            for kind, count in body.items():
                counts[kind] += count * (length or 1)
        elif " conditional(" in line:
            parts = r"(?:_computation|branch_computations)=\{?([^}\s]+[^}]*?)"
            found = re.findall(parts + r"(?:\}|, \w+=|$)", line)
            names = [
                each for part in found for each in re.findall(r"%?([\w.\-]+)", part)
            ]
            branches = [_count(bodies, each) for each in names if each in bodies]
            counts += min(branches, key=_count_all, default=Counter())
    return counts


def _count_all(counts):
    """Returns the number of launches."""
    return sum(counts[kind] for kind in ("fusion", "kernel", "copy"))


def _find_length(line):
    """Returns how often a loop runs; None if that is not known."""
    found = re.search(r'known_trip_count"?:\s*\{"n":\s*"(\d+)"', line)
    return int(found.group(1)) if found else None


def main():
    """Prints two tables: a row for each case."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--rows", type=int, default=2**17)
    parser.add_argument("--features", type=int, default=28)
    parser.add_argument("--depth", type=int, default=6)
    size, sharding = parser.parse_args(), find_sharding()
    tables = {name: [["case", "launches", *COLUMNS]] for name in ("boost", "fit")}
    for case in size.cases:
        rest = case, size.implementation, size, sharding
        counts = {"fit": sum(map(count_program, compile_fit(*rest)), Counter())}
        if case in BOOSTED:
            counts["boost"] = count_launches(compile_rounds(*rest))
        for name, found in counts.items():
            numbers = _count_all(found), *(found[column] for column in COLUMNS)
            tables[name].append([case, *(f"{number:,}" for number in numbers)])
            print(f"{case}: {numbers[0]:,} launches in a round of {name}", flush=True)
    for table in tables.values():
        print_table(table)
    figures = make_figures("compiled for a described H100", **tables)
    write_json(size.out / "gpu_programs.json", dict(figures=figures))


if __name__ == "__main__":
    main()
