# SPDX-License-Identifier: Apache-2.0
"""Single regression and classification trees (CART), and their pruning."""
