// SPDX-License-Identifier: Apache-2.0
// Bindings of leaves.h.
#include "ffi.h"
#include "leaves.h"

namespace jboost {
namespace {

// The group of each row, the channels, and the weights if there are any.
GroupedRows ReadGroupedRows(Buffers* buffers, int64_t num_channels,
                            int64_t num_groups) {
  GroupedRows rows{};
  rows.num_rows = buffers->NextShape<1>(Access::kOperand, "group")[0];
  rows.group = buffers->Operand<int32_t>("group", {rows.num_rows});
  rows.channels.number = num_channels;
  rows.num_groups = num_groups;
  buffers->Check(num_channels >= 1 && num_channels <= kMaxChannels,
                 "there must be 1 to 4 channels");
  for (int64_t c = 0; c < num_channels && c < kMaxChannels; ++c) {
    bool constant = buffers->NextRank() == 0;
    Shape shape = constant ? Shape{} : Shape{rows.num_rows};
    rows.channels.values[c] = buffers->Operand<float>("channels", shape);
    rows.channels.constant[c] = constant;
  }
  rows.weights = buffers->Optional<float>("weights", {rows.num_rows});
  return rows;
}

ffi::Error SumByGroupImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                          ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  auto [num_channels, num_groups] = buffers.NextShape<2>(Access::kResult, "sums");
  GroupedRows rows = ReadGroupedRows(&buffers, num_channels, num_groups);
  float* sums = buffers.Result<float>("sums", {num_channels, num_groups});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  SumByGroup(MakePool(threads), rows, sums);
  return ffi::Error::Success();
}

ffi::Error SumChangesImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                          ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  int64_t num_groups = buffers.NextShape<2>(Access::kResult, "sums")[1];
  int64_t num_rows = buffers.NextShape<1>(Access::kOperand, "group")[0];
  const int32_t* group = buffers.Operand<int32_t>("group", {num_rows});
  const float* before = buffers.Operand<float>("before", {num_rows});
  const float* after = buffers.Operand<float>("after", {num_rows});
  const float* weights = buffers.Optional<float>("weights", {num_rows});
  float* sums = buffers.Result<float>("sums", {2, num_groups});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  SumChanges(MakePool(threads), before, after, weights, group, num_rows, num_groups,
             sums);
  return ffi::Error::Success();
}

ffi::Error FindGreatestByGroupImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                                   ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  auto [num_channels, num_groups] = buffers.NextShape<2>(Access::kResult, "others", 1);
  GroupedRows rows = ReadGroupedRows(&buffers, num_channels, num_groups);
  int32_t* bits = buffers.Result<int32_t>("bits", {num_channels});
  float* others = buffers.Result<float>("others", {num_channels, num_groups});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  FindGreatestByGroup(MakePool(threads), rows, bits, others);
  return ffi::Error::Success();
}

ffi::Error SumDigitsByGroupImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                                ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  auto [num_channels, num_groups, four] =
      buffers.NextShape<3>(Access::kResult, "digits");
  const float* up = buffers.Operand<float>("up", {num_channels});
  GroupedRows rows = ReadGroupedRows(&buffers, num_channels, num_groups);
  int32_t* digits = buffers.Result<int32_t>("digits", {num_channels, num_groups, 4});
  buffers.Check(four == 4, "there must be 4 digits");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  SumDigitsByGroup(MakePool(threads), rows, up, digits);
  return ffi::Error::Success();
}

ffi::Error RangeByGroupImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                            ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  int64_t num_rows = buffers.NextShape<1>(Access::kOperand, "values")[0];
  const float* values = buffers.Operand<float>("values", {num_rows});
  const int32_t* group = buffers.Operand<int32_t>("group", {num_rows});
  int64_t num_groups = buffers.NextShape<1>(Access::kResult, "low")[0];
  float* low = buffers.Result<float>("low", {num_groups});
  float* high = buffers.Result<float>("high", {num_groups});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  RangeByGroup(MakePool(threads), values, group, num_rows, num_groups, low, high);
  return ffi::Error::Success();
}

