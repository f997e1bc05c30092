// SPDX-License-Identifier: Apache-2.0
// Bindings of binning.h: unpack, check every shape, call.
#include "binning.h"
#include "ffi.h"

namespace jboost {
namespace {

ffi::Error GetRows(const Float& x, Rows* rows) {
  auto shape = x.dimensions();
  JBOOST_CHECK(shape.size() == 2 && shape[0] > 0 && shape[1] > 0, "x must be [N, F]");
  *rows = Rows{x.typed_data(), shape[0], shape[1]};
  return ffi::Error::Success();
}

ffi::Error FindCutsImpl(ffi::ThreadPool threads, Float x, ffi::Buffer<ffi::U32> weight,
                        ffi::Result<Float> lower, ffi::Result<Float> upper,
                        ffi::Result<ffi::Buffer<ffi::S32>> num_cuts, int64_t max_bins) {
  Rows matrix;
  if (ffi::Error error = GetRows(x, &matrix); error.failure()) return error;
  auto weights = weight.dimensions();
  JBOOST_CHECK(weights.size() == 2 && weights[1] == 2 &&
                   (weights[0] == 0 || weights[0] == matrix.num_rows),
               "weight must be [N, 2] or [0, 2]");
  auto shape = lower->dimensions();
  JBOOST_CHECK(max_bins >= 2 && shape.size() == 2 && shape == upper->dimensions() &&
                   shape[0] == matrix.num_features && shape[1] >= max_bins - 2,
               "lower and upper must be [F, max_bins - 2]");
  JBOOST_CHECK(num_cuts->dimensions().size() == 1 &&
                   num_cuts->dimensions()[0] == matrix.num_features,
               "num_cuts must be [F]");
  Cuts cuts{lower->typed_data(), upper->typed_data(), num_cuts->typed_data(), shape[1]};
  FindCuts(
      MakePool(threads), matrix,
      weights[0] == 0 ? nullptr : reinterpret_cast<const double*>(weight.typed_data()),
      max_bins, cuts);
  return ffi::Error::Success();
}

ffi::Error FindCodesImpl(ffi::ThreadPool threads, Float x, Float thresholds,
                         ffi::Result<ffi::AnyBuffer> columns,
                         ffi::Result<ffi::AnyBuffer> packed) {
  Rows matrix;
  if (ffi::Error error = GetRows(x, &matrix); error.failure()) return error;
  auto bins = thresholds.dimensions();
  auto column = columns->dimensions(), row = packed->dimensions();
  auto type = columns->element_type();
  JBOOST_CHECK(bins.size() == 2 && bins[0] == matrix.num_features && bins[1] < 65536,
               "thresholds must be [F, B-1]");
  JBOOST_CHECK((type == ffi::U8 || type == ffi::U16) &&
                   packed->element_type() == type &&
                   (type == ffi::U16 || bins[1] < 256),
               "codes must be uint8 or uint16");
  JBOOST_CHECK(column.size() == 2 && (column[0] == 0 || column[0] == bins[0]),
               "columns must be [F, N] or [0, N]");
  JBOOST_CHECK(row.size() == 3 && row[1] == column[1] && row[1] >= matrix.num_rows &&
                   (row[0] == 0 ||
                    (row[0] * row[2] >= bins[0] && (row[0] - 1) * row[2] < bins[0])),
               "packed must be [blocks, N, width] or [0, N, width]");
  CodeLayouts layouts{column[0] == 0 ? nullptr : columns->untyped_data(),
                      row[0] == 0 ? nullptr : packed->untyped_data(),
                      row[1],
                      row[0],
                      row[2],
                      type == ffi::U16};
  FindCodes(MakePool(threads), matrix, thresholds.typed_data(), bins[1], layouts);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_find_cuts, FindCutsImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Float>()                  // x
                   .Arg<ffi::Buffer<ffi::U32>>()  // weight
                   .Ret<Float>()                  // lower
                   .Ret<Float>()                  // upper
                   .Ret<ffi::Buffer<ffi::S32>>()  // num_cuts
                   .Attr<int64_t>("max_bins"));

JBOOST_HANDLER(jboost_find_codes, FindCodesImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Float>()             // x
                   .Arg<Float>()             // thresholds
                   .Ret<ffi::AnyBuffer>()    // columns
                   .Ret<ffi::AnyBuffer>());  // packed

}  // namespace jboost
