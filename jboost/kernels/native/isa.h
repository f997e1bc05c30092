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

// The copies of a loop table, one of each instruction set.
#define JBOOST_DECLARE_LOOPS(Loops) \
  namespace baseline {              \
  extern const Loops k##Loops;      \
  }                                 \
  namespace avx2 {                  \
  extern const Loops k##Loops;      \
  }                                 \
  namespace avx512 {                \
  extern const Loops k##Loops;      \
  }

// The copy to be used. A macro, because the tables have names of their own.
#ifdef JBOOST_X86
#define JBOOST_CHOOSE(Loops) \
  ChooseLoops(baseline::k##Loops, avx2::k##Loops, avx512::k##Loops)
#else
#define JBOOST_CHOOSE(Loops) baseline::k##Loops
#endif

}  // namespace jboost

#endif  // JBOOST_ISA_H_
