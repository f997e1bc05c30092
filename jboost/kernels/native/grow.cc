// SPDX-License-Identifier: Apache-2.0
#include "grow.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "categories.h"
#include "exact_sum.h"
#include "limited.h"
#include "sampling.h"
#include "sparse.h"

namespace jboost {
namespace {

constexpr int64_t kPartRows = 4096;  // the fewest rows that a task sums
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kGroupChunks = 8;      // whose codes the last cache holds
constexpr int64_t kMostCells = 1 << 19;  // of the tables of all threads: 4 MB
constexpr int64_t kNearestRows = 32768;  // more rows are rounded stochastically

int64_t BlockFeatures(const Codes& codes, int64_t block) {
  return std::min(codes.width, codes.num_features - block * codes.width);
}

template <class Code>
void PackRows(const Codes& codes, const Code* columns, int64_t num_bins, int64_t block,
              int64_t begin, int64_t end, void* packed) {
  // Assembles words of 8 bytes from several columns: writing single codes, a row apart,
  // takes twice as long.
  constexpr int64_t kCodes = 8 / sizeof(Code), kBits = 8 * sizeof(Code);
  constexpr int64_t kTile = 256;  // rows whose codes stay in the L1 cache
  // Codes cannot exceed their type, even if num_bins does.
  Code last = static_cast<Code>(
      std::min<int64_t>(num_bins - 1, std::numeric_limits<Code>::max()));
  int64_t used = BlockFeatures(codes, block);
  for (int64_t at = begin; at < end; at += kTile) {
    int64_t size = std::min(kTile, end - at);
    Code* out =
        static_cast<Code*>(packed) + (block * codes.num_rows + at) * codes.width;
    for (int64_t f = 0; f < codes.width; f += kCodes) {
      int64_t count = std::max<int64_t>(0, std::min(kCodes, used - f));
      uint64_t words[kTile] = {};
      for (int64_t k = 0; k < count; ++k) {
        const Code* column =
            columns + (block * codes.width + f + k) * codes.num_rows + at;
        for (int64_t i = 0; i < size; ++i) {
          words[i] |= static_cast<uint64_t>(std::min(column[i], last)) << (kBits * k);
        }
      }
      for (int64_t i = 0; i < size; ++i) {
        std::memcpy(out + i * codes.width + f, words + i, sizeof words[i]);
      }
    }
  }
}

// Rows of a node in a chunk.
struct Run {
  int32_t node, chunk, begin, count;
};

// Sums of nodes whose rows several tasks share; null: none yet.
using Tables = std::vector<std::unique_ptr<int64_t[]>>;

// Tables for tasks that sum the same features: as many as there are threads at work.
class TablePool {
 public:
  std::unique_ptr<Tables> Take(int64_t num_nodes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<Tables>(num_nodes);
    std::unique_ptr<Tables> taken = std::move(free_.back());
    free_.pop_back();
    return taken;
  }
  void Return(std::unique_ptr<Tables> tables) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(tables));
  }
  const std::vector<std::unique_ptr<Tables>>& all() const { return free_; }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Tables>> free_;
};

// Rows of each node over all chunks.
std::vector<int64_t> CountRows(const Rows& rows, const NodeSum* nodes,
                               int64_t num_nodes, int64_t num_chunks) {
  std::vector<int64_t> counts(num_nodes, 0);
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const Segment* segments = rows.segments + chunk * rows.num_slots;
    for (int64_t node = 0; node < num_nodes; ++node) {
      const Segment& segment = segments[nodes[node].slot];
      counts[node] += segment.end - segment.begin;
    }
  }
  return counts;
}

// Lists the rows in order of group of chunks, node and chunk, so that the codes of a
// group are still in a cache when its next node needs the same lines. `ends`: where
// tasks of equal size end in the list.
std::vector<Run> ListRuns(const Rows& rows, const NodeSum* nodes, int64_t num_nodes,
                          int64_t num_chunks, int64_t group_size, int64_t task_rows,
                          std::vector<int64_t>* ends) {
  std::vector<Run> runs;
  int64_t room = task_rows;
  for (int64_t group = 0; group < num_chunks; group += group_size) {
    int64_t end = std::min(group + group_size, num_chunks);
    for (int64_t node = 0; node < num_nodes; ++node) {
      for (int64_t chunk = group; chunk < end; ++chunk) {
        Segment left = rows.segments[chunk * rows.num_slots + nodes[node].slot];
        while (left.begin < left.end) {
          if (room == 0) {
            ends->push_back(static_cast<int64_t>(runs.size()));
            room = task_rows;
          }
          int32_t count =
              static_cast<int32_t>(std::min<int64_t>(left.end - left.begin, room));
          runs.push_back({static_cast<int32_t>(node), static_cast<int32_t>(chunk),
                          left.begin, count});
          left.begin += count;
          room -= count;
        }
      }
    }
  }
  ends->push_back(static_cast<int64_t>(runs.size()));
  return runs;
}

