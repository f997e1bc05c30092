// SPDX-License-Identifier: Apache-2.0
// CUDA's language on threads of the host, for tests: what the kernels of
// jboost/kernels/cuda use of it. Blocks run one after the other, the threads of a block
// side by side, so that ThreadSanitizer sees races between them.
#ifndef JBOOST_TESTS_DEVICE_H_
#define JBOOST_TESTS_DEVICE_H_

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

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

struct Block {
  char* shared;
  std::barrier<> all{kThreads};
  std::barrier<> warps[kThreads / 32]{std::barrier<>(32), std::barrier<>(32)};
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
  std::vector<std::thread> threads;
  auto owned = std::make_unique<Block>();
  Block& here = *owned;
  std::unique_ptr<char[]> memory(new char[shared]);
  here.shared = memory.get();
  block = owned.get();
  for (unsigned thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([=, &kernel, &here] {
      threadIdx = dim3{thread, 0, 0};
      for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
          for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = dim3{x, y, z};
            if (thread == 0) std::memset(here.shared, 0x5a, shared);
            here.all.arrive_and_wait();
            kernel();
            here.all.arrive_and_wait();
          }
    });
  for (std::thread& thread : threads) thread.join();
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

// As plain XLA on a CPU computes.
inline float divide(float a, float b) { return a / b; }
inline float multiply(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }

#endif  // JBOOST_TESTS_DEVICE_H_
