// SPDX-License-Identifier: Apache-2.0
// Bindings of the steps of one level, for rows that are divided among devices or among
// blocks: each call takes the rows of one part.
#include <algorithm>
#include <cstring>
#include <vector>

#include "categories.h"
#include "exact_sum.h"
#include "grow_ffi.h"

namespace jboost {
namespace {

ffi::Error FindGreatestDerivativesImpl(ffi::ThreadPool threads,
                                       ffi::RemainingArgs operands,
                                       ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  int64_t num_rows = buffers.NextShape<1>(Access::kOperand, "gradient")[0];
  const float* gradient = buffers.Operand<float>("gradient", {num_rows});
  const float* curvature = buffers.Operand<float>("curvature", {num_rows});
  const uint8_t* in_bag = buffers.Bytes("in_bag", {num_rows});
  float* greatest = buffers.Result<float>("greatest", {2});
  int32_t* count = buffers.Result<int32_t>("num_in_bag", {});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  uint32_t bits[2];
  int64_t num_in_bag;
  FindGreatestDerivatives(MakePool(threads), num_rows, gradient, curvature, in_bag,
                          bits, &num_in_bag);
  std::memcpy(greatest, bits, sizeof bits);
  *count = static_cast<int32_t>(num_in_bag);
  return ffi::Error::Success();
}

ffi::Error SumMagnitudesImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                             ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  int64_t num_rows = buffers.NextShape<1>(Access::kOperand, "gradient")[0];
  const float* values[2];
  for (const float*& each : values) {
    each = buffers.Operand<float>("derivatives", {num_rows});
  }
  const uint8_t* in_bag = buffers.Bytes("in_bag", {num_rows});
  const float* greatest = buffers.Operand<float>("greatest", {2});
  int32_t* digits = buffers.Result<int32_t>("digits", {2, 4});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  for (int64_t channel = 0; channel < 2; ++channel) {
    Unit unit = ChooseUnit(MagnitudeBits(greatest[channel]));
    std::fill_n(digits + 4 * channel, 4, 0);
    if (!IsFinite(greatest[channel])) continue;
    SumMagnitudes(MakePool(threads), num_rows, values[channel], in_bag, unit.up,
                  digits + 4 * channel);
  }
  return ffi::Error::Success();
}

ffi::Error StartRowsImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, int64_t uniform) {
  Buffers buffers(operands, results);
  int64_t num_rows = buffers.NextShape<1>(Access::kOperand, "gradient")[0];
  const float* gradient = buffers.Operand<float>("gradient", {num_rows});
  const float* curvature = buffers.Operand<float>("curvature", {num_rows});
  const uint8_t* in_bag = buffers.Bytes("in_bag", {num_rows});
  const uint32_t* seed = buffers.Operand<uint32_t>("seed", {2});
  const float* scale = buffers.Operand<float>("scale", {2});
  bool stochastic = buffers.Scalar<uint8_t>("stochastic") != 0;
  int32_t first_row = buffers.Scalar<int32_t>("first_row");
  Rows rows = ReadRows(&buffers, Access::kResult, num_rows);
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  Rounding rounding{{scale[0], scale[1]}, stochastic, uniform != 0};
  PlaceRows(MakePool(threads), num_rows, gradient, curvature, in_bag, seed, rounding,
            first_row, rows);
  return ffi::Error::Success();
}

// The operands of sums of slots: codes by row come first, the rows elsewhere.
struct SlotSums {
  Codes codes{};
  const int32_t* slot = nullptr;
  int64_t num_slots = 0, num_columns = 0;
  Histograms histograms{};
};

