// Vectors of numbers, for CPUs with AVX-512 BF16.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

using Half = uint16_t;  // a bf16 number
using Pair = uint32_t;  // two of them that a product takes together, the first in the low half
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef Half Halves __attribute__((vector_size(32)));

constexpr int64_t LANES = 16;
constexpr float NEVER = -std::numeric_limits<float>::infinity();
const Floats COUNT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <class V, class X>
inline V load(const X* from) {
  V out;
  std::memcpy(&out, from, sizeof(V));
  return out;
}
template <class V, class X>
inline void store(X* to, V x) {
  std::memcpy(to, &x, sizeof(V));
}

inline Floats widened(Halves x) { return (Floats)(__builtin_convertvector(x, Words) << 16); }
inline Halves rounded(Floats x) { return (Halves)_mm512_cvtneps_pbh((__m512)x); }
// The first `count` of them
inline __mmask16 lanes(int64_t count) { return count >= LANES ? 0xffff : (1u << std::max<int64_t>(count, 0)) - 1; }
inline float sum(Floats x) { return _mm512_reduce_add_ps((__m512)x); }
inline float most(Floats x) { return _mm512_reduce_max_ps((__m512)x); }

// e^x for x up to 0, to 2e-7 of it; 0 below -87.
inline Floats exponential(Floats x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer, in the lowest bits
  const Floats shifted = x * 1.44269504f + shift, n = shifted - shift;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Words power = ((Words)shifted - (Words)(Floats{} + shift) + 127) << 23;
  return x < -87.0f ? Floats{} : p * (Floats)power;
}

// ln(1 + x) for x from 0 to 1, to 1e-7 of it: twice the area tangent of x / (2 + x)
inline Floats log_above(Floats x) {
  const Floats s = x / (2 + x), square = s * s;
  Floats p = square * (1.0f / 15) + 1.0f / 13;
  for (const float divisor : {11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) p = p * square + 1.0f / divisor;
  return 2 * s * p;
}

// ln(1 + e^z) and its slope sigmoid(z)
struct Softplus {
  Floats height, slope;
  explicit Softplus(Floats z) {
    const Floats e = exponential(z < 0 ? z : -z), larger = 1 / (1 + e), smaller = e * larger;
    height = (z > 0 ? z : Floats{}) + log_above(e);
    slope = z < 0 ? smaller : larger;
  }
};

template <int STEP>
inline Floats shifted(Floats x) {  // lane l as lane l + STEP was, 0 beyond the last
  Words which;
  for (int l = 0; l < LANES; l++) which[l] = std::min<int>(l + STEP, LANES);
  return __builtin_shuffle(x, Floats{}, which);
}
// Each lane with all to its right.
inline Floats sums_from_right(Floats x) {
  x += shifted<1>(x);
  x += shifted<2>(x);
  x += shifted<4>(x);
  return x + shifted<8>(x);
}

inline Floats gathered(const float* from, __m512i where) { return (Floats)_mm512_i32gather_ps(where, from, 4); }

// Between which of `positions` numbers counts lie, and how far from the lower one.
struct Between {
  Floats held;  // the counts, between 0 and the last number
  __m512i below, above;
  Floats part;
  Between(Floats count, int64_t positions) {
    const __m512i last = _mm512_set1_epi32(int(positions - 1));
    held = (Floats)_mm512_min_ps(_mm512_max_ps((__m512)count, _mm512_setzero_ps()), _mm512_cvtepi32_ps(last));
    below = _mm512_cvttps_epi32((__m512)held);
    above = _mm512_min_epi32(_mm512_add_epi32(below, _mm512_set1_epi32(1)), last);
    part = held - (Floats)_mm512_cvtepi32_ps(below);
  }
};

// 16 x 16 words, rows to columns: at each scale the blocks off the diagonal change places.
template <int SCALE>
inline void transposed_at(Words (&rows)[LANES]) {
  Words low, high;
  for (int e = 0; e < LANES; e++) {
    low[e] = e & SCALE ? LANES + e - SCALE : e;
    high[e] = e & SCALE ? LANES + e : e + SCALE;
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (!(i & SCALE)) {
      const Words a = rows[i], b = rows[i + SCALE];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + SCALE] = __builtin_shuffle(a, b, high);
    }
}
inline void transpose(Words (&rows)[LANES]) {
  transposed_at<8>(rows);
  transposed_at<4>(rows);
  transposed_at<2>(rows);
  transposed_at<1>(rows);
}
inline void load_rows(Words (&rows)[LANES], const void* from, int64_t stride) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) rows[i] = load<Words>((const Pair*)from + i * stride);
}

// (M, N) words to (N, M)
inline void transpose(const void* from, int64_t from_stride, void* to, int64_t to_stride, int64_t M, int64_t N) {
  Words rows[LANES];
  for (int64_t m = 0; m < M; m += LANES)
    for (int64_t n = 0; n < N; n += LANES) {
      load_rows(rows, (const Pair*)from + m * from_stride + n, from_stride);
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store((Pair*)to + (n + i) * to_stride + m, rows[i]);
    }
}

// Rows (T, D) to bf16 numbers at a stride
inline void store_rows(const float* from, float scale, Half* to, int64_t stride, int64_t T, int64_t D) {
  for (int64_t t = 0; t < T; t++)
    for (int64_t d = 0; d < D; d += LANES) store(to + t * stride + d, rounded(load<Floats>(from + t * D + d) * scale));
}

// As long as it lives, its thread takes numbers below 1e-38 for 0, which else are a hundred times as slow.
class Flushing {
 public:
  Flushing() { _mm_setcsr(found | 0x8040); }
  ~Flushing() { _mm_setcsr(found); }

 private:
  const unsigned found = _mm_getcsr();
};

template <class X>
struct Rows {  // (B, H, T, D), channels next to each other
  X* data;
  int64_t batch, head, time;
  X* of(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

// What the kernels are told of tensors (B, H, T, D) and of the memory of threads.
struct Sizes {
  int64_t batch, heads, length, width;  // width a multiple of 32
  int64_t window;                       // keys that a query sees, itself included
  int64_t near;                         // nearest keys that have vectors, a multiple of 32
  int64_t threads;
  char* scratch;                        // memory of the first thread, at a multiple of 64
  int64_t scratch_stride;               // bytes to the next thread's
  float scale;
};

// That of one thread, of which pieces are taken.
class Scratch {
 public:
  explicit Scratch(char* at) : next(at) {}
  template <class X>
  X* take(int64_t count) {
    X* out = (X*)next;
    next += (count * sizeof(X) + 63) / 64 * 64;
    return out;
  }
  char* next;
};

// Memory that is made of sizes and a scratch memory: that of this thread, and bytes that it needs.
template <class Memory>
Memory memory_of_thread(const Sizes& sizes) {
  Scratch from(sizes.scratch + omp_get_thread_num() * sizes.scratch_stride);
  return Memory(sizes, from);
}
template <class Memory>
int64_t memory_needed(const Sizes& sizes) {
  Scratch from(nullptr);
  Memory(sizes, from);
  return from.next - (char*)nullptr;
}

}  // namespace
