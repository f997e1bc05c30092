# SPDX-License-Identifier: Apache-2.0
"""The helper that runs functions in several processes."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from processes import run_processes


def fail_in_one(rank, scale):
    found = multihost_utils.process_allgather(np.int32(scale * rank))
    if rank == 1:
        raise ValueError(f"{jax.process_count()} have {np.ravel(found).tolist()}")
    multihost_utils.process_allgather(np.int32(0))


def test_processes_exchange_values_and_a_failure_ends_all():
    with pytest.raises(RuntimeError, match=r"2 have \[0, 5\]"):
        run_processes(fail_in_one, 2, 5)
