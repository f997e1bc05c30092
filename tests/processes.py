# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several processes that JAX connects, for tests.

In: a function of a module that processes can import, arguments. Out: what it returned
in each process, in order of rank.
"""

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_THREADS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def find_port() -> int:
    """Returns a port of this machine that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def run_processes(
    function: Callable[..., Any], count: int, *arguments: Any, timeout: float = 300
) -> list[Any]:
    """Calls ``function(rank, *arguments)`` in ``count`` processes of one job.

    ``jax.distributed`` connects them over 127.0.0.1, one CPU device each; one process
    alone is not connected. All are killed after ``timeout`` seconds, or when one fails.

    Args:
      function: of a module in this folder, not of ``__main__``.
      arguments: what pickle can write.

    Raises:
      RuntimeError: a process failed or was killed; holds the end of its stderr.
    """
    module, port = function.__module__, find_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(
            pickle.dumps((module, function.__name__, arguments))
        )
        command = [sys.executable, str(Path(__file__)), folder, str(count), str(port)]
        processes = []
        for rank in range(count):
            with Path(folder, f"errors.{rank}").open("wb") as errors:
                environment = {
                    **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": choose_flags()
                }  # fmt: skip
                processes.append(
                    subprocess.Popen(
                        [*command, str(rank)], cwd=HERE, env=environment, stderr=errors
                    )
                )
        _wait(processes, timeout)
        codes = [process.returncode for process in processes]
        if any(codes):
            ends = [
                Path(folder, f"errors.{rank}").read_text()[-3000:]
                for rank in range(count)
            ]
            said = "\n".join(
                f"process {rank} ended with {code}:\n{end}"
                for rank, (code, end) in enumerate(zip(codes, ends, strict=True))
            )
            raise RuntimeError(f"{module}.{function.__name__}, {count} times: {said}")
        return [
            pickle.loads(Path(folder, f"result.{rank}").read_bytes())
            for rank in range(count)
        ]


def choose_flags() -> str:
    """Returns the flags of the tests, which may change bits, for one device."""
    given = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in given if "device_count" not in flag]
    return " ".join([*kept, _THREADS])


def _wait(processes, timeout):
    """Waits until all have ended or one has failed; then kills those left."""
    end = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > end or any(process.poll() for process in processes):
                time.sleep(1)  # those that lost another one may say so
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(folder: str, count: int, port: int, rank: int) -> None:
    """Runs in each process."""
    import jax

    if count > 1:
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            address, count, rank, heartbeat_timeout_seconds=10,
            coordinator_bind_address=address if rank == 0 else None,
        )  # fmt: skip
    module, name, arguments = pickle.loads(Path(folder, "call").read_bytes())
    try:
        result = getattr(importlib.import_module(module), name)(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # JAX would wait for the others
    Path(folder, f"result.{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
