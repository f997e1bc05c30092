// SPDX-License-Identifier: Apache-2.0
// Grows one least-squares tree on all distinct values; jboost.cart.least_squares is the
// definition. Both add the same numbers in the same order.
#ifndef JBOOST_CART_H_
#define JBOOST_CART_H_

#include <cstdint>

namespace jboost {

struct CartTable {
  const float* matrix;    // [N, F]
  const double* targets;  // [K, N]
  const double* weights;  // [N], or null if all weights are equal
  int64_t num_rows, num_features, num_targets;
};

// Limits on splits; see jboost.cart.fit_tree.
struct CartRules {
  int64_t max_depth, min_child_samples, min_split_samples;
  double min_child_weight, min_gain;
};

// Memory for a tree of up to `capacity` nodes, breadth first; see
// jboost.cart.RegressionTree.
struct CartNodes {
  int32_t* left;
  int32_t* feature;
  float* threshold;
  bool* missing_left;
  double* value;  // [K, capacity]
  double* gain;
  double* squared_error;
  double* weight;
  int32_t* num_rows;
  int64_t capacity;
};

// Returns the number of nodes. Starts threads of its own for large tables, because the
// caller is not on XLA's threads.
int64_t GrowCart(const CartTable& table, const CartRules& rules, const CartNodes& nodes,
                 int64_t num_threads);

}  // namespace jboost

#endif  // JBOOST_CART_H_
