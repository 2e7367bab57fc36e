#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../src/decode_schedule.h"
#include "suites.h"

namespace neo_desktop::testing {
namespace {

struct ScheduleProblem {
  DecodeSchedule::Shape shape;
  std::vector<int32_t> lens;
  int64_t window;
  int num_threads;

  explicit ScheduleProblem(Random& random) {
    const int64_t head_bytes = 4 * random.pick({8, 64, 128, 256});
    shape = {random.pick({1, 2, 3, 8, 32}), random.pick({1, 3, 4, 8, 71}), head_bytes};
    const int64_t batch = random.pick({1, 2, 8, 300});
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t longest = random.pick({1, 100, 5000, batch < 10 ? 100'000 : 5000});
      lens.push_back(static_cast<int32_t>(random.chance(0.2) ? 0 : random.between(1, longest)));
    }
    window = random.chance(0.7) ? 0 : random.between(1, 5000);
    num_threads = static_cast<int>(random.pick({1, 2, 7, 64, 500}));
  }

  std::string text() const {
    std::ostringstream text;
    text << lens.size() << " requests, " << shape.kv_heads << " KV heads, group " << shape.group
         << ", window " << window << ", " << num_threads << " threads";
    return text.str();
  }

  int64_t begin(int64_t b) const { return window > 0 ? std::max<int64_t>(0, lens[b] - window) : 0; }
};

using Pieces = std::vector<std::pair<int64_t, int64_t>>;  // [begin, end) of tokens, in order

// Takes all items, and returns the cuts by (request, KV head).
std::map<std::pair<int64_t, int64_t>, Pieces> take_all(DecodeSchedule& schedule, Report& report) {
  std::map<std::pair<int64_t, int64_t>, Pieces> pieces;
  int64_t next = 0;
  for (auto batch = schedule.take(); batch.next < batch.end; batch = schedule.take()) {
    if (batch.next != next) report.fail("items were skipped or taken twice");
    next = batch.end;
    for (int64_t number = batch.next; number < batch.end; ++number) {
      const DecodeItem item = schedule.item(number);
      if (item.heads > schedule.most_heads_per_item()) report.fail("more heads than there is memory for");
      for (int64_t head = item.head; head < item.head + item.heads; ++head) {
        pieces[{item.request->b, head}].push_back({item.begin, item.end});
      }
    }
  }
  return pieces;
}

}  // namespace

void test_schedule(Random& random, Report& report) {
  const ScheduleProblem problem(random);
  report.describe(problem.text());
  const auto batch = static_cast<int64_t>(problem.lens.size());
  std::vector<DecodeRequest> memory;
  const std::vector<char> separate(batch, 0);
  DecodeSchedule schedule(problem.lens.data(), separate, batch, problem.window, problem.shape,
                          problem.num_threads, memory);
  const auto present = batch - std::count(problem.lens.begin(), problem.lens.end(), 0);
  const int least = present > 0 ? 1 : 0;
  if (schedule.threads() < least || schedule.threads() > problem.num_threads) {
    report.fail("threads out of range");
  }
  const auto pieces = take_all(schedule, report);
  if (static_cast<int64_t>(pieces.size()) != present * problem.shape.kv_heads) {
    report.fail("heads are missing, or taken of nobody");
  }
  for (const auto& [where, cut] : pieces) {
    const int64_t b = where.first;
    int64_t token = problem.begin(b);
    for (const auto& [begin, end] : cut) {
      if (begin != token || end <= begin) report.fail("tokens are missing, taken twice or out of order");
      token = end;
    }
    if (token != problem.lens[b]) report.fail("the last tokens are missing");
    if (where.second > 0) continue;
    // The request alone, in one thread: the cuts determine the rounding of results.
    std::vector<DecodeRequest> own;
    DecodeSchedule alone(&problem.lens[b], {0}, 1, problem.window, problem.shape, 1, own);
    if (take_all(alone, report)[{0, 0}] != cut) {
      report.fail("chunks depend on the batch or on the number of threads");
    }
  }
}

}  // namespace neo_desktop::testing
