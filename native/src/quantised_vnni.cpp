// AVX-512 with VNNI: dot products of unsigned and signed numbers.
#include <immintrin.h>

#include "quantised_tiles.h"

namespace neo_desktop {
namespace {

struct Vnni {
  using Ints = __m512i;
  using Floats = __m512;
  using Bytes = __m512i;
  using Signed = __m512i;
  using Sum = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  static constexpr int kRowsAtOnce = 8;
  static constexpr int kSignedShift = 128;  // added to signed weights to make them unsigned

  static void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512i broadcast(int32_t x) { return _mm512_set1_epi32(x); }
  template <int n>
  static __m512i broadcast_shifted(const int32_t* p) {
    return _mm512_slli_epi32(_mm512_set1_epi32(*p), n);
  }
  static __m512 broadcast(float x) { return _mm512_set1_ps(x); }
  static __m512i load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static __m512i load_small(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
  }
  static __m512i prepare(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
  template <int mask>
  static __m512i masked(__m512i bytes) {
    return _mm512_and_si512(bytes, _mm512_set1_epi8(mask));
  }
  template <int n>
  static __m512i shifted(__m512i bytes) {
    return n >= 0 ? _mm512_slli_epi16(bytes, n > 0 ? n : 0) : _mm512_srli_epi16(bytes, n < 0 ? -n : 0);
  }
  static __m512i either(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }
  static __m512i low(__m512i bytes) { return masked<15>(bytes); }
  static __m512i high(__m512i bytes) { return masked<15>(shifted<-4>(bytes)); }
  static __m512i looked_up(__m512i bytes) {
    const __m128i numbers = _mm_loadu_si128((const __m128i*)kFp4Numbers);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), bytes);
  }
  static __m512i dot(__m512i sum, __m512i weights, const int8_t* columns) {
    int32_t four;
    std::memcpy(&four, columns, sizeof four);
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(four));
  }
  static __m512i widened(__m512i sum) { return sum; }
  static __m512 load_half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static __m512 load_bfloat(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static __m512 to_floats(__m512i x) { return _mm512_cvtepi32_ps(x); }
  static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static __m512i multiply(__m512i a, __m512i b) { return _mm512_mullo_epi32(a, b); }
  static __m512 multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
};

}  // namespace

constinit const QuantisedKernels kQuantisedVnni = make_quantised_kernels<Vnni>();

}  // namespace neo_desktop
