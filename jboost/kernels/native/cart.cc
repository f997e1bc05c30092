// SPDX-License-Identifier: Apache-2.0
// Grows one least-squares tree on all distinct values; jboost.cart.least_squares is the
// definition. Both add the same numbers in the same order.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "parallel.h"
#include "scratch.h"
#include "sort_words.h"

namespace jboost {
namespace {

// These structs have members of 8 bytes only, which Python writes.
struct CartTable {
  const float* matrix;    // [N, F]
  const double* targets;  // [K, N]
  const double* weights;  // [N], or null if all weights are equal
  int64_t num_rows, num_features, num_targets;
};

// Limits on splits; see jboost.cart.fit_tree.
struct CartRules {
  int64_t max_depth, min_child_samples, min_split_samples;
  double min_child_weight, min_gain;
};

// Memory for a tree of up to `capacity` nodes, breadth first; see
// jboost.cart.RegressionTree.
struct CartNodes {
  int32_t* left;
  int32_t* feature;
  float* threshold;
  bool* missing_left;
  double* value;  // [K, capacity]
  double* gain;
  double* squared_error;
  double* weight;
  int32_t* num_rows;
  int64_t capacity;
};

// As in jboost.cart.least_squares.
constexpr double kTie = 1e-10;
constexpr double kNoise = 1e-20;
constexpr double kLeastShare = 1e-12;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kParallelWork = 100000;  // visits of a value from which threads pay
constexpr int64_t kSplitWork = 10;         // such visits that splitting a row is worth
constexpr int64_t kSlotTasks = 64;         // tasks of a level's slots
constexpr int64_t kLine = 16;              // floats of a cache line

// A value above the index of its row; see jboost.cart.least_squares.
using Word = uint64_t;
constexpr Word kRow = 0xFFFFFFFF;
constexpr Word kMissing = kRow << 32;

Word MakeWord(float value, int64_t row) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::abs(value) < std::numeric_limits<float>::min()) bits = 0;
  uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
  if (std::isnan(value)) key = 0xFFFFFFFF;
  return Word{key} << 32 | static_cast<Word>(row);
}

// NaN for missing values: their key is the one of a NaN.
float ReadValue(Word word) {
  uint32_t key = static_cast<uint32_t>(word >> 32);
  uint32_t bits = key >> 31 ? key & 0x7FFFFFFFu : ~key;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

int64_t RowOf(Word word) { return static_cast<int64_t>(word & kRow); }
bool IsMissing(Word word) { return word >= kMissing; }
bool Differ(Word one, Word other) { return (one ^ other) > kRow; }

// See jboost.codes.thresholds.midpoints.
float Midpoint(float low, float high) {
  float middle = low / 2 + high / 2;
  if (std::abs(middle) < std::numeric_limits<float>::min()) middle = 0.0f;
  return low <= middle && middle < high ? middle : low;
}

// NumPy's pairwise summation.
double SumPairwise(const double* terms, int64_t count) {
  if (count < 8) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) sum += terms[i];
    return sum;
  }
  if (count > 128) {
    int64_t half = count / 2 / 8 * 8;
    return SumPairwise(terms, half) + SumPairwise(terms + half, count - half);
  }
  double sums[8];
  std::copy(terms, terms + 8, sums);
  int64_t i = 8;
  for (; i + 8 <= count; i += 8) {
    for (int64_t j = 0; j < 8; ++j) sums[j] += terms[i + j];
  }
  double sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
               ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  for (; i < count; ++i) sum += terms[i];
  return sum;
}

// numpy.add.reduceat of one segment, which is not empty.
double Sum(const double* terms, int64_t count) {
  return terms[0] + SumPairwise(terms + 1, count - 1);
}

// numpy.maximum of two numbers: NaN if one is.
double Larger(double one, double other) {
  return one >= other || std::isnan(one) ? one : other;
}

struct Stats {
  int64_t num_rows = 0;
  double weight = 0.0;
  double squared_error = 0.0;
  bool pure = true;  // all targets are equal
};

// A node that may be split. Its rows stand at [start, start + num_rows) of every
// column.
struct Slot {
  int64_t node;
  int64_t start;
  Stats stats;
  double least;  // share of its weight that a child needs
  // Equal weights: cuts after positions [first, end) are allowed.
  int64_t first, end;
};

