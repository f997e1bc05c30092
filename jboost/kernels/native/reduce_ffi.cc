// SPDX-License-Identifier: Apache-2.0
#include "ffi.h"
#include "reduce.h"

namespace jboost {
namespace {

ffi::Error SumRowsImpl(ffi::ThreadPool threads, Float values, ffi::Result<Float> sums) {
  auto shape = values.dimensions();
  JBOOST_CHECK(shape.size() == 2 && sums->dimensions().size() == 1 &&
                   sums->dimensions()[0] == shape[0],
               "values must be [K, N], sums [K]");
  SumRows(MakePool(threads), values.typed_data(), shape[0], shape[1],
          sums->typed_data());
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_sum_rows, SumRowsImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Float>()    // values
                   .Ret<Float>());  // sums

}  // namespace jboost
