// SPDX-License-Identifier: Apache-2.0
// Splits of categorical features, by sets of codes instead of thresholds. A set is
// stored as bits: code c is bit c % 32 of word c / 32.
#ifndef JBOOST_CATEGORIES_H_
#define JBOOST_CATEGORIES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "grow.h"

namespace jboost {

constexpr int32_t kCategorical = -1;  // the threshold of a categorical split
constexpr int64_t kWordBits = 32;

inline bool HasCode(const uint32_t* set, int64_t code) {
  return (set[code / kWordBits] >> (code % kWordBits)) & 1;
}

// See CategoryLimits of jboost.trees.category_splits.
struct CategoryLimits {
  const int32_t* features;   // [G], ascending
  const int32_t* num_codes;  // [G]
  int64_t num_groups;
  int32_t max_onehot;

  // Whether codes of a group are split by thresholds, too.
  bool HasThresholds(const Search& search, int64_t group) const {
    return search.rows_per_threshold > 0 && num_codes[group] > max_onehot;
  }
  bool Has(int32_t feature) const {
    return std::binary_search(features, features + num_groups, feature);
  }
};

// The greatest magnitude of the gradient's integers of the rows, which are in slot 0.
int32_t FindGreatestGradient(const Pool& pool, const Rows& rows, int64_t num_rows);

// Sums, over the rows of the first slots, the squares of the gradient's integers, as
// digits [slots, 4] of an ExactSum. See _sum_squares of jboost.trees.grow.
void SumSquares(const Pool& pool, const Rows& rows, int64_t num_rows,
                int32_t greatest_gradient, int64_t num_slots, int32_t* digits);

// The value of such digits, or of sums of them.
float JoinSquares(const int32_t digits[4], int32_t greatest_gradient);

// Writes the better one of the split in `numeric`, by a threshold and with min_gain not
// subtracted, and the best categorical split. A threshold on the codes of categories is
// written as a set. `squares` [slots] are those of JoinSquares. `values` may be null;
// its child bounds are not written.
void FindCategorySplits(const Pool& pool, const Search& search,
                        const LimitsOfSlots* values, const CategoryLimits& categories,
                        const Splits& numeric, const float* squares,
                        const Splits& splits);

// Tells for each code on which side of a categorical split its rows go.
class CodeTable {
 public:
  // `slot`: of a categorical split.
  CodeTable(const Splits& splits, int64_t slot);

  bool GoesRight(int64_t code) const { return sides_[Clamp(code)] & 1; }
  // Whether the value is missing, or its category had no row in the node.
  bool IsMissing(int64_t code) const { return sides_[Clamp(code)] >> 1; }
  // Lets the table decide a rule, which must not outlive it.
  void Decide(SplitRule* rule) const {
    rule->sides = sides_.data();
    rule->last_code = static_cast<int64_t>(sides_.size()) - 1;
  }

 private:
  int64_t Clamp(int64_t code) const {
    int64_t last = static_cast<int64_t>(sides_.size()) - 1;
    return code < last ? code : last;
  }

  std::vector<uint8_t> sides_;
};

}  // namespace jboost

#endif  // JBOOST_CATEGORIES_H_
