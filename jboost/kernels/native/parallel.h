// SPDX-License-Identifier: Apache-2.0
// A parallel loop on XLA's thread pool that cannot deadlock.
//
// The calling thread claims tasks from an atomic counter, as every helper thread does,
// so the loop ends even if no helper ever runs (all threads of the pool may be inside
// such loops themselves). The caller waits only for tasks that a running helper has
// already claimed. A helper that starts late finds no task left; it touches nothing but
// the shared state, which it keeps alive.
//
// A task may throw, for example std::bad_alloc. The tasks that have not started are
// then skipped, and the first exception is rethrown by the calling thread, once no
// helper uses the loop's body anymore.
#ifndef JBOOST_PARALLEL_H_
#define JBOOST_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#endif

namespace jboost {

// The thread pool as kernels see it. `schedule` runs a task at some later time.
struct Pool {
  int64_t num_threads = 1;
  std::function<void(std::function<void()>)> schedule;
};

constexpr int64_t kSerial = 20000;  // units of work below which threads cost more

// The pool, or the calling thread alone where there is little work.
inline const Pool& Threads(const Pool& pool, int64_t work, int64_t least = kSerial) {
  // A static of the function rather than of the header: the loops include this file,
  // too, and code that runs when the library is loaded must not be compiled for a newer
  // processor.
  static const Pool alone;
  return work < least ? alone : pool;
}

namespace internal {

// ThreadSanitizer does not see how XLA hands a task to another thread. So it is told
// that what the caller has written before it announces a loop can be read after a
// helper has accepted it; and it ignores what the caller does while a Handover lives,
// which is to write the task itself.
#if defined(__SANITIZE_THREAD__)
inline void Announce(void* loop) { __tsan_release(loop); }
inline void Accept(void* loop) { __tsan_acquire(loop); }
class Handover {
 public:
  Handover() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Handover() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};
#else
inline void Announce(void*) {}
inline void Accept(void*) {}
class Handover {
 public:
  Handover() {}  // not defaulted, so that objects count as used
};
#endif

struct Loop {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // set by the task that sets `failed`
  int64_t num_tasks = 0;
  const std::function<void(int64_t)>* body = nullptr;  // owned by the caller
  std::mutex mutex;
  std::condition_variable finished;

  void Work() {
    for (;;) {
      int64_t task = next.fetch_add(1);
      if (task >= num_tasks) return;
      Run(task);
      if (done.fetch_add(1) + 1 == num_tasks) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }

  void Run(int64_t task) {
    if (failed.load(std::memory_order_relaxed)) return;  // the results are lost anyway
    try {
      (*body)(task);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }

  void Wait() {
    for (int spin = 0; spin < 4096; ++spin) {
      if (done.load(std::memory_order_acquire) == num_tasks) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [&] { return done.load() == num_tasks; });
  }
};

inline void Schedule(const Pool& pool, const std::shared_ptr<Loop>& loop,
                     int64_t helpers) {
  Announce(loop.get());
  Handover handover;
  try {
    for (int64_t helper = 0; helper < helpers; ++helper) {
      pool.schedule([loop] {
        Accept(loop.get());
        loop->Work();
      });
    }
  } catch (const std::bad_alloc&) {
    // The caller and the helpers that were scheduled do all tasks.
  }
}

}  // namespace internal

// Calls body(i) for i in [0, num_tasks), each once, on any thread of the pool. Rethrows
// what a task throws.
inline void ParallelFor(const Pool& pool, int64_t num_tasks,
                        const std::function<void(int64_t)>& body) {
  if (num_tasks <= 1 || pool.num_threads <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
  auto loop = std::make_shared<internal::Loop>();
  loop->num_tasks = num_tasks;
  loop->body = &body;
  internal::Schedule(pool, loop, std::min(pool.num_threads, num_tasks) - 1);
  loop->Work();
  loop->Wait();
  if (loop->failed.load()) std::rethrow_exception(std::move(loop->error));
}

}  // namespace jboost

#endif  // JBOOST_PARALLEL_H_
