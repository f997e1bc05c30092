# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: what a run depends on, so that no other run continues from its file.

In: a run before its first round. Out: settings as JSON stores them, digests of loss and
thresholds, and a digest for every block of 2^18 rows. Blocks are counted over the rows
of all processes, and the digest of a block is a sum over its rows. So processes may
divide the rows in any way, and a mixed-up shard is found by its block.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Integer, UInt64

from jboost.boosting.settings import RoundSettings, declared
from jboost.codes.codes import SparseCodes
from jboost.entry.exchanges import (
    gather_texts,
    num_processes,
    total_of_processes,
)
from jboost.entry.implementation import current_implementation
from jboost.model.containers import library_version
from jboost.objective.group_tracing import GroupLoss
from jboost.objective.jaxprs import Program
from jboost.objective.tracing import TracedLoss
from jboost.tables.frames import RowSource
from jboost.training.chunks import Job, Runner
from jboost.training.preparing import Prepared
from jboost.training.request import FitRequest
from jboost.training.rows import PaddedRows
from jboost.trees.initial import MedianStart

BLOCK_ROWS = 2**18
_STEP = 2**13  # rows whose hashes stay in the processor's cache
_LONGEST = 200  # characters of a loss that errors show
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TRACED_TOO = ("max_bins",)  # static, but a number of the program, too
_NAMES: dict[str, str] = {
    "values.bounds": "max_delta_step", "values.l1": "l1", "values.monotone": "monotone",
    "groups": "interactions", "categories.features": "categorical",
    "categories.l2": "category_l2", "categories.smoothing": "category_smoothing",
    "categories.min_weight": "min_category_weight",
    "categories.max_onehot": "max_onehot",
}  # fmt: skip


class Fingerprint(NamedTuple):
    """What a run depends on.

    Attributes:
      settings: by name, as JSON stores them.
      blocks: digests of x, y, sample_weight and offset, by name; two words for each
        block of rows.
    """

    settings: dict[str, Any]
    blocks: dict[str, np.ndarray]


def take_fingerprint(
    request: FitRequest, prepared: Prepared, job: Job, runner: Runner
) -> Fingerprint:
    """Returns what a run depends on."""
    settings = describe_run(request, prepared, job)
    blocks = _hash_rows("", job.rows, runner.read_codes())
    for name, part in job.sets.items():
        blocks |= _hash_rows(f"{name} ", part, part.read_codes())
    return Fingerprint(settings, blocks)


def describe_run(request: FitRequest, prepared: Prepared, job: Job) -> dict[str, Any]:
    """Returns what a run depends on, without its rows."""
    (loss, method), arrays = job.problem
    programs = list_programs(loss)
    text = repr([program and program.structure for program in programs])
    described = _without_addresses(text)  # of functions within
    named: dict[str, Any] = {
        name: getattr(method, name)
        for name, setting in declared(RoundSettings).items()
        if not setting.traced and name not in _TRACED_TOO
    }
    for name, value in _name_numbers(arrays.numbers):
        assert name not in named, name  # or one would hide the other
        named[name] = value
    named.setdefault("subsample", 1.0)
    bins, names, begin = prepared.bins, prepared.feature_names, request.begin
    if isinstance(begin, MedianStart) or begin is None:
        begin = "auto" if begin is None else "median"
    rows = _describe_rows("", job.rows)
    for name, part in job.sets.items():
        rows |= _describe_rows(f"{name} ", part)
    found = {
        "jboost": library_version(),
        "jax": jax.__version__,
        "thresholds of x": _digest(replace(bins, absent="missing")),
        "absent": bins.absent,
        **rows,
        "loss": _digest(described),
        "numbers in the loss": _digest(arrays.constants),
        **named,
        "implementation": current_implementation(),
        "init_score": begin if isinstance(begin, str) else np.asarray(begin).tolist(),
        "seed": request.settings.seed,
        "early_stopping_rounds": request.settings.early_stopping_rounds,
        "metrics": sorted(job.metrics),
        "by": None if request.by.metric is None else [*request.by],
        "validation": [*job.sets],
        "feature_names": names and [*names],
        "model": None if prepared.model is None else _digest(prepared.model),
    }
    return json.loads(json.dumps(found))


