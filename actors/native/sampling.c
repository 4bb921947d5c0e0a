/* What the sampler does with every id of a vocabulary, float32 rows of scores.
 *
 * Built by actors/native/build.py. actors/sampling/scores.py has the same functions in torch: they
 * are the definition, this is the fast form, and a test holds the two together. A row is worked on
 * by one thread, on its own, in blocks of B columns: its result depends on nothing else.
 *
 * Row m of a call is x[index[m] * stride ...] of V columns, and its score of a column is
 * x / temperature[m], rounded as float32. Compile without contraction of a * b + c: masses must be
 * the same integers in C and in torch.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define W 8  /* floats a vector */
#define B 64 /* columns a block; arrays by column are padded to a multiple */
#define BINS 1024
/* Columns to look at, below which waking threads takes longer: for passes that only compare, and
 * for those that compute. */
#define WORTH_COMPARING (1 << 19)
#define WORTH_COMPUTING (1 << 16)

typedef float vf __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4)));
typedef float vf4 __attribute__((vector_size(16), aligned(4)));
typedef double vd __attribute__((vector_size(32), aligned(8)));
typedef int64_t vl __attribute__((vector_size(32), aligned(8)));

static inline vd wide(double a) { return (vd){a, a, a, a}; }
static inline vf splat(float a) { return (vf){a, a, a, a, a, a, a, a}; }
static inline vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
static inline int any(vi m) {
  return (m[0] | m[1] | m[2] | m[3] | m[4] | m[5] | m[6] | m[7]) != 0;
}
static inline float largest(const float *s) {
  vf m = *(const vf *)s;
  for (int i = W; i < B; i += W) m = pick(*(const vf *)(s + i) > m, *(const vf *)(s + i), m);
  float best = m[0];
  for (int i = 1; i < W; i++) best = m[i] > best ? m[i] : best;
  return best;
}

/* The block of columns [c, c + B) of a row; behind the last column -inf, in `spare`. */
static inline const float *block(const float *x, int64_t c, int64_t V, float spare[B]) {
  if (c + B <= V) return x + c;
  for (int i = 0; i < B; i++) spare[i] = c + i < V ? x[c + i] : -INFINITY;
  return spare;
}

static inline void divide(const float *x, float temperature, float s[B]) {
  for (int i = 0; i < B; i += W) *(vf *)(s + i) = *(const vf *)(x + i) / splat(temperature);
}

/* Largest value and its column, the lowest id among equal ones; NaN if the row has one. */
void row_max(const float *x, int64_t stride, const int64_t *index, int64_t M, int64_t V,
             const int64_t *ids, float *top, int64_t *column, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) \
    if (M > 1 && M * V > WORTH_COMPARING)
  for (int64_t m = 0; m < M; m++) {
    const float *row = x + index[m] * stride;
    float spare[B], best = -INFINITY;
    int64_t found = 0;
    vi nan = {0};
    for (int64_t c = 0; c < V; c += B) {
      const float *s = block(row, c, V, spare);
      for (int i = 0; i < B; i += W) nan |= *(const vf *)(s + i) != *(const vf *)(s + i);
      float here = largest(s);
      if (!(here >= best)) continue;
      for (int i = 0; i < B && c + i < V; i++)
        if (s[i] == here && (here > best || ids[c + i] < ids[found])) {
          best = here;
          found = c + i;
        }
    }
    top[m] = any(nan) ? NAN : best;
    column[m] = found;
  }
}

/* The k-th largest of a[0, n), 0-based, by partition in place; n > k. */
static float kth(float *a, int64_t n, int64_t k) {
  int64_t lo = 0, hi = n - 1;
  while (lo < hi) {
    float p = a[lo + (hi - lo) / 2];
    int64_t i = lo, j = hi;
    while (i <= j) {
      while (a[i] > p) i++;
      while (a[j] < p) j--;
      if (i <= j) {
        float t = a[i];
        a[i++] = a[j];
        a[j--] = t;
      }
    }
    if (k <= j) hi = j;
    else if (k >= i) lo = i;
    else break;
  }
  return a[k];
}

typedef struct {
  float value;
  int64_t column, id;
} Entry;

static int descending(const void *a, const void *b) {
  const Entry *p = a, *q = b;
  if (p->value != q->value) return p->value > q->value ? -1 : 1;
  return p->id < q->id ? -1 : p->id > q->id;
}

/* The n largest scores, largest first, equal logits by id, and their columns; -inf and column 0
 * where a row has fewer finite ones. Returns 0, or -1 when scratch memory could not be had. */
