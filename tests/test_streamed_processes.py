# SPDX-License-Identifier: Apache-2.0
"""Streams with a mesh train the model of one process, which reads all rows."""

import os

import jax
import numpy as np
import pytest
from processes import run_processes
from streamed_processes import fail_in_turn, go_on, train


def assert_same(found, expected):
    (model, losses), (wanted, wanted_losses) = found, expected
    assert len(model) == len(wanted)
    for array, other in zip(model, wanted, strict=True):
        np.testing.assert_array_equal(array, other)
    np.testing.assert_array_equal(losses, wanted_losses)


@pytest.mark.parametrize("case", ["squared", "softmax", "absolute", "adaptive"])
def test_devices_of_one_process_share_what_rows_need(case, tmp_path):
    expected = train(0, 1, case, tmp_path, devices=1)
    assert_same(train(0, 1, case, tmp_path, devices=jax.device_count()), expected)


def test_processes_stream_their_own_rows(tmp_path):
    """One of them has no rows."""
    expected = train(0, 1, "validated", tmp_path, devices=1)
    for found in run_processes(train, 3, 3, "validated", tmp_path):
        assert_same(found, expected)


def test_a_run_goes_on_with_fewer_processes(tmp_path):
    expected = train(0, 1, "sampled", tmp_path, devices=1)
    path = tmp_path / "run.jboost"
    run_processes(go_on, 2, 2, tmp_path, path, 2)
    assert_same(go_on(0, 1, tmp_path, path, None), expected)


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
