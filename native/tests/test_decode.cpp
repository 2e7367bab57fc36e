#include <cstdint>
#include <stdexcept>
#include <string>

#include "answer.h"
#include "problem.h"
#include "suites.h"

namespace neo_desktop::testing {
namespace {

double largest_error = 0;

// True if the library must answer the call.
bool valid(const DecodeProblem& problem) {
  for (int64_t b = 0; b < problem.batch(); ++b) {
    const int64_t length = problem.context_len(b);
    if (length < 0 || length > problem.block_tables.view().shape[1] * problem.block_tokens) return false;
    for (int64_t token = problem.first_token(b); token < length; ++token) {
      const int64_t block = problem.block(b, token / problem.block_tokens);
      if (block < 0 || block >= problem.num_blocks()) return false;
    }
  }
  return true;
}

// Puts arbitrary numbers into some lengths and some entries of the block tables.
void spoil(DecodeProblem& problem, Random& random) {
  const int64_t max_blocks = problem.block_tables.view().shape[1];
  const int64_t capacity = max_blocks * problem.block_tokens;
  for (int64_t b = 0; b < problem.batch(); ++b) {
    if (random.chance(0.3)) {
      const int64_t likely = random.between(-1, capacity + 1);
      const int64_t length =
          random.pick<int64_t>({likely, likely, capacity, capacity + 1, 0, INT32_MIN, INT32_MAX});
      problem.context_lens.set(b, static_cast<double>(length));
    }
    for (int64_t i = 0; i < max_blocks; ++i) {
      if (!random.chance(0.3 / max_blocks)) continue;
      const int64_t blocks = problem.num_blocks();
      const int64_t block =
          random.pick<int64_t>({random.between(0, blocks - 1), blocks, -1, INT32_MIN, INT32_MAX});
      problem.block_tables.set(problem.block_tables.at({b, i}), static_cast<double>(block));
    }
  }
}

}  // namespace

double largest_decode_error() { return largest_error; }

void test_decode(Random& random, Report& report) {
  const DecodeProblem problem(random, false);
  const Answer answer = right_answer(problem);
  const std::string cache = problem.cache.bytes();
  for (const Isa isa : available_isas()) {
    report.describe(isa_name(isa) + ("; " + problem.text()));
    problem.erase_new_tokens();
    problem.call(isa, problem.num_threads);
    if (problem.cache.bytes() != cache) report.fail("the cache does not hold what it held, and the new rows");
    const std::string wrong = what_is_wrong(problem, answer, largest_error);
    if (!wrong.empty()) report.fail(wrong);
    const std::string first = problem.out.bytes();
    problem.call(isa, problem.num_threads == 1 ? 4 : 1);
    if (problem.out.bytes() != first) report.fail("another number of threads, another result");
  }
}

void test_decode_of_garbage(Random& random, Report& report) {
  DecodeProblem problem(random, true);
  spoil(problem, random);
  const bool answerable = valid(problem);
  if (answerable) problem.new_k.reset();  // requests may now have the same last token
  const Answer answer = answerable ? right_answer(problem) : Answer{};
  const std::string before = problem.out.bytes() + problem.cache.bytes();
  for (const Isa isa : available_isas()) {
    report.describe(isa_name(isa) + ("; " + problem.text()));
    bool refused = false;
    try {
      problem.call(isa, problem.num_threads);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    if (refused == answerable) {
      report.fail(refused ? "a valid call was refused" : "an invalid call was not refused");
    } else if (refused) {
      if (problem.out.bytes() + problem.cache.bytes() != before)
        report.fail("refused, but something was written");
    } else {
      const std::string wrong = what_is_wrong(problem, answer, largest_error);
      if (!wrong.empty()) report.fail(wrong);
    }
  }
}

}  // namespace neo_desktop::testing
