// SPDX-License-Identifier: Apache-2.0
#include "shap.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "linear.h"
#include "scratch.h"

namespace jboost {
namespace {

constexpr int64_t kPackedBytes = 1 << 22;  // of trees that are packed together
constexpr int64_t kBlockBytes = 1 << 18;   // of sums for a block of rows
constexpr int64_t kMostRows = 64;          // of a block at most
constexpr float kTiny = std::numeric_limits<float>::min();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The tree of one score in one round: its number is round * K + score. In heap order,
// the numbers of leaves follow those of nodes.
class TreeView {
 public:
  TreeView(const ShapTrees& trees, int64_t number)
      : trees_(trees),
        number_(number),
        inner_(trees.num_nodes),
        first_(number / trees.scores_per_tree() * trees.num_nodes),
        first_leaf_(number * trees.num_leaves()) {}

  bool linked() const { return trees_.left_child != nullptr; }
  int64_t num_nodes() const { return linked() ? inner_ : 2 * inner_ + 1; }
  int64_t Left(int64_t node) const {
    return linked() ? trees_.left_child[first_ + node] : 2 * node + 1;
  }
  bool IsLeaf(int64_t node) const {
    return linked() ? Left(node) == node : node >= inner_;
  }
  bool IsSplit(int64_t node) const {
    return !(Threshold(node) == kInfinity && MissingLeft(node));
  }
  int32_t Feature(int64_t node) const { return trees_.feature[first_ + node]; }
  float Threshold(int64_t node) const { return trees_.threshold[first_ + node]; }
  bool MissingLeft(int64_t node) const { return trees_.missing_left[first_ + node]; }
  const uint32_t* Sets(int64_t node) const {
    bool has = trees_.left_codes != nullptr && std::isnan(Threshold(node));
    return has ? trees_.left_codes + (first_ + node) * trees_.num_words : nullptr;
  }
  Terms LinearTerms(int64_t leaf) const {
    return Terms(trees_, number_, linked() ? leaf : leaf - inner_);
  }
  float Value(int64_t leaf) const { return trees_.leaf_value[Place(leaf)]; }
  float Cover(int64_t leaf) const { return trees_.cover[Place(leaf)]; }

  // The leaf or split node that rows reach from this node. Nodes that are not split
  // send all rows left.
  int64_t Resolve(int64_t node) const {
    while (!IsLeaf(node) && !IsSplit(node)) node = Left(node);
    return node;
  }

 private:
  int64_t Place(int64_t leaf) const {
    return first_leaf_ + (linked() ? leaf : leaf - inner_);
  }

  const ShapTrees& trees_;
  int64_t number_, inner_, first_, first_leaf_;
};

// The features that the trees use, and the place of each feature among these.
struct Used {
  std::vector<int32_t> features, place;

  Used(const ShapTrees& trees, int64_t num_features) : place(num_features, -1) {
    for (int64_t tree = 0; tree < trees.num_trees(); ++tree) {
      TreeView view(trees, tree * trees.scores_per_tree());
      for (int64_t node = 0; node < trees.num_nodes; ++node) {
        if (!view.IsLeaf(node) && view.IsSplit(node)) place[view.Feature(node)] = 0;
      }
    }
    int64_t num_terms = trees.num_trees() * trees.num_leaves() * trees.num_terms;
    for (int64_t i = 0; i < num_terms; ++i) {
      if (trees.term_feature[i] >= 0) place[trees.term_feature[i]] = 0;
    }
    for (int32_t feature = 0; feature < num_features; ++feature) {
      if (place[feature] < 0) continue;
      place[feature] = static_cast<int32_t>(features.size());
      features.push_back(feature);
    }
  }
  int64_t size() const { return static_cast<int64_t>(features.size()); }
};

// Packs a tree, with its tables for some points.
class Packer {
 public:
  Packer(const ShapTrees& trees, int64_t tree, const Used& used,
         const ShapPoints& points, bool pairs)
      : trees_(trees),
        view_(trees, tree),
        used_(used),
        points_(points),
        pairs_(pairs),
        num_codes_(static_cast<uint32_t>(32 * trees.num_words)),
        cover_(view_.num_nodes()) {
    int64_t root = view_.Resolve(0);
    if (view_.IsLeaf(root)) {
      if (trees.num_terms > 0) PackLeaf(root);
    } else {
      SumCover(root);
      Pack(root, 0);
    }
  }

  bool empty() const { return nodes_.empty(); }
  ShapTree tree() const {
    return {nodes_.data(), tables_.data(), terms_.data(), term_tables_.data()};
  }

