// Causal attention of bf16 numbers, forwards and backwards, for CPUs with AVX-512 BF16 or AMX.
//
// One sequence and head at a time per thread, by blocks of scores that stay in its cache: a score is never written to
// memory. The backward pass computes the probabilities again from the sums that the forward pass leaves behind, with
// keys along the rows, so that what it multiplies by lies in memory as the instructions read it.
//
// Products are of bf16 numbers with sums in fp32; logits, softmax and what is added to them are fp32.
//
// Source of the order of the two passes: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
// Partitioning" (2023), arXiv:2307.08691, algorithms 1 and 2.

#include <utility>

#include "products.h"

namespace {

constexpr int64_t KEYS = 128;  // keys of a block backwards, of long sequences
constexpr int64_t CHUNK = 1024;  // keys, or queries backwards, that are computed at once
constexpr int64_t STICKS = 256;  // keys that are asked at once whether a stick is used up
constexpr float USED_UP = 88;    // e to the minus that is 0 here
using Strided = Rows<Half>;

// What is added to the logits of query i and key j, with strides in numbers.
struct Added {
  int64_t kind;         // one of those below
  const float* values;  // of the first sequence and head
  int64_t batch, head, row;
  int64_t uniform, more;  // of straight lines, see there: queries that share their scale, and where scales are; of
                          // sticks, whether what is left goes to the query's own value; of counts, how many are
                          // told apart
  const Half* vectors;  // (2, near, D), of keys and of values; of counts, the second are not looked at
  float* sums;          // of gradients, by group of sequences; null where none are wanted
  int64_t sums_group, sums_head;
  float* counts;  // (B, H, T), whole counts: written forwards, if they are asked for, and read backwards
};
enum Kind : int64_t {
  NOTHING = 0,
  BY_DISTANCE = 1,  // values[i - j]; forwards they lie the other way round
  BY_PAIR = 2,      // values[i * row + j]
  LINES = 3,        // see `Lines`
  DECAY = 4,        // values[i] - values[j]
  SLOPES = 5,       // -(i - j) (values[i] + values[row + j])
  NEAR = 6,         // a vector to each of the nearest keys and values, the farthest first
  STICK = 7,        // nothing; but in place of a softmax keys before the query break a stick, the nearest first
  COUNTED = 8,      // what vectors, by number, give the query at the count of gates from the key to it
};

// -- memory of a thread -----------------------------------------------------------------------------------------------

// Straight lines: what is added is slope share + intercept; the share is what a curve over the distance gives times a
// scale of the query, and as many kinks as lie below it is the number of the line. Queries before `uniform`, a multiple
// of 16, have the same scale, so that a table by distance serves. Sums of gradients lie as the values do.
struct Lines {
  static constexpr int64_t KINKS = 32, STRIDE = 48;  // of the slopes and of the intercepts, one more than kinks
  static constexpr int64_t BEYOND = 256;             // numbers that a table has beyond its length, at most
  const float *curve, *scales;
  Floats kinks[2], slopes[3], intercepts[3];
  struct Point {
    __m512i line;
    Floats slope, height;
  };

  // `row` numbers of the curve lie before the one that is pointed to; `more` behind it are scales, kinks, slopes and
  // intercepts.
  static int64_t of_slopes(const Added& layout, int64_t length) { return layout.more + padded(length) + KINKS; }

  Lines() = default;
  Lines(const float* values, const Added& layout, int64_t length) : curve(values), scales(values + layout.more) {
    const float* of_slopes = values + Lines::of_slopes(layout, length);
    for (int n = 0; n < 2; n++) kinks[n] = load<Floats>(of_slopes - KINKS + n * LANES);
    for (int n = 0; n < 3; n++) slopes[n] = load<Floats>(of_slopes + n * LANES);
    for (int n = 0; n < 3; n++) intercepts[n] = load<Floats>(of_slopes + STRIDE + n * LANES);
  }

  inline Point at(Floats share) const {
    __m512i line = _mm512_setzero_si512();  // kinks below the share
    const __m512 x = (__m512)share, low = (__m512)kinks[0], high = (__m512)kinks[1];
    const int steps[] = {16, 8, 4, 2, 1, 1};
#pragma GCC unroll 6
    for (int n = 0; n < 6; n++) {
      const __m512i step = _mm512_set1_epi32(steps[n]), next = _mm512_add_epi32(line, _mm512_set1_epi32(steps[n] - 1));
      const __mmask16 beyond = _mm512_cmp_ps_mask(_mm512_permutex2var_ps(low, next, high), x, _CMP_LT_OQ);
      line = _mm512_mask_add_epi32(line, beyond, line, step);
    }
    const Floats slope = picked(slopes, line);
    return {line, slope, slope * share + picked(intercepts, line)};
  }

  // What queries that share a scale have, for all numbers of the curve.
  void lay_out(float* table, const Added& layout) const {
    for (int64_t n = 0; n < layout.row + layout.more; n += LANES) {
      const auto point = at(load<Floats>(curve - layout.row + n) * scales[0]);
      store(table + n, point.height);
    }
  }

  static inline Floats picked(const Floats (&from)[3], __m512i line) {
    const __m512 found = _mm512_permutex2var_ps((__m512)from[0], line, (__m512)from[1]);
    const __mmask16 last = _mm512_cmpeq_epi32_mask(line, _mm512_set1_epi32(KINKS));
    return (Floats)_mm512_mask_blend_ps(last, found, _mm512_set1_ps(from[2][0]));
  }
};

// Gradients of lines, summed apart by lane.
struct LineSums {
  Floats slopes[Lines::KINKS + 1] = {}, intercepts[Lines::KINKS + 1] = {};