def list_programs(loss: TracedLoss | GroupLoss) -> list[Program | None]:
    """Returns all programs of a loss."""
    if isinstance(loss, GroupLoss):
        return [*loss.values, *loss.gradients, loss.estimate]
    return [loss.value, loss.gradient, loss.hessian, loss.estimate, loss.curvature]


def describe_call(request: FitRequest) -> dict[str, Any]:
    """Returns what the processes of a run must agree on before they read rows."""
    plain = (bool, int, float, str, type(None))
    named = {
        name: value if isinstance(value, plain) else _without_addresses(repr(value))
        for name, value in request.settings.values.items()
    }
    checkpoint = None if request.checkpoint is None else request.checkpoint_rounds
    rows, source = request.rows, isinstance(request.rows.x, RowSource)
    optional = {
        name: getattr(rows, name) for name in ("sample_weight", "offset", "groups")
    }
    for place, parts in request.sets.values():
        names = (f"{place} {name}" for name in ("sample_weight", "offset", "groups"))
        optional |= zip(names, parts[2:], strict=True)
    return {
        "jboost": library_version(),
        "jax": jax.__version__,
        "x": f"a stream, bins given: {rows.x.has_bins}" if source else "rows",
        **{name: None if each is None else "given" for name, each in optional.items()},
        "loss": _shorten(_without_addresses(repr(request.loss))),
        "rows are padded": request.padded,
        **named,
        "learning_rate": _digest(request.rates),
        "checkpoint_rounds": checkpoint,
        "metrics": sorted(request.metrics),
        "by": None if request.by.metric is None else [*request.by],
        "validation": [*request.sets],
        "model": None if request.model is None else _digest(request.model),
    }


def _shorten(text):
    return text if len(text) <= _LONGEST else _digest(text)


def compare_processes(settings: dict[str, Any]) -> None:
    """Raises on every process if the settings of two processes differ.

    Raises:
      ValueError: with the names of what differs, and the number of a process.
    """
    if num_processes() == 1:
        return
    first, *others = map(json.loads, gather_texts(json.dumps(settings)))
    for number, other in enumerate(others, start=1):
        differing = _name_differences(first, other, "{} on process 0, {} there")
        if differing:
            raise ValueError(
                f"all processes must train with the same arguments; process {number} "
                f"differs in {', '.join(differing)}"
            )


def _without_addresses(text):
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _name_differences(old, new, form):
    """Names what differs, with both values where these are no digests."""
    differing = []
    for key in {**new, **old}:
        before, now = old.get(key), new.get(key)
        if before == now:
            continue
        hidden = str(before).startswith("sha256:") or str(now).startswith("sha256:")
        values = form.format(repr(before), repr(now))
        differing.append(key if hidden else f"{key} ({values})")
    return differing


def compare_fingerprints(old: Fingerprint, new: Fingerprint, name: str) -> None:
    """Raises if two runs differ; names what differs.

    Args:
      old: from the checkpoint ``name``.
      new: of this run.
    """
    differing = _name_differences(old.settings, new.settings, "was {}, is {}")
    for key in new.blocks:
        before, now = old.blocks.get(key), new.blocks[key]
        if before is None or before.shape != now.shape:
            continue  # then the settings tell other sets or numbers of rows
        differ = np.any(before != now, axis=1)
        if differ.any():
            first = int(np.argmax(differ))
            differing.append(f"{key} (first in block {first} of {BLOCK_ROWS} rows)")
    if differing:
        raise ValueError(
            f"checkpoint {name} is of another run: what differs is "
            f"{', '.join(differing)}; repeat the call that wrote it (num_rounds may be "
            f"raised), or give another path, with model=jb.load({name}) to go on from "
            "its model"
        )


