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

// The bin of a value, between the masses below it and up to it.
inline int32_t FindBin(int32_t low, int32_t high, float num_bins, float total) {
  float share = (static_cast<float>(low) + static_cast<float>(high)) / 2.0f;
  share = share * num_bins / total;
  share = share > 0.0f ? share : 0.0f;
  share = share < num_bins - 1.0f ? share : num_bins - 1.0f;
  return static_cast<int32_t>(share);
}

// Writes the bins of the values.
void FindBins(Sweep* sweep, int64_t values, ValueSums* sums) {
  if (values == 0) return;
  const ValueBins& bins = *sweep->bins;
  const float num_bins = bins.num_bins, total = bins.total;
  int32_t* __restrict mass = sums->mass;
  int32_t* __restrict bin = sums->bin;
  if (bins.mass == nullptr) {
    const int32_t missing = static_cast<int32_t>(sweep->missing), each = bins.each;
    for (int64_t i = 0; i < values; ++i) mass[i] = (sums->end[i] - missing) * each;
  }
  bin[0] = FindBin(sweep->low, mass[0], num_bins, total);
  for (int64_t i = 1; i < values; ++i) {
    bin[i] = FindBin(mass[i - 1], mass[i], num_bins, total);
  }
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

template <class Code, class Bin>
void ProposeColumn(const ColumnOrder& column, const ValueBins& bins, int32_t mass,
                   int64_t num_bins, Bin* out, int32_t* highest) {
  const Code* codes = static_cast<const Code*>(column.codes);
  const int32_t* order = column.order;
  for (int64_t bin = 0; bin < num_bins; ++bin) highest[bin] = 0;
  int64_t at = 0;
  int32_t known = mass;
  for (; at < column.num_rows && codes[order[at]] == 0; ++at) {
    known -= bins.mass == nullptr ? bins.each : bins.mass[order[at]];
    out[order[at]] = 0;
  }
  float total = static_cast<float>(known > 1 ? known : 1);
  int32_t low = 0, high = 0, lowest = -1;
  for (Code code = at < column.num_rows ? codes[order[at]] : 0; at < column.num_rows;) {
    int64_t end = at;
    Code next = code;
    for (; end < column.num_rows && next == code; ++end) {
      high += bins.mass == nullptr ? bins.each : bins.mass[order[end]];
      next = end + 1 < column.num_rows ? codes[order[end + 1]] : code;
    }
    int32_t bin = FindBin(low, high, bins.num_bins, total);
    lowest = lowest < 0 ? bin : lowest;
    bin += 1 - lowest;
    highest[bin] = static_cast<int32_t>(code);
    for (; at < end; ++at) out[order[at]] = static_cast<Bin>(bin);
    low = high;
    code = next;
  }
  for (int64_t bin = 1; bin < num_bins; ++bin) {
    highest[bin] = highest[bin] > highest[bin - 1] ? highest[bin] : highest[bin - 1];
  }
}

bool ProposeBins(const ColumnOrder& column, const ValueBins& bins, int32_t mass,
                 int64_t num_bins, bool wide, void* out, int32_t* highest) {
  uint32_t outside = 0, last = static_cast<uint32_t>(column.num_rows - 1);
  for (int64_t i = 0; i < column.num_rows; ++i) {
    outside |= static_cast<uint32_t>(column.order[i]) > last;
  }
  if (outside != 0) return false;
  auto propose = [&](auto code) {
    using Code = decltype(code);
    if (wide) {
      ProposeColumn<Code>(column, bins, mass, num_bins, static_cast<uint16_t*>(out),
                          highest);
    } else {
      ProposeColumn<Code>(column, bins, mass, num_bins, static_cast<uint8_t*>(out),
                          highest);
    }
  };
  if (column.code_size == 1) propose(uint8_t{});
  if (column.code_size == 2) propose(uint16_t{});
  if (column.code_size == 4) propose(uint32_t{});
  return true;
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
const SortedLoops kSortedLoops = {SumValues, ProposeBins, Divide};

}  // namespace jboost::JBOOST_ISA
