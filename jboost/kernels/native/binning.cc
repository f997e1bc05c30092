// SPDX-License-Identifier: Apache-2.0
#include "binning.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <vector>

#include "denormals.h"
#include "sort_words.h"

namespace jboost {
namespace {

constexpr int64_t kSortedRows = 50000;  // up to this, sorting is faster than counting
constexpr int64_t kSortedBins = 1024;  // from this on, most buckets contain a threshold
constexpr int64_t kMinSample = 2048;   // rows, and therefore buckets
constexpr int64_t kMaxSample = 8192;
constexpr int64_t kMapGroup = 4;      // features sampled together
constexpr int64_t kSampleShare = 64;  // of all rows
constexpr int64_t kMaxCells = 4096;
constexpr int64_t kCellBits = 16;
constexpr int64_t kGroup = 32;         // features counted together
constexpr int64_t kBlockRows = 512;    // rows whose keys fit the cache
constexpr int64_t kPad = 16;           // keeps columns from sharing cache sets
constexpr int64_t kFlushRows = 57344;  // rows whose counts fit 16 bits
constexpr int64_t kPartRows = 16384;   // the fewest rows that a task counts
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kCodeGroup = 32;  // features looked up together
constexpr int64_t kCodeRows = 256;  // rows of a block of codes
constexpr int64_t kKeyStride = kCodeRows + kPad;
constexpr int64_t kCodeBlocks = 8;      // blocks of a task
constexpr int64_t kDiscreteShare = 64;  // of a sample
constexpr int64_t kMaxRounds = 3;       // after these, all buckets are opened

// Writes the keys of rows [begin, end) of some features, `stride` apart. Rows beyond
// the matrix repeat row 0.
void MakeKeys(const FloatRows& matrix, int64_t begin, int64_t end,
              const int32_t* features, int64_t num_features, int32_t* keys,
              int64_t stride) {
  auto make = JBOOST_CHOOSE(BinningLoops).make_keys;
  int64_t width = matrix.num_features;
  for (int64_t row = begin; row < end;) {
    bool inside = row < matrix.num_rows;
    int64_t stop = inside ? std::min(matrix.num_rows, end) : end;
    make(matrix.values + (inside ? row * width : 0), inside ? width : 0, stop - row,
         features, num_features, keys + (row - begin), stride);
    row = stop;
  }
}

float ToFloat(int32_t key) {
  int32_t bits = key ^ ((key >> 31) & 0x7FFFFFFF);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t ToUnsigned(int32_t key) { return static_cast<uint32_t>(key) ^ 0x80000000u; }
int32_t ToKey(uint32_t word) { return static_cast<int32_t>(word ^ 0x80000000u); }

// One distinct value (bucket 0), or the values of one closed bucket, which are unknown.
struct Run {
  double mass;
  int32_t key;
  int32_t bucket;
};

struct Pair {
  int32_t lower, upper;
};

// The cap of mass; see find_cap in jboost/codes/thresholds.py. An unknown run counts as
// one value; if its mass exceeds the resulting cap, the cap can be too low.
double FindCap(const std::vector<Run>& runs, int64_t num_value_bins) {
  double total = 0.0, largest = 0.0, used = 0.0;
  for (const Run& run : runs) {
    total += run.mass;
    largest = std::max(largest, run.mass);
  }
  double cap = total / static_cast<double>(num_value_bins);
  if (largest <= cap) return cap;
  std::vector<double> masses(runs.size());
  for (size_t i = 0; i < runs.size(); ++i) masses[i] = runs[i].mass;
  std::vector<double> heaviest(std::min<size_t>(runs.size(), num_value_bins - 1));
  std::partial_sort_copy(masses.begin(), masses.end(), heaviest.begin(), heaviest.end(),
                         std::greater<double>());
  int64_t bins = num_value_bins;
  for (double mass : heaviest) {
    cap = (total - used) / static_cast<double>(bins--);
    if (mass <= cap) return cap;
    used += mass;
  }
  return (total - used) / static_cast<double>(bins);
}

// Finds the bin of a midpoint of mass: trunc(middle / cap), clipped to
// [0, num_value_bins).
class Binner {
 public:
  Binner(double cap, int64_t num_value_bins)
      : cap_(cap), last_(static_cast<double>(num_value_bins - 1)) {}

  int32_t operator()(double middle) {
    // Divides only where the bin can differ from that of the previous call.
    if (low_ < middle && middle < high_) return bin_;
    double share = middle / cap_;
    share = share > 0.0 ? share : 0.0;  // also if it is NaN
    bin_ = static_cast<int32_t>(share < last_ ? share : last_);
    low_ = bin_ * cap_ * (1 + kSlack);
    high_ = (bin_ + 1.0) * cap_ * (1 - kSlack);
    return bin_;
  }

 private:
  static constexpr double kSlack = 1e-12;
  double cap_, last_, low_ = 0.0, high_ = 0.0;
  int32_t bin_ = 0;
};

// Finds the cuts between runs. If the values of a closed bucket are needed for that,
// adds the bucket to `needed` instead. The definition adds value by value. An unknown
// run is added at once, which gives the same sum as long as masses are counts and the
// exponent of the sum does not change.
void CutRuns(const std::vector<Run>& runs, int64_t num_value_bins,
             std::vector<Pair>* cuts, std::vector<int32_t>* needed) {
  double cap = FindCap(runs, num_value_bins), sum = 0.0;
  Binner find_bin(cap, num_value_bins);
  bool rounded = false;  // sums of counts are exact until a cap is added
  int32_t previous = 0;
  const Run* before = nullptr;
  for (const Run& run : runs) {
    double start = sum, mass = run.mass < cap ? run.mass : cap;
    sum += mass;
    int32_t first, last;
    if (run.bucket == 0) {
      first = last = find_bin(sum - mass / 2);
      rounded |= run.mass > cap;
    } else {
      first = find_bin(start + 0.5);
      last = find_bin(sum - 0.5);
      bool opened = first != last || run.mass > cap ||
                    (rounded && std::ilogb(start) != std::ilogb(sum));
      if (opened) needed->push_back(run.bucket);
    }
    if (before != nullptr && previous != first) {
      if (before->bucket != 0) needed->push_back(before->bucket);
      if (run.bucket != 0) needed->push_back(run.bucket);
      cuts->push_back({before->key, run.key});
    }
    previous = last;
    before = &run;
  }
}

// Returns whether the cuts are final; if not, `needed` lists the buckets to open.
bool Resolve(const std::vector<Run>& runs, int64_t max_bins, std::vector<Pair>* cuts,
             std::vector<int32_t>* needed) {
  cuts->clear();
  needed->clear();
  if (static_cast<int64_t>(runs.size()) > max_bins - 1) {
    CutRuns(runs, max_bins - 1, cuts, needed);
    return needed->empty();
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].bucket != 0) needed->push_back(runs[i].bucket);
    if (i > 0) cuts->push_back({runs[i - 1].key, runs[i].key});
  }
  return needed->empty();
}

void Write(const std::vector<Pair>& pairs, int64_t feature, const Cuts& cuts) {
  float* lower = cuts.lower + feature * cuts.max_cuts;
  float* upper = cuts.upper + feature * cuts.max_cuts;
  int64_t size = static_cast<int64_t>(pairs.size());
  for (int64_t i = 0; i < cuts.max_cuts; ++i) {
    lower[i] = i < size ? ToFloat(pairs[i].lower) : 0.0f;
    upper[i] = i < size ? ToFloat(pairs[i].upper) : 0.0f;
  }
  cuts.num_cuts[feature] = static_cast<int32_t>(size);
}

// Returns the keys that are not missing, sorted.
std::vector<uint32_t> SortKeys(const int32_t* keys, int64_t num_keys) {
  std::vector<uint32_t> words(num_keys), scratch;
  int64_t size = 0;
  for (int64_t i = 0; i < num_keys; ++i) {
    words[size] = ToUnsigned(keys[i]);
    size += keys[i] != kMissingKey;
  }
  words.resize(size);
  scratch.resize(size);
  return Sort(words.data(), scratch.data(), size) == words.data() ? words : scratch;
}

// Appends a run for each distinct one of some sorted keys.
void AppendDistinct(const uint32_t* begin, const uint32_t* end,
                    std::vector<Run>* runs) {
  while (begin != end) {
    const uint32_t* next = begin + 1;
    while (next != end && *next == *begin) ++next;
    runs->push_back({static_cast<double>(next - begin), ToKey(*begin), 0});
    begin = next;
  }
}

std::vector<Run> CountDistinct(const int32_t* keys, int64_t num_keys) {
  std::vector<uint32_t> sorted = SortKeys(keys, num_keys);
  std::vector<Run> runs;
  runs.reserve(sorted.size());
  AppendDistinct(sorted.data(), sorted.data() + sorted.size(), &runs);
  return runs;
}

// Returns the distinct values and the sums of their weights, added in the order of
// rows.
std::vector<Run> WeighDistinct(const int32_t* keys, const double* weight,
                               int64_t num_keys) {
  std::vector<uint64_t> words, scratch;
  words.reserve(num_keys);
  for (int64_t i = 0; i < num_keys; ++i) {
    if (keys[i] == kMissingKey || !(weight[i] > 0.0)) continue;
    words.push_back(uint64_t{ToUnsigned(keys[i])} << 32 | static_cast<uint64_t>(i));
  }
  scratch.resize(words.size());
  int64_t size = static_cast<int64_t>(words.size());
  const uint64_t* sorted = Sort(words.data(), scratch.data(), size);
  std::vector<Run> runs;
  for (int64_t i = 0; i < size; ++i) {
    double mass = weight[sorted[i] & 0xFFFFFFFFu];
    int32_t key = ToKey(static_cast<uint32_t>(sorted[i] >> 32));
    if (runs.empty() || runs.back().key != key) {
      runs.push_back({mass, key, 0});
    } else {
      runs.back().mass += mass;
    }
  }
  return runs;
}

void CutBySorting(const Pool& pool, const FloatRows& matrix, const double* weight,
                  int64_t max_bins, const Cuts& cuts) {
  int64_t num_rows = matrix.num_rows, num_features = matrix.num_features;
  const Pool& threads = Threads(pool, num_rows * num_features);
  // A cache line holds 16 values of a row, so a task reads several features at once.
  int64_t group = std::clamp<int64_t>(num_features / (2 * threads.num_threads), 1, 8);
  ParallelFor(threads, (num_features + group - 1) / group, [&](int64_t task) {
    FlushDenormals guard(false);  // which would change sums of weights
    int64_t begin = task * group, size = std::min(group, num_features - begin);
    std::vector<int32_t> features(size), keys(size * num_rows);
    std::iota(features.begin(), features.end(), static_cast<int32_t>(begin));
    MakeKeys(matrix, 0, num_rows, features.data(), size, keys.data(), num_rows);
    std::vector<Pair> pairs;
    std::vector<int32_t> needed;
    for (int64_t f = 0; f < size; ++f) {
      const int32_t* own = keys.data() + f * num_rows;
      Resolve(weight == nullptr ? CountDistinct(own, num_rows)
                                : WeighDistinct(own, weight, num_rows),
              max_bins, &pairs, &needed);
      Write(pairs, begin + f, cuts);
    }
  });
}

// The state of one feature while its cuts are found by counting.
struct Feature {
  BucketMap map;
  std::vector<uint32_t> cells;
  std::vector<int32_t> usual;      // of each bucket: the most frequent sampled value
  std::vector<uint8_t> repeated;   // of each bucket: whether it was sampled twice
  std::vector<uint32_t> counts;    // of each bucket
  std::vector<uint8_t> open;       // of each bucket
  std::vector<int32_t> collected;  // the keys of open buckets, except the usual ones
  bool discrete = false;           // one value has a large share
  std::vector<Pair> cuts;
  bool resolved = false;
};

uint32_t FindOffset(const BucketMap& map, int32_t key) {
  uint32_t inside = static_cast<uint32_t>(std::clamp(key, map.low, map.high));
  return (inside - static_cast<uint32_t>(map.low)) >> map.drop;
}

uint32_t FindBucket(const BucketMap& map, int32_t key) {
  uint32_t offset = FindOffset(map, key), cell = map.cells[offset >> map.shift];
  uint32_t place = offset & ((uint32_t{1} << map.shift) - 1);
  return (cell >> 16) + ((place * (cell & 0xFFFF)) >> map.shift);
}

// Makes a map with as many buckets as sampled values. Each cell gets as many buckets as
// it has sampled values.
void MakeMap(const std::vector<Run>& sample, Feature* feature) {
  BucketMap& map = feature->map;
  map = {0, 0, 0, 0, nullptr};
  if (!sample.empty()) map = {sample.front().key, sample.back().key, 0, 0, nullptr};
  while ((FindOffset(map, map.high) >> map.shift) >= kMaxCells) {
    (map.shift < kCellBits ? map.shift : map.drop) += 1;
  }
  std::vector<uint32_t>& cells = feature->cells;
  cells.assign((FindOffset(map, map.high) >> map.shift) + 1, 0);
  for (const Run& run : sample) {
    cells[FindOffset(map, run.key) >> map.shift] += static_cast<uint32_t>(run.mass);
  }
  uint32_t base = 1;
  for (uint32_t& cell : cells) {
    uint32_t size = cell;
    cell = (base << 16) + size;
    base += size;
  }
  map.cells = cells.data();
  feature->counts.assign(base + 1, 0);
  feature->open.assign(base + 1, 0);
  feature->usual.assign(base + 1, kMissingKey);
  feature->repeated.assign(base + 1, 0);
  std::vector<double> most(base + 1, 0.0);
  for (const Run& run : sample) {
    uint32_t bucket = FindBucket(map, run.key);
    if (run.mass <= most[bucket]) continue;
    most[bucket] = run.mass;
    feature->usual[bucket] = run.key;
    feature->repeated[bucket] = run.mass > 1;
    feature->discrete |= run.mass > base / kDiscreteShare;
  }
}

// Returns the runs in order: one for each closed bucket, and one for each distinct
// value of open buckets.
std::vector<Run> MakeRuns(const Feature& feature) {
  std::vector<uint32_t> sorted =
      SortKeys(feature.collected.data(), feature.collected.size());
  std::vector<Run> runs;
  runs.reserve(sorted.size() + feature.counts.size());
  const uint32_t* next = sorted.data();
  const uint32_t* end = next + sorted.size();
  for (size_t bucket = 1; bucket < feature.counts.size(); ++bucket) {
    uint32_t count = feature.counts[bucket];
    if (count == 0) continue;
    if (!feature.open[bucket]) {
      runs.push_back({static_cast<double>(count), 0, static_cast<int32_t>(bucket)});
      continue;
    }
    const uint32_t* begin = next;
    while (next != end && FindBucket(feature.map, ToKey(*next)) == bucket) ++next;
    // All keys that were not collected have the usual value.
    double left = static_cast<double>(count - (next - begin));
    int32_t usual = feature.usual[bucket];
    const uint32_t* place = std::lower_bound(begin, next, ToUnsigned(usual));
    AppendDistinct(begin, place, &runs);
    if (left > 0) runs.push_back({left, usual, 0});
    AppendDistinct(place, next, &runs);
  }
  return runs;
}

// If values are discrete, a cut can turn out to lie next to a neighboring bucket. Opens
// these buckets in advance; that is cheap, since their usual values are not collected.
void OpenBesides(const std::vector<Run>& runs, Feature* feature) {
  std::vector<int32_t> beside;
  for (size_t i = 0; i < runs.size(); ++i) {
    int32_t bucket = runs[i].bucket;
    bool discrete = feature->open[bucket] && feature->repeated[bucket];
    if (bucket == 0 || !discrete) continue;
    if (i > 0) beside.push_back(runs[i - 1].bucket);
    if (i + 1 < runs.size()) beside.push_back(runs[i + 1].bucket);
  }
  for (int32_t bucket : beside) {
    if (bucket != 0) feature->open[bucket] = 1;
  }
}

// Finds the cuts, or opens the buckets that are needed to find them.
void Advance(int64_t max_bins, int64_t round, Feature* feature) {
  std::vector<Run> runs = MakeRuns(*feature);
  std::vector<int32_t> needed;
  feature->resolved = Resolve(runs, max_bins, &feature->cuts, &needed);
  feature->collected.clear();
  if (feature->resolved) return;
  if (round + 1 >= kMaxRounds) {
    for (const Run& run : runs) needed.push_back(run.bucket);
  }
  for (int32_t bucket : needed) {
    if (bucket != 0) feature->open[bucket] = 1;
  }
  OpenBesides(runs, feature);
}

// Calls use(f, keys, count) for each block of rows and each feature of a list.
template <class Use>
void ForKeys(const FloatRows& matrix, const std::vector<int32_t>& features,
             int64_t begin, int64_t end, const Use& use) {
  int64_t size = static_cast<int64_t>(features.size());
  constexpr int64_t kStride = kBlockRows + kPad;
  std::vector<int32_t> keys(size * kStride);
  for (int64_t row = begin; row < end; row += kBlockRows) {
    int64_t count = std::min(kBlockRows, end - row);
    MakeKeys(matrix, row, row + count, features.data(), size, keys.data(), kStride);
    for (int64_t f = 0; f < size; ++f) use(f, keys.data() + f * kStride, count);
  }
}

// Counters of 16 bits, which are added to totals before they overflow.
struct Counter {
  std::vector<uint16_t> even, odd;
  std::vector<uint32_t> totals;

