// SPDX-License-Identifier: Apache-2.0
#include "ffi.h"

#include <new>
#include <sstream>
#include <utility>

namespace jboost {
namespace {

// The name of a type that kernels use.
const char* NameType(ffi::DataType type) {
  using Type = ffi::DataType;
  constexpr std::pair<Type, const char*> kNames[] = {
      {Type::PRED, "bool"},  {Type::U8, "uint8"},  {Type::U16, "uint16"},
      {Type::U32, "uint32"}, {Type::S32, "int32"}, {Type::F32, "float32"}};
  for (const auto& [known, name] : kNames) {
    if (known == type) return name;
  }
  return "another type";
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
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_ + ahead);
    return buffer.has_value() ? std::optional(**buffer) : std::nullopt;
  }
  auto buffer = operands_.get<ffi::AnyBuffer>(next_operand_ + ahead);
  return buffer.has_value() ? std::optional(*buffer) : std::nullopt;
}

void* Buffers::Take(Access access, const char* name, ffi::DataType type,
                    const Shape& shape) {
  std::optional<ffi::AnyBuffer> buffer = Next(access, 0), other;
  if (access == Access::kInPlace) other = Next(Access::kResult, 0);
  if (access != Access::kResult) ++next_operand_;
  if (access != Access::kOperand) ++next_result_;
  if (!buffer.has_value() || !Fits(*buffer, type, shape)) {
    throw Mismatch(std::string(name) + " must be " + Describe(type, shape) + ", got " +
                   (buffer.has_value()
                        ? Describe(buffer->element_type(), buffer->dimensions())
                        : "nothing"));
  }
  if (access == Access::kInPlace &&
      (!other.has_value() || !Fits(*other, type, shape) ||
       (buffer->element_count() > 0 &&
        buffer->untyped_data() != other->untyped_data()))) {
    throw Mismatch(std::string(name) +
                   " must be updated in place: operand and result must be " +
                   Describe(type, shape) + " at one address");
  }
  return buffer->untyped_data();
}

void Buffers::Finish() const {
  bool all = next_operand_ == operands_.size() && next_result_ == results_.size();
  Require(all, "the number of operands or results is wrong");
  Require(num_attributes_ == attributes_.size(), "the number of attributes is wrong");
}

std::unique_ptr<ffi::Ffi> MakeHandler(Binding binding) {
  auto run = [binding](ffi::ThreadPool threads, ffi::RemainingArgs operands,
                       ffi::RemainingRets results, ffi::Dictionary attributes) {
    Pool pool;
    pool.num_threads = threads.num_threads();
    pool.schedule = [&threads](std::function<void()> task) {
      threads.Schedule(std::move(task));
    };
    Buffers buffers(operands, results, attributes);
    binding(buffers, pool);
    return ffi::Error::Success();
  };
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs()
      .To(run);
}

namespace internal {

XLA_FFI_Error* MakeError(const XLA_FFI_CallFrame* frame, const std::exception& error) {
  // A vector that no memory could hold is an error of length.
  bool out_of_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                       dynamic_cast<const std::length_error*>(&error) != nullptr;
  bool mismatch = dynamic_cast<const Mismatch*>(&error) != nullptr;
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = out_of_memory ? "jboost kernel: out of memory" : error.what();
  args.errc = out_of_memory ? XLA_FFI_Error_Code_RESOURCE_EXHAUSTED
              : mismatch    ? XLA_FFI_Error_Code_INVALID_ARGUMENT
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
