# SPDX-License-Identifier: Apache-2.0
"""The helper that runs functions in several processes."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from processes import run_processes


def gather(rank, scale):
    found = multihost_utils.process_allgather(np.int32(scale * rank))
    return jax.process_count(), np.asarray(found).reshape(-1).tolist()


def fail_in_one(rank):
    if rank == 1:
        raise ValueError("no such rows")
    multihost_utils.process_allgather(np.int32(0))


def test_processes_exchange_values():
    assert run_processes(gather, 2, 5) == [(2, [0, 5])] * 2
    assert run_processes(gather, 1, 5) == [(1, [0])]


def test_a_failure_ends_all_and_is_told():
    with pytest.raises(RuntimeError, match="no such rows"):
        run_processes(fail_in_one, 2)
