// Vectors of kLanes floats. The file that includes this defines CANDLE_P1_LANES, and is compiled for
// processors that have such vectors. It includes no header whose inline functions other files use,
// too: the linker could choose this file's, which other processors cannot execute.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tiles {
namespace {

constexpr int kLanes = CANDLE_P1_LANES;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Integers __attribute__((vector_size(4 * kLanes)));

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 64")

ALWAYS_INLINE Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

ALWAYS_INLINE void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// The first `num` of kLanes values; the others are zero.
ALWAYS_INLINE Lanes load_some(const float* from, int num) {
  if (num >= kLanes) return load(from);
  float values[kLanes] = {};
  std::memcpy(values, from, num * sizeof(float));
  return load(values);
}

ALWAYS_INLINE void store_some(float* to, Lanes lanes, int num) {
  if (num >= kLanes) return store(to, lanes);
  float values[kLanes];
  store(values, lanes);
  std::memcpy(to, values, num * sizeof(float));
}

ALWAYS_INLINE Lanes positive(Lanes values) { return values > 0.0f ? values : Lanes{}; }

constexpr std::size_t size(int a, int b) { return static_cast<std::size_t>(a) * b; }

}  // namespace
}  // namespace tiles
