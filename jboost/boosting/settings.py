# SPDX-License-Identifier: Apache-2.0
"""The hyperparameters of training: each is declared once, in this file.

Keywords, documentation, checks, and names in a checkpoint follow from the declarations.
``fit`` and ``boost`` write their signatures out for readers; a test compares. To add
one, add its declaration (and the keyword to both), then use ``settings.its_name``.
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


def learning_rates(
    learning_rate: Any, num_rounds: int, first: int = 0
) -> Array | np.ndarray:
    """Returns one rate per round from a number or a schedule, starting at ``first``."""
    if not callable(learning_rate):
        checks.check_number(
            "learning_rate", learning_rate, above=0.0,
            also=" or a schedule, round -> number",
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
Number = jax.Array | np.number | float
Count = jax.Array | np.integer | int
F = TypeVar("F", bound=Callable[..., Any])

_MOST_DEPTH = 20  # a heap of 2^20 leaves
_INF = float("inf")
_MARK = "{settings}"  # where a docstring lists them


class Setting(NamedTuple):
    """Declaration of a hyperparameter.

    Attributes:
      default: the default value, the same in every public function.
      check: called with name and value; returns the value to use, or raises. None:
        the check needs more than the value, see the comment at the entry.
      meaning: one line; the docstring of :func:`jboost.fit` has the details.
      traced: whether it is a number that the compiled program takes. The others are
        static: each value has a program of its own.
    """

    default: Any
    check: Callable[[str, Any], Any] | None
    meaning: str
    traced: bool


def _static(default: Any, check: Any, meaning: str) -> Setting:
    return Setting(default, check, meaning, traced=False)


def _traced(default: Any, check: Any, meaning: str) -> Setting:
    return Setting(default, check, meaning, traced=True)


def _integer(least: int, most: int = 2**31 - 1) -> Callable[..., Any]:
    return partial(checks.check_integer, least=least, most=most)


def _number(**limits: Any) -> Callable[..., Any]:
    return partial(checks.check_number, **limits)


def _one_of(literal: Any) -> Callable[..., Any]:
    """Returns a check that accepts only the words of a ``Literal`` type."""
    return partial(checks.check_word, words=get_args(literal))


def _or(word: str | None, check: Callable[..., Any]) -> Callable[[str, Any], Any]:
    """Returns a check that also accepts a given word, or None."""

    def read(name: str, value: Any) -> Any:
        if (value is None or isinstance(value, str)) and value == word:
            return value
        try:
            return check(name, value, also=f" or {word!r}")
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


def _check_sharing(name: str, value: Any) -> Any:
    """Accepts "auto", True or False."""
    if isinstance(value, str) and value == "auto":
        return value
    if not isinstance(value, bool | np.bool_):
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name} must be 'auto', True or False, got {show(value)}")
    return bool(value)


_PENALTY = _number(least=0.0)
_SHARE = _number(above=0.0, most=1.0)


# fmt: off
class RoundSettings(TypedDict, total=False):
    """The hyperparameters of one round: the keywords of ``boost_step``."""

    # Checked where the rates of all rounds are computed: a schedule may reach 0.
    learning_rate: Annotated[Any, _traced(0.1, None,
        "what leaf values are multiplied by: a number, or a schedule, round -> number, "
        "where several rounds are made")]
    max_depth: Annotated[int, _static(6, _integer(1, _MOST_DEPTH),
        "levels of splits in a tree")]
    max_bins: Annotated[int, _static(256, _integer(2, 2**16),
        "codes per feature, one of them for missing")]
    l1: Annotated[Number, _traced(0.0, _PENALTY,
        "moves the gradient sum of a leaf toward 0")]
    l2: Annotated[Any, _traced("auto", _or("auto", _number(least=0.0)),
        "shrinks leaf values toward 0; auto: 3 average rows, 1 for medians and "
        "quantiles, and 1 where absolute")]
    max_delta_step: Annotated[Number, _traced(_INF, _number(least=0.0, finite=False),
        "the largest magnitude of a leaf before the learning rate; 0: no limit")]
    min_gain: Annotated[Number, _traced(0.0, _PENALTY,
        "the least gain of a split")]
    min_child_weight: Annotated[Number, _traced(1.0, _PENALTY,
        "the least curvature of a child")]
    min_child_samples: Annotated[Any, _traced(
        "auto", _unless_traced(_or("auto", _integer(1))),
        "the least rows of a child; auto: one in 50, from 1 to 20; 3 to 20 for medians "
        "and quantiles; for others 1 where absolute")]
    regularization: Annotated[Regularization, _static(
        "relative", _one_of(Regularization),
        "whether l1, l2, min_gain and min_child_weight count average rows (relative) "
        "or units of the loss (absolute)")]
    subsample: Annotated[Number, _traced(1.0, _SHARE,
        "the share of rows that a round learns from")]
    colsample_bytree: Annotated[Number, _traced(1.0, _SHARE,
        "the share of features for each tree")]
    colsample_bylevel: Annotated[Number, _traced(1.0, _SHARE,
        "the share of those for each level")]
    colsample_bynode: Annotated[Number, _traced(1.0, _SHARE,
        "the share of those for each node")]
    max_leaves: Annotated[int | None, _static(None, _or(None, _integer(2)),
        "the most leaves of a tree; on each level the best splits come first")]
    # The next two name features: they are checked against the columns.
    monotone: Annotated[Any, _traced(None, None,
        "{feature: 1 or -1}, or a sign for every feature")]
    interactions: Annotated[Any, _traced(None, None,
        "groups of features that may meet on a path")]
    candidates: Annotated[Candidates, _static("global", _one_of(Candidates),
        "thresholds that may split a node: chosen once (global), in each node "
        "(local), or every value (exact)")]
    candidate_weights: Annotated[CandidateWeights, _static(
        "samples", _one_of(CandidateWeights),
        "what rows weigh when thresholds are chosen: samples or curvature")]
    category_l2: Annotated[Number, _traced(0.0, _PENALTY,
        "added to l2 in splits by sets of categories")]
    category_smoothing: Annotated[Number, _traced(0.0, _PENALTY,
        "the least curvature by which means of categories are shrunk")]
    min_category_weight: Annotated[Number, _traced(0.0, _PENALTY,
        "the least curvature of a child in splits by sets of categories")]
    max_onehot: Annotated[Count, _traced(4, _unless_traced(_integer(0)),
        "features of at most so many categories split off one category at a time")]
    curvature: Annotated[Curvature, _static("auto", _check_curvature,
        "the second-order weight of a row: a policy, or a function of score and "
        "target")]
    leaf_solver: Annotated[LeafSolver, _static("auto", _one_of(LeafSolver),
        "how leaf values are computed")]
    share_structure: Annotated[bool | str, _static("auto", _check_sharing,
        "whether one tree serves all K scores of a round, with K values in each leaf")]


class TableSettings(RoundSettings, total=False):
    """The hyperparameters of a run on raw tables; the estimators have them all."""

    num_rounds: Annotated[int, _static(100, _integer(0),
        "rounds of boosting; each grows a tree for every score")]
    # Checked with num_scores, in jboost.boosting.method.initial_scores.
    init_score: Annotated[Any, _traced("auto", None,
        "where training starts: auto (the argmin of the loss), median, or numbers")]
    absent: Annotated[Absent | None, _static(None, _or(None, _one_of(Absent)),
        "how entries that a sparse matrix does not store are read: missing or zero")]
    # Names features: it is checked against the columns.
    categorical: Annotated[Any, _static("auto", None,
        "categorical columns: auto (by dtype), None, or names and indices")]
    early_stopping_rounds: Annotated[int | None, _static(None, _or(None, _integer(1)),
        "stop after so many rounds without improvement")]


class FitSettings(TableSettings, total=False):
    """All hyperparameters: those of ``fit``, ``cross_validate`` and ``sweep``."""

    num_scores: Annotated[int, _static(1, _integer(1),
        "K, the scores of a row")]
    seed: Annotated[int, _traced(0, _integer(0, 2**32 - 1),
        "seeds everything random")]
# fmt: on


@cache
def declared(kind: type) -> Mapping[str, Setting]:
    """Returns the settings that one of the classes above declares, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


