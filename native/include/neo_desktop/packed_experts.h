// Feed-forward networks of experts, applied to the rows that are routed to them.
#pragma once

#include <optional>
#include <vector>

#include "neo_desktop/kernels.h"
#include "neo_desktop/packed_linear.h"

namespace neo_desktop {

// (up + 1) * gate * sigmoid(alpha * gate); gates are at most `limit`, ups between -limit and limit.
struct ClampedGate {
  float alpha;
  float limit;
};

// A layer's experts: gate and up are [intermediate, hidden], down is [hidden, intermediate].
struct PackedExperts {
  std::vector<PackedMatrix> gate;
  std::vector<PackedMatrix> up;
  std::vector<PackedMatrix> down;
  bool alike;                                         // gate and up share prepared rows
  std::optional<ClampedGate> clamped = std::nullopt;  // instead of silu(gate) * up
  Unary gate_by = Unary::kSilu;
  bool is_one = false;  // gate and up are the same matrix
};

// Divides stacked matrices into one per expert, as `divided` does.
PackedExperts packed_experts(int64_t count, const PackedMatrix& gate, const PackedMatrix& up,
                             const PackedMatrix& down, std::optional<ClampedGate> clamped = std::nullopt,
                             Unary gate_by = Unary::kSilu);

// Rows with their routing. Tensors have the model's dtype unless noted, and contiguous last dimensions.
struct ExpertRows {
  TensorView x;         // [n, hidden]
  TensorView ids;       // [n, k] int32: expert ids; -1: none
  TensorView weights;   // [n, k] fp32: routing weights
  TensorView gate_up;   // [n * k, 2 * intermediate], scratch, as are the next two
  TensorView gated;     // [n * k, intermediate]
  TensorView products;  // [n * k, hidden]
  TensorView out;       // [n, hidden]

  // Returns a range of rows; all ranges share the scratch tensors, one after the other.
  ExpertRows part(int64_t first, int64_t count) const;
};

// out = sum over a row's experts of weight * (down @ (silu(gate @ x) * (up @ x))), in the order of its ids.
// Rows are grouped by expert, so each expert's weights are read once. Matmuls are those of packed_linear,
// their sum is fp32. A row's result depends neither on other rows nor on threads. Throws
// std::invalid_argument for mismatched arguments and for invalid ids, before it writes anything.
void multiply_experts(const PackedExperts& experts, const ExpertRows& rows, int num_threads, Isa isa);

// Throws the errors of `multiply_experts` that do not depend on ids.
void check_experts(const ExpertRows& rows);

}  // namespace neo_desktop
