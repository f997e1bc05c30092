# SPDX-License-Identifier: Apache-2.0
"""Traceable functions give the same bits with and without jit, from NumPy and JAX."""

from functools import cache, partial

import chex
import jax
from tables import SMALL, make_regression

import jboost as jb

X, Y = make_regression()
BINS = jb.fit_bins(X)
CODES = jb.apply_bins(BINS, X)
KEY = jax.random.key(0)
boost = partial(
    jb.boost, loss=jb.losses.squared_error, key=KEY, subsample=0.7, **SMALL
)  # fmt: skip
all_variants = chex.variants(
    with_jit=True, without_jit=True, with_device=True, without_device=True
)


@cache
def train():
    """Trees on codes with the scores that they give, their ensemble, and one tree."""
    found = boost(CODES, Y)
    model = jb.to_ensemble(found[0], BINS)
    return found, model, jb.cart.fit_tree(X, Y, max_depth=3)


class VariantsTest(chex.TestCase):
    """Each test runs four times: jit or not, arrays of JAX or of NumPy."""

    def assert_agrees(self, function, *arguments):
        found = self.variant(function)(*arguments)
        chex.assert_trees_all_equal(found, function(*arguments), strict=True)

    @all_variants
    def test_apply_bins(self):
        self.assert_agrees(jb.apply_bins, BINS, X)

    @all_variants
    def test_boost(self):
        found = self.variant(boost)(CODES, Y)
        chex.assert_trees_all_equal(found, train()[0], strict=True)
        chex.assert_tree_all_finite(found)

    @all_variants
    def test_to_ensemble(self):
        (trees, _), _, _ = train()
        self.assert_agrees(jb.to_ensemble, trees, BINS)

    @all_variants
    def test_predict(self):
        for model in train()[1:]:
            self.assert_agrees(jb.predict, model, X)

    @all_variants
    def test_leaf_indices(self):
        for model in train()[1:]:
            self.assert_agrees(jb.leaf_indices, model, X)

    @all_variants
    def test_shap_values(self):
        self.assert_agrees(jb.shap_values, train()[1], X)
