// SPDX-License-Identifier: Apache-2.0
// The best cut of each node and feature; see ../../trees/splitting.py for the formulas.
//
// One block looks at one feature of one node. Each thread owns bins that follow each
// other; cumulative sums pass from thread to thread. Equal gains go to the lowest
// threshold, then to missing values right.
#ifndef JBOOST_SEARCH_CU_
#define JBOOST_SEARCH_CU_
#include "prelude.h"

constexpr float kUnbounded = 3.402823466e38f;  // bounds of values without limits

struct Cut {
  float gain;
  int place;  // 2 * threshold + (missing values go left)

  __device__ bool is_better_than(const Cut& other) const {
    return gain > other.gain || (gain == other.gain && place < other.place);
  }
};

// The limits of leaf values below a node; without limits only units and l2 count.
struct Limits {
  float gradient_unit, weight_unit, l2;  // l2 in units of the curvature's integers
  float l1, low, high;
};

// One side of a cut.
struct Side {
  float score, value;  // the value only where leaf values are limited

  template <bool kLimited>
  __device__ static Side of(const int* sums, const Limits& limits, float* size) {
    const float g = multiply((float)sums[0], limits.gradient_unit);
    const float weight = multiply(add((float)sums[1], limits.l2), limits.weight_unit);
    if (!kLimited) {
      const float score = divide(multiply(g, g), weight > 0 ? weight : infinity());
      if (size != nullptr) *size = score;
      return {score, 0};
    }
    const bool usable = weight > 0 && weight < infinity();
    const float divisor = usable ? weight : infinity(), factor = usable ? weight : 0;
    const float shrunk = fmaxf(add(fabsf(g), -limits.l1), 0);
    const float free = divide(g > 0 ? -shrunk : shrunk, divisor);
    const float value = fminf(fmaxf(free, limits.low), limits.high);
    const float sign = value > 0 ? 1 : value < 0 ? -1 : 0;
    const float pulled = divide(-add(g, multiply(limits.l1, sign)), divisor);
    if (size != nullptr) {
      const float longer = fmaxf(fabsf(pulled), fabsf(value));
      *size = multiply(multiply(factor, fabsf(value)), longer);
    }
    const float both = add(multiply(2, pulled), -value);
    return {fmaxf(multiply(multiply(factor, value), both), -kUnbounded), value};
  }
};

// The cuts of a feature that are tried; see draw_thresholds of
// ../../trees/splitting.py.
struct Draw {
  const u32* seed;
  u32 feature, cuts, wanted;  // wanted: 0 for all

  __device__ Draw(const u32* seed_of_node, int feature_of_node, int num_cuts,
                  int num_rows, int rows_per_threshold)
      : seed(seed_of_node), feature(feature_of_node), cuts(num_cuts), wanted(0) {
    const int per = rows_per_threshold;
    if (per <= 0) return;
    const int number = (num_rows + (per >> 1)) / per;
    if (number < num_cuts) wanted = number > 1 ? number : 1;
    if (num_cuts <= 1) wanted = 0;
  }

  // `rank`: of the cut's bin among those with rows, from 1.
  __device__ bool takes(u32 rank) const {
    if (rank > cuts) return false;
    const u32 number = (rank * wanted - 1) / cuts;
    const u32 first = number * cuts / wanted, end = (number + 1) * cuts / wanted;
    const u32 word = hash_word(feature * 65536 + number, seed);
    return rank == first + (((word >> 16) * (end - first)) >> 16) + 1;
  }
};

template <int kChannels>
__device__ __forceinline__ bool has_rows(const int* sums) {
  int bits = 0;
  for (int c = 0; c < kChannels; ++c) bits |= sums[c];
  return bits != 0;
}