  explicit Counter(const Feature& feature)
      : even(feature.counts.size(), 0),
        odd(feature.discrete ? feature.counts.size() : 0, 0),
        totals(feature.counts.size(), 0) {}

  void Flush() {
    for (std::vector<uint16_t>* counts : {&even, &odd}) {
      for (size_t b = 0; b < counts->size(); ++b) totals[b] += (*counts)[b];
      std::fill(counts->begin(), counts->end(), uint16_t{0});
    }
  }
};

void CountRows(const FloatRows& matrix, const std::vector<int32_t>& group,
               int64_t begin, int64_t end, std::mutex* mutex,
               std::vector<Feature>* features) {
  auto count_keys = JBOOST_CHOOSE(BinningLoops).count;
  std::vector<Counter> counters;
  for (int32_t f : group) counters.emplace_back((*features)[f]);
  for (int64_t row = begin; row < end; row += kFlushRows) {
    ForKeys(matrix, group, row, std::min(row + kFlushRows, end),
            [&](int64_t f, const int32_t* keys, int64_t size) {
              Counter& counter = counters[f];
              uint16_t* even = counter.even.data();
              uint16_t* odd = counter.odd.empty() ? even : counter.odd.data();
              count_keys((*features)[group[f]].map, keys, size, even, odd);
            });
    for (Counter& counter : counters) counter.Flush();
  }
  std::lock_guard<std::mutex> lock(*mutex);
  for (size_t f = 0; f < group.size(); ++f) {
    std::vector<uint32_t>& counts = (*features)[group[f]].counts;
    for (size_t b = 0; b < counts.size(); ++b) counts[b] += counters[f].totals[b];
  }
}

void CollectRows(const FloatRows& matrix, const std::vector<int32_t>& group,
                 int64_t begin, int64_t end, std::mutex* mutex,
                 std::vector<Feature>* features) {
  auto collect = JBOOST_CHOOSE(BinningLoops).collect;
  std::vector<std::vector<int32_t>> collected(group.size());
  std::vector<int32_t> scratch(kBlockRows + 1);
  ForKeys(matrix, group, begin, end, [&](int64_t f, const int32_t* keys, int64_t size) {
    const Feature& feature = (*features)[group[f]];
    int64_t taken = collect(feature.map, feature.open.data(), feature.usual.data(),
                            keys, size, scratch.data());
    collected[f].insert(collected[f].end(), scratch.begin(), scratch.begin() + taken);
  });
  std::lock_guard<std::mutex> lock(*mutex);
  for (size_t f = 0; f < group.size(); ++f) {
    std::vector<int32_t>& all = (*features)[group[f]].collected;
    all.insert(all.end(), collected[f].begin(), collected[f].end());
  }
}

// Calls pass(group, begin, end, mutex) for groups of unresolved features and parts of
// the rows.
template <class Pass>
void ForParts(const Pool& pool, int64_t num_rows, const std::vector<Feature>& features,
              const Pass& pass) {
  std::vector<int32_t> open;
  for (size_t f = 0; f < features.size(); ++f) {
    if (!features[f].resolved) open.push_back(static_cast<int32_t>(f));
  }
  int64_t size = static_cast<int64_t>(open.size());
  int64_t num_groups = (size + kGroup - 1) / kGroup;
  int64_t wanted = (kTasksPerThread * pool.num_threads + num_groups - 1) / num_groups;
  int64_t parts = std::clamp<int64_t>(num_rows / kPartRows, 1, wanted);
  std::vector<std::mutex> mutexes(num_groups);
  ParallelFor(pool, num_groups * parts, [&](int64_t task) {
    int64_t group = task / parts, part = task % parts;
    std::vector<int32_t> own(open.begin() + size * group / num_groups,
                             open.begin() + size * (group + 1) / num_groups);
    pass(own, num_rows * part / parts, num_rows * (part + 1) / parts, &mutexes[group]);
  });
}

// Makes the maps of a few features from a sample of rows at equal distances.
void MakeMaps(const FloatRows& matrix, int64_t begin, int64_t end,
              std::vector<Feature>* features) {
  int64_t size = std::clamp(matrix.num_rows / kSampleShare, kMinSample, kMaxSample);
  int64_t step = matrix.num_rows / size, stride = size + kPad;
  std::vector<int32_t> group(end - begin), keys(group.size() * stride);
  std::iota(group.begin(), group.end(), static_cast<int32_t>(begin));
  JBOOST_CHOOSE(BinningLoops)
      .make_keys(matrix.values, step * matrix.num_features, size, group.data(),
                 end - begin, keys.data(), stride);
  for (int64_t f = begin; f < end; ++f) {
    MakeMap(CountDistinct(keys.data() + (f - begin) * stride, size), &(*features)[f]);
  }
}

void CutByCounting(const Pool& pool, const FloatRows& matrix, int64_t max_bins,
                   const Cuts& cuts) {
  int64_t num_features = matrix.num_features;
  std::vector<Feature> features(num_features);
  ParallelFor(pool, (num_features + kMapGroup - 1) / kMapGroup, [&](int64_t task) {
    int64_t begin = task * kMapGroup;
    MakeMaps(matrix, begin, std::min(begin + kMapGroup, num_features), &features);
  });
  for (int64_t round = 0;; ++round) {
    auto pass = round == 0 ? CountRows : CollectRows;
    ForParts(
        pool, matrix.num_rows, features,
        [&](const std::vector<int32_t>& group, int64_t begin, int64_t end,
            std::mutex* mutex) { pass(matrix, group, begin, end, mutex, &features); });
    ParallelFor(pool, num_features, [&](int64_t f) {
      if (!features[f].resolved) Advance(max_bins, round, &features[f]);
    });
    bool resolved = std::all_of(features.begin(), features.end(),
                                [](const Feature& each) { return each.resolved; });
    if (resolved) break;
  }
  for (int64_t f = 0; f < num_features; ++f) Write(features[f].cuts, f, cuts);
}

// The key of a threshold, which is made like that of a value.
int32_t ThresholdKey(float threshold) {
  int32_t feature = 0, key;
  JBOOST_CHOOSE(BinningLoops).make_keys(&threshold, 1, 1, &feature, 1, &key, 1);
  return key;
}

// The search tree of one feature's thresholds. Its first entry is below all values
// except missing ones.
struct Lookup {
  std::vector<int32_t> entries;
  SearchTree tree;

