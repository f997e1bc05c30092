# SPDX-License-Identifier: Apache-2.0
"""The hyperparameters of training: each is declared once, in this file.

Keywords, documentation (docstrings and docs/parameters.md), checks, and names in a
checkpoint follow from the declarations. To add one, add its declaration, then use
``settings.its_name``.
"""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    get_args,
    get_type_hints,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jboost.entry import checks
from jboost.entry.messages import show
from jboost.losses.names import count_scores
from jboost.objective.curvature import Curvature, Policy
from jboost.tables.sparse import Absent
from jboost.trees.candidates import Candidates, CandidateWeights
from jboost.trees.leaves import LeafSolver


def rate_by_rows(num_rows: int) -> float:
    """Returns the learning rate "auto" of a run that stops early."""
    return float(np.clip(0.06 * (num_rows / 5000) ** 0.2, 0.01, _RATE))


def learning_rates(
    learning_rate: Any, num_rounds: int, first: int = 0
) -> Array | np.ndarray:
    """Returns one rate per round from a number or a schedule, starting at ``first``."""
    if not callable(learning_rate):
        checks.check_number(
            "learning_rate", learning_rate, above=0.0,
            also=", 'auto' or a schedule, round -> number",
        )  # fmt: skip
        if isinstance(learning_rate, Tracer):
            rate = jnp.asarray(learning_rate, jnp.float32)
            return jnp.broadcast_to(rate, (num_rounds,))
        # In one number's memory: with early stopping, num_rounds may be any number.
        return np.broadcast_to(np.float32(learning_rate), num_rounds)
    rates: list[Any] = []
    # Under jit, schedules written in jax.numpy are evaluated now instead of traced.
    with jax.ensure_compile_time_eval():
        for number in range(first, first + num_rounds):
            rates.append(learning_rate(number))
            checks.check_number(f"learning_rate({number})", rates[-1], least=0.0)
    if any(isinstance(rate, Tracer) for rate in rates):
        return jnp.stack([jnp.asarray(rate, jnp.float32) for rate in rates])
    return np.array(rates, np.float32)


Regularization = Literal["relative", "absolute"]
LeafRows = Literal["all", "sample"]
Number = jax.Array | np.number | float
Count = jax.Array | np.integer | int
F = TypeVar("F", bound=Callable[..., Any])

_MOST_DEPTH = 20  # a heap of 2^20 leaves
_MOST_ROUNDS, _PATIENCE = 2000, 50  # with early stopping
_FIXED_ROUNDS = 100  # without
_RATE = 0.1
# In place of "auto".
ROWS_PER_THRESHOLD, SUBSAMPLE, PARENT_ROWS, LINEAR_LEAVES = 100, 0.7, 10.0, True
_INF = float("inf")
_MARK = "{settings}"  # where a docstring lists them


class Setting(NamedTuple):
    """Declaration of a hyperparameter.

    Attributes:
      default: the default value, the same in every public function.
      check: called with name and value; returns the value to use, or raises. None:
        the check needs more than the value, see the comment at the entry.
      section: the part of docs/parameters.md that lists it.
      meaning: one line, for docstrings and the table of that page.
      details: further explanation for that page, in Markdown.
      traced: whether it is a number that the compiled program takes. The others are
        static: each value has a program of its own.
    """

    default: Any
    check: Callable[[str, Any], Any] | None
    section: str
    meaning: str
    details: str = ""
    traced: bool = False


_traced = partial(Setting, traced=True)


def _integer(least: int, most: int = 2**31 - 1) -> Callable[..., Any]:
    return partial(checks.check_integer, least=least, most=most)


def _number(**limits: Any) -> Callable[..., Any]:
    return partial(checks.check_number, **limits)


def _one_of(literal: Any) -> Callable[..., Any]:
    """Returns a check that accepts only the words of a ``Literal`` type."""
    return partial(checks.check_word, words=get_args(literal))


