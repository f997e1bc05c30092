// SPDX-License-Identifier: Apache-2.0
// Which instruction set the loops use. In: what the processor has, and what the user
// forces. Out: one of three copies of each loop.
#ifndef JBOOST_ISA_H_
#define JBOOST_ISA_H_

namespace jboost {

enum class Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

Isa CurrentIsa();

// Picks the copy of a loop table: Loops is a struct of function pointers.
template <class Loops>
const Loops& ChooseLoops(const Loops& baseline, const Loops& avx2,
                         const Loops& avx512) {
  switch (CurrentIsa()) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    default:
      return baseline;
  }
}

}  // namespace jboost

#endif  // JBOOST_ISA_H_
