// SPDX-License-Identifier: Apache-2.0
// Sums of float32 in the order of jboost.floats.sum_rows: 32 numbers at a time by
// halves, then 32 of those sums, and so on. Internal linkage, as loops include it, too.
#ifndef JBOOST_TREE_SUM_H_
#define JBOOST_TREE_SUM_H_

#include <cstdint>

namespace jboost {
namespace {

constexpr int64_t kFan = 32;
constexpr int64_t kSumBlock = kFan * kFan;  // rows whose sum one call makes

// Halves 32 numbers until one is left.
inline float SumGroup(const float* from) {
  float sums[16];
  for (int lane = 0; lane < 16; ++lane) sums[lane] = from[lane] + from[lane + 16];
  for (int half = 8; half >= 1; half /= 2) {
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

// Replaces n numbers by the sums of each 32; returns how many those are.
inline int64_t SumGroups(float* values, int64_t n) {
  int64_t whole = n / kFan;
  for (int64_t g = 0; g < whole; ++g) values[g] = SumGroup(values + g * kFan);
  if (whole * kFan == n) return whole;
  float rest[kFan];
  for (int64_t i = 0; i < kFan; ++i) {
    rest[i] = whole * kFan + i < n ? values[whole * kFan + i] : 0.0f;
  }
  values[whole] = SumGroup(rest);
  return whole + 1;
}

// The sum of n >= 1 numbers, which are overwritten.
inline float TreeSum(float* values, int64_t n) {
  do {
    n = SumGroups(values, n);
  } while (n > 1);
  return values[0];
}

}  // namespace
}  // namespace jboost

#endif  // JBOOST_TREE_SUM_H_
