// The steps, for vectors of CANDLE_P1_LANES floats; they are defined as CANDLE_P1_STEPS.

#pragma once

#include "fourier.h"
#include "products.h"
#include "steps.h"

namespace tiles {
namespace {

using Tile = Transform<kTile, 1>;
constexpr int kLast = kTile / 2;  // the last frequency

// The first plane, and the first part, of a complex frequency.
constexpr int plane_of(int frequency) { return 2 + 3 * (frequency - 1); }
constexpr int part_of(int frequency) { return 2 + 2 * (frequency - 1); }

void transform_kernel(const float* kernel, int taps, int depth, int width, int begin, int end,
                      bool conjugated, float* planes) {
  const std::size_t plane = size(depth, width);
  const float sign = conjugated ? -1.0f : 1.0f;
  for (int row = begin; row < end; ++row) {
    for (int column = 0; column < width; column += kLanes) {
      Lanes values[kTile] = {}, re[kLast + 1], im[kLast + 1];
      for (int t = 0; t < taps; ++t) {
        values[t] = load(kernel + t * plane + size(row, width) + column) * (1.0f / kTile);
      }
      Tile::forward(values, re, im);
      float* to = planes + (size(column / kColumns, depth) + row) * kColumns + column % kColumns;
      store(to, re[0]);
      store(to + plane, re[kLast]);
      for (int f = 1; f <= kComplex; ++f) {
        const Lanes imaginary = sign * im[f];
        store(to + plane_of(f) * plane, re[f]);
        store(to + (plane_of(f) + 1) * plane, imaginary - re[f]);
        store(to + (plane_of(f) + 2) * plane, re[f] + imaginary);
      }
    }
  }
}

template <Third third>
void transform_tiles(const float* rows, int num_tiles, int step, int used, int width,
                     float* planes) {
  const std::size_t plane = plane_size(width);
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int column = 0; column < width; column += kLanes) {
      const float* from = rows + size(tile * step, width) + column;
      Lanes values[kTile], re[kLast + 1], im[kLast + 1];
      UNROLLED
      for (int t = 0; t < kTile; ++t) values[t] = t < used ? load(from + size(t, width)) : Lanes{};
      Tile::forward(values, re, im);
      float* to = planes + size(tile, width) + column;
      store(to, re[0]);
      store(to + plane, re[kLast]);
      UNROLLED
      for (int f = 1; f <= kComplex; ++f) {
        store(to + plane_of(f) * plane, re[f]);
        store(to + (plane_of(f) + 1) * plane, im[f]);
        store(to + (plane_of(f) + 2) * plane,
              third == Third::kSum ? re[f] + im[f] : re[f] - im[f]);
      }
    }
  }
}

void transform(const float* rows, int num_tiles, int step, int used, int width, Third third,
               float* planes) {
  if (third == Third::kSum) {
    transform_tiles<Third::kSum>(rows, num_tiles, step, used, width, planes);
  } else {
    transform_tiles<Third::kDifference>(rows, num_tiles, step, used, width, planes);
  }
}

void multiply_spectra(const float* planes, const float* kernel, int num_tiles, int depth, int width,
                      float* parts) {
  const std::size_t plane = plane_size(depth), part = plane_size(width);
  const std::size_t matrix = size(depth, width);
  for (int f = 0; f < 2; ++f) {  // the real frequencies
    for (int column = 0; column < width; column += kColumns) {
      const float* right = kernel + f * matrix + size(column, depth);
      for (int row = 0; row < num_tiles; row += kRows) {
        const float* left = planes + f * plane + size(row, depth);
        Panel<> sums = {};
        sums.multiply(Left{left, static_cast<std::size_t>(depth), 1}, right, kColumns, depth);
        sums.store_to(parts + f * part + size(row, width) + column, width);
      }
    }
  }
  for (int f = 1; f <= kComplex; ++f) {
    for (int column = 0; column < width; column += kColumns) {
      const float* right = kernel + plane_of(f) * matrix + size(column, depth);
      for (int row = 0; row < num_tiles; row += kRows) {
        const auto left = [&](int which) {
          const float* data = planes + (plane_of(f) + which) * plane + size(row, depth);
          return Left{data, static_cast<std::size_t>(depth), 1};
        };
        float* to = parts + part_of(f) * part + size(row, width) + column;
        Panel<> real = {};
        real.multiply(left(2), right, kColumns, depth);
        Panel<> imaginary = real;
        imaginary.multiply(left(0), right + matrix, kColumns, depth);
        imaginary.store_to(to + part, width);
        real.multiply<-1>(left(1), right + 2 * matrix, kColumns, depth);
        real.store_to(to, width);
      }
    }
  }
}