struct Split {
  bool found = false;
  int32_t feature;
  float threshold;
  bool missing_left;
  bool has_missing;
  double gain;
  Stats children[2];
  int64_t start[2];  // of the children's slots; -1 if they may not be split
};

class Grower {
 public:
  Grower(const Pool& pool, const CartTable& table, const CartRules& rules,
         const CartNodes& nodes)
      : pool_(pool),
        table_(table),
        rules_(rules),
        nodes_(nodes),
        stride_(table.num_rows + 1),
        num_sums_(table.num_targets + (table.weights != nullptr)),
        words_(table.num_features * stride_),
        next_words_(table.num_features * stride_),
        summed_(num_sums_ * table.num_rows),
        rows_(table.num_rows),
        weights_(table.num_rows),
        terms_(table.num_rows),
        residuals_(table.num_targets * table.num_rows),
        share_(table.num_rows),
        factor_(table.num_rows),
        side_(table.num_rows) {}

  int64_t Grow();

 private:
  const Pool& Choose(int64_t work) const { return Threads(pool_, work, kParallelWork); }
  const Word* Column(int64_t feature) const { return words_.get() + feature * stride_; }
  const double* Summed(int64_t number) const {
    return summed_.get() + number * table_.num_rows;
  }
  int64_t NumRows() const { return slots_.back().start + slots_.back().stats.num_rows; }
  int64_t NumSlots() const { return static_cast<int64_t>(slots_.size()); }

  void SortColumns();
  Stats Summarize(int64_t start, int64_t size, double* value);
  void Scale(int64_t start, const Stats& stats);
  bool MayGrow(const Stats& stats) const;
  void WeighSlot(Slot* slot);
  double Weigh(const Slot& slot, int64_t num_left, double share) const;
  void Search(int64_t feature);
  template <class Visit>
  void VisitCuts(int64_t feature, const Slot& slot, double* sums, Visit visit);
  template <class Visit>
  void VisitCutsOfMany(int64_t feature, const Slot& slot, double* sums, Visit visit);
  void SplitSlot(int64_t number);
  bool FindSplit(int64_t number, Split* split);
  void MakeNode(int64_t node, const Stats& stats, const double* value);
  void SplitLevel();
  void MakeChildren();
  void MakeSlots();
  void Partition(int64_t feature);

  const Pool& pool_;
  const CartTable& table_;
  const CartRules& rules_;
  const CartNodes& nodes_;
  const int64_t stride_;    // words of a column, and one that is never read
  const int64_t num_sums_;  // sums over rows that a cut needs
  int64_t num_nodes_ = 0;
  int64_t first_node_ = 0;  // of the level
  int64_t depth_ = 0;
  Scratch<Word> words_, next_words_;
  // Weight times residual of each target, scaled so that it sums to 0 over a node and
  // gains are fractions of its squared error; then, for weights that differ, a row's
  // fraction of its node's weight minus 1 / rows.
  Scratch<double> summed_;
  Scratch<uint32_t> rows_;  // of each slot: its left rows, then the right ones
  Scratch<double> weights_, terms_, residuals_;  // of rows_
  Scratch<double> share_, factor_;               // of each cut, for equal weights
  Scratch<uint8_t> side_;                        // of each row: 1 if it goes right
  std::vector<Slot> slots_, next_slots_;
  std::vector<Split> splits_;
  std::vector<double> values_;  // [S, 2, K]: of the children
  std::vector<double> best_;    // [F, S]: the largest gain
  std::vector<double> sums_;    // [F, S, num_sums_]: at the start of each slot
};

void Grower::SortColumns() {
  int64_t num_features = table_.num_features, num_rows = table_.num_rows;
  const Pool& pool = Choose(num_features * num_rows);
  // A group of columns at a time, since neighbors share a cache line.
  int64_t num_groups = (num_features + kLine - 1) / kLine;
  ParallelFor(pool, num_groups, [&](int64_t group) {
    int64_t end = std::min(num_features, (group + 1) * kLine);
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t feature = group * kLine; feature < end; ++feature) {
        words_.get()[feature * stride_ + row] =
            MakeWord(table_.matrix[row * num_features + feature], row);
      }
    }
  });
  ParallelFor(pool, num_features, [&](int64_t feature) {
    Word* words = words_.get() + feature * stride_;
    Word* sorted = Sort(words, next_words_.get() + feature * stride_, num_rows);
    if (sorted != words) std::copy(sorted, sorted + num_rows, words);
  });
}

