// Attention of prefill chunks over K and V in rows.
#pragma once

#include <cstdint>

#include "neo_desktop/cpu.h"
#include "neo_desktop/tensor_view.h"

namespace neo_desktop {

// Chunk c has the queries [ends[0, c], ends[0, c + 1]) and the context [ends[1, c], ends[1, c + 1]). Its last
// query attends to the whole context, each earlier query to one token less; with a `window` (0: none) only to
// the last tokens before it. scale, sinks (may be null) and softcap are those of DecodeArguments.
//
// A row of `out` depends only on its query, its context and the model's shape, not on other rows or the
// number of threads. In fp32 arithmetic it has the same bits as decode attention over pairs.
struct PromptArguments {
  TensorView q;     // [queries, heads, head_dim] fp32, fp16 or bf16; rows contiguous
  TensorView k;     // [contexts, kv_heads, head_dim] of q's dtype
  TensorView v;     // as k
  TensorView ends;  // [2, chunks + 1] int32
  TensorView out;   // as q
  int64_t window;
  const TensorView* sinks;  // [heads] fp32
  float scale;
  float softcap;
};

// Throws std::invalid_argument if a shape, dtype, stride or end is wrong, before anything is written.
void prompt_attention(const PromptArguments& arguments, int num_threads, Isa isa);

}  // namespace neo_desktop
