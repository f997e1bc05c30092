// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>

#include "predict.h"

namespace jboost::JBOOST_ISA {
namespace {

constexpr int8_t kLowest = -128, kHighest = 127;  // of all codes
constexpr float kLeastNormal = 0x1p-126f, kMissing = __builtin_nanf("");

// How many levels vectors of rows descend. Each level doubles the number of nodes to
// select from, so deeper levels are faster row by row.
constexpr int kMaxLevels = 6;

// A vector holds the codes of several rows. `Fetch` loads what a node needs of each
// row, `Select` selects it for the node that a row has reached, and `Side` turns it
// into the side that each row takes.
#if defined(__AVX512VBMI__)

struct Lanes {
  static constexpr int64_t kRows = 64;
  static constexpr int64_t kThresholdBytes = 1;
  using Vector = __m512i;
  using Mask = __mmask64;

  static JBOOST_INLINE Vector Zero() { return _mm512_setzero_si512(); }
  static JBOOST_INLINE Vector Fetch(const int8_t* codes, const int8_t*) {
    return _mm512_load_si512(codes);
  }
  static JBOOST_INLINE Vector Select(Mask right, Vector a, Vector b) {
    return _mm512_mask_blend_epi8(right, a, b);
  }
  // `thresholds`: of the level; `path`: each row's place on the level.
  template <int kLevel>
  static JBOOST_INLINE Mask Side(Vector code, Vector path, const int8_t* thresholds) {
    Vector table = _mm512_loadu_si512(thresholds);
    return _mm512_cmpgt_epi8_mask(code, _mm512_permutexvar_epi8(path, table));
  }
  static JBOOST_INLINE Vector Append(Vector path, Mask right) {
    path = _mm512_add_epi8(path, path);
    return _mm512_mask_sub_epi8(path, right, path, _mm512_set1_epi8(-1));
  }
  static JBOOST_INLINE void Store(Vector path, uint8_t* out) {
    _mm512_store_si512(out, path);
  }
};

#elif defined(__AVX2__)

struct Lanes {
  static constexpr int64_t kRows = 32;
  static constexpr int64_t kThresholdBytes = 1;
  using Vector = __m256i;
  using Mask = __m256i;

  static JBOOST_INLINE Vector Zero() { return _mm256_setzero_si256(); }
  static JBOOST_INLINE Vector Fetch(const int8_t* codes, const int8_t*) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
  }
  static JBOOST_INLINE Vector Select(Mask right, Vector a, Vector b) {
    return _mm256_blendv_epi8(a, b, right);
  }
  static JBOOST_INLINE Vector Table(const int8_t* bytes) {
    return _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  template <int kLevel>
  static JBOOST_INLINE Mask Side(Vector code, Vector path, const int8_t* thresholds) {
    Vector threshold = _mm256_shuffle_epi8(Table(thresholds), path);
    if constexpr (kLevel == 5) {  // 32 nodes: bit 4 of the path selects the half
      Vector upper = _mm256_shuffle_epi8(Table(thresholds + 16), path);
      threshold = _mm256_blendv_epi8(threshold, upper, _mm256_slli_epi16(path, 3));
    }
    return _mm256_cmpgt_epi8(code, threshold);
  }
  static JBOOST_INLINE Vector Append(Vector path, Mask right) {
    return _mm256_sub_epi8(_mm256_add_epi8(path, path), right);
  }
  static JBOOST_INLINE void Store(Vector path, uint8_t* out) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(out), path);
  }
};

#else

// Sixteen rows, in a vector type of the compiler. There is no instruction that looks up
// bytes, so `Fetch` compares with a node's threshold, which is repeated sixteen times.
struct Lanes {
  static constexpr int64_t kRows = 16;
  static constexpr int64_t kThresholdBytes = 16;
  typedef int8_t Vector __attribute__((vector_size(16), may_alias));
  using Mask = Vector;

  static JBOOST_INLINE Vector Zero() { return Vector{}; }
  static JBOOST_INLINE Vector Fetch(const int8_t* codes, const int8_t* threshold) {
    return *reinterpret_cast<const Vector*>(codes) >
           *reinterpret_cast<const Vector*>(threshold);
  }
  static JBOOST_INLINE Vector Select(Mask right, Vector a, Vector b) {
    return a ^ ((a ^ b) & right);
  }
  template <int kLevel>
  static JBOOST_INLINE Mask Side(Vector above, Vector, const int8_t*) {
    return above;
  }
  static JBOOST_INLINE Vector Append(Vector path, Mask right) {
    return path + path - right;
  }
  static JBOOST_INLINE void Store(Vector path, uint8_t* out) {
    *reinterpret_cast<Vector*>(out) = path;
  }
};

