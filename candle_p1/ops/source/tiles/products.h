// Products of matrices, of which a panel of some rows and columns is computed in registers.

#pragma once

#include "lanes.h"

namespace tiles {
namespace {

constexpr int kVectors = 2;                  // of a row of a panel
constexpr int kColumns = kVectors * kLanes;  // of a panel
// So many that a panel, a row and a value fit the registers: AVX-512 has 32, the others have 16.
constexpr int kRows = kLanes == 16 ? 8 : 4;

// A matrix in memory: element (i, j) is at data[i * row + j * column].
struct Left {
  const float* data;
  std::size_t row;
  std::size_t column;
};

template <int rows = kRows, int vectors = kVectors>
struct Panel {
  Lanes at[rows][vectors];

  static ALWAYS_INLINE Panel load_from(const float* from, std::size_t stride) {
    Panel panel;
    UNROLLED
    for (int row = 0; row < rows; ++row) {
      UNROLLED
      for (int v = 0; v < vectors; ++v) panel.at[row][v] = load(from + row * stride + v * kLanes);
    }
    return panel;
  }

  ALWAYS_INLINE void store_to(float* to, std::size_t stride) const {
    UNROLLED
    for (int row = 0; row < rows; ++row) {
      UNROLLED
      for (int v = 0; v < vectors; ++v) store(to + row * stride + v * kLanes, at[row][v]);
    }
  }

  // Adds the product of left (rows, depth) and right (depth, columns), or subtracts it.
  template <int sign = 1>
  ALWAYS_INLINE void multiply(Left left, const float* right, std::size_t stride, int depth) {
    Panel sums = *this;
    for (int k = 0; k < depth; ++k) {
      Lanes columns[vectors];
      UNROLLED
      for (int v = 0; v < vectors; ++v) columns[v] = load(right + k * stride + v * kLanes);
      UNROLLED
      for (int row = 0; row < rows; ++row) {
        const float value = left.data[row * left.row + k * left.column];
        UNROLLED
        for (int v = 0; v < vectors; ++v) {
          if (sign > 0) {
            sums.at[row][v] += value * columns[v];
          } else {
            sums.at[row][v] -= value * columns[v];
          }
        }
      }
    }
    *this = sums;
  }
};

// Calls panel(row, column, P) for panels of type P that make up `num` rows of `width` columns.
template <int rows, int vectors, typename OfPanel>
ALWAYS_INLINE void cover_rows(int& row, int num, int column, OfPanel panel) {
  for (; row + rows <= num; row += rows) panel(row, column, Panel<rows, vectors>());
}

template <int vectors, typename OfPanel>
ALWAYS_INLINE void cover_columns(int& column, int num, int width, OfPanel panel) {
  for (; column + vectors * kLanes <= width; column += vectors * kLanes) {
    int row = 0;
    cover_rows<kRows, vectors>(row, num, column, panel);
    cover_rows<kRows / 2, vectors>(row, num, column, panel);
    cover_rows<1, vectors>(row, num, column, panel);
  }
}

template <typename OfPanel>
ALWAYS_INLINE void cover(int num, int width, OfPanel panel) {
  int column = 0;
  cover_columns<kVectors>(column, num, width, panel);
  cover_columns<1>(column, num, width, panel);
}

}  // namespace
}  // namespace tiles
