// AVX2: adds pairs of products in 16 bits.
#include "quantised_avx2.h"

namespace neo_desktop {
namespace {

struct Avx2 : Registers256 {
  static constexpr int kSignedShift = 0;

  struct Signed {
    __m256i weights;
    __m256i magnitudes;
  };

  static Signed prepare(__m256i bytes) { return {bytes, _mm256_abs_epi8(bytes)}; }
  // Two products of at most 128 * 127 fit 16 bits.
  static __m256i add_products(__m256i sum, __m256i unsigned_numbers, __m256i signed_numbers) {
    const __m256i pairs = _mm256_maddubs_epi16(unsigned_numbers, signed_numbers);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static __m256i dot(__m256i sum, __m256i weights, const int8_t* columns) {
    return add_products(sum, weights, four_columns(columns));
  }
  static __m256i dot_signed(__m256i sum, const Signed& prepared, const int8_t* columns) {
    return add_products(sum, prepared.magnitudes, _mm256_sign_epi8(four_columns(columns), prepared.weights));
  }
};

}  // namespace

constinit const QuantisedKernels kQuantisedAvx2 = make_quantised_kernels<Avx2>();

}  // namespace neo_desktop