 private:
  float SumCover(int64_t node) {
    if (view_.IsLeaf(node)) return cover_[node] = view_.Cover(node);
    int64_t left = view_.Left(node);
    float sum = SumCover(view_.Resolve(left));
    return cover_[node] = sum + SumCover(view_.Resolve(left + 1));
  }

  int32_t Pack(int64_t node, int64_t depth) {
    auto place = static_cast<int32_t>(nodes_.size());
    int32_t feature = used_.place[view_.Feature(node)];
    nodes_.push_back({view_.Threshold(node),
                      feature,
                      -1,
                      {-1, -1},
                      {0, 0},
                      {0, 0},
                      {0, 0},
                      view_.Sets(node),
                      num_codes_,
                      view_.MissingLeft(node),
                      false});
    tables_.resize(tables_.size() + ShapTableSize(points_.size));
    for (int64_t other = depth - 1; other >= 0 && nodes_[place].above < 0; --other) {
      if (path_[other].feature == feature) {
        nodes_[place].above = static_cast<int32_t>(other);
      }
    }
    double before = depth > 0 && nodes_[place].above >= 0
                        ? path_[nodes_[place].above].fraction
                        : 1.0;
    path_.resize(std::max<size_t>(path_.size(), depth + 1));
    for (int side = 0; side < 2; ++side) {
      int64_t child = view_.Resolve(view_.Left(node) + side);
      double share = cover_[node] > 0 ? cover_[child] / cover_[node] : 0.5f;
      path_[depth] = {feature, before * share};
      FillEdge(place, side, before, share);
      if (view_.IsLeaf(child)) {
        nodes_[place].value[side] = view_.Value(child);
        if (trees_.num_terms > 0) PackTerms(place, side, child, depth);
      } else {
        int32_t packed = Pack(child, depth + 1);
        nodes_[place].child[side] = packed;
      }
    }
    ShapNode& packed = nodes_[place];
    packed.is_last = packed.child[0] < 0 && packed.child[1] < 0 &&
                     packed.num_terms[0] + packed.num_terms[1] == 0;
    if (packed.is_last && !pairs_) JoinLeaves(place);
    return place;
  }

  // Packs a tree that is one leaf as a node that sends all rows left.
  void PackLeaf(int64_t leaf) {
    nodes_.push_back({kInfinity,
                      0,
                      -1,
                      {-1, -1},
                      {view_.Value(leaf), 0},
                      {0, 0},
                      {0, 0},
                      nullptr,
                      0,
                      true,
                      false});
    tables_.resize(ShapTableSize(points_.size));
    path_ = {{0, 1.0}};
    FillEdge(0, 0, 1.0, 1.0);
    FillEdge(0, 1, 1.0, 0.0);
    PackTerms(0, 0, leaf, 0);
  }

  // Packs the linear terms of a leaf below the node at this depth of the path.
  void PackTerms(int64_t place, int side, int64_t leaf, int64_t depth) {
    Terms terms = view_.LinearTerms(leaf);
    nodes_[place].first_term[side] = static_cast<int32_t>(terms_.size());
    for (int64_t p = 0; p < trees_.num_terms; ++p) {
      if (terms.feature[p] < 0) continue;
      int32_t feature = used_.place[terms.feature[p]];
      int64_t above = depth;
      while (above >= 0 && path_[above].feature != feature) --above;
      double before = above >= 0 ? path_[above].fraction : 1.0;
      const float* range = trees_.ranges + 2 * terms.feature[p];
      terms_.push_back({feature, static_cast<int32_t>(above), terms.slope[p],
                        terms.center[p], range[0], range[1]});
      for (bool change : {false, true}) {
        for (int64_t k = 0; k < points_.size; ++k) {
          double t = points_.place[k], last = before * (1 - t) + t;
          double number = change ? before / (t * last) : t / last;
          term_tables_.push_back(static_cast<float>(number));
        }
      }
      ++nodes_[place].num_terms[side];
    }
  }

  // See ShapEdgeSize for the layout and Edges in jboost.explanation.shap for
  // the formulas.
  void FillEdge(int64_t place, int side, double before, double share) {
    int64_t size = points_.size;
    float* table =
        tables_.data() + place * ShapTableSize(size) + side * ShapEdgeSize(size);
    double part = before * share;
    for (int64_t k = 0; k < size; ++k) {
      double t = points_.place[k];
      double factor = part * (1 - t) + t, last = before * (1 - t) + t;
      table[k] = static_cast<float>(factor / last);
      table[size + k] = static_cast<float>(part * (1 - t) / last);
      table[2 * size + k] = static_cast<float>((before - part) / (factor * last));
      table[3 * size + k] = static_cast<float>(-1 / ((1 - t) * last));
    }
    table[4 * size] = static_cast<float>(share);
  }