  // From that of heights, which it returns that of shares for.
  inline Floats add(const Lines::Point& point, Floats share, Floats gradient) {
    const __m512i lane = _mm512_add_epi32(_mm512_slli_epi32(point.line, 4), _mm512_cvttps_epi32((__m512)COUNT));
    for (const auto& [to, x] : {std::pair(slopes, gradient * share), std::pair(intercepts, gradient)})
      _mm512_i32scatter_ps(to, lane, (__m512)((Floats)_mm512_i32gather_ps(lane, to, 4) + x), 4);
    return gradient * point.slope;
  }

  // To where sums lie, those of a table, too.
  void hand_over(const Lines& lines, const float* of_table, const Added& layout, int64_t length, float* sums) {
    const Floats scale = Floats{} + lines.scales[0];
    Floats of_scale{};
    for (int64_t n = 0; n < layout.row + layout.more; n += LANES) {
      const Floats curve = load<Floats>(lines.curve - layout.row + n);
      const auto point = lines.at(curve * scale);
      const Floats of_share = add(point, curve * scale, load<Floats>(of_table + n));
      float* to = sums - layout.row + n;
      store(to, load<Floats>(to) + of_share * scale);
      of_scale += of_share * curve;
    }
    sums[layout.more] += sum(of_scale);
    float* to = sums + Lines::of_slopes(layout, length);
    for (int64_t n = 0; n <= Lines::KINKS; n++) {
      to[n] += sum(slopes[n]);
      to[Lines::STRIDE + n] += sum(intercepts[n]);
    }
  }
};

// What the nearest keys of some queries have more than others; nothing if there are no vectors.
struct Near {
  int64_t count = 0;            // N
  Pair *K_columns, *V_columns;  // vectors, panels of (D/2, N)
  Pair* V_pairs;                // panels of (N/2, D)
  Half* K_rows;                 // (D, N)
  float *S, *G;                 // (queries, N): what logits and gradients of probabilities have more
  Half *P, *dS;                 // (queries, N): those of the pairs that have it
  Pair *pairs;                  // panels of (queries/2, N)
  Half *columns;                // (N, queries)

  Near() = default;
  Near(const Sizes& sizes, int64_t queries, Scratch& from) : count(sizes.near) {
    const int64_t D = sizes.width;
    for (Pair** x : {&K_columns, &V_columns, &V_pairs}) *x = from.take<Pair>(count * D / 2);
    K_rows = from.take<Half>(count * D);
    for (float** x : {&S, &G}) *x = from.take<float>(queries * count);
    for (Half** x : {&P, &dS}) *x = from.take<Half>(queries * count);
    pairs = from.take<Pair>(queries * count / 2);
    columns = from.take<Half>(queries * count);
  }

  // Vectors (2, N, D), as they are read.
  void lay_out(const Half* vectors, int64_t D) const {
    const Half* of_values = vectors + count * D;
    transpose_to_panels(vectors, K_columns, count, D / 2);
    transpose_to_panels(of_values, V_columns, count, D / 2);
    pair_rows(vectors, D, V_pairs, count, D);
    columns_of_pairs(V_pairs, K_rows, count, count, D);
    pair_rows(of_values, D, V_pairs, count, D);
  }
};

// Of one sequence and head at a time. Tp: the length filled up; wide: numbers from row to row of a block of scores.
struct Forwards {
  int64_t Tp, wide;
  Half *Q, *K, *V;            // (Tp, D)
  Pair *K_columns, *V_pairs;  // panels of (D/2, Tp) and of (Tp/2, D)
  float *S, *O;               // logits of a block (BLOCK, wide), its outputs (BLOCK, D)
  Half* P;                    // exponentials of its logits (BLOCK, wide)
  float* table;               // by distance, see `Lines`
  Near near;

  Forwards(const Sizes& sizes, Scratch& from) : Tp(padded(sizes.length)), wide(std::min(Tp, CHUNK) + APART) {
    const int64_t D = sizes.width;
    for (Half** x : {&Q, &K, &V}) *x = from.take<Half>(Tp * D);
    for (Pair** x : {&K_columns, &V_pairs}) *x = from.take<Pair>(Tp * D / 2);
    S = from.take<float>(BLOCK * wide);
    O = from.take<float>(BLOCK * D);
    P = from.take<Half>(BLOCK * wide);
    table = from.take<float>(Tp + Lines::BEYOND);
    near = Near(sizes, BLOCK, from);
  }
};

// Likewise. Blocks are of keys here, and what they hold is by key and query.
struct Backwards {
  int64_t Tp, wide, keys, whole;      // keys: of a block; whole: numbers from row to row of whole lengths
  Half *Q, *K, *V, *A;                // (Tp, D); A: gradients of the outputs
  Half* K_columns;                    // (D, whole)
  Pair *Q_columns, *A_columns;        // panels of (D/2, Tp)
  Pair *Q_pairs, *A_pairs, *K_pairs;  // panels of (Tp/2, D)
  float *S, *G, *E;                   // (keys, wide): logits, gradients of probabilities, what is added
  Half *P, *dS;                       // (keys, wide): probabilities, gradients of logits
  Pair* dS_pairs;                     // panels of (keys/2, queries)
  float *dQ, *dK, *dV;                // (D, whole), (keys, D), (keys, D)
  float *inner, *logs, *counts;       // (Tp,): products of A and the outputs, logs of sums of exponentials, counts
  float *table, *of_table;            // by distance, see `Lines`, and sums of its gradients
  Near near;

