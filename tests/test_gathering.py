# SPDX-License-Identifier: Apache-2.0
"""Thresholds of rows that are divided among processes are those of one process."""

import numpy as np
import pytest
from gathered_bins import disagree, fit, unite
from processes import run_processes

CASES = {
    "numbers": dict(weighted=False),
    "weights": dict(weighted=True),
    "categories": dict(weighted=True, categorical=[3]),
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_bins_are_those_of_one_process(case, count):
    expected = fit(0, 1, 3000, CASES[case])
    assert expected[1] == "missing"
    for found in run_processes(fit, count, count, 3000, CASES[case]):
        assert found[1] == expected[1]
        for array, wanted in zip(found[::2], expected[::2], strict=True):
            np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("columns", "same columns"),
        ("weights", "sample_weight"),
        ("categories", "x must"),
    ],
)
def test_an_error_of_one_process_is_raised_on_all(what, message):
    errors = run_processes(disagree, 2, what)
    assert all(message in error for error in errors)
    if what != "columns":
        assert errors[0] == f"process 1: {errors[1]}"


@pytest.mark.parametrize("count", [2, 3])
def test_categories_of_data_frames_are_those_of_one_process(count):
    matrix, categories = unite(0, 1, 300)
    found = run_processes(unite, count, count, 300)
    np.testing.assert_array_equal(np.concatenate([part for part, _ in found]), matrix)
    assert all(values == categories for _, values in found)


def test_a_column_of_numbers_and_categories_is_refused_on_all():
    for error in run_processes(unite, 2, 2, 300, 1):
        assert "column 'words' of x" in error and "process 1: numbers" in error
