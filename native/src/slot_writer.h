// Writes rows of new tokens to the paged cache, in any layout and dtype.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_cache.h"

namespace neo_desktop {

// Copies keys or values, [tokens, kv_heads, head_dim], to their slots of the cache, cast to its dtype.
class SlotWriter {
 public:
  static SlotWriter of_keys(const TensorView& source, const PagedCache& cache, const Kernels& kernels) {
    return {source, cache.k, cache.k_scale, cache.k_pairs, cache, kernels};
  }
  static SlotWriter of_values(const TensorView& source, const PagedCache& cache, const Kernels& kernels) {
    return {source, cache.v, cache.v_scale, false, cache, kernels};
  }

  // Heads [head, head + heads) of a token into row `row` of a page.
  void write(int64_t token, int64_t page, int64_t row, int64_t head, int64_t heads) const {
    alignas(8) char cast[kMaxHeadDim * sizeof(float)];
    for (const int64_t end = head + heads; head < end; ++head) {
      const int64_t from = token * source_.stride(0) + head * source_.stride(1);
      const int64_t scale_at = page * cache_.scale_page_stride + head * cache_.scale_head_stride + row;
      const void* data = cast_row(offset(source_.data, source_.dtype, from), cast,
                                  scale_ == nullptr ? nullptr : scale_ + scale_at);
      const int64_t to = page * target_.page_stride + head * target_.head_stride;
      if (pairs_) {
        scatter_pairs(data, offset(target_.data, cache_.dtype, to + row * 2));
      } else {
        std::memcpy(offset(target_.data, cache_.dtype, to + row * cache_.head_dim), data,
                    cache_.head_dim * size_of(cache_.dtype));
      }
    }
  }

 private:
  SlotWriter(const TensorView& source, const CacheTensor& target, float* scale, bool pairs,
             const PagedCache& cache, const Kernels& kernels)
      : source_(source), target_(target), scale_(scale), pairs_(pairs), cache_(cache), kernels_(kernels) {}

  // The row in the cache's dtype: the original, or a copy in `memory`.
  const void* cast_row(const void* from, void* memory, float* scale) const {
    if (source_.dtype == cache_.dtype) return from;
    float row[kMaxHeadDim];
    kernels_.widen[static_cast<int>(source_.dtype)](from, row, cache_.head_dim, 1);
    if (cache_.dtype == DType::kInt8) {
      *scale = quantize(row, cache_.head_dim, static_cast<int8_t*>(memory));
    } else {
      kernels_.narrow[static_cast<int>(cache_.dtype)](row, memory, cache_.head_dim, 1);
    }
    return memory;
  }

  void scatter_pairs(const void* from, void* to) const {
    switch (size_of(cache_.dtype)) {
      case 1:
        return scatter<uint16_t>(from, to);
      case 2:
        return scatter<uint32_t>(from, to);
      default:
        return scatter<uint64_t>(from, to);
    }
  }

  template <class Pair>
  void scatter(const void* from, void* to) const {
    for (int i = 0; i < cache_.head_dim / 2; ++i) {
      std::memcpy(static_cast<Pair*>(to) + i * cache_.page_tokens, static_cast<const Pair*>(from) + i,
                  sizeof(Pair));
    }
  }

  // Rounds to nearest in steps of largest / 127; returns the step. A row with NaN or infinity gets a scale of
  // NaN, so that attention to it is not finite, as with the other dtypes. Written so that compilers vectorise
  // it.
  static float quantize(const float* row, int length, int8_t* out) {
    int32_t bits = 0;  // bits of the largest magnitude: integers have the same order, with NaN above all
    for (int i = 0; i < length; ++i) {
      bits = std::max(bits, std::bit_cast<int32_t>(row[i]) & 0x7fffffff);
    }
    const float largest = std::bit_cast<float>(bits);
    if (!std::isfinite(largest)) {
      std::memset(out, 0, length);
      return std::numeric_limits<float>::quiet_NaN();
    }
    const float scale = largest / 127;
    const float inverse = scale > 0 ? 1 / scale : 0;
    if (!std::isfinite(inverse)) return quantize_tiny(row, length, scale, out);
    for (int i = 0; i < length; ++i) {
      // Numbers near 1.5 * 2^23 have no fraction: the addition rounds, and the lowest byte is the result.
      out[i] = static_cast<int8_t>(std::bit_cast<int32_t>(row[i] * inverse + 0x1.8p23f));
    }
    return scale;
  }

  // The same for rows of denormals, whose scale itself has a large rounding error.
  static float quantize_tiny(const float* row, int length, float scale, int8_t* out) {
    for (int i = 0; i < length; ++i) {
      out[i] = static_cast<int8_t>(std::lrintf(std::clamp(row[i] / scale, -127.0f, 127.0f)));
    }
    return scale;
  }

  const TensorView& source_;
  const CacheTensor& target_;
  float* scale_;
  bool pairs_;
  const PagedCache& cache_;
  const Kernels& kernels_;
};

}  // namespace neo_desktop
