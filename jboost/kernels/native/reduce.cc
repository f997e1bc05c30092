// SPDX-License-Identifier: Apache-2.0
#include "reduce.h"

#include <algorithm>
#include <vector>

#include "exact_sum.h"

namespace jboost {
namespace {

constexpr int64_t kTask = 32768;       // values of a task
constexpr int64_t kLeastRows = 65536;  // values from which on threads pay

// Sums values that include infinities or NaN. These are added as floats, whose order
// does not matter then.
float SumOdd(const float* values, int64_t count) {
  auto finite = [=](int64_t i) { return IsFinite(values[i]) ? values[i] : 0.0f; };
  float others = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    if (!IsFinite(values[i])) others += values[i];
  }
  Unit unit = ChooseUnit(GreatestBits(finite, count));
  return SumTerms(finite, count, unit.up).Value(unit) + others;
}

}  // namespace

void SumRows(const Pool& all, const float* values, int64_t num_sums, int64_t count,
             float* sums) {
  const ReduceLoops& loops = JBOOST_CHOOSE(ReduceLoops);
  const Pool& pool = Threads(all, num_sums * count, kLeastRows);
  int64_t tasks = (count + kTask - 1) / kTask;
  std::vector<uint32_t> greatest(tasks);
  std::vector<ExactSum> parts(tasks);
  for (int64_t k = 0; k < num_sums; ++k) {
    const float* row = values + k * count;
    auto size = [&](int64_t task) { return std::min(kTask, count - task * kTask); };
    ParallelFor(pool, tasks, [&](int64_t task) {
      greatest[task] = loops.greatest_bits(row + task * kTask, size(task));
    });
    uint32_t bits = 0;
    for (uint32_t own : greatest) bits = std::max(bits, own);
    if (bits >= kInfinityBits) {
      sums[k] = SumOdd(row, count);
      continue;
    }
    Unit unit = ChooseUnit(bits);
    ParallelFor(pool, tasks, [&](int64_t task) {
      parts[task] = {};
      loops.sum(row + task * kTask, size(task), unit.up, &parts[task].high,
                &parts[task].low);
    });
    ExactSum total;
    for (const ExactSum& part : parts) total.Add(part);
    sums[k] = total.Value(unit);
  }
}

}  // namespace jboost
