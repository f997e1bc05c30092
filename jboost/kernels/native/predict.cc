// SPDX-License-Identifier: Apache-2.0
#include "predict.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

namespace jboost {
namespace {

constexpr int64_t kSerial = 20000;      // units of work below which threads cost more
constexpr int64_t kTaskRows = 4096;     // at most
constexpr int64_t kTile = 16;           // features that are transposed at a time
constexpr int64_t kPlaneBytes = 24576;  // of codes of a block: most of a first cache
constexpr size_t kMaxThresholds = 254;  // of a feature that bytes tell apart
constexpr int64_t kLeastRounds = 4;     // of a run: fewer do not pay for their codes
constexpr int64_t kMaxCodedDepth = 14;
constexpr int8_t kAlwaysLeft = 127, kAllValuesLeft = 126;
constexpr float kTiny = std::numeric_limits<float>::min();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

const Pool kAlone;

const Pool& Threads(const Pool& pool, int64_t work) {
  return work < kSerial ? kAlone : pool;
}

const PredictLoops& ChoosePredictLoops() {
#ifdef JBOOST_X86
  return ChooseLoops(baseline::kPredictLoops, avx2::kPredictLoops,
                     avx512::kPredictLoops);
#else
  return baseline::kPredictLoops;
#endif
}

// Memory at the start of a cache line.
template <class Number>
class Room {
 public:
  explicit Room(int64_t size) : memory_(new char[size * sizeof(Number) + 64]) {
    auto address = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = reinterpret_cast<Number*>((address + 63) & ~uintptr_t{63});
  }
  Number* get() const { return data_; }

 private:
  std::unique_ptr<char[]> memory_;
  Number* data_;
};

// The threshold that sends x where this one sends x with denormals counted as 0.
float EffectiveThreshold(float threshold) {
  if (std::isnan(threshold)) return kInfinity;  // nothing is above it
  if (std::fabs(threshold) >= kTiny) return threshold;
  return threshold < 0 ? -kTiny : std::nextafter(kTiny, 0.0f);
}

// One feature of a run: its thresholds as a search tree, and where its codes go.
struct CodedFeature {
  int64_t feature, levels;
  std::vector<float> table;
  int64_t left_plane = -1, right_plane = -1;  // -1: no node wants it
};

struct Run {
  int64_t first_round, last_round, num_planes;
  std::vector<CodedFeature> features;
};

// An ensemble on codes.
class CodedEnsemble {
 public:
  // False if the thresholds do not fit bytes.
  bool Build(const Pool& pool, const Ensemble& model, int64_t num_features);

  CodedTree Tree(int64_t tree) const {
    return {offset_.get() + (tree << max_depth_), threshold_.get() + (tree << max_depth_),
            max_depth_};
  }
  const std::vector<Run>& runs() const { return runs_; }
  int64_t block_rows() const { return block_rows_; }
  int64_t num_planes() const { return num_planes_; }

 private:
  bool Cut(const Pool& pool, const Ensemble& model, int64_t num_features,
           int64_t first_round, int64_t last_round);
  void CodeTrees(const Pool& pool, const Ensemble& model, const Run& run,
                 const std::vector<std::vector<float>>& thresholds);

