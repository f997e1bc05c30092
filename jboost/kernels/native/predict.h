// SPDX-License-Identifier: Apache-2.0
// Prediction: raw floats through all trees of an ensemble.
//
// Where it pays, rows are taken in blocks of up to 256. A block is first coded: code c
// of a value says that c of the thresholds which the ensemble has for this feature lie
// below it. Codes are bytes, by column, so that a block stays in the first cache while
// all trees pass by, and one instruction compares 16, 32 or 64 rows:
//
//   codes  plane 0 | row 0 .. row 255 |    one plane per feature, or two: one where a
//          plane 1 | row 0 .. row 255 |    missing value has the lowest code (it goes
//          ...                             left), one where it has the highest
//
// An ensemble with more thresholds than bytes can tell apart is cut into runs of
// rounds, each with codes of its own. A split of categories has a plane of its own
// while its tree is looked at: which rows it sends left. Few rows, trees with very many
// thresholds or sets of categories, and linked trees walk over the floats instead.
#ifndef JBOOST_PREDICT_H_
#define JBOOST_PREDICT_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

constexpr int64_t kBlockRows = 256;  // at most; a multiple of 64

// R rounds of K trees with I nodes each: in heap order with I = 2^max_depth - 1 and
// L = I + 1 leaves, or linked, where leaves are nodes, L = I.
struct Ensemble {
  const int32_t* feature;  // [R, K, I]
  const float* threshold;
  const uint8_t* missing_left;
  const float* leaf_value;  // [R, K, L]; null where only leaves are asked for
  const float* init_score;  // [K]; the same
  int64_t num_rounds, num_scores, max_depth, num_nodes;
  // [R, K, I, W]; null: none. Bit c % 32 of word c / 32 says whether code c goes left
  // where the threshold is NaN.
  const uint32_t* left_codes = nullptr;
  int64_t num_words = 0;
  // [R, K, I]; null in heap order. The right child follows; a leaf is its own.
  const int32_t* left_child = nullptr;

  int64_t num_leaves() const {
    return left_child == nullptr ? num_nodes + 1 : num_nodes;
  }
  int64_t num_trees() const { return num_rounds * num_scores; }
};

// The categorical columns: value v of column features[g] has code codes[g, v].
struct Categories {
  const int32_t* codes;     // [G, V]
  const int32_t* features;  // [G]
  int64_t num_features, num_values;
};

// A matrix [N, F], row by row or column by column.
struct Matrix {
  const float* values;
  int64_t num_rows, num_features;
  bool by_column;
  Categories categories;

  float At(int64_t row, int64_t column) const {
    return values[by_column ? column * num_rows + row : row * num_features + column];
  }
};

// What is asked for.
struct Answer {
  float* scores = nullptr;    // [N, K]
  float* stages = nullptr;    // [R, N, K]
  int32_t* leaves = nullptr;  // [N, R, K]
};

// One tree on codes. Nodes count from 1, so that level d begins at 2^d.
struct CodedTree {
  const int32_t* offset;    // of the plane that a node looks at
  const int8_t* threshold;  // a code above it goes right
  int64_t max_depth;
};

// What a node of a linked tree says, in one place of memory.
struct PackedNode {
  float threshold;
  int32_t feature, left_child;
  int32_t missing_right;
};

// A split of categories in a coded block: which plane says what it sends left.
struct CategorySet {
  int32_t from, to;  // offsets of planes: of the codes (two of them), of the result
  int64_t words;     // where its set begins
  bool wide;         // codes beyond a byte
};

struct PredictLoops {
  // columns[f * kBlockRows + i] = x[i * stride + f] for 16 features; rows is a
  // multiple of 16.
  void (*transpose)(const float* x, int64_t stride, int64_t rows, int64_t num_features,
                    float* columns);
  // Codes of a column: `table` holds 2^levels - 1 thresholds as a search tree that
  // begins at 1. A missing value gets the lowest code in `left`, the highest in
  // `right`; one of them may be null.
  void (*code)(const float* column, int64_t rows, const float* table, int64_t levels,
               int8_t* left, int8_t* right);
  // Codes, as floats, in the place of values of a category; NaN where there is none.
  // Denormals are 0.
  void (*encode)(float* values, int64_t stride, int64_t count, const int32_t* codes,
                 int64_t num_values);
  // The two planes of codes that sets look at; a missing value has code 0.
  void (*split_codes)(const float* codes, int64_t count, bool wide, int8_t* first,
                      int8_t* second);
  // The planes of sets: -1 where a row's code is in it, else 0; rows is a multiple of
  // 64. Narrow codes c are two planes, of c / 8 and of 1 << c % 8, and sets have 256
  // bits; wide ones are a plane of low bytes and one of high bytes, `stride` behind.
  void (*mark)(const CategorySet* sets, int64_t num_sets, const uint32_t* words,
               int64_t rows, int64_t stride, int8_t* codes);
  // scores[i] += leaf_value[leaf of row i]; rows is a multiple of 64.
  void (*add_tree)(const CodedTree& tree, const int8_t* codes, int64_t rows,
                   const float* leaf_value, float* scores);
  // The leaf of each row.
  void (*find_leaves)(const CodedTree& tree, const int8_t* codes, int64_t rows,
                      int32_t* leaf);
  // The leaves of rows x [rows, F] without denormals, categories as codes, in several
  // trees: leaf [trees, rows]. Linked trees may be packed, else null.
  void (*walk)(const Ensemble& model, const PackedNode* packed, int64_t first_tree,
               int64_t num_trees, const float* x, int64_t rows, int64_t num_features,
               int32_t* leaf);
};

JBOOST_DECLARE_LOOPS(PredictLoops)

// Whether all features that the trees look at are columns of the matrix.
bool HasFeatures(const Ensemble& model, int64_t num_features);

// Whether all children are nodes.
bool HasChildren(const Ensemble& model);

void Predict(const Pool& pool, const Ensemble& model, const Matrix& matrix,
             const Answer& answer);

}  // namespace jboost

#endif  // JBOOST_PREDICT_H_