@dataclass(frozen=True)
class Settings:
    """The hyperparameters of a run, checked; read them as attributes."""

    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name not in values:
            raise AttributeError(f"no setting {show(name)} is declared")
        return values[name]

    def replace(self, **changes: Any) -> "Settings":
        """Returns the settings with some values changed, and checked again."""
        return read_settings({**self.values, **changes})

    def with_scores(self, loss: Any, y: Any) -> "Settings":
        """Returns the settings with the number of scores that these targets need."""
        return self.replace(num_scores=count_scores(loss, y, self.num_scores))

    @property
    def own_curvature(self) -> Any:
        """The user's function, if ``curvature`` is one; otherwise None."""
        return self.curvature if callable(self.curvature) else None

    @property
    def sorts_rows(self) -> bool:
        """Whether trees are grown from sorted rows, with a code for every value."""
        return self.candidates != "global" or self.candidate_weights != "samples"


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Checks all settings as far as possible without data.

    Args:
      given: values by name. Names that are not declared are left out, so that
        ``locals()`` will do; defaults are filled in.

    Raises:
      TypeError, ValueError: a value is invalid, or two values exclude each other.
    """
    values = {}
    for name, setting in declared(FitSettings).items():
        value = given.get(name, setting.default)
        values[name] = setting.check(name, value) if setting.check else value
    settings = Settings(values)
    if settings.candidates == "exact" and settings.candidate_weights != "samples":
        raise ValueError(
            "candidate_weights must be 'samples' with candidates='exact', which tries "
            f"every value whatever it weighs, got {settings.candidate_weights!r}"
        )
    return settings


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
