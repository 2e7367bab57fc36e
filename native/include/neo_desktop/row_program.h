// The work between the attention of two layers of a decoder in one call: threads are woken once, and spin
// between steps instead of sleeping.
#pragma once

#include <cstdint>
#include <vector>

#include "neo_desktop/cpu.h"
#include "neo_desktop/packed_linear.h"

namespace neo_desktop {

// The operations on a row; their numbers are those of packed_linear and operators.h. Norms and heads work on
// groups. `a` and `b` are the step's sources, weights its tensors.
enum class RowOp {
  kMultiply,    // a @ matrix.T + bias, per head if there are several matrices
  kAddRmsNorm,  // a += b, in place; RMSNorm(a) * weight [length]; one group
  kRmsNorm,     // RMSNorm(a) * weight: fp32 [length], or in the dtype, then rounded before the product
  kLayerNorm,   // (a - mean) / deviation * weight + bias, both [length]
  kSiluMul,     // silu(gate) * up: a is [2 * length], gates first; one group
  kRope,        // heads (groups of length) in place, after an optional norm with weight [groups, length];
                // a and b are cosine and sine, fp32
  kCopy,        // a, converted from fp32 or to fp32 if dtypes differ
  kAdd,         // a + b, b may be a weight [groups * length], as for the next two
  kSubtract,
  kTimes,
  kAddNumber,    // a + number
  kTimesNumber,  // a * number
  kSilu,         // silu(a); the next ones are functions of a
  kSigmoid,
  kTanh,
  kRelu,
  kGelu,
  kGeluTanh,  // tanh approximation of GELU
  kSoftplus,
};

// Columns of a buffer: group g starts at first + g * stride.
struct RowColumns {
  int64_t buffer;
  int64_t first;
  int64_t stride;
};

struct RowStep {
  RowOp op;
  std::vector<RowColumns> sources;
  RowColumns into;
  int64_t groups;  // for matmuls: number of input columns
  int64_t length;  // of a group in the target
  float number;    // a norm's epsilon, or a factor or addend
  std::vector<TensorView> weights;
  std::vector<PackedMatrix> matrices;  // of a matmul: one, or one of equal size per head
};

struct RowBuffer {
  int64_t width;
  DType dtype;
  bool is_given;  // passed to each call, in order; other buffers are the calling thread's memory
};

// Steps that run one after the other for each row. A step reads and writes only its row.
class RowProgram {
 public:
  // Throws std::invalid_argument for invalid or mismatched arguments.
  RowProgram(std::vector<RowBuffer> buffers, std::vector<RowStep> steps);

  // given are [n, width], in the buffers' dtypes, with contiguous last dimensions. Throws
  // std::invalid_argument for others, before it writes anything.
  void run(const std::vector<TensorView>& given, int num_threads, Isa isa) const;

 private:
  void check(const RowStep& step) const;
  void check_columns(const RowColumns& columns, int64_t groups, int64_t length) const;
  void place_buffers();
  void run_some(const std::vector<TensorView>& given, int64_t first, int64_t rows, int num_threads,
                Isa isa) const;

  std::vector<RowBuffer> buffers_;
  std::vector<RowStep> steps_;
  std::vector<int64_t> offsets_;  // of buffers that are not given, in bytes per row
  int64_t row_bytes_ = 0;         // total of these buffers
  size_t num_given_ = 0;
};

}  // namespace neo_desktop
