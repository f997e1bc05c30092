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

ffi::Error SampleFeaturesImpl(ffi::ThreadPool, ffi::RemainingArgs operands,
                              ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  const uint32_t* seed = buffers.Operand<uint32_t>("seed", {2});
  int32_t level = buffers.Scalar<int32_t>("level");
  const float* fractions = buffers.Operand<float>("fractions", {3});
  auto [slots, features] = buffers.NextShape<2>(Access::kResult, "masks");
  uint8_t* masks = buffers.Result<uint8_t>("masks", {slots, features});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_CHECK(0 <= level && level < 31, "level must be 0 to 30");
  SampleFeatures(seed, level, fractions, slots, features, masks);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_sample, SampleImpl, Bind())
JBOOST_HANDLER(jboost_sample_features, SampleFeaturesImpl, Bind())

}  // namespace jboost
