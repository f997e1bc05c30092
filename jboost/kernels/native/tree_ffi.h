// SPDX-License-Identifier: Apache-2.0
// What the bindings of growing a whole tree share: limits and nodes.
#ifndef JBOOST_TREE_FFI_H_
#define JBOOST_TREE_FFI_H_

#include "ffi.h"
#include "tree.h"

namespace jboost {

// What a call's attributes say of its operands and results.
struct Options {
  bool limited, grouped, categorical;
};

// Seed, fractions, and the conditions of splits; then the number of columns that are
// features, those beyond being padding.
void ReadLimits(Buffers* buffers, TreeLimits* limits);

// The limits that not every tree has.
void ReadOptions(Buffers* buffers, const Options& options, int64_t num_columns,
                 TreeLimits* limits, CategoryLimits* categories);

// Whether the limits fit the columns; `named`: all columns must be features.
ffi::Error CheckLimits(const TreeLimits& limits, int64_t num_columns, bool named);

// The nodes of a tree, its left_codes and leaf_bounds being the last ones.
void ReadNodes(Buffers* buffers, Access access, int64_t num_nodes, TreeArrays* tree);
void ReadOptionalNodes(Buffers* buffers, Access access, int64_t num_nodes,
                       int64_t num_bins, const Options& options, TreeState* state);

ffi::Error CheckDepth(int64_t max_depth, int64_t num_slots);

}  // namespace jboost

#endif  // JBOOST_TREE_FFI_H_
