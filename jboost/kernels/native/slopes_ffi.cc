// SPDX-License-Identifier: Apache-2.0
// Bindings of slopes.h.
#include <algorithm>
#include <vector>

#include "ffi.h"
#include "slopes.h"

namespace jboost {
namespace {

ValueRows ReadValueRows(Buffers& buffers) {
  ValueRows rows{};
  auto [num_rows, num_features] = buffers.NextShape<2>("values");
  rows.num_rows = num_rows;
  rows.num_features = num_features;
  rows.values = buffers.Operand<float>("values", {num_rows, num_features});
  rows.leaf = buffers.Operand<int32_t>("leaf", {num_rows});
  return rows;
}

// Packs the terms [L, P]; first and second are arrays [L, P], or [F] by feature.
template <class Term>
std::vector<Term> PackTerms(const int32_t* feature, const float* first,
                            const float* second, int64_t size, int64_t num_features,
                            bool by_feature) {
  std::vector<Term> terms(size);
  for (int64_t i = 0; i < size; ++i) {
    Require(feature[i] < num_features, "terms must be of columns of the values");
    int32_t place = std::max(feature[i], 0);
    int64_t at = by_feature ? place : i;
    terms[i] = {place, feature[i] >= 0, first[at], second[at]};
  }
  return terms;
}

void SumProductsImpl(Buffers& buffers, const Pool& pool) {
  ValueRows rows = ReadValueRows(buffers);
  Products products;
  auto [num_leaves, num_terms] = buffers.NextShape<2>("terms");
  rows.num_leaves = num_leaves;
  products.num_terms = num_terms;
  auto* feature = buffers.Operand<int32_t>("terms", {num_leaves, num_terms});
  const float* middle = buffers.Operand<float>("middle", {rows.num_features});
  const float* inverse = buffers.Operand<float>("inverse", {rows.num_features});
  products.gradient = buffers.Operand<float>("gradient", {rows.num_rows});
  products.curvature = buffers.Operand<float>("curvature", {rows.num_rows});
  products.weights = buffers.Operand<float>("weights", {rows.num_rows});
  products.scales = buffers.Operand<float>("scales", {2, num_leaves});
  Require(num_terms >= 1 && num_terms <= kMaxTerms, "there must be 1 to 6 terms");
  int64_t channels = (num_terms + 1) * (num_terms + 2) / 2 + num_terms + 1;
  int32_t* sums = buffers.Result<int32_t>("sums", {channels, num_leaves});
  buffers.Finish();
  auto terms = PackTerms<ScaledTerm>(feature, middle, inverse, num_leaves * num_terms,
                                     rows.num_features, true);
  products.terms = terms.data();
  SumProducts(pool, rows, products, sums);
}

void AddLinesImpl(Buffers& buffers, const Pool& pool) {
  ValueRows rows = ReadValueRows(buffers);
  const float* scores = buffers.Operand<float>("scores", {rows.num_rows});
  Lines lines;
  auto [num_leaves, num_terms] = buffers.NextShape<2>("feature", Access::kOperand, 1);
  rows.num_leaves = num_leaves;
  lines.num_terms = num_terms;
  Shape shape = {num_leaves, num_terms};
  lines.value = buffers.Operand<float>("value", {num_leaves});
  auto* feature = buffers.Operand<int32_t>("feature", shape);
  const float* slope = buffers.Operand<float>("slope", shape);
  const float* center = buffers.Operand<float>("center", shape);
  Require(num_terms >= 1 && num_terms <= kMaxTerms, "there must be 1 to 6 terms");
  float* result = buffers.Result<float>("result", {rows.num_rows});
  buffers.Finish();
  auto terms = PackTerms<LineTerm>(feature, slope, center, num_leaves * num_terms,
                                   rows.num_features, false);
  lines.terms = terms.data();
  AddLines(pool, rows, lines, scores, result);
}

}  // namespace

JBOOST_HANDLER(jboost_sum_products, SumProductsImpl)
JBOOST_HANDLER(jboost_add_lines, AddLinesImpl)

}  // namespace jboost