#endif

using Vector = Lanes::Vector;
using Mask = Lanes::Mask;

// Fetches, for each row, from the node of level kLevel that it has reached: selects
// among the nodes below kNode, a node of level kFrom, by the sides taken from there on.
template <int kLevel, int kFrom, int kNode>
JBOOST_INLINE Vector Choose(const CodedTree& tree, const int8_t* codes,
                            const Mask* sides) {
  if constexpr (kFrom == kLevel) {
    return Lanes::Fetch(codes + tree.offset[kNode],
                        tree.threshold + kNode * Lanes::kThresholdBytes);
  } else {
    Vector left = Choose<kLevel, kFrom + 1, 2 * kNode>(tree, codes, sides);
    Vector right = Choose<kLevel, kFrom + 1, 2 * kNode + 1>(tree, codes, sides);
    return Lanes::Select(sides[kFrom], left, right);
  }
}

// Takes the rows of one vector down kLevels levels; returns their places on that level.
template <int kLevels, int kLevel = 0>
JBOOST_INLINE Vector Descend(const CodedTree& tree, const int8_t* codes, Mask* sides,
                             Vector path) {
  if constexpr (kLevel == kLevels) {
    return path;
  } else {
    Vector chosen = Choose<kLevel, 0, 1>(tree, codes, sides);
    sides[kLevel] =
        Lanes::template Side<kLevel>(chosen, path, tree.threshold + (1 << kLevel));
    path = Lanes::Append(path, sides[kLevel]);
    return Descend<kLevels, kLevel + 1>(tree, codes, sides, path);
  }
}

template <int kLevels>
JBOOST_INLINE Vector Descend(const CodedTree& tree, const int8_t* codes) {
  Mask sides[kLevels + 1];
  return Descend<kLevels>(tree, codes, sides, Lanes::Zero());
}

template <int kNumber>
struct Levels {
  static constexpr int kLevels = kNumber;
};

// Calls body with the number of levels that vectors descend, as a constant.
template <class Body>
JBOOST_INLINE void WithLevels(int64_t max_depth, Body body) {
  switch (max_depth) {
    case 1:
      return body(Levels<1>{});
    case 2:
      return body(Levels<2>{});
    case 3:
      return body(Levels<3>{});
    case 4:
      return body(Levels<4>{});
    case 5:
      return body(Levels<5>{});
    default:
      return body(Levels<kMaxLevels>{});
  }
}

// The thresholds of a tree as `Fetch` takes them.
class Thresholds {
 public:
  explicit Thresholds(const CodedTree& tree) : tree_(tree) {
    if constexpr (Lanes::kThresholdBytes > 1) {
      int64_t count = 1 << (tree.max_depth < kMaxLevels ? tree.max_depth : kMaxLevels);
      for (int64_t node = 1; node < count; ++node) {
        std::memset(scratch_ + node * Lanes::kThresholdBytes, tree.threshold[node],
                    Lanes::kThresholdBytes);
      }
      tree_.threshold = scratch_;
    }
  }
  const CodedTree& tree() const { return tree_; }

 private:
  CodedTree tree_;
  alignas(16) int8_t scratch_[Lanes::kThresholdBytes > 1 ? 16 << kMaxLevels : 1];
};

// Continues from level 6 row by row: place[i] becomes the leaf.
void DescendRows(const CodedTree& tree, const int8_t* codes, int64_t rows,
                 int32_t* place) {
  for (int64_t level = kMaxLevels; level < tree.max_depth; ++level) {
    const int32_t* offset = tree.offset + (int64_t{1} << level);
    const int8_t* threshold = tree.threshold + (int64_t{1} << level);
    for (int64_t i = 0; i < rows; ++i) {
      int32_t at = place[i];
      place[i] = 2 * at + (codes[offset[at] + i] > threshold[at]);
    }
  }
}

void FindLeaves(const CodedTree& tree, const int8_t* codes, int64_t rows,
                int32_t* leaf) {
  Thresholds thresholds(tree);
  WithLevels(tree.max_depth, [&](auto levels) {
    alignas(64) uint8_t places[Lanes::kRows];
    for (int64_t i = 0; i < rows; i += Lanes::kRows) {
      Lanes::Store(Descend<levels.kLevels>(thresholds.tree(), codes + i), places);
      for (int64_t j = 0; j < Lanes::kRows; ++j) leaf[i + j] = places[j];
    }
  });
  DescendRows(tree, codes, rows, leaf);
}

// Adds the values of up to 64 leaves.
#if defined(__AVX512VBMI__)

template <int kLevels>
struct Leaves {
  static constexpr int kTables = kLevels > 4 ? 1 << (kLevels - 4) : 1;
  __m512 table[kTables];

