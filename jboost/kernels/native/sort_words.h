// SPDX-License-Identifier: Apache-2.0
#ifndef JBOOST_SORT_WORDS_H_
#define JBOOST_SORT_WORDS_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace jboost {

// A stable sort by the upper 32 bits of a word. Returns `words` or `scratch`, whichever
// holds the result.
template <class Word>
Word* Sort(Word* words, Word* scratch, int64_t size) {
  constexpr int kDigits = 3, kBits = 11, kValues = 1 << kBits;
  constexpr int kFirst = 8 * (sizeof(Word) - sizeof(uint32_t));
  if (size < 512) {
    std::stable_sort(words, words + size,
                     [](Word a, Word b) { return (a >> kFirst) < (b >> kFirst); });
    return words;
  }
  std::vector<uint32_t> counts(kDigits * kValues, 0);
  for (int64_t i = 0; i < size; ++i) {
    for (int d = 0; d < kDigits; ++d) {
      ++counts[d * kValues + ((words[i] >> (kFirst + d * kBits)) & (kValues - 1))];
    }
  }
  for (int d = 0; d < kDigits; ++d) {
    uint32_t* count = counts.data() + d * kValues;
    int shift = kFirst + d * kBits;
    if (count[(words[0] >> shift) & (kValues - 1)] == static_cast<uint64_t>(size)) {
      continue;  // all words have the same digit
    }
    std::exclusive_scan(count, count + kValues, count, uint32_t{0});
    for (int64_t i = 0; i < size; ++i) {
      scratch[count[(words[i] >> shift) & (kValues - 1)]++] = words[i];
    }
    std::swap(words, scratch);
  }
  return words;
}

}  // namespace jboost

#endif  // JBOOST_SORT_WORDS_H_
