# SPDX-License-Identifier: Apache-2.0
"""Prediction as a program that runs without jboost.

In: an Ensemble. Out: a file of StableHLO, with the model in it, that needs jax alone.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jboost.entry import checks
from jboost.entry.decorators import on_host
from jboost.model.containers import replace_file
from jboost.model.ensemble import Ensemble, check_model
from jboost.model.predicting import predict
from jboost.tables.frames import read_frame

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@on_host("call it on concrete arrays")
def to_matrix(model: Ensemble, x: Any) -> Float[np.ndarray, "N F"]:
    """A table as the matrix that a program of :func:`export_predict` takes.

    Categories become the places 0, 1, 2, ... that training gave them, NaN where it saw
    no such value; ``model.categories.values`` lists them in this order for each of
    ``model.categories.features``. Columns of numbers stay as they are.

    Law: ``predict(model, to_matrix(model, x))`` equals ``predict(model, x)``.

    Args:
      model: from :func:`jboost.fit` or a reader.
      x: as for :func:`jboost.predict`, but dense.

    Raises:
      TypeError, ValueError: ``x`` does not have the model's columns.

    Example:
      >>> import numpy as np, jboost as jb
      >>> table = np.array([(1, "low"), (2, "top")], [("a", float), ("b", "U3")])
      >>> model, _ = jb.fit(table, np.array([0.0, 1.0]), num_rounds=1)
      >>> jb.interchange.to_matrix(model, table).tolist()
      [[1.0, 0.0], [2.0, 1.0]]
    """
    check_model(model)
    known = model.categories is not None
    frame = read_frame(x, "x", schema=model.schema, categorical=known)
    matrix = np.asarray(frame.matrix)
    if matrix.shape[1] != model.num_features:
        raise ValueError(
            f"x must have {model.num_features} columns, as in training, got "
            f"{matrix.shape[1]}"
        )
    return matrix


@on_host("call it on concrete arrays")
def export_predict(
    model: Ensemble,
    path: str | os.PathLike[str],
    *,
    inverse_link: Callable[..., Any] | None = None,
    offset: bool = False,
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> None:
    """Writes :func:`jboost.predict` of a model as a program in StableHLO.

    It is read and run wherever jax and flatbuffers are, without jboost::

        import jax
        with open("model.stablehlo", "rb") as file:
            program = jax.export.deserialize(bytearray(file.read()))
        scores = program.call(x)  # x [N, F], float32, for any N >= 1

    The program is plain XLA, for which the kernels of jboost need not be there; scores
    are those of ``jb.predict`` to the bit where the platform is the same. Categorical
    columns hold the integers that :func:`to_matrix` gives. jax keeps reading such files
    for at least half a year of its releases (see its documentation of compatibility),
    so keep the model itself, too (``jb.save``).

    Args:
      model: from :func:`jboost.fit` or a reader.
      path: where to; it is replaced at once, when all is written.
      inverse_link: as for :func:`jboost.predict`; baked in.
      offset: whether the program takes a second argument, [N] or [N, K], which is added
        to the scores.
      platforms: what the program is lowered for: "cpu", "cuda", "rocm", "tpu".

    Raises:
      ImportError: flatbuffers is not installed.
      OSError: the file cannot be written.
      TypeError, ValueError: for bad arguments.

    Example:
      >>> import jax, numpy as np, jboost as jb
      >>> x = np.arange(40, dtype=np.float32)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=5)
      >>> jb.interchange.export_predict(model, "model.stablehlo")  # doctest: +SKIP
    """
    check_model(model)
    checks.check_link(inverse_link, model.init_score.shape)
    if not isinstance(offset, bool):
        raise TypeError(f"offset must be True or False here, got {offset!r}")
    if isinstance(platforms, str) or not platforms:
        raise TypeError(f"platforms must be a sequence of names, got {platforms!r}")
    for platform in platforms:
        checks.check_word("platforms", platform, PLATFORMS)

    def score(x: Float[Array, "N F"], *offsets: Float[Array, "N *K"]):
        base = offsets[0] if offsets else None
        return predict(
            model, x, offset=base, inverse_link=inverse_link, implementation="xla"
        )

    most = (2**31 - 1) // model.num_features
    (size,) = jax.export.symbolic_shape("n", constraints=("n >= 1", f"n <= {most}"))
    shapes: list[Any] = [(size, model.num_features)]
    if offset:
        shapes.append((size, *model.init_score.shape))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = jax.export.export(jax.jit(score), platforms=tuple(platforms))(*arguments)
    try:
        content = program.serialize()
    except ImportError:
        raise ImportError(
            "export_predict needs flatbuffers, with which jax writes and reads such "
            "files: pip install 'jboost[export]', or pip install flatbuffers"
        ) from None
    replace_file(Path(path), [bytes(content)])