// Statistics of rows_[start, start + size); writes their residuals.
Stats Grower::Summarize(int64_t start, int64_t size, double* value) {
  const uint32_t* rows = rows_.get() + start;
  double* weights = weights_.get() + start;
  double* terms = terms_.get() + start;
  for (int64_t i = 0; i < size; ++i) {
    weights[i] = table_.weights == nullptr ? 1.0 : table_.weights[rows[i]];
  }
  Stats stats;
  stats.num_rows = size;
  stats.weight = Sum(weights, size);
  for (int64_t k = 0; k < table_.num_targets; ++k) {
    const double* targets = table_.targets + k * table_.num_rows;
    double* residuals = residuals_.get() + k * table_.num_rows + start;
    double low = kInfinity, high = -kInfinity;
    for (int64_t i = 0; i < size; ++i) {
      double target = residuals[i] = targets[rows[i]];
      low = std::min(low, target);
      high = std::max(high, target);
      terms[i] = weights[i] * target;
    }
    double rough = Sum(terms, size) / stats.weight;
    for (int64_t i = 0; i < size; ++i) {
      residuals[i] -= rough;
      terms[i] = weights[i] * residuals[i];
    }
    // Rounding leaves a small mean if targets are large.
    double rest = Sum(terms, size) / stats.weight;
    for (int64_t i = 0; i < size; ++i) {
      residuals[i] -= rest;
      terms[i] = weights[i] * (residuals[i] * residuals[i]);
    }
    stats.squared_error += Sum(terms, size);
    stats.pure = stats.pure && low == high;
    value[k] = rough + rest;
  }
  stats.pure = stats.pure || stats.squared_error == 0;
  return stats;
}

// Writes what cuts sum over the rows that Summarize has read.
void Grower::Scale(int64_t start, const Stats& stats) {
  const uint32_t* rows = rows_.get() + start;
  const double* weights = weights_.get() + start;
  double scale = std::sqrt(stats.weight * stats.squared_error);
  for (int64_t k = 0; k < table_.num_targets; ++k) {
    const double* residuals = residuals_.get() + k * table_.num_rows + start;
    double* scaled = summed_.get() + k * table_.num_rows;
    for (int64_t i = 0; i < stats.num_rows; ++i) {
      scaled[rows[i]] = weights[i] * residuals[i] / scale;
    }
  }
  if (table_.weights == nullptr) return;
  double* excess = summed_.get() + table_.num_targets * table_.num_rows;
  double equal = 1 / static_cast<double>(stats.num_rows);
  for (int64_t i = 0; i < stats.num_rows; ++i) {
    excess[rows[i]] = weights[i] / stats.weight - equal;
  }
}

bool Grower::MayGrow(const Stats& stats) const {
  int64_t least = std::max(rules_.min_split_samples, 2 * rules_.min_child_samples);
  return !stats.pure && stats.num_rows >= least && depth_ < rules_.max_depth;
}

// 1 / (fraction of weight left * fraction of weight right); -1 if the rules forbid the
// cut.
double Grower::Weigh(const Slot& slot, int64_t num_left, double share) const {
  int64_t fewer = std::min(num_left, slot.stats.num_rows - num_left);
  bool allowed =
      fewer >= rules_.min_child_samples && std::min(share, 1 - share) >= slot.least;
  return allowed ? 1 / (share * (1 - share)) : -1.0;
}

void Grower::WeighSlot(Slot* slot) {
  // Tolerance: sums of weights are rounded.
  double least = rules_.min_child_weight * (1 - 1e-9) / slot->stats.weight;
  slot->least = std::max(least, kLeastShare);
  double* shares = share_.get() + slot->start;
  double* factors = factor_.get() + slot->start;
  double num_rows = static_cast<double>(slot->stats.num_rows);
  slot->first = slot->stats.num_rows;
  slot->end = 0;
  for (int64_t i = 0; i < slot->stats.num_rows; ++i) {
    shares[i] = static_cast<double>(i + 1) / num_rows;
    if (table_.weights != nullptr) continue;
    factors[i] = Weigh(*slot, i + 1, shares[i]);
    if (factors[i] < 0) continue;
    slot->first = std::min(slot->first, i);
    slot->end = i + 1;
  }
  slot->first = std::min(slot->first, slot->end);
}

