// SPDX-License-Identifier: Apache-2.0
#include "leaves.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "exact_sum.h"

namespace jboost {
namespace {

constexpr int64_t kRowsPerTask = 16384;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNowhere = std::numeric_limits<float>::quiet_NaN();

// The number of tasks, each of which has a table of groups. There are few enough that
// the tables cost less than the rows.
int64_t NumTasks(int64_t num_rows, int64_t num_groups) {
  int64_t rows = std::max(kRowsPerTask, 16 * num_groups);
  return std::clamp<int64_t>(num_rows / rows, 1, 128);
}

// How the rows are divided into blocks for sums by group.
struct Blocks {
  // `least`: how many blocks there are at least.
  Blocks(const GroupedRows& rows, int64_t least)
      : number(std::max(
            least,
            std::clamp<int64_t>(rows.num_rows / std::max<int64_t>(256, rows.num_groups),
                                1, 128))),
        num_rows(rows.num_rows),
        length((rows.num_rows + number - 1) / number) {}

  int64_t begin(int64_t block) const { return std::min(block * length, num_rows); }

  int64_t number, num_rows, length;
};

// The bits of the greatest magnitude of each channel; infinities and NaN count.
void FindGreatest(const Pool& pool, const GroupedRows& rows, uint32_t* bits) {
  const LeafLoops& loops = JBOOST_CHOOSE(LeafLoops);
  Blocks blocks(rows, 1);
  std::vector<uint32_t> greatest(blocks.number * kMaxChannels);
  ParallelFor(pool, blocks.number, [&](int64_t block) {
    loops.greatest_bits(rows, blocks.begin(block), blocks.begin(block + 1),
                        greatest.data() + block * kMaxChannels);
  });
  std::fill_n(bits, rows.channels.number, 0);
  for (int64_t block = 0; block < blocks.number; ++block) {
    for (int64_t c = 0; c < rows.channels.number; ++c) {
      bits[c] = std::max(bits[c], greatest[block * kMaxChannels + c]);
    }
  }
}

// Rows with 0 in place of infinities, NaN and ignored rows, in the channels that have
// such values; the others are not copied.
class FiniteRows {
 public:
  // `bits`: those of the greatest magnitudes; overwritten with those of finite ones.
  // The infinities and NaN are added to `others` [channels, groups], if it is not null.
  FiniteRows(const Pool& pool, const GroupedRows& rows, uint32_t* bits, float* others)
      : rows_(rows) {
    FindGreatest(pool, rows, bits);
    for (int64_t c = 0; c < rows.channels.number; ++c) {
      if (bits[c] < kInfinityBits) continue;
      bits[c] = 0;
      std::vector<float>& finite = finite_[c];
      finite.assign(rows.num_rows, 0.0f);
      for (int64_t i = 0; i < rows.num_rows; ++i) {
        int64_t group = rows.group[i];
        if (group < 0 || group >= rows.num_groups) continue;
        float value = rows.channels.values[c][rows.channels.constant[c] ? 0 : i];
        float term = value;
        if (rows.weights != nullptr) {
          term = WeightedTerms{&value, rows.weights + i}(0);
        }
        if (IsFinite(term)) {
          finite[i] = value;
          bits[c] = std::max(bits[c], MagnitudeBits(term));
        } else if (others != nullptr) {
          others[c * rows.num_groups + group] += term;
        }
      }
      rows_.channels.values[c] = finite.data();
      rows_.channels.constant[c] = false;
    }
  }
  const GroupedRows& rows() const { return rows_; }

 private:
  GroupedRows rows_;
  std::vector<float> finite_[kMaxChannels];
};

// Tables of sums by group, one for each block of rows. A task sums kLockstep blocks,
// the last of which may be empty.
class BlockSums {
 public:
  explicit BlockSums(const GroupedRows& rows)
      : rows_(rows),
        // The rows of a block count at most 2^24 times, so that its sums fit 63 bits.
        blocks_(rows, (rows.num_rows * (rows.weights == nullptr ? 1 : 255) >> 24) + 1),
        table_((rows.num_groups + 1) * rows.channels.number),
        tables_(tasks() * kLockstep * table_) {}

