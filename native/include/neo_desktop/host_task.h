// The CPU's work in an iteration: one task per kind of work, with a step per layer, or per turn between the
// attention of two layers. Turn t ends layer t - 1 and begins layer t, so there is one turn more than layers.
//
// A thread runs the steps one by one, or a relay does when flags in memory say so (see relay.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "neo_desktop/packed_experts.h"
#include "neo_desktop/packed_linear.h"
#include "neo_desktop/paged_attention.h"

namespace neo_desktop {

constexpr int64_t kFlagInts = 16;  // a flag has a cache line to itself

enum FlagKind { kReady, kDone };

class HostTask {
 public:
  virtual ~HostTask() = default;

  // Runs a step in which the task takes part, on at least one thread.
  virtual void run(size_t turn, int num_threads, Isa isa) const = 0;

  // Checks block tables and context lengths, which may change between iterations. Throws
  // std::invalid_argument.
  virtual void check() const {}

  // True if the task has work in a turn; otherwise its flags are ignored.
  virtual bool takes_part(size_t) const { return true; }
  // True if a turn waits for its "ready" flag.
  virtual bool is_awaited(size_t) const { return true; }
  // True if the GPU cannot proceed without the task: attention and matmuls.
  virtual bool is_urgent() const { return true; }
  // True if a layer's step follows the next layer's steps of other tasks.
  virtual bool is_behind() const { return false; }

  // Describes, for messages, the step that the task waits for, or the step of the CPU that has not ended.
  virtual std::string words(size_t turn, bool is_waiting) const = 0;

  size_t turns() const { return turns_; }
  std::atomic_ref<int32_t> flag(FlagKind kind, size_t turn) const;

 protected:
  // flags: [2, turns, kFlagInts] int32. flags[0, turn, 0] becomes 1 when the GPU has done its part of a turn,
  // flags[1, turn, 0] when the task has. Throws std::invalid_argument for anything else.
  explicit HostTask(const TensorView& flags, std::optional<size_t> turns = std::nullopt);

 private:
  TensorView flags_;
  size_t turns_;
};

using HostTasks = std::vector<std::shared_ptr<const HostTask>>;

// One layer's KV in host memory.
struct LayerCache {
  TensorView k_cache;
  TensorView v_cache;
  std::optional<TensorView> k_scale;
  std::optional<TensorView> v_scale;
  int64_t window;                                  // 0: all
  std::optional<TensorView> sinks = std::nullopt;  // [heads] fp32; all layers have them, or none
};

// A model's KV in host memory, checked once.
class HostCaches {
 public:
  struct Layer {
    PagedCache cache;
    int64_t window;
    std::optional<TensorView> sinks;
  };

  // Throws std::invalid_argument unless the layers' caches are well-formed and have the same shape.
  explicit HostCaches(const std::vector<LayerCache>& layers);

  size_t size() const { return layers_.size(); }
  const Layer& operator[](size_t index) const { return layers_[index]; }

 private:
  std::vector<Layer> layers_;
};

// All functions below throw std::invalid_argument for invalid arguments. The memory of their arguments must
// stay valid as long as the task. `index` is that of the sub-batch, for messages.

// The attention of a sub-batch's decodes, with the same offload buffers in every layer. Or of async decodes,
// each in its own layer: then all tensors have a leading dimension of layers. READY: q, k and v are in host
// memory; DONE: the output is.
std::shared_ptr<HostTask> decode_task(std::shared_ptr<const HostCaches> caches,
                                      const DecodeArguments& arguments, const TensorView& flags, int index);

// Rows that move between slots of the caches and the GPU in every layer, with the same slots in all layers,
// through two buffers that alternate. READY: rows to the host have arrived, or a layer's buffer may be filled
// with rows to the GPU; the first two layers fill theirs at once and ignore the flag. DONE: the rows are in
// the cache, or in the buffer.
//
// Args: the name of the rows for messages ("a prompt's KV"), and the rows of even and of odd layers.
std::shared_ptr<HostTask> rows_task(std::shared_ptr<const HostCaches> caches, std::string what, bool to_host,
                                    bool is_behind, std::array<KVRows, 2> rows, const TensorView& flags);

// A matmul in every turn, with the same memory for input and output. READY: x is in host memory; DONE: the
// product is.
struct TurnMatmuls {
  std::string what;                                   // name of the matrix, for messages: "gate_up"
  int lag;                                            // turn t has the matrix of layer t - lag; 0 or 1
  std::vector<std::optional<PackedMatrix>> matrices;  // per turn; empty: the turn does nothing
  TensorView x;                                       // [n, columns]
  TensorView out;  // [elements]: starts with the products [n, rows of the turn's matrix], packed
};
std::shared_ptr<HostTask> matmul_task(TurnMatmuls matmuls, const TensorView& flags, int index);

// A layer's experts in every turn, as in `matmul_task`.
//
// Args: the experts per turn (turn t has those of layer t - 1; null: the turn does nothing), and their rows;
// scratch tensors may have fewer rows, and the task then computes in parts of that size.
std::shared_ptr<HostTask> experts_task(std::vector<const PackedExperts*> experts, ExpertRows rows,
                                       const TensorView& flags, int index);

// A range of host memory.
struct Bytes {
  char* data;
  int64_t size;
};

// Pieces of host memory that the GPU does not read in place, a piece per turn, copied to alternating buffers.
//
//   relay   |piece 0 to buffer 0|piece 1 to buffer 1|           |piece 2 to buffer 0|..
//   GPU                         |buffer 0                       |buffer 1|..
//
// READY: the turn's buffer may be filled; the first turns, one per buffer, fill it at once and ignore the
// flag. DONE: it is filled. The flags may have more turns than there are pieces.
std::shared_ptr<HostTask> copy_task(std::string what, std::vector<Bytes> sources, std::vector<Bytes> buffers,
                                    const TensorView& flags);

}  // namespace neo_desktop
