// A 1D convolution with a stride of one, its bias, relu and pooling, and their gradients, computed
// block by block: what is between values and maxima exists for one block per thread at a time.
// A block's outputs are computed by tiles or directly; see steps.h.
//
// The values can be those of one channel, of which a rectified convolution makes the channels that
// are convolved; they are then computed once more for the gradient instead of being kept.

#pragma once

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "array.h"
#include "steps.h"

namespace tiles {

struct Sizes {
  int batch;
  int length;      // of the values
  int first_taps;  // of the convolution of one channel, or 0 if there is none
  int channels;    // that are convolved
  int taps;
  int filters;
  int pool;  // positions whose maximum is taken; those after the last whole pool do not count
  bool rectify;
  bool by_tiles;  // rather than directly, where there is no convolution before

  int num_values() const { return first_taps > 0 ? 1 : channels; }  // at a position
  int positions() const { return length - std::max(first_taps - 1, 0) - taps + 1; }
  int num_pools() const { return positions() / pool; }
};

// Arrays of which the first is null if there is no convolution of one channel.
struct Weights {
  const float* first_kernel;  // (first_taps, channels)
  const float* first_biases;
  const float* kernel;  // (taps, channels, filters)
  const float* biases;  // not needed for gradients
};

// Either that of the values alone, which there is only without a first kernel, or all others.
struct Gradients {
  float* values;  // (batch, length, channels)
  float* first_kernel;
  float* first_biases;
  float* kernel;
  float* biases;
};

// All methods throw std::bad_alloc before anything is computed.
class Convolution {
 public:
  Convolution(const Sizes& sizes, const Steps& steps, int max_threads)
      : sizes_(sizes),
        steps_(steps),
        max_threads_(std::max(max_threads, 1)),
        width_(sizes.by_tiles ? steps.columns : steps.lanes),
        channels_(padded(sizes.channels)),
        filters_(padded(sizes.filters)),
        step_(sizes.by_tiles ? kTile - sizes.taps + 1 : 1),
        rows_of_block_(sizes.by_tiles ? kTiles * step_ : std::max(kDirectRows, sizes.pool)),
        pools_of_block_(rows_of_block_ / sizes.pool),
        blocks_((sizes.num_pools() + pools_of_block_ - 1) / pools_of_block_),
        threads_(std::min(max_threads_, std::max(1, sizes.batch * blocks_))) {}

  // Whether the convolution can be computed.
  static bool fits(const Sizes& sizes) {
    if (sizes.pool < 1 || sizes.pool > kMaxPool || sizes.num_pools() < 1) return false;
    if (!sizes.by_tiles) return sizes.first_taps == 0;
    return sizes.taps <= kTile / 2 && kTiles * (kTile - sizes.taps + 1) >= sizes.pool;
  }

  // Writes maxima (batch, num_pools, filters), and places unless a pool is one position.
  void forward(const float* values, const Weights& weights, float* maxima,
               std::uint8_t* places) const {
    const Prepared prepared(*this, weights, false);
    std::vector<Forward> workspaces;
    for (int i = 0; i < threads_; ++i) workspaces.emplace_back(*this);
    transform_kernel(prepared, channels_, filters_, true);
    in_threads(threads_, sizes_.batch * blocks_, [&](int thread, int begin, int end) {
      const Forward& with = workspaces[thread];
      for (int item = begin; item < end; ++item) {
        const Block block = at(item);
        if (sizes_.by_tiles) {
          fill(values, prepared, block, with.window);
          steps_.transform(with.window, block.num_tiles, step_, kTile, channels_, Third::kSum,
                           with.planes);
          steps_.multiply(with.planes, prepared.spectrum, block.num_tiles, channels_, filters_,
                          with.parts);
          steps_.put_tiles(with.parts, prepared.biases, block.num_tiles, step_, filters_,
                           with.rows);
        } else {
          steps_.multiply_windows(values + block.values, prepared.kernel, prepared.biases,
                                  block.num_rows, sizes_.channels, sizes_.taps * sizes_.channels,
                                  filters_, false, with.rows);
        }
        steps_.pool(with.rows, block.num_pools, sizes_.pool, filters_, sizes_.filters,
                    sizes_.rectify, maxima + block.maxima,
                    sizes_.pool > 1 ? places + block.maxima : nullptr);
      }
    });
  }

