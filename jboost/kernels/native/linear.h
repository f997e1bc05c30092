// SPDX-License-Identifier: Apache-2.0
// Values of linear leaves: leaf_value + sum_p slope_p (x_p - center_p), with x clipped
// to the ranges of its features; the leaf value alone if an x_p is missing. The
// definition is in jboost/trees/slopes.py, whose order of operations the kernels keep.
//
// For blocks of rows, the terms of a leaf are packed in groups of eight lanes, which
// vectors evaluate for one row at a time. Eight rows of products are then transposed,
// so that sums have a row per lane. The first term is the leaf value, and unused ones
// are 0: both read a column of zeros, at the end of each row.
//
//   term      0       1 .. P           others
//   column    F       feature_p        F
//   center    -value  center_p         0
//   slope     1       slope_p          0
#ifndef JBOOST_LINEAR_H_
#define JBOOST_LINEAR_H_

#include <cstdint>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "predict.h"
#include "scratch.h"

namespace jboost {

constexpr int64_t kLanes = 8;  // terms of a group

// The P terms of one leaf; `tree` counts the trees of all scores.
struct Terms {
  Terms(const Ensemble& model, int64_t tree, int64_t leaf) {
    int64_t structure = tree / model.scores_per_tree();
    feature = model.term_feature + Place(model, structure, leaf);
    slope = model.slope + Place(model, tree, leaf);
    center = model.center + Place(model, tree, leaf);
  }
  static int64_t Place(const Ensemble& model, int64_t tree, int64_t leaf) {
    return (tree * model.num_leaves() + leaf) * model.num_terms;
  }

  const int32_t* feature;
  const float *slope, *center;
};

// The packed terms of a tree, for one score: G groups per leaf. Those of the next tree
// begin `size` numbers behind, and as many bytes of columns.
struct LinearTree {
  const float* terms;       // [L, G, 2, kLanes]: centers and slopes
  const uint16_t* columns;  // [L, G, kLanes]
  int64_t num_groups, size;
};

struct LinearLoops {
  // Adds the value of leaf[i] for row i of x to scores[i]; `rows` is a multiple of 64,
  // and `stride`, the length of the rows of x, of 16.
  void (*add)(const LinearTree& tree, const int32_t* leaf, const float* x,
              int64_t stride, int64_t rows, float* scores);
};

JBOOST_DECLARE_LOOPS(LinearLoops)

// The packed terms of an ensemble.
class LinearLeaves {
 public:
  LinearLeaves(const Pool& pool, const Ensemble& model, int64_t num_features);

  // Whether columns fit 16 bits, and no product can overflow: then a sum is NaN only
  // where a value is missing.
  static bool Fit(const Ensemble& model, int64_t num_features);

  // The length of a row with its zeros.
  static int64_t Stride(int64_t num_features) { return (num_features + 16) / 16 * 16; }

  // `tree` counts the trees of all scores, R * K.
  const LinearTree& operator[](int64_t tree) const { return trees_[tree]; }
  bool has_terms(int64_t tree) const { return num_terms_[tree] > 0; }

 private:
  std::vector<int64_t> num_terms_;  // the most of a leaf, by tree
  std::vector<LinearTree> trees_;
  Scratch<float> terms_;
  Scratch<uint16_t> columns_;
};

// Clips rows of x, and adds zeros up to `stride`; NaN stays.
void ClipRows(const float* ranges, int64_t num_features, int64_t rows, int64_t stride,
              float* x);

// Returns the value of a leaf for a row of clipped values; `tree` counts the trees of
// all scores.
float EvaluateLeaf(const Ensemble& model, int64_t tree, int32_t leaf, const float* x);

}  // namespace jboost

#endif  // JBOOST_LINEAR_H_
