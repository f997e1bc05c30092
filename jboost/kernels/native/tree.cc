// SPDX-License-Identifier: Apache-2.0
#include "tree.h"

#include <algorithm>
#include <cfloat>
#include <vector>

#include "exact_sum.h"
#include "sampling.h"

namespace jboost {
namespace {

bool MayGrow(const TreeLimits& limits, const TreeState& state) {
  return limits.max_leaves == 0 || *state.free > 0;
}

// Leaves in the mask of a slot what the features on its path allow.
void Restrict(const TreeLimits& limits, const TreeState& state, int64_t slot,
              uint8_t* mask) {
  int64_t num_features = limits.num_features;
  if (!MayGrow(limits, state)) std::fill_n(mask, num_features, 0);
  if (limits.groups == nullptr) return;
  const uint8_t* used = state.used + slot * num_features;
  if (std::find(used, used + num_features, 1) == used + num_features) return;
  std::vector<uint8_t> allowed(used, used + num_features);
  for (int64_t group = 0; group < limits.num_groups; ++group) {
    const uint8_t* members = limits.groups + group * num_features;
    bool holds_path = true;
    for (int64_t f = 0; f < num_features; ++f) holds_path &= members[f] >= used[f];
    if (!holds_path) continue;
    for (int64_t f = 0; f < num_features; ++f) allowed[f] |= members[f];
  }
  for (int64_t f = 0; f < num_features; ++f) mask[f] &= allowed[f];
}

// A node that is split.
struct Parent {
  int64_t slot;
  bool left_smaller;  // the left child has no more rows than the right
};

// Writes the splits into the tree, decides where missing values go, and gives slots to
// the children: 2r and 2r + 1 to those of the r-th parent.
std::vector<Parent> SettleSplits(const TreeLimits& limits, int64_t level,
                                 const Splits& splits, const Sides* sides,
                                 const TreeState& state) {
  const TreeArrays& tree = state.tree;
  int64_t num_slots = state.histograms.num_slots;
  std::vector<int32_t> children(num_slots, -1);
  std::vector<Parent> parents;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (!splits.found[slot]) continue;
    const Sides& own = sides[slot];
    int32_t position = state.position[slot];
    int64_t node = (int64_t{1} << level) - 1 + position;
    tree.feature[node] = splits.feature[slot];
    tree.threshold[node] = splits.threshold[slot];
    // If the node has no missing value, these go to the child with more rows.
    tree.missing_left[node] = own.missing > 0
                                  ? splits.missing_left[slot]
                                  : static_cast<uint8_t>(own.left >= own.right);
    // Categories that no row of the node has go where missing values go.
    for (int64_t word = 0; word < tree.num_words; ++word) {
      int64_t at = slot * tree.num_words + word;
      uint32_t absent = tree.missing_left[node] ? splits.absent_codes[at] : 0u;
      tree.left_codes[node * tree.num_words + word] = splits.left_codes[at] | absent;
    }
    if (level + 1 == limits.max_depth) continue;
    children[2 * parents.size()] = 2 * position;
    children[2 * parents.size() + 1] = 2 * position + 1;
    parents.push_back({slot, own.left <= own.right});
  }
  std::copy(children.begin(), children.end(), state.position);
  return parents;
}

// Chooses which children are summed, and where the histograms of both go: the larger
// child takes its parent's place, the smaller one a place that no parent holds. Returns
// nothing if parents share a place.
std::vector<NodeSum> PlaceChildren(const std::vector<Parent>& parents,
                                   const TreeState& state) {
  int64_t num_slots = state.histograms.num_slots, free_place = 0, child = 0;
  std::vector<int32_t> old_place(state.place, state.place + num_slots);
  std::vector<uint8_t> taken(num_slots, 0);
  std::fill_n(state.place, num_slots, 0);
  for (const Parent& parent : parents) {
    if (taken[old_place[parent.slot]]++ != 0) return {};
  }
  std::vector<NodeSum> nodes;
  for (const Parent& parent : parents) {
    while (taken[free_place]) ++free_place;
    int32_t place = old_place[parent.slot];
    int64_t small = child + !parent.left_smaller, large = child + parent.left_smaller;
    state.place[small] = static_cast<int32_t>(free_place);
    state.place[large] = place;
    nodes.push_back({small, free_place++, place});
    child += 2;
  }
  return nodes;
}

// Passes constraints to the slots of the children.
void Descend(const TreeLimits& limits, int64_t level, const Splits& splits,
             const std::vector<Parent>& parents, const TreeState& state) {
  int64_t num_slots = state.histograms.num_slots, num_features = limits.num_features;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (!splits.found[slot]) continue;
    if (limits.max_leaves > 0) --*state.free;
    if (state.bounds == nullptr) continue;
    // Leaves under a node that is not split are its leftmost.
    int64_t child = 2 * static_cast<int64_t>(splits.position[slot]);
    for (int64_t side = 0; side < 2; ++side) {
      int64_t leaf = (child + side) << (limits.max_depth - 1 - level);
      std::copy_n(splits.child_bounds + 4 * slot + 2 * side, 2,
                  state.leaf_bounds + 2 * leaf);
    }
  }
  std::vector<uint8_t> used;
  if (state.used != nullptr) {
    used.assign(state.used, state.used + num_slots * num_features);
  }
  for (size_t pair = 0; pair < parents.size(); ++pair) {
    int64_t parent = parents[pair].slot;
    if (state.bounds != nullptr) {
      std::copy_n(splits.child_bounds + 4 * parent, 4, state.bounds + 4 * pair);
    }
    for (int64_t side = 0; side < 2 && state.used != nullptr; ++side) {
      uint8_t* own = state.used + (2 * pair + side) * num_features;
      std::copy_n(used.data() + parent * num_features, num_features, own);
      own[splits.feature[parent]] = 1;
    }
  }
}

