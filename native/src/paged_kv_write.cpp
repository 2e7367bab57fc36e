#include <algorithm>
#include <atomic>

#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_attention.h"
#include "neo_desktop/paged_cache.h"
#include "neo_desktop/thread_pool.h"
#include "slot_writer.h"

namespace neo_desktop {
namespace {

constexpr int64_t kPieceBytes = 64 << 10;  // what a thread writes before it asks for more

}  // namespace

void paged_kv_write(const TensorView& k, const TensorView& v, const TensorView& k_cache,
                    const TensorView& v_cache, const TensorView* k_scale, const TensorView* v_scale,
                    const TensorView& slots, int num_threads, Isa isa) {
  const PagedCache cache = check_cache(k_cache, v_cache, k_scale, v_scale);
  check_no_overlap(k_cache, 2);
  check_no_overlap(v_cache, 2);
  check_dims(slots, "[n]", 1);
  check_dtype(slots, {DType::kInt64});
  check_packed(slots, 1);
  const int64_t tokens = slots.size(0);
  check_rows(k, "[n of slots, kv_heads, head_dim]", tokens, cache);
  check_rows(v, "[n of slots, kv_heads, head_dim]", tokens, cache);
  const auto* slot = static_cast<const int64_t*>(slots.data);
  for (int64_t i = 0; i < tokens; ++i) {
    if (slot[i] < 0 || slot[i] >= cache.num_blocks * cache.block_size) {
      fail("slots[", i, "] is ", slot[i], ", outside the cache's slots 0 to ",
           cache.num_blocks * cache.block_size - 1);
    }
  }
  const int threads = check_num_threads(num_threads);
  const Kernels& kernels = kernels_for(isa);
  const SlotWriter keys = SlotWriter::of_keys(k, cache, kernels);
  const SlotWriter values = SlotWriter::of_values(v, cache, kernels);
  const int64_t token_bytes = 2 * cache.kv_heads * cache.head_dim * size_of(cache.dtype);
  const int64_t piece = std::max<int64_t>(1, kPieceBytes / token_bytes);
  const int64_t pieces = (tokens + piece - 1) / piece;
  std::atomic<int64_t> next_piece{0};
  ThreadPool::shared().run(static_cast<int>(std::min<int64_t>(threads, pieces)), [&](int) {
    for (int64_t p = next_piece++; p < pieces; p = next_piece++) {
      for (int64_t i = p * piece; i < std::min(tokens, (p + 1) * piece); ++i) {
        const int64_t block = slot[i] / cache.block_size;
        const int64_t row = slot[i] % cache.block_size;
        keys.write(i, block, row, 0, cache.kv_heads);
        values.write(i, block, row, 0, cache.kv_heads);
      }
    }
  });
}

}  // namespace neo_desktop
