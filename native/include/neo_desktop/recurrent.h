// Linear attention with a state of fixed size per request, and the short convolutions before it: Gated
// DeltaNet (arXiv:2412.06464) and Mamba-2 (arXiv:2405.21060), token by token. A head's state stays in the
// core's caches while its tokens pass, so a prompt costs arithmetic and a decode one reading of the state.
#pragma once

#include <optional>

#include "neo_desktop/cpu.h"
#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// Both functions pass spans of tokens through states. A span [n, 4] int32 has the tokens first .. end - 1,
// the slot of the state before them, and the slot of the state after them: {first, end, source, target}.
// Source -1 is a state of zeros, target -1 drops the state. Targets differ from each other, and from the
// sources of other spans. Tokens outside the spans are not read, and their outputs not written.

// They throw std::invalid_argument for arguments that do not fit together; then nothing was written. Rows are
// fp32, fp16 or bf16 of one dtype; states are fp32 and contiguous. Tokens and threads do not change a sum's
// order.

// With S the state of a head, [key_dim, value_dim], each token computes:
//
//     S = exp(decay) * S
//     d = beta * (v - S^T k)      or beta * v without the delta rule
//     S = S + k d^T
//     out = S^T q
//
// q and k are [tokens, key_heads, key_dim], v and out [tokens, heads, value_dim], decay and beta [tokens,
// heads] fp32; heads is a multiple of key_heads, and neighbouring heads share a key. state is [slots, heads,
// key_dim, value_dim].
void scan_state(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& decay,
                const TensorView& beta, bool is_delta, const TensorView& state, const TensorView& spans,
                const TensorView& out, int num_threads, Isa isa);

// out = the sum over i of weight[i] * x of i - width + 1 tokens later, + bias; then silu, if asked. x and out
// are [tokens, channels] and may be the same; weight is [width, channels] fp32, bias [channels] fp32. state
// is [slots, width - 1, channels]: a request's last inputs, oldest first.
void short_convolution(const TensorView& x, const TensorView& weight, const std::optional<TensorView>& bias,
                       bool has_silu, const TensorView& state, const TensorView& spans, const TensorView& out,
                       int num_threads, Isa isa);

}  // namespace neo_desktop