// Transforms one column of a tile's parts back.
ALWAYS_INLINE void invert(const float* parts, std::size_t part, Lanes* values) {
  Lanes re[kLast + 1], im[kLast + 1];
  re[0] = load(parts);
  re[kLast] = load(parts + part);
  UNROLLED
  for (int f = 1; f <= kComplex; ++f) {
    re[f] = load(parts + part_of(f) * part);
    im[f] = load(parts + (part_of(f) + 1) * part);
  }
  Tile::backward(re, im, values);
}

void put_tiles(const float* parts, const float* biases, int num_tiles, int step, int width,
               float* rows) {
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int column = 0; column < width; column += kLanes) {
      Lanes values[kTile];
      invert(parts + size(tile, width) + column, plane_size(width), values);
      const Lanes bias = load(biases + column);
      float* to = rows + size(tile * step, width) + column;
      UNROLLED
      for (int t = 0; t < kTile; ++t) {
        if (t < step) store(to + size(t, width), values[t] + bias);
      }
    }
  }
}

void add_tiles(const float* parts, int num_tiles, int step, int width, float* rows) {
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int column = 0; column < width; column += kLanes) {
      Lanes values[kTile];
      invert(parts + size(tile, width) + column, plane_size(width), values);
      float* to = rows + size(tile * step, width) + column;
      UNROLLED
      for (int t = 0; t < kTile; ++t) {
        store(to + size(t, width), load(to + size(t, width)) + values[t]);
      }
    }
  }
}

void accumulate(const float* inputs, const float* gradient, int num_tiles, int channels,
                int filters, float* sums) {
  const std::size_t left_plane = plane_size(channels), right_plane = plane_size(filters);
  for (int plane = 0; plane < kPlanes; ++plane) {
    for (int column = 0; column < filters; column += kColumns) {
      const float* right = gradient + plane * right_plane + column;
      for (int row = 0; row < channels; row += kRows) {
        const float* left = inputs + plane * left_plane + row;
        float* to = sums + plane * size(channels, filters) + size(row, filters) + column;
        Panel<> panel = Panel<>::load_from(to, filters);
        UNROLLED
        for (int i = kRows; i < 2 * kRows; ++i) __builtin_prefetch(to + size(i, filters), 1);
        panel.multiply(Left{left, 1, static_cast<std::size_t>(channels)}, right, filters,
                       num_tiles);
        panel.store_to(to, filters);
      }
    }
  }
}

void kernel_gradient(const float* sums, int taps, int channels, int filters, int begin, int end,
                     float* gradient) {
  const std::size_t matrix = size(channels, filters);
  for (int row = begin; row < end; ++row) {
    for (int column = 0; column < filters; column += kLanes) {
      const float* from = sums + size(row, filters) + column;
      Lanes re[kLast + 1], im[kLast + 1], values[kTile];
      re[0] = load(from);
      re[kLast] = load(from + matrix);
      for (int f = 1; f <= kComplex; ++f) {
        // Of inputs a + ib and a gradient c + id: ac, bd and (a - b)(c + d). Their spectrum is
        // that of the inputs times the conjugate of the gradient's.
        const float* products = from + plane_of(f) * matrix;
        const Lanes first = load(products), second = load(products + matrix);
        re[f] = first + second;
        im[f] = first - second - load(products + 2 * matrix);
      }
      Tile::backward(re, im, values);
      float* to = gradient + size(row, filters) + column;
      for (int t = 0; t < taps; ++t) store(to + t * matrix, values[t] * (1.0f / kTile));
    }
  }
}

