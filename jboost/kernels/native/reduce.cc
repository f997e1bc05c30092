// SPDX-License-Identifier: Apache-2.0
#include "reduce.h"

#include <algorithm>
#include <vector>

#include "tree_sum.h"

namespace jboost {
namespace {

constexpr int64_t kTask = 32 * kSumBlock;  // rows a task
constexpr int64_t kLeastRows = 65536;      // for threads: a row costs next to nothing
}  // namespace

void SumRows(const Pool& pool, const float* values, int64_t num_sums, int64_t count,
             float* sums) {
  const ReduceLoops& loops = JBOOST_CHOOSE(ReduceLoops);
  int64_t blocks = (count + kSumBlock - 1) / kSumBlock;
  int64_t tasks = (count + kTask - 1) / kTask;
  std::vector<float> partial(num_sums * blocks);
  ParallelFor(Threads(pool, num_sums * count, kLeastRows), num_sums * tasks,
              [&](int64_t number) {
                int64_t k = number / tasks, task = number % tasks;
                int64_t end = std::min((task + 1) * kTask, count);
                for (int64_t at = task * kTask; at < end; at += kSumBlock) {
                  partial[k * blocks + at / kSumBlock] = loops.sum_block(
                      values + k * count + at, std::min(kSumBlock, end - at));
                }
              });
  for (int64_t k = 0; k < num_sums; ++k) {
    sums[k] = blocks == 0 ? 0.0f
              : blocks == 1
                  ? partial[k]
                  : TreeSum(partial.data() + k * blocks, blocks);
  }
}

}  // namespace jboost
