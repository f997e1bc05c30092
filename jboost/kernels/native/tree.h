// SPDX-License-Identifier: Apache-2.0
// Growing a whole tree: the operations of grow.h, level by level.
//
// It equals jboost.trees.plain_growth bit for bit. What is passed from level to level
// (bounds of leaf values, features on the path, leaves that remain) is that of
// jboost.trees.paths.
#ifndef JBOOST_TREE_H_
#define JBOOST_TREE_H_

#include <cstdint>

#include "categories.h"
#include "grow.h"
#include "sparse.h"

namespace jboost {

struct TreeInput {
  const float* gradient;   // [N]
  const float* curvature;  // [N]
  const uint8_t* in_bag;   // [N]
  const uint32_t* seed;    // [2]
  const float* fractions;  // [3]: of features, by tree, level and node
  SplitLimits limits;      // without the units
  float min_gain;
  int64_t max_depth;
  int64_t max_leaves;  // 0: no limit
  bool uniform;        // all rows have the same curvature
  // The limits on leaf values; null without.
  const float* bounds;      // [2]: of the root
  const int32_t* monotone;  // [F]
  float l1;
  // The features that may meet on a path, [num_groups, F]; null without.
  const uint8_t* groups;
  int64_t num_groups;
  const CategoryLimits* categories;  // null without
};

struct TreeOutput {
  TreeArrays tree;
  int32_t* leaf;       // [N]
  float* leaf_bounds;  // [leaves, 2]; null without limits on leaf values
};

// Memory that growing a tree overwrites.
struct TreeScratch {
  Rows rows;
  Histograms histograms;
  SparseRow* sparse_rows;  // of sparse codes
};

// Grows a tree. Returns false if sparse entries lead out of a chunk.
bool GrowTree(const Pool& pool, const Codes& codes, const TreeInput& input,
              const TreeScratch& scratch, const TreeOutput& output);

}  // namespace jboost

#endif  // JBOOST_TREE_H_
