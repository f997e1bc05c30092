// SPDX-License-Identifier: Apache-2.0
// Loops of sorted.h, compiled once per instruction set.
#include "sorted.h"

namespace jboost::JBOOST_ISA {
namespace {

inline uint32_t RowOf(uint64_t entry) { return static_cast<uint32_t>(entry); }
inline uint32_t CodeOf(uint64_t entry) { return static_cast<uint32_t>(entry >> 32); }

inline void Write(int64_t word, int64_t number, uint32_t code, int64_t at,
                  ValueSums* sums) {
  int32_t low = static_cast<int32_t>(word);
  sums->gradient[at] = low;
  sums->curvature[at] = static_cast<int32_t>((word - low) >> 32);
  sums->count[at] = static_cast<int32_t>(number);
  sums->code[at] = code;
}

int64_t SumValues(Sweep* sweep, int64_t used, ValueSums* sums) {
  const uint64_t* entries = sweep->entries;
  const int64_t* words = sweep->words;
  int64_t left = sweep->size - sweep->at;
  int64_t end = sweep->at + (left < kSweepRows ? left : kSweepRows);
  int64_t word = sweep->word;
  uint32_t code = CodeOf(entries[sweep->at]);
  for (int64_t i = sweep->at; i < end; ++i) {
    word += words[RowOf(entries[i])];
    // Behind the last entry there is none to read, and any other code ends the value.
    uint32_t next = i + 1 < sweep->size ? CodeOf(entries[i + 1]) : ~code;
    Write(word, i + 1, code, used, sums);
    used += code != next;
    code = next;
  }
  sweep->at = end;
  sweep->word = word;
  return used;
}

int64_t SumBins(Sweep* sweep, int64_t used, ValueSums* sums) {
  const uint64_t* entries = sweep->entries;
  const int64_t* words = sweep->words;
  const int32_t* masses = sweep->bins.mass;
  const float num_bins = sweep->bins.num_bins, total = sweep->bins.total;
  int64_t left = sweep->size - sweep->at;
  int64_t end = sweep->at + (left < kSweepRows ? left : kSweepRows);
  int64_t word = sweep->word;
  int32_t mass = sweep->mass, low = sweep->low, bin = sweep->bin;
  uint32_t code = CodeOf(entries[sweep->at]);
  for (int64_t i = sweep->at; i < end; ++i) {
    uint32_t row = RowOf(entries[i]);
    word += words[row];
    mass += masses[row];
    uint32_t next = i + 1 < sweep->size ? CodeOf(entries[i + 1]) : ~code;
    if (code != next) {
      float share = (static_cast<float>(low) + static_cast<float>(mass)) / 2.0f;
      share = share * num_bins / total;
      share = share > 0.0f ? share : 0.0f;
      share = share < num_bins - 1.0f ? share : num_bins - 1.0f;
      int32_t found = static_cast<int32_t>(share);
      used += found != bin;
      bin = found;
      low = mass;
      Write(word, i + 1, code, used - 1, sums);
    }
    code = next;
  }
  sweep->at = end;
  sweep->word = word;
  sweep->mass = mass;
  sweep->low = low;
  sweep->bin = bin;
  return used;
}

int32_t SumMass(const uint64_t* entries, int64_t size, const int32_t* mass) {
  int32_t sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += mass[RowOf(entries[i])];
  return sum;
}

void Divide(const uint64_t* entries, int64_t size, const uint8_t* goes_right,
            uint64_t* left, uint64_t* right) {
  for (int64_t i = 0; i < size; ++i) {
    uint64_t entry = entries[i];
    uint64_t moves = goes_right[RowOf(entry)];
    uint64_t* to = moves ? right : left;
    *to = entry;
    right += moves;
    left += 1 - moves;
  }
}

}  // namespace

extern const SortedLoops kSortedLoops;
const SortedLoops kSortedLoops = {SumValues, SumBins, SumMass, Divide};

}  // namespace jboost::JBOOST_ISA