int top_n(const float *x, int64_t stride, const int64_t *index, const float *temperature,
          int64_t M, int64_t V, const int64_t *ids, int64_t n, float *values, int64_t *columns,
          int threads) {
  int64_t blocks = (V + B - 1) / B, failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) \
    if (M > 1 && M * V > WORTH_COMPUTING)
  for (int64_t m = 0; m < M; m++) {
    const float *row = x + index[m] * stride;
    for (int64_t i = 0; i < n; i++) values[m * n + i] = -INFINITY, columns[m * n + i] = 0;
    float spare[B], *maxima = malloc(2 * blocks * sizeof(float)), *kept = NULL;
    Entry *entries = NULL;
    if (!maxima) goto out_of_memory;
    for (int64_t b = 0; b < blocks; b++) maxima[b] = largest(block(row, b * B, V, spare));
    /* At least n scores reach the n-th largest block maximum: nothing below it can be wanted. */
    float bound = -INFINITY;
    if (blocks >= n) {
      memcpy(maxima + blocks, maxima, blocks * sizeof(float));
      bound = kth(maxima + blocks, blocks, n - 1);
    }
    int64_t count = 0, room = 0;
    for (int64_t b = 0; b < blocks; b++) room += maxima[b] >= bound ? B : 0;
    kept = malloc((room + 1) * sizeof(float));
    if (!kept) goto out_of_memory;
    for (int64_t b = 0; b < blocks; b++) {
      if (!(maxima[b] >= bound)) continue;
      const float *s = block(row, b * B, V, spare);
      for (int i = 0; i < B; i++) {
        kept[count] = s[i];
        count += s[i] >= bound && s[i] > -INFINITY;
      }
    }
    if (count == 0) goto done;
    float last = count > n ? kth(kept, count, n - 1) : bound;
    int64_t larger = 0, equal = 0;
    for (int64_t i = 0; i < count; i++) larger += kept[i] > last, equal += kept[i] == last;
    entries = malloc((larger + equal) * sizeof(Entry));
    if (!entries) goto out_of_memory;
    count = 0;
    for (int64_t b = 0; b < blocks; b++) {
      if (!(maxima[b] >= last)) continue;
      const float *s = block(row, b * B, V, spare);
      for (int i = 0; i < B; i++)
        if (s[i] >= last && s[i] > -INFINITY)
          entries[count++] = (Entry){s[i], b * B + i, ids[b * B + i]};
    }
    qsort(entries, count, sizeof(Entry), descending);
    for (int64_t i = 0; i < n && i < count; i++) {
      values[m * n + i] = entries[i].value / temperature[m];
      columns[m * n + i] = entries[i].column;
    }
    goto done;
  out_of_memory:
#pragma omp atomic write
    failed = 1;
  done:
    free(maxima);
    free(kept);
    free(entries);
  }
  return failed ? -1 : 0;
}

/* exp(s - top) in units of 2^-44, s <= top, to the nearest integer. Only operations that every
 * machine rounds alike, in the same order as `masses` in scores.py. */
static void masses(const float *s, float top, int64_t mass[B]) {
  const vd least = wide(-40.0), to_int = wide(0x1.8p52);
  for (int i = 0; i < B; i += 4) {
    vd d = __builtin_convertvector(*(const vf4 *)(s + i), vd) - wide(top);
    vl below = d < least;
    d = (vd)(((vl)least & below) | ((vl)d & ~below));
    vd t = d * wide(1.4426950408889634) + to_int, n = t - to_int; /* n: nearest integer */
    vd r = d - n * wide(0x1.62e42feep-1);
    r = r - n * wide(0x1.a39ef35793c76p-33);
    vd rr = r * r;
    vd even = wide(1.0 / 40320.0), odd = wide(1.0 / 362880.0);
    even = even * rr + wide(1.0 / 720.0), odd = odd * rr + wide(1.0 / 5040.0);
    even = even * rr + wide(1.0 / 24.0), odd = odd * rr + wide(1.0 / 120.0);
    even = even * rr + wide(0.5), odd = odd * rr + wide(1.0 / 6.0);
    even = even * rr + wide(1.0), odd = odd * rr + wide(1.0);
    vl scale = ((vl)t << 52) + ((int64_t)(1023 + 44) << 52); /* 2^(n + 44) */
    /* The integer stands in the low bits of the sum, rounded to nearest. */
    vd sum = (odd * r + even) * (vd)scale + wide(0x1p52);
    *(vl *)(mass + i) = (vl)sum - 0x4330000000000000;
  }
}

