# SPDX-License-Identifier: Apache-2.0
"""A device that is not the CPU, on machines that have no other.

In: nothing. Out: a platform named "elsewhere", which JAX takes for another one than
"cpu": programs are lowered for it without the kernels, and arrays are there or here.
Under that name runs the CPU. With JBOOST_TEST_PLATFORM=elsewhere all tests run there.
"""

import jax

NAME = "elsewhere"


def install(default: bool) -> None:
    """Adds the platform, before JAX looks for devices; likewise as the default one."""
    from jax._src import xla_bridge
    from jax._src.interpreters import mlir
    from jaxlib import xla_client

    clients = []

    def make():
        clients.append(xla_client.make_cpu_client(asynchronous=True))
        return clients[-1]

    def rename(kind, name, find_client):
        known = getattr(kind, name, None)
        if known is None:
            return

        def read(self):
            mine = any(find_client(self) is client for client in clients)
            return NAME if mine else known.__get__(self)

        setattr(kind, name, property(read))

    rename(xla_client.Client, "platform", lambda client: client)
    rename(xla_client.Client, "_raw_platform", lambda client: client)
    rename(xla_client.Device, "platform", lambda device: device.client)
    priority = 1000 if default else -1000
    xla_bridge.register_backend_factory(NAME, make, priority=priority)
    mlir._platforms_with_donation.append(NAME)
    rules = mlir._platform_specific_lowerings
    rules[NAME] = dict(rules["cpu"])  # for eigenvalues, say, which have no others


def find_device() -> jax.Device | None:
    """Returns a device that is not the CPU; None where there is none."""
    try:
        return jax.local_devices(backend=NAME)[0]
    except RuntimeError:  # JAX_PLATFORMS names others
        return None
