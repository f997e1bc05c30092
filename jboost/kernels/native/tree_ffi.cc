// SPDX-License-Identifier: Apache-2.0
// Binding of tree.h.
#include "tree_ffi.h"

#include <algorithm>

#include "grow_ffi.h"
#include "scratch.h"
#include "tree.h"

namespace jboost {

void ReadLimits(Buffers* buffers, TreeLimits* limits) {
  limits->seed = buffers->Operand<uint32_t>("seed", {2});
  limits->fractions = buffers->Operand<float>("fractions", {3});
  limits->limits.l2 = buffers->Scalar<float>("l2");
  limits->min_gain = buffers->Scalar<float>("min_gain");
  limits->limits.min_weight = buffers->Scalar<float>("min_child_weight");
  // A child without rows has no gain, so a minimum of 1 needs no check (and rows are
  // not counted for it).
  int32_t least = buffers->Scalar<int32_t>("min_child_samples");
  limits->limits.min_count = least > 1 ? least : 0;
  limits->num_features = buffers->Scalar<int32_t>("num_features");
}

void ReadOptions(Buffers* buffers, const Options& options, int64_t num_columns,
                 TreeLimits* limits, CategoryLimits* categories) {
  if (options.limited) {
    limits->l1 = buffers->Scalar<float>("l1");
    limits->bounds = buffers->Operand<float>("bounds", {2});
    limits->monotone = buffers->Operand<int32_t>("monotone", {num_columns});
  }
  if (options.grouped) {
    limits->num_groups = buffers->NextShape<2>(Access::kOperand, "groups")[0];
    limits->groups =
        buffers->Operand<uint8_t>("groups", {limits->num_groups, num_columns});
  }
  if (options.categorical) {
    int64_t groups = buffers->NextShape<1>(Access::kOperand, "categorical features")[0];
    categories->num_groups = groups;
    categories->features = buffers->Operand<int32_t>("categorical features", {groups});
    categories->num_codes = buffers->Operand<int32_t>("num_codes", {groups});
    categories->l2 = buffers->Scalar<float>("category l2");
    categories->smoothing = buffers->Scalar<float>("smoothing");
    categories->min_weight = buffers->Scalar<float>("category min_weight");
    categories->max_onehot = buffers->Scalar<int32_t>("max_onehot");
    limits->categories = categories;
  }
}

ffi::Error CheckLimits(const TreeLimits& limits, int64_t num_columns, bool named) {
  int64_t used = limits.num_features;
  named |= limits.groups != nullptr || limits.bounds != nullptr;
  JBOOST_CHECK(0 < used && used <= num_columns && (!named || used == num_columns),
               "num_features must be 1 to F, and F where columns are named");
  for (int64_t g = 0; limits.categories != nullptr && g < limits.categories->num_groups;
       ++g) {
    int32_t feature = limits.categories->features[g];
    JBOOST_CHECK(0 <= feature && feature < used,
                 "categorical features must be below num_features");
  }
  return ffi::Error::Success();
}

void ReadNodes(Buffers* buffers, Access access, int64_t num_nodes, TreeArrays* tree) {
  tree->feature = buffers->Read<int32_t>(access, "tree feature", {num_nodes});
  tree->threshold = buffers->Read<int32_t>(access, "tree threshold", {num_nodes});
  tree->missing_left = buffers->Read<uint8_t>(access, "tree missing_left", {num_nodes});
}

void ReadOptionalNodes(Buffers* buffers, Access access, int64_t num_nodes,
                       int64_t num_bins, const Options& options, TreeState* state) {
  if (options.limited) {
    state->leaf_bounds =
        buffers->Read<float>(access, "leaf bounds", {num_nodes + 1, 2});
  }
  if (options.categorical) {
    TreeArrays& tree = state->tree;
    tree.num_words = (num_bins + kWordBits - 1) / kWordBits;
    tree.left_codes =
        buffers->Read<uint32_t>(access, "tree left_codes", {num_nodes, tree.num_words});
  }
}

ffi::Error CheckDepth(int64_t max_depth, int64_t num_slots) {
  JBOOST_CHECK(0 < max_depth && max_depth < 31, "max_depth must be 1 to 30");
  JBOOST_CHECK(0 < num_slots && num_slots <= int64_t{1} << (max_depth - 1),
               "there must be 1 to 2^(max_depth - 1) slots");
  return ffi::Error::Success();
}

namespace {

ffi::Error GrowImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                    ffi::RemainingRets results, int64_t categorical, int64_t grouped,
                    int64_t limited, int64_t max_depth, int64_t max_leaves,
                    int64_t num_bins, int64_t num_slots, int64_t uniform) {
  JBOOST_RETURN_IF_ERROR(CheckDepth(max_depth, num_slots));
  Options options{limited != 0, grouped != 0, categorical != 0};
  Buffers buffers(operands, results);
  Source source;
  ReadColumns(&buffers, &source);
  Codes& codes = source.codes;
  bool dense = buffers.NextRank() == 3;
  Codes packed{};
  if (dense) {
    void* data;
    ReadPacked(&buffers, Access::kOperand, &packed, &data);
  }
  TreeRows rows{};
  int64_t num_rows = buffers.NextShape<1>(Access::kOperand, "gradient")[0];
  rows.gradient = buffers.Operand<float>("gradient", {num_rows});
  rows.curvature = buffers.Operand<float>("curvature", {num_rows});
  rows.in_bag = buffers.Bytes("in_bag", {num_rows});
  rows.uniform = uniform != 0;
  TreeLimits limits{};
  ReadLimits(&buffers, &limits);
  limits.max_depth = max_depth;
  limits.max_leaves = max_leaves;
  // What has F entries is read when F is known: sparse codes have their entries last.
  int64_t num_columns = dense ? codes.num_features
                              : buffers.NextShape<1>(Access::kOperand, "starts")[0] - 1;
  if (!dense) ReadEntries(&buffers, num_rows, &source);
  CategoryLimits categories{};
  ReadOptions(&buffers, options, num_columns, &limits, &categories);
  if (dense) {
    packed.num_features = num_columns;
    CheckBlocks(&buffers, packed);
    buffers.Check(packed.num_rows == codes.num_rows && packed.wide == codes.wide,
                  "packed must have the rows and the type of columns");
    codes.packed = packed.packed;
    codes.num_blocks = packed.num_blocks;
    codes.width = packed.width;
  }
  buffers.Check(codes.num_rows == num_rows, "codes must have N rows");
  buffers.Check(dense || !options.categorical, "sparse codes have no categories");
  buffers.Check(0 < num_bins && num_bins <= (codes.wide ? 65536 : kByteStride),
                "the bins must fit the type of the codes");
  int64_t nodes = (int64_t{1} << max_depth) - 1;
  TreeState state{};
  ReadNodes(&buffers, Access::kResult, nodes, &state.tree);
  rows.leaf = buffers.Result<int32_t>("leaf", {num_rows});
  ReadOptionalNodes(&buffers, Access::kResult, nodes, num_bins, options, &state);
  int64_t channels = rows.uniform ? 2 : 3;
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckEntries(source));
  JBOOST_RETURN_IF_ERROR(CheckLimits(limits, num_columns, !dense));
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
  JBOOST_CHECK(GrowTree(MakePool(threads), codes, limits, rows, state),
               "entries must hold ascending rows below N");
  return ffi::Error::Success();
}

