// SPDX-License-Identifier: Apache-2.0
// Prediction: sends rows of floats through all trees of an ensemble.
//
// Where it pays, rows are processed in blocks of up to 256. First, the values of a
// block are coded: the code of a value is the number of thresholds below it among those
// that the ensemble has for its feature. Codes are bytes, stored by column, so a block
// stays in the L1 cache while all trees are applied to it, and one instruction compares
// 16, 32 or 64 rows:
//
//   codes  plane 0 | row 0 .. row 255 |    one plane per feature, or two: one where a
//          plane 1 | row 0 .. row 255 |    missing value has the lowest code (it goes
//          ...                             left), one where it has the highest
//
// If a feature has more thresholds than a byte can distinguish, the ensemble is divided
// into runs of rounds, each with its own codes. While a tree is applied, each of its
// categorical splits has a plane that says which rows go left. For few rows, for trees
// with very many thresholds or categorical splits, and for linked trees, rows are not
// coded, but walk down the trees with their floats.
#ifndef JBOOST_PREDICT_H_
#define JBOOST_PREDICT_H_

#include <cstdint>
#include <memory>
#include <mutex>

#include "isa.h"
#include "parallel.h"

namespace jboost {

constexpr int64_t kBlockRows = 256;  // at most; a multiple of 64
constexpr int64_t kSharedTile = 16;  // trees whose leaf values are added together

// R rounds of S trees with I nodes each: in heap order with I = 2^max_depth - 1 and
// L = I + 1 leaves, or linked, where leaves are nodes, L = I. S is 1, where a tree has
// leaf values for all K scores, or K.
struct Ensemble {
  const int32_t* feature;  // [R, S, I]
  const float* threshold;
  const uint8_t* missing_left;
  const float* leaf_value;  // [R, K, L]; null if only leaves are wanted
  const float* init_score;  // [K]; the same
  int64_t num_rounds, trees_per_round, num_scores, max_depth, num_nodes;
  // [R, S, I, W], or null. Bit c % 32 of word c / 32 says whether code c goes left, if
  // the threshold is NaN (a categorical split).
  const uint32_t* left_codes = nullptr;
  int64_t num_words = 0;
  // [R, S, I]; null in heap order. The right child follows the left one. A leaf is its
  // own left child.
  const int32_t* left_child = nullptr;
  // P linear terms per leaf; 0: leaves are constant. Feature -1: no term.
  int64_t num_terms = 0;
  const int32_t* term_feature = nullptr;            // [R, S, L, P]
  const float *slope = nullptr, *center = nullptr;  // [R, K, L, P]
  const float* ranges = nullptr;  // [F, 2]: values are clipped to them

  int64_t num_leaves() const {
    return left_child == nullptr ? num_nodes + 1 : num_nodes;
  }
  int64_t num_trees() const { return num_rounds * trees_per_round; }
  int64_t scores_per_tree() const { return num_scores / trees_per_round; }
  bool shares_trees() const { return trees_per_round < num_scores; }
};

// The categorical columns: the value v of column features[g] has the code codes[g, v].
struct Categories {
  const int32_t* codes;     // [G, V]
  const int32_t* features;  // [G]
  int64_t num_features, num_values;
};

// The stored cells of a matrix, row by row (CSR).
struct SparseRows {
  const int32_t* starts;  // [N + 1]: of each row's cells, then E
  const int32_t* places;  // [E]: the column of each cell
  const float* values;    // [E]
  const int32_t* index;   // of each column: its feature; none if it is too large
  float absent;           // the value of cells that are not stored
};

// A matrix [N, F], row by row, column by column, or sparse.
struct Matrix {
  const float* values;
  int64_t num_rows, num_features;
  bool by_column;
  Categories categories;
  const SparseRows* sparse = nullptr;  // instead of values