// Chooses a power of two that keeps the scaled sum of magnitudes below 2^30; `unit` is
// its inverse.
void ChooseScale(float total, float* scale, float* unit) {
  int32_t exponent = -126;  // if the sum exceeds float32
  if (std::isfinite(total)) {
    total = std::max(total, 1e-30f);
    int32_t bits;
    std::memcpy(&bits, &total, sizeof bits);
    exponent = std::clamp(156 - (bits >> 23), -126, 126);
  }
  int32_t up = (exponent + 127) << 23, down = (127 - exponent) << 23;
  std::memcpy(scale, &up, sizeof up);
  std::memcpy(unit, &down, sizeof down);
}

// Writes the bounds of both children's leaf values, from the sums of the left child and
// of the node. See bound_children of jboost.trees.splitting.
void WriteChildBounds(const int32_t left[2], const int32_t total[2],
                      const SplitLimits& limits, const ValueLimits& values,
                      int32_t sign, bool is_missing, float* bounds) {
  const int32_t right[2] = {total[0] - left[0], total[1] - left[1]};
  Sums sides[2] = {InUnits(left, limits), InUnits(right, limits)};
  float best[2];
  for (int i = 0; i < 2; ++i) {
    best[i] = LimitedValue(sides[i], values, Divisor(sides[i].weight));
  }
  float middle = best[0] / 2.0f + best[1] / 2.0f;
  bool free = sign == 0, rising = is_missing ? best[0] <= best[1] : sign > 0;
  bounds[0] = bounds[2] = values.low;
  bounds[1] = bounds[3] = values.high;
  if (free) return;
  bounds[rising ? 1 : 0] = middle;
  bounds[rising ? 2 : 3] = middle;
}

// Lists the bins with rows, from cumulative sums with counts. Returns whether values
// are missing.
bool FindSeen(const BinSums& sums, std::vector<int32_t>* seen) {
  seen->clear();
  for (int64_t bin = 1; bin < sums.num_bins; ++bin) {
    bool here = sums.count[bin] != sums.count[bin - 1] ||
                sums.curvature[bin] != sums.curvature[bin - 1] ||
                sums.gradient[bin] != sums.gradient[bin - 1];
    if (here) seen->push_back(static_cast<int32_t>(bin));
  }
  return sums.gradient[0] != 0 || sums.curvature[0] != 0 || sums.count[0] != 0;
}

}  // namespace

void PackCodes(const Pool& pool, const Codes& codes, int64_t num_bins, void* packed) {
  int64_t pieces = NumChunks(codes.num_rows);
  ParallelFor(Threads(pool, codes.num_rows * codes.num_features),
              codes.num_blocks * pieces, [&](int64_t task) {
                int64_t block = task / pieces, begin = task % pieces * kChunk;
                int64_t end = std::min(begin + kChunk, codes.num_rows);
                WithCodes(codes.columns, codes.wide, [&](auto* columns) {
                  PackRows(codes, columns, num_bins, block, begin, end, packed);
                });
              });
}

bool BuildHistogram(const Pool& pool, const Codes& codes, const int32_t* channels,
                    int64_t num_channels, const int32_t* node, int64_t num_nodes,
                    int64_t num_bins, int32_t* out) {
  int64_t table = num_bins * num_channels;
  auto sum_feature = [&](const auto* column, int64_t feature) {
    for (int64_t m = 0; m < num_nodes; ++m) {
      std::fill_n(out + (m * codes.num_features + feature) * table, table, 0);
    }
    for (int64_t i = 0; i < codes.num_rows; ++i) {
      if (node[i] < 0 || node[i] >= num_nodes || column[i] >= num_bins) continue;
      int32_t* cell = out + (node[i] * codes.num_features + feature) * table +
                      column[i] * num_channels;
      for (int64_t c = 0; c < num_channels; ++c) {
        cell[c] =
            static_cast<int32_t>(static_cast<uint32_t>(cell[c]) +
                                 static_cast<uint32_t>(channels[i * num_channels + c]));
      }
    }
  };
  ParallelFor(Threads(pool, codes.num_rows * codes.num_features), codes.num_features,
              [&](int64_t feature) {
                WithCodes(codes.columns, codes.wide, [&](auto* columns) {
                  sum_feature(columns + feature * codes.num_rows, feature);
                });
              });
  return true;
}

