# SPDX-License-Identifier: Apache-2.0
"""Processes that train one model together: one is lost, preempted, or differs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import choose_flags, find_port
from tables import make_steps, same_bits, same_histories

import jboost as jb
from jboost.model.files import load

HEAD = """
import os, signal, sys, time
rank, port, what, folder = int(sys.argv[1]), *sys.argv[2:]
import jax
jax.config.update("jax_enable_preemption_service", True)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, heartbeat_timeout_seconds=5)
from functools import partial
import jax.numpy as jnp
import numpy as np
import jboost as jb
from tables import make_steps

x, y = make_steps()
own = slice(0, 90) if rank == 0 else slice(90, None)
mesh = jax.make_mesh((jax.device_count(),), ("rows",))
"""

RUN = """
def watch(number, history, model):
    time.sleep(0.05)  # the notice takes its time to reach the others
    if rank == 1 and number == 5:
        os.kill(os.getpid(), getattr(signal, what))

try:
    jb.fit(
        x[own], y[own], num_rounds=300, max_depth=2, callbacks=watch, mesh=mesh,
        checkpoint=f"{folder}/run.{rank}", checkpoint_rounds=4,
    )
except jb.TrainingError as error:
    print(f"{error} [{error.round}]", flush=True)
    jb.save(error.model, f"{folder}/model.{rank}")
    sys.exit(7)
"""


def run_both(script, *rest):
    """Runs two processes; returns what they printed and their exit codes."""
    command = [sys.executable, "-c", script]
    rest = [str(find_port()), *map(str, rest)]
    both = [
        subprocess.Popen(
            [*command, str(rank), *rest], cwd=Path(__file__).parent, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": choose_flags()},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    return said, [process.returncode for process in both]


def check_model(path, num_rounds):
    x, y = make_steps()
    model, _ = jb.fit(x, y, num_rounds=num_rounds, max_depth=2)
    same_bits(load(path), model)


def test_a_notice_of_preemption_ends_the_run_with_a_checkpoint(tmp_path):
    said, codes = run_both(HEAD + RUN, "SIGTERM", tmp_path)
    assert codes == [7, 7]
    kept = load(tmp_path / "run.0").num_rounds
    assert 6 <= kept < 300
    for rank, text in enumerate(said):
        assert f"preempted after round {kept - 1};" in text
        assert f"keeps {kept} rounds" in text
        check_model(tmp_path / f"model.{rank}", kept)
    assert not (tmp_path / "run.1").exists()  # process 0 writes


DIFFER = """
class fail_later:
    def __init__(self, calls):
        self.left, self.__name__ = calls, "own"

    def __call__(self, first, *_):
        np.asarray(first)  # a metric that is not compiled
        self.left -= 1
        return self.end() if self.left < 0 else 0.0

    def end(self):
        raise RuntimeError("own")

class leave_later(fail_later):
    def end(self):
        sys.exit("left")

call = dict(mesh=mesh, max_depth=2)

def attempt(name, rows=x[own], targets=y[own], **change):
    try:
        model, _ = jb.fit(rows, targets, num_rounds=4, **{**call, **change})
        print(name, model.num_rounds, flush=True)
    except BaseException as error:
        print(name, type(error).__name__, error, flush=True)

def fail(*_):
    raise RuntimeError("own")

def leave(*_):
    sys.exit("left")

def fourth(score, target):
    return (score - target) ** 4

def roots(score, target):
    return (score - jnp.sqrt(target)) ** 2

# One argument of process 1 differs.
one = rank == 1
given = np.ones(len(x[own]), "f4")
rows = x[own], y[own]
early = dict(early_stopping_rounds=2)
model = jb.fit(x, y, num_rounds=0)[0]
differing = dict(
    sample_weight=dict(sample_weight=given), offset=dict(offset=given),
    parameter=dict(loss=partial(jb.losses.huber, delta=2.0)),
    validation=dict(validation=rows), model=dict(model=model),
    metrics=dict(metrics=["mae"]), checkpoint=dict(checkpoint=f"{folder}/run"),
    early=early, callbacks=dict(callbacks=5), tables=dict(rows=x[own, :2]),
    rows=dict(targets=None), lengths=dict(targets=y),
)
for name, change in differing.items():
    base = dict(loss=jb.losses.huber) if name == "parameter" else {}
    attempt(name, **(change if one else base))
names = ("a", "b") if one else ("a",)
attempt("sets", validation={name: rows for name in names})
attempt("set weights", validation=(*rows, given) if one else rows)

# Something fails on process 1.
bad = np.where(np.arange(len(x[own])) == 7, np.nan if one else 0, y[own])
attempt("nan", targets=bad)
attempt("own nan", targets=bad, loss=fourth)
attempt("set nan", validation=(x[own], bad), loss=fourth)
attempt("root", targets=np.where(np.isnan(bad), -1, bad ** 2), loss=roots)
attempt("metric", metrics=dict(own=fail_later(1 if one else 99)))
attempt("leave", callbacks=leave if one else ())
attempt("exit", metrics=dict(own=leave_later(1 if one else 99)))
attempt("late", callbacks=fail_later(2) if one else fail_later(99))
none = slice(0, 0) if one else slice(None)
few = x[own][none], y[own][none]
for name in ("empty", "again"):
    attempt(name, validation=few, checkpoint=f"{folder}/run", **early)
