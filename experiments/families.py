# SPDX-License-Identifier: Apache-2.0
"""Do the families of other libraries train, and as well as their formulas?

Families of NumPyro, distrax and TensorFlow Probability's JAX substrate are trained
twice on rows drawn from them: by ``losses.likelihood``, which knows the distribution,
and as the plain function -log p, which does not.

    python experiments/families.py
    python experiments/families.py --only numpyro.Gamma tfp.Moyal --default

Libraries that are not installed are left out:
pip install numpyro distrax tfp-nightly

Six features are normal; three functions of them move the first three parameters, the
first by most. There are 3,000 training rows, and as many held-out ones. Fits have 100
rounds at a rate of 0.1 and depth 4, or with --default the settings of a bare call,
which chooses its rounds itself. Held-out losses are those of the best round, or of the
last with --default; that of the true parameters is subtracted.

Written to --out: families.jsonl (a fit a line; a run goes on where it was interrupted)
and families.md (the table of the documentation).

- falls: the most that one round adds to the training loss, where that is more than
  rounding; "yes" if none does.
- seconds: processor time of the first fit, compilation included.
"""

import importlib.util
import json
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from experiment_tools import (
    add_minutes,
    choose_tables,
    make_figures,
    make_parser,
    print_table,
    take_in_time,
    write_json,
)
from jax.nn import sigmoid
from jax.numpy import exp
from tqdm import tqdm

import jboost as jb

ROWS = 3000
KEYS = ("family", "way", "default")
WAYS = ("likelihood", "formula")
MODULES = {
    "numpyro": "numpyro.distributions",
    "distrax": "distrax",
    "tfp": "tensorflow_probability.substrates.jax.distributions",
}


class Family(NamedTuple):
    """A distribution of the scores, which are offset + spread * signal for rows."""

    make: Callable[[Any, Any], Any]  # takes the library and the scores of a row
    offset: tuple[float, ...]
    spread: tuple[float, ...]
    classes: bool = False


LOCATION = (0.0, -0.5), (2.0, 0.5)  # scores of a location and a logarithm of a scale
SHAPES = (0.0, 0.5), (0.8, 0.5)  # logarithms of two parameters
COUNTS = (0.7, 0.5), (0.6, 0.5)  # those of counts


def single(name):
    """Returns a maker of distributions with the logarithm of a parameter."""
    return lambda d, u: getattr(d, name)(exp(u))


def scaled(name):
    """Returns a maker of distributions with a location and the logarithm of a scale."""
    return lambda d, u: getattr(d, name)(u[0], exp(u[1]))


def positive(name):
    """Returns a maker of distributions with the logarithms of two parameters."""
    return lambda d, u: getattr(d, name)(exp(u[0]), exp(u[1]))


def mix(d, u):
    """Returns a mixture of two normal distributions."""
    weights = d.Categorical(logits=jnp.stack([u[4], 0 * u[4]]))
    return d.MixtureSameFamily(weights, d.Normal(u[:2], exp(u[2:4])))


def correlate(d, u):
    """Returns a normal distribution of two targets."""
    rows = [jnp.stack([exp(u[2]), 0 * u[2]]), jnp.stack([u[4], exp(u[3])])]
    return d.MultivariateNormal(u[:2], scale_tril=jnp.stack(rows))


