// SPDX-License-Identifier: Apache-2.0
// What the bindings of growing share: codes and the state of the rows.
#ifndef JBOOST_GROW_FFI_H_
#define JBOOST_GROW_FFI_H_

#include <vector>

#include "ffi.h"
#include "grow.h"

namespace jboost {

// Codes as a call gets them. `codes.sparse` points to `sparse`, so a Source stays where
// it is.
struct Source {
  Source() = default;
  Source(const Source&) = delete;

  Codes codes{};
  SparseColumns sparse{};
  int64_t num_entries = 0;  // of sparse codes
};

// Columns [F, N]; of a sparse matrix the stored codes [1, E].
void ReadColumns(Buffers* buffers, Source* source);

// The last operands of a call on sparse codes: where each feature's entries start,
// their rows, and the codes of what is not stored. A call on columns [F, N] has none.
void ReadEntries(Buffers* buffers, int64_t num_rows, Source* source);

// Whether the entries of each feature lie among those that are stored.
ffi::Error CheckEntries(const Source& source);

// The state of the rows, which `start` makes and the other calls take: words, index and
// segments.
Rows ReadRows(Buffers* buffers, Access access, int64_t num_rows);

// Whether every segment lies in its chunk.
ffi::Error CheckRows(const Rows& rows, int64_t num_rows);

// Whether the splits of a level are such that rows and the tree can be written by them.
ffi::Error CheckSplits(const Splits& splits, const int32_t* position, int64_t num_slots,
                       int64_t level, int64_t max_depth, int64_t num_features);

// Codes by row, [blocks, N, width]. The number of features comes from elsewhere.
void ReadPacked(Buffers* buffers, Access access, Codes* codes, void** packed);

// Codes by feature or by row: either serves to route rows. The features of codes by row
// include padding.
void ReadLayout(Buffers* buffers, Source* source);

// Whether packed codes are those of the features.
void CheckBlocks(Buffers* buffers, const Codes& codes);

}  // namespace jboost

#endif  // JBOOST_GROW_FFI_H_