  int64_t tasks() const { return (blocks_.number + kLockstep - 1) / kLockstep; }

  // Raises bits[c] to those of the greatest magnitude of a task's rows.
  void FindGreatest(int64_t task, uint32_t* bits) const {
    int64_t first = task * kLockstep;
    JBOOST_CHOOSE(LeafLoops).greatest_bits(rows_, blocks_.begin(first),
                                           blocks_.begin(first + kLockstep), bits);
  }

  // Sums a task's rows, which must be finite, as multiples of 1 / up[c].
  void Sum(int64_t task, const float* up) {
    int64_t first[kLockstep], end[kLockstep];
    uint64_t* sums_of[kLockstep];
    for (int64_t b = 0; b < kLockstep; ++b) {
      int64_t block = task * kLockstep + b;
      first[b] = blocks_.begin(block);
      end[b] = blocks_.begin(block + 1);
      sums_of[b] = tables_.data() + block * table_;
      std::fill_n(sums_of[b], table_, 0);
    }
    JBOOST_CHOOSE(LeafLoops).sum_blocks(rows_, up, first, end, sums_of);
  }

  // [channels, groups].
  std::vector<ExactSum> Totals() const {
    int64_t num_channels = rows_.channels.number, num_groups = rows_.num_groups;
    std::vector<ExactSum> totals(num_channels * num_groups);
    for (int64_t block = 0; block < blocks_.number; ++block) {
      for (int64_t g = 0; g < num_groups; ++g) {
        for (int64_t c = 0; c < num_channels; ++c) {
          uint64_t sum = tables_[block * table_ + g * num_channels + c];
          totals[c * num_groups + g].Add(static_cast<int64_t>(sum));
        }
      }
    }
    return totals;
  }

 private:
  GroupedRows rows_;
  Blocks blocks_;
  int64_t table_;
  std::vector<uint64_t> tables_;
};

// Sums finite rows as multiples of 1 / up[c]; [channels, groups].
std::vector<ExactSum> SumFinite(const Pool& pool, const GroupedRows& rows,
                                const float* up) {
  BlockSums sums(rows);
  ParallelFor(pool, sums.tasks(), [&](int64_t task) { sums.Sum(task, up); });
  return sums.Totals();
}

// Sums rows by the units of their greatest magnitudes; false if a term is not finite.
// Each task adds its rows, while they are in the cache, by the units of the greatest
// magnitudes so far, which are mostly those of all rows; else it is made again.
bool SumInOnePass(const Pool& pool, const GroupedRows& rows, Unit* units,
                  std::vector<ExactSum>* totals) {
  struct Ups {
    float of[kMaxChannels];
  };
  int64_t num_channels = rows.channels.number;
  BlockSums sums(rows);
  std::vector<Ups> used(sums.tasks());
  std::atomic<uint32_t> known[kMaxChannels] = {};
  ParallelFor(pool, sums.tasks(), [&](int64_t task) {
    uint32_t own[kMaxChannels] = {};
    sums.FindGreatest(task, own);
    bool finite = true;
    for (int64_t c = 0; c < num_channels; ++c) {
      uint32_t most = known[c].load(std::memory_order_relaxed);
      while (most < own[c] && !known[c].compare_exchange_weak(most, own[c])) {
      }
      used[task].of[c] = ChooseUnit(std::max(most, own[c])).up;
      finite &= own[c] < kInfinityBits;
    }
    if (finite) sums.Sum(task, used[task].of);
  });
  Ups up;
  for (int64_t c = 0; c < num_channels; ++c) {
    if (known[c] >= kInfinityBits) return false;
    units[c] = ChooseUnit(known[c]);
    up.of[c] = units[c].up;
  }
  std::vector<int64_t> again;
  for (int64_t task = 0; task < sums.tasks(); ++task) {
    if (!std::equal(up.of, up.of + num_channels, used[task].of)) again.push_back(task);
  }
  ParallelFor(pool, again.size(), [&](int64_t i) { sums.Sum(again[i], up.of); });
  *totals = sums.Totals();
  return true;
}

// Sums changes as arrays, where some are not finite.
void SumMadeChanges(const Pool& pool, const GroupedRows& rows, float* sums) {
  const float *before = rows.channels.values[0], *after = rows.channels.values[1];
  std::vector<float> change(rows.num_rows), size(rows.num_rows);
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    change[i] = after[i] - before[i];
    size[i] = std::fabs(after[i]) + std::fabs(before[i]);
  }
  GroupedRows made = rows;
  made.channels = {{change.data(), size.data()}, {}, 2, false};
  SumByGroup(pool, made, sums);
}

}  // namespace

