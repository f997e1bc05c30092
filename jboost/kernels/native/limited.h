// SPDX-License-Identifier: Apache-2.0
// The score of one side of a split where leaf values are limited, equal to the bit to
// limited_score of jboost.trees.splitting. Everything here has internal linkage,
// because the loops of every instruction set include it.
#ifndef JBOOST_LIMITED_H_
#define JBOOST_LIMITED_H_

#include <cfloat>

#include "grow.h"

namespace jboost {
namespace {

struct Sums {
  float gradient, weight;  // G, H + l2
};

// Sums of integers in their units, the weight with l2.
inline Sums InUnits(const int32_t sums[2], const SplitLimits& limits) {
  float weight = (static_cast<float>(sums[1]) + limits.l2 / limits.curvature_unit) *
                 limits.curvature_unit;
  return {static_cast<float>(sums[0]) * limits.gradient_unit, weight};
}

// The score without limits.
inline float Score(const Sums& sums) {
  return sums.weight > 0.0f ? sums.gradient * sums.gradient / sums.weight : 0.0f;
}

inline float Larger(float a, float b) { return a > b ? a : b; }
inline float Smaller(float a, float b) { return a < b ? a : b; }

// -G / (H + l2), with G moved by l1 toward 0, clipped to the bounds.
inline float LimitedValue(const Sums& sums, const ValueLimits& values, float divisor) {
  float shrunk = Larger(__builtin_fabsf(sums.gradient) - values.l1, 0.0f);
  float value = (sums.gradient > 0.0f ? -shrunk : shrunk) / divisor;
  return Smaller(Larger(value, values.low), values.high);
}

inline bool IsUsable(float weight) {
  return (weight > 0.0f) & (weight < __builtin_inff());
}

inline float Divisor(float weight) {
  return IsUsable(weight) ? weight : __builtin_inff();
}

// The point -(G + l1 sign(value)) / (H + l2).
inline float Pulled(const Sums& sums, const ValueLimits& values, float divisor,
                    float value) {
  float sign = value > 0.0f ? 1.0f : (value < 0.0f ? -1.0f : 0.0f);
  return -(sums.gradient + values.l1 * sign) / divisor;
}

// Returns the score; writes the leaf value to *value.
inline float LimitedScore(const Sums& sums, const ValueLimits& values, float* value) {
  float divisor = Divisor(sums.weight);
  float factor = IsUsable(sums.weight) ? sums.weight : 0.0f;
  float best = LimitedValue(sums, values, divisor);
  float pulled = Pulled(sums, values, divisor, best);
  *value = best;
  return Larger((factor * best) * (2.0f * pulled - best), -FLT_MAX);
}

// The magnitude of the score's terms, which bounds its rounding error.
inline float LimitedSize(const Sums& sums, const ValueLimits& values) {
  float divisor = Divisor(sums.weight);
  float factor = IsUsable(sums.weight) ? sums.weight : 0.0f;
  float best = LimitedValue(sums, values, divisor);
  float pulled = Pulled(sums, values, divisor, best);
  float size = __builtin_fabsf(best);
  return (factor * size) * Larger(__builtin_fabsf(pulled), size);
}

}  // namespace
}  // namespace jboost

#endif  // JBOOST_LIMITED_H_
