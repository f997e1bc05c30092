# SPDX-License-Identifier: Apache-2.0
"""Do hostile files and arguments give a correct result or a clear error?

Draws files (models, checkpoints, blocks of a stream, models of XGBoost, LightGBM and
scikit-learn) whose contents are changed under right checksums, and calls with arguments
of odd types, layouts, shapes and numbers. Every case must end with the result that
plain arguments give, or with an error of jboost that says what is wrong: no other
exception, no hang, no end of the process, no large memory. The tests draw the same
cases, but few of them (tests/fuzzing.py).

    python experiments/fuzz.py --minutes 60

A case is drawn from its target and number alone. A later run goes on with the numbers
where the last one ended; ``--repeat TARGET NUMBER`` runs one case here. Written to
--out: fuzz.json, and the cases that failed as files in fuzz-faults.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from experiment_tools import make_parser, read_processor, write_json

TESTS = Path(__file__).parents[1] / "tests"
SLICE = 150  # seconds until a new process goes on, which has forgotten all programs
TURN = 25  # cases of a target, then it is the next one's turn
MOST_SECONDS = 60  # of CPU time for a case
SILENCE = 1200  # seconds without CPU time or an end, as in a deadlock


def main():
    """Runs cases until the time is over."""
    args = parse()
    if args.worker:
        work(json.loads(args.worker))
        return
    if args.repeat:
        repeat(args.repeat[0], int(args.repeat[1]))
        return
    path = args.out / "fuzz.json"
    state = {"minutes": 0.0, "targets": {}}
    if path.exists():
        state |= json.loads(path.read_text())
    state["processor"] = read_processor()
    begun, before = time.monotonic(), state["minutes"]
    while (spent := (time.monotonic() - begun) / 60) < args.minutes:
        seconds = min(SLICE, 60 * (args.minutes - spent))
        run_slice(args, state, seconds)
        state["minutes"] = before + (time.monotonic() - begun) / 60
        write_json(path, state)
        print(summarize(state), flush=True)
    print(f"\nFound: {summarize(state)}; see {path}")


def summarize(state):
    """Returns the numbers of cases in words."""
    counts = [each["cases"] for each in state["targets"].values()]
    accepted = sum(each["accepted"] for each in state["targets"].values())
    faults = sum(len(each["faults"]) for each in state["targets"].values())
    return (
        f"{sum(counts)} cases of {len(counts)} kinds in {state['minutes']:.0f} "
        f"minutes: {accepted} gave a result, {faults} a fault, the others a clear error"
    )


def run_slice(args, state, seconds):
    """Runs cases in a process; notes what became of them."""
    first = {name: each["next"] for name, each in state["targets"].items()}
    task = dict(seconds=seconds, first=first, only=args.only, thorough=args.thorough)
    command = [sys.executable, __file__, "--worker", json.dumps(task)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        running = None
        for line in process.stdout:
            try:
                event = json.loads(line)
            except ValueError:  # what a case prints
                continue
            running = note(args, state, event)
        code = process.wait()
        if code and running is None:
            errors.seek(0)
            raise SystemExit(f"the process failed:\n{errors.read()[-3000:]}")
        if code:
            text = f"the process ended with {code} (-27: too much CPU time)"
            target, number = running
            save_fault(args, state, target, number, text)


def note(args, state, event):
    """Notes an event; returns the case that runs, if any."""
    target, number = event["target"], event["number"]
    new = dict(next=0, cases=0, accepted=0, faults=[])
    counted = state["targets"].setdefault(target, new)
    if event["event"] == "start":
        counted["next"] = number + 1
        return target, number
    counted["cases"] += 1
    if event["event"] == "fault":
        save_fault(args, state, target, number, event["text"])
    counted["accepted"] += event["event"] == "accepted"
    return None


def save_fault(args, state, target, number, text):
    """Writes a case that failed."""
    folder = args.out / "fuzz-faults"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{target.replace(' ', '-')}-{number}"
    (folder / f"{name}.txt").write_text(text + "\n")
    state["targets"][target]["faults"].append(number)
    print(f"fault: {target} {number}: {text.splitlines()[0][:300]}", flush=True)


def work(task):
    """Runs cases of all targets in turn, as a process of its own."""
    sys.path.insert(0, str(TESTS))
    import fuzzing

    first = task["first"]
    targets = [t for t in fuzzing.TARGETS if not task["only"] or t in task["only"]]
    numbers = {target: first.get(target, 0) for target in targets}
    targets.sort(key=numbers.__getitem__)  # that had fewer turns so far
    end = time.monotonic() + task["seconds"]
    with tempfile.TemporaryDirectory() as folder:
        while True:
            for target in targets:
                for _ in range(TURN):
                    if time.monotonic() > end:
                        return
                    run(fuzzing, target, numbers[target], Path(folder), task)
                    numbers[target] += 1


def run(fuzzing, target, number, folder, task):
    """Runs a case, and tells what became of it."""

    def tell(event, **more):
        print(json.dumps(dict(event=event, target=target, number=number, **more)))
        sys.stdout.flush()

    tell("start")
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)  # SIGPROF ends the process
    signal.alarm(SILENCE)
    try:
        accepted = fuzzing.run_case(target, number, folder, task["thorough"])
    except fuzzing.Fault as fault:
        text = f"{fault}\n\n{fuzzing.describe_case(target, number)}\n\n"
        tell("fault", text=text + "".join(traceback.format_exception(fault)))
    else:
        tell("accepted" if accepted else "refused")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def repeat(target, number):
    """Runs one case in this process, and leaves its file, if it is one."""
    sys.path.insert(0, str(TESTS))
    import fuzzing

    print(fuzzing.describe_case(target, number))
    case = fuzzing.draw_case(target, number)
    if isinstance(case, bytes):
        path = Path(f"{target.replace(' ', '-')}-{number}.bin")
        path.write_bytes(case)
        print(f"written: {path}")
    with tempfile.TemporaryDirectory() as folder:
        accepted = fuzzing.run_case(target, number, Path(folder), thorough=1.0)
        print("accepted" if accepted else "refused")


def parse():
    """Returns the options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--only", nargs="+", metavar="TARGET", help="targets to run")
    parser.add_argument(
        "--thorough", type=float, default=0.1,
        help="share of models that XLA and explanations evaluate, too",
    )  # fmt: skip
    parser.add_argument("--repeat", nargs=2, metavar=("TARGET", "NUMBER"))
    parser.add_argument("--worker", help="(the script's own: the task of a process)")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
