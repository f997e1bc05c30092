# SPDX-License-Identifier: Apache-2.0
"""Builds the library that stands in for CUDA's driver and compiler, and selects it.

It holds the kernels of jboost/kernels/cuda, compiled for the host.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SOURCES = HERE.parent / "jboost" / "kernels" / "cuda"
COMPILER = os.environ.get("CXX", "c++")
OPTIONS = [
    *("-std=c++20", "-O1", "-pthread", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
]


def build(source, file, *flags):
    """Compiles a source in the folder native."""
    folders = [f"-I{HERE / 'native'}", f"-I{SOURCES}"]
    source = str(HERE / "native" / source)
    command = [COMPILER, *OPTIONS, *flags, *folders, source, "-o", str(file)]
    subprocess.run(command, check=True)


def build_driver(folder):
    """Builds the library in a folder, and returns its path."""
    library = Path(folder) / "libdriver.so"
    # Fortified jumps may not leave their stack.
    turns = ["-DJBOOST_TURNS", "-U_FORTIFY_SOURCE"] if sys.platform == "linux" else []
    build("driver.cc", library, "-shared", "-fPIC", *turns)
    return library


def select_driver(library):
    """Makes this process use the library; before jboost looks for a driver."""
    from jboost.kernels.library import find_obstacle

    os.environ["JBOOST_LIBCUDA"] = os.environ["JBOOST_LIBNVRTC"] = str(library)
    assert find_obstacle() is None


def make_table():
    """Returns a table with missing values and a column of categories, and targets."""
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 3)).astype(np.float32)
    x[random.random(x.shape) < 0.1] = np.nan
    x[:, -1] = random.integers(0, 9, len(x))
    y = np.nan_to_num(x[:, 0]) + x[:, -1] % 3
    return x, y.astype(np.float32)
