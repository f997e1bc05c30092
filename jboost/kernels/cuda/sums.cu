// SPDX-License-Identifier: Apache-2.0
// Sums of integer channels by key.
//
// A block sums a chunk of rows into a table in shared memory. The table has `copies`
// copies side by side, of which a thread uses the one of its lane, so that threads of a
// warp with the same key do not wait for each other.
//
//   table [key][channel][copy]       result [key][channel]
#include "prelude.h"

JBOOST_KERNEL __launch_bounds__(512)
    sum_by_key(Strides strides, const int* values, const int* keys, int* result,
               i64 rows, i64 channels, i64 num_keys, i64 rows_per_block, i64 copies) {
  JBOOST_SHARED(memory);
  int* table = (int*)memory;
  values = member(values, strides, 0);
  keys = member(keys, strides, 1);
  result = member(result, strides, 2);
  const i64 cells = num_keys * channels;
  for (i64 i = threadIdx.x; i < cells * copies; i += blockDim.x) table[i] = 0;
  __syncthreads();
  const i64 begin = blockIdx.x * rows_per_block;
  const i64 end = least(rows, begin + rows_per_block);
  const i64 copy = copies == 0 ? 0 : threadIdx.x % copies;
  for (i64 row = begin + threadIdx.x; row < end; row += blockDim.x) {
    const int key = keys[row];
    if (key < 0 || key >= num_keys) continue;
    for (i64 c = 0; c < channels; ++c) {
      const int value = values[row * channels + c];
      const i64 cell = key * channels + c;
      if (value != 0)
        atomicAdd(copies == 0 ? result + cell : table + cell * copies + copy, value);
    }
  }
  if (copies != 0) add_copies(table, cells, copies, result);
}

// Floats to add, each a multiple of 1 / scale after rounding; see
// ../../kernels/exact_sums.py.
struct Terms {
  const float *values, *weights;  // weights: null for 1
  float scale;

  // Returns a row's multiple, of up to 46 bits and a sign.
  __device__ i64 multiple(i64 row) const {
    float value = values[row], factor = 1;
    i64 times = 1;
    if (weights != nullptr) {
      const float weight = weights[row];
      const bool whole = weight <= 255 && floorf(weight) == weight;
      const float one = weight > 0 ? 1 : 0;
      factor = whole ? one : weight;
      times = (i64)(whole ? weight : one);
    }
    value = factor > 0 ? multiply(factor, value) : 0;
    if (!(fabsf(value) < infinity())) return 0;
    return (i64)rintf(multiply(value, scale)) * times;
  }
};

// Adds a signed number to low + high * 2^32.
__device__ __forceinline__ void add_to_words(u64* words, i64 value) {
  if (value == 0) return;
  atomicAdd(words, (u64)(u32)value);
  atomicAdd(words + 1, (u64)(value >> 32));
}

// words [K][2]
JBOOST_KERNEL __launch_bounds__(512)
    sum_terms(Strides strides, const float* values, const float* weights,
              const float* scale, u64* words, i64 rows, i64 rows_per_block,
              i64 weighted) {
  JBOOST_SHARED(memory);
  u64* sums = (u64*)memory;  // [warp][2]
  const Terms terms = {member(values, strides, 0) + blockIdx.y * rows,
                       weighted ? member(weights, strides, 1) : nullptr,
                       member(scale, strides, 2)[blockIdx.y]};
  const i64 begin = blockIdx.x * rows_per_block;
  const i64 end = least(rows, begin + rows_per_block);
  u64 low = 0, high = 0;
  for (i64 row = begin + threadIdx.x; row < end; row += blockDim.x) {
    const i64 multiple = terms.multiple(row);
    low += (u32)multiple;
    high += (u64)(multiple >> 32);
  }
  for (int step = 16; step > 0; step /= 2) {
    low += __shfl_down_sync(JBOOST_WARP, low, step);
    high += __shfl_down_sync(JBOOST_WARP, high, step);
  }
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) sums[2 * warp] = low, sums[2 * warp + 1] = high;
  __syncthreads();
  if (threadIdx.x >= 2) return;
  u64 sum = 0;
  for (int w = 0; w < (int)blockDim.x / 32; ++w) sum += sums[2 * w + threadIdx.x];
  if (sum != 0)
    atomicAdd(member(words, strides, 3) + 2 * blockIdx.y + threadIdx.x, sum);
}

// words [C][key][2]. A multiple has three parts, of 16 bits, 16 bits and the rest with
// a sign; a block has so few rows that the sum of a part fits 32 bits.
//
//   table [key][part][copy]
JBOOST_KERNEL __launch_bounds__(512)
    sum_terms_by_key(Strides strides, const float* values, const float* weights,
                     const int* keys, const float* scale, u64* words, i64 rows,
                     i64 num_keys, i64 rows_per_block, i64 copies, i64 weighted) {
  JBOOST_SHARED(memory);
  int* table = (int*)memory;
  const Terms terms = {member(values, strides, 0) + blockIdx.y * rows,
                       weighted ? member(weights, strides, 1) : nullptr,
                       member(scale, strides, 3)[blockIdx.y]};
  keys = member(keys, strides, 2);
  words = member(words, strides, 4) + 2 * blockIdx.y * num_keys;
  const int width = (int)copies, copy = width == 0 ? 0 : threadIdx.x & (width - 1);
  for (int i = threadIdx.x; i < 3 * num_keys * width; i += blockDim.x) table[i] = 0;
  __syncthreads();
  const i64 begin = blockIdx.x * rows_per_block;
  const i64 end = least(rows, begin + rows_per_block);
  for (i64 first = begin + 4 * threadIdx.x; first < end; first += 4 * blockDim.x) {
    int key[4];
    i64 multiple[4];
    read_four(keys + first, (int)least(4, end - first), -1, key);
    for (int k = 0; k < 4; ++k)
      multiple[k] = key[k] < 0 || key[k] >= num_keys ? 0 : terms.multiple(first + k);
    for (int k = 0; k < 4; ++k) {
      if (multiple[k] == 0) continue;
      if (width == 0) {
        add_to_words(words + 2 * key[k], multiple[k]);
        continue;
      }
      int* cell = table + 3 * key[k] * width + copy;
      atomicAdd(cell, (int)(multiple[k] & 0xffff));
      atomicAdd(cell + width, (int)(multiple[k] >> 16 & 0xffff));
      atomicAdd(cell + 2 * width, (int)(multiple[k] >> 32));
    }
  }
  if (width == 0) return;
  __syncthreads();
  for (int key = threadIdx.x; key < num_keys; key += blockDim.x) {
    const int* cell = table + 3 * key * width;
    const i64 low = sum_copies(cell, width), middle = sum_copies(cell + width, width);
    const i64 high = sum_copies(cell + 2 * width, width);
    add_to_words(words + 2 * key, low + (middle << 16) + high * 4294967296);
  }
}

// Says which terms of each key are not finite: kinds [C][key], bit 0 for above all
// numbers, bit 1 for below, both for NaN.
JBOOST_KERNEL __launch_bounds__(512)
    find_kinds(Strides strides, const float* terms, const int* keys, u32* kinds,
               i64 rows, i64 num_keys) {
  terms = member(terms, strides, 0) + blockIdx.y * rows;
  keys = member(keys, strides, 1);
  kinds = member(kinds, strides, 2) + blockIdx.y * num_keys;
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += step) {
    const float term = terms[row];
    if (fabsf(term) < infinity() || keys[row] < 0 || keys[row] >= num_keys) continue;
    atomicOr(kinds + keys[row], term > 0 ? 1u : term < 0 ? 2u : 3u);
  }
}
