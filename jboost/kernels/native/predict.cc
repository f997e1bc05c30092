// SPDX-License-Identifier: Apache-2.0
#include "predict.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "linear.h"
#include "scratch.h"

namespace jboost {
namespace {

constexpr int64_t kTaskRows = 4096;      // at most
constexpr int64_t kTile = 16;            // features that are transposed at a time
constexpr int64_t kPlaneBytes = 24576;   // of a block's codes: most of an L1 cache
constexpr int64_t kMaxThresholds = 254;  // of a feature, which bytes can distinguish
constexpr int64_t kLeastRounds = 4;      // of a run: fewer are not worth coding
constexpr int64_t kMaxCodedDepth = 14;
constexpr int64_t kMaxSets = 256;       // of a tree: with more, walking is faster
constexpr int64_t kPackedNodes = 2048;  // of a tree: with more, packing pays
constexpr int64_t kNarrowWords = 8;     // of a set of codes that fit a byte
constexpr int8_t kAlwaysLeft = 127, kAllValuesLeft = 126, kInSet = -1;
constexpr float kTiny = std::numeric_limits<float>::min();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The threshold that sends x where `threshold`, which is not NaN, sends x if denormals
// count as 0.
float EffectiveThreshold(float threshold) {
  if (std::fabs(threshold) >= kTiny) return threshold;
  return threshold < 0 ? -kTiny : std::nextafter(kTiny, 0.0f);
}

// The distinct thresholds of one feature, in a hash table. After Sort, their ranks are
// known.
class ThresholdSet {
 public:
  ThresholdSet() { std::fill(keys_, keys_ + kPlaces, kInfinity); }

  // Returns the place of a threshold, which must be finite or -inf; -1 if there are too
  // many for bytes.
  int Insert(float threshold) {
    uint32_t bits;
    std::memcpy(&bits, &threshold, sizeof(bits));
    int place = static_cast<int>((bits * 0x9e3779b1u) >> (32 - kBits));
    while (keys_[place] != threshold) {
      if (keys_[place] == kInfinity) {
        if (size_ == kMaxThresholds) return -1;
        ++size_;
        keys_[place] = threshold;
        return place;
      }
      place = (place + 1) % kPlaces;
    }
    return place;
  }

  // Returns the thresholds in ascending order.
  std::vector<float> Sort() {
    std::vector<std::pair<float, int>> entries;
    for (int place = 0; place < kPlaces; ++place) {
      if (keys_[place] < kInfinity) entries.emplace_back(keys_[place], place);
    }
    std::sort(entries.begin(), entries.end());
    std::vector<float> sorted;
    for (const auto& [threshold, place] : entries) {
      ranks_[place] = static_cast<uint8_t>(sorted.size());
      sorted.push_back(threshold);
    }
    return sorted;
  }

  int Rank(int place) const { return ranks_[place]; }

 private:
  static constexpr int kBits = 9, kPlaces = 1 << kBits;
  float keys_[kPlaces];
  uint8_t ranks_[kPlaces];
  int64_t size_ = 0;
};

// How the nodes of a run use one feature. Sides: 0 for nodes that send missing values
// left, 1 for right.
struct Looks {
  std::unique_ptr<ThresholdSet> thresholds;  // null: no node has a threshold
  bool wanted[2] = {false, false}, in_sets = false;
  int32_t plane[2] = {0, 0}, set_plane = -1;
};

// One feature of a run: its thresholds as a search tree, and the planes of its codes.
struct CodedFeature {
  int64_t feature, levels;
  std::vector<float> table;
  int64_t left_plane, right_plane;  // -1: no node uses it
  int64_t set_plane;                // the first of two, or -1
};

struct Run {
  int64_t first_round, last_round, num_planes;
  std::vector<CodedFeature> features;
};

// An ensemble whose thresholds are codes.
class CodedEnsemble {
 public:
  // Returns false if thresholds do not fit bytes, or there are too many sets.
  bool Build(const Ensemble& model, const Matrix& matrix);

  // Returns a tree, and marks the rows of a block that its sets send left.
  CodedTree Tree(const PredictLoops& loops, int64_t tree, int64_t rows,
                 int8_t* codes) const {
    if (!sets_.empty()) {
      const CategorySet* sets = sets_.data() + first_set_[tree];
      loops.mark(sets, first_set_[tree + 1] - first_set_[tree], words_.data(), rows,
                 block_rows_, codes);
    }
    int64_t first = tree << max_depth_;
    return {offset_.get() + first, threshold_.get() + first, max_depth_};
  }
  bool wide(int64_t category) const { return num_words_[category] > kNarrowWords; }
  int64_t category(int64_t feature) const { return category_[feature]; }
  const std::vector<Run>& runs() const { return runs_; }
  int64_t block_rows() const { return block_rows_; }
  int64_t num_planes() const { return num_planes_; }

