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

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
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

  // As `close`.
  ~Relay();

  // Clears the flags and begins an iteration; to be called before the GPU is told to. Throws
  // std::invalid_argument if anything in the batches is wrong, and std::logic_error if an iteration is under
  // way; then nothing was begun. The batches' memory must stay until the iteration has ended.
  //
  // When nothing goes on for `patience`, neither the GPU nor the CPU, the iteration is given up: all flags
  // that the GPU may wait for are raised. The patience begins anew with every step. 0: it never ends. Time in
  // which the computer or this process did not run does not count.
  void start(std::vector<RelayBatch> batches, std::chrono::nanoseconds patience = {});

  // Blocks until the iteration has ended and returns what was done, in order. Throws what a step threw,
  // RelayStalledError if it was given up, or std::runtime_error if it was cancelled. After RelayStalledError
  // the thread may still be in a step that does not end: then the iteration counts as under way.
  std::vector<RelayStep> finish();

  // Ends the iteration early: what the GPU still waits for is declared done. Nothing happens if there is
  // none.
  void cancel();

  // Cancels an iteration that is under way and ends the thread; nothing can be started afterwards. Returns
  // false if the thread is in a step that does not end: it is left behind, and the memory that was given to
  // the relay must stay for ever. May be called again.
  bool close();

  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

 private:
  class State;
  std::shared_ptr<State> state_;  // the threads' own, too: one that is left behind goes on using it
};

}  // namespace neo_desktop
