# SPDX-License-Identifier: Apache-2.0
"""The libraries that ``gpu_parts.py`` compares with, if they can use the device.

In: a table on the device. Out: contenders as those of ``benchmark.py``, and why others
are absent.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from benchmark_cases import Case
from benchmark_peers import Contender, prepare_lightgbm, prepare_xgboost
from gpu_timing import Rows, Task


def find_xgboost(task: Task, rows: Rows, case: Case) -> Contender:
    """Returns XGBoost on the table where it is, or without cupy on a copy of it."""
    import xgboost

    if task.platform == "cuda" and not xgboost.build_info().get("USE_CUDA"):
        raise RuntimeError("this build of XGBoost has no CUDA")
    x, y = move_rows(task, rows)
    threads = os.cpu_count() or 1
    peer = prepare_xgboost(case, x, y, {}, threads, device=task.platform)
    used = json.loads(peer.train(1).save_config())["learner"]["generic_param"]
    if not used["device"].startswith(task.platform):
        raise RuntimeError(f"XGBoost computes on {used['device']}")
    return peer


def find_lightgbm(task: Task, rows: Rows, case: Case) -> Contender:
    """Returns LightGBM, which takes tables from the host."""
    x, y = np.asarray(rows.x), np.asarray(rows.y)
    made, threads = dict(device_type=task.platform), os.cpu_count() or 1
    prepare_lightgbm(case, x[:1000], y[:1000], {}, threads, **made).train(1)
    return prepare_lightgbm(case, x, y, {}, threads, **made)


PEERS = {"xgboost": find_xgboost, "lightgbm": find_lightgbm}


def find_peers(
    task: Task, rows: Rows, case: Case, names: Iterable[str]
) -> dict[str, Contender]:
    """Returns the peers that train on the device; saves why others are absent."""
    peers = {}
    for name in names:
        try:
            peers[name] = PEERS[name](task, rows, case)
        except Exception as error:
            task.note("absent", name, error)
    return peers


def move_rows(task: Task, rows: Rows) -> tuple[Any, Any]:
    """Returns values and targets as cupy arrays, or without cupy as NumPy arrays."""
    try:
        import cupy

        return cupy.from_dlpack(rows.x), cupy.from_dlpack(rows.y)
    except Exception as error:
        task.note("absent", "cupy", error)
        return np.asarray(rows.x), np.asarray(rows.y)
