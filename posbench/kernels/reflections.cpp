// What reflections between a key and a query change in their product (PaTH): the recurrence of reflections.py, one
// sequence and head at a time per thread, in fp32. Its letters are those of that file.

#include "native.h"

#include <omp.h>

namespace {

constexpr int64_t C = 32;  // keys of a block; lengths are filled up to a multiple, by tokens that reflect nothing

// c (M, N) = alpha a b, or added to c; a's numbers lie at any strides, M is a multiple of 8, N of 32.
void multiply(const float* a, int64_t of_row, int64_t of_column, const float* b, int64_t b_stride, float* c,
              int64_t c_stride, int64_t M, int64_t N, int64_t K, float alpha = 1, bool add = false) {
  constexpr int ROWS = 8;
  for (int64_t n = 0; n < N; n += 2 * LANES)
    for (int64_t m = 0; m < M; m += ROWS) {
      Floats sums[ROWS][2] = {};
      for (int64_t k = 0; k < K; k++) {
        const Floats left = load<Floats>(b + k * b_stride + n), right = load<Floats>(b + k * b_stride + n + LANES);
        const float* column = a + m * of_row + k * of_column;
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          const Floats x = Floats{} + column[i * of_row];
          sums[i][0] += x * left;
          sums[i][1] += x * right;
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++)
        for (int half = 0; half < 2; half++) {
          float* at = c + (m + i) * c_stride + n + half * LANES;
          store(at, sums[i][half] * alpha + (add ? load<Floats>(at) : Floats{}));
        }
    }
}

// a (M, K) and b (K, N), each row after the other
void multiply_rows(const float* a, const float* b, float* c, int64_t M, int64_t N, int64_t K, float alpha = 1,
                   bool add = false) {
  multiply(a, K, 1, b, N, c, N, M, N, K, alpha, add);
}
// aᵀ b for a (K, M)
void multiply_columns(const float* a, const float* b, float* c, int64_t M, int64_t N, int64_t K, float alpha = 1,
                      bool add = false) {
  multiply(a, 1, M, b, N, c, N, M, N, K, alpha, add);
}

// x + alpha y, numbers of a row
inline void add_row(float* x, const float* y, float alpha, int64_t n) {
  for (int64_t d = 0; d < n; d += LANES) store(x + d, load<Floats>(x + d) + load<Floats>(y + d) * alpha);
}
// factor (x - sum over j of weights_j rows_j), for numbers of a row
inline void less_rows(const float* x, const float* rows, const float* weights, int64_t count, float factor, float* to,
                      int64_t n) {
  for (int64_t d = 0; d < n; d += 2 * LANES) {
    Floats left = load<Floats>(x + d), right = load<Floats>(x + d + LANES);
    for (int64_t j = 0; j < count; j++) {
      left -= load<Floats>(rows + j * n + d) * weights[j];
      right -= load<Floats>(rows + j * n + d + LANES) * weights[j];
    }
    store(to + d, left * factor);
    store(to + d + LANES, right * factor);
  }
}
inline float dot(const float* x, const float* y, int64_t n) {
  Floats total{};
  for (int64_t d = 0; d < n; d += LANES) total += load<Floats>(x + d) * load<Floats>(y + d);
  return sum(total);
}

// Rows (C, C): what lies on the diagonal, or above it, to 0.
void keep_below(float* x, bool diagonal) {
  for (int64_t r = 0; r < C; r++) std::fill(x + r * C + r + (diagonal ? 1 : 0), x + (r + 1) * C, 0.0f);
}

void load_rows(const Rows<Half>& from, int64_t b, int64_t h, float* to, int64_t T, int64_t D) {
  for (int64_t t = 0; t < T; t++)
    for (int64_t d = 0; d < D; d += LANES)
      store(to + t * D + d, widened(load<Halves>(from.of(b, h) + t * from.time + d)));
}
void load_rows(const Rows<float>& from, int64_t b, int64_t h, float* to, int64_t T, int64_t D) {
  for (int64_t t = 0; t < T; t++) std::copy_n(from.of(b, h) + t * from.time, D, to + t * D);
}

// One sequence and head.
struct Path {
  int64_t T, Tp, D;
  float *Q, *K, *W, *B;          // (Tp, D), (Tp, D), (Tp, D), (Tp,)
  float *A, *G, *M, *V;          // of every block: (C, C), (C, C), (C, C), (C, D)
  float *K_columns, *W_columns;  // of one: (D, C)
  float *turned, *reaching;      // (Tp, D): what later blocks have changed in queries, and that with the queries
  float *S, *part;               // of a block, or of every block one after the other: (rows, C)
  // backwards
  float *dQ, *dturned, *dreaching, *dK, *dW, *dB;  // (Tp, D) ..., (Tp,)
  float *dS, *dM, *dV, *columns;                   // (Tp, C), (C, C), (C, D), (D, C)

