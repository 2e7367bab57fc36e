#include <algorithm>
#include <atomic>
#include <cstring>

#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_attention.h"
#include "neo_desktop/paged_cache.h"
#include "neo_desktop/thread_pool.h"

namespace neo_desktop {
namespace {

constexpr int64_t kPieceBytes = 64 << 10;  // what a thread writes before it asks for more

// Copies one token's rows, [kv_heads, head_dim], into its slot.
class SlotWriter {
 public:
  SlotWriter(const TensorView& source, const CacheTensor& target, const PagedCache& cache,
             const Kernels& kernels)
      : source_(source), target_(target), cache_(cache), kernels_(kernels) {}

  void write(int64_t token, int64_t slot) const {
    const int64_t block = slot / cache_.block_size;
    const int64_t row = slot % cache_.block_size;
    for (int64_t head = 0; head < cache_.kv_heads; ++head) {
      const int64_t from = token * source_.stride(0) + head * source_.stride(1);
      const int64_t to = block * target_.block_stride + head * target_.head_stride + row * cache_.head_dim;
      copy_row(offset(source_.data, source_.dtype, from), offset(target_.data, cache_.dtype, to));
    }
  }

 private:
  void copy_row(const void* from, void* to) const {
    if (source_.dtype == cache_.dtype) {
      std::memcpy(to, from, cache_.head_dim * size_of(cache_.dtype));
      return;
    }
    float row[kMaxHeadDim];
    kernels_.widen[static_cast<int>(source_.dtype)](from, row, cache_.head_dim);
    kernels_.narrow[static_cast<int>(cache_.dtype)](row, to, cache_.head_dim);
  }

  const TensorView& source_;
  const CacheTensor& target_;
  const PagedCache& cache_;
  const Kernels& kernels_;
};

void check_rows(const TensorView& rows, const TensorView& slots, const PagedCache& cache) {
  check_shape(rows, "[n of slots, kv_heads, head_dim]", {slots.size(0), cache.kv_heads, cache.head_dim});
  check_dtype(rows, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(rows, 1);
}

}  // namespace

void paged_kv_write(const TensorView& k, const TensorView& v, const TensorView& k_cache,
                    const TensorView& v_cache, const TensorView& slots, int num_threads, Isa isa) {
  const PagedCache cache = check_cache(k_cache, v_cache);
  check_no_overlap(k_cache, 2);
  check_no_overlap(v_cache, 2);
  check_dims(slots, "[n]", 1);
  check_dtype(slots, {DType::kInt64});
  check_packed(slots, 1);
  check_rows(k, slots, cache);
  check_rows(v, slots, cache);
  const int64_t tokens = slots.size(0);
  const auto* slot = static_cast<const int64_t*>(slots.data);
  for (int64_t i = 0; i < tokens; ++i) {
    if (slot[i] < 0 || slot[i] >= cache.num_blocks * cache.block_size) {
      fail("slots[", i, "] is ", slot[i], ", outside the cache's slots 0 to ",
           cache.num_blocks * cache.block_size - 1);
    }
  }
  const int threads = check_num_threads(num_threads);
  const Kernels& kernels = kernels_for(isa);
  const SlotWriter keys(k, cache.k, cache, kernels);
  const SlotWriter values(v, cache.v, cache, kernels);
  const int64_t token_bytes = 2 * cache.kv_heads * cache.head_dim * size_of(cache.dtype);
  const int64_t piece = std::max<int64_t>(1, kPieceBytes / token_bytes);
  const int64_t pieces = (tokens + piece - 1) / piece;
  std::atomic<int64_t> next_piece{0};
  ThreadPool::shared().run(static_cast<int>(std::min<int64_t>(threads, pieces)), [&](int) {
    for (int64_t p = next_piece++; p < pieces; p = next_piece++) {
      for (int64_t i = p * piece; i < std::min(tokens, (p + 1) * piece); ++i) {
        keys.write(i, slot[i]);
        values.write(i, slot[i]);
      }
    }
  });
}

}  // namespace neo_desktop
