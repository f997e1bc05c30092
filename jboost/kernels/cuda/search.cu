// SPDX-License-Identifier: Apache-2.0
// The best cut of each node and feature; see ../../trees/splitting.py for the formulas.
//
// One block looks at one feature of one node. Each thread owns bins that follow each
// other; cumulative sums pass from thread to thread. Equal gains go to the lowest
// threshold, then to missing values right.
#include "prelude.h"

struct Cut {
  float gain;
  int place;  // 2 * threshold + (missing values go left)

  __device__ bool is_better_than(const Cut& other) const {
    return gain > other.gain || (gain == other.gain && place < other.place);
  }
};

struct Score {
  float gradient_unit, weight_unit, l2;  // l2 in units of the curvature's integers

  __device__ float of(int gradient, int curvature) const {
    const float g = multiply((float)gradient, gradient_unit);
    const float weight = multiply(add((float)curvature, l2), weight_unit);
    return divide(multiply(g, g), weight > 0 ? weight : infinity());
  }
};

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

template <int kChannels>
__device__ __forceinline__ void search_feature(const int* bins_of, bool allowed,
                                               const float* unit, const float* limits,
                                               int least_count, int num_bins,
                                               float* gain, int* place, float* noise) {
  JBOOST_SHARED(memory);
  int* scratch = (int*)memory;  // [kChannels][warps], then [warps] twice
  const int num_warps = blockDim.x / 32;
  const int per_thread = (num_bins + blockDim.x - 1) / blockDim.x;
  const int first = threadIdx.x * per_thread;
  const int last = first + per_thread < num_bins ? first + per_thread : num_bins;
  int own[kChannels] = {}, sums[kChannels], total[kChannels];
  for (int bin = first; bin < last; ++bin)
    for (int c = 0; c < kChannels; ++c) own[c] += bins_of[bin * kChannels + c];
  scan_block<kChannels>(own, sums, total, scratch);

  const Score score = {unit[0], unit[1], limits[0]};
  const float least_weight = limits[1];
  const float parent = score.of(total[0], total[1]);
  Cut best = {-infinity(), 2 * first};
  for (int bin = first; bin < last; ++bin) {
    for (int c = 0; c < kChannels; ++c) sums[c] += bins_of[bin * kChannels + c];
    if (!allowed || bin == 0) continue;
    for (int missing_left = 0; missing_left < 2; ++missing_left) {
      int left[kChannels], right[kChannels];
      for (int c = 0; c < kChannels; ++c) {
        left[c] = sums[c] - (missing_left ? 0 : bins_of[c]);
        right[c] = total[c] - left[c];
      }
      const int lighter = left[1] < right[1] ? left[1] : right[1];
      const int fewer = left[kChannels - 1] < right[kChannels - 1]
                            ? left[kChannels - 1]
                            : right[kChannels - 1];
      if (!(multiply((float)lighter, unit[1]) >= least_weight)) continue;
      if (fewer < least_count) continue;
      const float both = add(score.of(left[0], left[1]), score.of(right[0], right[1]));
      const Cut cut = {multiply(add(both, -parent), 0.5f), 2 * bin + missing_left};
      if (cut.is_better_than(best)) best = cut;
    }
  }
  float* gains = (float*)(scratch + kChannels * num_warps);
  best = find_best_of_block(best, gains, (int*)(gains + num_warps));
  if (threadIdx.x != 0) return;
  *gain = best.gain;
  *place = best.place;
  if (noise != nullptr) *noise = parent;
}

#define JBOOST_SEARCH(name, kChannels)                                                 \
  JBOOST_KERNEL name(Strides strides, const int* histogram, const u8* allowed,         \
                     const float* unit, const float* limits, const int* least_count,   \
                     float* gain, int* place, float* noise, i64 features, i64 bins) {  \
    const i64 cell = blockIdx.x;                                                       \
    search_feature<kChannels>(                                                         \
        member(histogram, strides, 0) + cell * bins * kChannels,                       \
        member(allowed, strides, 1)[cell] != 0, member(unit, strides, 2),              \
        member(limits, strides, 3), *member(least_count, strides, 4), (int)bins,       \
        member(gain, strides, 5) + cell, member(place, strides, 6) + cell,             \
        cell % features == 0 ? member(noise, strides, 7) + cell / features : nullptr); \
  }

JBOOST_SEARCH(search_2, 2)
JBOOST_SEARCH(search_3, 3)
