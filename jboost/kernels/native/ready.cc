// SPDX-License-Identifier: Apache-2.0
// Prediction for callers that predict often: the model is checked and prepared once,
// and little work is done without XLA, whose calls take longer than a small prediction.
//
// `open_model` is called as an FFI handler. `predict_ready` does the work of a call on
// XLA's threads; `jboost_predict_here` does the same on the calling thread. Both take
// the address of a description of the call, a struct of 64-bit words. `predict_again`
// is part of programs that XLA compiles for sizes that repeat.
#include <cmath>
#include <cstring>
#include <exception>

#include "denormals.h"
#include "predict_ffi.h"

namespace jboost {
namespace {

enum AnswerKind : int64_t { kScores, kStages, kLeaves };
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

ffi::Error OpenModelImpl(ffi::ThreadPool, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, int64_t num_features,
                         int64_t max_depth) {
  Buffers buffers(operands, results);
  Matrix matrix;
  Ensemble model{};
  ReadModel(&buffers, num_features, false, max_depth, &matrix, &model);
  ReadValues(&buffers, &model);
  uint32_t* address = buffers.Result<uint32_t>("address", {2});
  JBOOST_RETURN_IF_ERROR(FinishModel(&buffers, 0, &matrix, model));
  auto* ready = new ReadyModel(model, num_features, matrix.categories);
  std::memcpy(address, &ready, sizeof(ready));
  return ffi::Error::Success();
}

ffi::Error PredictReadyImpl(ffi::ThreadPool threads, ffi::RemainingArgs,
                            ffi::RemainingRets, int64_t address) {
  auto* call = reinterpret_cast<Call*>(address);
  call->problem = Run(MakePool(threads), *call);
  return ffi::Error::Success();
}

ffi::Error PredictAgainImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                            ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  auto [num_rows, num_features] = buffers.NextShape<2>(Access::kOperand, "x");
  const float* x = buffers.Operand<float>("x", {num_rows, num_features});
  const uint32_t* address = buffers.Operand<uint32_t>("address", {2});
  auto [size] = buffers.NextShape<1>(Access::kResult, "scores");
  float* scores = buffers.Result<float>("scores", {size});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  ReadyModel* model;
  std::memcpy(&model, address, sizeof(model));
  JBOOST_CHECK(
      num_features == model->num_features && size == num_rows * model->model.num_scores,
      "x and scores must have the sizes of the model");
  Call call{model, scores, kScores, num_rows, x};
  Run(MakePool(threads), call);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_open_model, OpenModelImpl,
               Bind().Attr<int64_t>("num_features").Attr<int64_t>("max_depth"))
JBOOST_HANDLER(jboost_predict_again, PredictAgainImpl, Bind())
JBOOST_HANDLER(jboost_predict_ready, PredictReadyImpl, Bind().Attr<int64_t>("address"))

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
