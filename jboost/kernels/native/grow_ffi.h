// SPDX-License-Identifier: Apache-2.0
// What the bindings of growing begin with: buffers as arguments, checked.
#ifndef JBOOST_GROW_FFI_H_
#define JBOOST_GROW_FFI_H_

#include <algorithm>
#include <vector>

#include "ffi.h"
#include "grow.h"

namespace jboost {

using Index = ffi::Buffer<ffi::U16>;

inline bool AreCodes(const ffi::AnyBuffer& buffer, size_t rank) {
  return buffer.dimensions().size() == rank &&
         (buffer.element_type() == ffi::U8 || buffer.element_type() == ffi::U16);
}

// The rows of a level, checked.
inline ffi::Error GetSegments(int64_t num_rows, Int words, Index index, Int segments,
                              Rows* rows) {
  JBOOST_CHECK(Has(words.dimensions(), {num_rows, 2}), "words must be [N, 2]");
  JBOOST_CHECK(Has(index.dimensions(), {num_rows}), "index must be [N]");
  JBOOST_CHECK(segments.dimensions().size() == 3 &&
                   segments.dimensions()[0] == NumChunks(num_rows) &&
                   segments.dimensions()[2] == 2,
               "segments must be [chunks, slots, 2]");
  *rows =
      Rows{reinterpret_cast<int64_t*>(words.typed_data()), index.typed_data(),
           reinterpret_cast<Segment*>(segments.typed_data()), segments.dimensions()[1]};
  return ffi::Error::Success();
}

inline ffi::Error GetHistograms(Int sums, const Rows& rows, int64_t num_features,
                                bool counted, Histograms* histograms) {
  auto shape = sums.dimensions();
  JBOOST_CHECK(shape.size() == 4 && shape[0] == rows.num_slots &&
                   (shape[1] == 2 || shape[1] == 3) && shape[2] == num_features,
               "histograms must be [slots, channels, F, B]");
  *histograms = Histograms{sums.typed_data(), shape[0], shape[1], shape[3],
                           counted && shape[1] == 3};
  return ffi::Error::Success();
}

// Which children are summed, and where the histograms of all go: the larger child takes
// its parent's place, the smaller one a place that no parent holds.
inline ffi::Error PlaceChildren(int64_t slots, Int source, Bool left_smaller,
                                Int old_place, Int place, std::vector<NodeSum>* nodes) {
  int64_t pairs = std::max<int64_t>(1, slots / 2);
  JBOOST_CHECK(Has(source.dimensions(), {pairs}), "source must be [slots / 2]");
  JBOOST_CHECK(Has(left_smaller.dimensions(), {pairs}), "left_smaller: [slots / 2]");
  JBOOST_CHECK(Has(old_place.dimensions(), {slots}), "place must be [slots]");
  JBOOST_CHECK(Has(place.dimensions(), {slots}), "place must be [slots]");
  std::vector<int32_t> before(old_place.typed_data(), old_place.typed_data() + slots);
  std::vector<uint8_t> taken(slots, 0);
  int32_t* after = place.typed_data();
  for (int64_t slot = 0; slot < slots; ++slot) after[slot] = 0;
  for (int64_t pair = 0; pair < pairs && source.typed_data()[pair] >= 0; ++pair) {
    taken[before[source.typed_data()[pair]]] = 1;
  }
  int64_t free_place = 0;
  for (int64_t pair = 0; pair < pairs && source.typed_data()[pair] >= 0; ++pair) {
    while (taken[free_place]) ++free_place;
    int32_t parent = before[source.typed_data()[pair]];
    bool left = Bytes(left_smaller)[pair] != 0;
    int64_t small = 2 * pair + !left, large = 2 * pair + left;
    after[small] = static_cast<int32_t>(free_place);
    after[large] = parent;
    nodes->push_back({small, free_place++, parent});
  }
  return ffi::Error::Success();
}

}  // namespace jboost

#endif  // JBOOST_GROW_FFI_H_
