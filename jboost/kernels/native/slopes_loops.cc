// SPDX-License-Identifier: Apache-2.0
#include "slopes.h"

namespace jboost::JBOOST_ISA {
namespace {

typedef float Floats
    __attribute__((vector_size(4 * kProductLanes), may_alias, aligned(4)));
typedef int32_t Ints
    __attribute__((vector_size(4 * kProductLanes), may_alias, aligned(4)));

// sums += factor * values, cut to whole numbers, times `times`.
JBOOST_INLINE void AddLine(float factor, Floats values, int32_t times, uint32_t* sums) {
  Ints whole = __builtin_convertvector(factor * values, Ints);
  if (times != 1) whole *= times;
  *reinterpret_cast<Ints*>(sums) += whole;
}

template <int kTerms>
void AddProductsOf(const ValueRows& rows, const Products& products, int64_t begin,
                   int64_t end, uint32_t* sums) {
  constexpr int64_t kLines = kTerms + 2;
  auto last = static_cast<uint32_t>(rows.num_leaves);
  const float *by_gradient = products.scales,
              *by_curvature = products.scales + rows.num_leaves;
  for (int64_t i = begin; i < end; ++i) {
    float weight = products.weights[i];
    auto leaf = static_cast<uint32_t>(rows.leaf[i]);
    if (!(weight > 0) || leaf >= last) continue;
    const ScaledTerm* terms = products.terms + leaf * kTerms;
    const float* x = rows.values + i * rows.num_features;
    Floats values = {1.0f};
    bool complete = true;
    for (int p = 0; p < kTerms; ++p) {
      float value = (x[terms[p].feature] - terms[p].middle) * terms[p].inverse;
      value = terms[p].used ? value : 0.0f;
      complete &= value == value;
      values[p + 1] = value;
    }
    if (!complete) continue;
    bool counts = weight <= 255.0f && weight == __builtin_floorf(weight);
    int32_t times = counts ? static_cast<int32_t>(weight) : 1;
    float factor = counts ? 1.0f : weight;
    float curvature = factor * products.curvature[i] * by_curvature[leaf];
    float gradient = factor * products.gradient[i] * by_gradient[leaf];
    uint32_t* own = sums + leaf * kLines * kProductLanes;
    for (int j = 0; j <= kTerms; ++j, own += kProductLanes) {
      AddLine(curvature * values[j], values, times, own);
    }
    AddLine(gradient, values, times, own);
  }
}

void AddProducts(const ValueRows& rows, const Products& products, int64_t begin,
                 int64_t end, uint32_t* sums) {
  static constexpr decltype(&AddProductsOf<1>) kByTerms[kMaxTerms] = {
      AddProductsOf<1>, AddProductsOf<2>, AddProductsOf<3>,
      AddProductsOf<4>, AddProductsOf<5>, AddProductsOf<6>};
  kByTerms[products.num_terms - 1](rows, products, begin, end, sums);
}

template <int kTerms>
void AddLinesOf(const ValueRows& rows, const Lines& lines, int64_t begin, int64_t end,
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
    const LineTerm* terms = lines.terms + leaf * kTerms;
    for (int p = 0; p < kTerms; ++p) {
      float own = x[terms[p].feature];
      float term = terms[p].slope * (own - terms[p].center);
      complete &= (own == own) | !terms[p].used;
      sum += terms[p].used ? term : 0.0f;
    }
    result[i] = scores[i] + (complete ? sum : value + 0.0f);
  }
}

void AddLines(const ValueRows& rows, const Lines& lines, int64_t begin, int64_t end,
              const float* scores, float* result) {
  static constexpr decltype(&AddLinesOf<1>) kByTerms[kMaxTerms] = {
      AddLinesOf<1>, AddLinesOf<2>, AddLinesOf<3>,
      AddLinesOf<4>, AddLinesOf<5>, AddLinesOf<6>};
  kByTerms[lines.num_terms - 1](rows, lines, begin, end, scores, result);
}

}  // namespace

const SlopeLoops kSlopeLoops = {AddProducts, AddLines};

}  // namespace jboost::JBOOST_ISA
