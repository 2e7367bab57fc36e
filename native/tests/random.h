// Random numbers of one test case: the same seed, suite and index always give the same case.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

namespace neo_desktop::testing {

class Random {
 public:
  Random(uint64_t seed, uint64_t suite, uint64_t index) {
    std::seed_seq sequence{seed, suite, index};
    engine_.seed(sequence);
  }

  // From `low` to `high`, both included.
  int64_t between(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }

  bool chance(double probability) { return std::bernoulli_distribution(probability)(engine_); }

  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int64_t>(choices.size()) - 1)];
  }

  // `count` normally distributed numbers, up to kMostNoise: a piece of a pool, as drawing each is slow.
  const double* noise(int64_t count) { return pool().data() + between(0, kPool - count); }
  static constexpr int64_t kMostNoise = 256;

  std::mt19937_64& engine() { return engine_; }

 private:
  static constexpr int64_t kPool = 1 << 14;
  static const std::vector<double>& pool() {
    static const std::vector<double> numbers = [] {
      std::mt19937_64 engine(1);
      std::normal_distribution<double> normal;
      std::vector<double> drawn(kPool);
      for (double& number : drawn) number = normal(engine);
      return drawn;
    }();
    return numbers;
  }

  std::mt19937_64 engine_;
};

}  // namespace neo_desktop::testing
