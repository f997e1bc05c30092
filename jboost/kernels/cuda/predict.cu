// SPDX-License-Identifier: Apache-2.0
// Prediction: each thread sends one row through all trees, in order, so that scores are
// added in the order of plain XLA; see ../../model/scores.py.
//
// Values come by column. Where a block's values fit into shared memory, they are read
// once; there, threads of a warp never wait for each other.
//
//   trees: R rounds of S trees with I nodes. A node is a pair of words: its feature,
//   with bit 30 set where missing values go left, and its threshold. A threshold that
//   is NaN stands for a split by categories: bit c % 32 of word c / 32 of the node's
//   set says whether category c goes left. left_child is null in heap order.
#include "prelude.h"

struct Forest {
  const int2* nodes;
  const u32* sets;
  const int* left_child;
  i64 num_nodes, num_words, depth;
  bool has_sets, is_linked;
};

struct Values {
  const float* at;
  i64 step;  // from one feature to the next

  __device__ float of(int feature) const { return at[feature * step]; }
};

// Reads the values of the thread's row. No thread reads what another one has written.
__device__ __forceinline__ Values read_values(const float* columns, i64 rows,
                                              i64 features, i64 row, bool shared) {
  JBOOST_SHARED(memory);
  float* tile = (float*)memory;  // [feature][thread]
  if (!shared) return Values{columns + row, rows};
  for (i64 f = 0; f < features; ++f)
    tile[f * blockDim.x + threadIdx.x] = columns[f * rows + row];
  return Values{tile + threadIdx.x, (i64)blockDim.x};
}

__device__ __forceinline__ bool is_in_set(const u32* words, i64 num_words,
                                          float value) {
  // Also false for NaN, which the caller looks at itself.
  if (!(value >= 0 && value < 32.0f * num_words)) return false;
  const int code = (int)value;
  return (words[code / 32] >> (code % 32)) & 1;
}

__device__ __forceinline__ int find_leaf(const Forest& forest, i64 tree,
                                         const Values& values) {
  const i64 first = tree * forest.num_nodes;
  int node = 0;
  for (int level = 0; level < forest.depth; ++level) {
    const int2 fields = forest.nodes[first + node];
    const float threshold = __int_as_float(fields.y);
    const float value = values.of(fields.x & 0x3fffffff);
    bool right = value > threshold;
    if (forest.has_sets && threshold != threshold)
      right = !is_in_set(forest.sets + (first + node) * forest.num_words,
                         forest.num_words, value);
    if (value != value) right = (fields.x >> 30 & 1) == 0;
    if (forest.is_linked) {
      const int left = forest.left_child[first + node];
      node = left + (right && left != node);
    } else {
      node = 2 * node + 1 + right;
    }
  }
  return forest.is_linked ? node : node - (int)forest.num_nodes;
}

// Writes the scores [first, last) of a row: init_score plus the sum of the leaf values
// of all rounds, or, if staged, of the rounds up to each. `scores` are those of the
// row, of the first round if staged; `next_round` is the step between rounds if staged,
// else 0. Several scores are summed in the memory of the result.
__device__ __forceinline__ void add_rounds(const Forest& forest, const Values& values,
                                           const float* leaf_value,
                                           const float* init_score, float* scores,
                                           i64 rounds, i64 trees, i64 num_scores,
                                           i64 num_leaves, i64 next_round, i64 first,
                                           i64 last) {
  float one = 0;  // the sum, where there is only one score
  const bool single = last - first == 1;
  if (next_round == 0)
    for (i64 k = first; k < last; ++k) scores[k] = 0;
  for (i64 round = 0; round < rounds; ++round) {
    const i64 tree = round * trees + (trees == 1 ? 0 : first);
    const float* value =
        leaf_value + round * num_scores * num_leaves + find_leaf(forest, tree, values);
    float* now = scores + round * next_round;
    if (single) {
      one = add(one, value[first * num_leaves]);
      if (next_round != 0) now[first] = add(init_score[first], one);
      continue;
    }
    const bool fresh = next_round != 0 && round == 0;
    for (i64 k = 0; k < num_scores; ++k)
      now[k] = add(fresh ? 0 : now[k - next_round], value[k * num_leaves]);
  }
  if (single && next_round == 0) scores[first] = add(init_score[first], one);
  if (single) return;
  for (i64 round = 0; round < (next_round == 0 ? 1 : rounds); ++round)
    for (i64 k = 0; k < num_scores; ++k)
      scores[round * next_round + k] =
          add(init_score[k], scores[round * next_round + k]);
}

// scores [N, K], or [R, N, K] if staged; leaf_value [R, K, L]. Where each score has a
// tree, axis y of the grid is the score; otherwise a thread adds all scores.
JBOOST_KERNEL predict(Strides strides, const float* columns, const int2* nodes,
                      const u32* sets, const int* left_child, const float* leaf_value,
                      const float* init_score, float* scores, i64 rows, i64 features,
                      i64 rounds, i64 trees, i64 num_scores, i64 num_nodes,
                      i64 num_leaves, i64 num_words, i64 depth, i64 linked, i64 shared,
                      i64 staged) {
  const Forest forest = {member(nodes, strides, 1),
                         member(sets, strides, 2),
                         member(left_child, strides, 3),
                         num_nodes,
                         num_words,
                         depth,
                         num_words != 0,
                         linked != 0};
  columns = member(columns, strides, 0);
  leaf_value = member(leaf_value, strides, 4);
  init_score = member(init_score, strides, 5);
  scores = member(scores, strides, 6);
  const i64 first = trees == num_scores ? blockIdx.y : 0;
  const i64 last = trees == num_scores ? first + 1 : num_scores;
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += step) {
    const Values values = read_values(columns, rows, features, row, shared != 0);
    add_rounds(forest, values, leaf_value, init_score, scores + row * num_scores,
               rounds, trees, num_scores, num_leaves, staged ? rows * num_scores : 0,
               first, last);
  }
}

// leaves [N, R S]; axis y of the grid divides the trees.
JBOOST_KERNEL find_leaves(Strides strides, const float* columns, const int2* nodes,
                          const u32* sets, const int* left_child, int* leaves, i64 rows,
                          i64 num_trees, i64 num_nodes, i64 num_words, i64 depth,
                          i64 linked) {
  const Forest forest = {member(nodes, strides, 1),
                         member(sets, strides, 2),
                         member(left_child, strides, 3),
                         num_nodes,
                         num_words,
                         depth,
                         num_words != 0,
                         linked != 0};
  columns = member(columns, strides, 0);
  leaves = member(leaves, strides, 4);
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += step) {
    const Values values = {columns + row, rows};
    for (i64 tree = blockIdx.y; tree < num_trees; tree += gridDim.y)
      leaves[row * num_trees + tree] = find_leaf(forest, tree, values);
  }
}
