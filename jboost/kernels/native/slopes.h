// SPDX-License-Identifier: Apache-2.0
// Linear leaves in training: the sums from which slopes are found, and the update of
// the scores; see jboost.trees.slopes.
#ifndef JBOOST_SLOPES_H_
#define JBOOST_SLOPES_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

constexpr int64_t kMaxTerms = 6;
constexpr int64_t kProductLanes = 8;  // 1 and the terms, padded

// The values of the features of rows, [N, F], and the leaf of each row. Rows whose leaf
// is outside [0, num_leaves) are ignored.
struct ValueRows {
  const float* values;
  const int32_t* leaf;
  int64_t num_rows, num_features, num_leaves;
};

// A term of a leaf, whose values are scaled to (x - middle) * inverse.
struct ScaledTerm {
  int32_t feature, used;  // feature 0 if the term is not used
  float middle, inverse;
};

// The rows to sum, and how their terms are scaled.
struct Products {
  const ScaledTerm* terms;  // [L, P]
  int64_t num_terms;
  const float* gradient;
  const float* curvature;
  const float* weights;
  const float* scales;  // [2, L]: of gradient and of curvature
};

struct LineTerm {
  int32_t feature, used;
  float slope, center;
};

// The values and terms of the leaves of one tree.
struct Lines {
  const float* value;     // [L]
  const LineTerm* terms;  // [L, P]
  int64_t num_terms;
};

struct SlopeLoops {
  // Adds the products of the rows [begin, end) to sums [L, (P + 2) * kProductLanes]: in
  // line j of a leaf, h d_j times 1, d_1, ..., d_P, where d_0 = 1; in the last line g
  // times these.
  void (*add_products)(const ValueRows& rows, const Products& products, int64_t begin,
                       int64_t end, uint32_t* sums);
  // result = scores + what the leaves give to the rows [begin, end).
  void (*add_lines)(const ValueRows& rows, const Lines& lines, int64_t begin,
                    int64_t end, const float* scores, float* result);
};

JBOOST_DECLARE_LOOPS(SlopeLoops)

// sums[c][l]: the lower triangle of the lines, row by row, then the last line.
void SumProducts(const Pool& pool, const ValueRows& rows, const Products& products,
                 int32_t* sums);

// `result` may be `scores`.
void AddLines(const Pool& pool, const ValueRows& rows, const Lines& lines,
              const float* scores, float* result);

}  // namespace jboost

#endif  // JBOOST_SLOPES_H_
