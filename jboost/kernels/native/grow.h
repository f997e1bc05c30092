// SPDX-License-Identifier: Apache-2.0
// Growing one tree level by level.
//
// Rows are kept in chunks of 16,384. Within a chunk, the rows in the bag are grouped by
// slot, which stands for a node of the level: `index` holds their positions in the
// chunk (16 bits), and `words` their quantized gradients and curvatures in the same
// order. A segment says where the rows of a slot lie in a chunk. So every chunk is
// partitioned by itself, in cache. Sums are of integers, so they do not depend on the
// order of rows.
//
//   chunk 0  | slot 0: 3 7 8 | slot 1: 0 1 2 9 ... |     segments [chunk][slot] =
//   chunk 1  | slot 0: 1 4   | slot 1: 0 2 3 5 ... |       {begin, end}
//
// A word is (curvature << 32) + gradient, so one 64-bit addition sums both.
#ifndef JBOOST_GROW_H_
#define JBOOST_GROW_H_

#include <cstdint>
#include <vector>

#include "isa.h"
#include "parallel.h"

namespace jboost {

constexpr int64_t kChunk = 16384;

constexpr int64_t NumChunks(int64_t num_rows) {
  return (num_rows + kChunk - 1) / kChunk;
}

struct Segment {
  int32_t begin, end;
};

// The structure of sparse codes; see sparse.h.
struct SparseColumns {
  const int32_t* starts;  // [F + 1]
  const int32_t* rows;    // [E]
  const void* absent;     // [F], codes
};

// Codes in two layouts: by feature, for routing rows, and in rows of `width` features,
// for sums. More than 32 features are divided into blocks of 16.
struct Codes {
  // [F, N]; if `sparse` is set, the stored codes [E]; null: rows are routed by `packed`
  const void* columns;
  const void* packed;  // [blocks, N, width]
  int64_t num_rows, num_features, num_blocks, width;
  bool wide;  // uint16 instead of uint8
  const SparseColumns* sparse;

