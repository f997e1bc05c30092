// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <limits>

#include "shap.h"

namespace jboost::JBOOST_ISA {
namespace {

// Each lane holds one row. Products and sums are rounded separately, so that all
// instruction sets give the same bits.
#if defined(__AVX512F__)

struct Lanes {
  static constexpr int64_t kRows = 16;
  using Vector = __m512;
  using Mask = __mmask16;

  static JBOOST_INLINE Vector Set(float x) { return _mm512_set1_ps(x); }
  static JBOOST_INLINE Mask All() { return 0xffff; }
  static JBOOST_INLINE Mask And(Mask a, Mask b) { return a & b; }
  static JBOOST_INLINE Mask AndNot(Mask a, Mask b) { return a & static_cast<Mask>(~b); }
  static JBOOST_INLINE Vector Select(Mask mask, Vector yes, Vector no) {
    return _mm512_mask_blend_ps(mask, no, yes);
  }
  static JBOOST_INLINE Mask GoesLeft(Vector x, float threshold, bool missing_left) {
    Vector limit = Set(threshold);
    return missing_left ? _mm512_cmp_ps_mask(x, limit, _CMP_NGT_UQ)
                        : _mm512_cmp_ps_mask(x, limit, _CMP_LE_OQ);
  }
  static JBOOST_INLINE Mask FromBits(uint32_t bits) { return static_cast<Mask>(bits); }
  static JBOOST_INLINE Mask Exceeds(Vector x, float limit) {
    return _mm512_cmp_ps_mask(x, Set(limit), _CMP_GT_OQ);
  }
};

#elif defined(__AVX2__)

struct Lanes {
  static constexpr int64_t kRows = 8;
  using Vector = __m256;
  using Mask = __m256;

  static JBOOST_INLINE Vector Set(float x) { return _mm256_set1_ps(x); }
  static JBOOST_INLINE Mask All() { return _mm256_castsi256_ps(_mm256_set1_epi32(-1)); }
  static JBOOST_INLINE Mask And(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  static JBOOST_INLINE Mask AndNot(Mask a, Mask b) { return _mm256_andnot_ps(b, a); }
  static JBOOST_INLINE Vector Select(Mask mask, Vector yes, Vector no) {
    return _mm256_blendv_ps(no, yes, mask);
  }
  static JBOOST_INLINE Mask GoesLeft(Vector x, float threshold, bool missing_left) {
    Vector limit = Set(threshold);
    return missing_left ? _mm256_cmp_ps(x, limit, _CMP_NGT_UQ)
                        : _mm256_cmp_ps(x, limit, _CMP_LE_OQ);
  }
  static JBOOST_INLINE Mask FromBits(uint32_t bits) {
    __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i own = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(own, lane));
  }
  static JBOOST_INLINE Mask Exceeds(Vector x, float limit) {
    return _mm256_cmp_ps(x, Set(limit), _CMP_GT_OQ);
  }
};

#else

// Four rows, in a vector type of the compiler.
struct Lanes {
  static constexpr int64_t kRows = 4;
  typedef float Vector __attribute__((vector_size(16), may_alias));
  typedef int32_t Mask __attribute__((vector_size(16), may_alias));

  static JBOOST_INLINE Vector Set(float x) { return Vector{x, x, x, x}; }
  static JBOOST_INLINE Mask All() { return Mask{-1, -1, -1, -1}; }
  static JBOOST_INLINE Mask And(Mask a, Mask b) { return a & b; }
  static JBOOST_INLINE Mask AndNot(Mask a, Mask b) { return a & ~b; }
  static JBOOST_INLINE Vector Select(Mask mask, Vector yes, Vector no) {
    return (Vector)(((Mask)yes & mask) | ((Mask)no & ~mask));
  }
  static JBOOST_INLINE Mask GoesLeft(Vector x, float threshold, bool missing_left) {
    Vector limit = Set(threshold);
    return missing_left ? (Mask)(x <= limit) | (Mask)(x != x) : (Mask)(x <= limit);
  }
  static JBOOST_INLINE Mask FromBits(uint32_t bits) {
    Mask lane = {1, 2, 4, 8}, all = {};
    return ((all + static_cast<int32_t>(bits)) & lane) == lane;
  }
  static JBOOST_INLINE Mask Exceeds(Vector x, float limit) {
    return (Mask)(x > Set(limit));
  }
};

#endif

using Vector = Lanes::Vector;
using Mask = Lanes::Mask;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A number of each row at each point.
template <int kPoints>
struct Sums {
  Vector at[kPoints];
};

// Which rows a set sends left; their values are codes, as floats.
Mask LooksUp(const ShapNode& node, const float* column) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < Lanes::kRows; ++i) {
    float x = column[i];
    bool left = node.missing_left;
    if (x == x) {
      uint32_t code = x >= 0.0f && x < node.num_codes ? static_cast<uint32_t>(x) : 0;
      left = (node.sets[code / 32] >> (code % 32)) & 1;
    }
    bits |= static_cast<uint32_t>(left) << i;
  }
  return Lanes::FromBits(bits);
}

