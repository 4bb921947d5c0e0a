/* Paged attention for CPU, float32, one arithmetic path for every query.
 *
 * Built once per (HEAD_DIM, BLOCK) pair by actors/native/build.py. The point of writing it
 * instead of calling SDPA: what one query row computes depends on its own position and nothing
 * else. Not on how many rows share the call, not on how a prompt was cut into chunks, not on the
 * number of threads. Speculation changes exactly those things, so this is what makes output with
 * and without it the same bits.
 *
 * How: the keys are cut into partitions of PART positions, counted from position 0. A query's
 * result is the in-order merge of its partitions, each computed from a fresh accumulator by one
 * function (`partial`) that always works on LANES queries at a time. Whether partitions run on
 * several threads or in a loop does not change one operation.
 *
 * Layout (f32):
 *   k_cache [num_blocks, num_kv_heads, HEAD_DIM, BLOCK]   keys transposed: 8 positions a vector
 *   v_cache [num_blocks, num_kv_heads, BLOCK, HEAD_DIM]
 *   out     [T, num_heads, HEAD_DIM]
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <omp.h>

#include "team.h"

#define W 8      /* floats a vector; gcc and clang lower it to what the machine has */
#define LANES 4  /* queries handled together, so that a key vector is loaded once for four */
#define PART 256 /* positions a partition */
/* Positions a tile: what is scored at once. A KV block where blocks are whole vectors and fill a
 * partition; elsewhere its positions lie in several blocks and are gathered first. */
#if BLOCK % W == 0 && PART % BLOCK == 0
#define TILE BLOCK
#define GATHERED 0
#else
#define TILE 16
#define GATHERED 1
#endif
#define WORTH_THREADS 2048 /* keys to look at, below which waking threads takes longer */
#define NB (TILE / W)
#define ND (HEAD_DIM / W)
#define NEG -1e30f

typedef float vf __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4)));

static inline vf splat(float x) { return (vf){x, x, x, x, x, x, x, x}; }
static inline vf vmax(vf a, vf b) {
  vi m = a > b;
  return (vf)(((vi)a & m) | ((vi)b & ~m));
}
static inline float hmax(vf a) {
  float r = a[0];
  for (int i = 1; i < W; i++) r = a[i] > r ? a[i] : r;
  return r;
}
static inline float hsum(vf a) {
  return ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]));
}

/* exp for x <= 0: range reduction by ln 2 and a degree-5 polynomial (Cephes expf). Below -87 it
 * returns 0. Written out so that every lane, full or partial, takes the same path. */
static inline vf vexp(vf x) {
  vi low = x < splat(-87.0f);
  x = vmax(x, splat(-87.0f));
  vf t = x * splat(1.44269504088896341f) + splat(12582912.0f); /* 1.5 * 2^23: rounds to int */
  vf n = t - splat(12582912.0f);
  vf r = x - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  vf p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  vi e = ((vi)t - 0x4B400000 + 127) << 23;
  return (vf)((vi)(p * (vf)e) & ~low);
}
static inline float sexp(float x) { return vexp(splat(x))[0]; }

typedef struct {
  float m, l;
  vf acc[ND];
} State;

typedef struct {
  const float *k_cache, *v_cache;
  const int32_t *block_row;
  int64_t num_kv_heads;
  float scale, softcap;
} Ctx;

/* Where `d` = 0 of the key, and the value, of position p lie. */
static inline const float *key_at(const Ctx *c, int64_t kvh, int64_t p) {
  int64_t base = (int64_t)c->block_row[p / BLOCK] * c->num_kv_heads + kvh;
  return c->k_cache + base * HEAD_DIM * BLOCK + p % BLOCK;
}
static inline const float *value_at(const Ctx *c, int64_t kvh, int64_t p) {
  int64_t base = (int64_t)c->block_row[p / BLOCK] * c->num_kv_heads + kvh;
  return c->v_cache + (base * BLOCK + p % BLOCK) * HEAD_DIM;
}

#if GATHERED
/* Keys of TILE positions from p0 on, transposed as a block's are; zeros from `hi` on, where the
 * request may have no block. */
