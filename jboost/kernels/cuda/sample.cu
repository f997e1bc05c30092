// SPDX-License-Identifier: Apache-2.0
// Samples the features that each node may be split by: of all features the tree's, of
// these the level's, of these the node's; see ../../trees/levels.py.
//
// One block samples for one node. Each thread owns some of the features.
#include "prelude.h"

// Counts the eligible features whose hash lies below the bound; all, where it is null.
__device__ __forceinline__ int count_features(const u8* eligible, int features,
                                              const u32* seed, const u32* bound,
                                              int* scratch) {
  int own = 0;
  for (int f = threadIdx.x; f < features; f += blockDim.x)
    own += eligible[f] != 0 && (bound == nullptr || hash_word(f, seed) < *bound);
  __syncthreads();
  if (threadIdx.x == 0) *scratch = 0;
  __syncthreads();
  if (own != 0) atomicAdd(scratch, own);
  __syncthreads();
  return *scratch;
}

// allowed [M, F]; seed [2], of the tree; fractions [3].
JBOOST_KERNEL sample_features(Strides strides, const u32* seed_of_tree,
                              const int* level_of_tree, const float* fractions,
                              u8* allowed, i64 num_features) {
  JBOOST_SHARED(memory);
  int* scratch = (int*)memory;
  const int features = (int)num_features, level = *member(level_of_tree, strides, 1);
  seed_of_tree = member(seed_of_tree, strides, 0);
  fractions = member(fractions, strides, 2);
  allowed = member(allowed, strides, 3) + blockIdx.x * num_features;
  const int uses[3] = {0, 1 + level, 64 + (1 << level) + (int)blockIdx.x};
  for (int f = threadIdx.x; f < features; f += blockDim.x) allowed[f] = 1;
  for (int stage = 0; stage < 3; ++stage) {
    if (!(fractions[stage] < 1)) continue;
    const Seed own(seed_of_tree, uses[stage]);
    const u32* seed = own.words;
    const int number = count_features(allowed, features, seed, nullptr, scratch);
    int wanted = (int)rintf(multiply(fractions[stage], (float)number));
    wanted = wanted < 1 ? 1 : wanted;
    wanted = wanted > number ? number : wanted;
    // The largest bound with fewer hashes below it is the last one that is wanted.
    u32 bound = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const u32 next = bound + (1u << bit);
      if (count_features(allowed, features, seed, &next, scratch) < wanted)
        bound = next;
    }
    for (int f = threadIdx.x; f < features; f += blockDim.x)
      if (hash_word(f, seed) > bound) allowed[f] = 0;
  }
}
