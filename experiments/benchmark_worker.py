# SPDX-License-Identifier: Apache-2.0
"""The processes that ``benchmark.py`` measures: each holds one library.

    python experiments/benchmark_worker.py serve SOURCE THREADS

answers requests, one JSON per line, until its input ends: readings of one library
on generated data, after a call that is not timed.

    python experiments/benchmark_worker.py cold SOURCE THREADS CASE
    python experiments/benchmark_worker.py cold-cv SOURCE THREADS CASE
    python experiments/benchmark_worker.py memory SOURCE THREADS CASE

do one thing and end: import, fit and predict; import and cross-validate; the same as
cold, printing the peak memory after fit and after predict. benchmark_new.py has more of
these.
"""

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_cases import Case
from benchmark_new import TASKS, save_model
from benchmark_peers import (
    HELD_OUT,
    forget_table,
    make_table,
    make_targets,
    prepare,
    prepare_many,
    prepare_single_tree,
    take_rows,
)
from benchmark_timing import Reading, choose_times, time_call, watch

Reader = Callable[[], Reading]
TRAINED = 20_000  # models that only predict are trained on that many rows at most
SLOW_ROWS = 1_000_000  # rows from which on fits are slow: they need no full warm-up


# ---- the measures: each warms up and returns what takes a reading -------------------


def read_once(function: Callable[[], Any], times: int = 1) -> Reading:
    """Returns the milliseconds of a call, the mean of so many."""
    seconds, load = watch(lambda: time_call(function, times))
    return Reading((1e3 * seconds,), load)


def read_call(function: Callable[[], Any]) -> Reader:
    """Returns what times a call: it is called once or twice before."""
    return partial(read_once, function, choose_times(function))


def prepare_train(source: str, case: Case, threads: int) -> Reader:
    """Milliseconds a round, as the slope between two numbers of rounds."""
    contender = prepare(source, case, threads)
    contender.train(case.high)  # late rounds may compile what early ones do not need
    times = choose_times(lambda: contender.train(case.low))

    def read_both():
        low = time_call(lambda: contender.train(case.low), times)
        return low, time_call(lambda: contender.train(case.high), times)

    def read():
        (low, high), load = watch(read_both)
        return Reading((1e3 * (high - low) / (case.high - case.low),), load)

    return read


def prepare_fit(source: str, case: Case, threads: int) -> Reader:
    """Milliseconds from arrays to a model."""
    contender = prepare(source, case, threads)
    contender.fit(2)

    def fit():
        return contender.fit(case.rounds)

    return read_call(fit) if case.num_rows < SLOW_ROWS else partial(read_once, fit)


def prepare_cv(source: str, case: Case, threads: int) -> Reader:
    """Milliseconds from arrays to the losses of five folds."""
    contender = prepare(source, case, threads)
    return read_call(lambda: contender.validate(case.rounds))


@lru_cache(maxsize=2)
def train_model(source: str, case: Case, threads: int) -> tuple:
    """Returns a contender and its model: steps that differ in rows share them."""
    contender = prepare(source, case, threads, most=TRAINED)
    return contender, contender.fit(case.rounds)


def prepare_predict(source: str, case: Case, threads: int) -> Reader:
    """Milliseconds for raw scores of some rows."""
    contender, model = train_model(source, case._replace(predicted=0), threads)
    rows = take_rows(make_table(case).x, slice(case.predicted))
    contender.predict(model, rows)
    return read_call(lambda: contender.predict(model, rows))


def prepare_shap(source: str, case: Case, threads: int) -> Reader:
    """Milliseconds for SHAP values of some rows."""
    contender, model = train_model(source, case._replace(predicted=0), threads)
    rows = take_rows(make_table(case).x, slice(case.predicted))
    values, base = contender.explain(model, rows[:500])
    score = np.asarray(contender.predict(model, rows[:500]))
    np.testing.assert_allclose(values.sum(axis=1) + base, score, rtol=0, atol=1e-3)
    return read_call(lambda: contender.explain(model, rows))


def prepare_tree(source: str, case: Case, threads: int) -> Reader:
    """Milliseconds to grow one tree without a limit."""
    function = prepare_single_tree(source, case)
    function()
    return read_call(function)


