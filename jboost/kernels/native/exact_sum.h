// SPDX-License-Identifier: Apache-2.0
// Sums of float32 numbers that do not depend on the order of the terms: each term is
// rounded to a multiple of a unit, and the multiples are added as integers. See
// kernels/exact_sums.py for the definition and its reasons. Everything here has
// internal linkage, and uses no templates of the standard library, because the loops of
// every instruction set include it.
#ifndef JBOOST_EXACT_SUM_H_
#define JBOOST_EXACT_SUM_H_

#include <cstdint>

namespace jboost {
namespace {

constexpr int kDigit = 19;  // bits; a multiple has two digits
constexpr int64_t kDigitMask = (int64_t{1} << kDigit) - 1;
constexpr float kBase = 1 << kDigit;
constexpr uint32_t kInfinityBits = 0x7F800000u;

inline uint32_t MagnitudeBits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits & 0x7FFFFFFFu;  // these integers have the order of the magnitudes
}

inline bool IsFinite(float value) { return MagnitudeBits(value) < kInfinityBits; }

inline float PowerOfTwo(int exponent) {
  int32_t bits = (exponent + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return power;
}

// The e with 2^(e - 1) <= value < 2^e, for normal positive values.
inline int ExponentAbove(float value) {
  return static_cast<int>(MagnitudeBits(value) >> 23) - 126;
}

struct Unit {
  float up, down;  // 1 / unit, and the unit
};

inline Unit ChooseUnit(uint32_t greatest_bits) {
  int exponent = 2 * kDigit + 126 - static_cast<int>(greatest_bits >> 23);
  exponent = exponent < 124 ? exponent : 124;
  return {PowerOfTwo(exponent), PowerOfTwo(-exponent)};
}

// A sum of high * 2^19 + low units.
struct ExactSum {
  int64_t high = 0, low = 0;

  void Add(int64_t multiple) {
    high += multiple >> kDigit;
    low += multiple & kDigitMask;
  }
  // Digits from Write, or sums of such digits.
  void AddDigits(const int32_t digits[4]) {
    low += digits[0];
    high += digits[1] + (int64_t{digits[2]} << kDigit) +
            digits[3] * (int64_t{1} << (2 * kDigit));
  }
  void Add(const ExactSum& other) {
    high += other.high;
    low += other.low;
  }
  // Lowest first; all but the last one are below 2^19 and not negative.
  void Write(int32_t digits[4]) const {
    int64_t upper = high + (low >> kDigit);
    digits[0] = static_cast<int32_t>(low & kDigitMask);
    digits[1] = static_cast<int32_t>(upper & kDigitMask);
    digits[2] = static_cast<int32_t>((upper >> kDigit) & kDigitMask);
    digits[3] = static_cast<int32_t>(upper >> (2 * kDigit));
  }
  float Value(const Unit& unit) const {
    int32_t digits[4];
    Write(digits);
    float sum = static_cast<float>(digits[3]);
    for (int i = 2; i >= 0; --i) sum = sum * kBase + static_cast<float>(digits[i]);
    return sum * unit.down;
  }
};

// A weight as times * factor: a term is multiplied by the factor, and its multiple of
// the unit by `times`; see jboost.kernels.exact_sums.split_weights.
struct Weight {
  float factor;
  int32_t times;
};

// With masks, because branches do not vectorize.
inline Weight SplitWeight(float weight) {
  float small = weight < 255.5f ? weight : 255.5f;
  int32_t whole = static_cast<int32_t>(small);
  int32_t counts = static_cast<float>(whole) == weight ? -1 : 0, bits;
  __builtin_memcpy(&bits, &weight, sizeof bits);
  constexpr int32_t kOneBits = 0x3F800000;
  bits = (kOneBits & counts) | (bits & ~counts);
  Weight parts{0.0f, (whole & counts) | (1 & ~counts)};
  __builtin_memcpy(&parts.factor, &bits, sizeof bits);
  return parts;
}

// The value if the weight is positive, else 0. A mask, because a conditional load does
// not vectorize.
inline float KeepPositive(float weight, float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  bits &= weight > 0.0f ? ~0u : 0u;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Values of rows, and their weights; of weight 0, a value may be anything.
struct WeightedTerms {
  const float* values;
  const float* weights;

  float operator()(int64_t i) const {
    float factor = SplitWeight(weights[i]).factor;
    return KeepPositive(weights[i], factor * values[i]);
  }
  int32_t Times(int64_t i) const { return SplitWeight(weights[i]).times; }
};

// The same, where no row counts several times.
struct OnceTerms {
  const float* values;
  const float* weights;

  float operator()(int64_t i) const {
    return KeepPositive(weights[i], weights[i] * values[i]);
  }
};

// Whether no row counts several times. Most weights are at most 1.
inline bool CountOnce(const float* weights, int64_t count) {
  int32_t above = 0, several = 0;
  for (int64_t i = 0; i < count; ++i) above |= weights[i] > 1.0f;
  if (above == 0) return true;
  for (int64_t i = 0; i < count; ++i) several |= SplitWeight(weights[i]).times > 1;
  return several == 0;
}

constexpr int64_t kShortBlock = 2048;  // terms whose digits have sums within int32

// The bits of the greatest magnitude of term(0 .. count - 1).
template <class Term>
inline uint32_t GreatestBits(const Term& term, int64_t count) {
  uint32_t greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = MagnitudeBits(term(i));
    greatest = bits > greatest ? bits : greatest;
  }
  return greatest;
}

// A multiple of the unit, high * 2^19 + low.
struct Digits {
  int32_t high, low;
};

// Rounds half to even: adding 1.5 * 2^23 leaves no bits below 1.
inline Digits RoundToDigits(float multiple) {
  constexpr float kWhole = 12582912.0f;
  constexpr int32_t kWholeBits = 0x4B400000;
  int32_t high = static_cast<int32_t>(multiple * (1.0f / kBase));
  float rest = (multiple - static_cast<float>(high) * kBase) + kWhole;
  int32_t bits;
  __builtin_memcpy(&bits, &rest, sizeof bits);
  return {high, bits - kWholeBits};
}

// The sum of term(0 .. count - 1), which must be finite. Blocks are summed in int32,
// which vectorizes; they are short enough not to overflow.
template <class Term>
inline ExactSum SumTerms(const Term& term, int64_t count, float up) {
  ExactSum sum;
  for (int64_t begin = 0; begin < count; begin += kShortBlock) {
    int64_t end = count - begin < kShortBlock ? count : begin + kShortBlock;
    int32_t high = 0, low = 0;
    for (int64_t i = begin; i < end; ++i) {
      Digits digits = RoundToDigits(term(i) * up);
      high += digits.high;
      low += digits.low;
    }
    sum.high += high;
    sum.low += low;
  }
  return sum;
}

// The same, where term i counts times(i) <= 255 times.
template <class Term, class Times>
inline ExactSum SumTimes(const Term& term, const Times& times, int64_t count,
                         float up) {
  ExactSum sum;
  for (int64_t i = 0; i < count; ++i) {
    Digits digits = RoundToDigits(term(i) * up);
    sum.high += digits.high * times(i);
    sum.low += digits.low * times(i);
  }
  return sum;
}

}  // namespace
}  // namespace jboost

#endif  // JBOOST_EXACT_SUM_H_