  Path(const Sizes& sizes, bool back, Scratch& from) : T(sizes.length), Tp((T + C - 1) / C * C), D(sizes.width) {
    const auto take = [&](int64_t count) { return from.take<float>(count); };
    for (float** x : {&Q, &K, &W, &turned, &reaching}) *x = take(Tp * D);
    for (float** x : {&A, &G, &M}) *x = take(Tp * C);
    V = take(Tp * D);
    B = take(Tp);
    for (float** x : {&K_columns, &W_columns}) *x = take(D * C);
    S = take(back ? Tp * (Tp + C) / 2 : Tp * C);
    part = take(Tp * C);
    if (!back) return;
    for (float** x : {&dQ, &dturned, &dreaching, &dK, &dW}) *x = take(Tp * D);
    dB = take(Tp);
    dS = take(Tp * C);
    dM = take(C * C);
    for (float** x : {&dV, &columns}) *x = take(D * C);
  }

  void read(const Rows<Half>& q, const Rows<Half>& k, const Rows<float>& w, const float* beta, int64_t b,
            int64_t h) const {
    for (float* x : {Q, K, W}) std::fill(x + T * D, x + Tp * D, 0.0f);
    std::fill(B + T, B + Tp, 0.0f);
    load_rows(q, b, h, Q, T, D);
    load_rows(k, b, h, K, T, D);
    load_rows(w, b, h, W, T, D);
    std::copy_n(beta, T, B);
    std::fill(turned, turned + Tp * D, 0.0f);
  }

  // A block's matrices, which know no queries: [M | V] = (I + stril(B A))^-1 B [G | W], row after row.
  void prepare(int64_t n) const {
    const int64_t first = n * C;
    const float *w = W + first * D, *beta = B + first;
    float *a = A + first * C, *g = G + first * C, *m = M + first * C, *v = V + first * D;
    transpose(K + first * D, D, K_columns, C, C, D);
    transpose(w, D, W_columns, C, C, D);
    multiply_rows(w, W_columns, a, C, C, D);
    multiply_rows(w, K_columns, g, C, C, D);
    keep_below(g, false);
    for (int64_t i = 0; i < C; i++) {
      less_rows(g + i * C, m, a + i * C, i, beta[i], m + i * C, C);
      less_rows(w + i * D, v, a + i * C, i, beta[i], v + i * D, D);
    }
  }

  // Queries from a block's first on, as the block meets them.
  void reach(int64_t first) const {
    for (int64_t n = first * D; n < Tp * D; n += LANES)
      store(reaching + n, load<Floats>(Q + n) + load<Floats>(turned + n));
  }
  void meet(int64_t first, float* s) const {
    reach(first);
    multiply_rows(reaching + first * D, W_columns, s, Tp - first, C, D);
    keep_below(s, true);
  }
  void turn(int64_t n, const float* s, float sign) const {
    multiply_rows(s, V + n * C * D, turned + n * C * D, Tp - n * C, D, C, sign, true);
  }

  void forward(float scale, float* change) const {
    for (int64_t n = Tp / C - 1; n >= 0; n--) {
      const int64_t first = n * C, rows = Tp - first, keys = std::min(C, T - first);
      prepare(n);
      meet(first, S);
      const bool last = rows == C;  // nothing has turned its queries
      if (!last) multiply_rows(turned + first * D, K_columns, part, rows, C, D, scale);
      multiply_rows(S, M + first * C, part, rows, C, C, -scale, !last);
      for (int64_t r = first; r < T; r++) std::copy_n(part + (r - first) * C, keys, change + r * T + first);
      for (int64_t r = 0; r < first; r++) std::fill_n(change + r * T + first, keys, 0.0f);
      if (n) turn(n, S, -1);
    }
  }

  float* kept(int64_t n) const { return S + n * C * Tp - n * (n - 1) / 2 * C * C; }  // S of block n

  void backward(float scale, const float* above) const {
    const int64_t blocks = Tp / C;
    for (int64_t n = blocks - 1; n >= 0; n--) {
      prepare(n);
      meet(n * C, kept(n));
      if (n) turn(n, kept(n), -1);
    }
    for (float* x : {dQ, dturned}) std::fill(x, x + Tp * D, 0.0f);
    for (int64_t n = 0; n < blocks; n++) {
      const int64_t first = n * C, rows = Tp - first, keys = std::min(C, T - first);
      const float* s = kept(n);
      if (n) turn(n, s, 1);  // as it was
      reach(first);
      std::fill(part, part + rows * C, 0.0f);
      for (int64_t r = first; r < T; r++)
        for (int64_t c = 0; c < keys; c++) part[(r - first) * C + c] = scale * above[r * T + first + c];
      transpose(M + first * C, C, columns, C, C, C);
      multiply_rows(part, columns, dS, rows, C, C, -1);
      multiply_columns(s, part, dM, C, C, rows, -1);
      if (n) {
        transpose(V + first * D, D, columns, C, C, D);
        multiply_rows(dturned + first * D, columns, dS, rows, C, D, -1, true);
        multiply_columns(s, dturned + first * D, dV, C, D, rows, -1);
      } else {
        std::fill(dV, dV + C * D, 0.0f);
      }
      keep_below(dS, true);
      multiply_rows(dS, W + first * D, dreaching, rows, D, C);
      multiply_columns(dS, reaching + first * D, dW + first * D, C, D, rows);
      multiply_columns(part, turned + first * D, dK + first * D, C, D, rows);
      add_row(dQ + first * D, dreaching, 1, rows * D);
      if (n + 1 < blocks) {
        add_row(dturned + first * D, dreaching, 1, rows * D);
        multiply_rows(part, K + first * D, dturned + first * D, rows, D, C, 1, true);
      }
      unprepare(n);
    }
  }

