// SPDX-License-Identifier: Apache-2.0
#include "reduce.h"

#include <algorithm>
#include <atomic>
#include <utility>
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

// The sum of a task's terms as multiples of 1 / up; 0: not yet known.
struct Part {
  float up = 0.0f;
  ExactSum sum;
};

// The bits of the greatest finite magnitude. Adds the infinities and NaN to *others as
// floats: their order does not matter.
//
// `parts` may be null. Otherwise the terms of finite tasks are added, while they are in
// the cache, by the unit of the greatest magnitude so far, which is mostly the one of
// all terms.
uint32_t FindGreatest(const Pool& pool, const Terms& terms, float* others,
                      std::vector<Part>* parts) {
  const ReduceLoops& loops = JBOOST_CHOOSE(ReduceLoops);
  std::vector<uint32_t> greatest(terms.tasks());
  std::atomic<uint32_t> known{0};
  ParallelFor(pool, terms.tasks(), [&](int64_t task) {
    Terms part = terms.part(task);
    uint32_t own = loops.greatest_bits(part.values, part.weights, part.count);
    greatest[task] = own;
    if (parts == nullptr || own >= kInfinityBits) return;
    uint32_t most = known.load(std::memory_order_relaxed);
    while (most < own && !known.compare_exchange_weak(most, own)) {
    }
    Part& added = (*parts)[task];
    added.up = ChooseUnit(std::max(most, own)).up;
    loops.sum(part.values, part.weights, part.count, added.up, &added.sum.high,
              &added.sum.low);
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

// Sums the finite terms as multiples of 1 / up; `parts` are known by that unit or not.
ExactSum SumFinite(const Pool& pool, const Terms& terms, float up,
                   std::vector<Part> parts) {
  const ReduceLoops& loops = JBOOST_CHOOSE(ReduceLoops);
  std::vector<int64_t> left;
  for (int64_t task = 0; task < terms.tasks(); ++task) {
    if (parts[task].up != up) left.push_back(task);
  }
  ParallelFor(pool, left.size(), [&](int64_t number) {
    int64_t task = left[number];
    Terms part = terms.part(task);
    std::vector<float> finite;
    if (loops.greatest_bits(part.values, part.weights, part.count) >= kInfinityBits) {
      finite.assign(part.values, part.values + part.count);
      for (int64_t i = 0; i < part.count; ++i) {
        if (!IsFinite(part.at(i))) finite[i] = 0.0f;
      }
      part.values = finite.data();
    }
    ExactSum& sum = parts[task].sum = {};
    loops.sum(part.values, part.weights, part.count, up, &sum.high, &sum.low);
  });
  ExactSum total;
  for (const Part& part : parts) total.Add(part.sum);
  return total;
}

}  // namespace

void SumRows(const Pool& all, const float* values, const float* weights,
             int64_t num_sums, int64_t count, float* sums) {
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  for (int64_t k = 0; k < num_sums; ++k) {
    Terms terms{values + k * count, weights, count};
    float others = 0.0f;
    std::vector<Part> parts(terms.tasks());
    Unit unit = ChooseUnit(FindGreatest(pool, terms, &others, &parts));
    sums[k] = SumFinite(pool, terms, unit.up, std::move(parts)).Value(unit) + others;
  }
}

void FindGreatestOfRows(const Pool& all, const float* values, const float* weights,
                        int64_t num_sums, int64_t count, int32_t* bits, float* others) {
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  for (int64_t k = 0; k < num_sums; ++k) {
    others[k] = 0.0f;
    Terms terms{values + k * count, weights, count};
    uint32_t own = FindGreatest(pool, terms, others + k, nullptr);
    bits[k] = static_cast<int32_t>(own);
  }
}

void SumDigitsOfRows(const Pool& all, const float* values, const float* weights,
                     int64_t num_sums, int64_t count, const float* up,
                     int32_t* digits) {
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  for (int64_t k = 0; k < num_sums; ++k) {
    Terms terms{values + k * count, weights, count};
    std::vector<Part> parts(terms.tasks());
    SumFinite(pool, terms, up[k], std::move(parts)).Write(digits + 4 * k);
  }
}

}  // namespace jboost
