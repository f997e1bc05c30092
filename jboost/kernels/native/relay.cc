// SPDX-License-Identifier: Apache-2.0
// Calls another handler on arrays in the memory of the host.
//
// XLA compiles one program for each shape of its operands. The only operand of this
// handler is the address of a description of another call, so one program serves all
// handlers and all shapes. The other handler gets the same execution context, so it
// runs on XLA's threads, and it checks its operands as usual.
//
// The description is a list of 64-bit words: the address of the handler; the numbers of
// operands, results and attributes; for each operand, then for each result, its
// address, type, rank and shape; for each attribute, sorted by name, the address and
// length of its name, and its value.
#include <cstring>
#include <vector>

#include "ffi.h"

namespace jboost {
namespace {

struct Reader {
  const int64_t* word;

  int64_t Next() { return *word++; }

  void* NextAddress() { return reinterpret_cast<void*>(Next()); }

  std::vector<XLA_FFI_Buffer> NextBuffers(int64_t count) {
    std::vector<XLA_FFI_Buffer> buffers(count);
    for (XLA_FFI_Buffer& buffer : buffers) {
      buffer = {};
      buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      buffer.data = NextAddress();
      buffer.dtype = static_cast<XLA_FFI_DataType>(Next());
      buffer.rank = Next();
      buffer.dims = const_cast<int64_t*>(word);
      word += buffer.rank;
    }
    return buffers;
  }
};

template <class Value>
std::vector<void*> Addresses(std::vector<Value>& values) {
  std::vector<void*> addresses;
  for (Value& value : values) addresses.push_back(&value);
  return addresses;
}

XLA_FFI_Error* Relay(const XLA_FFI_CallFrame& outer, Reader description) {
  auto* handler = reinterpret_cast<XLA_FFI_Handler*>(description.NextAddress());
  int64_t num_operands = description.Next(), num_results = description.Next();
  int64_t num_attributes = description.Next();
  auto operands = description.NextBuffers(num_operands);
  auto results = description.NextBuffers(num_results);
  std::vector<int64_t> values(num_attributes);
  std::vector<XLA_FFI_ByteSpan> names(num_attributes);
  std::vector<XLA_FFI_Scalar> scalars(num_attributes);
  for (int64_t i = 0; i < num_attributes; ++i) {
    names[i].ptr = static_cast<const char*>(description.NextAddress());
    names[i].len = static_cast<size_t>(description.Next());
    values[i] = description.Next();
    scalars[i] = {XLA_FFI_DataType_S64, &values[i]};
  }
  std::vector<XLA_FFI_ArgType> operand_types(num_operands, XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(num_results, XLA_FFI_RetType_BUFFER);
  std::vector<XLA_FFI_AttrType> types(num_attributes, XLA_FFI_AttrType_SCALAR);
  auto operand_addresses = Addresses(operands), result_addresses = Addresses(results);
  auto scalar_addresses = Addresses(scalars), name_addresses = Addresses(names);
  XLA_FFI_CallFrame inner = outer;
  inner.args.size = num_operands;
  inner.args.types = operand_types.data();
  inner.args.args = operand_addresses.data();
  inner.rets.size = num_results;
  inner.rets.types = result_types.data();
  inner.rets.rets = result_addresses.data();
  inner.attrs.size = num_attributes;
  inner.attrs.types = types.data();
  inner.attrs.names = reinterpret_cast<XLA_FFI_ByteSpan**>(name_addresses.data());
  inner.attrs.attrs = scalar_addresses.data();
  return handler(&inner);
}

// The operand is the address of the description, in two words. Callers wait for the
// result.
void Check(Buffers& buffers, const Pool&) {
  buffers.Operand<uint32_t>("address", {2});
  uint32_t* done = buffers.Result<uint32_t>("done", {1});
  buffers.Finish();
  done[0] = 0;
}

XLA_FFI_Error* CheckAndRelay(XLA_FFI_CallFrame* call_frame) {
  static auto* check = MakeHandler(Check).release();
  XLA_FFI_Error* error = check->Call(call_frame);
  const XLA_FFI_Extension_Base* extension = call_frame->extension_start;
  bool asks_for_metadata =
      extension != nullptr && extension->type == XLA_FFI_Extension_Metadata;
  if (error != nullptr || asks_for_metadata) return error;
  auto* operand = static_cast<XLA_FFI_Buffer*>(call_frame->args.args[0]);
  int64_t address;
  std::memcpy(&address, operand->data, sizeof(address));
  return Relay(*call_frame, Reader{reinterpret_cast<const int64_t*>(address)});
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jboost_relay(
    XLA_FFI_CallFrame* call_frame) {
  return CatchErrors(call_frame, [&] { return CheckAndRelay(call_frame); });
}

}  // namespace jboost
