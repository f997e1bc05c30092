# SPDX-License-Identifier: Apache-2.0
"""Pictures show the numbers that they are given, on the axes that they are given."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import matplotlib
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from linear_leaves import add_slopes
from shared_models import share
from tables import ROWS, SMALL, make_regression

import jboost as jb

matplotlib.use("Agg")
import itertools

from matplotlib import pyplot
from matplotlib.figure import Figure

from jboost import plotting
from jboost.model.ensemble import Links
from jboost.plotting.tree_drawing import place_boxes
from jboost.tables.categories import Categories
from jboost.trees.tree import LeafSums

X, Y = make_regression()
ABSOLUTE = jb.losses.absolute_error
NAMES = ("income", "$age$", "a name that is far too long to be written at a tick")


@pytest.fixture(scope="module")
def trained():
    sets = {"one": (X[:50], Y[:50]), "two": (X[50:], Y[50:])}
    metrics = {"spread": lambda scores, targets, weights: jnp.std(scores)}
    return jb.fit(
        X, Y, **SMALL, validation=sets, metrics=metrics, feature_names=NAMES,
        linear_leaves=False,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def closed():
    """No figure is left open by a test."""
    yield
    pyplot.close("all")


@pytest.fixture
def ax():
    """Axes that pyplot does not know of."""
    return Figure().subplots()


def read(words):
    return [each.get_text() for each in words]


def test_absence_of_matplotlib_is_explained(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plotting.learning_curve(trained[1])


def test_learning_curve_shows_the_history(trained, ax):
    history = trained[1]
    assert plotting.learning_curve(history, ax=ax) is ax
    train, one, two, best, marker = ax.get_lines()
    for line, values in (
        (train, history.train_loss),
        (one, history.validation_loss["one"]),
        (two, history.validation_loss["two"]),
    ):
        np.testing.assert_array_equal(line.get_ydata(), values)
        np.testing.assert_array_equal(line.get_xdata(), np.arange(8))
    place = history.best_round
    assert best.get_xdata()[0] == marker.get_xdata()[0] == place
    assert marker.get_ydata()[0] == history.validation_loss["one"][place]
    assert ax.get_xlabel() == "round" and ax.get_ylabel() == "loss"
    labels = read(ax.get_legend().get_texts())
    assert labels[:3] == ["train", "one", "two"] and str(place) in labels[3]
    assert not pyplot.get_fignums()


def test_tuning_shows_settings_and_importance():
    model, tuned = jb.tune(X, Y, trials=4, folds=2, num_rounds=4, max_depth=2)
    left, right = plotting.tuning(tuned)
    tried, members, best = left.get_lines()
    np.testing.assert_array_equal(tried.get_ydata(), tuned.values)
    expected = [tuned.values[member.setting] for member in tuned.members]
    np.testing.assert_array_equal(members.get_ydata(), expected)
    np.testing.assert_array_equal(best.get_ydata(), np.minimum.accumulate(tuned.values))
    widths = {
        label.get_text(): bar.get_width()
        for label, bar in zip(right.get_yticklabels(), right.patches, strict=True)
    }
    assert widths == tuned.importance
    with pytest.raises(TypeError, match="unpack the result"):
        plotting.tuning((model, tuned))


def test_learning_curve_of_a_metric(trained):
    ax = plotting.learning_curve(trained[1], metric="spread")
    assert ax.get_ylabel() == "spread" and len(pyplot.get_fignums()) == 1
    expected = trained[1].metrics["train"]["spread"]
    np.testing.assert_array_equal(ax.get_lines()[0].get_ydata(), expected)


def test_learning_curve_without_validation_marks_nothing(trained, ax):
    history = replace(trained[1], validation_loss=None)
    assert len(plotting.learning_curve(history, ax=ax).get_lines()) == 1


def test_one_round_is_a_point_at_a_whole_number(trained, ax):
    history = replace(
        trained[1], train_loss=np.array([2.0]), validation_loss=None, best_round=0
    )
    plotting.learning_curve(history, ax=ax)
    assert ax.get_lines()[0].get_marker() == "o"
    ticks = [tick for tick in ax.get_xticks() if abs(tick) < 0.05]
    assert ticks == [0]


def make_folds():
    """Losses of two folds, which rise after the third round."""
    train = np.array([[4.0, 2.0, 1.0, 0.5], [6.0, 4.0, 1.0, 1.5]])
    held_out = np.array([[5.0, 4.0, 1.0, 2.0], [7.0, 4.0, 3.0, 4.0]])
    mean, none = held_out.mean(axis=0), np.zeros((2, 0), bool)
    error = held_out.std(axis=0, ddof=1) / np.sqrt(2)
    metrics = {"spread": held_out + 1}
    return jb.CrossValidation(
        train, held_out, metrics, mean, error, 2, np.zeros(0), none
    )


def test_cross_validation_is_drawn_as_means_in_bands(ax):
    result = make_folds()
    plotting.learning_curve(result, ax=ax)
    train, validation, _, mark = ax.get_lines()
    np.testing.assert_array_equal(train.get_ydata(), [5, 3, 1, 1])
    np.testing.assert_array_equal(validation.get_ydata(), [6, 4, 2, 3])
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (2, 2)
    _, band = ax.collections
    edges = band.get_paths()[0].vertices
    for place in range(4):
        at = edges[edges[:, 0] == place, 1]
        assert at.min() == pytest.approx(
            result.mean[place] - result.standard_error[place]
        )
        assert at.max() == pytest.approx(
            result.mean[place] + result.standard_error[place]
        )


def test_metrics_of_folds_have_one_line(ax):
    plotting.learning_curve(make_folds(), metric="spread", ax=ax)
    line, *_ = ax.get_lines()
    np.testing.assert_array_equal(line.get_ydata(), [7, 5, 3, 4])
    assert line.get_label() == "validation" and len(ax.collections) == 1


def test_importance_shows_the_largest_on_top(ax):
    found = jb.explanation.Importance(
        NAMES, np.array([1.0, 5.0, 3.0]), np.array([0.1, 0.5, 0.3])
    )
    assert plotting.importance(found, max_features=2, ax=ax) is ax
    assert [patch.get_width() for patch in ax.patches] == [5, 3]
    labels = read(ax.get_yticklabels())
    assert labels[0] == r"\$age\$" and labels[1].startswith("a name that")
    assert len(labels[1]) < 40
    error_bars = ax.collections[0].get_segments()
    np.testing.assert_allclose(error_bars[0][:, 0], [4.5, 5.5])
    assert "2 of 3 features" in ax.get_xlabel()
    low, high = ax.get_ylim()
    assert low > high  # downwards


@pytest.mark.parametrize("kind", ["improvement", "splits"])
def test_importance_of_a_model_is_that_of_feature_importance(trained, kind, ax):
    plotting.importance(trained[0], kind=kind, ax=ax)
    expected = sorted(jb.feature_importance(trained[0], kind).values, reverse=True)
    assert [patch.get_width() for patch in ax.patches] == expected
    assert kind in ax.get_xlabel()


def test_features_without_names_are_called_as_in_x(ax):
    found = jb.explanation.Importance(("0", "1"), np.array([1.0, 2.0]))
    plotting.importance(found, ax=ax)
    assert read(ax.get_yticklabels()) == ["x1", "x0"]


def leaf_words(model, round, score=0):
    """Values of the leaves that rows can come to."""
    leaves = np.unique(np.asarray(jb.leaf_indices(model, X))[:, round])
    return [f"{v:.3g}" for v in np.asarray(model.leaf_value)[round, score, leaves]]


def test_tree_shows_splits_and_leaves(trained, ax):
    model = trained[0]
    assert plotting.tree(model, 2, ax=ax) is ax
    words = read(ax.texts)
    splits = np.flatnonzero(np.asarray(model.is_split[2, 0]))
    assert len(ax.patches) == 2 * len(splits) + 1 + 2 * len(splits)
    for node in splits:
        name = NAMES[int(model.feature[2, 0, node])][:12]
        place = float(model.threshold[2, 0, node])
        assert any(w.startswith(name) and f"≤ {place:.3g}\n" in w for w in words)
    for value in leaf_words(model, 2):
        assert any(word.startswith(f"{value}  (") for word in words)
    assert words[0].endswith("\n(200)")  # the root has all rows
    assert "round 2 of 8" in words


def test_covers_of_leaves_sum_to_the_rows(trained):
    dot = plotting.tree_to_dot(trained[0], 1)
    assert dot == plotting.tree_to_dot(trained[0], -7)  # counted from the end
    lines = [line.split('"')[1] for line in dot.splitlines()[2:-1]]
    leaves = [line for line in lines if line[0] in "-0123456789"]
    assert sum(int(line.split("(")[1][:-1]) for line in leaves) == len(X)
    expected = leaf_words(trained[0], 1)
    assert sorted(line.split("\\n")[0] for line in leaves) == sorted(expected)


def test_linear_leaves_show_their_terms(trained, ax):
    model = add_slopes(replace(trained[0], slopes=None, ranges=None), 4)
    feature, slope, center = (np.asarray(part)[2, 0] for part in model.slopes)
    dot = plotting.tree_to_dot(model, 2)
    for leaf in np.unique(np.asarray(jb.leaf_indices(model, X))[:, 2]):
        terms = np.flatnonzero(feature[leaf] >= 0)
        lines = [f"{model.leaf_value[2, 0, leaf]:.3g}"]
        for p in terms[:3]:
            s, c = slope[leaf, p], center[leaf, p]
            signs = "-" if s < 0 else "+", "+" if c < 0 else "-"
            name = plotting.canvas.shorten(NAMES[feature[leaf, p]])
            lines.append(f"{signs[0]} {abs(s):.3g} ({name} {signs[1]} {abs(c):.3g})")
        lines += ["…"] * (len(terms) > 3)
        label = "\\n".join(lines)
        assert f'"{label}\\n(' in dot
    plotting.tree(model, 2, ax=ax)
    assert any("  + " in word and ")  (" in word for word in read(ax.texts))
    several = plotting.tree_to_dot(add_slopes(share(model, 2)), 2)
    assert "+ slope of income" in several


def test_cut_trees_count_the_leaves_below(trained, ax):
    plotting.tree(trained[0], max_depth=1, ax=ax)
    whole = plotting.tree_to_dot(trained[0])
    leaves = (whole.count(" -> ") + 2) // 2
    counts = [int(w.split()[1]) for w in read(ax.texts) if w.startswith("…")]
    assert sum(counts) + (2 - len(counts)) == leaves


@pytest.mark.parametrize("orientation", ["horizontal", "vertical"])
def test_words_fit_into_their_boxes_and_boxes_do_not_touch(trained, orientation):
    figure = Figure(figsize=(5, 3))
    ax = plotting.tree(trained[0], orientation=orientation, ax=figure.subplots())
    figure.draw_without_rendering()
    boxes = [p.get_window_extent() for p in ax.patches if hasattr(p, "get_boxstyle")]
    for number, box in enumerate(boxes):
        words = ax.texts[number].get_window_extent()
        assert box.x0 <= words.x0 and words.x1 <= box.x1
        assert box.y0 - 0.5 <= words.y0 and words.y1 <= box.y1 + 0.5
        assert not any(box.overlaps(other) for other in boxes[:number])


def test_heavy_lines_follow_missing_values():
    x = np.array([[1.0], [2.0], [np.nan], [np.nan]])
    single = jb.cart.fit_tree(x, np.array([0.0, 0.0, 5.0, 5.0]))
    assert "x0 is known" in plotting.tree_to_dot(single)
    assert '0 -> 2 [label="no, missing"]' in plotting.tree_to_dot(single)
    ax = plotting.tree(single)
    ax.get_figure().draw_without_rendering()
    left, right = (
        p.get_linewidth() for p in ax.patches if not hasattr(p, "get_boxstyle")
    )
    assert right > 2 * left


def test_high_leaves_are_red_and_low_ones_blue():
    single = jb.cart.fit_tree(np.array([[1.0], [2.0]]), np.array([10.0, 20.0]))
    ax = plotting.tree(single)
    _, low, high = (p for p in ax.patches if hasattr(p, "get_boxstyle"))
    assert low.get_facecolor()[2] > low.get_facecolor()[0]
    assert high.get_facecolor()[0] > high.get_facecolor()[2]


def make_categorical():
    """One split by a set of categories, one by a threshold on its left side."""
    codes = np.array([[1, 2, 0, 3, 4, 5]], np.int32)
    values = (("red", "blue", "unseen", "green", "grey", "black"),)
    return jb.Ensemble(
        feature=jnp.array([[[1, 0, 0]]]),
        threshold=jnp.array([[[np.nan, 0.5, np.inf]]]),
        missing_left=jnp.array([[[False, True, True]]]),
        leaf_value=jnp.array([[[1.0, 2.0, 3.0, 0.0]]]),
        init_score=jnp.array(0.0),
        num_features=2,
        feature_names=("size", "color"),
        left_codes=jnp.array([[[[0b110], [0], [0]]]], jnp.uint32),
        categories=Categories(codes, (1,), values),
    )


def test_categories_are_named(ax):
    model = make_categorical()
    plotting.tree(model, ax=ax)
    words = read(ax.texts)
    assert "color in {red, blue}" in words and "size ≤ 0.5" in words
    assert {"1", "2", "3"} <= set(words)
    other = replace(model, left_codes=jnp.array([[[[0b11110], [0], [0]]]], jnp.uint32))
    assert "color not in {black}" in plotting.tree_to_dot(other)
    plain = replace(model.categories, values=None)
    assert "color in {0, 1}" in plotting.tree_to_dot(replace(model, categories=plain))


def test_long_sets_of_categories_are_cut():
    values = tuple(f"category number {i} of many" for i in range(20))
    categories = Categories(np.arange(1, 21, dtype=np.int32)[None], (1,), (values,))
    bits = jnp.array([[[[0b111111110], [0], [0]]]], jnp.uint32)
    model = replace(make_categorical(), categories=categories, left_codes=bits)
    label = plotting.tree_to_dot(model).splitlines()[2]
    assert "+5}" in label and label.count("categor") == 3 and len(label) < 90


def test_linked_trees_are_drawn_by_their_links(ax):
    nowhere = np.inf
    model = jb.Ensemble(
        feature=jnp.array([[[0, 0, 1, 0, 0]]]),
        threshold=jnp.array([[[0.5, nowhere, 2.5, nowhere, nowhere]]]),
        missing_left=jnp.array([[[True, True, False, True, True]]]),
        leaf_value=jnp.array([[[0.0, -1.0, 0.0, 4.0, 8.0]]]),
        init_score=jnp.array(0.0),
        num_features=2,
        links=Links(jnp.array([[[1, 1, 3, 3, 4]]]), 2),
        sums=LeafSums(
            *(jnp.array([[[0.0, 5.0, 0.0, 7.0, 9.0]]]) for _ in range(2)),
            weight=jnp.full((1, 1, 5), np.nan),
            l2=jnp.zeros((1, 1)),
        ),
    )
    plotting.tree(model, ax=ax)
    leaves = ["-1  (5)", "x1 ≤ 2.5\n(16)", "4  (7)", "8  (9)"]
    assert read(ax.texts)[:5] == ["x0 ≤ 0.5\n(21)", *leaves]
    assert "curvature" in read(ax.texts)[-1]


def test_a_chain_of_a_thousand_levels_is_laid_out():
    chain = jb.cart.fit_tree(np.arange(300.0)[:, None], 4.0 ** -np.arange(300.0))
    assert chain.max_depth > 200
    dot = plotting.tree_to_dot(chain)
    assert dot.count(" -> ") == chain.num_nodes - 1
    plotting.tree(chain, max_depth=20)


def test_a_root_alone_is_a_tree():
    ax = plotting.tree(jb.cart.fit_tree(np.ones((3, 1)), np.arange(3.0)))
    assert read(ax.texts)[0] == "1  (3)" and len(ax.patches) == 1


def test_layout_is_tidy():
    """Parents are midway, sisters in order, and equal subtrees drawn alike."""
    #        0
    #      /   \
    #     1     2       1 and 4 have subtrees of the same shape
    #    3 4   5 6
    #     7 8 9 10
    parents = [-1, 0, 0, 1, 1, 2, 2, 4, 4, 5, 5]
    depths = [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    sizes = np.array([4.0, 2, 2, 1, 3, 3, 1, 1, 1, 1, 1])
    nodes = [
        SimpleNamespace(parent=parent, depth=depth)
        for parent, depth in zip(parents, depths, strict=True)
    ]
    boxes = np.stack([np.arange(11.0), sizes], axis=1)
    starts, places = place_boxes(nodes, boxes, sideways=True).T
    assert places[0] == pytest.approx((places[1] + places[2]) / 2)
    assert places[4] - places[7] == pytest.approx(places[5] - places[9])
    level = [[1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]
    for row in level:
        for a, b in itertools.pairwise(row):
            room = places[b] - places[a] - (sizes[a] + sizes[b]) / 2
            assert room >= 5 - 1e-9
    assert min(places - sizes / 2) == 0
    # A level begins where the widest box of the level above ends, after a gap of 26.
    assert (starts - boxes[:, 0] / 2).tolist() == [0] + [26] * 2 + [54] * 4 + [86] * 4
    across = place_boxes(nodes, boxes[:, ::-1], sideways=False)
    np.testing.assert_array_equal(across, np.stack([places, starts], axis=1))


def test_loss_panels_show_value_and_derivatives():
    scores = np.linspace(-2, 3, 41)
    axes = plotting.loss(jb.losses.squared_error, 1.0, scores)
    value, gradient, hessian = (ax.get_lines()[0] for ax in axes)
    np.testing.assert_allclose(value.get_xdata(), scores, rtol=1e-6)
    np.testing.assert_allclose(value.get_ydata(), (scores - 1) ** 2, atol=1e-5)
    np.testing.assert_allclose(gradient.get_ydata(), 2 * (scores - 1), atol=1e-5)
    np.testing.assert_allclose(hessian.get_ydata(), 2, atol=1e-6)
    assert [ax.get_xlabel() for ax in axes] == ["score"] * 3
    low, high = axes[2].get_ylim()
    assert low <= 0 and high > 2


def test_loss_panels_show_the_curvature_of_each_policy():
    given = Figure().subplots(1, 3)
    policies = ("auto", "secant", "unit")
    axes = plotting.loss(ABSOLUTE, 0.0, curvature=policies, axes=given)
    assert axes[2] is given[2] and not pyplot.get_fignums()
    hessian, *lines = axes[2].get_lines()[:4]
    assert not hessian.get_ydata().any()
    for policy, line in zip(policies, lines, strict=True):
        report = jb.inspect_loss(ABSOLUTE, 0.0, reach=4.0, curvature=policy)
        np.testing.assert_array_equal(line.get_ydata(), report.curvature)
        assert line.get_label() == f'"{policy}"'


def test_a_pole_of_the_hessian_does_not_flatten_the_rest():
    axes = plotting.loss(lambda s, t: jnp.abs(s - t) ** 1.5, 0.0)
    hessian = axes[2].get_lines()[0].get_ydata()
    assert np.nanmax(hessian) > 100 and axes[2].get_ylim()[1] < 20


def test_curvature_is_inspected_as_of_normal_scores():
    """Of |r|, "secant" is 1 / sqrt(t^2 + (2 delta)^2), delta = (E sqrt |Z|)^2."""
    report = jb.inspect_loss(
        ABSOLUTE, 0.0, scores=np.linspace(-6, 6, 4001),
        curvature="secant",
    )  # fmt: skip
    z = np.random.default_rng(0).normal(size=10**6)
    delta = 2 * np.mean(np.sqrt(abs(z))) ** 2
    expected = 1 / np.sqrt(report.scores**2 + delta**2)
    away = np.abs(report.scores) > 0.01  # at the kink the gradient is 0
    np.testing.assert_allclose(report.curvature[away], expected[away], rtol=5e-3)


def make_shap():
    """Two features, of which the second matters more; one value is missing."""
    values = np.array([[0.1, -1.0], [-0.2, 0.5], [0.0, 2.0], [0.1, 2.0]])
    x = np.array([[1.0, 0.0], [2.0, 5.0], [3.0, 10.0], [np.nan, 10.0]])
    return jb.explanation.ShapValues(values, np.array(0.0)), x


def test_swarms_have_a_point_for_each_row(ax):
    shap, x = make_shap()
    assert plotting.shap_summary(shap, x, feature_names=["a", "b"], ax=ax) is ax
    assert read(ax.get_yticklabels()) == ["b", "a"]
    for swarm, feature, place in zip(ax.collections, (1, 0), (0, 1), strict=True):
        points = np.asarray(swarm.get_offsets())
        np.testing.assert_allclose(points[:, 0], shap.values[:, feature])
        assert (abs(points[:, 1] - place) < 0.5).all()
    # Equal values are not drawn over each other.
    assert len(np.unique(np.asarray(ax.collections[0].get_offsets()), axis=0)) == 4


def test_points_have_the_colors_of_values(ax):
    shap, x = make_shap()
    plotting.shap_summary(shap, x, ax=ax)
    ax.get_figure().draw_without_rendering()
    high, low = ax.collections[0].get_facecolors()[[2, 0], :3]
    assert high[0] > low[0] and high[2] < low[2]  # orange and blue
    missing = ax.collections[1].get_facecolors()[3, :3]
    assert np.ptp(missing) == 0  # grey


def test_points_without_rows_have_one_color_and_no_bar(ax):
    plotting.shap_summary(make_shap()[0], ax=ax)
    assert len(ax.get_figure().axes) == 1


def test_bars_are_mean_magnitudes(ax):
    shap, _ = make_shap()
    plotting.shap_summary(shap, kind="bars", ax=ax)
    expected = np.abs(shap.values).mean(axis=0)
    widths = [patch.get_width() for patch in ax.patches]
    np.testing.assert_allclose(widths, sorted(expected, reverse=True))


def test_bars_of_several_scores_are_stacked(ax):
    values = np.random.default_rng(0).normal(size=(6, 2, 3))
    plotting.shap_summary(
        jb.explanation.ShapValues(values, np.zeros(3)), kind="bars", ax=ax
    )
    ends = max(patch.get_x() + patch.get_width() for patch in ax.patches)
    assert len(ax.patches) == 6
    assert ends == pytest.approx(np.abs(values).mean(axis=0).sum(axis=1).max())
    with pytest.raises(ValueError, match=r"score .*0 .*2"):
        plotting.shap_summary(jb.explanation.ShapValues(values, np.zeros(3)))


def test_summary_of_a_model_is_that_of_its_shap_values(trained, ax):
    plotting.shap_summary(trained[0], X, ax=ax, max_features=1, max_rows=50)
    values = np.asarray(jb.shap_values(trained[0], X).values)
    top = np.abs(values).mean(axis=0).argmax()
    (swarm,) = ax.collections
    drawn = np.asarray(swarm.get_offsets())[:, 0]
    assert len(drawn) == 50 and np.isin(drawn, values[:, top].astype(float)).all()
    assert "1 of 3 features" in ax.get_xlabel()


def test_dependence_on_one_feature(trained, ax):
    assert plotting.partial_dependence(trained[0], X, 0, grid=10, ax=ax) is ax
    found = jb.partial_dependence(trained[0], X, 0, grid=10, kind="both")
    *rows, average = ax.get_lines()
    np.testing.assert_allclose(average.get_ydata(), found.average, rtol=1e-6)
    np.testing.assert_array_equal(average.get_xdata(), found.grid[0])
    assert len(rows) == 50
    for row in rows:
        assert (np.abs(found.individual - row.get_ydata()).max(axis=1) < 1e-6).any()
    marks = [segment[0, 0] for segment in ax.collections[0].get_segments()]
    np.testing.assert_allclose(marks, np.quantile(X[:, 0], np.arange(1, 10) / 10))
    assert ax.get_xlabel() == "income"


def test_centred_curves_start_at_nothing(trained, ax):
    found = jb.partial_dependence(trained[0], X, 0, grid=10, kind="both")
    plotting.partial_dependence(found, centred=True, max_rows=3, ax=ax)
    assert len(ax.get_lines()) == 4
    assert all(line.get_ydata()[0] == 0 for line in ax.get_lines())


def test_dependence_on_two_features_is_a_map(trained, ax):
    plotting.partial_dependence(trained[0], X, (0, 1), grid=5, ax=ax)
    assert len(ax.get_figure().axes) == 2  # and a bar of colors
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("income", r"\$age\$")


CATEGORIES = np.array(["red", "green"])


def make_dependence(names, grid, average, individual=None):
    return jb.explanation.PartialDependence(
        names, grid, np.asarray(average, float), individual
    )


def test_dependence_on_categories_names_them(ax):
    found = make_dependence(("color",), (CATEGORIES,), [1, 3])
    plotting.partial_dependence(found, ax=ax)
    assert read(ax.get_xticklabels()) == ["red", "green"]
    np.testing.assert_array_equal(ax.get_lines()[0].get_ydata(), [1, 3])


def test_categories_with_a_number_are_lines(ax):
    numbers = np.array([0.5, 1.5, 2.5])
    average = [[1, 2, 3], [4, 5, 6]]
    found = make_dependence(("color", "7"), (CATEGORIES, numbers), average)
    plotting.partial_dependence(found, ax=ax)
    red, green = ax.get_lines()
    np.testing.assert_array_equal(red.get_ydata(), [1, 2, 3])
    np.testing.assert_array_equal(green.get_ydata(), [4, 5, 6])
    assert (green.get_label(), ax.get_xlabel()) == ("green", "x7")


def test_pairs_of_categories_are_cells(ax):
    found = make_dependence(("a", "b"), (CATEGORIES, CATEGORIES), [[1, 2], [3, 4]])
    plotting.partial_dependence(found, ax=ax)
    np.testing.assert_array_equal(ax.images[0].get_array(), [[1, 3], [2, 4]])


def test_many_categories_with_a_number_are_cells(ax):
    many = np.array([f"c{number}" for number in range(30)])
    average = np.arange(60.0).reshape(30, 2)
    found = make_dependence(("a", "b"), (many, np.array([0.25, 0.5])), average)
    plotting.partial_dependence(found, max_categories=30, ax=ax)
    np.testing.assert_array_equal(ax.images[0].get_array(), average.T)
    assert read(ax.get_yticklabels()) == ["0.25", "0.5"]
    assert read(ax.get_xticklabels()) == [*many]


RARE = pd.Series(np.random.default_rng(3).zipf(1.3, ROWS) % 40)
FRAME = pd.DataFrame(
    {
        "number": X[:, 0],
        "nominal": "n" + RARE.astype(str),
        "ordered": pd.Categorical(
            np.where(X[:, 1] < 0, "low", np.where(X[:, 1] < 0.5, "mid", "top")),
            ["top", "mid", "low"], ordered=True,
        ),
        "place": RARE,
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def named():
    """A model of strings, an ordered dtype, and integers that are categories."""
    return jb.fit(FRAME, Y + RARE % 3, **SMALL, categorical=["place"])[0]


@pytest.mark.parametrize("feature", ["nominal", "place"])
def test_rare_categories_are_one_point(named, ax, feature):
    """The mean over the rest is that of the rows' own frequencies."""
    plotting.partial_dependence(named, FRAME, feature, max_categories=6, ax=ax)
    *rows, points = ax.get_lines()
    assert {line.get_linestyle() for line in (*rows, points)} == {"None"}
    labels = read(ax.get_xticklabels())
    counts = FRAME[feature].value_counts()
    assert len(counts) > 20 and labels[-1] == f"others ({len(counts) - 5})"
    kept = counts[counts.index.astype(str).isin(labels)]
    assert len(kept) == 5 and kept.min() >= counts.drop(kept.index).max()

    def average(value):
        return float(jb.predict(named, FRAME.assign(**{feature: value})).mean())

    rest = FRAME[feature][~FRAME[feature].isin(kept.index)]
    expected = [*map(average, sorted(kept.index)), np.mean([*map(average, rest)])]
    np.testing.assert_allclose(points.get_ydata(), expected, rtol=1e-5)