  int64_t max_depth_ = 0, block_rows_ = 0, num_planes_ = 0;
  std::vector<Run> runs_;
  std::unique_ptr<int32_t[]> offset_;
  std::unique_ptr<int8_t[]> threshold_;
};

bool CodedEnsemble::Build(const Pool& pool, const Ensemble& model,
                          int64_t num_features) {
  max_depth_ = model.max_depth;
  int64_t size = model.num_trees() << max_depth_;
  offset_.reset(new int32_t[size]);
  threshold_.reset(new int8_t[size + 64]());  // vectors read beyond the last tree
  if (!Cut(pool, model, num_features, 0, model.num_rounds)) return false;
  for (const Run& run : runs_) num_planes_ = std::max(num_planes_, run.num_planes);
  block_rows_ = kBlockRows;
  while (block_rows_ > 64 && num_planes_ * block_rows_ > kPlaneBytes) block_rows_ /= 2;
  ParallelFor(Threads(pool, size), model.num_trees(), [&](int64_t tree) {
    int32_t* offset = offset_.get() + (tree << max_depth_);
    for (int64_t i = 0; i < int64_t{1} << max_depth_; ++i) {
      offset[i] *= static_cast<int32_t>(block_rows_);
    }
  });
  return true;
}

// Thresholds of each feature in these rounds, in no order and repeated; those that no
// value is above are left out. Marks planes that are wanted: two a feature.
std::vector<std::vector<float>> CollectThresholds(const Ensemble& model,
                                                  int64_t num_features,
                                                  int64_t first_round,
                                                  int64_t last_round,
                                                  std::vector<uint8_t>* wanted) {
  int64_t nodes = model.num_nodes() * model.num_scores;
  std::vector<std::vector<float>> thresholds(num_features);
  for (int64_t i = first_round * nodes; i < last_round * nodes; ++i) {
    bool finite = model.threshold[i] < kInfinity;
    bool left = model.missing_left[i] != 0;
    if (left && !finite) continue;
    int64_t feature = model.feature[i];
    (*wanted)[2 * feature + !left] = 1;
    if (finite) thresholds[feature].push_back(EffectiveThreshold(model.threshold[i]));
  }
  return thresholds;
}

// Sorted thresholds as a search tree that begins at 1, the children of k at 2k, 2k + 1.
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

bool CodedEnsemble::Cut(const Pool& pool, const Ensemble& model, int64_t num_features,
                        int64_t first_round, int64_t last_round) {
  std::vector<uint8_t> wanted(2 * num_features, 0);
  auto thresholds =
      CollectThresholds(model, num_features, first_round, last_round, &wanted);
  int64_t nodes = (last_round - first_round) * model.num_nodes() * model.num_scores;
  ParallelFor(Threads(pool, nodes), num_features, [&](int64_t feature) {
    auto& own = thresholds[feature];
    std::sort(own.begin(), own.end());
    own.erase(std::unique(own.begin(), own.end()), own.end());
  });
  for (const auto& own : thresholds) {
    if (own.size() <= kMaxThresholds) continue;
    int64_t middle = (first_round + last_round) / 2;
    return middle - first_round >= kLeastRounds &&
           Cut(pool, model, num_features, first_round, middle) &&
           Cut(pool, model, num_features, middle, last_round);
  }
  Run run{first_round, last_round, 0, {}};
  for (int64_t feature = 0; feature < num_features; ++feature) {
    bool left = wanted[2 * feature], right = wanted[2 * feature + 1];
    if (!left && !right) continue;
    int64_t levels = 0;
    while ((size_t{1} << levels) <= thresholds[feature].size()) ++levels;
    CodedFeature coded{feature, levels, MakeTable(thresholds[feature], levels)};
    if (left) coded.left_plane = run.num_planes++;
    if (right) coded.right_plane = run.num_planes++;
    run.features.push_back(std::move(coded));
  }
  CodeTrees(pool, model, run, thresholds);
  runs_.push_back(std::move(run));
  return true;
}

// Gives each node its plane (not yet in bytes) and its threshold in codes.
void CodedEnsemble::CodeTrees(const Pool& pool, const Ensemble& model, const Run& run,
                              const std::vector<std::vector<float>>& thresholds) {
  std::vector<int32_t> planes(2 * thresholds.size(), 0);
  for (const CodedFeature& coded : run.features) {
    planes[2 * coded.feature] = static_cast<int32_t>(coded.left_plane);
    planes[2 * coded.feature + 1] = static_cast<int32_t>(coded.right_plane);
  }
  int64_t num_nodes = model.num_nodes();
  auto code = [&](int64_t number) {
    int64_t tree = run.first_round * model.num_scores + number;
    int32_t* offset = offset_.get() + (tree << max_depth_) + 1;
    int8_t* threshold = threshold_.get() + (tree << max_depth_) + 1;
    offset[-1] = 0;
    for (int64_t node = 0; node < num_nodes; ++node) {
      int64_t at = tree * num_nodes + node;
      bool finite = model.threshold[at] < kInfinity;
      bool left = model.missing_left[at] != 0;
      offset[node] = 0;
      threshold[node] = finite ? 0 : left ? kAlwaysLeft : kAllValuesLeft;
      if (left && !finite) continue;
      int64_t feature = model.feature[at];
      offset[node] = planes[2 * feature + !left];
      if (!finite) continue;
      const auto& own = thresholds[feature];
      auto found = std::lower_bound(own.begin(), own.end(),
                                    EffectiveThreshold(model.threshold[at]));
      threshold[node] = static_cast<int8_t>(found - own.begin() - 128);
    }
  };
  int64_t trees = (run.last_round - run.first_round) * model.num_scores;
  ParallelFor(Threads(pool, trees * num_nodes), trees, code);
}

// Rows [first, first + count) of a matrix, row by row; zeros up to `rows`.
void CopyRows(const Matrix& matrix, int64_t first, int64_t count, int64_t rows,
              float* out) {
  int64_t width = matrix.num_features;
  int64_t begin = first * width - matrix.head_size;
  if (matrix.by_column || begin < 0) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t f = 0; f < width; ++f) out[i * width + f] = matrix.At(first + i, f);
    }
  } else {
    std::memcpy(out, matrix.body + begin, count * width * sizeof(float));
  }
  std::fill(out + count * width, out + rows * width, 0.0f);
}