static void gather_keys(const Ctx *c, int64_t kvh, int64_t p0, int64_t hi, float *keys) {
  int64_t n = hi - p0 < TILE ? hi - p0 : TILE;
  const float *from[TILE];
  for (int64_t t = 0; t < n; t++) from[t] = key_at(c, kvh, p0 + t);
  for (int d = 0; d < HEAD_DIM; d++) {
    for (int64_t t = 0; t < n; t++) keys[d * TILE + t] = from[t][d * BLOCK];
    for (int64_t t = n; t < TILE; t++) keys[d * TILE + t] = 0.0f;
  }
}
#endif

/* One partition for LANES queries that share a kv head. `q[i]` sees keys first[i]..last[i]. A
 * padding lane repeats a real one. */
static __attribute__((noinline)) void partial(const Ctx *c, int64_t kvh, int64_t part,
                                              const float *const q[LANES],
                                              const int64_t first[LANES],
                                              const int64_t last[LANES], State st[LANES]) {
  int64_t hi = 0, lo = INT64_MAX;
  for (int i = 0; i < LANES; i++) {
    st[i].m = NEG;
    st[i].l = 0.0f;
    for (int d = 0; d < ND; d++) st[i].acc[d] = splat(0.0f);
    if (last[i] + 1 > hi) hi = last[i] + 1;
    if (first[i] < lo) lo = first[i];
  }
  int64_t begin = part * PART, end = begin + PART;
  if (end > hi) end = hi;
  if (lo > begin) begin = lo / TILE * TILE;
  for (int64_t p0 = begin; p0 < end; p0 += TILE) {
#if GATHERED
    float k[HEAD_DIM * TILE];
    gather_keys(c, kvh, p0, hi, k);
#else
    const float *k = key_at(c, kvh, p0), *v = value_at(c, kvh, p0);
#endif
    vf s[LANES][NB];
    for (int i = 0; i < LANES; i++)
      for (int j = 0; j < NB; j++) s[i][j] = splat(0.0f);
    for (int d = 0; d < HEAD_DIM; d++) {
      vf kd[NB];
      for (int j = 0; j < NB; j++) kd[j] = *(const vf *)(k + d * TILE + j * W);
      for (int i = 0; i < LANES; i++) {
        vf qd = splat(q[i][d]);
        for (int j = 0; j < NB; j++) s[i][j] += qd * kd[j];
      }
    }
    for (int i = 0; i < LANES; i++) {
      if (p0 > last[i] || p0 + TILE <= first[i]) continue;
      vf mx = splat(NEG);
      for (int j = 0; j < NB; j++) {
        s[i][j] *= splat(c->scale);
        if (c->softcap > 0.0f)
          for (int w = 0; w < W; w++) s[i][j][w] = c->softcap * tanhf(s[i][j][w] / c->softcap);
        for (int w = 0; w < W; w++) {
          int64_t p = p0 + j * W + w;
          if (p > last[i] || p < first[i]) s[i][j][w] = NEG;
        }
        mx = vmax(mx, s[i][j]);
      }
      float m = hmax(mx);
      if (st[i].m > m) m = st[i].m;
      float alpha = sexp(st[i].m - m);
      vf sum = splat(0.0f);
      for (int j = 0; j < NB; j++) {
        s[i][j] = vexp(s[i][j] - splat(m));
        sum += s[i][j];
      }
      st[i].m = m;
      st[i].l = st[i].l * alpha + hsum(sum);
      vf a = splat(alpha), acc[ND]; /* of its own, so that it stays in registers */
      for (int d = 0; d < ND; d++) acc[d] = st[i].acc[d] * a;
      /* A tile reaching past this query's position holds keys of later rows, or what an earlier
       * owner left: their weight is 0, but 0 * inf would not be. Stop at the last valid one. */
      int64_t nv = last[i] - p0 + 1 < TILE ? last[i] - p0 + 1 : TILE;
      for (int64_t t = 0; t < nv; t++) {
        vf w = splat(s[i][t / W][t % W]);
#if GATHERED
        const float *vt = value_at(c, kvh, p0 + t);
#else
        const float *vt = v + t * HEAD_DIM;
#endif
        for (int d = 0; d < ND; d++) acc[d] += w * *(const vf *)(vt + d * W);
      }
      for (int d = 0; d < ND; d++) st[i].acc[d] = acc[d];
    }
  }
}

