# SPDX-License-Identifier: Apache-2.0
"""Streams with a mesh train the model of one process, which reads all rows."""

import os

import numpy as np
import pytest
from compilations import Compilations
from processes import run_processes
from streamed_processes import STOPPED, run_in_turn, train, train_in_memory


def assert_same(found, expected):
    (model, curves), (wanted, wanted_curves) = found, expected
    assert len(model) == len(wanted)
    for array, other in zip(model, wanted, strict=True):
        np.testing.assert_array_equal(array, other)
    np.testing.assert_array_equal(curves, wanted_curves)


@pytest.mark.parametrize("case", ["softmax", "adaptive"])
def test_devices_of_one_process_share_what_rows_need(case, tmp_path):
    with Compilations() as compilations:
        found = train(0, 1, case, tmp_path, devices=2)
    programs = [name for name in compilations.names if "_run" in name]
    assert len(programs) <= 6, programs  # two at the start and four of a round, once
    assert_same(found, train_in_memory(case))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What three processes return, one of which has no rows, and their folder."""
    folder = tmp_path_factory.mktemp("runs")
    found = run_processes(run_in_turn, 3, 3, folder, folder / "run.jboost")
    return [*zip(*found, strict=True)], folder


def test_processes_stream_their_own_rows_and_one_goes_on(runs, tmp_path):
    ((first, *others), stopped, _), folder = runs
    call = (0, 1, "validated", tmp_path, 1)
    whole, curves = train(*call)
    np.testing.assert_array_equal(first[1], curves[:, :2])
    for other in others:
        assert_same(other, first)
    expected = train(*call, **STOPPED)
    assert expected[1].shape[1] == 3
    for each in stopped:
        assert_same(each, expected)
    again = train(*call, checkpoint=folder / "run.jboost", checkpoint_rounds=1)
    assert_same(again, (whole, curves))


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("block", "TrainingError", "could not be read in round 1"),
        ("source", "OSError", "the disk is gone"),
        ("columns", "ValueError", "same columns"),
        ("memory", "ValueError", "memory must be at least"),
        ("nothing", "ValueError", "at least one batch on every process"),
    ],
)
def test_what_fails_on_one_process_is_raised_on_all(what, kind, message, runs):
    (*_, found), folder = runs
    errors = [each[what] for each in found]
    assert [name for name, _ in errors] == 3 * [kind]
    assert all(message in text for _, text in errors)
    if what != "columns":
        assert "process 2: " in errors[0][1]
    assert not list(folder.rglob(f"*{os.sep}*.block"))