  Lookup(const float* thresholds, int64_t size) {
    std::vector<std::vector<int32_t>> levels(1);
    levels[0].push_back(kMissingKey);
    for (int64_t t = 0; t < size; ++t) levels[0].push_back(ThresholdKey(thresholds[t]));
    // The last entry is above every value, so that no search leaves the tree. (No value
    // is above a threshold of +inf either, which it may replace.)
    while (levels.back().size() % kFanout != 0) levels.back().push_back(INT32_MAX);
    levels.back().back() = INT32_MAX;
    while (levels.back().size() > kFanout) {
      std::vector<int32_t> upper;
      for (size_t i = kFanout - 1; i < levels.back().size(); i += kFanout) {
        upper.push_back(levels.back()[i]);
      }
      while (upper.size() % kFanout != 0) upper.push_back(INT32_MAX);
      levels.push_back(upper);
    }
    tree.num_levels = static_cast<int>(levels.size());
    for (const auto& level : levels) {
      entries.insert(entries.end(), level.begin(), level.end());
    }
    int64_t place = 0;
    for (int i = 0; i < tree.num_levels; ++i) {
      tree.levels[tree.num_levels - 1 - i] = entries.data() + place;
      place += levels[i].size();
    }
  }
  Lookup(const Lookup&) = delete;
  Lookup(Lookup&&) = default;  // a moved vector keeps its memory
};

// The codes of a block of rows, by feature, `stride` apart.
struct CodeBlock {
  const void* codes;
  int64_t stride;
};

CodeBlock WriteColumns(const CodeLayouts& layouts, const std::vector<Lookup>& lookups,
                       const int32_t* keys, int64_t first, int64_t num_features,
                       int64_t begin, int64_t count, uint8_t* scratch) {
  int64_t size = layouts.wide ? 2 : 1;
  bool direct = layouts.columns != nullptr;
  int64_t stride = direct ? layouts.num_rows : kCodeRows;
  uint8_t* start =
      direct ? static_cast<uint8_t*>(layouts.columns) + (first * stride + begin) * size
             : scratch;
  for (int64_t f = 0; f < num_features; ++f) {
    JBOOST_CHOOSE(BinningLoops)
        .find_codes(lookups[first + f].tree, keys + f * kKeyStride, count, layouts.wide,
                    start + f * stride * size);
  }
  return {start, stride};
}

// Writes rows [begin, begin + count) of the blocks that hold features [first, ...).
void WritePacked(const CodeLayouts& layouts, const CodeBlock& block, int64_t first,
                 int64_t num_features, int64_t begin, int64_t count) {
  int64_t size = layouts.wide ? 2 : 1, width = layouts.width;
  for (int64_t f = 0; f < num_features; f += width) {
    int64_t used = std::min(width, num_features - f);
    int64_t place = (((first + f) / width) * layouts.num_rows + begin) * width * size;
    uint8_t* rows = static_cast<uint8_t*>(layouts.packed) + place;
    if (used < width) std::memset(rows, 0, count * width * size);
    JBOOST_CHOOSE(BinningLoops)
        .transpose(static_cast<const uint8_t*>(block.codes) + f * block.stride * size,
                   block.stride, used, count, layouts.wide, rows, width);
  }
}

}  // namespace

