// SPDX-License-Identifier: Apache-2.0
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

// The first position from `begin` on whose code is above `code`; codes ascend.
template <class Code>
int64_t FindEnd(const Code* codes, const int32_t* order, int64_t begin, int64_t end,
                Code code) {
  // Runs of equal codes are short or long: doubles the step, then halves it.
  int64_t step = 1;
  while (begin + step <= end && codes[order[begin + step - 1]] <= code) {
    begin += step;
    step *= 2;
  }
  for (; step > 0; step /= 2) {
    if (begin + step <= end && codes[order[begin + step - 1]] <= code) begin += step;
  }
  return begin;
}

// A value's entries, or those of several values of one bin.
struct Run {
  int64_t begin, end;
  int32_t bin;
};

template <class Code>
struct BinnedColumn {
  const Code* codes;
  const int32_t* order;
  int64_t num_rows, missing;
  const ValueBins& bins;
  int32_t high = 0;  // mass of the values so far, where masses differ

  // The value from `begin` on.
  Run NextValue(int64_t begin) {
    int32_t low = high;
    Code code = codes[order[begin]];
    int64_t end = begin;
    for (; end < num_rows && codes[order[end]] == code; ++end) {
      high += bins.mass[order[end]];
    }
    return {begin, end, FindBin(low, high, bins.num_bins, bins.total)};
  }

  // The same where each row has one mass, and more values of the same bin: a value that
  // ends before the middle of another one has no higher bin.
  Run NextValues(int64_t begin) const {
    int64_t end = FindEnd(codes, order, begin, num_rows, codes[order[begin]]);
    int32_t bin = BinOf(begin, end);
    double width = bins.each == 0
                       ? static_cast<double>(num_rows)
                       : static_cast<double>(bins.total) /
                             (static_cast<double>(bins.num_bins) * bins.each);
    int64_t last = missing + static_cast<int64_t>(width * (bin + 1)) - 2;
    last = last < num_rows - 1 ? last : num_rows - 1;
    if (last > end && BinOf(last, last + 1) == bin) {
      Code code = codes[order[last]];
      end = code == 0 ? end : FindEnd<Code>(codes, order, end, last, code - 1);
    }
    return {begin, end, bin};
  }

  int32_t BinOf(int64_t begin, int64_t end) const {
    int32_t low = static_cast<int32_t>(begin - missing) * bins.each;
    int32_t up = static_cast<int32_t>(end - missing) * bins.each;
    return FindBin(low, up, bins.num_bins, bins.total);
  }
};

template <class Code, class Bin>
void ProposeColumn(const SortedCodes& column, ValueBins bins, int32_t mass,
                   int64_t num_bins, Bin* out, int32_t* highest) {
  const Code* codes = static_cast<const Code*>(column.columns);
  const int32_t* order = column.order;
  for (int64_t bin = 0; bin < num_bins; ++bin) highest[bin] = 0;
  int64_t at = FindEnd<Code>(codes, order, 0, column.num_rows, 0);
  for (int64_t i = 0; i < at; ++i) {
    mass -= bins.mass == nullptr ? bins.each : bins.mass[order[i]];
    out[order[i]] = 0;
  }
  bins.total = static_cast<float>(mass > 1 ? mass : 1);
  BinnedColumn<Code> values{codes, order, column.num_rows, at, bins};
  int32_t lowest = -1;
  while (at < column.num_rows) {
    Run run = bins.mass == nullptr ? values.NextValues(at) : values.NextValue(at);
    lowest = lowest < 0 ? run.bin : lowest;
    int32_t bin = 1 + run.bin - lowest;
    highest[bin] = static_cast<int32_t>(codes[order[run.end - 1]]);
    for (; at < run.end; ++at) out[order[at]] = static_cast<Bin>(bin);
  }
  for (int64_t bin = 1; bin < num_bins; ++bin) {
    highest[bin] = highest[bin] > highest[bin - 1] ? highest[bin] : highest[bin - 1];
  }
}

bool ProposeBins(const SortedCodes& column, const ValueBins& bins, int32_t mass,
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

const SortedLoops kSortedLoops = {SumValues, ProposeBins, Divide};

}  // namespace jboost::JBOOST_ISA
