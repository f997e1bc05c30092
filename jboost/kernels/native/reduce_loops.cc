// SPDX-License-Identifier: Apache-2.0
#include "reduce.h"

#include <cstring>

#include "tree_sum.h"

namespace jboost::JBOOST_ISA {
namespace {

float SumBlock(const float* values, int64_t count) {
  float room[kSumBlock];
  std::memcpy(room, values, count * sizeof(float));
  return TreeSum(room, SumGroups(room, count));
}

}  // namespace

extern const ReduceLoops kReduceLoops;
const ReduceLoops kReduceLoops = {SumBlock};

}  // namespace jboost::JBOOST_ISA
