// The CPU's part in decode iterations that a GPU runs from beginning to end by itself.
//
// In every layer of every sub-batch the GPU copies q, k and v to host memory and raises a flag; the relay's
// thread, which looks at that flag, attends and raises another; the GPU waits for it and copies the output
// back. Nothing else takes part: no Python, no system call, no lock.
//
//   GPU     |linear 0|q, k, v|ready 0|linear 1|q, k, v|ready 1|wait for done 0|o|linear 0|..
//   relay                    ^       |attention 0 |done 0|    |attention 1 |done 1|..
//
// The GPU never waits in vain: an error and a cancelled iteration raise all flags that it may still wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "neo_desktop/paged_attention.h"

namespace neo_desktop {

// One layer's KV in host memory.
struct RelayLayer {
  TensorView k_cache;
  TensorView v_cache;
  std::optional<TensorView> k_scale;
  std::optional<TensorView> v_scale;
  int64_t window;  // 0: all
};

constexpr int64_t kFlagInts = 16;  // a flag has a cache line to itself

// What one sub-batch hands over, in the same memory in every layer.
struct RelayBatch {
  DecodeArguments arguments;
  // [2, layers, kFlagInts] int32: flags[0, layer, 0] becomes 1 when q, k and v of the layer are there,
  // flags[1, layer, 0] when the output is.
  TensorView flags;
};

// When a layer of a sub-batch was attended to; times are those of std::chrono::steady_clock.
struct RelayStep {
  int layer;
  int batch;
  int64_t start_ns;
  int64_t end_ns;
};

// An iteration in which nothing went on for longer than it may; the message names where it stood.
class RelayStalledError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One thread makes the calls; any may cancel.
class Relay {
 public:
  // Throws std::invalid_argument unless all layers' caches are alike and well-formed.
  Relay(const std::vector<RelayLayer>& layers, int num_threads, Isa isa);

  // Cancels an iteration that is under way.
  ~Relay();

  // Clears the flags and begins an iteration; to be called before the GPU is told to. Throws
  // std::invalid_argument if anything in the batches is wrong, and std::logic_error if an iteration is under
  // way; then nothing was begun. The batches' memory must stay until the iteration has ended.
  //
  // When nothing goes on for `patience`, neither the GPU nor the CPU, the iteration is given up: all flags
  // that the GPU may wait for are raised. The patience begins anew with every step. 0: it never ends.
  void start(std::vector<RelayBatch> batches, std::chrono::nanoseconds patience = {});

  // Blocks until the iteration has ended and returns what was done, in order. Throws what a step threw,
  // RelayStalledError if it was given up, or std::runtime_error if it was cancelled. After RelayStalledError
  // the thread may still be in a step that does not end: then the iteration counts as under way.
  std::vector<RelayStep> finish();

  // Ends the iteration early: what the GPU still waits for is declared done. Nothing happens if there is
  // none.
  void cancel();

  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

 private:
  struct Layer {
    PagedCache cache;
    int64_t window;
  };

  enum class Doing : int { kWaiting, kAttending };

  void work();
  void serve();
  void guard();
  void goes_on(size_t layer, size_t batch, Doing doing);
  std::string where() const;
  bool wait_until_ready(const RelayBatch& batch, size_t layer) const;
  void release_all();

  std::vector<Layer> layers_;
  const int num_threads_;
  const Isa isa_;

  // Of the iteration. Whoever starts it writes them before `running_`, the thread after.
  std::vector<RelayBatch> batches_;
  std::vector<RelayStep> steps_;
  std::exception_ptr error_;
  std::chrono::nanoseconds patience_{};
  std::atomic<bool> cancelled_{false};

  // What the guard looks at.
  std::atomic<int64_t> last_progress_ns_{0};
  std::atomic<size_t> layer_{0};
  std::atomic<size_t> batch_{0};
  std::atomic<Doing> doing_{Doing::kWaiting};

  std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  bool running_ = false;
  bool closed_ = false;
  std::string stalled_;  // where the iteration stood when it was given up
  std::condition_variable guard_changed_;
  int64_t guard_wakes_ns_ = 0;  // when the guard looks next, whatever happens meanwhile

  std::thread guard_;   // gives iterations up; with one after the other nobody wakes it
  std::thread thread_;  // serves them. The last members: they use all others
};

}  // namespace neo_desktop