 private:
  bool Cut(const Ensemble& model, int64_t num_features, int64_t first_round,
           int64_t last_round);
  bool Collect(const Ensemble& model, const Run& run, std::vector<Looks>* looks);
  void CodeTrees(const Ensemble& model, const Run& run,
                 const std::vector<Looks>& looks);
  bool ReadCategories(const Ensemble& model, const Matrix& matrix);
  void AddSet(const Ensemble& model, int64_t at, int32_t plane, int64_t number);
  void PlaceSets();

  int64_t max_depth_ = 0, block_rows_ = 0, num_planes_ = 0;
  std::vector<Run> runs_;
  std::vector<int64_t> category_;   // of each feature; -1: none
  std::vector<int64_t> num_words_;  // of the sets of each categorical feature
  std::vector<CategorySet> sets_;
  std::vector<uint32_t> words_;
  std::vector<int64_t> first_set_;  // of each tree
  std::unique_ptr<int32_t[]> offset_;
  std::unique_ptr<int8_t[]> threshold_;
};

bool CodedEnsemble::Build(const Ensemble& model, const Matrix& matrix) {
  max_depth_ = model.max_depth;
  int64_t size = model.num_trees() << max_depth_;
  if (!ReadCategories(model, matrix)) return false;
  offset_.reset(new int32_t[size]);
  threshold_.reset(new int8_t[size + 64]());  // loads of vectors exceed the last tree
  first_set_.push_back(0);
  if (!Cut(model, matrix.num_features, 0, model.num_rounds)) return false;
  for (const Run& run : runs_) num_planes_ = std::max(num_planes_, run.num_planes);
  PlaceSets();
  // Trees without any split have no plane, but their nodes read one (of any values).
  num_planes_ = std::max<int64_t>(1, num_planes_);
  block_rows_ = kBlockRows;
  while (block_rows_ > 64 && num_planes_ * block_rows_ > kPlaneBytes) block_rows_ /= 2;
  for (int64_t i = 0; i < size; ++i) offset_[i] *= static_cast<int32_t>(block_rows_);
  for (CategorySet& set : sets_) {
    set.from *= static_cast<int32_t>(block_rows_);
    set.to *= static_cast<int32_t>(block_rows_);
  }
  return true;
}

// Whether a node is a categorical split.
bool HasSet(const Ensemble& model, int64_t at) {
  return model.left_codes != nullptr && std::isnan(model.threshold[at]);
}

// Finds out which features are categorical. Returns false if there are too many sets,
// or a set of a feature that is not categorical.
bool CodedEnsemble::ReadCategories(const Ensemble& model, const Matrix& matrix) {
  const Categories& categories = matrix.categories;
  category_.assign(matrix.num_features, -1);
  for (int64_t g = 0; g < categories.num_features; ++g) {
    category_[categories.features[g]] = g;
    const int32_t* codes = categories.codes + g * categories.num_values;
    int32_t most = 0;
    for (int64_t v = 0; v < categories.num_values; ++v) most = std::max(most, codes[v]);
    if (most > 65535) return false;
    num_words_.push_back(std::max<int64_t>(kNarrowWords, most / 32 + 1));
  }
  if (model.left_codes == nullptr) return true;
  for (int64_t tree = 0; tree < model.num_trees(); ++tree) {
    int64_t count = 0, first = tree * model.num_nodes;
    for (int64_t at = first; at < first + model.num_nodes; ++at) {
      if (!HasSet(model, at)) continue;
      if (category_[model.feature[at]] < 0 || ++count > kMaxSets) return false;
    }
  }
  return true;
}

// Adds the set of a node; its plane has the given number within the tree. Missing
// values have code 0.
void CodedEnsemble::AddSet(const Ensemble& model, int64_t at, int32_t plane,
                           int64_t number) {
  int64_t size = num_words_[category_[model.feature[at]]];
  auto first = static_cast<int64_t>(words_.size());
  words_.resize(first + size);
  int64_t used = std::min(size, model.num_words);
  std::copy_n(model.left_codes + at * model.num_words, used, words_.begin() + first);
  words_[first] = (words_[first] & ~uint32_t{1}) | model.missing_left[at];
  sets_.push_back({plane, static_cast<int32_t>(number), first, size > kNarrowWords});
}

// Assigns planes to the sets of each tree, after all other planes.
void CodedEnsemble::PlaceSets() {
  auto first = static_cast<int32_t>(num_planes_);
  for (CategorySet& set : sets_) {
    set.to += first;
    num_planes_ = std::max<int64_t>(num_planes_, set.to + 1);
  }
  int64_t size = static_cast<int64_t>(first_set_.size() - 1) << max_depth_;
  for (int64_t i = 0; i < size; ++i) {
    if (offset_[i] < 0) offset_[i] = first - 1 - offset_[i];
  }
}

// Collects the thresholds of a run and the planes that it needs; stores the places of
// the thresholds in `offset_`. Returns false if there are too many thresholds.
bool CodedEnsemble::Collect(const Ensemble& model, const Run& run,
                            std::vector<Looks>* looks) {
  int64_t num_nodes = model.num_nodes, end = run.last_round * model.trees_per_round;
  for (int64_t tree = run.first_round * model.trees_per_round; tree < end; ++tree) {
    int32_t* place = offset_.get() + (tree << max_depth_) + 1;
    for (int64_t node = 0; node < num_nodes; ++node) {
      int64_t at = tree * num_nodes + node;
      bool finite = model.threshold[at] < kInfinity, right = !model.missing_left[at];
      if (!finite && !right && !HasSet(model, at)) continue;
      Looks& own = (*looks)[model.feature[at]];
      if (HasSet(model, at)) {
        own.in_sets = true;
        continue;
      }
      own.wanted[right] = true;
      if (!finite) continue;
      if (own.thresholds == nullptr) own.thresholds.reset(new ThresholdSet);
      place[node] = own.thresholds->Insert(EffectiveThreshold(model.threshold[at]));
      if (place[node] < 0) return false;
    }
  }
  return true;
}

// Arranges sorted thresholds as a search tree: its root has index 1, and the children
// of k have 2 k and 2 k + 1.
std::vector<float> MakeTable(const std::vector<float>& sorted, int64_t levels) {
  std::vector<float> table(std::max<int64_t>(32, int64_t{1} << levels), kInfinity);
  for (int64_t level = 0; level < levels; ++level) {
    int64_t step = int64_t{1} << (levels - 1 - level);
    for (int64_t i = 0; i < int64_t{1} << level; ++i) {
      size_t rank = (2 * i + 1) * step - 1;
      if (rank < sorted.size()) table[(int64_t{1} << level) + i] = sorted[rank];
    }
  }
  return table;
}

// Codes these rounds as one run, or as several if their thresholds do not fit bytes.
// Returns false if even short runs do not fit.
bool CodedEnsemble::Cut(const Ensemble& model, int64_t num_features,
                        int64_t first_round, int64_t last_round) {
  Run run{first_round, last_round, 0, {}};
  std::vector<Looks> looks(num_features);
  if (!Collect(model, run, &looks)) {
    int64_t middle = (first_round + last_round) / 2;
    return middle - first_round >= kLeastRounds &&
           Cut(model, num_features, first_round, middle) &&
           Cut(model, num_features, middle, last_round);
  }
  for (int64_t feature = 0; feature < num_features; ++feature) {
    Looks& own = looks[feature];
    if (!own.wanted[0] && !own.wanted[1] && !own.in_sets) continue;
    std::vector<float> sorted;
    if (own.thresholds != nullptr) sorted = own.thresholds->Sort();
    int64_t levels = 0;
    while ((size_t{1} << levels) <= sorted.size()) ++levels;
    for (int side : {0, 1}) {
      own.plane[side] = own.wanted[side] ? static_cast<int32_t>(run.num_planes++) : -1;
    }
    if (own.in_sets) {
      own.set_plane = static_cast<int32_t>(run.num_planes);
      run.num_planes += 2;
    }
    run.features.push_back({feature, levels, MakeTable(sorted, levels), own.plane[0],
                            own.plane[1], own.set_plane});
  }
  CodeTrees(model, run, looks);
  runs_.push_back(std::move(run));
  return true;
}

// Assigns each node its plane, by number, and its threshold, as a code.
void CodedEnsemble::CodeTrees(const Ensemble& model, const Run& run,
                              const std::vector<Looks>& looks) {
  int64_t num_nodes = model.num_nodes, end = run.last_round * model.trees_per_round;
  for (int64_t tree = run.first_round * model.trees_per_round; tree < end; ++tree) {
    int32_t* offset = offset_.get() + (tree << max_depth_) + 1;
    int8_t* threshold = threshold_.get() + (tree << max_depth_) + 1;
    int32_t sets = 0;
    offset[-1] = 0;
    for (int64_t node = 0; node < num_nodes; ++node) {
      int64_t at = tree * num_nodes + node;
      bool finite = model.threshold[at] < kInfinity, right = !model.missing_left[at];
      const Looks& own = looks[model.feature[at]];
      if (HasSet(model, at)) {
        AddSet(model, at, own.set_plane, sets);
        threshold[node] = kInSet;
        offset[node] = -1 - sets++;  // until all planes are known
        continue;
      }
      if (finite) {
        threshold[node] = static_cast<int8_t>(own.thresholds->Rank(offset[node]) - 128);
      } else {
        threshold[node] = right ? kAllValuesLeft : kAlwaysLeft;
      }
      offset[node] = finite || right ? own.plane[right] : 0;
    }
    first_set_.push_back(static_cast<int64_t>(sets_.size()));
  }
}

// Writes the rows [first, first + count) of a sparse matrix with all their cells.
void FillRows(const Matrix& matrix, int64_t first, int64_t count, int64_t stride,
              float* out) {
  const SparseRows& sparse = *matrix.sparse;
  int64_t width = matrix.num_features;
  for (int64_t i = 0; i < count; ++i, out += stride) {
    std::fill(out, out + width, sparse.absent);
    for (int32_t at = sparse.starts[first + i]; at < sparse.starts[first + i + 1];
         ++at) {
      int32_t feature = sparse.index[sparse.places[at]];
      if (feature < width) out[feature] = sparse.values[at];
    }
  }
}

// Copies the rows [first, first + count) of a matrix row by row, at distance `stride`;
// adds zeros up to `rows`.
void CopyRows(const Matrix& matrix, int64_t first, int64_t count, int64_t rows,
              int64_t stride, float* out) {
  int64_t width = matrix.num_features;
  if (matrix.sparse != nullptr) {
    FillRows(matrix, first, count, stride, out);
  } else if (matrix.by_column) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t f = 0; f < width; ++f) out[i * stride + f] = matrix.At(first + i, f);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(out + i * stride, matrix.values + (first + i) * width,
                  width * sizeof(float));
    }
  }
  std::fill(out + count * stride, out + rows * stride, 0.0f);
}

