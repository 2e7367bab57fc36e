// Tests of the core without Python, for sanitizers and for other processors:
//
//   neo_desktop_native_tests [cases [seed [first case]]]
//
// Every kernel that this CPU supports gets random problems, whose memory ends at an inaccessible page, and is
// compared with a reference in double precision. Prints failures, with the numbers that reproduce the case.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "neo_desktop/cpu.h"
#include "suites.h"

using namespace neo_desktop;
using namespace neo_desktop::testing;

namespace {

struct Suite {
  const char* name;
  void (*test)(Random& random, Report& report);
  int64_t share;  // of the cases: every share-th number is one
};

constexpr Suite kSuites[] = {
    {"decode", test_decode, 1},
    {"decode of garbage", test_decode_of_garbage, 1},
    {"prompts", test_prompts, 1},
    {"write", test_write, 1},
    {"read", test_read, 1},
    {"store", test_store, 1},
    {"concurrent calls", test_concurrent_calls, 10},
    {"relay", test_relay, 4},
    {"transfers", test_transfers, 4},
    {"products of the relay", test_products, 4},
    {"schedule", test_schedule, 2},
    {"quantised products", test_quantised, 2},
    {"dense products", test_dense, 2},
    {"quantised layers", test_quantised_layer, 4},
    {"experts", test_experts, 4},
};

}  // namespace

int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 400;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const int64_t first = argc > 3 ? std::atoll(argv[3]) : 0;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a sanitizer that ends the process leaves nothing unprinted
  Report report;
  for (uint64_t s = 0; s < std::size(kSuites); ++s) {
    for (int64_t i = first; i < first + cases; i += kSuites[s].share) {
      Random random(seed, s, i);
      report.begin(kSuites[s].name, seed, i);
      try {
        kSuites[s].test(random, report);
      } catch (const std::exception& error) {
        report.fail(error.what());
      }
    }
  }
  std::printf("isas:");
  for (const Isa isa : available_isas()) std::printf(" %s", isa_name(isa));
  std::printf("; cases: %lld; largest decode error: %.2g of what is allowed; failures: %lld\n",
              static_cast<long long>(cases), largest_decode_error(),
              static_cast<long long>(report.failures()));
  return report.failures() == 0 ? 0 : 1;
}