void pool_rows(const float* rows, int num, int pool, int width, int filters, bool rectify,
               float* maxima, std::uint8_t* places) {
  for (int i = 0; i < num; ++i) {
    for (int column = 0; column < filters; column += kLanes) {
      const int here = filters - column;
      const float* from = rows + size(i * pool, width) + column;
      Lanes most = load(from);
      Integers place = {};
      for (int row = 1; row < pool; ++row) {
        const Lanes value = load(from + size(row, width));
        place = value > most ? Integers{} + row : place;
        most = value > most ? value : most;
      }
      store_some(maxima + size(i, filters) + column, rectify ? positive(most) : most, here);
      if (places == nullptr) continue;
      for (int lane = 0; lane < (here < kLanes ? here : kLanes); ++lane) {
        places[size(i, filters) + column + lane] = static_cast<std::uint8_t>(place[lane]);
      }
    }
  }
}

void unpool_rows(const float* gradient, const float* maxima, const std::uint8_t* places, int num,
                 int pool, int width, int filters, bool rectify, float* rows, float* of_biases) {
  for (int i = 0; i < num; ++i) {
    for (int column = 0; column < filters; column += kLanes) {
      const int here = filters - column;
      const std::size_t at = size(i, filters) + column;
      Lanes given = load_some(gradient + at, here);
      if (rectify) given = load_some(maxima + at, here) > 0.0f ? given : Lanes{};
      Integers place = {};
      if (places != nullptr) {
        for (int lane = 0; lane < (here < kLanes ? here : kLanes); ++lane) {
          place[lane] = places[at + lane];
        }
      }
      store(of_biases + column, load(of_biases + column) + given);
      for (int row = 0; row < pool; ++row) {
        store(rows + size(i * pool + row, width) + column, place == row ? given : Lanes{});
      }
    }
  }
}

void multiply_windows(const float* rows, const float* kernel, const float* biases, int num,
                      int row_width, int depth, int width, bool rectify, float* products) {
  const std::size_t stride = row_width;
  cover(num, width, [=](int row, int column, auto panel) {
    for (auto& sums : panel.at) {
      int v = 0;
      for (Lanes& lanes : sums) {
        lanes = biases == nullptr ? Lanes{} : load(biases + column + kLanes * v++);
      }
    }
    panel.multiply(Left{rows + row * stride, stride, 1}, kernel + column, width, depth);
    if (rectify) {
      for (auto& sums : panel.at) {
        for (Lanes& lanes : sums) lanes = positive(lanes);
      }
    }
    panel.store_to(products + size(row, width) + column, width);
  });
}

void accumulate_windows(const float* rows, const float* gradient, int num, int row_width, int depth,
                        int width, float* sums) {
  const std::size_t stride = row_width;
  cover(depth, width, [=](int row, int column, auto panel) {
    float* to = sums + size(row, width) + column;
    panel = panel.load_from(to, width);
    panel.multiply(Left{rows + row, 1, stride}, gradient + column, width, num);
    panel.store_to(to, width);
  });
}

void rectify_gradient(const float* rows, int num, int width, float* of_rows, float* of_biases) {
  for (int column = 0; column < width; column += kLanes) {
    Lanes total = load(of_biases + column);
    for (int row = 0; row < num; ++row) {
      const std::size_t at = size(row, width) + column;
      const Lanes gradient = load(rows + at) > 0.0f ? load(of_rows + at) : Lanes{};
      store(of_rows + at, gradient);
      total += gradient;
    }
    store(of_biases + column, total);
  }
}

}  // namespace

extern const Steps CANDLE_P1_STEPS = {
    kLanes,           kColumns,         transform_kernel,   transform,
    multiply_spectra, put_tiles,        add_tiles,          accumulate,
    kernel_gradient,  multiply_windows, accumulate_windows, rectify_gradient,
    pool_rows,        unpool_rows};

}  // namespace tiles
