// SPDX-License-Identifier: Apache-2.0
// The best set of categories of each node and categorical feature; see
// ../../trees/category_splits.py for the formulas.
//
// One block looks at one feature of one node: it shrinks the sums, sorts the categories
// by their means in shared memory, and searches the cuts of this order as search.cu
// does those of a numeric feature.
#include "search.cu"

constexpr float kStrongest = 1.2089258196146292e24f;  // 2^80

// One categorical feature of a node.
struct Levels {
  int num_codes;
  bool onehot;    // one category at a time
  float squares;  // sum of the squares of the rows' gradients
};

// Adds up `size` numbers of both arrays, a power of two, in the order of
// _sum_by_halves; the sums come first.
__device__ __forceinline__ void add_by_halves(float* one, float* other, int size) {
  for (int half = size / 2; half > 0; half /= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
      one[i] = add(one[i], one[i + half]);
      other[i] = add(other[i], other[i + half]);
    }
  }
  __syncthreads();
}

// Sorts different words, in number a power of two.
__device__ __forceinline__ void sort_words(u64* words, int size) {
  for (int run = 2; run <= size; run *= 2)
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const int other = i ^ step;
        if (other < i || (words[i] < words[other]) == ((i & run) == 0)) continue;
        const u64 word = words[i];
        words[i] = words[other], words[other] = word;
      }
    }
  __syncthreads();
}

