# SPDX-License-Identifier: Apache-2.0
"""The record of a run: losses and metrics by round, and the model after any round.

Arrays grow in place, and a model is a view of their first rounds, so that the total
time grows with the number of rounds. No prediction changes where models are joined.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jboost.codes.bins import Bins
from jboost.kernels.calls import make_aligned
from jboost.model.ensemble import Ensemble, Links, rounds_of, to_ensemble, truncate
from jboost.training.history import UNNAMED, History
from jboost.training.metrics import BY_LOSS, Criterion
from jboost.trees.tree import BoostedTrees, Tree


def append_rounds(before: Ensemble, after: Ensemble) -> Ensemble:
    """Joins the rounds of ``before`` and ``after``, from the score of ``before``.

    Heaps become as deep as the deeper ones; beside linked trees they are linked, too.
    Scores that share trees in one model only have trees of their own in the result.
    The sums that leaves were fitted to are kept if both models have them.
    """
    if before.shares_structure != after.shares_structure:
        before, after = _repeat_structure(before), _repeat_structure(after)
    linked = before.links is not None or after.links is not None
    if linked:
        before, after = _link(before), _link(after)
        width = max(before.feature.shape[2], after.feature.shape[2])
    else:
        width = 2 ** max(before.max_depth, after.max_depth) - 1
    words = max(_words(before), _words(after))
    parts = [_take_arrays(model, width, words) for model in (before, after)]
    arrays: dict[str, Any] = {}
    for name, first in parts[0].items():
        second = parts[1][name]
        join = lambda a, b: np.concatenate([a, b])  # noqa: E731
        known = first is not None and second is not None
        arrays[name] = jax.tree.map(join, first, second) if known else None
    arrays = jax.device_put(arrays)
    left_child = arrays.pop("left_child")
    links = None
    if left_child is not None:
        depth = max(before.max_depth, after.max_depth)
        links = Links(left_child=left_child, max_depth=depth)
    names = after.feature_names or before.feature_names
    return replace(before, **arrays, links=links, feature_names=names)


def _words(model):
    """Words of the sets of categories."""
    return 0 if model.left_codes is None else model.left_codes.shape[3]


def _take_arrays(model, width, words):
    """Returns the arrays with an axis of rounds, with ``width`` nodes per tree."""
    short = width - model.feature.shape[2]

    def pad(array, fill):
        array = np.asarray(array)
        return np.pad(array, ((0, 0), (0, 0), (0, short)), constant_values=fill)

    arrays: dict[str, Any] = dict(
        feature=pad(model.feature, 0),
        threshold=pad(model.threshold, np.inf),
        missing_left=pad(model.missing_left, True),
        left_codes=None,
        left_child=None,
    )
    if words:
        codes = np.zeros((*arrays["feature"].shape, words), np.uint32)
        if model.left_codes is not None:
            old = np.asarray(model.left_codes)
            codes[:, :, : old.shape[2], : old.shape[3]] = old
        arrays["left_codes"] = codes
    if model.links is not None:
        node = np.arange(width, dtype=np.int32)
        left_child = pad(model.links.left_child, 0)
        arrays["left_child"] = np.where(node < width - short, left_child, node)

    def widen(values):
        if model.links is not None:
            return pad(values, 0)
        values = np.asarray(values)  # a leaf's rows all go left from where it was
        wide = np.zeros((*values.shape[:2], width + 1), values.dtype)
        wide[:, :, :: (width + 1) // values.shape[2]] = values
        return wide

    arrays["leaf_value"] = widen(model.leaf_value)
    arrays["sums"] = _map_leaves(widen, model.sums)
    return arrays


def _map_leaves(change, sums):
    """Applies ``change`` to the sums of leaves; l2 is one number per tree."""
    if sums is None:
        return None
    return sums._replace(
        gradient=change(sums.gradient),
        curvature=change(sums.curvature),
        weight=change(sums.weight),
        l2=np.asarray(sums.l2),
    )


def _link(model: Ensemble) -> Ensemble:
    """Returns a model with linked trees; heaps keep the indices of their nodes."""
    if model.links is not None:
        return model
    nodes = model.nodes()
    is_leaf = nodes.is_leaf

    def by_round(array, size=model.num_scores):
        rounds = array.reshape(model.num_rounds, model.num_scores, *array.shape[1:])
        return rounds[:, :size]

    by_tree: Any = partial(by_round, size=model.feature.shape[1])

    def of_leaves(values) -> Any:
        return by_round(np.where(is_leaf, values, 0).astype(np.float32))

    sums = model.sums
    if sums is not None:
        sums = sums._replace(
            gradient=of_leaves(nodes.gradient),
            curvature=of_leaves(nodes.curvature),
            weight=of_leaves(nodes.weight),
        )
    left_codes = None if nodes.left_codes is None else by_tree(nodes.left_codes)
    own = np.arange(nodes.left.shape[1], dtype=np.int32)
    left_child = np.where(is_leaf, own, nodes.left)
    return replace(
        model,
        feature=by_tree(nodes.feature),
        threshold=by_tree(nodes.threshold),
        missing_left=by_tree(nodes.missing_left),
        leaf_value=of_leaves(nodes.value),
        sums=sums,
        left_codes=left_codes,
        links=Links(by_tree(left_child), model.max_depth),
    )


def _repeat_structure(model: Ensemble) -> Ensemble:
    """Returns the same model with a tree for each score, R rounds of K trees."""
    if not model.shares_structure:
        return model
    names = ("feature", "threshold", "missing_left", "left_codes", "links")
    parts = {name: getattr(model, name) for name in names}
    repeat = partial(np.repeat, repeats=model.num_scores, axis=1)
    return replace(model, **jax.tree.map(repeat, parts))


class GrowingArray:
    """An array that grows along axis 0; views of its first rows stay unchanged."""

    def __init__(self, rows: np.ndarray):
        self._memory = rows

    def write(self, first: int, rows: Any) -> None:
        """Writes rows from index ``first`` on; those before it must be written."""
        rows, old = np.asarray(rows), self._memory
        end = first + len(rows)
        if end > len(old):
            # Aligned, so that JAX shares the memory instead of copying it.
            shape = (max(end, 2 * len(old)), *old.shape[1:])
            self._memory = make_aligned(shape, old.dtype)
            self._memory[:first] = old[:first]
        self._memory[first:end] = rows

    def first(self, count: int) -> np.ndarray:
        """Returns a view of the first rows."""
        return self._memory[:count]


class GrowingModel:
    """A model that grows by rounds.

    Attributes:
      num_rounds: the number of its rounds.
    """

    def __init__(self, model: Ensemble):
        self._model, self.num_rounds = model, model.num_rounds
        leaves, self._structure = jax.tree.flatten(rounds_of(model))
        self._arrays = [GrowingArray(np.asarray(leaf)) for leaf in leaves]

    def add(self, model: Ensemble) -> None:
        """Appends the rounds of a model of the same layout."""
        leaves = jax.tree.leaves(rounds_of(model))
        for array, rows in zip(self._arrays, leaves, strict=True):
            array.write(self.num_rounds, rows)
        # Last: an interrupt before it leaves the rounds out.
        self.num_rounds += model.num_rounds

    def first(self, num_rounds: int) -> Ensemble:
        """Returns the model of the first rounds."""
        leaves = [array.first(num_rounds) for array in self._arrays]
        parts = jax.tree.unflatten(self._structure, jax.device_put(leaves))
        return replace(self._model, **parts)


@dataclass
class Record:
    """The rounds so far on the host.

    The trees of ``before`` come first: those of a model that training continues from,
    and the first ``restored`` rounds of this run if it continues from a checkpoint. The
    file now holds ``kept`` rounds of it. Metrics are those of the sets ``measured``.
    """

    bins: Bins
    init_score: Any  # [] or [K], NumPy, as the trees
    set_names: tuple[str, ...]
    named: bool  # whether the sets were given by name
    no_trees: Tree  # arrays of zero rounds
    choices: dict[str, Any]
    bagged: bool  # whether rounds leave rows out
    feature_names: tuple[str, ...] | None = None
    metric_names: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    before: Ensemble | None = None
    restored: int = 0
    kept: int = 0
    by: Criterion = BY_LOSS
    # Parameters of an adaptive loss, at the start and after each round; else ().
    parameters: list[Any] = field(default_factory=list)
    num_rounds: int = 0

    def __post_init__(self):
        def rows(*shape):
            return GrowingArray(np.zeros((0, *shape)))

        self._train_loss, self._set_losses = rows(), rows(len(self.set_names))
        self._metrics = rows(len(self.measured), len(self.metric_names))
        self._improvement = rows()
        # One entry a round; None for those that the model has.
        self._trees: list[Tree | None] = []
        self._model: GrowingModel | None = None

    @property
    def train_loss(self) -> np.ndarray:
        """The losses of the training rows."""
        return self._train_loss.first(self.num_rounds)

    def add(
        self,
        trees: Tree,
        train_loss: Any,
        set_losses: Any,
        metrics: Any,
        improvement: Any,
        parameters: Sequence[Any],
    ) -> None:
        """Appends rounds.

        Args:
          trees: the trees, with a leading axis of rounds.
          train_loss: the loss of the training rows, [n].
          set_losses: the losses of the validation sets, [n, sets].
          metrics: the metrics, [n, measured sets, metrics].
          improvement: the improvement out of the bag, [n]; unused unless rounds leave
            rows out.
          parameters: the parameters of an adaptive loss after each round.
        """
        first, count = self.num_rounds, len(train_loss)
        for i in range(count):
            self._trees.append(jax.tree.map(lambda a: a[i : i + 1], trees))  # noqa: B023
        self.parameters += parameters
        self._set_losses.write(first, set_losses)
        self._metrics.write(first, metrics)
        if self.bagged:
            self._improvement.write(first, improvement)
        self._train_loss.write(first, train_loss)
        # Last: a round counts from here on, wherever an interrupt strikes.
        self.num_rounds += count

    def best_round(self, num_rounds: int) -> int:
        """Returns the best of the first ``num_rounds``; -1 if none is finite."""
        if not self.set_names or num_rounds == 0:
            return num_rounds - 1
        return self.by.find_best(self.compared(num_rounds))

    def compared(self, num_rounds: int) -> np.ndarray:
        """Returns the criterion after each of the first rounds, on the first set."""
        if self.by.metric is None:
            return self._set_losses.first(num_rounds)[:, 0]
        of = self.measured.index(self.set_names[0])
        metric = self.metric_names.index(self.by.metric)
        return self._metrics.first(num_rounds)[:, of, metric]

    def model(self, num_rounds: int) -> Ensemble:
        """Returns the ensemble after the first ``num_rounds`` rounds."""
        before, count = self.before, num_rounds - self.restored
        if before is not None and count <= 0:
            return truncate(before, before.num_rounds + count)
        earlier = 0 if before is None else before.num_rounds
        made = self._model
        done = 0 if made is None else made.num_rounds - earlier
        if made is None or done < count:
            new = self._convert(self._trees[done:count])
            if made is None:
                self._model = made = GrowingModel(
                    new if before is None else append_rounds(before, new)
                )
            elif before is None:
                made.add(new)
            else:  # in the layout of both
                made.add(append_rounds(made.first(0), new))
            self._trees[done:count] = [None] * (count - done)
        return made.first(earlier + count)

    def _convert(self, trees):
        """Returns a model of these rounds alone."""
        joined = self.no_trees
        if trees:
            join = lambda *arrays: np.concatenate(arrays)  # noqa: E731
            joined = jax.tree.map(join, *trees)
        model = to_ensemble(BoostedTrees(joined, self.init_score), self.bins)
        return replace(model, feature_names=self.feature_names)

    def table(self) -> dict[str, np.ndarray]:
        """Returns the history as arrays, with an entry per round."""
        number = self.num_rounds
        measured = number and self.metric_names
        return {
            "train_loss": self.train_loss,
            "set_losses": self._set_losses.first(number),
            "metrics": self._metrics.first(number) if measured else np.zeros(0),
            "improvement": self._improvement.first(number),
            **self._stack_parameters(),
        }

    def _stack_parameters(self) -> dict[str, np.ndarray]:
        leaves = [jax.tree.leaves(each) for each in self.parameters]
        columns = enumerate(zip(*leaves, strict=True))
        return {f"parameters.{number}": np.stack(column) for number, column in columns}

    def restore(self, model: Ensemble, table: dict[str, np.ndarray]) -> None:
        """Takes the rounds of an interrupted run of the same call as its own.

        Raises:
          ValueError: an array has another shape than :meth:`table` gives it.
        """
        self._check_table(table)
        number = len(table["train_loss"])
        self.before, self.restored, self.kept = model, number, number
        self._train_loss.write(0, table["train_loss"])
        self._set_losses.write(0, table["set_losses"])
        self._improvement.write(0, table["improvement"])
        shape = (number, len(self.measured), len(self.metric_names))
        self._metrics.write(0, table["metrics"].reshape(shape))
        structure = jax.tree.structure(self.parameters[0])
        columns = [table[name] for name in self._stack_parameters()]
        self.parameters = [
            jax.tree.unflatten(structure, [column[i] for column in columns])
            for i in range(number + 1)
        ]
        self.num_rounds = number

    def _check_table(self, table):
        number, sets = len(table["train_loss"]), len(self.set_names)
        shapes: dict[str, tuple[int, ...]] = {
            name: (number + 1, *column.shape[1:])
            for name, column in self._stack_parameters().items()
        }
        shapes |= dict(train_loss=(number,), set_losses=(number, sets))
        shapes["improvement"] = (number,) if self.bagged else (0,)
        shapes["metrics"] = (0,)
        if number and self.metric_names:
            shapes["metrics"] = (number, len(self.measured), len(self.metric_names))
        kinds = {name: array.dtype for name, array in self.table().items()}
        for name, array in table.items():
            found, expected = (array.dtype, array.shape), (kinds[name], shapes[name])
            if found != expected:
                raise ValueError(f"history.{name} must be {expected}, got {found}")

    def history(self, num_rounds: int, kept: int | None = None) -> History:
        """Returns the history of the first ``num_rounds`` rounds.

        Args:
          kept: how many rounds the model holds; None: all of them.
        """

        def take(array):
            return array.first(num_rounds).copy()  # the user's own

        table, metrics = take(self._set_losses), take(self._metrics)
        by_name = {name: table[:, i].copy() for i, name in enumerate(self.set_names)}
        measured = self.measured if self.metric_names and num_rounds else ()
        return History(
            train_loss=take(self._train_loss),
            validation_loss=by_name if self.named else by_name.get(UNNAMED),
            metrics={
                name: {
                    metric: metrics[:, i, j].copy()
                    for j, metric in enumerate(self.metric_names)
                }
                for i, name in enumerate(measured)
            },
            best_round=self.best_round(num_rounds),
            choices=self.choices,
            oob_improvement=take(self._improvement) if self.bagged else None,
            parameters=self.parameters[num_rounds if kept is None else kept],
            by=self.by,
        )
