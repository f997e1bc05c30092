// SPDX-License-Identifier: Apache-2.0
#include "reduce.h"

#include <algorithm>
#include <vector>

#include "exact_sum.h"

namespace jboost {
namespace {

constexpr int64_t kTask = 32768;       // values of a task
constexpr int64_t kLeastRows = 65536;  // values from which on threads pay

// One row of values.
struct Terms {
  const float* values;
  const uint8_t* times;  // may be null; see SumTerms
  int64_t count;

  int64_t tasks() const { return (count + kTask - 1) / kTask; }
  const float* begin(int64_t task) const { return values + task * kTask; }
  int64_t size(int64_t task) const { return std::min(kTask, count - task * kTask); }
};

// The bits of the greatest finite magnitude. Adds the infinities and NaN to *others as
// floats: their order does not matter.
uint32_t FindGreatest(const Pool& pool, const Terms& terms, float* others) {
  const ReduceLoops& loops = JBOOST_CHOOSE(ReduceLoops);
  std::vector<uint32_t> greatest(terms.tasks());
  ParallelFor(pool, terms.tasks(), [&](int64_t task) {
    greatest[task] = loops.greatest_bits(terms.begin(task), terms.size(task));
  });
  uint32_t bits = 0;
  for (int64_t task = 0; task < terms.tasks(); ++task) {
    uint32_t own = greatest[task];
    if (own >= kInfinityBits) {
      own = 0;
      for (int64_t i = 0; i < terms.size(task); ++i) {
        float value = terms.begin(task)[i];
        IsFinite(value) ? own = std::max(own, MagnitudeBits(value)) : * others += value;
      }
    }
    bits = std::max(bits, own);
  }
  return bits;
}

// Sums the finite terms as multiples of 1 / up.
ExactSum SumFinite(const Pool& pool, const Terms& terms, float up) {
  const ReduceLoops& loops = JBOOST_CHOOSE(ReduceLoops);
  std::vector<ExactSum> parts(terms.tasks());
  ParallelFor(pool, terms.tasks(), [&](int64_t task) {
    const float* values = terms.begin(task);
    int64_t size = terms.size(task);
    std::vector<float> finite;
    if (loops.greatest_bits(values, size) >= kInfinityBits) {
      finite.assign(values, values + size);
      for (float& value : finite) value = IsFinite(value) ? value : 0.0f;
      values = finite.data();
    }
    const uint8_t* times =
        terms.times == nullptr ? nullptr : terms.times + task * kTask;
    loops.sum(values, times, size, up, &parts[task].high, &parts[task].low);
  });
  ExactSum total;
  for (const ExactSum& part : parts) total.Add(part);
  return total;
}

}  // namespace

void SumRows(const Pool& all, const float* values, const uint8_t* times,
             int64_t num_sums, int64_t count, float* sums) {
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  for (int64_t k = 0; k < num_sums; ++k) {
    Terms terms{values + k * count, times, count};
    float others = 0.0f;
    Unit unit = ChooseUnit(FindGreatest(pool, terms, &others));
    sums[k] = SumFinite(pool, terms, unit.up).Value(unit) + others;
  }
}

void FindGreatestOfRows(const Pool& all, const float* values, int64_t num_sums,
                        int64_t count, int32_t* bits, float* others) {
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  for (int64_t k = 0; k < num_sums; ++k) {
    others[k] = 0.0f;
    uint32_t own = FindGreatest(pool, {values + k * count, nullptr, count}, others + k);
    bits[k] = static_cast<int32_t>(own);
  }
}

void SumDigitsOfRows(const Pool& all, const float* values, const uint8_t* times,
                     int64_t num_sums, int64_t count, const float* up,
                     int32_t* digits) {
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  for (int64_t k = 0; k < num_sums; ++k) {
    SumFinite(pool, {values + k * count, times, count}, up[k]).Write(digits + 4 * k);
  }
}

}  // namespace jboost