  int64_t code_size() const { return wide ? 2 : 1; }
};

// A feature's codes of one chunk: codes[i * stride] is that of the i-th row.
struct Column {
  const void* codes;
  int64_t stride;
};

// The rows of one node in one chunk, as loops take them.
struct RowRange {
  const void* packed;  // the chunk's first row of one block
  const uint16_t* index;
  const int64_t* words;
  int64_t count, width;
  int64_t num_features;  // of the block, at most 32
  int64_t stride;        // cells of a feature in the scratch table
};

constexpr int64_t kByteStride = 256;  // the stride of uint8 codes

// One slot's best split so far.
struct BestSplit {
  float gain;
  int32_t feature, threshold;
  bool missing_left;
};

struct SplitLimits {
  float gradient_unit, curvature_unit, l2, min_weight;
  int32_t min_count;  // 0: no limit
};

// The limits on the leaf values below one node.
struct ValueLimits {
  float l1, low, high;
};

// What WeighRows reads and writes, [N].
struct WeighedRows {
  const uint8_t* in_bag;
  const float* weights;
  const float* gradient;
  const float* curvature;
  float mean;
  float* weighed_gradient;
  float* weighed_curvature;
  uint8_t* times;
};

// What SplitPairs reads, [N] pairs and weights, and writes, [N].
struct PairedRows {
  const float* pairs;
  const float* weights;
  float* gradient;
  float* curvature;
};

struct GrowLoops {
  // scratch[f * stride + code] += word, for all rows and features.
  void (*sum_words)(const RowRange&, bool wide, int64_t* scratch);
  // The same with {word, 1} in place of a word.
  void (*sum_words_and_counts)(const RowRange&, bool wide, int64_t* scratch);
  // Moves the rows of a segment that go left before those that go right, keeping their
  // order; returns how many go left, and adds the number of rows with code 0 to
  // *missing.
  int64_t (*partition)(const Column& column, bool wide, uint32_t threshold,
                       bool missing_left, int64_t count, uint16_t* index,
                       int64_t* words, uint16_t* index_scratch, int64_t* words_scratch,
                       int64_t* missing);
  // At the last level, rows need not move: leaf[index] = left_leaf, or left_leaf + 1.
  void (*write_leaves)(const Column& column, bool wide, uint32_t threshold,
                       bool missing_left, int64_t count, const uint16_t* index,
                       int32_t left_leaf, int32_t* leaf, int64_t* num_left,
                       int64_t* missing);
  // See SplitPairs.
  bool (*split_pairs)(const PairedRows& rows, int64_t begin, int64_t end);
  // See WeighRows.
  void (*weigh_rows)(const WeighedRows& rows, int64_t begin, int64_t end);
  // The bits of the greatest magnitude of the rows in the bag; and the sum of their
  // magnitudes times `in_bag`, in units (see exact_sum.h), added to high * 2^19 + low.
  uint32_t (*greatest_bits)(const float* values, const uint8_t* in_bag, int64_t count);
  void (*sum_magnitudes)(const float* values, const uint8_t* in_bag, int64_t count,
                         float up, int64_t* high, int64_t* low);
  // Rounds the derivatives of a chunk to words; see
  // jboost.numerics.exact.quantize.
  void (*quantise)(const float* gradient, const float* curvature, int64_t first_row,
                   int64_t count, const float* scale, const uint32_t* seed,
                   bool stochastic, bool uniform, const uint8_t* in_bag,
                   int64_t* words);
  // Looks for a better split in one feature's cumulative sums.
  void (*search_feature)(const int32_t* gradient, const int32_t* curvature,
                         const int32_t* count, int64_t num_bins, const int32_t total[3],
                         float parent, const SplitLimits& limits, int32_t feature,
                         float* scratch, BestSplit* best);
  // The same where leaf values are limited; `sign`: 1 if they must not decrease with
  // the feature, -1 if they must not increase, 0 if they are free, as they are from
  // threshold `free_from` on, above which are only missing values.
  void (*search_limited_feature)(const int32_t* gradient, const int32_t* curvature,
                                 const int32_t* count, int64_t num_bins,
                                 const int32_t total[3], float parent,
                                 const SplitLimits& limits, const ValueLimits& values,
                                 int32_t sign, int64_t free_from, int32_t feature,
                                 float* scratch, BestSplit* best);
  // The greatest magnitude of the gradients in `words`, and the sum of their squares,
  // as multiples of 1 / `up`: high * 2^19 + low, see exact_sum.h.
  int32_t (*greatest_gradient)(const int64_t* words, int64_t count);
  void (*sum_squares)(const int64_t* words, int64_t count, float up, int64_t* high,
                      int64_t* low);
};

JBOOST_DECLARE_LOOPS(GrowLoops)

// The state of the rows while a tree grows; see the top of this file.
struct Rows {
  int64_t* words;     // [N]
  uint16_t* index;    // [N]
  Segment* segments;  // [chunks, slots]
  int64_t num_slots;
};

// packed[b][i][j] = columns[b * width + j][i], at most num_bins - 1; 0 beyond the last
// feature.
void PackCodes(const Pool& pool, const Codes& codes, int64_t num_bins, void* packed);

// out[m][f][b][c] = the sum of channels[i][c] over the rows i with node[i] = m whose
// code of feature f is b.
bool BuildHistogram(const Pool& pool, const Codes& codes, const int32_t* channels,
                    int64_t num_channels, const int32_t* node, int64_t num_nodes,
                    int64_t num_bins, int32_t* out);

// Whether a segment's rows, index[0 .. size), lie in a chunk of `count` rows.
bool AreInChunk(const uint16_t* index, int64_t size, int64_t count);

// Takes pairs of gradient and curvature apart; both become 0 where one is not finite.
// Returns whether those of all rows whose weight is positive are finite.
bool SplitPairs(const Pool& pool, const PairedRows& rows, int64_t num_rows);

// Weighs the derivatives of the rows in the bag, divides them by `mean`, and tells how
// many times each row counts. See weigh_rows of jboost.boosting.round.
void WeighRows(const Pool& pool, const WeighedRows& rows, int64_t num_rows);

// How derivatives become integers; see jboost.numerics.exact.
struct Rounding {
  float scale[2];  // of gradients and of curvatures
  bool stochastic;
  bool uniform;  // all rows have the same curvature: its integers count rows
};

// Quantizes the derivatives (see quantise of jboost.numerics.exact), and puts the
// rows in the bag into slot 0. `in_bag` says how many times a row counts, 0 for rows
// outside the bag; without `uniform` it multiplies the derivatives. `first_row` is the
// number of the first row, if these are not all rows.
void PlaceRows(const Pool& pool, int64_t num_rows, const float* gradient,
               const float* curvature, const uint8_t* in_bag, const uint32_t* seed,
               const Rounding& rounding, int64_t first_row, const Rows& rows);

// The bits of the greatest magnitudes of the gradients and of the curvatures of the
// rows in the bag, and the number of these rows.
void FindGreatestDerivatives(const Pool& pool, int64_t num_rows, const float* gradient,
                             const float* curvature, const uint8_t* in_bag,
                             uint32_t bits[2], int64_t* num_in_bag);

// Sums the magnitudes of the values of rows in the bag, which are finite, as multiples
// of 1 / up; digits of an ExactSum.
void SumMagnitudes(const Pool& pool, int64_t num_rows, const float* values,
                   const uint8_t* in_bag, float up, int32_t digits[4]);

// Chooses scales (see choose_scale). `units` are the values of 1 in quantized gradients
// and curvatures.
Rounding ChooseRounding(const Pool& pool, int64_t num_rows, const float* gradient,
                        const float* curvature, const uint8_t* in_bag, bool uniform,
                        float units[2], int64_t* num_in_bag);

// Starts a tree: chooses scales and places the rows.
void StartRows(const Pool& pool, int64_t num_rows, const float* gradient,
               const float* curvature, const uint8_t* in_bag, const uint32_t* seed,
               bool uniform, const Rows& rows, float units[2]);

struct Histograms {
  int32_t* sums;  // [slots, channels, F, B], cumulative over bins
  int64_t num_slots, num_channels, num_bins;
  bool counted;      // whether the third channel is filled
  bool add = false;  // to what `sums` holds
};

// One node to sum. For a pair of children, only the smaller one is summed. The larger
// one gets its histogram, in the place of the parent's, by subtraction. (The sums are
// integers, so this is exact.)
struct NodeSum {
  int64_t slot;           // whose rows are summed
  int64_t place;          // where its histogram goes
  int64_t sibling_place;  // holds the parent, gets parent minus slot; -1: none
};

// Turns the sums of words, [F, row], into cumulative histograms; subtracts them from
// the parent's, if there is one.
void FinishNode(const int64_t* scratch, int64_t row, const Histograms& histograms,
                const NodeSum& node, int64_t first_feature, int64_t used,
                int64_t num_features);

bool SumNodes(const Pool& pool, const Codes& codes, const Rows& rows,
              const NodeSum* nodes, int64_t num_nodes, const Histograms& histograms);

// The pairs of children whose histograms are needed.
struct Children {
  const int32_t* source;        // [pairs]: the parent's slot; from the first -1 on none
  const uint8_t* left_smaller;  // [pairs]
  const int32_t* old_place;     // [slots]: of the parents' histograms
  int32_t* place;               // [slots]: of the children's
  int64_t num_slots, num_pairs;
};

// Chooses which children are summed, and where the histograms of both go: the larger
// child takes its parent's place, the smaller one a place that no parent holds. Returns
// false if there are too few places, or parents that are no slots or share a place.
bool PlaceChildren(const Children& children, std::vector<NodeSum>* nodes);

struct Splits {  // [slots]
  const int32_t* feature;
  const int32_t* threshold;
  const uint8_t* missing_left;
  const uint8_t* found;
  // Of splits by categories (see categories.h), [slots, words]; null without.
  const uint32_t* left_codes = nullptr;
  const uint32_t* absent_codes = nullptr;
  int64_t num_words = 0;
};

struct SplitOutput {  // [slots]
  int32_t* feature;
  int32_t* threshold;
  uint8_t* missing_left;
  float* gain;
  uint8_t* found;
};

// The limits on the leaf values of each slot, and (written) of the children of its
// split.
struct LimitsOfSlots {
  float l1;
  const float* bounds;      // [slots, 2]
  const int32_t* monotone;  // [F]
  float* child_bounds;      // [slots, 2, 2]
};

// What a split's gain is compared with.
struct NodeScore {
  float parent, size;  // the node's score, and the magnitude of its terms
  ValueLimits values;  // where leaf values are limited
};

// The score of a slot's node, from its sums; `slots` may be null.
NodeScore ScoreNode(const int32_t total[2], const SplitLimits& limits,
                    const LimitsOfSlots* slots, int64_t slot);

// Writes the best split of a slot, which has the sums `left` on its left; `is_missing`:
// above the threshold are only missing values.
void WriteSplit(int64_t slot, const BestSplit& best, const int32_t left[2],
                const int32_t total[2], bool is_missing, const NodeScore& node,
                const SplitLimits& limits, float min_gain, const LimitsOfSlots* slots,
                const SplitOutput& splits);

// The operands of a search for splits.
struct Search {
  Histograms histograms;
  int64_t num_features;
  const int32_t* place;     // [slots]: of each slot's histogram
  const int32_t* position;  // [slots]: of its node on the level; -1: an empty slot
  const uint8_t* masks;     // [slots, F]: which features may be split
  SplitLimits limits;
  float min_gain;