def _or(check: Callable[..., Any], *words: str | None) -> Callable[[str, Any], Any]:
    """Returns a check that also accepts given words, or None."""
    *others, last = map(repr, words)
    also = "".join(f", {word}" for word in others) + f" or {last}"

    def read(name: str, value: Any) -> Any:
        if (value is None or isinstance(value, str)) and value in words:
            return value
        try:
            return check(name, value, also=also)
        except TypeError as error:  # the value of a word is wrong
            raise (ValueError if isinstance(value, str) else TypeError)(error) from None

    return read


def _unless_traced(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Returns a check that leaves out traced numbers, which are not known yet."""
    return lambda name, value: (
        value if isinstance(value, Tracer) else check(name, value)
    )


def _check_curvature(name: str, value: Any) -> Any:
    """Accepts the name of a policy, or a function."""
    if callable(value):
        return value
    also = " or a function (score, target) -> K numbers or a K x K matrix"
    return checks.check_word(name, value, get_args(Policy), also=also)


def _check_auto_flag(name: str, value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return value
    if not isinstance(value, bool | np.bool_):
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name} must be 'auto', True or False, got {show(value)}")
    return bool(value)


_PENALTY = _number(least=0.0)
_SHARE = _number(above=0.0, most=1.0)


# fmt: off
class LeafSettings(TypedDict, total=False):
    """The hyperparameters of leaf values: keywords of ``refit``."""

    # Checked where the rates of all rounds are computed: a schedule may reach 0.
    learning_rate: Annotated[Any, _traced(_RATE, None, "Trees",
        "factor of leaf values: a number, or a schedule, round -> number, as in optax; "
        "auto: less for few rows",
        "`\"auto\"` is `0.06 (N / 5000)^0.2`, from `0.01` to `0.1`, for N training "
        "rows in `fit` with `num_rounds=\"auto\"` and early stopping, and `0.1` "
        "elsewhere. `history.choices` has the number, which `jboost.refit` needs.")]
    l1: Annotated[Number, _traced(0.0, _PENALTY, "Trees",
        "penalty alpha: moves the gradient sum of a leaf toward 0",
        "Weak leaves become 0. Counted like `l2` (relative: XGBoost's alpha is `l1` "
        "times the unit of `regularization`). Does not apply to medians and "
        "quantiles.")]
    l2: Annotated[Any, _traced("auto", _or(_number(least=0.0), "auto"), "Trees",
        "penalty lambda: shrinks leaf values toward 0; auto: 1 average row; 3 if all "
        "thresholds are tried, except for medians, quantiles and absolute "
        "regularization",
        "Counted in average rows (relative) or in units of the loss's second "
        "derivative (absolute, as in XGBoost). For medians and "
        "quantiles, each leaf gets one more residual of 0, of weight `l2` (absolute: "
        "none). A row counts as min(1, mean "
        "weight), also for `min_child_weight`, `min_gain` and `l1`.")]
    parent_rows: Annotated[Any, _traced("auto", _or(_PENALTY, "auto"), "Trees",
        "how many rows the value of the parent node weighs in the value of a leaf; "
        "auto: 10; 0 if all thresholds are tried",
        "From the root down, v = -(G - p v_parent) / (H + `l2` + p), where p is "
        "counted like `l2`: small leaves borrow from their parents. (Hierarchical "
        "shrinkage, Agarwal et al. 2022, divides by the rows of the parent.) Does not "
        "apply to leaves that are medians or quantiles.")]
    max_delta_step: Annotated[Number, _traced(_INF, _number(least=0.0, finite=False),
        "Trees",
        "the largest magnitude of a leaf value before the learning rate; inf or 0: no "
        "limit")]
    regularization: Annotated[Regularization, Setting(
        "relative", _one_of(Regularization), "Trees",
        "whether l1, l2, min_gain and min_child_weight count average rows (relative) "
        "or units of the loss (absolute)",
        "`\"relative\"` divides gradient and curvature by the curvature of an average "
        "row, so that a loss times a million trains the same model. That curvature is "
        "the mean of this round, or, if that is less than the mean of the first round, "
        "the geometric mean of both; times N / N_eff, where N_eff rows hold the "
        "information at the start. Each score has its own divisor; scores that compete "
        "for a row, as in softmax, share the sum of theirs. For a logistic loss it "
        "starts at 1/4, the greatest curvature, however rare positive rows are. "
        "`\"absolute\"` leaves the units of the loss, as XGBoost does. See "
        "[Curvature](curvature.md#regularization-in-rows).")]
    curvature: Annotated[Curvature, Setting("auto", _check_curvature, "Loss",
        "the second-order weight of a row: a policy, or a function of score and "
        "target",
        "`\"auto\"`, `\"exact\"`, `\"secant\"`, `\"absolute\"` or `\"unit\"`; for "
        "[distributions](distributions.md) also `\"fisher\"`, `\"natural\"` or "
        "`\"standardized\"` (which is auto); for [losses of groups](groups.md) only "
        "`\"probe\"` (which is auto) or `\"unit\"`; formulas: [Curvature]"
        "(curvature.md). Or, for losses of one row, a function with the arguments of "
        "the loss that returns a number, for K > 1 K numbers or a K x K matrix (its "
        "diagonal is used). It should be positive (the Fisher information of a "
        "likelihood, for example).")]
    leaf_solver: Annotated[LeafSolver, Setting("auto", _one_of(LeafSolver), "Loss",
        "the method that computes leaf values",
        "`\"newton\"`: -G / (H + `l2`), where H sums `curvature`; `\"hessian\"`: the "
        "same with the second derivatives of the loss, whatever `curvature` is; "
        "`\"exact\"`: the argmin of the leaf's loss; `\"guarded\"`: the Newton step, "
        "replaced by the argmin in leaves where it falls short of its predicted "
        "decrease, and in all leaves if three quarters of the rows have almost no "
        "curvature; "
        "`\"line_search\"`: the Newton steps times one multiplier per tree; "
        "`\"median_step\"`: one step from the median of the rows' own minimizers, "
        "without `l2` (for Huber's loss and similar ones); `\"joint\"`: one Newton "
        "step of all leaves for losses of groups, of the K values of a leaf with "
        "`share_structure`; `\"auto\"`: joint for these, exact for piecewise linear "
        "losses, newton for quadratic ones (hessian with unit curvature) and for more "
        "than 64 scores, else guarded. See [Leaves](leaves.md).")]


class RoundSettings(LeafSettings, total=False):
    """The hyperparameters of one round: the keywords of ``boost_step``."""

    max_depth: Annotated[int, Setting(6, _integer(1, _MOST_DEPTH), "Trees",
        "levels of splits in a tree",
        "The order of interaction: depth 1 makes a sum of functions of one feature "
        "each, depth 2 of two.")]
    linear_leaves: Annotated[bool | str, Setting("auto", _check_auto_flag, "Trees",
        "whether leaves have slopes: auto: yes for one score, unless all thresholds "
        "are tried, or regularization is absolute",
        "A leaf then gives v + sum_j w_j (x_j - c_j), with a term for each of the "
        "nearest 6 numeric features of its path, found by a ridge regression of "
        "gradient and curvature in the leaf; x is clipped to about the range of the "
        "training rows. A row that misses one of the values gets v alone. "
        "Features with a monotone constraint have no slopes. Leaves that are order "
        "statistics (medians, quantiles) stay constant, and so do those of sparse "
        "x, streams, `boost` and `boost_step`, which see only codes.")]
    max_bins: Annotated[int, Setting(256, _integer(2, 2**16), "Trees",
        "codes per feature, including one for missing values",
        "See `candidates`. Categories may have sixteen times as many, see "
        "`categorical`.")]
    min_gain: Annotated[Number, _traced(0.0, _PENALTY, "Trees",
        "the least gain kappa of a split",
        "XGBoost's gamma is 2 `min_gain`.")]
    min_child_weight: Annotated[Number, _traced(1.0, _PENALTY, "Trees",
        "the least curvature of a child, in the units of l2")]
    min_child_samples: Annotated[Any, _traced(
        "auto", _unless_traced(_or(_integer(1), "auto")), "Trees",
        "the minimum number of rows of a child; auto: N / 50, from 1 to 10; 3 to 20 "
        "for medians and quantiles; otherwise 1 if absolute",
        "`\"auto\"` for leaves that are order statistics (absolute error, quantiles): "
        "2 / min(tau, 1 - tau) - 1, at most 20; 20 if three quarters of the rows have "
        "almost no curvature. From 1 to 20 if all thresholds are tried. N are all rows "
        "of positive weight; children are counted in the sample of the splits.")]
    subsample: Annotated[Any, _traced("auto", _or(_SHARE, "auto"), "Sampling",
        "the share of rows used to find the splits of a round; auto: ``0.7``; 1 if "
        "absolute",
        "Exactly this share is drawn, without replacement; whole groups if `groups` "
        "are ids.")]
    leaf_rows: Annotated[LeafRows, Setting("all", _one_of(LeafRows), "Sampling",
        "the rows that leaf values are fitted to: all, or the sample of the splits",
        "`\"all\"` gives leaf values less noise. With `\"sample\"` the trees of the "
        "rounds differ more, and a round does not see the other rows (Friedman 2002): "
        "the history has its improvement on them.")]
    colsample_bytree: Annotated[Number, _traced(1.0, _SHARE, "Sampling",
        "the share of features for each tree")]
    colsample_bylevel: Annotated[Number, _traced(1.0, _SHARE, "Sampling",
        "the share of the tree's features for each level")]
    colsample_bynode: Annotated[Number, _traced(1.0, _SHARE, "Sampling",
        "the share of the level's features for each node")]
    max_leaves: Annotated[int | None, Setting(None, _or(_integer(2), None), "Trees",
        "the most leaves of a tree; None: as many as max_depth allows",
        "Trees still grow level by level: on each level the best splits are made "
        "first, up to this number of leaves. (LightGBM's num_leaves differs: a tree "
        "may go deep in one place before a level is full.)")]
    # The next two name features: they are checked against the columns.
    monotone: Annotated[Any, _traced(None, None, "Constraints and split candidates",
        "{feature: 1 or -1}, by index or name, or a sign for every feature",
        "1 where the score must not fall as the feature rises, -1 where it must not "
        "rise, 0 where it may do both. Missing values are unconstrained. With K scores "
        "the constraint holds for each.")]
    interactions: Annotated[Any, _traced(None, None,
        "Constraints and split candidates",
        "groups of features, by index or name, that may meet on a path",
        "`[[0, 1], [1, 2, 3]]`: all features on a path from root to leaf are in one "
        "group. A feature of no group splits alone.")]
    rows_per_threshold: Annotated[Any, _traced(
        "auto", _unless_traced(_or(_integer(0), "auto")),
        "Constraints and split candidates",
        "rows of a node per threshold that it tries for each feature; 0: try all; "
        "auto: 100; 0 if absolute or with other `candidates`",
        "Of a feature's cuts between bins with rows in the node, "
        "max(1, round(rows / `rows_per_threshold`)) are tried, drawn for each node and "
        "feature, evenly spread by rank. (Extremely randomized trees draw one by "
        "value; Geurts, Ernst and Wehenkel 2006.) The same holds for sets of "
        "categories and for single categories. Only with `candidates=\"global\"`.")]
    candidates: Annotated[Candidates, Setting("global", _one_of(Candidates),
        "Constraints and split candidates",
        "thresholds that may split a node: chosen once (global), in each node "
        "(local), or every value (exact)",
        "Candidates are eps = 1 / (`max_bins` - 1) of the weight apart (Chen and "
        "Guestrin 2016, section 3.2); exact ones ignore `max_bins`. Local and exact "
        "candidates sort the rows of each feature once, and take six to seven times as "
        "long as histograms. The order takes 4 bytes for each cell of x, and 16 more "
        "while a tree grows.")]
    candidate_weights: Annotated[CandidateWeights, Setting(
        "samples", _one_of(CandidateWeights), "Constraints and split candidates",
        "the weights of rows in the choice of thresholds: samples or curvature",
        "`\"curvature\"` multiplies `sample_weight` by the curvature of the loss; "
        "global candidates are then chosen anew for each tree, as by XGBoost's "
        "approx.")]
    max_onehot: Annotated[Count, _traced(4, _unless_traced(_integer(0)), "Categories",
        "the most codes of a feature that splits off one category at a time",
        "Such splits do not shrink the means of categories by the noise of their "
        "rows.")]
    share_structure: Annotated[bool | str, Setting("auto", _check_auto_flag, "Loss",
        "whether one tree serves all K scores of a round, with K values in each leaf",
        "`\"auto\"`: for three classes or more (a loss of differences of scores, no "
        "likelihood) if the learning rates sum to 30 over all rounds (300 rounds at "
        "`0.1`), unless `leaf_solver`, `monotone` or absolute `regularization` is "
        "given; a run that continues a model or a checkpoint keeps its choice. See "
        "[Several scores](several-scores.md).")]


class RunSettings(RoundSettings, total=False):
    """The hyperparameters of a run of one or more scores."""

    # Checked with num_scores, in jboost.boosting.method.initial_scores.
    init_score: Annotated[Any, _traced("auto", None, "Loss",
        "the score where training starts: auto, median, or one or K numbers",
        "`\"auto\"`: the argmin over c of the weighted loss (or, if no row has a "
        "gradient at this point, a point where the most rows have one; see "
        "`history.choices`); `\"median\"`: the median of the rows' own minimizers (the "
        "targets, for a loss that is least at the target).")]


class ScoreSettings(RunSettings, total=False):
    """The hyperparameters of a run with a given number of scores."""

    num_scores: Annotated[int, Setting(1, _integer(1), "Loss",
        "K, the scores of a row",
        "The loss receives K scores, and each round grows K trees or, with "
        "`share_structure`, one. A built-in loss of one score has a score for each "
        "column of y [N, K]; 1 then means K.")]


class BoostSettings(ScoreSettings, total=False):
    """The hyperparameters of ``boost``."""

    num_rounds: Annotated[int, Setting(100, _integer(0), "Trees",
        "rounds of boosting; each grows a tree for every score")]


class TableSettings(RunSettings, total=False):
    """The hyperparameters of a run on raw tables; the estimators have them all."""

    num_rounds: Annotated[Any, Setting("auto", _or(_integer(0), "auto"), "Trees",
        "rounds of boosting, each of which grows a tree for every score; auto: until "
        "the loss of held-out rows no longer falls",
        "`\"auto\"`: at most 2,000 rounds, with early stopping after 50 without "
        "improvement on `validation` or, without it, on held-out rows (see "
        "`validation_fraction`). 100 rounds where no rows can be held out: for "
        "streams, runs that continue a model, fewer than 50 rows, and groups that are "
        "not ids with a loss that does not take `where`. "
        "`cross_validate` and `sweep` stop by the mean over the folds.")]
    absent: Annotated[Absent | None, Setting(None, _or(_one_of(Absent), None), "Data",
        "the meaning of entries that a sparse matrix does not store: missing or zero",
        "The result is that of the dense matrix with NaN (`\"missing\"`: they take the "
        "direction learned at each split) or 0 in their places. The model keeps it for "
        "prediction. `None`: that of `model`, or missing if x is sparse, or dense with "
        "a missing value in a row of positive weight. Otherwise validation sets and "
        "the model refuse sparse matrices that do not store every entry.")]
    # Names features: it is checked against the columns.
    categorical: Annotated[Any, Setting("auto", None, "Categories",
        "categorical columns: auto (by dtype), names and indices; None: not allowed",
        "`\"auto\"`: the categorical columns of a data frame (strings, and columns "
        "declared categorical); a sequence: these columns as well. In a matrix a "
        "column of categories holds integers 0, 1, 2, ..., NaN where missing. "
        "Categories have no order: a split sends a set of them left, found by sorting "
        "those in the node by gradient over curvature (Fisher 1958; Breiman et al. "
        "1984, theorem 4.5), shrunk by the noise of the node's rows (DerSimonian and "
        "Laird 1986). The heaviest 16 `max_bins` - 2 have a code each (fewer where all "
        "columns together would have more than 2^19 codes), the others share one. In "
        "prediction, categories unseen in training (in a matrix also integers < 0) are "
        "treated as missing; if unseen in a node, they follow its missing values. Not "
        "with sparse x, streams, `candidates` other than `\"global\"` or "
        "`candidate_weights=\"curvature\"`, nor with `monotone` signs on them.")]
    early_stopping_rounds: Annotated[Any, Setting(
        "auto", _or(_integer(1), None, "auto"), "Validation and stopping",
        "stop after this number of rounds without improvement; None: never; auto: 50 "
        "with `num_rounds=\"auto\"`, else None",
        "Compares the loss of the first validation set or, without one, of held-out "
        "rows, or the criterion `by`; the model is then that of the best round.")]


class HoldOutSettings(TableSettings, total=False):
    """The hyperparameters of an estimator: of a run that may hold out rows itself."""

    validation_fraction: Annotated[float, Setting(
        0.2, _number(above=0.0, below=1.0), "Validation and stopping",
        "the share of rows that early stopping holds out where there is no validation "
        "set",
        "Drawn by `seed`: whole groups if `groups` are ids; where the targets have few "
        "different values, such as classes, the same share of each value. Rows of "
        "weight 0 do not count.")]
    refit: Annotated[bool | str, Setting("auto", _check_auto_flag,
        "Validation and stopping",
        "whether leaf values are at last fitted to all rows, those held out included",
        "Splits, and the number of rounds, stay; the leaf values of all rounds are "
        "computed again, in order (`jboost.refit`). `\"auto\"`: yes if rows were held "
        "out without `validation`; True: the first validation set is added to the "
        "training rows. Losses in `history` are those before.")]


    members: Annotated[int, Setting(1, _integer(1), "Validation and stopping",
        "models whose mean score is the result; each is trained with a seed of its own",
        "Where rows are held out, each member holds out others, stops by itself, and "
        "is fitted to all rows at last. The result is one model with the rounds of all "
        "members, of leaf values divided by their number. `history` is that of the "
        "first member, and its choices have \"rounds_of_members\". Not with `model` or "
        "`checkpoint`.")]


class StudySettings(TableSettings, ScoreSettings, total=False):
    """The hyperparameters of ``cross_validate`` and ``sweep``."""

    seed: Annotated[int, _traced(0, _integer(0, 2**32 - 1), "Sampling",
        "seed of everything random")]


class FitSettings(HoldOutSettings, StudySettings, total=False):
    """All hyperparameters: those of ``fit``."""
# fmt: on


@cache
def declared(kind: type) -> Mapping[str, Setting]:
    """Returns the settings that one of the classes above declares, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


@dataclass(frozen=True)
class Settings:
    """The hyperparameters of a run, checked; read them as attributes.

    Attributes:
      values: their values; those that other settings decide are no longer "auto".
      given: the values before.
    """

    values: Mapping[str, Any]
    given: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name not in values:
            raise AttributeError(f"no setting {show(name)} is declared")
        return values[name]

    def replace(self, **changes: Any) -> "Settings":
        """Returns the settings with some values changed, and checked again."""
        return read_settings({**self.given, **changes}, FitSettings)

    def with_scores(self, loss: Any, y: Any) -> "Settings":
        """Returns the settings with the number of scores that these targets need."""
        return self.replace(num_scores=count_scores(loss, y, self.num_scores))

    def with_rounds(self, stops: bool) -> "Settings":
        """Returns the settings with numbers in place of "auto" rounds.

        ``stops``: whether rounds can be compared on rows that are held out.
        """
        rounds, patience = self.num_rounds, self.early_stopping_rounds
        if rounds == "auto" and patience is None:
            raise ValueError(
                "num_rounds must be a number if early_stopping_rounds is None, got "
                "'auto'"
            )
        if patience == "auto":
            patience = _PATIENCE if rounds == "auto" and stops else None
        if rounds == "auto":
            rounds = _MOST_ROUNDS if stops else _FIXED_ROUNDS
        return self.replace(num_rounds=rounds, early_stopping_rounds=patience)

    @property
    def refits(self) -> bool:
        """Whether leaf values are fitted to all rows after some were held out.

        "auto" does not where that would break ``monotone`` constraints, or undo leaf
        values of samples.
        """
        if self.refit != "auto":
            return bool(self.refit)
        return self.monotone is None and self.leaf_rows == "all"

    @property
    def own_curvature(self) -> Any:
        """The user's function, if ``curvature`` is one; otherwise None."""
        return self.curvature if callable(self.curvature) else None

    @property
    def leaves_out(self) -> bool:
        """Whether rounds may fit leaf values to a part of the rows."""
        share = self.subsample
        return self.leaf_rows == "sample" and (isinstance(share, Tracer) or share < 1)

    @property
    def draws_thresholds(self) -> bool:
        """Whether nodes may try some of the thresholds of a feature."""
        rows = self.rows_per_threshold
        return isinstance(rows, Tracer) or rows > 0

    @property
    def sorts_rows(self) -> bool:
        """Whether trees are grown from sorted rows, with a code for every value."""
        return self.candidates != "global" or self.candidate_weights != "samples"


def read_settings(given: Mapping[str, Any], kind: type = BoostSettings) -> Settings:
    """Checks all settings as far as possible without data.

    Names that are not declared are left out; defaults are filled in, those of ``kind``
    first.
    """
    values = {}
    for name, setting in {**declared(FitSettings), **declared(kind)}.items():
        value = given.get(name, setting.default)
        values[name] = setting.check(name, value) if setting.check else value
    settings = Settings({**values, **_decide_search(values)}, values)
    if settings.candidates == "exact" and settings.candidate_weights != "samples":
        raise ValueError(
            "candidate_weights must be 'samples' with candidates='exact', which tries "
            f"every value whatever it weighs, got {settings.candidate_weights!r}"
        )
    if settings.candidates != "global" and settings.draws_thresholds:
        rows: Any = settings.rows_per_threshold
        raise ValueError(
            "rows_per_threshold must be 0 unless candidates='global': nodes try all "
            f"candidates of other kinds, got {rows} with {settings.candidates!r}"
        )
    return settings


def _decide_search(values):
    """Replaces "auto" where other settings decide; docs/defaults.md has the reasons.

    Samples of rows, of thresholds, and small leaves that borrow from their parents need
    each other. "absolute" is for models like those of other libraries.
    """
    relative = values["regularization"] == "relative"
    rows: Any = values["rows_per_threshold"]
    if isinstance(rows, str):
        drawn = relative and values["candidates"] == "global"
        rows = ROWS_PER_THRESHOLD if drawn else 0
    found: dict[str, Any] = {"rows_per_threshold": rows}
    rate = values["learning_rate"]
    if isinstance(rate, str) and rate == "auto":
        found["learning_rate"] = _RATE  # fit may know better, see rate_by_rows
    draws = isinstance(rows, Tracer) or rows > 0
    if values["linear_leaves"] == "auto":
        one = values["num_scores"] == 1
        found["linear_leaves"] = LINEAR_LEAVES and relative and draws and one
    if isinstance(values["subsample"], str):
        found["subsample"] = SUBSAMPLE if relative else 1.0
    if isinstance(values["parent_rows"], str):
        found["parent_rows"] = PARENT_ROWS if relative and draws else 0.0
    return found


def takes_settings(function: F) -> F:
    """Decorates a function with ``**settings: Unpack[...]`` of a class above.

    ``inspect.signature`` and ``help`` then list the keywords with their defaults, and
    the docstring explains them where it says ``{settings}``.
    """
    signature = inspect.signature(function)
    *others, keywords = signature.parameters.values()
    (kind,) = get_args(keywords.annotation)
    types = get_type_hints(kind)
    listed = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=each.default,
            annotation=types[name],
        )
        for name, each in declared(kind).items()
    ]  # fmt: skip
    expanded: Any = function
    expanded.__signature__ = signature.replace(parameters=[*others, *listed])
    expanded.__doc__ = explain_settings(function.__doc__, kind)
    return function


def explain_settings(docstring: str | None, kind: type) -> str | None:
    """Replaces ``{settings}`` in a docstring by a line for each hyperparameter."""
    if docstring is None or _MARK not in docstring:
        return docstring
    before, _, after = docstring.partition(_MARK)
    indent = before.rpartition("\n")[2]
    lines = [
        textwrap.fill(
            f"{name}: {each.meaning}; default {each.default!r}.", 88,
            initial_indent=indent, subsequent_indent=indent + "  ",
        )
        for name, each in declared(kind).items()
    ]  # fmt: skip
    return before.removesuffix(indent) + "\n".join(lines) + after
