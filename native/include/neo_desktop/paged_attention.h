// Decode attention over a paged KV cache, and copies of rows to the cache and from it.
#pragma once

#include <cstdint>
#include <optional>

#include "neo_desktop/cpu.h"
#include "neo_desktop/paged_cache.h"
#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// Keys and values of the requests' newest tokens, [batch, kv_heads, head_dim].
struct NewRows {
  TensorView k;
  TensorView v;
};

// out[b, h] = softmax(scale * q[b, h] · K) V over request b's tokens; with a `window` (0: none) over the last
// tokens only. `sinks` (null: none), [heads] fp32, add one more token with the score sinks[h] and a value of
// zero. With a `softcap`, a score s becomes softcap * tanh(s / softcap), except the sink's.
//
// Query head h reads KV head h / (heads / kv_heads). Accumulates in fp32. The result does not depend on the
// number of threads or on other requests in the batch. A non-finite key, value or query makes only those
// heads non-finite that attend to it; the rest of the cache does not matter.
struct DecodeArguments {
  TensorView q;             // [batch, heads, head_dim] fp32, fp16 or bf16; rows contiguous
  TensorView out;           // as q
  TensorView block_tables;  // [batch, max_blocks] int32; token t of request b is in slot
                            // block_tables[b, t / block_size] * block_size + t % block_size
  TensorView context_lens;  // [batch] int32, tokens in the cache, the newest included; 0: no
                            // request, its row of `out` is not written
  // If given, they are first written to the contexts' last slots, and no two requests may share that
  // slot; otherwise the cache holds them already. A request may attend to the new row of the request before
  // it, if its context is one token longer: rows of one sequence.
  std::optional<NewRows> new_rows;
  int64_t block_size;  // tokens; a divisor of page_tokens, in pairs a multiple of 16; 0 means page_tokens
  float scale;
  float softcap = 0;  // 0: none

  // Throws std::invalid_argument if any shape, dtype, stride, length or block id is wrong for that cache.
  void check(const PagedCache& cache, int64_t window, const TensorView* sinks) const;

  // Attends, on num_threads threads. check() must have passed for a cache with the same shape and dtype, this
  // window or none, and the same number of sinks.
  void run(const PagedCache& cache, int64_t window, const TensorView* sinks, int num_threads, Isa isa) const;
};

// Checks and runs.
//
//   k/v_cache      [num_pages, kv_heads, page_tokens, head_dim]; in pairs or shared, see check_cache
//   k/v_scale      [num_pages, kv_heads, page_tokens] fp32 if the caches are int8, else null
//
// num_threads 0 means default_num_threads(). Throws std::invalid_argument before anything is read or written.
void paged_attention_decode(const DecodeArguments& arguments, const TensorView& k_cache,
                            const TensorView& v_cache, const TensorView* k_scale, const TensorView* v_scale,
                            int64_t window, const TensorView* sinks, int num_threads, Isa isa);

// Rows of keys and values, [n, kv_heads, head_dim] fp32, fp16 or bf16, and their slots in a cache, [n] int64.
struct KVRows {
  TensorView k;
  TensorView v;
  TensorView slots;

  // Throws std::invalid_argument if any shape, dtype, stride or slot is wrong for that cache.
  void check(const PagedCache& cache) const;

  // Writes row i to slot slots[i] of the cache, cast to its dtype; for int8 with the scale that its largest
  // element needs. Slots must be distinct; of equal slots any row may win. check() must have passed for a
  // cache with the same shape and dtype.
  void write(const PagedCache& cache, int num_threads, Isa isa) const;

  // The inverse: copies slots to the rows, cast to their dtype.
  void read(const PagedCache& cache, int num_threads, Isa isa) const;

  // Rows [first, first + count).
  KVRows part(int64_t first, int64_t count) const;
};

// Checks and writes. Threads and errors as above.
void paged_kv_write(const TensorView& k, const TensorView& v, const TensorView& k_cache,
                    const TensorView& v_cache, const TensorView* k_scale, const TensorView* v_scale,
                    const TensorView& slots, int num_threads, Isa isa);

// Checks and reads.
void paged_kv_read(const TensorView& k_cache, const TensorView& v_cache, const TensorView* k_scale,
                   const TensorView* v_scale, const TensorView& slots, const TensorView& k_out,
                   const TensorView& v_out, int num_threads, Isa isa);

}  // namespace neo_desktop