  explicit JBOOST_INLINE Leaves(const float* leaf_value) {
    __mmask16 used = kLevels < 4 ? (1 << (1 << kLevels)) - 1 : 0xffff;
    for (int t = 0; t < kTables; ++t) {
      table[t] = _mm512_maskz_loadu_ps(used, leaf_value + 16 * t);
    }
  }

  JBOOST_INLINE __m512 Find(__m512i leaf) const {
    if constexpr (kTables == 1) {
      return _mm512_permutexvar_ps(leaf, table[0]);
    } else if constexpr (kTables == 2) {
      return _mm512_permutex2var_ps(table[0], leaf, table[1]);
    } else {
      __m512 low = _mm512_permutex2var_ps(table[0], leaf, table[1]);
      __m512 high = _mm512_permutex2var_ps(table[2], leaf, table[3]);
      __mmask16 upper = _mm512_test_epi32_mask(leaf, _mm512_set1_epi32(32));
      return _mm512_mask_blend_ps(upper, low, high);
    }
  }

  JBOOST_INLINE void Add(Vector path, float* scores) const {
    AddPart<0>(path, scores);
    AddPart<1>(path, scores);
    AddPart<2>(path, scores);
    AddPart<3>(path, scores);
  }

  template <int kPart>
  JBOOST_INLINE void AddPart(Vector path, float* scores) const {
    __m512i leaf = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(path, kPart));
    float* at = scores + 16 * kPart;
    _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), Find(leaf)));
  }
};

#else

template <int kLevels>
struct Leaves {
  const float* leaf_value;

  explicit JBOOST_INLINE Leaves(const float* values) : leaf_value(values) {}

  JBOOST_INLINE void Add(Vector path, float* scores) const {
    alignas(64) uint8_t places[Lanes::kRows];
    Lanes::Store(path, places);
#if defined(__AVX2__)
    for (int64_t j = 0; j < Lanes::kRows; j += 8) {
      __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(places + j));
      __m256 value = _mm256_i32gather_ps(leaf_value, _mm256_cvtepu8_epi32(bytes), 4);
      _mm256_store_ps(scores + j, _mm256_add_ps(_mm256_load_ps(scores + j), value));
    }
#else
    for (int64_t j = 0; j < Lanes::kRows; ++j) scores[j] += leaf_value[places[j]];
#endif
  }
};

#endif

void AddTree(const CodedTree& tree, const int8_t* codes, int64_t rows,
             const float* leaf_value, float* scores) {
  if (tree.max_depth > kMaxLevels) {
    int32_t leaf[kBlockRows];
    FindLeaves(tree, codes, rows, leaf);
    for (int64_t i = 0; i < rows; ++i) scores[i] += leaf_value[leaf[i]];
    return;
  }
  Thresholds thresholds(tree);
  WithLevels(tree.max_depth, [&](auto levels) {
    Leaves<levels.kLevels> leaves(leaf_value);
    for (int64_t i = 0; i < rows; i += Lanes::kRows) {
      leaves.Add(Descend<levels.kLevels>(thresholds.tree(), codes + i), scores + i);
    }
  });
}

// Adds kWidth numbers per row: those of its leaves, which begin at places[t *
// kBlockRows
// + i] of the values of tree t.
template <int kWidth>
JBOOST_INLINE void AddParts(const LeafRows& leaves, const uint32_t* places,
                            int64_t rows, int64_t first, float* scores) {
  typedef float Part __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
  constexpr int kGroup = 4;  // rows whose sums are independent
  int64_t step = leaves.num_leaves * leaves.width;
  for (int64_t i = 0; i < rows; i += kGroup) {
    float* own = scores + i * leaves.width + first;
    Part sum[kGroup];
    for (int j = 0; j < kGroup; ++j) {
      sum[j] = *reinterpret_cast<const Part*>(own + j * leaves.width);
    }
    const float* values = leaves.values + first;
    const uint32_t* place = places + i;
    for (int64_t t = 0; t < leaves.num_trees; ++t) {
      for (int j = 0; j < kGroup; ++j) {
        sum[j] += *reinterpret_cast<const Part*>(values + place[j]);
      }
      values += step;
      place += kBlockRows;
    }
    for (int j = 0; j < kGroup; ++j) {
      *reinterpret_cast<Part*>(own + j * leaves.width) = sum[j];
    }
  }
}

