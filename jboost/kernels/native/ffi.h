// SPDX-License-Identifier: Apache-2.0
// What the bindings of all kernels share: reading buffers, the thread pool, errors.
//
// A binding reads its buffers one after the other, each with its name, type and shape,
// so that a batched, transposed or misplaced buffer becomes an error. It then checks
// the values that the safety of memory depends on, and calls the kernel.
#ifndef JBOOST_FFI_H_
#define JBOOST_FFI_H_

#include <array>
#include <complex>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jboost {

namespace ffi = xla::ffi;

using Shape = std::vector<int64_t>;

// Where a buffer comes from: an operand, a result, or an operand and the result that
// overwrites it.
enum class Access { kOperand, kResult, kInPlace };

// The type of a buffer's elements.
template <class Element>
constexpr ffi::DataType kTypeOf = ffi::DataType::INVALID;
template <>
inline constexpr ffi::DataType kTypeOf<int32_t> = ffi::DataType::S32;
template <>
inline constexpr ffi::DataType kTypeOf<uint32_t> = ffi::DataType::U32;
template <>
inline constexpr ffi::DataType kTypeOf<uint16_t> = ffi::DataType::U16;
template <>
inline constexpr ffi::DataType kTypeOf<float> = ffi::DataType::F32;
template <>
inline constexpr ffi::DataType kTypeOf<std::complex<float>> = ffi::DataType::C64;
template <>  // booleans: the kernels take them as bytes
inline constexpr ffi::DataType kTypeOf<uint8_t> = ffi::DataType::PRED;

// Reads the buffers of a call in order. The first mismatch is kept as the error of the
// call; from then on buffers are null and shapes are zeros. So a binding reads
// everything first, calls Finish once, and only then uses what it has read.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs operands, ffi::RemainingRets results)
      : operands_(operands), results_(results) {}

  template <class Element>
  Element* Read(Access access, const char* name, const Shape& shape) {
    return static_cast<Element*>(Take(access, name, kTypeOf<Element>, shape));
  }
  template <class Element>
  const Element* Operand(const char* name, const Shape& shape) {
    return Read<Element>(Access::kOperand, name, shape);
  }
  template <class Element>
  Element* Result(const char* name, const Shape& shape) {
    return Read<Element>(Access::kResult, name, shape);
  }
  template <class Element>
  Element* InPlace(const char* name, const Shape& shape) {
    return Read<Element>(Access::kInPlace, name, shape);
  }
  template <class Element>
  Element Scalar(const char* name) {
    const Element* value = Operand<Element>(name, {});
    return value == nullptr ? Element{} : *value;
  }
  const uint8_t* Bytes(const char* name, const Shape& shape) {
    return static_cast<uint8_t*>(
        Take(Access::kOperand, name, ffi::DataType::U8, shape));
  }
  // Null if there is no operand left.
  template <class Element>
  const Element* Optional(const char* name, const Shape& shape) {
    return HasOperands() ? Operand<Element>(name, shape) : nullptr;
  }
  // Codes are uint8 or, if `wide`, uint16.
  void* Codes(Access access, const char* name, const Shape& shape, bool wide) {
    ffi::DataType type = wide ? ffi::DataType::U16 : ffi::DataType::U8;
    return Take(access, name, type, shape);
  }

  // The shape of the buffer that is read next; zeros (and an error) if it has another
  // rank. `ahead`: buffers in between.
  template <size_t kRank>
  std::array<int64_t, kRank> NextShape(Access access, const char* name,
                                       int64_t ahead = 0) {
    std::array<int64_t, kRank> sizes{};
    std::optional<ffi::AnyBuffer> next = Next(access, ahead);
    if (!next.has_value() || next->dimensions().size() != kRank) {
      Fail(std::string(name) + " must have rank " + std::to_string(kRank));
      return sizes;
    }
    for (size_t axis = 0; axis < kRank; ++axis) sizes[axis] = next->dimensions()[axis];
    return sizes;
  }
  // 0 where there is no operand left.
  size_t NextRank() const {
    std::optional<ffi::AnyBuffer> next = Next(Access::kOperand, 0);
    return next.has_value() ? next->dimensions().size() : 0;
  }
  bool NextIsWide(Access access) const { return NextIs(access, ffi::DataType::U16); }
  bool NextIs(Access access, ffi::DataType type) const {
    std::optional<ffi::AnyBuffer> next = Next(access, 0);
    return next.has_value() && next->element_type() == type;
  }
  bool HasOperands() const { return next_operand_ < operands_.size(); }

  void Check(bool condition, const char* expectation) {
    if (!condition) Fail(expectation);
  }
  // The first error; also if a buffer was not read.
  ffi::Error Finish();

 private:
  std::optional<ffi::AnyBuffer> Next(Access access, int64_t ahead) const;
  void* Take(Access access, const char* name, ffi::DataType type, const Shape& shape);
  void Fail(const std::string& message);

  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  size_t next_operand_ = 0, next_result_ = 0;
  std::string error_;  // empty: none
};

inline ffi::Error Mismatch(const std::string& what) {
  return ffi::Error::InvalidArgument("jboost kernel: " + what);
}

// Returns an error from a function whose buffers do not hold what they must.
#define JBOOST_CHECK(condition, what)        \
  do {                                       \
    if (!(condition)) return Mismatch(what); \
  } while (false)

// Returns the error, if any, of a function that returns one.
#define JBOOST_RETURN_IF_ERROR(expression)                              \
  do {                                                                  \
    if (ffi::Error error = (expression); error.failure()) return error; \
  } while (false)

// The result holds a reference to `threads`, so it must not outlive the call. (Helper
// threads that start late do not use it.)
inline Pool MakePool(ffi::ThreadPool& threads) {
  Pool pool;
  pool.num_threads = threads.num_threads();
  pool.schedule = [&threads](std::function<void()> task) {
    threads.Schedule(std::move(task));
  };
  return pool;
}

// What all bindings take; attributes follow.
inline auto Bind() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets();
}

// Runs `call`, which returns an XLA_FFI_Error*. Turns an exception into an error of
// XLA: running out of memory must not end the process.
template <class Call>
XLA_FFI_Error* CatchErrors(const XLA_FFI_CallFrame* frame, const Call& call);

// Defines a handler under its C name, for ctypes to find.
#define JBOOST_HANDLER(name, implementation, binding)                    \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name( \
      XLA_FFI_CallFrame* call_frame) {                                   \
    return CatchErrors(call_frame, [&] {                                 \
      static auto* handler = (binding).To(implementation).release();     \
      return handler->Call(call_frame);                                  \
    });                                                                  \
  }

namespace internal {

XLA_FFI_Error* MakeError(const XLA_FFI_CallFrame* frame, const std::exception& error);

// Orders calls for ThreadSanitizer, which does not see how XLA does it: what one call
// has written the next one may read. (Within a call nothing is ordered by this.)
class CallOrder {
#if defined(__SANITIZE_THREAD__)
 public:
  CallOrder() { __tsan_acquire(Place()); }
  ~CallOrder() { __tsan_release(Place()); }

 private:
  static void* Place();
#else
 public:
  CallOrder() {}  // not defaulted, so that the object counts as used
#endif
};

}  // namespace internal

template <class Call>
XLA_FFI_Error* CatchErrors(const XLA_FFI_CallFrame* frame, const Call& call) {
  internal::CallOrder order;
  try {
    return call();
  } catch (const std::exception& error) {
    return internal::MakeError(frame, error);
  }
}

}  // namespace jboost

#endif  // JBOOST_FFI_H_
