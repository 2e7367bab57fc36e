// Feed-forward networks of experts, some of which each row is given to.
#pragma once

#include <optional>
#include <vector>

#include "neo_desktop/packed_linear.h"

namespace neo_desktop {

// Gates of at most `limit` and ups between -limit and limit become (up + 1) * gate * sigmoid(alpha * gate).
struct ClampedGate {
  float alpha;
  float limit;
};

// A layer's experts: gate and up are [intermediate, hidden], down is [hidden, intermediate].
struct PackedExperts {
  std::vector<PackedMatrix> gate;
  std::vector<PackedMatrix> up;
  std::vector<PackedMatrix> down;
  bool alike;                                         // rows for gate serve for up, too
  std::optional<ClampedGate> clamped = std::nullopt;  // instead of silu(gate) * up
};

// Cuts matrices of all experts, one after the other, into those of each. An expert's rows are a multiple of
// 16, and lie in one part. Throws std::invalid_argument where they do not.
PackedExperts packed_experts(int64_t count, const PackedMatrix& gate, const PackedMatrix& up,
                             const PackedMatrix& down, std::optional<ClampedGate> clamped = std::nullopt);

// Rows with their experts. Tensors are of the model's dtype unless said otherwise, last dimensions
// contiguous.
struct ExpertRows {
  TensorView x;         // [n, hidden]
  TensorView ids;       // [n, k] int32: of experts; -1: of none
  TensorView weights;   // [n, k] fp32: what their results are multiplied with
  TensorView gate_up;   // [n * k, 2 * intermediate], with any content, likewise the next two
  TensorView gated;     // [n * k, intermediate]
  TensorView products;  // [n * k, hidden]
  TensorView out;       // [n, hidden]

  // Some of the rows; what has any content serves all of them, one after the other.
  ExpertRows part(int64_t first, int64_t count) const;
};

// out = sum over a row's experts of weight * (down @ (silu(gate @ x) * (up @ x))), in the order of its ids.
// Rows are grouped by expert: each expert's weights are read once. Products are those of packed_linear, their
// sum is fp32. A row's result depends neither on other rows nor on threads. Throws std::invalid_argument for
// what does not fit together, and for an id that is no expert's; nothing was written then.
void multiply_experts(const PackedExperts& experts, const ExpertRows& rows, int num_threads, Isa isa);

// Throws what `multiply_experts` would throw whatever the ids are.
void check_experts(const ExpertRows& rows);

}  // namespace neo_desktop
