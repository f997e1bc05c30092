// SPDX-License-Identifier: Apache-2.0
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace jboost {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

// The number of terms of the leaf that has most; unused ones in between count.
int64_t CountTerms(const Ensemble& model, int64_t tree) {
  int64_t most = 0;
  for (int64_t leaf = 0; leaf < model.num_leaves(); ++leaf) {
    Terms terms(model, tree, leaf);
    for (int64_t p = most; p < model.num_terms; ++p) {
      if (terms.feature[p] >= 0) most = p + 1;
    }
  }
  return most;
}

}  // namespace

bool LinearLeaves::Fit(const Ensemble& model, int64_t num_features) {
  if (num_features > std::numeric_limits<uint16_t>::max()) return false;
  bool fit = true;
  for (int64_t tree = 0; tree < model.num_rounds * model.num_scores; ++tree) {
    for (int64_t leaf = 0; leaf < model.num_leaves(); ++leaf) {
      Terms terms(model, tree, leaf);
      for (int64_t p = 0; p < model.num_terms; ++p) {
        if (terms.feature[p] < 0) continue;
        const float* range = model.ranges + 2 * terms.feature[p];
        float most = std::max(std::fabs(range[0]), std::fabs(range[1]));
        most = std::fabs(terms.slope[p]) * (most + std::fabs(terms.center[p]));
        fit &= most <= kLargest;
      }
    }
  }
  return fit;
}

LinearLeaves::LinearLeaves(const Pool& pool, const Ensemble& model,
                           int64_t num_features)
    : num_terms_(model.num_rounds * model.num_scores),
      trees_(num_terms_.size()),
      terms_((model.num_terms / kLanes + 1) * 2 * kLanes * trees_.size() *
             model.num_leaves()),
      columns_((model.num_terms / kLanes + 1) * kLanes * trees_.size() *
               model.num_leaves()) {
  auto zero = static_cast<uint16_t>(num_features);
  int64_t most = (model.num_terms / kLanes + 1) * kLanes * model.num_leaves();
  auto size = static_cast<int64_t>(trees_.size());
  ParallelFor(Threads(pool, size * most), size, [&](int64_t tree) {
    num_terms_[tree] = CountTerms(model, tree);
    int64_t groups = num_terms_[tree] / kLanes + 1;
    float* numbers = terms_.get() + tree * 2 * most;
    uint16_t* columns = columns_.get() + tree * most;
    trees_[tree] = {numbers, columns, groups, 2 * most};
    std::fill(columns, columns + model.num_leaves() * groups * kLanes, zero);
    std::fill(numbers, numbers + 2 * model.num_leaves() * groups * kLanes, 0.0f);
    for (int64_t leaf = 0; leaf < model.num_leaves(); ++leaf) {
      Terms terms(model, tree, leaf);
      numbers[0] = -model.leaf_value[tree * model.num_leaves() + leaf];
      numbers[kLanes] = 1.0f;
      for (int64_t p = 0; p < num_terms_[tree]; ++p) {
        if (terms.feature[p] < 0) continue;
        int64_t lane = (p + 1) % kLanes, group = (p + 1) / kLanes * 2 * kLanes;
        columns[p + 1] = static_cast<uint16_t>(terms.feature[p]);
        numbers[group + lane] = terms.center[p];
        numbers[group + kLanes + lane] = terms.slope[p];
      }
      columns += groups * kLanes;
      numbers += groups * 2 * kLanes;
    }
  });
}

void ClipRows(const float* ranges, int64_t num_features, int64_t rows, int64_t stride,
              float* x) {
  for (int64_t i = 0; i < rows; ++i, x += stride) {
    for (int64_t f = 0; f < num_features; ++f) {
      float value = x[f], low = ranges[2 * f], high = ranges[2 * f + 1];
      value = value < low ? low : value;
      x[f] = value > high ? high : value;
    }
    std::fill(x + num_features, x + stride, 0.0f);
  }
}

float EvaluateLeaf(const Ensemble& model, int64_t tree, int32_t leaf, const float* x) {
  float value = model.leaf_value[tree * model.num_leaves() + leaf], sum = value;
  Terms terms(model, tree, leaf);
  for (int64_t p = 0; p < model.num_terms; ++p) {
    if (terms.feature[p] < 0) continue;
    float own = x[terms.feature[p]];
    if (std::isnan(own)) return value;
    sum += std::clamp(terms.slope[p] * (own - terms.center[p]), -kLargest, kLargest);
  }
  return sum;
}

}  // namespace jboost