template <int kPoints, bool kPairs>
class Walk {
 public:
  Walk(const ShapTree& tree, const ShapLanes& lanes)
      : tree_(tree),
        lanes_(lanes),
        edges_(static_cast<Edge*>(lanes.scratch)),
        changes_(reinterpret_cast<Sums<kPoints>*>(static_cast<char*>(lanes.scratch) +
                                                  kShapSlots * kShapVectorBytes)) {}

  void Run(const float* weight) {
    Sums<kPoints> product;
    for (int k = 0; k < kPoints; ++k) product.at[k] = Lanes::Set(weight[k]);
    Visit(0, 0, product);
  }

 private:
  // The edge that was taken at some depth.
  struct Edge {
    Mask open;
    int32_t feature;
  };
  static_assert(sizeof(Edge) <= kShapVectorBytes, "of scratch");

  JBOOST_INLINE Vector Read(int32_t feature) {
    return *reinterpret_cast<const Vector*>(lanes_.columns + feature * lanes_.stride);
  }

  JBOOST_INLINE Mask Decide(const ShapNode& node) {
    if (node.sets != nullptr) {
      return LooksUp(node, lanes_.columns + node.feature * lanes_.stride);
    }
    return Lanes::GoesLeft(Read(node.feature), node.threshold, node.missing_left);
  }

  JBOOST_INLINE void Add(float* to, Vector change) {
    Vector* at = reinterpret_cast<Vector*>(to);
    *at = *at + change;
  }

  // Ends at a node both of whose children are leaves.
  JBOOST_INLINE Sums<kPoints> EndAt(const ShapNode& node, const float* table, Mask left,
                                    Mask above, const Sums<kPoints>& product) {
    Sums<kPoints> sums;
    Vector change = Lanes::Set(0.0f);
    for (int k = 0; k < kPoints; ++k) {
      Vector sum =
          Lanes::Select(left, Lanes::Set(table[k]), Lanes::Set(table[kPoints + k]));
      Vector own = Lanes::Select(left, Lanes::Set(table[2 * kPoints + k]),
                                 Lanes::Set(table[3 * kPoints + k]));
      if (node.above >= 0) {
        sum = Lanes::Select(above, sum, Lanes::Set(table[4 * kPoints]));
        own = Lanes::Select(above, own, Lanes::Set(0.0f));
      }
      sums.at[k] = product.at[k] * sum;
      change = change + product.at[k] * own;
    }
    Add(lanes_.values + node.feature * lanes_.stride, change);
    return sums;
  }

  // Adds to the pairs of this edge's feature and each feature above.
  JBOOST_INLINE void AddPairs(int32_t feature, int64_t depth,
                              const Sums<kPoints>& own) {
    for (int64_t other = 0; other < depth; ++other) {
      if (edges_[other].feature == feature) continue;
      Vector both = changes_[other].at[0] * own.at[0];
      for (int k = 1; k < kPoints; ++k) {
        both = both + changes_[other].at[k] * own.at[k];
      }
      int64_t place = edges_[other].feature * lanes_.num_features + feature;
      Add(lanes_.pairs + place * lanes_.stride, both);
    }
  }

