// SPDX-License-Identifier: Apache-2.0
#include "sparse.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

namespace jboost {
namespace {

constexpr int64_t kTasksPerThread = 64;  // many, as features differ in their entries
constexpr int64_t kAhead = 24;           // how many entries ahead to prefetch rows

// Calls body(f) for every feature; a task takes several features, and makes its own
// body.
template <class MakeBody>
void ForFeatures(const Pool& pool, int64_t num_features, const MakeBody& make_body) {
  int64_t most = pool.num_threads * kTasksPerThread;
  int64_t step = (num_features + most - 1) / most;
  ParallelFor(pool, (num_features + step - 1) / step, [&](int64_t task) {
    auto body = make_body();
    int64_t end = std::min((task + 1) * step, num_features);
    for (int64_t f = task * step; f < end; ++f) body(f);
  });
}

int64_t NumEntries(const Codes& codes) {
  return codes.sparse->starts[codes.num_features];
}

// Whether all rows of entries are below num_rows. Without branches, so that it
// vectorizes: a sign bit is set where a row is negative, or greater than the last one.
bool AreBelow(const int32_t* rows, int64_t count, int64_t num_rows) {
  uint32_t outside = 0, last = static_cast<uint32_t>(num_rows - 1);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t row = static_cast<uint32_t>(rows[i]);
    outside |= row | (last - row);
  }
  return outside >> 31 == 0;
}

// Writes each row's word and node to `scratch`. Returns the totals of the nodes, {word,
// count} each, or nothing if the index leads out of a chunk.
std::vector<int64_t> PlaceRows(const Pool& pool, int64_t num_rows, const Rows& rows,
                               const NodeSum* nodes, int64_t num_nodes, int64_t table,
                               SparseRow* scratch) {
  int64_t num_chunks = NumChunks(num_rows);
  std::vector<int64_t> parts(num_chunks * num_nodes * 2, 0);
  std::atomic<bool> inside{true};
  ParallelFor(Threads(pool, num_rows), num_chunks, [&](int64_t chunk) {
    int64_t first = chunk * kChunk, end = std::min(first + kChunk, num_rows);
    std::fill(scratch + first, scratch + end, SparseRow{0, num_nodes * table});
    for (int64_t node = 0; node < num_nodes; ++node) {
      const Segment& segment = rows.segments[chunk * rows.num_slots + nodes[node].slot];
      int64_t sum = 0;
      if (!AreInChunk(rows.index + first + segment.begin, segment.end - segment.begin,
                      end - first)) {
        inside = false;
        return;
      }
      for (int64_t i = first + segment.begin; i < first + segment.end; ++i) {
        scratch[first + rows.index[i]] = {rows.words[i], node * table};
        sum += rows.words[i];
      }
      int64_t* part = parts.data() + (chunk * num_nodes + node) * 2;
      part[0] = sum;
      part[1] = segment.end - segment.begin;
    }
  });
  if (!inside) return {};
  std::vector<int64_t> totals(num_nodes * 2, 0);
  for (size_t i = 0; i < parts.size(); ++i) totals[i % totals.size()] += parts[i];
  return totals;
}

// tables[the row's place + code] += word, for all entries of a feature.
template <class Code, bool kCounted>
void SumEntries(const int32_t* rows, const Code* codes, int64_t count, int64_t last,
                const SparseRow* scratch, int64_t* tables) {
  auto add = [&](int64_t i) {
    const SparseRow& row = scratch[rows[i]];
    int64_t code = std::min<int64_t>(codes[i], last);
    int64_t* cell = tables + row.place + (kCounted ? 2 * code : code);
    cell[0] += row.word;
    if (kCounted) cell[1] += 1;
  };
  int64_t i = 0;
  for (; i + kAhead < count; ++i) {
    __builtin_prefetch(scratch + rows[i + kAhead]);
    add(i);
  }
  for (; i < count; ++i) add(i);
}

template <class Code, bool kCounted>
bool SumNodesOf(const Pool& pool, const Codes& codes, const NodeSum* nodes,
                int64_t num_nodes, const Histograms& histograms,
                const std::vector<int64_t>& totals, const SparseRow* scratch) {
  int64_t bins = histograms.num_bins, table = bins * (kCounted ? 2 : 1);
  const SparseColumns& sparse = *codes.sparse;
  std::atomic<bool> inside{true};
  auto make_body = [&] {
    // One table for each node, and one for rows of no node, which is not read.
    std::shared_ptr<int64_t[]> tables(new int64_t[(num_nodes + 1) * table]());
    return [&, tables](int64_t f) {
      std::fill(tables.get(), tables.get() + num_nodes * table, 0);
      int64_t begin = sparse.starts[f], count = sparse.starts[f + 1] - begin;
      if (!AreBelow(sparse.rows + begin, count, codes.num_rows)) {
        inside = false;
        return;
      }
      SumEntries<Code, kCounted>(sparse.rows + begin,
                                 static_cast<const Code*>(codes.columns) + begin, count,
                                 bins - 1, scratch, tables.get());
      int64_t absent =
          std::min<int64_t>(static_cast<const Code*>(sparse.absent)[f], bins - 1);
      for (int64_t node = 0; node < num_nodes; ++node) {
        int64_t* own = tables.get() + node * table;
        int64_t rest = totals[2 * node], others = totals[2 * node + 1];
        for (int64_t b = 0; b < bins; ++b) {
          rest -= own[kCounted ? 2 * b : b];
          if (kCounted) others -= own[2 * b + 1];
        }
        own[kCounted ? 2 * absent : absent] += rest;
        if (kCounted) own[2 * absent + 1] += others;
        FinishNode(own, bins, histograms, nodes[node], f, 1, codes.num_features);
      }
    };
  };
  int64_t work = NumEntries(codes) + num_nodes * codes.num_features * bins;
  ForFeatures(Threads(pool, work), codes.num_features, make_body);
  return inside;
}

template <class Code>
bool BuildOf(const Pool& pool, const Codes& codes, const int32_t* channels,
             int64_t num_channels, const int32_t* node, int64_t num_nodes,
             int64_t num_bins, int32_t* out) {
  // Sums of int32 overflow as those of XLA do.
  std::vector<uint32_t> totals(num_nodes * num_channels, 0);
  auto inside = [&](int64_t i) { return node[i] >= 0 && node[i] < num_nodes; };
  for (int64_t i = 0; i < codes.num_rows; ++i) {
    for (int64_t c = 0; c < num_channels && inside(i); ++c) {
      totals[node[i] * num_channels + c] += channels[i * num_channels + c];
    }
  }
  const SparseColumns& sparse = *codes.sparse;
  int64_t table = num_bins * num_channels;
  std::atomic<bool> below{true};
  auto sum_feature = [&](int64_t f) {
    auto cells = [&](int64_t m) {
      return reinterpret_cast<uint32_t*>(out) + (m * codes.num_features + f) * table;
    };
    int64_t absent = static_cast<const Code*>(sparse.absent)[f];
    if (!AreBelow(sparse.rows + sparse.starts[f],
                  sparse.starts[f + 1] - sparse.starts[f], codes.num_rows)) {
      below = false;
      return;
    }
    for (int64_t m = 0; m < num_nodes; ++m) {
      std::fill_n(cells(m), table, 0);
      if (absent >= num_bins) continue;
      std::copy_n(totals.begin() + m * num_channels, num_channels,
                  cells(m) + absent * num_channels);
    }
    for (int64_t e = sparse.starts[f]; e < sparse.starts[f + 1]; ++e) {
      int64_t i = sparse.rows[e], code = static_cast<const Code*>(codes.columns)[e];
      if (!inside(i) || code >= num_bins) continue;
      for (int64_t c = 0; c < num_channels; ++c) {
        uint32_t value = channels[i * num_channels + c];
        cells(node[i])[code * num_channels + c] += value;
        if (absent < num_bins) cells(node[i])[absent * num_channels + c] -= value;
      }
    }
  };
  ForFeatures(Threads(pool, NumEntries(codes)), codes.num_features,
              [&] { return sum_feature; });
  return below;
}

// The rows of a chunk, [begin, end) of its index, that have reached a node.
struct Stop {
  int64_t node, begin, end;
};

template <class Code>
bool DescendChunk(const Codes& codes, const TreeArrays& tree, int64_t num_inner,
                  int64_t chunk, const uint8_t* skip, int32_t* leaf) {
  int64_t first = chunk * kChunk, count = std::min(kChunk, codes.num_rows - first);
  std::vector<uint16_t> index, right_scratch(count);
  index.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    if (!skip[first + i]) index.push_back(static_cast<uint16_t>(i));
  }
  ColumnReader reader(codes, chunk);
  std::vector<Stop> stops;
  if (!index.empty()) stops.push_back({0, 0, static_cast<int64_t>(index.size())});
  while (!stops.empty()) {
    Stop stop = stops.back();
    stops.pop_back();
    if (stop.node >= num_inner) {
      for (int64_t i = stop.begin; i < stop.end; ++i) {
        leaf[first + index[i]] = static_cast<int32_t>(stop.node - num_inner);
      }
      continue;
    }
    const Code* column =
        static_cast<const Code*>(reader.Read(tree.feature[stop.node]).codes);
    int64_t left = stop.begin, right = 0;
    for (int64_t i = stop.begin; i < stop.end; ++i) {
      uint16_t row = index[i];
      Code code = column[row];
      bool goes_right = code == 0
                            ? !tree.missing_left[stop.node]
                            : static_cast<int32_t>(code) > tree.threshold[stop.node];
      index[left] = row;
      right_scratch[right] = row;
      left += !goes_right;
      right += goes_right;
    }
    std::copy_n(right_scratch.begin(), right, index.begin() + left);
    if (right > 0) stops.push_back({2 * stop.node + 2, left, stop.end});
    if (left > stop.begin) stops.push_back({2 * stop.node + 1, stop.begin, left});
  }
  return reader.IsInside();
}

}  // namespace

