// Memory of the imitated GPU, in host memory, and copies.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "device.h"

namespace imitated {
namespace {

auto& blocks = *new std::map<uintptr_t, Block>;
size_t used_bytes = 0;

void* take(size_t bytes, bool on_host) {
  // Takes physical memory at the first write.
  void* address =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  blocks[reinterpret_cast<uintptr_t>(address)] = {bytes, on_host};
  if (!on_host) used_bytes += bytes;
  return address;
}

cudaError_t give_back(void* address, const char* call) {
  Guard guard(lock);
  if (is_forbidden(call)) return cudaErrorStreamCaptureUnsupported;
  if (auto error = wait_until_idle(guard)) return error;
  auto found = blocks.find(reinterpret_cast<uintptr_t>(address));
  if (found == blocks.end()) return address ? fail(cudaErrorInvalidValue, call) : cudaSuccess;
  if (!found->second.on_host) used_bytes -= found->second.bytes;
  munmap(address, found->second.bytes);
  blocks.erase(found);
  return cudaSuccess;
}

bool is_within(const void* address, size_t bytes) {
  const Block* block = block_at(address);
  return !block || block == block_at(static_cast<const char*>(address) + (bytes ? bytes - 1 : 0));
}

cudaError_t copy(void* target, const void* source, size_t bytes, CUstream handle, bool blocks_caller) {
  Guard guard(lock);
  if (auto error = refused("cudaMemcpy")) return error;
  CUstream stream = stream_of(handle);
  if (blocks_caller && is_forbidden("cudaMemcpy")) return cudaErrorStreamCaptureUnsupported;
  if (!is_within(target, bytes) || !is_within(source, bytes))
    return fail(cudaErrorInvalidValue, "a copy leaves its allocation");
  const bool is_pageable = !block_at(target) || !block_at(source);
  if (is_pageable && stream->capture)
    return fail(cudaErrorStreamCaptureUnsupported, "a pageable copy in a capture");
  const cudaError_t error = enqueue(stream, "copy", [=] { std::memcpy(target, source, bytes); });
  return !error && (blocks_caller || is_pageable) ? wait_for(guard, stream->last) : error;
}

}  // namespace

size_t total_bytes() {
  const char* gib = std::getenv("IMITATED_GPU_GIB");
  return static_cast<size_t>((gib ? std::atof(gib) : 4.0) * (1 << 30));
}

const Block* block_at(const void* address) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  auto next = blocks.upper_bound(number);
  if (next == blocks.begin()) return nullptr;
  --next;
  return number < next->first + next->second.bytes ? &next->second : nullptr;
}

}  // namespace imitated

using namespace imitated;

EXPORT cudaError_t cudaMalloc(void** address, size_t bytes) {
  Guard guard(lock);
  if (auto error = refused("cudaMalloc")) return error;
  if (is_forbidden("cudaMalloc")) return cudaErrorStreamCaptureUnsupported;
  const size_t page = size_t{2} << 20;
  bytes = (bytes + page - 1) / page * page;
  if (used_bytes + bytes > total_bytes()) return fail(cudaErrorMemoryAllocation, "out of memory");
  *address = take(bytes, false);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  Guard guard(lock);
  if (auto error = refused("cudaHostAlloc")) return error;
  if (is_forbidden("cudaHostAlloc")) return cudaErrorStreamCaptureUnsupported;
  *address = take((bytes + 4095) / 4096 * 4096, true);
  return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void* address) { return give_back(address, "cudaFree"); }

EXPORT cudaError_t cudaFreeHost(void* address) { return give_back(address, "cudaFreeHost"); }

EXPORT cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  Guard guard(lock);
  if (auto error = refused("cudaHostRegister")) return error;
  if (block_at(address)) return fail(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister");
  blocks[reinterpret_cast<uintptr_t>(address)] = {bytes, true};
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* address) {
  Guard guard(lock);
  const bool is_known = blocks.erase(reinterpret_cast<uintptr_t>(address)) == 1;
  return is_known ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered, "cudaHostUnregister");
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all) {
  Guard guard(lock);
  if (auto error = refused("cudaMemGetInfo")) return error;
  *all = total_bytes();
  *free_bytes = *all - used_bytes;
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Guard guard(lock);
  *attributes = {};
  attributes->device = -2;
  const Block* block = block_at(address);
  if (!block) return cudaSuccess;
  attributes->type = block->on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = 0;
  attributes->devicePointer = const_cast<void*>(address);
  attributes->hostPointer = block->on_host ? const_cast<void*>(address) : nullptr;
  return cudaSuccess;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* host, unsigned) {
  *device = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  return copy(target, source, bytes, nullptr, true);
}

EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  return copy(target, source, bytes, stream, false);
}

EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  Guard guard(lock);
  if (auto error = refused("cudaMemsetAsync")) return error;
  if (!block_at(target) || !is_within(target, bytes))
    return fail(cudaErrorInvalidValue, "cudaMemset leaves its allocation");
  return enqueue(stream, "memset", [=] { std::memset(target, value, bytes); });
}
