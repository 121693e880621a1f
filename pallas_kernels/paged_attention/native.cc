// Paged attention on a CPU, as an XLA FFI target. See native.py for the contract.
//
// One unit of work is a tile of queries of one row and some query heads of one KV head. Keys are read where they lie in their
// blocks, once per unit, in tiles of 64 with a running maximum and sum. Parts of 1024 keys are worked off one by one and merged
// in order, by one thread or by several. So every query head does the same operations in the same order whatever its unit, its
// batch and the threads: a result has the same bits in any company.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "parallel_for.h"
#include "tile.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace pallas_kernels;

namespace {

constexpr int32_t kMaxTileQueries = 16;
// Floats of unfinished output that a unit may hold: they stay in a core's own cache.
constexpr int64_t kUnitFloats = 32768;
// Rows of a unit from which on it pays to turn a narrow tile of keys into floats once.
constexpr int64_t kMinRowsToWiden = 3;
// Heads that stay together though threads lack work: each piece of a group reads all keys again.
constexpr int32_t kMinHeads = 4;

using TileKernel = void (*)(const Shapes&, const Unit&, const Queries&, const Tile<float>&, Progress&);

// Every kernel gives the same bits as the last one.
TileKernel PickTileKernel(const Shapes& s) {
  switch (s.key_dim == s.value_dim ? s.key_dim : 0) {
    case 16: return AttendTile<float, 1>;
    case 32: return AttendTile<float, 2>;
    case 64: return AttendTile<float, 4>;
    case 80: return AttendTile<float, 5>;
    case 96: return AttendTile<float, 6>;
    case 128: return AttendTile<float, 8>;
    case 256: return AttendTile<float, 16>;
    default: return AttendTile<float, 0>;
  }
}

// The rows of a unit, which are its queries times its heads, over one part of their keys.
template <typename T>
Progress AttendPart(const Shapes& s, const Unit& unit, const Pools<T>& pools, const Queries& queries, int64_t part, TileKernel attend_tile) {
  const int64_t num_rows = int64_t{unit.num_queries} * unit.num_heads;
  const bool is_widened = !std::is_same_v<T, float> && num_rows >= kMinRowsToWiden;
  std::vector<float> room(is_widened ? kTileKeys * (s.key_dim + s.value_dim) : 0);
  Progress progress{std::vector<Vec>(num_rows * (s.value_dim / kLanes), Vec{}), std::vector<float>(num_rows, kMasked),
                    std::vector<float>(num_rows, 0.0f)};
  const int64_t first_key = std::max(queries.first_key(s, unit), part * kPartKeys);
  const int64_t last_end = std::min(queries.first_end(unit) + unit.num_queries - 1, (part + 1) * kPartKeys);
  Tile<T> tile;
  Tile<float> wide;
  for (int64_t start = first_key / kTileKeys * kTileKeys; start < last_end; start += kTileKeys) {
    FindTile(s, pools, queries.table, unit.kv_head, start, std::max(first_key, start), std::min(start + kTileKeys, last_end), tile);
    if constexpr (std::is_same_v<T, float>) {
      attend_tile(s, unit, queries, tile, progress);
    } else if (is_widened) {
      WidenTile(s, tile, pools.keys == pools.values, room.data(), wide);
      attend_tile(s, unit, queries, wide, progress);
    } else {
      AttendTile<T, 0>(s, unit, queries, tile, progress);
    }
  }
  return progress;
}

// What came before and a later part. Where a row saw nothing of one of them, it keeps the bits of the other.
void Merge(Progress& progress, const Progress& part) {
  const int64_t num_rows = progress.total.size(), num_vecs = progress.weighted.size() / num_rows;
  for (int64_t row = 0; row < num_rows; ++row) {
    const float highest = std::max(progress.highest[row], part.highest[row]);
    const float keep = Exp(Splat(progress.highest[row] - highest))[0], add = Exp(Splat(part.highest[row] - highest))[0];
    progress.highest[row] = highest;
    progress.total[row] = progress.total[row] * keep + part.total[row] * add;
    for (int64_t i = row * num_vecs; i < (row + 1) * num_vecs; ++i)
      progress.weighted[i] = progress.weighted[i] * keep + part.weighted[i] * add;
  }
}

void Finish(const Shapes& s, const Unit& unit, const Queries& queries, const Progress& progress) {
  const int64_t num_rows = progress.total.size(), num_vecs = s.value_dim / kLanes;
  for (int64_t row = 0; row < num_rows; ++row) {
    float keep = 1.0f, total = progress.total[row];
    if (queries.sinks != nullptr) {
      const float sink = queries.sinks[unit.first_head + row % unit.num_heads], highest = std::max(progress.highest[row], sink);
      keep = Exp(Splat(progress.highest[row] - highest))[0];
      total = total * keep + Exp(Splat(sink - highest))[0];
    }
    float* out = queries.out + PlaceOf(s, unit, queries, row) * s.value_dim;
    for (int64_t i = 0; i < num_vecs; ++i) Store(out + i * kLanes, progress.weighted[row * num_vecs + i] * keep / total);
  }
}

std::vector<Unit> Units(const Shapes& s, const int32_t* starts, int64_t num_rows, int64_t num_threads) {
  const int32_t group = s.num_heads / s.num_kv_heads;
  const int32_t max_heads = std::max<int64_t>(kMaxTileQueries, kUnitFloats / s.value_dim);
  const int32_t tile_queries = std::clamp(max_heads / group, 1, kMaxTileQueries);
  int64_t num_whole = 0;
  for (int64_t row = 0; row < num_rows; ++row) num_whole += (starts[row + 1] - starts[row] + tile_queries - 1) / tile_queries * s.num_kv_heads;
  const int32_t num_pieces = num_whole ? (num_threads + num_whole - 1) / num_whole : 1;
  const int32_t heads = std::min({max_heads, group, std::max(kMinHeads, (group + num_pieces - 1) / num_pieces)});
  std::vector<Unit> units;
  for (int32_t row = 0; row < num_rows; ++row)
    for (int32_t first = 0, count = starts[row + 1] - starts[row]; first < count; first += tile_queries)
      for (int32_t kv_head = 0; kv_head < s.num_kv_heads; ++kv_head)
        for (int32_t head = 0; head < group; head += heads)
          units.push_back({row, kv_head, first, std::min(tile_queries, count - first), kv_head * group + head, std::min(heads, group - head)});
  return units;
}

// Whole units where there are enough of them, else their parts: few rows with long contexts keep all threads busy too.
template <typename QueriesOf, typename PartOf>
void Run(ffi::ThreadPool& pool, const Shapes& s, const std::vector<Unit>& units, const QueriesOf& queries_of, const PartOf& part_of) {
  const int64_t num_threads = std::max<int64_t>(1, pool.num_threads()), num_units = units.size();
  std::vector<std::pair<int64_t, int64_t>> tasks;  // unit, part
  if (num_units < 2 * num_threads)
    for (int64_t index = 0; index < num_units; ++index)
      for (int64_t part = 0; part < queries_of(units[index]).num_parts(s, units[index]); ++part) tasks.push_back({index, part});
  if (tasks.size() <= num_units) {
    ParallelFor(pool, num_units, num_threads, [&](int64_t index) {
      const Queries queries = queries_of(units[index]);
      Progress progress = part_of(units[index], queries, 0);
      for (int64_t part = 1; part < queries.num_parts(s, units[index]); ++part) Merge(progress, part_of(units[index], queries, part));
      Finish(s, units[index], queries, progress);
    });
    return;
  }
  std::vector<Progress> parts(tasks.size());
  ParallelFor(pool, tasks.size(), num_threads, [&](int64_t index) {
    const Unit& unit = units[tasks[index].first];
    parts[index] = part_of(unit, queries_of(unit), tasks[index].second);
  });
  for (size_t index = 0, first = 0; index < tasks.size(); ++index) {
    if (index > first) Merge(parts[first], parts[index]);
    if (index + 1 < tasks.size() && tasks[index + 1].first == tasks[first].first) continue;
    const Unit& unit = units[tasks[first].first];
    Finish(s, unit, queries_of(unit), parts[first]);
    first = index + 1;
  }
}

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

const float* DataOrNull(Floats& buffer) { return buffer.element_count() ? buffer.typed_data() : nullptr; }

template <ffi::DataType kType, typename T>
ffi::Error PagedAttention(ffi::ThreadPool pool, Floats q, ffi::Buffer<kType> k, ffi::Buffer<kType> v, Ints tables, Ints query_start_loc,
                          Ints context_lens, Floats sinks, Floats key_scales, Floats value_scales, ffi::ResultBuffer<ffi::F32> out,
                          float scale, float soft_cap, int64_t window) {
  auto q_shape = q.dimensions();
  auto k_shape = k.dimensions();
  const int64_t num_rows = context_lens.dimensions()[0];
  const Shapes s{q_shape[1], k_shape[0], q_shape[2], out->dimensions()[2], v.dimensions()[3], k_shape[1], k_shape[2], tables.dimensions()[1], window,
                 scale, soft_cap};
  if (s.key_dim % kLanes || s.value_dim % kLanes) return ffi::Error(ffi::ErrorCode::kUnimplemented, "paged_attention: dims must be multiples of 16");
  const int32_t* starts = query_start_loc.typed_data();
  const int32_t* lens = context_lens.typed_data();
  const Pools<T> pools{reinterpret_cast<const T*>(k.untyped_data()), reinterpret_cast<const T*>(v.untyped_data()), DataOrNull(key_scales),
                       DataOrNull(value_scales)};
  // Tokens past the last row are padding: finite, and nobody reads them.
  float* output = out->typed_data();
  const int64_t row_size = s.num_heads * s.value_dim;
  std::fill(output + starts[num_rows] * row_size, output + q_shape[0] * row_size, 0.0f);
  const TileKernel attend_tile = PickTileKernel(s);
  const auto queries_of = [&](const Unit& unit) {
    const int64_t before = lens[unit.row] - (starts[unit.row + 1] - starts[unit.row]);
    return Queries{q.typed_data(), DataOrNull(sinks), output, tables.typed_data() + unit.row * s.table_width, starts[unit.row], before};
  };
  const auto part_of = [&](const Unit& unit, const Queries& queries, int64_t part) {
    return AttendPart(s, unit, pools, queries, queries.first_part(s, unit) + part, attend_tile);
  };
  Run(pool, s, Units(s, starts, num_rows, std::max<int64_t>(1, pool.num_threads())), queries_of, part_of);
  return ffi::Error::Success();
}

}  // namespace

#define BIND(kType)                 \
  ffi::Ffi::Bind()                  \
      .Ctx<ffi::ThreadPool>()       \
      .Arg<Floats>()                \
      .Arg<ffi::Buffer<kType>>()    \
      .Arg<ffi::Buffer<kType>>()    \
      .Arg<Ints>()                  \
      .Arg<Ints>()                  \
      .Arg<Ints>()                  \
      .Arg<Floats>()                \
      .Arg<Floats>()                \
      .Arg<Floats>()                \
      .Ret<Floats>()                \
      .Attr<float>("scale")         \
      .Attr<float>("soft_cap")      \
      .Attr<int64_t>("window")

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention_float32, (PagedAttention<ffi::F32, float>), BIND(ffi::F32));
XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention_bfloat16, (PagedAttention<ffi::BF16, uint16_t>), BIND(ffi::BF16));
XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention_int8, (PagedAttention<ffi::S8, int8_t>), BIND(ffi::S8));
