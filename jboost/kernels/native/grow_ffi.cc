// SPDX-License-Identifier: Apache-2.0
// Bindings of growing: of grow.h and sparse.h, of the steps of one level, of tree.h and
// sorted.h, and of sampling.h.
//
// Of the steps of a level, each call takes the rows of one part, where rows are divided
// among devices or among blocks.
#include <algorithm>
#include <cstring>
#include <vector>

#include "categories.h"
#include "exact_sum.h"
#include "ffi.h"
#include "grow.h"
#include "sampling.h"
#include "scratch.h"
#include "sorted.h"
#include "sparse.h"
#include "tree.h"

namespace jboost {
namespace {

// Codes as a call gets them. `codes.sparse` points to `sparse`, so a Source stays where
// it is.
struct Source {
  Source() = default;
  Source(const Source&) = delete;

  Codes codes{};
  SparseColumns sparse{};
};

// Columns [F, N]; of a sparse matrix the stored codes [1, E].
void ReadColumns(Buffers& buffers, Source* source) {
  auto [features, rows] = buffers.NextShape<2>("columns");
  Codes& codes = source->codes;
  codes.num_features = features;
  codes.num_rows = rows;
  codes.wide = buffers.NextIsWide(Access::kOperand);
  codes.columns =
      buffers.Codes(Access::kOperand, "columns", {features, rows}, codes.wide);
}

// The last operands of a call on sparse codes: where each feature's entries start,
// their rows, and the codes of what is not stored. A call on columns [F, N] has none.
// Requires that the entries of each feature lie among those that are stored.
void ReadEntries(Buffers& buffers, int64_t num_rows, Source* source) {
  Codes& codes = source->codes;
  if (!buffers.HasOperands()) {
    Require(codes.num_rows == num_rows, "columns must be [F, N]");
    return;
  }
  int64_t entries = codes.num_rows;
  Require(codes.num_features == 1, "columns of sparse codes must be [1, E]");
  int64_t features = buffers.NextShape<1>("starts")[0] - 1;
  SparseColumns& sparse = source->sparse;
  sparse.starts = buffers.Operand<int32_t>("starts", {features + 1});
  sparse.rows = buffers.Operand<int32_t>("rows", {entries});
  sparse.absent =
      buffers.Codes(Access::kOperand, "absent codes", {features}, codes.wide);
  codes.num_features = features;
  codes.num_rows = num_rows;
  codes.sparse = &sparse;
  bool inside = sparse.starts[0] >= 0 && sparse.starts[features] <= entries;
  for (int64_t f = 0; f < features; ++f) {
    inside &= sparse.starts[f] <= sparse.starts[f + 1];
  }
  Require(inside, "starts must ascend from 0 to E");
}

// The state of the rows, which `start` makes and the other calls take: words, index and
// segments. Requires that every segment lies in its chunk.
Rows ReadRows(Buffers& buffers, Access access, int64_t num_rows) {
  Rows rows;
  rows.words =
      reinterpret_cast<int64_t*>(buffers.Read<int32_t>(access, "words", {num_rows, 2}));
  rows.index = buffers.Read<uint16_t>(access, "index", {num_rows});
  rows.num_slots = buffers.NextShape<3>("segments", access)[1];
  rows.segments = reinterpret_cast<Segment*>(buffers.Read<int32_t>(
      access, "segments", {NumChunks(num_rows), rows.num_slots, 2}));
  Require(rows.num_slots > 0, "there must be a slot");
  if (access == Access::kResult) return rows;
  bool inside = true;
  for (int64_t chunk = 0; chunk < NumChunks(num_rows); ++chunk) {
    int64_t count = std::min(kChunk, num_rows - chunk * kChunk);
    for (int64_t slot = 0; slot < rows.num_slots; ++slot) {
      const Segment& segment = rows.segments[chunk * rows.num_slots + slot];
      inside &= 0 <= segment.begin && segment.begin <= segment.end;
      inside &= segment.end <= count;
    }
  }
  Require(inside, "segments must lie in their chunks");
  return rows;
}

// The nodes of a tree.
void ReadNodes(Buffers& buffers, Access access, int64_t num_nodes, TreeArrays* tree) {
  tree->feature = buffers.Read<int32_t>(access, "tree feature", {num_nodes});
  tree->threshold = buffers.Read<int32_t>(access, "tree threshold", {num_nodes});
  tree->missing_left = buffers.Read<uint8_t>(access, "tree missing_left", {num_nodes});
}

// The derivatives of rows, and how many times each counts.
void ReadDerivatives(Buffers& buffers, Derivatives* rows) {
  rows->num_rows = buffers.NextShape<1>("gradient")[0];
  Shape shape = {rows->num_rows};
  rows->gradient = buffers.Operand<float>("gradient", shape);
  rows->curvature = buffers.Operand<float>("curvature", shape);
  rows->in_bag = static_cast<const uint8_t*>(
      buffers.Codes(Access::kOperand, "in_bag", shape, /*wide=*/false));
}

// The splits of a level; of categories, if sets have words.
void ReadSplits(Buffers& buffers, Access access, int64_t num_slots, int64_t num_words,
                Splits* splits) {
  Shape shape = {num_slots}, sets = {num_slots, num_words};
  splits->position = buffers.Read<int32_t>(access, "position", shape);
  splits->feature = buffers.Read<int32_t>(access, "feature", shape);
  splits->threshold = buffers.Read<int32_t>(access, "threshold", shape);
  splits->missing_left = buffers.Read<uint8_t>(access, "missing_left", shape);
  splits->found = buffers.Read<uint8_t>(access, "found", shape);
  splits->num_words = num_words;
  if (num_words == 0) return;
  splits->left_codes = buffers.Read<uint32_t>(access, "left_codes", sets);
  splits->absent_codes = buffers.Read<uint32_t>(access, "absent_codes", sets);
}

// Codes by row, [blocks, N, width]. The number of features comes from elsewhere.
void* ReadPacked(Buffers& buffers, Access access, Codes* codes) {
  auto [blocks, rows, width] = buffers.NextShape<3>("packed", access);
  codes->num_blocks = blocks;
  codes->num_rows = rows;
  codes->width = width;
  codes->wide = buffers.NextIsWide(access);
  void* packed = buffers.Codes(access, "packed", {blocks, rows, width}, codes->wide);
  codes->packed = packed;
  // Rows are written in words of 8 bytes, and summed up to 32 features at a time.
  Require(width > 0 && width <= 32 && width % 8 == 0,
          "the width of packed codes must be 8, 16, 24 or 32");
  return packed;
}

// The same for codes that were read by feature.
void* ReadPackedColumns(Buffers& buffers, Access access, Codes* codes) {
  Codes packed = *codes;
  void* data = ReadPacked(buffers, access, &packed);
  Require(packed.num_blocks * packed.width >= packed.num_features &&
              (packed.num_blocks - 1) * packed.width < packed.num_features,
          "packed must hold the codes of F features");
  Require(packed.num_rows == codes->num_rows && packed.wide == codes->wide,
          "packed must have the rows and the type of columns");
  *codes = packed;
  return data;
}

// Codes by feature or by row: either serves to route rows. The features of codes by row
// include padding.
void ReadLayout(Buffers& buffers, Source* source) {
  if (buffers.NextRank() != 3) return ReadColumns(buffers, source);
  ReadPacked(buffers, Access::kOperand, &source->codes);
  source->codes.num_features = source->codes.num_blocks * source->codes.width;
}

void PackImpl(Buffers& buffers, const Pool& pool) {
  int64_t num_bins = buffers.Attribute("num_bins");
  Source source;
  ReadColumns(buffers, &source);
  void* packed = ReadPackedColumns(buffers, Access::kResult, &source.codes);
  Require(num_bins > 0, "num_bins must be positive");
  buffers.Finish();
  PackCodes(pool, source.codes, num_bins, packed);
}

void SplitPairsImpl(Buffers& buffers, const Pool& pool) {
  int64_t count = buffers.NextShape<1>("pairs")[0];
  PairedRows rows;
  rows.pairs = reinterpret_cast<const float*>(
      buffers.Operand<std::complex<float>>("pairs", {count}));
  rows.weights = buffers.Operand<float>("weights", {count});
  rows.gradient = buffers.Result<float>("gradient", {count});
  rows.curvature = buffers.Result<float>("curvature", {count});
  uint8_t* finite = buffers.Result<uint8_t>("finite", {});
  buffers.Finish();
  *finite = SplitPairs(pool, rows, count);
}

void WeighRowsImpl(Buffers& buffers, const Pool& pool) {
  int64_t count = buffers.NextShape<1>("in_bag")[0];
  WeighedRows rows{};
  rows.num_rows = count;
  rows.in_bag = buffers.Operand<uint8_t>("in_bag", {count});
  rows.weights = buffers.Operand<float>("weights", {count});
  rows.gradient = buffers.Operand<float>("gradient", {count});
  rows.curvature = buffers.Operand<float>("curvature", {count});
  rows.mean = buffers.Scalar<float>("mean");
  rows.weighed_gradient = buffers.Result<float>("weighed gradient", {count});
  rows.weighed_curvature = buffers.Result<float>("weighed curvature", {count});
  rows.times = static_cast<uint8_t*>(
      buffers.Codes(Access::kResult, "times", {count}, /*wide=*/false));
  buffers.Finish();
  WeighRows(pool, rows);
}

void HistogramImpl(Buffers& buffers, const Pool& pool) {
  Source source;
  ReadColumns(buffers, &source);
  auto [num_rows, num_channels] = buffers.NextShape<2>("channels");
  const int32_t* channels =
      buffers.Operand<int32_t>("channels", {num_rows, num_channels});
  const int32_t* node = buffers.Operand<int32_t>("node", {num_rows});
  ReadEntries(buffers, num_rows, &source);
  auto shape = buffers.NextShape<4>("sums", Access::kResult);
  int64_t num_nodes = shape[0], num_bins = shape[2];
  int32_t* sums = buffers.Result<int32_t>(
      "sums", {num_nodes, source.codes.num_features, num_bins, num_channels});
  buffers.Finish();
  auto build = source.codes.sparse == nullptr ? BuildHistogram : BuildSparseHistogram;
  Require(build(pool, source.codes, channels, num_channels, node, num_nodes, num_bins,
                sums),
          "rows of entries must be below N");
}

template <bool kCategories>
void FindLeavesImpl(Buffers& buffers, const Pool& pool) {
  Source source;
  ReadLayout(buffers, &source);
  int64_t nodes = buffers.NextShape<1>("feature")[0], max_depth = 0;
  TreeArrays tree;
  ReadNodes(buffers, Access::kOperand, nodes, &tree);
  if (kCategories) {
    tree.num_words = buffers.NextShape<2>("left_codes")[1];
    tree.left_codes =
        buffers.Read<uint32_t>(Access::kOperand, "left_codes", {nodes, tree.num_words});
    Require(tree.num_words > 0, "sets of codes must have words");
  }
  int64_t num_rows = buffers.NextShape<1>("skip")[0];
  const uint8_t* skip = buffers.Operand<uint8_t>("skip", {num_rows});
  int32_t* leaf = buffers.InPlace<int32_t>("leaf", {num_rows});
  Require(!kCategories || !buffers.HasOperands(), "sparse codes have no categories");
  if (source.codes.packed == nullptr) ReadEntries(buffers, num_rows, &source);
  Require(source.codes.num_rows == num_rows, "codes must have N rows");
  while ((int64_t{1} << max_depth) - 1 < nodes) ++max_depth;
  Require((int64_t{1} << max_depth) - 1 == nodes,
          "a tree must have 2^max_depth - 1 nodes");
  buffers.Finish();
  bool inside = true;
  for (int64_t node = 0; node < nodes; ++node) {
    inside &= 0 <= tree.feature[node] && tree.feature[node] < source.codes.num_features;
  }
  Require(inside, "the nodes of a tree must split features below F");
  auto find = source.codes.sparse == nullptr ? FindLeaves : FindSparseLeaves;
  Require(find(pool, source.codes, tree, max_depth, skip, leaf),
          "the rows of a feature's entries must ascend below N");
}

void FindGreatestDerivativesImpl(Buffers& buffers, const Pool& pool) {
  Derivatives rows{};
  ReadDerivatives(buffers, &rows);
  float* greatest = buffers.Result<float>("greatest", {2});
  int32_t* count = buffers.Result<int32_t>("num_in_bag", {});
  buffers.Finish();
  uint32_t bits[2];
  int64_t num_in_bag;
  FindGreatestDerivatives(pool, rows, bits, &num_in_bag);
  std::memcpy(greatest, bits, sizeof bits);
  *count = static_cast<int32_t>(num_in_bag);
}

void SumMagnitudesImpl(Buffers& buffers, const Pool& pool) {
  Derivatives rows{};
  ReadDerivatives(buffers, &rows);
  const float* greatest = buffers.Operand<float>("greatest", {2});
  int32_t* digits = buffers.Result<int32_t>("digits", {2, 4});
  buffers.Finish();
  for (int64_t channel = 0; channel < 2; ++channel) {
    Unit unit = ChooseUnit(MagnitudeBits(greatest[channel]));
    std::fill_n(digits + 4 * channel, 4, 0);
    if (!IsFinite(greatest[channel])) continue;
    SumMagnitudes(pool, rows.num_rows, channel == 0 ? rows.gradient : rows.curvature,
                  rows.in_bag, unit.up, digits + 4 * channel);
  }
}

void StartRowsImpl(Buffers& buffers, const Pool& pool) {
  Derivatives derivatives{};
  derivatives.uniform = buffers.Attribute("uniform") != 0;
  ReadDerivatives(buffers, &derivatives);
  const uint32_t* seed = buffers.Operand<uint32_t>("seed", {2});
  const float* scale = buffers.Operand<float>("scale", {2});
  bool stochastic = buffers.Scalar<uint8_t>("stochastic") != 0;
  int32_t first_row = buffers.Scalar<int32_t>("first_row");
  Rows rows = ReadRows(buffers, Access::kResult, derivatives.num_rows);
  buffers.Finish();
  Rounding rounding{{scale[0], scale[1]}, stochastic};
  PlaceRows(pool, derivatives, seed, rounding, first_row, rows);
}

// The operands of sums of slots: codes by row come first, the rows elsewhere.
struct SlotSums {
  Codes codes{};
  const int32_t* slot = nullptr;
  int64_t num_slots = 0, num_columns = 0;
  Histograms histograms{};
};

void ReadSlotSums(Buffers& buffers, SlotSums* sums) {
  sums->codes.num_features = buffers.Scalar<int32_t>("num_features");
  sums->num_slots = buffers.NextShape<1>("slot")[0];
  sums->slot = buffers.Operand<int32_t>("slot", {sums->num_slots});
  auto [num_sums, channels, columns, bins] = buffers.NextShape<4>("sums");
  sums->num_columns = columns;
  sums->histograms = {
      buffers.InPlace<int32_t>("sums", {num_sums, channels, columns, bins}), num_sums,
      channels, bins, channels == 3};
  sums->histograms.add = true;
  Require(sums->num_slots == num_sums, "there must be a sum for each slot");
  Require(channels == 2 || channels == 3, "sums must have 2 or 3 channels");
  Require(0 < bins && bins <= (sums->codes.wide ? 65536 : kByteStride),
          "the codes of sums must fit their type");
}

void AddSlots(const Pool& pool, const Rows& rows, SlotSums* sums) {
  Codes& codes = sums->codes;
  Require(0 < codes.num_features && codes.num_features <= sums->num_columns &&
              sums->num_columns <= codes.num_blocks * codes.width,
          "num_features must be 1 to F, and packed must hold F features");
  codes.num_blocks = (codes.num_features + codes.width - 1) / codes.width;
  std::vector<NodeSum> nodes;
  for (int64_t i = 0; i < sums->num_slots && sums->slot[i] >= 0; ++i) {
    Require(sums->slot[i] < rows.num_slots, "slot must hold slots of segments");
    nodes.push_back({sums->slot[i], i, -1});
  }
  if (nodes.empty()) return;
  Require(SumNodes(pool, codes, rows, nodes.data(), static_cast<int64_t>(nodes.size()),
                   sums->histograms),
          "index must hold rows of a chunk");
}

void SumSlotsImpl(Buffers& buffers, const Pool& pool) {
  SlotSums sums;
  ReadPacked(buffers, Access::kOperand, &sums.codes);
  Rows rows = ReadRows(buffers, Access::kOperand, sums.codes.num_rows);
  ReadSlotSums(buffers, &sums);
  buffers.Finish();
  AddSlots(pool, rows, &sums);
}

// Requires that rows and the tree can be written by the splits of a level.
void CheckSplits(const Splits& splits, int64_t num_slots, int64_t level,
                 int64_t max_depth, int64_t num_features) {
  Require(0 < max_depth && max_depth < 31, "max_depth must be 1 to 30");
  Require(0 <= level && level < max_depth, "level must be between 0 and max_depth - 1");
  int64_t width = int64_t{1} << level, num_pairs = 0;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    Require(-1 <= splits.position[slot] && splits.position[slot] < width,
            "position must be -1 or that of a node of the level");
    if (!splits.found[slot]) continue;
    ++num_pairs;
    Require(splits.position[slot] >= 0, "splits must be of slots that hold a node");
    Require(0 <= splits.feature[slot] && splits.feature[slot] < num_features,
            "splits must be of features below F");
  }
  Require(level == max_depth - 1 || 2 * num_pairs <= num_slots,
          "there must be two slots for each split");
}

// The operands of routing rows.
struct Routing {
  Source source;
  Splits splits{};
  Rows rows{};
  int32_t* leaf = nullptr;
};

void ReadRouting(Buffers& buffers, Routing* routing) {
  ReadLayout(buffers, &routing->source);
  int64_t num_rows = routing->source.codes.num_rows;
  int64_t slots = buffers.NextShape<1>("position")[0];
  // After five arrays the rows begin with their words, int32; sets of codes are uint32.
  bool has_sets = buffers.NextIs(Access::kOperand, ffi::DataType::U32, 5);
  int64_t num_words =
      has_sets ? buffers.NextShape<2>("left_codes", Access::kOperand, 5)[1] : 0;
  Require(!has_sets || num_words > 0, "sets of codes must have words");
  ReadSplits(buffers, Access::kOperand, slots, num_words, &routing->splits);
  routing->rows = ReadRows(buffers, Access::kInPlace, num_rows);
  routing->leaf = buffers.InPlace<int32_t>("leaf", {num_rows});
  Require(routing->rows.num_slots == slots, "splits must be of the slots of segments");
}

void Route(const Pool& pool, const Routing& routing, int64_t level, int64_t max_depth) {
  const Codes& codes = routing.source.codes;
  CheckSplits(routing.splits, routing.rows.num_slots, level, max_depth,
              codes.num_features);
  Require(RouteRows(pool, codes, routing.splits, level, max_depth, routing.rows,
                    routing.leaf, nullptr),
          "index must hold rows of a chunk");
}

void RouteRowsImpl(Buffers& buffers, const Pool& pool) {
  int64_t level = buffers.Attribute("level");
  int64_t max_depth = buffers.Attribute("max_depth");
  Routing routing;
  ReadRouting(buffers, &routing);
  buffers.Finish();
  Route(pool, routing, level, max_depth);
}

// Both steps of a level, by one call.
void RouteAndSumImpl(Buffers& buffers, const Pool& pool) {
  int64_t level = buffers.Attribute("level");
  int64_t max_depth = buffers.Attribute("max_depth");
  SlotSums sums;
  ReadPacked(buffers, Access::kOperand, &sums.codes);
  Routing routing;
  ReadRouting(buffers, &routing);
  ReadSlotSums(buffers, &sums);
  Require(routing.source.codes.num_rows == sums.codes.num_rows,
          "codes by feature and by row must be of the same rows");
  buffers.Finish();
  Route(pool, routing, level, max_depth);
  AddSlots(pool, routing.rows, &sums);
}

void FindGreatestGradientImpl(Buffers& buffers, const Pool& pool) {
  int64_t num_rows = buffers.NextShape<2>("words")[0];
  Rows rows = ReadRows(buffers, Access::kOperand, num_rows);
  int32_t* greatest = buffers.Result<int32_t>("greatest", {});
  buffers.Finish();
  *greatest = FindGreatestGradient(pool, rows, num_rows);
}

void SumSquaresImpl(Buffers& buffers, const Pool& pool) {
  int64_t num_rows = buffers.NextShape<2>("words")[0];
  Rows rows = ReadRows(buffers, Access::kOperand, num_rows);
  int32_t greatest = buffers.Scalar<int32_t>("greatest");
  int64_t slots = buffers.NextShape<2>("digits", Access::kResult)[0];
  int32_t* digits = buffers.Result<int32_t>("digits", {slots, 4});
  Require(slots <= rows.num_slots, "there must be digits for slots only");
  buffers.Finish();
  SumSquares(pool, rows, num_rows, greatest, slots, digits);
}

// What a call's attributes say of its operands and results.
struct Options {
  bool limited, grouped, categorical;
};

// The attributes of a tree; then its seed, fractions and conditions of splits, and the
// number of columns that are features, those beyond being padding. `categories`:
// whether the call tells if there are some.
Options ReadLimits(Buffers& buffers, bool categories, TreeLimits* limits) {
  limits->max_depth = buffers.Attribute("max_depth");
  limits->max_leaves = buffers.Attribute("max_leaves");
  Require(0 < limits->max_depth && limits->max_depth < 31, "max_depth must be 1 to 30");
  limits->seed = buffers.Operand<uint32_t>("seed", {2});
  limits->fractions = buffers.Operand<float>("fractions", {3});
  limits->limits.l2 = buffers.Scalar<float>("l2");
  limits->min_gain = buffers.Scalar<float>("min_gain");
  limits->limits.min_weight = buffers.Scalar<float>("min_child_weight");
  int32_t least = buffers.Scalar<int32_t>("min_child_samples");
  limits->num_features = buffers.Scalar<int32_t>("num_features");
  limits->rows_per_threshold = buffers.Scalar<int32_t>("rows_per_threshold");
  // A child without rows has no gain, so a minimum of 1 needs no check (and rows are
  // not counted for it, but for a draw of thresholds).
  bool counted = least > 1 || limits->rows_per_threshold > 0;
  limits->limits.min_count = counted ? least : 0;
  return {buffers.Attribute("limited") != 0, buffers.Attribute("grouped") != 0,
          categories && buffers.Attribute("categorical") != 0};
}

// The limits that not every tree has.
void ReadOptions(Buffers& buffers, const Options& options, int64_t num_columns,
                 TreeLimits* limits, CategoryLimits* categories) {
  if (options.limited) {
    limits->l1 = buffers.Scalar<float>("l1");
    limits->bounds = buffers.Operand<float>("bounds", {2});
    limits->monotone = buffers.Operand<int32_t>("monotone", {num_columns});
  }
  if (options.grouped) {
    limits->num_groups = buffers.NextShape<2>("groups")[0];
    limits->groups =
        buffers.Operand<uint8_t>("groups", {limits->num_groups, num_columns});
  }
  if (options.categorical) {
    int64_t groups = buffers.NextShape<1>("categorical features")[0];
    categories->num_groups = groups;
    categories->features = buffers.Operand<int32_t>("categorical features", {groups});
    categories->num_codes = buffers.Operand<int32_t>("num_codes", {groups});
    categories->max_onehot = buffers.Scalar<int32_t>("max_onehot");
    limits->categories = categories;
  }
}

// Requires that the limits fit the columns; `named`: all columns must be features.
void CheckLimits(const TreeLimits& limits, int64_t num_columns, bool named) {
  int64_t used = limits.num_features;
  named |= limits.groups != nullptr || limits.bounds != nullptr;
  Require(0 < used && used <= num_columns && (!named || used == num_columns),
          "num_features must be 1 to F, and F where columns are named");
  for (int64_t g = 0; limits.categories != nullptr && g < limits.categories->num_groups;
       ++g) {
    int32_t feature = limits.categories->features[g];
    Require(0 <= feature && feature < used,
            "categorical features must be below num_features");
  }
}

// The left_codes and leaf_bounds of the nodes of a tree.
void ReadOptionalNodes(Buffers& buffers, Access access, int64_t num_nodes,
                       int64_t num_bins, const Options& options, TreeState* state) {
  if (options.limited) {
    state->leaf_bounds = buffers.Read<float>(access, "leaf bounds", {num_nodes + 1, 2});
  }
  if (options.categorical) {
    TreeArrays& tree = state->tree;
    tree.num_words = (num_bins + kWordBits - 1) / kWordBits;
    tree.left_codes =
        buffers.Read<uint32_t>(access, "tree left_codes", {num_nodes, tree.num_words});
  }
}

void CheckSlots(int64_t max_depth, int64_t num_slots) {
  Require(0 < num_slots && num_slots <= int64_t{1} << (max_depth - 1),
          "there must be 1 to 2^(max_depth - 1) slots");
}

void GrowImpl(Buffers& buffers, const Pool& pool) {
  int64_t num_bins = buffers.Attribute("num_bins");
  int64_t num_slots = buffers.Attribute("num_slots");
  Source source;
  ReadColumns(buffers, &source);
  Codes& codes = source.codes;
  bool dense = buffers.NextRank() == 3;
  if (dense) ReadPackedColumns(buffers, Access::kOperand, &codes);
  TreeRows rows{};
  ReadDerivatives(buffers, &rows);
  rows.uniform = buffers.Attribute("uniform") != 0;
  int64_t num_rows = rows.num_rows;
  TreeLimits limits{};
  Options options = ReadLimits(buffers, true, &limits);
  CheckSlots(limits.max_depth, num_slots);
  // What has F entries is read when F is known: sparse codes have their entries last.
  int64_t num_columns =
      dense ? codes.num_features : buffers.NextShape<1>("starts")[0] - 1;
  if (!dense) ReadEntries(buffers, num_rows, &source);
  CategoryLimits categories{};
  ReadOptions(buffers, options, num_columns, &limits, &categories);
  Require(codes.num_rows == num_rows, "codes must have N rows");
  Require(dense || !options.categorical, "sparse codes have no categories");
  Require(0 < num_bins && num_bins <= (codes.wide ? 65536 : kByteStride),
          "the bins must fit the type of the codes");
  int64_t nodes = (int64_t{1} << limits.max_depth) - 1;
  TreeState state{};
  ReadNodes(buffers, Access::kResult, nodes, &state.tree);
  rows.leaf = buffers.Result<int32_t>("leaf", {num_rows});
  ReadOptionalNodes(buffers, Access::kResult, nodes, num_bins, options, &state);
  int64_t channels = rows.uniform ? 2 : 3;
  buffers.Finish();
  CheckLimits(limits, num_columns, !dense);
  if (dense) {
    codes.num_features = limits.num_features;
    codes.num_blocks = (limits.num_features + codes.width - 1) / codes.width;
  }
  CallScratch<int64_t> words(num_rows);
  CallScratch<uint16_t> index(num_rows);
  CallScratch<Segment> segments(NumChunks(num_rows) * num_slots);
  CallScratch<int32_t> sums(num_slots * channels * num_columns * num_bins);
  CallScratch<SparseRow> sparse_rows(dense ? 0 : num_rows);
  rows.rows = {words.get(), index.get(), segments.get(), num_slots};
  rows.sparse_rows = sparse_rows.get();
  state.histograms = {sums.get(), num_slots, channels, num_bins,
                      limits.limits.min_count > 0 && channels == 3};
  Require(GrowTree(pool, codes, limits, rows, state),
          "entries must hold ascending rows below N, and splits must have two slots");
}

// The nodes whose histograms were summed: the smaller child of each pair; on the first
// level, the root.
void ListSummed(const int32_t* summed, int64_t count, int64_t level,
                const TreeState& state, std::vector<NodeSum>* nodes) {
  int64_t slots = state.histograms.num_slots;
  for (int64_t i = 0; i < count && summed[i] >= 0; ++i) {
    int64_t slot = summed[i], sibling = slot ^ 1;
    Require(slot < slots && (level == 0 || sibling < slots), "summed must hold slots");
    bool inside = 0 <= state.place[slot] && state.place[slot] < slots;
    inside &= level == 0 || (0 <= state.place[sibling] && state.place[sibling] < slots);
    Require(inside, "place must hold slots");
    nodes->push_back({slot, state.place[slot], level == 0 ? -1 : state.place[sibling]});
  }
}

void FindLevelImpl(Buffers& buffers, const Pool& pool) {
  int64_t level = buffers.Attribute("level");
  TreeLimits limits{};
  Options options = ReadLimits(buffers, true, &limits);
  const float* units = buffers.Operand<float>("units", {2});
  auto [num_sums, channels, columns, bins] = buffers.NextShape<4>("sums");
  const int32_t* sums =
      buffers.Operand<int32_t>("sums", {num_sums, channels, columns, bins});
  const int32_t* summed = buffers.Operand<int32_t>("summed", {num_sums});
  CategoryLimits categories{};
  ReadOptions(buffers, options, columns, &limits, &categories);
  const int32_t* digits = nullptr;
  int64_t num_digits = 0;
  int32_t greatest = 0;
  if (options.categorical) {
    num_digits = buffers.NextShape<2>("squares")[0];
    digits = buffers.Operand<int32_t>("squares", {num_digits, 4});
    greatest = buffers.Scalar<int32_t>("greatest gradient");
  }
  int64_t nodes = (int64_t{1} << limits.max_depth) - 1;
  TreeState state{};
  ReadNodes(buffers, Access::kInPlace, nodes, &state.tree);
  int64_t slots = buffers.NextShape<1>("position")[0];
  state.position = buffers.InPlace<int32_t>("position", {slots});
  state.place = buffers.InPlace<int32_t>("place", {slots});
  state.free = buffers.InPlace<int32_t>("free", {1});
  state.histograms = {
      buffers.InPlace<int32_t>("histograms", {slots, channels, columns, bins}), slots,
      channels, bins, channels == 3};
  ReadOptionalNodes(buffers, Access::kInPlace, nodes, bins, options, &state);
  if (options.limited) state.bounds = buffers.InPlace<float>("bounds", {slots, 2});
  if (options.grouped) {
    state.used = buffers.InPlace<uint8_t>("used", {slots, columns});
  }
  SplitMemory memory(slots, 0);
  Splits& splits = memory.splits;
  ReadSplits(buffers, Access::kResult, slots, state.tree.num_words, &splits);
  int64_t most_summed = buffers.NextShape<1>("summed", Access::kResult)[0];
  int32_t* to_sum = buffers.Result<int32_t>("summed", {most_summed});
  Require(channels == 2 || channels == 3, "sums must have 2 or 3 channels");
  Require(bins > 0, "there must be bins");
  Require(num_digits <= slots, "squares must be of slots");
  buffers.Finish();
  CheckSlots(limits.max_depth, slots);
  CheckLimits(limits, columns, false);
  bool last = level == limits.max_depth - 1;
  Require(0 <= level && level < limits.max_depth,
          "level must be between 0 and max_depth - 1");
  limits.limits.gradient_unit = units[0];
  limits.limits.curvature_unit = units[1];
  if (level == 0) StartTree(limits, state);
  std::vector<NodeSum> summed_nodes;
  ListSummed(summed, num_sums, level, state, &summed_nodes);
  JoinSums(pool, summed_nodes.data(), static_cast<int64_t>(summed_nodes.size()), sums,
           limits.num_features, state.histograms);
  std::vector<float> squares(slots);
  for (int64_t slot = 0; slot < num_digits; ++slot) {
    squares[slot] = JoinSquares(digits + 4 * slot, greatest);
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    bool inside = state.place[slot] >= 0 && state.place[slot] < slots;
    inside &= state.position[slot] >= -1 && state.position[slot] < 1 << level;
    Require(inside, "position and place must be those of the level");
  }
  FindLevel(pool, limits, level, squares.data(), state, splits);
  int64_t num_found = slots - std::count(splits.found, splits.found + slots, 0);
  Require(HaveSlots(limits, level, splits, state),
          "there must be two slots for each split");
  Require(last || num_found <= most_summed, "there must be a sum for each split");
  std::vector<Sides> sides(slots);
  CountSides(state.histograms, limits.num_features, state.place, splits, sides.data());
  std::fill_n(to_sum, most_summed, -1);
  for (const NodeSum& child : FinishLevel(limits, level, splits, sides.data(), state)) {
    *to_sum++ = static_cast<int32_t>(child.slot);
  }
}

// Codes of any width, and the order of the rows.
void ReadSorted(Buffers& buffers, SortedCodes* codes) {
  auto [features, rows] = buffers.NextShape<2>("columns");
  codes->num_columns = features;
  codes->num_rows = rows;
  if (buffers.NextIs(Access::kOperand, ffi::DataType::U32)) {
    codes->code_size = 4;
    codes->columns = buffers.Operand<uint32_t>("columns", {features, rows});
  } else {
    bool wide = buffers.NextIsWide(Access::kOperand);
    codes->code_size = wide ? 2 : 1;
    codes->columns = buffers.Codes(Access::kOperand, "columns", {features, rows}, wide);
  }
  codes->order = buffers.Operand<int32_t>("order", {features, rows});
}

void GrowSortedImpl(Buffers& buffers, const Pool& pool) {
  int64_t num_slots = buffers.Attribute("num_slots");
  SortedCodes codes{};
  ReadSorted(buffers, &codes);
  int64_t num_rows = codes.num_rows, num_columns = codes.num_columns;
  SortedRows rows{};
  ReadDerivatives(buffers, &rows);
  Require(rows.num_rows == num_rows, "gradient must have the rows of columns");
  rows.uniform = buffers.Attribute("uniform") != 0;
  TreeLimits limits{};
  Options options = ReadLimits(buffers, false, &limits);
  CheckSlots(limits.max_depth, num_slots);
  ReadOptions(buffers, options, num_columns, &limits, nullptr);
  if (buffers.Attribute("local") != 0) {
    rows.mass = buffers.Operand<int32_t>("mass", {num_rows});
    rows.num_bins = buffers.Scalar<int32_t>("num_bins");
  }
  int64_t nodes = (int64_t{1} << limits.max_depth) - 1;
  TreeState state{};
  state.histograms.num_slots = num_slots;
  ReadNodes(buffers, Access::kResult, nodes, &state.tree);
  rows.leaf = buffers.Result<int32_t>("leaf", {num_rows});
  ReadOptionalNodes(buffers, Access::kResult, nodes, 0, options, &state);
  buffers.Finish();
  CheckLimits(limits, num_columns, false);
  CallScratch<int64_t> words(num_rows);
  CallScratch<uint64_t> before(num_columns * num_rows), after(num_columns * num_rows);
  rows.words = words.get();
  rows.entries[0] = before.get();
  rows.entries[1] = after.get();
  Require(GrowSortedTree(pool, codes, limits, rows, state),
          "order must hold every row once for each feature, and splits must have two "
          "slots");
}

void ProposeImpl(Buffers& buffers, const Pool& pool) {
  SortedCodes codes{};
  ReadSorted(buffers, &codes);
  const int32_t* mass = buffers.Operand<int32_t>("mass", {codes.num_rows});
  Proposal proposal{};
  proposal.wide = buffers.NextIsWide(Access::kResult);
  Shape shape = {codes.num_columns, codes.num_rows};
  proposal.codes =
      buffers.Codes(Access::kResult, "proposed codes", shape, proposal.wide);
  proposal.num_bins = buffers.NextShape<2>("highest", Access::kResult)[1];
  proposal.highest =
      buffers.Result<int32_t>("highest", {codes.num_columns, proposal.num_bins});
  Require(codes.num_rows > 0, "there must be rows");
  Require(1 < proposal.num_bins &&
              proposal.num_bins <= (proposal.wide ? 65536 : kByteStride),
          "the bins must fit the type of the proposed codes");
  buffers.Finish();
  Require(Propose(pool, codes, mass, proposal),
          "order must hold rows, and mass must sum to less than 2^31");
}

void SampleImpl(Buffers& buffers, const Pool& pool) {
  const uint32_t* seed = buffers.Operand<uint32_t>("seed", {2});
  int64_t count = buffers.NextShape<1>("eligible")[0];
  const uint8_t* eligible = buffers.Operand<uint8_t>("eligible", {count});
  float fraction = buffers.Scalar<float>("fraction");
  uint8_t* chosen = buffers.Result<uint8_t>("chosen", {count});
  buffers.Finish();
  Sample(pool, seed, eligible, count, fraction, chosen);
}

}  // namespace