  // Adds the linear terms of a leaf to its sums; `product` is that of the path. Rows
  // that miss a value of a term get none.
  void AddTerms(const ShapNode& node, int side, int64_t depth,
                const Sums<kPoints>& product, Sums<kPoints>* sums) {
    int32_t first = node.first_term[side], last = first + node.num_terms[side];
    Mask complete = Lanes::All();
    for (int32_t i = first; i < last; ++i) {
      Vector x = Read(tree_.terms[i].feature);
      complete = Lanes::And(complete, Lanes::GoesLeft(x, kInfinity, false));
    }
    for (int32_t i = first; i < last; ++i) {
      const ShapTerm& term = tree_.terms[i];
      const float* table = tree_.term_tables + i * ShapTermSize(kPoints);
      Vector x = Read(term.feature);
      x = Lanes::Select(Lanes::GoesLeft(x, term.low, false), Lanes::Set(term.low), x);
      x = Lanes::Select(Lanes::Exceeds(x, term.high), Lanes::Set(term.high), x);
      Vector value = Lanes::Set(term.slope) * (x - Lanes::Set(term.center));
      Mask open = complete;
      if (term.above >= 0) open = Lanes::And(open, edges_[term.above].open);
      value = Lanes::Select(open, value, Lanes::Set(0.0f));
      Sums<kPoints> own;
      Vector change = Lanes::Set(0.0f);
      for (int k = 0; k < kPoints; ++k) {
        own.at[k] = product.at[k] * Lanes::Set(table[k]) * value;
        sums->at[k] = sums->at[k] + own.at[k];
        own.at[k] = own.at[k] * Lanes::Set(table[kPoints + k]);
        change = change + own.at[k];
      }
      Add(lanes_.values + term.feature * lanes_.stride, change);
      if (kPairs) AddPairs(term.feature, depth + 1, own);
    }
  }

  // Visits a node and all below it; returns the sums over its leaves.
  Sums<kPoints> Visit(int32_t place, int64_t depth, const Sums<kPoints>& product) {
    const ShapNode& node = tree_.nodes[place];
    const float* table = tree_.tables + place * ShapTableSize(kPoints);
    Mask left = Decide(node), above = Lanes::All();
    if (node.above >= 0) above = edges_[node.above].open;
    if (!kPairs && node.is_last) return EndAt(node, table, left, above, product);
    Sums<kPoints> total;
    for (int k = 0; k < kPoints; ++k) total.at[k] = Lanes::Set(0.0f);
    Vector values = Lanes::Set(0.0f);
    edges_[depth].feature = node.feature;
    for (int side = 0; side < 2; ++side, table += ShapEdgeSize(kPoints)) {
      Mask own = side == 0 ? Lanes::And(above, left) : Lanes::AndNot(above, left);
      edges_[depth].open = own;
      Sums<kPoints> sums, change;
      for (int k = 0; k < kPoints; ++k) {
        Vector gain =
            Lanes::Select(own, Lanes::Set(table[k]), Lanes::Set(table[kPoints + k]));
        change.at[k] = Lanes::Select(own, Lanes::Set(table[2 * kPoints + k]),
                                     Lanes::Set(table[3 * kPoints + k]));
        if (node.above >= 0) {
          gain = Lanes::Select(above, gain, Lanes::Set(table[4 * kPoints]));
          change.at[k] = Lanes::Select(above, change.at[k], Lanes::Set(0.0f));
        }
        sums.at[k] = product.at[k] * gain;
      }
      if (kPairs) changes_[depth] = change;
      if (node.child[side] >= 0) {
        sums = Visit(node.child[side], depth + 1, sums);
      } else {
        Sums<kPoints> path = sums;
        for (int k = 0; k < kPoints; ++k) {
          sums.at[k] = sums.at[k] * Lanes::Set(node.value[side]);
        }
        if (node.num_terms[side] > 0) AddTerms(node, side, depth, path, &sums);
      }
      for (int k = 0; k < kPoints; ++k) {
        total.at[k] = total.at[k] + sums.at[k];
        sums.at[k] = sums.at[k] * change.at[k];
        values = values + sums.at[k];
      }
      if (kPairs) AddPairs(node.feature, depth, sums);
    }
    Add(lanes_.values + node.feature * lanes_.stride, values);
    return total;
  }

  const ShapTree& tree_;
  const ShapLanes& lanes_;
  Edge* edges_;
  Sums<kPoints>* changes_;
};

template <int kPoints>
void Start(const ShapTree& tree, const float* weight, const ShapLanes& lanes) {
  if (lanes.pairs != nullptr) {
    Walk<kPoints, true>(tree, lanes).Run(weight);
  } else {
    Walk<kPoints, false>(tree, lanes).Run(weight);
  }
}

void AddTree(const ShapTree& tree, const float* weight, int64_t points,
             const ShapLanes& lanes) {
  if (points == 1) return Start<1>(tree, weight, lanes);
  if (points == 2) return Start<2>(tree, weight, lanes);
  if (points == 3) return Start<3>(tree, weight, lanes);
  return Start<4>(tree, weight, lanes);
}

}  // namespace

const ShapLoops kShapLoops = {Lanes::kRows, AddTree};

}  // namespace jboost::JBOOST_ISA