void ReadSlotSums(Buffers* buffers, SlotSums* sums) {
  sums->codes.num_features = buffers->Scalar<int32_t>("num_features");
  sums->num_slots = buffers->NextShape<1>(Access::kOperand, "slot")[0];
  sums->slot = buffers->Operand<int32_t>("slot", {sums->num_slots});
  auto [num_sums, channels, columns, bins] =
      buffers->NextShape<4>(Access::kOperand, "sums");
  sums->num_columns = columns;
  sums->histograms = {
      buffers->InPlace<int32_t>("sums", {num_sums, channels, columns, bins}), num_sums,
      channels, bins, channels == 3};
  sums->histograms.add = true;
  buffers->Check(sums->num_slots == num_sums, "there must be a sum for each slot");
  buffers->Check(channels == 2 || channels == 3, "sums must have 2 or 3 channels");
  buffers->Check(0 < bins && bins <= (sums->codes.wide ? 65536 : kByteStride),
                 "the codes of sums must fit their type");
}

ffi::Error AddSlots(const Pool& pool, const Rows& rows, SlotSums* sums) {
  Codes& codes = sums->codes;
  JBOOST_CHECK(0 < codes.num_features && codes.num_features <= sums->num_columns &&
                   sums->num_columns <= codes.num_blocks * codes.width,
               "num_features must be 1 to F, and packed must hold F features");
  codes.num_blocks = (codes.num_features + codes.width - 1) / codes.width;
  std::vector<NodeSum> nodes;
  for (int64_t i = 0; i < sums->num_slots && sums->slot[i] >= 0; ++i) {
    JBOOST_CHECK(sums->slot[i] < rows.num_slots, "slot must hold slots of segments");
    nodes.push_back({sums->slot[i], i, -1});
  }
  if (nodes.empty()) return ffi::Error::Success();
  JBOOST_CHECK(SumNodes(pool, codes, rows, nodes.data(),
                        static_cast<int64_t>(nodes.size()), sums->histograms),
               "index must hold rows of a chunk");
  return ffi::Error::Success();
}

ffi::Error SumSlotsImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                        ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  SlotSums sums;
  void* packed;
  ReadPacked(&buffers, Access::kOperand, &sums.codes, &packed);
  Rows rows = ReadRows(&buffers, Access::kOperand, sums.codes.num_rows);
  ReadSlotSums(&buffers, &sums);
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckRows(rows, sums.codes.num_rows));
  return AddSlots(MakePool(threads), rows, &sums);
}

// The operands of routing rows.
struct Routing {
  Source source;
  const int32_t* position = nullptr;
  Splits splits{};
  Rows rows{};
  int32_t* leaf = nullptr;
};

void ReadRouting(Buffers* buffers, Routing* routing) {
  ReadLayout(buffers, &routing->source);
  int64_t num_rows = routing->source.codes.num_rows;
  int64_t slots = buffers->NextShape<1>(Access::kOperand, "position")[0];
  routing->position = buffers->Operand<int32_t>("position", {slots});
  Splits& splits = routing->splits;
  splits.feature = buffers->Operand<int32_t>("feature", {slots});
  splits.threshold = buffers->Operand<int32_t>("threshold", {slots});
  splits.missing_left = buffers->Operand<uint8_t>("missing_left", {slots});
  splits.found = buffers->Operand<uint8_t>("found", {slots});
  // The rows begin with their words, int32; sets of codes are uint32.
  if (buffers->NextIs(Access::kOperand, ffi::DataType::U32)) {
    splits.num_words = buffers->NextShape<2>(Access::kOperand, "left_codes")[1];
    Shape shape = {slots, splits.num_words};
    splits.left_codes = buffers->Operand<uint32_t>("left_codes", shape);
    splits.absent_codes = buffers->Operand<uint32_t>("absent_codes", shape);
    buffers->Check(splits.num_words > 0, "sets of codes must have words");
  }
  routing->rows = ReadRows(buffers, Access::kInPlace, num_rows);
  routing->leaf = buffers->InPlace<int32_t>("leaf", {num_rows});
  buffers->Check(routing->rows.num_slots == slots,
                 "splits must be of the slots of segments");
}

