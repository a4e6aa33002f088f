// Sums along rows of scores, for encodings whose logits or weights depend on what lies between a query and a key. Rows
// are of n fp32 numbers.

#include "products.h"

namespace {

inline Floats gathered(const float* from, __m512i where) { return (Floats)_mm512_i32gather_ps(where, from, 4); }

inline Floats products_from_right(Floats x) {
  const Floats one = Floats{} + 1.0f;
  x *= shifted<1>(x, one);
  x *= shifted<2>(x, one);
  x *= shifted<4>(x, one);
  return x * shifted<8>(x, one);
}

// sigmoid(z) and sigmoid(-z), each as exact as the other
struct Shares {
  Floats taken, left;
  explicit Shares(Floats z) {
    const Floats e = exponential(z < 0 ? z : -z), larger = 1 / (1 + e), smaller = e * larger;
    taken = z < 0 ? smaller : larger;
    left = z < 0 ? larger : smaller;
  }
};

int64_t blocks_of(int64_t n) { return (n + LANES - 1) / LANES; }

inline __m512i next_of(__m512i position, int64_t positions) {
  return _mm512_min_epi32(_mm512_add_epi32(position, _mm512_set1_epi32(1)), _mm512_set1_epi32(int(positions - 1)));
}

// A row of CoPE: gates of visible keys, which all are if that is not said, their counts up to the query (at most
// positions - 1), and what `whole` (positions,) gives at the counts, added to the logits or alone.
template <bool ALONE = false>
void count_row(int64_t n, int64_t positions, const float* logits, const float* whole, const float* visible,
               float* biased, float* gates, float* counts) {
  float right = 0;
  for (int64_t c = (blocks_of(n) - 1) * LANES; c >= 0; c -= LANES) {
    const int64_t some = n - c;
    const Floats z = load_some(logits + c, some);
    const Floats seen = visible ? load_some(visible + c, some) : COUNT < float(some) ? Floats{} + 1 : Floats{};
    const Floats gate = seen != 0 ? Shares(z).taken * seen : Floats{}, all = sums_from_right(gate) + right;
    right = all[0];
    const Floats count = (Floats)_mm512_min_ps((__m512)all, _mm512_set1_ps(float(positions - 1)));
    const __m512i below = _mm512_cvttps_epi32((__m512)count);
    const __m512i above = next_of(below, positions);
    const Floats at = gathered(whole, below), slope = gathered(whole, above) - at;
    const Floats part = all == all ? count - (Floats)_mm512_cvtepi32_ps(below) : all;  // what is no number stays none
    store_some(biased + c, some, (ALONE ? at : z + at) + part * slope);
    if (!gates) continue;
    store_some(gates + c, some, gate);
    store_some(counts + c, some, count);
  }
}

// Its gradients, of the logits and of `whole`.
template <bool ALONE = false>
void uncount_row(int64_t n, int64_t positions, const float* gradient, const float* whole, const float* gates,
                 const float* counts, float* of_logits, float* of_whole) {
  float left = 0;
  std::fill(of_whole, of_whole + positions, 0.0f);
  for (int64_t c = 0; c < n; c += LANES) {
    const int64_t some = n - c;
    const Floats g = load_some(gradient + c, some), gate = load_some(gates + c, some);
    const Floats count = load_some(counts + c, some);
    const __m512i below = _mm512_cvttps_epi32((__m512)count);
    const __m512i above = next_of(below, positions);
    const Floats part = count - (Floats)_mm512_cvtepi32_ps(below);
    const Floats of_gates = sums_from_left(g * (gathered(whole, above) - gathered(whole, below))) + left;
    left = of_gates[LANES - 1];
    const Floats of_logit = of_gates * gate * (1 - gate);
    store_some(of_logits + c, some, ALONE ? of_logit : g + of_logit);
    if (!_mm512_cmp_ps_mask((__m512)g, _mm512_setzero_ps(), _CMP_NEQ_UQ)) continue;
    const Floats up = g * part, down = g - up;
    const Words low = (Words)below, high = (Words)above;
    for (int l = 0; l < LANES; l++) {
      of_whole[low[l]] += down[l];
      of_whole[high[l]] += up[l];
    }
  }
}

// A row of stick-breaking: the share of the stick that each key breaks off, from the right; returns what is left.
float break_row(int64_t n, const float* z, float* weights) {
  float left = 1;
  for (int64_t c = (blocks_of(n) - 1) * LANES; c >= 0; c -= LANES) {
    const Shares shares(load_some(z + c, n - c, NEVER));
    const Floats after = products_from_right(shares.left) * left;  // what is left after each
    store_some(weights + c, n - c, shares.taken * shifted<1>(after, Floats{} + left));
    left = after[0];
  }
  return left;
}

void unbreak_row(int64_t n, const float* of_weights, float of_rest, const float* z, const float* weights, float rest,
                 float* of_z) {
  float before = of_rest * rest;
  for (int64_t c = 0; c < n; c += LANES) {
    const int64_t some = n - c;
    const Floats of_logs = load_some(of_weights + c, some) * load_some(weights + c, some);
    const Floats all = sums_from_left(of_logs) + before;
    before = all[LANES - 1];
    store_some(of_z + c, some, of_logs - all * Shares(load_some(z + c, some, NEVER)).taken);
  }
}

// What CoPE adds to the logits of a text, one sequence and head at a time, by blocks of queries; `window` of the sizes are
// the whole positions. Pp: these filled up.
struct Counting {
  int64_t T, Tp, Pp, D, P, wide;
  Half *Q, *K, *E;             // (Tp, D), (Tp, D), (Pp, D): queries, keys, vectors of positions
  Pair *K_columns, *E_columns;  // panels of (D/2, Tp) and of (D/2, Pp)
  float *S, *W;                 // of a block: logits (BLOCK, wide), what whole positions give (BLOCK, Pp)
  // backwards
  Pair *K_pairs, *E_pairs, *Q_pairs;  // panels of (Tp/2, D), (Pp/2, D), and of a block (BLOCK/2, D)
  float *gates, *counts, *dS, *dW;    // (BLOCK, wide) ..., (BLOCK, Pp)
  Half *G, *columns;                  // gradients of a block, as they are multiplied, and by column
  Pair* pairs;
  float *dQ, *dK, *dE;  // (BLOCK, D), (Tp, D), (Pp, D)

