// SPDX-License-Identifier: Apache-2.0
// Tests parallel.h where the library is built with sanitizers: every task runs once,
// and a failure on any thread reaches the caller after all helpers have let go of the
// body.
#include "parallel.h"

#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

namespace jboost {
namespace {

constexpr int64_t kTasks = 64;

// Starts a thread for each scheduled task; scheduling fails after `limit` tasks.
class Helpers {
 public:
  explicit Helpers(int64_t limit) {
    pool_.num_threads = 8;
    pool_.schedule = [this, limit](std::function<void()> task) {
      if (static_cast<int64_t>(threads_.size()) == limit) throw std::bad_alloc();
      threads_.emplace_back(std::move(task));
    };
  }
  ~Helpers() {
    for (std::thread& thread : threads_) thread.join();
  }
  const Pool& pool() const { return pool_; }

 private:
  Pool pool_;
  std::vector<std::thread> threads_;
};

void Expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "parallel_test: %s\n", what);
  std::exit(1);
}

void TestEveryTaskRunsOnce(int64_t limit) {
  std::vector<int64_t> runs(kTasks, 0);  // not atomic: no task may run twice
  Helpers helpers(limit);
  ParallelFor(helpers.pool(), kTasks, [&](int64_t task) { ++runs[task]; });
  for (int64_t count : runs) Expect(count == 1, "a task did not run exactly once");
}

void TestFailureReachesTheCaller(int64_t failing) {
  bool caught = false;
  Helpers helpers(8);
  try {
    std::vector<int64_t> results(kTasks, 0);  // gone when the exception is caught
    ParallelFor(helpers.pool(), kTasks, [&](int64_t task) {
      if (task == failing) throw std::bad_alloc();
      results[task] = task;
    });
  } catch (const std::bad_alloc&) {
    caught = true;
  }
  Expect(caught, "the failure of a task was lost");
}

}  // namespace
}  // namespace jboost

int main() {
  for (int round = 0; round < 50; ++round) {
    jboost::TestEveryTaskRunsOnce(8);
    jboost::TestEveryTaskRunsOnce(round % 4);  // scheduling fails
    jboost::TestFailureReachesTheCaller(round % jboost::kTasks);
  }
  std::puts("parallel_test: passed");
}