FAMILIES = {
    "numpyro.Normal": Family(scaled("Normal"), *LOCATION),
    "numpyro.Laplace": Family(scaled("Laplace"), *LOCATION),
    "numpyro.Logistic": Family(scaled("Logistic"), *LOCATION),
    "numpyro.Gumbel": Family(scaled("Gumbel"), *LOCATION),
    "numpyro.Cauchy": Family(scaled("Cauchy"), *LOCATION),
    "numpyro.StudentT": Family(
        lambda d, u: d.StudentT(1 + exp(u[2]), u[0], exp(u[1])),
        (0.0, -0.5, 1.0), (2.0, 0.5, 0.3),
    ),
    "numpyro.AsymmetricLaplace": Family(
        lambda d, u: d.AsymmetricLaplace(u[0], exp(u[1]), exp(u[2])),
        (0.0, -0.5, 0.0), (2.0, 0.5, 0.4),
    ),
    "numpyro.LogNormal": Family(scaled("LogNormal"), (0.0, -0.5), (1.0, 0.5)),
    "numpyro.LeftTruncated(Normal)": Family(
        lambda d, u: d.LeftTruncatedDistribution(d.Normal(u[0], exp(u[1])), low=0.0),
        (1.0, 0.0), (1.0, 0.4),
    ),
    "numpyro.Gamma": Family(
        lambda d, u: d.Gamma(exp(u[1]), exp(u[1] - u[0])), *SHAPES
    ),
    "numpyro.InverseGamma": Family(
        lambda d, u: d.InverseGamma(1 + exp(u[0]), exp(u[1])), (0.8, 0.0), (0.4, 0.5)
    ),
    "numpyro.Weibull": Family(positive("Weibull"), *SHAPES),
    "numpyro.Exponential": Family(single("Exponential"), (0.0,), (0.8,)),
    "numpyro.HalfNormal": Family(single("HalfNormal"), (0.0,), (0.8,)),
    "numpyro.Pareto": Family(lambda d, u: d.Pareto(1.0, exp(u)), (0.5,), (0.5,)),
    "numpyro.Gompertz": Family(positive("Gompertz"), (0.0, 0.0), (0.6, 0.4)),
    "numpyro.Beta": Family(
        lambda d, u: d.BetaProportion(sigmoid(u[0]), exp(u[1])), (0.0, 1.5), (0.8, 0.5)
    ),
    "numpyro.Kumaraswamy": Family(positive("Kumaraswamy"), (0.3, 0.3), (0.5, 0.5)),
    "numpyro.VonMises": Family(scaled("VonMises"), (0.0, 0.8), (0.8, 0.5)),
    "numpyro.Bernoulli": Family(
        lambda d, u: d.Bernoulli(logits=u), (0.0,), (1.5,)
    ),
    "numpyro.Categorical": Family(
        lambda d, u: d.Categorical(logits=u), (0.0, 0.0, -1.0), (1.5, 1.5, 1.5), True
    ),
    "numpyro.Poisson": Family(single("Poisson"), (0.5,), (0.7,)),
    "numpyro.Geometric": Family(
        lambda d, u: d.Geometric(logits=u), (-0.5,), (0.8,)
    ),
    "numpyro.NegativeBinomial2": Family(positive("NegativeBinomial2"), *COUNTS),
    "numpyro.BetaBinomial": Family(
        lambda d, u: d.BetaBinomial(exp(u[0]), exp(u[1]), 20), (0.5, 0.5), (0.6, 0.5),
    ),
    "numpyro.ZeroInflatedPoisson": Family(
        lambda d, u: d.ZeroInflatedPoisson(sigmoid(u[1]), exp(u[0])),
        (0.8, -0.5), (0.6, 0.8),
    ),
    "numpyro.ZeroInflatedNegativeBinomial2": Family(
        lambda d, u: d.ZeroInflatedNegativeBinomial2(
            exp(u[0]), exp(u[1]), gate=sigmoid(u[2])
        ),
        (1.0, 0.7, -0.7), (0.5, 0.4, 0.7),
    ),
    "numpyro.MixtureSameFamily(Normal)": Family(
        mix, (-1.0, 1.5, -0.7, -0.7, 0.0), (1.0, 0.5, 0.3, 0.3, 0.8)
    ),
    "numpyro.MultivariateNormal": Family(
        correlate, (0.0, 0.0, -0.5, -0.3, 0.0), (1.0, 0.8, 0.4, 0.4, 0.5)
    ),
    "distrax.Normal": Family(scaled("Normal"), *LOCATION),
    "distrax.Laplace": Family(scaled("Laplace"), *LOCATION),
    "distrax.Logistic": Family(scaled("Logistic"), *LOCATION),
    "distrax.Gumbel": Family(scaled("Gumbel"), *LOCATION),
    "distrax.Gamma": Family(lambda d, u: d.Gamma(exp(u[1]), exp(u[1] - u[0])), *SHAPES),
    "distrax.Beta": Family(positive("Beta"), (0.5, 0.5), (0.6, 0.5)),
    "distrax.VonMises": Family(scaled("VonMises"), (0.0, 0.8), (0.8, 0.5)),
    "tfp.Normal": Family(scaled("Normal"), *LOCATION),
    "tfp.Gamma": Family(
        lambda d, u: d.Gamma(exp(u[1]), log_rate=u[1] - u[0]), *SHAPES
    ),
    "tfp.Weibull": Family(lambda d, u: d.Weibull(exp(u[1]), exp(u[0])), *SHAPES),
    "tfp.LogLogistic": Family(scaled("LogLogistic"), (0.0, -0.7), (0.8, 0.3)),
    "tfp.Moyal": Family(scaled("Moyal"), *LOCATION),
    "tfp.TwoPieceNormal": Family(
        lambda d, u: d.TwoPieceNormal(u[0], exp(u[1]), exp(u[2])),
        (0.0, -0.5, 0.0), (2.0, 0.5, 0.4),
    ),
    "tfp.SinhArcsinh": Family(
        lambda d, u: d.SinhArcsinh(u[0], exp(u[1]), skewness=u[2]),
        (0.0, -0.5, 0.0), (2.0, 0.5, 0.4),
    ),
    "tfp.JohnsonSU": Family(
        lambda d, u: d.JohnsonSU(u[2], 1.5, u[0], exp(u[1])),
        (0.0, -0.5, 0.0), (2.0, 0.5, 0.4),
    ),
    "tfp.GeneralizedNormal": Family(
        lambda d, u: d.GeneralizedNormal(u[0], exp(u[1]), 1.5), *LOCATION
    ),
    "tfp.ExponentiallyModifiedGaussian": Family(
        lambda d, u: d.ExponentiallyModifiedGaussian(u[0], exp(u[1]), exp(u[2])),
        (0.0, -0.5, 0.0), (1.0, 0.4, 0.4),
    ),
    "tfp.LogitNormal": Family(scaled("LogitNormal"), (0.0, -0.3), (0.8, 0.4)),
    "tfp.InverseGaussian": Family(positive("InverseGaussian"), *SHAPES),
    "tfp.NegativeBinomial": Family(
        lambda d, u: d.NegativeBinomial(exp(u[1]), logits=u[0]), (0.0, 0.5), (0.6, 0.5),
    ),
}  # fmt: skip


