#include "neo_desktop/arithmetic.h"

#include <chrono>
#include <stdexcept>
#include <vector>

#include "neo_desktop/kernels.h"
#include "neo_desktop/thread_pool.h"

namespace neo_desktop {
namespace {

constexpr double kMostSeconds = 10;
constexpr int64_t kRounds = 256;  // between two reads of the clock: some microseconds

}  // namespace

double fma_rate(double seconds, int num_threads, Isa isa, DType dtype) {
  if (!(seconds > 0 && seconds <= kMostSeconds)) {
    throw std::invalid_argument("seconds is " + std::to_string(seconds) + "; expected more than 0, up to 10");
  }
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16) {
    throw std::invalid_argument("dtype must be float32 or bfloat16");
  }
  const Kernels& kernels = kernels_for(isa);
  const bool dot_products = dtype == DType::kBFloat16 && kernels.bf16.multiply_adds != nullptr;
  const auto multiply_adds = dot_products ? kernels.bf16.multiply_adds : kernels.multiply_adds;

  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  // Per thread: a thread that wakes late has less time, but works as fast as the others while all are
  // working.
  std::vector<double> rates(num_threads, 0.0);
  const auto begin = Clock::now();
  ThreadPool::shared().run(num_threads, [&](int participant) {
    const auto own_begin = Clock::now();
    float kept = 0;
    int64_t count = 0;
    Clock::time_point now;
    do {
      count += multiply_adds(kRounds, &kept);
      now = Clock::now();
    } while (Seconds(now - begin).count() < seconds);
    rates[participant] = static_cast<double>(count) / Seconds(now - own_begin).count();
  });
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum;
}

}  // namespace neo_desktop