void SumByGroup(const Pool& all, const GroupedRows& rows, float* sums) {
  const Pool& pool = Threads(all, rows.num_rows);
  std::fill_n(sums, rows.channels.number * rows.num_groups, 0.0f);
  Unit units[kMaxChannels];
  std::vector<ExactSum> totals;
  if (!SumInOnePass(pool, rows, units, &totals)) {
    if (rows.channels.changes) return SumMadeChanges(all, rows, sums);
    uint32_t bits[kMaxChannels];
    FiniteRows finite(pool, rows, bits, sums);
    float up[kMaxChannels];
    for (int64_t c = 0; c < rows.channels.number; ++c) {
      units[c] = ChooseUnit(bits[c]);
      up[c] = units[c].up;
    }
    totals = SumFinite(pool, finite.rows(), up);
  }
  for (size_t i = 0; i < totals.size(); ++i) {
    sums[i] += totals[i].Value(units[i / rows.num_groups]);
  }
}

void FindGreatestByGroup(const Pool& all, const GroupedRows& rows, int32_t* bits,
                         float* others) {
  std::fill_n(others, rows.channels.number * rows.num_groups, 0.0f);
  uint32_t finite[kMaxChannels];
  FiniteRows(Threads(all, rows.num_rows), rows, finite, others);
  for (int64_t c = 0; c < rows.channels.number; ++c) {
    bits[c] = static_cast<int32_t>(finite[c]);
  }
}

void SumDigitsByGroup(const Pool& all, const GroupedRows& rows, const float* up,
                      int32_t* digits) {
  const Pool& pool = Threads(all, rows.num_rows);
  uint32_t bits[kMaxChannels];
  FiniteRows finite(pool, rows, bits, nullptr);
  std::vector<ExactSum> totals = SumFinite(pool, finite.rows(), up);
  for (size_t i = 0; i < totals.size(); ++i) totals[i].Write(digits + 4 * i);
}

namespace {

constexpr int64_t kTask = 32768;       // values of a task
constexpr int64_t kLeastRows = 65536;  // values from which on threads pay

// One row of values, and the weights or null.
struct Terms {
  const float* values;
  const float* weights;
  int64_t count;

