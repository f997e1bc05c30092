// SPDX-License-Identifier: Apache-2.0
#include "sorted.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

namespace jboost {
namespace {

uint32_t CodeOf(uint64_t entry) { return static_cast<uint32_t>(entry >> 32); }
uint32_t RowOf(uint64_t entry) { return static_cast<uint32_t>(entry); }

// The rows of a slot's node: positions among the entries, and sums (of gradient,
// curvature, and what is compared with the least number of rows).
struct Group {
  int64_t begin = 0, size = 0;
  int32_t total[3] = {0, 0, 0};
  int32_t mass = 0;  // where there is one
};

// The best split of a node by one feature.
struct FeatureSplit {
  BestSplit best{-__builtin_inff(), 0, 0, false};
  int32_t left[2] = {0, 0};
  bool is_missing = false;  // above the threshold are only missing values
};

// A tree while it grows.
struct Growth {
  const Pool& pool;
  const SortedCodes& codes;
  const TreeLimits& limits;  // in the units of the search
  const SortedRows& rows;
  const TreeState& state;
  std::vector<Group> groups;        // [slots]
  std::vector<uint8_t> goes_right;  // [N], of rows of split nodes
  std::vector<FeatureSplit> best;   // [slots]
  int32_t mass_of_each = -1;        // row in the bag; -1: they differ
  int64_t level = 0;

  int64_t num_slots() const { return state.histograms.num_slots; }
  // If all rows have the same curvature, its sum counts rows.
  void CountRows(Group* group) const {
    group->total[2] =
        rows.uniform ? group->total[1] : static_cast<int32_t>(group->size);
  }
  const uint64_t* Entries(int64_t feature) const {
    return rows.entries[level % 2] + feature * codes.num_rows;
  }
};

// Writes the rows in the bag in order of each feature. Returns false if they are not
// all there, each once: that they are keeps what follows within its memory.
template <class Code>
bool MakeEntries(const Growth& growth, int64_t num_in_bag) {
  const SortedCodes& codes = growth.codes;
  int64_t num_rows = codes.num_rows;
  std::atomic<bool> whole{true};
  ParallelFor(
      Threads(growth.pool, num_rows * growth.limits.num_features),
      growth.limits.num_features, [&](int64_t feature) {
        const int32_t* order = codes.order + feature * num_rows;
        const Code* column =
            static_cast<const Code*>(codes.columns) + feature * num_rows;
        uint64_t* entries = growth.rows.entries[0] + feature * num_rows;
        bool inside = true;
        for (int64_t i = 0; i < num_rows; ++i) {
          inside &= static_cast<uint64_t>(order[i]) < static_cast<uint64_t>(num_rows);
        }
        int64_t kept = 0;
        std::vector<uint8_t> waits(growth.rows.in_bag, growth.rows.in_bag + num_rows);
        for (int64_t i = 0; i < num_rows && inside; ++i) {
          uint32_t row = static_cast<uint32_t>(order[i]);
          entries[kept] = static_cast<uint64_t>(column[row]) << 32 | row;
          kept += waits[row] != 0;
          waits[row] = 0;
        }
        if (kept != num_in_bag) whole = false;
      });
  return whole;
}

// Finds the best split of a slot by one feature.
class FeatureSearch {
 public:
  FeatureSearch(const Growth& growth, int64_t feature)
      : growth_(growth),
        feature_(feature),
        is_limited_(growth.limits.bounds != nullptr),
        sums_(new ValueSums) {}

  FeatureSplit Find(int64_t slot) {
    const SortedLoops& loops = JBOOST_CHOOSE(SortedLoops);
    const Group& group = growth_.groups[slot];
    FeatureSplit found;
    sweep_ = {};
    sweep_.entries = growth_.Entries(feature_) + group.begin;
    sweep_.size = group.size;
    sweep_.words = growth_.rows.words;
    sweep_.bin = -1;
    int64_t used = SumMissing();
    if (sweep_.at == sweep_.size) return found;
    bool binned = growth_.rows.mass != nullptr;
    ValueBins bins;
    if (binned) {
      bins = MakeBins(group);
      sweep_.bins = &bins;
    }
    LimitsOfSlots limited{growth_.limits.l1, growth_.state.bounds, nullptr};
    NodeScore node = ScoreNode(group.total, growth_.limits.limits,
                               is_limited_ ? &limited : nullptr, slot);
    for (bool last = false; !last;) {
      used = loops.sum_values(&sweep_, used, sums_.get());
      last = sweep_.at == sweep_.size;
      // The latest bin may still get values.
      int64_t complete = used - (binned && !last), free_from = complete;
      if (last && is_limited_) Copy(used - 1, complete++);
      if (complete > 1) Search(group, node, complete, free_from, &found);
      if (!binned) used = 1;
      if (binned && used > 1) {
        Copy(used - 1, 1);
        used = 2;
      }
    }
    return found;
  }

