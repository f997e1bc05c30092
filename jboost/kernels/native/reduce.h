// SPDX-License-Identifier: Apache-2.0
// Sums of float32 numbers whose bits do not depend on the order of the terms; see
// jboost.numerics.exact.sum_rows.
#ifndef JBOOST_REDUCE_H_
#define JBOOST_REDUCE_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

struct ReduceLoops {
  // The bits of the greatest magnitude of a term; see MagnitudeBits. `weights` may be
  // null, here and below; see WeightedTerms.
  uint32_t (*greatest_bits)(const float* values, const float* weights, int64_t count);
  // Adds the sum of the terms, which must be finite, to high * 2^19 + low, in units.
  void (*sum)(const float* values, const float* weights, int64_t count, float up,
              int64_t* high, int64_t* low);
};

JBOOST_DECLARE_LOOPS(ReduceLoops)

// sums[k] = the sum of weights[i] values[k * count + i] over i, for k < num_sums.
// `weights` may be null, here and below; see WeightedTerms.
void SumRows(const Pool& pool, const float* values, const float* weights,
             int64_t num_sums, int64_t count, float* sums);

// The two halves of SumRows, for terms that are divided among machines.
//
// bits[k] = those of the greatest finite magnitude; others[k] = the sum of the
// infinities and NaN, 0 without.
void FindGreatestOfRows(const Pool& pool, const float* values, const float* weights,
                        int64_t num_sums, int64_t count, int32_t* bits, float* others);
// digits[k] = those of the sum of the finite terms as multiples of 1 / up[k]; see
// ExactSum. Terms must be below 2^38 multiples.
void SumDigitsOfRows(const Pool& pool, const float* values, const float* weights,
                     int64_t num_sums, int64_t count, const float* up, int32_t* digits);

}  // namespace jboost

#endif  // JBOOST_REDUCE_H_
