# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the documentation: ``python docs/make_pictures.py``.

Building the documentation draws missing pictures.
"""

from functools import cache, partial
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot
import numpy as np
import pandas as pd

import jboost as jb
from jboost import plotting

FOLDER = Path(__file__).parent / "pictures"
NAMES = ["rooms", "age", "distance", "noise"]


def make_homes():
    """Returns generated rents of homes: 500 rows, with some missing cells."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 4))
    y = x[:, 0] + np.sin(3 * x[:, 1]) + x[:, 0] * x[:, 2]
    x[rng.random(x.shape) < 0.05] = np.nan
    return x, y + 0.3 * rng.standard_t(3, size=500)


@cache
def train_homes():
    """Returns a model of 300 rows, and its history on the other 200."""
    x, y = make_homes()
    return jb.fit(
        x[:300], y[:300], validation=(x[300:], y[300:]), num_rounds=100, max_depth=3,
        feature_names=NAMES,
    )  # fmt: skip


WAVE_SHARES = np.array([0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
WAVE_LOSSES = {
    "L2, squared error": (jb.losses.squared_error, "C0", "-"),
    "L1, absolute error": (jb.losses.absolute_error, "C1", "--"),
    "Huber, delta = 0.5": (partial(jb.losses.huber, delta=0.5), "C2", "-."),
}


def make_waves(share, seed=0):
    """Returns noisy targets of a wave, with a share of them made much larger."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(-3, 3, 600))
    wave = np.sin(2 * x) + x / 3
    y = wave + 0.2 * rng.normal(size=600)
    corrupted = rng.permutation(600)[: round(share * 600)]
    y[corrupted] += rng.uniform(3, 12, len(corrupted))
    return x[:, None], y, wave


def fit_wave(loss, x, y):
    """Returns the scores of a small model on its training rows."""
    settings = dict(max_depth=3, min_child_samples=20, learning_rate=0.1)
    return jb.predict(jb.fit(x, y, loss, num_rounds=60, **settings)[0], x)


def draw_contaminated():
    """Draws models of three losses on targets of which some are corrupted."""
    figure, (left, right) = matplotlib.pyplot.subplots(
        1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(3, 2)
    )
    x, y, wave = make_waves(0.15)
    left.plot(x[:, 0], y, ".", color="0.7", markersize=4, label="training rows")
    left.plot(x[:, 0], wave, color="0.2", linewidth=1, label="truth")
    for name, (loss, color, dashes) in WAVE_LOSSES.items():
        line = dict(color=color, linestyle=dashes, linewidth=2, label=name)
        left.plot(x[:, 0], fit_wave(loss, x, y), **line)
        errors = [np.mean([mean_wave_error(loss, s, i) for i in range(4)])
                  for s in WAVE_SHARES]  # fmt: skip
        right.plot(100 * WAVE_SHARES, errors, **line)
    left.set(xlabel="feature", ylabel="target", ylim=(-2.6, 6))
    left.set_title("15 % of the targets are corrupted", fontsize=10)
    right.set(xlabel="corrupted targets (%)", ylim=0)
    right.set_title("mean distance to the truth", fontsize=10)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=5,
        frameon=False, fontsize=9,
    )  # fmt: skip
    return figure


def mean_wave_error(loss, share, seed):
    """Returns the mean distance of a model to the truth."""
    x, y, wave = make_waves(share, seed)
    return np.abs(fit_wave(loss, x, y) - wave).mean()


def draw_learning_curve():
    """Draws training and validation loss."""
    return plotting.learning_curve(train_homes()[1]).figure


def draw_folds():
    """Draws means over folds with bands of one standard error."""
    x, y = make_homes()
    return plotting.learning_curve(jb.cross_validate(x, y, num_rounds=100)).figure


def draw_tuning():
    """Draws the search of settings for noisy waves."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 5))
    y = x[:, 0] + np.sin(3 * x[:, 1]) + rng.normal(size=1000)
    _, tuned = jb.tune(x, y, trials=64, num_rounds=144)
    return plotting.tuning(tuned)[0].figure


def draw_importance():
    """Draws the importance of four features."""
    return plotting.importance(train_homes()[0]).figure


def draw_tree():
    """Draws the first tree."""
    return plotting.tree(train_homes()[0]).figure


def draw_shap():
    """Draws SHAP values of all rows."""
    return plotting.shap_summary(train_homes()[0], make_homes()[0]).figure


def draw_dependence():
    """Draws the partial dependence on one feature."""
    return plotting.partial_dependence(train_homes()[0], make_homes()[0], "age").figure


def draw_dependence_two():
    """Draws the partial dependence on two features that interact."""
    pair = ("rooms", "distance")
    return plotting.partial_dependence(train_homes()[0], make_homes()[0], pair).figure


@cache
def train_districts():
    """Returns a model of rents by rooms and one of 30 districts of different sizes."""
    rng = np.random.default_rng(0)
    district = np.minimum(rng.zipf(1.3, 2000), 30)
    effect = rng.normal(size=31)
    rooms = rng.normal(size=2000)
    names = np.array([f"district {number}" for number in range(31)])
    x = pd.DataFrame({"rooms": rooms, "district": names[district]})
    y = rooms + effect[district] + 0.3 * rng.normal(size=2000)
    return jb.fit(x, y, num_rounds=50, max_depth=3)[0], x


def draw_dependence_categories():
    """Draws the partial dependence on a feature with more categories than are shown."""
    model, x = train_districts()
    return plotting.partial_dependence(model, x, "district", max_categories=12).figure


def draw_loss_absolute():
    """Draws |r|, whose Hessian is zero."""
    return plotting.loss(jb.losses.absolute_error, 0.0)[0].figure


def draw_loss_poisson():
    """Draws a loss whose Hessian is a good curvature."""
    return plotting.loss(jb.losses.poisson, 3.0, np.linspace(-2, 3, 401))[0].figure


def draw_loss_cautious():
    """Draws the custom loss of the page on losses."""
    return plotting.loss(cautious, 0.0)[0].figure


def draw_policies():
    """Draws a non-convex loss with three policies."""
    policies = ("auto", "secant", "absolute")
    return plotting.loss(jb.losses.cauchy, 0.0, curvature=policies)[0].figure


def draw_leaf():
    """Draws a Newton step that fails, and the minimum of the leaf's loss."""
    residuals = np.array([2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
    values = np.linspace(-1, 12, 600)

    def total(value):
        return np.log(np.cosh(np.subtract.outer(value, residuals))).sum(axis=-1)

    gradient = np.tanh(-residuals).sum()
    hessian = (1 - np.tanh(residuals) ** 2).sum()
    figure, ax = matplotlib.pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    model = total(0.0) + gradient * values + hessian * values**2 / 2
    ax.plot(values, total(values), color="C0", linewidth=2, label="loss of the leaf")
    ax.plot(
        values, model, "--", color="C1", label="second-order model with the Hessian"
    )
    best = values[total(values).argmin()]
    ax.plot([best], [total(best)], "o", color="C0", label=f"its minimum, {best:.2f}")
    ax.plot([0], [total(0.0)], "o", color="0.5", label="before the step")
    ax.annotate(
        f"its minimum, {-gradient / hessian:.0f}", (7.1, -21.5), (8.2, -12),
        color="C1", arrowprops=dict(arrowstyle="->", color="C1"),
    )  # fmt: skip
    ax.set(xlabel="leaf value", ylim=(-22, 45))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper center")
    return figure


def cautious(score, target):
    """Limits the effect of outliers; predicting too high costs four times as much."""
    residual = score - target
    return jnp.where(residual > 0, 4.0, 1.0) * jnp.log1p(residual**2)


PICTURES = {
    name.removeprefix("draw_"): function
    for name, function in dict(globals()).items()
    if name.startswith("draw_")
}


def write_report() -> None:
    """Writes the example of a report, which git ignores."""
    model, history = train_homes()
    x, y = make_homes()
    path = FOLDER / "report.html"
    jb.report(model, x[300:], y[300:], history=history, path=path, title="Rents")


def draw_missing(anew: bool = False) -> None:
    """Writes an SVG for each function above and a report, unless they exist."""
    FOLDER.mkdir(exist_ok=True)
    if anew or not (FOLDER / "report.html").exists():
        write_report()
    matplotlib.use("Agg")
    # A fixed salt, and no date: equal pictures give equal files.
    style = {"svg.hashsalt": "jboost", "figure.facecolor": "white"}
    for name, draw in PICTURES.items():
        path = FOLDER / f"{name}.svg"
        if path.exists() and not anew:
            continue
        with matplotlib.rc_context(style):
            figure = draw()
            figure.savefig(path, metadata={"Date": None})
            matplotlib.pyplot.close(figure)


if __name__ == "__main__":
    draw_missing(anew=True)
