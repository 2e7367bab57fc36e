// The right answer of decode attention, in double precision, and the comparison with it.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace neo_desktop::testing {

// What rounding to fp32 may do to a row of results, about: relative, by way of large scores; and absolute,
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

// What is wrong with `problem.out`; empty if nothing is. Raises `largest` to the largest error found, as a
// share of what is allowed.
std::string what_is_wrong(const DecodeProblem& problem, const Answer& answer, double& largest);

}  // namespace neo_desktop::testing