ffi::Error Route(const Pool& pool, const Routing& routing, int64_t level,
                 int64_t max_depth) {
  const Codes& codes = routing.source.codes;
  JBOOST_RETURN_IF_ERROR(CheckRows(routing.rows, codes.num_rows));
  JBOOST_RETURN_IF_ERROR(CheckSplits(routing.splits, routing.position,
                                     routing.rows.num_slots, level, max_depth,
                                     codes.num_features));
  JBOOST_CHECK(RouteRows(pool, codes, routing.splits, routing.position, level,
                         max_depth, routing.rows, routing.leaf, nullptr),
               "index must hold rows of a chunk");
  return ffi::Error::Success();
}

ffi::Error RouteRowsImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                         ffi::RemainingRets results, int64_t level, int64_t max_depth) {
  Buffers buffers(operands, results);
  Routing routing;
  ReadRouting(&buffers, &routing);
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  return Route(MakePool(threads), routing, level, max_depth);
}

// Both steps of a level, by one call.
ffi::Error RouteAndSumImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                           ffi::RemainingRets results, int64_t level,
                           int64_t max_depth) {
  Buffers buffers(operands, results);
  SlotSums sums;
  void* packed;
  ReadPacked(&buffers, Access::kOperand, &sums.codes, &packed);
  Routing routing;
  ReadRouting(&buffers, &routing);
  ReadSlotSums(&buffers, &sums);
  buffers.Check(routing.source.codes.num_rows == sums.codes.num_rows,
                "codes by feature and by row must be of the same rows");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  Pool pool = MakePool(threads);
  JBOOST_RETURN_IF_ERROR(Route(pool, routing, level, max_depth));
  return AddSlots(pool, routing.rows, &sums);
}

ffi::Error FindGreatestGradientImpl(ffi::ThreadPool threads,
                                    ffi::RemainingArgs operands,
                                    ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  int64_t num_rows = buffers.NextShape<2>(Access::kOperand, "words")[0];
  Rows rows = ReadRows(&buffers, Access::kOperand, num_rows);
  int32_t* greatest = buffers.Result<int32_t>("greatest", {});
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckRows(rows, num_rows));
  *greatest = FindGreatestGradient(MakePool(threads), rows, num_rows);
  return ffi::Error::Success();
}

ffi::Error SumSquaresImpl(ffi::ThreadPool threads, ffi::RemainingArgs operands,
                          ffi::RemainingRets results) {
  Buffers buffers(operands, results);
  int64_t num_rows = buffers.NextShape<2>(Access::kOperand, "words")[0];
  Rows rows = ReadRows(&buffers, Access::kOperand, num_rows);
  int32_t greatest = buffers.Scalar<int32_t>("greatest");
  int64_t slots = buffers.NextShape<2>(Access::kResult, "digits")[0];
  int32_t* digits = buffers.Result<int32_t>("digits", {slots, 4});
  buffers.Check(slots <= rows.num_slots, "there must be digits for slots only");
  JBOOST_RETURN_IF_ERROR(buffers.Finish());
  JBOOST_RETURN_IF_ERROR(CheckRows(rows, num_rows));
  SumSquares(MakePool(threads), rows, num_rows, greatest, slots, digits);
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_greatest_derivatives, FindGreatestDerivativesImpl, Bind())
JBOOST_HANDLER(jboost_sum_magnitudes, SumMagnitudesImpl, Bind())
JBOOST_HANDLER(jboost_start_rows, StartRowsImpl, Bind().Attr<int64_t>("uniform"))
JBOOST_HANDLER(jboost_sum_slots, SumSlotsImpl, Bind())
JBOOST_HANDLER(jboost_route_rows, RouteRowsImpl,
               Bind().Attr<int64_t>("level").Attr<int64_t>("max_depth"))
JBOOST_HANDLER(jboost_route_and_sum, RouteAndSumImpl,
               Bind().Attr<int64_t>("level").Attr<int64_t>("max_depth"))
JBOOST_HANDLER(jboost_greatest_gradient, FindGreatestGradientImpl, Bind())
JBOOST_HANDLER(jboost_sum_squares, SumSquaresImpl, Bind())

}  // namespace jboost
