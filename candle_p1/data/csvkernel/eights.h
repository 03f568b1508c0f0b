// Numbers eight at a time, for processors with AVX-512 as of 2019 (Ice Lake, Zen 4 and later).
//
// The functions are compiled for these instructions, whatever the rest is compiled for, and must
// only be called if has_avx512() is true. Nothing of the standard library is instantiated in them,
// because the linker could give its code to other processors.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

// What the compiler says about its own header (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define CSVKERNEL_HAS_EIGHTS 1
#define CSVKERNEL_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,avx512vpopcntdq")))

namespace csvkernel {

inline bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vpopcntdq");
}

namespace eights {

// The 16 bytes up to the one that ends a field.
CSVKERNEL_AVX512 inline __m128i window(const char* base, std::uint32_t end) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + end - 15));
}

CSVKERNEL_AVX512 inline __m512i four_windows(const char* base, const std::uint32_t* ends) {
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(window(base, ends[0])),
                                              window(base, ends[1]), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(window(base, ends[2])),
                                               window(base, ends[3]), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// What is known about four windows. In each of the words, 16 bits belong to one window.
struct Four {
  __m512i digits;         // right-aligned; 0 elsewhere
  std::uint64_t point;    // bits up to that of the point; all if there is none
  std::uint64_t minus;    // a bit in each window that begins with a minus sign
  std::uint64_t unusual;  // not 0 if one of the fields is not plain
};

// `within` has the bits of the bytes that belong to the fields. They are plain if they are digits
// with at most one point, and possibly a minus sign first.
CSVKERNEL_AVX512 inline Four read_four(__m512i text, std::uint64_t within, bool may_end_line) {
  constexpr std::uint64_t kLasts = 0x8000800080008000, kOnes = 0x0001000100010001;
  const __m512i values = _mm512_sub_epi8(text, _mm512_set1_epi8('0'));
  const std::uint64_t digits = _mm512_cmple_epu8_mask(values, _mm512_set1_epi8(9)) & within;
  const std::uint64_t points = _mm512_cmpeq_epi8_mask(text, _mm512_set1_epi8('.')) & within;
  const std::uint64_t minus = _mm512_cmpeq_epi8_mask(text, _mm512_set1_epi8('-')) & within;
  // The end of the field stands for a missing point, so that no window is without one and no
  // subtraction borrows from the next.
  const std::uint64_t marks = points | kLasts, lower = marks - kOnes;
  std::uint64_t unusual = within & ~(digits | points | minus);
  unusual |= minus & (within << 1);                 // not the first byte
  unusual |= marks & lower & ~kLasts;               // a second point
  unusual |= ~(digits + (kLasts - kOnes)) & kLasts;  // no digit
  if (!may_end_line) unusual |= _mm512_cmpeq_epi8_mask(text, _mm512_set1_epi8('\n')) & kLasts;
  // The digits before the point move by one byte, to its place.
  const std::uint64_t point = marks ^ lower;
  const __m512i kept = _mm512_maskz_mov_epi8(digits, values);
  return {_mm512_mask_mov_epi8(kept, point, _mm512_bslli_epi128(kept, 1)), point, minus, unusual};
}

CSVKERNEL_AVX512 inline void store(float* out, __m512d values, __m512i order) {
  _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(_mm512_cvtpd_ps(values),
                                                 _mm512_cvtepi64_epi32(order)));
}

CSVKERNEL_AVX512 inline void store(double* out, __m512d values, __m512i order) {
  _mm512_storeu_pd(out, _mm512_permutexvar_pd(order, values));
}

// Reads eight fields if all are plain and shorter than 16 bytes; otherwise returns false, and has
// written nothing. Field i is between the bytes base[befores[i]] and base[ends[i]]; the 15 bytes
// before the end of each can be read.
//
// The number is an integer of at most 15 digits (with the place of the point as a last 0, if there
// is one), divided by a power of ten. Both are exact as doubles, see kDivisors.
template <class T>
CSVKERNEL_AVX512 inline bool read(const char* base, const std::uint32_t* befores,
                                  const std::uint32_t* ends, bool may_end_line, T* out) {
  const __m256i stop = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ends));
  const __m256i start = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(befores));
  // A shift by more than 31 gives 0, and so no digits.
  const __m256i missing = _mm256_sub_epi32(_mm256_set1_epi32(16), _mm256_sub_epi32(stop, start));
  const __m128i within = _mm256_cvtepi32_epi16(_mm256_and_si256(
      _mm256_sllv_epi32(_mm256_set1_epi32(0xFFFF), missing), _mm256_set1_epi32(0x7FFF)));
  const Four a = read_four(four_windows(base, ends),
                           static_cast<std::uint64_t>(_mm_cvtsi128_si64(within)), may_end_line);
  const Four b = read_four(four_windows(base, ends + 4),
                           static_cast<std::uint64_t>(_mm_extract_epi64(within, 1)), may_end_line);
  if ((a.unusual | b.unusual) != 0) return false;

  const __m512i ten = _mm512_set1_epi16(0x010A), hundred = _mm512_set1_epi32(0x00010064);
  const __m512i packed = _mm512_packus_epi32(  // of fields 0 and 4, 1 and 5, 2 and 6, 3 and 7
      _mm512_madd_epi16(_mm512_maddubs_epi16(a.digits, ten), hundred),
      _mm512_madd_epi16(_mm512_maddubs_epi16(b.digits, ten), hundred));
  const __m512i halves = _mm512_madd_epi16(packed, _mm512_set1_epi32(0x00012710));
  const __m512i integers = _mm512_add_epi64(
      _mm512_mul_epu32(halves, _mm512_set1_epi64(100'000'000)), _mm512_srli_epi64(halves, 32));

  const __m128i points = _mm_unpacklo_epi16(_mm_cvtsi64_si128(static_cast<long long>(a.point)),
                                            _mm_cvtsi64_si128(static_cast<long long>(b.point)));
  const __m128i signs = _mm_unpacklo_epi16(_mm_cvtsi64_si128(static_cast<long long>(a.minus)),
                                           _mm_cvtsi64_si128(static_cast<long long>(b.minus)));
  const __m512i places = _mm512_popcnt_epi64(_mm512_cvtepu16_epi64(points));  // 1 to 16
  const __m512d divisors = _mm512_permutex2var_pd(  // 10 to the power of 16 - places
      _mm512_setr_pd(1e0, 1e15, 1e14, 1e13, 1e12, 1e11, 1e10, 1e9), places,
      _mm512_setr_pd(1e8, 1e7, 1e6, 1e5, 1e4, 1e3, 1e2, 1e1));
  const __m512d positive = _mm512_div_pd(_mm512_cvtepi64_pd(integers), divisors);
  const __m512d values = _mm512_mask_xor_pd(positive, _mm_test_epi16_mask(signs, signs), positive,
                                            _mm512_set1_pd(-0.0));
  store(out, values, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7));
  return true;
}

