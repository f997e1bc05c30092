// SPDX-License-Identifier: Apache-2.0
#include "ffi.h"
#include "sampling.h"

namespace jboost {
namespace {

ffi::Error SampleImpl(ffi::ThreadPool threads, UInt seed, Bool eligible, Float fraction,
                      ffi::Result<Bool> chosen) {
  JBOOST_CHECK(seed.dimensions().size() == 1 && seed.dimensions()[0] == 2,
               "seed must be [2]");
  JBOOST_CHECK(eligible.dimensions().size() == 1, "eligible must be [N]");
  JBOOST_CHECK(fraction.dimensions().size() == 0, "fraction must be a scalar");
  JBOOST_CHECK(chosen->dimensions().size() == 1 &&
                   chosen->dimensions()[0] == eligible.dimensions()[0],
               "the mask must be [N]");
  Sample(MakePool(threads), seed.typed_data(), Bytes(eligible),
         eligible.dimensions()[0], *fraction.typed_data(), Bytes(*chosen));
  return ffi::Error::Success();
}

ffi::Error SampleFeaturesImpl(UInt seed, Int level, Float fractions,
                              ffi::Result<Bool> masks) {
  JBOOST_CHECK(seed.dimensions().size() == 1 && seed.dimensions()[0] == 2,
               "seed must be [2]");
  JBOOST_CHECK(level.dimensions().size() == 0, "level must be a scalar");
  JBOOST_CHECK(fractions.dimensions().size() == 1 && fractions.dimensions()[0] == 3,
               "fractions must be [3]");
  auto shape = masks->dimensions();
  JBOOST_CHECK(shape.size() == 2, "masks must be [slots, F]");
  SampleFeatures(seed.typed_data(), *level.typed_data(), fractions.typed_data(),
                 shape[0], shape[1], Bytes(*masks));
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_sample, SampleImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<UInt>()    // seed
                   .Arg<Bool>()    // eligible
                   .Arg<Float>()   // fraction
                   .Ret<Bool>());  // chosen

JBOOST_HANDLER(jboost_sample_features, SampleFeaturesImpl,
               ffi::Ffi::Bind()
                   .Arg<UInt>()    // seed
                   .Arg<Int>()     // level
                   .Arg<Float>()   // fractions
                   .Ret<Bool>());  // masks

}  // namespace jboost
