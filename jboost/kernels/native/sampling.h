// SPDX-License-Identifier: Apache-2.0
// Random subsets without replacement: the k entries of least hash.
#ifndef JBOOST_SAMPLING_H_
#define JBOOST_SAMPLING_H_

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace jboost {

constexpr int kDigits = 2048;  // 11 bits of a hash at a time

struct SamplingLoops {
  // Counts the eligible entries by the 11 bits above `shift`, of those hashes whose
  // bits above them equal `prefix`.
  void (*count_digits)(const uint32_t* seed, const uint8_t* eligible, int64_t first,
                       int64_t count, int shift, uint32_t prefix, int32_t* counts);
  // Keeps eligible entries with hash <= bound.
  void (*keep)(const uint32_t* seed, const uint8_t* eligible, int64_t first,
               int64_t count, uint32_t bound, uint8_t* chosen);
};

JBOOST_DECLARE_LOOPS(SamplingLoops)

// Chooses max(1, round(fraction * number)) of the eligible entries; all of them where
// fraction >= 1. See jboost.numerics.sampling.sample.
void Sample(const Pool& pool, const uint32_t* seed, const uint8_t* eligible,
            int64_t count, float fraction, uint8_t* chosen);

// Masks [slots, F] of a level: some of the tree's features, of those the level's, of
// those the node's; see jboost.trees.growing.
void SampleFeatures(const uint32_t* seed, int32_t level, const float fractions[3],
                    int64_t num_slots, int64_t num_features, uint8_t* masks);

}  // namespace jboost

#endif  // JBOOST_SAMPLING_H_