class Rows(NamedTuple):
    """Training rows and held-out rows, and the loss of the true parameters."""

    x: np.ndarray
    y: np.ndarray
    true_loss: np.ndarray

    def take(self, rows) -> "Rows":
        """Returns some rows."""
        return Rows(*(array[rows] for array in self))


def draw(family: Family, make: Callable) -> Rows:
    """Draws features, the parameters that they determine, and targets."""
    x = np.random.default_rng(0).normal(size=(2 * ROWS, 6)).astype(np.float32)
    signals = [
        np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1],
        np.where(x[:, 2] > 0, 0.8, -0.8) + 0.4 * x[:, 3] * x[:, 0],
        0.7 * x[:, 4] - 0.5 * (np.abs(x[:, 1]) - 0.8),
    ]
    scores = np.stack([
        start + spread * signals[k % 3]
        for k, (start, spread) in enumerate(
            zip(family.offset, family.spread, strict=True)
        )
    ], axis=1).astype(np.float32)  # fmt: skip
    scores = jnp.asarray(scores if scores.shape[1] > 1 else scores[:, 0])
    module = type(make(scores[0])).__module__.split(".")[0]
    name = "key" if module == "numpyro" else "seed"  # numpyro.sample(key=)

    def sample(score, key):
        return make(score).sample(**{name: key})

    keys = jax.random.split(jax.random.key(0), 2 * ROWS)
    y = np.asarray(jax.jit(jax.vmap(sample))(scores, keys))
    y = y.astype(np.int32 if family.classes else np.float32)
    true_loss = -jax.vmap(lambda s, t: make(s).log_prob(t))(scores, jnp.asarray(y))
    return Rows(x, y, np.asarray(true_loss))


