// Paged attention on a CPU, as an XLA FFI target. See native.py for the contract.
//
// One unit of work is a tile of queries of one row and one KV head. Keys are read where they lie in their blocks, once per
// tile, in tiles of 64 with a running maximum and sum. Every query does the same operations in the same order whatever its
// tile, its batch and the thread: a result has the same bits in any company.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kLanes = 16;
constexpr int kTileKeys = 64;
constexpr int kTileQueries = 16;
constexpr float kMasked = -1e30f;

typedef float Vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(64), aligned(4)));
typedef uint16_t HalfVec __attribute__((vector_size(32), aligned(2)));
typedef uint32_t WideVec __attribute__((vector_size(64), aligned(4)));

inline Vec Splat(float x) { return Vec{} + x; }

inline Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }

// bfloat16 is the upper half of a float32.
inline Vec Load(const uint16_t* p) {
  WideVec wide = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), WideVec) << 16;
  Vec out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));

// A fixed tree, so that the order of the sum is the same everywhere.
inline float Sum(Vec v) {
  Vec8 eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  Vec4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  Vec4 two = four + __builtin_shufflevector(four, four, 2, 3, 2, 3);
  return two[0] + two[1];
}

inline float Max(Vec v) {
  Vec other = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
  v = v > other ? v : other;
  float lane[8];
  std::memcpy(lane, &v, sizeof lane);
  for (int width = 4; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = std::max(lane[i], lane[i + width]);
  return lane[0];
}

// exp for x <= 0: 2^n times a polynomial of degree 6 on [-ln2/2, ln2/2] (coefficients of Cephes expf); below -87 it is 0.
inline Vec Exp(Vec x) {
  IntVec is_tiny = x < Splat(-87.0f);
  x = is_tiny ? Splat(-87.0f) : x;
  IntVec n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, IntVec);
  Vec whole = __builtin_convertvector(n, Vec);
  Vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec y = Splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  IntVec bits = (n + 127) << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof power);
  y = y * power;
  return is_tiny ? Splat(0.0f) : y;
}