 private:
  // Passes the missing values, which come first; returns the number of sums.
  int64_t SumMissing() {
    Sweep& sweep = sweep_;
    while (sweep.at < sweep.size && CodeOf(sweep.entries[sweep.at]) == 0) {
      sweep.word += sweep.words[RowOf(sweep.entries[sweep.at++])];
    }
    sweep.missing = sweep.at;
    int32_t low = static_cast<int32_t>(sweep.word);
    sums_->gradient[0] = low;
    sums_->curvature[0] = static_cast<int32_t>((sweep.word - low) >> 32);
    sums_->count[0] = static_cast<int32_t>(sweep.at);
    if (sweep.at == 0 || sweep.at == sweep.size ||
        CodeOf(sweep.entries[sweep.at]) == 1) {
      return 1;
    }
    Copy(0, 1);  // all values may go right
    return 2;
  }

  ValueBins MakeBins(const Group& group) const {
    const SortedRows& rows = growth_.rows;
    float num_bins = static_cast<float>(rows.num_bins);
    int32_t each = growth_.mass_of_each, known = group.mass;
    if (each >= 0) {
      known -= each * static_cast<int32_t>(sweep_.missing);
    } else {
      for (int64_t i = 0; i < sweep_.missing; ++i) {
        known -= rows.mass[RowOf(sweep_.entries[i])];
      }
    }
    return {each >= 0 ? nullptr : rows.mass, each, num_bins,
            static_cast<float>(std::max(known, 1))};
  }

  void Copy(int64_t from, int64_t to) {
    sums_->gradient[to] = sums_->gradient[from];
    sums_->curvature[to] = sums_->curvature[from];
    sums_->count[to] = sums_->count[from];
  }

  // The code of a threshold: the highest among the rows on its left.
  int32_t ThresholdOf(int64_t at, bool is_missing) const {
    if (is_missing) return kMostCodes - 1;
    int64_t count = sums_->count[at];
    if (count == sweep_.missing) return 1;
    return static_cast<int32_t>(CodeOf(sweep_.entries[count - 1]));
  }

  void Search(const Group& group, const NodeScore& node, int64_t size,
              int64_t free_from, FeatureSplit* found) {
    const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
    const ValueSums& sums = *sums_;
    const SplitLimits& limits = growth_.limits.limits;
    const int32_t* count = growth_.rows.uniform ? sums.curvature : sums.count;
    int32_t feature = static_cast<int32_t>(feature_);
    BestSplit best{-__builtin_inff(), feature, 0, false};
    loops.search({sums.gradient, sums.curvature, count, size}, group.total, node,
                 limits, is_limited_ ? growth_.limits.monotone[feature] : 0, free_from,
                 feature, gains_, &best);
    // Of equal gains that of the lower threshold is kept.
    if (!(best.gain > found->best.gain)) return;
    int32_t at = best.threshold;
    found->is_missing = at >= free_from;
    found->left[0] = sums.gradient[at] - (best.missing_left ? 0 : sums.gradient[0]);
    found->left[1] = sums.curvature[at] - (best.missing_left ? 0 : sums.curvature[0]);
    best.threshold = ThresholdOf(at, found->is_missing);
    found->best = best;
  }

