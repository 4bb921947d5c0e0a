/* Vectors of the machine's width, as gcc and clang have them. */
#if defined(__AVX512F__)
#define W 16    /* floats a vector */
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif

typedef float vf __attribute__((vector_size(4 * W), aligned(4)));