// Copies rows as nodes compare them: without denormals, categories as codes.
void EncodeRows(const PredictLoops& loops, const Matrix& matrix, int64_t first,
                int64_t count, int64_t rows, int64_t stride, float* out) {
  CopyRows(matrix, first, count, rows, stride, out);
  for (int64_t i = 0; i < count; ++i) {
    float* x = out + i * stride;
    for (int64_t f = 0; f < matrix.num_features; ++f) {
      x[f] = std::fabs(x[f]) < kTiny ? 0.0f : x[f];
    }
  }
  const Categories& categories = matrix.categories;
  for (int64_t g = 0; g < categories.num_features; ++g) {
    loops.encode(out + categories.features[g], stride, count,
                 categories.codes + g * categories.num_values, categories.num_values);
  }
}

// The memory of one task, for one block of rows at a time.
struct Block {
  Block(const CodedEnsemble& coded, const Matrix& matrix, int64_t width, bool linear)
      : codes(coded.num_planes() * coded.block_rows()),
        columns(kTile * kBlockRows),
        scores(width * kBlockRows),
        leaves(std::max(kTile, kSharedTile) * kBlockRows),
        stride(linear ? LinearLeaves::Stride(matrix.num_features) : 0),
        clipped(stride * kBlockRows),
        copy(0),
        matrix(matrix) {}

