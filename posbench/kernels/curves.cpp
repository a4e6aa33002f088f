// Curves over distance that tokens mix: what they add to the logits of a text's pairs, and gradients of that.
//
// Products are of bf16 numbers. Each number is two of them, its own rounding and that of what this left; of the four
// products of two such numbers the three larger ones are summed, which leaves an error of some 2^-17.

#include "products.h"

namespace {

// What queries, or keys, mix and where gradients go.
struct Mixing {
  Rows<const float> mixtures;  // (B, H, T, channels)
  const float* curves;         // (1 or H, reach, channels), from distance 0 on
  int64_t of_head;             // numbers between the curves of two heads
  int64_t channels, reach;     // reach: at most T
  Rows<float> of_mixtures;
  float* of_curves;  // (B, H, reach, channels)
};

// What is read of it for a sequence and head. Curves are rows by distance: of queries from far to near, so that keys
// follow each other, and of keys from near to far, those of negative distances first.
struct Side {
  const Mixing* given;  // null if nothing is mixed
  bool rising;
  int64_t T, Tp, N, wide;   // N: rows of curves; wide: numbers from row to row of a block's gradients
  int64_t C = 0, W = 0;     // channels, filled up, and numbers that a row of split ones takes
  Half *mixtures, *curves;  // (Tp, W), (N, W)
  Pair *columns, *rows;     // of curves, panels of (W/2, N) and of (N/2, C)
  Half *slanted, *turned;   // gradients of a block: (BLOCK, wide) by row of curves, and (N, BLOCK)
  Pair *pairs, *own;        // panels of (BLOCK/2, N) and, of the block's mixtures, of (BLOCK/2, C)
  float *of_block, *of_curves;  // (BLOCK, C), (N, C)

  Side(const Sizes& sizes, const Mixing* given, bool rising, Scratch& from)
      : given(given), rising(rising), T(sizes.length), Tp(padded(T)), N(Tp + BLOCK), wide(N + BLOCK) {
    if (!given) return;
    C = padded(given->channels), W = 3 * C;
    mixtures = from.take<Half>(Tp * W);
    curves = from.take<Half>(N * W);
    columns = from.take<Pair>(N * W / 2);
    rows = from.take<Pair>(N * C / 2);
    slanted = from.take<Half>(BLOCK * wide);
    turned = from.take<Half>(N * BLOCK);
    pairs = from.take<Pair>(N * BLOCK / 2);
    own = from.take<Pair>(BLOCK * C / 2);
    of_block = from.take<float>(BLOCK * C);
    of_curves = from.take<float>(N * C);
  }

  int64_t row_of(int64_t distance) const { return rising ? distance + BLOCK : Tp - 1 - distance; }

  // A row of numbers in two parts, the first of which meets both of the other's
  void split(const float* from, Half* to, bool of_curves) const {
    for (int64_t d = 0; d < C; d += LANES) {
      const Floats x = load_some(from + d, given->channels - d);
      const Halves own = rounded(x), left = rounded(x - widened(own));
      store(to + d, own);
      store(to + C + d, of_curves ? own : left);
      store(to + 2 * C + d, of_curves ? left : own);
    }
  }
  void take_curves(int64_t h) const {
    std::memset(curves, 0, N * W * sizeof(Half));
    for (int64_t d = 0; d < given->reach; d++)
      split(given->curves + h * given->of_head + d * given->channels, curves + row_of(d) * W, true);
    transpose_to_panels(curves, columns, N, W / 2);
    pair_rows(curves, W, rows, N, C);
  }
  void take_mixtures(int64_t b, int64_t h) const {
    for (int64_t t = 0; t < T; t++)
      split(given->mixtures.of(b, h) + t * given->mixtures.time, mixtures + t * W, false);
    std::memset(mixtures + T * W, 0, (Tp - T) * W * sizeof(Half));
  }

