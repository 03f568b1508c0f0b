// Memory for floats, aligned to lines of the cache, and in huge pages where it is large.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace tiles {

// Throws std::bad_alloc if there is no memory.
class Array {
 public:
  Array() = default;
  explicit Array(std::size_t num) : num_(num) {
    const std::size_t line = 64, huge_page = 1 << 21;
    const bool is_large = num * sizeof(float) >= huge_page / 4;
    const std::size_t align = is_large ? huge_page : line;
    const std::size_t num_bytes =
        std::max<std::size_t>(1, (num * sizeof(float) + align - 1) / align) * align;
    data_.reset(static_cast<float*>(std::aligned_alloc(align, num_bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    if (is_large) madvise(data_.get(), num_bytes, MADV_HUGEPAGE);  // faster, if there are any
  }
  operator float*() const { return data_.get(); }
  void clear() { std::memset(data_.get(), 0, num_ * sizeof(float)); }
  void add(const Array& other) {
    for (std::size_t i = 0; i < num_; ++i) data_[i] += other.data_[i];
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float[], Free> data_;
  std::size_t num_ = 0;
};

}  // namespace tiles
