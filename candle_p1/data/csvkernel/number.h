// Converts decimal text to the double that Python's float() gives: correctly rounded, for ASCII
// without underscores.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#if defined(__SSE4_1__)
#include <smmintrin.h>
#endif

namespace csvkernel {

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

// A carriage return is none of them: it only belongs to the end of a line.
inline bool is_space(char c) { return c == ' ' || c == '\t' || c == '\v' || c == '\f'; }

inline std::string_view strip(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

inline bool equals_ignoring_case(std::string_view text, std::string_view lower) {
  return std::equal(text.begin(), text.end(), lower.begin(), lower.end(),
                    [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; });
}

// Tells whether a number that is out of range for std::from_chars is infinite, or so small that it
// is 0.
inline double beyond_range(std::string_view text) {
  std::int64_t magnitude = 0;  // the power of ten of the first nonzero digit
  bool seen_point = false, seen_digit = false;
  std::size_t i = 0;
  for (; i < text.size() && (is_digit(text[i]) || text[i] == '.'); ++i) {
    if (text[i] == '.') {
      seen_point = true;
    } else if (seen_digit || text[i] != '0') {
      magnitude += !seen_point;
      seen_digit = true;
    } else {
      magnitude -= seen_point;
    }
  }
  std::int64_t exponent = 0;
  if (i < text.size()) {  // at the e
    const bool negative = text[++i] == '-';
    i += text[i] == '-' || text[i] == '+';
    for (; i < text.size(); ++i) {
      exponent = std::min<std::int64_t>(exponent * 10 + (text[i] - '0'), 1'000'000'000'000);
    }
    if (negative) exponent = -exponent;
  }
  return magnitude + exponent > 0 ? std::numeric_limits<double>::infinity() : 0.0;
}

// Reads a complete field; returns whether it is a number.
inline bool parse_any_number(std::string_view text, double& value) {
  text = strip(text);
  const bool negative = !text.empty() && text.front() == '-';
  if (negative || (!text.empty() && text.front() == '+')) text.remove_prefix(1);
  if (text.empty()) return false;
  if (is_digit(text.front()) || text.front() == '.') {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (end != text.data() + text.size()) return false;
    if (error == std::errc::result_out_of_range) {
      value = beyond_range(text);
    } else if (error != std::errc()) {
      return false;
    }
  } else if (equals_ignoring_case(text, "inf") || equals_ignoring_case(text, "infinity")) {
    value = std::numeric_limits<double>::infinity();
  } else if (equals_ignoring_case(text, "nan")) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else {
    return false;
  }
  if (negative) value = -value;
  return true;
}

// Powers of ten, and their negatives. They are exact as doubles, so that the quotient of an
// integer below 2^53 and one of them is rounded correctly (W. D. Clinger, How to read floating
// point numbers accurately, 1990).
inline constexpr double kDivisors[2][16] = {
    {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15},
    {-1e0, -1e1, -1e2, -1e3, -1e4, -1e5, -1e6, -1e7, -1e8, -1e9, -1e10, -1e11, -1e12, -1e13, -1e14,
     -1e15}};

#if defined(__SSE4_1__)

inline constexpr int kWindow = 16;  // bytes that the fast path looks at

// The positions of the digits, the last digit last, by the length of the field and the position of
// its point (the length if there is none); 0x80 stands for a leading 0.
using DigitPlaces = std::array<std::array<std::array<std::uint8_t, 16>, 16>, 16>;

constexpr DigitPlaces make_digit_places() {
  DigitPlaces places{};
  for (int length = 0; length < 16; ++length) {
    for (int point = 0; point < 16; ++point) {
      int place = 15;
      for (int i = length - 1; i >= 0; --i) {
        if (i != point) places[length][point][place--] = static_cast<std::uint8_t>(i);
      }
      for (; place >= 0; --place) places[length][point][place] = 0x80;
    }
  }
  return places;
}

alignas(16) inline constexpr DigitPlaces kDigitPlaces = make_digit_places();

// Sixteen bytes of text, from the start of a field.
class Window {
 public:
  explicit Window(const char* text)
      : text_(_mm_loadu_si128(reinterpret_cast<const __m128i*>(text))),
        digits_(_mm_sub_epi8(text_, _mm_set1_epi8('0'))),
        are_digits_(mask(_mm_cmpeq_epi8(_mm_min_epu8(digits_, _mm_set1_epi8(9)), digits_))) {}

  // Whether these are eight fields of one digit, each followed by a separator.
  bool is_eight_digits(char separator) const {
    const unsigned separators = mask(_mm_cmpeq_epi8(text_, _mm_set1_epi8(separator)));
    return ((separators ^ 0xAAAA) | (~are_digits_ & 0x5555)) == 0;
  }

  void store_eight_digits(float* out) const {
    const __m128i bytes = _mm_shuffle_epi8(
        digits_, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, -1, -1, -1, -1, -1, -1, -1, -1));
    _mm_storeu_ps(out, _mm_cvtepi32_ps(_mm_cvtepu8_epi32(bytes)));
    _mm_storeu_ps(out + 4, _mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_srli_si128(bytes, 4))));
  }

  void store_eight_digits(double* out) const {
    float values[8];
    store_eight_digits(values);
    std::copy(values, values + 8, out);
  }

  // Reads a field of less than 16 bytes: digits with at most one point, and possibly a minus sign
  // first. Returns false if it is anything else. There are no branches that depend on the length,
  // because they would be mispredicted whenever the length changes.
  bool parse(int length, double& value) const {
    const unsigned within = (1U << length) - 1;
    const unsigned minus = mask(_mm_cmpeq_epi8(text_, _mm_set1_epi8('-'))) & within & 1;
    const unsigned points = mask(_mm_cmpeq_epi8(text_, _mm_set1_epi8('.'))) & within;
    const unsigned digits = are_digits_ & within;
    if ((digits | points | minus) != within || (points & (points - 1)) != 0 || digits == 0) {
      return false;
    }
    const int point = __builtin_ctz(points | (1U << length));
    const auto* table = kDigitPlaces[length - minus][point - minus].data();
    const __m128i places = _mm_add_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(table)),
                                        _mm_set1_epi8(static_cast<char>(minus)));
    const __m128i sixteen = _mm_shuffle_epi8(digits_, places);
    const __m128i pairs = _mm_maddubs_epi16(sixteen, _mm_set1_epi16(0x010A));
    const __m128i fours = _mm_madd_epi16(pairs, _mm_set1_epi32(0x00010064));
    const __m128i packed = _mm_packus_epi32(fours, fours);
    const __m128i eights = _mm_madd_epi16(packed, _mm_set1_epi32(0x00012710));
    const auto both = static_cast<std::uint64_t>(_mm_cvtsi128_si64(eights));
    const std::uint64_t integer = (both & 0xFFFFFFFF) * 100'000'000 + (both >> 32);
    const unsigned decimals = static_cast<unsigned>(length - point) - (points != 0);
    value = static_cast<double>(static_cast<std::int64_t>(integer)) / kDivisors[minus][decimals];
    return true;
  }

 private:
  static unsigned mask(__m128i bytes) { return static_cast<unsigned>(_mm_movemask_epi8(bytes)); }

  __m128i text_, digits_;
  unsigned are_digits_;
};

#else

inline constexpr int kWindow = 16;

// The same digit by digit, for other processors.
class Window {
 public:
  explicit Window(const char* text) : text_(text) {}

  static constexpr bool is_eight_digits(char) { return false; }
  template <class T>
  static void store_eight_digits(T*) {}

  bool parse(int length, double& value) const {
    const bool minus = text_[0] == '-';
    std::int64_t integer = 0;
    int point = -1, num_digits = 0;
    for (int i = minus; i < length; ++i) {
      const char c = text_[i];
      if (is_digit(c)) {
        integer = integer * 10 + (c - '0');
        ++num_digits;
      } else if (c == '.' && point < 0) {
        point = i;
      } else {
        return false;
      }
    }
    if (num_digits == 0) return false;
    value = static_cast<double>(integer) / kDivisors[minus][point < 0 ? 0 : length - point - 1];
    return true;
  }

 private:
  const char* text_;
};

#endif

}  // namespace csvkernel