void AddLeaves(const LeafRows& leaves, int64_t rows, float* scores) {
  uint32_t places[kSharedTile * kBlockRows];
  auto width = static_cast<uint32_t>(leaves.width);
  for (int64_t t = 0; t < leaves.num_trees; ++t) {
    for (int64_t i = t * kBlockRows; i < t * kBlockRows + rows; ++i) {
      places[i] = static_cast<uint32_t>(leaves.leaf[i]) * width;
    }
  }
  if (width == 4) return AddParts<4>(leaves, places, rows, 0, scores);
  if (width == 8) return AddParts<8>(leaves, places, rows, 0, scores);
  for (int64_t first = 0; first < leaves.width; first += 16) {
    AddParts<16>(leaves, places, rows, first, scores);
  }
}

#if defined(__AVX512VBMI__)

// Transposes a 16 x 16 tile: interleaves pairs, then quadruples, then swaps quarters.
JBOOST_INLINE void TransposeTile(const float* x, int64_t stride, __mmask16 used,
                                 float* columns) {
  __m512 row[16], pair[16];
  for (int i = 0; i < 16; ++i) row[i] = _mm512_maskz_loadu_ps(used, x + i * stride);
  for (int i = 0; i < 16; i += 2) {
    pair[i] = _mm512_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm512_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    __m512d a = _mm512_castps_pd(pair[i]), b = _mm512_castps_pd(pair[i + 1]);
    __m512d c = _mm512_castps_pd(pair[i + 2]), d = _mm512_castps_pd(pair[i + 3]);
    row[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    row[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    row[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    row[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; ++i) {  // column i of each quarter, in rows i, i + 4, ...
    __m512 a = _mm512_shuffle_f32x4(row[i], row[i + 4], 0x88);
    __m512 b = _mm512_shuffle_f32x4(row[i], row[i + 4], 0xdd);
    __m512 c = _mm512_shuffle_f32x4(row[i + 8], row[i + 12], 0x88);
    __m512 d = _mm512_shuffle_f32x4(row[i + 8], row[i + 12], 0xdd);
    _mm512_store_ps(columns + i * kBlockRows, _mm512_shuffle_f32x4(a, c, 0x88));
    _mm512_store_ps(columns + (i + 4) * kBlockRows, _mm512_shuffle_f32x4(b, d, 0x88));
    _mm512_store_ps(columns + (i + 8) * kBlockRows, _mm512_shuffle_f32x4(a, c, 0xdd));
    _mm512_store_ps(columns + (i + 12) * kBlockRows, _mm512_shuffle_f32x4(b, d, 0xdd));
  }
}

void Transpose(const float* x, int64_t stride, int64_t rows, int64_t num_features,
               float* columns) {
  __mmask16 used = num_features < 16 ? (1 << num_features) - 1 : 0xffff;
  for (int64_t i = 0; i < rows; i += 16) {
    TransposeTile(x + i * stride, stride, used, columns + i);
  }
}

// Searches a table that is held in registers. A place has a leading 1 and a bit for
// each step so far; the permutations use its low bits, and the first steps select
// registers.
template <int kLevels>
JBOOST_INLINE __m512i Search(__m512 x, const __m512* table) {
  __m512i place = _mm512_set1_epi32(1);
  const __m512i one = _mm512_set1_epi32(1);
  __mmask16 first = 0, second = 0;
#pragma GCC unroll 8
  for (int level = 0; level < kLevels; ++level) {
    __m512 threshold;
    if (level < 4) {
      threshold = _mm512_permutexvar_ps(place, table[0]);
    } else if (level == 4) {
      threshold = _mm512_permutexvar_ps(place, table[1]);
    } else if (level == 5) {
      threshold = _mm512_permutex2var_ps(table[2], place, table[3]);
    } else if (level == 6) {
      threshold =
          _mm512_mask_blend_ps(first, _mm512_permutex2var_ps(table[4], place, table[5]),
                               _mm512_permutex2var_ps(table[6], place, table[7]));
    } else {
      __m512 low = _mm512_mask_blend_ps(
          second, _mm512_permutex2var_ps(table[8], place, table[9]),
          _mm512_permutex2var_ps(table[10], place, table[11]));
      __m512 high = _mm512_mask_blend_ps(
          second, _mm512_permutex2var_ps(table[12], place, table[13]),
          _mm512_permutex2var_ps(table[14], place, table[15]));
      threshold = _mm512_mask_blend_ps(first, low, high);
    }
    __mmask16 above = _mm512_cmp_ps_mask(x, threshold, _CMP_GT_OQ);
    if (level == 0) first = above;
    if (level == 1) second = above;
    place = _mm512_add_epi32(place, place);
    place = _mm512_mask_add_epi32(place, above, place, one);
  }
  return place;
}

template <int kLevels>
void CodeColumn(const float* column, int64_t rows, const float* values, int8_t* left,
                int8_t* right) {
  constexpr int kTables = kLevels > 4 ? 1 << (kLevels - 4) : 1;
  __m512 table[kTables];
  for (int t = 0; t < kTables; ++t) table[t] = _mm512_loadu_ps(values + 16 * t);
  const __m512i start = _mm512_set1_epi32((1 << kLevels) - kLowest);
  for (int64_t i = 0; i < rows; i += 16) {
    __m512 x = _mm512_load_ps(column + i);
    __m128i code =
        _mm512_cvtepi32_epi8(_mm512_sub_epi32(Search<kLevels>(x, table), start));
    if (left != nullptr) _mm_store_si128(reinterpret_cast<__m128i*>(left + i), code);
    if (right == nullptr) continue;
    __mmask16 missing = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    code = _mm_mask_blend_epi8(missing, code, _mm_set1_epi8(kHighest));
    _mm_store_si128(reinterpret_cast<__m128i*>(right + i), code);
  }
}

#elif defined(__AVX2__)

// One 8 x 8 tile.
JBOOST_INLINE void TransposeTile(const float* x, int64_t stride, __m256i used,
                                 float* columns) {
  __m256 row[8], pair[8];
  for (int i = 0; i < 8; ++i) row[i] = _mm256_maskload_ps(x + i * stride, used);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    row[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
    row[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
    row[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    row[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_store_ps(columns + i * kBlockRows,
                    _mm256_permute2f128_ps(row[i], row[i + 4], 0x20));
    _mm256_store_ps(columns + (i + 4) * kBlockRows,
                    _mm256_permute2f128_ps(row[i], row[i + 4], 0x31));
  }
}

void Transpose(const float* x, int64_t stride, int64_t rows, int64_t num_features,
               float* columns) {
  for (int64_t f = 0; f < num_features; f += 8) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    int32_t left = static_cast<int32_t>(num_features - f);
    __m256i used = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), lane);
    for (int64_t i = 0; i < rows; i += 8) {
      TransposeTile(x + i * stride + f, stride, used, columns + f * kBlockRows + i);
    }
  }
}

// The first levels in registers, the others gathered.
template <int kLevels>
JBOOST_INLINE __m256i Search(__m256 x, const float* values, const __m256* table) {
  __m256i place = _mm256_set1_epi32(1);
  __m256 first = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int level = 0; level < kLevels; ++level) {
    __m256 threshold;
    if (level < 3) {
      threshold = _mm256_permutevar8x32_ps(table[0], place);
    } else if (level == 3) {
      threshold = _mm256_permutevar8x32_ps(table[1], place);
    } else if (level == 4) {
      threshold = _mm256_blendv_ps(_mm256_permutevar8x32_ps(table[2], place),
                                   _mm256_permutevar8x32_ps(table[3], place), first);
    } else {
      threshold = _mm256_i32gather_ps(values, place, 4);
    }
    __m256 above = _mm256_cmp_ps(x, threshold, _CMP_GT_OQ);
    if (level == 0) first = above;
    place = _mm256_add_epi32(place, place);
    place = _mm256_sub_epi32(place, _mm256_castps_si256(above));
  }
  return place;
}

// The low bytes of two times eight numbers.
JBOOST_INLINE __m128i PackBytes(__m256i a, __m256i b) {
  const __m256i low = _mm256_set1_epi32(255);
  __m256i words =
      _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
  words = _mm256_permute4x64_epi64(words, 0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words),
                          _mm256_extracti128_si256(words, 1));
}

template <int kLevels>
void CodeColumn(const float* column, int64_t rows, const float* values, int8_t* left,
                int8_t* right) {
  __m256 table[4];
  for (int t = 0; t < 4; ++t) table[t] = _mm256_loadu_ps(values + 8 * t);
  const __m256i start = _mm256_set1_epi32((1 << kLevels) - kLowest);
  for (int64_t i = 0; i < rows; i += 16) {
    __m256 x = _mm256_load_ps(column + i), y = _mm256_load_ps(column + i + 8);
    __m256i a = _mm256_sub_epi32(Search<kLevels>(x, values, table), start);
    __m256i b = _mm256_sub_epi32(Search<kLevels>(y, values, table), start);
    __m128i code = PackBytes(a, b);
    if (left != nullptr) _mm_store_si128(reinterpret_cast<__m128i*>(left + i), code);
    if (right == nullptr) continue;
    __m256i s = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i t = _mm256_castps_si256(_mm256_cmp_ps(y, y, _CMP_UNORD_Q));
    code = _mm_blendv_epi8(code, _mm_set1_epi8(kHighest), PackBytes(s, t));
    _mm_store_si128(reinterpret_cast<__m128i*>(right + i), code);
  }
}

#else

void Transpose(const float* x, int64_t stride, int64_t rows, int64_t num_features,
               float* columns) {
  for (int64_t i = 0; i < rows; i += 16) {
    for (int64_t f = 0; f < num_features; ++f) {
      for (int64_t j = i; j < i + 16; ++j) {
        columns[f * kBlockRows + j] = x[j * stride + f];
      }
    }
  }
}

// Sixteen rows at a time, whose steps the processor can overlap.
template <int kLevels>
void CodeColumn(const float* column, int64_t rows, const float* values, int8_t* left,
                int8_t* right) {
  for (int64_t i = 0; i < rows; i += 16) {
    const float* x = column + i;
    int32_t place[16];
    for (int j = 0; j < 16; ++j) place[j] = 1;
    for (int level = 0; level < kLevels; ++level) {
      for (int j = 0; j < 16; ++j) {
        place[j] = 2 * place[j] + (x[j] > values[place[j]]);
      }
    }
    for (int j = 0; j < 16; ++j) {
      int8_t code = static_cast<int8_t>(place[j] - (1 << kLevels) + kLowest);
      if (left != nullptr) left[i + j] = code;
      if (right != nullptr) right[i + j] = x[j] != x[j] ? kHighest : code;
    }
  }
}

#endif

void Code(const float* column, int64_t rows, const float* table, int64_t levels,
          int8_t* left, int8_t* right) {
  static constexpr decltype(&CodeColumn<0>) kByLevels[] = {
      CodeColumn<0>, CodeColumn<1>, CodeColumn<2>, CodeColumn<3>, CodeColumn<4>,
      CodeColumn<5>, CodeColumn<6>, CodeColumn<7>, CodeColumn<8>};
  kByLevels[levels](column, rows, table, left, right);
}

JBOOST_INLINE float EncodeValue(float value, const int32_t* codes, float limit) {
  value = (value < kLeastNormal) & (value > -kLeastNormal) ? 0.0f : value;
  bool inside = (value >= 0.0f) & (value < limit);
  auto whole = static_cast<int32_t>(inside ? value : 0.0f);
  int32_t code = inside ? codes[whole] : 0;
  bool known = (static_cast<float>(whole) == value) & (code > 0);
  return known ? static_cast<float>(code) : kMissing;
}

void Encode(float* values, int64_t stride, int64_t count, const int32_t* codes,
            int64_t num_values) {
  const auto limit = static_cast<float>(num_values);
  int64_t i = 0;
#if defined(__AVX512VBMI__)
  const __m512 zero = _mm512_setzero_ps(), most = _mm512_set1_ps(limit);
  const __m512 least = _mm512_set1_ps(kLeastNormal);
  for (; stride == 1 && i + 16 <= count; i += 16) {
    __m512 value = _mm512_loadu_ps(values + i);
    __mmask16 tiny = _mm512_cmp_ps_mask(_mm512_abs_ps(value), least, _CMP_LT_OQ);
    value = _mm512_mask_mov_ps(value, tiny, zero);
    __mmask16 inside = _mm512_cmp_ps_mask(value, zero, _CMP_GE_OQ) &
                       _mm512_cmp_ps_mask(value, most, _CMP_LT_OQ);
    __m512i whole = _mm512_maskz_cvttps_epi32(inside, value);
    __m512i code =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), inside, whole, codes, 4);
    __mmask16 known = _mm512_cmp_ps_mask(_mm512_cvtepi32_ps(whole), value, _CMP_EQ_OQ) &
                      _mm512_cmpgt_epi32_mask(code, _mm512_setzero_si512());
    value = _mm512_mask_cvtepi32_ps(_mm512_set1_ps(kMissing), known, code);
    _mm512_storeu_ps(values + i, value);
  }
#elif defined(__AVX2__)
  const __m256 zero = _mm256_setzero_ps(), most = _mm256_set1_ps(limit);
  const __m256 least = _mm256_set1_ps(kLeastNormal), sign = _mm256_set1_ps(-0.0f);
  const __m256i none = _mm256_setzero_si256();
  for (; stride == 1 && i + 8 <= count; i += 8) {
    __m256 value = _mm256_loadu_ps(values + i);
    __m256 tiny = _mm256_cmp_ps(_mm256_andnot_ps(sign, value), least, _CMP_LT_OQ);
    value = _mm256_andnot_ps(tiny, value);
    __m256 inside = _mm256_and_ps(_mm256_cmp_ps(value, zero, _CMP_GE_OQ),
                                  _mm256_cmp_ps(value, most, _CMP_LT_OQ));
    __m256i whole = _mm256_cvttps_epi32(_mm256_and_ps(inside, value));
    __m256i code =
        _mm256_mask_i32gather_epi32(none, codes, whole, _mm256_castps_si256(inside), 4);
    __m256 known = _mm256_cmp_ps(_mm256_cvtepi32_ps(whole), value, _CMP_EQ_OQ);
    known = _mm256_and_ps(known, _mm256_castsi256_ps(_mm256_cmpgt_epi32(code, none)));
    value = _mm256_blendv_ps(_mm256_set1_ps(kMissing), _mm256_cvtepi32_ps(code), known);
    _mm256_storeu_ps(values + i, value);
  }
#endif
  for (; i < count; ++i) {
    values[i * stride] = EncodeValue(values[i * stride], codes, limit);
  }
}

