/* Block formats of GGUF files, as `FORMAT_load` of linear.c wants them.
 *
 * A panel is 16 rows of the file, block by block, each field of the 16 blocks turned over: the 16
 * rows' first unit of it, then their second, and so on. A unit is two bytes in a field of float16,
 * and one byte everywhere else. So a panel is as large as the rows were, and what is one input's of
 * 16 outputs lies side by side. Packing is `pack_blocks` in actors/model/blocks.py.
 *
 * The values are those of gguf-py's `dequantize`, with its roundings in its order.
 */
typedef uint64_t wide __attribute__((vector_size(32), aligned(1), may_alias));
typedef int8_t wide_bytes __attribute__((vector_size(32), aligned(1)));
typedef uint8_t row_bytes __attribute__((vector_size(16), aligned(1)));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4)));
typedef int8_t vb __attribute__((vector_size(W), aligned(1)));
typedef uint16_t vh __attribute__((vector_size(2 * W), aligned(2)));

#define SMALL 32 /* inputs that are unpacked at a time, of all formats here */

/* W bytes with sign. gcc takes the general form apart. */
ALWAYS vf from_bytes(const void *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif defined(__aarch64__)
  int32_t four;
  memcpy(&four, p, sizeof four);
  int16x8_t twice = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(twice)));
#else
  return __builtin_convertvector(__builtin_convertvector(*(const vb *)p, vi), vf);
#endif
}

/* W float16. */
ALWAYS vf from_halves(const void *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
#else
  vi h = __builtin_convertvector(*(const vh *)p, vi), size = (h & 0x7fff) << 13;
  vi v = (vi)((vf)size * 0x1p112f) | ((size >= 31 << 23) & 0x7f800000); /* infinity, not 2^16 */
  return (vf)(v | (h & 0x8000) << 16);
#endif
}

/* --- bytes of 32 inputs, q [32][16] ------------------------------------------------------------- */

#define EACH(n) for (int i = 0; i < (n); i += 32)
#define WIDE(p) (*(const wide *)((const uint8_t *)(p) + i))
#define BYTES(p) (*(wide_bytes *)((int8_t *)(p) + i))
#define ALL(byte) (0x0101010101010101u * (byte))

/* The first 16 inputs in the low halves of bytes, the others in the high ones; where `fifth` is
 * given, a bit more of each, as `packed_bits` of actors/model/blocks.py lays them. */
ALWAYS void two_halves(const uint8_t *from, const uint8_t *fifth, int8_t *q, int less) {
  wide bits[2] = {{0}};
  if (fifth) memcpy(bits, fifth, sizeof bits);
#pragma GCC unroll 8
  EACH(16 * P) {
    int b = i / 32;
    wide w = WIDE(from), low = w & ALL(15), high = w >> 4 & ALL(15);
    if (fifth) {
      low |= (b < 4 ? bits[0] << (4 - b) : bits[0] >> (b - 4)) & ALL(16);
      high |= (b < 4 ? bits[1] << (4 - b) : bits[1] >> (b - 4)) & ALL(16);
    }
    BYTES(q) = (wide_bytes)low - (int8_t)less;
    BYTES(q + 16 * P) = (wide_bytes)high - (int8_t)less;
  }
}

/* Four bits of each of 32 bytes, from bit `shift` on, and above them those of `mask` of other bytes,
 * from bit `high_shift` on. */
ALWAYS void low_and_high(const uint8_t *low, int shift, const uint8_t *high, int high_shift,
                         int mask, int8_t *q, int less) {
  EACH(SMALL * P) {
    wide w = WIDE(low) >> shift & ALL(15);
    if (mask) w |= (WIDE(high) >> high_shift & ALL((uint64_t)mask)) << 4;
    BYTES(q) = (wide_bytes)w - (int8_t)less;
  }
}

/* --- and their values --------------------------------------------------------------------------- */

/* d * q for `num` inputs. */
ALWAYS void times(const int8_t *q, int num, const vf *d, float *to) {
  for (int k = 0; k < num; k++)
    for (int v = 0; v < NV; v++) OUT(to + k * P + v * W) = d[v] * from_bytes(q + k * P + v * W);
}

/* d * q + m, rounded twice. */
ALWAYS void times_plus(const int8_t *q, int num, const vf *d, const vf *m, float *to) {
  for (int k = 0; k < num; k++)
    for (int v = 0; v < NV; v++) {
      vf product = d[v] * from_bytes(q + k * P + v * W);
      IN_REGISTER(product); /* else one operation is made of the two, with one rounding */
      OUT(to + k * P + v * W) = product + m[v];
    }
}

ALWAYS void halves(const uint8_t *from, vf *to) {
  for (int v = 0; v < NV; v++) to[v] = from_halves(from + v * W * 2);
}

/* --- formats ------------------------------------------------------------------------------------
 * One that gives 32 inputs at a time: `block` inputs in `size` bytes a row. */
