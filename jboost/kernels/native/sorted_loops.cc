// SPDX-License-Identifier: Apache-2.0
// Loops of sorted.h, compiled once per instruction set.
#include "sorted.h"

namespace jboost::JBOOST_ISA {
namespace {

inline uint32_t RowOf(uint64_t entry) { return static_cast<uint32_t>(entry); }
inline uint32_t CodeOf(uint64_t entry) { return static_cast<uint32_t>(entry >> 32); }

// Sums the entries up to `end` by value: sums->word, end and, if rows differ in it,
// mass. Returns the number of values.
template <bool kMass>
int64_t SumRows(Sweep* sweep, int64_t end, ValueSums* sums) {
  const uint64_t* entries = sweep->entries;
  const int64_t* words = sweep->words;
  const int32_t* masses = kMass ? sweep->bins->mass : nullptr;
  int64_t* __restrict out = sums->word;
  int32_t* __restrict ends = sums->end;
  int32_t* __restrict out_mass = sums->mass;
  int64_t word = sweep->word, values = 0;
  int32_t mass = sweep->mass;
  uint64_t entry = entries[sweep->at];
  auto add = [&](int64_t i, uint64_t next) {
    word += words[RowOf(entry)];
    out[values] = word;
    ends[values] = static_cast<int32_t>(i + 1);
    if (kMass) {
      mass += masses[RowOf(entry)];
      out_mass[values] = mass;
    }
    values += CodeOf(entry) != CodeOf(next);
    entry = next;
  };
  // Behind the last entry there is none to read, and any other code ends the value.
  int64_t followed = end < sweep->size ? end : end - 1;
  for (int64_t i = sweep->at; i < followed; ++i) add(i, entries[i + 1]);
  if (followed < end) add(followed, ~entry);
  sweep->at = end;
  sweep->word = word;
  sweep->mass = mass;
  return values;
}

// Writes the bins of the values.
void FindBins(Sweep* sweep, int64_t values, ValueSums* sums) {
  if (values == 0) return;
  const ValueBins& bins = *sweep->bins;
  const float num_bins = bins.num_bins, total = bins.total, most = num_bins - 1.0f;
  int32_t* __restrict mass = sums->mass;
  int32_t* __restrict bin = sums->bin;
  if (bins.mass == nullptr) {
    const int32_t missing = static_cast<int32_t>(sweep->missing), each = bins.each;
    for (int64_t i = 0; i < values; ++i) mass[i] = (sums->end[i] - missing) * each;
  }
  auto find = [&](int32_t low, int32_t high) {
    float share = (static_cast<float>(low) + static_cast<float>(high)) / 2.0f;
    share = share * num_bins / total;
    share = share > 0.0f ? share : 0.0f;
    share = share < most ? share : most;
    return static_cast<int32_t>(share);
  };
  bin[0] = find(sweep->low, mass[0]);
  for (int64_t i = 1; i < values; ++i) bin[i] = find(mass[i - 1], mass[i]);
  sweep->low = mass[values - 1];
}

inline void Write(const ValueSums& from, int64_t value, int64_t at, ValueSums* sums) {
  int64_t word = from.word[value];
  int32_t low = static_cast<int32_t>(word);
  sums->gradient[at] = low;
  sums->curvature[at] = static_cast<int32_t>((word - low) >> 32);
  sums->count[at] = from.end[value];
}

int64_t SumValues(Sweep* sweep, int64_t used, ValueSums* sums) {
  int64_t left = sweep->size - sweep->at;
  int64_t end = sweep->at + (left < kSweepRows ? left : kSweepRows);
  bool weighed = sweep->bins != nullptr && sweep->bins->mass != nullptr;
  int64_t values = (weighed ? SumRows<true> : SumRows<false>)(sweep, end, sums);
  if (sweep->bins == nullptr) {
    for (int64_t i = 0; i < values; ++i) Write(*sums, i, used + i, sums);
    return used + values;
  }
  FindBins(sweep, values, sums);
  // Each value overwrites the one before it in its bin; the first may do so with the
  // last one of the sweep before.
  for (int64_t i = 0; i < values; ++i) {
    used += sums->bin[i] != sweep->bin;
    sweep->bin = sums->bin[i];
    Write(*sums, i, used - 1, sums);
  }
  return used;
}

void Divide(const uint64_t* entries, int64_t size, const uint8_t* goes_right,
            int64_t left, int64_t right, uint64_t* out) {
  for (int64_t i = 0; i < size; ++i) {
    uint64_t entry = entries[i];
    // No branch, which no processor could predict.
    int64_t moves = goes_right[RowOf(entry)];
    out[left + ((right - left) & -moves)] = entry;
    right += moves;
    left += 1 - moves;
  }
}

}  // namespace

extern const SortedLoops kSortedLoops;
const SortedLoops kSortedLoops = {SumValues, Divide};

}  // namespace jboost::JBOOST_ISA
