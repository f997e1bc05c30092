// SPDX-License-Identifier: Apache-2.0
// Codes of which only some are stored, by feature: the entries [starts[f],
// starts[f + 1]) hold rows, ascending, and codes; every other row has absent[f].
//
// Sums go feature by feature over its stored entries, for all nodes at once: a row's
// word and its node lie side by side, and the tables of one feature stay in cache.
// What is not stored is the node's total minus what is, exact in integers. So a level
// costs a step per stored entry, one per row, and what every level costs: tables of
// nodes x features x bins.
#ifndef JBOOST_SPARSE_H_
#define JBOOST_SPARSE_H_

#include <cstdint>
#include <vector>

#include "grow.h"

namespace jboost {

// Gives a chunk's codes of one feature after another, as if all were stored.
class ColumnReader {
 public:
  ColumnReader(const Codes& codes, int64_t chunk) : codes_(codes), chunk_(chunk) {}

  // Codes by position in the chunk; they hold until the next call.
  const void* Read(int64_t feature);

  // False if entries were read whose rows do not ascend.
  bool IsInside() const { return places_ < uint64_t{kChunk}; }

 private:
  template <class Code>
  const void* ReadEntries(int64_t feature);

  const Codes& codes_;
  int64_t chunk_;
  int64_t feature_ = -1;         // whose codes are in the room
  int64_t begin_ = 0, end_ = 0;  // its entries in the chunk
  uint64_t places_ = 0;          // the places of all entries read, joined by "or"
  std::vector<char> room_;       // what is not stored, but for those entries
};

// A row as sums see it.
struct SparseRow {
  int64_t word;
  int64_t place;  // of its node's table; the last table is nobody's
};

// As SumNodes; `room` [N] is overwritten. False also if a row of an entry is not below
// N; the same holds for the functions below.
bool SumSparseNodes(const Pool& pool, const Codes& codes, const Rows& rows,
                    const NodeSum* nodes, int64_t num_nodes,
                    const Histograms& histograms, SparseRow* room);

// As BuildHistogram.
bool BuildSparseHistogram(const Pool& pool, const Codes& codes, const int32_t* channels,
                          int64_t num_channels, const int32_t* node, int64_t num_nodes,
                          int64_t num_bins, int32_t* out);

// As FindLeaves: rows go down the tree together, so that each node reads one column.
bool FindSparseLeaves(const Pool& pool, const Codes& codes, const TreeNodes& tree,
                      int64_t max_depth, const uint8_t* skip, int32_t* leaf);

}  // namespace jboost

#endif  // JBOOST_SPARSE_H_
