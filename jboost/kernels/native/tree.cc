// SPDX-License-Identifier: Apache-2.0
#include "tree.h"

#include <algorithm>
#include <vector>

#include "sampling.h"

namespace jboost {
namespace {

// The constraints that the slots of a level inherit from their paths.
class Paths {
 public:
  Paths(const TreeInput& input, int64_t num_slots, int64_t num_features,
        float* leaf_bounds)
      : input_(input),
        num_features_(num_features),
        free_(input.max_leaves - 1),
        leaf_bounds_(leaf_bounds) {
    if (input.bounds != nullptr) {
      bounds_.resize(2 * num_slots);
      Fill(bounds_.data(), num_slots);
      Fill(leaf_bounds, int64_t{1} << input.max_depth);
    }
    if (input.groups != nullptr) used_.assign(num_slots * num_features, 0);
  }

  const float* bounds() const { return bounds_.data(); }
  bool MayGrow() const { return input_.max_leaves == 0 || free_ > 0; }

  // Leaves in the mask of a slot what the features on its path allow.
  void Restrict(int64_t slot, uint8_t* mask) const {
    if (!MayGrow()) std::fill_n(mask, num_features_, 0);
    if (input_.groups == nullptr) return;
    const uint8_t* used = used_.data() + slot * num_features_;
    if (std::find(used, used + num_features_, 1) == used + num_features_) return;
    std::vector<uint8_t> allowed(used, used + num_features_);
    for (int64_t group = 0; group < input_.num_groups; ++group) {
      const uint8_t* members = input_.groups + group * num_features_;
      bool holds_path = true;
      for (int64_t f = 0; f < num_features_; ++f) holds_path &= members[f] >= used[f];
      if (!holds_path) continue;
      for (int64_t f = 0; f < num_features_; ++f) allowed[f] |= members[f];
    }
    for (int64_t f = 0; f < num_features_; ++f) mask[f] &= allowed[f];
  }

  // Keeps the splits of highest gain while leaves remain, ties to the lower slot.
  void KeepBest(int64_t num_slots, const float* gain, uint8_t* found) {
    if (input_.max_leaves == 0) return;
    std::vector<int64_t> order;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      if (found[slot]) order.push_back(slot);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return gain[a] > gain[b]; });
    for (size_t rank = 0; rank < order.size(); ++rank) {
      if (static_cast<int64_t>(rank) >= free_) found[order[rank]] = 0;
    }
  }

  // Passes constraints to slots 2r and 2r + 1, the children of source[r].
  // `position`: of the parents.
  void Descend(int64_t level, const Splits& splits, const int32_t* position,
               const float* child_bounds, const int32_t* source, int64_t num_slots) {
    for (int64_t slot = 0; slot < num_slots; ++slot) free_ -= splits.found[slot] != 0;
    if (input_.bounds != nullptr) {
      for (int64_t slot = 0; slot < num_slots; ++slot) {
        if (!splits.found[slot]) continue;
        // Leaves under a node that is not split are its leftmost.
        int64_t child = 2 * static_cast<int64_t>(position[slot]);
        for (int64_t side = 0; side < 2; ++side) {
          int64_t leaf = (child + side) << (input_.max_depth - 1 - level);
          std::copy_n(child_bounds + 4 * slot + 2 * side, 2, leaf_bounds_ + 2 * leaf);
        }
      }
    }
    std::vector<float> bounds = bounds_;
    std::vector<uint8_t> used = used_;
    for (int64_t pair = 0; 2 * pair + 1 < num_slots && source[pair] >= 0; ++pair) {
      int64_t parent = source[pair];
      if (!bounds.empty()) {
        std::copy_n(child_bounds + 4 * parent, 4, bounds.data() + 4 * pair);
      }
      for (int64_t side = 0; side < 2 && !used.empty(); ++side) {
        uint8_t* own = used.data() + (2 * pair + side) * num_features_;
        std::copy_n(used_.data() + parent * num_features_, num_features_, own);
        own[splits.feature[parent]] = 1;
      }
    }
    bounds_.swap(bounds);
    used_.swap(used);
  }