  Backwards(const Sizes& sizes, Scratch& from)
      : Tp(padded(sizes.length)),
        wide(std::min(Tp, CHUNK) + APART),
        keys(Tp < CHUNK ? BLOCK : KEYS),
        whole(Tp + APART) {
    const int64_t D = sizes.width;
    for (Half** x : {&Q, &K, &V, &A}) *x = from.take<Half>(Tp * D);
    for (Pair** x : {&Q_columns, &A_columns, &Q_pairs, &A_pairs, &K_pairs}) *x = from.take<Pair>(Tp * D / 2);
    for (float** x : {&S, &G, &E}) *x = from.take<float>(keys * wide);
    for (Half** x : {&P, &dS}) *x = from.take<Half>(keys * wide);
    dS_pairs = from.take<Pair>(keys / 2 * wide);
    for (float** x : {&dK, &dV}) *x = from.take<float>(keys * D);
    for (float** x : {&inner, &logs, &counts}) *x = from.take<float>(Tp);
    K_columns = from.take<Half>(D * whole);
    dQ = from.take<float>(D * whole);
    for (float** x : {&table, &of_table}) *x = from.take<float>(Tp + Lines::BEYOND);
    near = Near(sizes, Tp, from);
  }
};

// -- running sums over keys -------------------------------------------------------------------------------------------

// Logits of `count` keys, of which the query sees those from `first` to `last`, with what `whole` (positions,) gives at
// their counts. Those to the right have had `right` gates; returns them with these.
inline float count_keys(float* s, const float* whole, int64_t positions, int64_t count, float first, float last,
                        float scale, float right) {
  for (int64_t c = count - LANES; c >= 0; c -= LANES) {
    const Floats column = COUNT + float(c), z = load<Floats>(s + c) * scale;
    const auto seen = (column >= first) & (column <= last);
    const Floats all = sums_from_right(seen ? Softplus(z).slope : Floats{}) + right;
    right = all[0];
    const Between at(all, positions);
    const Floats low = gathered(whole, at.below);
    store(s + c, z + low + at.part * (gathered(whole, at.above) - low));
  }
  return right;
}

// -- forwards ---------------------------------------------------------------------------------------------------------

// Logits of query i and `count` keys from `begin` on, in place; hidden ones are -inf. Returns the largest.
template <int64_t KIND>
inline float logits(float* s, const float* values, const Added& layout, const float* table, int64_t i, int64_t begin,
                    int64_t count, const Sizes& sizes) {
  if constexpr (KIND == LINES)
    if (i < layout.uniform) return logits<BY_DISTANCE>(s, table, layout, table, i, begin, count, sizes);
  const int64_t row = layout.row;
  const float* added = KIND == BY_PAIR ? values + i * row + begin : values - i + begin;
  const Lines lines = KIND == LINES ? Lines(values, layout, sizes.length) : Lines();
  const float *of_keys = KIND == DECAY ? values + begin : KIND == SLOPES ? values + row + begin : nullptr;
  const float own = of_keys ? values[i] : 0;
  const float last = float(i - begin), first = last - float(sizes.window) + 1;  // columns that the query sees
  Floats top = Floats{} + NEVER;
  for (int64_t c = 0; c < count; c += LANES) {
    Floats x = load<Floats>(s + c);
    if constexpr (KIND != COUNTED) x *= sizes.scale;
    if constexpr (KIND == DECAY) x += own - load<Floats>(of_keys + c);
    if constexpr (KIND == BY_DISTANCE || KIND == BY_PAIR) x += load<Floats>(added + c);
    if constexpr (KIND == LINES) {
      const auto point = lines.at(load<Floats>(lines.curve - i + begin + c) * lines.scales[i]);
      x += point.height;
    }
    const Floats column = COUNT + float(c);
    if constexpr (KIND == SLOPES) x -= (last - column) * (own + load<Floats>(of_keys + c));
    x = (column <= last) & (column >= first) ? x : Floats{} + NEVER;
    store(s + c, x);
    top = x > top ? x : top;
  }
  return most(top);
}

// Keys, of `count` from `begin` on, that are among the nearest of query i: their columns begin at `column` for the
// number `first` of these.
struct Reached {
  int64_t column, first, end;
  Reached(int64_t i, int64_t near, int64_t begin, int64_t count)
      : column(i - near + 1 - begin), first(std::max<int64_t>(0, -column)), end(std::min(near, count - column)) {}
};

// A block of queries from `first` on, by chunks of keys; what earlier chunks gave is scaled when a larger logit comes.
template <int64_t KIND>
void block_forwards(const Sizes& sizes, const Forwards& m, const float* values, const Added& layout, const float* sink,
                    int64_t first, Half* out, int64_t stride, float* logs, float* counts) {
  const int64_t D = sizes.width, rows = std::min(BLOCK, sizes.length - first), end = first + BLOCK;
  const int64_t nearest = std::max<int64_t>(0, first - sizes.window + 1) / BLOCK * BLOCK;  // in it all see a key
  float tops[BLOCK], totals[BLOCK];
  std::fill(tops, tops + BLOCK, sink ? *sink : NEVER);
  std::fill(totals, totals + BLOCK, sink ? 1.0f : 0.0f);
  float gates[BLOCK] = {};
  const int64_t N = m.near.count, chunks = (end - nearest + CHUNK - 1) / CHUNK;
  if (KIND == NEAR || KIND == COUNTED)
    product(m.Q + first * D, D, m.near.K_columns, D / 2 * PANEL, m.near.S, N, BLOCK, N, D);
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    const int64_t begin = nearest + (KIND == COUNTED ? chunks - 1 - chunk : chunk) * CHUNK;  // counts begin at the end
    const int64_t count = std::min(CHUNK, end - begin);
    const bool more = chunk > 0;
    product(m.Q + first * D, D, m.K_columns + begin * D / 2, D / 2 * PANEL, m.S, m.wide, BLOCK, count, D);
    const bool nearby = KIND == NEAR && begin + count > first - N;
    if (nearby) std::memset(m.near.P, 0, BLOCK * N * sizeof(Half));
    for (int64_t r = 0; r < rows; r++) {
      float* s = m.S + r * m.wide;
      Half* p = m.P + r * m.wide;
      const Reached reached(first + r, N, begin, count);
      if (nearby)
        for (int64_t n = reached.first; n < reached.end; n++) s[reached.column + n] += m.near.S[r * N + n];
      const float* table = m.table + layout.row;
      if constexpr (KIND == COUNTED) {
        const float own = float(first + r - begin);
        gates[r] = count_keys(s, m.near.S + r * N, layout.uniform, count, own - float(sizes.window) + 1, own,
                              sizes.scale, gates[r]);
      }
      const float top = std::max(tops[r], logits<KIND>(s, values, layout, table, first + r, begin, count, sizes));
      Floats total{};
      for (int64_t c = 0; c < count; c += LANES) {
        const Floats e = exponential(load<Floats>(s + c) - top);
        total += e;
        store(p + c, rounded(e));
      }
      const Floats kept = exponential(Floats{} + (tops[r] - top));
      for (int64_t d = 0; more && d < D; d += LANES)
        store(m.O + r * D + d, load<Floats>(m.O + r * D + d) * kept);
      tops[r] = top;
      totals[r] = totals[r] * kept[0] + sum(total);
      if (nearby)
        for (int64_t n = reached.first; n < reached.end; n++) m.near.P[r * N + n] = p[reached.column + n];
    }
    for (int64_t r = rows; r < BLOCK; r++) std::memset(m.P + r * m.wide, 0, count * sizeof(Half));
    product(m.P, m.wide, m.V_pairs + begin / 2 * PANEL, m.Tp / 2 * PANEL, m.O, D, BLOCK, D, count, more);
    if (nearby) product(m.near.P, N, m.near.V_pairs, N / 2 * PANEL, m.O, D, BLOCK, D, N, true);
  }
  for (int64_t r = 0; r < rows; r++) {
    const float share = 1 / totals[r];
    for (int64_t d = 0; d < D; d += LANES)
      store(out + (first + r) * stride + d, rounded(load<Floats>(m.O + r * D + d) * share));
    if (logs) logs[first + r] = tops[r] + std::log(totals[r]);
    if (KIND == COUNTED && counts) counts[first + r] = gates[r];
  }
}

