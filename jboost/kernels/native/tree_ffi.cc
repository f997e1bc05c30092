// SPDX-License-Identifier: Apache-2.0
// Binding of tree.h.
#include <algorithm>

#include "grow_ffi.h"
#include "tree.h"

namespace jboost {
namespace {

// What a call's attributes say of its operands and results.
struct Options {
  int64_t max_depth, max_leaves, num_bins, num_slots;
  bool uniform, limited, grouped, categorical;
};

// Returns how many columns are features; those beyond are padding.
int32_t ReadNumbers(Buffers* buffers, int64_t num_rows, TreeInput* input) {
  input->gradient = buffers->Operand<float>("gradient", {num_rows});
  input->curvature = buffers->Operand<float>("curvature", {num_rows});
  input->in_bag = buffers->Operand<uint8_t>("in_bag", {num_rows});
  input->seed = buffers->Operand<uint32_t>("seed", {2});
  input->fractions = buffers->Operand<float>("fractions", {3});
  SplitLimits& limits = input->limits;
  limits.l2 = buffers->Scalar<float>("l2");
  input->min_gain = buffers->Scalar<float>("min_gain");
  limits.min_weight = buffers->Scalar<float>("min_child_weight");
  // A child without rows has no gain, so a minimum of 1 needs no check (and rows are
  // not counted for it).
  int32_t least = buffers->Scalar<int32_t>("min_child_samples");
  limits.min_count = least > 1 ? least : 0;
  return buffers->Scalar<int32_t>("num_features");
}

void ReadCategories(Buffers* buffers, CategoryLimits* categories) {
  int64_t groups = buffers->NextShape<1>(Access::kOperand, "categorical features")[0];
  categories->num_groups = groups;
  categories->features = buffers->Operand<int32_t>("categorical features", {groups});
  categories->num_codes = buffers->Operand<int32_t>("num_codes", {groups});
  categories->l2 = buffers->Scalar<float>("category l2");
  categories->smoothing = buffers->Scalar<float>("smoothing");
  categories->min_weight = buffers->Scalar<float>("category min_weight");
  categories->max_onehot = buffers->Scalar<int32_t>("max_onehot");
}

TreeOutput ReadOutput(Buffers* buffers, int64_t num_rows, const Options& options) {
  int64_t nodes = (int64_t{1} << options.max_depth) - 1;
  TreeOutput output{};
  output.tree.feature = buffers->Result<int32_t>("feature", {nodes});
  output.tree.threshold = buffers->Result<int32_t>("threshold", {nodes});
  output.tree.missing_left = buffers->Result<uint8_t>("missing_left", {nodes});
  output.leaf = buffers->Result<int32_t>("leaf", {num_rows});
  if (options.limited) {
    output.leaf_bounds = buffers->Result<float>("leaf_bounds", {nodes + 1, 2});
  }
  if (options.categorical) {
    int64_t words = (options.num_bins + kWordBits - 1) / kWordBits;
    output.tree.num_words = words;
    output.tree.left_codes = buffers->Result<uint32_t>("left_codes", {nodes, words});
  }
  return output;
}

TreeScratch ReadScratch(Buffers* buffers, int64_t num_rows, const Codes& codes,
                        const Options& options, int32_t min_count) {
  TreeScratch scratch{};
  scratch.rows = ReadRows(buffers, Access::kResult, num_rows);
  int64_t channels = options.uniform ? 2 : 3, slots = options.num_slots;
  int32_t* sums = buffers->Result<int32_t>(
      "sums", {slots, channels, codes.num_features, options.num_bins});
  scratch.histograms = {sums, slots, channels, options.num_bins,
                        min_count > 0 && channels == 3};
  if (codes.sparse != nullptr) {
    scratch.sparse_rows = reinterpret_cast<SparseRow*>(
        buffers->Result<int32_t>("sparse rows", {num_rows, 4}));
  }
  buffers->Check(scratch.rows.num_slots == slots, "segments must have slots");
  return scratch;
}

ffi::Error GrowImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                    ffi::RemainingRets results, int64_t categorical, int64_t grouped,
                    int64_t limited, int64_t max_depth, int64_t max_leaves,
                    int64_t num_bins, int64_t num_slots, int64_t uniform) {
  JBOOST_CHECK(0 < max_depth && max_depth < 31, "max_depth must be 1 to 30");
  JBOOST_CHECK(0 < num_slots && num_slots <= int64_t{1} << (max_depth - 1),
               "there must be 1 to 2^(max_depth - 1) slots");
  Options options{max_depth,    max_leaves,   num_bins,     num_slots,
                  uniform != 0, limited != 0, grouped != 0, categorical != 0};
  Buffers buffers(operands, results);
  Source source;
  ReadColumns(&buffers, &source);
  Codes& codes = source.codes;
  TreeInput input{};
  bool dense = buffers.NextRank() == 3;
  Codes packed{};
  if (dense) {
    void* data;
    ReadPacked(&buffers, Access::kOperand, &packed, &data);
  }
  int64_t num_rows = buffers.NextShape<1>(Access::kOperand, "gradient")[0];
  int32_t used = ReadNumbers(&buffers, num_rows, &input);
  input.max_depth = max_depth;
  input.max_leaves = max_leaves;
  input.uniform = options.uniform;
  // What has F entries is read when F is known: sparse codes have their entries last.
  int64_t num_features = dense
                             ? codes.num_features
                             : buffers.NextShape<1>(Access::kOperand, "starts")[0] - 1;
  if (!dense) ReadEntries(&buffers, num_rows, &source);
  if (options.limited) {
    input.l1 = buffers.Scalar<float>("l1");
    input.bounds = buffers.Operand<float>("bounds", {2});
    input.monotone = buffers.Operand<int32_t>("monotone", {num_features});
  }
  if (options.grouped) {
    input.num_groups = buffers.NextShape<2>(Access::kOperand, "groups")[0];
    input.groups = buffers.Operand<uint8_t>("groups", {input.num_groups, num_features});
  }
  CategoryLimits categories{};
  if (options.categorical) {
    ReadCategories(&buffers, &categories);
    input.categories = &categories;
  }
  if (dense) {
    packed.num_features = num_features;
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
  TreeOutput output = ReadOutput(&buffers, num_rows, options);
  TreeScratch scratch =
      ReadScratch(&buffers, num_rows, codes, options, input.limits.min_count);
  bool named = options.grouped || options.limited || !dense;
  buffers.Check(0 < used && used <= num_features && (!named || used == num_features),
                "num_features must be 1 to F, and F where columns are named");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckEntries(source));
  for (int64_t group = 0; group < categories.num_groups; ++group) {
    int32_t feature = categories.features[group];
    JBOOST_CHECK(0 <= feature && feature < used,
                 "categorical features must be below num_features");
  }
  if (dense) {
    codes.num_features = used;
    codes.num_blocks = (used + codes.width - 1) / codes.width;
  }
  JBOOST_CHECK(GrowTree(MakePool(threads), codes, input, scratch, output),
               "entries must hold ascending rows below N");
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

}  // namespace jboost
