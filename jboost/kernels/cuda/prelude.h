// SPDX-License-Identifier: Apache-2.0
// What all CUDA kernels share. The Python package reads these files, puts this one in
// front, and compiles them for the user's GPU; see ../cuda_compiler.py.
//
// Every kernel takes first the strides of a batch, then its buffers in the order of
// the wrapper's operands and results, then numbers. Axis z of the grid is the member of
// the batch that a block works on. A kernel must be right for any number of threads
// that is a multiple of 32, and must not depend on the order of blocks.
#ifndef JBOOST_PRELUDE_H_
#define JBOOST_PRELUDE_H_

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// By how many bytes the buffers of one member of a batch lie behind those of the last;
// 0 where all members share a buffer.
struct Strides {
  i64 bytes[16];
};

#ifdef __CUDACC__
extern __shared__ __align__(16) char jboost_memory[];  // of a block
#define JBOOST_SHARED(name) char* name = jboost_memory
#define JBOOST_KERNEL extern "C" __global__ void
#define JBOOST_WARP 0xffffffffu

// Divides as XLA does on GPUs, with an error of up to two units in the last place, so
// that gains have the bits of plain XLA. Products and sums are rounded one by one.
__device__ __forceinline__ float divide(float a, float b) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
#endif

template <class T>
__device__ __forceinline__ T* member(T* buffer, const Strides& strides, int index) {
  if (strides.bytes[index] == 0) return buffer;
  return (T*)((char*)buffer + blockIdx.z * strides.bytes[index]);
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ i64 least(i64 a, i64 b) { return a < b ? a : b; }

__device__ __forceinline__ bool aligned(const void* place, int bytes) {
  return ((u64)place & (u64)(bytes - 1)) == 0;
}

// Reads four integers that follow each other, of which `count` exist; others are
// `otherwise`.
__device__ __forceinline__ void read_four(const int* place, int count, int otherwise,
                                          int* values) {
  if (count == 4 && aligned(place, 16)) {
    int4 four = *(const int4*)place;
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    return;
  }
  for (int i = 0; i < 4; ++i) values[i] = i < count ? place[i] : otherwise;
}

// The same for codes.
__device__ __forceinline__ void read_four(const u8* place, int count, int otherwise,
                                          int* values) {
  if (count == 4 && aligned(place, 4)) {
    u32 word = *(const u32*)place;
    for (int i = 0; i < 4; ++i) values[i] = (word >> (8 * i)) & 255;
    return;
  }
  for (int i = 0; i < 4; ++i) values[i] = i < count ? place[i] : otherwise;
}

__device__ __forceinline__ void read_four(const u16* place, int count, int otherwise,
                                          int* values) {
  for (int i = 0; i < 4; ++i) values[i] = i < count ? place[i] : otherwise;
}

// Returns the sum of the copies of a cell, a power of two. Each thread begins at
// another copy: in the same one, all would wait for one bank of the shared memory.
__device__ __forceinline__ int sum_copies(const int* cell, int copies) {
  int sum = 0;
  for (int i = 0; i < copies; ++i) sum += cell[(i + threadIdx.x) & (copies - 1)];
  return sum;
}

// Writes four integers that follow each other, of which `count` exist.
__device__ __forceinline__ void write_four(int* place, int count, const int* values) {
  if (count == 4 && aligned(place, 16)) {
    *(int4*)place = make_int4(values[0], values[1], values[2], values[3]);
    return;
  }
  for (int i = 0; i < count; ++i) place[i] = values[i];
}

// Adds a block's table, [cell][copy] in shared memory, to the result.
__device__ __forceinline__ void add_copies(const int* table, i64 cells, i64 copies,
                                           int* result) {
  __syncthreads();
  for (i64 cell = threadIdx.x; cell < cells; cell += blockDim.x) {
    const int sum = sum_copies(table + cell * copies, (int)copies);
    if (sum != 0) atomicAdd(result + cell, sum);
  }
}

// ../../numerics/random.py: hash_words.
__device__ __forceinline__ u32 hash_word(u32 word, const u32* seed) {
  for (int part = 0; part < 2; ++part) {
    word += seed[part];
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    word ^= word >> 16;
  }
  return word;
}

// The same: derive_seeds, for one index.
struct Seed {
  u32 words[2];

  __device__ Seed(const u32* seed, int index) {
    for (int part = 0; part < 2; ++part)
      words[part] = hash_word(2 * (u32)index + part, seed);
  }
};

#endif  // JBOOST_PRELUDE_H_