static __attribute__((noinline)) void merge(State *total, const State *part) {
  if (part->l == 0.0f) return; /* this partition lies outside the query's window */
  float m = total->m > part->m ? total->m : part->m;
  float a = sexp(total->m - m), b = sexp(part->m - m);
  total->m = m;
  total->l = total->l * a + part->l * b;
  vf va = splat(a), vb = splat(b);
  for (int d = 0; d < ND; d++) total->acc[d] = total->acc[d] * va + part->acc[d] * vb;
}

/* `sink`: NULL, or a score that takes part in the softmax and has no value of its own. */
static __attribute__((noinline)) void finish(const State *st, const float *sink, float *out) {
  float l = st->l, a = 1.0f;
  if (sink) {
    float m = st->m > *sink ? st->m : *sink;
    a = sexp(st->m - m);
    l = l * a + sexp(*sink - m);
  }
  vf inv = splat(a / l);
  for (int d = 0; d < ND; d++) *(vf *)(out + d * W) = st->acc[d] * inv;
}

/* Write the new rows' keys and values into their slots. Strides are in floats. */
void write_kv(const float *key, const float *value, float *k_cache, float *v_cache,
              const int64_t *slots, int64_t T, int64_t num_kv_heads, int64_t k_row,
              int64_t k_head, int64_t v_row, int64_t v_head) {
  for (int64_t t = 0; t < T; t++) {
    if (slots[t] < 0) continue; /* a padding row */
    int64_t block = slots[t] / BLOCK, off = slots[t] % BLOCK;
    for (int64_t h = 0; h < num_kv_heads; h++) {
      int64_t base = block * num_kv_heads + h;
      const float *ks = key + t * k_row + h * k_head;
      float *kd = k_cache + base * HEAD_DIM * BLOCK + off;
      for (int d = 0; d < HEAD_DIM; d++) kd[d * BLOCK] = ks[d];
      memcpy(v_cache + base * BLOCK * HEAD_DIM + off * HEAD_DIM, value + t * v_row + h * v_head,
             HEAD_DIM * sizeof(float));
    }
  }
}

typedef struct {
  const float *q, *k_cache, *v_cache, *sinks;
  float *out;
  const int32_t *block_table, *query_start, *seq_lens;
  int64_t R, max_blocks, num_heads, num_kv_heads, q_row, q_head, window;
  float scale, softcap;
  int causal;
} Attention;

/* LANES consecutive (row, head-in-group) pairs, from `g0` on, of one request and kv head. */
typedef struct {
  int64_t r, h, g0;
} Item;

static int64_t num_parts(const Attention *a, int64_t r) {
  return ((int64_t)a->seq_lens[r] + PART - 1) / PART;
}

/* (row, head-in-group) pairs of a request. */
static int64_t num_pairs(const Attention *a, int64_t r) {
  return (int64_t)(a->query_start[r + 1] - a->query_start[r]) * (a->num_heads / a->num_kv_heads);
}

/* Partitions [part, end) of an item, merged in order into `total`. */
static void attend_item(const Attention *a, Item it, int64_t part, int64_t end, State total[LANES]) {
  int64_t G = a->num_heads / a->num_kv_heads, start = a->query_start[it.r];
  int64_t qlen = a->query_start[it.r + 1] - start, qn = qlen * G;
  Ctx c = {a->k_cache, a->v_cache, a->block_table + it.r * a->max_blocks, a->num_kv_heads,
           a->scale, a->softcap};
  const float *qp[LANES];
  int64_t first[LANES], last[LANES];
  for (int i = 0; i < LANES; i++) {
    int64_t g = it.g0 + i < qn ? it.g0 + i : qn - 1;
    qp[i] = a->q + (start + g / G) * a->q_row + (it.h * G + g % G) * a->q_head;
    int64_t pos = a->seq_lens[it.r] - qlen + g / G;
    last[i] = a->causal ? pos : a->seq_lens[it.r] - 1;
    first[i] = a->window ? pos - a->window + 1 : 0;
  }
  partial(&c, it.h, part, qp, first, last, total);
  for (part++; part < end; part++) {
    State st[LANES];
    partial(&c, it.h, part, qp, first, last, st);
    for (int i = 0; i < LANES; i++) merge(&total[i], &st[i]);
  }
}

