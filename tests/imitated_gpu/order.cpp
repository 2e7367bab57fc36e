// Streams, events, captures and graphs: what may run when.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <utility>

#include "device.h"

namespace imitated {

std::mutex& lock = *new std::mutex;
std::condition_variable& something_ended = *new std::condition_variable;
std::set<CapturePtr> captures;

namespace {

std::condition_variable& something_new = *new std::condition_variable;
auto& pending = *new std::vector<OperationPtr>;
int num_running = 0;
CUstream_st default_stream;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

bool may_run(const OperationPtr& operation) {
  auto ended = [](const OperationPtr& other) { return other->ended; };
  return std::all_of(operation->after.begin(), operation->after.end(), ended) &&
         (!operation->ready || operation->ready());
}

void work() {
  const char* seed = std::getenv("IMITATED_GPU_SEED");
  std::mt19937 draw(seed ? std::atoi(seed) : 0);
  Guard guard(lock);
  while (true) {
    something_new.wait(guard, [] { return !pending.empty(); });
    std::vector<size_t> able;
    for (size_t i = 0; i < pending.size() && able.size() < 8; i++)
      if (may_run(pending[i])) able.push_back(i);
    if (able.empty()) {  // a stream waits for a word in memory
      guard.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      guard.lock();
      continue;
    }
    const size_t index = able[draw() % able.size()];
    OperationPtr operation = pending[index];
    pending.erase(pending.begin() + index);
    num_running++;
    guard.unlock();
    if (operation->run) operation->run();
    guard.lock();
    num_running--;
    operation->ended = true;
    operation->after.clear();
    something_ended.notify_all();
  }
}

OperationPtr submit(const char* name, std::function<void()> run, std::function<bool()> ready,
                    std::vector<OperationPtr> after) {
  static bool is_started = false;
  if (!is_started) std::thread(work).detach();
  is_started = true;
  auto operation = std::make_shared<Operation>(Operation{name, std::move(run), std::move(ready), {}});
  for (auto& other : after)
    if (other && !other->ended) operation->after.push_back(other);
  pending.push_back(operation);
  something_new.notify_all();
  return operation;
}

cudaStreamCaptureStatus status_of(const CapturePtr& capture) {
  if (!capture) return cudaStreamCaptureStatusNone;
  return capture->is_broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t record(CUevent event, CUstream handle, unsigned flags) {
  Guard guard(lock);
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
  stream->last = submit("record", [time = event->time_ms] { *time = now_ms(); }, nullptr, {stream->last});
  event->operation = stream->last;
  return cudaSuccess;
}

}  // namespace

void complain(const std::string& what) { std::fprintf(stderr, "imitated GPU: %s\n", what.c_str()); }

cudaError_t fail(cudaError_t error, const std::string& why) {
  complain(why + " (error " + std::to_string(error) + ")");
  return last_error = error;
}

CUstream stream_of(CUstream handle) {
  const bool is_default = handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? &default_stream : handle;
}

bool is_forbidden(const char* call) {
  for (auto& capture : captures) {
    const bool is_own = capture->thread == std::this_thread::get_id();
    if (capture->mode == cudaStreamCaptureModeRelaxed || thread_mode == cudaStreamCaptureModeRelaxed)
      continue;
    if (!is_own && capture->mode == cudaStreamCaptureModeThreadLocal) continue;
    if (!is_own && thread_mode == cudaStreamCaptureModeThreadLocal) continue;
    capture->is_broken = true;
    fail(cudaErrorStreamCaptureUnsupported, std::string(call) + " during a capture");
    return true;
  }
  return false;
}

cudaError_t enqueue(CUstream handle, const char* name, std::function<void()> run,
                    std::function<bool()> ready) {
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
  stream->last = submit(name, std::move(run), std::move(ready), {stream->last});
  return cudaSuccess;
}

void wait_until_idle(Guard& guard) {
  something_ended.wait(guard, [] { return pending.empty() && num_running == 0; });
}

void wait_for(Guard& guard, const OperationPtr& operation) {
  something_ended.wait(guard, [&] { return !operation || operation->ended; });
}

}  // namespace imitated

using namespace imitated;

EXPORT cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

// Work in Python on a stream.
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
  CUstream stream = stream_of(handle);
  if (stream->capture) stream->capture->is_broken = true;
  if (stream->capture || is_forbidden("cudaStreamSynchronize"))
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  wait_for(guard, stream->last);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Guard guard(lock);
  CUstream stream = stream_of(handle);
  if (stream->capture) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  return !stream->last || stream->last->ended ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  Guard guard(lock);
  if (is_forbidden("cudaDeviceSynchronize")) return cudaErrorStreamCaptureUnsupported;
  wait_until_idle(guard);
  return cudaSuccess;
}

EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  Guard guard(lock);
  auto word = reinterpret_cast<uint32_t*>(address);
  if (!block_at(word)) return complain("a stream writes to pageable memory"), CUDA_ERROR_INVALID_VALUE;
  auto write = [=] { __atomic_store_n(word, value, __ATOMIC_RELEASE); };
  return static_cast<CUresult>(enqueue(stream, "write value", write));
}

EXPORT CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  Guard guard(lock);
  auto word = reinterpret_cast<uint32_t*>(address);
  if (!block_at(word)) return complain("a stream waits for pageable memory"), CUDA_ERROR_INVALID_VALUE;
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
  if (is_forbidden("cudaEventQuery")) return cudaErrorStreamCaptureUnsupported;
  if (event->capture) return fail(cudaErrorCapturedEvent, "cudaEventQuery of a captured event");
  return !event->operation || event->operation->ended ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Guard guard(lock);
  if (is_forbidden("cudaEventSynchronize")) return cudaErrorStreamCaptureUnsupported;
  if (event->capture) return fail(cudaErrorCapturedEvent, "cudaEventSynchronize of a captured event");
  wait_for(guard, event->operation);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  Guard guard(lock);
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
  stream->last = submit("wait event", nullptr, nullptr, {stream->last, event->operation});
  return cudaSuccess;
}

// Captures and graphs

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Guard guard(lock);
  *status = status_of(stream_of(stream)->capture);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph,
                                            const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                            size_t* num_nodes) {
  Guard guard(lock);
  auto capture = stream_of(stream)->capture;
  *status = status_of(capture);
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (num_nodes) *num_nodes = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Guard guard(lock);
  static unsigned long long num_captures = 0;
  CUstream stream = stream_of(handle);
  if (stream == &default_stream || stream->capture)
    return fail(cudaErrorStreamCaptureUnsupported, "a capture of the default stream, or within another");
  auto capture = std::make_shared<Capture>();
  capture->id = ++num_captures;
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->streams.insert(stream);
  stream->capture = capture;
  captures.insert(capture);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Guard guard(lock);
  *graph = nullptr;
  CUstream origin = stream_of(handle);
  auto capture = origin->capture;
  if (!capture) return fail(cudaErrorIllegalState, "the end of no capture");
  if (capture->origin != origin) return fail(cudaErrorStreamCaptureUnmatched, "the end of another's capture");
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return fail(cudaErrorStreamCaptureWrongThread, "another thread ends a capture");
  const auto& nodes = capture->graph->nodes;
  std::set<int> joined;
  for (std::vector<int> todo = origin->captured_last; !todo.empty();) {
    const int node = todo.back();
    todo.pop_back();
    if (joined.insert(node).second)
      todo.insert(todo.end(), nodes[node].after.begin(), nodes[node].after.end());
  }
  bool all_joined = true;
  for (CUstream stream : capture->streams) {
    for (int node : stream->captured_last) all_joined = all_joined && joined.count(node);
    stream->capture = nullptr;
    stream->captured_last.clear();
  }
  captures.erase(capture);
  if (capture->is_broken) return fail(cudaErrorStreamCaptureInvalidated, "a broken capture ends");
  if (!all_joined)
    return fail(cudaErrorStreamCaptureUnjoined, "a captured stream did not join the first one");
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(capture->graph));
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = (*reinterpret_cast<std::shared_ptr<Graph>*>(graph))->nodes.size();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                                 unsigned long long) {
  *exec = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  Guard guard(lock);
  CUstream stream = stream_of(handle);
  if (stream->capture) return fail(cudaErrorStreamCaptureUnsupported, "a graph is launched in a capture");
  std::vector<OperationPtr> all;
  for (auto& node : (*reinterpret_cast<std::shared_ptr<Graph>*>(exec))->nodes) {
    std::vector<OperationPtr> after{stream->last};
    for (int index : node.after) after.push_back(all[index]);
    all.push_back(submit(node.name, node.run, node.ready, std::move(after)));
  }
  all.push_back(stream->last);
  stream->last = submit("end of a graph", nullptr, nullptr, std::move(all));
  return cudaSuccess;
}
