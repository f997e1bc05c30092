// SPDX-License-Identifier: Apache-2.0
// Binding of the search of categories.h; what else it does is bound with growing.
#include "categories.h"
#include "ffi.h"
#include "grow_ffi.h"

namespace jboost {
namespace {

// `values` are l1 and bounds [slots, 2], where leaf values are limited.
ffi::Error FindCategorySplitsImpl(
    ffi::ThreadPool threads, Int sums, Int place, Int position, Bool masks, Float units,
    Float l2, Float min_gain, Float min_weight, Int min_count, Int features,
    Int num_codes, Float category_l2, Float smoothing, Float category_weight,
    Int max_onehot, Int numeric_feature, Int numeric_threshold,
    Bool numeric_missing_left, Float numeric_gain, ffi::RemainingArgs values,
    ffi::Result<Int> feature, ffi::Result<Int> threshold,
    ffi::Result<Bool> missing_left, ffi::Result<Float> gain, ffi::Result<Bool> found,
    ffi::Result<UInt> left_codes, ffi::Result<UInt> absent_codes) {
  auto shape = sums.dimensions();
  JBOOST_CHECK(shape.size() == 4 && (shape[1] == 2 || shape[1] == 3),
               "histograms must be [slots, channels, F, B]");
  int64_t slots = shape[0], num_groups = features.element_count();
  int64_t num_words = (shape[3] + kWordBits - 1) / kWordBits;
  JBOOST_CHECK(Has(place.dimensions(), {slots}), "place must be [slots]");
  JBOOST_CHECK(Has(position.dimensions(), {slots}), "position must be [slots]");
  JBOOST_CHECK(Has(masks.dimensions(), {slots, shape[2]}), "masks must be [slots, F]");
  JBOOST_CHECK(Has(units.dimensions(), {2}), "units must be [2]");
  JBOOST_CHECK(
      l2.dimensions().size() == 0 && min_gain.dimensions().size() == 0 &&
          min_weight.dimensions().size() == 0 && min_count.dimensions().size() == 0 &&
          category_l2.dimensions().size() == 0 && smoothing.dimensions().size() == 0 &&
          category_weight.dimensions().size() == 0 &&
          max_onehot.dimensions().size() == 0,
      "limits must be scalars");
  JBOOST_CHECK(Has(features.dimensions(), {num_groups}) &&
                   Has(num_codes.dimensions(), {num_groups}),
               "categorical features and their codes must be [G]");
  for (int64_t group = 0; group < num_groups; ++group) {
    int32_t place_of = features.typed_data()[group];
    JBOOST_CHECK(place_of >= 0 && place_of < shape[2], "features must be below F");
  }
  JBOOST_CHECK(Has(numeric_feature.dimensions(), {slots}) &&
                   Has(numeric_threshold.dimensions(), {slots}) &&
                   Has(numeric_missing_left.dimensions(), {slots}) &&
                   Has(numeric_gain.dimensions(), {slots}) &&
                   Has(feature->dimensions(), {slots}),
               "splits must be [slots]");
  JBOOST_CHECK(Has(left_codes->dimensions(), {slots, num_words}) &&
                   Has(absent_codes->dimensions(), {slots, num_words}),
               "sets of codes must be [slots, words]");
  LimitsOfSlots limited{};
  JBOOST_CHECK(values.size() == 0 || values.size() == 2, "values: l1 and bounds");
  if (values.size() == 2) {
    auto l1 = values.get<Float>(0), bounds = values.get<Float>(1);
    JBOOST_CHECK(l1 && bounds && l1->dimensions().size() == 0 &&
                     Has(bounds->dimensions(), {slots, 2}),
                 "bounds must be [slots, 2]");
    limited.l1 = *l1->typed_data();
    limited.bounds = bounds->typed_data();
  }
  // As in the search of thresholds.
  int32_t least = *min_count.typed_data() > 1 ? *min_count.typed_data() : 0;
  Histograms histograms{sums.typed_data(), slots, shape[1], shape[3], least > 0};
  SplitLimits limits{units.typed_data()[0], units.typed_data()[1], *l2.typed_data(),
                     *min_weight.typed_data(), least};
  CategoryLimits categories{
      features.typed_data(),     num_codes.typed_data(),  num_groups,
      *category_l2.typed_data(), *smoothing.typed_data(), *category_weight.typed_data(),
      *max_onehot.typed_data()};
  NumericSplits numeric{numeric_feature.typed_data(), numeric_threshold.typed_data(),
                        Bytes(numeric_missing_left), numeric_gain.typed_data()};
  CategorySplitOutput output{{feature->typed_data(), threshold->typed_data(),
                              Bytes(*missing_left), gain->typed_data(), Bytes(*found)},
                             left_codes->typed_data(),
                             absent_codes->typed_data(),
                             num_words};
  FindCategorySplits(MakePool(threads), histograms, shape[2], place.typed_data(),
                     position.typed_data(), Bytes(masks), limits,
                     *min_gain.typed_data(), values.size() == 2 ? &limited : nullptr,
                     categories, numeric, output);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_find_category_splits, FindCategorySplitsImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Int>()       // sums
                   .Arg<Int>()       // place
                   .Arg<Int>()       // position
                   .Arg<Bool>()      // masks
                   .Arg<Float>()     // units
                   .Arg<Float>()     // l2
                   .Arg<Float>()     // min_gain
                   .Arg<Float>()     // min_child_weight
                   .Arg<Int>()       // min_count
                   .Arg<Int>()       // categorical features
                   .Arg<Int>()       // num_codes
                   .Arg<Float>()     // category l2
                   .Arg<Float>()     // smoothing
                   .Arg<Float>()     // category min_weight
                   .Arg<Int>()       // max_onehot
                   .Arg<Int>()       // numeric feature
                   .Arg<Int>()       // numeric threshold
                   .Arg<Bool>()      // numeric missing_left
                   .Arg<Float>()     // numeric gain
                   .RemainingArgs()  // l1, bounds
                   .Ret<Int>()       // feature
                   .Ret<Int>()       // threshold
                   .Ret<Bool>()      // missing_left
                   .Ret<Float>()     // gain
                   .Ret<Bool>()      // found
                   .Ret<UInt>()      // left_codes
                   .Ret<UInt>());    // absent_codes

}  // namespace jboost
