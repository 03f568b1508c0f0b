// Finds where the fields of a range of text end, for many of them before they are parsed.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SSE4_1__)
#include <smmintrin.h>
#endif

#include "eights.h"

namespace csvkernel {

#if defined(__SSE4_1__)

// A parser asks for the ends of fields one after the other: the next one is that of the field that
// it is at. Looks at 64 bytes at a time, so that the work on one field need not wait until the end
// of the previous one is found.
class FieldEnds {
 public:
  static constexpr bool kHasEights = false;

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
  static constexpr bool kHasEights = false;

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

#if defined(CSVKERNEL_HAS_EIGHTS)

// The same with AVX-512: finds the ends in some KiB of text at a time, and parses numbers eight at
// a time.
class EightEnds {
 public:
  static constexpr bool kHasEights = true;

  EightEnds(const char* first, const char* stop, char separator)
      : first_(first), stop_(stop), separator_(separator) {
    begin_at(first);
  }

  // Returns nullptr if there is no end within kBytes.
  const char* next() {
    if (next_ == num_) look();
    return next_ < num_ ? base_ + ends_[++next_] : nullptr;
  }

  // Continues at `p`, which is after what was returned last.
  void restart(const char* p) {
    if (p - base_ > kBytes) return begin_at(p);
    const auto offset = static_cast<std::uint32_t>(p - base_);
    while (next_ < num_ && ends_[next_ + 1] < offset) ++next_;
    ends_[next_] = offset - 1;
  }

  // Returns the ends of the next `num` fields, as offsets from base(), after that of the field
  // before; nullptr if there are not so many within kBytes, or if read_eight cannot read the first.
  const std::uint32_t* peek(std::size_t num) {
    if (num_ - next_ < num) {
      if (num_ > 0 && stop_ - base_ <= kBytes) return nullptr;  // all have been found
      look();
      if (num_ < num) return nullptr;
    }
    return base_ + ends_[next_ + 1] - first_ < 15 ? nullptr : ends_ + next_ + 1;
  }

  void skip(std::size_t num) { next_ += num; }
  const char* base() const { return base_; }

  // Parses eight numbers, which are between the ends of other fields; see eights::read.
  template <class T>
  bool read_eight(const std::uint32_t* befores, const std::uint32_t* ends, T* out) const {
    return eights::read(base_, befores, ends, true, out);
  }

  // Parses numbers, beginning with the one at `p`, until one is not plain or there are at most
  // eight left, which may end the line; returns where the next one begins.
  template <class T>
  CSVKERNEL_AVX512 const char* parse_numbers(const char* p, T*& out, const T* end) {
    while (end - out > 8) {
      const std::uint32_t* ends = peek(8);
      if (ends == nullptr || !eights::read(base_, ends - 1, ends, false, out)) break;
      const bool are_digits = ends[7] - ends[-1] == 16;
      p = base_ + ends[7] + 1;
      out += 8;
      next_ += 8;
      if (!are_digits) continue;
      const char* const before = p;
      for (; end - out > 32 && stop_ - p >= 64 && eights::read_digits(p, separator_, out); p += 64) {
        out += 32;
      }
      if (p != before) restart(p);
    }
    return p;
  }

 private:
  static constexpr std::ptrdiff_t kBytes = 4096;

  void begin_at(const char* p) {
    base_ = p;
    next_ = num_ = 0;
    ends_[0] = ~std::uint32_t{0};
  }

  void look() {
    begin_at(base_ + static_cast<std::uint32_t>(ends_[next_] + 1));
    num_ = eights::find_ends(base_, stop_ - base_ < kBytes ? stop_ : base_ + kBytes, separator_,
                             ends_ + 1);
  }

  const char* first_;
  const char* stop_;
  char separator_;
  const char* base_;
  std::size_t next_, num_;
  std::uint32_t ends_[1 + kBytes + 64];  // from base_; ends_[next_] is before the next field
};

#endif

}  // namespace csvkernel