attempt("number", l2=2.0 + rank)
attempt("loss", loss=[jb.losses.huber, jb.losses.logistic][rank])
attempt("constant", loss=lambda s, t: (s - t) ** 2 * (1.0 + rank))
attempt("stop", callbacks=(lambda number, history, model: number == 1) if rank else ())
attempt("fail", callbacks=fail if rank else ())
attempt("whole")
"""


# The names of attempts, and what all processes must say.
SAID = {
    "sample_weight": "process 1 differs in sample_weight (None on process 0, 'given'",
    "offset": "process 1 differs in offset (None on process 0, 'given' there)",
    "parameter": "process 1 differs in loss ('<function huber>' on process 0",
    "validation": "process 1 differs in validation ([] on process 0, ['validation']",
    "model": ", model",
    "metrics": "process 1 differs in metrics ([] on process 0, ['mae'] there)",
    "checkpoint": "process 1 differs in checkpoint_rounds (None on process 0, 50",
    "early": "process 1 differs in early_stopping_rounds (None on process 0, ",
    "callbacks": "TypeError {}callbacks must be callable as",
    "tables": "x must have the same columns on every process",
    "rows": "ValueError process 1: y must be given",
    "lengths": "ValueError process 1: y must have 110 rows",
    "sets": "process 1 differs in validation (['a'] on process 0, ['a', 'b'] there)",
    "set weights": "process 1 differs in validation sample_weight (None on process 0",
    "nan": "process 1: y must be finite in every row of positive weight, got nan in "
    "row 7",
    "own nan": "process 1: y must be finite in every row of positive weight, got nan "
    "in row 7",
    "set nan": "process 1: validation y must be finite in every row of positive "
    "weight, got nan in row 7",
    "root": "process 1: loss must be finite on the data, got nan in row 7",
    "metric": "{}metrics['own'] failed in round 1 on set 'train': RuntimeError('own')",
    "late": "TrainingError a callback failed in round 2 on process 1",
    "empty": "4", "again": "4", "whole": "4",
}  # fmt: skip


def read_lines(text):
    """What was said, by the name of the attempt."""
    names = sorted([*SAID, "number", "loss", "constant", "stop", "fail", "leave",
                    "exit"], key=len, reverse=True)  # fmt: skip
    found = {}
    for line in text.splitlines():
        for name in names:
            if line.startswith(f"{name} "):
                found[name] = line.removeprefix(f"{name} ")
                break
    return found


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """Runs two processes that differ, until one is lost.

    Returns what they said, their exit codes, and their folder.
    """
    folder = tmp_path_factory.mktemp("lost")
    return *run_both(HEAD + DIFFER + RUN, "SIGKILL", folder), folder


def test_processes_agree_on_settings_stops_and_failures(lost):
    said, _, _ = lost
    for rank, text in enumerate(said):
        lines = read_lines(text)
        for name, words in SAID.items():
            expected = words.format("" if rank else "process 1: ")
            assert expected in lines[name], name
        # An exit stays one; the others learn of it.
        assert ("SystemExit left" in lines["leave"]) == (rank == 1)
        assert "on process 1" in lines["leave"] or rank == 1
        assert ("SystemExit left" if rank else "process 1: left") in lines["exit"]
        assert (
            "process 1 differs in l2 (2.0 on process 0, 3.0 there)" in lines["number"]
        )
        assert "process 1 differs in loss" in lines["loss"]
        assert "process 1 differs in numbers in the loss" in lines["constant"]
        assert lines["stop"] == "2"
        own = ": RuntimeError('own')" if rank else ""
        failed = f"TrainingError a callback failed in round 0 on process 1{own}"
        assert lines["fail"] == failed
        assert lines["whole"] == "4"


def test_a_lost_process_ends_the_other_with_what_it_has(lost):
    said, codes, folder = lost
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    kept = load(folder / "run.0").num_rounds
    assert kept in (4, 8)
    assert "process 0 of 2 could not finish round" in said[0]
    assert f"keeps {kept} rounds: the same call goes on from there" in said[0]
    made = load(folder / "model.0").num_rounds
    assert kept <= made <= 8
    check_model(folder / "model.0", made)
    # One process goes on without a mesh.
    x, y = make_steps()
    call = dict(num_rounds=12, max_depth=2, checkpoint_rounds=4)
    seen = []
    model, history = jb.fit(
        x, y, checkpoint=folder / "run.0", **call,
        callbacks=lambda number, history, model: seen.append(number),
    )  # fmt: skip
    assert seen == [*range(kept, 12)]
    whole, told = jb.fit(x, y, **call)
    same_bits(model, whole)
    same_histories(history, told)