// Shares of a stick that `count` keys break off, from the right: those from `first` to before `last`, by their logits s.
// Returns what they and those before them take of its logarithm.
inline float break_stick(const float* s, Half* shares, int64_t count, float first, float last, float scale,
                         float taken) {
  for (int64_t c = count - LANES; c >= 0; c -= LANES) {
    const Floats column = COUNT + float(c);
    const auto seen = (column >= first) & (column < last);
    const Floats z = load<Floats>(s + c) * scale;
    const Floats all = sums_from_right(seen ? Softplus(z).height : Floats{}) + taken;
    const Floats log = z - all;
    store(shares + c, rounded(seen ? exponential(log > 0 ? Floats{} : log) : Floats{}));
    taken = all[0];
  }
  return taken;
}

// A block of queries from `first` on, by chunks of keys from the nearest on. Sums are left as those of exponentials are
// elsewhere; where nobody asks for them, keys for which nothing is left are not looked at.
void block_of_sticks(const Sizes& sizes, const Forwards& m, bool rest, int64_t first, Half* out, int64_t stride,
                     float* logs) {
  const int64_t D = sizes.width, rows = std::min(BLOCK, sizes.length - first), end = first + BLOCK;
  const int64_t farthest = std::max<int64_t>(0, first - sizes.window + 1) / BLOCK * BLOCK;
  float taken[BLOCK] = {};
  for (int64_t stop = end; stop > farthest;) {
    const int64_t begin = std::max(farthest, stop - STICKS), count = stop - begin;
    product(m.Q + first * D, D, m.K_columns + begin * D / 2, D / 2 * PANEL, m.S, m.wide, BLOCK, count, D);
    for (int64_t r = 0; r < rows; r++) {
      const float own = float(first + r - begin);
      taken[r] = break_stick(m.S + r * m.wide, m.P + r * m.wide, count, own - float(sizes.window) + 1, own,
                             sizes.scale, taken[r]);
    }
    for (int64_t r = rows; r < BLOCK; r++) std::memset(m.P + r * m.wide, 0, count * sizeof(Half));
    product(m.P, m.wide, m.V_pairs + begin / 2 * PANEL, m.Tp / 2 * PANEL, m.O, D, BLOCK, D, count, stop < end);
    if (!logs && *std::min_element(taken, taken + rows) > USED_UP) break;
    stop = begin;
  }
  for (int64_t r = 0; r < rows; r++) {
    const Floats left = rest ? exponential(Floats{} - taken[r]) : Floats{};
    for (int64_t d = 0; d < D; d += LANES) {
      const Floats own = widened(load<Halves>(m.V + (first + r) * D + d));
      store(out + (first + r) * stride + d, rounded(load<Floats>(m.O + r * D + d) + left * own));
    }
    if (logs) logs[first + r] = taken[r];
  }
}

