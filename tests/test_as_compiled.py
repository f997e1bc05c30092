# SPDX-License-Identifier: Apache-2.0
"""What must agree to the last bit does so as users compile it, too.

The tests compile with flags that make XLA quicker (see conftest.py). Whether a product
is fused with a sum is the compiler's choice, and kernels promise the bits of plain XLA:
so some of the tests that compare bits run again here without the flags.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHOSEN = {
    "test_grow_kernels.py": [
        "trees_are_those_of_plain_xla and several and baseline",
        "trees_are_those_of_plain_xla and uniform and baseline",
        "constrained_trees_are_those_of_plain_xla and values",
        "words_hold_the_rounded_rows and 40001 and baseline",
        "sums_of_floats and 200003 and baseline",
    ],
    "test_leaf_kernels.py": [
        "test_sums and 5003 and baseline",
        "test_order_statistics and one and 5003",
    ],
    "test_predict_kernels.py": ["test_equals_xla and 4097 and baseline"],
    "test_binning_kernels.py": ["both_layouts and 2503 and 28 and baseline"],
    "test_streaming.py": ["squared_error_is_the_same", "sampling_and_offset_are"],
    "test_sparse.py": ["the_model_of_the_dense_matrix and samples"],
    "test_constraints.py": ["models_are_monotone and squared"],
    "test_boosting.py": ["boost_equals_fit and squared_error"],
    "test_continue.py": [
        "rounds_in_two_parts_are_the_rounds and several",
        "plain_xla_keeps_every_bit",
    ],
}


@pytest.mark.skipif(not os.environ.get("XLA_FLAGS"), reason="there are no flags")
def test_bits_agree_without_the_flags_of_the_tests():
    here = Path(__file__).parent
    chosen = [f"({words})" for every in CHOSEN.values() for words in every]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider",
         *(str(here / name) for name in CHOSEN), "-k", " or ".join(chosen)],
        env=os.environ | {"XLA_FLAGS": ""}, cwd=here.parent, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
