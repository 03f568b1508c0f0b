// Finds where the fields of a range of text end, for many of them before they are parsed.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SSE4_1__)
#include <smmintrin.h>
#endif

namespace csvkernel {

#if defined(__SSE4_1__)

// Looks at 64 bytes at a time, so that the work on one field need not wait until the end of the
// previous one is found.
class FieldEnds {
 public:
  FieldEnds(const char* first, const char* stop, char separator)
      : block_(first), stop_(stop), separator_(_mm_set1_epi8(separator)) {
    look();
  }

  // Returns the next separator or end of a line; nullptr if there is none, or if only the last
  // bytes of the text are left, which are not looked at.
  const char* next() {
    while (ends_ == 0) {
      if (stop_ - block_ < 2 * kBytes) return nullptr;
      block_ += kBytes;
      look();
    }
    const char* end = block_ + __builtin_ctzll(ends_);
    ends_ &= ends_ - 1;
    return end;
  }

  // Continues at `p`, which is not before the block that was looked at last.
  void restart(const char* p) {
    if (p - block_ < kBytes) {
      ends_ = all_ & (~std::uint64_t{0} << (p - block_));
      return;
    }
    block_ = p;
    look();
  }

 private:
  static constexpr std::ptrdiff_t kBytes = 64;

  void look() {
    all_ = ends_ = 0;
    if (stop_ - block_ < kBytes) return;
    for (int i = 0; i < 4; ++i) {
      const __m128i text = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block_) + i);
      const __m128i found = _mm_or_si128(_mm_cmpeq_epi8(text, separator_),
                                         _mm_cmpeq_epi8(text, _mm_set1_epi8('\n')));
      all_ |= static_cast<std::uint64_t>(static_cast<unsigned>(_mm_movemask_epi8(found)))
              << (16 * i);
    }
    ends_ = all_;
  }

  const char* block_;
  const char* stop_;
  __m128i separator_;
  std::uint64_t all_ = 0;   // a bit for each byte of the block, set if it ends a field
  std::uint64_t ends_ = 0;  // those that have not been returned yet
};

#else

// The same byte by byte, for other processors.
class FieldEnds {
 public:
  FieldEnds(const char* first, const char* stop, char separator)
      : next_(first), stop_(stop), separator_(separator) {}

  const char* next() {
    while (next_ < stop_ && *next_ != separator_ && *next_ != '\n') ++next_;
    return next_ < stop_ ? next_++ : nullptr;
  }

  void restart(const char* p) { next_ = p; }

 private:
  const char* next_;
  const char* stop_;
  char separator_;
};

#endif

}  // namespace csvkernel
