#include "neo_desktop/paged_cache.h"

#include <cmath>

#include "neo_desktop/kernels.h"

namespace neo_desktop {

namespace {

// Checks [num_pages, kv_heads, page_tokens, head_dim / 2, 2]; tokens are adjacent per pair of dimensions.
void check_pairs(const TensorView& k_cache) {
  const int64_t page_tokens = k_cache.size(2);
  if (k_cache.size(4) != 2 || k_cache.stride(4) != 1 || k_cache.stride(2) != 2 ||
      k_cache.stride(3) != 2 * page_tokens) {
    fail("k_cache has shape ", to_string(k_cache.shape), " and strides ", to_string(k_cache.strides),
         "; with five dimensions it is a view of [num_pages, kv_heads, head_dim / 2, page_tokens, 2]");
  }
  if (page_tokens % kSegmentTokens != 0) {
    fail("k_cache has pages of ", page_tokens, " tokens; dimension pairs need a multiple of ",
         kSegmentTokens);
  }
}

void check_scale(const TensorView& scale, const TensorView& v_cache) {
  check_shape(scale, "[num_pages, kv_heads, page_tokens] of the cache",
              {v_cache.size(0), v_cache.size(1), v_cache.size(2)});
  check_dtype(scale, {DType::kFloat32});
  check_packed(scale, 1);
}

}  // namespace

PagedCache check_cache(const TensorView& k_cache, const TensorView& v_cache, const TensorView* k_scale,
                       const TensorView* v_scale) {
  const char* meaning = "[num_pages, kv_heads, page_tokens, head_dim]";
  const bool pairs = k_cache.shape.size() == 5;
  if (pairs) {
    check_dims(v_cache, meaning, 4);
    check_shape(k_cache, "the shape of v_cache with head_dim in pairs",
                {v_cache.size(0), v_cache.size(1), v_cache.size(2), v_cache.size(3) / 2, 2});
  } else {
    check_dims(k_cache, meaning, 4);
    check_shape(v_cache, "the shape of k_cache", k_cache.shape);
  }
  for (int dim = 0; dim < 4; ++dim) {
    if (v_cache.size(dim) < 1) fail("k_cache has shape ", to_string(k_cache.shape), "; no size may be 0");
  }
  if (pairs) {
    check_pairs(k_cache);
  } else {
    check_packed(k_cache, 2);
    const bool shares_rows = k_cache.data == v_cache.data;
    if (shares_rows && k_cache.strides != v_cache.strides) fail("k_cache and v_cache overlap");
    if (!shares_rows) check_dtype(k_cache, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  }
  check_dtype(k_cache, {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt8});
  if (v_cache.size(2) > INT32_MAX) fail("k_cache has pages of ", v_cache.size(2), " tokens: too many");
  check_dtype(v_cache, {k_cache.dtype});
  check_packed(v_cache, 2);
  const int64_t head_dim = v_cache.size(3);
  if (head_dim % 8 != 0 || head_dim > kMaxHeadDim) {
    fail("head_dim is ", head_dim, "; expected a multiple of 8 from 8 to ", kMaxHeadDim);
  }
  PagedCache cache{{k_cache.data, k_cache.stride(0), k_cache.stride(1)},
                   {v_cache.data, v_cache.stride(0), v_cache.stride(1)},
                   k_cache.dtype,
                   v_cache.size(0),
                   v_cache.size(1),
                   v_cache.size(2),
                   static_cast<int>(head_dim),
                   pairs};
  const bool scaled = k_cache.dtype == DType::kInt8;
  if (scaled != (k_scale != nullptr) || scaled != (v_scale != nullptr)) {
    fail("an int8 cache, and no other, comes with k_scale and v_scale");
  }
  if (scaled) {
    check_scale(*k_scale, v_cache);
    check_scale(*v_scale, v_cache);
    if (k_scale->strides != v_scale->strides) fail("k_scale and v_scale must have the same strides");
    cache.k_scale = static_cast<float*>(k_scale->data);
    cache.v_scale = static_cast<float*>(v_scale->data);
    cache.scale_page_stride = k_scale->stride(0);
    cache.scale_head_stride = k_scale->stride(1);
  }
  return cache;
}

void check_slots(const TensorView& slots, const PagedCache& cache) {
  check_dims(slots, "[n]", 1);
  check_dtype(slots, {DType::kInt64});
  check_packed(slots, 1);
  const auto* slot = static_cast<const int64_t*>(slots.data);
  for (int64_t i = 0; i < slots.size(0); ++i) {
    if (slot[i] < 0 || slot[i] >= cache.num_slots()) {
      fail("slots[", i, "] is ", slot[i], ", outside the cache's slots 0 to ", cache.num_slots() - 1);
    }
  }
}

void check_rows(const TensorView& rows, const char* meaning, int64_t tokens, const PagedCache& cache) {
  check_shape(rows, meaning, {tokens, cache.kv_heads, cache.head_dim});
  check_dtype(rows, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_packed(rows, 1);
}

void check_constants(float scale, float softcap, int64_t window, const TensorView* sinks, int64_t heads) {
  if (!std::isfinite(scale)) fail("scale is ", scale, "; expected a finite number");
  if (!std::isfinite(softcap) || softcap < 0) {
    fail("softcap is ", softcap, "; expected 0 (none) or a positive number");
  }
  if (window < 0) fail("window is ", window, "; expected 0 (all tokens) or a number of tokens");
  if (sinks != nullptr) {
    check_shape(*sinks, "[heads of q]", {heads});
    check_dtype(*sinks, {DType::kFloat32});
    check_packed(*sinks, 1);
  }
}

}  // namespace neo_desktop
