// SPDX-License-Identifier: Apache-2.0
// Bindings of leaves.h.
#include "ffi.h"
#include "leaves.h"

namespace jboost {
namespace {

// The group of each row, the channels, and the weights if there are any.
GroupedRows ReadGroupedRows(Buffers& buffers, int64_t num_channels,
                            int64_t num_groups) {
  GroupedRows rows{};
  rows.num_rows = buffers.NextShape<1>("group")[0];
  rows.group = buffers.Operand<int32_t>("group", {rows.num_rows});
  rows.channels.number = num_channels;
  rows.num_groups = num_groups;
  Require(num_channels >= 1 && num_channels <= kMaxChannels,
          "there must be 1 to 4 channels");
  for (int64_t c = 0; c < num_channels && c < kMaxChannels; ++c) {
    bool constant = buffers.NextRank() == 0;
    Shape shape = constant ? Shape{} : Shape{rows.num_rows};
    rows.channels.values[c] = buffers.Operand<float>("channels", shape);
    rows.channels.constant[c] = constant;
  }
  rows.weights = buffers.Optional<float>("weights", {rows.num_rows});
  return rows;
}

template <bool kChanges>
void SumByGroupImpl(Buffers& buffers, const Pool& pool) {
  auto [num_channels, num_groups] = buffers.NextShape<2>("sums", Access::kResult);
  GroupedRows rows = ReadGroupedRows(buffers, num_channels, num_groups);
  const bool* constant = rows.channels.constant;
  Require(!kChanges || (num_channels == 2 && !constant[0] && !constant[1]),
          "changes must be of two arrays");
  rows.channels.changes = kChanges;
  float* sums = buffers.Result<float>("sums", {num_channels, num_groups});
  buffers.Finish();
  SumByGroup(pool, rows, sums);
}

void FindGreatestByGroupImpl(Buffers& buffers, const Pool& pool) {
  auto [num_channels, num_groups] = buffers.NextShape<2>("others", Access::kResult, 1);
  GroupedRows rows = ReadGroupedRows(buffers, num_channels, num_groups);
  int32_t* bits = buffers.Result<int32_t>("bits", {num_channels});
  float* others = buffers.Result<float>("others", {num_channels, num_groups});
  buffers.Finish();
  FindGreatestByGroup(pool, rows, bits, others);
}

void SumDigitsByGroupImpl(Buffers& buffers, const Pool& pool) {
  auto [num_channels, num_groups, four] =
      buffers.NextShape<3>("digits", Access::kResult);
  const float* up = buffers.Operand<float>("up", {num_channels});
  GroupedRows rows = ReadGroupedRows(buffers, num_channels, num_groups);
  int32_t* digits = buffers.Result<int32_t>("digits", {num_channels, num_groups, 4});
  Require(four == 4, "there must be 4 digits");
  buffers.Finish();
  SumDigitsByGroup(pool, rows, up, digits);
}

void RangeByGroupImpl(Buffers& buffers, const Pool& pool) {
  int64_t num_rows = buffers.NextShape<1>("values")[0];
  const float* values = buffers.Operand<float>("values", {num_rows});
  const int32_t* group = buffers.Operand<int32_t>("group", {num_rows});
  int64_t num_groups = buffers.NextShape<1>("low", Access::kResult)[0];
  float* low = buffers.Result<float>("low", {num_groups});
  float* high = buffers.Result<float>("high", {num_groups});
  buffers.Finish();
  RangeByGroup(pool, values, group, num_rows, num_groups, low, high);
}

void AddValuesImpl(Buffers& buffers, const Pool& pool) {
  auto [num_scores, num_rows] = buffers.NextShape<2>("scores");
  Shape shape = {num_scores, num_rows};
  const float* scores = buffers.Operand<float>("scores", shape);
  int64_t num_leaves = buffers.NextShape<2>("values")[1];
  const float* values = buffers.Operand<float>("values", {num_scores, num_leaves});
  const int32_t* leaf = buffers.Operand<int32_t>("leaf", shape);
  // May be the memory of the scores; every score is read before it is written.
  float* result = buffers.Result<float>("result", shape);
  buffers.Finish();
  AddValues(pool, scores, values, leaf, num_scores, num_rows, num_leaves, result);
}

// Their number of groups must be below 2^29: loops number groups and sides, kSides of
// each group, in 32 bits.
KinkRows ReadKinkRows(Buffers& buffers) {
  KinkRows rows;
  rows.num_rows = buffers.NextShape<1>("minimiser")[0];
  rows.minimiser = buffers.Operand<float>("minimiser", {rows.num_rows});
  rows.scores = buffers.Operand<float>("scores", {rows.num_rows});
  rows.weights = buffers.Operand<float>("weights", {rows.num_rows});
  rows.uniform = buffers.NextRank() == 0;
  Shape slopes = rows.uniform ? Shape{} : Shape{rows.num_rows};
  rows.left = buffers.Operand<float>("left", slopes);
  rows.kink = buffers.Operand<float>("kink", slopes);
  rows.scale = buffers.Scalar<float>("scale");
  rows.group = buffers.Operand<int32_t>("group", {rows.num_rows});
  return rows;
}

constexpr int64_t kMostGroups = INT32_MAX / kSides;

void MiddleMinimisersImpl(Buffers& buffers, const Pool& pool) {
  KinkRows rows = ReadKinkRows(buffers);
  int64_t num_groups = buffers.NextShape<1>("values", Access::kResult)[0];
  float* values = buffers.Result<float>("values", {num_groups});
  Require(num_groups < kMostGroups, "there must be fewer than 2^29 groups");
  buffers.Finish();
  MiddleMinimisers(pool, rows, num_groups, values);
}

void SumKinksImpl(Buffers& buffers, const Pool& pool) {
  KinkRows rows = ReadKinkRows(buffers);
  int64_t table = buffers.NextShape<3>("pairs", Access::kResult)[2];
  int32_t* pairs = buffers.Result<int32_t>("pairs", {2, 2, table});
  Require(table >= 1 && table < kMostGroups, "there must be fewer than 2^29 groups");
  buffers.Finish();
  SumKinks(pool, rows, table - 1, pairs);
}

void SumKinksByDigitImpl(Buffers& buffers, const Pool& pool) {
  KinkRows rows = ReadKinkRows(buffers);
  auto [two, ends, table, size] = buffers.NextShape<4>("pairs", Access::kResult);
  KeyDigit digit;
  digit.prefix = buffers.Operand<uint32_t>("prefix", {kEnds, table});
  digit.shift = buffers.Scalar<int32_t>("shift");
  digit.bits = size == 256 ? 8 : 4;
  int32_t* pairs = buffers.Result<int32_t>("pairs", {2, kEnds, table, size});
  Require(two == 2 && ends == kEnds && table >= 1 && table < INT32_MAX / 256,
          "there must be fewer than 2^23 groups");
  Require(size == 256 || size == 16, "a digit must have 4 or 8 bits");
  buffers.Finish();
  Require(digit.shift >= 0 && digit.shift <= 32 - digit.bits,
          "a digit must lie within 32 bits");
  SumKinksByDigit(pool, rows, table - 1, digit, pairs);
}

WeightedRows ReadWeightedRows(Buffers& buffers, const float** up) {
  auto [num_sums, count] = buffers.NextShape<2>("values");
  const float* values = buffers.Operand<float>("values", {num_sums, count});
  if (up != nullptr) *up = buffers.Operand<float>("up", {num_sums});
  return {values, buffers.Optional<float>("weights", {count}), num_sums, count};
}

void SumRowsImpl(Buffers& buffers, const Pool& pool) {
  WeightedRows rows = ReadWeightedRows(buffers, nullptr);
  float* sums = buffers.Result<float>("sums", {rows.num_sums});
  buffers.Finish();
  SumRows(pool, rows, sums);
}

void FindGreatestOfRowsImpl(Buffers& buffers, const Pool& pool) {
  WeightedRows rows = ReadWeightedRows(buffers, nullptr);
  int32_t* bits = buffers.Result<int32_t>("bits", {rows.num_sums});
  float* others = buffers.Result<float>("others", {rows.num_sums});
  buffers.Finish();
  FindGreatestOfRows(pool, rows, bits, others);
}

void SumDigitsOfRowsImpl(Buffers& buffers, const Pool& pool) {
  const float* up;
  WeightedRows rows = ReadWeightedRows(buffers, &up);
  int32_t* digits = buffers.Result<int32_t>("digits", {rows.num_sums, 4});
  buffers.Finish();
  SumDigitsOfRows(pool, rows, up, digits);
}

}  // namespace

JBOOST_HANDLER(jboost_sum_by_group, SumByGroupImpl<false>)
JBOOST_HANDLER(jboost_sum_changes, SumByGroupImpl<true>)
JBOOST_HANDLER(jboost_greatest_by_group, FindGreatestByGroupImpl)
JBOOST_HANDLER(jboost_digits_by_group, SumDigitsByGroupImpl)
JBOOST_HANDLER(jboost_range_by_group, RangeByGroupImpl)
JBOOST_HANDLER(jboost_add_values, AddValuesImpl)
JBOOST_HANDLER(jboost_middle_minimisers, MiddleMinimisersImpl)
JBOOST_HANDLER(jboost_sum_kinks, SumKinksImpl)
JBOOST_HANDLER(jboost_sum_kinks_by_digit, SumKinksByDigitImpl)
JBOOST_HANDLER(jboost_sum_rows, SumRowsImpl)
JBOOST_HANDLER(jboost_greatest_of_rows, FindGreatestOfRowsImpl)
JBOOST_HANDLER(jboost_digits_of_rows, SumDigitsOfRowsImpl)

}  // namespace jboost