void FindCuts(const Pool& pool, const FloatRows& matrix, const double* weight,
              int64_t max_bins, const Cuts& cuts) {
  bool sorted =
      weight != nullptr || matrix.num_rows <= kSortedRows || max_bins >= kSortedBins;
  if (sorted) {
    CutBySorting(pool, matrix, weight, max_bins, cuts);
  } else {
    CutByCounting(pool, matrix, max_bins, cuts);
  }
}

void FindCodes(const Pool& pool, const FloatRows& matrix, const float* thresholds,
               int64_t num_thresholds, const CodeLayouts& layouts) {
  int64_t num_features = matrix.num_features, num_rows = layouts.num_rows;
  std::vector<Lookup> lookups;
  lookups.reserve(num_features);
  for (int64_t f = 0; f < num_features; ++f) {
    lookups.emplace_back(thresholds + f * num_thresholds, num_thresholds);
  }
  // A task writes whole blocks of the packed layout.
  int64_t width = layouts.packed == nullptr ? kCodeGroup : layouts.width;
  int64_t group = std::max(width, kCodeGroup / width * width);
  int64_t num_groups = (num_features + group - 1) / group;
  int64_t task_rows = kCodeRows * kCodeBlocks;
  int64_t num_parts = (num_rows + task_rows - 1) / task_rows;
  ParallelFor(
      Threads(pool, num_rows * num_features), num_groups * num_parts,
      [&](int64_t task) {
        int64_t first = task % num_groups * group;
        int64_t size = std::min(group, num_features - first);
        int64_t begin = task / num_groups * task_rows;
        int64_t end = std::min(begin + task_rows, num_rows);
        std::vector<int32_t> features(size), keys(size * kKeyStride);
        std::vector<uint8_t> scratch(layouts.columns == nullptr ? size * kCodeRows * 2
                                                                : 0);
        std::iota(features.begin(), features.end(), static_cast<int32_t>(first));
        for (int64_t row = begin; row < end; row += kCodeRows) {
          int64_t count = std::min(kCodeRows, end - row);
          MakeKeys(matrix, row, row + count, features.data(), size, keys.data(),
                   kKeyStride);
          CodeBlock block = WriteColumns(layouts, lookups, keys.data(), first, size,
                                         row, count, scratch.data());
          if (layouts.packed == nullptr) continue;
          WritePacked(layouts, block, first, size, row, count);
        }
      });
}

}  // namespace jboost