static void finish_item(const Attention *a, Item it, const State total[LANES]) {
  int64_t G = a->num_heads / a->num_kv_heads, qn = num_pairs(a, it.r);
  for (int i = 0; i < LANES && it.g0 + i < qn; i++) {
    int64_t head = it.h * G + (it.g0 + i) % G;
    int64_t row = a->query_start[it.r] + (it.g0 + i) / G;
    finish(&total[i], a->sinks ? a->sinks + head : NULL,
           a->out + (row * a->num_heads + head) * HEAD_DIM);
  }
}

/* Attention of all query rows by a team: all of it call this with the same arguments. `next`: two
 * counters, 0. The output is whole when all have come to the next meeting. Returns 0, or on all of
 * them -1 when scratch memory could not be had.
 *
 * Few items and long sequences: partitions are handed out to the threads and merged afterwards.
 * Else every item walks its own. The same `partial` and `merge` calls happen either way. */
static int attend_together(const Attention *a, Member m, int64_t next[2]) {
  int64_t num_items = 0, max_parts = 1;
  for (int64_t r = 0; r < a->R; r++) {
    num_items += (num_pairs(a, r) + LANES - 1) / LANES * a->num_kv_heads;
    if (num_parts(a, r) > max_parts) max_parts = num_parts(a, r);
  }
  int split = max_parts > 1 && num_items < 4 * m.team->size;
  State *states = NULL;
  if (split) {
    states = shared_scratch(m, (size_t)num_items * max_parts * LANES * sizeof(State));
    if (!states) return -1;
  }
  for (int phase = split ? 0 : 1; phase < 2; phase++) {
    int64_t steps = phase == 0 ? max_parts : 1, n = 0;
    int64_t mine = __atomic_fetch_add(&next[phase], 1, __ATOMIC_RELAXED);
    for (Item it = {0, 0, 0}; it.r < a->R; it.r++)
      for (it.h = 0; it.h < a->num_kv_heads; it.h++)
        for (it.g0 = 0; it.g0 < num_pairs(a, it.r); it.g0 += LANES, n++)
          for (; mine < (n + 1) * steps;
               mine = __atomic_fetch_add(&next[phase], 1, __ATOMIC_RELAXED)) {
            int64_t part = mine % steps, parts = num_parts(a, it.r);
            State own[LANES], *total = split ? states + n * max_parts * LANES : own;
            if (phase == 0) {
              if (part < parts) attend_item(a, it, part, part + 1, total + part * LANES);
              continue;
            }
            if (!split) attend_item(a, it, 0, parts, total);
            for (part = 1; split && part < parts; part++)
              for (int i = 0; i < LANES; i++) merge(&total[i], &total[part * LANES + i]);
            finish_item(a, it, total);
          }
    if (phase == 0) meet(m);
  }
  return 0;
}

/* Attention of all query rows of a ragged batch.
 *   query_start [R + 1], seq_lens [R] (keys of the request, its new rows included),
 *   block_table [R, max_blocks]. Row j of request r sits at pos = seq_len - q_len + j and sees
 *   keys up to itself, or (causal 0) all seq_len; of these the ones behind pos - window, where
 *   window is not 0.
 *   sinks [num_heads], or NULL.
 * Returns 0, or -1 when scratch memory could not be had. */
int paged_attention(const float *q, float *out, const float *k_cache, const float *v_cache,
                    const int32_t *block_table, const int32_t *query_start,
                    const int32_t *seq_lens, int64_t R, int64_t max_blocks, int64_t num_heads,
                    int64_t num_kv_heads, int64_t q_row, int64_t q_head, const float *sinks,
                    float scale, float softcap, int64_t window, int causal, int threads) {
  Attention a = {q,           k_cache,   v_cache,  sinks, out,    block_table,
                 query_start, seq_lens,  R,        max_blocks,    num_heads,
                 num_kv_heads, q_row,    q_head,   window, scale, softcap,
                 causal};
  int64_t num_keys = 0;
  int failed = 0;
  for (int64_t r = 0; r < R; r++)
    num_keys += (num_pairs(&a, r) + LANES - 1) / LANES * num_kv_heads * seq_lens[r];
  Team team = {.looks = LEAST_LOOKS};
  int64_t next[2] = {0, 0};
#pragma omp parallel num_threads(threads) if (num_keys >= WORTH_THREADS) reduction(| : failed)
  {
#pragma omp single
    team.size = omp_get_num_threads();
    failed = attend_together(&a, (Member){&team, omp_get_thread_num()}, next);
  }
  free(team.scratch);
  return failed;
}
