// SPDX-License-Identifier: Apache-2.0
// Sparse codes, stored by feature: the entries [starts[f], starts[f + 1]) hold the
// rows, in ascending order, and the codes of feature f. All other rows have the code
// absent[f].
//
// Histograms are summed feature by feature from the stored entries, for all nodes at
// once: each row's word is stored next to its node, and the tables of one feature stay
// in cache. The sum of the other rows is the node's total minus the sum of the entries,
// which is exact in integers. So the cost of a level is proportional to the number of
// entries plus the number of rows plus the size of the tables, nodes x features x bins.
#ifndef JBOOST_SPARSE_H_
#define JBOOST_SPARSE_H_

#include <cstdint>
#include <vector>

#include "grow.h"

namespace jboost {

// Reads a chunk's codes of one feature after another, as if all codes were stored.
class ColumnReader {
 public:
  ColumnReader(const Codes& codes, int64_t chunk) : codes_(codes), chunk_(chunk) {}

  // The codes by position in the chunk; they are valid until the next call.
  Column Read(int64_t feature);

  // False if entries were read whose rows do not ascend.
  bool IsInside() const { return places_ < uint64_t{kChunk}; }

 private:
  template <class Code>
  Column ReadEntries(int64_t feature);

  const Codes& codes_;
  int64_t chunk_;
  int64_t feature_ = -1;         // the feature that scratch_ holds
  int64_t begin_ = 0, end_ = 0;  // its entries in the chunk
  uint64_t places_ = 0;          // the places of all entries read, joined by "or"
  std::vector<char> scratch_;    // the codes of the chunk
};

// A row, as the summation over entries reads it.
struct SparseRow {
  int64_t word;
  int64_t place;  // of its node's table; rows of no node have the last one
};

// Like SumNodes; overwrites `scratch` [N]. Returns false, as the functions below do, if
// an index leads out of a chunk or the row of an entry is not below N.
bool SumSparseNodes(const Pool& pool, const Codes& codes, const Rows& rows,
                    const NodeSum* nodes, int64_t num_nodes,
                    const Histograms& histograms, SparseRow* scratch);

// Like BuildHistogram.
bool BuildSparseHistogram(const Pool& pool, const Codes& codes, const int32_t* channels,
                          int64_t num_channels, const int32_t* node, int64_t num_nodes,
                          int64_t num_bins, int32_t* out);

// Like FindLeaves. The rows of a chunk descend together, so that each node reads its
// column once.
bool FindSparseLeaves(const Pool& pool, const Codes& codes, const TreeArrays& tree,
                      int64_t max_depth, const uint8_t* skip, int32_t* leaf);

}  // namespace jboost

#endif  // JBOOST_SPARSE_H_