  Scratch<int8_t> codes;
  Scratch<float> columns, scores;
  Scratch<int32_t> leaves;
  int64_t stride;           // of the rows of `clipped`
  Scratch<float> clipped;   // rows that the terms of linear leaves read
  std::vector<float> copy;  // of rows that cannot be read where they are
  const Matrix& matrix;
  int64_t first = 0, count = 0;  // rows of the matrix
  int64_t rows = 0;              // count, rounded up to a multiple of 64

  // Moves to the rows [first_row, first_row + num_rows).
  void Start(int64_t first_row, int64_t num_rows) {
    first = first_row;
    count = num_rows;
    rows = (count + 63) / 64 * 64;
    if (matrix.sparse == nullptr && (matrix.by_column || rows == count)) {
      copy.clear();
    } else {
      copy.resize(rows * matrix.num_features);
      CopyRows(matrix, first, count, rows, matrix.num_features, copy.data());
    }
  }

  const float* x() const {
    if (!copy.empty()) return copy.data();
    return matrix.values + first * matrix.num_features;
  }
};

// Loads the columns [feature, feature + used) of a block.
void LoadColumns(const PredictLoops& loops, const Block& block, int64_t feature,
                 int64_t used) {
  const Matrix& matrix = block.matrix;
  float* columns = block.columns.get();
  if (!matrix.by_column) {
    loops.transpose(block.x() + feature, matrix.num_features, block.rows, used,
                    columns);
    return;
  }
  for (int64_t f = 0; f < used; ++f, columns += kBlockRows) {
    const float* values = matrix.values + (feature + f) * matrix.num_rows + block.first;
    std::memcpy(columns, values, block.count * sizeof(float));
    std::fill(columns + block.count, columns + block.rows, 0.0f);
  }
}