// Finds the better ones of splits by thresholds (also on codes of categories, which are
// in the order of their weights) and by sets of categories.
void FindMixedSplits(const Pool& pool, const Search& search,
                     const LimitsOfSlots* limited, const CategoryLimits& categories,
                     const float* squares, const Splits& level) {
  int64_t num_slots = search.num_slots();
  SplitMemory numeric(num_slots, 0);
  numeric.splits.child_bounds = level.child_bounds;
  std::vector<uint8_t> masks(search.masks,
                             search.masks + num_slots * search.num_features);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    for (int64_t group = 0; group < categories.num_groups; ++group) {
      if (categories.HasThresholds(search, group)) continue;
      masks[slot * search.num_features + categories.features[group]] = 0;
    }
  }
  Search free = search;
  free.masks = masks.data();
  // It is subtracted last: rounding could otherwise make gains equal.
  free.min_gain = 0.0f;
  FindSplits(pool, free, limited, numeric.splits);
  FindCategorySplits(pool, search, limited, categories, numeric.splits, squares, level);
  for (int64_t slot = 0; slot < num_slots && limited != nullptr; ++slot) {
    if (level.threshold[slot] >= 0) continue;
    // Sets of categories have no order to preserve.
    for (int64_t i = 0; i < 4; ++i) {
      level.child_bounds[4 * slot + i] = limited->bounds[2 * slot + i % 2];
    }
  }
}

bool Sum(const Pool& pool, const Codes& codes, const TreeRows& rows,
         const Histograms& histograms, const std::vector<NodeSum>& nodes) {
  int64_t count = static_cast<int64_t>(nodes.size());
  return codes.sparse == nullptr
             ? SumNodes(pool, codes, rows.rows, nodes.data(), count, histograms)
             : SumSparseNodes(pool, codes, rows.rows, nodes.data(), count, histograms,
                              rows.sparse_rows);
}

}  // namespace

SearchLimits::SearchLimits(const TreeLimits& given, const float units[2])
    : limits(given), given_bounds_(given.bounds), bounds_{} {
  int gradient = ExponentAbove(units[0]);
  int wanted = std::min(ExponentAbove(units[1]) >> 1, 30);
  scale_ = PowerOfTwo(std::clamp(wanted - gradient + 1, -126, 126));
  limits.limits.gradient_unit = units[0] * scale_;
  limits.limits.curvature_unit = units[1];
  limits.min_gain = given.min_gain * scale_ * scale_;
  if (given.bounds == nullptr) return;
  limits.l1 = std::min(given.l1 * scale_, FLT_MAX);
  for (int i = 0; i < 2; ++i) {
    bounds_[i] = std::clamp(given.bounds[i] * scale_, -FLT_MAX, FLT_MAX);
  }
  limits.bounds = bounds_;
}

