// The contract between the driver (decode_call.cpp) and the kernels, one set per instruction set.
// Included by the ISA-specific files: nothing here may generate code of its own.
#pragma once

#include <array>
#include <cstdint>

#include "neo_desktop/dtype.h"

namespace neo_desktop {

constexpr int kQueryTile = 8;  // query heads that a kernel works on at once, at most
constexpr int kMaxLanes = 16;  // head_dim is padded to a multiple of this
constexpr int kMaxHeadDim = 256;
constexpr int kSegmentTokens =
    16;  // in the layout of dimension pairs, blocks and pages are multiples of this
constexpr int kPairTile = 4 * kSegmentTokens;  // tokens that attention takes at once

// Query heads are worked on in tiles of kQueryTile; the last tile is padded to 1, 2, 4 or 8 of them.
constexpr int padded_group(int group) {
  const int rest = group % kQueryTile;
  return group - rest + (rest > 4 ? 8 : rest > 2 ? 4 : rest);
}

// Decode attention of some KV heads and their query heads over tokens [begin, end) of one request.
struct AttendTask {
  const float* q;  // [kv_heads, padded_group, padded_head_dim], times scale * log2(e); the padding is zero
  const BFloat16* q_bf16;  // the same before it was multiplied, if q is bf16; for Bf16Kernels
  float score_scale;       // what q_bf16 lacks
  float softcap;           // of scores in units of log2; 0: none

  // The first head of page 0: rows [page_tokens, head_dim], or, of K, pairs [head_dim / 2, page_tokens, 2].
  const void* k;
  const void* v;
  int64_t k_page_stride;  // elements between one page and the next
  int64_t v_page_stride;
  int64_t k_head_stride;  // elements between one KV head and the next
  int64_t v_head_stride;
  const float* k_scale;  // of int8 only: what each token's row is multiplied with, page 0's first head
  const float* v_scale;
  int64_t scale_page_stride;
  int64_t scale_head_stride;
  // Token t is row t % block_tokens of block block_table[t / block_tokens]; block b is the part
  // b % blocks_per_page of page b / blocks_per_page.
  const int32_t* block_table;
  int64_t begin;
  int64_t end;
  int64_t block_tokens;
  int64_t blocks_per_page;
  int64_t page_tokens;  // block_tokens * blocks_per_page
  int kv_heads;
  int group;  // query heads per KV head
  int padded_group;
  int head_dim;
  int padded_head_dim;
  const AttendTask* next;  // what this thread attends to afterwards, to read ahead; may be null
  float* state;            // scratch [kv_heads, padded_group, 2, kMaxLanes]

  // Results. With the weight of token t for a query head: w[t] = 2^(score[t] - max),
  float* max;  // [kv_heads, padded_group] the largest score, in units of log2
  float* sum;  // [kv_heads, padded_group] sum of w[t] over t
  float* acc;  // [kv_heads, padded_group, padded_head_dim] sum of w[t] * v[t] over t
};

using AttendKernel = void(const AttendTask& task);

constexpr int kPromptRows = 6;  // that a prompt kernel works on at once

// Prompt attention of one KV head's query heads over tokens [begin, end) of one request. A row is a query
// head of a token, row r query head r % group of the token at `position` + r / group. It attends to the
// tokens up to its own, or to the last `window` of them.
struct PromptTask {
  const float* q;  // [rows / kPromptRows rounded up, padded_head_dim / 2, kPromptRows, 2], times
                   // scale * log2(e); the padding is zero
  const void* k;   // the head's rows of the context, from token 0 on
  const void* v;
  int64_t k_stride;  // elements from one token to the next
  int64_t v_stride;
  int64_t begin;  // a multiple of the tiles
  int64_t end;
  int64_t position;
  int64_t window;  // 0: none
  int rows;
  int group;
  int head_dim;
  int padded_head_dim;
  float softcap;  // of scores in units of log2; 0: none
  float* tiles;   // scratch [2, kPairTile, padded_head_dim]
  float* state;   // scratch [rows, 2, kMaxLanes]

