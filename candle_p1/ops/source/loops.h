// Loops over the values of tensors, divided among threads.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

namespace tensorflow_c {

constexpr std::size_t kValuesPerThread = 1 << 16;  // about what starting a thread costs

// Returns into how many parts, each for a thread, it pays to divide values.
inline std::size_t parts_of(std::size_t num, int32_t max_threads) {
  const auto most = static_cast<std::size_t>(std::max(max_threads, 1));
  return std::max<std::size_t>(1, std::min(most, num / kValuesPerThread));
}

// Calls work(i) for i in [0, num), each in its own thread.
template <typename Work>
void in_threads(std::size_t num, Work work) {
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < num; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
}

// Calls part(begin, end) for ranges that make up [0, num), each in its own thread.
template <typename Part>
void in_parts(std::size_t num, int32_t max_threads, Part part) {
  const std::size_t num_parts = parts_of(num, max_threads);
  in_threads(num_parts, [&](std::size_t i) {
    part(num * i / num_parts, num * (i + 1) / num_parts);
  });
}

}  // namespace tensorflow_c
