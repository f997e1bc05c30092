// SPDX-License-Identifier: Apache-2.0
// What the values of leaves are made of: sums, ranges and order statistics by group,
// and the update of the scores.
//
// A group outside [0, num_groups) takes no part in anything.
#ifndef JBOOST_LEAVES_H_
#define JBOOST_LEAVES_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

constexpr int64_t kMaxChannels = 4;
constexpr int64_t kLockstep = 4;  // blocks of rows that are summed side by side

// Rows of which each minimizes its own loss at `minimiser`, where its slope jumps by
// `kink` from -left. Both are numbers of all rows if `uniform`.
struct KinkRows {
  const float* minimiser;
  const float* scores;
  const float* weights;
  const float* left;
  const float* kink;
  const int32_t* group;
  int64_t num_rows;
  float scale;  // slopes times weight times scale are rounded to integers
  bool uniform;
};

// Where a row's key lies: below its group's `low`, between, above `high`.
enum Side { kBelow = 0, kInside = 1, kAbove = 2, kSides = 4 };

// Sums by group, one more for rows outside, and between which keys candidates lie
// (NaN: none do).
struct KinkSums {
  const float* low;  // [num_groups + 1]
  const float* high;
  uint64_t* left;  // [num_groups + 1]
  uint64_t* kink;  // [num_groups + 1, kSides]
};

struct Candidate {
  float key;  // minimizer - score
  uint32_t group;
  uint64_t kink;
};

struct LeafLoops {
  // The bits of the greatest magnitude of rows [begin, end) that are in a group.
  uint32_t (*greatest_bits)(const float* channel, const int32_t* group,
                            int64_t num_groups, int64_t begin, int64_t end);
  // Adds rows [begin[b], end[b]), as multiples of 1 / up[c], to the table sums[b] of
  // [num_groups + 1, channels], which holds int64 as uint64.
  void (*sum_blocks)(const float* const* channels, int64_t num_channels,
                     const int32_t* group, int64_t num_groups, const float* up,
                     const int64_t* begin, const int64_t* end, uint64_t* const* sums);
  // low[g] = min, high[g] = max of the values; a NaN makes it -inf and inf.
  void (*find_range)(const float* values, const int32_t* group, int64_t count,
                     int64_t num_groups, float* low, float* high);
  // scores + table[leaf]; rows outside take table[num_leaves].
  void (*add_values)(const float* scores, const float* table, int64_t num_leaves,
                     const int32_t* leaf, int64_t count, float* result);
  // Sums every stride-th row from `begin` to `end` by group and side, and lists those
  // inside; returns how many. `list` has room for all.
  int64_t (*collect)(const KinkRows& rows, int64_t begin, int64_t end, int64_t stride,
                     int64_t num_groups, const KinkSums& sums, Candidate* list);
};

JBOOST_DECLARE_LOOPS(LeafLoops)

// sums[c][g] = sum of channels[c][i] over rows i of group g, the same bits for any
// order of the rows; see jboost.histogram.sum_channels.
void SumByGroup(const Pool& pool, const float* const* channels, int64_t num_channels,
                const int32_t* group, int64_t num_rows, int64_t num_groups,
                float* sums);

// Of empty groups low is inf and high -inf.
void RangeByGroup(const Pool& pool, const float* values, const int32_t* group,
                  int64_t num_rows, int64_t num_groups, float* low, float* high);

// result[k][i] = scores[k][i] + values[k][leaf[k][i]]; result may be scores.
void AddValues(const Pool& pool, const float* scores, const float* values,
               const int32_t* leaf, int64_t num_scores, int64_t num_rows,
               int64_t num_leaves, float* result);

// The middle of the minimizers of each group's sum of losses, 0 for empty groups; see
// jboost.leaves.middle_minimisers.
void MiddleMinimisers(const Pool& pool, const KinkRows& rows, int64_t num_groups,
                      float* values);

}  // namespace jboost

#endif  // JBOOST_LEAVES_H_