void CodeBlock(const PredictLoops& loops, const CodedEnsemble& model, const Run& run,
               const Block& block) {
  int64_t loaded = -1, block_rows = model.block_rows();
  for (const CodedFeature& coded : run.features) {
    int64_t tile = coded.feature / kTile;
    if (tile != loaded) {
      int64_t used = std::min(kTile, block.matrix.num_features - tile * kTile);
      LoadColumns(loops, block, tile * kTile, used);
      loaded = tile;
    }
    auto plane = [&](int64_t number) {
      return number < 0 ? nullptr : block.codes.get() + number * block_rows;
    };
    float* column = block.columns.get() + coded.feature % kTile * kBlockRows;
    int64_t category = model.category(coded.feature);
    if (category >= 0) {
      const Categories& categories = block.matrix.categories;
      loops.encode(column, 1, block.rows,
                   categories.codes + category * categories.num_values,
                   categories.num_values);
    }
    if (coded.set_plane >= 0) {
      loops.split_codes(column, block.rows, model.wide(category),
                        plane(coded.set_plane), plane(coded.set_plane + 1));
    }
    if (coded.left_plane < 0 && coded.right_plane < 0) continue;
    loops.code(column, block.rows, coded.table.data(), coded.levels,
               plane(coded.left_plane), plane(coded.right_plane));
  }
}

// Writes init_score[k] + sums[k * kBlockRows + i] of `count` rows to out [count, K].
void WriteScores(const Ensemble& model, const float* sums, int64_t count, float* out) {
  for (int64_t k = 0; k < model.num_scores; ++k, sums += kBlockRows) {
    float start = model.init_score[k];
    for (int64_t i = 0; i < count; ++i) out[i * model.num_scores + k] = start + sums[i];
  }
}

// Transposes leaves[t * stride + i] of a few trees to out [N, trees], from row `first`
// on.
void WriteLeaves(const int32_t* leaves, int64_t stride, int64_t first, int64_t count,
                 int64_t first_tree, int64_t used, int64_t num_trees, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    int32_t* row = out + (first + i) * num_trees + first_tree;
    for (int64_t t = 0; t < used; ++t) row[t] = leaves[t * stride + i];
  }
}

// Adds the linear leaves of a tree to the scores of a block.
void AddLinearTree(const PredictLoops& loops, const Ensemble& model,
                   const CodedTree& coded, const LinearLeaves& linear, int64_t tree,
                   const Block& block) {
  const LinearLoops& linear_loops = JBOOST_CHOOSE(LinearLoops);
  int64_t together = model.scores_per_tree();
  int32_t* leaves = block.leaves.get();
  loops.find_leaves(coded, block.codes.get(), block.rows, leaves);
  float* scores = block.scores.get() + tree % model.trees_per_round * kBlockRows;
  for (int64_t k = 0; k < together; ++k) {
    linear_loops.add(linear[tree * together + k], leaves, block.clipped.get(),
                     block.stride, block.rows, scores + k * kBlockRows);
  }
}

// `linear` is null if all leaves are constant.
void ScoreBlock(const PredictLoops& loops, const Ensemble& model,
                const CodedEnsemble& coded, const LinearLeaves* linear,
                const Block& block, const Answer& answer) {
  int64_t num_scores = model.num_scores, num_rows = block.matrix.num_rows;
  float* scores = block.scores.get();
  if (linear != nullptr) {
    float* x = block.clipped.get();
    EncodeRows(loops, block.matrix, block.first, block.count, block.rows, block.stride,
               x);
    ClipRows(model.ranges, block.matrix.num_features, block.count, block.stride, x);
  }
  std::fill(scores, scores + num_scores * kBlockRows, 0.0f);
  for (const Run& run : coded.runs()) {
    CodeBlock(loops, coded, run, block);
    for (int64_t round = run.first_round; round < run.last_round; ++round) {
      for (int64_t k = 0; k < model.trees_per_round; ++k) {
        int64_t tree = round * model.trees_per_round + k;
        int8_t* codes = block.codes.get();
        CodedTree own = coded.Tree(loops, tree, block.rows, codes);
        if (linear != nullptr && (model.shares_trees() || linear->has_terms(tree))) {
          AddLinearTree(loops, model, own, *linear, tree, block);
        } else {
          loops.add_tree(own, codes, block.rows,
                         model.leaf_value + (tree << model.max_depth),
                         scores + k * kBlockRows);
        }
      }
      if (answer.stages == nullptr) continue;
      WriteScores(model, scores, block.count,
                  answer.stages + (round * num_rows + block.first) * num_scores);
    }
  }
  if (answer.scores == nullptr) return;
  WriteScores(model, scores, block.count, answer.scores + block.first * num_scores);
}

