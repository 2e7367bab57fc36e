// The contract between the driver (decode_call.cpp) and the kernels, one set per instruction set.
// Included by the ISA-specific files: nothing here may generate code of its own.
#pragma once

#include <array>
#include <cstdint>

#include "neo_desktop/dtype.h"

namespace neo_desktop {

constexpr int kQueryTile = 8;  // query heads that a kernel processes at once, at most
constexpr int kMaxLanes = 16;  // head_dim is padded to a multiple of this
constexpr int kMaxHeadDim = 576;
constexpr int kSegmentTokens = 16;             // with K in pairs, blocks and pages are multiples of this
constexpr int kPairTile = 4 * kSegmentTokens;  // tokens per step of attention

// Query heads are processed in tiles of kQueryTile; the last tile is padded to 1, 2, 4 or 8 heads.
constexpr int padded_group(int group) {
  const int rest = group % kQueryTile;
  return group - rest + (rest > 4 ? 8 : rest > 2 ? 4 : rest);
}

// Decode attention of some KV heads and their query heads over tokens [begin, end) of one request, for one
// or more rows of queries. Row r attends to the tokens before context_len - (rows - 1 - r).
struct AttendTask {
  const float* q;  // [kv_heads, rows, padded_group, padded_head_dim], times scale * log2(e); padding is zero
  const BFloat16* q_bf16;  // unscaled queries if q is bf16; for Bf16Kernels
  float score_scale;       // factor missing in q_bf16
  float softcap;           // of scores in units of log2; 0: none

  // The first head of page 0: rows [page_tokens, head_dim], or, of K, pairs [head_dim / 2, page_tokens, 2].
  const void* k;
  const void* v;
  int64_t k_page_stride;  // elements between one page and the next
  int64_t v_page_stride;
  int64_t k_head_stride;  // elements between one KV head and the next
  int64_t v_head_stride;
  void* paired;          // scratch [head_dim / 2, kPairTile, 2]: k and v are the same rows; null: they differ
  const float* k_scale;  // int8 only: scale per token, from page 0's first head on
  const float* v_scale;
  int64_t scale_page_stride;
  int64_t scale_head_stride;
  // Token t is row t % block_tokens of block block_table[t / block_tokens]; block b is part b %
  // blocks_per_page of page b / blocks_per_page.
  const int32_t* block_table;
  int64_t begin;
  int64_t end;
  int64_t context_len;  // of the last row; at least `end`
  int64_t block_tokens;
  int64_t blocks_per_page;
  int64_t page_tokens;  // block_tokens * blocks_per_page
  int kv_heads;
  int rows;
  int group;  // query heads per KV head
  int padded_group;
  int head_dim;
  int padded_head_dim;
  const AttendTask* next;  // this thread's next task, for read-ahead; may be null
  float* state;            // scratch [kv_heads, rows, padded_group, 2, kMaxLanes]

  // Results. With the weight of token t for a query head: w[t] = 2^(score[t] - max),
  float* max;  // [kv_heads, rows, padded_group] the largest score, in units of log2
  float* sum;  // [kv_heads, rows, padded_group] sum of w[t] over t
  float* acc;  // [kv_heads, rows, padded_group, padded_head_dim] sum of w[t] * v[t] over t
};

using AttendKernel = void(const AttendTask& task);

constexpr int kPromptRows = 6;  // rows that a prompt kernel processes at once

// Prompt attention of one KV head's query heads over tokens [begin, end) of one request. A row is a query
// head of a token, row r query head r % group of the token at `position` + r / group. It attends to the
// tokens up to its own, at most to the last `window` tokens.
struct PromptTask {
  const float* q;  // [rows / kPromptRows rounded up, padded_head_dim / 2, kPromptRows, 2], times
                   // scale * log2(e); the padding is zero
  const void* k;   // the head's rows of the context, from token 0 on
  const void* v;
  int64_t k_stride;  // elements between tokens
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