  int64_t tasks() const { return (count + kTask - 1) / kTask; }
  int64_t size(int64_t task) const { return std::min(kTask, count - task * kTask); }
  Terms part(int64_t task) const {
    int64_t first = task * kTask;
    return {values + first, weights == nullptr ? nullptr : weights + first, size(task)};
  }
  float at(int64_t i) const {
    return weights == nullptr ? values[i] : WeightedTerms{values, weights}(i);
  }
};

// The sum of a task's terms as multiples of 1 / up; 0: not yet known.
struct Part {
  float up = 0.0f;
  ExactSum sum;
};

// The bits of the greatest finite magnitude. Adds the infinities and NaN to *others as
// floats: their order does not matter.
//
// `parts` may be null. Otherwise the terms of finite tasks are added, while they are in
// the cache, by the unit of the greatest magnitude so far, which is mostly the one of
// all terms.
uint32_t FindGreatestTerm(const Pool& pool, const Terms& terms, float* others,
                          std::vector<Part>* parts) {
  const LeafLoops& loops = JBOOST_CHOOSE(LeafLoops);
  std::vector<uint32_t> greatest(terms.tasks());
  std::atomic<uint32_t> known{0};
  ParallelFor(pool, terms.tasks(), [&](int64_t task) {
    Terms part = terms.part(task);
    uint32_t own = loops.greatest_term(part.values, part.weights, part.count);
    greatest[task] = own;
    if (parts == nullptr || own >= kInfinityBits) return;
    uint32_t most = known.load(std::memory_order_relaxed);
    while (most < own && !known.compare_exchange_weak(most, own)) {
    }
    Part& added = (*parts)[task];
    added.up = ChooseUnit(std::max(most, own)).up;
    loops.sum_terms(part.values, part.weights, part.count, added.up, &added.sum.high,
                    &added.sum.low);
  });
  uint32_t bits = 0;
  for (int64_t task = 0; task < terms.tasks(); ++task) {
    uint32_t own = greatest[task];
    if (own >= kInfinityBits) {
      own = 0;
      Terms part = terms.part(task);
      for (int64_t i = 0; i < part.count; ++i) {
        float term = part.at(i);
        IsFinite(term) ? own = std::max(own, MagnitudeBits(term)) : * others += term;
      }
    }
    bits = std::max(bits, own);
  }
  return bits;
}

// Sums the finite terms as multiples of 1 / up; `parts` are known by that unit or not.
ExactSum SumTerms(const Pool& pool, const Terms& terms, float up,
                  std::vector<Part> parts) {
  const LeafLoops& loops = JBOOST_CHOOSE(LeafLoops);
  std::vector<int64_t> left;
  for (int64_t task = 0; task < terms.tasks(); ++task) {
    if (parts[task].up != up) left.push_back(task);
  }
  ParallelFor(pool, left.size(), [&](int64_t number) {
    int64_t task = left[number];
    Terms part = terms.part(task);
    std::vector<float> finite;
    if (loops.greatest_term(part.values, part.weights, part.count) >= kInfinityBits) {
      finite.assign(part.values, part.values + part.count);
      for (int64_t i = 0; i < part.count; ++i) {
        if (!IsFinite(part.at(i))) finite[i] = 0.0f;
      }
      part.values = finite.data();
    }
    ExactSum& sum = parts[task].sum = {};
    loops.sum_terms(part.values, part.weights, part.count, up, &sum.high, &sum.low);
  });
  ExactSum total;
  for (const Part& part : parts) total.Add(part.sum);
  return total;
}

Terms TermsOf(const WeightedRows& rows, int64_t number) {
  return {rows.values + number * rows.count, rows.weights, rows.count};
}

const Pool& ThreadsOf(const Pool& pool, const WeightedRows& rows) {
  return Threads(pool, rows.num_sums * rows.count, kLeastRows);
}

}  // namespace

void SumRows(const Pool& all, const WeightedRows& rows, float* sums) {
  const Pool& pool = ThreadsOf(all, rows);
  for (int64_t k = 0; k < rows.num_sums; ++k) {
    Terms terms = TermsOf(rows, k);
    float others = 0.0f;
    std::vector<Part> parts(terms.tasks());
    Unit unit = ChooseUnit(FindGreatestTerm(pool, terms, &others, &parts));
    sums[k] = SumTerms(pool, terms, unit.up, std::move(parts)).Value(unit) + others;
  }
}

void FindGreatestOfRows(const Pool& all, const WeightedRows& rows, int32_t* bits,
                        float* others) {
  const Pool& pool = ThreadsOf(all, rows);
  for (int64_t k = 0; k < rows.num_sums; ++k) {
    others[k] = 0.0f;
    bits[k] = static_cast<int32_t>(
        FindGreatestTerm(pool, TermsOf(rows, k), others + k, nullptr));
  }
}

void SumDigitsOfRows(const Pool& all, const WeightedRows& rows, const float* up,
                     int32_t* digits) {
  const Pool& pool = ThreadsOf(all, rows);
  for (int64_t k = 0; k < rows.num_sums; ++k) {
    Terms terms = TermsOf(rows, k);
    std::vector<Part> parts(terms.tasks());
    SumTerms(pool, terms, up[k], std::move(parts)).Write(digits + 4 * k);
  }
}