// The leaf values of trees that all scores share: those of a leaf lie side by side, so
// that vectors add them.
class SharedValues {
 public:
  SharedValues(const Pool& pool, const Ensemble& model)
      : num_scores_(model.num_scores),
        num_leaves_(model.num_leaves()),
        width_(PaddedWidth(model)),
        values_(model.num_rounds * num_leaves_ * width_) {
    int64_t size = num_leaves_ * num_scores_;
    const Pool& threads = Threads(pool, model.num_rounds * size);
    ParallelFor(threads, model.num_rounds, [&](int64_t round) {
      const float* from = model.leaf_value + round * size;
      float* to = values_.get() + round * num_leaves_ * width_;
      for (int64_t leaf = 0; leaf < num_leaves_; ++leaf, to += width_) {
        for (int64_t k = 0; k < num_scores_; ++k) to[k] = from[k * num_leaves_ + leaf];
        std::fill(to + num_scores_, to + width_, 0.0f);
      }
    });
  }

  // Whether the places of a tree's values fit the 32 bits that the loops count them in.
  static bool Fit(const Ensemble& model) {
    return PaddedWidth(model) <= (int64_t{1} << 32) / model.num_leaves();
  }

  // The numbers of a row or leaf, the padding included.
  static int64_t PaddedWidth(const Ensemble& model) {
    int64_t size = model.num_scores;
    return size <= 4 ? 4 : size <= 8 ? 8 : (size + 15) / 16 * 16;
  }

  LeafRows Take(const int32_t* leaves, int64_t first_round, int64_t num_rounds) const {
    const float* values = values_.get() + first_round * num_leaves_ * width_;
    return {leaves, values, num_rounds, num_leaves_, width_};
  }

  // Writes init_score + sums of a block to out [count, K].
  void Write(const Ensemble& model, const float* sums, int64_t count,
             float* out) const {
    for (int64_t i = 0; i < count; ++i, sums += width_, out += num_scores_) {
      for (int64_t k = 0; k < num_scores_; ++k) out[k] = model.init_score[k] + sums[k];
    }
  }

 private:
  int64_t num_scores_, num_leaves_, width_;
  Scratch<float> values_;
};

void ScoreSharedBlock(const PredictLoops& loops, const Ensemble& model,
                      const CodedEnsemble& coded, const SharedValues& values,
                      const Block& block, const Answer& answer) {
  int64_t num_rows = block.matrix.num_rows;
  int64_t most = answer.stages == nullptr ? kSharedTile : 1;
  float* scores = block.scores.get();
  int32_t* leaves = block.leaves.get();
  std::fill(scores, scores + block.rows * SharedValues::PaddedWidth(model), 0.0f);
  for (const Run& run : coded.runs()) {
    CodeBlock(loops, coded, run, block);
    for (int64_t round = run.first_round; round < run.last_round; round += most) {
      int64_t used = std::min(most, run.last_round - round);
      for (int64_t t = 0; t < used; ++t) {
        int8_t* codes = block.codes.get();
        loops.find_leaves(coded.Tree(loops, round + t, block.rows, codes), codes,
                          block.rows, leaves + t * kBlockRows);
      }
      loops.add_leaves(values.Take(leaves, round, used), block.rows, scores);
      if (answer.stages == nullptr) continue;
      int64_t at = round * num_rows + block.first;
      values.Write(model, scores, block.count, answer.stages + at * model.num_scores);
    }
  }
  if (answer.scores == nullptr) return;
  values.Write(model, scores, block.count,
               answer.scores + block.first * model.num_scores);
}

void FindBlockLeaves(const PredictLoops& loops, const Ensemble& model,
                     const CodedEnsemble& coded, const Block& block, int32_t* out) {
  for (const Run& run : coded.runs()) {
    CodeBlock(loops, coded, run, block);
    int64_t end = run.last_round * model.trees_per_round;
    for (int64_t tree = run.first_round * model.trees_per_round; tree < end;
         tree += kTile) {
      int64_t used = std::min(kTile, end - tree);
      for (int64_t t = 0; t < used; ++t) {
        int8_t* codes = block.codes.get();
        loops.find_leaves(coded.Tree(loops, tree + t, block.rows, codes), codes,
                          block.rows, block.leaves.get() + t * kBlockRows);
      }
      WriteLeaves(block.leaves.get(), kBlockRows, block.first, block.count, tree, used,
                  model.num_trees(), out);
    }
  }
}

void PredictOnCodes(const Pool& pool, const Ensemble& model, const CodedEnsemble& coded,
                    const SharedValues* values, const LinearLeaves* linear,
                    const Matrix& matrix, const Answer& answer) {
  const PredictLoops& loops = JBOOST_CHOOSE(PredictLoops);
  int64_t block_rows = coded.block_rows(), num_rows = matrix.num_rows;
  int64_t task_rows = num_rows / (8 * pool.num_threads) / block_rows * block_rows;
  task_rows = std::max(block_rows, std::min(kTaskRows, task_rows));
  bool shared = values != nullptr && answer.leaves == nullptr;
  int64_t width = shared ? SharedValues::PaddedWidth(model) : model.num_scores;
  auto run = [&](int64_t task) {
    Block block(coded, matrix, width, linear != nullptr);
    int64_t end = std::min((task + 1) * task_rows, num_rows);
    for (int64_t first = task * task_rows; first < end; first += block_rows) {
      block.Start(first, std::min(block_rows, end - first));
      if (answer.leaves != nullptr) {
        FindBlockLeaves(loops, model, coded, block, answer.leaves);
      } else if (shared) {
        ScoreSharedBlock(loops, model, coded, *values, block, answer);
      } else {
        ScoreBlock(loops, model, coded, linear, block, answer);
      }
    }
  };
  ParallelFor(pool, (num_rows + task_rows - 1) / task_rows, run);
}

