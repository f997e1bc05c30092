// SPDX-License-Identifier: Apache-2.0
#include "ffi.h"

#include <new>
#include <sstream>
#include <stdexcept>

namespace jboost {
namespace {

// The name of a type that kernels use.
const char* NameType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
      return "bool";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::U16:
      return "uint16";
    case ffi::DataType::U32:
      return "uint32";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::F32:
      return "float32";
    default:
      return "another type";
  }
}

template <class Sizes>
std::string Describe(ffi::DataType type, const Sizes& sizes) {
  std::ostringstream out;
  out << NameType(type) << " [";
  const char* separator = "";
  for (int64_t size : sizes) {
    out << separator << size;
    separator = ", ";
  }
  out << "]";
  return out.str();
}

bool Fits(const ffi::AnyBuffer& buffer, ffi::DataType type, const Shape& shape) {
  auto sizes = buffer.dimensions();
  return buffer.element_type() == type && Shape(sizes.begin(), sizes.end()) == shape;
}

}  // namespace

std::optional<ffi::AnyBuffer> Buffers::Next(Access access, int64_t ahead) const {
  if (access == Access::kResult) {
    size_t at = next_result_ + ahead;
    if (at >= results_.size()) return std::nullopt;
    auto buffer = results_.get<ffi::AnyBuffer>(at);
    if (buffer.has_error()) return std::nullopt;
    return **buffer;
  }
  size_t at = next_operand_ + ahead;
  if (at >= operands_.size()) return std::nullopt;
  auto buffer = operands_.get<ffi::AnyBuffer>(at);
  if (buffer.has_error()) return std::nullopt;
  return *buffer;
}

void* Buffers::Take(Access access, const char* name, ffi::DataType type,
                    const Shape& shape) {
  std::optional<ffi::AnyBuffer> buffer = Next(access, 0), other;
  if (access == Access::kInPlace) other = Next(Access::kResult, 0);
  if (access != Access::kResult) ++next_operand_;
  if (access != Access::kOperand) ++next_result_;
  if (!error_.empty()) return nullptr;
  bool fits = buffer.has_value() && Fits(*buffer, type, shape);
  if (!fits) {
    Fail(std::string(name) + " must be " + Describe(type, shape) + ", got " +
         (buffer.has_value() ? Describe(buffer->element_type(), buffer->dimensions())
                             : "nothing"));
  } else if (access == Access::kInPlace &&
             (!other.has_value() || !Fits(*other, type, shape) ||
              (buffer->element_count() > 0 &&
               buffer->untyped_data() != other->untyped_data()))) {
    Fail(std::string(name) + " must be updated in place: operand and result must be " +
         Describe(type, shape) + " at one address");
  }
  return error_.empty() ? buffer->untyped_data() : nullptr;
}

void Buffers::Fail(const std::string& message) {
  if (error_.empty()) error_ = message;
}

ffi::Error Buffers::Finish() {
  bool all = next_operand_ == operands_.size() && next_result_ == results_.size();
  Check(all, "the number of operands or results is wrong");
  return error_.empty() ? ffi::Error::Success() : Mismatch(error_);
}

namespace internal {

XLA_FFI_Error* MakeError(const XLA_FFI_CallFrame* frame, const std::exception& error) {
  // A vector that no memory could hold is an error of length.
  bool out_of_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                       dynamic_cast<const std::length_error*>(&error) != nullptr;
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = out_of_memory ? "jboost kernel: out of memory" : error.what();
  args.errc = out_of_memory ? XLA_FFI_Error_Code_RESOURCE_EXHAUSTED
                            : XLA_FFI_Error_Code_INTERNAL;
  return frame->api->XLA_FFI_Error_Create(&args);
}

#if defined(__SANITIZE_THREAD__)
void* CallOrder::Place() {
  static char place;
  return &place;
}
#endif

}  // namespace internal
}  // namespace jboost