  // Writes the gradients that are not null, given that of the maxima.
  void backward(const float* values, const Weights& weights, const float* maxima,
                const std::uint8_t* places, const float* gradient, const Gradients& to) const {
    const bool of_weights = to.kernel != nullptr;
    const bool of_inputs = !of_weights || sizes_.first_taps > 0;
    const Prepared prepared(*this, weights, true);
    const std::size_t tail = rows_of(margin(), sizes_.channels);
    const Array tails(of_weights ? 0 : sizes_.batch * blocks_ * tail);
    const Array of_kernel(of_weights && sizes_.by_tiles ? sizes_.taps * matrix() : 0);
    std::vector<Backward> workspaces;
    for (int i = 0; i < threads_; ++i) workspaces.emplace_back(*this, of_weights, of_inputs);
    if (of_inputs) transform_kernel(prepared, filters_, channels_, false);
    in_threads(threads_, sizes_.batch * blocks_, [&](int thread, int begin, int end) {
      Backward& with = workspaces[thread];
      with.clear();
      for (int item = begin; item < end; ++item) {
        const Block block = at(item);
        float* rows = with.rows + rows_of(margin(), filters_);
        steps_.unpool(gradient + block.maxima, maxima + block.maxima,
                      sizes_.pool > 1 ? places + block.maxima : nullptr, block.num_pools,
                      sizes_.pool, filters_, sizes_.filters, sizes_.rectify, rows, with.of_biases);
        if (sizes_.by_tiles) {
          clear_rows(rows, block.num_rows, block.num_tiles * step_, filters_);
          steps_.transform(rows, block.num_tiles, step_, step_, filters_, Third::kSum,
                           with.of_rows);
        }
        if (of_weights) add_to_kernel(values, prepared, block, rows, with);
        if (of_inputs) compute_of_window(prepared, block, rows, with);
        if (sizes_.first_taps > 0) {
          const int num = block.num_rows + margin();
          steps_.rectify_gradient(with.window, num, channels_, with.of_window,
                                  with.of_first_biases);
          steps_.accumulate_windows(values + block.values, with.of_window, num, 1,
                                    sizes_.first_taps, channels_, with.of_first_kernel);
        } else if (!of_weights) {
          // The last rows belong to the next block, too, which another thread may compute.
          copy_rows(with.of_window, channels_, block.num_rows, to.values + block.values);
          copy_rows(with.of_window + rows_of(block.num_rows, channels_), channels_, margin(),
                    tails + item * tail);
        }
      }
    });
    if (!of_weights) return finish_values(tails, tail, to.values);
    Backward& total = workspaces[0];
    for (int i = 1; i < threads_; ++i) total.add(workspaces[i]);
    finish_kernel(total, of_kernel, to);
    std::memcpy(to.biases, total.of_biases, sizes_.filters * sizeof(float));
    if (sizes_.first_taps > 0) {
      copy_rows(total.of_first_kernel, channels_, sizes_.first_taps, to.first_kernel);
      copy_rows(total.of_first_biases, channels_, 1, to.first_biases);
    }
  }

 private:
  static constexpr int kMaxPool = 255;      // a place is a byte
  static constexpr int kDirectRows = 512;   // of a block that is computed directly

  // A part of a sample: whole pools, and the tiles that cover them.
  struct Block {
    int num_pools;
    int num_rows;
    int num_tiles;
    std::size_t values;  // where its first value is
    std::size_t maxima;  // and its first maximum
  };

