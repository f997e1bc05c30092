# SPDX-License-Identifier: Apache-2.0
"""Files: models and checkpoints."""