def to_polars(frame):
    """Enums are polars' ordered dtype."""
    levels = pl.Enum([*frame["ordered"].cat.categories])
    return pl.from_pandas(frame).with_columns(pl.col("ordered").cast(levels))


@pytest.mark.parametrize("to_table", [lambda f: f, to_polars, pa.Table.from_pandas])
def test_ordered_dtypes_keep_their_order(named, ax, to_table):
    """In pictures, and as shades of points; nominal categories are grey."""
    table = to_table(FRAME)
    plotting.partial_dependence(named, table, "ordered", ax=ax)
    labels = read(ax.get_xticklabels())
    assert labels == ["top", "mid", "low"]
    swarms = Figure().subplots()
    plotting.shap_summary(named, table, ax=swarms)
    swarms.get_figure().draw_without_rendering()
    shades = {
        label.get_text(): swarm.get_facecolors()[:, :3]
        for label, swarm in zip(
            swarms.get_yticklabels(), swarms.collections, strict=True
        )
    }
    assert np.ptp(shades["nominal"]) == np.ptp(shades["place"]) == 0
    reds = [shades["ordered"][FRAME["ordered"] == v, 0] for v in ("top", "mid", "low")]
    assert [np.ptp(red) for red in reds] == [0, 0, 0]
    assert reds[0][0] < reds[1][0] < reds[2][0]
    assert len(np.unique(shades["number"], axis=0)) > 50


