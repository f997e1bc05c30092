# SPDX-License-Identifier: Apache-2.0
"""Rows that fit holds out: which, how training sees them, and the refit on all rows.

The references are cross-validation with the same rows as its only fold, jb.refit, and
the same run on several devices or from a checkpoint.
"""

import jax
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from tables import ROWS, make_regression, same_bits, same_histories

import jboost as jb
from jboost.training import fitting
from jboost.training.preparing import draw

X, Y = make_regression()
WEIGHTS = (np.arange(ROWS) % 3).astype(np.float32)
CALL = dict(max_depth=3, num_rounds=12, early_stopping_rounds=4, refit=False, seed=5)
QUERIES = np.arange(ROWS) // 8
LEVELS = np.digitize(Y, [0.5, 1.5])
KINDS = pd.Series(np.where(X[:, 2] > 0, "a", np.where(X[:, 1] > 0, "b", "c")))
TIMES = dict(time=np.exp(Y), event=X[:, 2] > -1)


def hold(x=X, y=Y, loss=jb.losses.squared_error, **call):
    return jb.fit(x, y, loss, **{**CALL, **call})


CASES = {
    "rows": {},
    "table": dict(
        x=pd.DataFrame(dict(a=X[:, 0], b=KINDS, c=X[:, 1])),
        sample_weight=WEIGHTS, offset=X[:, 0],
    ),
    "sparse": dict(
        x=scipy.sparse.csr_array(np.where(np.abs(X) > 1, X, 0)),
        subsample=0.6, rows_per_threshold=10, parent_rows=2.0,
    ),
    "shared": dict(
        y=LEVELS, loss=jb.losses.softmax, num_scores=3, share_structure=True
    ),
    "queries": dict(y=1.0 * LEVELS, loss=jb.losses.lambda_rank, groups=QUERIES),
    "all": dict(y=TIMES, loss=jb.losses.cox, groups="all"),
    "adaptive": dict(loss=jb.losses.make_adaptive_huber()),
}  # fmt: skip


def find_mask(case):
    weights = case.get("sample_weight", np.ones(ROWS))
    number = QUERIES if case.get("groups") is QUERIES else None
    return draw(0.2, 5, weights > 0, case.get("y", Y), number)


def same_leaves(model, before, given):
    """Asserts that jb.refit finds the leaf values of ``model``."""
    of_splits = ("num_scores", "share_structure", "subsample", "rows_per_threshold")
    given = {k: v for k, v in given.items() if k not in of_splits}
    expected = jb.refit(before, given.pop("x", X), given.pop("y", Y), **given)
    same_bits(model.feature, before.feature)
    np.testing.assert_allclose(
        model.leaf_value, expected.leaf_value, rtol=2e-4, atol=2e-6
    )
    np.testing.assert_array_equal(model.sums.weight, expected.sums.weight)


@pytest.mark.parametrize("name", CASES)
def test_held_out_rows_are_those_of_a_fold_and_a_refit_has_all(name):
    case, mask = CASES[name], find_mask(CASES[name])
    before, history = hold(**case)
    weights = case.get("sample_weight", np.ones(ROWS))
    fold = (~mask & (weights > 0), mask & (weights > 0))
    call = {k: v for k, v in CALL.items() if k not in ("refit", "seed")}
    given = dict(x=X, y=Y, loss=jb.losses.squared_error) | case
    found = jb.cross_validate(**given, **call, folds=[fold], seed=5)
    for part in ("train_loss", "validation_loss"):
        np.testing.assert_allclose(
            getattr(history, part), getattr(found, part)[0], rtol=2e-5, err_msg=part
        )
    assert history.best_round == found.best_round
    if name == "all":  # the next test refits it
        return
    model, told = hold(**case, refit=True)
    assert told.choices.pop("refit") and not history.choices.pop("refit")
    same_histories(told, history)
    same_leaves(model, before, case)