// The nodes whose histograms were summed: the smaller child of each pair; on the first
// level, the root.
ffi::Error ListSummed(const int32_t* summed, int64_t count, int64_t level,
                      const TreeState& state, std::vector<NodeSum>* nodes) {
  int64_t slots = state.histograms.num_slots;
  for (int64_t i = 0; i < count && summed[i] >= 0; ++i) {
    int64_t slot = summed[i], sibling = slot ^ 1;
    JBOOST_CHECK(slot < slots && (level == 0 || sibling < slots),
                 "summed must hold slots");
    bool inside = 0 <= state.place[slot] && state.place[slot] < slots;
    inside &= level == 0 || (0 <= state.place[sibling] && state.place[sibling] < slots);
    JBOOST_CHECK(inside, "place must hold slots");
    nodes->push_back({slot, state.place[slot], level == 0 ? -1 : state.place[sibling]});
  }
  return ffi::Error::Success();
}

// The results of a level.
struct LevelResults {
  int32_t *position, *feature, *threshold;
  uint8_t *missing_left, *found;
  uint32_t *left_codes = nullptr, *absent_codes = nullptr;
  int32_t* summed;
  int64_t num_summed;

  void Write(const LevelSplits& splits, const std::vector<NodeSum>& children) const {
    std::copy(splits.position.begin(), splits.position.end(), position);
    std::copy(splits.feature.begin(), splits.feature.end(), feature);
    std::copy(splits.threshold.begin(), splits.threshold.end(), threshold);
    std::copy(splits.missing_left.begin(), splits.missing_left.end(), missing_left);
    std::copy(splits.found.begin(), splits.found.end(), found);
    if (left_codes != nullptr) {
      std::copy(splits.left_codes.begin(), splits.left_codes.end(), left_codes);
      std::copy(splits.absent_codes.begin(), splits.absent_codes.end(), absent_codes);
    }
    std::fill_n(summed, num_summed, -1);
    for (size_t i = 0; i < children.size(); ++i) {
      summed[i] = static_cast<int32_t>(children[i].slot);
    }
  }
};

