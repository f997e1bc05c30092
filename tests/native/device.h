// SPDX-License-Identifier: Apache-2.0
// CUDA's language on threads of the host, for tests: what the kernels of
// jboost/kernels/cuda use of it. Blocks run one after the other, the threads of a block
// side by side, so that ThreadSanitizer sees races between them; or, where JBOOST_TURNS
// is defined, in turns on one thread of the host, which is many times faster.
#ifndef JBOOST_TESTS_DEVICE_H_
#define JBOOST_TESTS_DEVICE_H_

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>
#ifdef JBOOST_TURNS
#include <setjmp.h>
#include <ucontext.h>
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define JBOOST_SHARED(name) char* name = device::block->shared
#define JBOOST_KERNEL static void
#define JBOOST_WARP 0xffffffffu

struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline thread_local dim3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace device {

constexpr int kThreads = 64;  // of a block, whatever the launch asks for

#ifdef JBOOST_TURNS
inline jmp_buf host, turns[kThreads];
inline unsigned turn;  // whose turn it is
inline bool begun[kThreads], ended[kThreads];

class Barrier {
 public:
  explicit Barrier(int count) : count_(count), missing_(count) {}
  void arrive_and_wait() {
    const int phase = phase_;
    if (--missing_ == 0) missing_ = count_, ++phase_;
    while (phase_ == phase)
      if (_setjmp(turns[turn]) == 0) _longjmp(host, 1);
  }

 private:
  int count_, missing_, phase_ = 0;
};

// Runs a function for each thread of a block.
inline void run_threads(const std::function<void()>& run) {
  constexpr size_t kStack = 1 << 16;
  static std::vector<char> stacks(kThreads * kStack);
  static const std::function<void()>* function;
  static unsigned left;
  function = &run;
  std::fill_n(begun, kThreads, false);
  std::fill_n(ended, kThreads, false);
  for (left = kThreads, turn = 0; left > 0; turn = (turn + 1) % kThreads) {
    if (ended[turn] || _setjmp(host) != 0) continue;
    threadIdx = dim3{turn, 0, 0};
    if (begun[turn]) _longjmp(turns[turn], 1);
    begun[turn] = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stacks.data() + turn * kStack;
    start.uc_stack.ss_size = kStack;
    makecontext(
        &start,
        [] {
          (*function)();
          ended[turn] = true, --left;
          _longjmp(host, 1);
        },
        0);
    setcontext(&start);
  }
}
#else
using Barrier = std::barrier<>;

// Runs a function for each thread of a block.
inline void run_threads(const std::function<void()>& run) {
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([=, &run] {
      threadIdx = dim3{thread, 0, 0};
      run();
    });
  for (std::thread& thread : threads) thread.join();
}
#endif

struct Block {
  char* shared;
  Barrier all{kThreads};
  Barrier warps[kThreads / 32]{Barrier(32), Barrier(32)};
  uint64_t exchanged[kThreads];
};
inline Block* block;

// Returns the value of another lane of the warp; out of range: one's own.
template <class T>
T exchange(T value, int lane) {
  const int warp = threadIdx.x / 32 * 32;
  std::memcpy(&block->exchanged[threadIdx.x], &value, sizeof value);
  block->warps[warp / 32].arrive_and_wait();
  T other = value;
  if (lane >= 0 && lane < 32)
    std::memcpy(&other, &block->exchanged[warp + lane], sizeof other);
  block->warps[warp / 32].arrive_and_wait();
  return other;
}

// Runs a kernel. Shared memory holds garbage at first, as on a GPU, and has exactly the
// size that was asked for.
inline void launch(dim3 grid, int shared, const std::function<void()>& kernel) {
  blockDim = dim3{kThreads};
  gridDim = grid;
  auto owned = std::make_unique<Block>();
  Block& here = *owned;
  std::unique_ptr<char[]> memory(new char[shared]);
  here.shared = memory.get();
  block = owned.get();
  run_threads([=, &kernel, &here] {
    for (unsigned z = 0; z < grid.z; ++z)
      for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx = dim3{x, y, z};
          if (threadIdx.x == 0) std::memset(here.shared, 0x5a, shared);
          here.all.arrive_and_wait();
          kernel();
          here.all.arrive_and_wait();
        }
  });
}

}  // namespace device

inline void __syncthreads() { device::block->all.arrive_and_wait(); }

template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
  return device::exchange(value, (int)threadIdx.x % 32 - step);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int step) {
  return device::exchange(value, (int)threadIdx.x % 32 + step);
}

template <class T>
T atomicAdd(T* place, T value) {
  return std::atomic_ref<T>(*place).fetch_add(value, std::memory_order_relaxed);
}

template <class T>
T atomicOr(T* place, T value) {
  return std::atomic_ref<T>(*place).fetch_or(value, std::memory_order_relaxed);
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int shift) {
  return static_cast<uint32_t>(((uint64_t(high) << 32) | low) >> (shift & 31));
}

inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// As plain XLA on a CPU computes.
inline float divide(float a, float b) { return a / b; }
inline float multiply(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }

#endif  // JBOOST_TESTS_DEVICE_H_
