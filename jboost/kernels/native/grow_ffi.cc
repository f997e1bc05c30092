// SPDX-License-Identifier: Apache-2.0
// Bindings of grow.h and sparse.h.
#include "grow_ffi.h"

#include <algorithm>
#include <vector>

#include "categories.h"
#include "ffi.h"
#include "grow.h"
#include "sparse.h"

namespace jboost {

void ReadColumns(Buffers* buffers, Source* source) {
  auto [features, rows] = buffers->NextShape<2>(Access::kOperand, "columns");
  Codes& codes = source->codes;
  codes.num_features = features;
  codes.num_rows = rows;
  codes.wide = buffers->NextIsWide(Access::kOperand);
  codes.columns =
      buffers->Codes(Access::kOperand, "columns", {features, rows}, codes.wide);
}

void ReadEntries(Buffers* buffers, int64_t num_rows, Source* source) {
  Codes& codes = source->codes;
  if (!buffers->HasOperands()) {
    buffers->Check(codes.num_rows == num_rows, "columns must be [F, N]");
    return;
  }
  int64_t entries = codes.num_rows;
  buffers->Check(codes.num_features == 1, "columns of sparse codes must be [1, E]");
  int64_t features = buffers->NextShape<1>(Access::kOperand, "starts")[0] - 1;
  source->num_entries = entries;
  SparseColumns& sparse = source->sparse;
  sparse.starts = buffers->Operand<int32_t>("starts", {features + 1});
  sparse.rows = buffers->Operand<int32_t>("rows", {entries});
  sparse.absent =
      buffers->Codes(Access::kOperand, "absent codes", {features}, codes.wide);
  codes.num_features = features;
  codes.num_rows = num_rows;
  codes.sparse = &sparse;
}

ffi::Error CheckEntries(const Source& source) {
  if (source.codes.sparse == nullptr) return ffi::Error::Success();
  const int32_t* starts = source.sparse.starts;
  int64_t features = source.codes.num_features;
  bool inside = starts[0] >= 0 && starts[features] <= source.num_entries;
  for (int64_t f = 0; f < features; ++f) inside &= starts[f] <= starts[f + 1];
  JBOOST_CHECK(inside, "starts must ascend from 0 to E");
  return ffi::Error::Success();
}

Rows ReadRows(Buffers* buffers, Access access, int64_t num_rows) {
  Rows rows;
  rows.words = reinterpret_cast<int64_t*>(
      buffers->Read<int32_t>(access, "words", {num_rows, 2}));
  rows.index = buffers->Read<uint16_t>(access, "index", {num_rows});
  rows.num_slots = buffers->NextShape<3>(access, "segments")[1];
  rows.segments = reinterpret_cast<Segment*>(buffers->Read<int32_t>(
      access, "segments", {NumChunks(num_rows), rows.num_slots, 2}));
  buffers->Check(rows.num_slots > 0, "there must be a slot");
  return rows;
}

ffi::Error CheckRows(const Rows& rows, int64_t num_rows) {
  bool inside = true;
  for (int64_t chunk = 0; chunk < NumChunks(num_rows); ++chunk) {
    int64_t count = std::min(kChunk, num_rows - chunk * kChunk);
    for (int64_t slot = 0; slot < rows.num_slots; ++slot) {
      const Segment& segment = rows.segments[chunk * rows.num_slots + slot];
      inside &= 0 <= segment.begin && segment.begin <= segment.end;
      inside &= segment.end <= count;
    }
  }
  JBOOST_CHECK(inside, "segments must lie in their chunks");
  return ffi::Error::Success();
}

void ReadPacked(Buffers* buffers, Access access, Codes* codes, void** packed) {
  auto [blocks, rows, width] = buffers->NextShape<3>(access, "packed");
  codes->num_blocks = blocks;
  codes->num_rows = rows;
  codes->width = width;
  codes->wide = buffers->NextIsWide(access);
  *packed = buffers->Codes(access, "packed", {blocks, rows, width}, codes->wide);
  codes->packed = *packed;
  // Rows are written in words of 8 bytes, and summed up to 32 features at a time.
  buffers->Check(width > 0 && width <= 32 && width % 8 == 0,
                 "the width of packed codes must be 8, 16, 24 or 32");
}

void ReadLayout(Buffers* buffers, Source* source) {
  if (buffers->NextRank() != 3) {
    ReadColumns(buffers, source);
    return;
  }
  void* packed;
  ReadPacked(buffers, Access::kOperand, &source->codes, &packed);
  source->codes.num_features = source->codes.num_blocks * source->codes.width;
}

void CheckBlocks(Buffers* buffers, const Codes& codes) {
  buffers->Check(codes.num_blocks * codes.width >= codes.num_features &&
                     (codes.num_blocks - 1) * codes.width < codes.num_features,
                 "packed must hold the codes of F features");
}

ffi::Error CheckSplits(const Splits& splits, const int32_t* position, int64_t num_slots,
                       int64_t level, int64_t max_depth, int64_t num_features) {
  JBOOST_CHECK(0 < max_depth && max_depth < 31, "max_depth must be 1 to 30");
  JBOOST_CHECK(0 <= level && level < max_depth,
               "level must be between 0 and max_depth - 1");
  int64_t width = int64_t{1} << level, num_pairs = 0;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    JBOOST_CHECK(-1 <= position[slot] && position[slot] < width,
                 "position must be -1 or that of a node of the level");
    if (!splits.found[slot]) continue;
    ++num_pairs;
    JBOOST_CHECK(position[slot] >= 0, "splits must be of slots that hold a node");
    JBOOST_CHECK(0 <= splits.feature[slot] && splits.feature[slot] < num_features,
                 "splits must be of features below F");
  }
  JBOOST_CHECK(level == max_depth - 1 || 2 * num_pairs <= num_slots,
               "there must be two slots for each split");
  return ffi::Error::Success();
}