Column ColumnReader::Read(int64_t feature) {
  int64_t num_rows = codes_.num_rows, first = chunk_ * kChunk;
  if (codes_.columns == nullptr) {
    int64_t width = codes_.width, block = feature / width;
    int64_t at = (block * num_rows + first) * width + feature % width;
    return {static_cast<const char*>(codes_.packed) + at * codes_.code_size(), width,
            codes_.wide};
  }
  if (codes_.sparse == nullptr) {
    int64_t at = feature * num_rows + first;
    return {static_cast<const char*>(codes_.columns) + at * codes_.code_size(), 1,
            codes_.wide};
  }
  return codes_.wide ? ReadEntries<uint16_t>(feature) : ReadEntries<uint8_t>(feature);
}

template <class Code>
Column ColumnReader::ReadEntries(int64_t feature) {
  if (feature == feature_) return {scratch_.data(), 1, codes_.wide};
  const SparseColumns& sparse = *codes_.sparse;
  const Code* absent = static_cast<const Code*>(sparse.absent);
  int64_t first = chunk_ * kChunk;
  if (feature_ < 0) scratch_.resize(kChunk * sizeof(Code));
  Code* scratch = reinterpret_cast<Code*>(scratch_.data());
  if (feature_ < 0 || absent[feature_] != absent[feature]) {
    std::fill(scratch, scratch + kChunk, absent[feature]);
  } else {
    for (int64_t e = begin_; e < end_; ++e) {
      scratch[(sparse.rows[e] - first) & (kChunk - 1)] = absent[feature];
    }
  }
  const int32_t* begin = sparse.rows + sparse.starts[feature];
  const int32_t* end = sparse.rows + sparse.starts[feature + 1];
  begin = std::lower_bound(begin, end, first);
  end = std::lower_bound(begin, end, first + kChunk);
  feature_ = feature;
  begin_ = begin - sparse.rows;
  end_ = end - sparse.rows;
  const Code* codes = static_cast<const Code*>(codes_.columns);
  for (int64_t e = begin_; e < end_; ++e) {
    // The mask changes nothing unless rows do not ascend, and keeps writes inside.
    int64_t place = sparse.rows[e] - first;
    places_ |= static_cast<uint64_t>(place);
    scratch[place & (kChunk - 1)] = codes[e];
  }
  return {scratch, 1, codes_.wide};
}

