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
  float* sums = buffers.Result<float>("sums", {num_sums});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  SumRows(MakePool(threads), values, num_sums, count, sums);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_sum_rows, SumRowsImpl, Bind())

}  // namespace jboost
