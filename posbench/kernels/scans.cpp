// Sums along rows of scores, for encodings whose logits or weights depend on what lies between a query and a key. Rows
// are of n fp32 numbers.

#include "native.h"

namespace {

inline Floats products_from_right(Floats x) {
  const Floats one = Floats{} + 1.0f;
  x *= shifted<1>(x, one);
  x *= shifted<2>(x, one);
  x *= shifted<4>(x, one);
  return x * shifted<8>(x, one);
}

int64_t blocks_of(int64_t n) { return (n + LANES - 1) / LANES; }

// A row of CoPE: gates of visible keys, their counts up to the query (at most positions - 1), and the logits with what
// `whole` (positions,) gives at the counts.
void count_row(int64_t n, int64_t positions, const float* logits, const float* whole, const float* visible,
               float* biased, float* gates, float* counts) {
  float right = 0;
  for (int64_t c = (blocks_of(n) - 1) * LANES; c >= 0; c -= LANES) {
    const int64_t some = n - c;
    const Floats z = load_some(logits + c, some), seen = load_some(visible + c, some);
    const Floats gate = seen != 0 ? Softplus(z).slope * seen : Floats{}, all = sums_from_right(gate) + right;
    right = all[0];
    const Between at(all, positions);
    const Floats low = gathered(whole, at.below), slope = gathered(whole, at.above) - low;
    store_some(biased + c, some, z + low + (all == all ? at.part : all) * slope);  // what is no number stays none
    store_some(gates + c, some, gate);
    store_some(counts + c, some, at.held);
  }
}

// Its gradients, of the logits and of `whole`.
void uncount_row(int64_t n, int64_t positions, const float* gradient, const float* whole, const float* gates,
                 const float* counts, float* of_logits, float* of_whole) {
  float left = 0;
  std::fill(of_whole, of_whole + positions, 0.0f);
  for (int64_t c = 0; c < n; c += LANES) {
    const int64_t some = n - c;
    const Floats g = load_some(gradient + c, some), gate = load_some(gates + c, some);
    const Between at(load_some(counts + c, some), positions);
    const Floats of_gates = sums_from_left(g * (gathered(whole, at.above) - gathered(whole, at.below))) + left;
    left = of_gates[LANES - 1];
    store_some(of_logits + c, some, g + of_gates * gate * (1 - gate));
    if (!_mm512_cmp_ps_mask((__m512)g, _mm512_setzero_ps(), _CMP_NEQ_UQ)) continue;
    const Floats up = g * at.part, down = g - up;
    const Words low = (Words)at.below, high = (Words)at.above;
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
    const Softplus stick(load_some(z + c, n - c, NEVER));
    const Floats after = products_from_right(stick.left) * left;  // what is left after each
    store_some(weights + c, n - c, stick.slope * shifted<1>(after, Floats{} + left));
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
    store_some(of_z + c, some, of_logs - all * Softplus(load_some(z + c, some, NEVER)).slope);
  }
}

}  // namespace

extern "C" {

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
