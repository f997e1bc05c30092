// SPDX-License-Identifier: Apache-2.0
#include "slopes.h"

namespace jboost::JBOOST_ISA {
namespace {

// Writes 1 and the scaled values of the terms; returns false if one is missing.
inline bool ScaleRow(const Products& products, const int32_t* terms, const float* x,
                     float* scaled) {
  bool complete = true;
  scaled[0] = 1.0f;
  for (int64_t p = 0; p < products.num_terms && terms[p] >= 0; ++p) {
    int32_t f = terms[p];
    scaled[p + 1] = (x[f] - products.middle[f]) * products.inverse[f];
    complete &= scaled[p + 1] == scaled[p + 1];
  }
  return complete;
}

// sums += round(factor * values) * times, on all lanes.
JBOOST_INLINE void AddLine(float factor, const float* values, int32_t times,
                           uint32_t* sums) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    auto whole = static_cast<int32_t>(__builtin_rintf(factor * values[lane]));
    sums[lane] += static_cast<uint32_t>(whole * times);
  }
}

void AddProducts(const ValueRows& rows, const Products& products, int64_t begin,
                 int64_t end, uint32_t* sums) {
  int64_t num_lines = products.num_terms + 2;
  auto last = static_cast<uint32_t>(rows.num_leaves);
  const float *by_gradient = products.scales,
              *by_curvature = products.scales + rows.num_leaves;
  for (int64_t i = begin; i < end; ++i) {
    float weight = products.weights[i];
    auto leaf = static_cast<uint32_t>(rows.leaf[i]);
    if (!(weight > 0) || leaf >= last) continue;
    alignas(32) float scaled[kLanes] = {};
    const int32_t* terms = products.terms + leaf * products.num_terms;
    const float* x = rows.values + i * rows.num_features;
    if (!ScaleRow(products, terms, x, scaled)) continue;
    bool counts = weight <= 255.0f && weight == __builtin_floorf(weight);
    int32_t times = counts ? static_cast<int32_t>(weight) : 1;
    float factor = counts ? 1.0f : weight;
    float curvature = factor * products.curvature[i] * by_curvature[leaf];
    float gradient = factor * products.gradient[i] * by_gradient[leaf];
    uint32_t* own = sums + leaf * num_lines * kLanes;
    for (int64_t j = 0; j <= products.num_terms; ++j) {
      AddLine(curvature * scaled[j], scaled, times, own + j * kLanes);
    }
    AddLine(gradient, scaled, times, own + (num_lines - 1) * kLanes);
  }
}

void AddLines(const ValueRows& rows, const Lines& lines, int64_t begin, int64_t end,
              const float* scores, float* result) {
  auto last = static_cast<uint32_t>(rows.num_leaves);
  for (int64_t i = begin; i < end; ++i) {
    auto leaf = static_cast<uint32_t>(rows.leaf[i]);
    if (leaf >= last) {
      result[i] = scores[i];
      continue;
    }
    const float* x = rows.values + i * rows.num_features;
    float value = lines.value[leaf], sum = value;
    bool complete = true;
    int64_t first = leaf * lines.num_terms;
    for (int64_t at = first; at < first + lines.num_terms; ++at) {
      int32_t f = lines.feature[at];
      float term = f < 0 ? 0.0f : lines.slope[at] * (x[f] - lines.center[at]);
      complete &= f < 0 || x[f] == x[f];
      sum += term;
    }
    result[i] = scores[i] + (complete ? sum : value);
  }
}

}  // namespace

const SlopeLoops kSlopeLoops = {AddProducts, AddLines};

}  // namespace jboost::JBOOST_ISA
