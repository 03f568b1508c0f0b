// The steps of a convolution, which are compiled for several processors.
//
// There are two forms. Directly, the window of rows that an output position depends on is
// contiguous in memory, so the convolution is a product of the matrix of all windows, which overlap,
// and the kernel.
//
// By tiles, a sequence is cut into tiles of kTile positions that overlap by the kernel's length - 1. In the
// spectra of tiles and kernel the convolution is a product of matrices for each frequency, of
// channels and filters: for long kernels far fewer multiplications. Such a product of complex numbers takes three real ones instead of four:
//   (a + ib)(c + id) = k - b (c + d) + i (k + a (d - c)), where k = (a + b) c,
// so a spectrum that will be multiplied has three planes for each complex frequency.
//
// Arrays are in C's order, and aligned in no particular way; a row is a position, with all its
// channels or filters. Widths are padded to a multiple of `columns`, except where it says `lanes`.

#pragma once

#include <cstddef>
#include <cstdint>

namespace tiles {

constexpr int kTile = 32;              // positions that are transformed together
constexpr int kTiles = 32;             // the tiles of a block, whose spectra are multiplied together
constexpr int kComplex = kTile / 2 - 1;   // frequencies of a real tile; 0 and the last one are real
constexpr int kPlanes = 2 + 3 * kComplex;  // of a spectrum that will be multiplied
constexpr int kParts = 2 + 2 * kComplex;   // of a product: its real and imaginary parts

// Whether the third plane of a frequency is the sum of the first two or their difference.
enum class Third { kSum, kDifference };

// The values of a plane of tiles, or of a part. After its rows is a line of the cache, so that the same
// column of all planes does not fall into the same few lines of the cache.
constexpr std::size_t plane_size(int width) {
  return static_cast<std::size_t>(kTiles) * width + 16;
}

struct Steps {
  int lanes;
  int columns;

  // Planes (kPlanes, width / columns, depth, columns) of a kernel (taps, depth, width), for
  // rows [begin, end) of its depth; conjugated for a correlation, which forward passes are.
  void (*transform_kernel)(const float* kernel, int taps, int depth, int width, int begin, int end,
                           bool conjugated, float* planes);

  // Planes (kPlanes, kTiles, width), plane_size(width) apart, of num_tiles tiles, each of which begins
  // `step` rows after the previous one and consists of `used` rows and zeros.
  void (*transform)(const float* rows, int num_tiles, int step, int used, int width, Third third,
                    float* planes);

  // Parts (kParts, kTiles, width) of the products of tiles' planes (kPlanes, kTiles, depth; with
  // sums) and a kernel's.
  void (*multiply)(const float* planes, const float* kernel, int num_tiles, int depth, int width,
                   float* parts);

  // rows = the first `step` rows of each tile, plus biases (width,).
  void (*put_tiles)(const float* parts, const float* biases, int num_tiles, int step, int width,
                    float* rows);

  // rows += all kTile rows of each tile.
  void (*add_tiles)(const float* parts, int num_tiles, int step, int width, float* rows);

  // sums (kPlanes, channels, filters) += products, over tiles, of the planes of the inputs (with
  // differences) and of the outputs' gradient (with sums).
  void (*accumulate)(const float* inputs, const float* gradient, int num_tiles, int channels,
                     int filters, float* sums);

  // The kernel's gradient (taps, channels, filters) from these sums, for channels [begin, end).
  void (*kernel_gradient)(const float* sums, int taps, int channels, int filters, int begin,
                          int end, float* gradient);

  // Products (num, width) of windows and a kernel (depth, width), plus biases (width,) if there are
  // any, rectified or not. Window i is the `depth` values from row i of rows (..., row_width), which
  // is not padded. The width is a multiple of lanes.
  void (*multiply_windows)(const float* rows, const float* kernel, const float* biases, int num,
                           int row_width, int depth, int width, bool rectify, float* products);

  // sums (depth, width) += products, over windows, of the windows and the gradient (num, width).
  void (*accumulate_windows)(const float* rows, const float* gradient, int num, int row_width,
                             int depth, int width, float* sums);

  // Clears of_rows where the rectified rows are zero; of_biases += its sum. Lanes.
  void (*rectify_gradient)(const float* rows, int num, int width, float* of_rows,
                           float* of_biases);

  // The maximum of each of `num` pools of `pool` rows, and in which of its rows it is (places may be
  // null if there is only one); (num, filters). The width is a multiple of lanes.
  void (*pool)(const float* rows, int num, int pool, int width, int filters, bool rectify,
               float* maxima, std::uint8_t* places);

  // The gradient of rows (num * pool, width) from that of the maxima; of_biases += its sum. Lanes.
  void (*unpool)(const float* gradient, const float* maxima, const std::uint8_t* places, int num,
                 int pool, int width, int filters, bool rectify, float* rows, float* of_biases);
};

// Returns the steps for the newest instructions that the processor has, and that the environment variable
// CANDLE_P1_INSTRUCTIONS allows.
const Steps& chosen_steps();

extern const Steps kPortable;
#if defined(__x86_64__)
extern const Steps kAvx2;
extern const Steps kAvx512;
#endif

}  // namespace tiles
