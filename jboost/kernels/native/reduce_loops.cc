// SPDX-License-Identifier: Apache-2.0
#include "exact_sum.h"
#include "reduce.h"

namespace jboost::JBOOST_ISA {
namespace {

struct Plain {
  const float* values;
  float operator()(int64_t i) const { return values[i]; }
};

struct Masked {
  const float* values;
  const float* weights;
  float operator()(int64_t i) const { return KeepPositive(weights[i], values[i]); }
};

uint32_t FindGreatestBits(const float* values, const float* weights, int64_t count) {
  if (weights == nullptr) return GreatestBits(Plain{values}, count);
  if (AreMasks(weights, 0, count)) return GreatestBits(Masked{values, weights}, count);
  return GreatestBits(WeightedTerms{values, weights}, count);
}

ExactSum SumAny(const float* values, const float* weights, int64_t count, float up) {
  if (weights == nullptr) return SumTerms(Plain{values}, count, up);
  if (AreMasks(weights, 0, count)) return SumTerms(Masked{values, weights}, count, up);
  WeightedTerms terms{values, weights};
  return SumTimes(terms, [&](int64_t i) { return terms.Times(i); }, count, up);
}

void Sum(const float* values, const float* weights, int64_t count, float up,
         int64_t* high, int64_t* low) {
  ExactSum sum = SumAny(values, weights, count, up);
  *high += sum.high;
  *low += sum.low;
}

}  // namespace

extern const ReduceLoops kReduceLoops;
const ReduceLoops kReduceLoops = {FindGreatestBits, Sum};

}  // namespace jboost::JBOOST_ISA
