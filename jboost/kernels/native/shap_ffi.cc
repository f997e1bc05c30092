// SPDX-License-Identifier: Apache-2.0
// Binding of shap.h.
#include "predict_ffi.h"
#include "shap.h"

namespace jboost {
namespace {

ffi::Error ShapImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                    ffi::RemainingRets results, int64_t num_features, int64_t by_column,
                    int64_t max_depth, int64_t pairs) {
  Buffers buffers(operands, results);
  Matrix matrix;
  ShapTrees trees{};
  ReadModel(&buffers, num_features, by_column != 0, max_depth, &matrix, &trees);
  ReadLeaves(&buffers, &trees);
  trees.cover = buffers.Operand<float>(
      "cover", {trees.num_rounds, trees.num_scores, trees.num_leaves()});
  ShapPoints points;
  points.size = buffers.NextShape<1>(Access::kOperand, "place")[0];
  points.place = buffers.Operand<float>("place", {points.size});
  points.weight = buffers.Operand<float>("weight", {points.size});
  Shape shape = {matrix.num_rows, num_features};
  if (pairs != 0) shape.push_back(num_features);
  shape.push_back(trees.num_scores);
  ShapAnswer answer{buffers.Result<float>("out", shape), pairs != 0};
  JBOOST_RETURN_IF_ERROR(FinishModel(&buffers, matrix.num_rows, &matrix, trees));
  JBOOST_CHECK(matrix.categories.num_features == 0,
               "the values of categorical columns must be codes");
  JBOOST_CHECK(AreTrees(trees), "links must make trees of depth 255 at most");
  Explain(MakePool(threads), trees, matrix, points, answer);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_shap, ShapImpl,
               Bind()
                   .Attr<int64_t>("num_features")
                   .Attr<int64_t>("by_column")
                   .Attr<int64_t>("max_depth")
                   .Attr<int64_t>("pairs"))

}  // namespace jboost