template <int64_t KIND>
void forwards(const Sizes& sizes, const Strided& q, const Strided& k, const Strided& v, const Added& added,
              const float* sinks, const Strided& out, float* logs) {
  const int64_t T = sizes.length, D = sizes.width, H = sizes.heads;
#pragma omp parallel num_threads(sizes.threads)
  {
    const auto m = memory_of_thread<Forwards>(sizes);
    const Flushing flushing;
    Unit unit;
    if (KIND == NEAR || KIND == COUNTED) m.near.lay_out(added.vectors, D);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < sizes.batch * H; n++) {
      const int64_t b = n / H, h = n % H;
      copy_rows(q.of(b, h), q.time, m.Q, T, m.Tp, D);
      copy_rows(k.of(b, h), k.time, m.K, T, m.Tp, D);
      copy_rows(v.of(b, h), v.time, m.V, T, m.Tp, D);
      transpose_to_panels(m.K, m.K_columns, m.Tp, D / 2);
      pair_rows(m.V, D, m.V_pairs, m.Tp, D);
      const float* values = added.values + b * added.batch + h * added.head;
      if (KIND == LINES) Lines(values, added, T).lay_out(m.table, added);
      for (int64_t first = 0; first < T; first += BLOCK) {
        float* to = logs ? logs + n * T : nullptr;
        if constexpr (KIND == STICK)
          block_of_sticks(sizes, m, added.uniform, first, out.of(b, h), out.time, to);
        else
          block_forwards<KIND>(sizes, m, values, added, sinks ? sinks + h : nullptr, first, out.of(b, h), out.time, to,
                               added.counts ? added.counts + n * T : nullptr);
      }
    }
  }
}

// -- backwards --------------------------------------------------------------------------------------------------------

// Sums by pair of a single sequence are written, not added to. This writes the zeros of the pairs that no block has.
void clear_hidden(const Sizes& sizes, const Backwards& m, int64_t row, float* sums) {
  for (int64_t i = 0; i < sizes.length; i++) {
    const int64_t seen = sizes.window < sizes.length ? 0 : std::min(m.Tp, (i / m.keys + 1) * m.keys);
    std::memset(sums + i * row + seen, 0, (m.Tp - seen) * sizeof(float));
  }
}

