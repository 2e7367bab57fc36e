// The paged KV cache as the native functions see it: two tensors of blocks, checked once.
#pragma once

#include <cstdint>

#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// One of the two tensors, [num_blocks, kv_heads, block_size, head_dim]. A row is `head_dim` elements; rows of
// one block and head are contiguous, blocks and heads may lie anywhere.
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
};

// Throws std::invalid_argument unless both tensors have the same shape and dtype and supported strides, and
// head_dim is a multiple of 8 up to 256.
PagedCache check_cache(const TensorView& k_cache, const TensorView& v_cache);

// Element `index` of a tensor of this dtype.
inline const void* offset(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * size_of(dtype);
}
inline void* offset(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * size_of(dtype);
}

}  // namespace neo_desktop
