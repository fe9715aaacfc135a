// The checksum of a buffer's bits.
#include "dev/test/kernel_test.cuh"
#include "llmc/checksum.cuh"

namespace {

template <typename T>
unsigned long long checksum_of(const std::vector<T>& values) {
    DeviceBuffer<T> in(values);
    DeviceBuffer<unsigned long long> out(1);  // poisoned: the launcher sets it
    checksum(out.get(), in.get(), values.size(), test_stream());
    const unsigned long long result = out.download()[0];
    checksum(out.get(), in.get(), values.size(), test_stream());
    EXPECT_EQ(out.download()[0], result) << "the same buffer again";
    return result;
}

// The formula, one piece after the other.
uint64_t mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    x ^= x >> 31;
    return x;
}

template <typename T>
uint64_t reference(const std::vector<T>& values) {
    uint64_t sum = 0, position = 0, halves[2];
    const size_t per_piece = kChecksumPieceBytes / sizeof(T);
    for (size_t i = 0; i < values.size(); i += per_piece) {
        memcpy(halves, &values[i], sizeof(halves));
        position += 0x9e3779b97f4a7c15u;
        sum += mix(mix(position + halves[0]) + halves[1]);
    }
    return sum;
}

// Any bits: NaN, infinities, subnormals, both zeros among them.
template <typename T>
std::vector<T> random_bits(size_t count, unsigned seed) {
    std::mt19937_64 generator(seed);
    std::vector<T> values(count);
    for (T& value : values) {
        const uint64_t bits = generator();
        memcpy(static_cast<void*>(&value), &bits, sizeof(T));
    }
    return values;
}

template <typename T>
void flip(std::vector<T>& values, size_t bit) {
    unsigned char byte;
    memcpy(&byte, reinterpret_cast<const unsigned char*>(values.data()) + bit / 8, 1);
    byte ^= static_cast<unsigned char>(1u << bit % 8);
    memcpy(reinterpret_cast<unsigned char*>(values.data()) + bit / 8, &byte, 1);
}

// Elements of a chunk that a warp takes, and of a block.
template <typename T>
constexpr size_t kChunk = kChecksumChunk * kChecksumPieceBytes / sizeof(T);
template <typename T>
constexpr size_t kBlock = kChunk<T> * kChecksumWarps;

TEST(Checksum, OfSplitMix64) {
    // The first outputs of SplitMix64 from state 0 are mix(golden), mix(2 golden), ...: known answers for the reference above.
    EXPECT_EQ(mix(0x9e3779b97f4a7c15u), 0xe220a8397b1dcdafu);
    EXPECT_EQ(mix(2 * 0x9e3779b97f4a7c15u), 0x6e789e6aa1b965f4u);
}

template <typename T>
void check_sizes() {
    for (const size_t n : {size_t{0}, size_t{8}, size_t{16}, size_t{248}, size_t{256}, size_t{264}, size_t{2056}, kChunk<T> - 8, kChunk<T>, kChunk<T> + 8, kBlock<T> - 8,
                           kBlock<T>, kBlock<T> + 8, 3 * kBlock<T> + kChunk<T> + 1048}) {
        const std::vector<T> values = random_bits<T>(n, static_cast<unsigned>(n));
        EXPECT_EQ(checksum_of(values), reference(values)) << n << " elements of " << sizeof(T) << " bytes";
    }
}

TEST(Checksum, AwkwardSizes) {
    check_sizes<floatX>();
    check_sizes<float>();
    EXPECT_EQ(checksum_of(std::vector<floatX>{}), 0u);
}

TEST(Checksum, EveryBitCounts) {
    const size_t n = kBlock<floatX> + 264;
    std::vector<floatX> values = random_bits<floatX>(n, 1);
    DeviceBuffer<floatX> in(n);
    DeviceBuffer<unsigned long long> out(1);
    const auto sum = [&] {
        in.upload(values);
        checksum(out.get(), in.get(), n, test_stream());
        return out.download()[0];
    };
    const unsigned long long base = sum();
    // All bits of the first piece, and some of each bit's place further on: the other warps, the ragged end, the last bit.
    const size_t bits = n * sizeof(floatX) * 8;
    std::vector<size_t> flipped;
    for (size_t bit = 0; bit < 128; bit++) flipped.push_back(bit);
    for (const size_t start : {kChunk<floatX> * sizeof(floatX) * 8, bits / 2, kBlock<floatX> * sizeof(floatX) * 8, bits - 128}) {
        for (size_t bit = 0; bit < 128; bit += 13) flipped.push_back(start + bit);
    }
    flipped.push_back(bits - 1);
    for (const size_t bit : flipped) {
        flip(values, bit);
        EXPECT_NE(sum(), base) << "bit " << bit;
        flip(values, bit);
    }
    EXPECT_EQ(sum(), base);
}

template <typename T>
void check_order() {
    const size_t n = 2 * kBlock<T>, piece = kChecksumPieceBytes / sizeof(T);
    const std::vector<T> values = random_bits<T>(n, 2);
    const unsigned long long base = checksum_of(values);
    // Neighbouring pieces, the same lane's next load, another warp, another block: first piece against piece `other`, then the halves of one piece.
    for (const size_t other : {piece, 32 * piece, kChunk<T>, kBlock<T>, n - piece}) {
        std::vector<T> swapped = values;
        std::swap_ranges(swapped.begin(), swapped.begin() + piece, swapped.begin() + other);
        EXPECT_NE(checksum_of(swapped), base) << "pieces 0 and " << other / piece;
    }
    std::vector<T> swapped = values;
    std::swap_ranges(swapped.begin(), swapped.begin() + piece / 2, swapped.begin() + piece / 2);
    EXPECT_NE(checksum_of(swapped), base) << "halves of a piece";
    std::rotate(swapped.begin(), swapped.begin() + piece, swapped.end());
    EXPECT_NE(checksum_of(swapped), base) << "all pieces one further";
}

TEST(Checksum, OrderCounts) {
    check_order<floatX>();
    check_order<float>();
}

TEST(Checksum, BitsCountNotNumbers) {
    const auto with = [](float value) {
        std::vector<floatX> values = to_storage<floatX>(random_values<floatX>(1024, 3));
        values[517] = to_storage<floatX>(static_cast<double>(value));
        return values;
    };
    EXPECT_NE(checksum_of(with(0.0f)), checksum_of(with(-0.0f)));
    // Zeros behind the end, and only zeros.
    std::vector<floatX> values = with(1.0f), longer = values;
    longer.resize(values.size() + 8, floatX(0.0f));
    EXPECT_NE(checksum_of(longer), checksum_of(values));
    EXPECT_NE(checksum_of(std::vector<floatX>(8, floatX(0.0f))), 0u);
    EXPECT_NE(checksum_of(std::vector<floatX>(8, floatX(0.0f))), checksum_of(std::vector<floatX>(16, floatX(0.0f))));
    // Two NaN.
    std::vector<float> nans(8, float_of(0x7fc00000u)), others = nans;
    others[3] = float_of(0x7fc00001u);
    EXPECT_NE(checksum_of(nans), checksum_of(others));
}

TEST(Checksum, RefusesWhatIsNoWholePiece) {
    DeviceBuffer<floatX> in(16);
    EXPECT_THROW(checksum(static_cast<unsigned long long*>(nullptr), in.get(), 12, test_stream()), Error);
    EXPECT_THROW(checksum(static_cast<unsigned long long*>(nullptr), in.get() + 1, 8, test_stream()), Error);
}

}  // namespace
