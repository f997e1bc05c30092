# SPDX-License-Identifier: Apache-2.0
"""Does a run that is killed at random moments end as if nothing had happened?

One process trains with a checkpoint: on rows in memory, on a stream, fold by fold, or
from an earlier model. It is killed (SIGKILL) at a random moment, or as soon as it is
seen writing, and the same call is made again until it ends. Meanwhile the disk may be
full, the folder read-only, the clock may jump, or a second process may make the same
call. After each event every checkpoint must hold the first rounds of the undisturbed
model, bit for bit, and no fewer than before; the finished model and history must have
the bytes of the undisturbed ones.

    python experiments/kills.py --kills 200

Full disks are imitated by a limit on the size of files. On Linux and macOS.
Written to --out: kills.json.
"""

import collections
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from experiment_tools import make_parser, read_processor, write_json

KINDS = ("memory", "stream", "folds", "continued")
TROUBLES = ("none", "none", "full disk", "read-only folder", "clock", "two processes")
FOLDS, EVERY = 3, 3
FAILED, REFUSED = 3, 4  # exit codes: by TrainingError; before training
NOBODY = 65534
PRELOADED = (
    "jboost.training.fitting", "jboost.streams.stream", "jboost.model.files",
    "jboost.streams.block_rounds", "jboost.streams.growth",
)  # fmt: skip


