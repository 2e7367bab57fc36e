// The running softmax of one query head over tiles of kPairTile tokens, shared by decode and prefill
// attention: a row's bits are the same in both.
#pragma once

#include "simd_common.h"

namespace neo_desktop {
namespace {

// Below every score, but differences of two scores stay finite.
constexpr float kLowest = -0x1p127f;

template <class V>
struct TileSoftmax {
  using Reg = typename V::Reg;

  // Turns the scores of a tile into weights. `max` (the same in all lanes) and `sum` (per lane) have room for
  // kMaxLanes numbers each; acc [padded_head_dim] is the sum over the tiles before.
  static void run(float* weights, float* max, float* sum, float* acc, int padded_head_dim) {
    Reg candidate = V::load(weights);
#pragma GCC unroll 16
    for (int i = V::kLanes; i < kPairTile; i += V::kLanes) {
      candidate = V::max(V::load(weights + i), candidate);
    }
    if (V::any_greater(candidate, V::load(max))) {  // rare after a row's first tiles
      raise_max(candidate, max, sum, acc, padded_head_dim);
    }
    const Reg top = V::load(max);
    Reg total = V::load(sum);
#pragma GCC unroll 16
    for (int i = 0; i < kPairTile; i += V::kLanes) {
      const Reg weight = V::exp2(V::subtract(V::load(weights + i), top));
      V::store(weights + i, weight);
      total = V::add(total, weight);
    }
    V::store(sum, total);
  }

  static void start(float* max, float* sum) {
    V::store(max, V::broadcast(kLowest));
    V::store(sum, V::zero());
  }

  static float total(const float* sum) {
    float total = 0;
    for (int i = 0; i < V::kLanes; ++i) total += sum[i];
    return total;
  }

 private:
  static void raise_max(Reg candidate, float* max, float* sum, float* acc, int padded_head_dim) {
    const Reg old = V::load(max);
    const Reg top = V::template max_within<V::kLanes>(V::max(candidate, old));
    V::store(max, top);
    const Reg before = V::load(sum);
    if (!V::any_differs(before, V::zero())) return;  // the first tile has nothing to rescale
    const Reg factor = V::exp2(V::subtract(old, top));
    V::store(sum, V::multiply(before, factor));
    for (int i = 0; i < padded_head_dim; i += V::kLanes) {
      V::store(acc + i, V::multiply(V::load(acc + i), factor));
    }
  }
};

}  // namespace
}  // namespace neo_desktop