  // From the gradients of M and V, in place: those of what they were made of.
  void unprepare(int64_t n) const {
    const int64_t first = n * C;
    const float *w = W + first * D, *beta = B + first;
    const float *a = A + first * C, *g = G + first * C, *m = M + first * C, *v = V + first * D;
    float *dw = dW + first * D, *dk = dK + first * D, *db = dB + first;
    for (int64_t j = C - 2; j >= 0; j--) {  // times the inverse, transposed
      float column[C];
      const int64_t later = C - 1 - j;
      for (int64_t i = 0; i < later; i++) column[i] = beta[j + 1 + i] * a[(j + 1 + i) * C + j];
      less_rows(dM + j * C, dM + (j + 1) * C, column, later, 1, dM + j * C, C);
      less_rows(dV + j * D, dV + (j + 1) * D, column, later, 1, dV + j * D, D);
    }
    float* dA = dS;  // that of the matrix below its diagonal, for now
    transpose(m, C, columns, C, C, C);
    multiply_rows(dM, columns, dA, C, C, C, -1);
    transpose(v, D, columns, C, C, D);
    multiply_rows(dV, columns, dA, C, C, D, -1, true);
    keep_below(dA, false);
    keep_below(dM, false);
    for (int64_t i = 0; i < C; i++) {
      const int64_t row = i * C;
      db[i] = dot(dV + i * D, w + i * D, D) + dot(dM + row, g + row, C) + dot(dA + row, a + row, C);
      add_row(dw + i * D, dV + i * D, beta[i], D);
      for (float* x : {dM + row, dA + row})
        for (int64_t c = 0; c < C; c++) x[c] *= beta[i];
    }
    multiply_rows(dM, K + first * D, dw, C, D, C, 1, true);
    multiply_columns(dM, w, dk, C, D, C, 1, true);
    multiply_rows(dA, w, dw, C, D, C, 1, true);
    multiply_columns(dA, w, dw, C, D, C, 1, true);
  }
};

void store_halves(const float* from, Half* to, int64_t count) {
  for (int64_t n = 0; n < count; n += LANES) store(to + n, rounded(load<Floats>(from + n)));
}

// Does `compute` with the path of every sequence and head, and its number.
template <class Compute>
void for_each_path(const Sizes& sizes, bool back, const Rows<Half>& q, const Rows<Half>& k, const Rows<float>& w,
                   const float* beta, const Compute& compute) {
#pragma omp parallel num_threads(sizes.threads)
  {
    const Flushing flushing;
    Scratch from(sizes.scratch + omp_get_thread_num() * sizes.scratch_stride);
    const Path path(sizes, back, from);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < sizes.batch * sizes.heads; n++) {
      path.read(q, k, w, beta + n * sizes.length, n / sizes.heads, n % sizes.heads);
      compute(path, n);
    }
  }
}

int64_t memory_needed(const Sizes& sizes, bool back) {
  Scratch from(nullptr);
  Path(sizes, back, from);
  return from.next - (char*)nullptr;
}

}  // namespace

extern "C" {

// Bytes of scratch that a thread needs.
int64_t scratch_of_change(const Sizes* sizes) { return memory_needed(*sizes, false); }
int64_t scratch_of_unchange(const Sizes* sizes) { return memory_needed(*sizes, true); }

// beta is (batch, heads, length), change (batch, heads, length, length).
void change(const Sizes* sizes, const Rows<Half>* q, const Rows<Half>* k, const Rows<float>* w, const float* beta,
            float* change) {
  const int64_t T = sizes->length;
  for_each_path(*sizes, false, *q, *k, *w, beta,
                [&](const Path& path, int64_t n) { path.forward(sizes->scale, change + n * T * T); });
}

// above is the gradient of change; dq, dk and dw are (batch, heads, length, width), dbeta as beta.
void unchange(const Sizes* sizes, const Rows<Half>* q, const Rows<Half>* k, const Rows<float>* w, const float* beta,
              const float* above, Half* dq, Half* dk, float* dw, float* dbeta) {
  const int64_t T = sizes->length, D = sizes->width;
  for_each_path(*sizes, true, *q, *k, *w, beta, [&](const Path& path, int64_t n) {
    path.backward(sizes->scale, above + n * T * T);
    store_halves(path.dQ, dq + n * T * D, T * D);
    store_halves(path.dK, dk + n * T * D, T * D);
    std::copy_n(path.dW, T * D, dw + n * T * D);
    std::copy_n(path.dB, T, dbeta + n * T);
  });
}
}
