// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "exact_sum.h"
#include "leaves.h"

namespace jboost::JBOOST_ISA {
namespace {

// A group's row in a table; ignored rows have the last one.
inline int64_t Place(int32_t group, int64_t num_groups) {
  uint32_t place = static_cast<uint32_t>(group);
  return place < static_cast<uint64_t>(num_groups) ? place : num_groups;
}

template <class Term>
uint32_t GreatestInGroups(const Term& term, const int32_t* group, int64_t num_groups,
                          int64_t count) {
  uint32_t groups = static_cast<uint32_t>(num_groups), greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t inside = static_cast<uint32_t>(group[i]) < groups ? ~0u : 0u;
    uint32_t bits = MagnitudeBits(term(i)) & inside;  // a branch does not vectorize
    greatest = bits > greatest ? bits : greatest;
  }
  return greatest;
}

// The values of a channel from a row on. Those that are not in memory are in `made`.
inline const float* ValuesFrom(const Channels& channels, int64_t c, int64_t row,
                               const float* made) {
  return channels.constant[c] || channels.changes ? made : channels.values[c] + row;
}

// Writes the two channels of changes for the rows from `row` on.
inline void FillChanges(const Channels& channels, int64_t row, int64_t count,
                        float* __restrict change, float* __restrict size) {
  const float* before = channels.values[0] + row;
  const float* after = channels.values[1] + row;
  for (int64_t i = 0; i < count; ++i) {
    change[i] = after[i] - before[i];
    size[i] = __builtin_fabsf(after[i]) + __builtin_fabsf(before[i]);
  }
}

inline void FillConstants(const Channels& channels, int64_t count, float* made) {
  for (int64_t c = 0; c < channels.number; ++c) {
    for (int64_t i = 0; channels.constant[c] && i < count; ++i) {
      made[c * count + i] = channels.values[c][0];
    }
  }
}

void FindGreatestBits(const GroupedRows& rows, int64_t begin, int64_t end,
                      uint32_t* bits) {
  const Channels& channels = rows.channels;
  const float* weights = rows.weights;
  constexpr int64_t kRows = 1024;  // stay in the cache for all channels
  float made[kMaxChannels * kRows];
  FillConstants(channels, kRows, made);
  for (int64_t row = begin; row < end; row += kRows) {
    int64_t count = end - row < kRows ? end - row : kRows;
    if (channels.changes) {
      FillChanges(channels, row, count, made, made + kRows);
    }
    bool once = weights == nullptr || CountOnce(weights + row, count);
    for (int64_t c = 0; c < channels.number; ++c) {
      const float* values = ValuesFrom(channels, c, row, made + c * kRows);
      auto find = [&](const auto& term) {
        return GreatestInGroups(term, rows.group + row, rows.num_groups, count);
      };
      uint32_t own = weights == nullptr ? find([=](int64_t i) { return values[i]; })
                     : once             ? find(OnceTerms{values, weights + row})
                                        : find(WeightedTerms{values, weights + row});
      bits[c] = own > bits[c] ? own : bits[c];
    }
  }
}

constexpr int64_t kStep = 128;  // rows that are rounded together, which vectorizes

template <int kChannels>
struct Step {
  uint64_t multiples[kChannels][kStep];  // ignored rows may overflow
};

inline uint64_t Join(int32_t high, int32_t low) {
  return static_cast<uint64_t>(high * (int64_t{1} << kDigit) + low);
}

template <int kChannels>
inline void RoundRows(const Channels& channels, float* made, const float* weights,
                      const float* up, int64_t row, int64_t count,
                      Step<kChannels>* step) {
  if (kChannels == 2 && channels.changes) {
    FillChanges(channels, row, count, made, made + kStep);
  }
  bool once = weights == nullptr || CountOnce(weights + row, count);
  float factors[kStep];
  uint32_t times[kStep];
  for (int64_t i = 0; !once && i < count; ++i) {
    Weight parts = SplitWeight(weights[row + i]);
    factors[i] = KeepPositive(weights[row + i], parts.factor);
    times[i] = static_cast<uint32_t>(parts.times);
  }
  for (int c = 0; c < kChannels; ++c) {
    const float* __restrict values = ValuesFrom(channels, c, row, made + c * kStep);
    uint64_t* __restrict multiples = step->multiples[c];
    if (weights == nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        Digits digits = RoundToDigits(values[i] * up[c]);
        multiples[i] = Join(digits.high, digits.low);
      }
    } else if (once) {
      OnceTerms terms{values, weights + row};
      for (int64_t i = 0; i < count; ++i) {
        Digits digits = RoundToDigits(terms(i) * up[c]);
        multiples[i] = Join(digits.high, digits.low);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        Digits digits =
            RoundToDigits(KeepPositive(factors[i], factors[i] * values[i]) * up[c]);
        // Products fit 28 bits; those of ignored rows may overflow.
        multiples[i] =
            Join(static_cast<int32_t>(static_cast<uint32_t>(digits.high) * times[i]),
                 static_cast<int32_t>(static_cast<uint32_t>(digits.low) * times[i]));
      }
    }
  }
}

