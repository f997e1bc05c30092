// SPDX-License-Identifier: Apache-2.0
// Growing one tree on rows sorted by each feature: any value may be a threshold.
//
// It equals jboost.trees.exact_growth bit for bit. An entry is (code << 32) + row. The
// entries of a feature are grouped by node and sorted by code within a node, so that
// missing values (code 0) come first. The groups of all features lie at the same
// positions, because they hold the same rows; see jboost.trees.exact_growth.
//
// One sweep over a node's entries makes running sums at the ends of its values (or of
// its bins of values). They are searched as the cumulative histograms of grow.h are.
#ifndef JBOOST_SORTED_H_
#define JBOOST_SORTED_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"
#include "tree.h"

namespace jboost {

constexpr int64_t kSweepRows = 1024;       // whose sums are searched while in cache
constexpr int32_t kMostCodes = INT32_MAX;  // MOST_CODES of jboost.trees.exact_growth

// Sums at the ends of values: the missing value first, then up to kSweepRows values.
// Two more may follow: code 1 without rows, and the last of all codes.
struct ValueSums {
  static constexpr int64_t kSize = kSweepRows + 3;
  int32_t gradient[kSize], curvature[kSize];
  int32_t count[kSize];  // of entries up to here
  // Of the values that a sweep has found last.
  int64_t word[kSweepRows];
  int32_t end[kSweepRows], mass[kSweepRows], bin[kSweepRows];
};

// The bins of a node's values; see find_bins of jboost.trees.candidates.
struct ValueBins {
  const int32_t* mass;  // [N]; null: that of each row is `each`
  int32_t each;
  float num_bins;
  float total;  // mass of the node's rows that have a value
};

// One node's entries of a feature, and where a sweep over them is.
struct Sweep {
  const uint64_t* entries;
  int64_t size;
  const int64_t* words;   // [N]
  const ValueBins* bins;  // null: each value is a bin
  int64_t missing;        // entries without a value, which come first
  int64_t at;             // the next entry
  int64_t word;           // sum so far
  // Of the values so far: their mass, that before the value at hand, the latest bin.
  int32_t mass, low, bin;
};

// Codes by feature and the rows in order of each feature's codes.
struct SortedCodes {
  const void* columns;   // [F, N]
  int64_t code_size;     // 1, 2 or 4 bytes
  const int32_t* order;  // [F, N]
  int64_t num_rows, num_columns;
};

struct SortedLoops {
  // Sums up to kSweepRows entries; values, or bins of values, are written from `used`
  // on. Returns the number of sums. The last bin may still grow.
  int64_t (*sum_values)(Sweep* sweep, int64_t used, ValueSums* sums);
  // The bins of a feature's values, from its rows in order, which have that mass; see
  // Proposal. `total` of the bins is not read. Returns false if a row is not below
  // num_rows.
  bool (*propose)(const SortedCodes& column, const ValueBins& bins, int32_t mass,
                  int64_t num_bins, bool wide, void* out, int32_t* highest);
  // Copies the entries of rows with right[row] == 0 from `left` on, the others from
  // `right` on.
  void (*divide)(const uint64_t* entries, int64_t size, const uint8_t* goes_right,
                 int64_t left, int64_t right, uint64_t* out);
};

JBOOST_DECLARE_LOOPS(SortedLoops)

// What a tree on sorted rows is grown from.
struct SortedRows : Derivatives {
  const int32_t* mass;  // [N]; null: each value is a candidate
  int32_t num_bins;     // of a node's values, where there is a mass
  // Memory that growing the tree overwrites.
  int64_t* words;        // [N]
  uint64_t* entries[2];  // [F, N]
  int32_t* leaf;         // [N], written
};

// Grows a tree; of `state`, the nodes have memory. The units of `limits` are not read.
// Returns false if the order of a feature does not hold every row once.
bool GrowSortedTree(const Pool& pool, const SortedCodes& codes,
                    const TreeLimits& limits, const SortedRows& rows,
                    const TreeState& state);

// Bins of all values, proposed for a whole tree.
struct Proposal {
  int64_t num_bins;  // the missing one included
  bool wide;         // codes are uint16 instead of uint8
  void* codes;       // [F, N]: 0 for missing values, 1 for the lowest bin
  int32_t*
      highest;  // [F, num_bins]: the highest code of a value in the bins up to each
};

// Cuts the values of each feature into bins of about equal mass, which is [N]; see
// jboost.trees.candidates.propose. Returns false if the order leads out of the rows.
bool Propose(const Pool& pool, const SortedCodes& codes, const int32_t* mass,
             const Proposal& proposal);

}  // namespace jboost

#endif  // JBOOST_SORTED_H_
