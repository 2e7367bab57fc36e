// What lies between the attention of two layers of a decoder, in one call: threads are woken once, and wait
// for each other in between without sleeping.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "neo_desktop/cpu.h"
#include "neo_desktop/packed_linear.h"

namespace neo_desktop {

// What a step computes of a row; numbers are those of packed_linear and of operators.h, where it has them.
// Groups are what norms and heads are about. `a` and `b` are the step's sources, weights its tensors.
enum class RowOp {
  kMultiply,    // a @ matrix.T + bias; one group
  kAddRmsNorm,  // a += b, in place; RMSNorm(a) * weight [length]; one group
  kRmsNorm,     // RMSNorm(a) * weight: fp32 [length], or of the dtype, then rounded before that
  kLayerNorm,   // (a - mean) / deviation * weight + bias, both [length]
  kSiluMul,     // silu(gate) * up: a is [2 * length], gates first; one group
  kRope,  // heads (groups of length) in place, after a norm with weight [groups, length] if there is one;
          // a and b are cosine and sine, fp32
  kCopy,  // a, from fp32 or to it if dtypes differ
  kAdd,   // a + b, where b may be a weight [groups * length]; likewise those that follow
  kSubtract,
  kTimes,
  kAddNumber,    // a + number
  kTimesNumber,  // a * number
  kSilu,         // of a; likewise those that follow
  kSigmoid,
  kTanh,
  kRelu,
  kGelu,
  kGeluTanh,  // its approximation
};

// Columns of a buffer: group g begins at first + g * stride.
struct RowColumns {
  int64_t buffer;
  int64_t first;
  int64_t stride;
};

struct RowStep {
  RowOp op;
  std::vector<RowColumns> sources;
  RowColumns into;
  int64_t groups;  // of a product: the columns that it multiplies
  int64_t length;  // of each group, as it is written
  float number;    // a norm's epsilon, or a factor or addend
  std::vector<TensorView> weights;
  std::optional<PackedMatrix> matrix;
};

struct RowBuffer {
  int64_t width;
  DType dtype;
  bool is_given;  // to each call, in the order of such buffers; others are memory of the calling thread
};

// Steps that are carried out one after the other for each row. A step reads and writes its row alone.
class RowProgram {
 public:
  // Throws std::invalid_argument for what does not fit together.
  RowProgram(std::vector<RowBuffer> buffers, std::vector<RowStep> steps);

  // given are [n, width], of the buffers' dtypes; their last dimension is contiguous.
  // Throws std::invalid_argument for others; then nothing was written.
  void run(const std::vector<TensorView>& given, int num_threads, Isa isa) const;

 private:
  void check(const RowStep& step) const;
  void check_columns(const RowColumns& columns, int64_t groups, int64_t length) const;
  void place_buffers();
  void run_some(const std::vector<TensorView>& given, int64_t first, int64_t rows, int num_threads,
                Isa isa) const;

  std::vector<RowBuffer> buffers_;
  std::vector<RowStep> steps_;
  std::vector<int64_t> offsets_;  // of buffers that are not given: bytes in front of them, for one row
  int64_t row_bytes_ = 0;         // of all of them
  size_t num_given_ = 0;
};

}  // namespace neo_desktop
