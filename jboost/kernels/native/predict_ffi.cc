// SPDX-License-Identifier: Apache-2.0
// Bindings of predict.h and shap.h.
#include <cmath>
#include <cstring>
#include <exception>

#include "denormals.h"
#include "ffi.h"
#include "predict.h"
#include "shap.h"

namespace jboost {
namespace {

// Reads what all these calls begin with: the matrix, which is flat, its categories and
// the structure of the trees.
void ReadModel(Buffers& buffers, Matrix* matrix, Ensemble* model) {
  int64_t num_features = buffers.Attribute("num_features");
  int64_t max_depth = buffers.Attribute("max_depth");
  bool by_column = buffers.Attribute("by_column") != 0;
  int64_t size = buffers.NextShape<1>("x")[0];
  const float* x = buffers.Operand<float>("x", {size});
  Require(num_features > 0 && size % num_features == 0,
          "x must be flat and hold N * F numbers");
  Categories categories;
  auto [groups, values] = buffers.NextShape<2>("codes");
  categories.num_features = groups;
  categories.num_values = values;
  categories.codes = buffers.Operand<int32_t>("codes", {groups, values});
  categories.features = buffers.Operand<int32_t>("coded_features", {groups});
  *matrix = {x, size / num_features, num_features, by_column, categories};
  auto [rounds, number, nodes] = buffers.NextShape<3>("feature");
  Shape trees = {rounds, number, nodes};
  model->num_rounds = rounds;
  model->trees_per_round = model->num_scores = number;
  model->num_nodes = nodes;
  model->max_depth = max_depth;
  model->feature = buffers.Operand<int32_t>("feature", trees);
  model->threshold = buffers.Operand<float>("threshold", trees);
  model->missing_left = buffers.Operand<uint8_t>("missing_left", trees);
  Require(number > 0, "rounds must have trees");
  // Sets and links have shape [0] where there are none.
  if (buffers.NextRank() == 1) {
    buffers.Operand<uint32_t>("left_codes", {0});
  } else {
    model->num_words = buffers.NextShape<4>("left_codes")[3];
    model->left_codes = buffers.Operand<uint32_t>(
        "left_codes", {rounds, number, nodes, model->num_words});
    Require(model->num_words > 0, "left_codes must have words");
  }
  if (buffers.NextRank() == 1) {
    buffers.Operand<int32_t>("left_child", {0});
    Require(0 < max_depth && max_depth < 31 && nodes == (int64_t{1} << max_depth) - 1,
            "trees must have 2^max_depth - 1 nodes");
  } else {
    model->left_child = buffers.Operand<int32_t>("left_child", trees);
    Require(nodes > 0 && max_depth >= 0, "linked trees must have nodes");
  }
}

// Checks what the safety of walking through the trees depends on. Calls Finish.
void FinishModel(const Buffers& buffers, const Matrix& matrix, const Ensemble& model) {
  buffers.Finish();
  Require(HasFeatures(model, matrix.num_features),
          "the trees split features beyond the columns of x");
  Require(model.left_child == nullptr || HasChildren(model),
          "the children of linked nodes must be nodes");
  const Categories& categories = matrix.categories;
  for (int64_t g = 0; g < categories.num_features; ++g) {
    int32_t feature = categories.features[g];
    Require(0 <= feature && feature < matrix.num_features,
            "coded_features must be columns of x");
  }
}

// Reads the leaf values, whose shape says how many scores there are; until then there
// is one for each tree of a round.
void ReadLeaves(Buffers& buffers, Ensemble* model) {
  int64_t scores = buffers.NextShape<3>("leaf_value")[1];
  int64_t trees = model->trees_per_round;
  Require(scores == trees || (trees == 1 && scores > 0),
          "rounds must have one tree, or one for each score");
  model->num_scores = scores;
  model->leaf_value = buffers.Operand<float>(
      "leaf_value", {model->num_rounds, scores, model->num_leaves()});
}

// Reads the linear terms of the leaves, if there are any.
void ReadTerms(Buffers& buffers, int64_t num_features, Ensemble* model) {
  if (!buffers.HasOperands()) return;  // leaves are constant
  int64_t rounds = model->num_rounds, leaves = model->num_leaves();
  int64_t terms = model->num_terms = buffers.NextShape<4>("slopes.feature")[3];
  model->term_feature = buffers.Operand<int32_t>(
      "slopes.feature", {rounds, model->trees_per_round, leaves, terms});
  Shape shape = {rounds, model->num_scores, leaves, terms};
  model->slope = buffers.Operand<float>("slopes.slope", shape);
  model->center = buffers.Operand<float>("slopes.center", shape);
  model->ranges = buffers.Operand<float>("ranges", {num_features, 2});
}

// Reads the leaf values, the initial scores and the linear terms.
void ReadValues(Buffers& buffers, int64_t num_features, Ensemble* model) {
  ReadLeaves(buffers, model);
  model->init_score = buffers.Operand<float>("init_score", {model->num_scores});
  ReadTerms(buffers, num_features, model);
}

enum AnswerKind : int64_t { kScores, kStages, kLeaves };

template <AnswerKind kWanted>
void PredictImpl(Buffers& buffers, const Pool& pool) {
  Matrix matrix;
  Ensemble model{};
  Answer answer;
  ReadModel(buffers, &matrix, &model);
  if (kWanted != kLeaves) ReadValues(buffers, matrix.num_features, &model);
  int64_t rows = matrix.num_rows, rounds = model.num_rounds, scores = model.num_scores;
  if (kWanted == kScores) {
    answer.scores = buffers.Result<float>("scores", {rows, scores});
  } else if (kWanted == kStages) {
    answer.stages = buffers.Result<float>("stages", {rounds, rows, scores});
  } else {
    Shape shape = {rows, rounds, model.trees_per_round};
    answer.leaves = buffers.Result<int32_t>("leaves", shape);
  }
  FinishModel(buffers, matrix, model);
  Predict(pool, model, matrix, answer);
}

void ShapImpl(Buffers& buffers, const Pool& pool) {
  bool pairs = buffers.Attribute("pairs") != 0;
  Matrix matrix;
  ShapTrees trees{};
  ReadModel(buffers, &matrix, &trees);
  ReadLeaves(buffers, &trees);
  trees.cover = buffers.Operand<float>(
      "cover", {trees.num_rounds, trees.num_scores, trees.num_leaves()});
  ShapPoints points;
  points.size = buffers.NextShape<1>("place")[0];
  points.place = buffers.Operand<float>("place", {points.size});
  points.weight = buffers.Operand<float>("weight", {points.size});
  ReadTerms(buffers, matrix.num_features, &trees);
  Shape shape = {matrix.num_rows, matrix.num_features};
  if (pairs) shape.push_back(matrix.num_features);
  shape.push_back(trees.num_scores);
  ShapAnswer answer{buffers.Result<float>("out", shape), pairs};
  FinishModel(buffers, matrix, trees);
  Require(matrix.categories.num_features == 0,
          "the values of categorical columns must be codes");
  Require(AreTrees(trees), "links must make trees of depth 255 at most");
  Explain(pool, trees, matrix, points, answer);
}

// Prediction for callers that predict often: the model is checked and prepared once,
// and little work is done without XLA, whose calls take longer than a small prediction.
//
// `open_model` is called as an FFI handler. `predict_ready` does the work of a call on
// XLA's threads; `jboost_predict_here` does the same on the calling thread. Both take
// the address of a description of the call, a struct of 64-bit words. `predict_again`
// is part of programs that XLA compiles for sizes that repeat.
enum Problem : int64_t { kNone, kBadEntries, kNoMemory };

struct Call {
  ReadyModel* model;
  void* result;
  int64_t kind, num_rows;
  const float* values;  // the matrix, or the stored cells
  int64_t by_column = 0;
  // The following describe sparse rows, as SparseRows does; `starts` is null otherwise.
  const int32_t *starts = nullptr, *places = nullptr, *index = nullptr;
  int64_t num_entries = 0, num_columns = 0, absent_is_missing = 0;
  int64_t problem = kNone;  // written
};

// Whether the cells are in the memory that was passed.
bool HasEntries(const Call& call) {
  bool inside = call.starts[0] >= 0 && call.starts[call.num_rows] <= call.num_entries;
  for (int64_t i = 0; i < call.num_rows; ++i) {
    inside &= call.starts[i] <= call.starts[i + 1];
  }
  if (!inside) return false;
  for (int64_t at = call.starts[0]; at < call.starts[call.num_rows]; ++at) {
    inside &= (call.places[at] >= 0) & (call.places[at] < call.num_columns);
  }
  return inside;
}

Problem Run(const Pool& pool, const Call& call) {
  ReadyModel& model = *call.model;
  Matrix matrix{call.values, call.num_rows, model.num_features, call.by_column != 0,
                model.categories};
  SparseRows sparse{call.starts, call.places, call.values, call.index,
                    call.absent_is_missing != 0 ? std::nanf("") : 0.0f};
  if (call.starts != nullptr) {
    if (!HasEntries(call)) return kBadEntries;
    matrix.sparse = &sparse;
  }
  Answer answer;
  if (call.kind == kLeaves) {
    answer.leaves = static_cast<int32_t*>(call.result);
  } else {
    auto* scores = static_cast<float*>(call.result);
    (call.kind == kScores ? answer.scores : answer.stages) = scores;
  }
  model.Predict(pool, matrix, answer);
  return kNone;
}

void OpenModelImpl(Buffers& buffers, const Pool&) {
  Matrix matrix;
  Ensemble model{};
  ReadModel(buffers, &matrix, &model);
  ReadValues(buffers, matrix.num_features, &model);
  uint32_t* address = buffers.Result<uint32_t>("address", {2});
  FinishModel(buffers, matrix, model);
  auto* ready = new ReadyModel(model, matrix.num_features, matrix.categories);
  std::memcpy(address, &ready, sizeof(ready));
}

void PredictReadyImpl(Buffers& buffers, const Pool& pool) {
  auto* call = reinterpret_cast<Call*>(buffers.Attribute("address"));
  call->problem = Run(pool, *call);
}

void PredictAgainImpl(Buffers& buffers, const Pool& pool) {
  auto [num_rows, num_features] = buffers.NextShape<2>("x");
  const float* x = buffers.Operand<float>("x", {num_rows, num_features});
  const uint32_t* address = buffers.Operand<uint32_t>("address", {2});
  auto [size] = buffers.NextShape<1>("scores", Access::kResult);
  float* scores = buffers.Result<float>("scores", {size});
  buffers.Finish();
  ReadyModel* model;
  std::memcpy(&model, address, sizeof(model));
  Require(
      num_features == model->num_features && size == num_rows * model->model.num_scores,
      "x and scores must have the sizes of the model");
  Call call{model, scores, kScores, num_rows, x};
  Run(pool, call);
}

}  // namespace

JBOOST_HANDLER(jboost_predict, PredictImpl<kScores>)
JBOOST_HANDLER(jboost_staged_predict, PredictImpl<kStages>)
JBOOST_HANDLER(jboost_leaf_indices, PredictImpl<kLeaves>)
JBOOST_HANDLER(jboost_shap, ShapImpl)
JBOOST_HANDLER(jboost_open_model, OpenModelImpl)
JBOOST_HANDLER(jboost_predict_again, PredictAgainImpl)
JBOOST_HANDLER(jboost_predict_ready, PredictReadyImpl)

extern "C" __attribute__((visibility("default"))) void jboost_close_model(
    int64_t address) {
  delete reinterpret_cast<ReadyModel*>(address);
}

extern "C" __attribute__((visibility("default"))) void jboost_predict_here(
    int64_t address) {
  auto* call = reinterpret_cast<Call*>(address);
  FlushDenormals as_xla_does(true);
  try {
    call->problem = Run(Pool(), *call);
  } catch (const std::exception&) {
    call->problem = kNoMemory;
  }
}

}  // namespace jboost