# A refit joins rows of the two sets, or takes one set whole; the loss is no part of it.
@pytest.mark.parametrize("name", ["table", "sparse", "queries", "all"])
def test_a_refit_may_take_the_validation_set_in(name):
    """It is that of all rows in their order."""
    part = np.arange(ROWS) < 152  # 19 queries
    given = dict(x=X, y=Y, loss=jb.losses.squared_error) | CASES[name]
    of_rows = ("x", "y", "sample_weight", "offset", "groups")

    def take(value, rows):
        if isinstance(value, str) or value is None:
            return value
        if isinstance(value, dict):
            return {key: each[rows] for key, each in value.items()}
        return value[rows]

    train, held = (
        {key: take(given.get(key), rows) for key in of_rows} for rows in (part, ~part)
    )
    settings = {k: v for k, v in given.items() if k not in of_rows}
    call = CALL | settings | train | dict(validation=jb.rows(**held))
    before, told = jb.fit(**call)
    model, history = jb.fit(**call | dict(refit=True))
    assert history.choices.pop("refit") and not told.choices.pop("refit")
    same_histories(history, told)
    same_leaves(model, before, given)


def test_a_draw_takes_shares_of_classes_and_whole_groups():
    counted, labels = WEIGHTS > 0, (np.arange(ROWS) % 7 == 0)
    for share in (0.1, 0.2, 0.35):
        mask = draw(share, 0, counted, labels)
        assert not mask[~counted].any()
        for label in (False, True):
            own = counted & (labels == label)
            assert abs(mask[own].sum() - share * own.sum()) < 2
        mask = draw(share, 0, counted, Y, QUERIES)
        per = [mask[(q == QUERIES) & counted] for q in np.unique(QUERIES)]
        assert all(part.all() or not part.any() for part in per)
        assert abs(sum(part.any() for part in per) - share * len(per)) < 2
    assert (draw(0.2, 0, counted, Y) != draw(0.2, 1, counted, Y)).any()
    chances = [draw(0.2, seed, counted, Y) for seed in range(200)]
    shares = np.mean(chances, axis=0)[counted]
    assert shares.min() > 0.05 and shares.max() < 0.4  # any row may be held out
    for few in (draw(0.01, 0, counted, labels), draw(0.999, 0, counted, labels)):
        assert 0 < few.sum() < counted.sum()
    several = draw(0.2, 0, counted, np.stack([Y, X[:, 0]], 1))
    assert abs(several[counted].sum() - 0.2 * counted.sum()) < 2
    assert not several[~counted].any()
    assert draw(0.2, 0, np.arange(ROWS) < 1, Y) is None
    assert draw(0.2, 0, counted, Y, np.zeros(ROWS)) is None


def test_metrics_see_only_their_rows():
    def size(scores, targets, weights):
        return np.float32(len(targets))

    mask = draw(0.2, 5, np.ones(ROWS, bool), Y)
    _, history = hold(metrics=dict(size=size))
    assert (history.metrics["validation"]["size"] == mask.sum()).all()
    assert (history.metrics["train"]["size"] == (~mask).sum()).all()


def test_auto_stops_and_refits():
    model, history = jb.fit(X, Y, max_depth=3, learning_rate=0.5)
    choices = history.choices
    assert choices["early_stopping_rounds"] == 50 and choices["refit"]
    assert model.num_rounds == history.best_round + 1 == len(history.train_loss) - 50
    few, told = jb.fit(X[:49], Y[:49], max_depth=3)
    assert few.num_rounds == 100 and told.validation_loss is None
    fixed, _ = jb.fit(X[:49], Y[:49], max_depth=3, num_rounds=100)
    same_bits(few, fixed)
    own, told = jb.fit(
        X, Y, max_depth=3, learning_rate=0.5, validation=(X[:50], Y[:50])
    )
    assert not told.choices["refit"] and own.num_rounds == told.best_round + 1
    more, told = jb.fit(X, Y, max_depth=3, model=few)
    assert more.num_rounds == 200 and told.validation_loss is None
    _, told = jb.fit(X, Y, max_depth=3, learning_rate=0.5, monotone=[1, 0, 0])
    assert told.validation_loss is not None and not told.choices["refit"]
    curve = jb.cross_validate(X, Y, folds=2, max_depth=3, learning_rate=0.5)
    assert len(curve.mean) == curve.best_round + 51


def test_devices_hold_out_the_same_rows():
    call = dict(sample_weight=WEIGHTS, refit=True)
    model, history = hold(**call)
    other, told = hold(**call, mesh=jax.make_mesh((2,), ("rows",)))
    same_bits(model, other)
    same_histories(history, told)