  // Results, as in AttendTask; acc has room for whole groups of kPromptRows. Rows without a token are empty.
  float* max;  // [rows]
  float* sum;
  float* acc;  // [rows, padded_head_dim]
};

using PromptKernel = void(const PromptTask& task);

// Kernels that bf16 dot-product instructions speed up; null if the ISA has none.
struct Bf16Kernels {
  // As DenseKernels::multiply for bf16 weights, but rows of x are also bf16; null if it is not faster.
  void (*multiply_dense)(const void* tile, const BFloat16* x, int64_t columns, int rows, float* out);
  // As attend_pairs, for several query heads in bf16 and caches that bf16 represents exactly. Accumulates in
  // fp32.
  std::array<AttendKernel*, kCacheTypes> attend;
  // Query heads per KV head from which this is faster than fp32; with fewer, memory is the limit.
  std::array<int, kCacheTypes> min_group;
  // As Kernels::multiply_adds.
  int64_t (*multiply_adds)(int64_t rounds, float* kept);
};

// Elementwise functions, in the order of RowOp.
enum class Unary { kSilu, kSigmoid, kTanh, kRelu, kGelu, kGeluTanh, kSoftplus };
constexpr int kUnaries = static_cast<int>(Unary::kSoftplus) + 1;
enum class Binary { kAdd, kSubtract, kTimes };
constexpr int kBinaries = static_cast<int>(Binary::kTimes) + 1;

// The operators of operators.h and row_program.h for one row of any length, indexed by DType.
struct RowOperators {
  void (*add_rms_norm[kFloatTypes])(const void* x, void* residual, const void* weight, void* out, int length,
                                    float eps);
  void (*silu_mul[kFloatTypes])(const void* gate_up, void* out, int length);
  // (up + 1) * gate * sigmoid(alpha * gate); gates are at most `limit`, ups between -limit and limit.
  void (*clamped_mul[kFloatTypes])(const void* gate_up, void* out, int length, float alpha, float limit);
  // norm may be null.
  void (*rope[kFloatTypes])(void* heads, int count, int dim, const float* cos, const float* sin,
                            const void* norm, float eps);
  // With weights in x's dtype, rounds before the multiplication; with fp32 weights, after it.
  void (*rms_norm[kFloatTypes])(const void* x, const void* weight, void* out, int length, float eps);
  void (*wide_rms_norm[kFloatTypes])(const void* x, const void* weight, void* out, int length, float eps);
  // bias may be null.
  void (*layer_norm[kFloatTypes])(const void* x, const void* weight, const void* bias, void* out, int length,
                                  float eps);
  // Indexed by the target's dtype, then the source's.
  void (*convert[kFloatTypes][kFloatTypes])(const void* source, void* target, int length);
  void (*unary[kUnaries][kFloatTypes])(const void* x, void* out, int length);
  void (*binary[kBinaries][kFloatTypes])(const void* a, const void* b, void* out, int length);
  // x * factor + addend
  void (*scale[kFloatTypes])(const void* x, void* out, int length, float factor, float addend);
};

// Matmuls with dense weights in tiles of 16 rows: [columns, 16], in bf16 [columns / 2, 16, 2].
struct DenseKernels {
  // Writes a tile's products with rows x[rows, columns] to out[rows, 16], indexed by DType (the weights').
  // columns is even; rows is at most rows_at_once. A row's sums do not depend on other rows.
  void (*multiply[kFloatTypes])(const void* tile, const float* x, int64_t columns, int rows, float* out);
  int rows_at_once;
};

// Some tokens of a head in `scan_state`, all fp32; see recurrent.h.
struct ScanTask {
  const float* q;       // [tokens, key_dim]
  const float* k;       // [tokens, key_dim]
  float* v;             // [tokens, value_dim], replaced by the output
  const float* decay;   // [tokens], as a factor
  const float* beta;    // [tokens]; null: without the delta rule
  const float* before;  // [key_dim, value_dim], the state before the tokens
  float* state;         // the same after them; may be `before`
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
  // All are indexed by DType (the cache's, or the row's). Lengths are multiples of 8.
  AttendKernel* attend_rows[kFloatTypes];
  AttendKernel* attend_pairs[kCacheTypes];
  PromptKernel* attend_prompt[kFloatTypes];
  // Merges the partial softmax (acc, max, sum) of one chunk of a context into that of the chunks before it.
  void (*merge)(const float* acc, float max, float sum, float* into_acc, float* into_max, float* into_sum,
                int padded_head_dim);
  // Conversions to fp32 and from fp32, times a factor.
  void (*widen[kFloatTypes])(const void* source, float* target, int length, float factor);
  void (*narrow[kFloatTypes])(const float* source, void* target, int length, float factor);

  // Reads every cache line once, in order; the result prevents the compiler from removing the reads.
  float (*read)(const void* data, int64_t bytes);

  // Runs independent multiply-adds in registers, enough at a time to keep the core busy, for `rounds` rounds.
  // Returns their number. kept must be zero; it prevents the compiler from removing them.
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
