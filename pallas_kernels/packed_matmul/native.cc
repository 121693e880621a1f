// A product with a packed matrix on a CPU, as an XLA FFI target. See native.py for the contract and matrix.py for the layout.
//
// One unit of work is a range of rows of the matrix, taken in tiles: the tile is unpacked to float32 into a buffer that stays
// in the cache, then multiplied with all rows of x, in blocks of a few rows of each. Every result is one vector of 16 partial
// sums over k in order and one fixed tree at the end: it has the same bits whatever the number of rows, and on any thread.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kLanes = 16;
constexpr int kRun = 32;
// A tile in the first cache costs half as much to unpack; where x does not fit into the second one, taller tiles read x less often.
constexpr int64_t kSmallTileBytes = 32 << 10;
constexpr int64_t kTallTileBytes = 512 << 10;
constexpr int64_t kMaxTileRows = 32;
constexpr int64_t kSmallInputBytes = 512 << 10;
// Below this many multiplications another thread costs more than it saves.
constexpr int64_t kMinParallelWork = 1 << 16;

typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t IntVec __attribute__((vector_size(64)));
typedef int32_t SignedIntVec __attribute__((vector_size(64)));
typedef int16_t SignedHalfVec __attribute__((vector_size(32)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));
typedef uint8_t ByteVec __attribute__((vector_size(16)));
typedef int8_t SignedVec __attribute__((vector_size(16)));
typedef float Vec4 __attribute__((vector_size(16)));

#ifdef __AVX512F__
constexpr int kBlockRows = 4;
#else
constexpr int kBlockRows = 2;
#endif
constexpr int kBlockOutputs = 4;

// Through memcpy: an attribute that allows less alignment is lost where a type is a template's argument.
template <typename V>
inline V Load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// ---- numbers -----------------------------------------------------------------------------------------------------------

// GCC takes a conversion from 8 to 32 bits apart lane by lane; in two steps it does not.
inline IntVec Widen(ByteVec v) {
#ifdef __AVX512F__
  return (IntVec)_mm512_cvtepu8_epi32((__m128i)v);
#else
  return __builtin_convertvector(__builtin_convertvector(v, HalfVec), IntVec);
#endif
}

inline IntVec Widen(SignedVec v) {
#ifdef __AVX512F__
  return (IntVec)_mm512_cvtepi8_epi32((__m128i)v);
#else
  return (IntVec)__builtin_convertvector(__builtin_convertvector(v, SignedHalfVec), SignedIntVec);
#endif
}

// Codes fit into the signed type, whose conversion every machine has.
inline Vec ToFloat(IntVec v) { return __builtin_convertvector((SignedIntVec)v, Vec); }

inline Vec FromHalf(HalfVec half) {
#ifdef __AVX512F__
  return (Vec)_mm512_cvtph_ps((__m256i)half);
#else
  const IntVec wide = __builtin_convertvector(half, IntVec);
  const IntVec sign = (wide & 0x8000u) << 16, exponent = wide & 0x7c00u;
  const IntVec normal = ((wide & 0x7fffu) << 13) + (112u << 23);
  const IntVec huge = normal + (112u << 23);
  Vec small = ToFloat(wide & 0x3ffu) * 5.9604644775390625e-8f;  // 2^-24: no product with a denormal
  IntVec bits = exponent == 0u ? (IntVec)small : exponent == 0x7c00u ? huge : normal;
  return (Vec)(bits | sign);
#endif
}

inline Vec FromBrain(HalfVec half) { return (Vec)(__builtin_convertvector(half, IntVec) << 16); }

template <typename Convert>
inline void ConvertAll(const char* from, int size, int64_t count, float* to, const Convert& convert) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(to + i, convert(from + i * size));
  if (i == count) return;
  char rest[kLanes * 4] = {};
  std::memcpy(rest, from + i * size, (count - i) * size);
  Vec last = convert(rest);
  std::memcpy(to + i, &last, (count - i) * sizeof(float));
}

// A level of scales or offsets: [N, per_row] numbers of some type.
struct Numbers {
  const char* start = nullptr;
  ffi::DataType type = ffi::DataType::F32;
  int64_t per_row = 0;

  // Rows first .. first + num_rows as float32.
  void Read(int64_t first, int64_t num_rows, float* to) const {
    const int size = type == ffi::DataType::F32 ? 4 : type == ffi::DataType::F16 || type == ffi::DataType::BF16 ? 2 : 1;
    const char* from = start + first * per_row * size;
    const int64_t count = num_rows * per_row;
    switch (type) {
      case ffi::DataType::F16: return ConvertAll(from, size, count, to, [](const char* p) { return FromHalf(Load<HalfVec>(p)); });
      case ffi::DataType::BF16: return ConvertAll(from, size, count, to, [](const char* p) { return FromBrain(Load<HalfVec>(p)); });
      case ffi::DataType::U8:
        return ConvertAll(from, size, count, to, [](const char* p) { return ToFloat(Widen(Load<ByteVec>(p))); });
      case ffi::DataType::S8:
        return ConvertAll(from, size, count, to, [](const char* p) { return ToFloat(Widen(Load<SignedVec>(p))); });
      default: std::memcpy(to, from, count * sizeof(float));
    }
  }
};