  const Growth& growth_;
  int64_t feature_;
  bool is_limited_;
  Sweep sweep_;
  std::unique_ptr<ValueSums> sums_;
  float gains_[ValueSums::kSize];
};

// Divides the entries of a feature among the children of the groups that `before` had.
void DivideEntries(const Growth& growth, const std::vector<Group>& before,
                   int64_t feature) {
  const SortedLoops& loops = JBOOST_CHOOSE(SortedLoops);
  const uint64_t* from =
      growth.rows.entries[(growth.level + 1) % 2] + feature * growth.codes.num_rows;
  uint64_t* to =
      growth.rows.entries[growth.level % 2] + feature * growth.codes.num_rows;
  for (size_t pair = 0; pair < before.size(); ++pair) {
    loops.divide(from + before[pair].begin, before[pair].size, growth.goes_right.data(),
                 growth.groups[2 * pair].begin, growth.groups[2 * pair + 1].begin, to);
  }
}

// Finds the best split of each slot; `before` are the groups of the parents.
void SearchLevel(Growth* growth, const std::vector<Group>& before) {
  const TreeState& state = growth->state;
  int64_t num_slots = growth->num_slots(), num_features = growth->limits.num_features;
  std::vector<uint8_t> masks = MaskFeatures(growth->limits, growth->level, state);
  std::vector<FeatureSplit> found(num_features * num_slots);
  int64_t num_rows = 0;
  for (const Group& group : growth->groups) num_rows += group.size;
  ParallelFor(Threads(growth->pool, num_rows * num_features), num_features,
              [&](int64_t feature) {
                DivideEntries(*growth, before, feature);
                FeatureSearch search(*growth, feature);
                for (int64_t slot = 0; slot < num_slots; ++slot) {
                  if (state.position[slot] < 0) continue;
                  if (!masks[slot * num_features + feature]) continue;
                  found[feature * num_slots + slot] = search.Find(slot);
                }
              });
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    FeatureSplit& best = growth->best[slot];
    best = {};
    for (int64_t feature = 0; feature < num_features; ++feature) {
      const FeatureSplit& own = found[feature * num_slots + slot];
      if (own.best.gain > best.best.gain) best = own;
    }
  }
}

// Writes the splits of a level.
SplitMemory WriteLevel(const Growth& growth) {
  const TreeLimits& limits = growth.limits;
  SplitMemory memory(growth.num_slots(), 0);
  const Splits& splits = memory.splits;
  std::copy_n(growth.state.position, growth.num_slots(), splits.position);
  LimitsOfSlots values{limits.l1, growth.state.bounds, limits.monotone};
  const LimitsOfSlots* limited = limits.bounds == nullptr ? nullptr : &values;
  for (int64_t slot = 0; slot < growth.num_slots(); ++slot) {
    if (splits.position[slot] < 0) continue;
    const FeatureSplit& best = growth.best[slot];
    const int32_t* total = growth.groups[slot].total;
    WriteSplit(slot, best.best, best.left, total, best.is_missing,
               ScoreNode(total, limits.limits, limited, slot), limits.limits,
               limits.min_gain, limited, splits);
  }
  KeepBest(limits, growth.state, splits);
  return memory;
}

// Sends the rows of split nodes down, on the last level to their leaves; and those of
// the other nodes to their leaves. Returns what lies on either side.
std::vector<Sides> RouteGroups(Growth* growth, const Splits& splits) {
  int64_t num_slots = growth->num_slots(), max_depth = growth->limits.max_depth;
  bool last = growth->level == max_depth - 1;
  std::vector<Sides> sides(num_slots);
  ParallelFor(Threads(growth->pool, growth->codes.num_rows), num_slots,
              [&](int64_t slot) {
                if (splits.position[slot] < 0) return;
                const Group& group = growth->groups[slot];
                bool found = splits.found[slot] != 0;
                const uint64_t* entries =
                    growth->Entries(found ? splits.feature[slot] : 0) + group.begin;
                int32_t* leaf = growth->rows.leaf;
                if (!found) {
                  int32_t value = splits.position[slot] << (max_depth - growth->level);
                  for (int64_t i = 0; i < group.size; ++i)
                    leaf[RowOf(entries[i])] = value;
                  return;
                }
                uint32_t threshold = static_cast<uint32_t>(splits.threshold[slot]);
                uint8_t missing_right = splits.missing_left[slot] ? 0 : 1;
                Sides own;
                for (int64_t i = 0; i < group.size; ++i) {
                  uint32_t code = CodeOf(entries[i]), row = RowOf(entries[i]);
                  uint8_t right = code == 0 ? missing_right : code > threshold;
                  own.missing += code == 0;
                  own.right += right;
                  growth->goes_right[row] = right;
                  if (last) leaf[row] = 2 * splits.position[slot] + right;
                }
                own.left = group.size - own.right;
                sides[slot] = own;
              });
  return sides;
}

// The mass of the rows of a split node that go left.
int32_t SumLeftMass(const Growth& growth, const uint64_t* entries, int64_t size,
                    int64_t num_left) {
  if (growth.rows.mass == nullptr) return 0;
  if (growth.mass_of_each >= 0) {
    return growth.mass_of_each * static_cast<int32_t>(num_left);
  }
  int32_t sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    uint32_t row = RowOf(entries[i]);
    sum += growth.goes_right[row] ? 0 : growth.rows.mass[row];
  }
  return sum;
}

