// SPDX-License-Identifier: Apache-2.0
// Sums, ranges and order statistics by group, from which the values of leaves are
// computed, and the update of the scores; sums of all rows.
//
// Sums have bits that do not depend on the order of the terms; see
// jboost.numerics.exact. Rows whose group is outside [0, num_groups) are ignored.
#ifndef JBOOST_LEAVES_H_
#define JBOOST_LEAVES_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

constexpr int64_t kMaxChannels = 4;
constexpr int64_t kLockstep = 4;  // blocks of rows that are summed in turns

// Rows with losses of two straight pieces. A row's loss has its minimum at `minimiser`,
// where its slope jumps by `kink`, from -left. If `uniform`, both are the same for all
// rows and stored once.
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

// Whether a row's key lies below its group's `low`, between it and `high`, or above.
enum Side { kBelow = 0, kInside = 1, kAbove = 2, kSides = 4 };

// Sums by group, with one more group for ignored rows. Candidates are the rows whose
// keys lie between `low` and `high` (NaN: none).
struct KinkSums {
  const float* low;  // [num_groups + 1]
  const float* high;
  uint64_t* left;  // [num_groups + 1]
  uint64_t* kink;  // [num_groups + 1, kSides]
};

// A digit of keys, as integers of the same order: its lowest bit and its number of
// bits. Rows count whose higher digits are those of their group's prefix.
constexpr int64_t kEnds = 2;  // keys that are searched for side by side
struct KeyDigit {
  const uint32_t* prefix;  // [kEnds, num_groups + 1]
  int32_t shift, bits;
};

struct Candidate {
  float key;  // minimiser - score
  uint32_t group;
  uint64_t kink;
};

// Channels to sum by group. A channel is [N], or one number for all rows if it is
// `constant`. If they are `changes`, there are two: values[1] - values[0], and the sum
// of the magnitudes of these values.
struct Channels {
  const float* values[kMaxChannels];
  bool constant[kMaxChannels];
  int64_t number;
  bool changes;
};

struct GroupedRows {
  Channels channels;
  const float* weights;  // [N], or null; see WeightedTerms
  const int32_t* group;  // [N]
  int64_t num_rows, num_groups;
};

// Arrays of numbers to sum, [num_sums, count], with the weights of the columns.
struct WeightedRows {
  const float* values;
  const float* weights;  // [count], or null; see WeightedTerms
  int64_t num_sums, count;
};

struct LeafLoops {
  // Raises bits[c] to the bits of the greatest magnitude of the rows [begin, end) that
  // are in a group.
  void (*greatest_bits)(const GroupedRows& rows, int64_t begin, int64_t end,
                        uint32_t* bits);
  // Adds rows [begin[b], end[b]), as multiples of 1 / up[c], to the table sums[b],
  // [num_groups + 1, channels]. It holds int64 numbers as uint64, which may overflow.
  void (*sum_blocks)(const GroupedRows& rows, const float* up, const int64_t* begin,
                     const int64_t* end, uint64_t* const* sums);
  // low[g] = min, high[g] = max of the values; -inf and inf if one is NaN.
  void (*find_range)(const float* values, const int32_t* group, int64_t count,
                     int64_t num_groups, float* low, float* high);
  // result = scores + table[leaf]; leaves outside of the table count as num_leaves.
  void (*add_values)(const float* scores, const float* table, int64_t num_leaves,
                     const int32_t* leaf, int64_t count, float* result);
  // Sums every stride-th row from `begin` to `end` by group and side, and lists the
  // candidates; returns their number. `list` has room for all rows.
  int64_t (*collect)(const KinkRows& rows, int64_t begin, int64_t end, int64_t stride,
                     int64_t num_groups, const KinkSums& sums, Candidate* list);
  // Adds the kinks of rows [begin, end) to sums[kEnds][num_groups + 1][2^digit.bits].
  void (*sum_digits)(const KinkRows& rows, int64_t begin, int64_t end,
                     int64_t num_groups, const KeyDigit& digit, uint64_t* sums);
  // The bits of the greatest magnitude of a term; see MagnitudeBits.
  uint32_t (*greatest_term)(const float* values, const float* weights, int64_t count);
  // Adds the sum of the terms, which must be finite, to high * 2^19 + low, in units.
  void (*sum_terms)(const float* values, const float* weights, int64_t count, float up,
                    int64_t* high, int64_t* low);
};

JBOOST_DECLARE_LOOPS(LeafLoops)

// sums[c][g] = the sum of weights[i] values[c][i] over the rows i of group g.
void SumByGroup(const Pool& pool, const GroupedRows& rows, float* sums);

// The two halves of SumByGroup, for rows that are divided among machines.
//
// bits[c] = those of the greatest finite magnitude of rows that are in a group;
// others[c][g] = the sum of the infinities and NaN, 0 without.
void FindGreatestByGroup(const Pool& pool, const GroupedRows& rows, int32_t* bits,
                         float* others);
// digits[c][g] = those of the sum of the finite terms as multiples of 1 / up[c]; see
// ExactSum. Terms must be below 2^38 multiples.
void SumDigitsByGroup(const Pool& pool, const GroupedRows& rows, const float* up,
                      int32_t* digits);

// The same of WeightedRows, as one group: sums[k], bits[k], others[k], digits[k].
void SumRows(const Pool& pool, const WeightedRows& rows, float* sums);
void FindGreatestOfRows(const Pool& pool, const WeightedRows& rows, int32_t* bits,
                        float* others);
void SumDigitsOfRows(const Pool& pool, const WeightedRows& rows, const float* up,
                     int32_t* digits);

// The least and the greatest value of each group; inf and -inf if it is empty.
void RangeByGroup(const Pool& pool, const float* values, const int32_t* group,
                  int64_t num_rows, int64_t num_groups, float* low, float* high);

// result[k][i] = scores[k][i] + values[k][leaf[k][i]]; `result` may be `scores`.
void AddValues(const Pool& pool, const float* scores, const float* values,
               const int32_t* leaf, int64_t num_scores, int64_t num_rows,
               int64_t num_leaves, float* result);

// Writes the middle of the interval where each group's sum of losses is least, or 0 if
// the group is empty; see jboost.trees.leaf_operations.middle_minimizers.
void MiddleMinimisers(const Pool& pool, const KinkRows& rows, int64_t num_groups,
                      float* values);

// What MiddleMinimisers needs of rows that are divided among machines. Numbers are
// pairs, high * 2^20 + low.
//
// pairs[2][2][num_groups + 1] = the sums of `left` and of `kink`.
void SumKinks(const Pool& pool, const KinkRows& rows, int64_t num_groups,
              int32_t* pairs);
// pairs[2][kEnds][num_groups + 1][2^digit.bits] = the sums of `kink` by digit.
void SumKinksByDigit(const Pool& pool, const KinkRows& rows, int64_t num_groups,
                     const KeyDigit& digit, int32_t* pairs);

}  // namespace jboost

#endif  // JBOOST_LEAVES_H_