// What one task needs besides the ensemble.
struct Block {
  Block(const CodedEnsemble& coded, const Matrix& matrix, int64_t num_scores)
      : codes(coded.num_planes() * coded.block_rows()),
        columns(kTile * kBlockRows),
        scores(num_scores * kBlockRows),
        leaves(kTile * kBlockRows),
        copy(0),
        matrix(matrix) {}

  Room<int8_t> codes;
  Room<float> columns, scores;
  Room<int32_t> leaves;
  std::vector<float> copy;  // of rows that cannot be read in place
  const Matrix& matrix;
  int64_t first = 0, count = 0;  // rows of the matrix
  int64_t rows = 0;              // count, rounded up to a multiple of 64

  // Goes to rows [first, first + count).
  void Start(int64_t first_row, int64_t num_rows) {
    first = first_row;
    count = num_rows;
    rows = (count + 63) / 64 * 64;
    bool in_place = first * matrix.num_features >= matrix.head_size && rows == count;
    if (matrix.by_column || in_place) {
      copy.clear();
    } else {
      copy.resize(rows * matrix.num_features);
      CopyRows(matrix, first, count, rows, copy.data());
    }
  }

  const float* x() const {
    if (!copy.empty()) return copy.data();
    return matrix.body + first * matrix.num_features - matrix.head_size;
  }
};

// Columns [feature, feature + used) of a block.
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
    int64_t begin = (feature + f) * matrix.num_rows + block.first - matrix.head_size;
    if (begin >= 0) {
      std::memcpy(columns, matrix.body + begin, block.count * sizeof(float));
    } else {
      for (int64_t i = 0; i < block.count; ++i) {
        columns[i] = matrix.At(block.first + i, feature + f);
      }
    }
    std::fill(columns + block.count, columns + block.rows, 0.0f);
  }
}

void CodeBlock(const PredictLoops& loops, const Run& run, int64_t block_rows,
               const Block& block) {
  int64_t loaded = -1;
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
    loops.code(block.columns.get() + coded.feature % kTile * kBlockRows, block.rows,
               coded.table.data(), coded.levels, plane(coded.left_plane),
               plane(coded.right_plane));
  }
}

// scores[k * kBlockRows + i] of `count` rows become rows of out [count, K].
void WriteScores(const float* scores, int64_t count, int64_t num_scores, float* out) {
  for (int64_t k = 0; k < num_scores; ++k, scores += kBlockRows) {
    for (int64_t i = 0; i < count; ++i) out[i * num_scores + k] = scores[i];
  }
}