ffi::Error AddValuesImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                         ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  auto [num_scores, num_rows] = buffers.NextShape<2>(Access::kOperand, "scores");
  Shape shape = {num_scores, num_rows};
  const float* scores = buffers.Operand<float>("scores", shape);
  int64_t num_leaves = buffers.NextShape<2>(Access::kOperand, "values")[1];
  const float* values = buffers.Operand<float>("values", {num_scores, num_leaves});
  const int32_t* leaf = buffers.Operand<int32_t>("leaf", shape);
  // May be the memory of the scores; every score is read before it is written.
  float* result = buffers.Result<float>("result", shape);
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  AddValues(MakePool(threads), scores, values, leaf, num_scores, num_rows, num_leaves,
            result);
  return ffi::Error::Success();
}

// Their number of groups must be below 2^29: loops number groups and sides, kSides of
// each group, in 32 bits.
KinkRows ReadKinkRows(Buffers* buffers) {
  KinkRows rows;
  rows.num_rows = buffers->NextShape<1>(Access::kOperand, "minimiser")[0];
  rows.minimiser = buffers->Operand<float>("minimiser", {rows.num_rows});
  rows.scores = buffers->Operand<float>("scores", {rows.num_rows});
  rows.weights = buffers->Operand<float>("weights", {rows.num_rows});
  rows.uniform = buffers->NextRank() == 0;
  Shape slopes = rows.uniform ? Shape{} : Shape{rows.num_rows};
  rows.left = buffers->Operand<float>("left", slopes);
  rows.kink = buffers->Operand<float>("kink", slopes);
  rows.scale = buffers->Scalar<float>("scale");
  rows.group = buffers->Operand<int32_t>("group", {rows.num_rows});
  return rows;
}

constexpr int64_t kMostGroups = INT32_MAX / kSides;

ffi::Error MiddleMinimisersImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                                ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  KinkRows rows = ReadKinkRows(&buffers);
  int64_t num_groups = buffers.NextShape<1>(Access::kResult, "values")[0];
  float* values = buffers.Result<float>("values", {num_groups});
  buffers.Check(num_groups < kMostGroups, "there must be fewer than 2^29 groups");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  MiddleMinimisers(MakePool(threads), rows, num_groups, values);
  return ffi::Error::Success();
}

ffi::Error SumKinksImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                        ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  KinkRows rows = ReadKinkRows(&buffers);
  int64_t table = buffers.NextShape<3>(Access::kResult, "pairs")[2];
  int32_t* pairs = buffers.Result<int32_t>("pairs", {2, 2, table});
  buffers.Check(table >= 1 && table < kMostGroups,
                "there must be fewer than 2^29 groups");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  SumKinks(MakePool(threads), rows, table - 1, pairs);
  return ffi::Error::Success();
}

ffi::Error SumKinksByDigitImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                               ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  KinkRows rows = ReadKinkRows(&buffers);
  auto [two, ends, table, size] = buffers.NextShape<4>(Access::kResult, "pairs");
  KeyDigit digit;
  digit.prefix = buffers.Operand<uint32_t>("prefix", {kEnds, table});
  digit.shift = buffers.Scalar<int32_t>("shift");
  digit.bits = size == 256 ? 8 : 4;
  int32_t* pairs = buffers.Result<int32_t>("pairs", {2, kEnds, table, size});
  buffers.Check(two == 2 && ends == kEnds && table >= 1 && table < INT32_MAX / 256,
                "there must be fewer than 2^23 groups");
  buffers.Check(size == 256 || size == 16, "a digit must have 4 or 8 bits");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_CHECK(digit.shift >= 0 && digit.shift <= 32 - digit.bits,
               "a digit must lie within 32 bits");
  SumKinksByDigit(MakePool(threads), rows, table - 1, digit, pairs);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_sum_by_group, SumByGroupImpl, Bind())
JBOOST_HANDLER(jboost_sum_changes, SumChangesImpl, Bind())
JBOOST_HANDLER(jboost_greatest_by_group, FindGreatestByGroupImpl, Bind())
JBOOST_HANDLER(jboost_digits_by_group, SumDigitsByGroupImpl, Bind())
JBOOST_HANDLER(jboost_range_by_group, RangeByGroupImpl, Bind())
JBOOST_HANDLER(jboost_add_values, AddValuesImpl, Bind())
JBOOST_HANDLER(jboost_middle_minimisers, MiddleMinimisersImpl, Bind())
JBOOST_HANDLER(jboost_sum_kinks, SumKinksImpl, Bind())
JBOOST_HANDLER(jboost_sum_kinks_by_digit, SumKinksByDigitImpl, Bind())

}  // namespace jboost
