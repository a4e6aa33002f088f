// What reflections between a key and a query change in their product (PaTH): the recurrence of reflections.py, one
// sequence and head at a time per thread, in fp32. Its letters are those of that file; W here are vectors of any length,
// made unit vectors as they are read.

#include "native.h"

namespace {

constexpr int64_t C = 32;  // keys of a block; lengths are filled up to a multiple, by tokens that reflect nothing
constexpr float LEAST = 1e-12f;  // length that a vector is divided by, as `EPS` in encodings/path.py

// c (M, N) = alpha a b, or added to c; a's numbers lie at any strides, M is a multiple of 8, N of 32.
[[gnu::noinline]] void multiply(const float* a, int64_t of_row, int64_t of_column, const float* b, int64_t b_stride, float* c,
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
          const float x = column[i * of_row];
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
  constexpr int APART = 4;  // sums, so that one need not wait for the other
  for (int64_t d = 0; d < n; d += LANES) {
    Floats sums[APART] = {};
    int64_t j = 0;
    for (; j + APART <= count; j += APART)
#pragma GCC unroll 4
      for (int i = 0; i < APART; i++) sums[i] += load<Floats>(rows + (j + i) * n + d) * weights[j + i];
    for (; j < count; j++) sums[0] += load<Floats>(rows + j * n + d) * weights[j];
    store(to + d, (load<Floats>(x + d) - ((sums[0] + sums[1]) + (sums[2] + sums[3]))) * factor);
  }
}
inline float dot(const float* x, const float* y, int64_t n) {
  Floats total{};
  for (int64_t d = 0; d < n; d += LANES) total += load<Floats>(x + d) * load<Floats>(y + d);
  return sum(total);
}

// Rows (C, C): what lies above the diagonal, or on it, to 0.
void keep_below(float* x, bool diagonal) {
  for (int64_t r = 0; r < C; r++)
    for (int64_t c = 0; c < C; c += LANES) {
      float* at = x + r * C + c;
      _mm512_storeu_ps(at, _mm512_maskz_loadu_ps(lanes(r + diagonal - c), at));
    }
}

// One sequence and head.
struct Path {
  int64_t T, Tp, D, blocks;
  float *Q, *K, *W, *B;          // (Tp, D), (Tp, D), (Tp, D), (Tp,)
  float* shorten;                // (Tp,): what vectors were multiplied by
  float *A, *G, *M, *V;          // of every block: (C, C), (C, C), (C, C), (C, D)
  float *K_columns, *W_columns;  // of one: (D, C)
  float *turned, *reaching;      // (Tp, D): what later blocks have changed in queries, and that with the queries
  float *S, *part;               // of a block, or of every block one after the other: (rows, C)
  // backwards
  float *dQ, *dturned, *dreaching, *dK, *dW, *dB;  // (Tp, D) ..., (Tp,)
  float *dS, *dM, *dV, *columns;                   // (Tp, C), (C, C), (C, D), (D, C)

  Path(const Sizes& sizes, bool back, Scratch& from)
      : T(sizes.length), Tp((T + C - 1) / C * C), D(sizes.width), blocks(Tp / C) {
    const auto take = [&](int64_t count) { return from.take<float>(count); };
    for (float** x : {&Q, &K, &W, &turned, &reaching}) *x = take(Tp * D);
    for (float** x : {&A, &G, &M}) *x = take(Tp * C);
    V = take(Tp * D);
    for (float** x : {&B, &shorten}) *x = take(Tp);
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
    const Half *of_q = q.of(b, h), *of_k = k.of(b, h);
    const float* of_w = w.of(b, h);
    for (int64_t t = 0; t < T; t++) {
      float *query = Q + t * D, *key = K + t * D, *vector = W + t * D;
      Floats squares{};
      for (int64_t d = 0; d < D; d += LANES) {
        store(query + d, widened(load<Halves>(of_q + t * q.time + d)));
        store(key + d, widened(load<Halves>(of_k + t * k.time + d)));
        const Floats x = load<Floats>(of_w + t * w.time + d);
        squares += x * x;
        store(vector + d, x);
      }
      shorten[t] = 1 / std::max(std::sqrt(sum(squares)), LEAST);
      for (int64_t d = 0; d < D; d += LANES) store(vector + d, load<Floats>(vector + d) * shorten[t]);
    }
    std::copy_n(beta, T, B);
    std::fill(turned, turned + Tp * D, 0.0f);
  }

