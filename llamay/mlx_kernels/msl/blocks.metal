// Readers of GGUF's weight blocks, as they lie in the file (ggml's ggml-common.h); FORMAT is ggml's
// type id. A row is cut into units of 16 weights, two halves of 8: columns first(unit) + 0..7 and
// first(unit) + GAP + 0..7, so that a unit's quants lie in as few bytes as its format allows.
// A weight is scale * q + minimum, with a scale and a minimum for each half.
namespace llamay {

struct Eight {  // one half of a unit
    float4 q[2];
    float scale, minimum;
};

template <int FORMAT>
struct Blocks;

// 4 bytes at an address that ALIGNMENT (2 or 4) divides.
template <int ALIGNMENT>
inline uint load_uint(const device uchar* at) {
    if (ALIGNMENT == 4) return *reinterpret_cast<const device uint*>(at);
    const device ushort* halves = reinterpret_cast<const device ushort*>(at);
    return uint(halves[0]) | uint(halves[1]) << 16;
}

inline float load_half(const device uchar* at) {
    return float(*reinterpret_cast<const device half*>(at));
}

inline float4 unsigned_bytes(uint word) { return float4(as_type<uchar4>(word)); }
inline float4 signed_bytes(uint word) { return float4(as_type<char4>(word)); }
// The low or the high half of each byte.
template <int HALF>
inline uint nibbles(uint word) { return word >> 4 * HALF & 0x0f0f0f0fu; }
// Bits 0..3 of a number as bit 4 of 4 bytes.
inline uint spread_to_fifth(uint bits) {
    return (bits & 1u) << 4 | (bits & 2u) << 11 | (bits & 4u) << 18 | (bits & 8u) << 25;
}

// --- floats ---

struct FloatUnits {
    enum { LENGTH = 1, GAP = 8, HAS_MINIMUM = 0 };
    static int first(int unit) { return unit * 16; }
};

template <>
struct Blocks<0> : FloatUnits {  // F32
    enum { BYTES = 4 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device float4* at = reinterpret_cast<const device float4*>(row + unit * 64 + HALF * 32);
        for (int i = 0; i < 2; i++) w.q[i] = at[i];
        w.scale = 1.0f;
    }
};

template <>
struct Blocks<1> : FloatUnits {  // F16
    enum { BYTES = 2 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device half4* at = reinterpret_cast<const device half4*>(row + unit * 32 + HALF * 16);
        for (int i = 0; i < 2; i++) w.q[i] = float4(at[i]);
        w.scale = 1.0f;
    }
};

template <>
struct Blocks<30> : FloatUnits {  // BF16
    enum { BYTES = 2 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device ushort4* at = reinterpret_cast<const device ushort4*>(row + unit * 32 + HALF * 16);
        for (int i = 0; i < 2; i++) w.q[i] = as_type<float4>(uint4(at[i]) << 16);
        w.scale = 1.0f;
    }
};

// --- blocks of 32: byte j of 16 holds weight j in its low half and weight j + 16 in its high half ---

struct NibbleUnits {
    enum { LENGTH = 32, GAP = 16 };
    static int first(int unit) { return unit / 2 * 32 + unit % 2 * 8; }
};

template <int ALIGNMENT, int HALF>
inline void four_bits(const device uchar* quants, thread Eight& w) {
    for (int i = 0; i < 2; i++) {
        w.q[i] = unsigned_bytes(nibbles<HALF>(load_uint<ALIGNMENT>(quants + 4 * i)));
    }
}

// The same with a fifth bit for each weight: bit i of `fifth` belongs to weight i of the unit's block.
template <int ALIGNMENT, int HALF>
inline void five_bits(const device uchar* quants, uint fifth, thread Eight& w) {
    for (int i = 0; i < 2; i++) {
        const uint high = spread_to_fifth(fifth >> (16 * HALF + 4 * i));
        w.q[i] = unsigned_bytes(nibbles<HALF>(load_uint<ALIGNMENT>(quants + 4 * i)) | high);
    }
}

inline void subtract(float offset, thread Eight& w) {
    for (int i = 0; i < 2; i++) w.q[i] -= offset;
}

template <>
struct Blocks<2> : NibbleUnits {  // Q4_0: f16 d, u8 q[16]
    enum { BYTES = 18, HAS_MINIMUM = 0 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 2 * BYTES;
        four_bits<2, HALF>(block + 2 + unit % 2 * 8, w);
        subtract(8.0f, w);
        w.scale = load_half(block);
    }
};

template <>
struct Blocks<3> : NibbleUnits {  // Q4_1: f16 d, f16 m, u8 q[16]
    enum { BYTES = 20, HAS_MINIMUM = 1 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 2 * BYTES;
        four_bits<4, HALF>(block + 4 + unit % 2 * 8, w);
        w.scale = load_half(block);
        w.minimum = load_half(block + 2);
    }
};

template <>
struct Blocks<6> : NibbleUnits {  // Q5_0: f16 d, u32 fifth bits, u8 q[16]
    enum { BYTES = 22, HAS_MINIMUM = 0 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 2 * BYTES;
        const int start = unit % 2 * 8;
        five_bits<2, HALF>(block + 6 + start, load_uint<2>(block + 2) >> start, w);
        subtract(16.0f, w);
        w.scale = load_half(block);
    }
};

template <>
struct Blocks<7> : NibbleUnits {  // Q5_1: f16 d, f16 m, u32 fifth bits, u8 q[16]
    enum { BYTES = 24, HAS_MINIMUM = 1 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 2 * BYTES;
        const int start = unit % 2 * 8;
        five_bits<4, HALF>(block + 8 + start, load_uint<4>(block + 4) >> start, w);
        w.scale = load_half(block);
        w.minimum = load_half(block + 2);
    }
};

template <>
struct Blocks<8> {  // Q8_0: f16 d, i8 q[32]
    enum { LENGTH = 32, GAP = 8, BYTES = 34, HAS_MINIMUM = 0 };
    static int first(int unit) { return unit * 16; }
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 2 * BYTES;
        const device uchar* quants = block + 2 + unit % 2 * 16 + HALF * 8;
        for (int i = 0; i < 2; i++) w.q[i] = signed_bytes(load_uint<2>(quants + 4 * i));
        w.scale = load_half(block);
    }
};

constant float IQ4_VALUES[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                                 1.0f, 13.0f, 25.0f, 38.0f, 53.0f, 69.0f, 89.0f, 113.0f};

template <int ALIGNMENT, int HALF>
inline void iq4_values(const device uchar* quants, thread Eight& w) {
    for (int i = 0; i < 2; i++) {
        const uchar4 index = as_type<uchar4>(nibbles<HALF>(load_uint<ALIGNMENT>(quants + 4 * i)));
        w.q[i] = float4(IQ4_VALUES[index.x], IQ4_VALUES[index.y], IQ4_VALUES[index.z], IQ4_VALUES[index.w]);
    }
}

template <>
struct Blocks<20> : NibbleUnits {  // IQ4_NL: f16 d, u8 q[16], indices of IQ4_VALUES
    enum { BYTES = 18, HAS_MINIMUM = 0 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 2 * BYTES;
        iq4_values<2, HALF>(block + 2 + unit % 2 * 8, w);
        w.scale = load_half(block);
    }
};

}  // namespace llamay
