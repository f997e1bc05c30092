// SPDX-License-Identifier: Apache-2.0
// Sums of float32 rows whose bits do not depend on the order of the rows; see
// jboost.numerics.sums.sum_rows.
#ifndef JBOOST_REDUCE_H_
#define JBOOST_REDUCE_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

struct ReduceLoops {
  // The bits of the greatest magnitude.
  uint32_t (*greatest_bits)(const float* values, int64_t count);
  // Adds the sum of finite values, in units, to high * 2^19 + low.
  void (*sum)(const float* values, int64_t count, float up, int64_t* high,
              int64_t* low);
};

JBOOST_DECLARE_LOOPS(ReduceLoops)

// sums[k] = the sum of values[k * count ...], for k < num_sums.
void SumRows(const Pool& pool, const float* values, int64_t num_sums, int64_t count,
             float* sums);

}  // namespace jboost

#endif  // JBOOST_REDUCE_H_
