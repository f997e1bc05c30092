# SPDX-License-Identifier: Apache-2.0
"""New values for the leaves of a model whose structure stays."""
