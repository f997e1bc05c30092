// SPDX-License-Identifier: Apache-2.0
#include "leaves.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

namespace jboost {
namespace {

constexpr int64_t kSerial = 20000;  // rows below which threads cost more
constexpr int64_t kRowsPerTask = 16384;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

const LeafLoops& ChooseLeafLoops() {
#ifdef JBOOST_X86
  return ChooseLoops(baseline::kLeafLoops, avx2::kLeafLoops, avx512::kLeafLoops);
#else
  return baseline::kLeafLoops;
#endif
}

Pool PoolFor(const Pool& pool, int64_t work) { return work < kSerial ? Pool() : pool; }

// Tasks of rows with a table of groups each: the tables shall not outweigh the rows.
int64_t NumTasks(int64_t num_rows, int64_t num_groups) {
  int64_t rows = std::max(kRowsPerTask, 16 * num_groups);
  return std::clamp<int64_t>(num_rows / rows, 1, 128);
}

}  // namespace

void SumByGroup(const Pool& pool, const float* const* channels, int64_t num_channels,
                const int32_t* group, int64_t num_rows, int64_t num_groups,
                float* sums) {
  const LeafLoops& loops = ChooseLeafLoops();
  int64_t blocks = std::clamp<int64_t>(
      num_rows / std::max<int64_t>(256, num_groups), 1, 128);
  int64_t length = (num_rows + blocks - 1) / blocks;
  int64_t table = (num_groups + 1) * num_channels;
  // In tasks of kLockstep blocks; the last ones may be empty.
  int64_t tasks = (blocks + kLockstep - 1) / kLockstep;
  std::vector<float> tables(tasks * kLockstep * table, 0.0f);
  ParallelFor(PoolFor(pool, num_rows), tasks, [&](int64_t task) {
    int64_t begin[kLockstep], end[kLockstep];
    float* sums_of[kLockstep];
    for (int64_t b = 0; b < kLockstep; ++b) {
      int64_t block = task * kLockstep + b;
      begin[b] = std::min(block * length, num_rows);
      end[b] = std::min(begin[b] + length, num_rows);
      sums_of[b] = tables.data() + block * table;
    }
    loops.sum_blocks(channels, num_channels, group, num_groups, begin, end, sums_of);
  });
  for (int64_t c = 0; c < num_channels; ++c) {
    float* result = sums + c * num_groups;
    std::fill(result, result + num_groups, 0.0f);
    for (int64_t block = 0; block < blocks; ++block) {
      const float* from = tables.data() + block * table + c;
      for (int64_t g = 0; g < num_groups; ++g) result[g] += from[g * num_channels];
    }
  }
}

void RangeByGroup(const Pool& pool, const float* values, const int32_t* group,
                  int64_t num_rows, int64_t num_groups, float* low, float* high) {
  const LeafLoops& loops = ChooseLeafLoops();
  int64_t tasks = NumTasks(num_rows, num_groups), table = num_groups + 1;
  std::vector<float> lows(tasks * table, kInfinity), highs(tasks * table, -kInfinity);
  ParallelFor(PoolFor(pool, num_rows), tasks, [&](int64_t task) {
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
  const LeafLoops& loops = ChooseLeafLoops();
  int64_t tasks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  // One entry more: x + -0 is x, of both zeros, too.
  std::vector<float> tables(num_scores * (num_leaves + 1), -0.0f);
  for (int64_t k = 0; k < num_scores; ++k) {
    std::copy_n(values + k * num_leaves, num_leaves,
                tables.data() + k * (num_leaves + 1));
  }
  ParallelFor(PoolFor(pool, num_scores * num_rows), num_scores * tasks,
              [&](int64_t number) {
                int64_t k = number / tasks, begin = number % tasks * kRowsPerTask;
                int64_t count = std::min(kRowsPerTask, num_rows - begin);
                int64_t first = k * num_rows + begin;
                loops.add_values(scores + first, tables.data() + k * (num_leaves + 1),
                                 num_leaves, leaf + first, count, result + first);
              });
}

// Order statistics by group without sorting all rows: a sample tells between which two
// keys each group's lies, almost surely; one pass over all rows sums what is below and
// lists what is between; the list is searched. Where the sample led astray, all rows of
// the group are listed. Sums are of integers, so that nothing depends on the order.
namespace {

constexpr int64_t kStride = 32;           // of the sample
constexpr int64_t kSampled = 1 << 16;     // rows below which all are listed at once
constexpr int64_t kFewCandidates = 24;    // that are sorted
constexpr int kRounds = 64;               // of quickselect before everything is sorted
constexpr double kSigmas = 3.5;           // half the width of an interval

bool ByKey(const Candidate& a, const Candidate& b) { return a.key < b.key; }

float MedianKey(const Candidate* list, int64_t n) {
  float a = list[n / 8].key, b = list[n / 2].key, c = list[n - 1 - n / 8].key;
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}

// Moves what is chosen to the front without branches; returns how many, and their sum.
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

// The least key such that the kinks up to it sum to `wanted` or more.
float SelectKey(Candidate* list, int64_t n, uint64_t wanted) {
  for (int round = 0; n > kFewCandidates && round < kRounds; ++round) {
    float pivot = MedianKey(list, n);
    uint64_t less, equal;
    int64_t num_less =
        Partition(list, n, &less, [=](float key) { return key < pivot; });
    if (wanted <= less) {
      n = num_less;
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
  }
  std::sort(list, list + n, ByKey);
  int64_t i = 0;
  for (; i + 1 < n && wanted > list[i].kink; ++i) wanted -= list[i].kink;
  return list[i].key;
}

// As SelectKey, for a second sum that is no less than the first, whose key is known.
float SelectNextKey(Candidate* list, int64_t n, uint64_t wanted, float first) {
  uint64_t sum = 0, next_sum = 0;
  float next = kInfinity;
  for (int64_t i = 0; i < n; ++i) {
    float key = list[i].key;
    if (key <= first) {
      sum += list[i].kink;
    } else if (list[i].kink > 0 && key <= next) {
      next_sum = key == next ? next_sum + list[i].kink : list[i].kink;
      next = key;
    }
  }
  if (wanted <= sum) return first;
  return wanted <= sum + next_sum ? next : SelectKey(list, n, wanted);
}

// All candidates, grouped; those of group g are [begin[g], begin[g + 1]).
struct Grouped {
  std::vector<KinkGroup> groups;
  std::vector<int64_t> begin;
  std::unique_ptr<Candidate[]> candidates;
};

// Every stride-th row; `groups` says which keys are candidates.
void CollectGroups(const Pool& pool, const KinkRows& rows, int64_t num_groups,
                   int64_t stride, Grouped* grouped) {
  const LeafLoops& loops = ChooseLeafLoops();
  std::vector<KinkGroup>& groups = grouped->groups;
  int64_t samples = (rows.num_rows + stride - 1) / stride;
  int64_t tasks = NumTasks(samples, num_groups);
  int64_t table_size = num_groups + 1;  // the last one takes rows outside
  std::vector<KinkGroup> tables(tasks * table_size);
  std::vector<int64_t> sizes(tasks);
  // A task's candidates lie where its rows would, so that most of this stays untouched.
  std::unique_ptr<Candidate[]> lists(new Candidate[samples + 1]);
  ParallelFor(pool, tasks, [&](int64_t task) {
    KinkGroup* table = tables.data() + task * table_size;
    for (int64_t g = 0; g < num_groups; ++g) {
      table[g] = {0, 0, 0, groups[g].low, groups[g].high, 0};
    }
    table[num_groups] = {0, 0, 0, kInfinity, -kInfinity, 0};
    int64_t begin = task * samples / tasks, end = (task + 1) * samples / tasks;
    sizes[task] = loops.collect(rows, begin * stride,
                                std::min(end * stride, rows.num_rows), stride,
                                num_groups, table, lists.get() + begin);
  });
  // Where each group begins, and each task within it.
  std::vector<int64_t> place(tasks * num_groups);
  grouped->begin.assign(num_groups + 1, 0);
  int64_t total = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    groups[g] = {0, 0, 0, groups[g].low, groups[g].high, 0};
    grouped->begin[g] = total;
    for (int64_t task = 0; task < tasks; ++task) {
      const KinkGroup& part = tables[task * table_size + g];
      groups[g].left += part.left;
      groups[g].kink += part.kink;
      groups[g].below += part.below;
      place[task * num_groups + g] = total;
      total += part.num_candidates;
    }
  }
  grouped->begin[num_groups] = total;
  grouped->candidates.reset(new Candidate[total + 1]);
  ParallelFor(pool, tasks, [&](int64_t task) {
    const Candidate* from = lists.get() + task * samples / tasks;
    int64_t* to = place.data() + task * num_groups;
    for (int64_t i = 0; i < sizes[task]; ++i) {
      grouped->candidates[to[from[i].group]++] = from[i];
    }
  });
}

// Between which keys the sample expects the wanted one.
void NarrowGroup(Candidate* list, int64_t n, KinkGroup* group) {
  double sum = 0, squares = 0, left = static_cast<double>(group->left);
  for (int64_t i = 0; i < n; ++i) {
    double kink = static_cast<double>(list[i].kink);
    sum += kink;
    squares += kink * kink;
  }
  if (sum <= 0) return;
  double number = sum * sum / squares;  // as many equal rows say as much (Kish)
  double share = left / sum;
  double error = (kSigmas * std::sqrt(share * (1 - share) * number) + 2) / number;
  double low = (share - error) * sum, high = (share + error) * sum;
  if (low >= 1) group->low = SelectKey(list, n, static_cast<uint64_t>(low));
  if (high <= sum - 1) group->high = SelectKey(list, n, static_cast<uint64_t>(high));
}

// The value of one group; false if it does not lie among the candidates.
bool FindValue(Candidate* list, int64_t n, const KinkGroup& group, float* value) {
  *value = 0.0f;
  if (group.kink == 0) return true;
  // Slopes within 2^-20 of their sum are no slopes.
  uint64_t slack = group.kink >> 20, below = group.below;
  uint64_t first = group.left > slack ? group.left - slack : 1;
  uint64_t last = group.left + slack + 1;
  first = std::min(first, group.kink);
  last = std::min(last, group.kink);
  uint64_t listed = 0;
  for (int64_t i = 0; i < n; ++i) listed += list[i].kink;
  if (first <= below || last > below + listed) return false;
  float low = SelectKey(list, n, first - below);
  float high = SelectNextKey(list, n, last - below, low);
  *value = low / 2 + high / 2;
  return true;
}

}  // namespace

void MiddleMinimisers(const Pool& all, const KinkRows& rows, int64_t num_groups,
                      float* values) {
  Pool pool = PoolFor(all, rows.num_rows);
  Grouped grouped;
  grouped.groups.assign(num_groups, {0, 0, 0, -kInfinity, kInfinity, 0});
  auto of_group = [&](int64_t g) { return grouped.candidates.get() + grouped.begin[g]; };
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
      grouped.groups[g].low = found[g] ? kInfinity : -kInfinity;
      grouped.groups[g].high = found[g] ? -kInfinity : kInfinity;
    }
  }
}

}  // namespace jboost
