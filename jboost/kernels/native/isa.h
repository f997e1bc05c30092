// SPDX-License-Identifier: Apache-2.0
// Chooses which of the three copies of each loop is used, by the instruction set of the
// processor or the one that the user forces.
#ifndef JBOOST_ISA_H_
#define JBOOST_ISA_H_

namespace jboost {

enum class Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

Isa CurrentIsa();

// Chooses the copy of a loop table; Loops is a struct of function pointers.
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

// Declares the copies of a loop table, one for each instruction set.
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

// The copy to use. A macro, because each table has its own name.
#ifdef JBOOST_X86
#define JBOOST_CHOOSE(Loops) \
  ChooseLoops(baseline::k##Loops, avx2::k##Loops, avx512::k##Loops)
#else
#define JBOOST_CHOOSE(Loops) baseline::k##Loops
#endif

}  // namespace jboost

#endif  // JBOOST_ISA_H_
