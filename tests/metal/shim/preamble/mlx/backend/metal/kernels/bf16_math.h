// In place of MLX's, which is for compilers without bfloat.
#pragma once
inline uint16_t bfloat16_to_uint16(const bfloat16_t value) { return value.bits; }
inline bfloat16_t uint16_to_bfloat16(const uint16_t bits) { return as_type<bfloat16_t>(bits); }