  float At(int64_t row, int64_t column) const {
    return values[by_column ? column * num_rows + row : row * num_features + column];
  }
};

// The results that are wanted; the others are null.
struct Answer {
  float* scores = nullptr;    // [N, K]
  float* stages = nullptr;    // [R, N, K]
  int32_t* leaves = nullptr;  // [N, R, S]
};

// One tree on codes. Nodes count from 1, so that level d begins at 2^d.
struct CodedTree {
  const int32_t* offset;    // of the plane that a node reads
  const int8_t* threshold;  // a code above it goes right
  int64_t max_depth;
};

// The leaves of a block in up to kSharedTile trees that all scores share.
struct LeafRows {
  const int32_t* leaf;  // [trees, kBlockRows]
  const float* values;  // [trees, L, width]
  int64_t num_trees, num_leaves;
  int64_t width;  // 4, 8 or a multiple of 16, at least K
};

// A node of a linked tree, in one place of memory.
struct PackedNode {
  float threshold;
  int32_t feature, left_child;
  int32_t missing_right;
};

// A categorical split of a coded block, and the plane that says which rows go left.
struct CategorySet {
  int32_t from, to;  // offsets of the two planes of codes, and of the result
  int64_t words;     // where the words of its set begin
  bool wide;         // some codes exceed a byte
};

struct PredictLoops {
  // columns[f * kBlockRows + i] = x[i * stride + f] for up to 16 features; `rows` is a
  // multiple of 16.
  void (*transpose)(const float* x, int64_t stride, int64_t rows, int64_t num_features,
                    float* columns);
  // Writes the codes of a column. `table` holds 2^levels - 1 thresholds as a search
  // tree whose root has index 1. Missing values get the lowest code in `left` and the
  // highest one in `right`; either may be null.
  void (*code)(const float* column, int64_t rows, const float* table, int64_t levels,
               int8_t* left, int8_t* right);
  // Replaces the values of a categorical column by their codes, as floats; NaN if there
  // is none. Denormals count as 0.
  void (*encode)(float* values, int64_t stride, int64_t count, const int32_t* codes,
                 int64_t num_values);
  // Writes the two planes of codes that `mark` reads; missing values have code 0.
  void (*split_codes)(const float* codes, int64_t count, bool wide, int8_t* first,
                      int8_t* second);
  // Writes the planes of sets: -1 if a row's code is in the set, else 0; `rows` is a
  // multiple of 64. The planes of narrow codes c hold c / 8 and 1 << c % 8, and their
  // sets have 256 bits; the planes of wide codes hold the low and the high bytes. The
  // second plane follows at distance `stride`.
  void (*mark)(const CategorySet* sets, int64_t num_sets, const uint32_t* words,
               int64_t rows, int64_t stride, int8_t* codes);
  // scores[i] += leaf_value[the leaf of row i]; `rows` is a multiple of 64.
  void (*add_tree)(const CodedTree& tree, const int8_t* codes, int64_t rows,
                   const float* leaf_value, float* scores);
  // Adds the values of the leaves, tree by tree, to the scores [rows, width]; `rows` is
  // a multiple of 64.
  void (*add_leaves)(const LeafRows& leaves, int64_t rows, float* scores);
  // Writes the leaf of each row.
  void (*find_leaves)(const CodedTree& tree, const int8_t* codes, int64_t rows,
                      int32_t* leaf);
  // Writes the leaves of rows x [rows, F] in several trees: leaf [trees, rows].
  // Denormals and categories of x have been replaced. `packed` may hold the nodes of
  // linked trees, or be null.
  void (*walk)(const Ensemble& model, const PackedNode* packed, int64_t first_tree,
               int64_t num_trees, const float* x, int64_t rows, int64_t num_features,
               int32_t* leaf);
  // From so many rows on, coding 64 rows takes less time than walking, if the codes of
  // the ensemble are known.
  int64_t coded_rows;
};

JBOOST_DECLARE_LOOPS(PredictLoops)

struct CodedModel;

// Whether all features of the nodes and of linear terms are columns of the matrix.
bool HasFeatures(const Ensemble& model, int64_t num_features);

// Whether all children of linked nodes are nodes.
bool HasChildren(const Ensemble& model);

void Predict(const Pool& pool, const Ensemble& model, const Matrix& matrix,
             const Answer& answer);

// The same for many calls: the codes of the ensemble are kept from the first call for
// which, or call after which, they are worth their computation. Its arrays stay in the
// memory of the caller. Calls may overlap.
class ReadyModel {
 public:
  ReadyModel(const Ensemble& model, int64_t num_features, const Categories& categories);
  ~ReadyModel();

  void Predict(const Pool& pool, const Matrix& matrix, const Answer& answer);

  const Ensemble model;
  const int64_t num_features;
  const Categories categories;

 private:
  std::shared_ptr<const CodedModel> FindCodes(const Pool& pool, const Matrix& matrix);

  std::mutex mutex_;      // of the following
  int64_t num_rows_ = 0;  // of all calls until the codes were computed
  bool finished_ = false;
  std::shared_ptr<const CodedModel> coded_;  // null: too many thresholds for codes
};

}  // namespace jboost

#endif  // JBOOST_PREDICT_H_
