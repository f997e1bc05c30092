# SPDX-License-Identifier: Apache-2.0
"""How public functions are entered: decorators, argument checks, compiled programs."""
