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
using Words = ffi::Buffer<ffi::U32>;

constexpr int64_t kMaxHead = 64;

bool Has(const ffi::AnyBuffer::Dimensions& shape, std::vector<int64_t> expected) {
  return std::vector<int64_t>(shape.begin(), shape.end()) == expected;
}

// The structure of an ensemble, checked. Sets and links have shape [0] where there are
// none.
ffi::Error GetTrees(Int feature, Float threshold, Bool missing_left, Words left_codes,
                    Int left_child, int64_t max_depth, Ensemble* model) {
  auto shape = feature.dimensions();
  JBOOST_CHECK(shape.size() == 3, "feature must be [R, K, I]");
  std::vector<int64_t> trees(shape.begin(), shape.end());
  JBOOST_CHECK(Has(threshold.dimensions(), trees), "threshold must be [R, K, I]");
  JBOOST_CHECK(Has(missing_left.dimensions(), trees), "missing_left must be [R, K, I]");
  *model = Ensemble{feature.typed_data(),
                    threshold.typed_data(),
                    reinterpret_cast<const uint8_t*>(missing_left.typed_data()),
                    nullptr,
                    nullptr,
                    trees[0],
                    trees[1],
                    max_depth,
                    trees[2]};
  if (!Has(left_codes.dimensions(), {0})) {
    std::vector<int64_t> sets = trees;
    sets.push_back(left_codes.dimensions().back());
    JBOOST_CHECK(Has(left_codes.dimensions(), sets) && sets[3] > 0,
                 "left_codes must be [R, K, I, W]");
    model->left_codes = left_codes.typed_data();
    model->num_words = sets[3];
  }
  if (!Has(left_child.dimensions(), {0})) {
    JBOOST_CHECK(Has(left_child.dimensions(), trees) && max_depth >= 0,
                 "left_child must be [R, K, I]");
    model->left_child = left_child.typed_data();
    JBOOST_CHECK(HasChildren(*model), "the children of linked nodes must be nodes");
    return ffi::Error::Success();
  }
  JBOOST_CHECK(0 < max_depth && max_depth < 31 &&
                   trees[2] == (int64_t{1} << max_depth) - 1,
               "I must be 2^max_depth - 1");
  return ffi::Error::Success();
}

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

ffi::Error GetMatrix(Float head, Float body, Int codes, Int coded_features,
                     const Ensemble& model, int64_t num_rows, int64_t num_features,
                     int64_t by_column, Matrix* matrix) {
  JBOOST_CHECK(head.dimensions().size() == 1 && body.dimensions().size() == 1,
               "head and body must be flat");
  int64_t head_size = head.dimensions()[0];
  JBOOST_CHECK(num_features > 0 && head_size <= kMaxHead &&
                   head_size + body.dimensions()[0] == num_rows * num_features,
               "head and body must hold N x F numbers");
  JBOOST_CHECK(HasFeatures(model, num_features),
               "the trees look at features beyond the columns of x");
  JBOOST_CHECK(codes.dimensions().size() == 2 &&
                   Has(coded_features.dimensions(), {codes.dimensions()[0]}),
               "codes must be [G, V], coded_features [G]");
  Categories categories{codes.typed_data(), coded_features.typed_data(),
                        codes.dimensions()[0], codes.dimensions()[1]};
  for (int64_t g = 0; g < categories.num_features; ++g) {
    int32_t feature = categories.features[g];
    JBOOST_CHECK(0 <= feature && feature < num_features,
                 "coded_features must be columns of x");
  }
  *matrix = Matrix{head.typed_data(), body.typed_data(), head_size,  num_rows,
                   num_features,      by_column != 0,    categories};
  return ffi::Error::Success();
}

ffi::Error PredictImpl(ffi::ThreadPool threads, Float head, Float body, Int codes,
                       Int coded_features, Int feature, Float threshold,
                       Bool missing_left, Words left_codes, Int left_child,
                       Float leaf_value, Float init_score, ffi::Result<Float> scores,
                       int64_t num_features, int64_t by_column, int64_t max_depth) {
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
  error = GetMatrix(head, body, codes, coded_features, model, shape[0], num_features,
                    by_column, &matrix);
  if (error.failure()) return error;
  Answer answer;
  answer.scores = scores->typed_data();
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

ffi::Error StagedPredictImpl(ffi::ThreadPool threads, Float head, Float body, Int codes,
                             Int coded_features, Int feature, Float threshold,
                             Bool missing_left, Words left_codes, Int left_child,
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
  JBOOST_CHECK(shape.size() == 3 && shape[0] == model.num_rounds &&
                   shape[2] == model.num_scores,
               "stages must be [R, N, K]");
  Matrix matrix;
  error = GetMatrix(head, body, codes, coded_features, model, shape[1], num_features,
                    by_column, &matrix);
  if (error.failure()) return error;
  Answer answer;
  answer.stages = stages->typed_data();
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

ffi::Error LeafIndicesImpl(ffi::ThreadPool threads, Float head, Float body, Int codes,
                           Int coded_features, Int feature, Float threshold,
                           Bool missing_left, Words left_codes, Int left_child,
                           ffi::Result<Int> leaves, int64_t num_features,
                           int64_t by_column, int64_t max_depth) {
  Ensemble model;
  ffi::Error error = GetTrees(feature, threshold, missing_left, left_codes, left_child,
                              max_depth, &model);
  if (error.failure()) return error;
  auto shape = leaves->dimensions();
  JBOOST_CHECK(shape.size() == 3 && shape[1] == model.num_rounds &&
                   shape[2] == model.num_scores,
               "leaves must be [N, R, K]");
  Matrix matrix;
  error = GetMatrix(head, body, codes, coded_features, model, shape[0], num_features,
                    by_column, &matrix);
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
      .Arg<Int>()    // codes
      .Arg<Int>()    // coded_features
      .Arg<Int>()    // feature
      .Arg<Float>()  // threshold
      .Arg<Bool>()   // missing_left
      .Arg<Words>()  // left_codes
      .Arg<Int>();   // left_child
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
