// SPDX-License-Identifier: Apache-2.0
// Bindings of grow.h and sparse.h: unpack, check every shape, call.
#include "grow_ffi.h"

#include <vector>

#include "ffi.h"
#include "grow.h"
#include "sparse.h"

namespace jboost {
namespace {

Codes MakeCodes(const ffi::AnyBuffer& columns) {
  Codes codes{};
  codes.columns = columns.untyped_data();
  codes.num_features = columns.dimensions()[0];
  codes.num_rows = columns.dimensions()[1];
  codes.wide = columns.element_type() == ffi::U16;
  return codes;
}

void SetPacked(Codes& codes, void* packed, ffi::AnyBuffer::Dimensions shape) {
  codes.packed = packed;
  codes.num_blocks = shape[0];
  codes.num_rows = shape[1];
  codes.width = shape[2];
}

// Codes by feature. Of sparse ones `columns` holds the stored codes [1, E], and
// `entries` their starts, rows and absent codes.
ffi::Error GetColumns(ffi::AnyBuffer columns, ffi::RemainingArgs entries,
                      int64_t num_rows, SparseColumns* sparse, Codes* codes) {
  JBOOST_CHECK(AreCodes(columns, 2), "codes must be [F, N]");
  *codes = MakeCodes(columns);
  if (entries.size() == 0) {
    JBOOST_CHECK(codes->num_rows == num_rows, "codes must be [F, N]");
    return ffi::Error::Success();
  }
  auto starts = entries.get<Int>(0), rows = entries.get<Int>(1);
  auto absent = entries.get<ffi::AnyBuffer>(2);
  JBOOST_CHECK(starts && rows && absent, "entries must be starts, rows, absent codes");
  JBOOST_CHECK(AreCodes(*absent, 1) && absent->element_type() == columns.element_type(),
               "absent codes must be [F]");
  codes->num_features = absent->dimensions()[0];
  codes->num_rows = num_rows;
  JBOOST_CHECK(Has(starts->dimensions(), {codes->num_features + 1}),
               "starts must be [F + 1]");
  JBOOST_CHECK(Has(columns.dimensions(), {1, columns.dimensions()[1]}) &&
                   Has(rows->dimensions(), {columns.dimensions()[1]}),
               "codes must be [1, E], and rows [E]");
  *sparse =
      SparseColumns{starts->typed_data(), rows->typed_data(), absent->untyped_data()};
  codes->sparse = sparse;
  return ffi::Error::Success();
}

// Codes by row, of as many features as `sums` has.
ffi::Error GetPacked(ffi::AnyBuffer packed, Int sums, Codes* codes) {
  JBOOST_CHECK(AreCodes(packed, 3), "packed must be [blocks, N, width]");
  JBOOST_CHECK(sums.dimensions().size() == 4, "sums must be [slots, channels, F, B]");
  codes->wide = packed.element_type() == ffi::U16;
  codes->num_features = sums.dimensions()[2];
  SetPacked(*codes, packed.untyped_data(), packed.dimensions());
  JBOOST_CHECK(codes->num_blocks * codes->width >= codes->num_features &&
                   (codes->num_blocks - 1) * codes->width < codes->num_features,
               "packed must hold F features");
  return ffi::Error::Success();
}

ffi::Error PackImpl(ffi::ThreadPool threads, ffi::AnyBuffer columns,
                    ffi::Result<ffi::AnyBuffer> packed, int64_t num_bins) {
  JBOOST_CHECK(AreCodes(columns, 2) && AreCodes(*packed, 3), "codes must be [F, N]");
  Codes codes = MakeCodes(columns);
  int64_t num_rows = codes.num_rows;
  SetPacked(codes, packed->untyped_data(), packed->dimensions());
  JBOOST_CHECK(codes.num_rows == num_rows &&
                   packed->element_type() == columns.element_type() &&
                   codes.num_blocks * codes.width >= codes.num_features &&
                   (codes.num_blocks - 1) * codes.width < codes.num_features,
               "packed must be [blocks, N, width]");
  PackCodes(MakePool(threads), codes, num_bins, packed->untyped_data());
  return ffi::Error::Success();
}

ffi::Error HistogramImpl(ffi::ThreadPool threads, ffi::AnyBuffer columns, Int channels,
                         Int node, ffi::RemainingArgs entries, ffi::Result<Int> sums) {
  JBOOST_CHECK(node.dimensions().size() == 1, "node must be [N]");
  int64_t num_rows = node.dimensions()[0];
  SparseColumns sparse;
  Codes codes{};
  ffi::Error error = GetColumns(columns, entries, num_rows, &sparse, &codes);
  if (error.failure()) return error;
  JBOOST_CHECK(
      channels.dimensions().size() == 2 && channels.dimensions()[0] == num_rows,
      "channels must be [N, C]");
  auto shape = sums->dimensions();
  JBOOST_CHECK(shape.size() == 4 && shape[1] == codes.num_features &&
                   shape[3] == channels.dimensions()[1],
               "sums must be [M, F, B, C]");
  auto build = codes.sparse == nullptr ? BuildHistogram : BuildSparseHistogram;
  build(MakePool(threads), codes, channels.typed_data(), shape[3], node.typed_data(),
        shape[0], shape[2], sums->typed_data());
  return ffi::Error::Success();
}

ffi::Error StartImpl(ffi::ThreadPool threads, Float gradient, Float curvature,
                     Bool in_bag, UInt seed, ffi::Result<Int> words,
                     ffi::Result<Index> index, ffi::Result<Int> segments,
                     ffi::Result<Float> units, int64_t uniform) {
  JBOOST_CHECK(gradient.dimensions().size() == 1, "gradient must be [N]");
  int64_t num_rows = gradient.dimensions()[0];
  JBOOST_CHECK(Has(curvature.dimensions(), {num_rows}), "curvature must be [N]");
  JBOOST_CHECK(Has(in_bag.dimensions(), {num_rows}), "in_bag must be [N]");
  JBOOST_CHECK(Has(seed.dimensions(), {2}), "seed must be [2]");
  JBOOST_CHECK(Has(words->dimensions(), {num_rows, 2}), "words must be [N, 2]");
  JBOOST_CHECK(Has(index->dimensions(), {num_rows}), "index must be [N]");
  JBOOST_CHECK(segments->dimensions().size() == 3 &&
                   segments->dimensions()[0] == NumChunks(num_rows) &&
                   segments->dimensions()[2] == 2,
               "segments must be [chunks, slots, 2]");
  JBOOST_CHECK(Has(units->dimensions(), {2}), "units must be [2]");
  StartRows(MakePool(threads), num_rows, gradient.typed_data(), curvature.typed_data(),
            Bytes(in_bag), seed.typed_data(), uniform != 0, segments->dimensions()[1],
            reinterpret_cast<int64_t*>(words->typed_data()), index->typed_data(),
            reinterpret_cast<Segment*>(segments->typed_data()), units->typed_data());
  return ffi::Error::Success();
}

// What histograms of nodes are made of, and where they go.
struct Sums {
  SparseColumns sparse;
  Codes codes{};
  Rows rows;
  Histograms histograms;
  SparseRow* room = nullptr;  // of sparse codes
};

// Codes by row; or those of sparse columns, as GetColumns takes them, and room.
ffi::Error GetSums(ffi::AnyBuffer packed, Int words, Index index, Int segments,
                   Int min_count, ffi::RemainingArgs entries, Int sums,
                   ffi::RemainingRets room, Sums* out) {
  JBOOST_CHECK(words.dimensions().size() == 2, "words must be [N, 2]");
  int64_t num_rows = words.dimensions()[0];
  ffi::Error error = ffi::Error::Success();
  if (entries.size() == 0) {
    error = GetPacked(packed, sums, &out->codes);
  } else {
    error = GetColumns(packed, entries, num_rows, &out->sparse, &out->codes);
    auto rows = room.get<Int>(0);
    JBOOST_CHECK(rows && Has((*rows)->dimensions(), {num_rows, 4}),
                 "room must be [N, 4]");
    out->room = reinterpret_cast<SparseRow*>((*rows)->typed_data());
  }
  if (error.failure()) return error;
  error = GetSegments(out->codes.num_rows, words, index, segments, &out->rows);
  if (error.failure()) return error;
  JBOOST_CHECK(min_count.dimensions().size() == 0, "min_count must be a scalar");
  return GetHistograms(sums, out->rows, out->codes.num_features,
                       *min_count.typed_data() > 1, &out->histograms);
}

void Sum(ffi::ThreadPool& threads, const Sums& sums, const NodeSum* nodes,
         int64_t num_nodes) {
  if (sums.codes.sparse == nullptr) {
    SumNodes(MakePool(threads), sums.codes, sums.rows, nodes, num_nodes,
             sums.histograms);
  } else {
    SumSparseNodes(MakePool(threads), sums.codes, sums.rows, nodes, num_nodes,
                   sums.histograms, sums.room);
  }
}

ffi::Error SumRootImpl(ffi::ThreadPool threads, ffi::AnyBuffer packed, Int words,
                       Index index, Int segments, Int min_count,
                       ffi::RemainingArgs entries, ffi::Result<Int> sums,
                       ffi::RemainingRets room) {
  Sums all;
  ffi::Error error =
      GetSums(packed, words, index, segments, min_count, entries, *sums, room, &all);
  if (error.failure()) return error;
  NodeSum root{0, 0, -1};
  Sum(threads, all, &root, 1);
  return ffi::Error::Success();
}

ffi::Error SumChildrenImpl(ffi::ThreadPool threads, ffi::AnyBuffer packed, Int words,
                           Index index, Int segments, Int min_count, Int source,
                           Bool left_smaller, Int old_place, Int old_sums,
                           ffi::RemainingArgs entries, ffi::Result<Int> place,
                           ffi::Result<Int> sums, ffi::RemainingRets room) {
  Sums all;
  ffi::Error error =
      GetSums(packed, words, index, segments, min_count, entries, *sums, room, &all);
  if (error.failure()) return error;
  JBOOST_CHECK(old_sums.typed_data() == sums->typed_data(), "sums must be aliased");
  std::vector<NodeSum> nodes;
  error = PlaceChildren(all.rows.num_slots, source, left_smaller, old_place, *place,
                        &nodes);
  if (error.failure()) return error;
  Sum(threads, all, nodes.data(), static_cast<int64_t>(nodes.size()));
  return ffi::Error::Success();
}

ffi::Error FindSplitsWithin(const LimitsOfSlots* values, ffi::ThreadPool threads,
                            Int sums, Int place, Int position, Bool masks, Float units,
                            Float l2, Float min_gain, Float min_weight, Int min_count,
                            ffi::Result<Int> feature, ffi::Result<Int> threshold,
                            ffi::Result<Bool> missing_left, ffi::Result<Float> gain,
                            ffi::Result<Bool> found) {
  auto shape = sums.dimensions();
  JBOOST_CHECK(shape.size() == 4 && (shape[1] == 2 || shape[1] == 3),
               "histograms must be [slots, channels, F, B]");
  int64_t slots = shape[0];
  JBOOST_CHECK(Has(place.dimensions(), {slots}), "place must be [slots]");
  JBOOST_CHECK(Has(position.dimensions(), {slots}), "position must be [slots]");
  JBOOST_CHECK(Has(masks.dimensions(), {slots, shape[2]}), "masks must be [slots, F]");
  JBOOST_CHECK(Has(units.dimensions(), {2}), "units must be [2]");
  JBOOST_CHECK(l2.dimensions().size() == 0 && min_gain.dimensions().size() == 0 &&
                   min_weight.dimensions().size() == 0 &&
                   min_count.dimensions().size() == 0,
               "limits must be scalars");
  JBOOST_CHECK(Has(feature->dimensions(), {slots}), "splits must be [slots]");
  // A child without rows gives no gain: 1 asks for nothing, and nobody has counted.
  int32_t least = *min_count.typed_data() > 1 ? *min_count.typed_data() : 0;
  Histograms histograms{sums.typed_data(), slots, shape[1], shape[3], least > 0};
  SplitLimits limits{units.typed_data()[0], units.typed_data()[1], *l2.typed_data(),
                     *min_weight.typed_data(), least};
  SplitOutput output{feature->typed_data(), threshold->typed_data(),
                     Bytes(*missing_left), gain->typed_data(), Bytes(*found)};
  FindSplits(MakePool(threads), histograms, shape[2], place.typed_data(),
             position.typed_data(), Bytes(masks), limits, *min_gain.typed_data(),
             values, output);
  return ffi::Error::Success();
}

ffi::Error FindSplitsImpl(ffi::ThreadPool threads, Int sums, Int place, Int position,
                          Bool masks, Float units, Float l2, Float min_gain,
                          Float min_weight, Int min_count, ffi::Result<Int> feature,
                          ffi::Result<Int> threshold, ffi::Result<Bool> missing_left,
                          ffi::Result<Float> gain, ffi::Result<Bool> found) {
  return FindSplitsWithin(nullptr, threads, sums, place, position, masks, units, l2,
                          min_gain, min_weight, min_count, feature, threshold,
                          missing_left, gain, found);
}

ffi::Error FindLimitedSplitsImpl(ffi::ThreadPool threads, Int sums, Int place,
                                 Int position, Bool masks, Float units, Float l2,
                                 Float min_gain, Float min_weight, Int min_count,
                                 Float l1, Float bounds, Int monotone,
                                 ffi::Result<Int> feature, ffi::Result<Int> threshold,
                                 ffi::Result<Bool> missing_left,
                                 ffi::Result<Float> gain, ffi::Result<Bool> found,
                                 ffi::Result<Float> child_bounds) {
  auto shape = sums.dimensions();
  JBOOST_CHECK(shape.size() == 4, "histograms must be [slots, channels, F, B]");
  JBOOST_CHECK(l1.dimensions().size() == 0, "l1 must be a scalar");
  JBOOST_CHECK(Has(bounds.dimensions(), {shape[0], 2}), "bounds must be [slots, 2]");
  JBOOST_CHECK(Has(monotone.dimensions(), {shape[2]}), "monotone must be [F]");
  JBOOST_CHECK(Has(child_bounds->dimensions(), {shape[0], 2, 2}),
               "child_bounds must be [slots, 2, 2]");
  LimitsOfSlots values{*l1.typed_data(), bounds.typed_data(), monotone.typed_data(),
                       child_bounds->typed_data()};
  return FindSplitsWithin(&values, threads, sums, place, position, masks, units, l2,
                          min_gain, min_weight, min_count, feature, threshold,
                          missing_left, gain, found);
}

// Sets of categories, and where they go in the tree; without categories null.
struct Sets {
  const uint32_t* left_codes = nullptr;
  const uint32_t* absent_codes = nullptr;
  uint32_t* tree_left_codes = nullptr;
  int64_t num_words = 0;
};

ffi::Error SplitRowsBy(const Sets& sets, ffi::ThreadPool threads,
                       const ffi::AnyBuffer& columns, Int level, Int feature,
                       Int threshold, Bool missing_left, Bool found,
                       ffi::RemainingArgs entries, ffi::Result<Int> words,
                       ffi::Result<Index> index, ffi::Result<Int> segments,
                       ffi::Result<Int> tree_feature, ffi::Result<Int> tree_threshold,
                       ffi::Result<Bool> tree_missing_left, ffi::Result<Int> position,
                       ffi::Result<Int> leaf, ffi::Result<Int> source,
                       ffi::Result<Bool> left_smaller, int64_t max_depth) {
  JBOOST_CHECK(leaf->dimensions().size() == 1, "leaf must be [N]");
  int64_t num_rows = leaf->dimensions()[0], nodes = (int64_t{1} << max_depth) - 1;
  SparseColumns sparse;
  Codes codes{};
  ffi::Error error = GetColumns(columns, entries, num_rows, &sparse, &codes);
  if (error.failure()) return error;
  JBOOST_CHECK(level.dimensions().size() == 0, "level must be a scalar");
  JBOOST_CHECK(Has(words->dimensions(), {num_rows, 2}), "words must be [N, 2]");
  JBOOST_CHECK(Has(index->dimensions(), {num_rows}), "index must be [N]");
  JBOOST_CHECK(segments->dimensions().size() == 3 &&
                   segments->dimensions()[0] == NumChunks(num_rows),
               "segments must be [chunks, slots, 2]");
  int64_t slots = segments->dimensions()[1];
  JBOOST_CHECK(
      Has(feature.dimensions(), {slots}) && Has(threshold.dimensions(), {slots}) &&
          Has(missing_left.dimensions(), {slots}) && Has(found.dimensions(), {slots}) &&
          Has(position->dimensions(), {slots}),
      "splits must be [slots]");
  JBOOST_CHECK(Has(tree_feature->dimensions(), {nodes}) &&
                   Has(tree_threshold->dimensions(), {nodes}) &&
                   Has(tree_missing_left->dimensions(), {nodes}),
               "tree must be [2^max_depth - 1]");
  JBOOST_CHECK(Has(source->dimensions(), {std::max<int64_t>(1, slots / 2)}),
               "source must be [slots / 2]");
  Rows rows{reinterpret_cast<int64_t*>(words->typed_data()), index->typed_data(),
            reinterpret_cast<Segment*>(segments->typed_data()), slots};
  Splits splits{feature.typed_data(), threshold.typed_data(), Bytes(missing_left),
                Bytes(found),         sets.left_codes,        sets.absent_codes};
  TreeArrays tree{tree_feature->typed_data(), tree_threshold->typed_data(),
                  Bytes(*tree_missing_left), sets.tree_left_codes, sets.num_words};
  SplitRows(MakePool(threads), codes, rows, splits, *level.typed_data(), max_depth,
            tree, position->typed_data(), leaf->typed_data(), source->typed_data(),
            Bytes(*left_smaller));
  return ffi::Error::Success();
}

ffi::Error SplitRowsImpl(ffi::ThreadPool threads, ffi::AnyBuffer columns, Int level,
                         Int feature, Int threshold, Bool missing_left, Bool found, Int,
                         Index, Int, Int, Int, Bool, Int, Int,
                         ffi::RemainingArgs entries, ffi::Result<Int> words,
                         ffi::Result<Index> index, ffi::Result<Int> segments,
                         ffi::Result<Int> tree_feature, ffi::Result<Int> tree_threshold,
                         ffi::Result<Bool> tree_missing_left, ffi::Result<Int> position,
                         ffi::Result<Int> leaf, ffi::Result<Int> source,
                         ffi::Result<Bool> left_smaller, int64_t max_depth) {
  return SplitRowsBy({}, threads, columns, level, feature, threshold, missing_left,
                     found, entries, words, index, segments, tree_feature,
                     tree_threshold, tree_missing_left, position, leaf, source,
                     left_smaller, max_depth);
}

// The same with sets of categories; `none` are no more arguments.
ffi::Error SplitCategoryRowsImpl(
    ffi::ThreadPool threads, ffi::AnyBuffer columns, Int level, Int feature,
    Int threshold, Bool missing_left, Bool found, UInt left_codes, UInt absent_codes,
    Int, Index, Int, Int, Int, Bool, Int, Int, UInt old_left_codes,
    ffi::RemainingArgs none, ffi::Result<Int> words, ffi::Result<Index> index,
    ffi::Result<Int> segments, ffi::Result<Int> tree_feature,
    ffi::Result<Int> tree_threshold, ffi::Result<Bool> tree_missing_left,
    ffi::Result<Int> position, ffi::Result<Int> leaf, ffi::Result<UInt> tree_left_codes,
    ffi::Result<Int> source, ffi::Result<Bool> left_smaller, int64_t max_depth) {
  auto shape = left_codes.dimensions();
  int64_t slots = feature.element_count(), nodes = (int64_t{1} << max_depth) - 1;
  JBOOST_CHECK(shape.size() == 2 && shape[0] == slots &&
                   Has(absent_codes.dimensions(), {slots, shape[1]}),
               "sets of codes must be [slots, words]");
  JBOOST_CHECK(Has(tree_left_codes->dimensions(), {nodes, shape[1]}) &&
                   old_left_codes.typed_data() == tree_left_codes->typed_data(),
               "left_codes must be [2^max_depth - 1, words], and aliased");
  Sets sets{left_codes.typed_data(), absent_codes.typed_data(),
            tree_left_codes->typed_data(), shape[1]};
  return SplitRowsBy(sets, threads, columns, level, feature, threshold, missing_left,
                     found, none, words, index, segments, tree_feature, tree_threshold,
                     tree_missing_left, position, leaf, source, left_smaller,
                     max_depth);
}

// The leaves of trees; `left_codes` may be null.
ffi::Error FindLeavesBy(const UInt* left_codes, ffi::ThreadPool threads,
                        const ffi::AnyBuffer& columns, Int feature, Int threshold,
                        Bool missing_left, Bool skip, ffi::RemainingArgs entries,
                        ffi::Result<Int> leaf) {
  JBOOST_CHECK(leaf->dimensions().size() == 1, "leaf must be [N]");
  SparseColumns sparse;
  Codes codes{};
  ffi::Error error =
      GetColumns(columns, entries, leaf->dimensions()[0], &sparse, &codes);
  if (error.failure()) return error;
  JBOOST_CHECK(feature.dimensions().size() == 1, "tree must be [2^max_depth - 1]");
  int64_t nodes = feature.dimensions()[0], max_depth = 0;
  while ((int64_t{1} << max_depth) - 1 < nodes) ++max_depth;
  JBOOST_CHECK(Has(threshold.dimensions(), {nodes}) &&
                   Has(missing_left.dimensions(), {nodes}) &&
                   (int64_t{1} << max_depth) - 1 == nodes,
               "tree must be [2^max_depth - 1]");
  JBOOST_CHECK(Has(skip.dimensions(), {codes.num_rows}), "skip must be [N]");
  TreeArrays tree{feature.typed_data(), threshold.typed_data(), Bytes(missing_left)};
  if (left_codes != nullptr) {
    auto shape = left_codes->dimensions();
    JBOOST_CHECK(shape.size() == 2 && shape[0] == nodes && codes.sparse == nullptr,
                 "left_codes must be [2^max_depth - 1, words]");
    tree.left_codes = const_cast<uint32_t*>(left_codes->typed_data());
    tree.num_words = shape[1];
  }
  auto find = codes.sparse == nullptr ? FindLeaves : FindSparseLeaves;
  find(MakePool(threads), codes, tree, max_depth, Bytes(skip), leaf->typed_data());
  return ffi::Error::Success();
}

ffi::Error FindLeavesImpl(ffi::ThreadPool threads, ffi::AnyBuffer columns, Int feature,
                          Int threshold, Bool missing_left, Bool skip, Int,
                          ffi::RemainingArgs entries, ffi::Result<Int> leaf) {
  return FindLeavesBy(nullptr, threads, columns, feature, threshold, missing_left, skip,
                      entries, leaf);
}

// The same with sets of categories; `none` are no more arguments.
ffi::Error FindCategoryLeavesImpl(ffi::ThreadPool threads, ffi::AnyBuffer columns,
                                  Int feature, Int threshold, Bool missing_left,
                                  UInt left_codes, Bool skip, Int,
                                  ffi::RemainingArgs none, ffi::Result<Int> leaf) {
  return FindLeavesBy(&left_codes, threads, columns, feature, threshold, missing_left,
                      skip, none, leaf);
}

}  // namespace

JBOOST_HANDLER(jboost_pack, PackImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<ffi::AnyBuffer>()  // columns
                   .Ret<ffi::AnyBuffer>()  // packed
                   .Attr<int64_t>("num_bins"));

JBOOST_HANDLER(jboost_histogram, HistogramImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<ffi::AnyBuffer>()  // columns
                   .Arg<Int>()             // channels
                   .Arg<Int>()             // node
                   .RemainingArgs()        // starts, rows, absent
                   .Ret<Int>());           // sums

JBOOST_HANDLER(jboost_start, StartImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Float>()  // gradient
                   .Arg<Float>()  // curvature
                   .Arg<Bool>()   // in_bag
                   .Arg<UInt>()   // seed
                   .Ret<Int>()    // words
                   .Ret<Index>()  // index
                   .Ret<Int>()    // segments
                   .Ret<Float>()  // units
                   .Attr<int64_t>("uniform"));

JBOOST_HANDLER(jboost_sum_root, SumRootImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<ffi::AnyBuffer>()  // packed
                   .Arg<Int>()             // words
                   .Arg<Index>()           // index
                   .Arg<Int>()             // segments
                   .Arg<Int>()             // min_count
                   .RemainingArgs()        // starts, rows, absent
                   .Ret<Int>()             // sums
                   .RemainingRets());      // room

JBOOST_HANDLER(jboost_sum_children, SumChildrenImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<ffi::AnyBuffer>()  // packed
                   .Arg<Int>()             // words
                   .Arg<Index>()           // index
                   .Arg<Int>()             // segments
                   .Arg<Int>()             // min_count
                   .Arg<Int>()             // source
                   .Arg<Bool>()            // left_smaller
                   .Arg<Int>()             // place
                   .Arg<Int>()             // sums
                   .RemainingArgs()        // starts, rows, absent
                   .Ret<Int>()             // place
                   .Ret<Int>()             // sums
                   .RemainingRets());      // room

JBOOST_HANDLER(jboost_find_splits, FindSplitsImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Int>()     // sums
                   .Arg<Int>()     // place
                   .Arg<Int>()     // position
                   .Arg<Bool>()    // masks
                   .Arg<Float>()   // units
                   .Arg<Float>()   // l2
                   .Arg<Float>()   // min_gain
                   .Arg<Float>()   // min_child_weight
                   .Arg<Int>()     // min_count
                   .Ret<Int>()     // feature
                   .Ret<Int>()     // threshold
                   .Ret<Bool>()    // missing_left
                   .Ret<Float>()   // gain
                   .Ret<Bool>());  // found

JBOOST_HANDLER(jboost_find_limited_splits, FindLimitedSplitsImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<Int>()      // sums
                   .Arg<Int>()      // place
                   .Arg<Int>()      // position
                   .Arg<Bool>()     // masks
                   .Arg<Float>()    // units
                   .Arg<Float>()    // l2
                   .Arg<Float>()    // min_gain
                   .Arg<Float>()    // min_child_weight
                   .Arg<Int>()      // min_count
                   .Arg<Float>()    // l1
                   .Arg<Float>()    // bounds
                   .Arg<Int>()      // monotone
                   .Ret<Int>()      // feature
                   .Ret<Int>()      // threshold
                   .Ret<Bool>()     // missing_left
                   .Ret<Float>()    // gain
                   .Ret<Bool>()     // found
                   .Ret<Float>());  // child_bounds

JBOOST_HANDLER(jboost_split_rows, SplitRowsImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<ffi::AnyBuffer>()  // columns
                   .Arg<Int>()             // level
                   .Arg<Int>()             // feature
                   .Arg<Int>()             // threshold
                   .Arg<Bool>()            // missing_left
                   .Arg<Bool>()            // found
                   .Arg<Int>()             // words
                   .Arg<Index>()           // index
                   .Arg<Int>()             // segments
                   .Arg<Int>()             // tree feature
                   .Arg<Int>()             // tree threshold
                   .Arg<Bool>()            // tree missing_left
                   .Arg<Int>()             // position
                   .Arg<Int>()             // leaf
                   .RemainingArgs()        // starts, rows, absent
                   .Ret<Int>()             // words
                   .Ret<Index>()           // index
                   .Ret<Int>()             // segments
                   .Ret<Int>()             // tree feature
                   .Ret<Int>()             // tree threshold
                   .Ret<Bool>()            // tree missing_left
                   .Ret<Int>()             // position
                   .Ret<Int>()             // leaf
                   .Ret<Int>()             // source
                   .Ret<Bool>()            // left_smaller
                   .Attr<int64_t>("max_depth"));

JBOOST_HANDLER(jboost_split_category_rows, SplitCategoryRowsImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<ffi::AnyBuffer>()  // columns
                   .Arg<Int>()             // level
                   .Arg<Int>()             // feature
                   .Arg<Int>()             // threshold
                   .Arg<Bool>()            // missing_left
                   .Arg<Bool>()            // found
                   .Arg<UInt>()            // left_codes
                   .Arg<UInt>()            // absent_codes
                   .Arg<Int>()             // words
                   .Arg<Index>()           // index
                   .Arg<Int>()             // segments
                   .Arg<Int>()             // tree feature
                   .Arg<Int>()             // tree threshold
                   .Arg<Bool>()            // tree missing_left
                   .Arg<Int>()             // position
                   .Arg<Int>()             // leaf
                   .Arg<UInt>()            // tree left_codes
                   .RemainingArgs()        // none
                   .Ret<Int>()             // words
                   .Ret<Index>()           // index
                   .Ret<Int>()             // segments
                   .Ret<Int>()             // tree feature
                   .Ret<Int>()             // tree threshold
                   .Ret<Bool>()            // tree missing_left
                   .Ret<Int>()             // position
                   .Ret<Int>()             // leaf
                   .Ret<UInt>()            // tree left_codes
                   .Ret<Int>()             // source
                   .Ret<Bool>()            // left_smaller
                   .Attr<int64_t>("max_depth"));

JBOOST_HANDLER(jboost_find_category_leaves, FindCategoryLeavesImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<ffi::AnyBuffer>()  // columns
                   .Arg<Int>()             // feature
                   .Arg<Int>()             // threshold
                   .Arg<Bool>()            // missing_left
                   .Arg<UInt>()            // left_codes
                   .Arg<Bool>()            // skip
                   .Arg<Int>()             // leaf
                   .RemainingArgs()        // none
                   .Ret<Int>());           // leaf

JBOOST_HANDLER(jboost_find_leaves, FindLeavesImpl,
               ffi::Ffi::Bind()
                   .Ctx<ffi::ThreadPool>()
                   .Arg<ffi::AnyBuffer>()  // columns
                   .Arg<Int>()             // feature
                   .Arg<Int>()             // threshold
                   .Arg<Bool>()            // missing_left
                   .Arg<Bool>()            // skip
                   .Arg<Int>()             // leaf
                   .RemainingArgs()        // starts, rows, absent
                   .Ret<Int>());           // leaf

}  // namespace jboost
