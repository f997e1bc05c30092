# SPDX-License-Identifier: Apache-2.0
"""Processes that train one model together: one is lost, preempted, or differs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from processes import choose_flags, find_port
from tables import SMALL, make_steps, same_bits, same_histories

import jboost as jb
from jboost.model.files import load

RUN = """
import os, signal, sys, time
rank, port, what, folder = int(sys.argv[1]), *sys.argv[2:]
import jax
jax.config.update("jax_enable_preemption_service", True)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, heartbeat_timeout_seconds=5)
import jboost as jb
from processes import choose_flags, find_port
from tables import make_steps

def watch(number, history, model):
    time.sleep(0.05)  # the notice takes its time to reach the others
    if rank == 1 and number == 5:
        os.kill(os.getpid(), getattr(signal, what))

x, y = make_steps()
own = slice(0, 90) if rank == 0 else slice(90, None)
kinds = (jax.sharding.AxisType.Auto,)
try:
    jb.fit(
        x[own], y[own], num_rounds=300, max_depth=3, callbacks=watch,
        mesh=jax.make_mesh((jax.device_count(),), ("rows",), axis_types=kinds),
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
        said = [process.communicate(timeout=100)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    return said, [process.returncode for process in both]


def check_model(path, num_rounds):
    x, y = make_steps()
    model, _ = jb.fit(x, y, **{**SMALL, "num_rounds": num_rounds})
    same_bits(load(path), model)


def test_a_notice_of_preemption_ends_the_run_with_a_checkpoint(tmp_path):
    said, codes = run_both(RUN, "SIGTERM", tmp_path)
    assert codes == [7, 7]
    kept = load(tmp_path / "run.0").num_rounds
    assert 6 <= kept < 300
    for rank, text in enumerate(said):
        assert f"preempted after round {kept - 1};" in text
        assert f"keeps {kept} rounds" in text
        check_model(tmp_path / f"model.{rank}", kept)
    assert not (tmp_path / "run.1").exists()  # process 0 writes


def test_a_lost_process_ends_the_other_with_what_it_has(tmp_path):
    said, codes = run_both(RUN, "SIGKILL", tmp_path)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    kept = load(tmp_path / "run.0").num_rounds
    assert kept in (4, 8)
    assert "process 0 of 2 could not finish round" in said[0]
    assert f"keeps {kept} rounds: the same call goes on from there" in said[0]
    made = load(tmp_path / "model.0").num_rounds
    assert kept <= made <= 8
    check_model(tmp_path / "model.0", made)
    # One process goes on without a mesh.
    x, y = make_steps()
    call = dict(num_rounds=12, max_depth=3, checkpoint_rounds=4)
    seen = []
    model, history = jb.fit(
        x, y, checkpoint=tmp_path / "run.0", **call,
        callbacks=lambda number, history, model: seen.append(number),
    )  # fmt: skip
    assert seen == [*range(kept, 12)]
    whole, told = jb.fit(x, y, **call)
    same_bits(model, whole)
    same_histories(history, told)


DIFFER = """
import sys
rank, port = int(sys.argv[1]), sys.argv[2]
import jax
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, heartbeat_timeout_seconds=5)
import jboost as jb
from processes import choose_flags, find_port
from tables import make_steps

x, y = make_steps()
own = slice(0, 90) if rank == 0 else slice(90, None)
kinds = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=kinds)
call = dict(mesh=mesh, max_depth=3)

def attempt(name, **change):
    try:
        model, _ = jb.fit(x[own], y[own], num_rounds=4, **{**call, **change})
        print(name, model.num_rounds, flush=True)
    except Exception as error:
        print(name, type(error).__name__, error, flush=True)

def fail(number, history, model):
    raise RuntimeError("own")

attempt("number", l2=2.0 + rank)
attempt("loss", loss=[jb.losses.huber, jb.losses.logistic][rank])
attempt("constant", loss=lambda s, t: (s - t) ** 2 * (1.0 + rank))
attempt("stop", callbacks=(lambda number, history, model: number == 1) if rank else ())
attempt("fail", callbacks=fail if rank else ())
attempt("whole")
"""


def test_processes_agree_on_settings_stops_and_failures():
    said, codes = run_both(DIFFER)
    assert codes == [0, 0]
    for rank, text in enumerate(said):
        lines = dict(
            line.split(" ", 1) for line in text.splitlines() if "Gloo" not in line
        )
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
