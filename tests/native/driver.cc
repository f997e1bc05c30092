// SPDX-License-Identifier: Apache-2.0
// Stands in for libcuda and libnvrtc, for tests: "compiles" by handing the source back,
// and runs kernels on threads of the host.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "device.h"
//
#include "histogram.cu"
#include "kinks.cu"
#include "packed_histogram.cu"
#include "predict.cu"
#include "route.cu"
#include "sample.cu"
#include "search.cu"
#include "search_categories.cu"
#include "sums.cu"

namespace {

struct Kernel {
  void (*run)(void** arguments);
  int shared_bytes = 0;  // what a launch may ask for
};

template <class... Types, size_t... kIndices>
void CallKernel(void (*kernel)(Types...), void** arguments,
                std::index_sequence<kIndices...>) {
  kernel(*static_cast<std::remove_reference_t<Types>*>(arguments[kIndices])...);
}

template <auto kKernel>
struct Runner;
template <class... Types, void (*kKernel)(Types...)>
struct Runner<kKernel> {
  static void Run(void** arguments) {
    CallKernel(kKernel, arguments, std::index_sequence_for<Types...>());
  }
};

#define KERNEL(name)              \
  {                               \
    #name, { Runner<&name>::Run } \
  }
std::map<std::string, Kernel> kernels = {
    KERNEL(histogram_u8_2),
    KERNEL(histogram_u8_3),
    KERNEL(histogram_u16_2),
    KERNEL(histogram_u16_3),
    KERNEL(packed_histogram_2),
    KERNEL(packed_histogram_3),
    KERNEL(count_nodes),
    KERNEL(list_nodes),
    KERNEL(search_2),
    KERNEL(search_3),
    KERNEL(search_limited_2),
    KERNEL(search_limited_3),
    KERNEL(search_categories_2),
    KERNEL(search_categories_3),
    KERNEL(search_categories_limited_2),
    KERNEL(search_categories_limited_3),
    KERNEL(sample_features),
    KERNEL(route_u8),
    KERNEL(route_u16),
    KERNEL(predict),
    KERNEL(find_leaves),
    KERNEL(sum_by_key),
    KERNEL(sum_terms),
    KERNEL(sum_terms_by_key),
    KERNEL(find_kinds),
    KERNEL(sum_kinks),
    KERNEL(sum_kinks_by_digit),
};

// Errors of the driver, and of the compiler.
constexpr int kInvalidValue = 1, kNotFound = 500;

std::mutex one_launch;
std::string source;
const char kImage[] = "image";

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }

int cuGetErrorString(int code, const char** text) {
  *text = code == kNotFound ? "named symbol not found" : "invalid argument";
  return 0;
}

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device != 0) return kInvalidValue;
  *value = attribute == 75 ? 9 : 0;  // compute capability 9.0
  return 0;
}

int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}

int cuLibraryLoadData(void** library, const void* code, void*, void**, unsigned, void*,
                      void**, unsigned) {
  *library = &kernels;
  return std::strcmp(static_cast<const char*>(code), kImage) == 0 ? 0 : kInvalidValue;
}

int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  auto found = kernels.find(name);
  if (found == kernels.end()) return kNotFound;
  *kernel = &found->second;
  return 0;
}

int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  constexpr int kMostOnHopper = 227 * 1024;
  if (attribute != 8 || device != 0 || value > kMostOnHopper) return kInvalidValue;
  static_cast<Kernel*>(kernel)->shared_bytes = value;
  return 0;
}

int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return 0;
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads,
                   unsigned, unsigned, unsigned shared, void*, void** arguments,
                   void**) {
  auto* kernel = static_cast<Kernel*>(function);
  constexpr int kAlways = 48 * 1024;  // without setting the attribute
  const int most = std::max(kAlways, kernel->shared_bytes);
  if (x == 0 || y == 0 || z == 0 || threads == 0 || static_cast<int>(shared) > most)
    return kInvalidValue;
  std::lock_guard<std::mutex> lock(one_launch);
  device::launch({x, y, z}, static_cast<int>(shared), [=] { kernel->run(arguments); });
  return 0;
}

const char* nvrtcGetErrorString(int) { return "compilation failed"; }

int nvrtcVersion(int* major, int* minor) {
  *major = 0, *minor = 0;
  return 0;
}

int nvrtcCreateProgram(void** program, const char* text, const char*, int, const char**,
                       const char**) {
  source = text;
  *program = &source;
  return 0;
}

int nvrtcDestroyProgram(void** program) {
  *program = nullptr;
  return 0;
}

int nvrtcGetNumSupportedArchs(int* number) {
  *number = 2;
  return 0;
}

int nvrtcGetSupportedArchs(int* architectures) {
  architectures[0] = 80, architectures[1] = 90;
  return 0;
}

// A program that holds the word #error does not compile.
int nvrtcCompileProgram(void*, int, const char**) {
  return source.find("#error") == std::string::npos ? 0 : 6;
}

int nvrtcGetProgramLogSize(void*, size_t* size) {
  *size = sizeof "no log";
  return 0;
}

int nvrtcGetProgramLog(void*, char* log) {
  std::strcpy(log, "no log");
  return 0;
}

int nvrtcGetCUBINSize(void*, size_t* size) {
  *size = sizeof kImage;
  return 0;
}

int nvrtcGetCUBIN(void*, char* code) {
  std::memcpy(code, kImage, sizeof kImage);
  return 0;
}

}  // extern "C"
