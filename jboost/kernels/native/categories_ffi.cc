// SPDX-License-Identifier: Apache-2.0
// Binding of the search of categories.h. Its other functions are bound in grow_ffi.cc.
#include "categories.h"
#include "ffi.h"
#include "grow_ffi.h"

namespace jboost {
namespace {

CategoryLimits ReadCategories(Buffers* buffers) {
  CategoryLimits categories;
  int64_t groups = buffers->NextShape<1>(Access::kOperand, "categorical features")[0];
  categories.num_groups = groups;
  categories.features = buffers->Operand<int32_t>("categorical features", {groups});
  categories.num_codes = buffers->Operand<int32_t>("num_codes", {groups});
  categories.l2 = buffers->Scalar<float>("category l2");
  categories.smoothing = buffers->Scalar<float>("smoothing");
  categories.min_weight = buffers->Scalar<float>("category min_weight");
  categories.max_onehot = buffers->Scalar<int32_t>("max_onehot");
  return categories;
}

NumericSplits ReadNumeric(Buffers* buffers, int64_t slots) {
  NumericSplits numeric;
  numeric.feature = buffers->Operand<int32_t>("numeric feature", {slots});
  numeric.threshold = buffers->Operand<int32_t>("numeric threshold", {slots});
  numeric.missing_left = buffers->Operand<uint8_t>("numeric missing_left", {slots});
  numeric.gain = buffers->Operand<float>("numeric gain", {slots});
  return numeric;
}

ffi::Error FindCategorySplitsImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                                  ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  Search search = ReadSearch(&buffers);
  int64_t slots = search.num_slots();
  CategoryLimits categories = ReadCategories(&buffers);
  NumericSplits numeric = ReadNumeric(&buffers, slots);
  LimitsOfSlots values{};
  bool limited = buffers.HasOperands();  // leaf values are
  if (limited) {
    values.l1 = buffers.Scalar<float>("l1");
    values.bounds = buffers.Operand<float>("bounds", {slots, 2});
  }
  CategorySplitOutput output;
  output.splits = ReadSplits(&buffers, slots);
  output.num_words = (search.histograms.num_bins + kWordBits - 1) / kWordBits;
  Shape sets = {slots, output.num_words};
  output.left_codes = buffers.Result<uint32_t>("left_codes", sets);
  output.absent_codes = buffers.Result<uint32_t>("absent_codes", sets);
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckSearch(search));
  for (int64_t group = 0; group < categories.num_groups; ++group) {
    int32_t feature = categories.features[group];
    JBOOST_CHECK(0 <= feature && feature < search.num_features,
                 "categorical features must be below F");
  }
  FindCategorySplits(MakePool(threads), search, limited ? &values : nullptr, categories,
                     numeric, output);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_find_category_splits, FindCategorySplitsImpl, Bind())

}  // namespace jboost
