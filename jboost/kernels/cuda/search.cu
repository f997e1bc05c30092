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

template <int kChannels>
__device__ __forceinline__ void search_feature(const int* bins_of, bool allowed,
                                               const float* unit, const float* limits,
                                               const int* counts, const u32* seed,
                                               int feature, int num_bins, float* gain,
                                               int* place, float* noise) {
  JBOOST_SHARED(memory);
  int* scratch = (int*)memory;  // [kChannels + 1][warps], then [warps] twice
  const int num_warps = blockDim.x / 32;
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
  const Draw draw(seed, feature, total[kChannels] - !has_rows<kChannels>(bins_of),
                  total[kChannels - 1], counts[1]);

  const Score score = {unit[0], unit[1], limits[0]};
  const float least_weight = limits[1];
  const float parent = score.of(total[0], total[1]);
  Cut best = {-infinity(), 2 * first};
  for (int bin = first; bin < last; ++bin) {
    for (int c = 0; c < kChannels; ++c) sums[c] += bins_of[bin * kChannels + c];
    if (!allowed || bin == 0) continue;
    const bool here = has_rows<kChannels>(bins_of + bin * kChannels);
    sums[kChannels] += here;
    if (draw.wanted > 0 && !(here && draw.takes(sums[kChannels]))) continue;
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
      if (fewer < counts[0]) continue;
      const float both = add(score.of(left[0], left[1]), score.of(right[0], right[1]));
      const Cut cut = {multiply(add(both, -parent), 0.5f), 2 * bin + missing_left};
      if (cut.is_better_than(best)) best = cut;
    }
  }
  float* gains = (float*)(scratch + (kChannels + 1) * num_warps);
  best = find_best_of_block(best, gains, (int*)(gains + num_warps));
  if (threadIdx.x != 0) return;
  *gain = best.gain;
  *place = best.place;
  if (noise != nullptr) *noise = parent;
}

#define JBOOST_SEARCH(name, kChannels)                                           \
  JBOOST_KERNEL name(Strides strides, const int* histogram, const u8* allowed,   \
                     const float* unit, const float* limits, const int* counts,  \
                     const u32* seeds, float* gain, int* place, float* noise,    \
                     i64 features, i64 bins) {                                   \
    const i64 cell = blockIdx.x, node = cell / features;                         \
    search_feature<kChannels>(                                                   \
        member(histogram, strides, 0) + cell * bins * kChannels,                 \
        member(allowed, strides, 1)[cell] != 0, member(unit, strides, 2),        \
        member(limits, strides, 3), member(counts, strides, 4),                  \
        member(seeds, strides, 5) + 2 * node, (int)(cell % features), (int)bins, \
        member(gain, strides, 6) + cell, member(place, strides, 7) + cell,       \
        cell % features == 0 ? member(noise, strides, 8) + node : nullptr);      \
  }

JBOOST_SEARCH(search_2, 2)
JBOOST_SEARCH(search_3, 3)
