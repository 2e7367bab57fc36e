// What lies between the attention of two layers of a decoder, in one call: threads are woken once, and wait
// for each other in between without sleeping.
#pragma once

#include <optional>
#include <vector>

#include "neo_desktop/packed_linear.h"

namespace neo_desktop {

// A layer's weights; tensors are of the model's dtype.
struct PackedLayer {
  TensorView input_norm;  // [hidden]
  PackedMatrix qkv;
  std::optional<TensorView> qk_norm;  // [rotated heads, head_dim]
  PackedMatrix output;
  TensorView post_attention_norm;  // [hidden]
  PackedMatrix gate_up;
  PackedMatrix down;
  float eps;
};

// What layers hand on, [n, ...] of the model's dtype.
struct LayerState {
  TensorView residual;   // [n, hidden]
  TensorView x;          // [n, hidden]: what is to be added to it
  TensorView qkv;        // [n, all heads * head_dim]
  TensorView rotated;    // [n, heads of queries and keys, head_dim]: part of it
  TensorView attention;  // [n, heads * head_dim]
  TensorView cos;        // [n, head_dim] fp32
  TensorView sin;
  TensorView normed;   // [n, hidden]
  TensorView gate_up;  // [n, 2 * intermediate]
  TensorView gated;    // [n, intermediate]
};

// Computes what follows the attention of layer `finished`, then what precedes that of layer `begun`, up to
// rotated queries and keys; null: nothing. Numbers are those of packed_linear and of operators.h. Meant
// for few rows, whose quantised form stays in a core's caches.
// Throws std::invalid_argument for what does not fit together.
void advance(const PackedLayer* finished, const PackedLayer* begun, const LayerState& state, int num_threads,
             Isa isa);

}  // namespace neo_desktop