// Finds the mass of all rows in the bag, and whether theirs are equal.
void StartMass(Growth* growth) {
  const SortedRows& rows = growth->rows;
  if (rows.mass == nullptr) return;
  uint32_t sum = 0;
  int32_t least = INT32_MAX, most = 0;
  for (int64_t row = 0; row < growth->codes.num_rows; ++row) {
    if (rows.in_bag[row] == 0) continue;
    int32_t mass = rows.mass[row];
    sum += static_cast<uint32_t>(mass);
    least = std::min(least, mass);
    most = std::max(most, mass);
  }
  growth->groups[0].mass = static_cast<int32_t>(sum);
  if (least == most) growth->mass_of_each = most;
}

// Gives the children of the r-th split slots 2r and 2r + 1. Returns the groups of
// their parents.
std::vector<Group> DivideGroups(Growth* growth, const Splits& splits,
                                const std::vector<Sides>& sides) {
  std::vector<Group> parents, children(growth->num_slots());
  for (int64_t slot = 0; slot < growth->num_slots(); ++slot) {
    if (!splits.found[slot]) continue;
    const Group& parent = growth->groups[slot];
    const int32_t* left = growth->best[slot].left;
    Group* pair = children.data() + 2 * parents.size();
    int32_t mass =
        SumLeftMass(*growth, growth->Entries(splits.feature[slot]) + parent.begin,
                    parent.size, sides[slot].left);
    pair[0] = {parent.begin, sides[slot].left, {left[0], left[1], 0}, mass};
    pair[1] = {parent.begin + sides[slot].left,
               sides[slot].right,
               {parent.total[0] - left[0], parent.total[1] - left[1], 0},
               parent.mass - mass};
    for (int side = 0; side < 2; ++side) growth->CountRows(pair + side);
    parents.push_back(parent);
  }
  growth->groups = std::move(children);
  return parents;
}

// Finds the leaves of the rows out of the bag.
template <class Code>
void FindOtherLeaves(const Growth& growth) {
  const SortedCodes& codes = growth.codes;
  const TreeArrays& tree = growth.state.tree;
  const Code* columns = static_cast<const Code*>(codes.columns);
  int64_t num_rows = codes.num_rows, max_depth = growth.limits.max_depth;
  ParallelFor(Threads(growth.pool, num_rows), NumChunks(num_rows), [&](int64_t chunk) {
    int64_t end = std::min((chunk + 1) * kChunk, num_rows);
    for (int64_t row = chunk * kChunk; row < end; ++row) {
      if (growth.rows.in_bag[row] != 0) continue;
      int64_t node = 0;
      for (int64_t level = 0; level < max_depth; ++level) {
        uint32_t code = columns[tree.feature[node] * num_rows + row];
        bool right = code == 0 ? !tree.missing_left[node]
                               : code > static_cast<uint32_t>(tree.threshold[node]);
        node = 2 * node + 1 + right;
      }
      growth.rows.leaf[row] =
          static_cast<int32_t>(node - ((int64_t{1} << max_depth) - 1));
    }
  });
}

