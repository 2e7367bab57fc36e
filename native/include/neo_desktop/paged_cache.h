// The paged KV cache of the native functions: two tensors of pages, checked once.
//
// A page holds page_tokens tokens. Slots number the rows of the pages: slot s is row s % page_tokens of page
// s / page_tokens. Block tables name slots by block. A block is a whole page or a fraction of a page: decode
// attention reads the longest pieces if the blocks of a page are consecutive in a table, but the allocator
// can still assign them one by one.
#pragma once

#include <cstdint>

#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// One of the two tensors, [num_pages, kv_heads, page_tokens, head_dim]. The rows of one page and head are
// contiguous; pages and heads may have any strides.
struct CacheTensor {
  void* data;
  int64_t page_stride;  // elements
  int64_t head_stride;  // elements
};

struct PagedCache {
  CacheTensor k;
  CacheTensor v;
  DType dtype;
  int64_t num_pages;
  int64_t kv_heads;
  int64_t page_tokens;
  int head_dim;

  // True if one page and head of K is [head_dim / 2, page_tokens, 2] instead of [page_tokens, head_dim].
  // Vector lanes are then tokens, and attention is faster, above all for grouped queries.
  bool k_pairs;

  // int8 only: a row is its elements times its scale, [num_pages, kv_heads, page_tokens].
  float* k_scale = nullptr;
  float* v_scale = nullptr;
  int64_t scale_page_stride = 0;
  int64_t scale_head_stride = 0;

  // True if the keys, in rows, are also the values. Attention over them is that over pairs, if blocks allow
  // it.
  bool shares_rows() const { return !k_pairs && k.data == v.data; }

  int64_t num_slots() const { return num_pages * page_tokens; }
};

// k_cache is [num_pages, kv_heads, page_tokens, head_dim], or, in pairs, [num_pages, kv_heads, page_tokens,
// head_dim / 2, 2] with the strides that follow from the layout above. Both may be the same tensor, of rows.
// The scales are null unless the dtype is int8. Throws std::invalid_argument unless shapes and dtypes agree,
// strides are supported, head_dim is a multiple of 8 up to 576, and, in pairs, page_tokens is a multiple
// of 16.
PagedCache check_cache(const TensorView& k_cache, const TensorView& v_cache, const TensorView* k_scale,
                       const TensorView* v_scale);

// Throws std::invalid_argument unless slots are [n] int64 and within the cache.
void check_slots(const TensorView& slots, const PagedCache& cache);

// Throws std::invalid_argument unless rows are [tokens, kv_heads, head_dim] floats; `meaning` names the
// shape.
void check_rows(const TensorView& rows, const char* meaning, int64_t tokens, const PagedCache& cache);

// Throws std::invalid_argument for constants of attention that are no numbers of the allowed ranges, or sinks
// (null: none) that are not [heads] fp32.
void check_constants(float scale, float softcap, int64_t window, const TensorView* sinks, int64_t heads);

// Element `index` of a tensor of this dtype.
inline const void* offset(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * size_of(dtype);
}
inline void* offset(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * size_of(dtype);
}

}  // namespace neo_desktop
