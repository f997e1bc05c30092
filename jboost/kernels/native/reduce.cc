// SPDX-License-Identifier: Apache-2.0
#include "reduce.h"

#include <algorithm>
#include <vector>

#include "exact_sum.h"

namespace jboost {
namespace {

constexpr int64_t kTask = 32768;       // values of a task
constexpr int64_t kLeastRows = 65536;  // values from which on threads pay

// One row of values, and the weights or null.
struct Terms {
  const float* values;
  const float* weights;
  int64_t count;

  int64_t tasks() const { return (count + kTask - 1) / kTask; }
  int64_t size(int64_t task) const { return std::min(kTask, count - task * kTask); }
  Terms part(int64_t task) const {
    int64_t first = task * kTask;
    return {values + first, weights == nullptr ? nullptr : weights + first, size(task)};
  }
  float at(int64_t i) const {
    return weights == nullptr ? values[i] : WeightedTerms{values, weights}(i);
  }
};

// The bits of the greatest finite magnitude. Adds the infinities and NaN to *others as
// floats: their order does not matter.
uint32_t FindGreatest(const Pool& pool, const Terms& terms, float* others) {
  const ReduceLoops& loops = JBOOST_CHOOSE(ReduceLoops);
  std::vector<uint32_t> greatest(terms.tasks());
  ParallelFor(pool, terms.tasks(), [&](int64_t task) {
    Terms part = terms.part(task);
    greatest[task] = loops.greatest_bits(part.values, part.weights, part.count);
  });
  uint32_t bits = 0;
  for (int64_t task = 0; task < terms.tasks(); ++task) {
    uint32_t own = greatest[task];
    if (own >= kInfinityBits) {
      own = 0;
      Terms part = terms.part(task);
      for (int64_t i = 0; i < part.count; ++i) {
        float term = part.at(i);
        IsFinite(term) ? own = std::max(own, MagnitudeBits(term)) : * others += term;
      }
    }
    bits = std::max(bits, own);
  }
  return bits;
}

// Sums the finite terms, which all are if `known`, as multiples of 1 / up.
ExactSum SumFinite(const Pool& pool, const Terms& terms, bool known, float up) {
  const ReduceLoops& loops = JBOOST_CHOOSE(ReduceLoops);
  std::vector<ExactSum> parts(terms.tasks());
  ParallelFor(pool, terms.tasks(), [&](int64_t task) {
    Terms part = terms.part(task);
    std::vector<float> finite;
    if (!known &&
        loops.greatest_bits(part.values, part.weights, part.count) >= kInfinityBits) {
      finite.assign(part.values, part.values + part.count);
      for (int64_t i = 0; i < part.count; ++i) {
        if (!IsFinite(part.at(i))) finite[i] = 0.0f;
      }
      part.values = finite.data();
    }
    loops.sum(part.values, part.weights, part.count, up, &parts[task].high,
              &parts[task].low);
  });
  ExactSum total;
  for (const ExactSum& part : parts) total.Add(part);
  return total;
}

}  // namespace

void SumRows(const Pool& all, const float* values, const float* weights,
             int64_t num_sums, int64_t count, float* sums) {
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  for (int64_t k = 0; k < num_sums; ++k) {
    Terms terms{values + k * count, weights, count};
    float others = 0.0f;
    Unit unit = ChooseUnit(FindGreatest(pool, terms, &others));
    sums[k] = SumFinite(pool, terms, others == 0.0f, unit.up).Value(unit) + others;
  }
}

void FindGreatestOfRows(const Pool& all, const float* values, const float* weights,
                        int64_t num_sums, int64_t count, int32_t* bits, float* others) {
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  for (int64_t k = 0; k < num_sums; ++k) {
    others[k] = 0.0f;
    Terms terms{values + k * count, weights, count};
    uint32_t own = FindGreatest(pool, terms, others + k);
    bits[k] = static_cast<int32_t>(own);
  }
}

void SumDigitsOfRows(const Pool& all, const float* values, const float* weights,
                     int64_t num_sums, int64_t count, const float* up,
                     int32_t* digits) {
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  for (int64_t k = 0; k < num_sums; ++k) {
    Terms terms{values + k * count, weights, count};
    SumFinite(pool, terms, false, up[k]).Write(digits + 4 * k);
  }
}

}  // namespace jboost
