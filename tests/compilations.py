# SPDX-License-Identifier: Apache-2.0
"""What is compiled meanwhile, for tests that say that nothing is."""

import logging
import re

import jax


class Compilations(logging.Handler):
    """Names of the programs that are compiled meanwhile."""

    def emit(self, record):
        self.names += re.findall(r"^Compiling (\S+)", record.getMessage())

    def __enter__(self):
        self.names, self.logger = [], logging.getLogger("jax")
        self.setting = jax.log_compiles(True)
        self.setting.__enter__()
        self.propagate, self.logger.propagate = self.logger.propagate, False
        self.logger.addHandler(self)
        return self

    def __exit__(self, *error):
        self.logger.removeHandler(self)
        self.logger.propagate = self.propagate
        self.setting.__exit__(*error)
