// SPDX-License-Identifier: Apache-2.0
#include "launch.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

namespace jboost {
namespace {

// The functions of the driver that are used, with the types that its ABI promises.
struct Driver {
  int (*Init)(unsigned);
  int (*GetErrorString)(int, const char**);
  int (*DriverGetVersion)(int*);
  int (*DeviceGetCount)(int*);
  int (*DeviceGetAttribute)(int*, int, int);
  int (*CtxGetDevice)(int*);
  int (*LibraryLoadData)(void**, const void*, void*, void**, unsigned, void*, void**,
                         unsigned);
  int (*LibraryGetKernel)(void**, void*, const char*);
  int (*KernelSetAttribute)(int, int, void*, int);
  int (*KernelGetFunction)(void**, void*);
  int (*MemsetD32Async)(uint64_t, unsigned, size_t, void*);
  int (*LaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, void*, void**, void**);
  std::string error;  // empty: all were found

  Driver() {
    const char* path = std::getenv("JBOOST_LIBCUDA");
    void* library = dlopen(path != nullptr ? path : "libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
      error = dlerror();
      return;
    }
    Find(library, "cuInit", &Init);
    Find(library, "cuGetErrorString", &GetErrorString);
    Find(library, "cuDriverGetVersion", &DriverGetVersion);
    Find(library, "cuDeviceGetCount", &DeviceGetCount);
    Find(library, "cuDeviceGetAttribute", &DeviceGetAttribute);
    Find(library, "cuCtxGetDevice", &CtxGetDevice);
    Find(library, "cuLibraryLoadData", &LibraryLoadData);
    Find(library, "cuLibraryGetKernel", &LibraryGetKernel);
    Find(library, "cuKernelSetAttribute", &KernelSetAttribute);
    Find(library, "cuKernelGetFunction", &KernelGetFunction);
    Find(library, "cuMemsetD32Async", &MemsetD32Async);
    Find(library, "cuLaunchKernel", &LaunchKernel);
    if (error.empty()) error = Say("cuInit", Init(0));
  }

  template <class Function>
  void Find(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    if (*function == nullptr && error.empty())
      error = std::string("the driver of the GPU has no ") + name +
              " (CUDA 12.0 or newer is needed)";
  }

