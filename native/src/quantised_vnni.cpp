// Of AVX-512 with VNNI, whose dot products multiply unsigned numbers with signed ones.
#include <immintrin.h>

#include "quantised_tiles.h"

namespace neo_desktop {
namespace {

struct Vnni {
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRowsAtOnce = 8;

  // What weights are larger by when they are multiplied: signed ones are made unsigned.
  template <WeightType type>
  static constexpr int shift() {
    return type == WeightType::kQ8_0 ? 128 : 0;
  }
  static void prefetch(const uint8_t* p) {
    for (int line = 0; line < 5; ++line) _mm_prefetch((const char*)p + 2048 + 64 * line, _MM_HINT_T0);
  }
  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512i broadcast(int32_t x) { return _mm512_set1_epi32(x); }
  static __m512 broadcast(float x) { return _mm512_set1_ps(x); }
  static __m512i load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static __m512i prepare(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
  static __m512i low(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
  static __m512i high(__m512i bytes) { return low(_mm512_srli_epi16(bytes, 4)); }
  static __m512i dot(__m512i sum, __m512i weights, const int8_t* columns) {
    int32_t four;
    std::memcpy(&four, columns, sizeof four);
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(four));
  }
  static __m512i dot_signed(__m512i sum, __m512i prepared, const int8_t* columns) {
    return dot(sum, prepared, columns);
  }
  static __m512 load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static __m512 to_floats(__m512i x) { return _mm512_cvtepi32_ps(x); }
  static __m512 multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
};

}  // namespace

constinit const QuantisedKernels kQuantisedVnni = make_quantised_kernels<Vnni>();

}  // namespace neo_desktop