LevelResults ReadLevelResults(Buffers* buffers, int64_t slots, int64_t num_words) {
  LevelResults results;
  results.position = buffers->Result<int32_t>("position", {slots});
  results.feature = buffers->Result<int32_t>("feature", {slots});
  results.threshold = buffers->Result<int32_t>("threshold", {slots});
  results.missing_left = buffers->Result<uint8_t>("missing_left", {slots});
  results.found = buffers->Result<uint8_t>("found", {slots});
  if (num_words > 0) {
    results.left_codes = buffers->Result<uint32_t>("left_codes", {slots, num_words});
    results.absent_codes =
        buffers->Result<uint32_t>("absent_codes", {slots, num_words});
  }
  results.num_summed = buffers->NextShape<1>(Access::kResult, "summed")[0];
  results.summed = buffers->Result<int32_t>("summed", {results.num_summed});
  return results;
}

ffi::Error FindLevelImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, int64_t categorical,
                         int64_t grouped, int64_t level, int64_t limited,
                         int64_t max_depth, int64_t max_leaves) {
  Options options{limited != 0, grouped != 0, categorical != 0};
  Buffers buffers(operands, results);
  TreeLimits limits{};
  ReadLimits(&buffers, &limits);
  limits.max_depth = max_depth;
  limits.max_leaves = max_leaves;
  const float* units = buffers.Operand<float>("units", {2});
  auto [num_sums, channels, columns, bins] =
      buffers.NextShape<4>(Access::kOperand, "sums");
  const int32_t* sums =
      buffers.Operand<int32_t>("sums", {num_sums, channels, columns, bins});
  const int32_t* summed = buffers.Operand<int32_t>("summed", {num_sums});
  CategoryLimits categories{};
  ReadOptions(&buffers, options, columns, &limits, &categories);
  const int32_t* digits = nullptr;
  int64_t num_digits = 0;
  int32_t greatest = 0;
  if (options.categorical) {
    num_digits = buffers.NextShape<2>(Access::kOperand, "squares")[0];
    digits = buffers.Operand<int32_t>("squares", {num_digits, 4});
    greatest = buffers.Scalar<int32_t>("greatest gradient");
  }
  JBOOST_CHECK(0 < max_depth && max_depth < 31, "max_depth must be 1 to 30");
  int64_t nodes = (int64_t{1} << max_depth) - 1;
  TreeState state{};
  ReadNodes(&buffers, Access::kInPlace, nodes, &state.tree);
  int64_t slots = buffers.NextShape<1>(Access::kOperand, "position")[0];
  state.position = buffers.InPlace<int32_t>("position", {slots});
  state.place = buffers.InPlace<int32_t>("place", {slots});
  state.free = buffers.InPlace<int32_t>("free", {1});
  state.histograms = {
      buffers.InPlace<int32_t>("histograms", {slots, channels, columns, bins}), slots,
      channels, bins, channels == 3};
  ReadOptionalNodes(&buffers, Access::kInPlace, nodes, bins, options, &state);
  if (options.limited) state.bounds = buffers.InPlace<float>("bounds", {slots, 2});
  if (options.grouped) {
    state.used = buffers.InPlace<uint8_t>("used", {slots, columns});
  }
  LevelResults found = ReadLevelResults(&buffers, slots, state.tree.num_words);
  buffers.Check(channels == 2 || channels == 3, "sums must have 2 or 3 channels");
  buffers.Check(bins > 0, "there must be bins");
  buffers.Check(num_digits <= slots, "squares must be of slots");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckDepth(max_depth, slots));
  JBOOST_RETURN_IF_ERROR(CheckLimits(limits, columns, false));
  JBOOST_CHECK(0 <= level && level < max_depth,
               "level must be between 0 and max_depth - 1");
  limits.limits.gradient_unit = units[0];
  limits.limits.curvature_unit = units[1];
  if (level == 0) StartTree(limits, state);
  Pool pool = MakePool(threads);
  std::vector<NodeSum> summed_nodes, children;
  JBOOST_RETURN_IF_ERROR(ListSummed(summed, num_sums, level, state, &summed_nodes));
  JoinSums(pool, summed_nodes.data(), static_cast<int64_t>(summed_nodes.size()), sums,
           limits.num_features, state.histograms);
  std::vector<float> squares(slots);
  for (int64_t slot = 0; slot < num_digits; ++slot) {
    squares[slot] = JoinSquares(digits + 4 * slot, greatest);
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    bool inside = state.place[slot] >= 0 && state.place[slot] < slots;
    inside &= state.position[slot] >= -1 && state.position[slot] < 1 << level;
    JBOOST_CHECK(inside, "position and place must be those of the level");
  }
  LevelSplits splits = FindLevel(pool, limits, level, squares.data(), state);
  int64_t num_found = std::count_if(splits.found.begin(), splits.found.end(),
                                    [](uint8_t found) { return found != 0; });
  JBOOST_CHECK(level == max_depth - 1 || 2 * num_found <= slots,
               "there must be two slots for each split");
  JBOOST_CHECK(level == max_depth - 1 || num_found <= found.num_summed,
               "there must be a sum for each split");
  std::vector<Sides> sides(slots);
  CountSides(state.histograms, limits.num_features, state.place, splits.splits(),
             sides.data());
  children = FinishLevel(limits, level, splits, sides.data(), state);
  found.Write(splits, children);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_grow, GrowImpl,
               Bind()
                   .Attr<int64_t>("categorical")
                   .Attr<int64_t>("grouped")
                   .Attr<int64_t>("limited")
                   .Attr<int64_t>("max_depth")
                   .Attr<int64_t>("max_leaves")
                   .Attr<int64_t>("num_bins")
                   .Attr<int64_t>("num_slots")
                   .Attr<int64_t>("uniform"))
JBOOST_HANDLER(jboost_find_level, FindLevelImpl,
               Bind()
                   .Attr<int64_t>("categorical")
                   .Attr<int64_t>("grouped")
                   .Attr<int64_t>("level")
                   .Attr<int64_t>("limited")
                   .Attr<int64_t>("max_depth")
                   .Attr<int64_t>("max_leaves"))

}  // namespace jboost