// Of `keys` keys from `first` on and `count` queries from `begin` on: P, dS and dS_pairs. Gradients of what is added
// go to `sums`, or if they are those of a single sequence, by pair, `anew`.
template <int64_t KIND>
void block_backwards(const Sizes& sizes, const Backwards& m, const float* values, const Added& layout, float* sums,
                     bool anew, LineSums& of_lines, int64_t first, int64_t keys, int64_t begin, int64_t count) {
  const int64_t D = sizes.width, rows = std::min(keys, sizes.length - first);
  product(m.K + first * D, D, m.Q_columns + begin * D / 2, D / 2 * PANEL, m.S, m.wide, keys, count, D);
  product(m.V + first * D, D, m.A_columns + begin * D / 2, D / 2 * PANEL, m.G, m.wide, keys, count, D);
  const int64_t row = layout.row;
  if constexpr (KIND == BY_PAIR) transpose(values + begin * row + first, row, m.E, m.wide, count, keys);
  const Lines lines = KIND == LINES ? Lines(values, layout, sizes.length) : Lines();
  const int64_t own = KIND == LINES ? layout.uniform - begin : count;  // columns from which on lines are needed
  const __m512i apart = _mm512_cvttps_epi32((__m512)(COUNT * float(m.near.count)));  // queries, by vectors
  for (int64_t r = 0; r < keys; r++) {
    const int64_t distance = begin - first - r;  // of the first query from the key
    const float* added = (KIND == BY_PAIR ? m.E + r * m.wide : KIND == LINES ? m.table + layout.row : values);
    if constexpr (KIND == BY_DISTANCE || KIND == LINES) added += distance;
    const float* of_queries = KIND == DECAY || KIND == SLOPES ? values + begin : nullptr;
    const float of_key = KIND == DECAY ? values[first + r] : KIND == SLOPES ? values[row + first + r] : 0;
    // Columns that see the key: none if it is not there; its own breaks no stick.
    const float nearest = r < rows ? float(-distance) + (KIND == STICK) : -NEVER;
    const float farthest = float(sizes.window) - 1 - float(distance);
    float *s = m.S + r * m.wide, *g = m.G + r * m.wide;
    // Queries among whose nearest keys it is, by distance, and where they have it.
    const int64_t N = m.near.count, from = KIND == NEAR ? std::max<int64_t>(0, distance) : 0;
    const int64_t until = KIND == NEAR ? std::min(N, count + distance) : 0;
    const int64_t nearest_at = (first + r) * N + N - 1;
    for (int64_t d = from; d < until; d++) {
      s[d - distance] += m.near.S[nearest_at + d * (N - 1)];
      g[d - distance] += m.near.G[nearest_at + d * (N - 1)];
    }
    Floats total{};
    for (int64_t c = 0; c < count; c += LANES) {
      Floats x = load<Floats>(s + c) * sizes.scale;
      if constexpr (KIND == BY_DISTANCE || KIND == BY_PAIR) x += load<Floats>(added + c);
      Lines::Point point;
      Floats curve, scale;
      if constexpr (KIND == LINES) {
        if (c < own) {
          x += load<Floats>(added + c);
        } else {
          curve = load<Floats>(lines.curve + distance + c), scale = load<Floats>(lines.scales + begin + c);
          point = lines.at(curve * scale);
          x += point.height;
        }
      }
      if constexpr (KIND == DECAY) x += load<Floats>(of_queries + c) - of_key;
      const Floats column = COUNT + float(c);
      if constexpr (KIND == SLOPES) x -= (column + float(distance)) * (load<Floats>(of_queries + c) + of_key);
      const auto seen = (column >= nearest) & (column <= farthest);
      Floats p, ds;
      if constexpr (KIND == STICK) {
        // `table` has what farther keys take of each query's stick, `inner` gradients of their shares' logarithms. What
        // the key and nearer ones take is a difference then, whose rounding is felt beyond some thousand tokens: at
        // 8,192, whose keys take a half each, as much as that of bf16 numbers.
        float *farther = m.table + begin + c, *of_farther = m.inner + begin + c;
        const Softplus own(x);
        const Floats log = x - (load<Floats>(m.logs + begin + c) - load<Floats>(farther));
        p = seen ? exponential(log > 0 ? Floats{} : log) : Floats{};
        const Floats of_log = seen ? p * load<Floats>(g + c) : Floats{}, all = load<Floats>(of_farther) + of_log;
        ds = seen ? of_log - all * own.slope : Floats{};
        store(farther, load<Floats>(farther) + (seen ? own.height : Floats{}));
        store(of_farther, all);
      } else if constexpr (KIND == COUNTED) {
        // `table` has the gates of farther keys, `of_table` gradients of all counts that this gate is in.
        float *farther = m.table + begin + c, *of_counts = m.of_table + begin + c;
        const int64_t vectors = (begin + c) * m.near.count;
        const float* whole = m.near.S + vectors;
        float* of_whole = m.near.G + vectors;
        const Between at(load<Floats>(m.counts + begin + c) - load<Floats>(farther), layout.uniform);
        const __m512i below = _mm512_add_epi32(apart, at.below), above = _mm512_add_epi32(apart, at.above);
        const Floats gate = Softplus(x).slope, low = gathered(whole, below), slope = gathered(whole, above) - low;
        const Floats logit = x + low + at.part * slope;
        p = seen ? exponential(logit - load<Floats>(m.logs + begin + c)) : Floats{};
        ds = seen ? p * (load<Floats>(g + c) - load<Floats>(m.inner + begin + c)) : Floats{};
        _mm512_i32scatter_ps(of_whole, below, (__m512)(gathered(of_whole, below) + ds * (1 - at.part)), 4);
        _mm512_i32scatter_ps(of_whole, above, (__m512)(gathered(of_whole, above) + ds * at.part), 4);
        const Floats all = load<Floats>(of_counts) + ds * slope;
        store(of_counts, all);
        store(farther, load<Floats>(farther) + (seen ? gate : Floats{}));
        ds += seen ? all * gate * (1 - gate) : Floats{};
      } else {
        p = seen ? exponential(x - load<Floats>(m.logs + begin + c)) : Floats{};
        ds = seen ? p * (load<Floats>(g + c) - load<Floats>(m.inner + begin + c)) : Floats{};
      }
      store(m.P + r * m.wide + c, rounded(p));
      store(m.dS + r * m.wide + c, rounded(ds));
      if ((KIND == BY_DISTANCE || KIND == LINES) && c < own && sums && r < rows) {
        float* to = (KIND == LINES ? m.of_table + layout.row : sums) + distance + c;
        store(to, load<Floats>(to) + ds);
      }
      if (KIND == LINES && c >= own && sums && r < rows) {
        const Floats of_share = of_lines.add(point, curve * scale, ds);
        float *of_curve = sums + distance + c, *of_scales = sums + layout.more + begin + c;
        store(of_curve, load<Floats>(of_curve) + of_share * scale);
        store(of_scales, load<Floats>(of_scales) + of_share * curve);
      }
      if constexpr (KIND == BY_PAIR) store(g + c, ds);
      if constexpr (KIND == DECAY) total += ds;
      if constexpr (KIND == SLOPES) {
        const Floats turning = ds * (column + float(distance));
        total += turning;
        if (sums) store(sums + begin + c, load<Floats>(sums + begin + c) - turning);
      }
    }
    if (KIND == STICK && layout.uniform && -distance >= 0 && -distance < count && r < rows)
      store(m.P + r * m.wide - distance, rounded(exponential(Floats{} - m.logs[first + r]))[0]);
    for (int64_t d = from; d < until; d++) {
      m.near.P[nearest_at + d * (N - 1)] = m.P[r * m.wide + d - distance];
      m.near.dS[nearest_at + d * (N - 1)] = m.dS[r * m.wide + d - distance];
    }
    if ((KIND == DECAY || KIND == SLOPES) && sums && r < rows)
      sums[(KIND == SLOPES ? row : 0) + first + r] -= sum(total);
  }
  if (KIND == BY_PAIR && sums) {
    Words words[LANES];
    for (int64_t c = 0; c < count; c += LANES)
      for (int64_t r = 0; r < keys; r += LANES) {
        load_rows(words, m.G + r * m.wide + c, m.wide);
        transpose(words);
        for (int l = 0; l < LANES; l++) {
          float* to = sums + (begin + c + l) * row + first + r;
          store(to, anew ? (Floats)words[l] : load<Floats>(to) + (Floats)words[l]);
        }
      }
  }
  pair_rows(m.dS, m.wide, m.dS_pairs, keys, count);
}

