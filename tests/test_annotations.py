# SPDX-License-Identifier: Apache-2.0
"""Annotated types hold, as pyright infers them."""

import subprocess
import sys
from pathlib import Path


def test_types_agree():
    """A test of its own, so that other tests run beside pyright."""
    folder = Path(sys.executable).parent
    done = subprocess.run(
        [folder / "pyright", "--pythonpath", sys.executable],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
