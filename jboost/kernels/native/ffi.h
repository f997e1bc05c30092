// SPDX-License-Identifier: Apache-2.0
// What the bindings of all kernels share: reading buffers, the thread pool, errors.
//
// A binding reads its attributes, and its buffers one after the other, each with its
// name, type and shape, so that a batched, transposed or misplaced buffer becomes an
// error. It then checks the values that the safety of memory depends on, and calls the
// kernel.
#ifndef JBOOST_FFI_H_
#define JBOOST_FFI_H_

#include <array>
#include <complex>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jboost {

namespace ffi = xla::ffi;

using Shape = std::vector<int64_t>;

// A call whose attributes or buffers do not hold what they must.
struct Mismatch : std::invalid_argument {
  explicit Mismatch(const std::string& what)
      : std::invalid_argument("jboost kernel: " + what) {}
};

inline void Require(bool condition, const char* expectation) {
  if (!condition) throw Mismatch(expectation);
}

// Where a buffer comes from: an operand, a result, or an operand and the result that
// overwrites it.
enum class Access { kOperand, kResult, kInPlace };

// The type of a buffer's elements. The kernels take booleans as bytes.
template <class Element>
constexpr ffi::DataType TypeOf() {
  if (std::is_same_v<Element, int32_t>) return ffi::DataType::S32;
  if (std::is_same_v<Element, uint32_t>) return ffi::DataType::U32;
  if (std::is_same_v<Element, uint16_t>) return ffi::DataType::U16;
  if (std::is_same_v<Element, float>) return ffi::DataType::F32;
  if (std::is_same_v<Element, std::complex<float>>) return ffi::DataType::C64;
  return std::is_same_v<Element, uint8_t> ? ffi::DataType::PRED
                                          : ffi::DataType::INVALID;
}

template <class Value>
Value ReadAttribute(const ffi::Dictionary& attributes, const char* name) {
  ffi::ErrorOr<Value> value = attributes.get<Value>(name);
  if (!value.has_value()) throw Mismatch(std::string(name) + " must be an attribute");
  return *value;
}

// Reads the buffers of a call in order, and its attributes; throws a Mismatch.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs operands, ffi::RemainingRets results,
          ffi::Dictionary attributes)
      : operands_(operands), results_(results), attributes_(attributes) {}

  int64_t Attribute(const char* name) {
    ++num_attributes_;
    return ReadAttribute<int64_t>(attributes_, name);
  }

  template <class Element>
  Element* Read(Access access, const char* name, const Shape& shape) {
    return static_cast<Element*>(Take(access, name, TypeOf<Element>(), shape));
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
    return *Operand<Element>(name, {});
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

  // The shape of the buffer that is read next, or after `ahead` others.
  template <size_t kRank>
  std::array<int64_t, kRank> NextShape(const char* name,
                                       Access access = Access::kOperand,
                                       int64_t ahead = 0) const {
    std::array<int64_t, kRank> sizes{};
    std::optional<ffi::AnyBuffer> next = Next(access, ahead);
    if (!next.has_value() || next->dimensions().size() != kRank) {
      throw Mismatch(std::string(name) + " must have rank " + std::to_string(kRank));
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
  bool NextIs(Access access, ffi::DataType type, int64_t ahead = 0) const {
    std::optional<ffi::AnyBuffer> next = Next(access, ahead);
    return next.has_value() && next->element_type() == type;
  }
  bool HasOperands() const { return next_operand_ < operands_.size(); }

  // Requires that everything was read.
  void Finish() const;

 private:
  std::optional<ffi::AnyBuffer> Next(Access access, int64_t ahead) const;
  void* Take(Access access, const char* name, ffi::DataType type, const Shape& shape);

  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  size_t next_operand_ = 0, next_result_ = 0, num_attributes_ = 0;
};

// Reads the operands of a call, and runs its kernel. The pool must not outlive the
// call. (Helper threads that start late do not use it.)
using Binding = void (*)(Buffers& buffers, const Pool& pool);

std::unique_ptr<ffi::Ffi> MakeHandler(Binding binding);

// Defines a handler under its C name, for ctypes to find.
#define JBOOST_HANDLER(name, binding)                                    \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name( \
      XLA_FFI_CallFrame* call_frame) {                                   \
    return CatchErrors(call_frame, [&] {                                 \
      static auto* handler = MakeHandler(binding).release();             \
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

// Runs `call`, which returns an XLA_FFI_Error*. Turns an exception into an error of
// XLA: running out of memory must not end the process.
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