struct Matrix {
  int64_t num_outputs, num_inputs;
  const uint8_t* codes;
  const uint8_t* high;
  Numbers scales, super_scales, offsets, super_offsets, zeros;
  ffi::DataType code_type;
  int bits;
  float zero;
  Vec values;

  // Weights that share an entry of the tile's scales: a run, or half of one.
  int64_t cell() const { return num_inputs / scales.per_row < kRun ? kLanes : kRun; }
};

// Memory that a thread keeps: a tile of weights, and scale and offset of each of its cells.
struct Buffer {
  std::vector<float> memory;
  float *weights, *scales, *offsets, *scratch;

  void Reserve(int64_t num_weights) {
    const int64_t num_cells = num_weights / kLanes;
    if (memory.size() < size_t(num_weights + 3 * num_cells + 2 * kLanes)) memory.resize(num_weights + 3 * num_cells + 2 * kLanes);
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    weights = memory.data() + ((64 - address % 64) % 64) / sizeof(float);
    scales = weights + num_weights;
    offsets = scales + num_cells;
    scratch = offsets + num_cells;
  }
};

// One number a group, times that of the groups' group, repeated for each cell of the group.
void ReadLevels(const Numbers& small, const Numbers& large, int64_t cells_per_row, int64_t first, int64_t num_rows, float* scratch,
                float* to) {
  small.Read(first, num_rows, to);
  const int64_t count = num_rows * small.per_row;
  if (large.start != nullptr) {
    large.Read(first, num_rows, scratch);
    const int64_t each = small.per_row / large.per_row;
    for (int64_t i = 0; i < count; i += each)
      for (int64_t j = 0; j < each; ++j) to[i + j] *= scratch[i / each];
  }
  const int64_t repeats = cells_per_row / small.per_row;
  if (repeats == 1) return;
  for (int64_t i = count - 1; i >= 0; --i) std::fill(to + i * repeats, to + (i + 1) * repeats, to[i]);
}

void ReadScales(const Matrix& m, int64_t first, int64_t num_rows, Buffer& b) {
  const int64_t cells_per_row = m.num_inputs / m.cell(), count = num_rows * cells_per_row;
  ReadLevels(m.scales, m.super_scales, cells_per_row, first, num_rows, b.scratch, b.scales);
  if (m.zeros.start != nullptr) {
    ReadLevels(m.zeros, Numbers{}, cells_per_row, first, num_rows, b.scratch, b.offsets);
    for (int64_t i = 0; i < count; ++i) b.offsets[i] *= -b.scales[i];
  } else if (m.offsets.start != nullptr) {
    ReadLevels(m.offsets, m.super_offsets, cells_per_row, first, num_rows, b.scratch, b.offsets);
  } else {
    std::fill(b.offsets, b.offsets + count, 0.0f);
  }
  if (m.zero != 0.0f)
    for (int64_t i = 0; i < count; ++i) b.offsets[i] -= m.zero * b.scales[i];
  // Eight-bit floats are read as halves, which have a smaller bias: see Eights.
  if (m.code_type == ffi::DataType::F8E4M3FN)
    for (int64_t i = 0; i < count; ++i) b.scales[i] *= 256.0f;
}

// ---- unpacking ---------------------------------------------------------------------------------------------------------

inline Vec Lookup(Vec table, IntVec index) {
#ifdef __AVX512F__
  return (Vec)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#else
  Vec out;
  for (int i = 0; i < kLanes; ++i) out[i] = table[index[i] & 15];
  return out;
#endif
}

// The two halves of a run times scale plus offset, for each kind of code.
struct Nibbles {
  static void Run(const Matrix& m, int64_t run, const float* scale, const float* offset, int second, float* to) {
    const IntVec bytes = Widen(Load<ByteVec>(m.codes + run * kLanes));
    // The 16 possible weights of a cell, then one look-up each: cheaper than converting and scaling each weight.
    const Vec low = m.values * scale[0] + offset[0];
    const Vec high = second == 0 ? low : m.values * scale[second] + offset[second];
    Store(to, Lookup(low, bytes));
    Store(to + kLanes, Lookup(high, bytes >> 4));
  }
};

