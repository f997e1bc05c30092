// SPDX-License-Identifier: Apache-2.0
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace jboost {
namespace {

constexpr int64_t kPiece = 65536;       // rows of a task
constexpr int kShifts[] = {21, 10, 0};  // digits from the top: 11, 11 and 10 bits

}  // namespace

void Sample(const Pool& pool, const uint32_t* seed, const uint8_t* eligible,
            int64_t count, float fraction, uint8_t* chosen) {
  int64_t number = 0;
  for (int64_t i = 0; i < count; ++i) number += eligible[i] != 0;
  if (!(fraction < 1.0f) || number == 0) {
    std::memmove(chosen, eligible, count);
    return;
  }
  // Rounds half to even in float32, as XLA does.
  float share = std::nearbyint(fraction * static_cast<float>(number));
  int64_t wanted = std::clamp<int64_t>(static_cast<int64_t>(share), 1, number);
  const SamplingLoops& loops = JBOOST_CHOOSE(SamplingLoops);
  int64_t pieces = count < kSerial ? 1 : (count + kPiece - 1) / kPiece;
  auto piece_size = [&](int64_t piece) {
    return pieces == 1 ? count : std::min(kPiece, count - piece * kPiece);
  };
  // Finds the k-th least hash digit by digit, from counts of each value of the digit.
  std::vector<int32_t> counts(pieces * kDigits);
  uint32_t bound = 0;
  for (int shift : kShifts) {
    std::fill(counts.begin(), counts.end(), 0);
    int bits = shift == 0 ? 10 : 11;
    // The last digit has 10 bits; the counts include one more, which is known already.
    uint32_t prefix = shift == 21 ? 0 : bound >> (shift + 11);
    ParallelFor(pool, pieces, [&](int64_t piece) {
      int64_t first = piece * kPiece;
      loops.count_digits(seed, eligible + first, first, piece_size(piece), shift,
                         prefix, counts.data() + piece * kDigits);
    });
    uint32_t low = shift == 0 ? (bound & 1024u) : 0;
    for (uint32_t digit = low; digit < low + (1u << bits); ++digit) {
      int64_t here = 0;
      for (int64_t piece = 0; piece < pieces; ++piece) {
        here += counts[piece * kDigits + digit];
      }
      if (here >= wanted) {
        bound = shift == 0 ? (bound & ~2047u) | digit : bound | (digit << shift);
        break;
      }
      wanted -= here;
    }
  }
  ParallelFor(pool, pieces, [&](int64_t piece) {
    int64_t first = piece * kPiece;
    loops.keep(seed, eligible + first, first, piece_size(piece), bound, chosen + first);
  });
}

void SampleFeatures(const uint32_t* seed, int32_t level, const float fractions[3],
                    int64_t num_slots, int64_t num_features, uint8_t* masks) {
  std::fill(masks, masks + num_slots * num_features, 1);
  bool all = true;
  for (int stage = 0; stage < 3; ++stage) all &= !(fractions[stage] < 1.0f);
  if (all) return;
  Pool alone;
  Seed words{seed[0], seed[1]};
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    uint8_t* mask = masks + slot * num_features;
    // Each use has its own number: the tree 0, level d 1 + d, nodes from 64 on.
    uint32_t uses[] = {0, static_cast<uint32_t>(1 + level),
                       static_cast<uint32_t>(64 + (int64_t{1} << level) + slot)};
    for (int stage = 0; stage < 3; ++stage) {
      Seed own = Derive(words, uses[stage]);
      uint32_t pair[] = {own.first, own.second};
      std::vector<uint8_t> eligible(mask, mask + num_features);
      Sample(alone, pair, eligible.data(), num_features, fractions[stage], mask);
    }
  }
}

}  // namespace jboost
