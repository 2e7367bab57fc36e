#include "relay_items.h"

#include <algorithm>
#include <cstring>

namespace neo_desktop {
namespace {

// Bytes that a transfer copies per call; small, so that its threads are soon free for attention.
constexpr int64_t kTransferBytes = 1 << 20;

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

void check_arguments(const RelayBatch& batch, const PagedCache& cache, const TensorView* sinks,
                     size_t num_layers) {
  if (batch.layers.size() != 1 && batch.layers.size() != num_layers) {
    fail("there are decodes of ", batch.layers.size(), " layers; expected ", num_layers);
  }
  for (const DecodeArguments& arguments : batch.layers) arguments.check(cache, 0, sinks);
}

void check_arguments(const RelayTransfer& transfer, const PagedCache& cache) {
  for (const KVRows& rows : transfer.rows) {
    rows.check(cache);
    if (transfer.to_host) continue;
    check_no_overlap(rows.k, 2);
    check_no_overlap(rows.v, 2);
  }
}

void check_arguments(const RelayProduct& product, size_t num_layers) {
  if (product.matrices.size() != num_layers + 1) {
    fail("there are matrices for ", product.matrices.size(), " turns; expected ", num_layers + 1);
  }
  if (product.lag != 0 && product.lag != 1) fail("lag is ", product.lag, "; expected 0 or 1");
  check_dims(product.x, "[n, columns]", 2);
  check_dims(product.out, "[elements]", 1);
  check_packed(product.out, 1);
  for (size_t turn = 0; turn < product.matrices.size(); ++turn) {
    const auto& matrix = product.matrices[turn];
    if (!matrix) continue;
    const TensorView out = product.out_of(turn);
    check_packed_linear(product.x, matrix->parts, matrix->bias, out);
    if (product.out.size(0) < out.size(0) * out.size(1)) {
      fail("out has ", product.out.size(0), " elements; turn ", turn, " needs ", out.size(0) * out.size(1));
    }
  }
}

// Number of rows to compute at a time.
int64_t at_once(const ExpertRows& rows) {
  return rows.gated.size(0) / std::max<int64_t>(rows.ids.size(1), 1);
}

void check_arguments(const RelayExperts& item, size_t num_layers) {
  if (item.experts.size() != num_layers + 1) {
    fail("there are experts for ", item.experts.size(), " turns; expected ", num_layers + 1);
  }
  check_dims(item.rows.x, "[n, hidden]", 2);
  check_dims(item.rows.ids, "[n, k]", 2);
  check_dims(item.rows.weights, "[n, k]", 2);
  check_dims(item.rows.out, "[n, hidden]", 2);
  check_dims(item.rows.gate_up, "[rows, 2 * intermediate]", 2);
  check_dims(item.rows.gated, "[rows, intermediate]", 2);
  check_dims(item.rows.products, "[rows, hidden]", 2);
  const int64_t count = std::min(at_once(item.rows), item.rows.x.size(0));
  if (count < 1) fail("there is room for no row of experts");
  for (const PackedExperts* experts : item.experts) {
    if (experts != nullptr) check_experts(item.rows.part(0, count));
  }
}

void check_arguments(const RelayCopies& copies, size_t num_layers) {
  if (copies.sources.size() > num_layers) {
    fail("there are ", copies.sources.size(), " pieces to copy; expected at most ", num_layers);
  }
  if (copies.buffers.empty()) fail("there is no buffer to copy to");
  for (size_t turn = 0; turn < copies.sources.size(); ++turn) {
    const int64_t size = copies.sources[turn].size, room = copies.buffer(turn).size;
    if (size > room) fail("piece ", turn, " has ", size, " bytes; its buffer holds ", room);
  }
  check_dims(copies.flags, "[2, turns, ints of a cache line]", 3);
  const int64_t turns = std::max(copies.flags.size(1), static_cast<int64_t>(copies.sources.size()));
  check_shape(copies.flags, "[2, turns, ints of a cache line]", {2, turns, kFlagInts});
  check_dtype(copies.flags, {DType::kInt32});
  check_packed(copies.flags, 3);
}

void check_flags(const TensorView& flags, size_t turns) {
  check_shape(flags, "[2, layers, ints of a cache line]", {2, static_cast<int64_t>(turns), kFlagInts});
  check_dtype(flags, {DType::kInt32});
  check_packed(flags, 3);
}

void move(const RelayTransfer& transfer, const PagedCache& cache, size_t layer, int num_threads, Isa isa) {
  const KVRows& rows = transfer.rows[layer % transfer.rows.size()];
  const int64_t row_bytes = 2 * cache.kv_heads * cache.head_dim * size_of(cache.dtype);
  const int64_t at_once = std::max<int64_t>(kTransferBytes / row_bytes, 1);
  const int64_t count = rows.slots.size(0);
  for (int64_t first = 0; first < count; first += at_once) {
    const KVRows part = rows.part(first, std::min(at_once, count - first));
    transfer.to_host ? part.write(cache, num_threads, isa) : part.read(cache, num_threads, isa);
  }
}

}  // namespace

RelayBatch RelayBatch::by_layer(const DecodeArguments& all, const TensorView& flags, int index) {
  std::vector<const TensorView*> tensors{&all.q, &all.out, &all.block_tables, &all.context_lens};
  if (all.new_rows) tensors.insert(tensors.end(), {&all.new_rows->k, &all.new_rows->v});
  for (const TensorView* tensor : tensors) {
    check_dims(*tensor, "[layers, ...]",
               tensor == &all.context_lens   ? 2
               : tensor == &all.block_tables ? 3
                                             : 4);
    if (tensor->size(0) != all.q.size(0)) {
      fail(tensor->name, " has shape ", to_string(tensor->shape), "; expected ", all.q.size(0), " layers");
    }
  }
  RelayBatch batch{{}, flags, index};
  for (int64_t layer = 0; layer < all.q.size(0); ++layer) batch.layers.push_back(part_of(all, layer));
  return batch;
}

std::atomic_ref<int32_t> flag(const RelayItem& item, FlagKind kind, size_t layer) {
  const TensorView& flags =
      std::visit([](const auto& each) -> const TensorView& { return each.flags; }, item);
  return std::atomic_ref<int32_t>(
      static_cast<int32_t*>(flags.data)[(kind * flags.shape[1] + layer) * kFlagInts]);
}

TensorView RelayProduct::out_of(size_t turn) const {
  const int64_t rows = matrices[turn] ? matrices[turn]->rows() : 0;
  return {out.name, out.data, out.dtype, {x.size(0), rows}, {rows, 1}};
}

void check(const RelayItem& item, const PagedCache* cache, const TensorView* sinks, size_t num_layers) {
  if (const auto* product = std::get_if<RelayProduct>(&item)) {
    check_arguments(*product, num_layers);
    check_flags(product->flags, num_layers + 1);
    return;
  }
  if (const auto* experts = std::get_if<RelayExperts>(&item)) {
    check_arguments(*experts, num_layers);
    check_flags(experts->flags, num_layers + 1);
    return;
  }
  if (const auto* copies = std::get_if<RelayCopies>(&item)) {
    check_arguments(*copies, num_layers);
    return;
  }
  if (cache == nullptr) fail("a relay without caches has neither attention nor rows of KV");
  if (const auto* batch = std::get_if<RelayBatch>(&item)) {
    check_arguments(*batch, *cache, sinks, num_layers);
    check_flags(batch->flags, num_layers);
  } else {
    const auto& transfer = std::get<RelayTransfer>(item);
    check_arguments(transfer, *cache);
    check_flags(transfer.flags, num_layers);
  }
}

bool is_urgent(const RelayItem& item) {
  return !std::holds_alternative<RelayTransfer>(item) && !std::holds_alternative<RelayCopies>(item);
}

size_t turns_of(const RelayItem& item, size_t num_layers) {
  if (const auto* copies = std::get_if<RelayCopies>(&item)) return copies->sources.size();
  const bool is_in_turns =
      std::holds_alternative<RelayProduct>(item) || std::holds_alternative<RelayExperts>(item);
  return num_layers + (is_in_turns ? 1 : 0);
}

bool takes_part(const RelayItem& item, size_t turn) {
  if (const auto* product = std::get_if<RelayProduct>(&item)) return product->matrices[turn].has_value();
  if (const auto* experts = std::get_if<RelayExperts>(&item)) return experts->experts[turn] != nullptr;
  return true;
}

bool is_behind(const RelayItem& item) {
  const auto* transfer = std::get_if<RelayTransfer>(&item);
  return transfer != nullptr && transfer->is_behind;
}

bool is_awaited(const RelayItem& item, size_t layer) {
  if (const auto* copies = std::get_if<RelayCopies>(&item)) return layer >= copies->buffers.size();
  const auto* transfer = std::get_if<RelayTransfer>(&item);
  return transfer == nullptr || transfer->to_host || layer >= transfer->rows.size();
}

void run(const RelayItem& item, const PagedCache* cache, int64_t window, const TensorView* sinks,
         size_t layer, int num_threads, Isa isa) {
  if (const auto* batch = std::get_if<RelayBatch>(&item)) {
    batch->of(layer).run(*cache, window, sinks, num_threads, isa);
  } else if (const auto* transfer = std::get_if<RelayTransfer>(&item)) {
    move(*transfer, *cache, layer, num_threads, isa);
  } else if (const auto* copies = std::get_if<RelayCopies>(&item)) {
    const Bytes& source = copies->sources[layer];
    std::memcpy(copies->buffer(layer).data, source.data, static_cast<size_t>(source.size));
  } else if (const auto* experts = std::get_if<RelayExperts>(&item)) {
    const int64_t n = experts->rows.x.size(0), step = at_once(experts->rows);
    for (int64_t first = 0; first < n; first += step) {
      const ExpertRows part = experts->rows.part(first, std::min(step, n - first));
      multiply_experts(*experts->experts[layer], part, num_threads, isa);
    }
  } else {
    const auto& product = std::get<RelayProduct>(item);
    const PackedMatrix& matrix = *product.matrices[layer];
    packed_linear(product.x, matrix.parts, matrix.bias, product.out_of(layer), num_threads, isa);
  }
}

std::string words(const RelayItem& item, size_t layer, bool is_waiting) {
  const auto of = [](const std::string& what, size_t l) { return what + " of layer " + std::to_string(l); };
  if (const auto* batch = std::get_if<RelayBatch>(&item)) {
    const std::string place = std::to_string(layer) + " of " +
                              (batch->is_by_layer() ? "async decodes in " : "") + "sub-batch " +
                              std::to_string(batch->index);
    return (is_waiting ? "the GPU did not hand over q, k and v for layer "
                       : "the CPU did not end its attention for layer ") +
           place;
  }
  if (const auto* product = std::get_if<RelayProduct>(&item)) {
    const std::string place = std::to_string(static_cast<int64_t>(layer) - product->lag) + " of sub-batch " +
                              std::to_string(product->index);
    return (is_waiting ? "the GPU did not hand over the inputs of " : "the CPU did not end its part of ") +
           product->what + " of layer " + place;
  }
  if (const auto* experts = std::get_if<RelayExperts>(&item)) {
    const std::string place =
        std::to_string(static_cast<int64_t>(layer) - 1) + " of sub-batch " + std::to_string(experts->index);
    return (is_waiting ? "the GPU did not hand over the inputs of the experts of layer "
                       : "the CPU did not end the experts of layer ") +
           place;
  }
  if (const auto* copies = std::get_if<RelayCopies>(&item)) {
    const std::string piece = "piece " + std::to_string(layer) + " of the " + copies->what;
    return is_waiting ? "the GPU did not take " + copies->what + " that come before " + piece
                      : "the CPU did not end copying " + piece;
  }
  const auto& transfer = std::get<RelayTransfer>(item);
  if (!is_waiting) {
    return (transfer.to_host ? "the CPU did not end storing " : "the CPU did not end fetching ") +
           of(transfer.what, layer);
  }
  return transfer.to_host ? "the GPU did not hand over " + of(transfer.what, layer)
                          : "the GPU did not take over " + of(transfer.what, layer - transfer.rows.size());
}

}  // namespace neo_desktop
