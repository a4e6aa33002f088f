// A causal convolution of each channel over a few tokens, of fp32 or bf16 numbers, with sums in fp32. `window` of the
// sizes are the tokens that one sees, itself included; there is one head.

#include "native.h"

namespace {

constexpr int64_t WIDEST = 16;      // tokens
constexpr int64_t TOGETHER = 128;   // channels that one thread takes

inline Floats numbers(const float* from) { return load<Floats>(from); }
inline Floats numbers(const Half* from) { return widened(load<Halves>(from)); }
inline void put(float* to, Floats x) { store(to, x); }
inline void put(Half* to, Floats x) { store(to, rounded(x)); }

// Does `compute` with every sequence and some of its channels, from the first to the one after the last.
template <class Compute>
void for_each_part(const Sizes& sizes, const Compute& compute) {
#pragma omp parallel num_threads(sizes.threads)
  {
    const Flushing flushing;
#pragma omp for collapse(2)
    for (int64_t b = 0; b < sizes.batch; b++)
      for (int64_t c = 0; c < sizes.width; c += TOGETHER) compute(b, c, std::min(c + TOGETHER, sizes.width));
  }
}

// weight is (window, channels), the last for the token itself; out (batch, length, channels).
template <class X>
void convolve(const Sizes& sizes, const Rows<X>& x, const float* weight, X* out) {
  const int64_t T = sizes.length, D = sizes.width, K = sizes.window;
  for_each_part(sizes, [&](int64_t b, int64_t first, int64_t end) {
    for (int64_t t = 0; t < T; t++) {
      const X* own = x.of(b, 0) + t * x.time;
      const int64_t seen = std::min(t + 1, K);
      for (int64_t c = first; c < end; c += LANES) {
        Floats total{};
        for (int64_t s = 0; s < seen; s++)
          total += numbers(own - s * x.time + c) * load<Floats>(weight + (K - 1 - s) * D + c);
        put(out + (b * T + t) * D + c, total);
      }
    }
  });
}

// Gradients of x, (batch, length, channels), and of weights by sequence, (batch, window, channels).
template <class X>
void unconvolve(const Sizes& sizes, const Rows<X>& x, const float* weight, const Rows<X>& above, X* dx,
                float* dweight) {
  const int64_t T = sizes.length, D = sizes.width, K = sizes.window;
  for_each_part(sizes, [&](int64_t b, int64_t first, int64_t end) {
    float sums[WIDEST][TOGETHER] = {};
    for (int64_t t = 0; t < T; t++) {
      const X *own = x.of(b, 0) + t * x.time, *upper = above.of(b, 0) + t * above.time;
      const int64_t seeing = std::min(T - t, K);  // the token, and those after it
      for (int64_t c = first; c < end; c += LANES) {
        const Floats here = numbers(own + c);
        Floats total{};
        for (int64_t s = 0; s < seeing; s++) {
          const Floats arrived = numbers(upper + s * above.time + c);
          float* at = sums[s] + c - first;
          total += arrived * load<Floats>(weight + (K - 1 - s) * D + c);
          store(at, load<Floats>(at) + arrived * here);
        }
        put(dx + (b * T + t) * D + c, total);
      }
    }
    for (int64_t s = 0; s < K; s++) std::copy_n(sums[s], end - first, dweight + (b * K + K - 1 - s) * D + first);
  });
}

}  // namespace

extern "C" {

void convolve_floats(const Sizes* sizes, const Rows<float>* x, const float* weight, float* out) {
  convolve(*sizes, *x, weight, out);
}
void convolve_halves(const Sizes* sizes, const Rows<Half>* x, const float* weight, Half* out) {
  convolve(*sizes, *x, weight, out);
}
void unconvolve_floats(const Sizes* sizes, const Rows<float>* x, const float* weight, const Rows<float>* above,
                       float* dx, float* dweight) {
  unconvolve(*sizes, *x, weight, *above, dx, dweight);
}
void unconvolve_halves(const Sizes* sizes, const Rows<Half>* x, const float* weight, const Rows<Half>* above, Half* dx,
                       float* dweight) {
  unconvolve(*sizes, *x, weight, *above, dx, dweight);
}
}