// What the blocks read of a sequence and head, laid out as they read it.
template <int64_t KIND>
void prepare(const Backwards& m, const Added& layout, const Half* out, int64_t stride, const float* logs,
             const float* counts, int64_t T, int64_t D) {
  for (int64_t t = 0; t < m.Tp; t++) {
    Floats total{};
    const Half* with = KIND == STICK ? m.V + t * D : out + t * stride;
    for (int64_t d = 0; t < T && d < D; d += LANES)
      total += widened(load<Halves>(m.A + t * D + d)) * widened(load<Halves>(with + d));
    m.inner[t] = sum(total);
    if (KIND == STICK) m.inner[t] *= layout.uniform && t < T ? exponential(Floats{} - logs[t])[0] : 0;
    m.logs[t] = t < T ? logs[t] : -NEVER;  // of queries that are not there all probabilities are 0
    if (KIND == COUNTED) m.counts[t] = t < T ? counts[t] : 0;
  }
  transpose_to_panels(m.Q, m.Q_columns, m.Tp, D / 2);
  transpose_to_panels(m.A, m.A_columns, m.Tp, D / 2);
  pair_rows(m.Q, D, m.Q_pairs, m.Tp, D);
  pair_rows(m.A, D, m.A_pairs, m.Tp, D);
  pair_rows(m.K, D, m.K_pairs, m.Tp, D);
  columns_of_pairs(m.K_pairs, m.K_columns, m.whole, m.Tp, D);
  std::memset(m.dQ, 0, D * m.whole * sizeof(float));
}

// What nearest keys have more, of all queries of a sequence and head; or what counts give them, and no gradients yet.
template <int64_t KIND>
void prepare_near(const Backwards& m, int64_t D) {
  const Near& near = m.near;
  product(m.Q, D, near.K_columns, D / 2 * PANEL, near.S, near.count, m.Tp, near.count, D);
  if constexpr (KIND == COUNTED) {
    std::memset(near.G, 0, m.Tp * near.count * sizeof(float));
    return;
  }
  product(m.A, D, near.V_columns, D / 2 * PANEL, near.G, near.count, m.Tp, near.count, D);
  std::memset(near.P, 0, m.Tp * near.count * sizeof(Half));
  std::memset(near.dS, 0, m.Tp * near.count * sizeof(Half));
}

// Gradients of the queries by the vectors, and of the vectors, to sums (2, N, D). Both are scaled later, as logits are,
// which what counts give is not.
template <int64_t KIND>
void finish_near(const Backwards& m, float* sums, float scale, int64_t D) {
  const Near& near = m.near;
  const int64_t N = near.count;
  if (KIND == COUNTED) store_rows(near.G, 1 / scale, near.dS, N, m.Tp, N);
  transpose_to_panels(near.dS, near.pairs, m.Tp, N / 2);
  product(near.K_rows, N, near.pairs, N / 2 * PANEL, m.dQ, m.whole, D, m.Tp, N, true);
  if (!sums) return;
  const auto add = [&](const Half* of_pairs, const Pair* rows, float* to) {
    pair_rows(of_pairs, N, near.pairs, m.Tp, N);
    columns_of_pairs(near.pairs, near.columns, m.Tp, m.Tp, N);
    product(near.columns, m.Tp, rows, m.Tp / 2 * PANEL, to, D, N, D, m.Tp, true);
  };
  add(near.dS, m.Q_pairs, sums);
  if (KIND == NEAR) add(near.P, m.A_pairs, sums + N * D);
}

// (D, T) at a stride, times scale, to rows (T, D) of bf16 numbers
void store_columns(const float* from, int64_t from_stride, float scale, Half* to, int64_t to_stride, int64_t T,
                   int64_t D) {
  Words words[LANES];
  for (int64_t t = 0; t < T; t += LANES)
    for (int64_t d = 0; d < D; d += 2 * LANES) {
      for (int l = 0; l < LANES; l++) {
        const float* two = from + (d + 2 * l) * from_stride + t;
        const Halves low = rounded(load<Floats>(two) * scale), high = rounded(load<Floats>(two + from_stride) * scale);
        words[l] = __builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16;
      }
      transpose(words);
      for (int l = 0; l < std::min(LANES, T - t); l++) store(to + (t + l) * to_stride + d, words[l]);
    }
}

