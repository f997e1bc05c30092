// SPDX-License-Identifier: Apache-2.0
// Bindings of predict.h.
#include "predict_ffi.h"

namespace jboost {

void ReadModel(Buffers* buffers, int64_t num_features, bool by_column,
               int64_t max_depth, Matrix* matrix, Ensemble* model) {
  int64_t size = buffers->NextShape<1>(Access::kOperand, "x")[0];
  const float* x = buffers->Operand<float>("x", {size});
  buffers->Check(num_features > 0 && size % num_features == 0,
                 "x must be flat and hold N * F numbers");
  Categories categories;
  auto [groups, values] = buffers->NextShape<2>(Access::kOperand, "codes");
  categories.num_features = groups;
  categories.num_values = values;
  categories.codes = buffers->Operand<int32_t>("codes", {groups, values});
  categories.features = buffers->Operand<int32_t>("coded_features", {groups});
  *matrix = {x, num_features > 0 ? size / num_features : 0, num_features, by_column,
             categories};
  auto [rounds, number, nodes] = buffers->NextShape<3>(Access::kOperand, "feature");
  Shape trees = {rounds, number, nodes};
  model->num_rounds = rounds;
  model->trees_per_round = model->num_scores = number;
  model->num_nodes = nodes;
  model->max_depth = max_depth;
  model->feature = buffers->Operand<int32_t>("feature", trees);
  model->threshold = buffers->Operand<float>("threshold", trees);
  model->missing_left = buffers->Operand<uint8_t>("missing_left", trees);
  buffers->Check(number > 0, "rounds must have trees");
  // Sets and links have shape [0] where there are none.
  if (buffers->NextRank() == 1) {
    buffers->Operand<uint32_t>("left_codes", {0});
  } else {
    model->num_words = buffers->NextShape<4>(Access::kOperand, "left_codes")[3];
    model->left_codes = buffers->Operand<uint32_t>(
        "left_codes", {rounds, number, nodes, model->num_words});
    buffers->Check(model->num_words > 0, "left_codes must have words");
  }
  if (buffers->NextRank() == 1) {
    buffers->Operand<int32_t>("left_child", {0});
    buffers->Check(
        0 < max_depth && max_depth < 31 && nodes == (int64_t{1} << max_depth) - 1,
        "trees must have 2^max_depth - 1 nodes");
  } else {
    model->left_child = buffers->Operand<int32_t>("left_child", trees);
    buffers->Check(nodes > 0 && max_depth >= 0, "linked trees must have nodes");
  }
}

ffi::Error FinishModel(Buffers* buffers, int64_t num_rows, Matrix* matrix,
                       const Ensemble& model) {
  buffers->Check(matrix->num_rows == num_rows, "x must hold N * F numbers");
  JBOOST_RETURN_IF_ERROR(buffers->Finish());
  JBOOST_CHECK(HasFeatures(model, matrix->num_features),
               "the trees split features beyond the columns of x");
  JBOOST_CHECK(model.left_child == nullptr || HasChildren(model),
               "the children of linked nodes must be nodes");
  const Categories& categories = matrix->categories;
  for (int64_t g = 0; g < categories.num_features; ++g) {
    int32_t feature = categories.features[g];
    JBOOST_CHECK(0 <= feature && feature < matrix->num_features,
                 "coded_features must be columns of x");
  }
  return ffi::Error::Success();
}

void ReadLeaves(Buffers* buffers, Ensemble* model) {
  int64_t scores = buffers->NextShape<3>(Access::kOperand, "leaf_value")[1];
  int64_t trees = model->trees_per_round;
  buffers->Check(scores == trees || (trees == 1 && scores > 0),
                 "rounds must have one tree, or one for each score");
  model->num_scores = scores;
  model->leaf_value = buffers->Operand<float>(
      "leaf_value", {model->num_rounds, scores, model->num_leaves()});
}

void ReadValues(Buffers* buffers, Ensemble* model) {
  ReadLeaves(buffers, model);
  model->init_score = buffers->Operand<float>("init_score", {model->num_scores});
}

namespace {

ffi::Error PredictImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                       ffi::RemainingRets results, int64_t num_features,
                       int64_t by_column, int64_t max_depth) {
  Buffers buffers(operands, results);
  Matrix matrix;
  Ensemble model{};
  ReadModel(&buffers, num_features, by_column != 0, max_depth, &matrix, &model);
  ReadValues(&buffers, &model);
  int64_t num_rows = buffers.NextShape<2>(Access::kResult, "scores")[0];
  Answer answer;
  answer.scores = buffers.Result<float>("scores", {num_rows, model.num_scores});
  JBOOST_RETURN_IF_ERROR(FinishModel(&buffers, num_rows, &matrix, model));
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

ffi::Error StagedPredictImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                             ffi::RemainingRets results, int64_t num_features,
                             int64_t by_column, int64_t max_depth) {
  Buffers buffers(operands, results);
  Matrix matrix;
  Ensemble model{};
  ReadModel(&buffers, num_features, by_column != 0, max_depth, &matrix, &model);
  ReadValues(&buffers, &model);
  int64_t num_rows = buffers.NextShape<3>(Access::kResult, "stages")[1];
  Answer answer;
  answer.stages =
      buffers.Result<float>("stages", {model.num_rounds, num_rows, model.num_scores});
  JBOOST_RETURN_IF_ERROR(FinishModel(&buffers, num_rows, &matrix, model));
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

ffi::Error LeafIndicesImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                           ffi::RemainingRets results, int64_t num_features,
                           int64_t by_column, int64_t max_depth) {
  Buffers buffers(operands, results);
  Matrix matrix;
  Ensemble model{};
  ReadModel(&buffers, num_features, by_column != 0, max_depth, &matrix, &model);
  int64_t num_rows = buffers.NextShape<3>(Access::kResult, "leaves")[0];
  Answer answer;
  answer.leaves = buffers.Result<int32_t>(
      "leaves", {num_rows, model.num_rounds, model.trees_per_round});
  JBOOST_RETURN_IF_ERROR(FinishModel(&buffers, num_rows, &matrix, model));
  Predict(MakePool(threads), model, matrix, answer);
  return ffi::Error::Success();
}

// The attributes of all calls on a model.
auto BindModel() {
  return Bind()
      .Attr<int64_t>("num_features")
      .Attr<int64_t>("by_column")
      .Attr<int64_t>("max_depth");
}

}  // namespace

JBOOST_HANDLER(jboost_predict, PredictImpl, BindModel())
JBOOST_HANDLER(jboost_staged_predict, StagedPredictImpl, BindModel())
JBOOST_HANDLER(jboost_leaf_indices, LeafIndicesImpl, BindModel())

}  // namespace jboost
