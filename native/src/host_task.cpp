#include "neo_desktop/host_task.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace neo_desktop {
namespace {

// Bytes that a transfer copies per call; small, so that its threads are soon free for attention.
constexpr int64_t kTransferBytes = 1 << 20;

const TensorView* pointer(const std::optional<TensorView>& view) { return view ? &*view : nullptr; }

bool alike(const PagedCache& a, const PagedCache& b) {
  return a.dtype == b.dtype && a.k_pairs == b.k_pairs && a.num_pages == b.num_pages &&
         a.kv_heads == b.kv_heads && a.page_tokens == b.page_tokens && a.head_dim == b.head_dim;
}

TensorView part_of(const TensorView& whole, int64_t layer) {
  const int64_t at = layer * whole.stride(0) * static_cast<int64_t>(size_of(whole.dtype));
  return {whole.name,
          static_cast<char*>(whole.data) + at,
          whole.dtype,
          {whole.shape.begin() + 1, whole.shape.end()},
          {whole.strides.begin() + 1, whole.strides.end()}};
}

DecodeArguments part_of(const DecodeArguments& whole, int64_t layer) {
  DecodeArguments part = whole;
  part.q = part_of(whole.q, layer);
  part.out = part_of(whole.out, layer);
  part.block_tables = part_of(whole.block_tables, layer);
  part.context_lens = part_of(whole.context_lens, layer);
  if (whole.new_rows) part.new_rows = {part_of(whole.new_rows->k, layer), part_of(whole.new_rows->v, layer)};
  return part;
}

// Splits decodes of which every tensor has a leading dimension of layers.
std::vector<DecodeArguments> by_layer(const DecodeArguments& all, size_t layers) {
  const auto check = [&](const TensorView& tensor, size_t dims) {
    check_dims(tensor, "[layers, ...]", dims);
    if (tensor.size(0) != static_cast<int64_t>(layers)) {
      fail(tensor.name, " has shape ", to_string(tensor.shape), "; expected ", layers, " layers");
    }
  };
  check(all.q, 4);
  check(all.out, 4);
  check(all.block_tables, 3);
  check(all.context_lens, 2);
  if (all.new_rows) {
    check(all.new_rows->k, 4);
    check(all.new_rows->v, 4);
  }
  std::vector<DecodeArguments> parts;
  for (size_t layer = 0; layer < layers; ++layer) parts.push_back(part_of(all, layer));
  return parts;
}

class DecodeTask : public HostTask {
 public:
  DecodeTask(std::shared_ptr<const HostCaches> caches, const DecodeArguments& arguments,
             const TensorView& flags, int index)
      : HostTask(flags, caches->size()),
        caches_(std::move(caches)),
        is_by_layer_(arguments.q.shape.size() > 3),
        layers_(is_by_layer_ ? by_layer(arguments, turns()) : std::vector{arguments}),
        index_(index) {
    DecodeTask::check();
  }

  void check() const override {
    const HostCaches::Layer& first = (*caches_)[0];
    for (const DecodeArguments& each : layers_) each.check(first.cache, 0, pointer(first.sinks));
  }

  void run(size_t layer, int num_threads, Isa isa) const override {
    const HostCaches::Layer& of = (*caches_)[layer];
    layers_[is_by_layer_ ? layer : 0].run(of.cache, of.window, pointer(of.sinks), num_threads, isa);
  }

  std::string words(size_t layer, bool is_waiting) const override {
    return (is_waiting ? "the GPU did not hand over q, k and v for layer "
                       : "the CPU did not end its attention for layer ") +
           std::to_string(layer) + " of " + (is_by_layer_ ? "async decodes in " : "") + "sub-batch " +
           std::to_string(index_);
  }

 private:
  std::shared_ptr<const HostCaches> caches_;
  bool is_by_layer_;
  std::vector<DecodeArguments> layers_;  // one per layer, or one for all
  int index_;
};

class RowsTask : public HostTask {
 public:
  RowsTask(std::shared_ptr<const HostCaches> caches, std::string what, bool to_host, bool is_behind,
           std::array<KVRows, 2> rows, const TensorView& flags)
      : HostTask(flags, caches->size()),
        caches_(std::move(caches)),
        what_(std::move(what)),
        to_host_(to_host),
        is_behind_(is_behind),
        rows_(std::move(rows)) {
    for (const KVRows& each : rows_) {
      each.check((*caches_)[0].cache);
      if (to_host) continue;
      check_no_overlap(each.k, 2);
      check_no_overlap(each.v, 2);
    }
  }

  void run(size_t layer, int num_threads, Isa isa) const override {
    const KVRows& rows = rows_[layer % rows_.size()];
    const PagedCache& cache = (*caches_)[layer].cache;
    const int64_t row_bytes = 2 * cache.kv_heads * cache.head_dim * size_of(cache.dtype);
    const int64_t at_once = std::max<int64_t>(kTransferBytes / row_bytes, 1);
    const int64_t count = rows.slots.size(0);
    for (int64_t first = 0; first < count; first += at_once) {
      const KVRows part = rows.part(first, std::min(at_once, count - first));
      to_host_ ? part.write(cache, num_threads, isa) : part.read(cache, num_threads, isa);
    }
  }

