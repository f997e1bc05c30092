# SPDX-License-Identifier: Apache-2.0
"""save and load: models in files.

In: an Ensemble, a RegressionTree or Bins. Out: a file, and the same again, bit for bit.
``containers`` describes the format, ``layouts`` the fields and arrays of each type.
"""

import math
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np

from jboost.codes.bins import Bins
from jboost.entry.decorators import on_host
from jboost.entry.representation import show
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
    """Writes a model to a file, from which :func:`load` restores it bit for bit.

    The file holds arrays and a JSON header, no code; docs/file-format.md explains how
    to read it without jboost. Writing is atomic: a temporary file in the same folder
    is renamed, so that the path always holds the complete old or new file.

    Args:
      model: an Ensemble, a RegressionTree from :func:`jboost.cart.fit_tree`, or Bins.
      path: a path, or a binary file that is open for writing.

    Raises:
      TypeError: the model is of another type, or traced.
      ValueError: its arrays are inconsistent.
      OSError: the file cannot be written; an existing file is not changed.

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
    """Reads a file written by :func:`save`, or the model of a checkpoint of ``fit``.

    Files are not trusted: nothing in them is executed, and checksums, lengths and the
    structure of the trees are checked before a model is built from them.

    Args:
      path: a path, or a binary file that is open for reading.

    Returns:
      The saved Ensemble, RegressionTree or Bins.

    Raises:
      FileError: the file is damaged, of another format, or of a later version.
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
            f"{name}, written by {container.written_by}, has invalid contents: {error}"
        ) from None


def pack(model: Any, prefix: str = "") -> Container:
    """Converts a model to a container; ``prefix`` is put before all names."""
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
      ValueError: the model is not valid.
    """
    _check_contents(KINDS[type(model).__name__], model)


def _check_contents(kind, model):
    """Checks a model; returns its plain fields, as for JSON, and its arrays."""
    static, arrays = {}, {}
    _flatten(model, "", static, arrays)
    written = {name: _to_json(value) for name, value in static.items()}
    read = {name: _from_json(value) for name, value in written.items()}
    check_container(kind, read, arrays)
    return written, arrays


def unpack(container: Container) -> Any:
    """Returns the model in a container; in a checkpoint, names begin with "model.".

    Raises:
      ValueError: the model is not valid.
    """
    kept = container.type == "Checkpoint"
    start, name = ("model.", "Ensemble") if kept else ("", container.type)
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(
            f"its type must be one of {(*KINDS, 'Checkpoint')}, got "
            f"{show(container.type)}"
        )
    given, arrays = _strip(container.fields, start), _strip(container.arrays, start)
    static = {key: _from_json(value) for key, value in given.items()}
    check_container(kind, static, arrays)
    return _build(kind, static, arrays)


def _strip(table, prefix):
    size = len(prefix)
    return {name[size:]: v for name, v in table.items() if name.startswith(prefix)}


def _flatten(value, prefix, static, arrays):
    """Collects fields under their names; names of nested fields are joined by dots."""
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
    """Builds the model; arrays of an Ensemble are on the device, others on the host."""
    device = jax.device_put if kind.build is Ensemble else lambda arrays: arrays
    arrays = device(arrays)
    parts: dict[str, Any] = {}
    for group, (build, _) in kind.groups.items():
        inner = {**_strip(arrays, f"{group}."), **_strip(static, f"{group}.")}
        parts[group] = build(**inner) if inner else None
    own = {name: v for name, v in {**arrays, **static}.items() if "." not in name}
    return kind.build(**own, **parts)


def _to_json(value):
    """Converts plain fields for JSON; non-finite floats are stored by name."""
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
            raise ValueError(f"a field must not hold {show(value)}")
        return float(value["float"])
    return value