// Calls visit(position, gain, missing_left) for cuts after positions of a slot, first
// with missing values going right, then, if there are any, going left. `sums` are those
// of the column's rows before the slot, and then before the next slot.
template <class Visit>
void Grower::VisitCuts(int64_t feature, const Slot& slot, double* sums, Visit visit) {
  const Word* words = Column(feature) + slot.start;
  int64_t size = slot.stats.num_rows;
  if (num_sums_ > 1 || IsMissing(words[size - 1])) {
    return VisitCutsOfMany(feature, slot, sums, visit);
  }
  const double *scaled = Summed(0), *factors = factor_.get() + slot.start;
  double sum = sums[0];
  for (int64_t i = 0; i < slot.first; ++i) sum += scaled[RowOf(words[i])];
  for (int64_t i = slot.first; i < slot.end; ++i) {
    sum += scaled[RowOf(words[i])];
    double gain = sum * sum * factors[i];
    visit(i, Differ(words[i], words[i + 1]) ? gain : -1.0, false);
  }
  for (int64_t i = slot.end; i < size; ++i) sum += scaled[RowOf(words[i])];
  sums[0] = sum;
}

// VisitCuts for weights, several targets and missing values.
template <class Visit>
void Grower::VisitCutsOfMany(int64_t feature, const Slot& slot, double* sums,
                             Visit visit) {
  const Word* words = Column(feature) + slot.start;
  const double* shares = share_.get() + slot.start;
  const double* factors = factor_.get() + slot.start;
  int64_t size = slot.stats.num_rows, num_targets = table_.num_targets;
  bool weighted = table_.weights != nullptr;
  std::vector<double> runs(num_sums_ * size);
  for (int64_t k = 0; k < num_sums_; ++k) {
    const double* summed = Summed(k);
    double* run = runs.data() + k * size;
    for (int64_t i = 0; i < size; ++i) run[i] = sums[k] += summed[RowOf(words[i])];
  }
  const double* excess = runs.data() + num_targets * size;
  auto share = [&](int64_t i) { return weighted ? shares[i] + excess[i] : shares[i]; };
  auto square = [&](int64_t i, int64_t end) {
    double total = 0.0;
    for (int64_t k = 0; k < num_targets; ++k) {
      const double* run = runs.data() + k * size;
      double sum = end < 0 ? run[i] : run[i] - run[end];
      total += sum * sum;
    }
    return total;
  };
  for (int64_t i = 0; i + 1 < size; ++i) {
    double factor = weighted ? Weigh(slot, i + 1, share(i)) : factors[i];
    bool allowed = Differ(words[i], words[i + 1]) && factor > 0;
    visit(i, allowed ? square(i, -1) * factor : -1.0, false);
  }
  if (!IsMissing(words[size - 1])) return;
  int64_t num_values = std::lower_bound(words, words + size, kMissing) - words;
  // Missing values come last and the node's total is 0, so that their sum is minus the
  // sum at the last position that holds a value.
  int64_t end = num_values - 1;
  for (int64_t i = 0; i < end; ++i) {
    double factor = Weigh(slot, i + 1 + size - num_values, 1 + (share(i) - share(end)));
    bool allowed = Differ(words[i], words[i + 1]) && factor > 0;
    visit(i, allowed ? square(i, end) * factor : -1.0, true);
  }
}

// Finds the largest gain of a column in each slot.
void Grower::Search(int64_t feature) {
  std::vector<double> sums(num_sums_, 0.0);
  for (int64_t s = 0; s < NumSlots(); ++s) {
    int64_t place = feature * NumSlots() + s;
    std::copy(sums.begin(), sums.end(), sums_.begin() + place * num_sums_);
    double best = -1.0;
    VisitCuts(feature, slots_[s], sums.data(),
              [&](int64_t, double gain, bool) { best = Larger(best, gain); });
    best_[place] = best;
  }
}

