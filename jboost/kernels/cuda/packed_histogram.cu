// SPDX-License-Identifier: Apache-2.0
// Sums of integer channels by node, feature and bin, of codes of 8 bits packed by row.
//
// Eight threads look at the 32 codes of a row, four at a time, and four rows at once
// share a warp. Column c of the table is in memory bank c. At any moment the rows of a
// warp are at different codes of their words, so that its 32 threads add to 32
// different columns: no two of them wait for the same bank.
//
//   codes [block][row][word]     table [channel][bin][column]
//   result [node][group][channel][bin][column], of at most 32 `columns`
//
// A group is as many blocks of codes as fill 32 columns. Where it has fewer, several
// rows are added side by side, and the copies are joined at the end.
#include "prelude.h"

constexpr int kColumns = 32, kRowsInFlight = 8;  // rows: of each thread

struct Packed {
  const u32* codes;
  const int *channels, *rows, *starts;
  i64 num_rows;
  int blocks, words, nodes, bins;
  // Whether `rows` are the rows by node, those of node m from starts[m] on. Otherwise
  // they are the nodes of all rows, and only node 0 counts.
  bool listed;

  __device__ int count() const { return listed ? starts[nodes] : (int)num_rows; }

  // Returns the node that the row at a place of the list is in.
  __device__ int find_node(int place) const {
    int low = 0, high = nodes - 1;
    while (listed && low < high) {
      const int middle = (low + high) / 2;
      if (starts[middle + 1] > place)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

template <int kChannels>
struct alignas(kChannels == 2 ? 8 : 4) Channels {
  int of[kChannels];
};

// Adds the rows at places [begin, end) of the list, all of one node, to the table.
template <int kChannels>
__device__ __forceinline__ void add_rows(const Packed& packed, int group, int* table,
                                         int begin, int end) {
  const int slots = 8 / packed.words;  // blocks of codes in a full group
  const int left = packed.blocks - group * slots, own = left < slots ? left : slots;
  const int copies = slots / own;
  const int lane = threadIdx.x % 32, word = lane % 8, turn = lane / 8;
  const int slot = word / packed.words, plane = packed.bins * kColumns;
  const u32* codes =
      packed.codes +
      (i64)(group * slots + slot % own) * packed.num_rows * packed.words +
      word % packed.words;
  int* columns[4];
  for (int k = 0; k < 4; ++k) columns[k] = table + 4 * word + ((k + turn) & 3);
  const int first = turn * copies + slot / own, step = 4 * copies;
  const int warp = threadIdx.x / 32, stride = step * kRowsInFlight;
  for (int at = begin + warp * stride; at < end; at += blockDim.x / 32 * stride) {
    u32 four[kRowsInFlight];
    Channels<kChannels> values[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int place = at + i * step + first;
      const int known = place < end ? packed.rows[place] : -1;
      const int row = packed.listed ? known : place;
      const bool counts = packed.listed ? known >= 0 : known == 0;
      four[i] = counts ? codes[(i64)row * packed.words] : 0;
      for (int c = 0; c < kChannels; ++c) values[i].of[c] = 0;
      if (counts) values[i] = ((const Channels<kChannels>*)packed.channels)[row];
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const u32 turned = __funnelshift_r(four[i], four[i], 8 * turn);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        int* cell = columns[k] + (turned >> (8 * k) & 255) * kColumns;
        for (int c = 0; c < kChannels; ++c)
          atomicAdd(cell + c * plane, values[i].of[c]);
      }
    }
  }
}

template <int kChannels>
__device__ __forceinline__ void sum_packed(const Packed& packed, int columns,
                                           int* result) {
  JBOOST_SHARED(memory);
  int* table = (int*)memory;
  const int group = blockIdx.y, cells = kChannels * packed.bins * kColumns;
  const int slots = 8 / packed.words, left = packed.blocks - group * slots;
  const int width = 4 * packed.words * (left < slots ? left : slots);
  const int count = packed.count();
  const int share = (count + (int)gridDim.x - 1) / (int)gridDim.x;
  int begin = blockIdx.x * share;
  const int end = (int)least(count, (i64)begin + share);
  if (begin >= end) return;
  int node = packed.find_node(begin);
  while (begin < end) {
    while (packed.listed && packed.starts[node + 1] <= begin) ++node;
    const int stop = packed.listed ? (int)least(end, packed.starts[node + 1]) : end;
    for (int i = threadIdx.x; i < cells; i += blockDim.x) table[i] = 0;
    __syncthreads();
    add_rows<kChannels>(packed, group, table, begin, stop);
    __syncthreads();
    int* out = result + ((i64)node * gridDim.y + group) * (cells / kColumns * columns);
    for (int i = threadIdx.x; i < cells; i += blockDim.x) {
      if (i % kColumns >= width) continue;
      int sum = 0;
      for (int copy = 0; copy < kColumns; copy += width) sum += table[i + copy];
      if (sum != 0) atomicAdd(out + i / kColumns * columns + i % kColumns, sum);
    }
    __syncthreads();
    begin = stop;
  }
}

#define JBOOST_PACKED_HISTOGRAM(kChannels)                                          \
  JBOOST_KERNEL __launch_bounds__(1024) packed_histogram_##kChannels(               \
      Strides strides, const u32* codes, const int* channels, const int* rows,      \
      const int* starts, const int* enabled, int* result, i64 num_rows, i64 blocks, \
      i64 words, i64 nodes, i64 bins, i64 columns, i64 listed) {                    \
    if (*member(enabled, strides, 4) == 0) return;                                  \
    const Packed packed = {member(codes, strides, 0),                               \
                           member(channels, strides, 1),                            \
                           member(rows, strides, 2),                                \
                           member(starts, strides, 3),                              \
                           num_rows,                                                \
                           (int)blocks,                                             \
                           (int)words,                                              \
                           (int)nodes,                                              \
                           (int)bins,                                               \
                           listed != 0};                                            \
    sum_packed<kChannels>(packed, (int)columns, member(result, strides, 5));        \
  }

JBOOST_PACKED_HISTOGRAM(2)
JBOOST_PACKED_HISTOGRAM(3)

// Counts the rows of each node: counts [node]. Other nodes than [0, nodes) do not
// count.
JBOOST_KERNEL __launch_bounds__(512)
    count_nodes(Strides strides, const int* node, const int* enabled, int* counts,
                i64 rows, i64 nodes, i64 rows_per_block) {
  if (*member(enabled, strides, 1) == 0) return;
  JBOOST_SHARED(memory);
  int* table = (int*)memory;
  node = member(node, strides, 0);
  counts = member(counts, strides, 2);
  for (int i = threadIdx.x; i < nodes; i += blockDim.x) table[i] = 0;
  __syncthreads();
  const i64 begin = blockIdx.x * rows_per_block;
  const i64 end = least(rows, begin + rows_per_block);
  for (i64 first = begin + 4 * threadIdx.x; first < end; first += 4 * blockDim.x) {
    int four[4];
    read_four(node + first, (int)least(4, end - first), -1, four);
    for (int k = 0; k < 4; ++k)
      if (four[k] >= 0 && four[k] < nodes) atomicAdd(table + four[k], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < nodes; i += blockDim.x)
    if (table[i] != 0) atomicAdd(counts + i, table[i]);
}

// Lists the rows by node: those of node m from starts[m] on, in any order. `taken`
// [node] counts those that are listed.
JBOOST_KERNEL __launch_bounds__(512)
    list_nodes(Strides strides, const int* node, const int* starts, const int* enabled,
               int* list, int* taken, i64 rows, i64 nodes, i64 rows_per_block) {
  if (*member(enabled, strides, 2) == 0) return;
  JBOOST_SHARED(memory);
  int* counts = (int*)memory;
  int* places = counts + nodes;
  node = member(node, strides, 0);
  starts = member(starts, strides, 1);
  list = member(list, strides, 3);
  taken = member(taken, strides, 4);
  const i64 last = least(rows, (blockIdx.x + (i64)1) * rows_per_block);
  for (i64 begin = blockIdx.x * rows_per_block; begin < last; begin += 8 * blockDim.x) {
    for (int i = threadIdx.x; i < nodes; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    int nodes_of[8], order[8];
    for (int half = 0; half < 2; ++half) {
      const i64 first = begin + 4 * (half * blockDim.x + threadIdx.x);
      const i64 count = last - first;
      read_four(node + first, count < 0 ? 0 : (int)least(4, count), -1,
                nodes_of + 4 * half);
    }
    for (int k = 0; k < 8; ++k) {
      if (nodes_of[k] >= nodes) nodes_of[k] = -1;
      if (nodes_of[k] >= 0) order[k] = atomicAdd(counts + nodes_of[k], 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < nodes; i += blockDim.x)
      if (counts[i] != 0) places[i] = starts[i] + atomicAdd(taken + i, counts[i]);
    __syncthreads();
    for (int k = 0; k < 8; ++k) {
      const i64 row = begin + 4 * (k / 4 * blockDim.x + threadIdx.x) + k % 4;
      if (nodes_of[k] >= 0) list[places[nodes_of[k]] + order[k]] = (int)row;
    }
    __syncthreads();
  }
}
