// The imitated GPU's state. Operations wait for their turn and are carried out by one thread, in an order
// that is drawn among those that streams and events allow.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace imitated {

struct Operation {
  const char* name;
  std::function<void()> run;    // none: a kernel, which computes nothing
  std::function<bool()> ready;  // none: whenever those before it have ended
  std::vector<std::shared_ptr<Operation>> after;
  bool ended = false;
};
using OperationPtr = std::shared_ptr<Operation>;

// What a graph launches again and again; `after` are indices of earlier nodes.
struct Node {
  const char* name;
  std::function<void()> run;
  std::function<bool()> ready;
  std::vector<int> after;
};
struct Graph {
  std::vector<Node> nodes;
};

struct Capture {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  unsigned long long id;
  CUstream origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  std::set<CUstream> streams;
  bool is_broken = false;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Block {
  size_t bytes;
  bool on_host;  // pinned
};

// All below is guarded by `lock`. Nothing is ever destroyed: the process may end in the middle of an
// operation.
extern std::mutex& lock;
extern std::condition_variable& something_ended;
extern std::set<CapturePtr> captures;
using Guard = std::unique_lock<std::mutex>;

CUstream stream_of(CUstream handle);  // the default stream has several handles
cudaError_t enqueue(CUstream stream, const char* name, std::function<void()> run = nullptr,
                    std::function<bool()> ready = nullptr);
void wait_until_idle(Guard& guard);
void wait_for(Guard& guard, const OperationPtr& operation);

// Whether a capture that is under way forbids this thread such a call; it is broken then.
bool is_forbidden(const char* call);

cudaError_t fail(cudaError_t error, const std::string& why);  // says so, and returns the error
void complain(const std::string& what);

const Block* block_at(const void* address);
size_t total_bytes();

}  // namespace imitated

struct CUstream_st {
  bool in_slice = false;
  imitated::OperationPtr last;
  imitated::CapturePtr capture;
  std::vector<int> captured_last;  // nodes that the next one comes after
};

struct CUevent_st {
  bool is_timed = true;
  bool is_recorded = false;
  imitated::OperationPtr operation;
  imitated::CapturePtr capture;  // of the capture that recorded it, if one did
  std::vector<int> captured_nodes;
  std::shared_ptr<double> time_ms = std::make_shared<double>(-1.0);
};