  int64_t num_slots() const { return histograms.num_slots; }
};

// Finds the best split of each slot; `values` may be null.
void FindSplits(const Pool& pool, const Search& search, const LimitsOfSlots* values,
                const SplitOutput& splits);

// A tree in heap order, [nodes].
struct TreeNodes {
  const int32_t* feature;
  const int32_t* threshold;
  const uint8_t* missing_left;
  const uint32_t* left_codes = nullptr;  // [nodes, words]; null without categories
  int64_t num_words = 0;
};

// The same while it grows.
struct TreeArrays {
  int32_t* feature;
  int32_t* threshold;
  uint8_t* missing_left;
  uint32_t* left_codes = nullptr;
  int64_t num_words = 0;
};

// The rows of a split slot that go left, that go right, and that have a missing value
// (these are among the ones that go left or right).
struct Sides {
  int64_t left = 0, right = 0, missing = 0;
};

// Moves the rows of every split slot to its children: those of the r-th split are slots
// 2r and 2r + 1. Rows whose node is not split get their leaf, and so do all rows at the
// last level. `position` [slots] is that of each slot's node on the level, -1 for empty
// slots. Writes `sides` [slots] if it is not null. Returns false (the rows are then
// lost) if the index or sparse entries lead out of a chunk.
bool RouteRows(const Pool& pool, const Codes& codes, const Splits& splits,
               const int32_t* position, int64_t level, int64_t max_depth,
               const Rows& rows, int32_t* leaf, Sides* sides);

// The same numbers from cumulative histograms of all rows.
void CountSides(const Histograms& histograms, int64_t num_features,
                const int32_t* place, const Splits& splits, Sides* sides);

// What a level updates.
struct LevelState {
  TreeArrays tree;
  int32_t* position;  // [slots]: of each slot's node on its level; -1: an empty slot
  int32_t* source;    // [pairs]: the parent's slot; -1 beyond the splits found
  uint8_t* left_smaller;  // [pairs]: the left child has no more rows than the right
};

// Writes the splits into the tree, decides where missing values go, and gives slots to
// the children.
void SettleSplits(const Splits& splits, const Sides* sides, int64_t num_slots,
                  int64_t level, int64_t max_depth, const LevelState& state);

// Finds the leaf of every row with skip[i] == 0. Returns false if sparse entries lead
// out of a chunk.
bool FindLeaves(const Pool& pool, const Codes& codes, const TreeNodes& tree,
                int64_t max_depth, const uint8_t* skip, int32_t* leaf);

}  // namespace jboost

#endif  // JBOOST_GROW_H_
