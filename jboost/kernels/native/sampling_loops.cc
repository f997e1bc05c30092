// SPDX-License-Identifier: Apache-2.0
#include "sampling.h"

namespace jboost::JBOOST_ISA {
namespace {

constexpr int kBlock = 256;

void HashBlock(const Seed& seed, uint32_t first, int count, uint32_t* hashes) {
  for (int i = 0; i < count; ++i) hashes[i] = Hash(first + i, seed);
}

void CountDigits(const uint32_t* seed, const uint8_t* eligible, int64_t first,
                 int64_t count, int shift, uint32_t prefix, int32_t* counts) {
  Seed words{seed[0], seed[1]};
  uint32_t hashes[kBlock];
  // The highest digit has no bits above it, and a shift by 32 would be undefined.
  int above = shift + 11;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    int block = static_cast<int>(count - begin < kBlock ? count - begin : kBlock);
    HashBlock(words, static_cast<uint32_t>(first + begin), block, hashes);
    for (int i = 0; i < block; ++i) {
      uint32_t high = above < 32 ? hashes[i] >> above : 0;
      bool inside = eligible[begin + i] && high == prefix;
      counts[(hashes[i] >> shift) & (kDigits - 1)] += inside;
    }
  }
}

void Keep(const uint32_t* seed, const uint8_t* eligible, int64_t first, int64_t count,
          uint32_t bound, uint8_t* chosen) {
  Seed words{seed[0], seed[1]};
  for (int64_t i = 0; i < count; ++i) {
    uint32_t hash = Hash(static_cast<uint32_t>(first + i), words);
    chosen[i] = static_cast<uint8_t>((eligible[i] != 0) & (hash <= bound));
  }
}

}  // namespace

const SamplingLoops kSamplingLoops = {CountDigits, Keep};

}  // namespace jboost::JBOOST_ISA