// Stores the numbers of 64 bytes, if they are 32 fields of one digit, each followed by a separator.
CSVKERNEL_AVX512 inline bool read_digits(const char* p, char separator, float* out) {
  constexpr std::uint64_t kSeparators = 0xAAAAAAAAAAAAAAAA;
  const __m512i text = _mm512_loadu_si512(p);
  const __m512i values = _mm512_sub_epi8(text, _mm512_set1_epi8('0'));
  const std::uint64_t separators = _mm512_cmpeq_epi8_mask(text, _mm512_set1_epi8(separator));
  const std::uint64_t digits = _mm512_cmple_epu8_mask(values, _mm512_set1_epi8(9));
  if ((separators & kSeparators) != kSeparators || (digits | kSeparators) != ~std::uint64_t{0}) {
    return false;
  }
  const __m256i bytes = _mm512_cvtepi16_epi8(values);
  const __m512i first = _mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes));
  const __m512i second = _mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1));
  _mm512_storeu_ps(out, _mm512_cvtepi32_ps(first));
  _mm512_storeu_ps(out + 16, _mm512_cvtepi32_ps(second));
  return true;
}

CSVKERNEL_AVX512 inline bool read_digits(const char* p, char separator, double* out) {
  float values[32];
  if (!read_digits(p, separator, values)) return false;
  for (int i = 0; i < 32; ++i) out[i] = values[i];
  return true;
}

// Writes where the fields in [p, stop) end, as offsets from p, up to 64 in excess; returns how many.
CSVKERNEL_AVX512 inline std::size_t find_ends(const char* p, const char* stop, char separator,
                                              std::uint32_t* ends) {
  const __m512i places = _mm512_set_epi8(
          63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42,
          41, 40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20,
          19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  std::uint32_t* next = ends;
  for (std::uint32_t start = 0; start < stop - p; start += 64) {
    const std::ptrdiff_t left = stop - p - start;
    const __mmask64 here = left < 64 ? (std::uint64_t{1} << left) - 1 : ~std::uint64_t{0};
    const __m512i text = _mm512_maskz_loadu_epi8(here, p + start);
    const __mmask64 found = _mm512_mask_cmpeq_epi8_mask(here, text, _mm512_set1_epi8(separator)) |
                            _mm512_mask_cmpeq_epi8_mask(here, text, _mm512_set1_epi8('\n'));
    const __m512i those = _mm512_maskz_compress_epi8(found, places);
    const __m512i first = _mm512_set1_epi32(static_cast<int>(start));
    const __m256i low = _mm512_castsi512_si256(those);
    _mm512_storeu_si512(next, _mm512_add_epi32(
        first, _mm512_cvtepu8_epi32(_mm256_castsi256_si128(low))));
    _mm512_storeu_si512(next + 16, _mm512_add_epi32(
        first, _mm512_cvtepu8_epi32(_mm256_extracti128_si256(low, 1))));
    const int num = __builtin_popcountll(found);
    if (num > 32) {
      const __m256i high = _mm512_extracti64x4_epi64(those, 1);
      _mm512_storeu_si512(next + 32, _mm512_add_epi32(
          first, _mm512_cvtepu8_epi32(_mm256_castsi256_si128(high))));
      _mm512_storeu_si512(next + 48, _mm512_add_epi32(
          first, _mm512_cvtepu8_epi32(_mm256_extracti128_si256(high, 1))));
    }
    next += num;
  }
  return static_cast<std::size_t>(next - ends);
}

}  // namespace eights
}  // namespace csvkernel

#pragma GCC diagnostic pop

#else

namespace csvkernel {

inline bool has_avx512() { return false; }

}  // namespace csvkernel

#endif