namespace {

ffi::Error PackImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                    ffi::RemainingRets results, int64_t num_bins) {
  Buffers buffers(operands, results);
  Source source;
  ReadColumns(&buffers, &source);
  Codes codes = source.codes;
  void* packed;
  ReadPacked(&buffers, Access::kResult, &codes, &packed);
  CheckBlocks(&buffers, codes);
  buffers.Check(
      codes.num_rows == source.codes.num_rows && codes.wide == source.codes.wide,
      "packed must have the rows and the type of columns");
  buffers.Check(num_bins > 0, "num_bins must be positive");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  PackCodes(MakePool(threads), codes, num_bins, packed);
  return ffi::Error::Success();
}

ffi::Error SplitPairsImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                          ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  int64_t count = buffers.NextShape<1>(Access::kOperand, "pairs")[0];
  PairedRows rows;
  rows.pairs = reinterpret_cast<const float*>(
      buffers.Operand<std::complex<float>>("pairs", {count}));
  rows.weights = buffers.Operand<float>("weights", {count});
  rows.gradient = buffers.Result<float>("gradient", {count});
  rows.curvature = buffers.Result<float>("curvature", {count});
  uint8_t* finite = buffers.Result<uint8_t>("finite", {});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  *finite = SplitPairs(MakePool(threads), rows, count);
  return ffi::Error::Success();
}

ffi::Error WeighRowsImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                         ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  int64_t count = buffers.NextShape<1>(Access::kOperand, "in_bag")[0];
  WeighedRows rows;
  rows.in_bag = buffers.Operand<uint8_t>("in_bag", {count});
  rows.weights = buffers.Operand<float>("weights", {count});
  rows.gradient = buffers.Operand<float>("gradient", {count});
  rows.curvature = buffers.Operand<float>("curvature", {count});
  rows.mean = buffers.Scalar<float>("mean");
  rows.weighed_gradient = buffers.Result<float>("weighed gradient", {count});
  rows.weighed_curvature = buffers.Result<float>("weighed curvature", {count});
  rows.times = static_cast<uint8_t*>(
      buffers.Codes(Access::kResult, "times", {count}, /*wide=*/false));
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  WeighRows(MakePool(threads), rows, count);
  return ffi::Error::Success();
}

