/* Products of a few rows with a packed weight, at the speed of reading the weight once.
 *
 * A weight [N, K] is kept in panels of 16 outputs. A panel holds, for k = 0, 1, ... K - 1, what
 * gives the 16 weights of input k; how is the format's business: `FORMAT_load` gives `num` rows of
 * 16 float32 weights from input `k` on, either in place or unpacked into `space`, which stays in
 * the first cache. Everything behind that is the same for every format.
 *
 * One output is one accumulator that takes its K products in order, each by one fused
 * multiply-add: its bits depend neither on the number of rows, nor on the threads, nor on whether
 * the weights were float32 or were made float32 here.
 *
 * x [rows, K] and y [rows, N] float32, rows ldx and ldy apart.
 */
#include <stdint.h>
#include <string.h>
#include <omp.h>

#include "team.h"
#include "vector.h"

#define P 16       /* outputs a panel */
#define NV (P / W) /* vectors a row of a panel */
#define MOST 6     /* rows whose sums fit into registers beside a panel's weights */
#define CHUNK 256  /* inputs that are unpacked at a time for many rows; whole groups of each format */

#define SECOND_CACHE 65536 /* floats of x that stay in it */

#define ALWAYS static inline __attribute__((always_inline))
#define AT(p) (*(const vf *)(p))
#define OUT(p) (*(vf *)(p))

/* --- formats ------------------------------------------------------------------------------------
 * GROUP: inputs that are unpacked at a time where the rows are few. */

/* float32 [K][16]: used where it lies. */
#define F32_GROUP (1 << 28)
#define F32_SPACE 1
ALWAYS const float *F32_load(const uint8_t *panel, int64_t k, int64_t num, int64_t K, float *space) {
  (void)num, (void)K, (void)space;
  return (const float *)panel + k * P;
}
static int64_t F32_bytes(int64_t K) { return K * P * 4; }

/* bfloat16 [K][16]. */
#define BF16_GROUP 32
#define BF16_SPACE CHUNK
ALWAYS const float *BF16_load(const uint8_t *panel, int64_t k, int64_t num, int64_t K,
                              float *space) {
  (void)K;
  const uint16_t *from = (const uint16_t *)panel + k * P;
  uint32_t *to = (uint32_t *)space;
  for (int64_t i = 0; i < num * P; i++) to[i] = (uint32_t)from[i] << 16;
  return space;
}
static int64_t BF16_bytes(int64_t K) { return K * P * 2; }

#include "quantised.h"

/* --- few rows: all inputs, the sums in registers ------------------------------------------------ */

typedef void Few(const uint8_t *panel, int64_t stride, int64_t K, const float *x, int64_t ldx,
                 float *const *y, int64_t ldy, const float *const *bias);

/* M rows, Q panels side by side. */
#define FEW(FORMAT, M, Q)                                                                         \
  static void FORMAT##_few_##M(const uint8_t *panel, int64_t stride, int64_t K, const float *x,   \
                               int64_t ldx, float *const *y, int64_t ldy,                         \
                               const float *const *bias) {                                        \
    float space[Q][FORMAT##_SPACE > FORMAT##_GROUP ? FORMAT##_GROUP * P : P];                     \
    vf a[Q][M][NV];                                                                               \
    for (int q = 0; q < Q; q++)                                                                   \
      for (int m = 0; m < M; m++)                                                                 \
        for (int v = 0; v < NV; v++) a[q][m][v] = (vf){0};                                        \
    for (int64_t k0 = 0; k0 < K; k0 += FORMAT##_GROUP) {                                          \
      int64_t num = K - k0 < FORMAT##_GROUP ? K - k0 : FORMAT##_GROUP;                            \
      const float *w[Q];                                                                          \
      for (int q = 0; q < Q; q++) w[q] = FORMAT##_load(panel + q * stride, k0, num, K, space[q]); \
      for (int64_t k = 0; k < num; k++)                                                           \
        for (int q = 0; q < Q; q++) {                                                             \
          vf wk[NV];                                                                              \
          for (int v = 0; v < NV; v++) wk[v] = AT(w[q] + k * P + v * W);                          \
          if (M > 1 && M * Q < MOST) /* else there are none left */                               \
            for (int v = 0; v < NV; v++) IN_REGISTER(wk[v]);                                      \
          for (int m = 0; m < M; m++)                                                             \
            for (int v = 0; v < NV; v++) a[q][m][v] += wk[v] * x[m * ldx + k0 + k];               \
        }                                                                                         \
    }                                                                                             \
    for (int q = 0; q < Q; q++)                                                                   \
      for (int m = 0; m < M; m++)                                                                 \
        for (int v = 0; v < NV; v++)                                                              \
          OUT(y[q] + m * ldy + v * W) = bias[q] ? a[q][m][v] + AT(bias[q] + v * W) : a[q][m][v];  \
  }

/* --- many rows: a chunk of the panel stays in the first cache while all rows pass it ------------ */

#define MANY(M)                                                                                   \
  static void many_##M(const float *w, int64_t num, const float *x, int64_t ldx, float *y,        \
                       int64_t ldy, int is_first, const float *bias, const char *ahead) {         \
    vf a[M][NV];                                                                                  \
    for (int m = 0; m < M; m++)                                                                   \
      for (int v = 0; v < NV; v++) a[m][v] = is_first ? (vf){0} : AT(y + m * ldy + v * W);        \
    for (int64_t k = 0; k < num; k++) {                                                           \
      vf wk[NV];                                                                                  \
      __builtin_prefetch(ahead + k * 64);                                                         \
      for (int v = 0; v < NV; v++) wk[v] = AT(w + k * P + v * W);                                 \
      if (M > 1)                                                                                  \
        for (int v = 0; v < NV; v++) IN_REGISTER(wk[v]);                                          \
      for (int m = 0; m < M; m++)                                                                 \
        for (int v = 0; v < NV; v++) a[m][v] += wk[v] * x[m * ldx + k];                           \
    }                                                                                             \
    for (int m = 0; m < M; m++)                                                                   \
      for (int v = 0; v < NV; v++)                                                                \
        OUT(y + m * ldy + v * W) = bias ? a[m][v] + AT(bias + v * W) : a[m][v];                   \
  }
