// Copies rows to the cache's slots and back.
//
// Consecutive slots in a page, a span, are copied together, head by head. In dimension pairs their keys are
// interleaved, and a span's cache lines stay in L1 while all its rows are split or assembled.
#include <algorithm>
#include <atomic>

#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_attention.h"
#include "neo_desktop/paged_cache.h"
#include "neo_desktop/thread_pool.h"
#include "slot_reader.h"
#include "slot_writer.h"

namespace neo_desktop {
namespace {

constexpr int64_t kPieceBytes = 64 << 10;  // bytes that a thread copies per piece, about

// Calls body(span, head) for every KV head of spans that cover the slots, on several threads.
template <class Body>
void for_each_span(const TensorView& view, const PagedCache& cache, int threads, Body body) {
  const auto* slots = static_cast<const int64_t*>(view.data);
  const int64_t count = view.size(0);
  if (count == 0) return;
  const int64_t head_bytes = 2 * cache.head_dim * size_of(cache.dtype);
  const int64_t tokens = std::min(count, kSpanTokens);
  const int64_t heads = std::clamp<int64_t>(kPieceBytes / (tokens * head_bytes), 1, cache.kv_heads);
  const int64_t head_ranges = (cache.kv_heads + heads - 1) / heads;
  const int64_t pieces = (count + tokens - 1) / tokens * head_ranges;
  std::atomic<int64_t> next_piece{0};
  ThreadPool::shared().run(static_cast<int>(std::min<int64_t>(threads, pieces)), [&](int) {
    for (int64_t p = next_piece++; p < pieces; p = next_piece++) {
      const int64_t first_head = p % head_ranges * heads;
      const int64_t end_head = std::min(first_head + heads, cache.kv_heads);
      const int64_t end = std::min(count, (p / head_ranges + 1) * tokens);
      for (int64_t i = p / head_ranges * tokens; i < end;) {
        Span span{i, 1, slots[i] / cache.page_tokens, slots[i] % cache.page_tokens};
        const int64_t most = std::min(end - i, cache.page_tokens - span.row);
        while (span.tokens < most && slots[i + span.tokens] == slots[i] + span.tokens) ++span.tokens;
        for (int64_t head = first_head; head < end_head; ++head) body(span, head);
        i += span.tokens;
      }
    }
  });
}

TensorView part_of(TensorView tensor, int64_t first, int64_t count) {
  tensor.data = offset(tensor.data, tensor.dtype, first * tensor.stride(0));
  tensor.shape[0] = count;
  return tensor;
}

}  // namespace

void KVRows::check(const PagedCache& cache) const {
  check_dims(slots, "[n]", 1);
  check_rows(k, "[n of slots, kv_heads, head_dim]", slots.size(0), cache);
  check_rows(v, "[n of slots, kv_heads, head_dim]", slots.size(0), cache);
  check_slots(slots, cache);
}

void KVRows::write(const PagedCache& cache, int num_threads, Isa isa) const {
  const Kernels& kernels = kernels_for(isa);
  const SlotWriter keys = SlotWriter::of_keys(k, cache, kernels);
  const SlotWriter values = SlotWriter::of_values(v, cache, kernels);
  for_each_span(slots, cache, num_threads, [&](const Span& span, int64_t head) {
    for (const SlotWriter* writer : {&keys, &values}) {
      if (writer == &values && cache.shares_rows()) continue;
      for (int64_t t = 0; t < span.tokens; ++t)
        writer->write(span.first + t, span.page, span.row + t, head, 1);
    }
  });
}

void KVRows::read(const PagedCache& cache, int num_threads, Isa isa) const {
  const Kernels& kernels = kernels_for(isa);
  const SlotReader keys = SlotReader::of_keys(k, cache, kernels);
  const SlotReader values = SlotReader::of_values(v, cache, kernels);
  for_each_span(slots, cache, num_threads, [&](const Span& span, int64_t head) {
    keys.read(span, head);
    if (v.data != k.data) values.read(span, head);
  });
}

KVRows KVRows::part(int64_t first, int64_t count) const {
  return {part_of(k, first, count), part_of(v, first, count), part_of(slots, first, count)};
}

void paged_kv_write(const TensorView& k, const TensorView& v, const TensorView& k_cache,
                    const TensorView& v_cache, const TensorView* k_scale, const TensorView* v_scale,
                    const TensorView& slots, int num_threads, Isa isa) {
  const PagedCache cache = check_cache(k_cache, v_cache, k_scale, v_scale);
  check_no_overlap(k_cache, 2);
  check_no_overlap(v_cache, 2);
  const KVRows rows{k, v, slots};
  rows.check(cache);
  rows.write(cache, check_num_threads(num_threads), isa);
}

void paged_kv_read(const TensorView& k_cache, const TensorView& v_cache, const TensorView* k_scale,
                   const TensorView* v_scale, const TensorView& slots, const TensorView& k_out,
                   const TensorView& v_out, int num_threads, Isa isa) {
  const PagedCache cache = check_cache(k_cache, v_cache, k_scale, v_scale);
  const KVRows rows{k_out, v_out, slots};
  rows.check(cache);
  check_no_overlap(k_out, 2);
  check_no_overlap(v_out, 2);
  rows.read(cache, check_num_threads(num_threads), isa);
}

}  // namespace neo_desktop
