// SPDX-License-Identifier: Apache-2.0
// Thresholds of features, then codes of values.
//
// Values are compared as integer keys, whose order is that of the floats (see
// MakeKeys in binning_loops.cc): denormals count as 0, and a missing value has the
// lowest key of all.
//
// Thresholds of many rows are found without sorting them. A sample gives each feature
// a few thousand buckets of about equal size; all rows are counted into them; and only
// the values of buckets in which something is to be found out (a threshold, a heavy
// value) are looked at one by one, in a second pass:
//
//   buckets  | 244 | 251 | 9000 | 239 | ...      counted
//               ...  open   open   ...           [3.1 3.4 3.5 ...] [0 x 8999, 1e-3]
//
// The result is that of sorting everything, whatever the sample.
#ifndef JBOOST_BINNING_H_
#define JBOOST_BINNING_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

constexpr int32_t kMissingKey = INT32_MIN;

// A matrix [N, F], row by row.
struct FloatRows {
  const float* values;
  int64_t num_rows, num_features;
};

// A monotone map of keys to buckets 1, 2, ...; 0 is for missing values. The range of
// the sample is cut into equal cells, and a cell into equal buckets.
struct BucketMap {
  int32_t low, high;
  int32_t drop;           // bits of key - low that are not looked at
  int32_t shift;          // 2^shift of what remains a cell, at most 2^16
  const uint32_t* cells;  // (first bucket << 16) + number of buckets
};

// A search tree in which each node holds 16 keys, level by level: an entry of a level
// is the last one of a node of the next level.
constexpr int64_t kFanout = 16;
constexpr int kMaxLevels = 4;

struct SearchTree {
  int num_levels;
  const int32_t* levels[kMaxLevels];
};

struct BinningLoops {
  // keys[f][i] = key of rows[i * row_stride + features[f]].
  void (*make_keys)(const float* rows, int64_t row_stride, int64_t num_rows,
                    const int32_t* features, int64_t num_features, int32_t* keys,
                    int64_t keys_stride);
  // Counts keys by bucket: even ones, and odd ones. With one table for both a frequent
  // value would wait for itself.
  void (*count)(const BucketMap& map, const int32_t* keys, int64_t num_keys,
                uint16_t* even, uint16_t* odd);
  // Appends the keys in open buckets, but for each bucket's usual key; returns how
  // many. `collected` needs room for one more.
  int64_t (*collect)(const BucketMap& map, const uint8_t* open, const int32_t* usual,
                     const int32_t* keys, int64_t num_keys, int32_t* collected);
  // codes[i] = number of entries of the tree below keys[i].
  void (*find_codes)(const SearchTree& tree, const int32_t* keys, int64_t num_keys,
                     bool wide, void* codes);
  // rows[i * width + f] = columns[f * stride + i].
  void (*transpose)(const void* columns, int64_t stride, int64_t num_features,
                    int64_t num_rows, bool wide, void* rows, int64_t width);
};

JBOOST_DECLARE_LOOPS(BinningLoops)

// Pairs of neighboring distinct values with a threshold between them.
struct Cuts {
  float* lower;  // [F, max_cuts]
  float* upper;
  int32_t* num_cuts;  // [F]
  int64_t max_cuts;
};

// The definition is jboost.binning.find_cuts. weight: [N], or null.
void FindCuts(const Pool& pool, const FloatRows& matrix, const double* weight,
              int64_t max_bins, const Cuts& cuts);

struct CodeLayouts {
  void* columns;     // [F, N], or null
  void* packed;      // [blocks, N, width], or null
  int64_t num_rows;  // those beyond the matrix repeat row 0
  int64_t num_blocks, width;
  bool wide;  // uint16 instead of uint8
};

// Codes: 0 if missing, else 1 + #{thresholds < x}.
void FindCodes(const Pool& pool, const FloatRows& matrix, const float* thresholds,
               int64_t num_thresholds, const CodeLayouts& layouts);

}  // namespace jboost

#endif  // JBOOST_BINNING_H_
