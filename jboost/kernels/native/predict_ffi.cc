// SPDX-License-Identifier: Apache-2.0
// Bindings of predict.h: unpack, check every shape, call.
#include <vector>

#include "ffi.h"
#include "predict.h"

namespace jboost {
namespace {

using Int = ffi::Buffer<ffi::S32>;
using Float = ffi::Buffer<ffi::F32>;
using Bool = ffi::Buffer<ffi::PRED>;

constexpr int64_t kMaxHead = 64;

bool Has(const ffi::AnyBuffer::Dimensions& shape, std::vector<int64_t> expected) {
  return std::vector<int64_t>(shape.begin(), shape.end()) == expected;
}

// The structure of an ensemble, checked.
ffi::Error GetTrees(Int feature, Float threshold, Bool missing_left, Ensemble* model) {
  auto shape = feature.dimensions();
  JBOOST_CHECK(shape.size() == 3, "feature must be [R, K, I]");
  std::vector<int64_t> trees(shape.begin(), shape.end());
  JBOOST_CHECK(Has(threshold.dimensions(), trees), "threshold must be [R, K, I]");
  JBOOST_CHECK(Has(missing_left.dimensions(), trees), "missing_left must be [R, K, I]");
  int64_t max_depth = 0;
  while ((int64_t{1} << max_depth) - 1 < trees[2]) ++max_depth;
  *model = Ensemble{feature.typed_data(),
                    threshold.typed_data(),
                    reinterpret_cast<const uint8_t*>(missing_left.typed_data()),
                    nullptr,
                    nullptr,
                    trees[0],
                    trees[1],
                    max_depth};
  JBOOST_CHECK(max_depth > 0 && model->num_nodes() == trees[2],
               "I must be 2^max_depth - 1");
  return ffi::Error::Success();
}

ffi::Error GetValues(Float leaf_value, Float init_score, Ensemble* model) {
  JBOOST_CHECK(Has(leaf_value.dimensions(), {model->num_rounds, model->num_scores,
                                             model->num_nodes() + 1}),
               "leaf_value must be [R, K, I + 1]");
  JBOOST_CHECK(Has(init_score.dimensions(), {model->num_scores}),
               "init_score must be [K]");
  model->leaf_value = leaf_value.typed_data();
  model->init_score = init_score.typed_data();
  return ffi::Error::Success();
}

ffi::Error GetMatrix(Float head, Float body, const Ensemble& model, int64_t num_rows,
                     int64_t num_features, int64_t by_column, Matrix* matrix) {
  JBOOST_CHECK(head.dimensions().size() == 1 && body.dimensions().size() == 1,
               "head and body must be flat");
  int64_t head_size = head.dimensions()[0];
  JBOOST_CHECK(num_features > 0 && head_size <= kMaxHead &&
                   head_size + body.dimensions()[0] == num_rows * num_features,
               "head and body must hold N x F numbers");
  JBOOST_CHECK(HasFeatures(model, num_features),
               "the trees look at features beyond the columns of x");
  *matrix = Matrix{head.typed_data(), body.typed_data(), head_size,
                   num_rows,          num_features,      by_column != 0};
  return ffi::Error::Success();
}

ffi::Error PredictImpl(ffi::ThreadPool threads, Float head, Float body, Int feature,
                       Float threshold, Bool missing_left, Float leaf_value,
                       Float init_score, ffi::Result<Float> scores,
                       int64_t num_features, int64_t by_column) {
  Ensemble model;
  ffi::Error error = GetTrees(feature, threshold, missing_left, &model);
  if (error.failure()) return error;
  error = GetValues(leaf_value, init_score, &model);
  if (error.failure()) return error;
  auto shape = scores->dimensions();
  JBOOST_CHECK(shape.size() == 2 && shape[1] == model.num_scores,
               "scores must be [N, K]");
  Matrix matrix;
  error = GetMatrix(head, body, model, shape[0], num_features, by_column, &matrix);
  if (error.failure()) return error;
  Answer answer;
  answer.scores = scores->typed_data();
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

ffi::Error StagedPredictImpl(ffi::ThreadPool threads, Float head, Float body,
                             Int feature, Float threshold, Bool missing_left,
                             Float leaf_value, Float init_score,
                             ffi::Result<Float> stages, int64_t num_features,
                             int64_t by_column) {
  Ensemble model;
  ffi::Error error = GetTrees(feature, threshold, missing_left, &model);
  if (error.failure()) return error;
  error = GetValues(leaf_value, init_score, &model);
  if (error.failure()) return error;
  auto shape = stages->dimensions();
  JBOOST_CHECK(shape.size() == 3 && shape[0] == model.num_rounds &&
                   shape[2] == model.num_scores,
               "stages must be [R, N, K]");
  Matrix matrix;
  error = GetMatrix(head, body, model, shape[1], num_features, by_column, &matrix);
  if (error.failure()) return error;
  Answer answer;
  answer.stages = stages->typed_data();
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

ffi::Error LeafIndicesImpl(ffi::ThreadPool threads, Float head, Float body, Int feature,
                           Float threshold, Bool missing_left, ffi::Result<Int> leaves,
                           int64_t num_features, int64_t by_column) {
  Ensemble model;
  ffi::Error error = GetTrees(feature, threshold, missing_left, &model);
  if (error.failure()) return error;
  auto shape = leaves->dimensions();
  JBOOST_CHECK(shape.size() == 3 && shape[1] == model.num_rounds &&
                   shape[2] == model.num_scores,
               "leaves must be [N, R, K]");
  Matrix matrix;
  error = GetMatrix(head, body, model, shape[0], num_features, by_column, &matrix);
  if (error.failure()) return error;
  Answer answer;
  answer.leaves = leaves->typed_data();
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

// What all three begin with.
auto Operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Float>()  // head
      .Arg<Float>()  // body
      .Arg<Int>()    // feature
      .Arg<Float>()  // threshold
      .Arg<Bool>();  // missing_left
}

}  // namespace

JBOOST_HANDLER(jboost_predict, PredictImpl,
               Operands()
                   .Arg<Float>()  // leaf_value
                   .Arg<Float>()  // init_score
                   .Ret<Float>()  // scores
                   .Attr<int64_t>("num_features")
                   .Attr<int64_t>("by_column"))

JBOOST_HANDLER(jboost_staged_predict, StagedPredictImpl,
               Operands()
                   .Arg<Float>()  // leaf_value
                   .Arg<Float>()  // init_score
                   .Ret<Float>()  // stages
                   .Attr<int64_t>("num_features")
                   .Attr<int64_t>("by_column"))

JBOOST_HANDLER(jboost_leaf_indices, LeafIndicesImpl,
               Operands()
                   .Ret<Int>()  // leaves
                   .Attr<int64_t>("num_features")
                   .Attr<int64_t>("by_column"))

}  // namespace jboost
