// SPDX-License-Identifier: Apache-2.0
// Growing a whole tree: the operations of grow.h, level by level.
//
// It equals jboost.trees.grow bit for bit. What is passed from level to level
// (bounds of leaf values, features on the path, leaves that remain) is that of
// jboost.trees.paths.
#ifndef JBOOST_TREE_H_
#define JBOOST_TREE_H_

#include <cstdint>
#include <vector>

#include "categories.h"
#include "grow.h"
#include "sparse.h"

namespace jboost {

// What the splits of a tree depend on, besides the rows.
struct TreeLimits {
  const uint32_t* seed;    // [2]
  const float* fractions;  // [3]: of features, by tree, level and node
  SplitLimits limits;
  float min_gain;
  int64_t num_features;
  int64_t max_depth;
  int64_t max_leaves;  // 0: no limit
  // The limits on leaf values; null without.
  const float* bounds;      // [2]: of the root
  const int32_t* monotone;  // [F]
  float l1;
  // The features that may meet on a path, [num_groups, F]; null without.
  const uint8_t* groups;
  int64_t num_groups;
  const CategoryLimits* categories;  // null without
  int32_t rows_per_threshold;        // 0: every threshold is tried
};

// Limits in the units in which splits are searched; see jboost.trees.limits.
class SearchLimits {
 public:
  // `units`: what one integer of gradient and of curvature stands for.
  SearchLimits(const TreeLimits& given, const float units[2]);
  SearchLimits(const SearchLimits&) = delete;  // the limits point to a member
  SearchLimits& operator=(const SearchLimits&) = delete;

  // Returns bounds of leaf values to the units of the given limits.
  void RestoreBounds(int64_t num_leaves, float* bounds) const;

  TreeLimits limits;

 private:
  const float* given_bounds_;
  float scale_, bounds_[2];
};

// A tree while it grows: its nodes so far, and those of the next level, in slots.
struct TreeState {
  TreeArrays tree;
  float* leaf_bounds;     // [leaves, 2]; null without limits on leaf values
  Histograms histograms;  // of the level's nodes
  int32_t* position;      // [slots]: of each slot's node on its level; -1: none
  int32_t* place;         // [slots]: of its histogram
  // What nodes inherit from their paths; see jboost.trees.paths.
  int32_t* free;  // [1]: leaves that may still be added, if their number is limited
  float* bounds;  // [slots, 2]: of the leaf values below; null without limits
  uint8_t* used;  // [slots, F]: features on the path; null without groups
};

// The state of a tree that one call grows, with memory for what nodes inherit.
class GrowingTree {
 public:
  // `nodes`: where the tree and its histograms go.
  GrowingTree(const TreeLimits& limits, const TreeState& nodes);
  GrowingTree(const GrowingTree&) = delete;  // the state points to the members
  GrowingTree& operator=(const GrowingTree&) = delete;

  TreeState state;

 private:
  int32_t free_ = 0;
  std::vector<int32_t> position_, place_;
  std::vector<float> bounds_;
  std::vector<uint8_t> used_;
};

// Memory for the splits of a level, filled with zeros.
class SplitMemory {
 public:
  SplitMemory(int64_t num_slots, int64_t num_words);
  SplitMemory(SplitMemory&&) = default;  // moved vectors keep their memory

  Splits splits;

 private:
  std::vector<int32_t> numbers_;
  std::vector<uint8_t> flags_;
  std::vector<float> floats_;
  std::vector<uint32_t> sets_;
};

// Begins with a tree without a split, and the root in slot 0.
void StartTree(const TreeLimits& limits, const TreeState& state);

// The features that each slot may be split by, [slots, F].
std::vector<uint8_t> MaskFeatures(const TreeLimits& limits, int64_t level,
                                  const TreeState& state);

// Leaves as many splits as there may be leaves, those of the highest gain.
void KeepBest(const TreeLimits& limits, const TreeState& state, const Splits& splits);

// Finds the splits of a level. `squares` [slots]: sums of the squares of the gradient's
// integers, where there are categories.
void FindLevel(const Pool& pool, const TreeLimits& limits, int64_t level,
               const float* squares, const TreeState& state, const Splits& splits);

// Whether the children of the splits of a level have slots.
bool HaveSlots(const TreeLimits& limits, int64_t level, const Splits& splits,
               const TreeState& state);

// Writes the splits into the tree, and puts their children in the slots. Returns the
// children whose histograms must be summed before the next level.
std::vector<NodeSum> FinishLevel(const TreeLimits& limits, int64_t level,
                                 const Splits& splits, const Sides* sides,
                                 const TreeState& state);

// Puts sums of nodes, [nodes, C, F, B], in their places, and subtracts them from the
// parents'.
void JoinSums(const Pool& pool, const NodeSum* nodes, int64_t num_nodes,
              const int32_t* sums, int64_t num_features, const Histograms& histograms);

// The rows of a tree that is grown by one call.
struct TreeRows : Derivatives {
  // Memory that growing the tree overwrites.
  Rows rows;
  SparseRow* sparse_rows;  // of sparse codes
  int32_t* leaf;           // [N], written
};

// Grows a tree; of `state`, the nodes and the histograms have memory. The units of
// `limits` are not read. Returns false if sparse entries lead out of a chunk.
bool GrowTree(const Pool& pool, const Codes& codes, const TreeLimits& limits,
              const TreeRows& rows, const TreeState& state);

}  // namespace jboost

#endif  // JBOOST_TREE_H_
