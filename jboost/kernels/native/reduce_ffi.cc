// SPDX-License-Identifier: Apache-2.0
// Binding of reduce.h.
#include "ffi.h"
#include "reduce.h"

namespace jboost {
namespace {

ffi::Error SumRowsImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                       ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  auto [num_sums, count] = buffers.NextShape<2>(Access::kOperand, "values");
  const float* values = buffers.Operand<float>("values", {num_sums, count});
  const float* weights = buffers.Optional<float>("weights", {count});
  float* sums = buffers.Result<float>("sums", {num_sums});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  SumRows(MakePool(threads), values, weights, num_sums, count, sums);
  return ffi::Error::Success();
}

ffi::Error FindGreatestOfRowsImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                                  ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  auto [num_sums, count] = buffers.NextShape<2>(Access::kOperand, "values");
  const float* values = buffers.Operand<float>("values", {num_sums, count});
  const float* weights = buffers.Optional<float>("weights", {count});
  int32_t* bits = buffers.Result<int32_t>("bits", {num_sums});
  float* others = buffers.Result<float>("others", {num_sums});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  FindGreatestOfRows(MakePool(threads), values, weights, num_sums, count, bits, others);
  return ffi::Error::Success();
}

ffi::Error SumDigitsOfRowsImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                               ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  auto [num_sums, count] = buffers.NextShape<2>(Access::kOperand, "values");
  const float* values = buffers.Operand<float>("values", {num_sums, count});
  const float* up = buffers.Operand<float>("up", {num_sums});
  const float* weights = buffers.Optional<float>("weights", {count});
  int32_t* digits = buffers.Result<int32_t>("digits", {num_sums, 4});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  SumDigitsOfRows(MakePool(threads), values, weights, num_sums, count, up, digits);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_sum_rows, SumRowsImpl, Bind())
JBOOST_HANDLER(jboost_greatest_of_rows, FindGreatestOfRowsImpl, Bind())
JBOOST_HANDLER(jboost_digits_of_rows, SumDigitsOfRowsImpl, Bind())

}  // namespace jboost
