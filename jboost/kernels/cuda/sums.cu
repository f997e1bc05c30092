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
