# SPDX-License-Identifier: Apache-2.0
"""Does a run that loses processes at random moments end as if nothing had happened?

Several processes on this machine train one model together, with a checkpoint. A random
one of them is killed at a random moment; the others must end by themselves, and the run
goes on from the checkpoint with another number of processes: the numbers of
``--processes`` in turn, until it ends. The final model must have the bytes of a run
without faults in one process. One more run stops a process instead (SIGSTOP), which
the others must notice by its missing heartbeat.

    python experiments/faults.py --kills 20

Written to --out: faults.json.
"""

import hashlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from experiment_tools import make_parser, read_processor, write_json

HEARTBEAT = 10  # seconds


def main():
    """Kills processes of one run after another, and compares the models."""
    args = parse()
    if args.worker:
        work(json.loads(args.worker))
        return
    chance, events = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, _ = finish(args, Path(folder) / "undisturbed", 1)
        counts, number, runs = itertools.cycle(args.processes), 0, []
        while number < args.kills:
            path = Path(folder) / f"run {len(runs)}"
            while number < args.kills:
                event = disturb(args, path, next(counts), chance)
                events.append(event)
                print(f"{number + 1:3d} {describe(event)}", flush=True)
                if event["done"]:
                    break
                number += 1
            digest, told = finish(args, path, next(counts))
            runs.append({"same": digest == undisturbed, "goes on from": told})
            print(f"    ended with the same bytes: {runs[-1]['same']}", flush=True)
        stopped = stop_one(args, Path(folder) / "stopped")
        same, _ = finish(args, Path(folder) / "stopped", 1)
    slowest = max((e["seconds to end"] for e in events if not e["done"]), default=0)
    equal = sum(run["same"] for run in runs)
    print(
        f"\nFound: {number} processes were killed in {len(runs)} runs; {equal} of "
        f"{len(runs)} runs ended with the bytes of the undisturbed one; the other "
        f"processes ended within {slowest:.1f} s. After SIGSTOP the others ended "
        f"within {stopped['seconds to end']:.1f} s (codes {stopped['codes']}), and the "
        f"run then ended with the same bytes: {same == undisturbed}."
    )
    write_json(
        args.out / "faults.json",
        {
            "settings": vars(args), "processor": read_processor(), "events": events,
            "runs": runs, "stopped": stopped, "same after stop": same == undisturbed,
        },
    )  # fmt: skip


def describe(event):
    """Returns an event in words."""
    if event["done"]:
        return f"{event['processes']} processes had ended before the kill"
    return (
        f"{event['processes']} processes, number {event['rank']} killed after "
        f"{event['after']:.2f} s; {event['kept']} rounds kept; the others ended in "
        f"{event['seconds to end']:.1f} s with {event['codes']}"
    )


def disturb(args, path, number, chance):
    """Starts processes, and kills one of them at a random moment.

    One in five is killed while programs are compiled, the others some rounds later than
    the last one.
    """
    processes, rank, begun = start(args, path, number), chance.randrange(number), now()
    if chance.random() < 0.2:
        time.sleep(chance.uniform(1, 10))
    else:
        wanted = count_rounds(path) + chance.randrange(1, args.rounds // 6)
        wait_for(processes, path, wanted, begun + args.timeout)
        time.sleep(chance.uniform(0, 0.1))
    after = now() - begun
    done = any(process.poll() is not None for process in processes)
    begun = now()
    if not done:
        processes[rank].send_signal(signal.SIGKILL)
    codes = [process.wait(args.timeout) for process in processes]
    return {
        "processes": number, "rank": rank, "after": after, "done": done,
        "codes": codes, "seconds to end": now() - begun,
        "kept": count_rounds(path),
    }  # fmt: skip


def now():
    """Returns the time in seconds."""
    return time.perf_counter()


def wait_for(processes, path, rounds, limit):
    """Returns when the checkpoint holds so many rounds, or a process has ended."""
    while now() < limit and count_rounds(path) < rounds:
        if any(process.poll() is not None for process in processes):
            return
        time.sleep(0.02)


def stop_one(args, path):
    """Starts two processes, and stops the second one without ending it."""
    processes = start(args, path, 2)
    wait_for(processes, path, args.rounds // 4, now() + args.timeout)
    processes[1].send_signal(signal.SIGSTOP)
    begun = now()
    code = processes[0].wait(args.timeout)
    seconds = now() - begun
    processes[1].kill()
    processes[1].wait()
    return {"codes": [code], "seconds to end": seconds, "kept": count_rounds(path)}


def finish(args, path, number):
    """Runs to the end; returns a digest of the model, and the rounds kept before."""
    kept = count_rounds(path)
    codes = [process.wait(args.timeout) for process in start(args, path, number)]
    if any(codes):
        raise SystemExit(f"a run without faults ended with codes {codes}")
    content = path.with_suffix(".model").read_bytes()
    return hashlib.sha256(content).hexdigest(), kept


def count_rounds(path):
    """Returns how many rounds a checkpoint holds."""
    import jboost as jb

    return jb.load(path).num_rounds if path.exists() else 0


def start(args, path, number):
    """Starts the processes of a run."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    task = dict(
        path=str(path), port=port, processes=number, rows=args.rows, rounds=args.rounds
    )
    quiet = subprocess.DEVNULL if args.quiet else None
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps({**task, "rank": rank})],
            env={**os.environ, "JAX_PLATFORMS": "cpu"}, stderr=quiet,
        )
        for rank in range(number)
    ]  # fmt: skip


def work(task):
    """Trains as one of several processes."""
    import jax

    import jboost as jb

    number, mesh = task["processes"], None
    if number > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{task['port']}", number, task["rank"],
            heartbeat_timeout_seconds=HEARTBEAT, initialization_timeout=60,
        )  # fmt: skip
        mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    x, y = make_rows(task["rows"])
    edges = np.linspace(0, len(x), number + 1).astype(int)
    own = slice(*edges[task["rank"] : task["rank"] + 2])
    model, _ = jb.fit(
        x[own], y[own], jb.losses.huber, num_rounds=task["rounds"], subsample=0.7,
        max_depth=5, mesh=mesh, checkpoint=task["path"], checkpoint_rounds=5,
    )  # fmt: skip
    if task["rank"] == 0:
        jb.save(model, Path(task["path"]).with_suffix(".model"))


def make_rows(number):
    """Returns the rows of all processes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(number, 10)).astype(np.float32)
    return x, x[:, 0] + np.abs(x[:, 1]) + rng.normal(size=number).astype(np.float32)


def parse():
    """Returns the options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a run")
    parser.add_argument(
        "--quiet", action="store_true", help="hides what the processes report"
    )
    parser.add_argument("--worker", help="(the script's own: the task of a process)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
