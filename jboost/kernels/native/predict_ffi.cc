// SPDX-License-Identifier: Apache-2.0
// Bindings of predict.h: unpack, check every shape, call.
#include "predict_ffi.h"

namespace jboost {
namespace {

ffi::Error GetValues(Float leaf_value, Float init_score, Ensemble* model) {
  JBOOST_CHECK(Has(leaf_value.dimensions(),
                   {model->num_rounds, model->num_scores, model->num_leaves()}),
               "leaf_value must be [R, K, L]");
  JBOOST_CHECK(Has(init_score.dimensions(), {model->num_scores}),
               "init_score must be [K]");
  model->leaf_value = leaf_value.typed_data();
  model->init_score = init_score.typed_data();
  return ffi::Error::Success();
}

ffi::Error PredictImpl(ffi::ThreadPool threads, Float x, Int codes, Int coded_features,
                       Int feature, Float threshold, Bool missing_left, UInt left_codes,
                       Int left_child, Float leaf_value, Float init_score,
                       ffi::Result<Float> scores, int64_t num_features,
                       int64_t by_column, int64_t max_depth) {
  Ensemble model;
  ffi::Error error = GetTrees(feature, threshold, missing_left, left_codes, left_child,
                              max_depth, &model);
  if (error.failure()) return error;
  error = GetValues(leaf_value, init_score, &model);
  if (error.failure()) return error;
  auto shape = scores->dimensions();
  JBOOST_CHECK(shape.size() == 2 && shape[1] == model.num_scores,
               "scores must be [N, K]");
  Matrix matrix;
  error = GetMatrix(x, codes, coded_features, model, shape[0], num_features, by_column,
                    &matrix);
  if (error.failure()) return error;
  Answer answer;
  answer.scores = scores->typed_data();
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

ffi::Error StagedPredictImpl(ffi::ThreadPool threads, Float x, Int codes,
                             Int coded_features, Int feature, Float threshold,
                             Bool missing_left, UInt left_codes, Int left_child,
                             Float leaf_value, Float init_score,
                             ffi::Result<Float> stages, int64_t num_features,
                             int64_t by_column, int64_t max_depth) {
  Ensemble model;
  ffi::Error error = GetTrees(feature, threshold, missing_left, left_codes, left_child,
                              max_depth, &model);
  if (error.failure()) return error;
  error = GetValues(leaf_value, init_score, &model);
  if (error.failure()) return error;
  auto shape = stages->dimensions();
  JBOOST_CHECK(
      shape.size() == 3 && shape[0] == model.num_rounds && shape[2] == model.num_scores,
      "stages must be [R, N, K]");
  Matrix matrix;
  error = GetMatrix(x, codes, coded_features, model, shape[1], num_features, by_column,
                    &matrix);
  if (error.failure()) return error;
  Answer answer;
  answer.stages = stages->typed_data();
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

ffi::Error LeafIndicesImpl(ffi::ThreadPool threads, Float x, Int codes,
                           Int coded_features, Int feature, Float threshold,
                           Bool missing_left, UInt left_codes, Int left_child,
                           ffi::Result<Int> leaves, int64_t num_features,
                           int64_t by_column, int64_t max_depth) {
  Ensemble model;
  ffi::Error error = GetTrees(feature, threshold, missing_left, left_codes, left_child,
                              max_depth, &model);
  if (error.failure()) return error;
  auto shape = leaves->dimensions();
  JBOOST_CHECK(
      shape.size() == 3 && shape[1] == model.num_rounds && shape[2] == model.num_scores,
      "leaves must be [N, R, K]");
  Matrix matrix;
  error = GetMatrix(x, codes, coded_features, model, shape[0], num_features, by_column,
                    &matrix);
  if (error.failure()) return error;
  Answer answer;
  answer.leaves = leaves->typed_data();
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_predict, PredictImpl,
               Operands()
                   .Arg<Float>()  // leaf_value
                   .Arg<Float>()  // init_score
                   .Ret<Float>()  // scores
                   .Attr<int64_t>("num_features")
                   .Attr<int64_t>("by_column")
                   .Attr<int64_t>("max_depth"))

JBOOST_HANDLER(jboost_staged_predict, StagedPredictImpl,
               Operands()
                   .Arg<Float>()  // leaf_value
                   .Arg<Float>()  // init_score
                   .Ret<Float>()  // stages
                   .Attr<int64_t>("num_features")
                   .Attr<int64_t>("by_column")
                   .Attr<int64_t>("max_depth"))

JBOOST_HANDLER(jboost_leaf_indices, LeafIndicesImpl,
               Operands()
                   .Ret<Int>()  // leaves
                   .Attr<int64_t>("num_features")
                   .Attr<int64_t>("by_column")
                   .Attr<int64_t>("max_depth"))

}  // namespace jboost
