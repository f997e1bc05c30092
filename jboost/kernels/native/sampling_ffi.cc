// SPDX-License-Identifier: Apache-2.0
// Bindings of sampling.h.
#include "ffi.h"
#include "sampling.h"

namespace jboost {
namespace {

ffi::Error SampleImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                      ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  const uint32_t* seed = buffers.Operand<uint32_t>("seed", {2});
  int64_t count = buffers.NextShape<1>(Access::kOperand, "eligible")[0];
  const uint8_t* eligible = buffers.Operand<uint8_t>("eligible", {count});
  float fraction = buffers.Scalar<float>("fraction");
  uint8_t* chosen = buffers.Result<uint8_t>("chosen", {count});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  Sample(MakePool(threads), seed, eligible, count, fraction, chosen);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_sample, SampleImpl, Bind())

}  // namespace jboost