void RangeByGroup(const Pool& pool, const float* values, const int32_t* group,
                  int64_t num_rows, int64_t num_groups, float* low, float* high) {
  const LeafLoops& loops = JBOOST_CHOOSE(LeafLoops);
  int64_t tasks = NumTasks(num_rows, num_groups), table = num_groups + 1;
  std::vector<float> lows(tasks * table, kInfinity), highs(tasks * table, -kInfinity);
  ParallelFor(Threads(pool, num_rows), tasks, [&](int64_t task) {
    int64_t begin = task * num_rows / tasks, end = (task + 1) * num_rows / tasks;
    loops.find_range(values + begin, group + begin, end - begin, num_groups,
                     lows.data() + task * table, highs.data() + task * table);
  });
  for (int64_t g = 0; g < num_groups; ++g) {
    low[g] = kInfinity;
    high[g] = -kInfinity;
    for (int64_t task = 0; task < tasks; ++task) {
      low[g] = std::min(low[g], lows[task * table + g]);
      high[g] = std::max(high[g], highs[task * table + g]);
    }
  }
}

void AddValues(const Pool& pool, const float* scores, const float* values,
               const int32_t* leaf, int64_t num_scores, int64_t num_rows,
               int64_t num_leaves, float* result) {
  const LeafLoops& loops = JBOOST_CHOOSE(LeafLoops);
  int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  // The last entry is for ignored rows. Unlike x + 0, x + -0 is x for both zeros.
  std::vector<float> tables(num_scores * (num_leaves + 1), -0.0f);
  for (int64_t k = 0; k < num_scores; ++k) {
    std::copy_n(values + k * num_leaves, num_leaves,
                tables.data() + k * (num_leaves + 1));
  }
  ParallelFor(Threads(pool, num_scores * num_rows), num_scores * tasks,
              [&](int64_t number) {
                int64_t k = number / tasks, begin = number % tasks * kRowsPerTask;
                int64_t count = std::min(kRowsPerTask, num_rows - begin);
                int64_t first = k * num_rows + begin;
                loops.add_values(scores + first, tables.data() + k * (num_leaves + 1),
                                 num_leaves, leaf + first, count, result + first);
              });
}

// Order statistics by group without sorting all rows. A sample gives, for each group,
// an interval that almost surely contains its key. One pass over all rows sums the
// kinks of rows below the interval and lists the rows inside, which are then searched.
// If the key turns out to lie elsewhere, all rows of the group are listed. Sums are of
// integers, so the result does not depend on the order of rows.
namespace {

constexpr int64_t kStride = 32;         // of the sample
constexpr int64_t kSampled = 1 << 16;   // rows below which no sample is drawn
constexpr int64_t kFewCandidates = 24;  // so few are sorted
constexpr int kRounds = 64;             // of quickselect before everything is sorted
constexpr double kSigmas = 3.5;         // half the width of a sample's interval

bool ByKey(const Candidate& a, const Candidate& b) { return a.key < b.key; }

// Returns a pivot: a quantile of 15 keys, at about the wanted share of the sum.
float GuessKey(const Candidate* list, int64_t n, double share) {
  constexpr int kKeys = 15;
  float keys[kKeys];
  for (int i = 0; i < kKeys; ++i) {
    float key = list[(2 * i + 1) * n / (2 * kKeys)].key;
    int place = i;
    for (; place > 0 && keys[place - 1] > key; --place) keys[place] = keys[place - 1];
    keys[place] = key;
  }
  return keys[std::clamp(static_cast<int>(share * kKeys), 0, kKeys - 1)];
}

// Moves the chosen candidates to the front, without branches; returns their number and
// the sum of their kinks.
template <class Chosen>
int64_t Partition(Candidate* list, int64_t n, uint64_t* sum, Chosen chosen) {
  int64_t front = 0;
  uint64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    Candidate one = list[i];
    bool yes = chosen(one.key);
    list[i] = list[front];
    list[front] = one;
    front += yes;
    total += yes ? one.kink : 0;
  }
  *sum = total;
  return front;
}

// Quickselect: the least key such that the kinks up to it sum to `wanted` or more.
// `sum` is the sum of all kinks.
float SelectKey(Candidate* list, int64_t n, uint64_t wanted, uint64_t sum) {
  for (int round = 0; n > kFewCandidates && round < kRounds; ++round) {
    float pivot = GuessKey(list, n, static_cast<double>(wanted) / sum);
    uint64_t less, equal;
    int64_t num_less =
        Partition(list, n, &less, [=](float key) { return key < pivot; });
    if (wanted <= less) {
      n = num_less;
      sum = less;
      continue;
    }
    list += num_less;
    n -= num_less;
    wanted -= less;
    int64_t num_equal =
        Partition(list, n, &equal, [=](float key) { return key <= pivot; });
    if (wanted <= equal) return pivot;
    list += num_equal;
    n -= num_equal;
    wanted -= equal;
    sum -= less + equal;
  }
  std::sort(list, list + n, ByKey);
  if (n == 0) return 0.0f;  // only if sums have overflowed
  int64_t i = 0;
  for (; i + 1 < n && wanted > list[i].kink; ++i) wanted -= list[i].kink;
  return list[i].key;
}