  // Replaces the tables of both edges by one of sums over both leaves.
  void JoinLeaves(int64_t place) {
    int64_t size = points_.size;
    float* table = tables_.data() + place * ShapTableSize(size);
    std::vector<double> edge[2];
    double shut = 0;
    for (int side = 0; side < 2; ++side) {
      const float* from = table + side * ShapEdgeSize(size);
      edge[side].assign(from, from + ShapEdgeSize(size));
      double value = nodes_[place].value[side];
      for (int64_t k = 0; k < 2 * size; ++k) edge[side][k] *= value;
      shut += edge[side][4 * size] * value;
    }
    for (int64_t k = 0; k < size; ++k) {
      for (int side = 0; side < 2; ++side) {  // the side that rows take
        const std::vector<double>&own = edge[side], &other = edge[1 - side];
        double first = own[k], second = other[size + k];
        table[side * size + k] = static_cast<float>(first + second);
        table[(2 + side) * size + k] = static_cast<float>(first * own[2 * size + k] +
                                                          second * other[3 * size + k]);
      }
    }
    table[4 * size] = static_cast<float>(shut);
  }

  struct Step {
    int32_t feature;
    double
        fraction;  // the product of the shares of cover at the feature's splits so far
  };

  const ShapTrees& trees_;
  TreeView view_;
  const Used& used_;
  const ShapPoints& points_;
  bool pairs_;
  uint32_t num_codes_;
  std::vector<float> cover_;
  std::vector<Step> path_;
  std::vector<ShapNode> nodes_;
  std::vector<float> tables_;
  std::vector<ShapTerm> terms_;
  std::vector<float> term_tables_;
};

// A block of rows, by column, and its sums for the U features that are used: values
// [K, U, rows] and, if they are wanted, pairs [K, U, U, rows].
class Block {
 public:
  Block(int64_t rows, int64_t used, int64_t num_scores, bool pairs)
      : rows_(rows),
        used_(used),
        num_scores_(num_scores),
        columns_(used * rows),
        values_(num_scores * used * rows),
        pairs_(pairs ? num_scores * used * used * rows : 0),
        scratch_(kShapScratchBytes),
        has_pairs_(pairs) {
    std::fill_n(values_.get(), num_scores * used * rows, 0.0f);
    if (pairs) {
      std::fill_n(pairs_.get(), num_scores * used * used * rows, 0.0f);
    }
  }

  void Load(const Matrix& matrix, const Used& used, int64_t first, int64_t count) {
    for (int64_t u = 0; u < used_; ++u) {
      float* column = columns_.get() + u * rows_;
      for (int64_t i = 0; i < rows_; ++i) {
        float x = i < count ? matrix.At(first + i, used.features[u]) : 0.0f;
        column[i] = std::fabs(x) < kTiny ? 0.0f : x;
      }
    }
  }

  void AddTree(const ShapLoops& loops, const ShapTree& tree, int64_t score,
               const ShapPoints& points) {
    float* values = values_.get() + score * used_ * rows_;
    float* pairs = has_pairs_ ? pairs_.get() + score * used_ * used_ * rows_ : nullptr;
    for (int64_t i = 0; i < rows_; i += loops.num_lanes) {
      ShapLanes lanes{columns_.get() + i,
                      values + i,
                      has_pairs_ ? pairs + i : nullptr,
                      rows_,
                      used_,
                      scratch_.get()};
      loops.add_tree(tree, points.weight, points.size, lanes);
    }
  }

  // Adds row i to its values [F, K].
  void StoreValues(int64_t i, const Used& used, float* out) const {
    for (int64_t k = 0; k < num_scores_; ++k) {
      const float* values = values_.get() + k * used_ * rows_ + i;
      for (int64_t u = 0; u < used_; ++u) {
        out[used.features[u] * num_scores_ + k] += values[u * rows_];
      }
    }
  }

  // Adds row i to its interactions [F, F, K]. The diagonal gets a feature's value minus
  // its pairs.
  void StorePairs(int64_t i, const Used& used, int64_t num_features, float* out) const {
    for (int64_t k = 0; k < num_scores_; ++k) {
      const float* values = values_.get() + k * used_ * rows_ + i;
      const float* pairs = pairs_.get() + k * used_ * used_ * rows_ + i;
      for (int64_t a = 0; a < used_; ++a) {
        float* row = out + used.features[a] * num_features * num_scores_ + k;
        float rest = values[a * rows_];
        for (int64_t b = 0; b < used_; ++b) {
          if (a == b) continue;
          float both = pairs[(a * used_ + b) * rows_] + pairs[(b * used_ + a) * rows_];
          row[used.features[b] * num_scores_] += both / 2;
          rest -= both / 2;
        }
        row[used.features[a] * num_scores_] += rest;
      }
    }
  }

