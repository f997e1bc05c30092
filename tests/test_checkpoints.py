# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run interrupted anywhere ends as if it had not been."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from tables import SMALL, make_regression, make_runs, same_bits, same_histories

import jboost as jb
from jboost.model.containers import Container, read_container, write_container
from jboost.objective.jaxprs import _static
from jboost.training.checkpoints import hash_rows

X, Y = make_regression()
RUNS = make_runs()


class Interruption(BaseException):
    """As ctrl-C."""


def interrupt(number):
    def watch(round, history, model):
        if round == number:
            raise Interruption

    return watch


@pytest.mark.parametrize("name", ["categories", "several", "adaptive"])
def test_an_interrupted_run_ends_as_if_it_had_not_been(name, tmp_path):
    run = dict(**RUNS[name], num_rounds=8)
    model, history = jb.fit(**run)
    path = tmp_path / "run"
    for number in (1, 4, 5):  # before any file; after it; before the next one
        with pytest.raises(Interruption):
            jb.fit(
                **run, checkpoint=path, checkpoint_rounds=2, callbacks=interrupt(number)
            )
        if number > 1:
            same_bits(jb.load(path), jb.truncate(model, 4))
    seen = []
    resumed, told = jb.fit(
        **run, checkpoint=path, checkpoint_rounds=2,
        callbacks=lambda number, history, model: seen.append(
            (number, len(history.train_loss), model.num_rounds)
        ),
    )  # fmt: skip
    same_bits(resumed, model)
    same_histories(told, history)
    assert seen == [(n, n + 1, n + 1) for n in range(4, 8)]


def make_more_runs():
    """Arguments of ``fit`` by name: what else scores may depend on."""
    start = dict(x=X, y=Y, max_depth=2, num_rounds=6)
    weights = np.linspace(0, 2, len(Y))
    holes = np.where(np.abs(X) < 0.5, np.nan, X)
    stored = scipy.sparse.csr_matrix(np.where(np.abs(X) < 0.5, 0, X))
    late = dict(validation=(X[:50], Y[:50] + 1), early_stopping_rounds=3)
    solvers = ("guarded", "median_step", "hessian")
    robust = dict(start, loss=jb.losses.huber, sample_weight=weights)
    return {
        **{name: dict(robust, leaf_solver=name) for name in solvers},
        "median": dict(start, x=holes, loss=jb.losses.absolute_error, **late),
        "sparse": dict(start, x=stored, absent="zero", subsample=0.5),
        "sorted": dict(start, x=holes, candidates="exact", init_score="median"),
    }


MORE = make_more_runs()


@pytest.mark.parametrize("name", MORE)
def test_scores_are_computed_as_training_did(name, tmp_path):
    run, path = MORE[name], tmp_path / "run"
    model, history = jb.fit(**run)
    call = dict(run, checkpoint=path, checkpoint_rounds=2)
    with pytest.raises(Interruption):
        jb.fit(**call, callbacks=interrupt(2))
    resumed, told = jb.fit(**call)
    same_bits(resumed, model)
    same_histories(told, history)


def test_the_file_does_not_grow_with_the_rows(tmp_path):
    sizes = []
    for number in (1, 4):
        path = tmp_path / f"{number}"
        x, y = np.tile(X[:50], (number, 1)), np.tile(Y[:50], number)
        jb.fit(x, y, validation=(x, y), checkpoint=path, **SMALL)
        sizes.append(path.stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 100  # digits of numbers


def test_rows_are_hashed_as_defined_however_they_are_divided():
    rng, size = np.random.default_rng(0), 20_000
    words = rng.integers(0, 256, (2, size), np.uint8)
    whole = hash_rows([words], 0)
    parts = [words[:, :9000].astype(np.uint16), words[:, 9000:]]
    assert hash_rows(iter(parts), 0) == whole
    cut = 8000  # two processes
    assert hash_rows([words[:, :cut]], 0) + hash_rows([words[:, cut:]], cut) == whole

    def mix(value):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ value >> shift) * factor % 2**64
        return value ^ value >> 31

    multipliers = [int(m) | 1 for m in np.random.PCG64(0).random_raw(2)]
    total = 0
    for row in range(size):
        pairs = zip(words[:, row].tolist(), multipliers, strict=True)
        linear = sum(word * multiplier for word, multiplier in pairs)
        total += mix((linear + row * 0x9E3779B97F4A7C15) % 2**64)
    assert whole.tolist() == [total % 2**64]
    words[:, [9, 16]] = words[:, [16, 9]]  # the order of rows matters
    assert hash_rows([words], 0) != whole


