// SPDX-License-Identifier: Apache-2.0
// A parallel loop on XLA's thread pool that cannot deadlock.
//
// The calling thread claims tasks from an atomic counter like every helper, so the
// loop ends even if no helper ever gets to run (all threads of the pool may be inside
// such loops themselves); and it waits only for tasks that a running helper has
// already claimed. A helper that comes late finds the counter exhausted and touches
// nothing but the shared state, which it keeps alive.
#ifndef JBOOST_PARALLEL_H_
#define JBOOST_PARALLEL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace jboost {

// What a kernel knows of the thread pool. `schedule` runs a task some time later.
struct Pool {
  int64_t num_threads = 1;
  std::function<void(std::function<void()>)> schedule;
};

constexpr int64_t kSerial = 20000;  // units of work below which threads cost more

// The pool, or the calling thread alone where there is little to do.
inline const Pool& Threads(const Pool& pool, int64_t work, int64_t least = kSerial) {
  // Not a variable of the header: the loops include it, too, and code that runs when
  // the library is loaded must not be compiled for a newer processor.
  static const Pool alone;
  return work < least ? alone : pool;
}

namespace internal {

struct Loop {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  int64_t num_tasks = 0;
  const std::function<void(int64_t)>* body = nullptr;  // the caller's, see above
  std::mutex mutex;
  std::condition_variable finished;

  void Work() {
    for (;;) {
      int64_t task = next.fetch_add(1);
      if (task >= num_tasks) return;
      (*body)(task);
      if (done.fetch_add(1) + 1 == num_tasks) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }
};

}  // namespace internal

// Calls body(i) for i in [0, num_tasks), each once, on any thread of the pool.
inline void ParallelFor(const Pool& pool, int64_t num_tasks,
                        const std::function<void(int64_t)>& body) {
  if (num_tasks <= 1 || pool.num_threads <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
  auto loop = std::make_shared<internal::Loop>();
  loop->num_tasks = num_tasks;
  loop->body = &body;
  int64_t helpers = std::min(pool.num_threads, num_tasks) - 1;
  for (int64_t helper = 0; helper < helpers; ++helper) {
    pool.schedule([loop] { loop->Work(); });
  }
  loop->Work();
  for (int spin = 0; spin < 4096; ++spin) {
    if (loop->done.load(std::memory_order_acquire) == num_tasks) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(loop->mutex);
  loop->finished.wait(lock, [&] { return loop->done.load() == num_tasks; });
}

}  // namespace jboost

#endif  // JBOOST_PARALLEL_H_