def test_a_checkpoint_holds_out_the_same_rows(tmp_path):
    def press(number, history, model):
        if number == 3:
            raise KeyboardInterrupt

    path = tmp_path / "run"
    call = dict(refit=True, subsample=0.7, checkpoint=path, checkpoint_rounds=2)
    with pytest.raises(jb.TrainingInterrupted):
        hold(**call, callbacks=press)
    model, history = hold(**call)
    expected, told = hold(refit=True, subsample=0.7)
    same_bits(model, expected)
    same_histories(history, told)
    same_bits(hold(**call)[0], expected)  # a run that is over is refitted again
    with pytest.raises(ValueError, match="sample_weight"):
        hold(**call, validation_fraction=0.3)


def test_what_refit_cannot_do_keeps_the_model(monkeypatch):
    before, told = hold()
    for error, kind in (
        (ValueError("the loss diverges"), jb.TrainingError),
        (KeyboardInterrupt(), jb.TrainingInterrupted),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(fitting, "refit_rounds", fail)
        with pytest.raises(kind, match="fitted to all rows") as caught:
            hold(refit=True)
        kept = caught.value.model
        same_bits(jb.truncate(kept, before.num_rounds), before)
        same_bits(caught.value.history.train_loss, told.train_loss)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (dict(early_stopping_rounds=None, refit=True), "refit must be 'auto' or False"),
        (
            dict(
                x=jb.stream([(X, Y)], memory="64 MiB"),
                y=None,
                validation=(X, Y),
                refit=True,
            ),
            "refit must be 'auto' or False",
        ),
        (dict(monotone=[1, 0, 0], refit=True), "refit must be .* with monotone"),
        (dict(num_rounds="auto", early_stopping_rounds=None), "num_rounds must be a n"),
        (dict(num_rounds="all"), "num_rounds must be .* or 'auto'"),
        (dict(refit="yes"), "refit must be 'auto', True or False"),
        (dict(validation_fraction=1.0), "validation_fraction must be .* < 1.0"),
        (dict(x=X[:1], y=Y[:1]), "too few rows .* to hold some out"),
        (dict(model=True), "cannot be held out"),
        (dict(x=jb.stream([(X, Y)], memory="64 MiB"), y=None), "cannot be held out"),
    ],
)
def test_bad_calls_are_named(call, message):
    if call.get("model"):
        call = dict(model=jb.fit(X, Y, num_rounds=1, max_depth=3)[0])
    with pytest.raises(ValueError, match=message):
        hold(**call)


def test_members_hold_out_other_rows_and_are_averaged(monkeypatch):
    masks = [draw(0.2, 5, WEIGHTS > 0, LEVELS, None, 2, member) for member in range(5)]
    np.testing.assert_array_equal(np.sum(masks, axis=0), WEIGHTS > 0)
    kept, average = [], fitting._average
    monkeypatch.setattr(
        fitting, "_average", lambda each: (kept.extend(each), average(each))[1]
    )
    call = {**CALL, "refit": "auto"}
    model, history = jb.fit(X, Y, members=3, **call)
    first, own = jb.fit(X, Y, **call)
    same_bits(kept[0].model, first)
    np.testing.assert_array_equal(history.validation_loss, own.validation_loss)
    rounds = [part.model.num_rounds for part in kept]
    assert history.choices["rounds_of_members"] == rounds
    assert len({part.history.validation_loss[0] for part in kept}) == 3
    expected = np.mean([jb.predict(part.model, X) for part in kept], axis=0)
    np.testing.assert_allclose(jb.predict(model, X), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["shared", "table"])
def test_members_of_fixed_rounds_are_models_with_other_seeds(name):
    case = dict(CASES[name])
    rows = case.pop("x", X), case.pop("y", Y), case.pop("loss", jb.losses.squared_error)
    call = dict(max_depth=3, num_rounds=3, **case)
    model, _ = jb.fit(*rows, members=2, **call)
    each = [jb.predict(jb.fit(*rows, seed=seed, **call)[0], rows[0]) for seed in (0, 1)]
    expected = np.mean(np.asarray(each), axis=0)
    np.testing.assert_allclose(jb.predict(model, rows[0]), expected, atol=1e-5)


def test_members_need_runs_of_their_own(tmp_path):
    model, _ = jb.fit(X, Y, num_rounds=1, max_depth=3)
    for name, value in dict(model=model, checkpoint=tmp_path / "run").items():
        with pytest.raises(ValueError, match=f"members must be 1 with {name}"):
            jb.fit(X, Y, members=2, num_rounds=1, **{name: value})
