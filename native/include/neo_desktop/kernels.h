// The contract between the driver (paged_attention.cpp) and the kernels, one set per instruction set.
// Included by the ISA-specific files: nothing here may generate code of its own.
#pragma once

#include <cstdint>

#include "neo_desktop/dtype.h"

namespace neo_desktop {

constexpr int kQueryTile = 8;  // query heads that a kernel works on at once, at most
constexpr int kMaxLanes = 16;  // head_dim is padded to a multiple of this
constexpr int kMaxHeadDim = 256;

// Query heads are worked on in tiles of kQueryTile; the last tile is padded to 1, 2, 4 or 8 of them.
constexpr int padded_group(int group) {
  const int rest = group % kQueryTile;
  return group - rest + (rest > 4 ? 8 : rest > 2 ? 4 : rest);
}
constexpr int query_tiles(int group) { return (group + kQueryTile - 1) / kQueryTile; }

// Decode attention of some KV heads and their query heads over tokens [begin, end) of one request.
struct AttendTask {
  const float* q;  // [kv_heads, padded_group, padded_head_dim], times scale * log2(e); the padding is zero
  const void* k;   // the first head's rows [block_size, head_dim] of block 0; v likewise
  const void* v;
  int64_t k_block_stride;  // elements between one block and the next
  int64_t v_block_stride;
  int64_t k_head_stride;  // elements between one KV head and the next
  int64_t v_head_stride;
  const int32_t* block_table;
  int64_t begin;
  int64_t end;
  int64_t block_size;
  int kv_heads;
  int group;  // query heads per KV head
  int padded_group;
  int head_dim;
  int padded_head_dim;
  float* lanes;  // scratch [kv_heads, query_tiles, 2, kMaxLanes]

  // Results. With the weight of token t for a query head: w[t] = 2^(score[t] - max),
  float* max;  // [kv_heads, padded_group] the largest score, in units of log2
  float* sum;  // [kv_heads, padded_group] sum of w[t] over t
  float* acc;  // [kv_heads, padded_group, padded_head_dim] sum of w[t] * v[t] over t
};

struct Kernels {
  // All indexed by DType (the cache's, or the row's). Lengths are multiples of 8.
  void (*attend[kFloatTypes])(const AttendTask& task);
  void (*widen[kFloatTypes])(const void* source, float* target, int length);
  void (*narrow[kFloatTypes])(const float* source, void* target, int length);

  // Reads every cache line once, in order; the result only keeps that from being optimised away.
  float (*read)(const void* data, int64_t bytes);
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

enum class Isa;

// The kernels of an available instruction set.
const Kernels& kernels_for(Isa isa);

}  // namespace neo_desktop
