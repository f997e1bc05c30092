// SPDX-License-Identifier: Apache-2.0
// What the bindings of prediction and explanation begin with: trees and rows, checked.
#ifndef JBOOST_PREDICT_FFI_H_
#define JBOOST_PREDICT_FFI_H_

#include <vector>

#include "ffi.h"
#include "predict.h"

namespace jboost {

// The structure of an ensemble, checked. Sets and links have shape [0] where there are
// none.
inline ffi::Error GetTrees(Int feature, Float threshold, Bool missing_left,
                           UInt left_codes, Int left_child, int64_t max_depth,
                           Ensemble* model) {
  auto shape = feature.dimensions();
  JBOOST_CHECK(shape.size() == 3, "feature must be [R, K, I]");
  std::vector<int64_t> trees(shape.begin(), shape.end());
  JBOOST_CHECK(Has(threshold.dimensions(), trees), "threshold must be [R, K, I]");
  JBOOST_CHECK(Has(missing_left.dimensions(), trees), "missing_left must be [R, K, I]");
  *model = Ensemble{feature.typed_data(),
                    threshold.typed_data(),
                    Bytes(missing_left),
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
  JBOOST_CHECK(
      0 < max_depth && max_depth < 31 && trees[2] == (int64_t{1} << max_depth) - 1,
      "I must be 2^max_depth - 1");
  return ffi::Error::Success();
}

inline ffi::Error GetMatrix(Float x, Int codes, Int coded_features,
                            const Ensemble& model, int64_t num_rows,
                            int64_t num_features, int64_t by_column, Matrix* matrix) {
  JBOOST_CHECK(num_features > 0 && Has(x.dimensions(), {num_rows * num_features}),
               "x must be flat and hold N x F numbers");
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
  *matrix = Matrix{x.typed_data(), num_rows, num_features, by_column != 0, categories};
  return ffi::Error::Success();
}

// What all of them begin with.
inline auto Operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Float>()  // x
      .Arg<Int>()    // codes
      .Arg<Int>()    // coded_features
      .Arg<Int>()    // feature
      .Arg<Float>()  // threshold
      .Arg<Bool>()   // missing_left
      .Arg<UInt>()   // left_codes
      .Arg<Int>();   // left_child
}

}  // namespace jboost

#endif  // JBOOST_PREDICT_FFI_H_
