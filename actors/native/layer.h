/* What the generated code of a decoder layer is written in (actors/model/layer_code.py).
 *
 * A layer is run by all threads of one team from its first row to its last: rows are shared out for
 * what is done row by row, panels for products, and a barrier stands where one thread reads what
 * another wrote. A row's numbers are computed by the same instructions whatever the other rows are.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "paged_attention.c"

typedef void Panels(const void *weight, int64_t format, const float *bias, int64_t N, int64_t K,
                    const float *x, int64_t ldx, int64_t rows, float *y, int64_t ldy,
                    int64_t first, int64_t end);

/* Of one step, the same for all layers. */
typedef struct {
  Panels *panels;
  int64_t num_rows, num_reqs, max_blocks;
  float *space; /* num_rows times what the layer asks for */
} Step;

#define SIMD _Pragma("omp simd")

/* The calling thread's rows. */
#define ROWS(t)                                                            \
  for (int64_t t = step->num_rows * member.me / member.team->size,         \
               t##_end = step->num_rows * (member.me + 1) / member.team->size; \
       t < t##_end; t++)

/* Panels, a few at a time to whoever is free: a thread that lost its core holds nobody up. */
static void product(const Step *step, Member member, int64_t *next, const void *weight,
                    int64_t format, const float *bias, int64_t N, int64_t K, const float *x,
                    int64_t ldx, float *y) {
  int64_t num = (N + 15) / 16, some = (num / (8 * member.team->size) + 3) / 4 * 4;
  if (some == 0) some = 4;
  for (;;) {
    int64_t p = __atomic_fetch_add(next, some, __ATOMIC_RELAXED);
    if (p >= num) return;
    step->panels(weight, format, bias, N, K, x, ldx, step->num_rows, y, N, p,
                 p + some < num ? p + some : num);
  }
}

/* --- elementwise functions, written so that loops over them become vectors ---------------------- */

static inline float f_exp(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float t = x * 1.44269504088896341f + 12582912.0f; /* 1.5 * 2^23: rounds to int */
  float n = t - 12582912.0f, r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  union {
    float f;
    int32_t i;
  } u = {.f = t}, v;
  v.i = (u.i - 0x4B400000 + 127) << 23;
  return p * v.f;
}
static inline float f_sigmoid(float x) { return 1.0f / (1.0f + f_exp(-x)); }
static inline float f_silu(float x) { return x / (1.0f + f_exp(-x)); }
static inline float f_tanh(float x) {
  /* By the series near 0, where 1 - e^-2x would lose digits. */
  float e = f_exp(-2.0f * fabsf(x)), y = (1.0f - e) / (1.0f + e), s = x * x;
  float near = fabsf(x) * (1.0f + s * (-0.333333333f + s * (0.133333333f - s * 0.053968254f)));
  return copysignf(fabsf(x) < 0.125f ? near : y, x);
}
/* Abramowitz and Stegun 7.1.26 has three digits less than erf here needs: W. J. Cody's form for
 * |x| < 0.5, the complementary one beyond. */
static inline float f_erf(float x) {
  float a = fabsf(x), s = x * x;
  float near = x * (1.128379167f +
                    s * (-0.376126389f + s * (0.112837917f + s * (-0.026866171f + s * 0.005223978f))));
  float t = 1.0f / (1.0f + 0.5f * a);
  float c = t * f_exp(-a * a - 1.26551223f +
                      t * (1.00002368f +
                           t * (0.37409196f +
                                t * (0.09678418f +
                                     t * (-0.18628806f +
                                          t * (0.27886807f +
                                               t * (-1.13520398f +
                                                    t * (1.48851587f +
                                                         t * (-0.82215223f + t * 0.17087277f)))))))));
  return a < 0.5f ? near : copysignf(1.0f - c, x);
}
static inline float f_gelu(float x) { return 0.5f * x * (1.0f + f_erf(x * 0.70710678118654752f)); }
static inline float f_gelu_tanh(float x) {
  return 0.5f * x * (1.0f + f_tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}
static inline float f_relu(float x) { return x > 0.0f ? x : 0.0f; }