bool AreInChunk(const uint16_t* index, int64_t size, int64_t count) {
  uint16_t last = static_cast<uint16_t>(count - 1);
  uint16_t outside = 0;  // of 16 bits, so that the loop vectorizes well
  for (int64_t i = 0; i < size; ++i) outside |= index[i] > last;
  return outside == 0;
}

bool SplitPairs(const Pool& pool, const PairedRows& rows, int64_t num_rows) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  std::atomic<bool> finite{true};
  ParallelFor(Threads(pool, num_rows), NumChunks(num_rows), [&](int64_t chunk) {
    int64_t first = chunk * kChunk;
    if (!loops.split_pairs(rows, first, std::min(first + kChunk, num_rows))) {
      finite = false;
    }
  });
  return finite;
}

void WeighRows(const Pool& pool, const WeighedRows& rows) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  int64_t num_rows = rows.num_rows;
  ParallelFor(Threads(pool, num_rows), NumChunks(num_rows), [&](int64_t chunk) {
    int64_t first = chunk * kChunk;
    loops.weigh_rows(rows, first, std::min(first + kChunk, num_rows));
  });
}

void PlaceRows(const Pool& pool, const Derivatives& derivatives, const uint32_t* seed,
               const Rounding& rounding, int64_t first_row, const Rows& rows) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  int64_t num_rows = derivatives.num_rows;
  const uint8_t* in_bag = derivatives.in_bag;
  ParallelFor(Threads(pool, num_rows), NumChunks(num_rows), [&](int64_t chunk) {
    int64_t first = chunk * kChunk, count = std::min(kChunk, num_rows - first);
    loops.quantise(derivatives, first, count, first_row, rounding, seed,
                   rows.words + first);
    uint16_t* index = rows.index + first;
    int64_t* words = rows.words + first;
    int64_t kept = count;
    if (std::memchr(in_bag + first, 0, count) == nullptr) {
      for (int64_t i = 0; i < count; ++i) index[i] = static_cast<uint16_t>(i);
    } else {
      kept = 0;
      for (int64_t i = 0; i < count; ++i) {
        index[kept] = static_cast<uint16_t>(i);
        words[kept] = words[i];
        kept += in_bag[first + i] != 0;
      }
    }
    Segment* own = rows.segments + chunk * rows.num_slots;
    std::fill(own, own + rows.num_slots, Segment{0, 0});
    own[0].end = static_cast<int32_t>(kept);
  });
}

void FindGreatestDerivatives(const Pool& pool, const Derivatives& rows,
                             uint32_t bits[2], int64_t* num_in_bag) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  int64_t num_rows = rows.num_rows, num_chunks = NumChunks(num_rows);
  const uint8_t* in_bag = rows.in_bag;
  struct Part {
    uint32_t bits[2];
    int64_t kept;
  };
  std::vector<Part> parts(num_chunks);
  ParallelFor(Threads(pool, num_rows), num_chunks, [&](int64_t chunk) {
    int64_t first = chunk * kChunk, count = std::min(kChunk, num_rows - first);
    Part& part = parts[chunk];
    part.bits[0] = loops.greatest_bits(rows.gradient + first, in_bag + first, count);
    part.bits[1] = loops.greatest_bits(rows.curvature + first, in_bag + first, count);
    int64_t kept = 0;
    for (int64_t i = first; i < first + count; ++i) kept += in_bag[i] != 0;
    part.kept = kept;
  });
  bits[0] = bits[1] = 0;
  *num_in_bag = 0;
  for (const Part& part : parts) {
    for (int channel = 0; channel < 2; ++channel) {
      bits[channel] = std::max(bits[channel], part.bits[channel]);
    }
    *num_in_bag += part.kept;
  }
}

