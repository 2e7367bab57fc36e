// Captures and graphs.
#include <utility>

#include "device.h"

namespace imitated {

std::set<CapturePtr> captures;

namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaStreamCaptureStatus status_of(const CapturePtr& capture) {
  if (!capture) return cudaStreamCaptureStatusNone;
  return capture->is_broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

}  // namespace

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

}  // namespace imitated

using namespace imitated;

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
  if (auto error = refused("cudaStreamBeginCapture")) return error;
  static unsigned long long num_captures = 0;
  CUstream stream = stream_of(handle);
  if (stream == stream_of(nullptr) || stream->capture)
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
  if (death()) return refused("cudaStreamEndCapture");
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
  if (auto error = refused("cudaStreamEndCapture")) return error;  // the capture has ended nevertheless
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
  Guard guard(lock);
  if (auto error = refused("cudaGraphInstantiate")) return error;
  *exec = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  Guard guard(lock);
  if (auto error = refused("cudaGraphLaunch")) return error;
  CUstream stream = stream_of(handle);
  if (stream->capture) return fail(cudaErrorStreamCaptureUnsupported, "a graph is launched in a capture");
  note_call("graph");
  // CUDA may queue the nodes in any order that respects their dependencies.
  const auto& nodes = (*reinterpret_cast<std::shared_ptr<Graph>*>(exec))->nodes;
  std::vector<OperationPtr> all(nodes.size());
  std::vector<size_t> num_missing(nodes.size()), possible;
  std::vector<std::vector<size_t>> next(nodes.size());
  for (size_t i = 0; i < nodes.size(); i++) {
    num_missing[i] = nodes[i].after.size();
    for (int before : nodes[i].after) next[before].push_back(i);
    if (!num_missing[i]) possible.push_back(i);
  }
  while (!possible.empty()) {
    std::swap(possible[draw(possible.size())], possible.back());
    const size_t i = possible.back();
    possible.pop_back();
    std::vector<OperationPtr> after{stream->last};
    for (int before : nodes[i].after) after.push_back(all[before]);
    all[i] = submit(draw(1u << 30), nodes[i].name, nodes[i].run, nodes[i].ready, std::move(after));
    for (size_t each : next[i])
      if (--num_missing[each] == 0) possible.push_back(each);
  }
  all.push_back(stream->last);
  stream->last = submit(stream->number, "end of a graph", nullptr, nullptr, std::move(all));
  return cudaSuccess;
}
