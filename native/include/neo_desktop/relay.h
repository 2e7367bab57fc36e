// The CPU's part in iterations that a GPU runs from beginning to end by itself.
//
// Of every layer of a sub-batch the GPU copies q, k and v to host memory and raises a flag; the relay's
// thread, which looks at that flag, attends and raises another; the GPU waits for it and copies the output
// back. Nothing else takes part: no Python, no lock.
//
//   GPU     |linear 0|q, k, v|ready 0|linear 1|q, k, v|ready 1|wait for done 0|o|linear 0|..
//   relay                    ^       |attention 0 |done 0|    |attention 1 |done 1|..
//
// Rows of KV that cross over between the memories go the same way, through two buffers that take turns layer
// by layer: "ready" says that rows have come, or that a buffer may be filled again; "done" that they are in
// the cache, or in the buffer. Those that attention needs go ahead of it; new KV of prompts comes behind it,
// and may take until the next layer's:
//
//   relay   |ahead 0|ahead 1|behind 0|ahead 2|behind 1|ahead 3|behind 2|..
//
// Products with matrices that lie in host memory go the same way, between the attention of two layers: turn t
// has those of layer t - 1 that follow its attention, and those of layer t that precede its own. There is one
// turn more than there are layers.
//
// The GPU never waits in vain: an error and a cancelled iteration raise all flags that it may still wait for.
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

// What is attended to in every layer: a sub-batch's decodes, or decodes of which each is in a layer of its
// own.
struct RelayBatch {
  // Either one, for all layers: what a sub-batch hands over, in the same memory in each of them. Or one for
  // each layer.
  std::vector<DecodeArguments> layers;
  // [2, layers, kFlagInts] int32: flags[0, layer, 0] becomes 1 when q, k and v of the layer are there,
  // flags[1, layer, 0] when the output is.
  TensorView flags;
  int index = 0;  // of the sub-batch, for people

  // Decodes by layer. All tensors of `all` have a dimension of layers before the others. Throws
  // std::invalid_argument if they have not.
  static RelayBatch by_layer(const DecodeArguments& all, const TensorView& flags, int index);

  bool is_by_layer() const { return layers.size() > 1; }
  const DecodeArguments& of(size_t layer) const { return layers[is_by_layer() ? layer : 0]; }
};

// Rows that cross over in every layer between slots of host memory and the GPU, the same slots in all of
// them.
struct RelayTransfer {
  std::string what;  // crosses over, for people: "a prompt's KV"
  bool to_host;
  bool is_behind;              // see above
  std::array<KVRows, 2> rows;  // of even and of odd layers, with the slots
  // As of a RelayBatch. flags[0, layer, 0] becomes 1 when rows to the host are there, or when the layer's
  // buffer may be filled with rows to the GPU; in the first two layers it may be from the beginning, and the
  // flag is not looked at. flags[1, layer, 0]: when they are in the cache, or in the buffer.
  TensorView flags;
};

// A product in every turn, with the same rows of memory.
struct RelayProduct {
  std::string what;  // the matrix is, for people: "gate_up"
  int lag;           // in turn t it is of layer t - lag: 0 or 1
  // Of every turn, one more than layers; none: nothing is done in it, and no flag looked at.
  std::vector<std::optional<PackedMatrix>> matrices;
  TensorView x;    // [n, columns]
  TensorView out;  // [elements]: products [n, rows of the turn's matrix] lie at its beginning, without gaps
  // [2, layers + 1, kFlagInts] int32: flags[0, turn, 0] becomes 1 when x is there, flags[1, turn, 0] when the
  // product is.
  TensorView flags;
  int index = 0;  // of the sub-batch, for people

  TensorView out_of(size_t turn) const;
};

// Experts of a layer in every turn, with the same rows of memory.
struct RelayExperts {
  // Of every turn, one more than layers; null: nothing is done in it, and no flag looked at. In turn t they
  // are of layer t - 1.
  std::vector<const PackedExperts*> experts;
  ExpertRows rows;   // what has any content may be for fewer rows: they are computed so many at a time
  TensorView flags;  // as of a RelayProduct
  int index = 0;     // of the sub-batch, for people
};

// Bytes of host memory.
struct Bytes {
  char* data;
  int64_t size;
};

// Pieces of host memory that the GPU does not read where they lie: they are copied to buffers that take
// turns, and the GPU takes them from there.
//
//   relay   |piece 0 to buffer 0|piece 1 to buffer 1|           |piece 2 to buffer 0|..
//   GPU                         |buffer 0                       |buffer 1|..
struct RelayCopies {
  std::string what;            // is copied, for people: "weights"
  std::vector<Bytes> sources;  // a piece in every turn; of turns there are at most as many as layers
  std::vector<Bytes> buffers;  // each as large as the largest piece that it takes
  // [2, turns or more, kFlagInts] int32: flags[0, turn, 0] becomes 1 when the turn's buffer may be filled; in
  // the first turns, one for each buffer, it may be from the beginning, and the flag is not looked at.
  // flags[1, turn, 0]: when it has been.
  TensorView flags;

  const Bytes& buffer(size_t turn) const { return buffers[turn % buffers.size()]; }
};

// What is done in every layer.
using RelayItem = std::variant<RelayBatch, RelayTransfer, RelayProduct, RelayExperts, RelayCopies>;

// When an item of a layer was done; times are those of std::chrono::steady_clock.
struct RelayStep {
  int layer;  // of products: the turn
  int item;   // of those that were started
  int64_t start_ns;
  int64_t end_ns;
};

// An iteration in which nothing went on for longer than it may; the message names where it stood.
class RelayStalledError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Items are done in order, layer by layer: of each layer those that go ahead, then of the layer before those
// that come behind. With attention or products among them flags are looked at without a rest, from the thread
// pool's first CPU, while the pool's workers stay awake; transfers and copies alone have time, and leave the
// CPUs to others.
//
// One thread makes the calls; any may cancel.
class Relay {
 public:
  // Throws std::invalid_argument unless all layers' caches are alike and well-formed.
  Relay(const std::vector<RelayLayer>& layers, int num_threads, Isa isa);

  // One for products alone, or for copies alone, in so many turns.
  Relay(int64_t num_layers, int num_threads, Isa isa);

  // As `close`.
  ~Relay();

  // Clears the flags and begins an iteration; to be called before the GPU is told to. Throws
  // std::invalid_argument if anything in the items is wrong, and std::logic_error if an iteration is under
  // way; then nothing was begun. The items' memory must stay until the iteration has ended.
  //
  // When nothing goes on for `timeout`, neither the GPU nor the CPU, the iteration is given up: all flags
  // that the GPU may wait for are raised. The timeout begins anew with every step. 0: it never ends. Time in
  // which the computer or this process did not run does not count.
  void start(std::vector<RelayItem> items, std::chrono::nanoseconds timeout = {});

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
  explicit Relay(std::shared_ptr<State> made);
  std::shared_ptr<State> state_;  // the threads' own, too: one that is left behind goes on using it
};

}  // namespace neo_desktop
