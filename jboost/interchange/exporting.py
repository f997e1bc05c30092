# SPDX-License-Identifier: Apache-2.0
"""Exports prediction to a StableHLO file with the model; running it needs only jax."""

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
from jboost.entry.messages import show
from jboost.model.containers import replace_file
from jboost.model.ensemble import Ensemble, check_model
from jboost.model.predicting import predict
from jboost.model.preparing import check_columns
from jboost.model.wide_thresholds import warn_of_float32
from jboost.tables.frames import read_frame

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@on_host("call it on concrete arrays")
def to_matrix(model: Ensemble, x: Any) -> Float[np.ndarray, "N F"]:
    """Converts a table into the matrix that an exported program takes.

    Categories become the integers 0, 1, 2, ... that training assigned to them, and NaN
    if training did not see the value. ``model.categories.values`` lists the categories
    in this order for each of ``model.categories.features``. Numeric columns do not
    change.

    ``predict(model, to_matrix(model, x))`` always equals ``predict(model, x)``. See
    :func:`export_predict` for the program.

    Args:
      model: a model from :func:`jboost.fit` or a reader.
      x: a dense table that :func:`jboost.predict` accepts.

    Returns:
      A float32 matrix [N, F].

    Raises:
      TypeError, ValueError: the columns of ``x`` are not those of the model.

    Example:
      >>> import numpy as np, jboost as jb
      >>> table = np.array([(1, "low"), (2, "top")], [("a", float), ("b", "U3")])
      >>> model, _ = jb.fit(table, np.array([0.0, 1.0]), num_rounds=0)
      >>> jb.interchange.to_matrix(model, table).tolist()
      [[1.0, 0.0], [2.0, 1.0]]
    """
    check_model(model)
    warn_of_float32(model, "an exported program")
    known = model.categories is not None
    frame = read_frame(x, "x", schema=model.schema, categorical=known)
    matrix = np.asarray(frame.matrix)
    check_columns(model, matrix.shape[1])
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
    """Writes the prediction function of a model as a StableHLO program.

    Running the program needs jax and flatbuffers, but not jboost::

        import jax
        with open("model.stablehlo", "rb") as file:
            program = jax.export.deserialize(bytearray(file.read()))
        scores = program.call(x)  # x [N, F], float32, for any N >= 1

    The program is plain XLA and does not use the kernels of jboost. Its scores equal
    those of :func:`jboost.predict` bit for bit on the same platform. Categorical
    columns hold the integers that :func:`to_matrix` returns. jax guarantees that it can
    read such files for only a limited time, at least six months of releases (see the
    compatibility guarantees of ``jax.export``). Therefore also keep the model itself
    (:func:`jboost.save`).

    Args:
      model: a model from :func:`jboost.fit` or a reader.
      path: the file to write. An existing file is replaced atomically, once all data
        is written.
      inverse_link: the function that converts scores, as in :func:`jboost.predict`; it
        becomes part of the program.
      offset: whether the program takes a second argument, [N] or [N, K], which it adds
        to the scores.
      platforms: the platforms to lower the program for: "cpu", "cuda", "rocm", "tpu".

    Raises:
      ImportError: flatbuffers is not installed.
      OSError: the file cannot be written.
      TypeError, ValueError: an argument is invalid.

    Example:
      >>> import jax, numpy as np, jboost as jb
      >>> x = np.arange(40, dtype=np.float32)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=5)
      >>> jb.interchange.export_predict(model, "model.stablehlo")  # doctest: +SKIP
    """
    check_model(model)
    warn_of_float32(model, "an exported program")
    checks.check_link(inverse_link, model.init_score.shape)
    checks.check_flag("offset", offset)
    if isinstance(platforms, str) or not platforms:
        raise TypeError(f"platforms must be a sequence of names, got {show(platforms)}")
    for platform in platforms:
        checks.check_word("platforms", platform, PLATFORMS)

    def score(x: Float[Array, "N F"], *offsets: Float[Array, "N *K"]):
        base = offsets[0] if offsets else None
        return predict(
            model, x, offset=base, inverse_link=inverse_link, implementation="xla"
        )

    # A symbolic N makes one program for any number of rows. Its upper bound keeps the
    # number of elements of x within int32.
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
            "export_predict needs flatbuffers, which jax uses to write and read such "
            "files: pip install 'jboost[export]', or pip install flatbuffers"
        ) from None
    replace_file(Path(path), [bytes(content)])