  bool is_awaited(size_t layer) const override { return to_host_ || layer >= rows_.size(); }
  bool is_urgent() const override { return false; }
  bool is_behind() const override { return is_behind_; }

  std::string words(size_t layer, bool is_waiting) const override {
    const char* begin = to_host_ ? "the CPU did not end storing " : "the CPU did not end fetching ";
    if (is_waiting) begin = to_host_ ? "the GPU did not hand over " : "the GPU did not take over ";
    const size_t of = is_waiting && !to_host_ ? layer - rows_.size() : layer;
    return begin + what_ + " of layer " + std::to_string(of);
  }

 private:
  std::shared_ptr<const HostCaches> caches_;
  std::string what_;
  bool to_host_;
  bool is_behind_;
  std::array<KVRows, 2> rows_;
};

class MatmulTask : public HostTask {
 public:
  MatmulTask(TurnMatmuls matmuls, const TensorView& flags, int index)
      : HostTask(flags, matmuls.matrices.size()), matmuls_(std::move(matmuls)), index_(index) {
    const TurnMatmuls& all = matmuls_;
    if (all.lag != 0 && all.lag != 1) fail("lag is ", all.lag, "; expected 0 or 1");
    check_dims(all.x, "[n, columns]", 2);
    check_dims(all.out, "[elements]", 1);
    check_packed(all.out, 1);
    for (size_t turn = 0; turn < all.matrices.size(); ++turn) {
      const auto& matrix = all.matrices[turn];
      if (!matrix) continue;
      const TensorView out = out_of(turn);
      check_packed_linear(all.x, matrix->parts, matrix->bias, out);
      if (all.out.size(0) < out.size(0) * out.size(1)) {
        fail("out has ", all.out.size(0), " elements; turn ", turn, " needs ", out.size(0) * out.size(1));
      }
    }
  }

  void run(size_t turn, int num_threads, Isa isa) const override {
    const PackedMatrix& matrix = *matmuls_.matrices[turn];
    packed_linear(matmuls_.x, matrix.parts, matrix.bias, out_of(turn), num_threads, isa);
  }

  bool takes_part(size_t turn) const override { return matmuls_.matrices[turn].has_value(); }

  std::string words(size_t turn, bool is_waiting) const override {
    return (is_waiting ? "the GPU did not hand over the inputs of " : "the CPU did not end its part of ") +
           matmuls_.what + " of layer " + std::to_string(static_cast<int64_t>(turn) - matmuls_.lag) +
           " of sub-batch " + std::to_string(index_);
  }

 private:
  TensorView out_of(size_t turn) const {
    const TensorView& out = matmuls_.out;
    const int64_t rows = matmuls_.matrices[turn]->rows();
    return {out.name, out.data, out.dtype, {matmuls_.x.size(0), rows}, {rows, 1}};
  }

  TurnMatmuls matmuls_;
  int index_;
};

class ExpertsTask : public HostTask {
 public:
  ExpertsTask(std::vector<const PackedExperts*> experts, ExpertRows rows, const TensorView& flags, int index)
      : HostTask(flags, experts.size()), experts_(std::move(experts)), rows_(std::move(rows)), index_(index) {
    check_dims(rows_.x, "[n, hidden]", 2);
    check_dims(rows_.ids, "[n, k]", 2);
    check_dims(rows_.weights, "[n, k]", 2);
    check_dims(rows_.out, "[n, hidden]", 2);
    check_dims(rows_.gate_up, "[rows, 2 * intermediate]", 2);
    check_dims(rows_.gated, "[rows, intermediate]", 2);
    check_dims(rows_.products, "[rows, hidden]", 2);
    const int64_t count = std::min(at_once(), rows_.x.size(0));
    if (count < 1) fail("there is room for no row of experts");
    check_experts(rows_.part(0, count));
  }

  void run(size_t turn, int num_threads, Isa isa) const override {
    const int64_t n = rows_.x.size(0), step = at_once();
    for (int64_t first = 0; first < n; first += step) {
      multiply_experts(*experts_[turn], rows_.part(first, std::min(step, n - first)), num_threads, isa);
    }
  }

  bool takes_part(size_t turn) const override { return experts_[turn] != nullptr; }

  std::string words(size_t turn, bool is_waiting) const override {
    return (is_waiting ? "the GPU did not hand over the inputs of the experts of layer "
                       : "the CPU did not end the experts of layer ") +
           std::to_string(static_cast<int64_t>(turn) - 1) + " of sub-batch " + std::to_string(index_);
  }

