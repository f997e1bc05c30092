// SPDX-License-Identifier: Apache-2.0
#include "exact_sum.h"
#include "reduce.h"

namespace jboost::JBOOST_ISA {
namespace {

struct Plain {
  const float* values;
  float operator()(int64_t i) const { return values[i]; }
};

// Terms of one block, which stays in the cache while it is read twice.
uint32_t GreatestOfBlock(const float* values, const float* weights, int64_t count) {
  if (CountOnce(weights, count)) return GreatestBits(OnceTerms{values, weights}, count);
  return GreatestBits(WeightedTerms{values, weights}, count);
}

ExactSum SumBlock(const float* values, const float* weights, int64_t count, float up) {
  if (CountOnce(weights, count)) return SumTerms(OnceTerms{values, weights}, count, up);
  WeightedTerms terms{values, weights};
  return SumTimes(terms, [&](int64_t i) { return terms.Times(i); }, count, up);
}

uint32_t FindGreatestBits(const float* values, const float* weights, int64_t count) {
  if (weights == nullptr) return GreatestBits(Plain{values}, count);
  uint32_t greatest = 0;
  for (int64_t begin = 0; begin < count; begin += kShortBlock) {
    int64_t size = count - begin < kShortBlock ? count - begin : kShortBlock;
    uint32_t bits = GreatestOfBlock(values + begin, weights + begin, size);
    greatest = bits > greatest ? bits : greatest;
  }
  return greatest;
}

ExactSum SumAny(const float* values, const float* weights, int64_t count, float up) {
  if (weights == nullptr) return SumTerms(Plain{values}, count, up);
  ExactSum sum;
  for (int64_t begin = 0; begin < count; begin += kShortBlock) {
    int64_t size = count - begin < kShortBlock ? count - begin : kShortBlock;
    sum.Add(SumBlock(values + begin, weights + begin, size, up));
  }
  return sum;
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