ffi::Error HistogramImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                         ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  Source source;
  ReadColumns(&buffers, &source);
  auto [num_rows, num_channels] = buffers.NextShape<2>(Access::kOperand, "channels");
  const int32_t* channels =
      buffers.Operand<int32_t>("channels", {num_rows, num_channels});
  const int32_t* node = buffers.Operand<int32_t>("node", {num_rows});
  ReadEntries(&buffers, num_rows, &source);
  auto shape = buffers.NextShape<4>(Access::kResult, "sums");
  int64_t num_nodes = shape[0], num_bins = shape[2];
  int32_t* sums = buffers.Result<int32_t>(
      "sums", {num_nodes, source.codes.num_features, num_bins, num_channels});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckEntries(source));
  auto build = source.codes.sparse == nullptr ? BuildHistogram : BuildSparseHistogram;
  JBOOST_CHECK(build(MakePool(threads), source.codes, channels, num_channels, node,
                     num_nodes, num_bins, sums),
               "rows of entries must be below N");
  return ffi::Error::Success();
}

template <bool kCategories>
ffi::Error FindLeavesImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                          ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  Source source;
  ReadLayout(&buffers, &source);
  int64_t nodes = buffers.NextShape<1>(Access::kOperand, "feature")[0], max_depth = 0;
  TreeNodes tree;
  tree.feature = buffers.Operand<int32_t>("feature", {nodes});
  tree.threshold = buffers.Operand<int32_t>("threshold", {nodes});
  tree.missing_left = buffers.Operand<uint8_t>("missing_left", {nodes});
  if (kCategories) {
    tree.num_words = buffers.NextShape<2>(Access::kOperand, "left_codes")[1];
    tree.left_codes = buffers.Operand<uint32_t>("left_codes", {nodes, tree.num_words});
    buffers.Check(tree.num_words > 0, "sets of codes must have words");
  }
  int64_t num_rows = buffers.NextShape<1>(Access::kOperand, "skip")[0];
  const uint8_t* skip = buffers.Operand<uint8_t>("skip", {num_rows});
  int32_t* leaf = buffers.InPlace<int32_t>("leaf", {num_rows});
  buffers.Check(!kCategories || !buffers.HasOperands(),
                "sparse codes have no categories");
  if (source.codes.packed == nullptr) ReadEntries(&buffers, num_rows, &source);
  buffers.Check(source.codes.num_rows == num_rows, "codes must have N rows");
  while ((int64_t{1} << max_depth) - 1 < nodes) ++max_depth;
  buffers.Check((int64_t{1} << max_depth) - 1 == nodes,
                "a tree must have 2^max_depth - 1 nodes");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckEntries(source));
  bool inside = true;
  for (int64_t node = 0; node < nodes; ++node) {
    inside &= 0 <= tree.feature[node] && tree.feature[node] < source.codes.num_features;
  }
  JBOOST_CHECK(inside, "the nodes of a tree must split features below F");
  auto find = source.codes.sparse == nullptr ? FindLeaves : FindSparseLeaves;
  JBOOST_CHECK(find(MakePool(threads), source.codes, tree, max_depth, skip, leaf),
               "the rows of a feature's entries must ascend below N");
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_pack, PackImpl, Bind().Attr<int64_t>("num_bins"))
JBOOST_HANDLER(jboost_split_pairs, SplitPairsImpl, Bind())
JBOOST_HANDLER(jboost_weigh_rows, WeighRowsImpl, Bind())
JBOOST_HANDLER(jboost_histogram, HistogramImpl, Bind())
JBOOST_HANDLER(jboost_find_leaves, FindLeavesImpl<false>, Bind())
JBOOST_HANDLER(jboost_find_category_leaves, FindLeavesImpl<true>, Bind())

}  // namespace jboost
