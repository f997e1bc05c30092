// SPDX-License-Identifier: Apache-2.0
#include "exact_sum.h"
#include "reduce.h"

namespace jboost::JBOOST_ISA {
namespace {

uint32_t FindGreatestBits(const float* values, int64_t count) {
  return GreatestBits([=](int64_t i) { return values[i]; }, count);
}

void Sum(const float* values, const uint8_t* times, int64_t count, float up,
         int64_t* high, int64_t* low) {
  ExactSum sum = SumTerms([=](int64_t i) { return values[i]; }, times, count, up);
  *high += sum.high;
  *low += sum.low;
}

}  // namespace

extern const ReduceLoops kReduceLoops;
const ReduceLoops kReduceLoops = {FindGreatestBits, Sum};

}  // namespace jboost::JBOOST_ISA
