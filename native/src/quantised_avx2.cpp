// AVX2: products of unsigned numbers of up to 6 bits, in pairs.
#include "quantised_avx2.h"

namespace neo_desktop {
namespace {

struct Avx2 : Registers256 {
  static constexpr int kSignedShift = 0;

  struct Signed {
    __m256i weights;
    __m256i magnitudes;
  };

  // Pairs of products are added in 16 bits first: widening each takes as long as multiplying.
  struct Sum {
    Sum() = default;
    Sum(__m256i of_all) : all(of_all), pairs(_mm256_setzero_si256()) {}
    operator __m256i() const { return all; }
    __m256i all;
    __m256i pairs;
  };

  static Signed prepare(__m256i bytes) { return {bytes, _mm256_abs_epi8(bytes)}; }
  static Sum widened(const Sum& sum) {
    return _mm256_add_epi32(sum.all, _mm256_madd_epi16(sum.pairs, _mm256_set1_epi16(1)));
  }
  static Sum dot(Sum sum, __m256i weights, const int8_t* columns) {
    sum.pairs = _mm256_add_epi16(sum.pairs, _mm256_maddubs_epi16(weights, four_columns(columns)));
    asm("" : "+x"(sum.pairs));  // GCC would reorder the sums, and spill registers
    return sum;
  }
  static Sum dot(Sum sum, const Signed& prepared, const int8_t* columns) {
    const __m256i numbers = _mm256_sign_epi8(four_columns(columns), prepared.weights);
    sum.pairs = _mm256_maddubs_epi16(prepared.magnitudes, numbers);  // at most 2 * 128 * 127
    sum = widened(sum);
    asm("" : "+x"(sum.all));
    return sum;
  }
};

}  // namespace

constinit const QuantisedKernels kQuantisedAvx2 = make_quantised_kernels<Avx2>();

}  // namespace neo_desktop
