# SPDX-License-Identifier: Apache-2.0
"""Derives gradients, curvatures and minimizers from a loss."""
