// Properties of the imitated GPU, kernels (which compute nothing), and driver functions except streams.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <unordered_map>

#include "device.h"

using namespace imitated;

namespace {

const int capability = static_cast<int>(setting("IMITATED_GPU_CAPABILITY", 90));
const int num_sms = static_cast<int>(setting("IMITATED_GPU_SMS", 132));
const int l2_bytes = 50 << 20;
const int shared_bytes = 49152, shared_bytes_optin = 232448;
auto& kernel_names = *new std::unordered_map<const void*, std::string>;
thread_local std::vector<std::tuple<dim3, dim3, size_t, cudaStream_t>> launch_settings;

int attribute(int which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return capability / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return capability % 10;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return num_sms;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return shared_bytes;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return shared_bytes_optin;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return l2_bytes;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return 1000000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return 1000000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return 1024;
    default:
      return 0;
  }
}

cudaError_t launch(const char* name, dim3 grid, dim3 block, cudaStream_t stream) {
  const bool is_possible = grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535 && block.x &&
                           block.x * block.y * block.z <= 1024;
  if (auto error = refused("cudaLaunchKernel")) return error;
  if (!is_possible) return fail(cudaErrorInvalidConfiguration, name);
  return enqueue(stream, name);
}

const char* kernel_name(const void* function) {
  auto found = kernel_names.find(function);
  return found == kernel_names.end() ? "a kernel" : found->second.c_str();
}

}  // namespace

// Kernels of libraries that were compiled with nvcc

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*,
                                   void*, void*, int*) {
  kernel_names[function] = name;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  launch_settings.emplace_back(grid, block, shared, stream);
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  std::tie(*grid, *block, *shared, *static_cast<cudaStream_t*>(stream)) = launch_settings.back();
  launch_settings.pop_back();
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t,
                                      cudaStream_t stream) {
  Guard guard(lock);
  return launch(kernel_name(kernel), grid, block, stream);
}

EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t,
                                    cudaStream_t stream) {
  Guard guard(lock);
  return launch(kernel_name(function), grid, block, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  Guard guard(lock);
  return launch(kernel_name(function), config->gridDim, config->blockDim, config->stream);
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = capability;
  attributes->maxDynamicSharedSizeBytes = shared_bytes_optin;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int,
                                                                          size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}

// The device

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice, "there is one device");
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(static_cast<int>(which));
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "an imitated GPU");
  properties->totalGlobalMem = total_bytes();
  properties->major = capability / 10;
  properties->minor = capability % 10;
  properties->multiProcessorCount = num_sms;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsPerMultiProcessor = capability == 75 ? 1024 : 2048;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = shared_bytes;
  properties->sharedMemPerBlockOptin = properties->sharedMemPerMultiprocessor = shared_bytes_optin;
  properties->l2CacheSize = l2_bytes;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = properties->concurrentKernels = 1;
  return cudaSuccess;
}

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorLaunchTimeout:
      return "the launch timed out and was terminated";
    default:
      return "an error of the imitated GPU";
  }
}

EXPORT const char* cudaGetErrorName(cudaError_t) { return "imitatedError"; }

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// cuda-bindings finds the driver's functions by this call.
EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                                    CUdriverProcAddressQueryResult* result) {
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion(name, function, 0, 0, &found);
  const bool is_there = found == cudaDriverEntryPointSuccess;
  if (result) *result = is_there ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return is_there ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// The driver: contexts, and slices

static const auto context = reinterpret_cast<CUcontext>(8);

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

EXPORT CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* current) {
  *current = context;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

EXPORT CUresult cuDeviceGetDevResource(CUdevice, CUdevResource* resource, CUdevResourceType) {
  std::memset(resource, 0, sizeof *resource);
  resource->type = CU_DEV_RESOURCE_TYPE_SM;
  resource->sm.smCount = num_sms;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevSmResourceSplitByCount(CUdevResource* part, unsigned* count, const CUdevResource* whole,
                                            CUdevResource* rest, unsigned, unsigned least) {
  const unsigned wanted = (least + 7) / 8 * 8;  // Hopper allocates multiprocessors by 8
  if (wanted > whole->sm.smCount) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  *part = *rest = *whole;
  part->sm.smCount = wanted;
  rest->sm.smCount -= wanted;
  *count = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* descriptor, CUdevResource*, unsigned) {
  *descriptor = reinterpret_cast<CUdevResourceDesc>(8);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxCreate(CUgreenCtx* green, CUdevResourceDesc, CUdevice, unsigned) {
  *green = reinterpret_cast<CUgreenCtx>(8);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx) { return CUDA_SUCCESS; }

EXPORT CUresult cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx, unsigned, int) {
  *stream = new CUstream_st;
  (*stream)->in_slice = true;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx* green) {
  *green = stream_of(stream)->in_slice ? reinterpret_cast<CUgreenCtx>(8) : nullptr;
  return CUDA_SUCCESS;
}