  // What a block of tokens mixes of `count` rows of curves, a multiple of 32 as their beginning
  void mix(int64_t first, int64_t row, int64_t count, float* to, int64_t stride) const {
    product(mixtures + first * W, W, columns + row * W / 2, W / 2 * PANEL, to, stride, BLOCK, count, W);
  }

  // From the gradients of that in `slanted`, those of the block's mixtures and of the curves
  void unmix(int64_t b, int64_t h, int64_t first, int64_t row, int64_t count) const {
    product(slanted, wide, rows + row / 2 * PANEL, N / 2 * PANEL, of_block, C, BLOCK, C, count);
    for (int64_t r = 0; r < std::min(BLOCK, T - first); r++)
      for (int64_t d = 0; d < given->channels; d += LANES)
        store_some(given->of_mixtures.of(b, h) + (first + r) * given->of_mixtures.time + d, given->channels - d,
                   load<Floats>(of_block + r * C + d));
    pair_rows(slanted, wide, pairs, BLOCK, count);
    columns_of_pairs(pairs, turned, BLOCK, BLOCK, count);
    pair_rows(mixtures + first * W, W, own, BLOCK, C);
    product(turned, BLOCK, own, BLOCK / 2 * PANEL, of_curves + row * C, C, count, C, BLOCK, true);
  }
  void hand_over(int64_t task) const {
    for (int64_t d = 0; d < given->reach; d++)
      for (int64_t c = 0; c < given->channels; c += LANES)
        store_some(given->of_curves + (task * given->reach + d) * given->channels + c, given->channels - c,
                   load<Floats>(of_curves + row_of(d) * C + c));
  }
};

struct Both {
  Side queries, keys;
  int64_t wide;        // numbers from row to row of S and E
  float *S, *E;        // what a block of queries gets by curves of its own and by those of keys
  float *tile, *back;  // of a block of queries and one of keys, (BLOCK, 2 BLOCK)

  Both(const Sizes& sizes, const Mixing* of_queries, const Mixing* of_keys, Scratch& from)
      : queries(sizes, of_queries, false, from), keys(sizes, of_keys, true, from), wide(queries.Tp + 2 * BLOCK) {
    for (float** x : {&S, &E}) *x = from.take<float>(BLOCK * wide);
    for (float** x : {&tile, &back}) *x = from.take<float>(2 * BLOCK * BLOCK);
  }

  void take_curves(int64_t h) const {
    for (const Side* side : {&queries, &keys})
      if (side->given) side->take_curves(h);
  }
  void take_mixtures(int64_t b, int64_t h) const {
    for (const Side* side : {&queries, &keys})
      if (side->given) side->take_mixtures(b, h);
  }

  // A block of queries, to rows (T, T)
  void lay_out(int64_t first, float* out) const {
    const int64_t T = queries.T, count = first + BLOCK;
    queries.mix(first, queries.Tp - count, count, S, wide);
    for (int64_t key = 0; keys.given && key < count; key += BLOCK) {
      keys.mix(key, first - key, 2 * BLOCK, tile, 2 * BLOCK);
      transpose(tile + BLOCK, 2 * BLOCK - 1, E + key, wide, BLOCK, BLOCK);
    }
    for (int64_t r = 0; r < std::min(BLOCK, T - first); r++)
      for (int64_t j = 0; j < std::min(count, T); j += LANES) {
        Floats x = load<Floats>(S + r * wide + BLOCK - 1 - r + j);
        if (keys.given) x += load<Floats>(E + r * wide + j);
        store_some(out + (first + r) * T + j, T - j, x);
      }
  }

