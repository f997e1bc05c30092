// SPDX-License-Identifier: Apache-2.0
// Bindings of leaves.h: unpack, check every shape, call.
#include <vector>

#include "ffi.h"
#include "leaves.h"

namespace jboost {
namespace {

bool HasRank(const ffi::AnyBuffer::Dimensions& shape, size_t rank) {
  return shape.size() == rank;
}

ffi::Error SumByGroupImpl(ffi::ThreadPool threads, Int group,
                          ffi::RemainingArgs channels, ffi::Result<Float> sums) {
  JBOOST_CHECK(HasRank(group.dimensions(), 1) && HasRank(sums->dimensions(), 2),
               "group must be [N], sums [C, G]");
  int64_t num_channels = channels.size(), num_rows = group.dimensions()[0];
  JBOOST_CHECK(num_channels >= 1 && num_channels <= kMaxChannels &&
                   sums->dimensions()[0] == num_channels,
               "channels must be 1 to 4 arrays");
  const float* pointers[kMaxChannels];
  for (int64_t c = 0; c < num_channels; ++c) {
    auto channel = channels.get<Float>(c);
    JBOOST_CHECK(channel.has_value() && Has(channel->dimensions(), {num_rows}),
                 "channels must be float32 [N]");
    pointers[c] = channel->typed_data();
  }
  SumByGroup(MakePool(threads), pointers, num_channels, group.typed_data(), num_rows,
             sums->dimensions()[1], sums->typed_data());
  return ffi::Error::Success();
}

ffi::Error RangeByGroupImpl(ffi::ThreadPool threads, Float values, Int group,
                            ffi::Result<Float> low, ffi::Result<Float> high) {
  JBOOST_CHECK(HasRank(values.dimensions(), 1), "values must be [N]");
  int64_t num_rows = values.dimensions()[0];
  JBOOST_CHECK(Has(group.dimensions(), {num_rows}), "group must be [N]");
  JBOOST_CHECK(HasRank(low->dimensions(), 1) && low->dimensions() == high->dimensions(),
               "low and high must be [G]");
  RangeByGroup(MakePool(threads), values.typed_data(), group.typed_data(), num_rows,
               low->dimensions()[0], low->typed_data(), high->typed_data());
  return ffi::Error::Success();
}

ffi::Error AddValuesImpl(ffi::ThreadPool threads, Float scores, Float values, Int leaf,
                         ffi::Result<Float> result) {
  auto shape = scores.dimensions();
  JBOOST_CHECK(
      HasRank(shape, 2) && leaf.dimensions() == shape && result->dimensions() == shape,
      "scores, leaf and result must be [K, N]");
  JBOOST_CHECK(HasRank(values.dimensions(), 2) && values.dimensions()[0] == shape[0],
               "values must be [K, L]");
  AddValues(MakePool(threads), scores.typed_data(), values.typed_data(),
            leaf.typed_data(), shape[0], shape[1], values.dimensions()[1],
            result->typed_data());
  return ffi::Error::Success();
}

ffi::Error MiddleMinimisersImpl(ffi::ThreadPool threads, Float minimiser, Float scores,
                                Float weights, Float left, Float kink, Float scale,
                                Int group, ffi::Result<Float> values) {
  JBOOST_CHECK(HasRank(minimiser.dimensions(), 1), "minimiser must be [N]");
  int64_t num_rows = minimiser.dimensions()[0];
  JBOOST_CHECK(Has(scores.dimensions(), {num_rows}) &&
                   Has(weights.dimensions(), {num_rows}) &&
                   Has(group.dimensions(), {num_rows}),
               "scores, weights and group must be [N]");
  bool uniform = HasRank(left.dimensions(), 0);
  JBOOST_CHECK((uniform || Has(left.dimensions(), {num_rows})) &&
                   left.dimensions() == kink.dimensions(),
               "left and kink must be [N] or []");
  JBOOST_CHECK(HasRank(scale.dimensions(), 0), "scale must be a scalar");
  JBOOST_CHECK(HasRank(values->dimensions(), 1), "values must be [G]");
  KinkRows rows{minimiser.typed_data(),
                scores.typed_data(),
                weights.typed_data(),
                left.typed_data(),
                kink.typed_data(),
                group.typed_data(),
                num_rows,
                *scale.typed_data(),
                uniform};
  MiddleMinimisers(MakePool(threads), rows, values->dimensions()[0],
                   values->typed_data());
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_sum_by_group, SumByGroupImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Int>()       // group
                   .RemainingArgs()  // channels
                   .Ret<Float>());   // sums

JBOOST_HANDLER(jboost_range_by_group, RangeByGroupImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Float>()    // values
                   .Arg<Int>()      // group
                   .Ret<Float>()    // low
                   .Ret<Float>());  // high

JBOOST_HANDLER(jboost_add_values, AddValuesImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Float>()    // scores
                   .Arg<Float>()    // values
                   .Arg<Int>()      // leaf
                   .Ret<Float>());  // result

JBOOST_HANDLER(jboost_middle_minimisers, MiddleMinimisersImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Float>()    // minimizer
                   .Arg<Float>()    // scores
                   .Arg<Float>()    // weights
                   .Arg<Float>()    // left
                   .Arg<Float>()    // kink
                   .Arg<Float>()    // scale
                   .Arg<Int>()      // group
                   .Ret<Float>());  // values

}  // namespace jboost
