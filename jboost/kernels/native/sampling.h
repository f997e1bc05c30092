// SPDX-License-Identifier: Apache-2.0
// Random subsets without replacement: the k entries with the least hashes.
#ifndef JBOOST_SAMPLING_H_
#define JBOOST_SAMPLING_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

// The seeded hash of jboost.numerics.random.hash_words, with internal linkage, because
// the loops of every instruction set include it.
namespace {

struct Seed {
  uint32_t first, second;
};

inline uint32_t Mix(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x7FEB352Du;
  word = (word ^ (word >> 15)) * 0x846CA68Bu;
  return word ^ (word >> 16);
}

inline uint32_t Hash(uint32_t word, const Seed& seed) {
  return Mix(Mix(word + seed.first) + seed.second);
}

// jboost.numerics.random.derive_seeds: a seed of its own for each use of a seed.
inline Seed Derive(const Seed& seed, uint32_t use) {
  return {Hash(2 * use, seed), Hash(2 * use + 1, seed)};
}

}  // namespace
constexpr int kDigits = 2048;  // 11 bits of a hash at a time

struct SamplingLoops {
  // Counts eligible entries by the 11 bits of their hashes from bit `shift` on, if the
  // bits above these equal `prefix`.
  void (*count_digits)(const uint32_t* seed, const uint8_t* eligible, int64_t first,
                       int64_t count, int shift, uint32_t prefix, int32_t* counts);
  // Chooses the eligible entries with hash <= bound.
  void (*keep)(const uint32_t* seed, const uint8_t* eligible, int64_t first,
               int64_t count, uint32_t bound, uint8_t* chosen);
};

JBOOST_DECLARE_LOOPS(SamplingLoops)

// Chooses max(1, round(fraction * number)) of the eligible entries, or all of them if
// fraction >= 1. See jboost.numerics.random.sample.
void Sample(const Pool& pool, const uint32_t* seed, const uint8_t* eligible,
            int64_t count, float fraction, uint8_t* chosen);

// Writes the masks [slots, F] of a level: features are sampled for the tree, from these
// for the level, and from these for each node; see jboost.trees.grow.
void SampleFeatures(const uint32_t* seed, int32_t level, const float fractions[3],
                    int64_t num_slots, int64_t num_features, uint8_t* masks);

}  // namespace jboost

#endif  // JBOOST_SAMPLING_H_