// A part of a list that contains the keys of both wanted sums, `first` and `last`.
struct Span {
  Candidate* list;
  int64_t n;
  uint64_t first, last, sum;
};

// Copies the part of a span between two quantiles of a sample to `scratch`. Returns
// false if it does not contain both wanted keys, or is not half as long.
bool Shorten(Span* span, Candidate* scratch) {
  constexpr int64_t kKeys = 64;
  float keys[kKeys];
  for (int64_t i = 0; i < kKeys; ++i) {
    keys[i] = span->list[(2 * i + 1) * span->n / (2 * kKeys)].key;
  }
  std::sort(keys, keys + kKeys);
  double share = static_cast<double>(span->first) / span->sum;
  int64_t middle = static_cast<int64_t>(share * kKeys);
  // 9 of 64 keys are at least 2.25 standard deviations.
  float low = middle < 9 ? -kInfinity : keys[middle - 9];
  float high = middle + 9 >= kKeys ? kInfinity : keys[middle + 9];
  uint64_t below = 0, inside = 0;
  int64_t size = 0;
  for (int64_t i = 0; i < span->n; ++i) {
    Candidate one = span->list[i];
    uint64_t is_below = one.key < low, is_inside = (one.key >= low) & (one.key <= high);
    below += one.kink & -is_below;
    inside += one.kink & -is_inside;
    scratch[size] = one;
    size += is_inside;
  }
  if (span->first <= below || span->last > below + inside) return false;
  if (2 * size > span->n) return false;
  *span = {scratch, size, span->first - below, span->last - below, inside};
  return true;
}

// Finds the keys at which the sum of kinks reaches the first and the last wanted sum.
void SelectKeys(Span span, Candidate* scratch, float* low, float* high) {
  constexpr int64_t kShort = 256;
  while (span.n > kShort && Shorten(&span, scratch)) scratch += span.n;
  *low = SelectKey(span.list, span.n, span.first, span.sum);
  *high = SelectKey(span.list, span.n, span.last, span.sum);
}

struct KinkGroup {
  float low, high;             // the keys of candidates lie between
  uint64_t left, kink;         // sums of all rows
  uint64_t below, candidates;  // kinks of rows below `low`, and of candidates
};

// Candidates of group g are [begin[g], begin[g + 1]).
struct Grouped {
  std::vector<KinkGroup> groups;
  std::vector<int64_t> begin;
  std::unique_ptr<Candidate[]> candidates;
};

// What each task finds.
struct Parts {
  int64_t num_tasks, table;    // the number of groups, and one for ignored rows
  std::vector<uint64_t> left;  // [tasks, table]
  std::vector<uint64_t> kink;  // [tasks, table, kSides]
  std::vector<int64_t> size;   // of each task's list
  std::vector<int64_t>
      place;  // [tasks, table]: numbers of candidates; then their places
};

// Adds up what the tasks have found, and assigns places to their candidates.
void MergeParts(Parts* parts, Grouped* grouped) {
  int64_t num_groups = parts->table - 1, total = 0;
  grouped->begin.assign(num_groups + 1, 0);
  for (int64_t g = 0; g < num_groups; ++g) {
    KinkGroup& group = grouped->groups[g];
    group = {group.low, group.high, 0, 0, 0, 0};
    grouped->begin[g] = total;
    for (int64_t task = 0; task < parts->num_tasks; ++task) {
      int64_t at = task * parts->table + g;
      const uint64_t* kink = parts->kink.data() + at * kSides;
      group.left += parts->left[at];
      group.below += kink[kBelow];
      group.candidates += kink[kInside];
      group.kink += kink[kBelow] + kink[kInside] + kink[kAbove];
      int64_t count = parts->place[at];
      parts->place[at] = total;
      total += count;
    }
  }
  grouped->begin[num_groups] = total;
}