 private:
  void Fill(float* bounds, int64_t count) const {
    for (int64_t i = 0; i < 2 * count; ++i) bounds[i] = input_.bounds[i % 2];
  }

  const TreeInput& input_;
  int64_t num_features_;
  int64_t free_;               // leaves that may still be added
  float* leaf_bounds_;         // of each leaf, as far as the tree has grown
  std::vector<float> bounds_;  // [slots, 2]: of the leaf values below each slot's node
  std::vector<uint8_t> used_;  // [slots, F]: features on the path
};

// The splits of a level, and what finds them.
struct Level {
  Level(int64_t num_slots, int64_t num_features, int64_t num_words)
      : feature(num_slots),
        threshold(num_slots),
        missing_left(num_slots),
        gain(num_slots),
        found(num_slots),
        child_bounds(4 * num_slots),
        masks(num_slots * num_features),
        left_codes(num_slots * num_words),
        absent_codes(num_slots * num_words) {}

  SplitOutput output() {
    return {feature.data(), threshold.data(), missing_left.data(), gain.data(),
            found.data()};
  }
  Splits splits() const {
    Splits splits{feature.data(), threshold.data(), missing_left.data(), found.data()};
    if (!left_codes.empty()) {
      splits.left_codes = left_codes.data();
      splits.absent_codes = absent_codes.data();
    }
    return splits;
  }

  std::vector<int32_t> feature, threshold;
  std::vector<uint8_t> missing_left;
  std::vector<float> gain;
  std::vector<uint8_t> found;
  std::vector<float> child_bounds;
  std::vector<uint8_t> masks;
  std::vector<uint32_t> left_codes, absent_codes;
};

// Finds the best splits of a level by thresholds and by sets of categories.
void FindLevel(const Pool& pool, const TreeInput& input, const Paths& paths,
               const Rows& rows, int64_t num_rows, float greatest_square, Search search,
               Level* level) {
  LimitsOfSlots values{input.l1, paths.bounds(), input.monotone,
                       level->child_bounds.data()};
  const LimitsOfSlots* limited = input.bounds == nullptr ? nullptr : &values;
  search.masks = level->masks.data();
  if (input.categories == nullptr) {
    FindSplits(pool, search, limited, level->output());
    return;
  }
  int64_t num_slots = search.num_slots();
  const CategoryLimits& categories = *input.categories;
  Level numeric(num_slots, search.num_features, 0);
  numeric.masks = level->masks;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    for (int64_t group = 0; group < categories.num_groups; ++group) {
      numeric.masks[slot * search.num_features + categories.features[group]] = 0;
    }
  }
  Search free = search;
  free.masks = numeric.masks.data();
  // It is subtracted last: rounding could otherwise make gains equal.
  free.min_gain = 0.0f;
  FindSplits(pool, free, limited, numeric.output());
  int64_t num_words = static_cast<int64_t>(level->left_codes.size()) / num_slots;
  std::vector<float> squares(num_slots);
  SumSquares(pool, rows, num_rows, search.position, greatest_square, squares.data());
  FindCategorySplits(pool, search, limited, categories,
                     {numeric.feature.data(), numeric.threshold.data(),
                      numeric.missing_left.data(), numeric.gain.data()},
                     squares.data(),
                     {level->output(), level->left_codes.data(),
                      level->absent_codes.data(), num_words});
  for (int64_t slot = 0; slot < num_slots && limited != nullptr; ++slot) {
    if (level->threshold[slot] >= 0) continue;
    // Sets of categories have no order to preserve.
    for (int64_t i = 0; i < 4; ++i) {
      level->child_bounds[4 * slot + i] = paths.bounds()[2 * slot + i % 2];
    }
  }
}

bool Sum(const Pool& pool, const Codes& codes, const TreeScratch& scratch,
         const std::vector<NodeSum>& nodes) {
  int64_t count = static_cast<int64_t>(nodes.size());
  return codes.sparse == nullptr
             ? SumNodes(pool, codes, scratch.rows, nodes.data(), count,
                        scratch.histograms)
             : SumSparseNodes(pool, codes, scratch.rows, nodes.data(), count,
                              scratch.histograms, scratch.sparse_rows);
}

