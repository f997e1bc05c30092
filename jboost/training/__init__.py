# SPDX-License-Identifier: Apache-2.0
"""fit: the boosting loop with a host around it."""