  // Returns the message of a call; empty if it succeeded.
  std::string Say(const char* what, int code) const {
    if (code == 0) return "";
    const char* text = nullptr;
    GetErrorString(code, &text);
    return std::string(what) + ": " + (text != nullptr ? text : "unknown error") +
           " (CUDA error " + std::to_string(code) + ")";
  }
};

const Driver& GetDriver() {
  static const Driver* driver = new Driver();  // used until the process ends
  return *driver;
}

// cuDeviceGetAttribute: the compute capability.
constexpr int kMajor = 75, kMinor = 76;
// cuKernelSetAttribute: the greatest size of shared memory that a launch may ask for.
constexpr int kMaxSharedBytes = 8;

std::string FindArchitecture(const Driver& driver, int device, int* architecture) {
  int major = 0, minor = 0;
  std::string error = driver.Say("cuDeviceGetAttribute",
                                 driver.DeviceGetAttribute(&major, kMajor, device));
  if (error.empty())
    error = driver.Say("cuDeviceGetAttribute",
                       driver.DeviceGetAttribute(&minor, kMinor, device));
  *architecture = 10 * major + minor;
  return error;
}

// The compiled kernels, and what the driver made of them.
struct Kernels {
  std::mutex mutex;
  std::map<int, std::string> images;  // by architecture
  std::map<int, void*> libraries;     // the same
  // By device, name and size of shared memory.
  std::map<std::tuple<int, std::string, uint32_t>, void*> functions;
};

Kernels& GetKernels() {
  static Kernels* kernels = new Kernels();
  return *kernels;
}

#define JBOOST_DRIVER(name, ...)                                           \
  do {                                                                     \
    std::string failed = driver.Say("cu" #name, driver.name(__VA_ARGS__)); \
    if (!failed.empty()) return failed;                                    \
  } while (false)

std::string FindFunction(const Driver& driver, const Launch& launch, void** function) {
  int device = 0, architecture = 0;
  JBOOST_DRIVER(CtxGetDevice, &device);
  Kernels& kernels = GetKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  void*& known = kernels.functions[{device, launch.kernel, launch.shared_bytes}];
  if (known == nullptr) {
    std::string error = FindArchitecture(driver, device, &architecture);
    if (!error.empty()) return error;
    auto image = kernels.images.find(architecture);
    if (image == kernels.images.end())
      return "no kernels were compiled for GPUs of architecture " +
             std::to_string(architecture);
    void*& library = kernels.libraries[architecture];
    if (library == nullptr)
      JBOOST_DRIVER(LibraryLoadData, &library, image->second.data(), nullptr, nullptr,
                    0, nullptr, nullptr, 0);
    void *kernel = nullptr, *loaded = nullptr;
    JBOOST_DRIVER(LibraryGetKernel, &kernel, library, launch.kernel.c_str());
    JBOOST_DRIVER(KernelSetAttribute, kMaxSharedBytes,
                  static_cast<int>(launch.shared_bytes), kernel, device);
    JBOOST_DRIVER(KernelGetFunction, &loaded, kernel);
    known = loaded;
  }
  *function = known;
  return "";
}

}  // namespace

std::string PrepareLaunch(const Launch& launch) {
  const Driver& driver = GetDriver();
  if (!driver.error.empty()) return driver.error;
  void* function = nullptr;
  return FindFunction(driver, launch, &function);
}

std::string RunLaunch(void* stream, const Launch& launch,
                      const std::vector<Zeroed>& zeroed, void** arguments) {
  const Driver& driver = GetDriver();
  if (!driver.error.empty()) return driver.error;
  void* function = nullptr;
  std::string error = FindFunction(driver, launch, &function);
  if (!error.empty()) return error;
  for (const Zeroed& buffer : zeroed)
    if (buffer.bytes > 0)
      JBOOST_DRIVER(MemsetD32Async, reinterpret_cast<uint64_t>(buffer.data), 0,
                    buffer.bytes / 4, stream);
  if (launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0) return "";
  JBOOST_DRIVER(LaunchKernel, function, launch.grid[0], launch.grid[1], launch.grid[2],
                launch.threads, 1, 1, launch.shared_bytes, stream, arguments, nullptr);
  return "";
}

}  // namespace jboost

// Returns why kernels cannot be launched here; empty if they can. The text stays valid.
extern "C" __attribute__((visibility("default"))) const char* jboost_cuda_error() {
  return jboost::GetDriver().error.c_str();
}

// Returns the version of CUDA that the driver supports, 13 for 13.0; 0 without a driver.
extern "C" __attribute__((visibility("default"))) int jboost_cuda_version() {
  const jboost::Driver& driver = jboost::GetDriver();
  int version = 0;  // 1000 * major + 10 * minor
  if (!driver.error.empty() || driver.DriverGetVersion(&version) != 0) return 0;
  return version / 1000;
}

// Returns the architecture of GPU number `device`, 90 for 9.0; 0 if there is none.
extern "C" __attribute__((visibility("default"))) int jboost_cuda_architecture(
    int device) {
  const jboost::Driver& driver = jboost::GetDriver();
  int count = 0, architecture = 0;
  if (!driver.error.empty() || driver.DeviceGetCount(&count) != 0) return 0;
  if (device >= count) return 0;
  std::string error = jboost::FindArchitecture(driver, device, &architecture);
  return error.empty() ? architecture : 0;
}

// Keeps the compiled kernels for GPUs of an architecture.
extern "C" __attribute__((visibility("default"))) void jboost_cuda_load(
    int architecture, const char* image, int64_t bytes) {
  jboost::Kernels& kernels = jboost::GetKernels();
  std::lock_guard<std::mutex> lock(kernels.mutex);
  kernels.images.emplace(architecture, std::string(image, bytes));
}
