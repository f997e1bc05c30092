# SPDX-License-Identifier: Apache-2.0
"""Models: prediction, storage. Imports nothing of training."""