def test_pictures_of_nominal_features_alone_explain_no_colors(ax):
    x = FRAME[["nominal"]]
    plotting.shap_summary(jb.fit(x, Y, **SMALL)[0], x, ax=ax)
    assert len(ax.get_figure().axes) == 1


def test_dependence_of_several_scores(ax):
    grid = np.linspace(0, 1, 4)
    average = np.stack([grid, 1 - grid], axis=1)
    found = make_dependence(("0",), (grid,), average)
    plotting.partial_dependence(found, ax=ax)
    first, second = ax.get_lines()
    np.testing.assert_array_equal(second.get_ydata(), 1 - grid)
    assert first.get_label() == "score 0"


def test_dark_styles_have_light_words(trained):
    with pyplot.style.context("dark_background"):
        ax = plotting.tree(trained[0])
        assert ax.texts[0].get_color() == "white"
        curve = plotting.learning_curve(trained[1])
        cycle = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
        assert curve.get_lines()[0].get_color() == cycle[0]


BAD = {
    TypeError: [
        (lambda m, h: plotting.learning_curve((m, h)), "unpack"),
        (lambda m, h: plotting.learning_curve(h, ax=3), "ax must be matplotlib"),
        (lambda m, h: plotting.importance(h), "Importance|Ensemble"),
        (lambda m, h: plotting.tree(h), "model must be"),
        (lambda m, h: plotting.shap_summary(h, X), "shap must be"),
        (lambda m, h: plotting.partial_dependence(h), "dependence must be"),
    ],
    ValueError: [
        (lambda m, h: plotting.learning_curve(h, metric="auc"), "'spread'"),
        (lambda m, h: plotting.importance(m, max_features=0), "max_features"),
        (lambda m, h: plotting.shap_summary(m), "x must be given"),
        (lambda m, h: plotting.shap_summary(make_shap()[0], X), "rows and columns of"),
        (lambda m, h: plotting.shap_summary(m, X, kind="x"), "kind must be"),
        (lambda m, h: plotting.partial_dependence(m, X), "features must be"),
        (lambda m, h: plotting.partial_dependence(m, X, (0, 1), grid=1), "two values"),
        (lambda m, h: plotting.tree(m, 8), "round must be"),
        (lambda m, h: plotting.tree(m, score=1), "score must be"),
        (lambda m, h: plotting.tree(m, orientation="up"), "orientation"),
        (lambda m, h: plotting.tree(m, feature_names=["a"]), "3 names"),
        (lambda m, h: plotting.tree(m, max_depth=-1), "max_depth"),
        (lambda m, h: plotting.tree(jb.truncate(m, 0)), "at least one round"),
        (lambda m, h: plotting.loss(ABSOLUTE, 0.0, axes=[3]), "axes must be 3"),
        (lambda m, h: plotting.loss(ABSOLUTE, 0.0, [1, 0]), "scores must be .*ascend"),
        (lambda m, h: plotting.loss(ABSOLUTE, 0.0, curvature="none"), "curvature must"),
    ],
}


@pytest.mark.parametrize("error", BAD)
def test_bad_arguments_are_named(trained, error):
    for call, message in BAD[error]:
        with pytest.raises(error, match=message):
            call(*trained)
