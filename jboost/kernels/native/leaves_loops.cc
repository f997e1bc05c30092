// SPDX-License-Identifier: Apache-2.0
// The inner loops of leaves.cc, compiled once per instruction set. No templates of the
// standard library are used here: the linker could hand their code, compiled for a
// newer processor, to everybody.
#include <cstdint>

#include "leaves.h"

namespace jboost::JBOOST_ISA {
namespace {

// A group's row in a table, the last one for rows outside.
inline int64_t Place(int32_t group, int64_t num_groups) {
  uint32_t place = static_cast<uint32_t>(group);
  return place < static_cast<uint64_t>(num_groups) ? place : num_groups;
}

template <int kChannels>
inline void AddRow(const float* const* channels, int64_t row, int64_t place,
                   float* sums) {
  for (int c = 0; c < kChannels; ++c) sums[place * kChannels + c] += channels[c][row];
}

// Rows of several blocks take turns: additions to one group would wait for each other.
template <int kChannels>
void SumBlocksOf(const float* const* channels, const int32_t* group,
                 int64_t num_groups, const int64_t* begin, const int64_t* end,
                 float* const* sums) {
  int64_t common = end[0] - begin[0];
  for (int64_t b = 1; b < kLockstep; ++b) {
    common = end[b] - begin[b] < common ? end[b] - begin[b] : common;
  }
  for (int64_t i = 0; i < common; ++i) {
    for (int64_t b = 0; b < kLockstep; ++b) {
      int64_t row = begin[b] + i;
      AddRow<kChannels>(channels, row, Place(group[row], num_groups), sums[b]);
    }
  }
  for (int64_t b = 0; b < kLockstep; ++b) {
    for (int64_t row = begin[b] + common; row < end[b]; ++row) {
      AddRow<kChannels>(channels, row, Place(group[row], num_groups), sums[b]);
    }
  }
}

void SumBlocks(const float* const* channels, int64_t num_channels,
               const int32_t* group, int64_t num_groups, const int64_t* begin,
               const int64_t* end, float* const* sums) {
  switch (num_channels) {
    case 1:
      return SumBlocksOf<1>(channels, group, num_groups, begin, end, sums);
    case 2:
      return SumBlocksOf<2>(channels, group, num_groups, begin, end, sums);
    case 3:
      return SumBlocksOf<3>(channels, group, num_groups, begin, end, sums);
    case 4:
      return SumBlocksOf<4>(channels, group, num_groups, begin, end, sums);
  }
}

void FindRange(const float* values, const int32_t* group, int64_t count,
               int64_t num_groups, float* low, float* high) {
  constexpr float kInfinity = __builtin_inff();
  for (int64_t i = 0; i < count; ++i) {
    int64_t place = Place(group[i], num_groups);
    float value = values[i];
    float down = value == value ? value : -kInfinity;
    float up = value == value ? value : kInfinity;
    low[place] = down < low[place] ? down : low[place];
    high[place] = up > high[place] ? up : high[place];
  }
}

void AddValues(const float* scores, const float* table, int64_t num_leaves,
               const int32_t* leaf, int64_t count, float* result) {
  uint32_t last = static_cast<uint32_t>(num_leaves);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t place = static_cast<uint32_t>(leaf[i]);
    place = place < last ? place : last;
    result[i] = scores[i] + table[place];
  }
}

// floor(x + 1/2) of a product, at most 2^40: no sum of fewer than 2^23 can overflow.
inline uint64_t Round(float x) {
  constexpr float kMost = 1099511627776.0f;
  x = x + 0.5f;
  return static_cast<uint64_t>(static_cast<int64_t>(x < kMost ? x : kMost));
}

// Without branches: which side of a quantile a row lies on, no processor can guess.
int64_t Collect(const KinkRows& rows, int64_t begin, int64_t end, int64_t stride,
                int64_t num_groups, KinkGroup* groups, Candidate* list) {
  int64_t size = 0;
  for (int64_t i = begin; i < end; i += stride) {
    float weight = rows.weights[i], key = rows.minimiser[i] - rows.scores[i];
    int64_t place = Place(rows.group[i], num_groups);
    bool counts = (weight > 0.0f) & (key == key);
    place = counts ? place : num_groups;
    key = key == 0.0f ? 0.0f : key;  // one zero
    int64_t at = rows.uniform ? 0 : i;
    uint64_t left = Round(weight * rows.left[at] * rows.scale);
    uint64_t kink = Round(weight * rows.kink[at] * rows.scale);
    KinkGroup& group = groups[place];
    group.left += left;
    group.kink += kink;
    group.below += kink & -static_cast<uint64_t>(key < group.low);
    list[size] = {key, static_cast<uint32_t>(place), kink};
    uint32_t inside = (key >= group.low) & (key <= group.high);
    group.num_candidates += inside;
    size += inside;
  }
  return size;
}

}  // namespace

extern const LeafLoops kLeafLoops;
const LeafLoops kLeafLoops = {SumBlocks, FindRange, AddValues, Collect};

}  // namespace jboost::JBOOST_ISA