void SplitCodes(const float* codes, int64_t count, bool wide, int8_t* first,
                int8_t* second) {
  for (int64_t i = 0; i < count; ++i) {
    int32_t code = codes[i] > 0.0f ? static_cast<int32_t>(codes[i]) : 0;
    first[i] = static_cast<int8_t>(wide ? code : code >> 3);
    second[i] = static_cast<int8_t>(wide ? code >> 8 : 1 << (code & 7));
  }
}

// Marks the rows that a set of narrow codes sends left.
#if defined(__AVX512VBMI__)

JBOOST_INLINE void MarkNarrow(const int8_t* codes, const uint32_t* words, int64_t rows,
                              int64_t stride, int8_t* out) {
  __m512i table = _mm512_castsi256_si512(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
  for (int64_t i = 0; i < rows; i += 64) {
    __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(codes + i), table);
    __mmask64 left =
        _mm512_test_epi8_mask(bytes, _mm512_load_si512(codes + stride + i));
    _mm512_store_si512(out + i, _mm512_movm_epi8(left));
  }
}

#elif defined(__AVX2__)

JBOOST_INLINE void MarkNarrow(const int8_t* codes, const uint32_t* words, int64_t rows,
                              int64_t stride, int8_t* out) {
  const auto* halves = reinterpret_cast<const __m128i*>(words);
  __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128(halves));
  __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128(halves + 1));
  for (int64_t i = 0; i < rows; i += 32) {
    __m256i place = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + i));
    __m256i bit =
        _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + stride + i));
    // Bit 4 of the place selects the half.
    __m256i bytes = _mm256_blendv_epi8(_mm256_shuffle_epi8(low, place),
                                       _mm256_shuffle_epi8(high, place),
                                       _mm256_slli_epi16(place, 3));
    __m256i left = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
    _mm256_store_si256(reinterpret_cast<__m256i*>(out + i), left);
  }
}