 private:
  int64_t rows_, used_, num_scores_;
  Scratch<float> columns_, values_, pairs_;
  Scratch<char> scratch_;
  bool has_pairs_;
};

// The number of rows of a block, whose sums must fit the L2 cache.
int64_t ChooseRows(int64_t used, int64_t num_scores, bool pairs) {
  int64_t rows = kMostRows, numbers = used * num_scores * (pairs ? used : 1);
  while (rows > kMaxShapLanes && rows * numbers * 4 > kBlockBytes) rows /= 2;
  return rows;
}

void ExplainBatch(const Pool& pool, const ShapTrees& trees, const Matrix& matrix,
                  const Used& used, const ShapPoints& points, int64_t first_tree,
                  int64_t last_tree, const ShapAnswer& answer) {
  const ShapLoops& loops = JBOOST_CHOOSE(ShapLoops);
  std::vector<std::unique_ptr<Packer>> packed(last_tree - first_tree);
  ParallelFor(pool, last_tree - first_tree, [&](int64_t i) {
    packed[i].reset(new Packer(trees, first_tree + i, used, points, answer.pairs));
  });
  int64_t num_scores = trees.num_scores, num_features = matrix.num_features;
  int64_t rows = ChooseRows(used.size(), num_scores, answer.pairs);
  int64_t size = num_features * num_scores * (answer.pairs ? num_features : 1);
  ParallelFor(pool, (matrix.num_rows + rows - 1) / rows, [&](int64_t task) {
    int64_t first = task * rows, count = std::min(rows, matrix.num_rows - first);
    Block block(rows, used.size(), num_scores, answer.pairs);
    block.Load(matrix, used, first, count);
    for (int64_t tree = first_tree; tree < last_tree; ++tree) {
      const Packer& own = *packed[tree - first_tree];
      if (own.empty()) continue;
      block.AddTree(loops, own.tree(), tree % num_scores, points);
    }
    for (int64_t i = 0; i < count; ++i) {
      float* out = answer.out + (first + i) * size;
      if (answer.pairs) {
        block.StorePairs(i, used, num_features, out);
      } else {
        block.StoreValues(i, used, out);
      }
    }
  });
}

// Whether the nodes below the root form a tree that is not too deep.
bool IsTree(const TreeView& view) {
  std::vector<char> seen(view.num_nodes());
  std::vector<std::pair<int64_t, int64_t>> open = {{0, 0}};
  while (!open.empty()) {
    auto [node, depth] = open.back();
    open.pop_back();
    if (seen[node] || depth > kMaxShapDepth) return false;
    seen[node] = 1;
    if (view.IsLeaf(node)) continue;
    int64_t left = view.Left(node);
    if (left < 0 || left + 1 >= view.num_nodes()) return false;
    open.push_back({left, depth + 1});
    open.push_back({left + 1, depth + 1});
  }
  return true;
}

}  // namespace

bool AreTrees(const ShapTrees& trees) {
  if (trees.left_child == nullptr) return true;
  for (int64_t tree = 0; tree < trees.num_trees(); ++tree) {
    if (!IsTree(TreeView(trees, tree * trees.scores_per_tree()))) return false;
  }
  return true;
}

void Explain(const Pool& pool, const ShapTrees& trees, const Matrix& matrix,
             const ShapPoints& points, const ShapAnswer& answer) {
  int64_t features = matrix.num_features;
  int64_t size = features * trees.num_scores * (answer.pairs ? features : 1);
  std::fill_n(answer.out, matrix.num_rows * size, 0.0f);
  Used used(trees, features);
  if (used.size() == 0) return;
  for (int64_t k = 0; k < points.size; k += kMaxShapPoints) {
    ShapPoints some{points.place + k, points.weight + k,
                    std::min<int64_t>(kMaxShapPoints, points.size - k)};
    int64_t bytes = sizeof(ShapNode) + ShapTableSize(some.size) * sizeof(float);
    bytes *= trees.num_nodes;
    bytes += trees.num_leaves() * trees.num_terms *
             (sizeof(ShapTerm) + ShapTermSize(some.size) * sizeof(float));
    int64_t batch = std::max<int64_t>(1, kPackedBytes / bytes);
    int64_t count = trees.num_rounds * trees.num_scores;
    for (int64_t first = 0; first < count; first += batch) {
      int64_t last = std::min(first + batch, count);
      ExplainBatch(pool, trees, matrix, used, some, first, last, answer);
    }
  }
}

}  // namespace jboost