  // Weights as the steps take them. Those for gradients are transposed.
  struct Prepared {
    Prepared(const Convolution& of, const Weights& weights, bool for_gradient)
        : spectrum(of.sizes_.by_tiles ? kPlanes * of.matrix() : 0) {
      const Sizes& sizes = of.sizes_;
      if (sizes.by_tiles) {
        kernel = of.padded_kernel(weights.kernel, for_gradient);
      } else if (for_gradient) {
        kernel = of.reversed_kernel(weights.kernel);
      } else {
        const int depth = sizes.taps * sizes.channels;
        kernel = padded_rows(weights.kernel, depth, sizes.filters, of.filters_);
      }
      if (!for_gradient) biases = padded_rows(weights.biases, 1, sizes.filters, of.filters_);
      if (sizes.first_taps == 0) return;
      first_kernel =
          padded_rows(weights.first_kernel, sizes.first_taps, sizes.channels, of.channels_);
      first_biases = padded_rows(weights.first_biases, 1, sizes.channels, of.channels_);
    }
    Array spectrum, kernel, biases, first_kernel, first_biases;
  };

  // What a thread needs for the forward pass.
  struct Forward {
    explicit Forward(const Convolution& of)
        : rows(rows_of(of.rows_of_block_, of.filters_)),
          window(of.sizes_.by_tiles ? of.window() : 0),
          planes(of.sizes_.by_tiles ? kPlanes * plane_size(of.channels_) : 0),
          parts(of.sizes_.by_tiles ? kParts * plane_size(of.filters_) : 0) {}
    Array rows, window, planes, parts;
  };

  // What a thread needs for the gradients, and its part of them.
  struct Backward {
    Backward(const Convolution& of, bool of_weights, bool of_inputs)
        : rows(rows_of(of.rows_of_block_ + 2 * of.margin(), of.filters_)),
          of_window(of_inputs ? of.window() : 0),
          window(of.sizes_.by_tiles && of_weights ? of.window() : 0),
          planes(of.sizes_.by_tiles && of_weights ? kPlanes * plane_size(of.channels_) : 0),
          of_rows(of.sizes_.by_tiles ? kPlanes * plane_size(of.filters_) : 0),
          parts(of.sizes_.by_tiles && of_inputs ? kParts * plane_size(of.channels_) : 0),
          sums(of_weights ? of.num_sums() : 0),
          of_biases(of.filters_),
          of_first_kernel(rows_of(of.sizes_.first_taps, of.channels_)),
          of_first_biases(of.channels_) {}
    void clear() {
      rows.clear();
      for (Array* each : {&sums, &of_biases, &of_first_kernel, &of_first_biases}) each->clear();
    }
    void add(const Backward& other) {
      sums.add(other.sums);
      of_biases.add(other.of_biases);
      of_first_kernel.add(other.of_first_kernel);
      of_first_biases.add(other.of_first_biases);
    }
    Array rows, of_window, window, planes, of_rows, parts;
    Array sums, of_biases, of_first_kernel, of_first_biases;
  };

  void transform_kernel(const Prepared& prepared, int depth, int width, bool conjugated) const {
    if (!sizes_.by_tiles) return;
    in_threads(max_threads_, depth, [&](int, int begin, int end) {
      steps_.transform_kernel(prepared.kernel, sizes_.taps, depth, width, begin, end, conjugated,
                              prepared.spectrum);
    });
  }

  // Adds the products of the inputs' windows, or tiles, and the gradient of the rows.
  void add_to_kernel(const float* values, const Prepared& prepared, const Block& block,
                     const float* rows, const Backward& with) const {
    if (sizes_.by_tiles) {
      fill(values, prepared, block, with.window);
      steps_.transform(with.window, block.num_tiles, step_, kTile, channels_, Third::kDifference,
                       with.planes);
      steps_.accumulate(with.planes, with.of_rows, block.num_tiles, channels_, filters_, with.sums);
    } else {
      steps_.accumulate_windows(values + block.values, rows, block.num_rows, sizes_.channels,
                                sizes_.taps * sizes_.channels, filters_, with.sums);
    }
  }

