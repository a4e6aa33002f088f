// The training loss of bf16 logits, by rows, and its gradient in their place; sums in fp32.

#include "native.h"

#include <vector>

namespace {

inline Floats load_some(const Half* from, int64_t n) {  // -inf where there are fewer than LANES
  if (n >= LANES) return widened(load<Halves>(from));
  const Words read = (Words)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(n), from));
  return COUNT < float(n) ? (Floats)(read << 16) : Floats{} + NEVER;
}
inline void store_some(Half* to, int64_t n, Floats x) {
  _mm256_mask_storeu_epi16(to, lanes(n), (__m256i)rounded(x));
}

// Negative log-likelihood of a label. `grown` takes a row; where a share is wanted, the gradient times it is written
// over the logits.
float loss_of_row(Half* logits, int64_t label, int64_t V, const float* share, float* grown) {
  Floats tops = Floats{} + NEVER;
  for (int64_t c = 0; c < V; c += LANES) {
    const Floats x = load_some(logits + c, V - c);
    tops = x > tops ? x : tops;
  }
  const float top = most(tops), own = load_some(logits + label, 1)[0];
  Floats sums{};
  for (int64_t c = 0; c < V; c += LANES) {
    const Floats e = exponential(load_some(logits + c, V - c) - top);
    sums += e;
    store(grown + c, e);
  }
  const float total = sum(sums);
  if (share) {
    grown[label] -= total;
    const float factor = *share / total;
    for (int64_t c = 0; c < V; c += LANES) store_some(logits + c, V - c, load<Floats>(grown + c) * factor);
  }
  return (top - own) + std::log(total);
}

}  // namespace

extern "C" {

// Of logits (rows, V), one after the other: losses (rows,), and how many labels are none of 0 .. V-1, of whose rows
// nothing is computed.
int64_t cross_entropy(int64_t threads, int64_t rows, int64_t V, Half* logits, const int64_t* labels, const float* share,
                      float* losses) {
  int64_t wrong = 0;
#pragma omp parallel num_threads(threads) reduction(+ : wrong)
  {
    const Flushing flushing;
    std::vector<float> grown(V + LANES);
#pragma omp for
    for (int64_t r = 0; r < rows; r++) {
      if (labels[r] >= 0 && labels[r] < V)
        losses[r] = loss_of_row(logits + r * V, labels[r], V, share, grown.data());
      else
        wrong++;
    }
  }
  return wrong;
}
}
