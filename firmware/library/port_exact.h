/* No fused multiply-add and no reordering, whatever flags the surrounding project is compiled with: the same bits on
 * every board. port_library_begin verifies at run time that the compiler complied. */
#ifndef PORT_EXACT_H
#define PORT_EXACT_H

#ifdef __FAST_MATH__
#error "compile the PORT library without -ffast-math: it would train to other bits on every board"
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#endif
