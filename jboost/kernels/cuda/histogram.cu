// SPDX-License-Identifier: Apache-2.0
// Sums of integer channels by node, feature and bin.
//
// A block sums a chunk of rows for a group of features and a range of nodes into a
// table in shared memory, with integer atomics, and adds the table to the result. Sums
// of integers do not depend on their order. Where not even one feature and node fit
// into the table, blocks add to the result directly. If `enabled` is 0, nothing is
// summed and the result stays 0: a flag on the GPU costs less than a branch on the
// host.
//
//   table [channel][node][feature][bin]       result [node][feature][bin][channel]
#include "prelude.h"

struct HistogramSizes {
  i64 rows, features, nodes, bins;
  i64 rows_per_block, features_per_block, nodes_per_block;
  bool shared;  // whether a block has a table
};

template <int kChannels>
struct FourRows {
  int node[4];  // within the block's range; negative: the row is left out
  int value[4][kChannels];

  // Reads the nodes of the rows from `first` on, and the channels of those that count.
  __device__ bool read(const int* node_of, const int* channels, i64 first, int count,
                       int first_node, int num_nodes) {
    read_four(node_of + first, count, -1, node);
    bool any = false;
    for (int k = 0; k < 4; ++k) {
      node[k] = node[k] < 0 ? -1 : node[k] - first_node;
      if (node[k] >= num_nodes) node[k] = -1;
      if (node[k] < 0) continue;
      any = true;
      for (int c = 0; c < kChannels; ++c)
        value[k][c] = channels[(first + k) * kChannels + c];
    }
    return any;
  }
};

template <class Code, int kChannels>
__device__ __forceinline__ void sum_histogram(const Code* codes, const int* channels,
                                              const int* node, int* result,
                                              const HistogramSizes& sizes) {
  JBOOST_SHARED(memory);
  int* table = (int*)memory;
  const i64 groups =
      (sizes.features + sizes.features_per_block - 1) / sizes.features_per_block;
  const i64 first_feature = (blockIdx.x % groups) * sizes.features_per_block;
  const i64 first_node = (blockIdx.x / groups) * sizes.nodes_per_block;
  const int num_features =
      (int)least(sizes.features - first_feature, sizes.features_per_block);
  const int num_nodes = (int)least(sizes.nodes - first_node, sizes.nodes_per_block);
  const int bins = (int)sizes.bins;
  const int plane = num_nodes * num_features * bins;
  if (sizes.shared) {
    for (int i = threadIdx.x; i < kChannels * plane; i += blockDim.x) table[i] = 0;
    __syncthreads();
  }
  const i64 begin = blockIdx.y * sizes.rows_per_block;
  const i64 end = least(sizes.rows, begin + sizes.rows_per_block);
  for (i64 first = begin + 4 * threadIdx.x; first < end; first += 4 * blockDim.x) {
    FourRows<kChannels> rows;
    const int count = (int)least(4, end - first);
    if (!rows.read(node, channels, first, count, (int)first_node, num_nodes)) continue;
#pragma unroll 4
    for (int f = 0; f < num_features; ++f) {
      int code[4];
      read_four(codes + (first_feature + f) * sizes.rows + first, count, 0, code);
      for (int k = 0; k < 4; ++k) {
        if (rows.node[k] < 0) continue;
        const int bin = code[k] < bins ? code[k] : bins - 1;
        if (sizes.shared) {
          int* cell = table + (rows.node[k] * num_features + f) * bins + bin;
          for (int c = 0; c < kChannels; ++c)
            atomicAdd(cell + c * plane, rows.value[k][c]);
        } else {
          const i64 at =
              (first_node + rows.node[k]) * sizes.features + first_feature + f;
          int* cell = result + (at * bins + bin) * kChannels;
          for (int c = 0; c < kChannels; ++c) atomicAdd(cell + c, rows.value[k][c]);
        }
      }
    }
  }
  if (!sizes.shared) return;
  __syncthreads();
  // Neighboring threads add to neighboring numbers.
  for (int i = threadIdx.x; i < kChannels * plane; i += blockDim.x) {
    const int channel = i % kChannels, cell = i / kChannels;
    const int value = table[channel * plane + cell];
    if (value == 0) continue;
    const int bin = cell % bins, f = cell / bins % num_features;
    const i64 at =
        (first_node + cell / bins / num_features) * sizes.features + first_feature + f;
    atomicAdd(result + (at * bins + bin) * kChannels + channel, value);
  }
}

#define JBOOST_HISTOGRAM(name, Code, kChannels)                                      \
  JBOOST_KERNEL __launch_bounds__(512) name(                                         \
      Strides strides, const Code* codes, const int* channels, const int* node,      \
      const int* enabled, int* result, i64 rows, i64 features, i64 nodes, i64 bins,  \
      i64 rows_per_block, i64 features_per_block, i64 nodes_per_block, i64 shared) { \
    if (*member(enabled, strides, 3) == 0) return;                                   \
    const HistogramSizes sizes = {                                                   \
        rows,           features,           nodes,           bins,                   \
        rows_per_block, features_per_block, nodes_per_block, shared != 0};           \
    sum_histogram<Code, kChannels>(                                                  \
        member(codes, strides, 0), member(channels, strides, 1),                     \
        member(node, strides, 2), member(result, strides, 4), sizes);                \
  }

JBOOST_HISTOGRAM(histogram_u8_2, u8, 2)
JBOOST_HISTOGRAM(histogram_u8_3, u8, 3)
JBOOST_HISTOGRAM(histogram_u16_2, u16, 2)
JBOOST_HISTOGRAM(histogram_u16_3, u16, 3)