MANY(1) MANY(2) MANY(3) MANY(4) MANY(5) MANY(6)

typedef const float *Load(const uint8_t *panel, int64_t k, int64_t num, int64_t K, float *space);

static void many(Load *load, const uint8_t *panel, int64_t K, const float *x, int64_t ldx,
                 int64_t rows, float *y, int64_t ldy, const float *bias) {
  float space[CHUNK * P];
  for (int64_t k = 0; k < K; k += CHUNK) {
    int64_t num = K - k < CHUNK ? K - k : CHUNK;
    const float *w = load(panel, k, num, K, space), *b = k + num == K ? bias : 0;
    const char *ahead = (const char *)(w == space ? panel : (const uint8_t *)(w + num * P));
    for (int64_t row = 0; row < rows;) {
      int64_t left = rows - row, m = left <= MOST ? left : left >= 2 * MOST ? MOST : (left + 1) / 2;
      const float *from = x + row * ldx + k;
      float *to = y + row * ldy;
      switch (m) {
        case 1: many_1(w, num, from, ldx, to, ldy, k == 0, b, ahead); break;
        case 2: many_2(w, num, from, ldx, to, ldy, k == 0, b, ahead); break;
        case 3: many_3(w, num, from, ldx, to, ldy, k == 0, b, ahead); break;
        case 4: many_4(w, num, from, ldx, to, ldy, k == 0, b, ahead); break;
        case 5: many_5(w, num, from, ldx, to, ldy, k == 0, b, ahead); break;
        default: many_6(w, num, from, ldx, to, ldy, k == 0, b, ahead);
      }
      row += m;
    }
  }
}

/* --- what is asked for -------------------------------------------------------------------------- */

typedef struct {
  Few *few[MOST]; /* by rows - 1 */
  Load *load;
  int64_t (*bytes)(int64_t K);
} Format;

