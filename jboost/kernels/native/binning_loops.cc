// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>

#include "binning.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace jboost::JBOOST_ISA {
namespace {

constexpr int64_t kTile = 64;     // rows that are transposed together
constexpr int64_t kBlock = 1024;  // keys whose buckets are found together

// Turns the bits of floats into integers that have the order of the floats.
void OrderKeys(int32_t* keys, int64_t num_keys) {
  for (int64_t i = 0; i < num_keys; ++i) {
    int32_t bits = keys[i];
    int32_t size = bits & 0x7FFFFFFF;
    bits = size < 0x00800000 ? 0 : bits;  // denormal, or -0
    int32_t key = bits ^ ((bits >> 31) & 0x7FFFFFFF);
    keys[i] = size > 0x7F800000 ? kMissingKey : key;
  }
}

// out[f * stride + i] = the bits of rows[i * row_stride + features[f]], for four rows.
// Reads row by row, so that the matrix is read sequentially.
void CopyFour(const float* rows, int64_t row_stride, const int32_t* features,
              int64_t num_features, int32_t* out, int64_t stride) {
  int64_t f = 0;
#if defined(__SSE2__)
  for (; f + 4 <= num_features; f += 4) {
    if (features[f + 3] != features[f] + 3) break;  // not adjacent
    const float* values = rows + features[f];
    __m128 part[4];
    for (int j = 0; j < 4; ++j) part[j] = _mm_loadu_ps(values + j * row_stride);
    _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
    for (int j = 0; j < 4; ++j) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (f + j) * stride),
                       _mm_castps_si128(part[j]));
    }
  }
#endif
  for (; f < num_features; ++f) {
    for (int j = 0; j < 4; ++j) {
      std::memcpy(out + f * stride + j, rows + j * row_stride + features[f], 4);
    }
  }
}

void MakeKeys(const float* rows, int64_t row_stride, int64_t num_rows,
              const int32_t* features, int64_t num_features, int32_t* keys,
              int64_t stride) {
  for (int64_t begin = 0; begin < num_rows; begin += kTile) {
    int64_t end = num_rows - begin < kTile ? num_rows : begin + kTile, i = begin;
    for (; i + 4 <= end; i += 4) {
      CopyFour(rows + i * row_stride, row_stride, features, num_features, keys + i,
               stride);
    }
    for (; i < end; ++i) {
      for (int64_t f = 0; f < num_features; ++f) {
        std::memcpy(keys + f * stride + i, rows + i * row_stride + features[f], 4);
      }
    }
    for (int64_t f = 0; f < num_features; ++f) {
      OrderKeys(keys + f * stride + begin, end - begin);
    }
  }
}

inline int32_t Clamp(int32_t key, int32_t low, int32_t high) {
  key = key < low ? low : key;
  return key > high ? high : key;
}

void FindBuckets(const BucketMap& map, const int32_t* keys, int64_t num_keys,
                 uint32_t* buckets) {
  int32_t low = map.low, high = map.high, drop = map.drop, shift = map.shift;
  uint32_t mask = (uint32_t{1} << shift) - 1;
  uint32_t places[kBlock];
  for (int64_t i = 0; i < num_keys; ++i) {
    uint32_t offset =
        static_cast<uint32_t>(Clamp(keys[i], low, high)) - static_cast<uint32_t>(low);
    places[i] = offset >> drop;
    buckets[i] = (offset >> drop) >> shift;
  }
  for (int64_t i = 0; i < num_keys; ++i) {
    uint32_t cell = buckets[i];
    // Keeps the compiler from vectorizing these loads, because gathers are slower.
    __asm__("" : "+r"(cell));
    buckets[i] = map.cells[cell];
  }
  for (int64_t i = 0; i < num_keys; ++i) {
    uint32_t cell = buckets[i];
    uint32_t bucket = (cell >> 16) + (((places[i] & mask) * (cell & 0xFFFF)) >> shift);
    buckets[i] = keys[i] == kMissingKey ? 0 : bucket;
  }
}

void Count(const BucketMap& map, const int32_t* keys, int64_t num_keys, uint16_t* even,
           uint16_t* odd) {
  uint32_t buckets[kBlock];
  for (int64_t begin = 0; begin < num_keys; begin += kBlock) {
    int64_t count = num_keys - begin < kBlock ? num_keys - begin : kBlock;
    FindBuckets(map, keys + begin, count, buckets);
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      ++even[buckets[i]];
      ++odd[buckets[i + 1]];
    }
    if (i < count) ++even[buckets[i]];
  }
}

int64_t Collect(const BucketMap& map, const uint8_t* open, const int32_t* usual,
                const int32_t* keys, int64_t num_keys, int32_t* collected) {
  uint32_t buckets[kBlock];
  uint16_t places[kBlock];
  int64_t taken = 0;
  for (int64_t begin = 0; begin < num_keys; begin += kBlock) {
    int64_t count = num_keys - begin < kBlock ? num_keys - begin : kBlock, inside = 0;
    FindBuckets(map, keys + begin, count, buckets);
    // Without branches, which would be mispredicted.
    for (int64_t i = 0; i < count; ++i) {
      places[inside] = static_cast<uint16_t>(i);
      inside += open[buckets[i]];
    }
    for (int64_t j = 0; j < inside; ++j) {
      int32_t key = keys[begin + places[j]];
      collected[taken] = key;
      taken += key != usual[buckets[places[j]]];
    }
  }
  return taken;
}

