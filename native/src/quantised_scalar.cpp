// Of any processor: a lane at a time.
#include "neo_desktop/half.h"
#include "quantised_tiles.h"

namespace neo_desktop {
namespace {

struct Scalar {
  using Ints = int32_t;
  using Floats = float;
  static constexpr int kLanes = 1;
  static constexpr int kRowsAtOnce = 4;

  struct Bytes {
    int32_t of[4];
  };

  template <WeightType type>
  static constexpr int shift() {
    return 0;
  }
  static void prefetch(const uint8_t*) {}
  static float zero() { return 0.0f; }
  static int32_t broadcast(int32_t x) { return x; }
  static float broadcast(float x) { return x; }
  static Bytes load(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static Bytes each(const Bytes& bytes, auto change) {
    return {{change(bytes.of[0]), change(bytes.of[1]), change(bytes.of[2]), change(bytes.of[3])}};
  }
  static Bytes prepare(const Bytes& bytes) {
    return each(bytes, [](int32_t x) { return static_cast<int32_t>(static_cast<int8_t>(x)); });
  }
  static Bytes low(const Bytes& bytes) {
    return each(bytes, [](int32_t x) { return x & 15; });
  }
  static Bytes high(const Bytes& bytes) {
    return each(bytes, [](int32_t x) { return x >> 4; });
  }
  static int32_t dot(int32_t sum, const Bytes& weights, const int8_t* columns) {
    for (int i = 0; i < 4; ++i) sum += weights.of[i] * columns[i];
    return sum;
  }
  static int32_t dot_signed(int32_t sum, const Bytes& prepared, const int8_t* columns) {
    return dot(sum, prepared, columns);
  }
  static float load_half(const uint8_t* p) {
    Half half;
    std::memcpy(&half, p, sizeof half);
    return to_float(half);
  }
  static float to_floats(int32_t x) { return static_cast<float>(x); }
  static float multiply(float a, float b) { return a * b; }
  static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
  static void store(float* p, float x) { *p = x; }
};

}  // namespace

constinit const QuantisedKernels kQuantisedScalar = make_quantised_kernels<Scalar>();

}  // namespace neo_desktop