def test_the_argument_that_differs_is_named(tmp_path):
    call = dict(checkpoint=tmp_path / "run", sample_weight=np.ones(len(Y)), **SMALL)
    jb.fit(X, Y, **call)
    other = Y.copy()
    other[-2] += 1
    with pytest.raises(ValueError, match="what differs is y; repeat"):
        jb.fit(X, other, **call)
    call["sample_weight"][[0, -1]] = 2, 0
    with pytest.raises(ValueError, match="sample_weight; repeat"):
        jb.fit(X, Y, **call)


def test_files_of_older_formats_are_refused(tmp_path):
    path, before = tmp_path / "run", tmp_path / "before"
    jb.fit(X, Y, checkpoint=path, **SMALL)
    kind, fields, arrays, _ = read_container(path)
    del fields["fingerprint"]["y"]
    write_container(Container(kind, fields, arrays), before)
    with pytest.raises(ValueError, match=r"older format.*model=jb\.load"):
        jb.fit(X, Y, checkpoint=before, **SMALL)
    same_bits(jb.load(before), jb.load(path))


RUN = "import sys, test_checkpoints as t; t.train(sys.argv[1], 'stream', 10_000)"


def train(path, kind, num_rounds):
    rows = {"x": X, "y": Y}
    if kind == "stream":
        batches = [(X[:90], Y[:90]), (X[90:], Y[90:])]
        places = dict(bins=jb.fit_bins(X), directories=f"{path}.blocks")
        rows = {"x": jb.stream(batches, memory="64 MiB", **places)}
    kept = {} if path is None else dict(checkpoint=path, checkpoint_rounds=1)
    return jb.fit(
        **rows, num_rounds=num_rounds, max_depth=3, subsample=0.7, seed=1,
        validation=(X[:50], Y[:50]), early_stopping_rounds=100, linear_leaves=False,
        **kept,
    )  # fmt: skip