  // A block's matrices, which know no queries: [M | V] = (I + stril(B A))^-1 B [G | W], row after row. To the left of
  // the first block are no keys that would want its V.
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
      if (n) less_rows(w + i * D, v, a + i * C, i, beta[i], v + i * D, D);
    }
  }

  bool is_last(int64_t n) const { return n + 1 == blocks; }  // nothing has turned its queries

  // Queries from a block's first on, as the block meets them.
  const float* reach(int64_t n) const {
    const int64_t first = n * C * D;
    if (is_last(n)) return Q + first;
    for (int64_t at = first; at < Tp * D; at += LANES)
      store(reaching + at, load<Floats>(Q + at) + load<Floats>(turned + at));
    return reaching + first;
  }
  void meet(int64_t n, float* s) const {
    multiply_rows(reach(n), W_columns, s, Tp - n * C, C, D);
    keep_below(s, true);
  }
  void turn(int64_t n, const float* s, float sign) const {
    multiply_rows(s, V + n * C * D, turned + n * C * D, Tp - n * C, D, C, sign, true);
  }

  void forward(float scale, float* change) const {
    for (int64_t n = blocks - 1; n >= 0; n--) {
      const int64_t start = n * C, rows = Tp - start;
      prepare(n);
      meet(n, S);
      if (!is_last(n)) multiply_rows(turned + start * D, K_columns, part, rows, C, D, scale);
      multiply_rows(S, M + start * C, part, rows, C, C, -scale, !is_last(n));
      for (int64_t c = 0; c < C; c += LANES) {
        const __mmask16 there = lanes(T - start - c);
        float* column = change + start + c;
        for (int64_t r = 0; r < start; r++) _mm512_mask_storeu_ps(column + r * T, there, _mm512_setzero_ps());
        for (int64_t r = start; r < T; r++)
          _mm512_mask_storeu_ps(column + r * T, there, load<__m512>(part + (r - start) * C + c));
      }
      if (n) turn(n, S, -1);
    }
  }

  float* kept(int64_t n) const { return S + n * C * Tp - n * (n - 1) / 2 * C * C; }  // S of block n

  void backward(float scale, const float* above) const {
    for (int64_t n = blocks - 1; n >= 0; n--) {
      prepare(n);
      meet(n, kept(n));
      if (n) turn(n, kept(n), -1);
    }
    for (float* x : {dQ, dturned}) std::fill(x, x + Tp * D, 0.0f);
    for (int64_t n = 0; n < blocks; n++) {
      const int64_t start = n * C, rows = Tp - start, own = start * D;
      const float* s = kept(n);
      if (n && !is_last(n)) turn(n, s, 1);  // as it was
      const float* reached = reach(n);
      for (int64_t c = 0; c < C; c += LANES) {
        const __mmask16 there = lanes(T - start - c);
        for (int64_t r = start; r < T; r++)
          store(part + (r - start) * C + c, (Floats)_mm512_maskz_loadu_ps(there, above + r * T + start + c) * scale);
      }
      std::fill(part + (T - start) * C, part + rows * C, 0.0f);
      transpose(M + start * C, C, columns, C, C, C);
      multiply_rows(part, columns, dS, rows, C, C, -1);
      multiply_columns(s, part, dM, C, C, rows, -1);
      if (n) {
        transpose(V + own, D, columns, C, C, D);
        multiply_rows(dturned + own, columns, dS, rows, C, D, -1, true);
        multiply_columns(s, dturned + own, dV, C, D, rows, -1);
      }
      keep_below(dS, true);
      multiply_rows(dS, W + own, dreaching, rows, D, C);
      multiply_columns(dS, reached, dW + own, C, D, rows);
      add_row(dQ + own, dreaching, 1, rows * D);
      if (is_last(n)) {
        std::fill_n(dK + own, C * D, 0.0f);
      } else {
        multiply_columns(part, turned + own, dK + own, C, D, rows);
        float* of_later = dturned + own + C * D;  // the block's own queries turn nothing to the left of it any more
        add_row(of_later, dreaching + C * D, 1, (rows - C) * D);
        multiply_rows(part + C * C, K + own, of_later, rows - C, D, C, 1, true);
      }
      unprepare(n);
    }
    for (int64_t t = 0; t < T; t++) {  // from unit vectors to what they were made of
      float* dw = dW + t * D;
      if (shorten[t] < 1 / LEAST) add_row(dw, W + t * D, -dot(dw, W + t * D, D), D);
      for (int64_t d = 0; d < D; d += LANES) store(dw + d, load<Floats>(dw + d) * shorten[t]);
    }
  }

  // From the gradients of M and V, in place: those of what they were made of.
  void unprepare(int64_t n) const {
    const int64_t start = n * C;
    const float *w = W + start * D, *beta = B + start;
    const float *a = A + start * C, *g = G + start * C, *m = M + start * C, *v = V + start * D;
    float *dw = dW + start * D, *dk = dK + start * D, *db = dB + start;
    for (int64_t j = C - 2; j >= 0; j--) {  // times the inverse, transposed; A is symmetric
      float column[C];
      const int64_t next = j + 1, later = C - next;
      for (int64_t i = 0; i < later; i++) column[i] = beta[next + i] * a[j * C + next + i];
      less_rows(dM + j * C, dM + next * C, column, later, 1, dM + j * C, C);
      if (n) less_rows(dV + j * D, dV + next * D, column, later, 1, dV + j * D, D);
    }
    float* dA = dS;  // that of the matrix below its diagonal, for now
    transpose(m, C, columns, C, C, C);
    multiply_rows(dM, columns, dA, C, C, C, -1);
    if (n) {
      transpose(v, D, columns, C, C, D);
      multiply_rows(dV, columns, dA, C, C, D, -1, true);
    }
    keep_below(dA, false);
    keep_below(dM, false);
    for (int64_t i = 0; i < C; i++) {
      const int64_t row = i * C;
      db[i] = dot(dM + row, g + row, C) + dot(dA + row, a + row, C);
      if (n) {
        db[i] += dot(dV + i * D, w + i * D, D);
        add_row(dw + i * D, dV + i * D, beta[i], D);
      }
      for (float* x : {dM + row, dA + row})
        for (int64_t c = 0; c < C; c += LANES) store(x + c, load<Floats>(x + c) * beta[i]);
    }
    multiply_rows(dM, K + start * D, dw, C, D, C, 1, true);
    multiply_columns(dM, w, dk, C, D, C, 1, true);
    transpose(dA, C, columns, C, C, C);
    add_row(dA, columns, 1, C * C);
    multiply_rows(dA, w, dw, C, D, C, 1, true);
  }
};