void SumMagnitudes(const Pool& pool, int64_t num_rows, const float* values,
                   const uint8_t* in_bag, float up, int32_t digits[4]) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  int64_t num_chunks = NumChunks(num_rows);
  std::vector<ExactSum> parts(num_chunks);
  ParallelFor(Threads(pool, num_rows), num_chunks, [&](int64_t chunk) {
    int64_t first = chunk * kChunk, count = std::min(kChunk, num_rows - first);
    loops.sum_magnitudes(values + first, in_bag + first, count, up, &parts[chunk].high,
                         &parts[chunk].low);
  });
  ExactSum sum;
  for (const ExactSum& part : parts) sum.Add(part);
  sum.Write(digits);
}

Rounding ChooseRounding(const Pool& pool, const Derivatives& rows, float units[2],
                        int64_t* num_in_bag) {
  const float* channels[2] = {rows.gradient, rows.curvature};
  uint32_t bits[2];
  FindGreatestDerivatives(pool, rows, bits, num_in_bag);
  Rounding rounding{{1.0f, 1.0f}, *num_in_bag > kNearestRows};
  for (int channel = 0; channel < 2; ++channel) {
    if (channel == 1 && rows.uniform) {
      std::memcpy(&units[1], &bits[1], sizeof bits[1]);  // the curvature of all rows
      units[1] = std::max(1e-30f, units[1]);
      break;
    }
    float total = std::numeric_limits<float>::infinity();
    if (bits[channel] < kInfinityBits) {
      Unit unit = ChooseUnit(bits[channel]);
      int32_t digits[4];
      SumMagnitudes(pool, rows.num_rows, channels[channel], rows.in_bag, unit.up,
                    digits);
      ExactSum sum;
      sum.AddDigits(digits);
      total = sum.Value(unit);
    }
    ChooseScale(total, rounding.scale + channel, units + channel);
  }
  return rounding;
}

void FinishNode(const int64_t* scratch, int64_t row, const Histograms& histograms,
                const NodeSum& node, int64_t first_feature, int64_t used,
                int64_t num_features) {
  int64_t bins = histograms.num_bins, channels = histograms.num_channels;
  int64_t plane = num_features * bins;
  int32_t* own = histograms.sums + node.place * channels * plane;
  int32_t* sibling = node.sibling_place < 0
                         ? nullptr
                         : histograms.sums + node.sibling_place * channels * plane;
  int64_t stride = histograms.counted ? 2 : 1;
  for (int64_t f = 0; f < used; ++f) {
    const int64_t* cells = scratch + f * row * stride;
    int64_t at = (first_feature + f) * bins;
    int32_t* gradient = own + at;
    int32_t* curvature = own + plane + at;
    int64_t word = 0;
    for (int64_t b = 0; b < bins; ++b) {
      word += cells[b * stride];
      int32_t low = static_cast<int32_t>(word);
      gradient[b] = low + (histograms.add ? gradient[b] : 0);
      curvature[b] = static_cast<int32_t>((word - low) >> 32) +
                     (histograms.add ? curvature[b] : 0);
    }
    if (histograms.counted) {
      int64_t count = 0;
      for (int64_t b = 0; b < bins; ++b) {
        count += cells[b * 2 + 1];
        own[2 * plane + at + b] = static_cast<int32_t>(count) +
                                  (histograms.add ? own[2 * plane + at + b] : 0);
      }
    }
    if (sibling == nullptr) continue;
    int64_t filled = histograms.counted ? channels : 2;
    for (int64_t c = 0; c < filled; ++c) {
      const int32_t* mine = own + c * plane + at;
      int32_t* other = sibling + c * plane + at;
      for (int64_t b = 0; b < bins; ++b) other[b] -= mine[b];
    }
  }
}