def _name_numbers(numbers: Any, group: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name in ``fit``, value) of every number that the program takes."""
    for name, value in numbers._asdict().items():
        if name == "limits":
            yield from _name_numbers(value)
        elif hasattr(value, "_fields"):
            yield from _name_numbers(value, f"{name}.")
        elif value is not None and name != "num_features":  # x is digested
            whole = group + name
            yield str(_NAMES.get(whole, whole)), np.asarray(value).tolist()


def _describe_rows(prefix, rows: PaddedRows):
    """Returns the number of rows, and what one row of the targets is."""
    leaves, structure = jax.tree.flatten(rows.data.targets)
    kinds = [f"{leaf.dtype.name}{[*leaf.shape[1:]]}" for leaf in leaves]
    groups = rows.data.groups
    named = {}
    if groups is not None:
        named[f"{prefix}groups"] = f"{groups.kind} {groups.width}"
    return {
        **named,
        f"{prefix}number of rows": rows.division[1],
        f"{prefix}type of y": " ".join([*kinds, str(structure)]),
    }


def _hash_rows(prefix, rows: PaddedRows, codes):
    """Returns the digests of rows without their padding."""
    division, sparse = rows.division, rows.data.codes
    targets, weights = rows.real
    words = [_as_words(leaf) for leaf in jax.tree.leaves(targets)]
    offset = rows.fetch(rows.offset, axis=1).T
    sums = {
        "x": _hash_entries(sparse, rows.size)
        if isinstance(sparse, SparseCodes)
        else hash_blocks(codes, *division),
        "y": hash_blocks([np.concatenate(words)], *division),
        "sample_weight": hash_blocks([_as_words(weights)], *division),
        "offset": hash_blocks([_as_words(offset)], *division),
    }
    groups = rows.data.groups
    if groups is not None and groups.number is not None:
        number = np.asarray(groups.number)[: rows.size]
        sums["groups"] = hash_blocks([_as_words(number)], *division)
    return {
        prefix + name: total_of_processes(each).view(np.uint32).reshape(-1, 2)
        for name, each in sums.items()
    }


def _as_words(array):
    """Returns the bytes of each row as unsigned integers, [W, N]."""
    size, width = math.prod(array.shape[1:]), array.dtype.itemsize
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.view(f"<u{width}").reshape(len(array), size).T  # or of no row


def hash_blocks(
    parts: Iterable[Integer[np.ndarray, "W n"]], first_row: int, num_rows: int
) -> UInt64[np.ndarray, " B"]:
    """Hashes rows of integers w, block by block.

    The hash of a block is the sum of mix(sum_j m_j w_ij + i * golden) over its rows i,
    modulo 2^64, with odd random m_j (multilinear hashing) and the finalizer of
    SplitMix64 (Steele, Lea and Flood 2014). It depends on the order of rows, but not
    on how they are divided into parts.

    Args:
      parts: the rows of this process, in order.
      first_row: the number of the first of them.
      num_rows: of all processes.
    """
    sums, first = np.zeros(-(-num_rows // BLOCK_ROWS), np.uint64), first_row
    for part in parts:
        multipliers = _choose_multipliers(len(part))
        start, end = 0, part.shape[1]
        while start < end:
            block, inside = divmod(first + start, BLOCK_ROWS)
            stop = min(end, start + min(_STEP, BLOCK_ROWS - inside))
            hashes = np.arange(first + start, first + stop, dtype=np.uint64) * _GOLDEN
            for column, multiplier in zip(part, multipliers, strict=True):
                hashes += column[start:stop].astype(np.uint64) * multiplier
            # Sums of arrays wrap silently, those of scalars warn.
            sums[block : block + 1] += np.sum(_mix(hashes), dtype=np.uint64)
            start = stop
        first += end
    return sums


def _hash_entries(codes: SparseCodes, num_rows):
    """Does what :func:`hash_blocks` does for the stored entries of sparse codes."""
    starts = np.asarray(codes.starts)
    rows = np.asarray(codes.rows)[: starts[-1]].astype(np.uint64)
    multipliers = np.repeat(_choose_multipliers(len(starts) - 1), np.diff(starts))
    values = np.asarray(codes.codes)[: starts[-1]].astype(np.uint64) + np.uint64(1)
    sums = np.zeros(-(-num_rows // BLOCK_ROWS), np.uint64)
    hashes = _mix(values * multipliers + rows * _GOLDEN)
    np.add.at(sums, (rows // np.uint64(BLOCK_ROWS)).astype(np.int64), hashes)
    return sums


def _choose_multipliers(number):
    return np.random.PCG64(0).random_raw(number) | np.uint64(1)


def _mix(hashes):
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _digest(tree):
    """Digests a pytree: its structure, its arrays and strings."""
    leaves, structure = jax.tree.flatten(tree)
    found = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if isinstance(leaf, str):
            found.update(leaf.encode("utf-8", "surrogatepass"))
            continue
        array = np.asarray(leaf)
        found.update(f"{array.dtype.name}{array.shape}".encode())
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        found.update(little.reshape(-1).view(np.uint8).data)
    return "sha256:" + found.hexdigest()
