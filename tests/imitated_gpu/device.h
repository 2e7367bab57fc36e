// State of the imitated GPU. One thread runs the entries of a few hardware queues, each queue strictly in
// order; the next queue is drawn at random among the runnable ones.
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
  std::function<void()> run;    // none: a kernel without computation
  std::function<bool()> ready;  // none: ready as soon as `after` has ended
  std::vector<std::shared_ptr<Operation>> after;
  bool ended = false;
};
using OperationPtr = std::shared_ptr<Operation>;

// One operation of a graph; `after` holds indices of earlier nodes.
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

// `lock` guards all state below. Nothing is ever destroyed, because the process may end in the middle of an
// operation.
extern std::mutex& lock;
extern std::set<CapturePtr> captures;
using Guard = std::unique_lock<std::mutex>;

double setting(const char* name, double otherwise);  // from the environment

// Scheduling

unsigned draw(unsigned count);        // below `count`, from IMITATED_GPU_SEED
CUstream stream_of(CUstream handle);  // the default stream has several handles
OperationPtr submit(unsigned queue, const char* name, std::function<void()> run, std::function<bool()> ready,
                    std::vector<OperationPtr> after);
cudaError_t enqueue(CUstream stream, const char* name, std::function<void()> run = nullptr,
                    std::function<bool()> ready = nullptr);

void note_call(const char* name);  // counts an uncaptured call that adds work to a stream

// Both return early, with the error, if the device dies.
cudaError_t wait_until_idle(Guard& guard);
cudaError_t wait_for(Guard& guard, const OperationPtr& operation);

// Returns true if an active capture forbids this call in this thread, and breaks the capture.
bool is_forbidden(const char* call);

// Errors

cudaError_t fail(cudaError_t error, const std::string& why);  // prints the reason, and returns the error
void complain(const std::string& what);
cudaError_t death();  // the error of the dead device, for all calls, or 0

// Returns the error that a test requested for this call, or the dead device's error, or 0.
cudaError_t refused(const char* call);
void die(cudaError_t error, const std::string& why);  // drops all queued operations
void drop_all();
void set_up_queues();  // from the environment

struct Injuries {  // of the operation that runs next
  cudaError_t error = cudaSuccess;
  bool never_ends = false;
};
Injuries next_injuries();
int delay_us();  // added to every operation

const Block* block_at(const void* address);
size_t total_bytes();

}  // namespace imitated

struct CUstream_st {
  unsigned number = imitated::draw(1u << 30);  // selects its queue, at random
  bool in_slice = false;
  imitated::OperationPtr last;
  imitated::CapturePtr capture;
  std::vector<int> captured_last;  // predecessors of the next node
};

struct CUevent_st {
  bool is_timed = true;
  bool is_recorded = false;
  imitated::OperationPtr operation;
  imitated::CapturePtr capture;  // the capture that recorded it, if any
  std::vector<int> captured_nodes;
  std::shared_ptr<double> time_ms = std::make_shared<double>(-1.0);
};