template <int64_t KIND>
void backwards(const Sizes& sizes, const Strided& q, const Strided& k, const Strided& v, const Added& added,
               const Strided& out, const float* logs, const Strided& above, const Strided& dq, const Strided& dk,
               const Strided& dv, float* inner, int64_t groups) {
  const int64_t T = sizes.length, D = sizes.width, H = sizes.heads, B = sizes.batch;
  const bool anew = groups == B;
#pragma omp parallel num_threads(sizes.threads)
  {
    const auto m = memory_of_thread<Backwards>(sizes);
    const Flushing flushing;
    Unit unit;
    if (KIND == NEAR || KIND == COUNTED) m.near.lay_out(added.vectors, D);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < H * groups; task++) {
      const int64_t h = task % H, group = task / H;
      float* sums = added.sums ? added.sums + group * added.sums_group + h * added.sums_head : nullptr;
      LineSums of_lines;
      if (KIND == LINES) std::fill(m.of_table, m.of_table + m.Tp + Lines::BEYOND, 0.0f);
      if (KIND == BY_PAIR && sums && anew) clear_hidden(sizes, m, added.row, sums);
      for (int64_t b = group * B / groups; b < (group + 1) * B / groups; b++) {
        copy_rows(q.of(b, h), q.time, m.Q, T, m.Tp, D);
        copy_rows(k.of(b, h), k.time, m.K, T, m.Tp, D);
        copy_rows(v.of(b, h), v.time, m.V, T, m.Tp, D);
        copy_rows(above.of(b, h), above.time, m.A, T, m.Tp, D);
        const int64_t before = (b * H + h) * T;
        const float* counts = added.counts ? added.counts + before : nullptr;
        prepare<KIND>(m, added, out.of(b, h), out.time, logs + before, counts, T, D);
        if (KIND == STICK || KIND == COUNTED)
          for (float* x : {m.table, m.of_table}) std::fill(x, x + m.Tp, 0.0f);
        if (inner) std::memcpy(inner + before, m.inner, T * sizeof(float));
        if (KIND == NEAR || KIND == COUNTED) prepare_near<KIND>(m, D);
        const float* values = added.values + b * added.batch + h * added.head;
        if (KIND == LINES) Lines(values, added, T).lay_out(m.table, added);
        for (int64_t first = 0; first < T; first += m.keys) {
          const int64_t keys = std::min(m.keys, m.Tp - first), rows = std::min(keys, T - first);
          const int64_t end = std::min(m.Tp, padded(first + keys + sizes.window - 1));  // of queries that see them
          for (int64_t begin = first; begin < end; begin += CHUNK) {
            const int64_t count = std::min(CHUNK, end - begin);
            const bool more = begin > first;
            block_backwards<KIND>(sizes, m, values, added, sums, anew, of_lines, first, keys, begin, count);
            product(m.P, m.wide, m.A_pairs + begin / 2 * PANEL, m.Tp / 2 * PANEL, m.dV, D, keys, D, count, more);
            product(m.dS, m.wide, m.Q_pairs + begin / 2 * PANEL, m.Tp / 2 * PANEL, m.dK, D, keys, D, count, more);
            product(m.K_columns + first, m.whole, m.dS_pairs, keys / 2 * PANEL, m.dQ + begin, m.whole, D, count, keys,
                    true);
          }
          store_rows(m.dK, sizes.scale, dk.of(b, h) + first * dk.time, dk.time, rows, D);
          store_rows(m.dV, 1, dv.of(b, h) + first * dv.time, dv.time, rows, D);
        }
        if (KIND == NEAR || KIND == COUNTED) finish_near<KIND>(m, sums, sizes.scale, D);
        store_columns(m.dQ, m.whole, sizes.scale, dq.of(b, h), dq.time, T, D);
      }
      if (KIND == LINES && sums)
        of_lines.hand_over(Lines(added.values + h * added.head, added, T), m.of_table, added, T, sums);
    }
  }
}

}  // namespace

extern "C" {

bool can_run() { return unit_is_there(); }

// Bytes of scratch that a thread needs.
int64_t scratch_of_forward(const Sizes* sizes) { return memory_needed<Forwards>(*sizes); }
int64_t scratch_of_backward(const Sizes* sizes) { return memory_needed<Backwards>(*sizes); }

#define FOR_EACH_KIND(CALL)                \
  switch (added->kind) {                   \
    case NOTHING: CALL(NOTHING); break;    \
    case BY_DISTANCE: CALL(BY_DISTANCE); break; \
    case BY_PAIR: CALL(BY_PAIR); break;    \
    case LINES: CALL(LINES); break;        \
    case DECAY: CALL(DECAY); break;        \
    case SLOPES: CALL(SLOPES); break;      \
    case NEAR: CALL(NEAR); break;          \
    case STICK: CALL(STICK); break;        \
    case COUNTED: CALL(COUNTED); break;    \
  }

// sinks: (heads,), logits that join the sums of a head's rows; null if there are none.
void forward(const Sizes* sizes, const Strided* q, const Strided* k, const Strided* v, const Added* added,
             const float* sinks, const Strided* out, float* logs) {
#define CALL(KIND) forwards<KIND>(*sizes, *q, *k, *v, *added, sinks, *out, logs)
  FOR_EACH_KIND(CALL)
#undef CALL
}

// inner: (batch, heads, length), receives the products of the outputs and their gradients; null if nobody asks.
void backward(const Sizes* sizes, const Strided* q, const Strided* k, const Strided* v, const Added* added,
              const Strided* out, const float* logs, const Strided* above, const Strided* dq, const Strided* dk,
              const Strided* dv, float* inner, int64_t groups) {
#define CALL(KIND) backwards<KIND>(*sizes, *q, *k, *v, *added, *out, logs, *above, *dq, *dk, *dv, inner, groups)
  FOR_EACH_KIND(CALL)
#undef CALL
}
}