bool SumNodes(const Pool& pool, const Codes& codes, const Rows& rows,
              const NodeSum* nodes, int64_t num_nodes, const Histograms& histograms) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  auto sum = histograms.counted ? loops.sum_words_and_counts : loops.sum_words;
  int64_t num_chunks = NumChunks(codes.num_rows);
  std::vector<int64_t> counts = CountRows(rows, nodes, num_nodes, num_chunks);
  int64_t num_rows = 0;
  for (int64_t count : counts) num_rows += count;
  int64_t stride = codes.wide ? histograms.num_bins : kByteStride;
  int64_t feature_cells = stride * (histograms.counted ? 2 : 1);
  // Enough tasks to balance the threads, but not so many that clearing and merging
  // their tables costs as much as summing.
  const Pool& threads = Threads(pool, num_rows * codes.num_features);
  int64_t wanted = threads.num_threads == 1 ? 1 : threads.num_threads * kTasksPerThread;
  int64_t least = std::max(kPartRows, codes.width * feature_cells / 4);
  int64_t num_parts = std::max<int64_t>(1, std::min(wanted, num_rows / least));
  int64_t task_rows = std::max<int64_t>(1, (num_rows + num_parts - 1) / num_parts);
  int64_t held = threads.num_threads * num_nodes * codes.width * feature_cells;
  int64_t group_size =
      held <= kMostCells ? kGroupChunks : std::max<int64_t>(1, num_chunks);
  std::vector<int64_t> ends;
  std::vector<Run> runs =
      ListRuns(rows, nodes, num_nodes, num_chunks, group_size, task_rows, &ends);
  int64_t num_tasks = static_cast<int64_t>(ends.size());
  std::vector<TablePool> pools(codes.num_blocks);
  std::atomic<bool> inside{true};

  auto run_task = [&](int64_t number) {
    int64_t block = number / num_tasks, task = number % num_tasks;
    int64_t used = BlockFeatures(codes, block);
    int64_t cells = used * feature_cells;
    std::unique_ptr<Tables> tables = pools[block].Take(num_nodes);
    std::unique_ptr<int64_t[]> zeros;
    int64_t at = task == 0 ? 0 : ends[task - 1], end = ends[task];
    while (at < end) {
      int64_t node = runs[at].node, summed = 0;
      std::unique_ptr<int64_t[]>& table = (*tables)[node];
      bool begun = table != nullptr;
      if (!begun) table = zeros ? std::move(zeros) : std::make_unique<int64_t[]>(cells);
      for (; at < end && runs[at].node == node; ++at) {
        const Run& run = runs[at];
        if (at + 1 < end) {  // the hardware cannot predict the next rows
          const Run& next = runs[at + 1];
          int64_t first = next.chunk * kChunk + next.begin;
          __builtin_prefetch(rows.index + first);
          __builtin_prefetch(rows.words + first);
          __builtin_prefetch(rows.words + first + 8);
        }
        int64_t first = run.chunk * kChunk;
        const uint16_t* index = rows.index + first + run.begin;
        if (!AreInChunk(index, run.count, std::min(kChunk, codes.num_rows - first))) {
          inside = false;
          return;
        }
        const char* packed =
            static_cast<const char*>(codes.packed) +
            (block * codes.num_rows + first) * codes.width * codes.code_size();
        RowRange range{packed,    index,       rows.words + first + run.begin,
                       run.count, codes.width, used,
                       stride};
        sum(range, codes.wide, table.get());
        summed += run.count;
      }
      if (begun || summed < counts[node]) continue;
      FinishNode(table.get(), stride, histograms, nodes[node], block * codes.width,
                 used, codes.num_features);
      zeros = std::move(table);
      if (at < end) std::fill(zeros.get(), zeros.get() + cells, 0);
    }
    pools[block].Return(std::move(tables));
  };
  ParallelFor(threads, num_tasks * codes.num_blocks, run_task);
  if (!inside) return false;

  // Nodes without rows, and nodes that several tasks share.
  ParallelFor(threads, num_nodes * codes.num_blocks, [&](int64_t number) {
    int64_t node = number / codes.num_blocks, block = number % codes.num_blocks;
    int64_t used = BlockFeatures(codes, block);
    int64_t cells = used * feature_cells;
    int64_t* total = nullptr;
    std::unique_ptr<int64_t[]> zeros;
    if (counts[node] == 0) {
      if (histograms.add) return;
      zeros = std::make_unique<int64_t[]>(cells);
      total = zeros.get();
    }
    for (const std::unique_ptr<Tables>& tables : pools[block].all()) {
      int64_t* part = (*tables)[node].get();
      if (part == nullptr) continue;
      if (total == nullptr) {
        total = part;
      } else {
        for (int64_t i = 0; i < cells; ++i) total[i] += part[i];
      }
    }
    if (total != nullptr) {
      FinishNode(total, stride, histograms, nodes[node], block * codes.width, used,
                 codes.num_features);
    }
  });
  return true;
}

