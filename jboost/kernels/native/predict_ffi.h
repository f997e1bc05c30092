// SPDX-License-Identifier: Apache-2.0
// What the bindings of prediction and of SHAP values share: the rows and the trees.
#ifndef JBOOST_PREDICT_FFI_H_
#define JBOOST_PREDICT_FFI_H_

#include "ffi.h"
#include "predict.h"

namespace jboost {

// Reads the operands that all these calls begin with: the matrix, its categories and
// the structure of the trees. The matrix is flat; the number of its rows comes from the
// result.
void ReadModel(Buffers* buffers, int64_t num_features, bool by_column,
               int64_t max_depth, Matrix* matrix, Ensemble* model);

// Reads the leaf values, whose shape says how many scores there are; until then there
// is one for each tree of a round.
void ReadLeaves(Buffers* buffers, Ensemble* model);

// Reads the leaf values and the initial scores.
void ReadValues(Buffers* buffers, Ensemble* model);

// Checks that the matrix has `num_rows` rows, and what the safety of walking through
// the trees depends on. Calls Finish.
ffi::Error FinishModel(Buffers* buffers, int64_t num_rows, Matrix* matrix,
                       const Ensemble& model);

}  // namespace jboost

#endif  // JBOOST_PREDICT_FFI_H_
