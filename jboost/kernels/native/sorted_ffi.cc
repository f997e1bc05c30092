// SPDX-License-Identifier: Apache-2.0
// Binding of sorted.h.
#include "scratch.h"
#include "sorted.h"
#include "tree_ffi.h"

namespace jboost {
namespace {

// Codes of any width, and the order of the rows.
void ReadSorted(Buffers* buffers, SortedCodes* codes) {
  auto [features, rows] = buffers->NextShape<2>(Access::kOperand, "columns");
  codes->num_columns = features;
  codes->num_rows = rows;
  if (buffers->NextIs(Access::kOperand, ffi::DataType::U32)) {
    codes->code_size = 4;
    codes->columns = buffers->Operand<uint32_t>("columns", {features, rows});
  } else {
    bool wide = buffers->NextIsWide(Access::kOperand);
    codes->code_size = wide ? 2 : 1;
    codes->columns =
        buffers->Codes(Access::kOperand, "columns", {features, rows}, wide);
  }
  codes->order = buffers->Operand<int32_t>("order", {features, rows});
}

ffi::Error GrowSortedImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                          ffi::RemainingRets results, int64_t grouped, int64_t limited,
                          int64_t local, int64_t max_depth, int64_t max_leaves,
                          int64_t num_slots, int64_t uniform) {
  JBOOST_RETURN_IF_ERROR(CheckDepth(max_depth, num_slots));
  Options options{limited != 0, grouped != 0, false};
  Buffers buffers(operands, results);
  SortedCodes codes{};
  ReadSorted(&buffers, &codes);
  int64_t num_rows = codes.num_rows, num_columns = codes.num_columns;
  SortedRows rows{};
  rows.gradient = buffers.Operand<float>("gradient", {num_rows});
  rows.curvature = buffers.Operand<float>("curvature", {num_rows});
  rows.in_bag = buffers.Bytes("in_bag", {num_rows});
  rows.uniform = uniform != 0;
  TreeLimits limits{};
  ReadLimits(&buffers, &limits);
  limits.max_depth = max_depth;
  limits.max_leaves = max_leaves;
  ReadOptions(&buffers, options, num_columns, &limits, nullptr);
  if (local != 0) {
    rows.mass = buffers.Operand<int32_t>("mass", {num_rows});
    rows.num_bins = buffers.Scalar<int32_t>("num_bins");
  }
  int64_t nodes = (int64_t{1} << max_depth) - 1;
  TreeState state{};
  state.histograms.num_slots = num_slots;
  ReadNodes(&buffers, Access::kResult, nodes, &state.tree);
  rows.leaf = buffers.Result<int32_t>("leaf", {num_rows});
  ReadOptionalNodes(&buffers, Access::kResult, nodes, 0, options, &state);
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckLimits(limits, num_columns, false));
  CallScratch<int64_t> words(num_rows);
  CallScratch<uint64_t> before(num_columns * num_rows), after(num_columns * num_rows);
  rows.words = words.get();
  rows.entries[0] = before.get();
  rows.entries[1] = after.get();
  JBOOST_CHECK(GrowSortedTree(MakePool(threads), codes, limits, rows, state),
               "order must hold every row once for each feature");
  return ffi::Error::Success();
}

ffi::Error ProposeImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                       ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  SortedCodes codes{};
  ReadSorted(&buffers, &codes);
  const int32_t* mass = buffers.Operand<int32_t>("mass", {codes.num_rows});
  Proposal proposal{};
  proposal.wide = buffers.NextIsWide(Access::kResult);
  Shape shape = {codes.num_columns, codes.num_rows};
  proposal.codes =
      buffers.Codes(Access::kResult, "proposed codes", shape, proposal.wide);
  proposal.num_bins = buffers.NextShape<2>(Access::kResult, "highest")[1];
  proposal.highest =
      buffers.Result<int32_t>("highest", {codes.num_columns, proposal.num_bins});
  buffers.Check(codes.num_rows > 0, "there must be rows");
  buffers.Check(1 < proposal.num_bins &&
                    proposal.num_bins <= (proposal.wide ? 65536 : kByteStride),
                "the bins must fit the type of the proposed codes");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_CHECK(Propose(MakePool(threads), codes, mass, proposal),
               "order must hold rows");
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_propose, ProposeImpl, Bind())
JBOOST_HANDLER(jboost_grow_sorted, GrowSortedImpl,
               Bind()
                   .Attr<int64_t>("grouped")
                   .Attr<int64_t>("limited")
                   .Attr<int64_t>("local")
                   .Attr<int64_t>("max_depth")
                   .Attr<int64_t>("max_leaves")
                   .Attr<int64_t>("num_slots")
                   .Attr<int64_t>("uniform"))

}  // namespace jboost
