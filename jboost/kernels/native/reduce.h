// SPDX-License-Identifier: Apache-2.0
// Sums of float32 rows in a fixed order; see jboost.floats.sum_rows.
#ifndef JBOOST_REDUCE_H_
#define JBOOST_REDUCE_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

struct ReduceLoops {
  // The sum of at most 1,024 numbers.
  float (*sum_block)(const float* values, int64_t count);
};

JBOOST_DECLARE_LOOPS(ReduceLoops)

// sums[k] = the sum of values[k * count ...], for k < num_sums.
void SumRows(const Pool& pool, const float* values, int64_t num_sums, int64_t count,
             float* sums);

}  // namespace jboost

#endif  // JBOOST_REDUCE_H_