// Rounds the derivatives, and puts the rows in the bag into slot 0.
void StartGroups(const Rounding& rounding, int64_t num_in_bag, Growth* growth) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  const SortedRows& rows = growth->rows;
  int64_t num_rows = growth->codes.num_rows;
  std::vector<int64_t> sums(NumChunks(num_rows));
  ParallelFor(Threads(growth->pool, num_rows), NumChunks(num_rows), [&](int64_t chunk) {
    int64_t first = chunk * kChunk, count = std::min(kChunk, num_rows - first);
    loops.quantise(rows, first, count, 0, rounding, growth->limits.seed,
                   rows.words + first);
    for (int64_t row = first; row < first + count; ++row) {
      sums[chunk] += rows.in_bag[row] != 0 ? rows.words[row] : 0;
    }
  });
  int64_t sum = 0;
  for (int64_t part : sums) sum += part;
  Group& root = growth->groups[0];
  root.size = num_in_bag;
  root.total[0] = static_cast<int32_t>(sum);
  root.total[1] = static_cast<int32_t>((sum - root.total[0]) >> 32);
  growth->CountRows(&root);
  StartMass(growth);
}

template <class Code>
bool Grow(Growth* growth) {
  if (!MakeEntries<Code>(*growth, growth->groups[0].size)) return false;
  const TreeState& state = growth->state;
  std::vector<Group> parents;
  for (; growth->level < growth->limits.max_depth && state.position[0] >= 0;
       ++growth->level) {
    SearchLevel(growth, parents);
    SplitMemory level = WriteLevel(*growth);
    const Splits& splits = level.splits;
    if (!HaveSlots(growth->limits, growth->level, splits, state)) return false;
    std::vector<Sides> sides = RouteGroups(growth, splits);
    FinishLevel(growth->limits, growth->level, splits, sides.data(), state);
    if (growth->level + 1 < growth->limits.max_depth) {
      parents = DivideGroups(growth, splits, sides);
    }
  }
  FindOtherLeaves<Code>(*growth);
  return true;
}

}  // namespace

bool GrowSortedTree(const Pool& pool, const SortedCodes& codes, const TreeLimits& given,
                    const SortedRows& rows, const TreeState& nodes) {
  int64_t num_slots = nodes.histograms.num_slots;
  float units[2];
  int64_t num_in_bag;
  Rounding rounding = ChooseRounding(pool, rows, units, &num_in_bag);
  SearchLimits search(given, units);
  const TreeLimits& limits = search.limits;
  GrowingTree growing(limits, nodes);
  TreeState& state = growing.state;
  state.histograms.num_bins = kMostCodes;
  StartTree(limits, state);
  Growth growth{pool, codes, limits, rows, state, {}, {}, {}, -1, 0};
  growth.groups.resize(num_slots);
  growth.best.resize(num_slots);
  growth.goes_right.resize(codes.num_rows);
  StartGroups(rounding, num_in_bag, &growth);
  bool grown = codes.code_size == 1   ? Grow<uint8_t>(&growth)
               : codes.code_size == 2 ? Grow<uint16_t>(&growth)
                                      : Grow<uint32_t>(&growth);
  search.RestoreBounds(int64_t{1} << limits.max_depth, state.leaf_bounds);
  return grown;
}

bool Propose(const Pool& pool, const SortedCodes& codes, const int32_t* mass,
             const Proposal& proposal) {
  const SortedLoops& loops = JBOOST_CHOOSE(SortedLoops);
  int64_t num_rows = codes.num_rows, num_bins = proposal.num_bins;
  int64_t total = 0;
  bool equal = true, positive = true;
  for (int64_t row = 0; row < num_rows; ++row) {
    total += mass[row];
    equal &= mass[row] == mass[0];
    positive &= mass[row] >= 0;
  }
  if (!positive || total > INT32_MAX) return false;
  std::atomic<bool> inside{true};
  ParallelFor(Threads(pool, num_rows * codes.num_columns), codes.num_columns,
              [&](int64_t feature) {
                SortedCodes column = codes;
                column.columns = static_cast<const char*>(codes.columns) +
                                 feature * num_rows * codes.code_size;
                column.order += feature * num_rows;
                ValueBins bins{equal ? nullptr : mass, mass[0],
                               static_cast<float>(num_bins - 1), 0.0f};
                bool found = loops.propose(
                    column, bins, static_cast<int32_t>(total), num_bins, proposal.wide,
                    static_cast<char*>(proposal.codes) +
                        feature * num_rows * (proposal.wide ? 2 : 1),
                    proposal.highest + feature * num_bins);
                if (!found) inside = false;
              });
  return inside;
}

}  // namespace jboost
