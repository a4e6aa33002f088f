// Products of matrices of bf16 numbers with sums in fp32, by AMX or AVX-512 BF16, and how they lie in memory for them.

#pragma once

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "native.h"

namespace {

constexpr int64_t BLOCK = 32;  // rows of scores that are computed together; lengths are filled up to a multiple
constexpr int64_t PANEL = 32;  // columns of a matrix that lie together: (K, N) as (N / PANEL, K, PANEL)
constexpr int64_t APART = 32;  // numbers left free between rows, which else would share one set of a cache's lines

inline int64_t padded(int64_t n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

// -- layouts ----------------------------------------------------------------------------------------------------------

// (T, N) words to panels of (N, T)
inline void transpose_to_panels(const void* from, Pair* to, int64_t T, int64_t N) {
  for (int64_t t = 0; t < T; t += PANEL) transpose((const Pair*)from + t * N, N, to + t * N, PANEL, PANEL, N);
}

// (T, N) to panels of (T/2, N), pairs of two rows
inline void pair_rows(const Half* from, int64_t stride, Pair* to, int64_t T, int64_t N) {
  for (int64_t n = 0; n < N; n += PANEL)
    for (int64_t t = 0; t < T; t += 2)
      for (int64_t lane = n; lane < n + PANEL; lane += LANES, to += LANES) {
        const Words low = __builtin_convertvector(load<Halves>(from + t * stride + lane), Words);
        const Words high = __builtin_convertvector(load<Halves>(from + (t + 1) * stride + lane), Words);
        store(to, low | high << 16);
      }
}

// Such panels to (N, T) at a stride
inline void columns_of_pairs(const Pair* from, Half* to, int64_t stride, int64_t T, int64_t N) {
  for (int64_t n = 0; n < N; n += PANEL) transpose(from + n * T / 2, PANEL, to + n * stride, stride / 2, T / 2, PANEL);
}

// Rows (T, D) at a stride to (Tp, D), zeros beyond T
inline void copy_rows(const Half* from, int64_t stride, Half* to, int64_t T, int64_t Tp, int64_t D) {
  for (int64_t t = 0; t < T; t++)
    for (int64_t d = 0; d < D; d += 2 * LANES) store(to + t * D + d, load<Words>(from + t * stride + d));
  std::memset(to + T * D, 0, (Tp - T) * D * sizeof(Half));
}

// -- products ---------------------------------------------------------------------------------------------------------
// C (M, N) = A (M, K) B (K, N), or added to C, with B in panels of pairs of rows; all sizes are multiples of 32.

#if defined(__AMX_BF16__)

struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The unit for tiles of a thread, which other libraries in the process use, too: left as it was found.
class Unit {
 public:
  Unit() {
    _tile_storeconfig(found);
    static const Shapes shapes;
    _tile_loadconfig(&shapes);
  }
  ~Unit() {
    if (found[0])
      _tile_loadconfig(found);
    else
      _tile_release();
  }

 private:
  alignas(64) uint8_t found[64];
};

inline bool unit_is_there() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

inline void product(const Half* a, int64_t a_stride, const Pair* b, int64_t panel, float* c, int64_t c_stride, int64_t M,
             int64_t N, int64_t K, bool add = false) {
  for (int64_t n = 0; n < N; n += 32)
    for (int64_t m = 0; m < M; m += 32) {
      float *above = c + m * c_stride + n, *below = above + 16 * c_stride;
      if (add) {
        _tile_loadd(0, above, c_stride * 4);
        _tile_loadd(1, above + 16, c_stride * 4);
        _tile_loadd(2, below, c_stride * 4);
        _tile_loadd(3, below + 16, c_stride * 4);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t k = 0; k < K; k += 32) {
        _tile_loadd(4, a + m * a_stride + k, a_stride * 2);
        _tile_loadd(5, a + (m + 16) * a_stride + k, a_stride * 2);
        const Pair* both = b + n / PANEL * panel + k / 2 * PANEL;
        _tile_loadd(6, both, PANEL * 4);
        _tile_loadd(7, both + 16, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, above, c_stride * 4);
      _tile_stored(1, above + 16, c_stride * 4);
      _tile_stored(2, below, c_stride * 4);
      _tile_stored(3, below + 16, c_stride * 4);
    }
}

#else

struct Unit {};
inline bool unit_is_there() { return true; }

inline void product(const Half* a, int64_t a_stride, const Pair* b, int64_t panel, float* c, int64_t c_stride, int64_t M,
             int64_t N, int64_t K, bool add = false) {
  constexpr int ROWS = 8;
  for (int64_t n = 0; n < N; n += 2 * LANES)
    for (int64_t m = 0; m < M; m += ROWS) {
      __m512 sums[ROWS][2];
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) {
        const float* at = c + (m + i) * c_stride + n;
        sums[i][0] = add ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
        sums[i][1] = add ? _mm512_loadu_ps(at + LANES) : _mm512_setzero_ps();
      }
      for (int64_t k = 0; k < K / 2; k++) {
        const Pair* both = b + n / PANEL * panel + k * PANEL;
        const auto left = (__m512bh)_mm512_loadu_si512(both), right = (__m512bh)_mm512_loadu_si512(both + LANES);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          const auto two = (__m512bh)_mm512_set1_epi32(load<int>(a + (m + i) * a_stride + 2 * k));
          sums[i][0] = _mm512_dpbf16_ps(sums[i][0], two, left);
          sums[i][1] = _mm512_dpbf16_ps(sums[i][1], two, right);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) {
        float* at = c + (m + i) * c_stride + n;
        _mm512_storeu_ps(at, sums[i][0]);
        _mm512_storeu_ps(at + LANES, sums[i][1]);
      }
    }
}

#endif

}  // namespace
