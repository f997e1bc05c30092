# SPDX-License-Identifier: Apache-2.0
"""Runs fuzzers: cases by target and number, and what is a fault.

A case is drawn from its target and number alone. It ends well with a result, or with
an error of jboost that says what is wrong; in little time and memory. All else is a
fault: another exception, a wrong result, a hang, or the end of the process.
"""

import time
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_arguments import FUNCTIONS, check_call, draw_call
from fuzz_estimators import ESTIMATORS, draw_estimator, read_estimator
from fuzz_files import FILES, OWN_ERRORS, check_model

MOST_SECONDS, MOST_BYTES = 10, 400 * 2**20
CALL_SECONDS = 45  # a call may compile programs
TARGETS = (*FILES, *ESTIMATORS, *FUNCTIONS)


class Fault(AssertionError):
    """A case that ends otherwise than it may."""


def draw_case(target: str, number: int) -> Any:
    """Returns a case: the bytes of a file, an estimator, or a call."""
    random = make_random(target, number)
    if target in FILES:
        return FILES[target].draw(random)
    if target in ESTIMATORS:
        return draw_estimator(target, random)
    return draw_call(target, random)


def describe_case(target: str, number: int) -> str:
    """Returns in words what is odd about a case."""
    case = draw_case(target, number)
    return f"{len(case)} bytes" if isinstance(case, bytes) else str(case)


def run_case(target: str, number: int, folder: Path, thorough: float = 0.0) -> bool:
    """Runs a case.

    Args:
      folder: for the files of the case.
      thorough: the share of models that XLA and explanations evaluate, too.

    Returns:
      Whether it was accepted; it may be refused instead.

    Raises:
      Fault: it ended otherwise.
    """
    case = draw_case(target, number)
    if target in FILES:
        return run_file(target, case, folder, thorough, number)
    began = time.process_time()
    try:
        if target in FUNCTIONS:
            accepted = check_call(case)
        else:
            random = make_random(target, number, "model")
            accepted = read_estimator(case, random, thorough)
    except Exception as error:
        raise _find_fault(error) from error
    _check_limits(began, 0, most_seconds=CALL_SECONDS)
    return accepted


def run_file(
    target: str,
    content: bytes,
    folder: Path,
    thorough: float = 0.0,
    number: int = 0,
    most_bytes: int = MOST_BYTES,
) -> bool:
    """Reads a file, and checks the model that it holds; as :func:`run_case`."""
    path = folder / "file"
    path.write_bytes(content)
    began = time.process_time()
    tracemalloc.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = FILES[target].read(path)
        except OWN_ERRORS as error:
            if not str(error):
                raise Fault("an error without a message") from error
            return False
        except Exception as error:
            raise _find_fault(error) from error
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            _check_limits(began, peak, most_bytes)
        try:
            check_model(model, make_random(target, number, "model"), thorough)
        except Exception as error:
            raise _find_fault(error) from error
    return True


def _find_fault(error):
    return Fault(f"{type(error).__name__}: {error}"[:2000])


def _check_limits(began, peak, most_bytes=MOST_BYTES, most_seconds=MOST_SECONDS):
    seconds = time.process_time() - began
    if peak > most_bytes or seconds > most_seconds:
        raise Fault(f"took {peak / 1e6:.0f} MB and {seconds:.1f} s")


def make_random(target: str, number: int, *more: str) -> np.random.Generator:
    """Returns the random numbers of a case."""
    names = [zlib.crc32(name.encode()) for name in (target, *more)]
    return np.random.default_rng([*names, number])