#else

JBOOST_INLINE void MarkNarrow(const int8_t* codes, const uint32_t* words, int64_t rows,
                              int64_t stride, int8_t* out) {
  for (int64_t i = 0; i < rows; ++i) {
    uint32_t byte = words[codes[i] >> 2] >> (8 * (codes[i] & 3));
    out[i] = (byte & static_cast<uint8_t>(codes[stride + i])) != 0 ? -1 : 0;
  }
}

#endif

void Mark(const CategorySet* sets, int64_t num_sets, const uint32_t* words,
          int64_t rows, int64_t stride, int8_t* codes) {
  for (const CategorySet* set = sets; set < sets + num_sets; ++set) {
    const int8_t* from = codes + set->from;
    const uint32_t* own = words + set->words;
    int8_t* out = codes + set->to;
    if (!set->wide) {
      MarkNarrow(from, own, rows, stride, out);
      continue;
    }
    for (int64_t i = 0; i < rows; ++i) {
      uint32_t code = static_cast<uint8_t>(from[i]) |
                      static_cast<uint32_t>(static_cast<uint8_t>(from[stride + i]))
                          << 8;
      out[i] = (own[code / 32] >> (code % 32)) & 1 ? -1 : 0;
    }
  }
}

// Whether a value is in the set of a node. Codes beyond the set's words are not.
JBOOST_INLINE bool InSet(const Ensemble& model, int64_t at, float value) {
  if (value - value != 0.0f) value = 0.0f;  // infinite
  if (!(value > -1.0f && value < static_cast<float>(32 * model.num_words)))
    return false;
  auto code = static_cast<int64_t>(value);
  return (model.left_codes[at * model.num_words + code / 32] >> (code % 32)) & 1;
}

