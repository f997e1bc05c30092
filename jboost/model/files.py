# SPDX-License-Identifier: Apache-2.0
"""save and load: models in files.

In: an Ensemble, a RegressionTree or Bins. Out: a file, and the same back, equal to the
bit. ``containers`` describes the format, ``layouts`` what it holds for each type.
"""

import math
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np

from jboost.codes.bins import Bins
from jboost.entry.decorators import on_host
from jboost.model.containers import (
    Container,
    FileError,
    read_container,
    write_container,
)
from jboost.model.ensemble import Ensemble, describe_model
from jboost.model.layouts import KINDS, check_container
from jboost.model.regression_tree import RegressionTree

Model = Ensemble | RegressionTree | Bins


@on_host("call it on concrete arrays", runs_jax=False)
def save(model: Model, path: Any) -> None:
    """Writes a model to a file, from which :func:`load` gives back the same bits.

    The file holds arrays and a JSON header, no code; docs/file-format.md says how to
    read it without jboost. It is written beside its place and then put there, so that
    at any moment the path holds the old file or the new one, whole.

    Args:
      model: an Ensemble, a RegressionTree from :func:`jboost.cart.fit_tree`, or Bins.
      path: where to; or a binary file, open for writing.

    Raises:
      TypeError: the model is of another type, or traced.
      ValueError: its arrays do not fit together.
      OSError: the file cannot be written; what was there before stays.

    Example:
      >>> import io, numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> file = io.BytesIO()
      >>> jb.save(model, file)
      >>> _ = file.seek(0)
      >>> same = jb.load(file)
      >>> bool((jb.predict(same, x) == jb.predict(model, x)).all())
      True
    """
    write_container(pack(model), path)


@on_host("load the model first")
def load(path: Any) -> Any:
    """Reads what :func:`save` has written; of a checkpoint of ``fit``, its model.

    Nothing in the file is executed, and nothing in it is believed: checksums, lengths
    and the structure of the trees are tested before anything is made of them.

    Args:
      path: of the file; or a binary file, open for reading.

    Returns:
      An Ensemble, a RegressionTree or Bins, as was saved.

    Raises:
      FileError: the file is damaged, or none of jboost's, or of a later version.
      OSError: it cannot be read.

    Example:
      >>> import numpy as np, tempfile, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jb.save(model, f"{folder}/model.jboost")
      ...     same = jb.load(f"{folder}/model.jboost")
      >>> same
      Ensemble(num_rounds=20, num_scores=1, max_depth=6, num_features=1)
    """
    container = read_container(path)
    name = repr(getattr(path, "name", path) if hasattr(path, "read") else str(path))
    try:
        return unpack(container)
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{name}, written by {container.written_by}, does not hold what it should: "
            f"{error}"
        ) from None


def pack(model: Any, prefix: str = "") -> Container:
    """A model as a container; ``prefix`` goes before the names of arrays and fields."""
    kind = KINDS.get(type(model).__name__)
    if kind is None or type(model) is not kind.build:
        raise TypeError(
            f"model must be one of {tuple(KINDS)}, got {describe_model(model)}"
        )
    written, arrays = _check_contents(kind, model)
    return Container(
        type(model).__name__,
        {prefix + name: value for name, value in written.items()},
        {prefix + name: array for name, array in arrays.items()},
    )


def check_contents(model: Model) -> None:
    """Checks a model as :func:`load` checks a file.

    Raises:
      ValueError: it is not valid.
    """
    _check_contents(KINDS[type(model).__name__], model)


def _check_contents(kind, model):
    """The plain fields as JSON holds them, and the arrays."""
    static, arrays = {}, {}
    _flatten(model, "", static, arrays)
    written = {name: _to_json(value) for name, value in static.items()}
    read = {name: _from_json(value) for name, value in written.items()}
    check_container(kind, read, arrays)
    return written, arrays


def unpack(container: Container) -> Any:
    """The model in a container, that of a checkpoint under "model.".

    Raises:
      ValueError: it is not valid.
    """
    kept = container.type == "Checkpoint"
    start, name = ("model.", "Ensemble") if kept else ("", container.type)
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(
            f"its type must be one of {(*KINDS, 'Checkpoint')}, got {container.type!r}"
        )
    given, arrays = _strip(container.fields, start), _strip(container.arrays, start)
    static = {key: _from_json(value) for key, value in given.items()}
    check_container(kind, static, arrays)
    return _build(kind, static, arrays)


def _strip(table, prefix):
    size = len(prefix)
    return {name[size:]: v for name, v in table.items() if name.startswith(prefix)}


def _flatten(value, prefix, static, arrays):
    """Names of fields, with a point between those of a container and of its parts."""
    if is_dataclass(value):
        entries = [
            (part.name, part.metadata.get("static", False))
            for part in fields(value)
            if not part.metadata.get("derived", False)
        ]
    else:
        entries = [(name, False) for name in value._fields]
    for name, is_static in entries:
        part = getattr(value, name)
        if is_static:
            static[prefix + name] = part
        elif is_dataclass(part) or hasattr(part, "_fields"):
            _flatten(part, f"{prefix}{name}.", static, arrays)
        elif part is not None:
            arrays[prefix + name] = np.asarray(part)


def _build(kind, static, arrays):
    """The container, its groups first; Ensembles on the device, trees on the host."""
    device = jax.device_put if kind.build is Ensemble else lambda arrays: arrays
    arrays = device(arrays)
    parts: dict[str, Any] = {}
    for group, (build, _) in kind.groups.items():
        inner = {**_strip(arrays, f"{group}."), **_strip(static, f"{group}.")}
        parts[group] = build(**inner) if inner else None
    own = {name: v for name, v in {**arrays, **static}.items() if "." not in name}
    return kind.build(**own, **parts)


def _to_json(value):
    """Plain fields as JSON holds them; floats that it has no word for by their name."""
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _from_json(value):
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if isinstance(value, dict):
        if [*value] != ["float"] or value["float"] not in ("inf", "-inf", "nan"):
            raise ValueError(f"a field must not hold {value!r}")
        return float(value["float"])
    return value
