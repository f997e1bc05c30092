# SPDX-License-Identifier: Apache-2.0
"""Kernels refuse values that lead out of buffers, and survive a lack of memory."""

import gc
import os
import sys
import weakref
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jboost.kernels import calls, grow_cpu

pytestmark = pytest.mark.skipif(
    not calls.available(), reason="the kernels were not built"
)
SANITIZED = any(name in os.environ for name in ("ASAN_OPTIONS", "TSAN_OPTIONS"))


def i32(*values):
    return np.array(values, np.int32)


def like(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def run(name, results, operands, aliases=None, **attributes):
    operands = [jnp.asarray(each) for each in operands]
    results, structure = jax.tree.flatten(results)
    for operand, result in (aliases or {}).items():
        results[result] = operands[operand]
    results = jax.tree.unflatten(structure, results)
    values = calls.call(name, results, *operands, **attributes)
    return jax.block_until_ready(values)


# Five rows, three features, two slots, of which the first holds the root.
LEVEL = dict(
    columns=np.ones((3, 5), np.uint8), position=i32(0, -1), feature=i32(2, 0),
    threshold=i32(0, 0), missing_left=np.array([True, False]),
    found=np.array([True, False]), words=np.zeros((5, 2), np.int32),
    index=np.arange(5, dtype=np.uint16), segments=i32(0, 5, 0, 0).reshape(1, 2, 2),
    leaf=np.zeros(5, np.int32),
)  # fmt: skip
PACKED = np.ones((1, 5, 8), np.uint8)
SPARSE = dict(
    columns=np.ones((1, 4), np.uint8), starts=i32(0, 2, 4, 4), rows=i32(0, 3, 1, 4),
    absent=np.zeros(3, np.uint8),
)  # fmt: skip


def route_rows(aliased=True, level=0, max_depth=2, **changed):
    operands = LEVEL | changed
    state = [operands[name] for name in list(LEVEL)[6:]]
    aliases = {6 + i: i for i in range(4)} if aliased else None
    sizes = dict(level=level, max_depth=max_depth)
    return run(
        "route_rows", tuple(map(like, state)), operands.values(), aliases, **sizes
    )


@pytest.mark.parametrize("codes", [LEVEL["columns"], PACKED])
def test_rows_are_routed(codes):
    _, index, segments, _ = route_rows(columns=codes)
    np.testing.assert_array_equal(segments[0], [[0, 0], [0, 5]])
    np.testing.assert_array_equal(index, range(5))
    leaf = route_rows(columns=codes, level=1, max_depth=2)[3]
    np.testing.assert_array_equal(leaf, np.ones(5))


@pytest.mark.parametrize(
    "changed",
    [
        dict(level=-1), dict(level=2), dict(max_depth=0), dict(max_depth=40),
        dict(feature=i32(3, 0)), dict(feature=i32(-1, 0)),
        dict(columns=PACKED, feature=i32(8, 0)), dict(columns=PACKED[:, :4]),
        dict(position=i32(1, -1)), dict(position=i32(-2, -1)),
        dict(found=np.array([True, True])),  # of a slot without a node
        dict(found=np.array([True, True]), position=i32(0, 0)),  # more than slots hold
        dict(index=np.arange(1, 6, dtype=np.uint16)),
        dict(segments=i32(0, 6, 0, 0).reshape(1, 2, 2)),
        dict(segments=i32(-1, 5, 0, 0).reshape(1, 2, 2)),
        dict(segments=i32(3, 2, 0, 0).reshape(1, 2, 2)),
        dict(segments=np.zeros((1, 0, 2), np.int32)), dict(aliased=False),
    ],
)  # fmt: skip
def test_splits_that_lead_out_of_buffers_are_refused(changed):
    with pytest.raises(Exception, match="jboost kernel: "):
        route_rows(**changed)


def find_leaves(aliased=True, sparse=None, feature=(0, 1, 2)):
    leaf, skip = np.zeros(5, np.int32), np.zeros(5, bool)
    columns, *entries = (sparse or dict(columns=LEVEL["columns"])).values()
    operands = (columns, i32(*feature), i32(0, 0, 0), np.ones(3, bool), skip, leaf)
    aliases = {5: 0} if aliased else None
    return run("find_leaves", like(leaf), (*operands, *entries), aliases)


@pytest.mark.parametrize("sparse", [None, SPARSE])
def test_leaves_are_found_only_by_features_that_are_there(sparse):
    assert find_leaves(sparse=sparse).shape == (5,)
    for changed in (
        dict(feature=(0, 1, 3)),
        dict(feature=(0, -1, 2)),
        dict(aliased=False),
    ):
        with pytest.raises(Exception, match="jboost kernel: "):
            find_leaves(sparse=sparse, **changed)


# Two slots; the second one is summed.
SUMS = dict(
    packed=PACKED, words=LEVEL["words"], index=LEVEL["index"],
    segments=i32(0, 2, 2, 5).reshape(1, 2, 2), num_features=np.int32(3), slot=i32(1),
    sums=np.zeros((1, 3, 3, 4), np.int32),
)  # fmt: skip


def sum_slots(aliased=True, **changed):
    operands = SUMS | changed
    aliases = {6: 0} if aliased else None
    return run("sum_slots", like(operands["sums"]), operands.values(), aliases)


def test_slots_are_summed_only_where_there_are_rows():
    once = sum_slots()
    np.testing.assert_array_equal(once[0, 2], [[0, 3, 3, 3]] * 3)
    np.testing.assert_array_equal(sum_slots(sums=np.asarray(once)), 2 * once)
    np.testing.assert_array_equal(sum_slots(slot=i32(-1)), 0 * once)
    for changed in (
        dict(slot=i32(2)), dict(slot=i32(0, 1)), dict(aliased=False),
        dict(segments=i32(0, 2, 2, 6).reshape(1, 2, 2)),
        dict(index=np.array([0, 1, 5, 3, 4], np.uint16)),
        dict(num_features=np.int32(4)), dict(num_features=np.int32(0)),
        dict(sums=np.zeros((1, 3, 3, 300), np.int32)),
        dict(sums=np.zeros((1, 3, 9, 4), np.int32), num_features=np.int32(9)),
    ):  # fmt: skip
        with pytest.raises(Exception, match="jboost kernel: "):
            sum_slots(**changed)


def test_codes_beyond_the_bins_count_as_the_last():
    """A code of two bytes must not be added beyond the tables of sums."""
    packed = np.full((1, 5, 8), 65535, np.uint16)
    words = np.stack([np.arange(5, dtype=np.int32), np.zeros(5, np.int32)], axis=1)
    sums = sum_slots(packed=packed, words=words, slot=i32(0))
    np.testing.assert_array_equal(sums[0, 0], [[0, 0, 0, 1]] * 3)


LIMITS = grow_cpu.SplitLimits(
    l2=np.float32(1), min_gain=np.float32(0), min_child_weight=np.float32(1),
    min_child_samples=np.int32(1), num_features=np.int32(3),
    rows_per_threshold=np.int32(0),
)._asdict()  # fmt: skip
# The first level of a tree of depth 2 with two slots.
FIND = dict(
    seed=np.zeros(2, np.uint32), fractions=np.ones(3, np.float32), **LIMITS,
    units=np.ones(2, np.float32),
    sums=np.cumsum(np.ones((1, 2, 3, 4), np.int32), axis=-1, dtype=np.int32),
    summed=i32(0), feature=np.zeros(3, np.int32), threshold=np.zeros(3, np.int32),
    missing_left=np.zeros(3, bool), position=i32(0, 0), place=i32(0, 0), free=i32(0),
    histograms=np.zeros((2, 2, 3, 4), np.int32),
)  # fmt: skip


def find_level(aliased=True, level=0, max_depth=2, **changed):
    operands = FIND | changed
    first = list(FIND).index("feature")
    state = [operands[name] for name in list(FIND)[first:]]
    shape = jax.ShapeDtypeStruct
    slots = operands["position"].shape
    found = [shape(slots, np.int32)] * 3 + [shape(slots, np.bool_)] * 2
    results = (*map(like, state), *found, shape((1,), np.int32))
    aliases = {first + i: i for i in range(7)} if aliased else None
    return run(
        "find_level", results, operands.values(), aliases, categorical=0, grouped=0,
        level=level, limited=0, max_depth=max_depth, max_leaves=0,
    )  # fmt: skip


def test_levels_are_found_only_in_nodes_that_are_there():
    np.testing.assert_array_equal(find_level()[7], [0, -1])
    for changed in (
        dict(level=2), dict(level=-1), dict(max_depth=0), dict(max_depth=40),
        dict(summed=i32(2)), dict(num_features=np.int32(4)), dict(aliased=False),
        dict(sums=np.zeros((1, 2, 3, 5), np.int32)),
        dict(level=1, place=i32(2, 0)), dict(level=1, place=i32(0, -1)),
        dict(level=1, position=i32(2, 0)), dict(level=1, position=i32(-2, 0)),
    ):  # fmt: skip
        with pytest.raises(Exception, match="jboost kernel: "):
            find_level(**changed)


# Five rows, three features, four codes; depth 2.
GROW = dict(
    columns=np.ones((3, 5), np.uint8), packed=np.ones((1, 5, 8), np.uint8),
    gradient=np.arange(5, dtype=np.float32), curvature=np.ones(5, np.float32),
    in_bag=np.ones(5, np.uint8), seed=np.zeros(2, np.uint32),
    fractions=np.ones(3, np.float32), **LIMITS,
)  # fmt: skip
GROW_SIZES = dict(
    categorical=0, grouped=0, limited=0, max_depth=2, max_leaves=0, num_bins=4,
    num_slots=2, uniform=0,
)  # fmt: skip
MAX_ONEHOT = np.int32(4)


def grow(entries=(), more=(), **changed):
    sizes = GROW_SIZES | {k: v for k, v in changed.items() if k in GROW_SIZES}
    operands = GROW | {k: v for k, v in changed.items() if k not in GROW_SIZES}
    if entries:
        operands.pop("packed")
    words = [((3, 1), np.uint32)] * sizes["categorical"]
    shapes = [
        ((3,), np.int32), ((3,), np.int32), ((3,), bool), ((5,), np.int32), *words,
    ]  # fmt: skip
    results = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    operands = (*operands.values(), *entries, *more)
    return jax.jit(lambda *a: calls.call("grow", results, *a, **sizes))(*operands)


def test_trees_are_grown_only_from_codes_that_are_there():
    assert grow()[3].shape == (5,)
    assert grow(num_features=np.int32(1))[3].shape == (5,)
    features = dict(categorical=1, more=(i32(2), i32(3), MAX_ONEHOT))
    assert grow(**features)[3].shape == (5,)
    for changed in (
        dict(packed=np.ones((1, 4, 8), np.uint8)),
        dict(packed=np.ones((1, 5, 8), np.uint16)),
        dict(gradient=np.ones(4, np.float32)),
        dict(num_bins=300), dict(num_slots=3), dict(max_depth=31),
        dict(num_features=np.int32(4)), dict(num_features=np.int32(0)),
        dict(categorical=1, more=(i32(3), i32(3), MAX_ONEHOT)),
        dict(categorical=1, more=(i32(-1), i32(3), MAX_ONEHOT)),
    ):  # fmt: skip
        with pytest.raises(Exception, match="jboost kernel: "):
            grow(**changed)
    codes = np.array([1, 1, 2, 2, 3], np.uint8)
    split = dict(
        columns=np.tile(codes, (3, 1)), packed=np.tile(codes[None, :, None], (1, 1, 8)),
        gradient=np.array([-9, -8, 0, 8, 9], np.float32),
    )  # fmt: skip
    assert grow(**split)[0].tolist() == [0, 0, 0]
    with pytest.raises(Exception, match="two slots"):
        grow(**split, num_slots=1)


def test_trees_are_grown_only_from_entries_that_are_there():
    columns = SPARSE["columns"]
    given = {name: SPARSE[name] for name in ("starts", "rows", "absent")}
    assert grow(tuple(given.values()), columns=columns)[3].shape == (5,)
    for changed in (
        dict(rows=i32(0, 5, 1, 4)), dict(rows=i32(-1, 3, 1, 4)),
        dict(starts=i32(0, 2, 1, 4)), dict(starts=i32(0, 2, 4, 9)),
    ):  # fmt: skip
        with pytest.raises(Exception, match="jboost kernel: "):
            grow(tuple((given | changed).values()), columns=columns)


needs_limit = pytest.mark.skipif(
    SANITIZED or sys.platform != "linux", reason="needs a limit of address space"
)


@contextmanager
def address_space(more):
    """Limits the process to its present address space and some bytes more."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@needs_limit
def test_a_lack_of_memory_is_an_error_and_not_the_end():
    def find_cuts(num_rows):
        matrix = np.ones((num_rows, 2), np.float32)
        weight = np.ones(num_rows).view(np.uint32).reshape(num_rows, 2)
        cuts = jax.ShapeDtypeStruct((2, 6), np.float32)
        results = cuts, cuts, jax.ShapeDtypeStruct((2,), np.int32)
        return lambda: calls.call_on_host(
            "find_cuts", results, matrix, weight, max_bins=8
        )

    small = find_cuts(20_000)
    small()  # compiles, and starts the threads
    # Each column takes a block of 40 MB, more than malloc keeps for later use.
    large = find_cuts(5_000_000)
    with address_space(12_000_000), pytest.raises(Exception, match="out of memory"):
        large()
    assert small()[2].tolist() == [0, 0]


@pytest.mark.usefixtures("young_heap")
def test_memory_of_a_refused_call_is_released():
    result = np.zeros((3, 5), np.uint16)
    memory = weakref.ref(result)
    operands = np.ones((5, 3), np.float32), np.ones((2, 3), np.float32)
    with pytest.raises(Exception, match="jboost kernel: "):
        calls.call_on_host("find_codes", (result,), *operands)
    del result
    gc.collect()
    assert memory() is None


@needs_limit
def test_scratch_memory_is_kept_for_the_next_call_and_then_freed():
    num_rows = 10_000_000
    operands = GROW | dict(
        columns=np.ones((1, num_rows), np.uint8), num_features=np.int32(1),
        packed=np.ones((1, num_rows, 8), np.uint8), in_bag=np.ones(num_rows, np.uint8),
        gradient=np.ones(num_rows, np.float32), curvature=np.ones(num_rows, np.float32),
    )  # fmt: skip
    nodes = [np.empty(3, dtype) for dtype in (np.int32, np.int32, bool)]
    into = (*nodes, np.empty(num_rows, np.int32))

    def grow_again():  # takes a block of 80 MB, more than malloc keeps
        calls.call_on_host("grow", into, *operands.values(), **GROW_SIZES)

    grow_again()  # starts the threads
    with grow_cpu.keep_scratch():
        grow_again()
        with address_space(12_000_000):
            grow_again()
    with address_space(12_000_000), pytest.raises(Exception, match="out of memory"):
        grow_again()


@needs_limit
def test_a_lack_of_memory_for_a_single_tree_is_a_memory_error():
    limits = dict(
        max_depth=1, min_child_samples=1, min_split_samples=2, min_child_weight=0.0,
        min_gain=0.0,
    )  # fmt: skip

    def grow_single(num_rows):
        matrix, targets = np.ones((num_rows, 1), np.float32), np.ones((1, num_rows))
        return lambda: grow_cpu.grow_cart(matrix, targets, None, **limits)

    large = grow_single(5_000_000)
    with address_space(12_000_000), pytest.raises(MemoryError, match="5000000 rows"):
        large()
    assert grow_single(3)()["num_rows"].tolist() == [3]