// Sums [C] of the bins before those of this thread, and of all bins.
template <int kChannels>
__device__ __forceinline__ void scan_block(const int* own, int* before, int* total,
                                           int* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_warps = blockDim.x / 32;
  for (int c = 0; c < kChannels; ++c) {
    int sum = own[c];
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(JBOOST_WARP, sum, step);
      if (lane >= step) sum += other;
    }
    before[c] = sum - own[c];
    if (lane == 31) scratch[c * num_warps + warp] = sum;
  }
  __syncthreads();
  for (int c = 0; c < kChannels; ++c) {
    total[c] = 0;
    for (int w = 0; w < num_warps; ++w) {
      if (w == warp) before[c] += total[c];
      total[c] += scratch[c * num_warps + w];
    }
  }
}

__device__ __forceinline__ Cut find_best_of_block(Cut best, float* gains, int* places) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 16; step > 0; step /= 2) {
    const Cut other = {__shfl_down_sync(JBOOST_WARP, best.gain, step),
                       __shfl_down_sync(JBOOST_WARP, best.place, step)};
    if (lane + step < 32 && other.is_better_than(best)) best = other;
  }
  if (lane == 0) gains[warp] = best.gain, places[warp] = best.place;
  __syncthreads();
  for (int w = 0; w < (int)blockDim.x / 32; ++w) {
    const Cut other = {gains[w], places[w]};
    if (other.is_better_than(best)) best = other;
  }
  return best;
}

// What the block of a node's feature reads.
struct Task {
  const int* histogram;  // [bin][channel]
  bool allowed;
  int feature, bins, least_count, rows_per_threshold;
  float least_weight;
  const u32* seed;
};

__device__ __forceinline__ Task make_task(const int* histogram, bool allowed,
                                          int feature, int bins, const int* counts,
                                          const float* numbers, const u32* seed) {
  return {histogram, allowed, feature, bins, counts[0], counts[1], numbers[1], seed};
}

// Without `bounds`, leaf values are not limited.
__device__ __forceinline__ Limits make_limits(const float* unit, const float* numbers,
                                              const float* bounds) {
  if (bounds == nullptr) return {unit[0], unit[1], numbers[0], 0, 0, 0};
  return {unit[0], unit[1], numbers[0], numbers[2], bounds[0], bounds[1]};
}

// The gain of a cut; -infinity where it is not admissible. `monotone` is 1 where the
// right value must not be the lower one, -1 where it must not be the higher one.
template <int kChannels, bool kLimited>
__device__ __forceinline__ float find_gain(const int* left, const int* total,
                                           float parent, int monotone, const Task& task,
                                           const Limits& limits) {
  int right[kChannels];
  for (int c = 0; c < kChannels; ++c) right[c] = total[c] - left[c];
  const int lighter = left[1] < right[1] ? left[1] : right[1];
  const int fewer = left[kChannels - 1] < right[kChannels - 1] ? left[kChannels - 1]
                                                               : right[kChannels - 1];
  if (!(multiply((float)lighter, limits.weight_unit) >= task.least_weight))
    return -infinity();
  if (fewer < task.least_count) return -infinity();
  const Side low = Side::of<kLimited>(left, limits, nullptr);
  const Side high = Side::of<kLimited>(right, limits, nullptr);
  if (kLimited && monotone > 0 && low.value > high.value) return -infinity();
  if (kLimited && monotone < 0 && low.value < high.value) return -infinity();
  return multiply(add(add(low.score, high.score), -parent), 0.5f);
}

