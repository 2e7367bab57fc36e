// Of AVX2, which adds pairs of products up in 16 bits.
#include <immintrin.h>

#include "quantised_tiles.h"

namespace neo_desktop {
namespace {

struct Avx2 {
  using Ints = __m256i;
  using Floats = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRowsAtOnce = 4;

  struct Signed {
    __m256i weights;
    __m256i magnitudes;
  };

  template <WeightType type>
  static constexpr int shift() {
    return 0;
  }
  static void prefetch(const uint8_t* p) {
    for (int line = 0; line < 5; ++line) _mm_prefetch((const char*)p + 2048 + 64 * line, _MM_HINT_T0);
  }
  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256i broadcast(int32_t x) { return _mm256_set1_epi32(x); }
  static __m256 broadcast(float x) { return _mm256_set1_ps(x); }
  static __m256i load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static Signed prepare(__m256i bytes) { return {bytes, _mm256_abs_epi8(bytes)}; }
  static __m256i low(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
  static __m256i high(__m256i bytes) { return low(_mm256_srli_epi16(bytes, 4)); }
  static __m256i four_columns(const int8_t* columns) {
    int32_t four;
    std::memcpy(&four, columns, sizeof four);
    return _mm256_set1_epi32(four);
  }
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
  static __m256 load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static __m256 to_floats(__m256i x) { return _mm256_cvtepi32_ps(x); }
  static __m256 multiply(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static void store(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
};

}  // namespace

constinit const QuantisedKernels kQuantisedAvx2 = make_quantised_kernels<Avx2>();

}  // namespace neo_desktop
