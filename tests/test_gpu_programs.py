# SPDX-License-Identifier: Apache-2.0
"""What a GPU waits for in a round, and floats that it would add in any order.

A condition or a loop of unknown length waits until the host has read a number from the
GPU. These tests read the programs, which need no GPU: they are lowered for one.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

import jboost as jb
from jboost.entry.context import use_implementation
from jboost.entry.programs import Compiled

NUM_ROUNDS = 7
PLACE = re.compile(r'jboost/([\w/]+\.py)"?:(\d+)')
# Helpers, in whose place their callers are named.
HELPERS = ("entry/", "kernels/", "numerics/")
# Growing a tree: one level after the other, of as many as are needed.
GROWING = (
    "trees/histogram.py", "trees/levels.py", "trees/grow.py",
    "trees/splitting.py",
)  # fmt: skip


class Reader:
    """Lists the operations of a lowered program that matter on a GPU."""

    def __init__(self, lowered):
        functions = lowered.compiler_ir().body.operations
        self.functions = {f.attributes["sym_name"].value: f for f in functions}
        self.known = {}  # constants that a function is called with
        self.waits, self.scatters = [], []
        self.read(self.functions["main"].regions[0].blocks[0], ())

    def constant(self, value):
        """Returns the integer that a value is, if it is always the same."""
        if isinstance(value.owner, ir.Block):
            return self.known.get(value)
        op = getattr(value.owner, "operation", value.owner)
        if op.name == "stablehlo.constant":
            text = str(op.attributes["value"])
            number = re.fullmatch(r"dense<(-?\d+)> : tensor<u?i\d+>", text)
            return None if number is None else int(number[1])
        if op.name == "stablehlo.case":  # the index of a platform
            index = self.constant(op.operands[0])
            if index is None:
                return None
            return self.constant(
                [*op.regions[index].blocks[0].operations][-1].operands[0]
            )
        if op.name in ("stablehlo.convert", "stablehlo.clamp"):
            return self.constant(op.operands[op.name == "stablehlo.clamp"])
        return None

    def read(self, block, within):
        """Reads a block, which is inside of these operations."""
        for op in (each.operation for each in block.operations):
            blocks = [block for region in op.regions for block in region.blocks]
            if op.name == "func.call":
                name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                inner = self.functions[name].regions[0].blocks[0]
                for argument, value in zip(inner.arguments, op.operands, strict=True):
                    self.known[argument] = self.constant(value)
                self.read(inner, within)
            elif op.name == "stablehlo.case":
                index = self.constant(op.operands[0])
                if index is not None:  # of the platform
                    self.read(blocks[index], within)
                    continue
                self.waits.append((self.place(op), within))
                for branch in blocks:
                    self.read(branch, (*within, "branch"))
            elif op.name == "stablehlo.while":
                turns = self.count_turns(op)
                if turns is None:
                    self.waits.append((self.place(op), within))
                self.read(blocks[1], (*within, turns))
            elif op.name == "stablehlo.scatter":
                floats = "f32" in str(op.operands[0].type)
                adds = len([*blocks[0].operations]) > 1  # others only write
                if floats and adds and "unique_indices = true" not in str(op):
                    self.scatters.append((self.place(op), within))
            else:
                for inner in blocks:
                    self.read(inner, within)

    def count_turns(self, loop):
        """Returns how often a loop runs, if that is known."""
        condition = loop.regions[0].blocks[0]
        compared = [*condition.operations][-1].operands[0].owner
        op = getattr(compared, "operation", compared)
        if isinstance(compared, ir.Block) or op.name != "stablehlo.compare":
            return None
        first, last = op.operands
        if not isinstance(first.owner, ir.Block):
            return None
        start = self.constant(loop.operands[ir.BlockArgument(first).arg_number])
        end = self.constant(last)
        return None if start is None or end is None else end - start

    def place(self, op):
        """Returns the line of the library that an operation comes from."""
        found = PLACE.findall(str(op.location)) or [("?", "0")]
        outside = [each for each in found if not each[0].startswith(HELPERS)]
        return (outside or found)[0]


N = 300
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = X[:, 0] + X[:, 1] ** 2
CLASSES = (Y > 1).astype(np.int32)
SMOOTHING = "objective/curvature.py"  # whether a row has a minimum, or is at a kink
GUARD = "trees/leaves.py"  # whether Newton steps lower the loss
TOGETHER = "boosting/round.py"  # whether trees of several scores lower it together
ORDER = "trees/leaves.py"  # which quantile a leaf is
CASES = {
    "sampled and monotone": (
        jb.losses.squared_error, Y, dict(subsample=0.5, monotone=(1, 0, 0, 0)), []
    ),
    "softmax": (
        jb.losses.softmax, CLASSES, dict(num_scores=2, init_score=[0.5, 0.0]),
        [SMOOTHING, GUARD, TOGETHER],
    ),
    "absolute error": (jb.losses.absolute_error, Y, {}, [ORDER]),
}  # fmt: skip


@pytest.fixture
def source_lines():
    """Programs know their source lines."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 20)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


@pytest.mark.usefixtures("source_lines")
@pytest.mark.parametrize("case", CASES)
def test_what_a_gpu_waits_for_in_a_round(case):
    loss, y, settings, expected = CASES[case]
    y = np.asarray(y, y.dtype if y.dtype == np.int32 else np.float32)
    codes = jb.apply_bins(jb.fit_bins(X), X)

    def train(codes, y):
        return jb.boost(
            codes, y, loss, jax.random.key(0), num_rounds=NUM_ROUNDS, max_depth=2,
            implementation="xla", **settings,
        )  # fmt: skip

    lowered = jax.jit(train).trace(codes, y).lower(lowering_platforms=("cuda",))
    program = Reader(lowered)
    waits = [
        place
        for place, within in program.waits
        # Of conditions within others, an ordinary round meets none.
        if NUM_ROUNDS in within and "branch" not in within and place[0] not in GROWING
    ]
    assert Counter(file for file, _ in waits) == Counter(expected), waits
    assert not program.scatters


@pytest.mark.usefixtures("source_lines")
def test_the_reader_finds_what_it_looks_for():
    def wait(x, group):
        x = jax.lax.cond(x[0] > 0, lambda x: x + 1, lambda x: x, x)
        x = jax.lax.while_loop(lambda x: x[1] < 3, lambda x: x * 2, x)
        x = jax.lax.fori_loop(0, 3, lambda _, x: x - 1, x)
        x = jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)
        return jax.ops.segment_sum(x, group, 3), x.at[0].set(1.0)

    traced = jax.jit(wait).trace(jnp.ones(4), jnp.zeros(4, int))
    found = Reader(traced.lower(lowering_platforms=("cuda",)))
    assert (len(found.waits), len(found.scatters)) == (2, 1)


@pytest.mark.usefixtures("source_lines")
def test_programs_of_fit_wait_for_nothing(monkeypatch):
    seen, look_up = {}, Compiled.jitted

    def record(self, *operands):
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), operands
        )
        seen[self.function.__name__] = self, shapes
        return look_up(self, *operands)

    monkeypatch.setattr(Compiled, "jitted", record)
    jb.fit(X, Y > 1, jb.losses.logistic, num_rounds=1, max_depth=2)
    for name in ("derive", "grow", "finish"):
        program, operands = seen[name]

        def run(*operands, program=program):
            with use_implementation("cuda"):
                return program.function(*program.static, *operands)

        lowered = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
        assert not Reader(lowered).waits, name
        kernel = 'kernel = "packed_histogram_3"'  # not the slow one
        assert (kernel in lowered.as_text()) == (name == "grow")