#define SMALL_FORMAT(F, block, size)                                                              \
  enum { F##_GROUP = SMALL, F##_SPACE = CHUNK };                                                  \
  static int64_t F##_bytes(int64_t K) { return K / block * size * P; }                            \
  ALWAYS const float *F##_load(const uint8_t *panel, int64_t k, int64_t num, int64_t K,           \
                               float *space) {                                                    \
    (void)K;                                                                                      \
    for (int64_t i = 0; i < num; i += SMALL)                                                      \
      F##_small(panel + (k + i) / block * size * P, (k + i) % block / SMALL, space + i * P);      \
    return space;                                                                                 \
  }

#define D (2 * P) /* bytes of a float16 of each output */

ALWAYS void Q4_0_small(const uint8_t *p, int g, float *to) {
  (void)g;
  int8_t q[SMALL * P];
  vf d[NV];
  halves(p, d);
  two_halves(p + D, 0, q, 8);
  times(q, SMALL, d, to);
}
SMALL_FORMAT(Q4_0, 32, 18)

ALWAYS void Q4_1_small(const uint8_t *p, int g, float *to) {
  (void)g;
  int8_t q[SMALL * P];
  vf d[NV], m[NV];
  halves(p, d), halves(p + D, m);
  two_halves(p + 2 * D, 0, q, 0);
  times_plus(q, SMALL, d, m, to);
}
SMALL_FORMAT(Q4_1, 32, 20)

ALWAYS void Q5_0_small(const uint8_t *p, int g, float *to) {
  (void)g;
  int8_t q[SMALL * P];
  vf d[NV];
  halves(p, d);
  two_halves(p + D + 4 * P, p + D, q, 16);
  times(q, SMALL, d, to);
}
SMALL_FORMAT(Q5_0, 32, 22)

ALWAYS void Q5_1_small(const uint8_t *p, int g, float *to) {
  (void)g;
  int8_t q[SMALL * P];
  vf d[NV], m[NV];
  halves(p, d), halves(p + D, m);
  two_halves(p + 2 * D + 4 * P, p + 2 * D, q, 0);
  times_plus(q, SMALL, d, m, to);
}
SMALL_FORMAT(Q5_1, 32, 24)

ALWAYS void Q8_0_small(const uint8_t *p, int g, float *to) {
  (void)g;
  vf d[NV];
  halves(p, d);
  times((const int8_t *)p + D, SMALL, d, to);
}
SMALL_FORMAT(Q8_0, 32, 34)

/* Scale and minimum of group g of 8, from d, dmin and 12 bytes of six-bit numbers behind them. The
 * minimum is given with its sign turned. */
ALWAYS void scale_and_minimum(const uint8_t *p, int g, vf *d, vf *m) {
  const row_bytes *s = (const row_bytes *)(p + 2 * D);
  row_bytes two[2];
  two[0] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 2 & 0x30);
  two[1] = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 2 & 0x30);
  halves(p, d), halves(p + D, m);
  for (int v = 0; v < NV; v++) {
    d[v] = d[v] * from_bytes((const uint8_t *)&two[0] + v * W);
    m[v] = -(m[v] * from_bytes((const uint8_t *)&two[1] + v * W));
  }
}

ALWAYS void Q4_K_small(const uint8_t *p, int g, float *to) {
  int8_t q[SMALL * P];
  vf d[NV], m[NV];
  scale_and_minimum(p, g, d, m);
  low_and_high(p + 2 * D + (12 + g / 2 * SMALL) * P, g % 2 * 4, 0, 0, 0, q, 0);
  times_plus(q, SMALL, d, m, to);
}
SMALL_FORMAT(Q4_K, 256, 144)

ALWAYS void Q5_K_small(const uint8_t *p, int g, float *to) {
  int8_t q[SMALL * P];
  vf d[NV], m[NV];
  const uint8_t *high = p + 2 * D + 12 * P;
  scale_and_minimum(p, g, d, m);
  low_and_high(high + (SMALL + g / 2 * SMALL) * P, g % 2 * 4, high, g, 1, q, 0);
  times_plus(q, SMALL, d, m, to);
}
SMALL_FORMAT(Q5_K, 256, 176)

ALWAYS void Q6_K_small(const uint8_t *p, int g, float *to) {
  int8_t q[SMALL * P];
  vf d[NV], scaled[NV];
  int half = g / 4, quarter = g % 4;
  const uint8_t *low = p + (half * 64 + quarter % 2 * SMALL) * P;
  const uint8_t *high = p + (128 + half * SMALL) * P, *scales = p + (192 + g * 2) * P;
  low_and_high(low, quarter / 2 * 4, high, quarter * 2, 3, q, 32);
  halves(p + 208 * P, d);
  for (int i = 0; i < 2; i++) { /* a scale for 16 inputs */
    for (int v = 0; v < NV; v++) scaled[v] = d[v] * from_bytes(scales + i * P + v * W);
    times(q + i * 16 * P, 16, scaled, to + i * 16 * P);
  }
}
SMALL_FORMAT(Q6_K, 256, 210)

/* float16 [K][16]. */
enum { F16_GROUP = SMALL, F16_SPACE = CHUNK };
ALWAYS const float *F16_load(const uint8_t *panel, int64_t k, int64_t num, int64_t K, float *space) {
  (void)K;
  for (int64_t i = 0; i < num * P; i += W) OUT(space + i) = from_halves(panel + (k * P + i) * 2);
  return space;
}
static int64_t F16_bytes(int64_t K) { return K * P * 2; }
