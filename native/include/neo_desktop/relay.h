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
// Matmuls with matrices in host memory use the same flags, between the attention of two layers. Turn t has
// the matmuls of layer t - 1 after its attention, and those of layer t before its attention. The number of
// turns is the number of layers plus one.
//
// The GPU never waits in vain: an error or a cancelled iteration raises all flags that it may still wait for.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "neo_desktop/packed_experts.h"
#include "neo_desktop/packed_linear.h"
#include "neo_desktop/paged_attention.h"

namespace neo_desktop {

// One layer's KV in host memory.
struct RelayLayer {
  TensorView k_cache;
  TensorView v_cache;
  std::optional<TensorView> k_scale;
  std::optional<TensorView> v_scale;
  int64_t window;                                  // 0: all
  std::optional<TensorView> sinks = std::nullopt;  // [heads] fp32; all layers have them, or none
};

constexpr int64_t kFlagInts = 16;  // a flag has a cache line to itself

// The attention of every layer: a sub-batch's decodes, or async decodes, each in its own layer.
struct RelayBatch {
  // One entry for all layers: a sub-batch's offload buffers, the same memory in each layer. Or one entry per
  // layer.
  std::vector<DecodeArguments> layers;
  // [2, layers, kFlagInts] int32: flags[0, layer, 0] becomes 1 when q, k and v of the layer are ready,
  // flags[1, layer, 0] when the output is.
  TensorView flags;
  int index = 0;  // of the sub-batch, for messages

  // Splits decodes by layer. All tensors in `all` have a leading dimension of layers. Throws
  // std::invalid_argument otherwise.
  static RelayBatch by_layer(const DecodeArguments& all, const TensorView& flags, int index);

  bool is_by_layer() const { return layers.size() > 1; }
  const DecodeArguments& of(size_t layer) const { return layers[is_by_layer() ? layer : 0]; }
};

// Rows that move between slots of host memory and the GPU in every layer, with the same slots in all layers.
struct RelayTransfer {
  std::string what;  // name for messages: "a prompt's KV"
  bool to_host;
  bool is_behind;              // moves behind the attention, see above
  std::array<KVRows, 2> rows;  // rows and slots, of even and of odd layers
  // As in RelayBatch. flags[0, layer, 0] becomes 1 when rows to the host have arrived, or when the layer's
  // buffer may be filled with rows to the GPU; the first two layers may fill it at once and ignore the flag.
  // flags[1, layer, 0] becomes 1 when the rows are in the cache, or in the buffer.
  TensorView flags;
};

// A matmul in every turn, with the same input and output memory.
struct RelayProduct {
  std::string what;  // name of the matrix, for messages: "gate_up"
  int lag;           // turn t has the matrix of layer t - lag; 0 or 1
  // Per turn, one more than layers; empty: the turn does nothing and ignores its flag.
  std::vector<std::optional<PackedMatrix>> matrices;
  TensorView x;    // [n, columns]
  TensorView out;  // [elements]: starts with the products [n, rows of the turn's matrix], packed
  // [2, layers + 1, kFlagInts] int32: flags[0, turn, 0] becomes 1 when x is ready, flags[1, turn, 0] when the
  // product is.
  TensorView flags;
  int index = 0;  // of the sub-batch, for messages

  TensorView out_of(size_t turn) const;
};

// A layer's experts in every turn, with the same input and output memory.
struct RelayExperts {
  // Per turn, one more than layers; null: the turn does nothing and ignores its flag. Turn t has the experts
  // of layer t - 1.
  std::vector<const PackedExperts*> experts;
  ExpertRows rows;   // scratch tensors may have fewer rows: it then computes in parts of that size
  TensorView flags;  // as in RelayProduct
  int index = 0;     // of the sub-batch, for messages
};

// A range of host memory.
struct Bytes {
  char* data;
  int64_t size;
};

// Pieces of host memory that the GPU does not read in place: the relay copies them to alternating buffers,
// and the GPU reads the buffers.
//
//   relay   |piece 0 to buffer 0|piece 1 to buffer 1|           |piece 2 to buffer 0|..
//   GPU                         |buffer 0                       |buffer 1|..
struct RelayCopies {
  std::string what;            // name for messages: "weights"
  std::vector<Bytes> sources;  // a piece per turn; at most as many turns as layers
  std::vector<Bytes> buffers;  // each as large as its largest piece
  // [2, turns or more, kFlagInts] int32: flags[0, turn, 0] becomes 1 when the turn's buffer may be filled;
  // the first turns, one per buffer, may fill it at once and ignore the flag. flags[1, turn, 0] becomes 1
  // when it is filled.
  TensorView flags;

  const Bytes& buffer(size_t turn) const { return buffers[turn % buffers.size()]; }
};

// One kind of work in every layer or turn.
using RelayItem = std::variant<RelayBatch, RelayTransfer, RelayProduct, RelayExperts, RelayCopies>;

// Record of an item's work in one layer, with times of std::chrono::steady_clock.
struct RelayStep {
  int layer;  // for matmuls: the turn
  int item;   // index in `start`'s items
  int64_t start_ns;
  int64_t end_ns;
};

// An iteration without progress for longer than the timeout; the message names the step.
class RelayStalledError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs items layer by layer: first a layer's items ahead of its attention, then the previous layer's items
// behind it. With attention or matmuls among the items, the thread polls flags without sleeping, from the
// thread pool's first CPU, and the pool's workers stay awake. Transfers and copies alone are not urgent: the
// thread then sleeps between polls and leaves the CPUs to others.
//
// One thread makes the calls; any thread may cancel.
class Relay {
 public:
  // Throws std::invalid_argument unless all layers' caches are well-formed and have the same shape.
  Relay(const std::vector<RelayLayer>& layers, int num_threads, Isa isa);

  // A relay without KV, for matmuls alone, or for copies alone.
  Relay(int64_t num_layers, int num_threads, Isa isa);

  // Calls `close`.
  ~Relay();

  // Clears the flags and starts an iteration; call it before the GPU gets its work. Throws
  // std::invalid_argument if an item is invalid, and std::logic_error if an iteration is running; then
  // nothing starts. The items' memory must stay valid until the iteration has ended.
  //
  // If neither GPU nor CPU makes progress for `timeout`, the iteration fails: the relay raises all flags that
  // the GPU may wait for. Every step restarts the timeout. 0: no timeout. Time in which the computer or this
  // process was suspended does not count.
  void start(std::vector<RelayItem> items, std::chrono::nanoseconds timeout = {});

  // Blocks until the iteration has ended, and returns its steps, in order. Throws a step's exception,
  // RelayStalledError after a timeout, or std::runtime_error after a cancellation. After RelayStalledError
  // the thread may be stuck in a step; the iteration then still counts as running.
  std::vector<RelayStep> finish();

  // Ends the iteration early: raises the flags that the GPU still waits for. Does nothing without an
  // iteration.
  void cancel();

  // Cancels a running iteration and ends the thread; the relay cannot be used afterwards. Returns false if
  // the thread is stuck in a step: it is then abandoned, and the memory given to the relay must stay valid
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
