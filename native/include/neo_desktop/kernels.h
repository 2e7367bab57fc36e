// The contract between the driver (paged_attention.cpp) and the kernels, one set per instruction set.
// Included by the ISA-specific files: nothing here may generate code of its own.
#pragma once

#include <cstdint>

#include "neo_desktop/dtype.h"

namespace neo_desktop {

constexpr int kQueryTile = 8;  // query heads are padded to a multiple of this
constexpr int kMaxLanes = 16;  // head_dim is padded to a multiple of this
constexpr int kMaxHeadDim = 256;

// Decode attention of the query heads of one KV head over tokens [begin, end) of one request.
struct AttendTask {
  const float* q;  // [padded_group, padded_head_dim], times scale * log2(e); the padding is zero
  const void* k;   // this head's rows [block_size, head_dim] of block 0; v likewise
  const void* v;
  int64_t k_block_stride;  // elements between one block and the next
  int64_t v_block_stride;
  const int32_t* block_table;
  int64_t begin;
  int64_t end;
  int64_t block_size;
  int head_dim;
  int group;            // query heads
  int padded_group;     // group rounded up to kQueryTile
  int padded_head_dim;  // head_dim rounded up to kMaxLanes
  float* lanes;         // scratch [padded_group / kQueryTile, 2, kMaxLanes]

  // Results. With the weight of token t for query head g: w = 2^(score[g][t] - max[g]),
  float* max;  // [padded_group] the largest score, in units of log2
  float* sum;  // [padded_group] sum of w over t
  float* acc;  // [padded_group, padded_head_dim] sum of w * v[t] over t
};

struct Kernels {
  // All indexed by DType (the cache's, or the row's). Lengths are multiples of 8.
  void (*attend[kFloatTypes])(const AttendTask& task);
  void (*widen[kFloatTypes])(const void* source, float* target, int length);
  void (*narrow[kFloatTypes])(const float* source, void* target, int length);
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