def test_a_run_that_is_killed_goes_on(tmp_path):
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(path)], cwd=Path(__file__).parent
    )
    while not path.exists():
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.001)
    time.sleep(random.Random(0).uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    process.wait()
    rounds = jb.load(path).num_rounds  # whole, whenever it happened
    assert 0 < rounds < 10_000
    model, history = train(path, "stream", rounds + 8)
    whole, told = train(None, "arrays", rounds + 8)
    same_bits(model, whole)
    same_histories(history, told)
    assert {p.name for p in tmp_path.iterdir()} - {"run.blocks"} == {"run"}
    assert not [*tmp_path.glob("run.blocks/*")]


def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    litter = tmp_path / ".run[1].0a1b2c3d.part"
    litter.write_bytes(b"half")
    other = tmp_path / ".run2.0a1b2c3d.part"
    other.write_bytes(b"half")
    jb.fit(X, Y, checkpoint=tmp_path / "run[1]", **SMALL)
    assert {*tmp_path.iterdir()} == {tmp_path / "run[1]", other}


HOLD = """
import os, sys, time, jboost as jb
from tables import make_regression

def hold(number, history, model):
    if os.fork() > 0:  # a child that lives on holds no lock
        print("training", flush=True)
    time.sleep(20)
    os._exit(1)

x, y = make_regression()
jb.fit(x, y, num_rounds=8, max_depth=3, checkpoint=sys.argv[1], callbacks=hold)
"""


def test_two_runs_at_once_are_refused(tmp_path):
    path, folder = tmp_path / "run", str(Path(__file__).parent)
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        with process.stdout as said:
            assert said.readline() == "training\n"
        # The file of the other writer is not cleared away.
        part = tmp_path / ".run.0a1b2c3d.part"
        part.touch()
        with pytest.raises(ValueError, match=rf"in use by .*process {process.pid} on"):
            jb.fit(X, Y, checkpoint=path, **SMALL)
        link = tmp_path / "link"
        link.symlink_to(path)
        with pytest.raises(ValueError, match="in use by another run"):
            jb.fit(X, Y, checkpoint=link, **SMALL)
        assert part.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    # The lock ends with its process.
    assert (tmp_path / ".run.lock").exists()
    model, _ = jb.fit(X, Y, checkpoint=path, **SMALL)
    same_bits(model, jb.fit(X, Y, **SMALL)[0])
    assert {*tmp_path.iterdir()} == {path, link}


def test_two_runs_of_one_process_are_refused(tmp_path):
    call, refused = dict(checkpoint=tmp_path / "run", checkpoint_rounds=1), []

    def start_another(number, history, model):
        with pytest.raises(ValueError, match="in use by another run") as caught:
            jb.fit(X, Y, **call, **SMALL)
        refused.append(caught.value)
        if number == 3:
            raise Interruption

    with pytest.raises(Interruption):
        jb.fit(X, Y, **call, **SMALL, callbacks=start_another)
    assert len(refused) == 4
    model, _ = jb.fit(X, Y, **call, **SMALL)  # the lock ended with the run
    same_bits(model, jb.fit(X, Y, **SMALL)[0])


def test_file_systems_without_locks_keep_runs(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("jboost.training.checkpoints.fcntl.flock", fail)
    jb.fit(X, Y, checkpoint=tmp_path / "run", **SMALL)
    assert {*tmp_path.iterdir()} == {tmp_path / "run"}


def count_calls(calls):
    return lambda number, history, model: calls.append(number)


def test_a_finished_run_returns_at_once_and_may_be_made_longer(tmp_path):
    path, calls = tmp_path / "run", []
    first = jb.fit(X, Y, checkpoint=path, **SMALL)
    content = path.read_bytes()
    again = jb.fit(X, Y, checkpoint=path, callbacks=count_calls(calls), **SMALL)
    same_bits(again[0], first[0])
    same_histories(again[1], first[1])
    assert calls == []
    assert path.read_bytes() == content
    call = dict(num_rounds=11, max_depth=3)
    longer = jb.fit(X, Y, checkpoint=path, callbacks=count_calls(calls), **call)
    assert calls == [8, 9, 10]
    same_bits(longer[0], jb.fit(X, Y, **call)[0])


def test_a_run_that_stopped_early_is_over(tmp_path):
    noise = np.random.default_rng(0).normal(size=len(Y)).astype(np.float32)
    path, calls = tmp_path / "run", []
    call = dict(validation=(X, Y), early_stopping_rounds=3, max_depth=3)
    model, history = jb.fit(X, noise, num_rounds=60, **call)
    assert len(history.train_loss) < 60
    for num_rounds in (60, 60, 70):
        watch = count_calls(calls) if path.exists() else ()
        found, told = jb.fit(
            X, noise, num_rounds=num_rounds, checkpoint=path, callbacks=watch,
            checkpoint_rounds=2, **call,
        )  # fmt: skip
        same_bits(found, model)
        same_histories(told, history)
    assert calls == []


def test_a_run_that_a_callback_stopped_goes_on(tmp_path):
    path = tmp_path / "run"

    def stop(number, history, model):
        return number in (2, 4)

    lengths = []
    for _ in range(3):
        model, _ = jb.fit(
            X, Y, checkpoint=path, checkpoint_rounds=1, callbacks=stop, **SMALL
        )
        lengths.append(model.num_rounds)
    assert lengths == [3, 5, 8]
    same_bits(model, jb.fit(X, Y, **SMALL)[0])


def test_a_run_that_went_on_from_a_model_goes_on(tmp_path):
    path = tmp_path / "run"
    start, _ = jb.fit(X, Y, num_rounds=3, max_depth=3)
    shallow, _ = jb.fit(X, Y, num_rounds=3, max_depth=2)
    call = dict(model=start, checkpoint=path, checkpoint_rounds=2)
    with pytest.raises(Interruption):
        jb.fit(X, Y, **call, callbacks=interrupt(5), **SMALL)
    same_bits(jb.load(path), jb.fit(X, Y, num_rounds=7, max_depth=3)[0])
    model, history = jb.fit(X, Y, **call, **SMALL)
    same_bits(model, jb.fit(X, Y, num_rounds=11, max_depth=3)[0])
    assert len(history.train_loss) == 8
    with pytest.raises(ValueError, match="what differs is model;"):
        jb.fit(X, Y, **{**call, "model": shallow}, **SMALL)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run and the path of its checkpoint."""
    path = tmp_path_factory.mktemp("kept") / "run"
    run = dict(
        x=X, y=Y, validation={"late": (X[:50], Y[:50])}, checkpoint=path, **SMALL
    )
    jb.fit(**run)
    return run


def rescaled(score, target):
    return 3.0 * (score - target) ** 2


def test_numbers_of_categories_hide_no_others(tmp_path):
    x = np.concatenate([X[:, :2], np.arange(len(X))[:, None] % 6], axis=1)
    run = dict(
        x=x, y=Y, num_rounds=2, max_depth=3, categorical=[2],
        checkpoint=tmp_path / "run",
    )  # fmt: skip
    jb.fit(**run)
    for name, number in dict(l2=1.0, max_onehot=4).items():
        with pytest.raises(ValueError, match=rf" {name} \(was {number}, is 2"):
            jb.fit(**run, **{name: 2})


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("thresholds of x", dict(x=X + 1)),
        ("y", dict(y=-Y)),
        ("sample_weight", dict(sample_weight=np.r_[2, np.ones(len(Y) - 1)])),
        ("validation['late'] y", dict(validation={"late": (X[:50], -Y[:50])})),
        ("validation['late'] x", dict(validation={"late": (X[1:51], Y[:50])})),
        ("numbers in the loss", dict(loss=rescaled)),
        ("loss", dict(loss=jb.losses.log_cosh)),
        ("l2 (was 1.0, is 2.0)", dict(l2=2)),
        ("max_depth (was 3, is 2)", dict(max_depth=2)),
        ("subsample (was 0.69", dict(subsample=0.5)),
        ("seed (was 0, is 1)", dict(seed=1)),
        ("init_score (was 'auto', is [0.0])", dict(init_score=0)),
        ("early_stopping_rounds (was None, is 9)", dict(early_stopping_rounds=9)),
        ("feature_names (was None, is ['a', 'b', 'c'])", dict(feature_names=[*"abc"])),
        ("metrics (was [], is ['m'])", dict(metrics={"m": lambda s, t, w: s[0]})),
        ("learning_rate", dict(learning_rate=0.2)),
        ("num_rounds must be at least 8", dict(num_rounds=7)),
    ],
)
def test_another_run_is_refused_by_what_differs(what, change, kept):
    content = Path(kept["checkpoint"]).read_bytes()
    with pytest.raises(ValueError) as error:
        jb.fit(**{**kept, **change})
    assert what in str(error.value)
    assert str(kept["checkpoint"]) in str(error.value)
    assert Path(kept["checkpoint"]).read_bytes() == content


def test_equal_losses_and_data_are_the_same_run(kept):
    def loss(score, target):
        return (score - target) ** 2

    square = {**kept, "loss": jb.losses.squared_error, "x": X.astype(float)}
    square["y"] = Y.tolist()
    jb.fit(**square)
    with pytest.raises(ValueError, match="what differs is loss"):
        jb.fit(**{**kept, "loss": loss})  # integer_pow, not square


def test_equal_types_are_one_loss(kept):
    """JAX keeps the first of equal types that it meets, which may print differently.

    Arrays of files do not bring such a type.
    """
    little = np.dtype(np.float32).newbyteorder("<")
    assert repr(_static(little)) == repr(_static(np.dtype(np.float32)))
    for name, array in read_container(kept["checkpoint"]).arrays.items():
        assert repr(array.dtype) == repr(np.dtype(array.dtype.name)), name


def test_damaged_and_foreign_files_are_refused(kept, tmp_path):
    content = bytearray(Path(kept["checkpoint"]).read_bytes())
    content[len(content) // 2] ^= 1
    path = tmp_path / "run"
    path.write_bytes(content)
    with pytest.raises(jb.FileError, match="damaged"):
        jb.fit(**{**kept, "checkpoint": path})
    jb.save(jb.load(kept["checkpoint"]), path)
    with pytest.raises(jb.FileError, match=r"Ensemble.*checkpoint"):
        jb.fit(**{**kept, "checkpoint": path})


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "checkpoint must be a path", dict(checkpoint=1)),
        (ValueError, "folder that can be written to", dict(checkpoint="/nowhere/run")),
        (ValueError, "checkpoint must be a file", dict(checkpoint="/")),
        (ValueError, "checkpoint_rounds must be", dict(checkpoint_rounds=0)),
    ],
)
def test_bad_arguments_are_refused(error, message, change):
    with pytest.raises(error, match=message):
        jb.fit(X, Y, **change)


def test_a_full_disk_leaves_model_and_history(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jboost.model.containers.os.replace", fail)
    with pytest.raises(jb.TrainingError, match=r"checkpoint.*No space left") as error:
        jb.fit(X, Y, checkpoint=tmp_path / "run", checkpoint_rounds=3, **SMALL)
    monkeypatch.undo()
    same_bits(error.value.model, jb.fit(X, Y, num_rounds=3, max_depth=3)[0])
    assert len(error.value.history.train_loss) == 3
    assert not [*tmp_path.iterdir()]


def test_streams_keep_their_runs_too(tmp_path):
    bins, path = jb.fit_bins(X), tmp_path / "run"

    def rows(cut, shift=0.0):
        batches = [(X[:cut] + shift, Y[:cut]), (X[cut:] + shift, Y[cut:])]
        return jb.stream(batches, memory="64 MiB", bins=bins, block_rows=cut)

    call = dict(checkpoint=path, checkpoint_rounds=2, **SMALL)
    with pytest.raises(Interruption):
        jb.fit(rows(120), **call, callbacks=interrupt(4))
    model, history = jb.fit(rows(90), **call)  # in other blocks: the same data
    whole, told = jb.fit(rows(120), **SMALL)
    same_bits(model, whole)
    same_histories(history, told)
    with pytest.raises(ValueError, match="what differs is x; repeat"):
        jb.fit(rows(120, 0.5), **call)