template <int kChannels>
inline void AddRow(const Step<kChannels>& step, int64_t i, int64_t place,
                   uint64_t* sums) {
  for (int c = 0; c < kChannels; ++c) {
    sums[place * kChannels + c] += step.multiples[c][i];
  }
}

// Adds rows of several blocks in turns. Consecutive rows of one block are often of one
// group, and their additions would wait for each other.
template <int kChannels>
void SumBlocksOf(const GroupedRows& rows, const float* up, const int64_t* begin,
                 const int64_t* end, uint64_t* const* sums) {
  const Channels& channels = rows.channels;
  const int32_t* group = rows.group;
  const int64_t num_groups = rows.num_groups;
  Step<kChannels> steps[kLockstep];
  float made[kChannels * kStep];
  FillConstants(channels, kStep, made);
  int64_t longest = 0;
  for (int64_t b = 0; b < kLockstep; ++b) {
    longest = end[b] - begin[b] > longest ? end[b] - begin[b] : longest;
  }
  for (int64_t first = 0; first < longest; first += kStep) {
    int64_t count[kLockstep], common = kStep;
    for (int64_t b = 0; b < kLockstep; ++b) {
      int64_t left = end[b] - begin[b] - first;
      count[b] = left < 0 ? 0 : left < kStep ? left : kStep;
      common = count[b] < common ? count[b] : common;
      RoundRows<kChannels>(channels, made, rows.weights, up, begin[b] + first, count[b],
                           steps + b);
    }
    for (int64_t i = 0; i < common; ++i) {
      for (int64_t b = 0; b < kLockstep; ++b) {
        int64_t place = Place(group[begin[b] + first + i], num_groups);
        AddRow<kChannels>(steps[b], i, place, sums[b]);
      }
    }
    for (int64_t b = 0; b < kLockstep; ++b) {
      for (int64_t i = common; i < count[b]; ++i) {
        int64_t place = Place(group[begin[b] + first + i], num_groups);
        AddRow<kChannels>(steps[b], i, place, sums[b]);
      }
    }
  }
}

