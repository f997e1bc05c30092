// SPDX-License-Identifier: Apache-2.0
#include "linear.h"

namespace jboost::JBOOST_ISA {
namespace {

#if defined(__AVX2__)

// Reads eight columns of a row that has kWidth numbers; 0: any number.
template <int kWidth>
JBOOST_INLINE __m256 Pick(const float* x, __m256i columns) {
  if constexpr (kWidth == 0) {
    return _mm256_i32gather_ps(x, columns, 4);
#if defined(__AVX512VBMI__)
  } else if constexpr (kWidth == 16) {
    __m512i place = _mm512_castsi256_si512(columns);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(place, _mm512_load_ps(x)));
  } else if constexpr (kWidth == 32) {
    __m512i place = _mm512_castsi256_si512(columns);
    __m512 first = _mm512_load_ps(x), second = _mm512_load_ps(x + 16);
    return _mm512_castps512_ps256(_mm512_permutex2var_ps(first, place, second));
#endif
  } else if constexpr (kWidth == 8) {
    return _mm256_permutevar8x32_ps(_mm256_load_ps(x), columns);
  } else {
    __m256 low = Pick<kWidth / 2>(x, columns);
    __m256 high = Pick<kWidth / 2>(x + kWidth / 2, columns);
    constexpr int kShift = kWidth == 16 ? 28 : kWidth == 32 ? 27 : 26;
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(columns, kShift));
    return _mm256_blendv_ps(low, high, upper);
  }
}

// Transposes an 8 x 8 tile: interleaves pairs, then quadruples, then swaps halves.
JBOOST_INLINE void TransposeTile(__m256* row) {
  __m256 pair[8];
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
    __m256 low = row[i], high = row[i + 4];
    row[i] = _mm256_permute2f128_ps(low, high, 0x20);
    row[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
  }
}

// The terms of many trees exceed the L2 cache. So while a tree is applied to blocks of
// eight rows, each fetches its part of the next one, and no more than 4 lines.
JBOOST_INLINE void FetchNext(const LinearTree& tree, int64_t row, int64_t rows) {
  int64_t part = tree.size * 8 / rows < 64 ? tree.size * 8 / rows : 64;
  int64_t first = tree.size + row / 8 * part;
  for (int64_t at = first; at < first + part; at += 16) {
    __builtin_prefetch(tree.terms + at);
    __builtin_prefetch(tree.columns + at / 2);
  }
}

template <int kWidth, bool kOneGroup>
void AddRows(const LinearTree& tree, const int32_t* leaf, const float* x,
             int64_t stride, int64_t rows, float* scores) {
  const int64_t groups = kOneGroup ? 1 : tree.num_groups;
  const auto* columns = reinterpret_cast<const char*>(tree.columns);
  if constexpr (kWidth > 0) stride = kWidth;
  for (int64_t i = 0; i < rows; i += 8, x += 8 * stride) {
    FetchNext(tree, i, rows);
    __m256 sum = _mm256_setzero_ps(), value = sum;
    for (int64_t group = 0; group < groups; ++group) {
      __m256 term[kLanes];
      for (int j = 0; j < 8; ++j) {
        // As many bytes of columns as numbers.
        int64_t at = (leaf[i + j] * groups + group) * 2 * kLanes;
        const float* numbers = tree.terms + at;
        __m128i own = _mm_load_si128(reinterpret_cast<const __m128i*>(columns + at));
        __m256 picked = Pick<kWidth>(x + j * stride, _mm256_cvtepu16_epi32(own));
        picked = _mm256_sub_ps(picked, _mm256_load_ps(numbers));
        term[j] = _mm256_mul_ps(picked, _mm256_load_ps(numbers + kLanes));
      }
      TransposeTile(term);
      if (group == 0) value = term[0];
      for (int p = 0; p < kLanes; ++p) sum = _mm256_add_ps(sum, term[p]);
    }
    __m256 missing = _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q);
    sum = _mm256_blendv_ps(sum, value, missing);
    _mm256_store_ps(scores + i, _mm256_add_ps(_mm256_load_ps(scores + i), sum));
  }
}

template <int kWidth>
void AddRows(const LinearTree& tree, const int32_t* leaf, const float* x,
             int64_t stride, int64_t rows, float* scores) {
  auto run = tree.num_groups == 1 ? AddRows<kWidth, true> : AddRows<kWidth, false>;
  run(tree, leaf, x, stride, rows, scores);
}

void Add(const LinearTree& tree, const int32_t* leaf, const float* x, int64_t stride,
         int64_t rows, float* scores) {
  auto run = AddRows<0>;
  if (stride == 16) run = AddRows<16>;
  if (stride == 32) run = AddRows<32>;
#if defined(__AVX512VBMI__)
  if (stride == 64) run = AddRows<64>;
#endif
  run(tree, leaf, x, stride, rows, scores);
}

#else

void Add(const LinearTree& tree, const int32_t* leaf, const float* x, int64_t stride,
         int64_t rows, float* scores) {
  for (int64_t i = 0; i < rows; ++i, x += stride) {
    const float* numbers = tree.terms + leaf[i] * tree.num_groups * 2 * kLanes;
    const uint16_t* columns = tree.columns + leaf[i] * tree.num_groups * kLanes;
    float value = -numbers[0], sum = value;
    for (int64_t group = 0; group < tree.num_groups; ++group) {
      float term[kLanes];
      for (int p = 0; p < kLanes; ++p) {
        term[p] = numbers[kLanes + p] * (x[columns[p]] - numbers[p]);
      }
      for (int p = group == 0; p < kLanes; ++p) sum += term[p];
      numbers += 2 * kLanes;
      columns += kLanes;
    }
    scores[i] += sum != sum ? value : sum;
  }
}

#endif

}  // namespace

const LinearLoops kLinearLoops = {Add};

}  // namespace jboost::JBOOST_ISA
