#include <string>
#include <thread>
#include <vector>

#include "answer.h"
#include "neo_desktop/paged_attention.h"
#include "problem.h"
#include "suites.h"

namespace neo_desktop::testing {
namespace {

constexpr int kCallers = 4;
constexpr int kCallsEach = 6;

// One thread's calls: it writes to its own cache, and decodes.
class Caller {
 public:
  explicit Caller(Random& random)
      : problem_(random, true),
        answer_(right_answer(problem_)),
        isa_(available_isas()[random.between(0, static_cast<int64_t>(available_isas().size()) - 1)]),
        written_(problem_.cache.shape, random),
        rows_("rows", DType::kFloat32, {1, problem_.cache.shape.kv_heads, problem_.cache.shape.head_dim},
              packed_strides({1, problem_.cache.shape.kv_heads, problem_.cache.shape.head_dim}), random),
        slot_("slot", DType::kInt64, {1}, {1}, random) {
    slot_.set(0, 0);
  }

  void run() {
    for (int i = 0; i < kCallsEach && wrong_.empty(); ++i) {
      problem_.erase_new_tokens();
      problem_.call(isa_, problem_.num_threads);
      wrong_ = what_is_wrong(problem_, answer_, largest_error_);
      paged_kv_write(rows_.view(), rows_.view(), written_.k.view(), written_.v.view(),
                     written_.k_scale_view(), written_.v_scale_view(), slot_.view(), 2, isa_);
    }
  }

  const DecodeProblem& problem() const { return problem_; }
  const std::string& wrong() const { return wrong_; }

 private:
  DecodeProblem problem_;
  Answer answer_;
  Isa isa_;
  Cache written_;
  Tensor rows_;
  Tensor slot_;
  std::string wrong_;
  double largest_error_ = 0;
};

}  // namespace

void test_concurrent_calls(Random& random, Report& report) {
  std::vector<Caller> callers;
  for (int i = 0; i < kCallers; ++i) callers.emplace_back(random);
  report.describe(std::to_string(kCallers) + " threads");
  std::vector<std::thread> threads;
  for (Caller& caller : callers) threads.emplace_back([&caller] { caller.run(); });
  for (std::thread& thread : threads) thread.join();
  for (const Caller& caller : callers) {
    if (caller.wrong().empty()) continue;
    report.describe("one of " + std::to_string(kCallers) + " threads; " + caller.problem().text());
    report.fail(caller.wrong());
  }
}

}  // namespace neo_desktop::testing