def main():
    """Kills processes of one run after another, and compares what they leave."""
    args = parse()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([*PRELOADED])
    chance, events, runs = random.Random(args.seed), [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        os.chmod(place, 0o755)
        whole, cache = {}, make_folder(Path(place, "cache"))
        for kind in KINDS:
            for _ in range(2):  # the second one finds its programs in the cache
                begun = time.perf_counter()
                lab = Lab(processes, args, make_folder(Path(place, kind)), cache)
                code, said = lab.finish(lab.start(kind, least=0.0))
                assert code == 0, f"an undisturbed run ended with {code}: {said}"
                whole[kind] = (lab.read_models(), lab.read_result())
                print(f"{kind}: {time.perf_counter() - begun:.1f} s", flush=True)
                lab.clear()
        while count_kills(events) < args.kills:
            kind = KINDS[len(runs) % len(KINDS)]
            lab = Lab(processes, args, make_folder(Path(place, kind)), cache)
            events += disturb(lab, kind, whole[kind], chance, args, count_kills(events))
            runs.append(end(lab, kind, whole[kind]))
            print(f"    {kind}: ended with {runs[-1]}", flush=True)
            lab.clear()
    summary = summarize(events, runs)
    print(f"\n{summary}")
    write_json(
        args.out / "kills.json",
        {
            "settings": vars(args), "processor": read_processor(), "found": summary,
            "events": events, "runs": runs,
        },
    )  # fmt: skip


def count_kills(events):
    """Returns how many processes were killed."""
    return sum(event["code"] == -signal.SIGKILL for event in events)


def summarize(events, runs):
    """Returns the result in words."""
    kills = collections.Counter(
        event["trouble"] for event in events if event["code"] == -signal.SIGKILL
    )
    others = collections.Counter(
        f"{event['trouble']}: {event['said'] or event['code']}"
        for event in events
        if event["code"] != -signal.SIGKILL
    )
    faults = [event["fault"] for event in events if event["fault"]]
    same = sum(run == "the same bytes" for run in runs)
    seen = sum(event["writing"] for event in events)
    kept = sum(
        event["code"] == -signal.SIGKILL and event["rounds"] != {} for event in events
    )
    return (
        f"Found: {sum(kills.values())} kills ({dict(kills)}; {kept} with a checkpoint, "
        f"{seen} while one was written), {dict(others)}; {same} of {len(runs)} runs "
        f"ended with the bytes of the undisturbed run; faults: {faults or 'none'}."
    )


class Lab:
    """A folder, and the processes that train in it."""

    def __init__(self, processes, args, folder, cache):
        """Takes a multiprocessing context, the options, and folders."""
        self.processes, self.args, self.folder = processes, args, folder
        self.cache = str(cache)

    def start(self, kind, trouble="none", size=0, least=1e9):
        """Starts a process that makes the call; see ``work``.

        Args:
          least: seconds of compilation from which JAX keeps a program in its cache,
            into which processes in trouble do not write.
        """
        told, tell = self.processes.Pipe(duplex=False)
        cache, rounds = (self.cache, least), self.args.rounds
        task = (str(self.folder), kind, trouble, size, rounds, cache, tell)
        process = self.processes.Process(target=work, args=task)
        process.start()
        tell.close()
        return process, told

    def finish(self, started):
        """Waits for the end; returns the exit code and what the process said."""
        process, told = started
        said = ""
        try:
            if told.poll(self.args.timeout):
                said = told.recv()
        except EOFError:
            pass
        process.join(self.args.timeout)
        if process.is_alive():
            process.kill()
            raise SystemExit(f"a process did not end in {self.args.timeout} s")
        return process.exitcode, said

    def read_models(self):
        """Returns the models of all checkpoints by name."""
        import jboost as jb

        return {path.name: jb.load(path) for path in sorted(self.folder.glob("run*"))}

    def read_result(self):
        """Returns the digest of a finished run."""
        return (self.folder / "result").read_text()

    def is_writing(self):
        """Returns whether a checkpoint is being written."""
        with os.scandir(self.folder) as entries:
            return any(entry.name.endswith(".part") for entry in entries)

    def stamp(self):
        """Returns what changes with each checkpoint that is written."""
        with os.scandir(self.folder) as entries:
            return {e.name: e.inode() for e in entries if e.name.startswith("run")}

    def clear(self):
        """Removes the folder."""
        os.chmod(self.folder, 0o755)
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.folder.rmdir()


def make_folder(path):
    """Makes a folder in which a process without privileges can write."""
    path.mkdir()
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    return path


def disturb(lab, kind, whole, chance, args, done):
    """Disturbs one run until it ends or is disturbed enough; returns the events."""
    events, rounds = [], {}
    for _ in range(chance.randrange(3, 9)):
        trouble = chance.choice(TROUBLES)
        event = {"kind": kind, "trouble": trouble, **strike(lab, kind, trouble, chance)}
        found = check(lab, whole, rounds)
        event |= {"rounds": rounds.copy(), "fault": found or event["fault"]}
        events.append(event)
        number = done + count_kills(events)
        shown = event["fault"] or event["said"] or event["code"]
        print(
            f"{number:4d} {kind}, {trouble}, after {event['after']:.2f} s"
            f"{' while writing' * event['writing']}: {shown}; {rounds}",
            flush=True,
        )
        if number >= args.kills or event["code"] == 0:
            break
    return events


def strike(lab, kind, trouble, chance):
    """Starts a process in trouble, and kills it at some moment; tells what came."""
    size = chance.randrange(100, 40_000)
    started = [lab.start(kind, trouble, size)]
    if trouble == "two processes":
        started.append(lab.start(kind))
    begun = time.perf_counter()
    writing = wait(lab, [process for process, _ in started], chance)
    after = time.perf_counter() - begun
    if trouble == "read-only folder":
        os.chmod(lab.folder, 0o555)
        time.sleep(chance.uniform(0, 1))
    fault, ended = None, []
    for process, told in started[::-1]:
        if len(started) == 2 and process.exitcode is not None:
            ended.append(lab.finish((process, told)))
            continue
        process.kill()
        code, said = lab.finish((process, told))
    codes = [code for code, _ in ended]
    if not {*codes} <= {0, REFUSED} or codes == [REFUSED, REFUSED]:
        fault = f"two processes ended with {ended}"
    if len(ended) == 2:
        code, said = ended[0]
    os.chmod(lab.folder, 0o755)
    if trouble == "clock":
        for path in lab.folder.glob("run*"):
            moment = time.time() + chance.uniform(-1e8, 1e8)
            os.utime(path, (moment, moment))
    if code not in (0, FAILED, REFUSED, -signal.SIGKILL):
        fault = f"ended with {code}: {said}"
    writing = writing and code == -signal.SIGKILL
    return dict(code=code, said=said, after=after, writing=writing, fault=fault)


def wait(lab, processes, chance):
    """Waits for a moment; returns whether a checkpoint is being written then.

    One in four is a time from the start, when programs are compiled; others come some
    checkpoints after the start, half of them as soon as a file is seen being written.
    """
    mode = chance.choice(("time", "change", "writing", "writing"))
    begun, seen, stamps = time.perf_counter(), None, chance.randrange(1, 30)
    limit = chance.uniform(0, lab.args.seconds) if mode == "time" else 60
    while any(process.is_alive() for process in processes):
        if time.perf_counter() > begun + limit:
            return False
        if mode != "time" and stamps > 0:
            stamps, seen = stamps - (lab.stamp() != seen), lab.stamp()
        elif mode == "change":
            time.sleep(chance.uniform(0, 0.05))
            return False
        elif mode == "writing" and lab.is_writing():
            return True
        time.sleep(0.0002 if mode == "writing" else 0.002)
    return False


def check(lab, whole, rounds):
    """Checks every checkpoint; returns what is wrong, and updates their rounds."""
    import jax

    import jboost as jb

    try:
        models = lab.read_models()
    except ValueError as error:
        return f"a checkpoint cannot be read: {error}"
    for name, model in models.items():
        first = jb.truncate(whole[0][name], model.num_rounds)
        pairs = zip(jax.tree.leaves(model), jax.tree.leaves(first), strict=True)
        if not all(
            np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
        ):
            return f"{name} holds other trees"
        if model.num_rounds < rounds.get(name, 0):
            return f"{name} holds fewer rounds than before"
    if rounds.keys() - models.keys():
        return "a checkpoint is gone"
    rounds |= {name: model.num_rounds for name, model in models.items()}
    return None


def end(lab, kind, whole):
    """Makes the call once more, undisturbed; compares the result."""
    code, said = lab.finish(lab.start(kind))
    if code != 0:
        return f"code {code}: {said}"
    left = [*lab.folder.glob(".run*"), *lab.folder.glob("blocks/*")]
    if left:
        return f"files left over: {[path.name for path in left]}"
    return "the same bytes" if lab.read_result() == whole[1] else "other bytes"


def work(folder, kind, trouble, size, rounds, cache, tell):
    """Trains in a process of its own, and writes a digest of the results."""
    import jax

    import jboost as jb

    place, least = cache
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    if os.geteuid() == 0:  # who may write everywhere
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if trouble == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    if trouble == "clock":
        confuse()
    try:
        results = train(kind, Path(folder), rounds)
    except jb.TrainingError as error:
        tell.send(describe(error))
        sys.exit(FAILED)
    except (ValueError, OSError, jb.streams.BlockError) as error:
        tell.send(describe(error))
        sys.exit(REFUSED)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    Path(folder, "result").write_text(digest(results))


def describe(error):
    """Returns an error in the same words for all runs."""
    text = str(error)
    for words in (
        "checkpoint could not be written", "is in use by another run", "read-only",
        "can be written to", "no folder for blocks", "File too large",
        "Permission denied",
    ):  # fmt: skip
        if words in text:
            return f"{type(error).__name__}: {words}"
    return f"{type(error).__name__}: {text}"


def confuse():
    """Lets the clocks that Python reads jump by up to a day, back and forth."""
    jump = random.Random().uniform
    for name in ("time", "perf_counter", "monotonic"):
        clock = getattr(time, name)
        setattr(time, name, lambda clock=clock: clock() + jump(-1e5, 1e5))


def train(kind, folder, rounds):
    """Makes the call of a kind; returns models and histories."""
    import jboost as jb

    x, y = make_rows()
    call = dict(
        num_rounds=rounds, max_depth=4, subsample=0.7, seed=1, checkpoint_rounds=EVERY
    )
    if kind == "stream":
        batches = jb.streams.array_batches(x, y, batch_rows=500)
        rows = jb.stream(batches, memory="64 MiB", directories=folder / "blocks")
        return [jb.fit(rows, **call, checkpoint=folder / "run")]
    if kind == "folds":
        fold = np.arange(len(x)) % FOLDS
        return [
            jb.fit(
                x[fold != k], y[fold != k], jb.losses.huber, **call,
                validation=(x[fold == k], y[fold == k]), early_stopping_rounds=40,
                checkpoint=folder / f"run {k}",
            )
            for k in range(FOLDS)
        ]  # fmt: skip
    if kind == "continued":
        start = folder / "start"
        if not start.exists():
            jb.save(jb.fit(x, y, num_rounds=20, max_depth=4)[0], start)
        call["model"] = jb.load(start)
    return [jb.fit(x, y, **call, validation=(x, y), checkpoint=folder / "run")]


def digest(results):
    """Returns a hash of models and histories."""
    found = hashlib.sha256()
    for model, history in results:
        import jboost as jb

        jb.save(model, file := io.BytesIO())
        found.update(file.getvalue())
        found.update(history.train_loss.tobytes())
        if history.validation_loss is not None:
            found.update(history.validation_loss.tobytes())
        found.update(json.dumps(history.best_round).encode())
    return found.hexdigest()


def make_rows():
    """Returns rows with a few signals."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 8)).astype(np.float32)
    return x, x[:, 0] + np.abs(x[:, 1]) + rng.normal(size=len(x)).astype(np.float32)


def parse():
    """Returns the options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=3, help="in which moments are chosen"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a run")
    parser.add_argument("--folder", help="folder of the files (default: temporary)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