/* Masses of loose values [M, C], for rows whose largest scores are `top`. */
void weigh(const float *values, const float *top, int64_t M, int64_t C, int64_t *mass) {
  float spare[B];
  int64_t weight[B];
  for (int64_t m = 0; m < M; m++)
    for (int64_t c = 0; c < C; c += B) {
      masses(block(values + m * C, c, C, spare), top[m], weight);
      memcpy(mass + m * C + c, weight, (c + B <= C ? B : C - c) * sizeof(int64_t));
    }
}

/* A score's distance from the largest in 1/32, below BINS: grows as scores fall. */
static inline void distances(const float *s, float top, int32_t distance[B]) {
  for (int i = 0; i < B; i += W) {
    vf d = (splat(top) - *(const vf *)(s + i)) * splat(32.0f);
    d = pick(d < splat(BINS - 1.0f), d, splat(BINS - 1.0f));
    *(vi *)(distance + i) = __builtin_convertvector(d, vi);
  }
}

/* Weights of the scores that are at least `lowest`, by distance from `top`: masses, or 1 each. */
void by_distance(const float *x, int64_t stride, const int64_t *index, const float *temperature,
                 int64_t M, int64_t V, const float *lowest, const float *top, int64_t is_mass,
                 int64_t *bins, int threads) {
  memset(bins, 0, M * BINS * sizeof(int64_t));
  int64_t half = (V / 2 + B - 1) / B * B;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads) \
    if (M * V > WORTH_COMPUTING)
  for (int64_t m = 0; m < M; m++)
    for (int part = 0; part < 2; part++) {
      const float *row = x + index[m] * stride;
      float spare[B], s[B], least = lowest[m];
      int32_t distance[B];
      int64_t weight[B], sums[2][BINS] = {{0}}; /* two, so that neighbours do not wait */
      if (is_mass && least < top[m] - 40.0f) least = top[m] - 40.0f; /* below, a mass is 0 */
      for (int64_t c = part ? half : 0, end = part ? V : half; c < end; c += B) {
        divide(block(row, c, V, spare), temperature[m], s);
        if (!(largest(s) >= least)) continue;
        distances(s, top[m], distance);
        if (is_mass) masses(s, top[m], weight);
        for (int i = 0; i < B; i++)
          weight[i] = (s[i] >= least) & (c + i < V) ? (is_mass ? weight[i] : 1) : 0;
        for (int i = 0; i < B; i += 2) {
          sums[0][distance[i]] += weight[i];
          sums[1][distance[i + 1]] += weight[i + 1];
        }
      }
#pragma omp critical
      for (int i = 0; i < BINS; i++) bins[m * BINS + i] += sums[0][i] + sums[1][i];
    }
}

/* float32 as uint32 in the same order; -0 and 0 share a key. */
static inline uint32_t ordered(float s) {
  uint32_t b;
  s += 0.0f;
  memcpy(&b, &s, 4);
  return b >> 31 ? 0u - b : b | 0x80000000u;
}

static inline float score_of(uint32_t key) {
  uint32_t b = key >> 31 ? key & 0x7fffffffu : 0u - key;
  float s;
  memcpy(&s, &b, 4);
  return s;
}

/* Weights by (last - key) >> shift, of the scores at one distance whose keys are in
 * (last - width, last]; at most BINS bins. */
void by_key(const float *x, int64_t stride, const int64_t *index, const float *temperature,
            int64_t M, int64_t V, const float *top, int64_t is_mass, const int64_t *distance,
            const int64_t *last, int64_t width, int64_t shift, int64_t *bins, int threads) {
  memset(bins, 0, M * BINS * sizeof(int64_t));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) \
    if (M > 1 && M * V > WORTH_COMPUTING)
  for (int64_t m = 0; m < M; m++) {
    const float *row = x + index[m] * stride;
    uint32_t largest_key = (uint32_t)last[m], most = (uint32_t)(width - 1);
    uint32_t below[B], digit[2 * B];
    float spare[B], s[B], kept[2 * B];
    int32_t apart[B], hit[B], want = (int32_t)distance[m];
    int64_t weight[B], *to = bins + m * BINS;
    int count = 0;
    /* Scores of those keys; a row's keys may be fewer than `width`, down to that of -inf. */
    uint32_t infinite = ordered(-INFINITY), room = largest_key - infinite;
    vf high = splat(score_of(largest_key));
    vf low = splat(score_of(most < room ? largest_key - most : infinite));
    /* What counts is moved together first, and weighed a block at a time. */
    for (int64_t c = 0; c < V || count > 0; c += B) {
      if (c < V) {
        int32_t some = 0;
        divide(block(row, c, V, spare), temperature[m], s);
        vi near = {0};
        for (int i = 0; i < B; i += W) near |= (*(vf *)(s + i) >= low) & (*(vf *)(s + i) <= high);
        if (!any(near)) continue;
        distances(s, top[m], apart);
        for (int i = 0; i < B; i++) {
          uint32_t key = ordered(s[i]);
          below[i] = largest_key - key;
          hit[i] = (apart[i] == want) & (key <= largest_key) & (below[i] <= most);
          some |= hit[i];
        }
        if (!some) continue;
        for (int i = 0; i < B && c + i < V; i++) {
          kept[count] = s[i];
          digit[count] = below[i] >> shift;
          count += hit[i];
        }
        if (count < B) continue;
      }
      int done = count < B ? count : B;
      for (int i = done; i < B; i++) kept[i] = -INFINITY;
      if (is_mass) masses(kept, top[m], weight);
      for (int i = 0; i < done; i++) to[digit[i]] += is_mass ? weight[i] : 1;
      count -= done;
      memmove(kept, kept + done, count * sizeof(float));
      memmove(digit, digit + done, count * sizeof(uint32_t));
    }
  }
}

