/* Which instruction sets the compiler can emit, and how a loop is compiled once per level. */
#ifndef PORT_PACKING_SIMD_H
#define PORT_PACKING_SIMD_H

#include <string.h>

#include "packing.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the packed forms are little-endian"
#endif

#if defined(__x86_64__)
#define PACK_X86 1
#include <immintrin.h>
#define TARGET_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi,bmi2,popcnt")))
#elif defined(__aarch64__)
#define PACK_NEON 1
#include <arm_neon.h>
#endif

/* Inlined into one function per level, so that the compiler's own vectoriser works with that level's instructions. */
#define FOR_EVERY_LEVEL static inline __attribute__((always_inline))

/* The scalar reference is not vectorised. Compilers without this attribute may vectorise it, which changes no byte. */
#if defined(__GNUC__) && !defined(__clang__)
#define TARGET_SCALAR __attribute__((optimize("no-tree-vectorize")))
#else
#define TARGET_SCALAR
#endif

static inline uint64_t load_word(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static inline void store_word(uint8_t *to, uint64_t word) { memcpy(to, &word, sizeof word); }

#endif
