// The right answer of decode attention, in double precision, and the comparison with it.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace neo_desktop::testing {

// Possible fp32 rounding error of a row of results, about: relative, because of large scores; and absolute,
// where values cancel each other.
struct RowError {
  double of_weights;
  double of_sums;
};

struct Answer {
  std::vector<double> out;       // [batch, heads, head_dim]
  std::vector<RowError> errors;  // [batch, heads]
};

Answer right_answer(const DecodeProblem& problem);

// Describes the errors of `problem.out`; empty if it is right. Raises `largest` to the largest error found,
// relative to the allowed one.
std::string what_is_wrong(const DecodeProblem& problem, const Answer& answer, double& largest);

}  // namespace neo_desktop::testing
