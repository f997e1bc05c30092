// SPDX-License-Identifier: Apache-2.0
// Bindings of binning.h.
#include "binning.h"
#include "ffi.h"

namespace jboost {
namespace {

FloatRows ReadMatrix(Buffers& buffers) {
  auto [rows, features] = buffers.NextShape<2>("x");
  const float* values = buffers.Operand<float>("x", {rows, features});
  Require(rows > 0 && features > 0, "x must have rows and features");
  Require(rows <= INT32_MAX, "x must have fewer than 2^31 rows");
  return {values, rows, features};
}

void FindCutsImpl(Buffers& buffers, const Pool& pool) {
  int64_t max_bins = buffers.Attribute("max_bins");
  FloatRows matrix = ReadMatrix(buffers);
  // A float64 as two words, since XLA may have no float64. Without weights there are
  // no rows.
  int64_t weights = buffers.NextShape<2>("weight")[0];
  const uint32_t* weight = buffers.Operand<uint32_t>("weight", {weights, 2});
  Require(weights == 0 || weights == matrix.num_rows,
          "weight must have N rows, or none");
  Cuts cuts;
  int64_t features = matrix.num_features;
  cuts.max_cuts = buffers.NextShape<2>("lower", Access::kResult)[1];
  cuts.lower = buffers.Result<float>("lower", {features, cuts.max_cuts});
  cuts.upper = buffers.Result<float>("upper", {features, cuts.max_cuts});
  cuts.num_cuts = buffers.Result<int32_t>("num_cuts", {features});
  Require(max_bins >= 2 && cuts.max_cuts >= max_bins - 2,
          "lower and upper must hold max_bins - 2 cuts");
  buffers.Finish();
  FindCuts(pool, matrix,
           weights == 0 ? nullptr : reinterpret_cast<const double*>(weight), max_bins,
           cuts);
}

void FindCodesImpl(Buffers& buffers, const Pool& pool) {
  FloatRows matrix = ReadMatrix(buffers);
  int64_t features = matrix.num_features;
  int64_t num_thresholds = buffers.NextShape<2>("thresholds")[1];
  const float* thresholds =
      buffers.Operand<float>("thresholds", {features, num_thresholds});
  CodeLayouts layouts;
  layouts.wide = buffers.NextIsWide(Access::kResult);
  // A layout that is not wanted has no features, or no blocks.
  auto [columns, num_rows] = buffers.NextShape<2>("columns", Access::kResult);
  layouts.columns =
      buffers.Codes(Access::kResult, "columns", {columns, num_rows}, layouts.wide);
  auto [blocks, rows, width] = buffers.NextShape<3>("packed", Access::kResult);
  layouts.packed =
      buffers.Codes(Access::kResult, "packed", {blocks, rows, width}, layouts.wide);
  if (columns == 0) layouts.columns = nullptr;
  if (blocks == 0) layouts.packed = nullptr;
  layouts.num_rows = rows;
  layouts.num_blocks = blocks;
  layouts.width = width;
  Require(num_thresholds < (layouts.wide ? 65536 : 256), "codes must fit their type");
  Require(columns == 0 || columns == features, "columns must be [F, N] or [0, N]");
  Require(rows == num_rows && rows >= matrix.num_rows,
          "columns and packed must have the rows of x, or more");
  Require(
      blocks == 0 || (blocks * width >= features && (blocks - 1) * width < features),
      "packed must hold the codes of F features");
  buffers.Finish();
  FindCodes(pool, matrix, thresholds, num_thresholds, layouts);
}

}  // namespace

JBOOST_HANDLER(jboost_find_cuts, FindCutsImpl)
JBOOST_HANDLER(jboost_find_codes, FindCodesImpl)

}  // namespace jboost