// Sums every stride-th row by group, and lists each group's candidates.
void CollectGroups(const Pool& pool, const KinkRows& rows, int64_t num_groups,
                   int64_t stride, Grouped* grouped) {
  const LeafLoops& loops = JBOOST_CHOOSE(LeafLoops);
  int64_t samples = (rows.num_rows + stride - 1) / stride, table = num_groups + 1;
  int64_t tasks = NumTasks(samples, num_groups);
  Parts parts{tasks,
              table,
              std::vector<uint64_t>(tasks * table),
              std::vector<uint64_t>(tasks * table * kSides),
              std::vector<int64_t>(tasks),
              std::vector<int64_t>(tasks * table)};
  std::vector<float> low(table, kNowhere), high(table, kNowhere);
  for (int64_t g = 0; g < num_groups; ++g) {
    low[g] = grouped->groups[g].low;
    high[g] = grouped->groups[g].high;
  }
  // Each task has room for all its rows. Most of this memory is never touched.
  std::unique_ptr<Candidate[]> lists(new Candidate[samples + 1]);
  ParallelFor(pool, tasks, [&](int64_t task) {
    int64_t begin = task * samples / tasks, end = (task + 1) * samples / tasks;
    Candidate* list = lists.get() + begin;
    KinkSums sums{low.data(), high.data(), parts.left.data() + task * table,
                  parts.kink.data() + task * table * kSides};
    parts.size[task] =
        loops.collect(rows, begin * stride, std::min(end * stride, rows.num_rows),
                      stride, num_groups, sums, list);
    int64_t* count = parts.place.data() + task * table;
    for (int64_t i = 0; i < parts.size[task]; ++i) ++count[list[i].group];
  });
  MergeParts(&parts, grouped);
  grouped->candidates.reset(new Candidate[grouped->begin[num_groups] + 1]);
  ParallelFor(pool, tasks, [&](int64_t task) {
    const Candidate* from = lists.get() + task * samples / tasks;
    const Candidate* end = from + parts.size[task];
    Candidate* to = grouped->candidates.get();
    int64_t* place = parts.place.data() + task * table;
    for (; from < end; ++from) to[place[from->group]++] = *from;
  });
}

// Narrows a group's `low` and `high` to an interval where the sample expects the key.
void NarrowGroup(Candidate* list, int64_t n, KinkGroup* group) {
  double squares = 0, sum = static_cast<double>(group->kink);
  if (group->kink == 0) return;
  for (int64_t i = 0; i < n; ++i) {
    squares += static_cast<double>(list[i].kink) * static_cast<double>(list[i].kink);
  }
  double number = sum * sum / squares;  // effective sample size (Kish)
  double share = static_cast<double>(group->left) / sum;
  double error = (kSigmas * std::sqrt(share * (1 - share) * number) + 2) / number;
  double low = (share - error) * sum, high = (share + error) * sum;
  if (low >= 1) {
    group->low = SelectKey(list, n, static_cast<uint64_t>(low), group->kink);
  }
  if (high <= sum - 1) {
    group->high = SelectKey(list, n, static_cast<uint64_t>(high), group->kink);
  }
}

// Finds the value of one group; false if it does not lie among the candidates.
bool FindValue(Candidate* list, int64_t n, const KinkGroup& group, float* value) {
  *value = 0.0f;
  if (group.kink == 0) return true;
  // Slopes below 2^-20 of the sum of kinks count as 0.
  uint64_t slack = group.kink >> 20;
  uint64_t first = group.left > slack ? group.left - slack : 1;
  uint64_t last = group.left + slack + 1;
  first = std::min(first, group.kink);
  last = std::min(last, group.kink);
  if (first <= group.below || last > group.below + group.candidates) return false;
  // Each call of Shorten halves the list at least, so 2 n places suffice.
  std::unique_ptr<Candidate[]> scratch(new Candidate[2 * n]);
  float low, high;
  SelectKeys({list, n, first - group.below, last - group.below, group.candidates},
             scratch.get(), &low, &high);
  *value = low / 2 + high / 2;
  return true;
}

}  // namespace

