// SPDX-License-Identifier: Apache-2.0
// Bindings of the sums of sparse.h; what else it does is bound with its dense like.
#include "sparse.h"

#include <vector>

#include "ffi.h"
#include "grow_ffi.h"

namespace jboost {
namespace {

// Reads the four arrays of sparse codes.
ffi::Error GetEntries(Int starts, Int rows, ffi::AnyBuffer codes, ffi::AnyBuffer absent,
                      int64_t num_rows, SparseColumns* sparse, Codes* out) {
  JBOOST_CHECK(AreCodes(codes, 1), "codes must be [E]");
  return MakeSparse(codes, codes.dimensions()[0], starts, rows, absent, num_rows,
                    sparse, out);
}

ffi::Error HistogramImpl(ffi::ThreadPool threads, Int starts, Int rows,
                         ffi::AnyBuffer codes, ffi::AnyBuffer absent, Int channels,
                         Int node, ffi::Result<Int> sums) {
  JBOOST_CHECK(channels.dimensions().size() == 2, "channels must be [N, C]");
  int64_t num_rows = channels.dimensions()[0];
  SparseColumns sparse;
  Codes all{};
  ffi::Error error = GetEntries(starts, rows, codes, absent, num_rows, &sparse, &all);
  if (error.failure()) return error;
  JBOOST_CHECK(Has(node.dimensions(), {num_rows}), "node must be [N]");
  auto shape = sums->dimensions();
  JBOOST_CHECK(shape.size() == 4 && shape[1] == all.num_features &&
                   shape[3] == channels.dimensions()[1],
               "sums must be [M, F, B, C]");
  BuildSparseHistogram(MakePool(threads), all, channels.typed_data(), shape[3],
                       node.typed_data(), shape[0], shape[2], sums->typed_data());
  return ffi::Error::Success();
}

// What both sums begin with.
ffi::Error GetSums(Int starts, Int entry_rows, ffi::AnyBuffer entries,
                   ffi::AnyBuffer absent, Int words, Index index, Int segments,
                   Int min_count, Int sums, Int room, SparseColumns* sparse,
                   Codes* codes, Rows* rows, Histograms* histograms) {
  JBOOST_CHECK(words.dimensions().size() == 2, "words must be [N, 2]");
  int64_t num_rows = words.dimensions()[0];
  ffi::Error error =
      GetEntries(starts, entry_rows, entries, absent, num_rows, sparse, codes);
  if (error.failure()) return error;
  error = GetSegments(num_rows, words, index, segments, rows);
  if (error.failure()) return error;
  JBOOST_CHECK(min_count.dimensions().size() == 0, "min_count must be a scalar");
  JBOOST_CHECK(Has(room.dimensions(), {num_rows, 4}), "room must be [N, 4]");
  return GetHistograms(sums, *rows, codes->num_features, *min_count.typed_data() > 1,
                       histograms);
}

SparseRow* Room(Int& room) { return reinterpret_cast<SparseRow*>(room.typed_data()); }

ffi::Error SumRootImpl(ffi::ThreadPool threads, Int starts, Int entry_rows,
                       ffi::AnyBuffer entries, ffi::AnyBuffer absent, Int words,
                       Index index, Int segments, Int min_count, ffi::Result<Int> sums,
                       ffi::Result<Int> room) {
  SparseColumns sparse;
  Codes codes{};
  Rows rows;
  Histograms histograms;
  ffi::Error error =
      GetSums(starts, entry_rows, entries, absent, words, index, segments, min_count,
              *sums, *room, &sparse, &codes, &rows, &histograms);
  if (error.failure()) return error;
  NodeSum root{0, 0, -1};
  SumSparseNodes(MakePool(threads), codes, rows, &root, 1, histograms, Room(*room));
  return ffi::Error::Success();
}

ffi::Error SumChildrenImpl(ffi::ThreadPool threads, Int starts, Int entry_rows,
                           ffi::AnyBuffer entries, ffi::AnyBuffer absent, Int words,
                           Index index, Int segments, Int min_count, Int source,
                           Bool left_smaller, Int old_place, Int old_sums,
                           ffi::Result<Int> place, ffi::Result<Int> sums,
                           ffi::Result<Int> room) {
  SparseColumns sparse;
  Codes codes{};
  Rows rows;
  Histograms histograms;
  ffi::Error error =
      GetSums(starts, entry_rows, entries, absent, words, index, segments, min_count,
              *sums, *room, &sparse, &codes, &rows, &histograms);
  if (error.failure()) return error;
  JBOOST_CHECK(old_sums.typed_data() == sums->typed_data(), "sums must be aliased");
  std::vector<NodeSum> nodes;
  error = PlaceChildren(rows.num_slots, source, left_smaller, old_place, *place, &nodes);
  if (error.failure()) return error;
  SumSparseNodes(MakePool(threads), codes, rows, nodes.data(),
                 static_cast<int64_t>(nodes.size()), histograms, Room(*room));
  return ffi::Error::Success();
}

}  // namespace

JBOOST_HANDLER(jboost_sparse_histogram, HistogramImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Int>()             // starts
                                  .Arg<Int>()             // rows
                                  .Arg<ffi::AnyBuffer>()  // codes
                                  .Arg<ffi::AnyBuffer>()  // absent
                                  .Arg<Int>()             // channels
                                  .Arg<Int>()             // node
                                  .Ret<Int>());           // sums

JBOOST_HANDLER(jboost_sparse_sum_root, SumRootImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Int>()             // starts
                                  .Arg<Int>()             // rows
                                  .Arg<ffi::AnyBuffer>()  // codes
                                  .Arg<ffi::AnyBuffer>()  // absent
                                  .Arg<Int>()             // words
                                  .Arg<Index>()           // index
                                  .Arg<Int>()             // segments
                                  .Arg<Int>()             // min_count
                                  .Ret<Int>()             // sums
                                  .Ret<Int>());           // room

JBOOST_HANDLER(jboost_sparse_sum_children, SumChildrenImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Int>()             // starts
                                  .Arg<Int>()             // rows
                                  .Arg<ffi::AnyBuffer>()  // codes
                                  .Arg<ffi::AnyBuffer>()  // absent
                                  .Arg<Int>()             // words
                                  .Arg<Index>()           // index
                                  .Arg<Int>()             // segments
                                  .Arg<Int>()             // min_count
                                  .Arg<Int>()             // source
                                  .Arg<Bool>()            // left_smaller
                                  .Arg<Int>()             // place
                                  .Arg<Int>()             // sums
                                  .Ret<Int>()             // place
                                  .Ret<Int>()             // sums
                                  .Ret<Int>());           // room

}  // namespace jboost
