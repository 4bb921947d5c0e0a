/* Vectors of the machine's width, as gcc and clang have them. */
#include <stdint.h>
#if defined(__AVX512F__)
#define W 16    /* floats a vector */
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif
#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* The compiler takes it that `v` lies in a register here, and knows nothing of how it came there: so a
 * number that is used often is loaded once, and an operation on it stays an operation of its own. */
#if defined(__x86_64__)
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define IN_REGISTER(v) __asm__("" : "+m"(v))
#endif

typedef float vf __attribute__((vector_size(4 * W), aligned(4)));
