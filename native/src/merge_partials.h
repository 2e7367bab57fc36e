// Merges the partial softmaxes of a context's chunks, in order (attention_order.h).
#pragma once

#include "simd_common.h"

namespace neo_desktop {
namespace {

template <class V>
void merge_partials(const float* acc, float max, float sum, float* into_acc, float* into_max, float* into_sum,
                    int padded_head_dim) {
  const float top = *into_max > max ? *into_max : max;
  const auto old_factor = V::exp2(V::broadcast(*into_max - top));
  const auto factor = V::exp2(V::broadcast(max - top));
  for (int i = 0; i < padded_head_dim; i += V::kLanes) {
    const auto old = V::multiply(V::load(into_acc + i), old_factor);
    V::store(into_acc + i, V::multiply_add(V::load(acc + i), factor, old));
  }
  alignas(64) float total[V::kLanes];
  V::store(total,
           V::multiply_add(V::broadcast(sum), factor, V::multiply(V::broadcast(*into_sum), old_factor)));
  *into_sum = total[0];
  *into_max = top;
}

}  // namespace
}  // namespace neo_desktop
