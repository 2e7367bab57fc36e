// The public call of decode attention: checks all arguments before it reads anything.
#include "neo_desktop/paged_attention.h"

#include <algorithm>

#include "decode_call.h"
#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_cache.h"
#include "neo_desktop/thread_pool.h"

namespace neo_desktop {
namespace {

// Returns the tokens of a block.
int64_t check_block_size(int64_t block_size, const PagedCache& cache) {
  if (block_size == 0) return cache.page_tokens;
  if (block_size < 0 || cache.page_tokens % block_size != 0) {
    fail("block_size is ", block_size, "; expected a divisor of the ", cache.page_tokens,
         " tokens of the cache's pages");
  }
  const bool in_rows = !cache.k_pairs && cache.dtype != DType::kInt8;
  if (!in_rows && block_size % kSegmentTokens != 0) {
    fail("block_size is ", block_size, "; dimension pairs and int8 need a multiple of ", kSegmentTokens);
  }
  return block_size;
}

void check_context(const TensorView& block_tables, const TensorView& context_lens, const PagedCache& cache,
                   int64_t block_tokens, int64_t window) {
  const auto* lens = static_cast<const int32_t*>(context_lens.data);
  const int64_t num_blocks = cache.num_slots() / block_tokens;
  const int64_t capacity = block_tables.size(1) * block_tokens;
  for (int64_t b = 0; b < context_lens.size(0); ++b) {
    if (lens[b] < 0) fail("context_lens[", b, "] is ", lens[b], "; there are no fewer than 0 tokens");
    if (lens[b] > capacity) {
      fail("context_lens[", b, "] is ", lens[b], ", beyond the ", capacity, " tokens of its block table (",
           block_tables.size(1), " blocks of ", block_tokens, ")");
    }
    const auto* table = static_cast<const int32_t*>(block_tables.data) + b * block_tables.stride(0);
    const int64_t first_token = window > 0 ? std::max<int64_t>(0, lens[b] - window) : 0;
    for (int64_t i = first_token / block_tokens; i * block_tokens < lens[b]; ++i) {
      if (table[i] < 0 || table[i] >= num_blocks) {
        fail("block_tables[", b, ", ", i, "] is ", table[i], ", outside the cache's blocks 0 to ",
             num_blocks - 1);
      }
    }
  }
}

}  // namespace

void DecodeArguments::check(const PagedCache& cache, int64_t window, const TensorView* sinks) const {
  check_dims(q, "[batch, heads, head_dim]", 3);
  check_shape(q, "[batch, heads, head_dim of the cache]", {q.size(0), q.size(1), cache.head_dim});
  if (q.size(1) < 1 || q.size(1) % cache.kv_heads != 0) {
    fail("q has ", q.size(1), " heads; expected a multiple of the cache's ", cache.kv_heads, " KV heads");
  }
  check_dtype(q, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(q, 1);
  check_shape(out, "the shape of q", q.shape);
  check_dtype(out, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(out, 1);
  check_no_overlap(out, 2);
  check_dims(block_tables, "[batch, max_blocks]", 2);
  check_shape(block_tables, "[batch of q, max_blocks]", {q.size(0), block_tables.size(1)});
  check_dtype(block_tables, {DType::kInt32});
  check_packed(block_tables, 1);
  check_shape(context_lens, "[batch of q]", {q.size(0)});
  check_dtype(context_lens, {DType::kInt32});
  check_packed(context_lens, 1);
  check_constants(scale, softcap, window, sinks, q.size(1));
  check_context(block_tables, context_lens, cache, check_block_size(block_size, cache), window);
  if (new_rows) {
    check_rows(new_rows->k, "[batch of q, kv_heads, head_dim]", q.size(0), cache);
    check_rows(new_rows->v, "[batch of q, kv_heads, head_dim]", q.size(0), cache);
  }
}

void DecodeArguments::run(const PagedCache& cache, int64_t window, const TensorView* sinks, int num_threads,
                          Isa isa) const {
  if (q.size(0) == 0) return;
  const auto* of_heads = sinks == nullptr ? nullptr : static_cast<const float*>(sinks->data);
  run_decode(*this, cache, check_block_size(block_size, cache), window, of_heads, num_threads,
             kernels_for(isa));
}

void paged_attention_decode(const DecodeArguments& arguments, const TensorView& k_cache,
                            const TensorView& v_cache, const TensorView* k_scale, const TensorView* v_scale,
                            int64_t window, const TensorView* sinks, int num_threads, Isa isa) {
  const PagedCache cache = check_cache(k_cache, v_cache, k_scale, v_scale);
  const int threads = check_num_threads(num_threads);
  arguments.check(cache, window, sinks);
  if (arguments.new_rows) {
    check_no_overlap(k_cache, 2);
    check_no_overlap(v_cache, 2);
  }
  arguments.run(cache, window, sinks, threads, isa);
}

}  // namespace neo_desktop
