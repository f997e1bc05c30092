// SPDX-License-Identifier: Apache-2.0
#include "categories.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "exact_sum.h"
#include "limited.h"
#include "sort_words.h"

namespace jboost {
namespace {

// One feature's codes in the order in which they go left, and their sums in the form
// that the search for thresholds takes: [0] is the sum of missing values, and [r] that
// plus the sums of the first `first` - 1 + r codes (or of the r-th code alone, if
// `onehot`).
struct RankedFeature {
  std::vector<int32_t> codes;
  std::vector<uint64_t> words, scratch;
  size_t first;
  std::vector<int32_t> sums[3];
  bool onehot;
};

// The node's sums of one feature, by code, and space for what is computed from them.
struct FeatureSums {
  const int32_t* cumulative[3];
  bool counted;
  int64_t num_bins;
  std::vector<int32_t> gradient;    // [bins], shrunk unless the feature is one-hot
  std::vector<float> terms, heavy;  // [bins, rounded up to a power of two]

  int32_t Sum(int channel, int64_t code) const {
    return cumulative[channel][code] - cumulative[channel][code - 1];
  }
};

// Rounds half to even; from 2^23 on floats are whole.
float Round(float x) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: a sum has no bits below 1
  return __builtin_fabsf(x) < 4194304.0f ? (x + kWhole) - kWhole : std::nearbyint(x);
}

// See _sum_by_halves of jboost.trees.category_splits. Overwrites the values.
float SumByHalves(std::vector<float>* values) {
  for (size_t half = values->size() / 2; half > 0; half /= 2) {
    float* __restrict low = values->data();
    const float* __restrict high = values->data() + half;
    for (size_t i = 0; i < half; ++i) low[i] += high[i];
  }
  return (*values)[0];
}

// Replaces gradients by their expectations given the data; see _shrink of
// jboost.trees.category_splits. Returns whether categories differ by more than chance.
bool Shrink(float squares, int32_t total_curvature, FeatureSums* sums) {
  constexpr float kStrongest = 1.2089258196146292e24f;  // 2^80
  size_t size = 1;
  while (size < static_cast<size_t>(sums->num_bins)) size *= 2;
  sums->terms.assign(size, 0.0f);
  sums->heavy.assign(size, 0.0f);
  int64_t last = sums->num_bins - 1;
  float all_gradient =
      static_cast<float>(sums->cumulative[0][last] - sums->cumulative[0][0]);
  int32_t known = sums->cumulative[1][last] - sums->cumulative[1][0];
  float all_weight = static_cast<float>(known > 1 ? known : 1);
  float rows_weight = static_cast<float>(total_curvature > 1 ? total_curvature : 1);
  int32_t count = 0;
  for (int64_t code = 1; code <= last; ++code) {
    float gradient = static_cast<float>(sums->Sum(0, code));
    int32_t curvature = sums->Sum(1, code);
    if (curvature <= 0) continue;
    float weight = static_cast<float>(curvature);
    sums->terms[code] = gradient * gradient / weight;
    sums->heavy[code] = weight * weight / all_weight;
    ++count;
  }
  float by_chance = squares * static_cast<float>(count - 1) / rows_weight;
  float between = SumByHalves(&sums->terms) - all_gradient * all_gradient / all_weight;
  float excess = between - Larger(by_chance, 0.0f);
  float spread = all_weight - SumByHalves(&sums->heavy);
  bool varies = excess > 0.0f && spread > 0.0f;
  float strength = squares * spread / (rows_weight * (varies ? excess : 1.0f));
  strength = Smaller(strength, kStrongest);
  if (!varies) return false;
  float prior = strength * all_gradient / all_weight;
  for (int64_t code = 1; code <= last; ++code) {
    float gradient = static_cast<float>(sums->Sum(0, code));
    float weight = static_cast<float>(sums->Sum(1, code));
    float shrunk =
        weight > 0.0f ? weight * (gradient + prior) / (weight + strength) : 0.0f;
    sums->gradient[code] = static_cast<int32_t>(Round(shrunk));
  }
  return true;
}

// An integer of the order of the floats.
uint32_t Ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Ranks the codes. Where categories do not vary, they only part from missing values,
// all together.
void RankCodes(const FeatureSums& sums, bool varies, RankedFeature* ranked) {
  ranked->words.clear();
  bool counted = sums.counted;
  for (int64_t code = 1; code < sums.num_bins; ++code) {
    int32_t curvature = sums.Sum(1, code);
    bool seen =
        sums.Sum(0, code) != 0 || curvature != 0 || (counted && sums.Sum(2, code) != 0);
    if (!seen) continue;
    float key = 0.0f;
    if (!ranked->onehot && varies) {
      key = static_cast<float>(sums.gradient[code]) /
            static_cast<float>(curvature > 1 ? curvature : 1);
    }
    key += 0.0f;  // -0 and 0 are the same key
    ranked->words.push_back(static_cast<uint64_t>(Ordered(key)) << 32 | code);
  }
  // Words come in order of their codes, which a stable sort keeps.
  int64_t size = static_cast<int64_t>(ranked->words.size());
  const uint64_t* words = ranked->words.data();
  ranked->scratch.resize(size);
  if (!ranked->onehot && varies) {
    words = Sort(ranked->words.data(), ranked->scratch.data(), size);
  }
  ranked->codes.assign(words, words + size);
  ranked->first = ranked->onehot || varies ? 1 : ranked->codes.size();
  for (int channel = 0; channel < (counted ? 3 : 2); ++channel) {
    std::vector<int32_t>& of_ranks = ranked->sums[channel];
    int32_t missing = sums.cumulative[channel][0], before = missing;
    of_ranks.assign(1, missing);
    for (size_t i = 0; i < ranked->codes.size(); ++i) {
      int32_t code = ranked->codes[i];
      int32_t own = channel == 0 ? sums.gradient[code] : sums.Sum(channel, code);
      before = (ranked->onehot ? missing : before) + own;
      if (i + 1 >= ranked->first) of_ranks.push_back(before);
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
    int64_t code = ranked.codes[i];
    absent[code / kWordBits] &= ~bit(code);
    bool goes_left = ranked.onehot ? static_cast<int32_t>(i) + 1 == rank
                                   : static_cast<int32_t>(i) < rank;
    if (goes_left) left[code / kWordBits] |= bit(code);
  }
}

Unit SquareUnit(int32_t greatest_gradient) {
  float gradient = static_cast<float>(greatest_gradient);
  return ChooseUnit(MagnitudeBits(gradient * gradient));
}

}  // namespace

int32_t FindGreatestGradient(const Pool& pool, const Rows& rows, int64_t num_rows) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  int64_t num_chunks = NumChunks(num_rows);
  std::vector<int32_t> greatest(num_chunks, 0);
  ParallelFor(Threads(pool, num_rows), num_chunks, [&](int64_t chunk) {
    const Segment& segment = rows.segments[chunk * rows.num_slots];
    greatest[chunk] = loops.greatest_gradient(
        rows.words + chunk * kChunk + segment.begin, segment.end - segment.begin);
  });
  int32_t most = 0;
  for (int32_t own : greatest) most = std::max(most, own);
  return most;
}