static inline uint64_t mix(uint64_t h) {
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
  return h ^ (h >> 31);
}

static double noisy(float s, uint64_t hash) {
  double u = ((double)(hash >> 12) + 0.5) * 0x1p-52;
  return (double)s - log(-log(u));
}

/* The largest score + Gumbel noise among the scores that are at least `lowest`, and its column,
 * the lowest id among equal ones; -inf and column 0 where no score is.
 *
 * `key` [M] is the row's noise key, `spots` [V padded] id * 0x9E37... as in noise.py, `start` [M]
 * the column of the row's largest score.
 *
 * The two logarithms of the noise are taken only where a column can win. With v = 1 - u, noise is
 * -log(-log u) <= -log v. So a column loses to the best so far, `best`, if s - log v < best, that
 * is if v > exp(s - best). v is taken from 31 bits of the hash, rounded down; the exponential is
 * 2^y <= (1 + frac y) 2^floor y, which is what the float with the bits (y + 127) 2^23 is worth, for
 * y a little above its rounding errors (together below 5e-5: |y| <= 126, and adding 127 rounds to
 * 2^-18). About two columns a row pass beyond those that really raise the best. */
void draw(const float *x, int64_t stride, const int64_t *index, const float *temperature,
          int64_t M, int64_t V, const int64_t *ids, const uint64_t *spots, const float *lowest,
          const int64_t *key, const int64_t *start, double *total, int64_t *column, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) \
    if (M > 1 && M * V > WORTH_COMPUTING)
  for (int64_t m = 0; m < M; m++) {
    const float *row = x + index[m] * stride;
    uint64_t k = (uint64_t)key[m], hash[B];
    int64_t found = start[m];
    float spare[B], s[B], first = row[found] / temperature[m];
    double best = -INFINITY;
    total[m] = best;
    column[m] = 0;
    if (!(first >= lowest[m]) || first == -INFINITY) continue;
    best = noisy(first, mix(spots[found] + k));
    for (int64_t c = 0; c < V; c += B) {
      divide(block(row, c, V, spare), temperature[m], s);
      /* Noise is below 37: u is at most 1 - 2^-53. */
      float under = nextafterf((float)best, -INFINITY), least = under - 37.0f;
      if (least < lowest[m]) least = lowest[m];
      if (!(largest(s) >= least)) continue;
      int32_t rest[B], hot[B];
      for (int i = 0; i < B; i++) {
        hash[i] = mix(spots[c + i] + k);
        rest[i] = (int32_t)(~hash[i] >> 33);
      }
      vi found_hot = {0};
      for (int i = 0; i < B; i += W) {
        vf score = *(vf *)(s + i);
        vf y = (score - splat(under)) * splat(1.44269504f) + splat(1e-4f);
        y = pick(y > splat(-126.0f), y, splat(-126.0f));
        y = pick(y < splat(1.0f), y, splat(1.0f));
        vi bits = __builtin_convertvector((y + splat(127.0f)) * splat(8388608.0f), vi);
        vf v = __builtin_convertvector(*(vi *)(rest + i), vf) * splat(0x1p-31f * (1 - 0x1p-23f));
        vi is_hot = (score >= splat(least)) & (v <= (vf)bits);
        *(vi *)(hot + i) = is_hot;
        found_hot |= is_hot;
      }
      if (!any(found_hot)) continue;
      for (int i = 0; i < B && c + i < V; i++) {
        if (!hot[i] || c + i == found) continue;
        double value = noisy(s[i], hash[i]);
        if (value > best || (value == best && ids[c + i] < ids[found])) {
          best = value;
          found = c + i;
        }
      }
    }
    total[m] = best;
    column[m] = found;
  }
}