  Counting(const Sizes& sizes, bool back, Scratch& from)
      : T(sizes.length), Tp(padded(T)), Pp(padded(sizes.window)), D(sizes.width), P(sizes.window),
        wide(std::max(Tp, Pp) + APART) {
    for (Half** x : {&Q, &K}) *x = from.take<Half>(Tp * D);
    E = from.take<Half>(Pp * D);
    K_columns = from.take<Pair>(Tp * D / 2);
    E_columns = from.take<Pair>(Pp * D / 2);
    S = from.take<float>(BLOCK * wide);
    W = from.take<float>(BLOCK * Pp);
    if (!back) return;
    K_pairs = from.take<Pair>(Tp * D / 2);
    E_pairs = from.take<Pair>(Pp * D / 2);
    Q_pairs = from.take<Pair>(BLOCK * D / 2);
    for (float** x : {&gates, &counts, &dS}) *x = from.take<float>(BLOCK * wide);
    dW = from.take<float>(BLOCK * Pp);
    for (Half** x : {&G, &columns}) *x = from.take<Half>(BLOCK * wide);
    pairs = from.take<Pair>(BLOCK / 2 * wide);
    dQ = from.take<float>(BLOCK * D);
    dK = from.take<float>(Tp * D);
    dE = from.take<float>(Pp * D);
  }

  void read(const Rows<Half>& q, const Rows<Half>& k, const Half* table, int64_t b, int64_t h) const {
    copy_rows(q.of(b, h), q.time, Q, T, Tp, D);
    copy_rows(k.of(b, h), k.time, K, T, Tp, D);
    copy_rows(table, D, E, P, Pp, D);
    transpose_to_panels(K, K_columns, Tp, D / 2);
    transpose_to_panels(E, E_columns, Pp, D / 2);
  }

  // Of the queries from `first` on: logits of the keys before the block's end, and what whole positions give.
  void meet(int64_t first, float scale) const {
    const int64_t end = first + BLOCK;
    product(Q + first * D, D, K_columns, D / 2 * PANEL, S, wide, BLOCK, end, D);
    product(Q + first * D, D, E_columns, D / 2 * PANEL, W, Pp, BLOCK, Pp, D);
    for (int64_t r = 0; r < BLOCK; r++)
      for (int64_t c = 0; c < end; c += LANES) store(S + r * wide + c, load<Floats>(S + r * wide + c) * scale);
  }

  void forward(float scale, float* bias) const {
    for (int64_t first = 0; first < T; first += BLOCK) {
      meet(first, scale);
      for (int64_t i = first; i < std::min(first + BLOCK, T); i++) {
        const int64_t r = i - first;
        count_row<true>(i + 1, P, S + r * wide, W + r * Pp, nullptr, bias + i * T, nullptr, nullptr);
        std::fill(bias + i * T + i + 1, bias + (i + 1) * T, 0.0f);
      }
    }
  }

  // (BLOCK, N) to bf16 numbers
  void halve(const float* from, int64_t stride, float scale, int64_t N) const {
    for (int64_t r = 0; r < BLOCK; r++)
      for (int64_t c = 0; c < N; c += LANES)
        store(G + r * wide + c, rounded(load<Floats>(from + r * stride + c) * scale));
  }
  // to (N, D) += the transpose of G (BLOCK, N) times the block's queries
  void give(float* to, int64_t N) const {
    pair_rows(G, wide, pairs, BLOCK, N);
    columns_of_pairs(pairs, columns, BLOCK, BLOCK, N);
    product(columns, BLOCK, Q_pairs, BLOCK / 2 * PANEL, to, D, N, D, BLOCK, true);
  }

