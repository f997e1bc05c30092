// SPDX-License-Identifier: Apache-2.0
// Binning: finds the thresholds of features, then the codes of values.
//
// Values are compared as integer keys, which have the order of the floats (see MakeKeys
// in binning_loops.cc): denormals count as 0, and missing values have the lowest key.
//
// If there are many rows, thresholds are found without sorting. A sample divides the
// range of each feature into a few thousand buckets of about equal size, and a first
// pass counts all rows by bucket. A second pass collects the values of only those
// buckets whose counts do not suffice, because they contain a threshold or a frequent
// value:
//
//   buckets  | 244 | 251 | 9000 | 239 | ...      counted
//               ...  open   open   ...           [3.1 3.4 3.5 ...] [0 x 8999, 1e-3]
//
// The result is the same as that of sorting all rows, whatever the sample.
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

// A monotone map of keys to buckets 1, 2, ...; bucket 0 is for missing values. The
// range of the sample is divided into equal cells, and each cell into equal buckets.
struct BucketMap {
  int32_t low, high;
  int32_t drop;           // low bits of key - low that are ignored
  int32_t shift;          // a cell spans 2^shift of the remaining values, up to 2^16
  const uint32_t* cells;  // (first bucket << 16) + number of buckets
};

// A search tree whose nodes hold 16 keys each, stored level by level. An entry of a
// level equals the last entry of the corresponding node of the next level.
constexpr int64_t kFanout = 16;
constexpr int kMaxLevels = 4;

struct SearchTree {
  int num_levels;
  const int32_t* levels[kMaxLevels];
};

struct BinningLoops {
  // keys[f][i] = the key of rows[i * row_stride + features[f]].
  void (*make_keys)(const float* rows, int64_t row_stride, int64_t num_rows,
                    const int32_t* features, int64_t num_features, int32_t* keys,
                    int64_t keys_stride);
  // Counts keys by bucket, those at even and at odd places in two tables: with one
  // table, runs of a frequent value would wait for their own additions.
  void (*count)(const BucketMap& map, const int32_t* keys, int64_t num_keys,
                uint16_t* even, uint16_t* odd);
  // Writes the keys of open buckets to `collected`, except each bucket's usual key;
  // returns their number. `collected` needs room for one more.
  int64_t (*collect)(const BucketMap& map, const uint8_t* open, const int32_t* usual,
                     const int32_t* keys, int64_t num_keys, int32_t* collected);
  // codes[i] = the number of entries of the tree that are below keys[i].
  void (*find_codes)(const SearchTree& tree, const int32_t* keys, int64_t num_keys,
                     bool wide, void* codes);
  // rows[i * width + f] = columns[f * stride + i].
  void (*transpose)(const void* columns, int64_t stride, int64_t num_features,
                    int64_t num_rows, bool wide, void* rows, int64_t width);
};

JBOOST_DECLARE_LOOPS(BinningLoops)

// Pairs of neighboring distinct values that have a threshold between them.
struct Cuts {
  float* lower;  // [F, max_cuts]
  float* upper;
  int32_t* num_cuts;  // [F]
  int64_t max_cuts;
};

// See jboost.codes.thresholds.find_cuts for the definition. weight: [N], or null.
void FindCuts(const Pool& pool, const FloatRows& matrix, const double* weight,
              int64_t max_bins, const Cuts& cuts);

struct CodeLayouts {
  void* columns;     // [F, N], or null
  void* packed;      // [blocks, N, width], or null
  int64_t num_rows;  // rows beyond those of the matrix repeat row 0
  int64_t num_blocks, width;
  bool wide;  // uint16 instead of uint8
};

// Writes the code of each value: 0 if it is missing, else 1 + #{thresholds < x}.
void FindCodes(const Pool& pool, const FloatRows& matrix, const float* thresholds,
               int64_t num_thresholds, const CodeLayouts& layouts);

}  // namespace jboost

#endif  // JBOOST_BINNING_H_