// Does `compute` with the path of every sequence and head, and its number.
template <class Compute>
void for_each_path(const Sizes& sizes, bool back, const Rows<Half>& q, const Rows<Half>& k, const Rows<float>& w,
                   const float* beta, const Compute& compute) {
#pragma omp parallel num_threads(sizes.threads)
  {
    const Flushing flushing;
    const auto path = memory_of_thread<Path>(sizes, back);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < sizes.batch * sizes.heads; n++) {
      path.read(q, k, w, beta + n * sizes.length, n / sizes.heads, n % sizes.heads);
      compute(path, n);
    }
  }
}

}  // namespace

extern "C" {

// Bytes of scratch that a thread needs.
int64_t scratch_of_change(const Sizes* sizes) { return memory_needed<Path>(*sizes, false); }
int64_t scratch_of_unchange(const Sizes* sizes) { return memory_needed<Path>(*sizes, true); }

// beta is (batch, heads, length), change (batch, heads, length, length).
void change(const Sizes* sizes, const Rows<Half>* q, const Rows<Half>* k, const Rows<float>* w, const float* beta,
            float* change) {
  const int64_t T = sizes->length;
  for_each_path(*sizes, false, *q, *k, *w, beta,
                [&](const Path& path, int64_t n) { path.forward(sizes->scale, change + n * T * T); });
}

// above is the gradient of change; dbeta as beta.
void unchange(const Sizes* sizes, const Rows<Half>* q, const Rows<Half>* k, const Rows<float>* w, const float* beta,
              const float* above, const Rows<Half>* dq, const Rows<Half>* dk, const Rows<float>* dw, float* dbeta) {
  const int64_t T = sizes->length, D = sizes->width;
  for_each_path(*sizes, true, *q, *k, *w, beta, [&](const Path& path, int64_t n) {
    const int64_t b = n / sizes->heads, h = n % sizes->heads;
    path.backward(sizes->scale, above + n * T * T);
    store_rows(path.dQ, 1, dq->of(b, h), dq->time, T, D);
    store_rows(path.dK, 1, dk->of(b, h), dk->time, T, D);
    for (int64_t t = 0; t < T; t++) std::copy_n(path.dW + t * D, D, dw->of(b, h) + t * dw->time);
    std::copy_n(path.dB, T, dbeta + n * T);
  });
}
}
