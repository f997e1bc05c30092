// SPDX-License-Identifier: Apache-2.0
// Runs every kernel on random data, for sanitizers: arrays have exactly the sizes that
// the kernels may use. Whether results are right is tested from Python.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "driver.cc"

namespace {

std::mt19937 generator(0);
std::set<std::string> ran;

// Random numbers in [low, high).
template <class T>
std::vector<T> Draw(size_t count, int low, int high) {
  std::vector<T> values(count);
  for (T& value : values)
    value = static_cast<T>(low + int(generator() % unsigned(high - low)));
  return values;
}

template <class T>
T* Data(std::vector<T>& values) {
  return values.data();
}

template <class... Arguments>
void Run(const std::string& name, dim3 grid, int shared, Arguments... arguments) {
  void* kernel = nullptr;
  Strides strides{};
  void* list[] = {&strides, &arguments...};
  if (cuLibraryGetKernel(&kernel, nullptr, name.c_str()) != 0 ||
      cuKernelSetAttribute(8, shared, kernel, 0) != 0 ||
      cuLaunchKernel(kernel, grid.x, grid.y, grid.z, 64, 1, 1, shared, nullptr, list,
                     nullptr) != 0) {
    std::fprintf(stderr, "%s cannot be run\n", name.c_str());
    std::exit(1);
  }
  ran.insert(name);
}

constexpr i64 kRows = 203, kFeatures = 3, kNodes = 5, kRowsPerBlock = 52;
constexpr unsigned kBlocks = 4;

template <class Code>
void RunTraining(const std::string& suffix, i64 bins) {
  auto codes = Draw<Code>(kFeatures * kRows, 0, bins);
  auto node = Draw<int>(kRows, -1, kNodes + 1);
  auto slot = Draw<int>(kRows, 0, kNodes + 2);
  auto one = Draw<int>(1, 1, 2);
  for (i64 channels = 2; channels <= 3; ++channels) {
    auto values = Draw<int>(kRows * channels, -1000, 1000);
    std::vector<int> sums(kNodes * kFeatures * bins * channels);
    // With a table for two features and three nodes, and without one.
    for (i64 table : {1, 0})
      Run("histogram_" + suffix + "_" + std::to_string(channels),
          {table ? 4u : 1u, kBlocks}, table ? 2 * 3 * bins * channels * 4 : 0,
          Data(codes), Data(values), Data(node), Data(one), Data(sums), kRows,
          kFeatures, kNodes, bins, kRowsPerBlock, table ? i64(2) : kFeatures,
          table ? i64(3) : kNodes, table);
    auto allowed = Draw<u8>(kNodes * kFeatures, 0, 2);
    std::vector<float> unit = {0.5, 2}, numbers = {1, 0.1, 0.5};
    std::vector<int> counts = {1, 30}, level = {3};
    auto seed = Draw<u32>(2, 0, 1 << 20);
    auto bounds = Draw<float>(2 * kNodes, -9, 9);
    auto monotone = Draw<int>(kFeatures, -1, 2);
    std::vector<float> gain(kNodes * kFeatures), noise(kNodes);
    std::vector<int> place(kNodes * kFeatures);
    for (std::string kind : {"search_", "search_limited_"})
      Run(kind + std::to_string(channels), {kFeatures * kNodes}, 768, Data(sums),
          Data(allowed), Data(unit), Data(numbers), Data(counts), Data(seed),
          Data(level), Data(bounds), Data(monotone), Data(gain), Data(place),
          Data(noise), kFeatures, bins);
    std::vector<float> squares(kNodes, 1000);
    std::vector<int> features = {0, 2}, num_codes = {4, 99}, max_onehot = {4};
    const i64 groups = 2, words = (bins + 31) / 32, size = bins > 256 ? 512 : 256;
    std::vector<u32> left(kNodes * groups * words), absent(kNodes * groups * words);
    for (std::string kind : {"search_categories_", "search_categories_limited_"})
      Run(kind + std::to_string(channels), {unsigned(groups * kNodes)},
          int(12 * size + 8 * words + 4 * 7 * 2), Data(sums), Data(allowed), Data(unit),
          Data(numbers), Data(counts), Data(seed), Data(level), Data(bounds),
          Data(squares), Data(features), Data(num_codes), Data(max_onehot), Data(gain),
          Data(place), Data(left), Data(absent), kFeatures, bins, groups, size, words);
  }
  auto feature = Draw<int>(kNodes, 0, kFeatures);
  auto threshold = Draw<int>(kNodes, 0, bins);
  auto missing_left = Draw<u8>(kNodes, 0, 2);
  threshold[1] = -1;
  const i64 words = (bins + 31) / 32;
  auto left_codes = Draw<u32>(kNodes * words, 0, 1 << 30);
  auto pair = Draw<int>(kNodes, 0, kNodes);
  auto left_smaller = Draw<u8>(kNodes, 0, 2), in_bag = Draw<u8>(kRows, 0, 2);
  std::vector<int> results[3];
  for (auto& result : results) result.resize(kRows);
  Run("route_" + suffix, {2}, 0, Data(codes), Data(feature), Data(threshold),
      Data(missing_left), Data(left_codes), Data(pair), Data(left_smaller),
      Data(in_bag), Data(slot), Data(node), Data(results[0]), Data(results[1]),
      Data(results[2]), kRows, kNodes, i64(2 * kNodes), words);
}

void RunPacked() {
  constexpr i64 kWords = 4, kBins = 256, kBlocksOfCodes = 3;
  auto codes = Draw<u8>(kBlocksOfCodes * kRows * 4 * kWords, 0, kBins);
  auto node = Draw<int>(kRows, -1, kNodes + 1), one = Draw<int>(1, 1, 2);
  std::vector<int> counts(kNodes), starts(kNodes + 1), list(kRows), taken(kNodes);
  Run("count_nodes", {kBlocks}, kNodes * 4, Data(node), Data(one), Data(counts), kRows,
      kNodes, kRowsPerBlock);
  for (i64 i = 0; i < kNodes; ++i) starts[i + 1] = starts[i] + counts[i];
  Run("list_nodes", {kBlocks}, 2 * kNodes * 4, Data(node), Data(starts), Data(one),
      Data(list), Data(taken), kRows, kNodes, kRowsPerBlock);
  for (i64 channels = 2; channels <= 3; ++channels)
    for (i64 listed : {0, 1}) {
      auto values = Draw<int>(kRows * channels, -1000, 1000);
      const i64 nodes = listed ? kNodes : 1;
      std::vector<int> sums(nodes * 2 * channels * kBins * 32);
      Run("packed_histogram_" + std::to_string(channels), {kBlocks, 2},
          channels * kBins * 32 * 4, reinterpret_cast<u32*>(Data(codes)), Data(values),
          listed ? Data(list) : Data(node), Data(starts), Data(one), Data(sums), kRows,
          kBlocksOfCodes, kWords, nodes, kBins, i64(32), listed);
    }
}

void RunSums() {
  constexpr i64 kKeys = 7, kChannels = 2;
  auto values = Draw<int>(kRows * kChannels, -1000, 1000);
  auto keys = Draw<int>(kRows, -1, kKeys + 1);
  std::vector<int> sums(kKeys * kChannels);
  for (i64 copies : {0, 1, 32})
    Run("sum_by_key", {kBlocks}, kKeys * kChannels * copies * 4, Data(values),
        Data(keys), Data(sums), kRows, kChannels, kKeys, kRowsPerBlock, copies);
  auto terms = Draw<float>(kRows * kChannels, -9, 9),
       weights = Draw<float>(kRows, 0, 9);
  std::vector<float> scale = {1 << 20, 1 << 25};
  std::vector<u64> words(2 * kKeys * kChannels);
  for (i64 weighted : {0, 1}) {
    Run("sum_terms", {kBlocks, kChannels}, 512, Data(terms), Data(weights), Data(scale),
        Data(words), kRows, kRowsPerBlock, weighted);
    for (i64 copies : {0, 4})
      Run("sum_terms_by_key", {kBlocks, kChannels}, 3 * kKeys * copies * 4, Data(terms),
          Data(weights), Data(keys), Data(scale), Data(words), kRows, kKeys,
          kRowsPerBlock, copies, weighted);
  }
  terms[5] = NAN, terms[kRows] = INFINITY;
  std::vector<u32> kinds(kChannels * kKeys);
  Run("find_kinds", {2, kChannels}, 0, Data(terms), Data(keys), Data(kinds), kRows,
      kKeys);
  auto seed = Draw<u32>(2, 0, 1 << 30);
  auto level = Draw<int>(1, 3, 4);
  std::vector<float> fractions = {1, 0.5, 0.7};
  std::vector<u8> allowed(kNodes * 100);
  Run("sample_features", {kNodes}, 4, Data(seed), Data(level), Data(fractions),
      Data(allowed), i64(100));
}

void RunKinks() {
  constexpr i64 kGroups = 6, kEnds = 2, kBits = 4;
  auto minimizer = Draw<float>(kRows, -9, 9), scores = Draw<float>(kRows, -9, 9),
       weights = Draw<float>(kRows, 0, 3), left = Draw<float>(kRows, 0, 9);
  std::vector<float> kink = {2}, scale = {1 << 20};
  auto group = Draw<int>(kRows, -1, kGroups + 1);
  auto prefixes = Draw<u32>(kEnds * (kGroups + 1), 0, 1 << 30);
  std::vector<u32> shift = {28};
  minimizer[3] = NAN;
  for (i64 shared : {0, 1}) {
    std::vector<u64> sums(2 * kGroups), table((kEnds * (kGroups + 1)) << kBits);
    Run("sum_kinks", {kBlocks}, shared ? sums.size() * 8 : 0, Data(minimizer),
        Data(scores), Data(weights), Data(left), Data(kink), Data(scale), Data(group),
        Data(sums), kRows, kGroups, i64(1), i64(0), kRowsPerBlock, shared);
    Run("sum_kinks_by_digit", {kBlocks}, shared ? table.size() * 8 : 0, Data(minimizer),
        Data(scores), Data(weights), Data(left), Data(kink), Data(scale), Data(group),
        Data(prefixes), Data(shift), Data(table), kRows, kGroups, i64(1), i64(0),
        kRowsPerBlock, shared, kEnds, kBits);
  }
}

void RunPrediction() {
  constexpr i64 kRounds = 3, kDepth = 3, kInner = 7, kWords = 2;
  auto columns = Draw<float>(kFeatures * kRows, 0, 70);
  for (i64 trees : {1, 2})
    for (i64 linked : {0, 1}) {
      i64 nodes = linked ? 2 * kInner + 1 : kInner, leaves = linked ? nodes : nodes + 1;
      i64 every = kRounds * trees * nodes;
      auto features = Draw<int>(every, 0, kFeatures);
      std::vector<int2> fields(every);
      auto left = Draw<int>(every, 0, nodes - 1);
      for (i64 i = 0; i < every; ++i) {
        float threshold = i % 3 == 0 ? NAN : i % 70;
        fields[i].x = features[i] | (i % 2 << 30);
        std::memcpy(&fields[i].y, &threshold, sizeof threshold);
      }
      auto sets = Draw<u32>(every * kWords, 0, 1 << 30);
      auto values = Draw<float>(kRounds * 2 * leaves, -9, 9);
      auto initial = Draw<float>(2, -9, 9);
      for (i64 staged : {0, 1})
        for (i64 shared : {0, 1}) {
          std::vector<float> scores((staged ? kRounds : 1) * kRows * 2);
          Run("predict", {2, unsigned(trees)}, shared ? kFeatures * 64 * 4 : 0,
              Data(columns), Data(fields), Data(sets), Data(left), Data(values),
              Data(initial), Data(scores), kRows, kFeatures, kRounds, trees, i64(2),
              nodes, leaves, kWords, kDepth, linked, shared, staged);
        }
      std::vector<int> found(kRows * kRounds * trees);
      Run("find_leaves", {2, 2}, 0, Data(columns), Data(fields), Data(sets), Data(left),
          Data(found), kRows, kRounds * trees, nodes, kWords, kDepth, linked);
    }
}

}  // namespace

int main() {
  RunTraining<u8>("u8", 256);
  RunTraining<u16>("u16", 300);
  RunPacked();
  RunSums();
  RunKinks();
  RunPrediction();
  for (const auto& [name, kernel] : kernels) {
    if (ran.count(name) != 0) continue;
    std::fprintf(stderr, "%s was not run\n", name.c_str());
    return 1;
  }
  return 0;
}