JBOOST_HANDLER(jboost_pack, PackImpl)
JBOOST_HANDLER(jboost_split_pairs, SplitPairsImpl)
JBOOST_HANDLER(jboost_weigh_rows, WeighRowsImpl)
JBOOST_HANDLER(jboost_histogram, HistogramImpl)
JBOOST_HANDLER(jboost_find_leaves, FindLeavesImpl<false>)
JBOOST_HANDLER(jboost_find_category_leaves, FindLeavesImpl<true>)
JBOOST_HANDLER(jboost_greatest_derivatives, FindGreatestDerivativesImpl)
JBOOST_HANDLER(jboost_sum_magnitudes, SumMagnitudesImpl)
JBOOST_HANDLER(jboost_start_rows, StartRowsImpl)
JBOOST_HANDLER(jboost_sum_slots, SumSlotsImpl)
JBOOST_HANDLER(jboost_route_rows, RouteRowsImpl)
JBOOST_HANDLER(jboost_route_and_sum, RouteAndSumImpl)
JBOOST_HANDLER(jboost_greatest_gradient, FindGreatestGradientImpl)
JBOOST_HANDLER(jboost_sum_squares, SumSquaresImpl)
JBOOST_HANDLER(jboost_grow, GrowImpl)
JBOOST_HANDLER(jboost_find_level, FindLevelImpl)
JBOOST_HANDLER(jboost_propose, ProposeImpl)
JBOOST_HANDLER(jboost_grow_sorted, GrowSortedImpl)
JBOOST_HANDLER(jboost_sample, SampleImpl)

}  // namespace jboost