void SearchLimits::RestoreBounds(int64_t num_leaves, float* bounds) const {
  if (given_bounds_ == nullptr) return;
  for (int64_t i = 0; i < 2 * num_leaves; ++i) {
    bool kept = bounds[i] == bounds_[i % 2];
    bounds[i] = kept ? given_bounds_[i % 2] : bounds[i] / scale_;
  }
}

SplitMemory::SplitMemory(int64_t num_slots, int64_t num_words)
    : splits{},
      numbers_(3 * num_slots),
      flags_(2 * num_slots),
      floats_(5 * num_slots),
      sets_(2 * num_slots * num_words) {
  splits.feature = numbers_.data();
  splits.threshold = splits.feature + num_slots;
  splits.position = splits.threshold + num_slots;
  splits.missing_left = flags_.data();
  splits.found = splits.missing_left + num_slots;
  splits.gain = floats_.data();
  splits.child_bounds = splits.gain + num_slots;
  if (num_words == 0) return;
  splits.num_words = num_words;
  splits.left_codes = sets_.data();
  splits.absent_codes = splits.left_codes + num_slots * num_words;
}

GrowingTree::GrowingTree(const TreeLimits& limits, const TreeState& nodes)
    : state(nodes),
      position_(nodes.histograms.num_slots),
      place_(nodes.histograms.num_slots),
      bounds_(limits.bounds == nullptr ? 0 : 2 * nodes.histograms.num_slots),
      used_(limits.groups == nullptr
                ? 0
                : nodes.histograms.num_slots * limits.num_features) {
  state.free = &free_;
  state.position = position_.data();
  state.place = place_.data();
  state.bounds = bounds_.empty() ? nullptr : bounds_.data();
  state.used = used_.empty() ? nullptr : used_.data();
}

void StartTree(const TreeLimits& limits, const TreeState& state) {
  int64_t nodes = (int64_t{1} << limits.max_depth) - 1;
  int64_t num_slots = state.histograms.num_slots;
  const TreeArrays& tree = state.tree;
  std::fill_n(tree.feature, nodes, 0);
  std::fill_n(tree.threshold, nodes,
              static_cast<int32_t>(state.histograms.num_bins - 1));
  std::fill_n(tree.missing_left, nodes, 1);
  std::fill_n(tree.left_codes, nodes * tree.num_words, 0u);
  std::fill_n(state.position, num_slots, -1);
  std::fill_n(state.place, num_slots, 0);
  state.position[0] = 0;
  *state.free = static_cast<int32_t>(limits.max_leaves - 1);
  for (int64_t i = 0; i < 2 * num_slots && state.bounds != nullptr; ++i) {
    state.bounds[i] = limits.bounds[i % 2];
  }
  for (int64_t i = 0; i < 2 * (nodes + 1) && state.bounds != nullptr; ++i) {
    state.leaf_bounds[i] = limits.bounds[i % 2];
  }
  if (state.used != nullptr) {
    std::fill_n(state.used, num_slots * limits.num_features, 0);
  }
}

std::vector<uint8_t> MaskFeatures(const TreeLimits& limits, int64_t level,
                                  const TreeState& state) {
  int64_t num_slots = state.histograms.num_slots, num_features = limits.num_features;
  std::vector<uint8_t> masks(num_slots * num_features);
  SampleFeatures(limits.seed, static_cast<int32_t>(level), limits.fractions, num_slots,
                 num_features, masks.data());
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (state.position[slot] < 0) continue;
    Restrict(limits, state, slot, masks.data() + slot * num_features);
  }
  return masks;
}

void KeepBest(const TreeLimits& limits, const TreeState& state, const Splits& splits) {
  if (limits.max_leaves == 0) return;
  std::vector<int64_t> order;
  for (int64_t slot = 0; slot < state.histograms.num_slots; ++slot) {
    if (splits.found[slot]) order.push_back(slot);
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return splits.gain[a] > splits.gain[b];
  });
  for (size_t rank = 0; rank < order.size(); ++rank) {
    if (static_cast<int64_t>(rank) >= *state.free) splits.found[order[rank]] = 0;
  }
}

void FindLevel(const Pool& pool, const TreeLimits& limits, int64_t level,
               const float* squares, const TreeState& state, const Splits& splits) {
  int64_t num_slots = state.histograms.num_slots, num_features = limits.num_features;
  std::copy_n(state.position, num_slots, splits.position);
  std::vector<uint8_t> masks = MaskFeatures(limits, level, state);
  Search search{state.histograms,         num_features, state.place,
                state.position,           masks.data(), limits.limits,
                limits.min_gain,          limits.seed,  level,
                limits.rows_per_threshold};
  LimitsOfSlots values{limits.l1, state.bounds, limits.monotone};
  const LimitsOfSlots* limited = limits.bounds == nullptr ? nullptr : &values;
  if (limits.categories == nullptr) {
    FindSplits(pool, search, limited, splits);
  } else {
    FindMixedSplits(pool, search, limited, *limits.categories, squares, splits);
  }
  KeepBest(limits, state, splits);
}