void SumBlocks(const GroupedRows& rows, const float* up, const int64_t* begin,
               const int64_t* end, uint64_t* const* sums) {
  static constexpr decltype(&SumBlocksOf<1>) kByChannels[kMaxChannels] = {
      SumBlocksOf<1>, SumBlocksOf<2>, SumBlocksOf<3>, SumBlocksOf<4>};
  kByChannels[rows.channels.number - 1](rows, up, begin, end, sums);
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

// floor(x + 1/2), at most 2^40, so no sum of fewer than 2^23 numbers can overflow.
inline uint64_t Round(float x) {
  constexpr float kMost = 1099511627776.0f;
  x = x + 0.5f;
  return static_cast<uint64_t>(static_cast<int64_t>(x < kMost ? x : kMost));
}

constexpr int64_t kBlock = 256;  // rows that take each step together, which vectorizes

struct Block {
  float key[kBlock];
  int32_t place[kBlock];  // group * kSides + side
  uint8_t inside[kBlock];
  uint64_t kink[kBlock];
};

// Finds each row's key and side. Without branches, since these would be mispredicted: a
// row lies on either side of a quantile by chance.
inline void FindSides(const KinkRows& rows, int64_t begin, int64_t count,
                      int64_t stride, int64_t num_groups, const KinkSums& sums,
                      Block* block) {
  uint32_t last = static_cast<uint32_t>(num_groups);
  for (int64_t j = 0; j < count; ++j) {
    int64_t i = begin + j * stride;
    float key = rows.minimiser[i] - rows.scores[i];
    uint32_t group = static_cast<uint32_t>(rows.group[i]);
    bool counts = (rows.weights[i] > 0.0f) & (key == key);
    group = counts ? group : last;
    block->place[j] = static_cast<int32_t>(group < last ? group : last);
    block->key[j] = key == 0.0f ? 0.0f : key;  // -0 becomes 0
  }
  for (int64_t j = 0; j < count; ++j) {
    int32_t group = block->place[j];
    float key = block->key[j];
    int32_t side = (key >= sums.low[group] ? 1 : 0) + (key > sums.high[group] ? 1 : 0);
    block->place[j] = group * kSides + side;
    block->inside[j] = side == kInside;
  }
}

// The weight that all rows with a positive weight share; NaN if they differ.
float CommonWeight(const KinkRows& rows, int64_t begin, int64_t end, int64_t stride) {
  int64_t first = begin;
  while (first < end && !(rows.weights[first] > 0.0f)) first += stride;
  float common = first < end ? rows.weights[first] : 0.0f;
  int32_t others = 0;
  for (int64_t i = first; i < end; i += stride) {
    others |= (rows.weights[i] > 0.0f) & (rows.weights[i] != common);
  }
  return others ? __builtin_nanf("") : common;
}

int64_t Collect(const KinkRows& rows, int64_t begin, int64_t end, int64_t stride,
                int64_t num_groups, const KinkSums& sums, Candidate* list) {
  float common = rows.uniform ? CommonWeight(rows, begin, end, stride) : 0.0f;
  bool equal = rows.uniform && common == common;
  uint64_t left = equal ? Round(common * rows.left[0] * rows.scale) : 1;
  uint64_t kink = equal ? Round(common * rows.kink[0] * rows.scale) : 1;
  int64_t size = 0;
  Block block;
  for (int64_t first = begin; first < end; first += kBlock * stride) {
    int64_t count = (end - first + stride - 1) / stride;
    count = count < kBlock ? count : kBlock;
    FindSides(rows, first, count, stride, num_groups, sums, &block);
    if (equal) {  // counts rows; the sums are multiplied at the end
      for (int64_t j = 0; j < count; ++j) sums.kink[block.place[j]] += 1;
    } else {
      for (int64_t j = 0; j < count; ++j) {
        int64_t i = first + j * stride, at = rows.uniform ? 0 : i;
        float weight = rows.weights[i];
        block.kink[j] = Round(weight * rows.kink[at] * rows.scale);
        sums.kink[block.place[j]] += block.kink[j];
        sums.left[block.place[j] / kSides] +=
            Round(weight * rows.left[at] * rows.scale);
      }
    }
    uint8_t chosen[kBlock];
    int64_t num_chosen = 0;
    for (int64_t j = 0; j < count; ++j) {
      chosen[num_chosen] = static_cast<uint8_t>(j);
      num_chosen += block.inside[j];
    }
    for (int64_t k = 0; k < num_chosen; ++k) {
      int64_t j = chosen[k];
      uint32_t group = static_cast<uint32_t>(block.place[j]) / kSides;
      list[size++] = {block.key[j], group, equal ? kink : block.kink[j]};
    }
  }
  for (int64_t g = 0; equal && g < num_groups; ++g) {
    uint64_t* of_group = sums.kink + g * kSides;
    sums.left[g] = (of_group[kBelow] + of_group[kInside] + of_group[kAbove]) * left;
    for (int64_t side = 0; side < kSides; ++side) of_group[side] *= kink;
  }
  return size;
}

// An integer with the order of the keys.
inline uint32_t OrderedBits(float key) {
  uint32_t bits;
  __builtin_memcpy(&bits, &key, sizeof bits);
  return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

// Where rows lie in a table of digits, and which of them have a group's prefix.
struct DigitBlock {
  int32_t cell[kBlock];
  alignas(8) uint8_t same[kEnds][kBlock];
};

inline void FindCells(const KinkRows& rows, int64_t begin, int64_t count,
                      int64_t num_groups, const KeyDigit& digit, uint32_t above,
                      DigitBlock* block) {
  uint32_t last = static_cast<uint32_t>(num_groups), mask = (1u << digit.bits) - 1;
  const uint32_t* high_prefix = digit.prefix + num_groups + 1;
  for (int64_t j = 0; j < count; ++j) {
    int64_t i = begin + j;
    float key = rows.minimiser[i] - rows.scores[i];
    uint32_t group = static_cast<uint32_t>(rows.group[i]);
    bool counts = (rows.weights[i] > 0.0f) & (key == key);
    group = counts ? group : last;
    group = group < last ? group : last;
    uint32_t bits = OrderedBits(key == 0.0f ? 0.0f : key);  // -0 becomes 0
    block->cell[j] =
        static_cast<int32_t>((group << digit.bits) | ((bits >> digit.shift) & mask));
    block->same[0][j] = ((bits ^ digit.prefix[group]) & above) == 0;
    block->same[1][j] = ((bits ^ high_prefix[group]) & above) == 0;
  }
}

void SumDigits(const KinkRows& rows, int64_t begin, int64_t end, int64_t num_groups,
               const KeyDigit& digit, uint64_t* sums) {
  auto kink = [&](int64_t i) {
    return Round(rows.weights[i] * rows.kink[rows.uniform ? 0 : i] * rows.scale);
  };
  int64_t table = (num_groups + 1) << digit.bits;
  // Above the first digit is nothing, so both ends have the same sums.
  bool is_first = digit.shift + digit.bits == 32;
  uint32_t above = is_first ? 0u : ~0u << (digit.shift + digit.bits);
  DigitBlock block{};
  for (int64_t first = begin; first < end; first += kBlock) {
    int64_t count = end - first < kBlock ? end - first : kBlock;
    FindCells(rows, first, count, num_groups, digit, above, &block);
    if (is_first) {  // ignored rows are added, too: to the last group
      for (int64_t j = 0; j < count; ++j) sums[block.cell[j]] += kink(first + j);
      continue;
    }
    for (int64_t side = 0; side < kEnds; ++side) {
      for (int64_t j = count; j < kBlock; ++j) block.same[side][j] = 0;
      for (int64_t eight = 0; eight < count; eight += 8) {
        uint64_t same;  // a byte for each of eight rows; few are left
        __builtin_memcpy(&same, block.same[side] + eight, sizeof same);
        for (; same != 0; same &= same - 1) {
          int64_t j = eight + __builtin_ctzll(same) / 8;
          sums[side * table + block.cell[j]] += kink(first + j);
        }
      }
    }
  }
  for (int64_t i = 0; is_first && i < table; ++i) sums[table + i] = sums[i];
}

struct Plain {
  const float* values;
  float operator()(int64_t i) const { return values[i]; }
};

// Terms of one block, which stays in the cache while it is read twice.
uint32_t GreatestOfBlock(const float* values, const float* weights, int64_t count) {
  if (CountOnce(weights, count)) return GreatestBits(OnceTerms{values, weights}, count);
  return GreatestBits(WeightedTerms{values, weights}, count);
}

ExactSum SumBlock(const float* values, const float* weights, int64_t count, float up) {
  if (CountOnce(weights, count)) return SumTerms(OnceTerms{values, weights}, count, up);
  WeightedTerms terms{values, weights};
  return SumTimes(terms, [&](int64_t i) { return terms.Times(i); }, count, up);
}

uint32_t FindGreatestTerm(const float* values, const float* weights, int64_t count) {
  if (weights == nullptr) return GreatestBits(Plain{values}, count);
  uint32_t greatest = 0;
  for (int64_t begin = 0; begin < count; begin += kShortBlock) {
    int64_t size = count - begin < kShortBlock ? count - begin : kShortBlock;
    uint32_t bits = GreatestOfBlock(values + begin, weights + begin, size);
    greatest = bits > greatest ? bits : greatest;
  }
  return greatest;
}

ExactSum SumAny(const float* values, const float* weights, int64_t count, float up) {
  if (weights == nullptr) return SumTerms(Plain{values}, count, up);
  ExactSum sum;
  for (int64_t begin = 0; begin < count; begin += kShortBlock) {
    int64_t size = count - begin < kShortBlock ? count - begin : kShortBlock;
    sum.Add(SumBlock(values + begin, weights + begin, size, up));
  }
  return sum;
}

void SumTerms(const float* values, const float* weights, int64_t count, float up,
              int64_t* high, int64_t* low) {
  ExactSum sum = SumAny(values, weights, count, up);
  *high += sum.high;
  *low += sum.low;
}

}  // namespace

const LeafLoops kLeafLoops = {FindGreatestBits, SumBlocks, FindRange,        AddValues,
                              Collect,          SumDigits, FindGreatestTerm, SumTerms};

}  // namespace jboost::JBOOST_ISA
