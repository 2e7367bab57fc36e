// Any processor: one lane at a time.
#include "neo_desktop/half.h"
#include "quantised_tiles.h"

namespace neo_desktop {
namespace {

struct Scalar {
  using Ints = int32_t;
  using Floats = float;
  static constexpr int kLanes = 1;
  static constexpr int kRegisters = 16;
  static constexpr int kRowsAtOnce = 4;

  struct Bytes {
    int32_t of[4];
  };
  using Signed = Bytes;
  using Sum = int32_t;

  static constexpr int kSignedShift = 0;
  static void prefetch(const uint8_t*) {}
  static float zero() { return 0.0f; }
  static int32_t broadcast(int32_t x) { return x; }
  template <int n>
  static int32_t broadcast_shifted(const int32_t* p) {
    return *p << n;
  }
  static float broadcast(float x) { return x; }
  static Bytes load(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static int32_t load_small(const uint8_t* p) { return static_cast<int8_t>(*p); }
  static Bytes each(const Bytes& bytes, auto change) {
    return {{change(bytes.of[0]), change(bytes.of[1]), change(bytes.of[2]), change(bytes.of[3])}};
  }
  static Bytes prepare(const Bytes& bytes) {
    return each(bytes, [](int32_t x) { return static_cast<int32_t>(static_cast<int8_t>(x)); });
  }
  template <int mask>
  static Bytes masked(const Bytes& bytes) {
    return each(bytes, [](int32_t x) { return x & mask; });
  }
  template <int n>
  static Bytes shifted(const Bytes& bytes) {
    return each(bytes, [](int32_t x) { return n >= 0 ? x << (n > 0 ? n : 0) : x >> (n < 0 ? -n : 0); });
  }
  static Bytes either(const Bytes& a, const Bytes& b) {
    return {{a.of[0] | b.of[0], a.of[1] | b.of[1], a.of[2] | b.of[2], a.of[3] | b.of[3]}};
  }
  static Bytes low(const Bytes& bytes) { return masked<15>(bytes); }
  static Bytes high(const Bytes& bytes) {
    return each(bytes, [](int32_t x) { return x >> 4; });
  }
  static Bytes looked_up(const Bytes& bytes) {
    return each(bytes, [](int32_t x) { return static_cast<int32_t>(kFp4Numbers[x]); });
  }
  static int32_t dot(int32_t sum, const Bytes& weights, const int8_t* columns) {
    for (int i = 0; i < 4; ++i) sum += weights.of[i] * columns[i];
    return sum;
  }
  static int32_t widened(int32_t sum) { return sum; }
  static float load_half(const uint8_t* p) {
    Half half;
    std::memcpy(&half, p, sizeof half);
    return to_float(half);
  }
  static float load_bfloat(const uint8_t* p) {
    BFloat16 number;
    std::memcpy(&number, p, sizeof number);
    return to_float(number);
  }
  static float to_floats(int32_t x) { return static_cast<float>(x); }
  static int32_t add(int32_t a, int32_t b) { return a + b; }
  static int32_t multiply(int32_t a, int32_t b) { return a * b; }
  static float multiply(float a, float b) { return a * b; }
  static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
  static void store(float* p, float x) { *p = x; }
};

}  // namespace

constinit const QuantisedKernels kQuantisedScalar = make_quantised_kernels<Scalar>();

}  // namespace neo_desktop