NodeScore ScoreNode(const int32_t total[2], const SplitLimits& limits,
                    const LimitsOfSlots* slots, int64_t slot) {
  Sums whole = InUnits(total, limits);
  if (slots == nullptr) return {Score(whole), Score(whole), false, {}};
  ValueLimits values{slots->l1, slots->bounds[2 * slot], slots->bounds[2 * slot + 1]};
  float value;
  return {LimitedScore(whole, values, &value), LimitedSize(whole, values), true,
          values};
}

void WriteSplit(int64_t slot, const BestSplit& best, const int32_t left[2],
                const int32_t total[2], bool is_missing, const NodeScore& node,
                const SplitLimits& limits, float min_gain, const LimitsOfSlots* slots,
                const Splits& splits) {
  splits.feature[slot] = best.feature;
  splits.threshold[slot] = best.threshold;
  splits.missing_left[slot] = best.missing_left;
  splits.gain[slot] = best.gain - min_gain;
  splits.found[slot] = IsWorth(best.gain, node.size, min_gain);
  if (slots == nullptr) return;
  WriteChildBounds(left, total, limits, node.values, slots->monotone[best.feature],
                   is_missing, splits.child_bounds + 4 * slot);
}

bool DrawThresholds(const Search& search, int64_t slot, int32_t num_rows,
                    int64_t feature, int64_t cuts, std::vector<int32_t>* ranks) {
  int64_t per = search.rows_per_threshold;
  if (per <= 0) return false;
  int64_t wanted = std::max<int64_t>((num_rows + per / 2) / per, 1);
  if (wanted >= cuts) return false;
  uint32_t use = -static_cast<uint32_t>((int64_t{1} << search.level) + slot);
  Seed seed = Derive({search.seed[0], search.seed[1]}, use);
  ranks->clear();
  for (int64_t number = 0; number < wanted; ++number) {
    int64_t first = number * cuts / wanted, end = (number + 1) * cuts / wanted;
    uint32_t word = Hash(static_cast<uint32_t>(feature * 65536 + number), seed);
    ranks->push_back(
        static_cast<int32_t>(first + ((word >> 16) * (end - first) >> 16)));
  }
  return true;
}

BinSums DrawnSums::Take(const BinSums& given, bool counted,
                        const std::vector<int32_t>& at) {
  const int32_t* planes[3] = {given.gradient, given.curvature, given.count};
  for (int channel = 0; channel < (counted ? 3 : 2); ++channel) {
    sums[channel].assign(1, planes[channel][0]);
    for (int32_t index : at) sums[channel].push_back(planes[channel][index]);
  }
  return {sums[0].data(), sums[1].data(), sums[2].data(),
          static_cast<int64_t>(at.size()) + 1};
}

void FindSplits(const Pool& pool, const Search& search, const LimitsOfSlots* slots,
                const Splits& splits) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  const Histograms& histograms = search.histograms;
  const SplitLimits& limits = search.limits;
  const int32_t *place = search.place, *position = search.position;
  int64_t num_features = search.num_features;
  int64_t bins = histograms.num_bins, plane = num_features * bins;
  int64_t live = 0;
  for (int64_t slot = 0; slot < histograms.num_slots; ++slot) {
    live += position[slot] >= 0;
    splits.feature[slot] = splits.threshold[slot] = 0;
    splits.missing_left[slot] = splits.found[slot] = 0;
    splits.gain[slot] = -__builtin_inff();
    if (slots != nullptr) std::fill_n(splits.child_bounds + 4 * slot, 4, 0.0f);
  }
  auto search_slot = [&](int64_t slot) {
    if (position[slot] < 0) return;
    const int32_t* gradient =
        histograms.sums + place[slot] * histograms.num_channels * plane;
    const int32_t* curvature = gradient + plane;
    // If all rows have the same curvature, the curvature's sum counts rows.
    const int32_t* count = histograms.num_channels == 3 ? curvature + plane : curvature;
    int32_t total[3] = {gradient[bins - 1], curvature[bins - 1], 0};
    if (limits.min_count > 0) total[2] = count[bins - 1];
    NodeScore node = ScoreNode(total, limits, slots, slot);
    std::unique_ptr<float[]> scratch(new float[bins]);
    BestSplit best{-__builtin_inff(), 0, 0, false};
    std::vector<int32_t> seen, ranks;
    DrawnSums drawn;
    for (int64_t f = 0; f < num_features; ++f) {
      if (!search.masks[slot * num_features + f]) continue;
      int64_t at = f * bins, free_from = bins - 1;
      BinSums sums{gradient + at, curvature + at, count + at, bins};
      bool draws = false;
      if (search.rows_per_threshold > 0) {
        bool has_missing = FindSeen(sums, &seen);
        int64_t cuts = static_cast<int64_t>(seen.size()) - !has_missing;
        draws = DrawThresholds(search, slot, total[2], f, cuts, &ranks);
      }
      if (draws) {
        for (int32_t& rank : ranks) rank = seen[rank];
        sums = drawn.Take(sums, true, ranks);
        free_from = sums.num_bins - (ranks.back() == bins - 1);
      }
      float before = best.gain;
      loops.search(sums, total, node, limits, slots == nullptr ? 0 : slots->monotone[f],
                   free_from, static_cast<int32_t>(f), scratch.get(), &best);
      if (draws && best.gain > before) best.threshold = ranks[best.threshold - 1];
    }
    int64_t row = best.feature * bins, cut = row + best.threshold;
    int32_t left[2] = {gradient[cut], curvature[cut]};
    if (!best.missing_left) {
      left[0] -= gradient[row];
      left[1] -= curvature[row];
    }
    WriteSplit(slot, best, left, total, best.threshold == bins - 1, node, limits,
               search.min_gain, slots, splits);
  };
  ParallelFor(Threads(pool, live * plane), histograms.num_slots, search_slot);
}

