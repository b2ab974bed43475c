// Readers of GGUF's blocks of 256 weights (see blocks.metal for what a reader is).
namespace llamay {

// Where unit 0..15 of a block lies: its group of 128 weights, which of the group's pairs of 32, and
// which 8 of them.
struct Place {
    int group, pair, byte;
};

inline Place place_of(int unit) { return Place{unit / 8 % 2, unit / 4 % 2, unit % 4 * 8}; }

struct Units64 {  // byte l of a group's 32 holds weights l and l + 32
    enum { LENGTH = 256, GAP = 32, HAS_MINIMUM = 1 };
    static int first(int unit) { return unit / 4 * 64 + unit % 4 * 8; }
};

// Scale and minimum 0..7 of a Q4_K or Q5_K block: f16 d, f16 dmin, then 6 bits each in 12 bytes.
inline void packed_scale(const device uchar* block, int index, thread Eight& w) {
    const device uchar* packed = block + 4;
    int scale = packed[index] & 63, minimum = packed[index + 4] & 63;
    if (index >= 4) {
        scale = (packed[index + 4] & 15) | packed[index - 4] >> 6 << 4;
        minimum = packed[index + 4] >> 4 | packed[index] >> 6 << 4;
    }
    w.scale = load_half(block) * float(scale);
    w.minimum = -load_half(block + 2) * float(minimum);
}

template <>
struct Blocks<12> : Units64 {  // Q4_K: scales, u8 q[128]
    enum { BYTES = 144 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 16 * BYTES;
        four_bits<4, HALF>(block + 16 + unit % 16 * 8, w);
        packed_scale(block, unit % 16 / 4 * 2 + HALF, w);
    }
};

template <>
struct Blocks<13> : Units64 {  // Q5_K: scales, u8 fifth bits[32], u8 q[128]
    enum { BYTES = 176 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 16 * BYTES;
        const int index = unit % 16 / 4 * 2 + HALF;
        for (int i = 0; i < 2; i++) {
            const uint fifth = load_uint<4>(block + 16 + unit % 4 * 8 + 4 * i) >> index & 0x01010101u;
            const uint quants = load_uint<4>(block + 48 + unit % 16 * 8 + 4 * i);
            w.q[i] = unsigned_bytes(nibbles<HALF>(quants) | fifth << 4);
        }
        packed_scale(block, index, w);
    }
};

// Byte l of a group's 32 holds 2 bits each of weights l, l + 32, l + 64 and l + 96; a unit takes
// either the first two or the last two.
struct Units128 {
    enum { LENGTH = 256, GAP = 32 };
    static int first(int unit) {
        const Place place = place_of(unit);
        return unit / 16 * 256 + place.group * 128 + place.pair * 64 + place.byte;
    }
};

template <>
struct Blocks<10> : Units128 {  // Q2_K: u8 scales[16] (low: scale, high: minimum), u8 q[64], f16 d, f16 dmin
    enum { BYTES = 84, HAS_MINIMUM = 1 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 16 * BYTES;
        const Place place = place_of(unit);
        const int part = place.pair * 2 + HALF;
        for (int i = 0; i < 2; i++) {
            const uint word = load_uint<4>(block + 16 + place.group * 32 + place.byte + 4 * i);
            w.q[i] = unsigned_bytes(word >> 2 * part & 0x03030303u);
        }
        const uchar packed = block[place.group * 8 + part * 2 + place.byte / 16];
        w.scale = load_half(block + 80) * float(packed & 15);
        w.minimum = -load_half(block + 82) * float(packed >> 4);
    }
};

// Scale 0..15 of a Q3_K block: 4 low bits, then 2 high ones, packed in 12 bytes.
inline float q3_k_scale(const device uchar* packed, int index) {
    const int low = packed[index % 8] >> index / 8 * 4 & 15;
    return float((low | (packed[8 + index % 4] >> index / 4 * 2 & 3) << 4) - 32);
}

template <>
struct Blocks<11> : Units128 {  // Q3_K: u8 third bits[32], u8 q[64], u8 scales[12], f16 d
    enum { BYTES = 110, HAS_MINIMUM = 0 };
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 16 * BYTES;
        const Place place = place_of(unit);
        const int part = place.pair * 2 + HALF;
        for (int i = 0; i < 2; i++) {
            const uint low = load_uint<2>(block + 32 + place.group * 32 + place.byte + 4 * i) >> 2 * part;
            const uint third = load_uint<2>(block + place.byte + 4 * i) >> (place.group * 4 + part);
            w.q[i] = unsigned_bytes((low & 0x03030303u) | (third & 0x01010101u) << 2);
        }
        subtract(4.0f, w);
        const int index = place.group * 8 + part * 2 + place.byte / 16;
        w.scale = load_half(block + 108) * q3_k_scale(block + 96, index);
    }
};

template <>
struct Blocks<14> {  // Q6_K: u8 low[128], u8 high[64], i8 scales[16], f16 d
    enum { LENGTH = 256, GAP = 64, BYTES = 210, HAS_MINIMUM = 0 };
    static int first(int unit) {
        const Place place = place_of(unit);
        return unit / 16 * 256 + place.group * 128 + place.pair * 32 + place.byte;
    }
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 16 * BYTES;
        const Place place = place_of(unit);
        const int part = place.pair + 2 * HALF;
        for (int i = 0; i < 2; i++) {
            const uint low = load_uint<2>(block + place.group * 64 + place.pair * 32 + place.byte + 4 * i);
            const uint high = load_uint<2>(block + 128 + place.group * 32 + place.byte + 4 * i) >> 2 * part;
            w.q[i] = unsigned_bytes(nibbles<HALF>(low) | (high & 0x03030303u) << 4);
        }
        subtract(32.0f, w);
        const device char* scales = reinterpret_cast<const device char*>(block + 192);
        w.scale = load_half(block + 208) * float(scales[place.group * 8 + part * 2 + place.byte / 16]);
    }
};

template <>
struct Blocks<23> {  // IQ4_XS: f16 d, u16 high scale bits, u8 low scale bits[4], u8 q[128]
    enum { LENGTH = 256, GAP = 16, BYTES = 136, HAS_MINIMUM = 0 };
    static int first(int unit) { return unit / 2 * 32 + unit % 2 * 8; }
    template <int HALF>
    static void read(const device uchar* row, int unit, thread Eight& w) {
        const device uchar* block = row + unit / 16 * BYTES;
        const int part = unit % 16 / 2;
        iq4_values<4, HALF>(block + 8 + unit % 16 * 8, w);
        const int low = block[4 + part / 2] >> part % 2 * 4 & 15;
        const int high = *reinterpret_cast<const device ushort*>(block + 2) >> part * 2 & 3;
        w.scale = load_half(block) * float((low | high << 4) - 32);
    }
};

}  // namespace llamay
