// SPDX-License-Identifier: Apache-2.0
// The seeded hash of jboost.numerics.random.hash_words. Everything here has
// internal linkage, because the loops of every instruction set include it.
#ifndef JBOOST_HASH_H_
#define JBOOST_HASH_H_

#include <cstdint>

namespace jboost {
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

// jboost.numerics.random.derive: a seed of its own for each use of a seed.
inline Seed Derive(const Seed& seed, uint32_t use) {
  return {Hash(2 * use, seed), Hash(2 * use + 1, seed)};
}

}  // namespace
}  // namespace jboost

#endif  // JBOOST_HASH_H_