template <int kPlanes>
struct Planes {
  static IntVec Bits(IntVec code, const uint8_t* plane, int value) {
    uint16_t bits;
    std::memcpy(&bits, plane, sizeof bits);
#ifdef __AVX512F__
    return (IntVec)_mm512_mask_or_epi32((__m512i)code, bits, (__m512i)code, _mm512_set1_epi32(value));
#else
    const IntVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return code | (((IntVec{} + bits) >> lane & 1u) * uint32_t(value));
#endif
  }

  static void Run(const Matrix& m, int64_t run, const float* scale, const float* offset, int second, float* to) {
    const IntVec bytes = Widen(Load<ByteVec>(m.codes + run * kLanes));
    IntVec low = bytes & 15u, high = bytes >> 4;
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint8_t* bits = m.high + (run * kPlanes + plane) * 4;
      low = Bits(low, bits, 16 << plane);
      high = Bits(high, bits + 2, 16 << plane);
    }
    Store(to, ToFloat(low) * scale[0] + offset[0]);
    Store(to + kLanes, ToFloat(high) * scale[second] + offset[second]);
  }
};

template <typename V>
struct Bytes {
  static void Run(const Matrix& m, int64_t run, const float* scale, const float* offset, int second, float* to) {
    const uint8_t* codes = m.codes + run * kRun;
    Store(to, ToFloat(Widen(Load<V>(codes))) * scale[0] + offset[0]);
    Store(to + kLanes, ToFloat(Widen(Load<V>(codes + kLanes))) * scale[second] + offset[second]);
  }
};

// float8_e4m3fn: sign, exponent and mantissa moved to their places in a half give the number times 2^-8, denormals too.
struct Eights {
  static Vec Read(const uint8_t* codes) {
#ifdef __AVX512BW__
    const HalfVec wide = (HalfVec)_mm256_cvtepu8_epi16((__m128i)Load<ByteVec>(codes));
#else
    const HalfVec wide = __builtin_convertvector(Load<ByteVec>(codes), HalfVec);
#endif
    return FromHalf(((wide & 0x7f) << 7) | ((wide & 0x80) << 8));
  }
  static void Run(const Matrix& m, int64_t run, const float* scale, const float* offset, int second, float* to) {
    const uint8_t* codes = m.codes + run * kRun;
    Store(to, Read(codes) * scale[0] + offset[0]);
    Store(to + kLanes, Read(codes + kLanes) * scale[second] + offset[second]);
  }
};

template <typename Codes>
void UnpackTile(const Matrix& m, int64_t first, int64_t num_rows, Buffer& b) {
  ReadScales(m, first, num_rows, b);
  const int64_t runs = num_rows * (m.num_inputs / kRun), before = first * (m.num_inputs / kRun);
  if (m.cell() == kRun)
    for (int64_t i = 0; i < runs; ++i) Codes::Run(m, before + i, b.scales + i, b.offsets + i, 0, b.weights + i * kRun);
  else
    for (int64_t i = 0; i < runs; ++i) Codes::Run(m, before + i, b.scales + 2 * i, b.offsets + 2 * i, 1, b.weights + i * kRun);
}

typedef void (*Unpack)(const Matrix&, int64_t, int64_t, Buffer&);

Unpack PickUnpack(const Matrix& m) {
  switch (m.bits) {
    case 4: return UnpackTile<Nibbles>;
    case 5: return UnpackTile<Planes<1>>;
    case 6: return UnpackTile<Planes<2>>;
    case 8:
      if (m.code_type == ffi::DataType::U8) return UnpackTile<Bytes<ByteVec>>;
      if (m.code_type == ffi::DataType::S8) return UnpackTile<Bytes<SignedVec>>;
      if (m.code_type == ffi::DataType::F8E4M3FN) return UnpackTile<Eights>;
  }
  return nullptr;
}

// ---- products ----------------------------------------------------------------------------------------------------------

// The sums of four vectors. The tree is that of each vector alone: halves are added until one lane is left.
inline Vec4 Sums(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  const Vec cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  Vec v = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
          __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return __builtin_shufflevector(v, v, 0, 4, 8, 12);
}

// kRows rows of x times kOutputs rows of the tile.
template <int kRows, int kOutputs>
void Block(const float* x, const float* w, int64_t num_inputs, int64_t out_stride, float* out) {
  static_assert(kOutputs == 1 || kOutputs % 4 == 0);
  Vec acc[kRows][kOutputs];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kOutputs; ++j) acc[i][j] = Vec{};
  for (int64_t k = 0; k < num_inputs; k += kLanes) {
    Vec weight[kOutputs];
    for (int j = 0; j < kOutputs; ++j) weight[j] = Load<Vec>(w + j * num_inputs + k);
    for (int i = 0; i < kRows; ++i) {
      const Vec value = Load<Vec>(x + i * num_inputs + k);
      for (int j = 0; j < kOutputs; ++j) acc[i][j] += value * weight[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    if constexpr (kOutputs == 1) {
      out[i * out_stride] = Sums(acc[i][0], Vec{}, Vec{}, Vec{})[0];
    } else {
      for (int j = 0; j < kOutputs; j += 4) {
        const Vec4 sums = Sums(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]);
        std::memcpy(out + i * out_stride + j, &sums, sizeof sums);
      }
    }
  }
}