  // Computes the gradient of the rows of the inputs on which the block depends.
  void compute_of_window(const Prepared& prepared, const Block& block, float* rows,
                         const Backward& with) const {
    if (sizes_.by_tiles) {
      steps_.multiply(with.of_rows, prepared.spectrum, block.num_tiles, filters_, channels_,
                      with.parts);
      clear_rows(with.of_window, 0, block.num_tiles * step_ + kTile, channels_);
      steps_.add_tiles(with.parts, block.num_tiles, step_, channels_, with.of_window);
    } else {
      // Each depends on the rows that end there; before the first and after the last are zeros.
      clear_rows(rows, block.num_rows, block.num_rows + margin(), filters_);
      steps_.multiply_windows(rows - rows_of(margin(), filters_), prepared.kernel, nullptr,
                              block.num_rows + margin(), filters_, sizes_.taps * filters_,
                              channels_, false, with.of_window);
    }
  }

  static std::size_t rows_of(int num, int width) { return static_cast<std::size_t>(num) * width; }

  std::size_t matrix() const { return rows_of(channels_, filters_); }

  // How many values the sums of a kernel's gradient have.
  std::size_t num_sums() const {
    return sizes_.by_tiles ? kPlanes * matrix()
                           : rows_of(sizes_.taps * sizes_.channels, filters_);
  }

  // How many rows of the inputs an output depends on besides its own.
  int margin() const { return sizes_.taps - 1; }

  // How many values the rows of the inputs of a block have, with what tiles cover besides.
  std::size_t window() const {
    return rows_of(rows_of_block_ + std::max(kTile, margin()), channels_);
  }

  int padded(int num) const { return (num + width_ - 1) / width_ * width_; }

  Block at(int item) const {
    Block block;
    const int sample = item / blocks_;
    const int first = item % blocks_ * pools_of_block_;
    block.num_pools = std::min(pools_of_block_, sizes_.num_pools() - first);
    block.num_rows = block.num_pools * sizes_.pool;
    block.num_tiles = (block.num_rows + step_ - 1) / step_;
    block.values =
        (rows_of(sample, sizes_.length) + rows_of(first, sizes_.pool)) * sizes_.num_values();
    block.maxima = (rows_of(sample, sizes_.num_pools()) + first) * sizes_.filters;
    return block;
  }

  // Puts the rows that the block's tiles consist of into the window, and zeros after them.
  void fill(const float* values, const Prepared& prepared, const Block& block,
            float* window) const {
    const int num_rows = block.num_rows + margin();
    if (sizes_.first_taps > 0) {
      steps_.multiply_windows(values + block.values, prepared.first_kernel, prepared.first_biases,
                              num_rows, 1, sizes_.first_taps, channels_, true, window);
    } else {
      for (int row = 0; row < num_rows; ++row) {
        float* to = window + rows_of(row, channels_);
        std::memcpy(to, values + block.values + rows_of(row, sizes_.channels),
                    sizes_.channels * sizeof(float));
        std::fill(to + sizes_.channels, to + channels_, 0.0f);
      }
    }
    clear_rows(window, num_rows, block.num_tiles * step_ + kTile, channels_);
  }

  // Writes the kernel's gradient.
  void finish_kernel(const Backward& total, const Array& of_kernel, const Gradients& to) const {
    if (sizes_.by_tiles) {
      in_threads(max_threads_, channels_, [&](int, int begin, int end) {
        steps_.kernel_gradient(total.sums, sizes_.taps, channels_, filters_, begin, end, of_kernel);
      });
    }
    const int depth = sizes_.by_tiles ? channels_ : sizes_.channels;
    const float* whole = sizes_.by_tiles ? of_kernel : total.sums;
    for (int tap = 0; tap < sizes_.taps; ++tap) {
      for (int i = 0; i < sizes_.channels; ++i) {
        std::memcpy(to.kernel + rows_of(tap * sizes_.channels + i, sizes_.filters),
                    whole + rows_of(tap * depth + i, filters_), sizes_.filters * sizeof(float));
      }
    }
  }

