// SPDX-License-Identifier: Apache-2.0
#include "slopes.h"

#include <algorithm>
#include <vector>

namespace jboost {
namespace {

constexpr int64_t kRowsPerTask = 4096;

}  // namespace

void SumProducts(const Pool& pool, const ValueRows& rows, const Products& products,
                 int32_t* sums) {
  const SlopeLoops& loops = JBOOST_CHOOSE(SlopeLoops);
  int64_t num_leaves = rows.num_leaves, num_terms = products.num_terms;
  int64_t width = (num_terms + 2) * kProductLanes, size = num_leaves * width;
  int64_t most = std::max<int64_t>(
      1, std::min(4 * pool.num_threads, rows.num_rows / (16 * num_leaves)));
  int64_t tasks = std::min(most, (rows.num_rows + kRowsPerTask - 1) / kRowsPerTask);
  tasks = std::max<int64_t>(1, tasks);
  std::vector<uint32_t> tables(tasks * size, 0);
  ParallelFor(Threads(pool, rows.num_rows), tasks, [&](int64_t task) {
    int64_t begin = task * rows.num_rows / tasks;
    int64_t end = (task + 1) * rows.num_rows / tasks;
    loops.add_products(rows, products, begin, end, tables.data() + task * size);
  });
  for (int64_t task = 1; task < tasks; ++task) {
    for (int64_t i = 0; i < size; ++i) tables[i] += tables[task * size + i];
  }
  int64_t channel = 0;
  auto write = [&](int64_t line, int64_t lane) {
    for (int64_t leaf = 0; leaf < num_leaves; ++leaf) {
      uint32_t sum = tables[leaf * width + line * kProductLanes + lane];
      sums[channel * num_leaves + leaf] = static_cast<int32_t>(sum);
    }
    ++channel;
  };
  for (int64_t line = 0; line <= num_terms; ++line) {
    for (int64_t lane = 0; lane <= line; ++lane) write(line, lane);
  }
  for (int64_t lane = 0; lane <= num_terms; ++lane) write(num_terms + 1, lane);
}

void AddLines(const Pool& pool, const ValueRows& rows, const Lines& lines,
              const float* scores, float* result) {
  const SlopeLoops& loops = JBOOST_CHOOSE(SlopeLoops);
  int64_t tasks = (rows.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  ParallelFor(Threads(pool, rows.num_rows), tasks, [&](int64_t task) {
    int64_t begin = task * kRowsPerTask;
    int64_t end = std::min(begin + kRowsPerTask, rows.num_rows);
    loops.add_lines(rows, lines, begin, end, scores, result);
  });
}

}  // namespace jboost
