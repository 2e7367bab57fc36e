// AVX-VNNI: the dot products of processors without AVX-512.
#include "quantised_avx2.h"

namespace neo_desktop {
namespace {

struct AvxVnni : Registers256 {
  using Signed = __m256i;
  using Sum = __m256i;
  static constexpr int kSignedShift = 128;  // added to signed weights to make them unsigned

  static __m256i prepare(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }
  static __m256i dot(__m256i sum, __m256i weights, const int8_t* columns) {
    return _mm256_dpbusd_avx_epi32(sum, weights, four_columns(columns));
  }
  static __m256i widened(__m256i sum) { return sum; }
};

}  // namespace

constinit const QuantisedKernels kQuantisedAvxVnni = make_quantised_kernels<AvxVnni>();

}  // namespace neo_desktop
