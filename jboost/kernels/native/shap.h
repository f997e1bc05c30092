// SPDX-License-Identifier: Apache-2.0
// Shapley values of trees, and their interactions: jboost.explanation.shap.
//
// Trees are packed: only nodes that are split, parents before children. Each node has
// tables of numbers that do not depend on the row: for each of its edges, the number by
// which it multiplies the product of factors at the points of the quadrature, and the
// change of the ratio (o_i - z_i) / factor_i of its feature. Rows are lanes of vectors,
// and all lanes visit all nodes: products are carried down, sums over leaves up. Points
// are independent of each other; more than four are processed in several passes. The
// linear terms of a leaf are edges below it; see jboost.explanation.shap.
#ifndef JBOOST_SHAP_H_
#define JBOOST_SHAP_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"
#include "predict.h"

namespace jboost {

constexpr int kMaxShapPoints = 4;       // in one pass
constexpr int64_t kMaxShapLanes = 16;   // rows of the longest vector
constexpr int64_t kMaxShapDepth = 255;  // trees are walked by recursion

// Trees, and the cover of their leaves, [R, K, L].
struct ShapTrees : Ensemble {
  const float* cover = nullptr;
};

struct ShapPoints {
  const float* place;
  const float* weight;
  int64_t size;
};

// The result: values [N, F, K], or interactions [N, F, F, K].
struct ShapAnswer {
  float* out;
  bool pairs;
};

// A node of a packed tree.
struct ShapNode {
  float threshold;
  int32_t feature;
  int32_t above;     // depth of the last node on the path with this feature, or -1
  int32_t child[2];  // left and right: an index in the tree, or -1 for a leaf
  float value[2];    // of the children that are leaves
  int32_t first_term[2], num_terms[2];  // of the children that are leaves
  const uint32_t* sets;                 // the codes that go left, or null
  uint32_t num_codes;                   // of the set
  bool missing_left;
  bool is_last;  // both children are leaves without linear terms
};

// A linear term of a leaf, slope (x - center) with x clipped to [low, high].
struct ShapTerm {
  int32_t feature;
  int32_t above;  // depth of the last edge on the path with this feature, or -1
  float slope, center, low, high;
};

// The sizes of a node's tables for `points` points. An edge is open for a row if the
// row takes this side at all splits on the feature so far. The table of an edge has [4,
// points] numbers: its factors, if it is open, and if it is shut here but not above;
// and the changes in these two cases; then its factor if it is shut above. The table of
// a linear term has [2, points] numbers, factors and changes if it is open above. If a
// node is the last one, and only values are wanted, both tables are replaced by one of
// [4, points]: the sums over both leaves for rows that go left and for rows that go
// right, and these sums times the changes; then the sum if the node is shut above.
constexpr int64_t ShapEdgeSize(int64_t points) { return 4 * points + 1; }
constexpr int64_t ShapTableSize(int64_t points) { return 2 * ShapEdgeSize(points); }
constexpr int64_t ShapTermSize(int64_t points) { return 2 * points; }

struct ShapTree {
  const ShapNode* nodes;
  const float* tables;
  const ShapTerm* terms;
  const float* term_tables;
};

// The rows of one vector, and where the results of one tree are added.
struct ShapLanes {
  const float* columns;  // [F, stride]
  float* values;         // [F, stride]
  float* pairs;          // [F, F, stride], or null
  int64_t stride, num_features;
  void* scratch;  // kShapScratchBytes, aligned to a cache line
};

// For every depth, an edge and a vector for each point.
constexpr int64_t kShapVectorBytes = kMaxShapLanes * sizeof(float);
constexpr int64_t kShapSlots = kMaxShapDepth + 1;
constexpr int64_t kShapScratchBytes =
    kShapSlots * (1 + kMaxShapPoints) * kShapVectorBytes;

struct ShapLoops {
  int64_t num_lanes;
  // Adds one tree's values for num_lanes rows; `weight` has `points` <= kMaxShapPoints
  // numbers.
  void (*add_tree)(const ShapTree& tree, const float* weight, int64_t points,
                   const ShapLanes& lanes);
};

JBOOST_DECLARE_LOOPS(ShapLoops)

// Whether the links of nodes form trees of depth kMaxShapDepth at most.
bool AreTrees(const ShapTrees& trees);

void Explain(const Pool& pool, const ShapTrees& trees, const Matrix& matrix,
             const ShapPoints& points, const ShapAnswer& answer);

}  // namespace jboost

#endif  // JBOOST_SHAP_H_
