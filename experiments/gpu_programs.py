# SPDX-License-Identifier: Apache-2.0
"""What does XLA make of a round of training on an H100? Needs no GPU.

XLA compiles for a GPU that is only described. For each loss the script compiles ten
rounds of ``jb.boost`` and counts what one round launches: fusions of XLA, kernels of
jboost, copies. A condition, or a loop whose length is not known, waits until the host
has read a number from the GPU.

    python3 -m pip install "jax[cuda13]"
    python experiments/gpu_programs.py
"""

import os
import re
from collections import Counter

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

import jax
import jax.numpy as jnp
from experiment_tools import make_parser, write_json
from jax.experimental import topologies

import jboost as jb
from jboost.entry.context import use_implementation

ROUNDS = 10
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


def compile_rounds(loss, implementation, size, sharding):
    """Returns the text of the compiled program of ten rounds."""

    def train(codes, y):
        with use_implementation(implementation):
            return jb.boost(
                codes, y, loss, jax.random.key(0), num_rounds=ROUNDS,
                max_depth=size.depth,
            )  # fmt: skip

    shapes = ((size.rows, size.features), jnp.uint8), ((size.rows,), jnp.float32)
    operands = [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in shapes]
    lowered = jax.jit(train).trace(*operands).lower(lowering_platforms=("cuda",))
    return lowered.compile().as_text()


def count_launches(text):
    """Counts the instructions of one round, with those of its branches and loops."""
    pattern = r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\) -> .*? \{\n(.*?)^\}"
    bodies = dict(re.findall(pattern, text, re.M | re.S))
    rounds = [
        re.search(r"body=%?([\w.\-]+)", line).group(1)
        for body in bodies.values()
        for line in body.splitlines()
        if " while(" in line and _find_length(line) == ROUNDS
    ]
    counts = Counter()
    for name in rounds[-1:]:
        _add_counts(bodies, name, counts)
    return counts


def _add_counts(bodies, name, counts):
    for line in bodies[name].splitlines():
        for kind in ("fusion", "custom-call", "copy", "conditional", "while"):
            if f" {kind}(" not in line:
                continue
            counts["kernel" if kind == "custom-call" else kind] += 1
            if kind == "while" and _find_length(line) is None:
                counts["unknown length"] += 1
            if kind in ("while", "conditional"):
                parts = r"(?:body|_computation|branch_computations)=\{?([^}\s]+[^}]*?)"
                for part in re.findall(parts + r"(?:\}|, \w+=|$)", line):
                    for inner in re.findall(r"%?([\w.\-]+)", part):
                        if inner in bodies:
                            _add_counts(bodies, inner, counts)


def _find_length(line):
    """Returns how often a loop runs; None if that is not known."""
    found = re.search(r'known_trip_count"?:\s*\{"n":\s*"(\d+)"', line)
    return int(found.group(1)) if found else None


def main():
    """Prints a table: a row for each loss and implementation."""
    parser = make_parser(__doc__)
    parser.add_argument("--losses", nargs="+", default=["squared_error", "logistic"])
    parser.add_argument("--implementations", nargs="+", default=["cuda", "xla"])
    parser.add_argument("--rows", type=int, default=2**17)
    parser.add_argument("--features", type=int, default=28)
    parser.add_argument("--depth", type=int, default=6)
    size, found = parser.parse_args(), []
    sharding = find_sharding()
    print("| loss | implementation |", " | ".join(COLUMNS), "|")
    print("|---" * (2 + len(COLUMNS)) + "|")
    for name in size.losses:
        for implementation in size.implementations:
            loss = getattr(jb.losses, name)
            text = compile_rounds(loss, implementation, size, sharding)
            counts = count_launches(text)
            numbers = " | ".join(str(counts[column]) for column in COLUMNS)
            print(f"| {name} | {implementation} | {numbers} |", flush=True)
            found.append(dict(loss=name, implementation=implementation, **counts))
    write_json(size.out / "gpu_programs.json", dict(rounds=found))


if __name__ == "__main__":
    main()