def train(name: str, way: str, default: bool) -> dict[str, Any]:
    """Fits one family in one way, from an empty cache of programs."""
    family = FAMILIES[name]
    library = importlib.import_module(MODULES[name.split(".")[0]])

    def make(score):
        return family.make(library, score)

    def formula(score, target):
        return -make(score).log_prob(target)

    rows = draw(family, make)
    known, unknown = rows.take(slice(ROWS)), rows.take(slice(ROWS, None))
    loss = jb.losses.likelihood(make) if way == "likelihood" else formula
    settings: dict[str, Any] = dict(num_scores=len(family.offset))
    if not default:
        settings |= dict(num_rounds=100, learning_rate=0.1, max_depth=4)
        settings |= dict(validation=(unknown.x, unknown.y))
    jax.clear_caches()
    start = time.process_time()
    model, history = jb.fit(known.x, known.y, loss, **settings)
    seconds = time.process_time() - start
    trained = np.asarray(history.train_loss)
    if default:
        scores = jnp.asarray(jb.predict(model, unknown.x))
        held_out = float(jax.vmap(formula)(scores, jnp.asarray(unknown.y)).mean())
    else:
        held_out = float(np.nanmin(np.asarray(history.validation_loss)))
    return dict(
        family=name, way=way, default=default, rounds=len(trained), seconds=seconds,
        rise=float(np.max(np.diff(trained), initial=0)),
        scale=float(np.abs(trained).max()),
        held_out=held_out - float(unknown.true_loss.mean()),
    )  # fmt: skip


def main() -> None:
    """Trains what has no line yet, and writes the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="FAMILY")
    add_minutes(parser)
    parser.add_argument("--default", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    installed = {
        name
        for name, module in MODULES.items()
        if importlib.util.find_spec(module.split(".")[0])
    }
    names = choose_tables(parser, arguments.only, list(FAMILIES))
    names = [name for name in names if name.split(".")[0] in installed]
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "families.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {tuple(one[k] for k in KEYS): one for one in map(json.loads, lines)}
    jobs = [(n, way, arguments.default) for n in names for way in WAYS]
    left = [job for job in jobs if job not in found]
    for job in tqdm(take_in_time(left, arguments.minutes), total=len(left)):
        try:
            found[job] = train(*job)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found[job] = dict(zip(KEYS, job, strict=True), error=text)
        with path.open("a") as file:
            file.write(json.dumps(found[job]) + "\n")
    done = [n for n in names if all((n, w, arguments.default) in found for w in WAYS)]
    table = tabulate(found, done, arguments.default)
    print_table(table)
    write_json(path.with_suffix(".json"), {"figures": make_figures(families=table)})


def tabulate(found: dict, names: list[str], default: bool) -> list[list[str]]:
    """Returns the table of all families, with means in its last row."""
    heads = ("family", "K", "falls", "likelihood", "formula", "difference")
    rows = [[*heads, "seconds of both"]]
    differences, times = [], []
    for name in names:
        own, plain = (found[name, way, default] for way in WAYS)
        number = str(len(FAMILIES[name].offset))
        if "error" in own or "error" in plain:
            problem = own.get("error") or plain.get("error")
            rows.append([name, number, problem, "", "", "", ""])
            continue
        falls = "yes" if own["rise"] <= 2e-6 * own["scale"] else f"{own['rise']:.1e}"
        difference = own["held_out"] - plain["held_out"]
        differences.append(difference)
        times.append((own["seconds"], plain["seconds"]))
        losses = [f"{each['held_out']:.4f}" for each in (own, plain)]
        seconds = f"{own['seconds']:.1f}, {plain['seconds']:.1f}"
        rows.append([name, number, falls, *losses, f"{difference:+.4f}", seconds])
    if differences:
        mean, worst = np.mean(differences), np.max(differences)
        own, plain = np.mean(times, axis=0)
        label = f"mean (greatest difference {worst:+.4f})"
        seconds = f"{own:.1f}, {plain:.1f}"
        rows.append([label, "", "", "", "", f"{mean:+.4f}", seconds])
    return rows


if __name__ == "__main__":
    main()