template <int kRows, int kOutputs>
void BlocksOfRows(const float* x, const float* w, int64_t num_outputs, int64_t num_inputs, int64_t out_stride, float* out) {
  int64_t j = 0;
  for (; j + kOutputs <= num_outputs; j += kOutputs) Block<kRows, kOutputs>(x, w + j * num_inputs, num_inputs, out_stride, out + j);
  for (; j < num_outputs; ++j) Block<kRows, 1>(x, w + j * num_inputs, num_inputs, out_stride, out + j);
}

void MultiplyTile(const float* x, const float* w, int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int64_t out_stride,
                  float* out) {
  // A lone row needs eight independent sums to keep the units busy.
  if (num_rows == 1) return BlocksOfRows<1, 8>(x, w, num_outputs, num_inputs, out_stride, out);
  for (int64_t i = 0; i < num_rows;) {
    const float* rows = x + i * num_inputs;
    float* to = out + i * out_stride;
    const int64_t left = num_rows - i;
    if (left >= kBlockRows) {
      BlocksOfRows<kBlockRows, kBlockOutputs>(rows, w, num_outputs, num_inputs, out_stride, to);
      i += kBlockRows;
    } else {
      if (left == 3) BlocksOfRows<3, kBlockOutputs>(rows, w, num_outputs, num_inputs, out_stride, to);
      if (left == 2) BlocksOfRows<2, kBlockOutputs>(rows, w, num_outputs, num_inputs, out_stride, to);
      if (left == 1) BlocksOfRows<1, kBlockOutputs>(rows, w, num_outputs, num_inputs, out_stride, to);
      i += left;
    }
  }
}

Numbers NumbersOf(const ffi::AnyBuffer& buffer) {
  if (buffer.dimensions().size() != 2) return {};
  return {static_cast<const char*>(buffer.untyped_data()), buffer.element_type(), buffer.dimensions()[1]};
}

ffi::Error PackedMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer codes, ffi::AnyBuffer high,
                        ffi::AnyBuffer scales, ffi::AnyBuffer super_scales, ffi::AnyBuffer offsets, ffi::AnyBuffer super_offsets,
                        ffi::AnyBuffer zeros, ffi::ResultBuffer<ffi::F32> out, int64_t bits, float zero,
                        ffi::Span<const float> values) {
  const int64_t num_rows = x.dimensions()[0], num_inputs = x.dimensions()[1], num_outputs = out->dimensions()[1];
  Matrix m{num_outputs, num_inputs, static_cast<const uint8_t*>(codes.untyped_data()), static_cast<const uint8_t*>(high.untyped_data()),
           NumbersOf(scales), NumbersOf(super_scales), NumbersOf(offsets), NumbersOf(super_offsets), NumbersOf(zeros),
           codes.element_type(), int(bits), zero, Load<Vec>(values.begin())};
  const Unpack unpack = PickUnpack(m);
  if (unpack == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, "packed_matmul: these codes are not compiled in");
  if (num_rows == 0) return ffi::Error::Success();
  const int64_t row_bytes = num_inputs * int64_t{sizeof(float)};
  const int64_t tile_bytes = num_rows * row_bytes <= kSmallInputBytes ? kSmallTileBytes : kTallTileBytes;
  const int64_t tile = std::clamp<int64_t>(tile_bytes / row_bytes / 4 * 4, num_rows == 1 ? 8 : 4, kMaxTileRows);
  const int64_t num_threads = num_rows * num_outputs * num_inputs < kMinParallelWork ? 1 : std::max<int64_t>(1, pool.num_threads());
  const int64_t per_unit = (num_outputs / (num_threads * 8) + tile) / tile * tile;
  float* output = out->typed_data();
  pallas_kernels::ParallelFor(pool, (num_outputs + per_unit - 1) / per_unit, num_threads, [&](int64_t unit) {
    thread_local Buffer buffer;
    buffer.Reserve(tile * num_inputs);
    const int64_t end = std::min(num_outputs, (unit + 1) * per_unit);
    for (int64_t first = unit * per_unit; first < end; first += tile) {
      const int64_t count = std::min(tile, end - first);
      unpack(m, first, count, buffer);
      MultiplyTile(x.typed_data(), buffer.weights, num_rows, count, num_inputs, num_outputs, output + first);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(packed_matmul, PackedMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<float>("zero")
                                  .Attr<ffi::Span<const float>>("values"));