void MiddleMinimisers(const Pool& all, const KinkRows& rows, int64_t num_groups,
                      float* values) {
  const Pool& pool = Threads(all, rows.num_rows);
  Grouped grouped;
  grouped.groups.assign(num_groups, {-kInfinity, kInfinity, 0, 0, 0, 0});
  auto of_group = [&](int64_t g) {
    return grouped.candidates.get() + grouped.begin[g];
  };
  auto size = [&](int64_t g) { return grouped.begin[g + 1] - grouped.begin[g]; };
  if (rows.num_rows >= kSampled) {
    CollectGroups(pool, rows, num_groups, kStride, &grouped);
    ParallelFor(pool, num_groups, [&](int64_t g) {
      NarrowGroup(of_group(g), size(g), &grouped.groups[g]);
    });
  }
  std::vector<uint8_t> found(num_groups, 0);
  for (bool again = true; again;) {
    CollectGroups(pool, rows, num_groups, 1, &grouped);
    ParallelFor(pool, num_groups, [&](int64_t g) {
      if (found[g]) return;
      found[g] = FindValue(of_group(g), size(g), grouped.groups[g], values + g);
    });
    again = false;
    for (int64_t g = 0; g < num_groups; ++g) {
      again |= !found[g];
      grouped.groups[g].low = found[g] ? kNowhere : -kInfinity;
      grouped.groups[g].high = found[g] ? kNowhere : kInfinity;
    }
  }
}

namespace {

// Adds what the tasks have summed, [tasks, size], and writes it as pairs, [2, size].
void WritePairs(const std::vector<uint64_t>& sums, int64_t size, int32_t* pairs) {
  constexpr int kLow = 20;
  for (int64_t i = 0; i < size; ++i) {
    uint64_t sum = 0;
    for (size_t at = i; at < sums.size(); at += size) sum += sums[at];
    pairs[i] = static_cast<int32_t>(sum >> kLow);
    pairs[size + i] = static_cast<int32_t>(sum & ((1 << kLow) - 1));
  }
}

}  // namespace

void SumKinks(const Pool& pool, const KinkRows& rows, int64_t num_groups,
              int32_t* pairs) {
  const LeafLoops& loops = JBOOST_CHOOSE(LeafLoops);
  int64_t tasks = NumTasks(rows.num_rows, num_groups), table = num_groups + 1;
  std::vector<float> nowhere(table, kNowhere);  // so no row is a candidate
  std::vector<uint64_t> sums(tasks * 2 * table), kinks(tasks * table * kSides);
  ParallelFor(Threads(pool, rows.num_rows), tasks, [&](int64_t task) {
    uint64_t *left = sums.data() + task * 2 * table, *kink = left + table;
    uint64_t* by_side = kinks.data() + task * table * kSides;
    KinkSums parts{nowhere.data(), nowhere.data(), left, by_side};
    loops.collect(rows, task * rows.num_rows / tasks,
                  (task + 1) * rows.num_rows / tasks, 1, num_groups, parts, nullptr);
    for (int64_t g = 0; g < num_groups; ++g) kink[g] = by_side[g * kSides + kBelow];
    left[num_groups] = 0;
  });
  WritePairs(sums, 2 * table, pairs);
}

void SumKinksByDigit(const Pool& pool, const KinkRows& rows, int64_t num_groups,
                     const KeyDigit& digit, int32_t* pairs) {
  const LeafLoops& loops = JBOOST_CHOOSE(LeafLoops);
  int64_t size = kEnds * (num_groups + 1) << digit.bits;
  int64_t least = std::max(kRowsPerTask, 4 * size);  // rows that outweigh a table
  int64_t tasks = std::clamp<int64_t>(rows.num_rows / least, 1, 128);
  std::vector<uint64_t> sums(tasks * size);
  ParallelFor(Threads(pool, rows.num_rows), tasks, [&](int64_t task) {
    loops.sum_digits(rows, task * rows.num_rows / tasks,
                     (task + 1) * rows.num_rows / tasks, num_groups, digit,
                     sums.data() + task * size);
  });
  WritePairs(sums, size, pairs);
}

}  // namespace jboost