bool HaveSlots(const TreeLimits& limits, int64_t level, const Splits& splits,
               const TreeState& state) {
  int64_t slots = state.histograms.num_slots;
  int64_t num_found = slots - std::count(splits.found, splits.found + slots, 0);
  return level + 1 == limits.max_depth || 2 * num_found <= slots;
}

std::vector<NodeSum> FinishLevel(const TreeLimits& limits, int64_t level,
                                 const Splits& splits, const Sides* sides,
                                 const TreeState& state) {
  std::vector<Parent> parents = SettleSplits(limits, level, splits, sides, state);
  Descend(limits, level, splits, parents, state);
  if (!MayGrow(limits, state) || level + 1 == limits.max_depth) return {};
  return PlaceChildren(parents, state);
}

void JoinSums(const Pool& pool, const NodeSum* nodes, int64_t num_nodes,
              const int32_t* sums, int64_t num_features, const Histograms& histograms) {
  int64_t table = histograms.num_channels * num_features * histograms.num_bins;
  ParallelFor(Threads(pool, num_nodes * table), num_nodes, [&](int64_t number) {
    const NodeSum& node = nodes[number];
    const int32_t* own = sums + number * table;
    std::copy_n(own, table, histograms.sums + node.place * table);
    if (node.sibling_place < 0) return;
    int32_t* sibling = histograms.sums + node.sibling_place * table;
    for (int64_t i = 0; i < table; ++i) sibling[i] -= own[i];
  });
}

bool GrowTree(const Pool& pool, const Codes& codes, const TreeLimits& given,
              const TreeRows& rows, const TreeState& nodes) {
  int64_t num_slots = nodes.histograms.num_slots, num_rows = codes.num_rows;
  float units[2];
  int64_t num_in_bag;
  Rounding rounding = ChooseRounding(pool, rows, units, &num_in_bag);
  PlaceRows(pool, rows, given.seed, rounding, 0, rows.rows);
  SearchLimits search(given, units);
  const TreeLimits& limits = search.limits;
  GrowingTree growing(limits, nodes);
  const TreeState& state = growing.state;
  StartTree(limits, state);
  std::fill_n(rows.leaf, num_rows, 0);
  int32_t greatest = 0;
  if (limits.categories != nullptr) {
    greatest = FindGreatestGradient(pool, rows.rows, num_rows);
  }
  std::vector<int32_t> digits(4 * num_slots);
  std::vector<float> squares(num_slots);
  std::vector<Sides> sides(num_slots);
  SplitMemory memory(num_slots, state.tree.num_words);
  const Splits& splits = memory.splits;
  if (!Sum(pool, codes, rows, state.histograms, {{0, 0, -1}})) return false;
  for (int64_t level = 0; level < limits.max_depth && state.position[0] >= 0; ++level) {
    if (limits.categories != nullptr) {
      SumSquares(pool, rows.rows, num_rows, greatest, num_slots, digits.data());
      for (int64_t slot = 0; slot < num_slots; ++slot) {
        squares[slot] = JoinSquares(digits.data() + 4 * slot, greatest);
      }
    }
    FindLevel(pool, limits, level, squares.data(), state, splits);
    if (!HaveSlots(limits, level, splits, state) ||
        !RouteRows(pool, codes, splits, level, limits.max_depth, rows.rows, rows.leaf,
                   sides.data())) {
      return false;
    }
    std::vector<NodeSum> children =
        FinishLevel(limits, level, splits, sides.data(), state);
    if (children.empty()) continue;
    if (!Sum(pool, codes, rows, state.histograms, children)) return false;
  }
  search.RestoreBounds(int64_t{1} << limits.max_depth, state.leaf_bounds);
  // The loop has written the leaves of the rows in the bag.
  auto find = codes.sparse == nullptr ? FindLeaves : FindSparseLeaves;
  return find(pool, codes, state.tree, limits.max_depth, rows.in_bag, rows.leaf);
}

}  // namespace jboost
