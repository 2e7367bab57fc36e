#include "neo_desktop/paged_cache.h"

#include "neo_desktop/kernels.h"

namespace neo_desktop {

PagedCache check_cache(const TensorView& k_cache, const TensorView& v_cache) {
  const char* meaning = "[num_blocks, kv_heads, block_size, head_dim]";
  check_dims(k_cache, meaning, 4);
  check_shape(v_cache, "the shape of k_cache", k_cache.shape);
  check_dtype(k_cache, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_dtype(v_cache, {k_cache.dtype});
  check_packed(k_cache, 2);
  check_packed(v_cache, 2);
  for (int dim = 0; dim < 4; ++dim) {
    if (k_cache.size(dim) < 1) fail("k_cache has shape ", to_string(k_cache.shape), "; no size may be 0");
  }
  const int64_t head_dim = k_cache.size(3);
  if (head_dim % 8 != 0 || head_dim > kMaxHeadDim) {
    fail("head_dim is ", head_dim, "; expected a multiple of 8 from 8 to ", kMaxHeadDim);
  }
  return {{k_cache.data, k_cache.stride(0), k_cache.stride(1)},
          {v_cache.data, v_cache.stride(0), v_cache.stride(1)},
          k_cache.dtype,
          k_cache.size(0),
          k_cache.size(1),
          k_cache.size(2),
          static_cast<int>(head_dim)};
}

}  // namespace neo_desktop
