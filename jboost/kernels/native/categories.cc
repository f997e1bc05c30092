// SPDX-License-Identifier: Apache-2.0
#include "categories.h"

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "limited.h"

namespace jboost {
namespace {

struct Ranked {
  float key;
  int32_t code;
};

// One feature's codes in the order in which they go left, and their sums in the form
// that the search for thresholds takes: [0] is the sum of missing values, and [r] that
// plus the sums of the first r codes (or of the r-th code alone, if `onehot`).
struct RankedFeature {
  std::vector<Ranked> codes;
  std::vector<int32_t> sums[3];
  bool onehot;
};

// G / (H + smoothing); see _rank_codes of jboost.trees.category_splits.
float SortKey(int32_t gradient, int32_t curvature, const SplitLimits& limits,
              float smoothing) {
  float g = static_cast<float>(gradient) * limits.gradient_unit;
  float weight = (static_cast<float>(curvature) + smoothing / limits.curvature_unit) *
                 limits.curvature_unit;
  bool usable = weight > 0.0f;
  float sign = g > 0.0f ? 1.0f : (g < 0.0f ? -1.0f : 0.0f);
  float mean = (usable ? g : sign * FLT_MAX) / (usable ? weight : 1.0f);
  mean = Smaller(Larger(mean, -FLT_MAX), FLT_MAX);
  return mean == 0.0f ? 0.0f : mean;  // -0 and 0 are the same key
}

void RankCodes(const int32_t* const cumulative[3], bool counted, int64_t num_bins,
               const SplitLimits& limits, float smoothing, RankedFeature* ranked) {
  ranked->codes.clear();
  auto sum = [&](int channel, int64_t code) {
    return cumulative[channel][code] - cumulative[channel][code - 1];
  };
  for (int64_t code = 1; code < num_bins; ++code) {
    int32_t gradient = sum(0, code), curvature = sum(1, code);
    bool seen = gradient != 0 || curvature != 0 || (counted && sum(2, code) != 0);
    if (!seen) continue;
    float key = ranked->onehot ? 0.0f : SortKey(gradient, curvature, limits, smoothing);
    ranked->codes.push_back({key, static_cast<int32_t>(code)});
  }
  std::sort(ranked->codes.begin(), ranked->codes.end(),
            [](const Ranked& a, const Ranked& b) {
              return a.key != b.key ? a.key < b.key : a.code < b.code;
            });
  for (int channel = 0; channel < (counted ? 3 : 2); ++channel) {
    std::vector<int32_t>& sums = ranked->sums[channel];
    int32_t missing = cumulative[channel][0], before = missing;
    sums.assign(1, missing);
    for (const Ranked& entry : ranked->codes) {
      sums.push_back((ranked->onehot ? missing : before) + sum(channel, entry.code));
      before = sums.back();
    }
  }
}

// Writes the sets of a split between the first `rank` codes and the others.
void WriteSets(const RankedFeature& ranked, int32_t rank, int32_t num_codes,
               uint32_t* left, uint32_t* absent, int64_t num_words) {
  auto bit = [](int64_t code) { return uint32_t{1} << (code % kWordBits); };
  std::fill_n(left, num_words, 0u);
  std::fill_n(absent, num_words, 0u);
  int64_t most = std::min<int64_t>(num_codes, num_words * kWordBits - 1);
  for (int64_t code = 1; code <= most; ++code) absent[code / kWordBits] |= bit(code);
  for (size_t i = 0; i < ranked.codes.size(); ++i) {
    int64_t code = ranked.codes[i].code;
    absent[code / kWordBits] &= ~bit(code);
    bool goes_left = ranked.onehot ? static_cast<int32_t>(i) + 1 == rank
                                   : static_cast<int32_t>(i) < rank;
    if (goes_left) left[code / kWordBits] |= bit(code);
  }
}

}  // namespace

void FindCategorySplits(const Pool& pool, const Search& search,
                        const LimitsOfSlots* values, const CategoryLimits& categories,
                        const NumericSplits& numeric,
                        const CategorySplitOutput& output) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  const SplitOutput& splits = output.splits;
  const Histograms& histograms = search.histograms;
  const SplitLimits& limits = search.limits;
  int64_t num_features = search.num_features;
  int64_t bins = histograms.num_bins, plane = num_features * bins;
  bool counted = limits.min_count > 0;
  std::fill_n(output.left_codes, histograms.num_slots * output.num_words, 0u);
  std::fill_n(output.absent_codes, histograms.num_slots * output.num_words, 0u);
  auto search_slot = [&](int64_t slot) {
    splits.feature[slot] = numeric.feature[slot];
    splits.threshold[slot] = numeric.threshold[slot];
    splits.missing_left[slot] = numeric.missing_left[slot];
    splits.gain[slot] = numeric.gain[slot] - search.min_gain;
    splits.found[slot] = 0;
    if (search.position[slot] < 0) return;
    const int32_t* gradient =
        histograms.sums + search.place[slot] * histograms.num_channels * plane;
    const int32_t* curvature = gradient + plane;
    const int32_t* count = histograms.num_channels == 3 ? curvature + plane : curvature;
    int32_t total[3] = {gradient[bins - 1], curvature[bins - 1],
                        counted ? count[bins - 1] : 0};
    Sums whole{static_cast<float>(total[0]) * limits.gradient_unit,
               (static_cast<float>(total[1]) + limits.l2 / limits.curvature_unit) *
                   limits.curvature_unit};
    float parent =
        whole.weight > 0.0f ? whole.gradient * whole.gradient / whole.weight : 0.0f;
    float size = parent, value;
    ValueLimits of_slot{};
    if (values != nullptr) {
      of_slot = {values->l1, values->bounds[2 * slot], values->bounds[2 * slot + 1]};
      parent = LimitedScore(whole, of_slot, &value);
      size = LimitedSize(whole, of_slot);
    }
    std::vector<float> scratch(bins);
    RankedFeature ranked;
    BestSplit best{-__builtin_inff(), -1, 0, false};
    uint32_t* left = output.left_codes + slot * output.num_words;
    uint32_t* absent = output.absent_codes + slot * output.num_words;
    for (int64_t group = 0; group < categories.num_groups; ++group) {
      int32_t feature = categories.features[group];
      if (!search.masks[slot * num_features + feature]) continue;
      const int32_t* const cumulative[3] = {gradient + feature * bins,
                                            curvature + feature * bins,
                                            count + feature * bins};
      ranked.onehot = categories.num_codes[group] <= categories.max_onehot;
      RankCodes(cumulative, counted, bins, limits, categories.smoothing, &ranked);
      if (ranked.codes.empty()) continue;
      SplitLimits of_children = limits;
      of_children.l2 = limits.l2 + (ranked.onehot ? 0.0f : categories.l2);
      if (!ranked.onehot) {
        of_children.min_weight = Larger(limits.min_weight, categories.min_weight);
      }
      BestSplit before = best;
      int64_t size_of_search = static_cast<int64_t>(ranked.codes.size()) + 1;
      if (values == nullptr) {
        loops.search_feature(ranked.sums[0].data(), ranked.sums[1].data(),
                             ranked.sums[2].data(), size_of_search, total, parent,
                             of_children, feature, scratch.data(), &best);
      } else {
        loops.search_limited_feature(ranked.sums[0].data(), ranked.sums[1].data(),
                                     ranked.sums[2].data(), size_of_search, total,
                                     parent, of_children, of_slot, 0, feature,
                                     scratch.data(), &best);
      }
      if (best.feature == feature && best.feature != before.feature) {
        WriteSets(ranked, best.threshold, categories.num_codes[group], left, absent,
                  output.num_words);
      }
    }
    bool better =
        best.feature >= 0 &&
        (best.gain > numeric.gain[slot] ||
         (best.gain == numeric.gain[slot] && best.feature < numeric.feature[slot]));
    float gain = numeric.gain[slot];
    if (better) {
      gain = best.gain;
      splits.feature[slot] = best.feature;
      splits.threshold[slot] = kCategorical;
      splits.missing_left[slot] = best.missing_left;
    } else {
      std::fill_n(left, output.num_words, 0u);
      std::fill_n(absent, output.num_words, 0u);
    }
    splits.gain[slot] = gain - search.min_gain;
    splits.found[slot] = gain > search.min_gain && 2.0f * gain > 1e-6f * size;
  };
  ParallelFor(pool, histograms.num_slots, search_slot);
}