void StartTree(const TreeInput& input, const Codes& codes, int64_t num_bins,
               const TreeOutput& output) {
  int64_t nodes = (int64_t{1} << input.max_depth) - 1;
  const TreeArrays& tree = output.tree;
  std::fill_n(tree.feature, nodes, 0);
  std::fill_n(tree.threshold, nodes, static_cast<int32_t>(num_bins - 1));
  std::fill_n(tree.missing_left, nodes, 1);
  std::fill_n(tree.left_codes, nodes * tree.num_words, 0u);
  std::fill_n(output.leaf, codes.num_rows, 0);
}

}  // namespace

bool GrowTree(const Pool& pool, const Codes& codes, const TreeInput& input,
              const TreeScratch& scratch, const TreeOutput& output) {
  const Histograms& histograms = scratch.histograms;
  int64_t num_slots = histograms.num_slots, num_features = codes.num_features;
  StartTree(input, codes, histograms.num_bins, output);
  float units[2];
  StartRows(pool, codes.num_rows, input.gradient, input.curvature, input.in_bag,
            input.seed, input.uniform, scratch.rows, units);
  if (!Sum(pool, codes, scratch, {{0, 0, -1}})) return false;

  float greatest_square = 0.0f;
  if (input.categories != nullptr) {
    greatest_square = FindGreatestSquare(pool, scratch.rows, codes.num_rows);
  }
  Paths paths(input, num_slots, num_features, output.leaf_bounds);
  Level level(num_slots, num_features, output.tree.num_words);
  std::vector<int32_t> position(num_slots, -1), place(num_slots, 0);
  std::vector<int32_t> source(std::max<int64_t>(1, num_slots / 2));
  std::vector<uint8_t> left_smaller(source.size());
  position[0] = 0;
  Search search{};
  search.histograms = histograms;
  search.num_features = num_features;
  search.limits = input.limits;
  search.limits.gradient_unit = units[0];
  search.limits.curvature_unit = units[1];
  search.min_gain = input.min_gain;
  LevelState state{scratch.rows, output.tree,   position.data(),
                   output.leaf,  source.data(), left_smaller.data()};
  for (int64_t depth = 0; depth < input.max_depth && position[0] >= 0; ++depth) {
    SampleFeatures(input.seed, static_cast<int32_t>(depth), input.fractions, num_slots,
                   num_features, level.masks.data());
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      if (position[slot] < 0) continue;
      paths.Restrict(slot, level.masks.data() + slot * num_features);
    }
    search.place = place.data();
    search.position = position.data();
    FindLevel(pool, input, paths, scratch.rows, codes.num_rows, greatest_square, search,
              &level);
    paths.KeepBest(num_slots, level.gain.data(), level.found.data());
    std::vector<int32_t> parents = position;
    if (!SplitRows(pool, codes, level.splits(), depth, input.max_depth, state)) {
      return false;
    }
    paths.Descend(depth, level.splits(), parents.data(), level.child_bounds.data(),
                  source.data(), num_slots);
    if (!paths.MayGrow() || depth + 1 == input.max_depth) continue;
    std::vector<NodeSum> nodes;
    std::vector<int32_t> old_place = place;
    Children children{source.data(), left_smaller.data(), old_place.data(),
                      place.data(),  num_slots,           num_slots / 2};
    if (!PlaceChildren(children, &nodes)) return false;
    if (!Sum(pool, codes, scratch, nodes)) return false;
  }
  // The loop has written the leaves of the rows in the bag.
  TreeNodes tree{output.tree.feature, output.tree.threshold, output.tree.missing_left,
                 output.tree.left_codes, output.tree.num_words};
  auto find = codes.sparse == nullptr ? FindLeaves : FindSparseLeaves;
  return find(pool, codes, tree, input.max_depth, input.in_bag, output.leaf);
}

}  // namespace jboost