// An integer of the order of the floats.
__device__ __forceinline__ u32 order_of(float value) {
  const u32 bits = __float_as_uint(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The strength s of shrinking, and s m; nothing varies where it is negative.
struct Shrinking {
  float strength, prior;

  __device__ Shrinking(float between, float largest, const int* known, int num_heavy,
                       int all_rows_weight, float squares) {
    const float rows_weight = fmaxf((float)all_rows_weight, 1);
    const float gradient = (float)known[0], weight = fmaxf((float)known[1], 1);
    const float by_chance =
        divide(multiply(squares, add((float)num_heavy, -1)), rows_weight);
    const float mean = divide(multiply(gradient, gradient), weight);
    const float excess = add(add(between, -fmaxf(mean, 0)), -fmaxf(by_chance, 0));
    const float spread = add(weight, -largest);
    strength = -1, prior = 0;
    if (!(excess > 0 && spread > 0)) return;
    strength = divide(multiply(squares, spread), multiply(rows_weight, excess));
    strength = fminf(strength, kStrongest);
    prior = fmaxf(divide(multiply(strength, gradient), weight), -kUnbounded);
  }

  __device__ bool varies() const { return strength >= 0; }

  __device__ int shrink(int gradient, int curvature) const {
    if (!varies()) return gradient;
    const float weight = (float)curvature;
    const float sum = multiply(weight, add((float)gradient, prior));
    return (int)rintf(divide(sum, weight > 0 ? add(weight, strength) : 1));
  }
};

template <int kChannels, bool kLimited>
__device__ __forceinline__ void search_sets(const Task& task, const Limits& limits,
                                            const Levels& levels, int size, int words,
                                            float* gain, int* place, u32* left_codes,
                                            u32* absent_codes) {
  if (!task.allowed) {
    for (int i = threadIdx.x; i < words; i += blockDim.x)
      left_codes[i] = absent_codes[i] = 0;
    if (threadIdx.x == 0) *gain = -infinity(), *place = 0;
    return;
  }
  JBOOST_SHARED(memory);
  u64* keys = (u64*)memory;  // [size]; before, two terms of sums
  float *terms = (float*)memory, *weights = terms + size;
  int* shrunk = (int*)(keys + size);  // [size]
  u32* sets = (u32*)(shrunk + size);  // [2][words]
  int* scratch = (int*)(sets + 2 * words);
  const int* bins_of = task.histogram;
  for (int i = threadIdx.x; i < 2 * words; i += blockDim.x) sets[i] = 0;

  // Of all codes: channels, then those that have weight, and those that have rows.
  constexpr int kHeavy = kChannels, kSeen = kChannels + 1;
  const auto is_seen = [&](int code) {
    const int* sums = bins_of + code * kChannels;
    const bool counted = kChannels == 3 && task.least_count > 0;
    return code > 0 && code < task.bins &&
           (sums[0] != 0 || sums[1] != 0 || (counted && sums[kChannels - 1] != 0));
  };
  int own[kChannels + 2] = {}, before[kChannels + 2], total[kChannels + 2];
  for (int code = threadIdx.x; code < size; code += blockDim.x) {
    terms[code] = weights[code] = 0;
    if (code >= task.bins) continue;
    const int* sums = bins_of + code * kChannels;
    for (int c = 0; c < kChannels; ++c) own[c] += sums[c];
    own[kSeen] += is_seen(code);
    if (code == 0 || sums[1] <= 0) continue;
    own[kHeavy] += 1;
    terms[code] = divide(multiply((float)sums[0], (float)sums[0]), (float)sums[1]);
  }
  scan_block<kChannels + 2>(own, before, total, scratch);
  const int known[2] = {total[0] - bins_of[0], total[1] - bins_of[1]};
  const float all_weight = fmaxf((float)known[1], 1);
  for (int code = threadIdx.x; code < task.bins; code += blockDim.x) {
    const float weight = (float)bins_of[code * kChannels + 1];
    if (code > 0)
      weights[code] = fmaxf(divide(multiply(weight, weight), all_weight), 0);
  }
  add_by_halves(terms, weights, size);
  Shrinking shrinking(terms[0], weights[0], known, total[kHeavy], total[1],
                      levels.squares);
  if (levels.onehot) shrinking.strength = -1;
  const bool varies = shrinking.varies(), each = levels.onehot || varies;
  __syncthreads();

  for (int code = threadIdx.x; code < size; code += blockDim.x) {
    float key = infinity();
    if (is_seen(code)) {
      const int* sums = bins_of + code * kChannels;
      shrunk[code] = shrinking.shrink(sums[0], sums[1]);
      const float weight = (float)(sums[1] > 1 ? sums[1] : 1);
      key = levels.onehot ? 0 : divide((float)shrunk[code], weight);
      if (key == 0) key = 0;  // -0 is no other key than 0
    }
    keys[code] = (u64)order_of(key) << 32 | (u32)code;
  }
  sort_words(keys, size);

  const int count = total[kSeen], num_rows = total[kChannels - 1];
  const int per_thread = (size + blockDim.x - 1) / blockDim.x;
  const int first = threadIdx.x * per_thread;
  const int last = first + per_thread < count ? first + per_thread : count;
  const auto sum_of = [&](int rank, int c) {
    const int code = (int)(u32)keys[rank];
    return c == 0 ? shrunk[code] : bins_of[code * kChannels + c];
  };
  int ranked[kChannels] = {}, sums[kChannels], all[kChannels];
  for (int rank = first; rank < last; ++rank)
    for (int c = 0; c < kChannels; ++c) ranked[c] += sum_of(rank, c);
  scan_block<kChannels>(ranked, sums, all, scratch);
  for (int c = 0; c < kChannels; ++c) all[c] += bins_of[c];
  const bool complete = !has_rows<kChannels>(bins_of) && !levels.onehot;
  const Draw draw(task.seed, task.feature, each ? count - complete : 1, num_rows,
                  task.rows_per_threshold);
  const float parent = Side::of<kLimited>(all, limits, nullptr).score;
  Cut best = {-infinity(), 2 * first};
  for (int rank = first; rank < last; ++rank) {
    for (int c = 0; c < kChannels; ++c)
      sums[c] = (levels.onehot ? 0 : sums[c]) + sum_of(rank, c);
    if (!(each || rank == count - 1)) continue;
    if (draw.wanted > 0 && !draw.takes(rank + 1)) continue;
    for (int missing_left = 0; missing_left < 2; ++missing_left) {
      int left[kChannels];
      for (int c = 0; c < kChannels; ++c)
        left[c] = sums[c] + (missing_left ? bins_of[c] : 0);
      const float found =
          find_gain<kChannels, kLimited>(left, all, parent, 0, task, limits);
      const Cut cut = {found, 2 * rank + missing_left};
      if (cut.is_better_than(best)) best = cut;
    }
  }
  float* gains = (float*)(scratch + (kChannels + 2) * (blockDim.x / 32));
  best = find_best_of_block(best, gains, (int*)(gains + blockDim.x / 32));
  for (int rank = threadIdx.x; rank < size; rank += blockDim.x) {
    const int code = (int)(u32)keys[rank], chosen = best.place >> 1;
    const u32 bit = 1u << (code % 32);
    if (rank < count && (levels.onehot ? rank == chosen : rank <= chosen))
      atomicOr(sets + code / 32, bit);
    if (rank >= count && code > 0 && code < task.bins && code <= levels.num_codes)
      atomicOr(sets + words + code / 32, bit);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < words; i += blockDim.x)
    left_codes[i] = sets[i], absent_codes[i] = sets[words + i];
  if (threadIdx.x == 0) *gain = best.gain, *place = best.place;
}

// The operands are those of JBOOST_SEARCH. features, num_codes [G]: the categorical
// features, and their numbers of codes; results [node][group].
#define JBOOST_SEARCH_CATEGORIES(name, kChannels, kLimited)                            \
  JBOOST_KERNEL name(                                                                  \
      Strides strides, const int* histogram, const u8* allowed, const float* unit,     \
      const float* numbers, const int* counts, const u32* seed, const int* level,      \
      const float* bounds, const float* squares, const int* features,                  \
      const int* num_codes, const int* max_onehot, float* gain, int* place, u32* left, \
      u32* absent, i64 num_features, i64 bins, i64 groups, i64 size, i64 words) {      \
    const i64 cell = blockIdx.x, node = cell / groups, group = cell % groups;          \
    const int feature = member(features, strides, 9)[group];                           \
    const i64 at = node * num_features + feature;                                      \
    const Seed own(member(seed, strides, 5),                                           \
                   -((1 << *member(level, strides, 6)) + (int)node));                  \
    const Limits limits =                                                              \
        make_limits(member(unit, strides, 2), member(numbers, strides, 3),             \
                    kLimited ? member(bounds, strides, 7) + 2 * node : nullptr);       \
    const Task task =                                                                  \
        make_task(member(histogram, strides, 0) + at * bins * kChannels,               \
                  member(allowed, strides, 1)[at] != 0, feature, (int)bins,            \
                  member(counts, strides, 4), member(numbers, strides, 3), own.words); \
    const int codes = member(num_codes, strides, 10)[group];                           \
    const Levels levels = {codes, codes <= *member(max_onehot, strides, 11),           \
                           member(squares, strides, 8)[node]};                         \
    search_sets<kChannels, kLimited>(                                                  \
        task, limits, levels, (int)size, (int)words, member(gain, strides, 12) + cell, \
        member(place, strides, 13) + cell, member(left, strides, 14) + cell * words,   \
        member(absent, strides, 15) + cell * words);                                   \
  }

JBOOST_SEARCH_CATEGORIES(search_categories_2, 2, false)
JBOOST_SEARCH_CATEGORIES(search_categories_3, 3, false)
JBOOST_SEARCH_CATEGORIES(search_categories_limited_2, 2, true)
JBOOST_SEARCH_CATEGORIES(search_categories_limited_3, 3, true)