CodeTable::CodeTable(const uint32_t* left_codes, const uint32_t* absent_codes,
                     int64_t num_words, bool missing_left)
    : sides_(num_words * kWordBits) {
  uint8_t missing = 2 | static_cast<uint8_t>(!missing_left);
  for (int64_t code = 0; code < num_words * kWordBits; ++code) {
    bool gone = code == 0 || HasCode(absent_codes, code);
    sides_[code] = gone ? missing : static_cast<uint8_t>(!HasCode(left_codes, code));
  }
}

namespace {

template <class Code>
int64_t Partition(const Code* column, const CodeTable& table, int64_t count,
                  uint16_t* index, int64_t* words, uint16_t* index_scratch,
                  int64_t* words_scratch, int64_t* missing) {
  int64_t left = 0, right = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint16_t row = index[i];
    int64_t word = words[i];
    bool goes_right = table.GoesRight(column[row]);
    *missing += table.IsMissing(column[row]);
    index[left] = row;
    words[left] = word;
    index_scratch[right] = row;
    words_scratch[right] = word;
    left += !goes_right;
    right += goes_right;
  }
  std::memcpy(index + left, index_scratch, right * sizeof(uint16_t));
  std::memcpy(words + left, words_scratch, right * sizeof(int64_t));
  return left;
}

template <class Code>
void WriteLeaves(const Code* column, const CodeTable& table, int64_t count,
                 const uint16_t* index, int32_t left_leaf, int32_t* leaf,
                 int64_t* num_left, int64_t* missing) {
  int64_t right = 0;
  for (int64_t i = 0; i < count; ++i) {
    bool goes_right = table.GoesRight(column[index[i]]);
    *missing += table.IsMissing(column[index[i]]);
    right += goes_right;
    leaf[index[i]] = left_leaf + goes_right;
  }
  *num_left += count - right;
}

}  // namespace

int64_t PartitionByTable(const void* column, bool wide, const CodeTable& table,
                         int64_t count, uint16_t* index, int64_t* words,
                         uint16_t* index_scratch, int64_t* words_scratch,
                         int64_t* missing) {
  if (wide) {
    return Partition(static_cast<const uint16_t*>(column), table, count, index, words,
                     index_scratch, words_scratch, missing);
  }
  return Partition(static_cast<const uint8_t*>(column), table, count, index, words,
                   index_scratch, words_scratch, missing);
}

void WriteLeavesByTable(const void* column, bool wide, const CodeTable& table,
                        int64_t count, const uint16_t* index, int32_t left_leaf,
                        int32_t* leaf, int64_t* num_left, int64_t* missing) {
  if (wide) {
    WriteLeaves(static_cast<const uint16_t*>(column), table, count, index, left_leaf,
                leaf, num_left, missing);
  } else {
    WriteLeaves(static_cast<const uint8_t*>(column), table, count, index, left_leaf,
                leaf, num_left, missing);
  }
}

}  // namespace jboost