  // Clears the rows that no block has written, and adds those of the ends of blocks.
  void finish_values(const float* tails, std::size_t tail, float* values) const {
    const int written = sizes_.num_pools() * sizes_.pool;
    for (int sample = 0; sample < sizes_.batch; ++sample) {
      float* rows = values + rows_of(sample, sizes_.length) * sizes_.channels;
      clear_rows(rows, written, sizes_.length, sizes_.channels);
    }
    for (int item = 0; item < sizes_.batch * blocks_; ++item) {
      const Block block = at(item);
      float* rows = values + block.values + rows_of(block.num_rows, sizes_.channels);
      for (std::size_t i = 0; i < tail; ++i) rows[i] += tails[item * tail + i];
    }
  }

  // Copies the first `num` rows without their padding.
  void copy_rows(const float* from, int width, int num, float* to) const {
    for (int row = 0; row < num; ++row) {
      std::memcpy(to + rows_of(row, sizes_.channels), from + rows_of(row, width),
                  sizes_.channels * sizeof(float));
    }
  }

  static void clear_rows(float* rows, int begin, int end, int width) {
    if (end <= begin) return;
    std::memset(rows + rows_of(begin, width), 0, rows_of(end - begin, width) * sizeof(float));
  }

  static Array padded_rows(const float* from, int num, int width, int padded_width) {
    Array to(rows_of(num, padded_width));
    to.clear();
    for (int row = 0; row < num; ++row) {
      std::memcpy(to + rows_of(row, padded_width), from + rows_of(row, width),
                  width * sizeof(float));
    }
    return to;
  }

  // The kernel (taps, filters, channels) from the last tap to the first, padded.
  Array reversed_kernel(const float* kernel) const {
    Array to(sizes_.taps * matrix());
    to.clear();
    for (int tap = 0; tap < sizes_.taps; ++tap) {
      for (int i = 0; i < sizes_.channels; ++i) {
        for (int j = 0; j < sizes_.filters; ++j) {
          to[rows_of((sizes_.taps - 1 - tap) * filters_ + j, channels_) + i] =
              kernel[rows_of(tap * sizes_.channels + i, sizes_.filters) + j];
        }
      }
    }
    return to;
  }

  // The kernel (taps, channels, filters), padded; transposed, its filters come before its channels.
  Array padded_kernel(const float* kernel, bool transposed) const {
    Array to(sizes_.taps * matrix());
    to.clear();
    for (int tap = 0; tap < sizes_.taps; ++tap) {
      for (int i = 0; i < sizes_.channels; ++i) {
        for (int j = 0; j < sizes_.filters; ++j) {
          const std::size_t at =
              transposed ? rows_of(j, channels_) + i : rows_of(i, filters_) + j;
          to[tap * matrix() + at] =
              kernel[rows_of(tap * sizes_.channels + i, sizes_.filters) + j];
        }
      }
    }
    return to;
  }

  // Calls part(thread, begin, end) for ranges that make up [0, num): the same ones every time, so
  // that sums have the same bits.
  template <typename Part>
  static void in_threads(int num_threads, int num, Part part) {
    const auto bound = [&](int i) {
      return static_cast<int>(static_cast<std::int64_t>(num) * i / num_threads);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < num_threads; ++i) others.emplace_back(part, i, bound(i), bound(i + 1));
    part(0, 0, bound(1));
    for (std::thread& other : others) other.join();
  }

  const Sizes sizes_;
  const Steps& steps_;
  const int max_threads_;
  const int width_;               // of which channels_ and filters_ are multiples
  const int channels_, filters_;  // padded
  const int step_;                // positions that a tile adds
  const int rows_of_block_, pools_of_block_;
  const int blocks_;  // of a sample
  const int threads_;
};

}  // namespace tiles