// leaves[t * stride + i] of a few trees, to out [N, trees] from row `first` on.
void WriteLeaves(const int32_t* leaves, int64_t stride, int64_t first, int64_t count,
                 int64_t first_tree, int64_t used, int64_t num_trees, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    int32_t* row = out + (first + i) * num_trees + first_tree;
    for (int64_t t = 0; t < used; ++t) row[t] = leaves[t * stride + i];
  }
}

void StartScores(const Ensemble& model, float* scores) {
  for (int64_t k = 0; k < model.num_scores; ++k) {
    std::fill(scores + k * kBlockRows, scores + (k + 1) * kBlockRows,
              model.init_score[k]);
  }
}

void ScoreBlock(const PredictLoops& loops, const Ensemble& model,
                const CodedEnsemble& coded, const Block& block, const Answer& answer) {
  int64_t num_scores = model.num_scores, num_rows = block.matrix.num_rows;
  float* scores = block.scores.get();
  StartScores(model, scores);
  for (const Run& run : coded.runs()) {
    CodeBlock(loops, run, coded.block_rows(), block);
    for (int64_t round = run.first_round; round < run.last_round; ++round) {
      for (int64_t k = 0; k < num_scores; ++k) {
        int64_t tree = round * num_scores + k;
        loops.add_tree(coded.Tree(tree), block.codes.get(), block.rows,
                       model.leaf_value + (tree << model.max_depth),
                       scores + k * kBlockRows);
      }
      if (answer.stages == nullptr) continue;
      WriteScores(scores, block.count, num_scores,
                  answer.stages + (round * num_rows + block.first) * num_scores);
    }
  }
  if (answer.scores == nullptr) return;
  WriteScores(scores, block.count, num_scores, answer.scores + block.first * num_scores);
}

void FindBlockLeaves(const PredictLoops& loops, const Ensemble& model,
                     const CodedEnsemble& coded, const Block& block, int32_t* out) {
  for (const Run& run : coded.runs()) {
    CodeBlock(loops, run, coded.block_rows(), block);
    int64_t end = run.last_round * model.num_scores;
    for (int64_t tree = run.first_round * model.num_scores; tree < end; tree += kTile) {
      int64_t used = std::min(kTile, end - tree);
      for (int64_t t = 0; t < used; ++t) {
        loops.find_leaves(coded.Tree(tree + t), block.codes.get(), block.rows,
                          block.leaves.get() + t * kBlockRows);
      }
      WriteLeaves(block.leaves.get(), kBlockRows, block.first, block.count, tree, used,
                  model.num_trees(), out);
    }
  }
}

void PredictOnCodes(const Pool& pool, const Ensemble& model, const CodedEnsemble& coded,
                    const Matrix& matrix, const Answer& answer) {
  const PredictLoops& loops = ChoosePredictLoops();
  int64_t block_rows = coded.block_rows(), num_rows = matrix.num_rows;
  int64_t task_rows = num_rows / (8 * pool.num_threads) / block_rows * block_rows;
  task_rows = std::max(block_rows, std::min(kTaskRows, task_rows));
  auto run = [&](int64_t task) {
    Block block(coded, matrix, model.num_scores);
    int64_t end = std::min((task + 1) * task_rows, num_rows);
    for (int64_t first = task * task_rows; first < end; first += block_rows) {
      block.Start(first, std::min(block_rows, end - first));
      if (answer.leaves != nullptr) {
        FindBlockLeaves(loops, model, coded, block, answer.leaves);
      } else {
        ScoreBlock(loops, model, coded, block, answer);
      }
    }
  };
  ParallelFor(pool, (num_rows + task_rows - 1) / task_rows, run);
}

// Rows that walk over floats together, with what they need.
struct WalkBlock {
  int64_t rows, trees;  // at most, and trees that are walked at a time
  std::vector<float> x, scores;
  std::vector<int32_t> leaves;