// Finds the best split of a slot and writes to which side each of its rows goes.
bool Grower::FindSplit(int64_t number, Split* split) {
  const Slot& slot = slots_[number];
  double top = -1.0;
  for (int64_t f = 0; f < table_.num_features; ++f) {
    top = Larger(top, best_[f * NumSlots() + number]);
  }
  // Ties up to rounding go to the first feature, so that results are reproducible.
  double enough = top * (1 - kTie) - kNoise;
  int64_t feature = 0, place = number;
  while (feature < table_.num_features && !(best_[place] >= enough)) {
    ++feature;
    place += NumSlots();
  }
  split->gain = (top > kNoise ? top : 0.0) * slot.stats.squared_error;
  if (feature == table_.num_features) return false;
  if (!(split->gain >= rules_.min_gain * (1 - kTie))) return false;
  int64_t size = slot.stats.num_rows, first[2] = {size, size};
  VisitCuts(feature, slot, sums_.data() + place * num_sums_,
            [&](int64_t i, double gain, bool missing_left) {
              int64_t& index = first[missing_left];
              if (gain >= enough && index == size) index = i;
            });
  int64_t index = std::min(first[0], first[1]);
  const Word* words = Column(feature) + slot.start;
  split->found = true;
  split->feature = static_cast<int32_t>(feature);
  split->threshold =
      IsMissing(words[index + 1])
          ? std::numeric_limits<float>::infinity()
          : Midpoint(ReadValue(words[index]), ReadValue(words[index + 1]));
  split->missing_left = first[1] < first[0];
  split->has_missing = IsMissing(words[size - 1]);
  for (int64_t i = 0; i < size; ++i) {
    bool right = IsMissing(words[i]) ? !split->missing_left : i > index;
    side_.get()[RowOf(words[i])] = right;
  }
  return true;
}

void Grower::SplitSlot(int64_t number) {
  const Slot& slot = slots_[number];
  Split& split = splits_[number];
  split = Split();
  if (!FindSplit(number, &split)) return;
  // In the order of the first column, in which the definition adds up rows.
  const Word* words = Column(0) + slot.start;
  uint32_t* rows = rows_.get() + slot.start;
  int64_t count = 0, start = slot.start;
  for (int right = 0; right < 2; ++right) {
    int64_t begin = count;
    for (int64_t i = 0; i < slot.stats.num_rows; ++i) {
      int64_t row = RowOf(words[i]);
      if (side_.get()[row] == right) rows[count++] = static_cast<uint32_t>(row);
    }
    double* value = values_.data() + (2 * number + right) * table_.num_targets;
    Stats& child = split.children[right] = Summarize(start, count - begin, value);
    if (MayGrow(child)) Scale(start, child);
    start += child.num_rows;
  }
}

void Grower::MakeNode(int64_t node, const Stats& stats, const double* value) {
  nodes_.left[node] = -1;
  nodes_.feature[node] = 0;
  nodes_.threshold[node] = std::numeric_limits<float>::infinity();
  nodes_.missing_left[node] = true;
  for (int64_t k = 0; k < table_.num_targets; ++k) {
    nodes_.value[k * nodes_.capacity + node] = value[k];
  }
  nodes_.gain[node] = 0.0;
  nodes_.squared_error[node] = stats.squared_error;
  nodes_.weight[node] = stats.weight;
  nodes_.num_rows[node] = static_cast<int32_t>(stats.num_rows);
}

// Numbers the children in the order of their parents.
void Grower::MakeChildren() {
  std::vector<int64_t> number(num_nodes_ - first_node_, -1);  // of the slot of a node
  for (int64_t s = 0; s < NumSlots(); ++s) {
    if (splits_[s].found) number[slots_[s].node - first_node_] = s;
  }
  first_node_ = num_nodes_;
  for (int64_t s : number) {
    if (s < 0) continue;
    const Split& split = splits_[s];
    int64_t node = slots_[s].node;
    nodes_.left[node] = static_cast<int32_t>(num_nodes_);
    nodes_.feature[node] = split.feature;
    nodes_.threshold[node] = split.threshold;
    nodes_.missing_left[node] =
        split.has_missing ? split.missing_left
                          : split.children[0].weight >= split.children[1].weight;
    nodes_.gain[node] = split.gain;
    for (int right = 0; right < 2; ++right) {
      const double* value = values_.data() + (2 * s + right) * table_.num_targets;
      MakeNode(num_nodes_++, split.children[right], value);
    }
  }
}

// Lays out the children that may be split, left ones first.
void Grower::MakeSlots() {
  next_slots_.clear();
  int64_t start = 0;
  for (int right = 0; right < 2; ++right) {
    for (int64_t s = 0; s < NumSlots(); ++s) {
      Split& split = splits_[s];
      split.start[right] = -1;
      if (!split.found || !MayGrow(split.children[right])) continue;
      split.start[right] = start;
      int64_t node = nodes_.left[slots_[s].node] + right;
      next_slots_.push_back({node, start, split.children[right], 0.0, 0, 0});
      start += split.children[right].num_rows;
    }
  }
}