bool SumSparseNodes(const Pool& pool, const Codes& codes, const Rows& rows,
                    const NodeSum* nodes, int64_t num_nodes,
                    const Histograms& histograms, SparseRow* scratch) {
  if (num_nodes == 0) return true;
  int64_t table = histograms.num_bins * (histograms.counted ? 2 : 1);
  std::vector<int64_t> totals =
      PlaceRows(pool, codes.num_rows, rows, nodes, num_nodes, table, scratch);
  if (totals.empty()) return false;
  auto sum = codes.wide ? (histograms.counted ? SumNodesOf<uint16_t, true>
                                              : SumNodesOf<uint16_t, false>)
                        : (histograms.counted ? SumNodesOf<uint8_t, true>
                                              : SumNodesOf<uint8_t, false>);
  return sum(pool, codes, nodes, num_nodes, histograms, totals, scratch);
}

bool BuildSparseHistogram(const Pool& pool, const Codes& codes, const int32_t* channels,
                          int64_t num_channels, const int32_t* node, int64_t num_nodes,
                          int64_t num_bins, int32_t* out) {
  auto build = codes.wide ? BuildOf<uint16_t> : BuildOf<uint8_t>;
  return build(pool, codes, channels, num_channels, node, num_nodes, num_bins, out);
}

bool FindSparseLeaves(const Pool& pool, const Codes& codes, const TreeArrays& tree,
                      int64_t max_depth, const uint8_t* skip, int32_t* leaf) {
  int64_t num_inner = (int64_t{1} << max_depth) - 1;
  auto descend = codes.wide ? DescendChunk<uint16_t> : DescendChunk<uint8_t>;
  std::atomic<bool> inside{true};
  ParallelFor(Threads(pool, codes.num_rows * max_depth), NumChunks(codes.num_rows),
              [&](int64_t chunk) {
                bool own = descend(codes, tree, num_inner, chunk, skip, leaf);
                if (!own) inside = false;
              });
  return inside;
}

}  // namespace jboost
