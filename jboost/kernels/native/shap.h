// SPDX-License-Identifier: Apache-2.0
// Shapley values of trees, and their interactions: jboost.explanation.attributions.
//
// Trees are packed as nodes that are split, parents before children, each with tables
// of numbers that do not depend on the row: by what its edges multiply the product of
// factors at the points of the quadrature, and by how much they change the ratio
// (o_i - z_i) / factor_i of their feature. Then rows go through every tree as lanes of
// vectors, all lanes through all nodes: down with products, up with sums over leaves.
// Points are independent of each other: what is more than four goes down again.
#ifndef JBOOST_SHAP_H_
#define JBOOST_SHAP_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"
#include "predict.h"

namespace jboost {

constexpr int kMaxShapPoints = 4;       // at a time
constexpr int64_t kMaxShapLanes = 16;   // rows of a vector, at most
constexpr int64_t kMaxShapDepth = 255;  // of trees, which are walked by recursion

// Trees that know the cover of their leaves, [R, K, L].
struct ShapTrees : Ensemble {
  const float* cover = nullptr;
};

struct ShapPoints {
  const float* place;
  const float* weight;
  int64_t size;
};

// What is asked for: values [N, F, K] or interactions [N, F, F, K].
struct ShapAnswer {
  float* out;
  bool pairs;
};

// A node that is split, in a tree of such.
struct ShapNode {
  float threshold;
  int32_t feature;
  int32_t above;         // depth of the last node on the path with this feature, or -1
  int32_t child[2];      // left, right: a place in the tree, or -1 for a leaf
  float value[2];        // of leaves
  const uint32_t* sets;  // of the codes that go left, or null
  uint32_t num_codes;    // that they speak of
  bool missing_left;
  bool is_last;  // both children are leaves
};

// Numbers of a node for `points` points. An edge has [4, points]: what it multiplies
// by where it is open and where it is shut here but not above, and the changes in the
// same cases; then what it multiplies by where it is shut above. If both children are
// leaves and only values are asked for: [4, points] for rows that go left or right,
// the sums over both leaves and the sums times changes, then the sum where the node is
// shut above.
constexpr int64_t ShapEdgeSize(int64_t points) { return 4 * points + 1; }
constexpr int64_t ShapTableSize(int64_t points) { return 2 * ShapEdgeSize(points); }

struct ShapTree {
  const ShapNode* nodes;
  const float* tables;
};

// Rows of one vector on their way through one tree.
struct ShapLanes {
  const float* columns;  // [F, stride]: of these rows
  float* values;         // [F, stride]: what is added to
  float* pairs;          // [F, F, stride], or null
  int64_t stride, num_features;
  void* scratch;  // kShapScratchBytes, at the start of a cache line
};

// For every depth an edge, and a vector for each point.
constexpr int64_t kShapVectorBytes = kMaxShapLanes * sizeof(float);
constexpr int64_t kShapSlots = kMaxShapDepth + 1;
constexpr int64_t kShapScratchBytes =
    kShapSlots * (1 + kMaxShapPoints) * kShapVectorBytes;

struct ShapLoops {
  int64_t num_lanes;
  // Adds one tree's values for num_lanes rows; `points` <= kMaxShapPoints, of `weight`.
  void (*add_tree)(const ShapTree& tree, const float* weight, int64_t points,
                   const ShapLanes& lanes);
};

JBOOST_DECLARE_LOOPS(ShapLoops)

// Whether links make trees, none of which is too deep.
bool AreTrees(const ShapTrees& trees);

void Explain(const Pool& pool, const ShapTrees& trees, const Matrix& matrix,
             const ShapPoints& points, const ShapAnswer& answer);

}  // namespace jboost

#endif  // JBOOST_SHAP_H_
