// The CPU's part of iterations that run on a GPU as one CUDA graph.
//
// For every layer of a sub-batch, the GPU copies q, k and v to host memory and raises a flag. The relay's
// thread polls that flag, attends and raises another flag. The GPU waits for it and copies the output back.
// No Python and no lock take part.
//
//   GPU     |linear 0|q, k, v|ready 0|linear 1|q, k, v|ready 1|wait for done 0|o|linear 0|..
//   relay                    ^       |attention 0 |done 0|    |attention 1 |done 1|..
//
// Rows of KV that move between the memories use the same flags, and two buffers that alternate layer by
// layer: "ready" means that rows have arrived, or that a buffer may be filled again; "done" that they are in
// the cache, or in the buffer. Rows that attention needs move before it. New KV of prompts moves after it,
// and may take until the next layer's:
//
//   relay   |ahead 0|ahead 1|behind 0|ahead 2|behind 1|ahead 3|behind 2|..
//
// Matmuls with matrices in host memory use the same flags, between the attention of two layers.
//
// The GPU never waits in vain: an error or a cancelled iteration raises all flags that it may still wait for.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "neo_desktop/host_task.h"

namespace neo_desktop {

// Record of a task's step, with times of std::chrono::steady_clock.
struct RelayStep {
  int turn;  // or layer
  int task;  // index in `start`'s tasks
  int64_t start_ns;
  int64_t end_ns;
};

// An iteration without progress for longer than the timeout; the message names the step.
class RelayStalledError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs tasks turn by turn: first a turn's steps, then the steps of the turn before that are behind. With
// urgent tasks the thread polls flags without sleeping, from the thread pool's first CPU, and the pool's
// workers stay awake. Otherwise the thread sleeps between polls and leaves the CPUs to others.
//
// One thread makes the calls; any thread may cancel.
class Relay {
 public:
  // num_threads and isa are those of the tasks' steps.
  Relay(int num_threads, Isa isa);

  // Calls `close`.
  ~Relay();

  // Clears the flags and starts an iteration; call it before the GPU gets its work. Throws std::logic_error
  // if an iteration is running; then nothing starts.
  //
  // If neither GPU nor CPU makes progress for `timeout`, the iteration fails: the relay raises all flags that
  // the GPU may wait for. Every step restarts the timeout. 0: no timeout. Time in which the computer or this
  // process was suspended does not count.
  void start(HostTasks tasks, std::chrono::nanoseconds timeout = {});

  // Blocks until the iteration has ended, and returns its steps, in order. Throws a step's exception,
  // RelayStalledError after a timeout, or std::runtime_error after a cancellation. After RelayStalledError
  // the thread may be stuck in a step; the iteration then still counts as running.
  std::vector<RelayStep> finish();

  // Ends the iteration early: raises the flags that the GPU still waits for. Does nothing without an
  // iteration.
  void cancel();

  // Cancels a running iteration and ends the thread; the relay cannot be used afterwards. Returns false if
  // the thread is stuck in a step: it is then abandoned, and the memory of its tasks must stay valid
  // forever. May be called again.
  bool close();

  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

 private:
  class State;
  explicit Relay(std::shared_ptr<State> made);
  std::shared_ptr<State> state_;  // shared with the threads: an abandoned thread still uses it
};

}  // namespace neo_desktop
