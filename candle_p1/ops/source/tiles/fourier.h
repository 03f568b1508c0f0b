// Discrete Fourier transforms of kLanes real sequences at a time, by splitting each into its values
// of even and of odd index (Cooley and Tukey, 1965). Everything is unrolled.

#pragma once

#include "lanes.h"

namespace tiles {
namespace {

constexpr int kLongest = 32;
// cos(2 pi k / 32) for k = 0 to 8.
constexpr float kCosines[] = {1.0f,
                              0.98078528040323044913f,
                              0.92387953251128675613f,
                              0.83146961230254523708f,
                              0.70710678118654752440f,
                              0.55557023301960222474f,
                              0.38268343236508977173f,
                              0.19509032201612826785f,
                              0.0f};

// Of k / num turns, from none to a quarter.
constexpr float cosine(int k, int num) { return kCosines[k * (kLongest / num)]; }
constexpr float sine(int k, int num) { return kCosines[kLongest / 4 - k * (kLongest / num)]; }

// The transform of x[0], x[stride], ..., `num` values, which is
//   re[f] + i im[f] = sum over t of x[t * stride] exp(-2 pi i f t / num)  for f = 0 to num / 2.
// im[0] and im[num / 2] are zero, and neither set nor read.
template <int num, int stride>
struct Transform {
  static constexpr int kHalf = num / 2;
  static constexpr int kQuarter = num / 4;

  static ALWAYS_INLINE void forward(const Lanes* x, Lanes* re, Lanes* im) {
    Lanes even_re[kQuarter + 1], even_im[kQuarter + 1], odd_re[kQuarter + 1], odd_im[kQuarter + 1];
    Transform<kHalf, 2 * stride>::forward(x, even_re, even_im);
    Transform<kHalf, 2 * stride>::forward(x + stride, odd_re, odd_im);
    re[0] = even_re[0] + odd_re[0];
    re[kHalf] = even_re[0] - odd_re[0];
    UNROLLED
    for (int f = 1; f < kQuarter; ++f) {
      const Lanes turned_re = cosine(f, num) * odd_re[f] + sine(f, num) * odd_im[f];
      const Lanes turned_im = cosine(f, num) * odd_im[f] - sine(f, num) * odd_re[f];
      re[f] = even_re[f] + turned_re;
      im[f] = even_im[f] + turned_im;
      re[kHalf - f] = even_re[f] - turned_re;
      im[kHalf - f] = turned_im - even_im[f];
    }
    re[kQuarter] = even_re[kQuarter];
    im[kQuarter] = -odd_re[kQuarter];
  }

  // The inverse, times num.
  static ALWAYS_INLINE void backward(const Lanes* re, const Lanes* im, Lanes* x) {
    Lanes even_re[kQuarter + 1], even_im[kQuarter + 1], odd_re[kQuarter + 1], odd_im[kQuarter + 1];
    even_re[0] = re[0] + re[kHalf];
    odd_re[0] = re[0] - re[kHalf];
    UNROLLED
    for (int f = 1; f < kQuarter; ++f) {
      even_re[f] = re[f] + re[kHalf - f];
      even_im[f] = im[f] - im[kHalf - f];
      const Lanes turned_re = re[f] - re[kHalf - f];
      const Lanes turned_im = im[f] + im[kHalf - f];
      odd_re[f] = cosine(f, num) * turned_re - sine(f, num) * turned_im;
      odd_im[f] = cosine(f, num) * turned_im + sine(f, num) * turned_re;
    }
    even_re[kQuarter] = 2 * re[kQuarter];
    odd_re[kQuarter] = -2 * im[kQuarter];
    Transform<kHalf, 2 * stride>::backward(even_re, even_im, x);
    Transform<kHalf, 2 * stride>::backward(odd_re, odd_im, x + stride);
  }
};

template <int stride>
struct Transform<2, stride> {
  static ALWAYS_INLINE void forward(const Lanes* x, Lanes* re, Lanes*) {
    re[0] = x[0] + x[stride];
    re[1] = x[0] - x[stride];
  }

  static ALWAYS_INLINE void backward(const Lanes* re, const Lanes*, Lanes* x) {
    x[0] = re[0] + re[1];
    x[stride] = re[0] - re[1];
  }
};

}  // namespace
}  // namespace tiles
