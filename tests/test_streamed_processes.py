# SPDX-License-Identifier: Apache-2.0
"""Streams with a mesh train the model of one process, which reads all rows."""

import os

import jax
import numpy as np
import pytest
from processes import run_processes
from streamed_processes import STOPPED, fail_in_turn, stop_early, train, train_in_memory


def assert_same(found, expected):
    (model, curves), (wanted, wanted_curves) = found, expected
    assert len(model) == len(wanted)
    for array, other in zip(model, wanted, strict=True):
        np.testing.assert_array_equal(array, other)
    np.testing.assert_array_equal(curves, wanted_curves)


@pytest.mark.parametrize("case", ["softmax", "absolute", "adaptive"])
def test_devices_of_one_process_share_what_rows_need(case, tmp_path):
    found = train(0, 1, case, tmp_path, devices=jax.device_count())
    assert_same(found, train_in_memory(case))


def test_processes_stream_their_own_rows_and_one_goes_on(tmp_path):
    """One of them has no rows."""
    call, path = (0, 1, "validated", tmp_path, 1), tmp_path / "run.jboost"
    whole, curves = train(*call)
    found, stopped = zip(*run_processes(stop_early, 3, 3, tmp_path, path), strict=True)
    first, *others = found
    np.testing.assert_array_equal(first[1], curves[:, :2])
    for other in others:
        assert_same(other, first)
    expected = train(*call, **STOPPED)
    assert expected[1].shape[1] == 3
    for each in stopped:
        assert_same(each, expected)
    assert_same(train(*call, checkpoint=path, checkpoint_rounds=1), (whole, curves))


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """The errors of two processes, and the folder of their blocks."""
    folder = tmp_path_factory.mktemp("failures")
    return run_processes(fail_in_turn, 2, folder), folder


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
def test_what_fails_on_one_process_is_raised_on_all(what, kind, message, failures):
    found, folder = failures
    errors = [each[what] for each in found]
    assert [name for name, _ in errors] == [kind, kind]
    assert all(message in text for _, text in errors)
    if what != "columns":
        assert "process 1: " in errors[0][1]
    assert not list(folder.rglob(f"*{os.sep}*.block"))