// Counts how many of a node's 16 entries, which ascend, are below a key.
#if defined(__AVX512F__)
struct Node {
  __m512i entries;
  explicit Node(const int32_t* node) : entries(_mm512_loadu_si512(node)) {}
  uint32_t Below(int32_t key) const {
    uint32_t below = _mm512_cmplt_epi32_mask(entries, _mm512_set1_epi32(key));
    return __builtin_popcount(below);
  }
};
#elif defined(__SSE2__)
struct Node {
#if defined(__AVX2__)
  __m256i first, second;
  explicit Node(const int32_t* node)
      : first(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(node))),
        second(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(node + 8))) {}
  uint32_t Below(int32_t key) const {
    __m256i keys = _mm256_set1_epi32(key);
    uint32_t low =
        _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, first)));
    uint32_t high =
        _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, second)));
    return __builtin_popcount(low | high << 8);
  }
#else
  __m128i parts[4];
  explicit Node(const int32_t* node) {
    for (int j = 0; j < 4; ++j) {
      parts[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(node + 4 * j));
    }
  }
  uint32_t Below(int32_t key) const {
    __m128i keys = _mm_set1_epi32(key);
    __m128i low = _mm_packs_epi32(_mm_cmpgt_epi32(keys, parts[0]),
                                  _mm_cmpgt_epi32(keys, parts[1]));
    __m128i high = _mm_packs_epi32(_mm_cmpgt_epi32(keys, parts[2]),
                                   _mm_cmpgt_epi32(keys, parts[3]));
    uint32_t below = _mm_movemask_epi8(_mm_packs_epi16(low, high));
    return __builtin_ctz(~below);  // entries below the key come first
  }
#endif
};
#else
struct Node {
  const int32_t* entries;
  explicit Node(const int32_t* node) : entries(node) {}
  uint32_t Below(int32_t key) const {
    int32_t below = 0;
    for (int64_t j = 0; j < kFanout; ++j) below += entries[j] < key;
    return static_cast<uint32_t>(below);
  }
};
#endif

template <class Code, int kLevels>
void FindCodesOf(const SearchTree& tree, const int32_t* keys, int64_t num_keys,
                 Code* codes) {
  SearchTree own = tree;
  Node root(own.levels[0]);
  for (int64_t i = 0; i < num_keys; ++i) {
    int32_t key = keys[i];
    uint32_t place = root.Below(key);
    for (int level = 1; level < kLevels; ++level) {
      place = kFanout * place + Node(own.levels[level] + kFanout * place).Below(key);
    }
    codes[i] = static_cast<Code>(place);
  }
}

void FindCodes(const SearchTree& tree, const int32_t* keys, int64_t num_keys, bool wide,
               void* codes) {
  uint8_t* narrow = static_cast<uint8_t*>(codes);
  uint16_t* broad = static_cast<uint16_t*>(codes);
  switch (tree.num_levels) {
    case 1:
      if (wide) return FindCodesOf<uint16_t, 1>(tree, keys, num_keys, broad);
      return FindCodesOf<uint8_t, 1>(tree, keys, num_keys, narrow);
    case 2:
      if (wide) return FindCodesOf<uint16_t, 2>(tree, keys, num_keys, broad);
      return FindCodesOf<uint8_t, 2>(tree, keys, num_keys, narrow);
    case 3:
      return FindCodesOf<uint16_t, 3>(tree, keys, num_keys, broad);
    default:
      return FindCodesOf<uint16_t, 4>(tree, keys, num_keys, broad);
  }
}

// Swaps the off-diagonal blocks of an 8 x 8 matrix of bytes whose rows are words.
inline void Exchange(uint64_t* words, int distance, uint64_t mask) {
  for (int first = 0; first < 8; first += 2 * distance) {
    for (int i = first; i < first + distance; ++i) {
      uint64_t low = words[i], high = words[i + distance];
      uint64_t moved = ((low >> (8 * distance)) ^ high) & mask;
      words[i] = low ^ (moved << (8 * distance));
      words[i + distance] = high ^ moved;
    }
  }
}

// Transposes eight features of eight rows.
inline void TransposeBytes(const uint8_t* columns, int64_t stride, uint8_t* rows,
                           int64_t width) {
  uint64_t words[8];
  for (int f = 0; f < 8; ++f) std::memcpy(words + f, columns + f * stride, 8);
  Exchange(words, 4, 0x00000000FFFFFFFFu);
  Exchange(words, 2, 0x0000FFFF0000FFFFu);
  Exchange(words, 1, 0x00FF00FF00FF00FFu);
  for (int i = 0; i < 8; ++i) std::memcpy(rows + i * width, words + i, 8);
}

template <class Code>
void TransposeOf(const Code* columns, int64_t stride, int64_t num_features,
                 int64_t num_rows, Code* rows, int64_t width) {
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t f = 0; f < num_features; ++f) {
      rows[i * width + f] = columns[f * stride + i];
    }
  }
}

void Transpose(const void* columns, int64_t stride, int64_t num_features,
               int64_t num_rows, bool wide, void* rows, int64_t width) {
  if (wide) {
    return TransposeOf(static_cast<const uint16_t*>(columns), stride, num_features,
                       num_rows, static_cast<uint16_t*>(rows), width);
  }
  const uint8_t* from = static_cast<const uint8_t*>(columns);
  uint8_t* to = static_cast<uint8_t*>(rows);
  int64_t i = 0, whole = num_features / 8 * 8;
  for (; i + 8 <= num_rows; i += 8) {
    for (int64_t f = 0; f < whole; f += 8) {
      TransposeBytes(from + f * stride + i, stride, to + i * width + f, width);
    }
    TransposeOf(from + whole * stride + i, stride, num_features - whole, 8,
                to + i * width + whole, width);
  }
  TransposeOf(from + i, stride, num_features, num_rows - i, to + i * width, width);
}

}  // namespace

const BinningLoops kBinningLoops = {MakeKeys, Count, Collect, FindCodes, Transpose};

}  // namespace jboost::JBOOST_ISA