  void backward(float scale, const float* above, const Rows<Half>& dq, const Rows<Half>& dk, int64_t b, int64_t h,
                float* of_table) const {
    pair_rows(K, D, K_pairs, Tp, D);
    pair_rows(E, D, E_pairs, Pp, D);
    std::fill(dK, dK + Tp * D, 0.0f);
    std::fill(dE, dE + Pp * D, 0.0f);
    for (int64_t first = 0; first < T; first += BLOCK) {
      const int64_t end = first + BLOCK, rows = std::min(BLOCK, T - first);
      meet(first, scale);
      for (int64_t r = 0; r < BLOCK; r++) {
        std::fill(dS + r * wide, dS + r * wide + end, 0.0f);
        std::fill(dW + r * Pp, dW + (r + 1) * Pp, 0.0f);
        if (r >= rows) continue;
        const int64_t n = first + r + 1;
        float *gate = gates + r * wide, *count = counts + r * wide, *ds = dS + r * wide;
        count_row<true>(n, P, S + r * wide, W + r * Pp, nullptr, ds, gate, count);
        uncount_row<true>(n, P, above + (n - 1) * T, W + r * Pp, gate, count, ds, dW + r * Pp);
      }
      pair_rows(Q + first * D, D, Q_pairs, BLOCK, D);
      halve(dS, wide, scale, end);
      product(G, wide, K_pairs, Tp / 2 * PANEL, dQ, D, BLOCK, D, end);
      give(dK, end);
      halve(dW, Pp, 1, Pp);
      product(G, wide, E_pairs, Pp / 2 * PANEL, dQ, D, BLOCK, D, Pp, true);
      give(dE, Pp);
      store_rows(dQ, 1, dq.of(b, h) + first * dq.time, dq.time, rows, D);
    }
    store_rows(dK, 1, dk.of(b, h), dk.time, T, D);
    std::copy_n(dE, P * D, of_table);
  }
};

// Does `compute` with every sequence and head, read, and its number.
template <class Compute>
void for_each_text(const Sizes& sizes, bool back, const Rows<Half>& q, const Rows<Half>& k, const Half* table,
                   const Compute& compute) {
#pragma omp parallel num_threads(sizes.threads)
  {
    const Flushing flushing;
    Unit unit;
    const auto counting = memory_of_thread<Counting>(sizes, back);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < sizes.batch * sizes.heads; n++) {
      counting.read(q, k, table, n / sizes.heads, n % sizes.heads);
      compute(counting, n);
    }
  }
}

}  // namespace

extern "C" {

// Bytes of scratch that a thread needs.
int64_t scratch_of_count(const Sizes* sizes) { return memory_needed<Counting>(*sizes, false); }
int64_t scratch_of_uncount(const Sizes* sizes) { return memory_needed<Counting>(*sizes, true); }

// table is (positions, width), bias (batch, heads, length, length).
void count(const Sizes* sizes, const Rows<Half>* q, const Rows<Half>* k, const Half* table, float* bias) {
  const int64_t T = sizes->length;
  for_each_text(*sizes, false, *q, *k, table,
                [&](const Counting& one, int64_t n) { one.forward(sizes->scale, bias + n * T * T); });
}

// of_table is (batch, heads, positions, width).
void uncount(const Sizes* sizes, const Rows<Half>* q, const Rows<Half>* k, const Half* table, const float* above,
             const Rows<Half>* dq, const Rows<Half>* dk, float* of_table) {
  const int64_t T = sizes->length, H = sizes->heads;
  for_each_text(*sizes, true, *q, *k, table, [&](const Counting& one, int64_t n) {
    one.backward(sizes->scale, above + n * T * T, *dq, *dk, n / H, n % H, of_table + n * one.P * one.D);
  });
}

// Rows (sequences and heads, queries, n), contiguous; `visible` is (queries, n) for all of them.

void count_rows(int64_t threads, int64_t heads, int64_t queries, int64_t n, int64_t positions, const float* logits,
                const float* whole, const float* visible, float* biased, float* gates, float* counts) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < heads * queries; r++)
    count_row(n, positions, logits + r * n, whole + r * positions, visible + r % queries * n, biased + r * n,
              gates + r * n, counts + r * n);
}

void uncount_rows(int64_t threads, int64_t rows, int64_t n, int64_t positions, const float* gradient,
                  const float* whole, const float* gates, const float* counts, float* of_logits, float* of_whole) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; r++)
    uncount_row(n, positions, gradient + r * n, whole + r * positions, gates + r * n, counts + r * n, of_logits + r * n,
                of_whole + r * positions);
}

void break_rows(int64_t threads, int64_t rows, int64_t n, const float* z, float* weights, float* rest) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; r++) rest[r] = break_row(n, z + r * n, weights + r * n);
}

void unbreak_rows(int64_t threads, int64_t rows, int64_t n, const float* of_weights, const float* of_rest,
                  const float* z, const float* weights, const float* rest, float* of_z) {
#pragma omp parallel for num_threads(threads)
  for (int64_t r = 0; r < rows; r++)
    unbreak_row(n, of_weights + r * n, of_rest[r], z + r * n, weights + r * n, rest[r], of_z + r * n);
}
}
