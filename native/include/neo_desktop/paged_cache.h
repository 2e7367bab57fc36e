// The paged KV cache as the native functions see it: two tensors of blocks, checked once.
#pragma once

#include <cstdint>

#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// One of the two tensors, [num_blocks, kv_heads, block_size, head_dim]. The rows of one block and head are
// contiguous, blocks and heads may lie anywhere.
struct CacheTensor {
  void* data;
  int64_t block_stride;  // elements
  int64_t head_stride;   // elements
};

struct PagedCache {
  CacheTensor k;
  CacheTensor v;
  DType dtype;
  int64_t num_blocks;
  int64_t kv_heads;
  int64_t block_size;  // tokens
  int head_dim;

  // Whether one block and head of K is [head_dim / 2, block_size, 2] instead of [block_size, head_dim]:
  // then lanes of a vector are tokens, and attention is faster, above all for grouped queries.
  bool k_pairs;

  // Of int8: a row is its elements times its scale, [num_blocks, kv_heads, block_size].
  float* k_scale = nullptr;
  float* v_scale = nullptr;
  int64_t scale_block_stride = 0;
  int64_t scale_head_stride = 0;

  // Elements from the start of a block and head of K to dimension `i` of token `row`.
  int64_t k_element(int64_t row, int64_t i) const {
    return k_pairs ? (i / 2 * block_size + row) * 2 + i % 2 : row * head_dim + i;
  }
};

// k_cache is [num_blocks, kv_heads, block_size, head_dim], or, in pairs, [num_blocks, kv_heads, block_size,
// head_dim / 2, 2] with the strides that follow from the layout above. The scales are null unless the dtype
// is int8. Throws std::invalid_argument unless shapes and dtypes agree, strides are supported, head_dim is a
// multiple of 8 up to 256, and, in pairs, block_size is a multiple of 16.
PagedCache check_cache(const TensorView& k_cache, const TensorView& v_cache, const TensorView* k_scale,
                       const TensorView* v_scale);

// Element `index` of a tensor of this dtype.
inline const void* offset(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * size_of(dtype);
}
inline void* offset(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * size_of(dtype);
}

}  // namespace neo_desktop
