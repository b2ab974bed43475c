/* Attributes and pragmas of gcc and clang. */
#ifndef LLAMAY_COMPILER_H
#define LLAMAY_COMPILER_H

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define PRAGMA(text) _Pragma(#text)
#define TARGET_BEGIN(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_END PRAGMA(clang attribute pop)
#else
#define UNROLL _Pragma("GCC unroll 12")
#define PRAGMA(text) _Pragma(#text)
#define TARGET_BEGIN(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define TARGET_END PRAGMA(GCC pop_options)
#endif

/* Keeps the compiler from computing a vector register in another order than is written. */
#if defined(__x86_64__)
#define KEEP_ORDER(vector) __asm__("" : "+x"(vector))
#endif

#endif
