// SPDX-License-Identifier: Apache-2.0
// Sums of float32 numbers whose bits do not depend on the order of the terms; see
// jboost.numerics.sums.sum_rows.
#ifndef JBOOST_REDUCE_H_
#define JBOOST_REDUCE_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

struct ReduceLoops {
  // The bits of the greatest magnitude; see MagnitudeBits.
  uint32_t (*greatest_bits)(const float* values, int64_t count);
  // Adds the sum of the values, which must be finite, to high * 2^19 + low, in units.
  void (*sum)(const float* values, int64_t count, float up, int64_t* high,
              int64_t* low);
};

JBOOST_DECLARE_LOOPS(ReduceLoops)

// sums[k] = the sum of values[k * count ...], for k < num_sums.
void SumRows(const Pool& pool, const float* values, int64_t num_sums, int64_t count,
             float* sums);

}  // namespace jboost

#endif  // JBOOST_REDUCE_H_
