// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "exact_sum.h"
#include "grow.h"
#include "limited.h"
#include "sampling.h"

namespace jboost::JBOOST_ISA {
namespace {

constexpr int64_t kAhead = 32;  // how many rows ahead to prefetch

// Codes of uint8 always have a cell. Codes of uint16 have as many cells as there are
// bins; those beyond count as the last one, so that no sum is written out of the table.
// Eight codes at a time, which is one instruction; the width of rows is a multiple
// of 8.
inline const uint8_t* ClampCodes(const uint8_t* row, int64_t, int64_t, uint16_t*) {
  return row;
}
inline const uint16_t* ClampCodes(const uint16_t* row, int64_t width, int64_t stride,
                                  uint16_t* clamped) {
  uint16_t last = static_cast<uint16_t>(stride - 1);
  for (int64_t f = 0; f < width; f += 8) {
    for (int j = 0; j < 8; ++j) {
      uint16_t code = row[f + j];
      clamped[f + j] = code < last ? code : last;
    }
  }
  return clamped;
}

// Adds one row; if kCounted, also 1 beside each word. If the number of features and the
// stride are constants, the loop unrolls into two instructions per feature: load the
// code, add to memory.
template <class Code, bool kCounted, int kFeatures, int kStride>
inline void SumRow(const Code* row, int64_t word, int64_t num_features, int64_t stride,
                   int64_t* scratch) {
  if (kFeatures > 0) num_features = kFeatures;
  if (kStride > 0) stride = kStride;
#pragma GCC unroll 32
  for (int64_t f = 0; f < num_features; ++f) {
    if (kCounted) {
      int64_t* cell = scratch + 2 * (f * stride + row[f]);
#if defined(__x86_64__)
      typedef long long Pair __attribute__((vector_size(16), aligned(8), may_alias));
      Pair* pair = reinterpret_cast<Pair*>(cell);
      *pair = *pair + Pair{word, 1};
#else
      cell[0] += word;
      cell[1] += 1;
#endif
    } else {
      scratch[f * stride + row[f]] += word;
    }
  }
}

template <class Code, bool kCounted, int kFeatures, int kStride>
void SumRows(const RowRange& range, int64_t* scratch) {
  const Code* packed = static_cast<const Code*>(range.packed);
  const uint16_t* index = range.index;
  const int64_t* words = range.words;
  int64_t count = range.count, width = range.width;
  for (int64_t i = 0; i < count && i < kAhead; ++i) {
    __builtin_prefetch(packed + index[i] * width);
  }
  uint16_t clamped[32];
  int64_t i = 0;
  for (; i + kAhead < count; ++i) {
    __builtin_prefetch(packed + index[i + kAhead] * width);
    const Code* row =
        ClampCodes(packed + index[i] * width, width, range.stride, clamped);
    SumRow<Code, kCounted, kFeatures, kStride>(row, words[i], range.num_features,
                                               range.stride, scratch);
  }
  for (; i < count; ++i) {
    const Code* row =
        ClampCodes(packed + index[i] * width, width, range.stride, clamped);
    SumRow<Code, kCounted, kFeatures, kStride>(row, words[i], range.num_features,
                                               range.stride, scratch);
  }
}

// With the number of features as a constant.
template <class Code, bool kCounted, int kStride>
void SumCodes(const RowRange& range, int64_t* scratch) {
  switch (range.num_features) {
#define JBOOST_CASE(n)                                   \
  case n:                                                \
    SumRows<Code, kCounted, n, kStride>(range, scratch); \
    break;
#define JBOOST_CASES(n) \
  JBOOST_CASE(n + 1) JBOOST_CASE(n + 2) JBOOST_CASE(n + 3) JBOOST_CASE(n + 4)
    JBOOST_CASES(0)
    JBOOST_CASES(4)
    JBOOST_CASES(8)
    JBOOST_CASES(12)
    JBOOST_CASES(16)
    JBOOST_CASES(20)
    JBOOST_CASES(24)
    JBOOST_CASES(28)
#undef JBOOST_CASES
#undef JBOOST_CASE
  }
}

template <bool kCounted>
void SumWords(const RowRange& range, bool wide, int64_t* scratch) {
  if (wide) {
    SumCodes<uint16_t, kCounted, 0>(range, scratch);
  } else {
    SumCodes<uint8_t, kCounted, kByteStride>(range, scratch);
  }
}

// Tells whether a code goes right: if code > threshold, or if it is 0 (missing) and
// missing_left is false. In that case 1 is subtracted from all codes, which turns 0
// into the largest number.
template <class Code>
struct ThresholdSide {
  static constexpr bool kComparesBytes = sizeof(Code) == 1;
  Code shift, threshold;

