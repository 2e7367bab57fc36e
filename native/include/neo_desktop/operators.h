// A decoder's operators between its matmuls: normalisation, RoPE, SwiGLU's activation. They compute in fp32,
// and round to the tensors' dtype at the points where training rounds. A row's result does not depend on the
// number of rows.
#pragma once

#include <optional>

#include "neo_desktop/cpu.h"
#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// All throw std::invalid_argument for mismatched arguments. Tensors are fp32, fp16 or bf16 with one dtype;
// their last dimension is contiguous.

// residual += x, and out = RMSNorm(residual) * weight. x, residual and out are [n, hidden], weight is
// [hidden]. out may be x.
void add_rms_norm(const TensorView& x, const TensorView& residual, const TensorView& weight, float eps,
                  const TensorView& out, int num_threads, Isa isa);

// out = silu(gate) * up: gate_up is [n, 2 * m], gates first; out is [n, m].
void silu_mul(const TensorView& gate_up, const TensorView& out, int num_threads, Isa isa);

// Each row's first largest number: logits is [n, m], tokens [n] int64. -1 if a number is NaN or the largest
// one is infinite.
void choose_tokens(const TensorView& logits, const TensorView& tokens, int num_threads);

// A mixture of experts' choice. An expert's share is its logit's softmax or sigmoid.
struct Routing {
  bool is_sigmoid;
  bool normalises;                    // shares are divided by the sum of the chosen ones and epsilon
  float epsilon;                      // of sigmoids
  std::optional<TensorView> bias;     // [experts] fp32, added to sigmoids for the choice only
  std::optional<TensorView> factors;  // [experts] fp32, of shares
};

// Writes each row's k best experts, best first, the first among equals, and their shares. NaN is the best.
// logits is [n, experts], ids [n, k] int32, weights [n, k] fp32.
void choose_experts(const TensorView& logits, const Routing& routing, const TensorView& ids,
                    const TensorView& weights, int num_threads);

// Normalises (if norm is given) and rotates heads in place. heads is [n, heads, head_dim]; cos and sin are
// [n, head_dim] fp32, the first half of sin negated; norm is [heads, head_dim].
void rope(const TensorView& heads, const TensorView& cos, const TensorView& sin,
          const std::optional<TensorView>& norm, float eps, int num_threads, Isa isa);

}  // namespace neo_desktop