template <bool kSets>
JBOOST_INLINE bool GoesRight(const Ensemble& model, int64_t at, float value,
                             float threshold, bool missing_right) {
  bool right = (value > threshold) | ((value != value) & missing_right);
  if constexpr (kSets) {
    if (threshold != threshold && value == value) right = !InSet(model, at, value);
  }
  return right;
}

// One level at a time for all trees and rows, whose steps the processor can overlap.
template <bool kSets>
void WalkHeaps(const Ensemble& model, int64_t first_tree, int64_t num_trees,
               const float* x, int64_t rows, int64_t num_features, int32_t* leaf) {
  for (int64_t i = 0; i < num_trees * rows; ++i) leaf[i] = 0;
  for (int64_t level = 0; level < model.max_depth; ++level) {
    for (int64_t tree = 0; tree < num_trees; ++tree) {
      int64_t first = (first_tree + tree) * model.num_nodes + (int64_t{1} << level) - 1;
      const int32_t* feature = model.feature + first;
      const float* threshold = model.threshold + first;
      const uint8_t* missing_left = model.missing_left + first;
      int32_t* place = leaf + tree * rows;
      for (int64_t i = 0; i < rows; ++i) {
        int32_t at = place[i];
        float value = x[i * num_features + feature[at]];
        place[i] = 2 * at + GoesRight<kSets>(model, first + at, value, threshold[at],
                                             missing_left[at] == 0);
      }
    }
  }
}

