# SPDX-License-Identifier: Apache-2.0
"""New leaf values for a model with fixed splits."""
