# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the documentation: ``python docs/make_pictures.py``.

A picture below a block of code on a page is the figure that this code draws; the other
pictures have a function here. Building the documentation draws missing pictures.
"""

import re
import tempfile
from contextlib import chdir, redirect_stdout
from functools import cache, partial
from pathlib import Path

import matplotlib.pyplot
import numpy as np

import jboost as jb
from jboost import plotting

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "pictures"
PAGES = ["curvature", "explanations", "losses", "model-selection", "pictures"]
_BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\s+^```text\n.*?^```$)?"
    r"(?:\s+^!\[[^]]*\]\(pictures/(\w+)\.svg\)$)?",
    re.S | re.M,
)
NAMES = ["rooms", "age", "distance", "noise"]
# Text and axes are read on white and on black pages.
GRAY = "#777b80"
NEUTRAL = {
    "figure.facecolor": "none", "axes.facecolor": "none", "legend.facecolor": "none",
    "text.color": GRAY, "axes.edgecolor": GRAY, "axes.labelcolor": GRAY,
    "axes.titlecolor": GRAY, "xtick.color": GRAY, "ytick.color": GRAY,
}  # fmt: skip


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
    left.plot(x[:, 0], wave, color="C4", linewidth=1, label="truth")
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


def draw_tuning():
    """Draws the search of settings for noisy waves."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 5))
    y = x[:, 0] + np.sin(3 * x[:, 1]) + rng.normal(size=1000)
    _, tuned = jb.tune(x, y, trials=64, num_rounds=144)
    return plotting.tuning(tuned)[0].figure


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


PICTURES = {
    name.removeprefix("draw_"): function
    for name, function in dict(globals()).items()
    if name.startswith("draw_")
}


def adapt_colors(path: Path) -> None:
    """Makes the white ground of an SVG transparent, and its black text gray."""
    text = re.sub(r"fill: ?#ffffff", "fill: none", path.read_text())
    text = re.sub(r"#(000000|333333|262626)\b", GRAY, text)
    if "svg{fill" not in text:  # paths without a color are black otherwise
        text = text.replace('"text/css">*{', f'"text/css">svg{{fill: {GRAY}}} *{{')
    path.write_text(text)


def write_report() -> None:
    """Writes the example of a report, which git ignores."""
    model, history = train_homes()
    x, y = make_homes()
    path = FOLDER / "report.html"
    jb.report(model, x[300:], y[300:], history=history, path=path, title="Rents")


def draw_page(text: str) -> None:
    """Runs the code of a page until its last picture, and saves the figures."""
    blocks = _BLOCK.findall(text)
    names = {"__name__": "page"}
    while any(name for _, name in blocks):
        code, name = blocks.pop(0)
        matplotlib.pyplot.close("all")
        exec(code, names)
        if name:
            save(matplotlib.pyplot.gcf(), name)


def save(figure, name: str) -> None:
    """Writes a figure without a date: equal pictures give equal files."""
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    matplotlib.pyplot.close(figure)


def draw_missing(anew: bool = False) -> None:
    """Writes all pictures and a report, unless they exist."""
    FOLDER.mkdir(exist_ok=True)
    if anew:
        for name in ("benchmark", "gpu"):  # come from experiments/benchmark.py
            adapt_colors(FOLDER / f"{name}.svg")
    if anew or not (FOLDER / "report.html").exists():
        write_report()
    matplotlib.use("Agg")

    def is_missing(name):
        return bool(name) and (anew or not (FOLDER / f"{name}.svg").exists())

    with (
        matplotlib.rc_context({"svg.hashsalt": "jboost", **NEUTRAL}),
        tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(None),
    ):  # fmt: skip
        for name in filter(is_missing, PICTURES):
            save(PICTURES[name](), name)
        for page in PAGES:
            text = (HERE / f"{page}.md").read_text()
            if any(is_missing(name) for _, name in _BLOCK.findall(text)):
                draw_page(text)


if __name__ == "__main__":
    draw_missing(anew=True)