 private:
  // Number of rows to compute at a time.
  int64_t at_once() const { return rows_.gated.size(0) / std::max<int64_t>(rows_.ids.size(1), 1); }

  std::vector<const PackedExperts*> experts_;
  ExpertRows rows_;
  int index_;
};

class CopyTask : public HostTask {
 public:
  CopyTask(std::string what, std::vector<Bytes> sources, std::vector<Bytes> buffers, const TensorView& flags)
      : HostTask(flags), what_(std::move(what)), sources_(std::move(sources)), buffers_(std::move(buffers)) {
    if (sources_.size() > turns()) {
      fail("there are ", sources_.size(), " pieces to copy; expected at most ", turns());
    }
    if (buffers_.empty()) fail("there is no buffer to copy to");
    for (size_t turn = 0; turn < sources_.size(); ++turn) {
      const int64_t size = sources_[turn].size, room = buffer(turn).size;
      if (size > room) fail("piece ", turn, " has ", size, " bytes; its buffer holds ", room);
    }
  }

  void run(size_t turn, int, Isa) const override {
    std::memcpy(buffer(turn).data, sources_[turn].data, static_cast<size_t>(sources_[turn].size));
  }

  bool takes_part(size_t turn) const override { return turn < sources_.size(); }
  bool is_awaited(size_t turn) const override { return turn >= buffers_.size(); }
  bool is_urgent() const override { return false; }

  std::string words(size_t turn, bool is_waiting) const override {
    const std::string piece = "piece " + std::to_string(turn) + " of the " + what_;
    return is_waiting ? "the GPU did not take " + what_ + " that come before " + piece
                      : "the CPU did not end copying " + piece;
  }

 private:
  const Bytes& buffer(size_t turn) const { return buffers_[turn % buffers_.size()]; }

  std::string what_;
  std::vector<Bytes> sources_;
  std::vector<Bytes> buffers_;
};

}  // namespace

HostTask::HostTask(const TensorView& flags, std::optional<size_t> turns) : flags_(flags) {
  constexpr const char* kMeaning = "[2, turns, ints of a cache line]";
  check_dims(flags, kMeaning, 3);
  turns_ = turns.value_or(flags.size(1));
  check_shape(flags, kMeaning, {2, static_cast<int64_t>(turns_), kFlagInts});
  check_dtype(flags, {DType::kInt32});
  check_packed(flags, 3);
}

std::atomic_ref<int32_t> HostTask::flag(FlagKind kind, size_t turn) const {
  return std::atomic_ref<int32_t>(static_cast<int32_t*>(flags_.data)[(kind * turns_ + turn) * kFlagInts]);
}

HostCaches::HostCaches(const std::vector<LayerCache>& layers) {
  if (layers.empty()) fail("there are no layers");
  for (const LayerCache& layer : layers) {
    if (layer.window < 0) fail("window is ", layer.window, "; expected 0 (all tokens) or a number of tokens");
    check_no_overlap(layer.k_cache, 2);
    check_no_overlap(layer.v_cache, 2);
    layers_.push_back(
        {check_cache(layer.k_cache, layer.v_cache, pointer(layer.k_scale), pointer(layer.v_scale)),
         layer.window, layer.sinks});
    const auto heads = [](const auto& sinks) { return sinks ? sinks->shape : std::vector<int64_t>{}; };
    if (heads(layer.sinks) != heads(layers.front().sinks)) fail("all layers must have as many sinks");
    if (!alike(layers_.back().cache, layers_.front().cache)) fail("the caches of all layers must be alike");
  }
}

std::shared_ptr<HostTask> decode_task(std::shared_ptr<const HostCaches> caches,
                                      const DecodeArguments& arguments, const TensorView& flags, int index) {
  return std::make_shared<DecodeTask>(std::move(caches), arguments, flags, index);
}

std::shared_ptr<HostTask> rows_task(std::shared_ptr<const HostCaches> caches, std::string what, bool to_host,
                                    bool is_behind, std::array<KVRows, 2> rows, const TensorView& flags) {
  return std::make_shared<RowsTask>(std::move(caches), std::move(what), to_host, is_behind, std::move(rows),
                                    flags);
}

std::shared_ptr<HostTask> matmul_task(TurnMatmuls matmuls, const TensorView& flags, int index) {
  return std::make_shared<MatmulTask>(std::move(matmuls), flags, index);
}

std::shared_ptr<HostTask> experts_task(std::vector<const PackedExperts*> experts, ExpertRows rows,
                                       const TensorView& flags, int index) {
  return std::make_shared<ExpertsTask>(std::move(experts), std::move(rows), flags, index);
}

std::shared_ptr<HostTask> copy_task(std::string what, std::vector<Bytes> sources, std::vector<Bytes> buffers,
                                    const TensorView& flags) {
  return std::make_shared<CopyTask>(std::move(what), std::move(sources), std::move(buffers), flags);
}

}  // namespace neo_desktop