bool RouteRows(const Pool& pool, const Codes& codes, const Splits& splits,
               int64_t level, int64_t max_depth, const Rows& rows, int32_t* leaf,
               Sides* sides) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  const int32_t* position = splits.position;
  int64_t num_slots = rows.num_slots, num_chunks = NumChunks(codes.num_rows);
  bool last = level == max_depth - 1;
  std::vector<int32_t> pair(num_slots, -1);
  int32_t num_pairs = 0;
  int64_t live = 0;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (splits.found[slot]) pair[slot] = num_pairs++;
    live += position[slot] >= 0;
  }
  if (sides != nullptr) std::fill_n(sides, num_slots, Sides{});
  if (live == 0) return true;
  std::vector<std::unique_ptr<CodeTable>> tables(num_slots);
  for (int64_t slot = 0; slot < num_slots && splits.left_codes != nullptr; ++slot) {
    if (pair[slot] < 0 || splits.threshold[slot] != kCategorical) continue;
    tables[slot] = std::make_unique<CodeTable>(splits, slot);
  }
  std::vector<Sides> counts(num_chunks * num_pairs);
  std::atomic<bool> inside{true};
  auto route = [&](int64_t chunk) {
    int64_t first = chunk * kChunk;
    Segment* segments = rows.segments + chunk * num_slots;
    std::vector<Segment> before(segments, segments + num_slots);
    std::fill(segments, segments + num_slots, Segment{0, 0});
    std::unique_ptr<uint16_t[]> index_scratch;
    std::unique_ptr<int64_t[]> words_scratch;
    ColumnReader reader(codes, chunk);
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      if (position[slot] < 0) continue;
      Segment segment = before[slot];
      int64_t count = segment.end - segment.begin;
      uint16_t* index = rows.index + first + segment.begin;
      if (!AreInChunk(index, count, std::min(kChunk, codes.num_rows - first))) {
        inside = false;
        return;
      }
      if (pair[slot] < 0) {
        int32_t value = position[slot] << (max_depth - level);
        for (int64_t i = 0; i < count; ++i) leaf[first + index[i]] = value;
        continue;
      }
      Column column = reader.Read(splits.feature[slot]);
      SplitRule rule{static_cast<uint32_t>(splits.threshold[slot]),
                     splits.missing_left[slot] != 0, nullptr, 0};
      if (tables[slot] != nullptr) tables[slot]->Decide(&rule);
      Sides& own = counts[chunk * num_pairs + pair[slot]];
      if (last) {
        own.left = loops.write_leaves(column, rule, count, index, 2 * position[slot],
                                      leaf + first, &own.missing);
        own.right = count - own.left;
        continue;
      }
      if (index_scratch == nullptr) {
        index_scratch.reset(new uint16_t[kChunk + 32]);
        words_scratch.reset(new int64_t[kChunk + 32]);
      }
      int64_t* words = rows.words + first + segment.begin;
      own.left = loops.partition(column, rule, count, index, words, index_scratch.get(),
                                 words_scratch.get(), &own.missing);
      own.right = count - own.left;
      int32_t middle = segment.begin + static_cast<int32_t>(own.left);
      segments[2 * pair[slot]] = {segment.begin, middle};
      segments[2 * pair[slot] + 1] = {middle, segment.end};
    }
    if (!reader.IsInside()) inside = false;
  };
  ParallelFor(Threads(pool, codes.num_rows), num_chunks, route);
  if (!inside) return false;
  for (int64_t slot = 0; slot < num_slots && sides != nullptr; ++slot) {
    if (pair[slot] < 0) continue;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const Sides& own = counts[chunk * num_pairs + pair[slot]];
      sides[slot].left += own.left;
      sides[slot].right += own.right;
      sides[slot].missing += own.missing;
    }
  }
  return true;
}

