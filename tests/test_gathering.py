# SPDX-License-Identifier: Apache-2.0
"""Thresholds of rows that are divided among processes are those of one process."""

import functools

import numpy as np
import pytest
from gathered_bins import CASES, fit, run_all, unite
from ordered_rows import ENDS, OPTIONS, ROWS, find_bins
from processes import run_processes


@functools.cache
def run():
    """Runs everything in one job; returns what each process found, by name."""
    return run_processes(run_all, 3, 3)


@pytest.mark.parametrize("case", CASES)
def test_bins_are_those_of_one_process(case):
    expected = fit(0, 1, 3000, CASES[case])
    assert expected[1] == "missing"
    for found in (each[case] for each in run()):
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
    errors = [found["wrong " + what] for found in run()]
    assert all(message in error for error in errors)
    if what != "columns":
        assert len({*errors}) == 1
        assert errors[0].startswith("process 1: ")


@pytest.mark.parametrize("known_rows", [0, 200])
def test_categories_of_data_frames_are_those_of_one_process(known_rows):
    matrix, categories = unite(0, 1, 300, known_rows=known_rows)
    name = "frames of a model" if known_rows else "frames"
    found = [each[name] for each in run()]
    np.testing.assert_array_equal(np.concatenate([part for part, _ in found]), matrix)
    assert all(values == categories for _, values in found)


def test_a_column_of_numbers_and_categories_is_refused_on_all():
    for error in (found["wrong frames"] for found in run()):
        assert "column 'words' of x" in error and "process 1: numbers" in error


def test_sketches_in_row_order_are_those_of_one_process():
    """Some are empty, some have less than a block, blocks belong to several."""
    whole = find_bins(0, [[ROWS], [ENDS[-1][-1]]])
    assert [absent for _, absent, *_ in whole[:2]] == ["missing", None]
    alone = whole[: len(OPTIONS)] * (len(ENDS) - 1) + whole[len(OPTIONS) :]
    for found in (each["sketches"] for each in run()):
        for result, expected in zip(found, alone, strict=True):
            for array, wanted in zip(result, expected, strict=True):
                np.testing.assert_array_equal(array, wanted)
