// The imitated GPU's state. A few hardware queues carry out what was put into them, each strictly in order,
// by one thread; which queue goes on is drawn among those whose next entry may.
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
extern std::set<CapturePtr> captures;
using Guard = std::unique_lock<std::mutex>;

double setting(const char* name, double otherwise);  // from the environment

// What runs when

unsigned draw(unsigned count);        // below `count`, from IMITATED_GPU_SEED
CUstream stream_of(CUstream handle);  // the default stream has several handles
OperationPtr submit(unsigned queue, const char* name, std::function<void()> run, std::function<bool()> ready,
                    std::vector<OperationPtr> after);
cudaError_t enqueue(CUstream stream, const char* name, std::function<void()> run = nullptr,
                    std::function<bool()> ready = nullptr);

void note_call(const char* name);  // that puts something on a stream, and is not captured

// Both return early, with the error, when the device dies.
cudaError_t wait_until_idle(Guard& guard);
cudaError_t wait_for(Guard& guard, const OperationPtr& operation);

// Whether a capture that is under way forbids this thread such a call; it is broken then.
bool is_forbidden(const char* call);

// Errors

cudaError_t fail(cudaError_t error, const std::string& why);  // says so, and returns the error
void complain(const std::string& what);
cudaError_t death();  // the error that has ended the device, or 0: all calls fail with it

// The error that a test asked for at this call, or that the device died of; 0: it may go on.
cudaError_t refused(const char* call);
void die(cudaError_t error, const std::string& why);  // drops all that was to be carried out
void drop_all();
void set_up_queues();  // as the environment says

struct Injuries {  // of an operation that is about to be carried out
  cudaError_t error = cudaSuccess;
  bool never_ends = false;
};
Injuries next_injuries();
int delay_us();  // of each operation

const Block* block_at(const void* address);
size_t total_bytes();

}  // namespace imitated

struct CUstream_st {
  unsigned number = imitated::draw(1u << 30);  // its queue is drawn with it
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