template <int kChannels, bool kLimited>
__device__ __forceinline__ void search_feature(const Task& task, const Limits& limits,
                                               int monotone, float* gain, int* place,
                                               float* noise) {
  JBOOST_SHARED(memory);
  int* scratch = (int*)memory;  // [kChannels + 1][warps], then [warps] twice
  const int* bins_of = task.histogram;
  const int num_bins = task.bins, num_warps = blockDim.x / 32;
  const int per_thread = (num_bins + blockDim.x - 1) / blockDim.x;
  const int first = threadIdx.x * per_thread;
  const int last = first + per_thread < num_bins ? first + per_thread : num_bins;
  // The last one counts the bins of values that have rows.
  int own[kChannels + 1] = {}, sums[kChannels + 1], total[kChannels + 1];
  for (int bin = first; bin < last; ++bin) {
    for (int c = 0; c < kChannels; ++c) own[c] += bins_of[bin * kChannels + c];
    own[kChannels] += bin > 0 && has_rows<kChannels>(bins_of + bin * kChannels);
  }
  scan_block<kChannels + 1>(own, sums, total, scratch);
  const Draw draw(task.seed, task.feature,
                  total[kChannels] - !has_rows<kChannels>(bins_of),
                  total[kChannels - 1], task.rows_per_threshold);

  float size;
  const float parent = Side::of<kLimited>(total, limits, &size).score;
  Cut best = {-infinity(), 2 * first};
  for (int bin = first; bin < last; ++bin) {
    for (int c = 0; c < kChannels; ++c) sums[c] += bins_of[bin * kChannels + c];
    if (!task.allowed || bin == 0) continue;
    const bool here = has_rows<kChannels>(bins_of + bin * kChannels);
    sums[kChannels] += here;
    if (draw.wanted > 0 && !(here && draw.takes(sums[kChannels]))) continue;
    // Above the last threshold are no values, only missing ones.
    const int sign = bin < num_bins - 1 ? monotone : 0;
    for (int missing_left = 0; missing_left < 2; ++missing_left) {
      int left[kChannels];
      for (int c = 0; c < kChannels; ++c)
        left[c] = sums[c] - (missing_left ? 0 : bins_of[c]);
      const float found =
          find_gain<kChannels, kLimited>(left, total, parent, sign, task, limits);
      const Cut cut = {found, 2 * bin + missing_left};
      if (cut.is_better_than(best)) best = cut;
    }
  }
  float* gains = (float*)(scratch + (kChannels + 1) * num_warps);
  best = find_best_of_block(best, gains, (int*)(gains + num_warps));
  if (threadIdx.x != 0) return;
  *gain = best.gain;
  *place = best.place;
  if (noise != nullptr) *noise = size;
}

// unit [2]; numbers: l2, least weight of a child, l1; counts: least number of rows of a
// child, and rows per threshold; seed [2], of the tree.
#define JBOOST_SEARCH(name, kChannels, kLimited)                                 \
  JBOOST_KERNEL name(Strides strides, const int* histogram, const u8* allowed,   \
                     const float* unit, const float* numbers, const int* counts, \
                     const u32* seed, const int* level, const float* bounds,     \
                     const int* monotone, float* gain, int* place, float* noise, \
                     i64 features, i64 bins) {                                   \
    const i64 cell = blockIdx.x, node = cell / features;                         \
    const int feature = (int)(cell % features);                                  \
    numbers = member(numbers, strides, 3);                                       \
    /* Negative: the sampling of features derives seeds from numbers >= 0. */    \
    const Seed own(member(seed, strides, 5),                                     \
                   -((1 << *member(level, strides, 6)) + (int)node));            \
    const Limits limits =                                                        \
        make_limits(member(unit, strides, 2), numbers,                           \
                    kLimited ? member(bounds, strides, 7) + 2 * node : nullptr); \
    const Task task =                                                            \
        make_task(member(histogram, strides, 0) + cell * bins * kChannels,       \
                  member(allowed, strides, 1)[cell] != 0, feature, (int)bins,    \
                  member(counts, strides, 4), numbers, own.words);               \
    search_feature<kChannels, kLimited>(                                         \
        task, limits, kLimited ? member(monotone, strides, 8)[feature] : 0,      \
        member(gain, strides, 9) + cell, member(place, strides, 10) + cell,      \
        feature == 0 ? member(noise, strides, 11) + node : nullptr);             \
  }

JBOOST_SEARCH(search_2, 2, false)
JBOOST_SEARCH(search_3, 3, false)
JBOOST_SEARCH(search_limited_2, 2, true)
JBOOST_SEARCH(search_limited_3, 3, true)

#endif  // JBOOST_SEARCH_CU_