// The nodes of a linked tree, read from the arrays of the model.
struct ScatteredNodes {
  const Ensemble& model;
  int64_t first;

  JBOOST_INLINE PackedNode operator[](int32_t node) const {
    int64_t at = first + node;
    return {model.threshold[at], model.feature[at], model.left_child[at],
            model.missing_left[at] == 0};
  }
};

// Takes kGroup rows down a tree together, so that their steps overlap, until none
// moves.
template <bool kSets, int kGroup, class Nodes>
JBOOST_INLINE void WalkGroup(const Ensemble& model, int64_t first, const Nodes& nodes,
                             const float* x, int64_t num_features, int32_t* leaf) {
  int32_t place[kGroup] = {};
  for (int64_t level = 0; level < model.max_depth; ++level) {
    int32_t moved = 0;
    for (int j = 0; j < kGroup; ++j) {
      PackedNode node = nodes[place[j]];
      bool right =
          GoesRight<kSets>(model, first + place[j], x[j * num_features + node.feature],
                           node.threshold, node.missing_right != 0);
      // A leaf is its own left child, and the row stays, whatever the leaf's split.
      int32_t next = node.left_child + (right & (node.left_child != place[j]));
      moved |= next ^ place[j];
      place[j] = next;
    }
    if (moved == 0) break;
  }
  for (int j = 0; j < kGroup; ++j) leaf[j] = place[j];
}

template <bool kSets, class Nodes>
JBOOST_INLINE void WalkTree(const Ensemble& model, int64_t first, const Nodes& nodes,
                            const float* x, int64_t rows, int64_t num_features,
                            int32_t* leaf) {
  constexpr int kGroup = 8;
  int64_t i = 0;
  for (; i + kGroup <= rows; i += kGroup) {
    WalkGroup<kSets, kGroup>(model, first, nodes, x + i * num_features, num_features,
                             leaf + i);
  }
  for (; i < rows; ++i) {
    WalkGroup<kSets, 1>(model, first, nodes, x + i * num_features, num_features,
                        leaf + i);
  }
}

template <bool kSets>
void WalkLinks(const Ensemble& model, const PackedNode* packed, int64_t first_tree,
               int64_t num_trees, const float* x, int64_t rows, int64_t num_features,
               int32_t* leaf) {
  for (int64_t tree = first_tree; tree < first_tree + num_trees; ++tree, leaf += rows) {
    int64_t first = tree * model.num_nodes;
    if (packed == nullptr) {
      ScatteredNodes nodes{model, first};
      WalkTree<kSets>(model, first, nodes, x, rows, num_features, leaf);
    } else {
      WalkTree<kSets>(model, first, packed + first, x, rows, num_features, leaf);
    }
  }
}

void Walk(const Ensemble& model, const PackedNode* packed, int64_t first_tree,
          int64_t num_trees, const float* x, int64_t rows, int64_t num_features,
          int32_t* leaf) {
  bool sets = model.left_codes != nullptr;
  if (model.left_child == nullptr) {
    auto run = sets ? WalkHeaps<true> : WalkHeaps<false>;
    run(model, first_tree, num_trees, x, rows, num_features, leaf);
  } else {
    auto run = sets ? WalkLinks<true> : WalkLinks<false>;
    run(model, packed, first_tree, num_trees, x, rows, num_features, leaf);
  }
}

}  // namespace

// Measured on 100 and 500 trees of depth 6.
#if defined(__AVX512VBMI__)
constexpr int64_t kCodedRows = 5;
#elif defined(__AVX2__)
constexpr int64_t kCodedRows = 9;
#else
constexpr int64_t kCodedRows = 24;
#endif

const PredictLoops kPredictLoops = {Transpose, Code,      Encode,    SplitCodes,
                                    Mark,      AddTree,   AddLeaves, FindLeaves,
                                    Walk,      kCodedRows};

}  // namespace jboost::JBOOST_ISA