// The memory of one task that walks, for one block of rows at a time.
struct WalkBlock {
  int64_t rows, trees;  // of a block, and trees that are walked together
  std::vector<float> x, clipped, scores;
  std::vector<int32_t> leaves;

  WalkBlock(const Ensemble& model, const Matrix& matrix)
      : rows(std::clamp<int64_t>(8192 / matrix.num_features, 1,
                                 std::min<int64_t>(64, matrix.num_rows))),
        trees(std::max<int64_t>(1, kTile / rows)),
        x(rows * matrix.num_features),
        clipped(model.num_terms > 0 ? x.size() : 0),
        scores(model.num_scores * kBlockRows),
        leaves(rows * trees) {}
};

void WalkRows(const PredictLoops& loops, const Ensemble& model,
              const PackedNode* packed, const Matrix& matrix, int64_t first,
              int64_t count, WalkBlock* block, const Answer& answer) {
  int64_t width = matrix.num_features;
  float *x = block->x.data(), *clipped = block->clipped.data();
  EncodeRows(loops, matrix, first, count, count, width, x);
  if (model.num_terms > 0) {
    std::copy_n(x, count * width, clipped);
    ClipRows(model.ranges, width, count, width, clipped);
  }
  int64_t num_scores = model.num_scores, num_trees = model.num_trees();
  int64_t together = model.scores_per_tree();
  float* scores = block->scores.data();
  std::fill(block->scores.begin(), block->scores.end(), 0.0f);
  for (int64_t tree = 0; tree < num_trees; tree += block->trees) {
    int64_t used = std::min(block->trees, num_trees - tree);
    int32_t* leaves = block->leaves.data();
    loops.walk(model, packed, tree, used, x, count, width, leaves);
    if (answer.leaves != nullptr) {
      WriteLeaves(leaves, count, first, count, tree, used, num_trees, answer.leaves);
      continue;
    }
    for (int64_t t = tree; t < tree + used; ++t, leaves += count) {
      const float* value = model.leaf_value + t * together * model.num_leaves();
      float* own = scores + t % model.trees_per_round * kBlockRows;
      for (int64_t k = 0; k < together; ++k, value += model.num_leaves()) {
        for (int64_t i = 0; i < count; ++i) {
          own[k * kBlockRows + i] += model.num_terms == 0
                                         ? value[leaves[i]]
                                         : EvaluateLeaf(model, t * together + k,
                                                        leaves[i], clipped + i * width);
        }
      }
      if (answer.stages == nullptr || (t + 1) % model.trees_per_round != 0) continue;
      int64_t round = t / model.trees_per_round;
      WriteScores(model, scores, count,
                  answer.stages + (round * matrix.num_rows + first) * num_scores);
    }
  }
  if (answer.scores == nullptr) return;
  WriteScores(model, scores, count, answer.scores + first * num_scores);
}

// Packs the nodes of trees that exceed the caches, if there are enough rows.
std::vector<PackedNode> PackNodes(const Pool& pool, const Ensemble& model,
                                  int64_t num_rows) {
  std::vector<PackedNode> packed;
  if (model.left_child == nullptr || model.num_nodes < kPackedNodes ||
      num_rows * model.max_depth < model.num_nodes) {
    return packed;
  }
  packed.resize(model.num_trees() * model.num_nodes);
  ParallelFor(pool, model.num_trees(), [&](int64_t tree) {
    int64_t end = (tree + 1) * model.num_nodes;
    for (int64_t at = tree * model.num_nodes; at < end; ++at) {
      packed[at] = {model.threshold[at], model.feature[at], model.left_child[at],
                    model.missing_left[at] == 0};
    }
  });
  return packed;
}