  // Results, as of AttendTask; acc has room for whole groups of kPromptRows. Rows without a token are empty.
  float* max;  // [rows]
  float* sum;
  float* acc;  // [rows, padded_head_dim]
};

using PromptKernel = void(const PromptTask& task);

// What dot-product instructions of bf16 do faster; null where there are none.
struct Bf16Kernels {
  // As DenseKernels::multiply for weights in bf16, with rows of x in bf16, too; null where it is not faster.
  void (*multiply_dense)(const void* tile, const BFloat16* x, int64_t columns, int rows, float* out);
  // As attend_pairs, for several query heads in bf16 and caches that bf16 holds exactly. Adds up in fp32.
  std::array<AttendKernel*, kCacheTypes> attend;
  // Query heads per KV head from which on they are faster than fp32; for fewer, memory decides.
  std::array<int, kCacheTypes> min_group;
  // As Kernels::multiply_adds.
  int64_t (*multiply_adds)(int64_t rounds, float* kept);
};

// Of a row's numbers one by one, in the order of RowOp.
enum class Unary { kSilu, kSigmoid, kTanh, kRelu, kGelu, kGeluTanh };
constexpr int kUnaries = static_cast<int>(Unary::kGeluTanh) + 1;
enum class Binary { kAdd, kSubtract, kTimes };
constexpr int kBinaries = static_cast<int>(Binary::kTimes) + 1;

// A row's share of the operators in operators.h and row_program.h, indexed by DType; any length.
struct RowOperators {
  void (*add_rms_norm[kFloatTypes])(const void* x, void* residual, const void* weight, void* out, int length,
                                    float eps);
  void (*silu_mul[kFloatTypes])(const void* gate_up, void* out, int length);
  // (up + 1) * gate * sigmoid(alpha * gate), of gates of at most `limit` and ups between -limit and limit.
  void (*clamped_mul[kFloatTypes])(const void* gate_up, void* out, int length, float alpha, float limit);
  // norm may be null.
  void (*rope[kFloatTypes])(void* heads, int count, int dim, const float* cos, const float* sin,
                            const void* norm, float eps);
  // Rounded to the dtype before it is multiplied with weights of it; or not, with weights of fp32.
  void (*rms_norm[kFloatTypes])(const void* x, const void* weight, void* out, int length, float eps);
  void (*wide_rms_norm[kFloatTypes])(const void* x, const void* weight, void* out, int length, float eps);
  // bias may be null.
  void (*layer_norm[kFloatTypes])(const void* x, const void* weight, const void* bias, void* out, int length,
                                  float eps);
  // By the dtype that is written, then the one that is read.
  void (*convert[kFloatTypes][kFloatTypes])(const void* source, void* target, int length);
  void (*unary[kUnaries][kFloatTypes])(const void* x, void* out, int length);
  void (*binary[kBinaries][kFloatTypes])(const void* a, const void* b, void* out, int length);
  // x * factor + addend
  void (*scale[kFloatTypes])(const void* x, void* out, int length, float factor, float addend);
};

// Products with rows of plain numbers, packed in tiles of 16: [columns, 16], in bf16 [columns / 2, 16, 2].
struct DenseKernels {
  // Puts a tile's products with rows x[rows, columns] into out[rows, 16], indexed by DType (the weights');
  // columns is even. rows is at most rows_at_once. A row's sums do not depend on the others.
  void (*multiply[kFloatTypes])(const void* tile, const float* x, int64_t columns, int rows, float* out);
  int rows_at_once;
};

// Some tokens of a head in `scan_state`, all fp32; see recurrent.h.
struct ScanTask {
  const float* q;      // [tokens, key_dim]
  const float* k;      // [tokens, key_dim]
  float* v;            // [tokens, value_dim], replaced by the output
  const float* decay;  // [tokens], as a factor
  const float* beta;   // [tokens]; may be null
  float* state;        // [key_dim, value_dim]
  int tokens;
  int key_dim;
  int value_dim;
};

constexpr int kMaxConvolution = 8;  // taps

// Some channels of a request in `short_convolution`. Strides are in elements.
struct ConvolutionTask {
  const void* x;
  void* out;
  const float* weight;
  const float* bias;  // may be null
  float* state;
  int64_t x_stride;
  int64_t out_stride;
  int64_t state_stride;  // between rows of weight and of state
  int64_t tokens;
  int channels;
  int width;
  bool has_silu;
};

struct StateKernels {
  void (*scan)(const ScanTask& task);
  void (*convolve[kFloatTypes])(const ConvolutionTask& task);
};

struct Kernels {
  // All indexed by DType (the cache's, or the row's). Lengths are multiples of 8.
  AttendKernel* attend_rows[kFloatTypes];
  AttendKernel* attend_pairs[kCacheTypes];
  PromptKernel* attend_prompt[kFloatTypes];
  // Adds the partial softmax (acc, max, sum) of one chunk of a context to that of the chunks before it.
  void (*merge)(const float* acc, float max, float sum, float* into_acc, float* into_max, float* into_sum,
                int padded_head_dim);
  // To fp32 and from it, times a factor.
  void (*widen[kFloatTypes])(const void* source, float* target, int length, float factor);
  void (*narrow[kFloatTypes])(const float* source, void* target, int length, float factor);

  // Reads every cache line once, in order; the result only keeps that from being optimised away.
  float (*read)(const void* data, int64_t bytes);

  // Makes independent multiply-adds in registers, as many at a time as keep the core busy, and returns how
  // many; `rounds` is how often it goes through them. kept is zero at first, and only keeps them from being
  // optimised away.
  int64_t (*multiply_adds)(int64_t rounds, float* kept);

  RowOperators operators;
  DenseKernels dense;
  StateKernels states;
  Bf16Kernels bf16;
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Bf16Kernels kAvx512Bf16Kernels;
extern const Bf16Kernels kAmxKernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
extern const Bf16Kernels kNeonBf16Kernels;
#endif

enum class Isa;

// The kernels of an available instruction set.
const Kernels& kernels_for(Isa isa);

}  // namespace neo_desktop