void SumSquares(const Pool& pool, const Rows& rows, int64_t num_rows,
                int32_t greatest_gradient, int64_t num_slots, int32_t* digits) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  Unit unit = SquareUnit(greatest_gradient);
  int64_t num_chunks = NumChunks(num_rows);
  std::vector<ExactSum> parts(num_chunks * num_slots);
  ParallelFor(Threads(pool, num_rows), num_chunks, [&](int64_t chunk) {
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const Segment& segment = rows.segments[chunk * rows.num_slots + slot];
      ExactSum& part = parts[chunk * num_slots + slot];
      loops.sum_squares(rows.words + chunk * kChunk + segment.begin,
                        segment.end - segment.begin, unit.up, &part.high, &part.low);
    }
  });
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    ExactSum sum;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      sum.Add(parts[chunk * num_slots + slot]);
    }
    sum.Write(digits + 4 * slot);
  }
}

float JoinSquares(const int32_t digits[4], int32_t greatest_gradient) {
  ExactSum sum;
  sum.AddDigits(digits);
  return sum.Value(SquareUnit(greatest_gradient));
}

void FindCategorySplits(const Pool& pool, const Search& search,
                        const LimitsOfSlots* values, const CategoryLimits& categories,
                        const Splits& numeric, const float* squares,
                        const Splits& splits) {
  const GrowLoops& loops = JBOOST_CHOOSE(GrowLoops);
  const Histograms& histograms = search.histograms;
  const SplitLimits& limits = search.limits;
  int64_t num_features = search.num_features;
  int64_t bins = histograms.num_bins, plane = num_features * bins;
  bool counted = limits.min_count > 0;
  std::fill_n(splits.left_codes, histograms.num_slots * splits.num_words, 0u);
  std::fill_n(splits.absent_codes, histograms.num_slots * splits.num_words, 0u);
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
    float size = ScoreNode(total, limits, values, slot).size;
    FeatureSums sums;
    sums.counted = counted;
    sums.num_bins = bins;
    sums.gradient.resize(bins);
    std::vector<float> scratch(bins);
    RankedFeature ranked;
    std::vector<int32_t> ranks;
    DrawnSums drawn;
    BestSplit best{-__builtin_inff(), -1, 0, false};
    uint32_t* left = splits.left_codes + slot * splits.num_words;
    uint32_t* absent = splits.absent_codes + slot * splits.num_words;
    for (int64_t group = 0; group < categories.num_groups; ++group) {
      int32_t feature = categories.features[group];
      if (!search.masks[slot * num_features + feature]) continue;
      for (int channel = 0; channel < 3; ++channel) {
        const int32_t* planes[3] = {gradient, curvature, count};
        sums.cumulative[channel] = planes[channel] + feature * bins;
      }
      ranked.onehot = categories.num_codes[group] <= categories.max_onehot;
      bool varies = !ranked.onehot && Shrink(squares[slot], total[1], &sums);
      if (!varies) {
        for (int64_t code = 1; code < bins; ++code) {
          sums.gradient[code] = sums.Sum(0, code);
        }
      }
      RankCodes(sums, varies, &ranked);
      if (ranked.codes.empty()) continue;
      // What is shrunk has other totals than the node.
      int32_t all[3] = {ranked.onehot ? total[0] : ranked.sums[0].back(), total[1],
                        total[2]};
      NodeScore node = ScoreNode(all, limits, values, slot);
      BestSplit before = best;
      BinSums tried{ranked.sums[0].data(), ranked.sums[1].data(), ranked.sums[2].data(),
                    static_cast<int64_t>(ranked.sums[0].size())};
      bool draws = false;
      if (ranked.onehot || varies) {
        bool has_missing = tried.gradient[0] != 0 || tried.curvature[0] != 0 ||
                           (counted && tried.count[0] != 0);
        int64_t cuts = tried.num_bins - 1 - (!has_missing && !ranked.onehot);
        draws = DrawThresholds(search, slot, total[2], feature, cuts, &ranks);
      }
      if (draws) {
        for (int32_t& rank : ranks) ++rank;
        tried = drawn.Take(tried, counted, ranks);
      }
      loops.search(tried, all, node, limits, 0, tried.num_bins, feature, scratch.data(),
                   &best);
      if (best.feature == feature && best.feature != before.feature) {
        if (draws) best.threshold = ranks[best.threshold - 1];
        best.threshold += static_cast<int32_t>(ranked.first) - 1;
        WriteSets(ranked, best.threshold, categories.num_codes[group], left, absent,
                  splits.num_words);
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
      std::fill_n(left, splits.num_words, 0u);
      std::fill_n(absent, splits.num_words, 0u);
      if (categories.Has(splits.feature[slot])) {
        for (int64_t code = 1; code <= splits.threshold[slot]; ++code) {
          left[code / kWordBits] |= uint32_t{1} << (code % kWordBits);
        }
        splits.threshold[slot] = kCategorical;
      }
    }
    splits.gain[slot] = gain - search.min_gain;
    splits.found[slot] = IsWorth(gain, size, search.min_gain);
  };
  ParallelFor(pool, histograms.num_slots, search_slot);
}

CodeTable::CodeTable(const Splits& splits, int64_t slot)
    : sides_(splits.num_words * kWordBits) {
  const uint32_t* left = splits.left_codes + slot * splits.num_words;
  const uint32_t* absent = splits.absent_codes + slot * splits.num_words;
  uint8_t missing = 2 | static_cast<uint8_t>(!splits.missing_left[slot]);
  for (int64_t code = 0; code < splits.num_words * kWordBits; ++code) {
    bool gone = code == 0 || HasCode(absent, code);
    sides_[code] = gone ? missing : static_cast<uint8_t>(!HasCode(left, code));
  }
}

}  // namespace jboost
