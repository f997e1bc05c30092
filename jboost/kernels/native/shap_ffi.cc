// SPDX-License-Identifier: Apache-2.0
// Binding of shap.h: unpack, check every shape, call.
#include "predict_ffi.h"
#include "shap.h"

namespace jboost {
namespace {

ffi::Error ShapImpl(ffi::ThreadPool threads, Float x, Int codes, Int coded_features,
                    Int feature, Float threshold, Bool missing_left, UInt left_codes,
                    Int left_child, Float leaf_value, Float cover, Float place,
                    Float weight, ffi::Result<Float> out, int64_t num_features,
                    int64_t by_column, int64_t max_depth, int64_t pairs) {
  ShapTrees trees;
  ffi::Error error = GetTrees(feature, threshold, missing_left, left_codes, left_child,
                              max_depth, &trees);
  if (error.failure()) return error;
  std::vector<int64_t> leaves = {trees.num_rounds, trees.num_scores,
                                 trees.num_leaves()};
  JBOOST_CHECK(Has(leaf_value.dimensions(), leaves), "leaf_value must be [R, K, L]");
  JBOOST_CHECK(Has(cover.dimensions(), leaves), "cover must be [R, K, L]");
  trees.leaf_value = leaf_value.typed_data();
  trees.cover = cover.typed_data();
  int64_t num_rows = out->dimensions().size() > 0 ? out->dimensions()[0] : 0;
  std::vector<int64_t> shape = {num_rows, num_features};
  if (pairs != 0) shape.push_back(num_features);
  shape.push_back(trees.num_scores);
  JBOOST_CHECK(Has(out->dimensions(), shape), "out must be [N, F, K] or [N, F, F, K]");
  Matrix matrix;
  error = GetMatrix(x, codes, coded_features, trees, num_rows, num_features, by_column,
                    &matrix);
  if (error.failure()) return error;
  JBOOST_CHECK(matrix.categories.num_features == 0, "categories must be codes by now");
  JBOOST_CHECK(place.dimensions().size() == 1 &&
                   Has(weight.dimensions(), {place.dimensions()[0]}),
               "place and weight must be [P]");
  JBOOST_CHECK(AreTrees(trees), "links must make trees of depth 255 at most");
  ShapPoints points{place.typed_data(), weight.typed_data(), place.dimensions()[0]};
  Explain(MakePool(threads), trees, matrix, points,
          ShapAnswer{out->typed_data(), pairs != 0});
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_shap, ShapImpl,
               Operands()
                   .Arg<Float>()  // leaf_value
                   .Arg<Float>()  // cover
                   .Arg<Float>()  // place
                   .Arg<Float>()  // weight
                   .Ret<Float>()  // out
                   .Attr<int64_t>("num_features")
                   .Attr<int64_t>("by_column")
                   .Attr<int64_t>("max_depth")
                   .Attr<int64_t>("pairs"))

}  // namespace jboost
