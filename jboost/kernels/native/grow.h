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

// Calls `body` with the codes as a pointer to their type.
template <class Body>
auto WithCodes(const void* codes, bool wide, const Body& body) {
  return wide ? body(static_cast<const uint16_t*>(codes))
              : body(static_cast<const uint8_t*>(codes));
}

// A feature's codes of one chunk: codes[i * stride] is that of the i-th row.
struct Column {
  const void* codes;
  int64_t stride;
  bool wide;
};

// Which codes a split sends right: those above the threshold, and 0 (missing) unless
// `missing_left`; or, by categories, those whose side is odd (see CodeTable).
struct SplitRule {
  uint32_t threshold;
  bool missing_left;
  const uint8_t* sides;  // [last_code + 1]; null: the threshold decides
  int64_t last_code;     // greater codes count as this one
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

// The cumulative sums of one feature, [num_bins].
struct BinSums {
  const int32_t* gradient;
  const int32_t* curvature;
  const int32_t* count;
  int64_t num_bins;
};

// What a split's gain is compared with.
struct NodeScore {
  float parent, size;  // the node's score, and the magnitude of its terms
  bool limited;        // whether leaf values are limited, by `values`
  ValueLimits values;
};

// The derivatives of rows, [N].
struct Derivatives {
  const float* gradient;
  const float* curvature;
  const uint8_t* in_bag;  // how many times a row counts; 0 outside the bag
  int64_t num_rows;
  bool uniform;  // all rows have the same curvature: its integers count rows
};

// How derivatives become integers; see jboost.numerics.exact.
struct Rounding {
  float scale[2];  // of gradients and of curvatures
  bool stochastic;
};

// What WeighRows reads and writes, [N].
struct WeighedRows : Derivatives {
  const float* weights;
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
  // order; returns how many go left, and adds the number of missing values to
  // *missing.
  int64_t (*partition)(const Column& column, const SplitRule& rule, int64_t count,
                       uint16_t* index, int64_t* words, uint16_t* index_scratch,
                       int64_t* words_scratch, int64_t* missing);
  // At the last level, rows need not move: leaf[index] = left_leaf, or left_leaf + 1.
  int64_t (*write_leaves)(const Column& column, const SplitRule& rule, int64_t count,
                          const uint16_t* index, int32_t left_leaf, int32_t* leaf,
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
  // Rounds the derivatives of rows [begin, begin + count) to words; see
  // jboost.numerics.exact.quantize. `first_row` is the number of row 0.
  void (*quantise)(const Derivatives& rows, int64_t begin, int64_t count,
                   int64_t first_row, const Rounding& rounding, const uint32_t* seed,
                   int64_t* words);
  // Looks for a better split in one feature's cumulative sums. Where leaf values are
  // limited, `sign` is 1 if they must not decrease with the feature, -1 if they must
  // not increase, and 0 if they are free, as they are from threshold `free_from` on,
  // above which are only missing values.
  void (*search)(const BinSums& sums, const int32_t total[3], const NodeScore& node,
                 const SplitLimits& limits, int32_t sign, int64_t free_from,
                 int32_t feature, float* scratch, BestSplit* best);
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
void WeighRows(const Pool& pool, const WeighedRows& rows);

// Quantizes the derivatives, and puts the rows in the bag into slot 0. Without
// `uniform` derivatives are multiplied by `in_bag`. `first_row` is the number of the
// first row, if these are not all rows.
void PlaceRows(const Pool& pool, const Derivatives& derivatives, const uint32_t* seed,
               const Rounding& rounding, int64_t first_row, const Rows& rows);

// The bits of the greatest magnitudes of the gradients and of the curvatures of the
// rows in the bag, and the number of these rows.
void FindGreatestDerivatives(const Pool& pool, const Derivatives& rows,
                             uint32_t bits[2], int64_t* num_in_bag);

// Sums the magnitudes of the values of rows in the bag, which are finite, as multiples
// of 1 / up; digits of an ExactSum.
void SumMagnitudes(const Pool& pool, int64_t num_rows, const float* values,
                   const uint8_t* in_bag, float up, int32_t digits[4]);

// Chooses scales (see choose_scale). `units` are the values of 1 in quantized gradients
// and curvatures.
Rounding ChooseRounding(const Pool& pool, const Derivatives& rows, float units[2],
                        int64_t* num_in_bag);

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

// The splits of a level, [slots].
struct Splits {
  int32_t* position;  // of the node on the level; -1: an empty slot
  int32_t* feature;
  int32_t* threshold;
  uint8_t* missing_left;
  uint8_t* found;
  float* gain;
  float* child_bounds;  // [slots, 2, 2]: of leaf values, where they are limited
  // Of splits by categories (see categories.h), [slots, words]; null without.
  uint32_t* left_codes;
  uint32_t* absent_codes;
  int64_t num_words;
};

// Whether a gain pays for a leaf, and exceeds the rounding error of a node's score.
inline bool IsWorth(float gain, float size, float min_gain) {
  return gain > min_gain && 2.0f * gain > 1e-6f * size;
}

// The limits on the leaf values of each slot.
struct LimitsOfSlots {
  float l1;
  const float* bounds;      // [slots, 2]
  const int32_t* monotone;  // [F]
};

// The score of a slot's node, from its sums; `slots` may be null.
NodeScore ScoreNode(const int32_t total[2], const SplitLimits& limits,
                    const LimitsOfSlots* slots, int64_t slot);

// Writes the best split of a slot, which has the sums `left` on its left; `is_missing`:
// above the threshold are only missing values.
void WriteSplit(int64_t slot, const BestSplit& best, const int32_t left[2],
                const int32_t total[2], bool is_missing, const NodeScore& node,
                const SplitLimits& limits, float min_gain, const LimitsOfSlots* slots,
                const Splits& splits);

// The operands of a search for splits.
struct Search {
  Histograms histograms;
  int64_t num_features;
  const int32_t* place;     // [slots]: of each slot's histogram
  const int32_t* position;  // [slots]: of its node on the level; -1: an empty slot
  const uint8_t* masks;     // [slots, F]: which features may be split
  SplitLimits limits;
  float min_gain;
  const uint32_t* seed;  // [2]: of the tree
  int64_t level;
  int32_t rows_per_threshold;  // 0: every threshold is tried

  int64_t num_slots() const { return histograms.num_slots; }
};

// Draws the ranks, ascending from 0, of the cuts of a feature that are tried in a slot
// with `num_rows` rows; returns false if all are tried. See draw_thresholds of
// jboost.trees.splitting.
bool DrawThresholds(const Search& search, int64_t slot, int32_t num_rows,
                    int64_t feature, int64_t cuts, std::vector<int32_t>* ranks);

// The cumulative sums of one feature at the cuts that are tried; [0]: missing values.
struct DrawnSums {
  std::vector<int32_t> sums[3];

  // `at`: the indices in `given` of the cuts that are tried.
  BinSums Take(const BinSums& given, bool counted, const std::vector<int32_t>& at);
};

// Finds the best split of each slot; `values` may be null.
void FindSplits(const Pool& pool, const Search& search, const LimitsOfSlots* values,
                const Splits& splits);

// A tree in heap order, [nodes].
struct TreeArrays {
  int32_t* feature;
  int32_t* threshold;
  uint8_t* missing_left;
  uint32_t* left_codes = nullptr;  // [nodes, words]; null without categories
  int64_t num_words = 0;
};

// The rows of a split slot that go left, that go right, and that have a missing value
// (these are among the ones that go left or right).
struct Sides {
  int64_t left = 0, right = 0, missing = 0;
};

// Moves the rows of every split slot to its children: those of the r-th split are slots
// 2r and 2r + 1. Rows whose node is not split get their leaf, and so do all rows at the
// last level. Writes `sides` [slots] if it is not null. Returns false (the rows are
// then lost) if the index or sparse entries lead out of a chunk.
bool RouteRows(const Pool& pool, const Codes& codes, const Splits& splits,
               int64_t level, int64_t max_depth, const Rows& rows, int32_t* leaf,
               Sides* sides);

// The same numbers from cumulative histograms of all rows.
void CountSides(const Histograms& histograms, int64_t num_features,
                const int32_t* place, const Splits& splits, Sides* sides);

// Finds the leaf of every row with skip[i] == 0. Returns false if sparse entries lead
// out of a chunk.
bool FindLeaves(const Pool& pool, const Codes& codes, const TreeArrays& tree,
                int64_t max_depth, const uint8_t* skip, int32_t* leaf);

}  // namespace jboost

#endif  // JBOOST_GROW_H_
