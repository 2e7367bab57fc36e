// Streams, their memory operations, and events.
#include <algorithm>
#include <chrono>
#include <utility>

#include "device.h"

namespace imitated {
namespace {

CUstream_st default_stream;

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

cudaError_t record(CUevent event, CUstream handle, unsigned flags) {
  Guard guard(lock);
  if (auto error = refused("cudaEventRecord")) return error;
  CUstream stream = stream_of(handle);
  event->is_recorded = true;
  if (flags & cudaEventRecordExternal) {
    if (!stream->capture) return fail(cudaErrorInvalidValue, "an external record outside of a capture");
    return enqueue(stream, "external record", [time = event->time_ms] { *time = now_ms(); });
  }
  event->capture = stream->capture;
  event->captured_nodes = stream->captured_last;
  if (stream->capture) return cudaSuccess;
  event->time_ms = std::make_shared<double>(-1.0);
  note_call("record");
  stream->last = submit(stream->number, "record", [time = event->time_ms] { *time = now_ms(); }, nullptr,
                        {stream->last});
  event->operation = stream->last;
  return cudaSuccess;
}

}  // namespace

CUstream stream_of(CUstream handle) {
  const bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? &default_stream : handle;
}

cudaError_t enqueue(CUstream handle, const char* name, std::function<void()> run,
                    std::function<bool()> ready) {
  if (death()) return refused(name);
  CUstream stream = stream_of(handle);
  if (auto capture = stream->capture) {
    if (capture->is_broken) return fail(cudaErrorStreamCaptureInvalidated, name);
    auto& nodes = capture->graph->nodes;
    nodes.push_back({name, std::move(run), std::move(ready), stream->captured_last});
    stream->captured_last = {static_cast<int>(nodes.size()) - 1};
    return cudaSuccess;
  }
  if (stream == &default_stream)
    for (auto& capture : captures)
      if (capture->mode == cudaStreamCaptureModeGlobal) {
        capture->is_broken = true;
        return fail(cudaErrorStreamCaptureImplicit, "the default stream is used during a capture");
      }
  note_call(name);
  stream->last = submit(stream->number, name, std::move(run), std::move(ready), {stream->last});
  return cudaSuccess;
}

}  // namespace imitated

using namespace imitated;

// Adds a Python function to a stream.
EXPORT int imitated_gpu_enqueue(void* stream, long number, void (*work)(long), const char* name) {
  Guard guard(lock);
  return enqueue(static_cast<CUstream>(stream), name, [=] { work(number); });
}

// Streams

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = new CUstream_st;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Guard guard(lock);
  if (auto error = refused("cudaStreamSynchronize")) return error;
  CUstream stream = stream_of(handle);
  if (stream->capture) stream->capture->is_broken = true;
  if (stream->capture || is_forbidden("cudaStreamSynchronize"))
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  return wait_for(guard, stream->last);
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Guard guard(lock);
  if (auto error = refused("cudaStreamQuery")) return error;
  CUstream stream = stream_of(handle);
  if (stream->capture) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  return !stream->last || stream->last->ended ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  Guard guard(lock);
  if (auto error = refused("cudaDeviceSynchronize")) return error;
  if (is_forbidden("cudaDeviceSynchronize")) return cudaErrorStreamCaptureUnsupported;
  return wait_until_idle(guard);
}

// Returns the error of a memory operation, or 0. An error in a capture breaks the capture.
static CUresult refused_memory_operation(const char* name, CUstream handle, const void* word) {
  const auto capture = stream_of(handle)->capture;
  auto error = refused(name);
  if (!error && capture && (error = refused((std::string(name) + " in a capture").c_str())))
    capture->is_broken = true;
  if (!error && !block_at(word))
    error = fail(cudaErrorInvalidValue, std::string(name) + " of pageable memory");
  return static_cast<CUresult>(error);
}

EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  Guard guard(lock);
  auto word = reinterpret_cast<uint32_t*>(address);
  if (auto error = refused_memory_operation("cuStreamWriteValue32", stream, word)) return error;
  auto write = [=] { __atomic_store_n(word, value, __ATOMIC_RELEASE); };
  return static_cast<CUresult>(enqueue(stream, "write value", write));
}

EXPORT CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  Guard guard(lock);
  auto word = reinterpret_cast<uint32_t*>(address);
  if (auto error = refused_memory_operation("cuStreamWaitValue32", stream, word)) return error;
  auto arrived = [=] { return __atomic_load_n(word, __ATOMIC_ACQUIRE) == value; };
  return static_cast<CUresult>(enqueue(stream, "wait value", nullptr, arrived));
}

// Events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  (*event)->is_timed = !(flags & cudaEventDisableTiming);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return record(event, stream, 0);
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return record(event, stream, flags);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  Guard guard(lock);
  if (auto error = refused("cudaEventQuery")) return error;
  if (is_forbidden("cudaEventQuery")) return cudaErrorStreamCaptureUnsupported;
  if (event->capture) return fail(cudaErrorCapturedEvent, "cudaEventQuery of a captured event");
  return !event->operation || event->operation->ended ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Guard guard(lock);
  if (auto error = refused("cudaEventSynchronize")) return error;
  if (is_forbidden("cudaEventSynchronize")) return cudaErrorStreamCaptureUnsupported;
  if (event->capture) return fail(cudaErrorCapturedEvent, "cudaEventSynchronize of a captured event");
  return wait_for(guard, event->operation);
}

EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  Guard guard(lock);
  if (auto error = refused("cudaEventElapsedTime")) return error;
  for (cudaEvent_t event : {start, end}) {
    if (!event->is_timed || !event->is_recorded || event->capture)
      return fail(cudaErrorInvalidResourceHandle, "the time of an event that has none");
    if (*event->time_ms < 0) return fail(cudaErrorNotReady, "the time of an event that was not reached");
  }
  *ms = static_cast<float>(std::max(1e-3, *end->time_ms - *start->time_ms));
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  Guard guard(lock);
  if (auto error = refused("cudaStreamWaitEvent")) return error;
  CUstream stream = stream_of(handle);
  if (flags & cudaEventWaitExternal) return fail(cudaErrorNotSupported, "external waits are not imitated");
  if (auto capture = event->capture) {
    if (!captures.count(capture)) return fail(cudaErrorStreamCaptureIsolation, "a wait for an ended capture");
    if (stream->capture && stream->capture != capture)
      return fail(cudaErrorStreamCaptureMerge, "two captures meet");
    if (stream == &default_stream)
      return fail(cudaErrorStreamCaptureImplicit, "the default stream is captured");
    stream->capture = capture;
    capture->streams.insert(stream);
    for (int node : event->captured_nodes) stream->captured_last.push_back(node);
    return cudaSuccess;
  }
  if (!event->operation) return cudaSuccess;
  if (stream->capture) {
    stream->capture->is_broken = true;
    return fail(cudaErrorStreamCaptureIsolation, "a captured stream waits for an event from outside");
  }
  note_call("wait event");
  stream->last = submit(stream->number, "wait event", nullptr, nullptr, {stream->last, event->operation});
  return cudaSuccess;
}