void PredictByWalking(const Pool& pool, const Ensemble& model, const Matrix& matrix,
                      const Answer& answer) {
  const PredictLoops& loops = JBOOST_CHOOSE(PredictLoops);
  int64_t steps = model.max_depth + model.scores_per_tree() - 1;
  int64_t work = matrix.num_rows * model.num_trees() * steps;
  const Pool& threads = Threads(pool, work);
  std::vector<PackedNode> packed = PackNodes(threads, model, matrix.num_rows);
  const PackedNode* nodes = packed.empty() ? nullptr : packed.data();
  int64_t parts = std::min(matrix.num_rows, threads.num_threads * 8);
  parts = std::max<int64_t>(1, std::min(parts, work / kSerial));
  ParallelFor(threads, parts, [&](int64_t part) {
    WalkBlock block(model, matrix);
    int64_t end = matrix.num_rows * (part + 1) / parts;
    for (int64_t i = matrix.num_rows * part / parts; i < end; i += block.rows) {
      WalkRows(loops, model, nodes, matrix, i, std::min(block.rows, end - i), &block,
               answer);
    }
  });
}

// Whether to code the ensemble: coding a node costs about as much as ten steps of a
// row.
bool CodingPays(const Ensemble& model, int64_t num_rows) {
  return model.left_child == nullptr && model.max_depth <= kMaxCodedDepth &&
         model.num_rounds > 0 && num_rows * model.max_depth > 10 * model.num_nodes &&
         (!model.shares_trees() || SharedValues::Fit(model));
}

}  // namespace

bool HasFeatures(const Ensemble& model, int64_t num_features) {
  int64_t size = model.num_trees() * model.num_nodes;
  int32_t least = 0, most = 0;
  for (int64_t i = 0; i < size; ++i) {
    least = std::min(least, model.feature[i]);
    most = std::max(most, model.feature[i]);
  }
  size = model.num_trees() * model.num_leaves() * model.num_terms;
  for (int64_t i = 0; i < size; ++i) {
    least = std::min(least, model.term_feature[i] < -1 ? -1 : 0);
    most = std::max(most, model.term_feature[i]);
  }
  return least >= 0 && most < num_features;
}

bool HasChildren(const Ensemble& model) {
  bool inside = true;
  for (int64_t tree = 0; tree < model.num_trees(); ++tree) {
    const int32_t* left = model.left_child + tree * model.num_nodes;
    for (int64_t node = 0; node < model.num_nodes; ++node) {
      bool leaf = left[node] == node;
      inside &= leaf | ((left[node] >= 0) & (left[node] < model.num_nodes - 1));
    }
  }
  return inside;
}

// The codes of an ensemble, and its leaf values as they are added.
struct CodedModel {
  CodedEnsemble coded;
  std::unique_ptr<SharedValues> values;  // of trees that all scores share
  std::unique_ptr<LinearLeaves> linear;  // instead, if leaves are linear

  // Returns false if the ensemble cannot be coded.
  bool Build(const Pool& pool, const Ensemble& model, const Matrix& matrix) {
    int64_t width = matrix.num_features;
    if (model.num_terms > 0 && !LinearLeaves::Fit(model, width)) return false;
    if (!coded.Build(model, matrix)) return false;
    if (model.num_terms > 0) {
      linear.reset(new LinearLeaves(pool, model, width));
    } else if (model.shares_trees()) {
      values.reset(new SharedValues(pool, model));
    }
    return true;
  }
};

// Predicts by codes, or by walking where there are none.
static void PredictWith(const CodedModel* codes, const Pool& pool,
                        const Ensemble& model, const Matrix& matrix,
                        const Answer& answer) {
  if (codes == nullptr) return PredictByWalking(pool, model, matrix, answer);
  PredictOnCodes(pool, model, codes->coded, codes->values.get(), codes->linear.get(),
                 matrix, answer);
}

void Predict(const Pool& pool, const Ensemble& model, const Matrix& matrix,
             const Answer& answer) {
  if (matrix.num_rows == 0) return;
  CodedModel coded;
  bool codes = CodingPays(model, matrix.num_rows) && coded.Build(pool, model, matrix);
  PredictWith(codes ? &coded : nullptr, pool, model, matrix, answer);
}

ReadyModel::ReadyModel(const Ensemble& model, int64_t num_features,
                       const Categories& categories)
    : model(model), num_features(num_features), categories(categories) {}

ReadyModel::~ReadyModel() = default;

void ReadyModel::Predict(const Pool& pool, const Matrix& matrix, const Answer& answer) {
  if (matrix.num_rows == 0) return;
  PredictWith(FindCodes(pool, matrix).get(), pool, model, matrix, answer);
}

std::shared_ptr<const CodedModel> ReadyModel::FindCodes(const Pool& pool,
                                                        const Matrix& matrix) {
  if (matrix.num_rows < JBOOST_CHOOSE(PredictLoops).coded_rows) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!finished_) {
    num_rows_ += matrix.num_rows;
    if (CodingPays(model, num_rows_)) {
      auto coded = std::make_shared<CodedModel>();
      if (coded->Build(pool, model, matrix)) coded_ = std::move(coded);
      finished_ = true;
    }
  }
  return coded_;
}

}  // namespace jboost
