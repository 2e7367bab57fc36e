// Reads rows from the paged cache, in any layout and dtype: the inverse of slot_writer.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "neo_desktop/kernels.h"
#include "neo_desktop/paged_cache.h"

namespace neo_desktop {

constexpr int64_t kSpanTokens = 64;  // at most: bounds the memory for assembling keys

// Consecutive slots in a page, and their rows.
struct Span {
  int64_t first;  // row
  int64_t tokens;
  int64_t page;
  int64_t row;  // in the page
};

// Copies slots of the cache to keys or values, [tokens, kv_heads, head_dim], cast to their dtype.
class SlotReader {
 public:
  static SlotReader of_keys(const TensorView& target, const PagedCache& cache, const Kernels& kernels) {
    return {target, cache.k, cache.k_scale, cache.k_pairs, cache, kernels};
  }
  static SlotReader of_values(const TensorView& target, const PagedCache& cache, const Kernels& kernels) {
    return {target, cache.v, cache.v_scale, false, cache, kernels};
  }

  void read(const Span& span, int64_t head) const {
    alignas(64) char gathered[kSpanTokens * kMaxHeadDim * sizeof(float)];
    const int64_t begin = span.page * source_.page_stride + head * source_.head_stride;
    const void* rows = offset(source_.data, cache_.dtype, begin + span.row * (pairs_ ? 2 : cache_.head_dim));
    if (pairs_) {
      gather_pairs(rows, span.tokens, gathered);
      rows = gathered;
    }
    const float* scale = scale_ == nullptr ? nullptr
                                           : scale_ + span.page * cache_.scale_page_stride +
                                                 head * cache_.scale_head_stride + span.row;
    for (int64_t t = 0; t < span.tokens; ++t) {
      const int64_t to = (span.first + t) * target_.stride(0) + head * target_.stride(1);
      cast_row(offset(rows, cache_.dtype, t * cache_.head_dim), scale == nullptr ? 1 : scale[t],
               offset(target_.data, target_.dtype, to));
    }
  }

 private:
  SlotReader(const TensorView& target, const CacheTensor& source, const float* scale, bool pairs,
             const PagedCache& cache, const Kernels& kernels)
      : target_(target), source_(source), scale_(scale), pairs_(pairs), cache_(cache), kernels_(kernels) {}

  void cast_row(const void* from, float scale, void* to) const {
    if (target_.dtype == cache_.dtype) {
      std::memcpy(to, from, cache_.head_dim * size_of(cache_.dtype));
      return;
    }
    float row[kMaxHeadDim];
    if (cache_.dtype == DType::kInt8) {
      const auto* steps = static_cast<const int8_t*>(from);
      for (int i = 0; i < cache_.head_dim; ++i) row[i] = steps[i] * scale;
    } else {
      kernels_.widen[static_cast<int>(cache_.dtype)](from, row, cache_.head_dim, 1);
    }
    kernels_.narrow[static_cast<int>(target_.dtype)](row, to, cache_.head_dim, 1);
  }

  void gather_pairs(const void* from, int64_t tokens, void* to) const {
    switch (size_of(cache_.dtype)) {
      case 1:
        return gather<uint16_t>(from, tokens, to);
      case 2:
        return gather<uint32_t>(from, tokens, to);
      default:
        return gather<uint64_t>(from, tokens, to);
    }
  }

  // [head_dim / 2, page_tokens] pairs to [tokens, head_dim / 2].
  template <class Pair>
  void gather(const void* from, int64_t tokens, void* to) const {
    const int pairs = cache_.head_dim / 2;
    for (int i = 0; i < pairs; ++i) {
      const auto* source = static_cast<const Pair*>(from) + i * cache_.page_tokens;
      auto* target = static_cast<Pair*>(to) + i;
      for (int64_t t = 0; t < tokens; ++t) std::memcpy(target + t * pairs, source + t, sizeof(Pair));
    }
  }

  const TensorView& target_;
  const CacheTensor& source_;
  const float* scale_;
  bool pairs_;
  const PagedCache& cache_;
  const Kernels& kernels_;
};

}  // namespace neo_desktop
