# SPDX-License-Identifier: Apache-2.0
"""What must agree to the last bit does so as users compile it, too.

The tests compile with flags that make XLA quicker (see conftest.py). Whether a product
is fused with a sum is the compiler's choice, and kernels promise the bits of plain XLA:
so some of the tests that compare bits run here without the flags. Where this file is
among those that run, they run only here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# (function, what its parameters hold) by file; each entry must select a test.
CHOSEN = {
    "test_grow_kernels.py": [
        ("test_trees_are_those_of_plain_xla", "two groups", "baseline"),
        ("test_constrained_trees_are_those_of_plain_xla", "values"),
        ("test_words_hold_the_rounded_rows", "40001", "baseline"),
        ("test_sums_of_floats_do_not_depend_on_the_order", "70003", "baseline"),
    ],
    "test_leaf_kernels.py": [
        ("test_sums", "70001"),
        ("test_order_statistics", "one", "5003"),
    ],
    "test_predict_kernels.py": [("test_leaves_and_scores_are_those_of_a_walk", "4097")],
    "test_binning_kernels.py": [("test_both_layouts_hold_the_codes", "28")],
    "test_routes.py": [
        ("test_a_route_trains_the_model_of_fit", "adaptive candidates-xla]"),
        ("test_a_route_trains_the_model_of_fit", "adaptive candidates-parts]"),
    ],
    "test_constraints.py": [("test_models_are_monotone", "squared")],
    "test_mesh.py": [
        ("test_padding_of_shards_changes_no_bit", "8200"),
        ("test_several_scores_round_alike_for_any_number_of_rows",),
    ],
    "test_sharded_growth.py": [
        ("test_shards_grow_the_tree_of_one_device", "constrained categories"),
    ],
    "test_continue.py": [("test_plain_xla_keeps_every_bit",)],
}


def find_chosen(items):
    """Returns what ``CHOSEN`` lists of the items, and what of it is not there."""
    chosen, missing = [], []
    for file, entries in CHOSEN.items():
        for function, *words in entries:
            found = [
                item
                for item in items
                if (item.path.name, getattr(item, "originalname", ""))
                == (file, function)
                and all(word in item.name for word in words)
            ]
            chosen += found
            if not found:
                missing.append((file, function, *words))
    return chosen, missing


class Selection:
    """A plugin of pytest: keeps what ``CHOSEN`` lists, all of which must be there."""

    def pytest_collection_modifyitems(self, config, items):
        chosen, missing = find_chosen(items)
        if missing:
            raise pytest.UsageError(f"no such tests: {missing}")
        items[:] = chosen


def test_bits_agree_without_the_flags_of_the_tests():
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | {"XLA_FLAGS": ""},
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


if __name__ == "__main__":
    here = Path(__file__).parent
    files = [str(here / name) for name in CHOSEN]
    options = ["-n", "0", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, *files], plugins=[Selection()]))