void CountSides(const Histograms& histograms, int64_t num_features,
                const int32_t* place, const Splits& splits, Sides* sides) {
  int64_t bins = histograms.num_bins, channels = histograms.num_channels;
  for (int64_t slot = 0; slot < histograms.num_slots; ++slot) {
    sides[slot] = {};
    if (!splits.found[slot]) continue;
    // The last channel counts rows, also where it is the curvature of uniform ones.
    const int32_t* count =
        histograms.sums + ((place[slot] * channels + channels - 1) * num_features +
                           splits.feature[slot]) *
                              bins;
    Sides& own = sides[slot];
    if (splits.left_codes != nullptr && splits.threshold[slot] == kCategorical) {
      CodeTable table(splits, slot);
      for (int64_t code = 0; code < bins; ++code) {
        int64_t rows = count[code] - (code == 0 ? 0 : count[code - 1]);
        (table.GoesRight(code) ? own.right : own.left) += rows;
        if (table.IsMissing(code)) own.missing += rows;
      }
      continue;
    }
    own.missing = count[0];
    own.left =
        count[splits.threshold[slot]] - (splits.missing_left[slot] ? 0 : count[0]);
    own.right = count[bins - 1] - own.left;
  }
}

bool FindLeaves(const Pool& pool, const Codes& codes, const TreeArrays& tree,
                int64_t max_depth, const uint8_t* skip, int32_t* leaf) {
  int64_t num_inner = (int64_t{1} << max_depth) - 1;
  int64_t last_code = tree.num_words * kWordBits - 1;
  auto descend = [&](auto categorical, auto* codes_of_type, int64_t chunk) {
    using Code = std::remove_pointer_t<decltype(codes_of_type)>;
    int64_t first = chunk * kChunk, end = std::min(first + kChunk, codes.num_rows);
    if (std::memchr(skip + first, 0, end - first) == nullptr) return;
    // Where the codes of each feature begin, and how far apart rows are.
    ColumnReader reader(codes, chunk);
    std::vector<const Code*> columns(codes.num_features);
    int64_t stride = 1;
    for (int64_t f = 0; f < codes.num_features; ++f) {
      Column column = reader.Read(f);
      columns[f] = static_cast<const Code*>(column.codes);
      stride = column.stride;
    }
    for (int64_t i = first; i < end; ++i) {
      if (skip[i]) continue;
      int64_t node = 0;
      for (int64_t level = 0; level < max_depth; ++level) {
        Code code = columns[tree.feature[node]][(i - first) * stride];
        bool right = code == 0 ? !tree.missing_left[node]
                               : static_cast<int32_t>(code) > tree.threshold[node];
        if constexpr (decltype(categorical)::value) {
          if (code != 0 && tree.threshold[node] == kCategorical) {
            right = !HasCode(tree.left_codes + node * tree.num_words,
                             std::min<int64_t>(code, last_code));
          }
        }
        node = 2 * node + 1 + right;
      }
      leaf[i] = static_cast<int32_t>(node - num_inner);
    }
  };
  ParallelFor(Threads(pool, codes.num_rows * max_depth), NumChunks(codes.num_rows),
              [&](int64_t chunk) {
                WithCodes(codes.columns, codes.wide, [&](auto* type) {
                  tree.left_codes != nullptr ? descend(std::true_type(), type, chunk)
                                             : descend(std::false_type(), type, chunk);
                });
              });
  return true;
}

}  // namespace jboost