  // Gradients from those of the pairs, rows (T, T)
  void pull_queries(int64_t b, int64_t h, int64_t first, const float* above) const {
    const int64_t count = first + BLOCK, wide = queries.wide;
    for (int64_t r = 0; r < BLOCK; r++) {
      Half* to = queries.slanted + r * wide;
      const int64_t i = first + r;
      std::memset(to, 0, count * sizeof(Half));
      for (int64_t j = 0; i < queries.T && j <= i; j += LANES)
        store(to + BLOCK - 1 - r + j, rounded(load_some(above + i * queries.T + j, i + 1 - j)));
    }
    queries.unmix(b, h, first, queries.Tp - count, count);
  }
  void pull_keys(int64_t b, int64_t h, int64_t first, const float* above) const {
    const int64_t count = keys.Tp - first + BLOCK, T = keys.T;
    for (int64_t r = 0; r < BLOCK; r++) std::memset(keys.slanted + r * keys.wide, 0, count * sizeof(Half));
    for (int64_t query = first; query < keys.Tp; query += BLOCK) {
      for (int64_t r = 0; r < BLOCK; r++)
        for (int64_t j = 0; j < BLOCK; j += LANES) {
          const int64_t i = query + r, seen = i < T ? i + 1 - first - j : 0;
          store(tile + r * BLOCK + j, load_some(above + i * T + first + j, seen));
        }
      transpose(tile, BLOCK, back, BLOCK, BLOCK, BLOCK);
      for (int64_t r = 0; r < BLOCK; r++)
        for (int64_t i = 0; i < BLOCK; i += LANES)
          store(keys.slanted + r * keys.wide + BLOCK - r + query - first + i,
                rounded(load<Floats>(back + r * BLOCK + i)));
    }
    keys.unmix(b, h, first, 0, count);
  }
};

// For each sequence and head, those of a head one after the other
template <class Task>
void for_each(const Sizes& sizes, const Mixing* of_queries, const Mixing* of_keys, Task task) {
#pragma omp parallel num_threads(sizes.threads)
  {
    const auto m = memory_of_thread<Both>(sizes, of_queries, of_keys);
    const Flushing flushing;
    Unit unit;
    int64_t taken = -1;
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < sizes.batch * sizes.heads; n++) {
      const int64_t b = n % sizes.batch, h = n / sizes.batch;
      if (h != taken) m.take_curves(taken = h);
      m.take_mixtures(b, h);
      task(m, b, h);
    }
  }
}

}  // namespace

extern "C" {

// Bytes of scratch that a thread needs.
int64_t scratch_of_lay_out_curves(const Sizes* sizes, const Mixing* of_queries, const Mixing* of_keys) {
  return memory_needed<Both>(*sizes, of_queries, of_keys);
}
int64_t scratch_of_pull_curves(const Sizes* sizes, const Mixing* of_queries, const Mixing* of_keys) {
  return memory_needed<Both>(*sizes, of_queries, of_keys);
}

// out: (B, H, T, T), where keys after the query are left to chance; of_keys: null if they mix nothing
void lay_out_curves(const Sizes* sizes, const Mixing* of_queries, const Mixing* of_keys, float* out) {
  const int64_t T = sizes->length;
  for_each(*sizes, of_queries, of_keys, [&](const Both& m, int64_t b, int64_t h) {
    for (int64_t first = 0; first < T; first += BLOCK) m.lay_out(first, out + (b * sizes->heads + h) * T * T);
  });
}

void pull_curves(const Sizes* sizes, const Mixing* of_queries, const Mixing* of_keys, const float* above) {
  const int64_t T = sizes->length;
  for_each(*sizes, of_queries, of_keys, [&](const Both& m, int64_t b, int64_t h) {
    const int64_t task = b * sizes->heads + h;
    for (const Side* side : {&m.queries, &m.keys}) {
      if (!side->given) continue;
      std::memset(side->of_curves, 0, side->N * side->C * sizeof(float));
      for (int64_t first = 0; first < T; first += BLOCK) {
        const float* from = above + task * T * T;
        side->rising ? m.pull_keys(b, h, first, from) : m.pull_queries(b, h, first, from);
      }
      side->hand_over(task);
    }
  });
}
}