  WalkBlock(const Ensemble& model, const Matrix& matrix)
      : rows(std::clamp<int64_t>(8192 / matrix.num_features, 1,
                                 std::min<int64_t>(64, matrix.num_rows))),
        trees(std::max<int64_t>(1, kTile / rows)),
        x(rows * matrix.num_features),
        scores(model.num_scores * kBlockRows),
        leaves(rows * trees) {}
};

void WalkRows(const PredictLoops& loops, const Ensemble& model, const Matrix& matrix,
              int64_t first, int64_t count, WalkBlock* block, const Answer& answer) {
  float* x = block->x.data();
  CopyRows(matrix, first, count, count, x);
  for (int64_t i = 0; i < count * matrix.num_features; ++i) {
    x[i] = std::fabs(x[i]) < kTiny ? 0.0f : x[i];
  }
  int64_t num_scores = model.num_scores, num_trees = model.num_trees();
  float* scores = block->scores.data();
  if (answer.leaves == nullptr) StartScores(model, scores);
  for (int64_t tree = 0; tree < num_trees; tree += block->trees) {
    int64_t used = std::min(block->trees, num_trees - tree);
    int32_t* leaves = block->leaves.data();
    loops.walk(model, tree, used, x, count, matrix.num_features, leaves);
    if (answer.leaves != nullptr) {
      WriteLeaves(leaves, count, first, count, tree, used, num_trees, answer.leaves);
      continue;
    }
    for (int64_t t = tree; t < tree + used; ++t, leaves += count) {
      const float* value = model.leaf_value + (t << model.max_depth);
      float* own = scores + t % num_scores * kBlockRows;
      for (int64_t i = 0; i < count; ++i) own[i] += value[leaves[i]];
      if (answer.stages == nullptr || (t + 1) % num_scores != 0) continue;
      int64_t round = t / num_scores;
      WriteScores(scores, count, num_scores,
                  answer.stages + (round * matrix.num_rows + first) * num_scores);
    }
  }
  if (answer.scores == nullptr) return;
  WriteScores(scores, count, num_scores, answer.scores + first * num_scores);
}

void PredictByWalking(const Pool& pool, const Ensemble& model, const Matrix& matrix,
                      const Answer& answer) {
  const PredictLoops& loops = ChoosePredictLoops();
  int64_t work = matrix.num_rows * model.num_trees() * model.max_depth;
  const Pool& threads = Threads(pool, work);
  int64_t parts = std::min(matrix.num_rows, threads.num_threads * 8);
  parts = std::max<int64_t>(1, std::min(parts, work / kSerial));
  ParallelFor(threads, parts, [&](int64_t part) {
    WalkBlock block(model, matrix);
    int64_t end = matrix.num_rows * (part + 1) / parts;
    for (int64_t i = matrix.num_rows * part / parts; i < end; i += block.rows) {
      WalkRows(loops, model, matrix, i, std::min(block.rows, end - i), &block, answer);
    }
  });
}

// Coding the ensemble costs about as much as sixteen steps of a row a node, and a
// row's codes as much as four steps a feature.
bool CodesPay(const Ensemble& model, int64_t num_rows) {
  return model.max_depth <= kMaxCodedDepth && model.num_rounds > 0 &&
         num_rows * model.max_depth > 16 * model.num_nodes();
}

}  // namespace

bool HasFeatures(const Ensemble& model, int64_t num_features) {
  int64_t size = model.num_trees() * model.num_nodes();
  int32_t least = 0, most = 0;
  for (int64_t i = 0; i < size; ++i) {
    least = std::min(least, model.feature[i]);
    most = std::max(most, model.feature[i]);
  }
  return least >= 0 && most < num_features;
}

void Predict(const Pool& pool, const Ensemble& model, const Matrix& matrix,
             const Answer& answer) {
  if (matrix.num_rows == 0) return;
  CodedEnsemble coded;
  if (CodesPay(model, matrix.num_rows) &&
      coded.Build(pool, model, matrix.num_features)) {
    PredictOnCodes(pool, model, coded, matrix, answer);
  } else {
    PredictByWalking(pool, model, matrix, answer);
  }
}

}  // namespace jboost