// Moves a column's words to the slots of the next level, in the same order.
void Grower::Partition(int64_t feature) {
  const Word* column = Column(feature);
  Word* next = next_words_.get() + feature * stride_;
  const uint8_t* side = side_.get();
  for (int64_t s = 0; s < NumSlots(); ++s) {
    const Split& split = splits_[s];
    bool left_grows = split.start[0] >= 0, right_grows = split.start[1] >= 0;
    if (!left_grows && !right_grows) continue;
    // The words of a child that does not grow overwrite each other in the last place.
    int64_t left = left_grows ? split.start[0] : stride_ - 1;
    int64_t right = right_grows ? split.start[1] : stride_ - 1;
    const Word* words = column + slots_[s].start;
    for (int64_t i = 0; i < slots_[s].stats.num_rows; ++i) {
      bool goes_right = side[RowOf(words[i])];
      next[goes_right ? right : left] = words[i];
      left += left_grows & !goes_right;
      right += right_grows & goes_right;
    }
  }
}

int64_t Grower::Grow() {
  SortColumns();
  std::iota(rows_.get(), rows_.get() + table_.num_rows, 0u);
  values_.resize(2 * table_.num_targets);
  Stats root = Summarize(0, table_.num_rows, values_.data());
  MakeNode(num_nodes_++, root, values_.data());
  if (MayGrow(root)) {
    Scale(0, root);
    slots_.push_back({0, 0, root, 0.0, 0, 0});
  }
  while (!slots_.empty()) {
    SplitLevel();
    MakeChildren();
    MakeSlots();
    const Pool& pool = Choose(table_.num_features * NumRows());
    ParallelFor(pool, table_.num_features, [&](int64_t f) { Partition(f); });
    std::swap(words_, next_words_);
    std::swap(slots_, next_slots_);
  }
  return num_nodes_;
}

void Grower::SplitLevel() {
  ++depth_;
  splits_.resize(NumSlots());
  values_.resize(2 * NumSlots() * table_.num_targets);
  best_.resize(table_.num_features * NumSlots());
  sums_.resize(best_.size() * num_sums_);
  for (Slot& slot : slots_) WeighSlot(&slot);
  const Pool& pool = Choose(table_.num_features * NumRows());
  ParallelFor(pool, table_.num_features, [&](int64_t f) { Search(f); });
  int64_t group = NumSlots() / kSlotTasks + 1;
  int64_t num_groups = (NumSlots() + group - 1) / group;
  ParallelFor(Choose(kSplitWork * NumRows()), num_groups, [&](int64_t task) {
    int64_t end = std::min(NumSlots(), (task + 1) * group);
    for (int64_t s = task * group; s < end; ++s) SplitSlot(s);
  });
}

// Threads of one call, for callers that are not on XLA's threads.
class OwnThreads {
 public:
  explicit OwnThreads(int64_t count) {
    pool_.schedule = [this](std::function<void()> task) { Schedule(std::move(task)); };
    try {
      for (; pool_.num_threads < count; ++pool_.num_threads) {
        threads_.emplace_back([this] { Work(); });
      }
    } catch (const std::exception&) {
      // There is no memory for another thread, or the system allows none. An exception
      // that left the constructor would end the process, as threads are running.
    }
  }

  ~OwnThreads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const Pool& pool() const { return pool_; }

 private:
  void Schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return done_ || !tasks_.empty(); });
      if (done_) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  Pool pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool done_ = false;
};

}  // namespace

// Returns the number of nodes, or -1 if there is not enough memory. Starts threads of
// its own for large tables, because the caller is not on XLA's threads.
extern "C" __attribute__((visibility("default"))) int64_t
jboost_grow_cart(const CartTable* table, const CartRules* rules, const CartNodes* nodes,
                 int64_t num_threads) {
  try {
    int64_t useful = 1 + table->num_rows * table->num_features / kParallelWork;
    OwnThreads threads(std::min(num_threads, useful));
    return Grower(threads.pool(), *table, *rules, *nodes).Grow();
  } catch (const std::exception&) {
    return -1;
  }
}

}  // namespace jboost