  explicit ThresholdSide(const SplitRule& rule)
      : shift(rule.missing_left ? 0 : 1),
        threshold(static_cast<Code>(rule.threshold - shift)) {}

  bool GoesRight(Code code) const {
    return static_cast<Code>(code - shift) > threshold;
  }
  bool IsMissing(Code code) const { return code == 0; }
};

// The same by the sides of codes.
template <class Code>
struct TableSide {
  static constexpr bool kComparesBytes = false;
  const uint8_t* sides;
  int64_t last;

  explicit TableSide(const SplitRule& rule) : sides(rule.sides), last(rule.last_code) {}

  uint8_t At(Code code) const { return sides[code < last ? code : last]; }
  bool GoesRight(Code code) const { return At(code) & 1; }
  bool IsMissing(Code code) const { return At(code) >> 1; }
};

// Calls `body` with the codes of a column and their sides.
template <class Body>
inline int64_t WithSides(const Column& column, const SplitRule& rule,
                         const Body& body) {
  return WithCodes(column.codes, column.wide, [&](auto* codes) {
    using Code = std::remove_const_t<std::remove_pointer_t<decltype(codes)>>;
    return rule.sides == nullptr ? body(codes, ThresholdSide<Code>(rule))
                                 : body(codes, TableSide<Code>(rule));
  });
}

template <class Code, class Side>
int64_t PartitionOf(const Code* column, int64_t stride, const Side side, int64_t count,
                    uint16_t* index, int64_t* words, uint16_t* index_scratch,
                    int64_t* words_scratch, int64_t* missing) {
  int64_t left = 0, right = 0, missed = 0, i = 0;
#if defined(__AVX512VBMI2__)
  if constexpr (Side::kComparesBytes) {
    const uint8_t* bytes = column;
    for (; i + 32 <= count; i += 32) {
      // Loads codes one by one (a gather of bytes is no faster), then compares all.
      alignas(32) uint8_t codes[32];
      for (int j = 0; j < 32; ++j) codes[j] = bytes[index[i + j] * stride];
      __m256i code = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
      missed += __builtin_popcount(_mm256_testn_epi8_mask(code, code));
      __m256i shifted = _mm256_sub_epi8(code, _mm256_set1_epi8(side.shift));
      uint32_t goes_right =
          _mm256_cmpgt_epu8_mask(shifted, _mm256_set1_epi8(side.threshold));
      __m512i rows = _mm512_loadu_si512(index + i);
      int num_right = __builtin_popcount(goes_right);
      __m512i word[4];
      for (int j = 0; j < 4; ++j) word[j] = _mm512_loadu_si512(words + i + 8 * j);
      // All words of this step are loaded by now, so they can be overwritten.
      _mm512_storeu_si512(index + left, _mm512_maskz_compress_epi16(~goes_right, rows));
      _mm512_storeu_si512(index_scratch + right,
                          _mm512_maskz_compress_epi16(goes_right, rows));
      int64_t l = left, r = right;
      for (int j = 0; j < 4; ++j) {
        __mmask8 some = static_cast<__mmask8>(goes_right >> (8 * j));
        int rights = __builtin_popcount(some);
        _mm512_storeu_si512(words + l, _mm512_maskz_compress_epi64(
                                           static_cast<__mmask8>(~some), word[j]));
        _mm512_storeu_si512(words_scratch + r,
                            _mm512_maskz_compress_epi64(some, word[j]));
        l += 8 - rights;
        r += rights;
      }
      left += 32 - num_right;
      right += num_right;
    }
  }
#endif
  for (; i < count; ++i) {
    uint16_t row = index[i];
    int64_t word = words[i];
    Code code = column[row * stride];
    bool goes_right = side.GoesRight(code);
    missed += side.IsMissing(code);
    index[left] = row;
    words[left] = word;
    index_scratch[right] = row;
    words_scratch[right] = word;
    left += !goes_right;
    right += goes_right;
  }
  std::memcpy(index + left, index_scratch, right * sizeof(uint16_t));
  std::memcpy(words + left, words_scratch, right * sizeof(int64_t));
  *missing += missed;
  return left;
}

int64_t Partition(const Column& column, const SplitRule& rule, int64_t count,
                  uint16_t* index, int64_t* words, uint16_t* index_scratch,
                  int64_t* words_scratch, int64_t* missing) {
  return WithSides(column, rule, [&](auto* codes, const auto& side) {
    return PartitionOf(codes, column.stride, side, count, index, words, index_scratch,
                       words_scratch, missing);
  });
}

int64_t WriteLeaves(const Column& column, const SplitRule& rule, int64_t count,
                    const uint16_t* index, int32_t left_leaf, int32_t* leaf,
                    int64_t* missing) {
  return WithSides(column, rule, [&](auto* codes, const auto side) {
    int64_t right = 0, missed = 0, stride = column.stride;
    for (int64_t i = 0; i < count; ++i) {
      auto code = codes[index[i] * stride];
      bool goes_right = side.GoesRight(code);
      missed += side.IsMissing(code);
      right += goes_right;
      leaf[index[i]] = left_leaf + goes_right;
    }
    *missing += missed;
    return count - right;
  });
}

// The magnitude of a row in the bag; 0 for other rows, whose values may be NaN.
struct Magnitude {
  const float* values;
  const uint8_t* in_bag;
  float operator()(int64_t i) const {
    // A mask, because a conditional load does not vectorize.
    uint32_t bits = MagnitudeBits(values[i]) & (in_bag[i] ? ~0u : 0u);
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
    return magnitude;
  }
};

uint32_t FindGreatestBits(const float* values, const uint8_t* in_bag, int64_t count) {
  return GreatestBits(Magnitude{values, in_bag}, count);
}

// Whether no row counts several times.
inline bool CountOnce(const uint8_t* in_bag, int64_t count) {
  uint8_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= in_bag[i];
  return bits < 2;
}

void SumMagnitudes(const float* values, const uint8_t* in_bag, int64_t count, float up,
                   int64_t* high, int64_t* low) {
  Magnitude term{values, in_bag};
  ExactSum sum =
      CountOnce(in_bag, count)
          ? SumTerms(term, count, up)
          : SumTimes(term, [=](int64_t i) { return int32_t{in_bag[i]}; }, count, up);
  *high += sum.high;
  *low += sum.low;
}

// floor(x) for |x| < 2^31.
inline int32_t Floor(float x) {
  int32_t whole = static_cast<int32_t>(x);
  return whole - (static_cast<float>(whole) > x);
}

constexpr int kBlock = 256;  // rows that are rounded together

// The offsets to add before rounding down: a half, or a fraction from the row's hash.
void FillOffsets(const uint32_t* seed, uint32_t row, uint32_t channel, bool stochastic,
                 int count, float* __restrict offsets) {
  if (!stochastic) {
    for (int i = 0; i < count; ++i) offsets[i] = 0.5f;
    return;
  }
  constexpr float kFraction = 1.0f / 16777216.0f;
  Seed key{seed[0], seed[1]};
  for (int i = 0; i < count; ++i) {
    uint32_t bits = Hash((row + static_cast<uint32_t>(i)) ^ (channel << 31), key) >> 8;
    offsets[i] = static_cast<float>(static_cast<int32_t>(bits)) * kFraction;
  }
}

// Stochastic rounding is of the product with the number of times: an error of rounding
// is not multiplied.
void RoundBlock(const float* __restrict values, const uint8_t* __restrict in_bag,
                float scale, bool stochastic, const float* __restrict offsets,
                int count, int32_t* __restrict whole) {
  if (CountOnce(in_bag, count)) {
    for (int i = 0; i < count; ++i) {
      float value = in_bag[i] ? values[i] : 0.0f;
      whole[i] = Floor(value * scale + offsets[i]);
    }
    return;
  }
  if (stochastic) {
    for (int i = 0; i < count; ++i) {
      float value = in_bag[i] ? values[i] * static_cast<float>(in_bag[i]) : 0.0f;
      whole[i] = Floor(value * scale + offsets[i]);
    }
    return;
  }
  for (int i = 0; i < count; ++i) {
    float value = in_bag[i] ? values[i] : 0.0f;
    whole[i] = Floor(value * scale + offsets[i]) * in_bag[i];
  }
}

void Quantise(const Derivatives& rows, int64_t start, int64_t count, int64_t first_row,
              const Rounding& rounding, const uint32_t* seed, int64_t* words) {
  const float* gradient = rows.gradient + start;
  const float* curvature = rows.curvature + start;
  const float* scale = rounding.scale;
  const uint8_t* in_bag = rows.in_bag + start;
  const bool stochastic = rounding.stochastic, uniform = rows.uniform;
  float offsets[kBlock];
  int32_t low[kBlock], high[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    int block = static_cast<int>(count - begin < kBlock ? count - begin : kBlock);
    uint32_t row = static_cast<uint32_t>(first_row + start + begin);
    FillOffsets(seed, row, 0, stochastic, block, offsets);
    RoundBlock(gradient + begin, in_bag + begin, scale[0], stochastic, offsets, block,
               low);
    if (uniform) {
      for (int i = 0; i < block; ++i) high[i] = in_bag[begin + i] != 0;
    } else {
      FillOffsets(seed, row, 1, stochastic, block, offsets);
      RoundBlock(curvature + begin, in_bag + begin, scale[1], stochastic, offsets,
                 block, high);
    }
    int64_t* __restrict out = words + begin;
    for (int i = 0; i < block; ++i) {
      out[i] = static_cast<int64_t>(static_cast<uint64_t>(high[i]) << 32) + low[i];
    }
  }
}

// Maps a float32 to an integer; integers have the order of the floats.
inline int32_t Ordered(float x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

// The gains of all thresholds of a feature; -inf if a child is too small. The limits
// are copied so that the compiler knows that no store changes them.
template <bool kCounted>
void FindGains(const int32_t* __restrict gradient, const int32_t* __restrict curvature,
               const int32_t* __restrict count, int64_t num_bins,
               const int32_t total[3], const int32_t away[3], float parent,
               const SplitLimits& limits, float* __restrict gains) {
  const float gradient_unit = limits.gradient_unit;
  const float curvature_unit = limits.curvature_unit;
  // l2 in units of the quantized curvature, so that no product is added to, which a
  // compiler might contract to an FMA.
  const float l2 = limits.l2 / curvature_unit, min_weight = limits.min_weight;
  const float infinity = __builtin_inff();
  const int32_t away_g = away[0], away_h = away[1], away_n = away[2];
  const int32_t total_g = total[0], total_h = total[1], total_n = total[2];
  const int32_t min_count = limits.min_count;
  for (int64_t b = 0; b < num_bins; ++b) {
    int32_t left_g = gradient[b] - away_g, left_h = curvature[b] - away_h;
    float left = static_cast<float>(left_g) * gradient_unit;
    float right = static_cast<float>(total_g - left_g) * gradient_unit;
    float left_h_float = static_cast<float>(left_h);
    float right_h_float = static_cast<float>(total_h - left_h);
    float left_weight = (left_h_float + l2) * curvature_unit;
    float right_weight = (right_h_float + l2) * curvature_unit;
    left_weight = left_weight > 0.0f ? left_weight : infinity;
    right_weight = right_weight > 0.0f ? right_weight : infinity;
    float gain = left * left / left_weight + right * right / right_weight - parent;
    gain *= 0.5f;
    float lighter = left_h_float < right_h_float ? left_h_float : right_h_float;
    bool admissible = lighter * curvature_unit >= min_weight;
    if (kCounted) {
      int32_t left_n = count[b] - away_n, right_n = total_n - left_n;
      admissible &= (left_n < right_n ? left_n : right_n) >= min_count;
    }
    gains[b] = admissible ? gain : -infinity;
  }
}

// The same where leaf values are limited, for thresholds [begin, end); `sign` says how
// the children's values must be ordered.
template <bool kCounted>
void FindLimitedGains(const int32_t* __restrict gradient,
                      const int32_t* __restrict curvature,
                      const int32_t* __restrict count, int64_t begin, int64_t end,
                      const int32_t total[3], const int32_t away[3], float parent,
                      const SplitLimits& limits, const ValueLimits& node, int32_t sign,
                      float* __restrict gains) {
  const float gradient_unit = limits.gradient_unit;
  const float curvature_unit = limits.curvature_unit;
  const float l2 = limits.l2 / curvature_unit, min_weight = limits.min_weight;
  const float infinity = __builtin_inff();
  const ValueLimits values = node;
  const bool rising = sign > 0, falling = sign < 0;
  const int32_t away_g = away[0], away_h = away[1], away_n = away[2];
  const int32_t total_g = total[0], total_h = total[1], total_n = total[2];
  const int32_t min_count = limits.min_count;
  for (int64_t b = begin; b < end; ++b) {
    int32_t left_g = gradient[b] - away_g, left_h = curvature[b] - away_h;
    float left_h_float = static_cast<float>(left_h);
    float right_h_float = static_cast<float>(total_h - left_h);
    Sums left{static_cast<float>(left_g) * gradient_unit,
              (left_h_float + l2) * curvature_unit};
    Sums right{static_cast<float>(total_g - left_g) * gradient_unit,
               (right_h_float + l2) * curvature_unit};
    float left_value, right_value;
    float gain = LimitedScore(left, values, &left_value);
    gain = gain + LimitedScore(right, values, &right_value) - parent;
    gain *= 0.5f;
    float lighter = left_h_float < right_h_float ? left_h_float : right_h_float;
    bool admissible = lighter * curvature_unit >= min_weight;
    admissible &= !(rising & (left_value > right_value));
    admissible &= !(falling & (left_value < right_value));
    if (kCounted) {
      int32_t left_n = count[b] - away_n, right_n = total_n - left_n;
      admissible &= (left_n < right_n ? left_n : right_n) >= min_count;
    }
    gains[b] = admissible ? gain : -infinity;
  }
}

// Takes the first of the highest gains, with missing values right, then left, if it is
// better than `best`. `find_gains` writes the gains to `scratch`.
template <class FindGains>
void TakeBest(const FindGains& find_gains, const int32_t missing[3], int64_t num_bins,
              int32_t feature, float* scratch, BestSplit* best) {
  const int32_t nothing[3] = {0, 0, 0};
  bool has_missing = missing[0] != 0 || missing[1] != 0 || missing[2] != 0;
  for (int direction = 0; direction < (has_missing ? 2 : 1); ++direction) {
    find_gains(direction == 0 ? missing : nothing);
    int32_t highest = Ordered(-__builtin_inff());
    for (int64_t b = 1; b < num_bins; ++b) {
      int32_t key = Ordered(scratch[b]);
      highest = key > highest ? key : highest;
    }
    int32_t bits = highest ^ ((highest >> 31) & 0x7FFFFFFF);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    if (!(largest > -__builtin_inff())) continue;  // no threshold is admissible
    bool better = largest > best->gain;
    // With missing values left, an equal gain is better only at a lower threshold.
    bool same = largest == best->gain && best->feature == feature;
    if (!better && !same) continue;
    int64_t first = 1;
    while (scratch[first] != largest) ++first;
    if (!better && first >= best->threshold) continue;
    best->gain = largest;
    best->feature = feature;
    best->threshold = static_cast<int32_t>(first);
    best->missing_left = direction == 1;
  }
}

void Search(const BinSums& sums, const int32_t total[3], const NodeScore& node,
            const SplitLimits& limits, int32_t sign, int64_t free_from, int32_t feature,
            float* scratch, BestSplit* best) {
  const int32_t *gradient = sums.gradient, *curvature = sums.curvature;
  bool counted = limits.min_count > 0;
  const int32_t missing[3] = {gradient[0], curvature[0], counted ? sums.count[0] : 0};
  auto find_gains = counted ? FindGains<true> : FindGains<false>;
  auto find_limited = counted ? FindLimitedGains<true> : FindLimitedGains<false>;
  auto find = [&](const int32_t away[3]) {
    if (!node.limited) {
      return find_gains(gradient, curvature, sums.count, sums.num_bins, total, away,
                        node.parent, limits, scratch);
    }
    for (bool free : {false, true}) {
      find_limited(gradient, curvature, sums.count, free ? free_from : 0,
                   free ? sums.num_bins : free_from, total, away, node.parent, limits,
                   node.values, free ? 0 : sign, scratch);
    }
  };
  TakeBest(find, missing, sums.num_bins, feature, scratch, best);
}

bool SplitPairs(const PairedRows& rows, int64_t begin, int64_t end) {
  uint32_t odd = 0;
  for (int64_t i = begin; i < end; ++i) {
    float gradient = rows.pairs[2 * i], curvature = rows.pairs[2 * i + 1];
    bool both = IsFinite(gradient) & IsFinite(curvature);
    rows.gradient[i] = both ? gradient : 0.0f;
    rows.curvature[i] = both ? curvature : 0.0f;
    uint32_t counts = rows.weights[i] > 0.0f ? 1u : 0u;
    odd |= counts & ~(both ? 1u : 0u);
  }
  return odd == 0;
}

void WeighRows(const WeighedRows& rows, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float weight = rows.in_bag[i] ? rows.weights[i] : 0.0f;
    float one = weight > 0.0f ? 1.0f : 0.0f;
    // 2^23 added and subtracted rounds to a whole number.
    bool whole = weight <= 255.0f && (weight + 8388608.0f) - 8388608.0f == weight;
    float factor = whole ? one : weight;
    bool counts = factor > 0.0f;
    rows.times[i] = static_cast<uint8_t>(whole ? weight : one);
    rows.weighed_gradient[i] = (counts ? factor * rows.gradient[i] : 0.0f) / rows.mean;
    rows.weighed_curvature[i] =
        (counts ? factor * rows.curvature[i] : 0.0f) / rows.mean;
  }
}

int32_t GreatestGradient(const int64_t* words, int64_t count) {
  int32_t greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t gradient = static_cast<int32_t>(words[i]);
    int32_t size = gradient < 0 ? -gradient : gradient;
    greatest = size > greatest ? size : greatest;
  }
  return greatest;
}

void SumSquares(const int64_t* words, int64_t count, float up, int64_t* high,
                int64_t* low) {
  auto square = [=](int64_t i) {
    float gradient = static_cast<float>(static_cast<int32_t>(words[i]));
    return gradient * gradient;
  };
  ExactSum sum = SumTerms(square, count, up);
  *high = sum.high;
  *low = sum.low;
}

}  // namespace

const GrowLoops kGrowLoops = {SumWords<false>,  SumWords<true>,   Partition,
                              WriteLeaves,      SplitPairs,       WeighRows,
                              FindGreatestBits, SumMagnitudes,    Quantise,
                              Search,           GreatestGradient, SumSquares};

}  // namespace jboost::JBOOST_ISA