// Runs unit(0..count-1) on the pool and on this thread; returns when all are done. Tasks that start late find nothing
// left and touch only the shared counter, so that this never waits for a thread that is waiting itself.
template <typename Unit>
void ParallelFor(ffi::ThreadPool& pool, int64_t count, int64_t num_threads, const Unit& unit) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto shared = std::make_shared<Shared>();
  const Unit* work = &unit;
  const auto run = [shared, count, work] {
    for (int64_t i; (i = shared->next.fetch_add(1)) < count;) {
      (*work)(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(num_threads, count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([run] { run(); });
  run();
  while (shared->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

struct Shapes {
  int64_t num_heads, num_kv_heads, head_dim, num_blocks, block_size, table_width, window;
  float scale;
};

struct Unit {
  int32_t row, kv_head, first_query, num_queries;
};

// The largest head dim this file is compiled for, in vectors.
constexpr int kMaxVecs = 16;

template <typename T, int kVecs>
void Attend(const Shapes& s, const Unit& unit, const float* q, const T* k, const T* v, const int32_t* table, int64_t query_start,
            int64_t num_keys_before, float* out) {
  const int64_t group = s.num_heads / s.num_kv_heads;
  const int64_t num_rows = unit.num_queries * group;
  const int64_t pool = s.num_blocks * s.block_size * s.head_dim * unit.kv_head;
  std::vector<Vec> weighted(num_rows * kVecs, Vec{});
  std::vector<float> highest(num_rows, kMasked), total(num_rows, 0.0f);
  const int64_t first_end = num_keys_before + unit.first_query + 1;
  const int64_t last_end = first_end + unit.num_queries - 1;
  const int64_t first_key = std::max<int64_t>(0, first_end - s.window) / kTileKeys * kTileKeys;
  for (int64_t tile = first_key; tile < last_end; tile += kTileKeys) {
    const int64_t tile_end = std::min<int64_t>(tile + kTileKeys, last_end);
    const T* key_at[kTileKeys];
    const T* value_at[kTileKeys];
    for (int64_t key = tile; key < tile_end; ++key) {
      const int64_t slot = int64_t{table[key / s.block_size]} * s.block_size + key % s.block_size;
      key_at[key - tile] = k + pool + slot * s.head_dim;
      value_at[key - tile] = v + pool + slot * s.head_dim;
    }
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t end = std::min<int64_t>(first_end + row / group, tile_end);
      const int64_t begin = std::max<int64_t>(tile, first_end + row / group - s.window);
      if (begin >= end) continue;
      const float* query = q + ((query_start + unit.first_query + row / group) * s.num_heads + unit.kv_head * group + row % group) * s.head_dim;
      Vec query_vecs[kVecs];
      for (int i = 0; i < kVecs; ++i) query_vecs[i] = Load(query + i * kLanes);
      alignas(64) float scores[kTileKeys];
      for (int i = 0; i < kTileKeys; ++i) scores[i] = kMasked;
      for (int64_t key = begin - tile; key < end - tile; ++key) {
        Vec sum = query_vecs[0] * Load(key_at[key]);
        for (int i = 1; i < kVecs; ++i) sum += query_vecs[i] * Load(key_at[key] + i * kLanes);
        scores[key] = Sum(sum) * s.scale;
      }
      Vec top = Load(scores);
      for (int i = 1; i < kTileKeys / kLanes; ++i) {
        Vec next = Load(scores + i * kLanes);
        top = top > next ? top : next;
      }
      const float new_highest = std::max(highest[row], Max(top));
      Vec keep_vec = Exp(Splat(highest[row] - new_highest));
      const float keep = keep_vec[0];
      Vec tile_total = Vec{};
      alignas(64) float weights[kTileKeys];
      for (int i = 0; i < kTileKeys / kLanes; ++i) {
        Vec score = Load(scores + i * kLanes);
        Vec weight = Exp(score - new_highest);
        tile_total += weight;
        std::memcpy(weights + i * kLanes, &weight, sizeof weight);
      }
      highest[row] = new_highest;
      total[row] = total[row] * keep + Sum(tile_total);
      Vec acc[kVecs];
      for (int i = 0; i < kVecs; ++i) acc[i] = weighted[row * kVecs + i] * keep;
      for (int64_t key = begin - tile; key < end - tile; ++key)
        for (int i = 0; i < kVecs; ++i) acc[i] += weights[key] * Load(value_at[key] + i * kLanes);
      for (int i = 0; i < kVecs; ++i) weighted[row * kVecs + i] = acc[i];
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    float* target = out + ((query_start + unit.first_query + row / group) * s.num_heads + unit.kv_head * group + row % group) * s.head_dim;
    for (int i = 0; i < kVecs; ++i) {
      Vec result = weighted[row * kVecs + i] / total[row];
      std::memcpy(target + i * kLanes, &result, sizeof result);
    }
  }
}

template <typename T>
using Kernel = void (*)(const Shapes&, const Unit&, const float*, const T*, const T*, const int32_t*, int64_t, int64_t, float*);

template <typename T>
Kernel<T> PickKernel(int64_t head_dim) {
  switch (head_dim) {
    case 16: return Attend<T, 1>;
    case 32: return Attend<T, 2>;
    case 64: return Attend<T, 4>;
    case 80: return Attend<T, 5>;
    case 96: return Attend<T, 6>;
    case 128: return Attend<T, 8>;
    case 256: return Attend<T, 16>;
    default: return nullptr;
  }
}

template <ffi::DataType kType, typename T>
ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<kType> k, ffi::Buffer<kType> v,
                          ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> query_start_loc, ffi::Buffer<ffi::S32> context_lens,
                          ffi::ResultBuffer<ffi::F32> out, float scale, int64_t window) {
  auto q_shape = q.dimensions();
  auto k_shape = k.dimensions();
  const int64_t num_rows = context_lens.dimensions()[0];
  const Shapes s{q_shape[1], k_shape[0], q_shape[2], k_shape[1], k_shape[2], tables.dimensions()[1], window, scale};
  Kernel<T> attend = PickKernel<T>(s.head_dim);
  if (attend == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, "paged_attention: head dim is not compiled in");
  const int32_t* starts = query_start_loc.typed_data();
  const int32_t* lens = context_lens.typed_data();
  float* output = out->typed_data();
  std::vector<Unit> units;
  for (int64_t row = 0; row < num_rows; ++row)
    for (int32_t first = 0, count = starts[row + 1] - starts[row]; first < count; first += kTileQueries)
      for (int32_t head = 0; head < s.num_kv_heads; ++head)
        units.push_back({int32_t(row), head, first, std::min<int32_t>(kTileQueries, count - first)});
  // Tokens past the last row are padding: finite, and nobody reads them.
  const int64_t row_size = s.num_heads * s.head_dim;
  std::fill(output + starts[num_rows] * row_size, output + q_shape[0] * row_size, 0.0f);
  const T* keys = reinterpret_cast<const T*>(k.untyped_data());
  const T* values = reinterpret_cast<const T*>(v.untyped_data());
  ParallelFor(pool, units.size(), std::max<int64_t>(1, pool.num_threads()), [&](int64_t index) {
    const Unit& unit = units[index];
    const int64_t before = lens[unit.row] - (starts[unit.row + 1] - starts[unit.row]);
    attend(s, unit, q.typed_data(), keys, values, tables.typed_data() + unit.row * s.table_width, starts[unit.row], before, output);
  });
  return ffi::Error::Success();
}

}  // namespace

#define BIND(kType)                       \
  ffi::Ffi::Bind()                        \
      .Ctx<ffi::ThreadPool>()             \
      .Arg<ffi::Buffer<ffi::F32>>()       \
      .Arg<ffi::Buffer<kType>>()          \
      .Arg<ffi::Buffer<kType>>()          \
      .Arg<ffi::Buffer<ffi::S32>>()       \
      .Arg<ffi::Buffer<ffi::S32>>()       \
      .Arg<ffi::Buffer<ffi::S32>>()       \
      .Ret<ffi::Buffer<ffi::F32>>()       \
      .Attr<float>("scale")               \
      .Attr<int64_t>("window")


XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention_float32, (PagedAttention<ffi::F32, float>), BIND(ffi::F32));
XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention_bfloat16, (PagedAttention<ffi::BF16, uint16_t>), BIND(ffi::BF16));