def prepare_many_models(source: str, case: Case, threads: int) -> Reader:
    """Milliseconds to train all models; those of a loop, from a quarter of them."""
    share = 1 if source == "jboost-vmap" else 4
    case = case._replace(num_models=case.num_models // share)
    function = prepare_many(source, case, threads)
    if source == "jboost-vmap":  # is compiled for this number of models
        function()
    else:
        prepare_many(source, case._replace(num_models=2), threads)()

    def read():
        (milliseconds,), load = read_once(function)
        return Reading((share * milliseconds,), load)

    return read


MEASURES: dict[str, Callable[[str, Case, int], Reader]] = {
    "train": prepare_train,
    "fit": prepare_fit,
    "cv": prepare_cv,
    "predict": prepare_predict,
    "shap": prepare_shap,
    "tree": prepare_tree,
    "many": prepare_many_models,
}


def measure_loss(source: str, case: Case, threads: int) -> float | None:
    """Returns the mean loss of held-out rows after the rounds of the slope.

    None where it is not comparable: for losses of groups.
    """
    from compare_fits import held_out_loss

    names = {"own": "squared_error", "quantile": "quantile 0.9"}
    contender = prepare(source, case, threads)
    rows = slice(case.num_rows, case.num_rows + HELD_OUT)
    table = make_table(case)
    score = contender.predict(contender.train(case.high), take_rows(table.x, rows))
    try:
        y = make_targets(case, table.signal)[rows]
        return held_out_loss(names.get(case.loss, case.loss), np.asarray(score), y)
    except (ValueError, TypeError):
        return None


# ---- fresh processes ----------------------------------------------------------------


def run_cold(source: str, case: Case, threads: int) -> None:
    """Imports, fits and predicts."""
    contender = prepare(source, case, threads)
    contender.predict(contender.fit(case.rounds), make_table(case).x[: case.num_rows])


def run_cold_cv(source: str, case: Case, threads: int) -> None:
    """Imports and cross-validates."""
    prepare(source, case, threads).validate(case.rounds)


def run_memory(source: str, case: Case, threads: int) -> None:
    """Does the same and prints the peak memory, MiB, after fit and after predict."""
    contender = prepare(source, case, threads)
    model = contender.fit(case.high)
    fitted = read_peak()
    contender.predict(model, make_table(case).x[: case.num_rows])
    print(fitted, read_peak())


def read_peak() -> float:
    """Returns the peak resident memory of this process in MiB.

    ru_maxrss is the last resort: on Linux it starts with that of the parent.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(s.split()[1]) for s in lines if s.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 1024)


# ---- the process that answers -------------------------------------------------------


class Server:
    """Answers requests about one source."""

    def __init__(self, source: str, threads: int):
        """Nothing is imported yet."""
        self.source, self.threads = source, threads
        self.reader: Reader | None = None

    def prepare(self, measure: str, case: list) -> None:
        """Gets ready for readings."""
        self.reader = None  # frees memory first
        self.reader = MEASURES[measure](self.source, Case(*case), self.threads)

    def read(self) -> Reading:
        """Takes one reading."""
        assert self.reader
        return self.reader()

    def forget(self) -> None:
        """Drops data and models: those of the next step are others."""
        self.reader = None
        train_model.cache_clear()
        forget_table()

    def loss(self, case: list) -> float | None:
        """Returns the loss of held-out rows."""
        return measure_loss(self.source, Case(*case), self.threads)

    def describe(self) -> dict:
        """Returns what jboost computes with, and a digest of its files."""
        import jax

        import jboost as jb

        device = jax.devices()[0]
        digest, root = hashlib.sha256(), Path(inspect.getfile(jb)).parent
        library = os.environ.get("JBOOST_LIBRARY")  # kernels from elsewhere
        files = [*root.rglob("*.py"), *root.rglob("*.so"), *filter(None, [library])]
        for path in sorted(map(Path, files)):
            digest.update(path.read_bytes())
        return {
            "device": f"{device.platform}: {device.device_kind}",
            "implementations": str(jb.implementations()),
            "digest of jboost": digest.hexdigest()[:12],
        }


def serve(source: str, threads: int) -> None:
    """Answers {"do": name, argument: value, ...} until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print does not belong to the answers
    server = Server(source, threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(server, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def main() -> None:
    """Does what the command line says; see the module docstring."""
    task, source, threads, *case = sys.argv[1:]
    if task == "serve":
        serve(source, int(threads))
    else:
        runs = {"cold": run_cold, "cold-cv": run_cold_cv, "memory": run_memory}
        runs |= TASKS | {"save": save_model}
        runs[task](source, Case(*json.loads(case[0])), int(threads))


if __name__ == "__main__":
    main()