/* Panels side by side, so that enough sums are under way to hide how long one takes. */
#define Q1 4
#define Q2 2
#define Q3 2
#define FORMAT(F)                                                                                  \
  FEW(F, 1, Q1) FEW(F, 2, Q2) FEW(F, 3, Q3) FEW(F, 4, 1) FEW(F, 5, 1) FEW(F, 6, 1)                 \
  static const float *F##_chunk(const uint8_t *panel, int64_t k, int64_t num, int64_t K,           \
                                float *space) {                                                    \
    return F##_load(panel, k, num, K, space);                                                      \
  }                                                                                                \
  static const Format F = {{F##_few_1, F##_few_2, F##_few_3, F##_few_4, F##_few_5, F##_few_6},     \
                           F##_chunk,                                                              \
                           F##_bytes};
FORMAT(F32) FORMAT(BF16) FORMAT(F16)
FORMAT(Q8_0) FORMAT(Q4_0) FORMAT(Q4_1) FORMAT(Q5_0) FORMAT(Q5_1)
FORMAT(Q4_K) FORMAT(Q5_K) FORMAT(Q6_K)

/* As `Format` of actors/model/linear.py numbers them. */
static const Format *const formats[] = {&F32,  &BF16, &F16,  &Q8_0, &Q4_0, &Q4_1,
                                        &Q5_0, &Q5_1, &Q4_K, &Q5_K, &Q6_K};

static void of_block(const void *weight, int64_t format, const float *bias, int64_t N, int64_t K,
                     const float *x, int64_t ldx, int64_t rows, float *y, int64_t ldy,
                     int64_t first, int64_t end) {
  const Format *f = formats[format];
  int64_t stride = f->bytes(K);
  for (int64_t p = first; p < end;) {
    int64_t side = rows == 1 ? Q1 : rows == 2 ? Q2 : rows == 3 ? Q3 : 1;
    if (rows > MOST || (p + side) * P > N || p + side > end) side = 1;
    const uint8_t *panel = (const uint8_t *)weight + p * stride;
    int is_whole = (p + side) * P <= N;
    float rest[is_whole ? 1 : rows * P], rest_bias[P];
    float *to[Q1];
    const float *b[Q1];
    for (int q = 0; q < side; q++) {
      to[q] = is_whole ? y + (p + q) * P : rest;
      b[q] = bias ? bias + (p + q) * P : 0;
    }
    int64_t ld = is_whole ? ldy : P;
    if (!is_whole && bias) {
      memset(rest_bias, 0, sizeof rest_bias);
      memcpy(rest_bias, b[0], (N - p * P) * sizeof(float));
      b[0] = rest_bias;
    }
    if (rows > MOST) {
      many(f->load, panel, K, x, ldx, rows, to[0], ld, b[0]);
    } else if (side == 1 && rows <= 3) {
      many(f->load, panel, K, x, ldx, rows, to[0], ld, b[0]);
    } else {
      f->few[rows - 1](panel, stride, K, x, ldx, to, ld, b);
    }
    if (!is_whole)
      for (int64_t r = 0; r < rows; r++)
        memcpy(y + r * ldy + p * P, rest + r * P, (N - p * P) * sizeof(float));
    p += side;
  }
}

/* Outputs of panels [first, end): the share of one thread. Panels behind the last whole number of
 * outputs are filled up with anything; of their outputs only those below N are written. Many rows
 * go block by block, each small enough to stay in the second cache while all panels pass it. */
void linear_panels(const void *weight, int64_t format, const float *bias, int64_t N, int64_t K,
                   const float *x, int64_t ldx, int64_t rows, float *y, int64_t ldy, int64_t first,
                   int64_t end) {
  int64_t block = SECOND_CACHE / K / MOST * MOST;
  if (block < 4 * MOST) block = 4 * MOST;
  for (int64_t row = 0; row < rows; row += block)
    of_block(weight, format, bias, N, K, x + row * ldx, ldx, rows - row < block ? rows - row : block,
             y + row * ldy, ldy, first, end);
}

/* All panels, by `threads` threads that take a few at a time. */
void linear(const void *weight, int64_t format, const float *bias, int64_t N, int64_t K,
            const float *x, int64_t ldx, int64_t rows, float *y, int64_t ldy, int threads) {
  int64_t num = (N + P - 1) / P, some = (num + 8 * threads - 1) / (8 * threads);
  some = (some + Q1 - 1) / Q1 * Q1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < num; p += some)
    linear_panels(weight, format, bias, N, K, x, ldx, rows, y, ldy, p,
                  p + some < num ? p + some : num);
}

/* Rows `ids` [num] of a weight to y [num, K]; not 0, and not all done, where an id is none. */
int look_up(const void *weight, int64_t format, int64_t N, int64_t K, const int64_t *ids,
            int64_t num, float *y) {
  const Format *f = formats[format];
  float space[CHUNK * P];
  for (int64_t i = 0; i < num; i++) {
    if (ids[i] < 0 || ids[i] >= N) return 1;
    const uint8_t *panel = (const uint8_t *)weight + ids[i] / P * f->bytes(K);
    for (int64_t k = 0; k < K; k += CHUNK) {
      int64_t count = K - k < CHUNK ? K - k : CHUNK;
      const float *w = f->load(panel, k, count, K, space);
      for (int64_t c = 0; c < count; c++) y[i * K + k + c] = w[c * P + ids[i] % P];
    }
  }
  return 0;
}

/* --- layers ------------------------------------------------------------------------------------ */

typedef struct {
  void (*panels)(const void *, int64_t, const float *, int64_t, int64_t, const float *, int64_t,
                 int64_t, float *, int64_t, int64_t, int64_t);
  int64_t num_rows, num_reqs, max_blocks;
  float *space;
} Step; /* as in layer.h */

typedef int Layer(const Step *step, Member member, void *const *weights, const float *states,
                  void *const *rows, float *out, int64_t *next);

/* Run layers in order by one team; layer i reads the states `in[i]` and writes `out[i]`. `next`:
 * room for `most_counters` a layer. Returns 0, or not if a layer failed. */
int run_layers(int64_t num_layers, Layer *const *layers, void *const *const *weights,
               const float *const *in, void *const *const *rows, float *const *out, int64_t *next,
               int64_t most_counters, int64_t num_rows, int64_t num_reqs, int64_t max_blocks,
               float *space, int threads) {
  static _Thread_local Team own = {.looks = MOST_LOOKS}; /* kept, for what it has learnt */
  Team *team = &own;
  Step step = {linear_panels, num_rows, num_reqs, max_blocks, space};
  int failed = 0;
  memset(next, 0, num_layers * most_counters * sizeof(int64_t));
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
  {
    Member member = {team, omp_get_thread_num()};
#pragma omp single
    team->size = omp_get_num_threads();
    for (int64_t i = 0; i < num_layers && !failed; i++)
      failed = layers[i](&step, member, weights[i], in[i], rows[i], out[i],
                         next + i * most_counters);
  }
  return failed;
}
