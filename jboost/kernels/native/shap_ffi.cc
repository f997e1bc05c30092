// SPDX-License-Identifier: Apache-2.0
// Binding of shap.h: unpack, check every shape, call.
#include <vector>

#include "ffi.h"
#include "shap.h"

namespace jboost {
namespace {

using Int = ffi::Buffer<ffi::S32>;
using Word = ffi::Buffer<ffi::U32>;
using Float = ffi::Buffer<ffi::F32>;
using Bool = ffi::Buffer<ffi::PRED>;
using Shape = std::vector<int64_t>;

Shape GetShape(const ffi::AnyBuffer::Dimensions& shape) {
  return Shape(shape.begin(), shape.end());
}

// Absent are left_codes without words and left_child without nodes.
ffi::Error GetTrees(Int feature, Float threshold, Bool missing_left, Word left_codes,
                    Int left_child, Float leaf_value, Float cover, ShapTrees* trees) {
  Shape shape = GetShape(feature.dimensions());
  JBOOST_CHECK(shape.size() == 3, "feature must be [R, K, I]");
  JBOOST_CHECK(GetShape(threshold.dimensions()) == shape, "threshold must be [R, K, I]");
  JBOOST_CHECK(GetShape(missing_left.dimensions()) == shape,
               "missing_left must be [R, K, I]");
  Shape sets = GetShape(left_codes.dimensions());
  JBOOST_CHECK(sets.size() == 4 && Shape(sets.begin(), sets.end() - 1) == shape,
               "left_codes must be [R, K, I, W]");
  Shape links = GetShape(left_child.dimensions());
  bool linked = links == shape;
  JBOOST_CHECK(linked || links == (Shape{shape[0], shape[1], 0}),
               "left_child must be [R, K, I] or [R, K, 0]");
  Shape leaves = {shape[0], shape[1], linked ? shape[2] : shape[2] + 1};
  JBOOST_CHECK(GetShape(leaf_value.dimensions()) == leaves,
               "leaf_value must be [R, K, L]");
  JBOOST_CHECK(GetShape(cover.dimensions()) == leaves, "cover must be [R, K, L]");
  JBOOST_CHECK(shape[2] > 0 && (linked || (shape[2] & (shape[2] + 1)) == 0),
               "I must be 2^max_depth - 1");
  *trees = ShapTrees{feature.typed_data(),
                     threshold.typed_data(),
                     reinterpret_cast<const uint8_t*>(missing_left.typed_data()),
                     sets[3] > 0 ? left_codes.typed_data() : nullptr,
                     linked ? left_child.typed_data() : nullptr,
                     leaf_value.typed_data(),
                     cover.typed_data(),
                     shape[0],
                     shape[1],
                     shape[2],
                     sets[3]};
  return ffi::Error::Success();
}

ffi::Error ShapImpl(ffi::ThreadPool threads, Float head, Float body, Int feature,
                    Float threshold, Bool missing_left, Word left_codes,
                    Int left_child, Float leaf_value, Float cover, Float place,
                    Float weight, ffi::Result<Float> out, int64_t num_features,
                    int64_t by_column, int64_t pairs) {
  ShapTrees trees;
  ffi::Error error = GetTrees(feature, threshold, missing_left, left_codes, left_child,
                              leaf_value, cover, &trees);
  if (error.failure()) return error;
  Shape shape = GetShape(out->dimensions());
  Shape expected = {shape.empty() ? 0 : shape[0], num_features};
  if (pairs != 0) expected.push_back(num_features);
  expected.push_back(trees.num_scores);
  JBOOST_CHECK(shape == expected, "out must be [N, F, K] or [N, F, F, K]");
  JBOOST_CHECK(head.dimensions().size() == 1 && body.dimensions().size() == 1,
               "head and body must be flat");
  int64_t head_size = head.dimensions()[0];
  JBOOST_CHECK(num_features > 0 &&
                   head_size + body.dimensions()[0] == shape[0] * num_features,
               "head and body must hold N x F numbers");
  JBOOST_CHECK(place.dimensions().size() == 1 &&
                   GetShape(place.dimensions()) == GetShape(weight.dimensions()),
               "place and weight must be [P]");
  JBOOST_CHECK(CheckShapTrees(trees, num_features),
               "features must be columns of x, and links must make trees of depth 255 "
               "at most");
  Matrix matrix{head.typed_data(), body.typed_data(), head_size, shape[0],
                num_features,      by_column != 0,    {}};
  ShapPoints points{place.typed_data(), weight.typed_data(), place.dimensions()[0]};
  Explain(MakePool(threads), trees, matrix, points,
          ShapAnswer{out->typed_data(), pairs != 0});
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_shap, ShapImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Float>()  // head
                   .Arg<Float>()  // body
                   .Arg<Int>()    // feature
                   .Arg<Float>()  // threshold
                   .Arg<Bool>()   // missing_left
                   .Arg<Word>()   // left_codes
                   .Arg<Int>()    // left_child
                   .Arg<Float>()  // leaf_value
                   .Arg<Float>()  // cover
                   .Arg<Float>()  // place
                   .Arg<Float>()  // weight
                   .Ret<Float>()  // out
                   .Attr<int64_t>("num_features")
                   .Attr<int64_t>("by_column")
                   .Attr<int64_t>("pairs"))

}  // namespace jboost
