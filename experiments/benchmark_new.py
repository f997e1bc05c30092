# SPDX-License-Identifier: Apache-2.0
"""The measures of ``benchmark.py`` in new processes: losses, sweeps, servers, pairs.

Out: ``TASKS``, functions of (source, case, threads) by the name of their measure. Each
is run by a fresh process, which prints what it has measured itself, if anything.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmark_cases import Case
from benchmark_peers import list_jboost, list_xgboost, make_table, prepare

PLACE = "BENCHMARK_PLACE"  # the environment variable with a rank and a port
MODEL = "BENCHMARK_MODEL"  # the environment variable that holds the path of a model
SWEPT = [
    {"max_depth": depth, "learning_rate": rate, "l2": l2}
    for depth in (4, 6)
    for rate in (0.05, 0.1)
    for l2 in (1.0, 3.0)
]


def list_new_losses() -> dict[str, tuple[Callable[..., Any], int]]:
    """Returns losses that no library has, with their numbers of scores."""
    import jax
    import jax.numpy as jnp

    def normal(score, target, rate, power):
        residual = (target - rate) * jnp.exp(-score)
        return score + power * jnp.log1p(residual**2 / (2 * power))

    def soft_quantile(score, target, tau):
        residual = target - score
        return tau * residual + 0.1 * jax.nn.softplus(-residual / 0.1)

    def focal(score, target, power):
        sure = jax.nn.sigmoid(jnp.where(target > 0, score, -score))
        return -((1 - sure) ** power) * jnp.log(sure + 1e-7)

    def mixture(scores, target):
        parts = [
            jax.nn.log_sigmoid(sign * scores[4])
            - scores[i + 1]
            - 0.5 * jnp.exp(-2 * scores[i + 1]) * (scores[i] - target) ** 2
            for sign, i in ((1, 0), (-1, 2))
        ]
        return -jax.nn.logsumexp(jnp.stack(parts))

    residual_losses = {
        "log cosh": lambda r: jnp.logaddexp(r, -r),
        "lopsided log cosh": lambda r: (
            jnp.where(r > 0, 4.0, 1.0) * (jnp.logaddexp(r, -r) - np.log(2.0))
        ),
        "Cauchy": lambda r: jnp.log1p(r**2 / 2),
        "fourth power": lambda r: r**4,
        "expectile": lambda r: jnp.where(r > 0, 0.2, 0.8) * r**2,
        "Geman-McClure": lambda r: r**2 / (1 + r**2),
        "beyond a margin": lambda r: jnp.maximum(jnp.abs(r) - 0.1, 0) ** 2,
        "arc tangent": lambda r: jnp.arctan(r**2),
        "square root": lambda r: jnp.sqrt(1 + r**2) - 1,
        "linex": lambda r: jnp.exp(0.5 * r) - 0.5 * r - 1,
        "power 1.5": lambda r: (r**2 + 0.01) ** 0.75,
        "Welsch": lambda r: 1 - jnp.exp(-(r**2) / 8),
        "one-sided": lambda r: jax.nn.softplus(r) ** 2 + 0.1 * r**2,
        "logarithm of cosh, scaled": lambda r: jnp.log(jnp.cosh(r / 2)) * 4,
        "mean of two": lambda r: 0.5 * r**2 + jnp.sqrt(1 + r**2),
        "Barron, -2": lambda r: 2 * r**2 / (r**2 + 4),
    }

    def of_residual(function):
        return lambda score, target: function(score - target)

    losses: dict[str, tuple[Callable[..., Any], int]] = {
        name: (of_residual(function), 1) for name, function in residual_losses.items()
    }
    losses |= {
        "soft quantile": (lambda s, t: soft_quantile(s, t, 0.8), 1),
        "focal": (lambda s, t: focal(s, t, 2), 1),
        "focal, 1": (lambda s, t: focal(s, t, 1), 1),
        "softplus rate": (
            lambda s, t: jax.nn.softplus(s) - jnp.abs(t) * jnp.log(jax.nn.softplus(s)),
            1,
        ),
        "normal": (
            lambda s, t: s[1] + 0.5 * jnp.exp(-2 * s[1]) * (s[0] - t) ** 2,
            2,
        ),
        "heavy normal": (lambda s, t: normal(s[1], t, s[0], 2.5), 2),
        "soft Laplace": (
            lambda s, t: s[1] + jnp.exp(-s[1]) * jnp.sqrt(0.01 + (s[0] - t) ** 2),
            2,
        ),
        "three quantiles": (
            lambda s, t: sum(
                soft_quantile(s[i], t, tau) for i, tau in enumerate((0.1, 0.5, 0.9))
            ),
            3,
        ),
        "mixture": (mixture, 5),
    }
    return losses


def run_new(source: str, case: Case, threads: int) -> None:
    """Prints the mean processor time of first fits with one score, and with several.

    The process has fitted built-in losses of one score before.
    """
    import jboost as jb

    del threads
    table = make_table(case)
    x, y = table.x[: case.num_rows], table.signal[: case.num_rows]
    chosen = list_jboost(case) | {"num_rounds": case.rounds}
    jb.fit(x, y, **chosen)
    jb.fit(x, (y > 0).astype(np.float32), jb.losses.logistic, **chosen)
    seconds: tuple[list[float], list[float]] = ([], [])
    for loss, num_scores in list_new_losses().values():
        begin = time.process_time()
        jb.fit(x, y, loss, num_scores=num_scores, **chosen)
        seconds[num_scores > 1].append(time.process_time() - begin)
    print(*map(np.mean, seconds))


def run_losses(source: str, case: Case, threads: int) -> None:
    """Fits twenty new losses of one score, one after the other."""
    table = make_table(case)
    x, y = table.x[: case.num_rows], table.signal[: case.num_rows]
    losses = [loss for loss, number in list_new_losses().values() if number == 1]
    if source == "jboost":
        import jboost as jb

        for loss in losses:
            jb.fit(x, y, loss, **list_jboost(case), num_rounds=case.rounds)
        return
    import jax
    import xgboost

    data = xgboost.DMatrix(x, y)
    parameters = list_xgboost(case, threads)
    for loss in losses:
        slopes = jax.jit(jax.vmap(jax.grad(loss)))
        bends = jax.jit(jax.vmap(jax.grad(jax.grad(loss))))

        def objective(score, _, slopes=slopes, bends=bends):
            score = score.astype(np.float32)
            bend = np.maximum(np.asarray(bends(score, y)), 1e-6)
            return np.asarray(slopes(score, y)), bend

        xgboost.train(parameters, data, case.rounds, obj=objective)


def run_sweep(source: str, case: Case, threads: int) -> None:
    """Cross-validates eight points of two depths on three folds, with categories."""
    import pandas as pd

    generator = np.random.default_rng(0)
    size = case.num_rows
    x = generator.normal(size=(size, case.num_features)).astype(np.float32)
    levels = generator.integers(0, 8, (size, 2))
    y = x[:, 0] + np.sin(2 * x[:, 1]) + 0.3 * levels[:, 0]
    frame = pd.DataFrame(x, columns=[f"x{i}" for i in range(x.shape[1])])
    for i in range(2):
        frame[f"c{i}"] = pd.Categorical(levels[:, i].astype(str))
    if source == "jboost":
        import jboost as jb

        settings = {"folds": 3, "num_rounds": case.rounds, **list_jboost(case)}
        for name in SWEPT[0]:
            del settings[name]
        jb.sweep(frame, y, jb.losses.squared_error, SWEPT, grid=False, **settings)
        return
    import xgboost

    data = xgboost.DMatrix(frame, y, enable_categorical=True)
    for point in SWEPT:
        chosen = list_xgboost(case, threads) | {
            "max_depth": point["max_depth"],
            "learning_rate": point["learning_rate"],
            "reg_lambda": point["l2"],
        }
        xgboost.cv(chosen, data, case.rounds, nfold=3)


def save_model(source: str, case: Case, threads: int) -> None:
    """Writes the model, and a row, that a server of :func:`run_server` loads."""
    contender, path = prepare(source, case, threads), os.environ[MODEL]
    model = contender.fit(case.rounds)
    if source == "jboost":
        import jboost as jb

        jb.save(model, path + ".jboost")
    else:
        model.save_model(path + ".ubj")
    np.save(path + ".npy", make_table(case).x[:1])


def run_server(source: str, case: Case, threads: int) -> None:
    """Starts as a server does: imports, loads a model, and predicts one row."""
    del case, threads
    path = os.environ[MODEL]
    rows = np.load(path + ".npy")
    if source == "jboost":
        import jboost as jb

        np.asarray(jb.predict(jb.load(path + ".jboost"), rows))
        return
    import xgboost

    xgboost.Booster(model_file=path + ".ubj").inplace_predict(rows)


def run_processes(source: str, case: Case, threads: int) -> None:
    """Prints the milliseconds a round of one process, or of two with a core each.

    Two processes are this function again, with their rank and a port in PLACE.
    """
    place = os.environ.get(PLACE, "")
    if source == "jboost-two" and not place:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        both = [
            subprocess.Popen(
                [sys.executable, *sys.argv], stdout=subprocess.PIPE, text=True,
                env=os.environ | {PLACE: f"{rank} {port}", "PJRT_NPROC": "1"},
            )
            for rank in range(2)
        ]  # fmt: skip
        # Gloo writes above the figure that a process prints.
        print(max(float(each.communicate()[0].split()[-1]) for each in both))
        return
    rank, mesh, rows = 0, None, slice(case.num_rows)
    if place:
        rank, port = map(int, place.split())
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        half = case.num_rows // 2
        rows = slice(rank * half, (rank + 1) * half)
    import jax

    import jboost as jb

    if place:
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
        mesh = jax.make_mesh((2,), ("rows",))
    table = make_table(case)
    x, y, seconds = table.x[rows], table.signal[rows], {case.low: [], case.high: []}
    for number in (case.high, *3 * (case.low, case.high)):  # the first one compiles
        begun = time.perf_counter()
        jb.fit(x, y, num_rounds=number, mesh=mesh, **list_jboost(case))
        seconds[number].append(time.perf_counter() - begun)
    least = min(seconds[case.high][1:]) - min(seconds[case.low])
    print(1e3 * least / (case.high - case.low))


TASKS: dict[str, Callable[[str, Case, int], None]] = {
    "new": run_new,
    "losses": run_losses,
    "sweep": run_sweep,
    "server": run_server,
    "processes": run_processes,
}
