// SPDX-License-Identifier: Apache-2.0
// Sums of kinks by group, and by digits of keys, for weighted order statistics; see
// ../../trees/leaf_operations.py.
//
// A block sums a chunk of rows into a table in shared memory if the table fits there,
// otherwise into the result. Sums are whole numbers of up to 41 bits.
#include "prelude.h"

// Rows that pull the value of their group up or down by a slope.
struct Kinks {
  const float *minimizer, *scores, *weights, *left, *kink;
  float scale;
  const int* group;
  i64 num_groups, left_step, kink_step;  // a step is 0 if all rows share a number

  // Returns the group of a row that counts, else -1.
  __device__ int find_group(i64 row) const {
    const int found = group[row];
    const bool inside = found >= 0 && found < num_groups;
    // A comparison with NaN is false: of the weight here, of the key below.
    if (!inside || !(weights[row] > 0)) return -1;
    const float key = minimizer[row] - scores[row];
    return key == key ? found : -1;
  }

  // Returns the key of a row, as a number of the same order.
  __device__ u32 key(i64 row) const {
    const float value = minimizer[row] - scores[row];
    const u32 bits = value == 0 ? 0 : __float_as_uint(value);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  }

  // Returns the multiple of 1 / scale next to a slope times the weight of its row.
  __device__ u64 multiple(i64 row, float slope) const {
    const float product = multiply(multiply(weights[row], slope), scale);
    const float value = add(product, 0.5f), most = 1099511627776.0f;  // 2^40
    return (u64)floorf(value < most ? value : most);
  }
};

// Returns the rows of a member of the batch from the first operands of a kernel.
__device__ __forceinline__ Kinks read_kinks(const Strides& strides,
                                            const float* minimizer, const float* scores,
                                            const float* weights, const float* left,
                                            const float* kink, const float* scale,
                                            const int* group, i64 num_groups,
                                            i64 left_step, i64 kink_step) {
  return {member(minimizer, strides, 0),
          member(scores, strides, 1),
          member(weights, strides, 2),
          member(left, strides, 3),
          member(kink, strides, 4),
          *member(scale, strides, 5),
          member(group, strides, 6),
          num_groups,
          left_step,
          kink_step};
}

__device__ __forceinline__ u64* start_table(u64* result, char* memory, i64 cells,
                                            i64 shared) {
  if (!shared) return result;
  u64* table = (u64*)memory;
  for (i64 cell = threadIdx.x; cell < cells; cell += blockDim.x) table[cell] = 0;
  __syncthreads();
  return table;
}

__device__ __forceinline__ void add_table(const u64* table, i64 cells, u64* result) {
  if (table == result) return;
  __syncthreads();
  for (i64 cell = threadIdx.x; cell < cells; cell += blockDim.x)
    if (table[cell] != 0) atomicAdd(result + cell, table[cell]);
}

// result [left, kink][group]
JBOOST_KERNEL __launch_bounds__(512)
    sum_kinks(Strides strides, const float* minimizer, const float* scores,
              const float* weights, const float* left, const float* kink,
              const float* scale, const int* group, u64* result, i64 rows,
              i64 num_groups, i64 left_step, i64 kink_step, i64 rows_per_block,
              i64 shared) {
  JBOOST_SHARED(memory);
  const Kinks kinks = read_kinks(strides, minimizer, scores, weights, left, kink, scale,
                                 group, num_groups, left_step, kink_step);
  result = member(result, strides, 7);
  u64* table = start_table(result, memory, 2 * num_groups, shared);
  const i64 begin = blockIdx.x * rows_per_block;
  const i64 end = least(rows, begin + rows_per_block);
  for (i64 row = begin + threadIdx.x; row < end; row += blockDim.x) {
    const int found = kinks.find_group(row);
    if (found < 0) continue;
    atomicAdd(table + found, kinks.multiple(row, kinks.left[row * left_step]));
    atomicAdd(table + num_groups + found,
              kinks.multiple(row, kinks.kink[row * kink_step]));
  }
  add_table(table, 2 * num_groups, result);
}

// Sums over the rows with a prefix of their group. prefixes [end][group + 1]: the
// digits above `shift + bits` that are known; result [end][group + 1][digit].
JBOOST_KERNEL __launch_bounds__(512)
    sum_kinks_by_digit(Strides strides, const float* minimizer, const float* scores,
                       const float* weights, const float* left, const float* kink,
                       const float* scale, const int* group, const u32* prefixes,
                       const u32* shift, u64* result, i64 rows, i64 num_groups,
                       i64 left_step, i64 kink_step, i64 rows_per_block, i64 shared,
                       i64 ends, i64 bits) {
  JBOOST_SHARED(memory);
  const Kinks kinks = read_kinks(strides, minimizer, scores, weights, left, kink, scale,
                                 group, num_groups, left_step, kink_step);
  prefixes = member(prefixes, strides, 7);
  result = member(result, strides, 9);
  const int below = (int)*member(shift, strides, 8);
  const i64 groups = num_groups + 1, cells = (ends * groups) << bits;
  u64* table = start_table(result, memory, cells, shared);
  const i64 begin = blockIdx.x * rows_per_block;
  const i64 last = least(rows, begin + rows_per_block);
  for (i64 row = begin + threadIdx.x; row < last; row += blockDim.x) {
    const int found = kinks.find_group(row);
    if (found < 0) continue;
    const u32 leading = kinks.key(row) >> below;
    const u64 multiple = kinks.multiple(row, kinks.kink[row * kink_step]);
    for (i64 end = 0; end < ends; ++end) {
      const i64 place = end * groups + found;
      if (leading >> bits != (prefixes[place] >> below) >> bits) continue;
      const u32 digit = leading & ((1u << bits) - 1);
      atomicAdd(table + ((place << bits) | digit), multiple);
    }
  }
  add_table(table, cells, result);
}
